/* test_hybrid_step.c - the recurrent form of the hybrid operator on the GPU, setting by
 * setting: leave and step, driven through many tokens of several sessions at once, of
 * different lengths and at different places in their chunks. */
#include "hybrid_step_sessions.h"

static void check(const gpu *g, const test_case *c, uint64_t seed, bool unrotated)
{
    for (size_t kv_size = 2; kv_size <= 4; kv_size += 2) {
        static run r;
        open_run(&r, g, c, kv_size, seed, unrotated);
        if (kv_size == 4 && sti_cuda_hybrid_quantized(&r.h)) { /* not of floats */
            still_error err;
            assert_int_equal(sti_cuda_hybrid_step_check(&r.h, &err),
                             STILL_E_UNSUPPORTED);
            close_run(&r);
            continue;
        }
        assert_true(!unrotated || sti_cuda_hybrid_step_ropes(&r.h));
        for (int call = 1; feed_some(&r, call, 0);) call++;
        for (int i = 0; i < SESSIONS; i++) compare_session(&r, i);
        close_run(&r);
    }
}

/* ---- Cases --------------------------------------------------------------- */

static void no_cap(sti_hybrid_settings *s)
{
    s->cap = STI_CAP_NONE;
}
static void received_per_head(sti_hybrid_settings *s)
{
    received(s);
    s->per_head = true;
}
static void keynorm(sti_hybrid_settings *s)
{
    s->score = STI_SCORE_KEYNORM;
    small_cap(s);
}
static void distinct(sti_hybrid_settings *s)
{
    s->score = STI_SCORE_DISTINCT;
    small_cap(s);
}
static void window_scale(sti_hybrid_settings *s)
{
    s->la_scale = STI_SCALE_WINDOW;
    s->window_factor = true;
    small_cap(s);
}
static void relu(sti_hybrid_settings *s)
{
    s->map = STI_MAP_RELU;
    s->den_eps = 1e-6;
    small_cap(s);
}
static void plain_map(sti_hybrid_settings *s)
{
    s->norm_preserved = s->gate = s->alpha = false;
    s->feature_floor = 0.02; /* high enough to be felt */
}
static void select_all(sti_hybrid_settings *s)
{
    s->select = s->chunk;
    s->cap = s->chunk + 3;
}
static void no_list(sti_hybrid_settings *s)
{
    s->cap = 0;
}
static void raw_features(sti_hybrid_settings *s)
{
    s->feature_positions = STI_FEATURES_NONE;
    if (s->has_window) small_cap(s);
}
static void state_cap(sti_hybrid_settings *s)
{
    s->state_cap = 10;
    small_cap(s);
}

static void uneven_per_head(sti_hybrid_settings *s)
{
    per_head(s);
    uneven(s);
}
static void quantized(sti_hybrid_settings *s)
{
    small_cap(s);
    s->key_bits = 8;
    s->value_bits = 4;
}
static void quantized_more(sti_hybrid_settings *s)
{
    uneven(s);
    s->key_bits = 5;
    s->value_bits = 3;
}
static void quantized_keys(sti_hybrid_settings *s)
{
    small_cap(s);
    s->key_bits = 5;
}
static void quantized_values(sti_hybrid_settings *s)
{
    uneven(s);
    s->value_bits = 3;
}
static void uneven_far(sti_hybrid_settings *s)
{
    far_and_raw(s);
    uneven(s);
}
static void quantized_far(sti_hybrid_settings *s)
{
    far_keys(s);
    s->key_bits = 8;
    s->value_bits = 4;
}
static void quantized_uneven_far(sti_hybrid_settings *s)
{
    uneven_far(s);
    s->key_bits = 5;
    s->value_bits = 3;
}
static void quantized_long_8(sti_hybrid_settings *s)
{
    long_list(s);
    s->key_bits = 8;
    s->value_bits = 4;
}
static void uneven_state_cap(sti_hybrid_settings *s)
{
    uneven(s);
    s->state_cap = 4 * s->chunk;
}

/* Every setting, at shapes that no vector fits and at those that vectors are for. */
static const test_case cases[] = {
    {"still", "still", 8, {4, 2, 16, 16}, 75, NULL, false, false, 0},
    {"small cap", "still", 8, {6, 2, 32, 32}, 75, small_cap, false, false, 0},
    {"odd sizes", "still", 5, {3, 1, 13, 13}, 61, small_cap, false, false, 0},
    {"few features", "still", 6, {4, 2, 24, 10}, 61, small_cap, false, false, 0},
    {"odd features", "still", 6, {2, 2, 40, 33}, 61, small_cap, false, false, 0},
    {"narrow maps", "still", 6, {4, 2, 48, 24}, 61, small_cap, false, false, 0},
    {"maps of 4", "still", 6, {4, 2, 64, 4}, 61, small_cap, false, false, 0},
    {"one token chunks", "still", 1, {2, 1, 8, 8}, 20, select_all, false, false, 0},
    {"start values", "still", 8, {4, 2, 16, 16}, 60, small_cap, false, true, 0},
    {"no cap", "still", 8, {4, 2, 64, 64}, 75, no_cap, false, false, 0},
    {"per head", "still", 8, {4, 2, 32, 32}, 75, per_head, false, false, 0},
    {"group of 7", "still", 8, {7, 1, 16, 16}, 50, small_cap, false, false, 0},
    {"group of 6", "still", 8, {6, 1, 112, 56}, 40, small_cap, false, false, 0},
    {"group of 8", "still", 8, {16, 2, 64, 64}, 50, small_cap, false, false, 0},
    {"received", "still", 8, {6, 2, 32, 32}, 75, received, false, false, 0},
    {"received, per head",
     "still",
     7,
     {6, 2, 20, 20},
     75,
     received_per_head,
     false,
     false,
     0},
    {"keynorm", "still", 8, {4, 2, 16, 16}, 60, keynorm, false, false, 0},
    {"random", "still", 8, {4, 2, 16, 16}, 60, random_scores, false, false, 0},
    {"distinct", "still", 8, {4, 2, 64, 64}, 75, distinct, false, false, 0},
    {"distinct, odd", "still", 7, {6, 2, 20, 20}, 75, distinct, false, false, 0},
    {"window scale", "still", 8, {4, 2, 16, 16}, 60, window_scale, false, false, 0},
    {"window scale, start",
     "still",
     8,
     {4, 2, 16, 16},
     60,
     window_scale,
     false,
     true,
     0},
    {"relu", "still", 8, {4, 2, 16, 16}, 60, relu, false, false, 0},
    {"plain map", "still", 8, {4, 2, 16, 16}, 60, plain_map, false, false, 0},
    {"select all", "still", 8, {4, 2, 16, 16}, 75, select_all, false, false, 0},
    {"uneven caps", "still", 8, {6, 3, 64, 64}, 90, uneven, false, false, 0},
    {"uneven, odd", "still", 7, {6, 3, 20, 20}, 90, uneven, false, false, 0},
    {"uneven per head",
     "still",
     8,
     {6, 3, 64, 64},
     90,
     uneven_per_head,
     false,
     false,
     0},
    {"uneven, state cap",
     "still",
     8,
     {6, 3, 64, 64},
     90,
     uneven_state_cap,
     false,
     false,
     0},
    {"uneven, far", "still", 8, {6, 3, 64, 64}, 99, uneven_far, false, false, 2e-3},
    {"quantized", "still", 8, {4, 2, 64, 64}, 90, quantized, false, false, 1e-3},
    {"quantized, D 32", "still", 7, {4, 2, 32, 32}, 90, quantized, false, false, 1e-3},
    {"quantized, D 96", "still", 8, {4, 2, 96, 96}, 90, quantized, false, false, 1e-3},
    {"keys 5, values 3",
     "still",
     8,
     {6, 3, 64, 64},
     99,
     quantized_more,
     false,
     false,
     1e-3},
    {"5 and 3, D 128",
     "still",
     16,
     {6, 3, 128, 96},
     120,
     quantized_more,
     false,
     false,
     1e-3},
    {"keys 5", "still", 8, {4, 2, 64, 64}, 90, quantized_keys, false, false, 1e-3},
    {"values 3", "still", 8, {6, 3, 128, 64}, 90, quantized_values, false, false, 1e-3},
    /* Where half and double differ, a level may too. */
    {"quantized, far",
     "still",
     8,
     {4, 2, 64, 64},
     90,
     quantized_far,
     false,
     false,
     1e-2},
    {"quantized, uneven, far",
     "still",
     8,
     {6, 3, 64, 64},
     99,
     quantized_uneven_far,
     false,
     false,
     1e-2},
    {"quantized, uneven, far, D 128",
     "still",
     8,
     {6, 3, 128, 128},
     99,
     quantized_uneven_far,
     false,
     false,
     1e-2},
    {"long list", "still", 32, {9, 3, 64, 64}, 800, long_list, false, false, 2e-4},
    {"long, 5 and 3",
     "still",
     32,
     {9, 3, 64, 64},
     800,
     quantized_long,
     false,
     false,
     1e-3},
    {"long, 8 and 4",
     "still",
     30,
     {6, 3, 64, 64},
     700,
     quantized_long_8,
     false,
     false,
     1e-3},
    {"long, D 128",
     "still",
     24,
     {6, 3, 128, 64},
     600,
     quantized_long_8,
     false,
     false,
     1e-3},
    {"no list", "still", 8, {4, 2, 16, 16}, 60, no_list, false, false, 0},
    {"state cap", "still", 8, {4, 2, 16, 16}, 75, state_cap, false, false, 0},
    /* A far key that is kept in half is rounded once more when it turns. */
    {"far keys", "still", 8, {4, 2, 16, 16}, 90, far_keys, false, false, 2e-3},
    {"far keys, pairs", "still", 8, {4, 2, 10, 10}, 90, far_keys, true, false, 2e-3},
    {"far and raw", "still", 8, {4, 2, 32, 32}, 90, far_and_raw, false, false, 2e-3},
    {"raw features", "still", 8, {4, 2, 16, 16}, 60, raw_features, true, false, 0},
    {"lolcats", "lolcats", 8, {4, 2, 16, 16}, 60, NULL, false, false, 0},
    {"hedgehog", "hedgehog", 8, {4, 2, 16, 16}, 40, NULL, false, false, 0},
    {"hedgehog of 96", "hedgehog", 8, {8, 1, 96, 32}, 30, NULL, false, false, 0},
    {"hedgehog, raw", "hedgehog", 8, {4, 2, 16, 16}, 40, raw_features, false, false, 0},
    {"t2r", "t2r", 8, {6, 2, 18, 18}, 40, NULL, false, false, 0},
    {"swa", "swa", 8, {4, 2, 16, 16}, 60, NULL, false, false, 0},
    {"softmax", "softmax", 8, {4, 2, 16, 16}, 60, NULL, false, false, 0},
    {"heads of 80", "still", 16, {4, 2, 80, 80}, 80, small_cap, false, false, 0},
    {"heads of 128", "still", 16, {8, 2, 128, 128}, 80, small_cap, false, false, 0},
    {"heads of 256", "still", 8, {4, 2, 256, 256}, 40, small_cap, false, false, 0},
};

static void test_setting(void **state)
{
    const test_case *c = *state;
    check(need_gpu(), c, 11 + (uint64_t)(c - cases), false);
}

/* Rows that come before RoPE. A key that is rounded after a turn in float may be
 * rounded to the next half. */
static const test_case turned[] = {
    {"turned", "still", 8, {6, 2, 64, 64}, 75, NULL, false, false, 2e-3},
    {"turned pairs", "still", 8, {6, 2, 64, 64}, 75, small_cap, true, false, 2e-3},
    {"turned, 32", "still", 8, {4, 2, 32, 32}, 75, NULL, false, false, 2e-3},
    {"turned, 80", "still", 8, {4, 2, 80, 80}, 60, NULL, false, false, 2e-3},
    {"turned, 128", "still", 8, {8, 2, 128, 128}, 60, NULL, false, false, 2e-3},
    {"turned, 10", "still", 8, {4, 2, 10, 10}, 60, NULL, true, false, 2e-3},
    {"turned, 136", "still", 8, {4, 2, 136, 136}, 40, NULL, false, false, 2e-3},
    {"turned, 256", "still", 8, {4, 2, 256, 64}, 40, NULL, false, false, 2e-3},
    {"turned, of 7", "still", 8, {7, 1, 48, 48}, 50, NULL, false, false, 2e-3},
    {"turned, head", "still", 8, {4, 2, 32, 32}, 75, per_head, false, false, 2e-3},
    {"turned, received", "still", 8, {4, 2, 32, 32}, 75, received, false, false, 2e-3},
    {"turned, far", "still", 8, {6, 2, 64, 64}, 90, far_keys, false, false, 2e-3},
    {"turned, far, raw",
     "still",
     8,
     {6, 1, 32, 32},
     90,
     far_and_raw,
     true,
     false,
     2e-3},
    {"turned, raw", "still", 8, {4, 2, 64, 64}, 60, raw_features, false, false, 2e-3},
    {"turned, lolcats", "lolcats", 8, {4, 2, 64, 64}, 60, NULL, false, false, 2e-3},
    {"turned, swa", "swa", 8, {4, 2, 64, 64}, 60, NULL, false, false, 2e-3}};

static void test_unrotated(void **state)
{
    const test_case *c = *state;
    check(need_gpu(), c, 71 + (uint64_t)(c - turned), true);
}

/* Sizes of real models: lists that fill up, thousands of keys; those with a limit of
 * their own in rows that come before RoPE. */
static const test_case real[] = {
    {"SmolLM2", "still", 128, {9, 3, 64, 64}, 1100, NULL, false, false, 2e-3},
    {"8B", "still", 128, {8, 2, 128, 128}, 700, NULL, false, false, 2e-3},
    {"large chunks", "still", 600, {2, 1, 32, 32}, 1900, NULL, false, false, 0}};

static void test_real_size(void **state)
{
    const test_case *c = *state;
    check(need_gpu(), c, 5 + (uint64_t)(c - real), c->half_limit > 0);
}

/* ---- Other tests --------------------------------------------------------- */

/* Which calls of the entry may be unrotated. */
static void test_turns(void **state)
{
    (void)state;
    need_gpu();
    static const struct {
        const char *method;
        void (*change)(sti_hybrid_settings *);
        int D, T;
        bool turns;
    } calls[] = {{"still", NULL, 64, 1, true},     {"still", NULL, 64, 4, true},
                 {"still", NULL, 64, 5, false},    {"still", far_and_raw, 64, 1, true},
                 {"still", keynorm, 64, 1, false}, {"still", NULL, 13, 1, false},
                 {"hedgehog", NULL, 64, 1, false}, {"lolcats", NULL, 128, 1, true}};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        sti_hybrid_settings set = preset(calls[i].method, 64);
        if (calls[i].change) calls[i].change(&set);
        sti_hybrid_state st = {.kv_size = 2};
        const sti_hybrid_args one = {
            .set = &set, .shape = {4, 2, calls[i].D, calls[i].D}, .T = 1, .state = &st};
        sti_hybrid_args a[2] = {one, one};
        a[1].T = calls[i].T;
        if (sti_cuda_hybrid_ropes(a, 2) != calls[i].turns)
            fail_msg("%s, call %zu: expected %d", calls[i].method, i, calls[i].turns);
    }
}

/* The order in which blocks arrive changes nothing. */
static void test_repeatable(void **state)
{
    (void)state;
    static const test_case c = {"repeated", "still", 16, {8, 2, 64, 64}, 150, small_cap,
                                false,      false,   0};
    const gpu *g = need_gpu();
    float *first = NULL;
    for (int i = 0; i < 3; i++) {
        static run r;
        open_run(&r, g, &c, 2, 99, false);
        for (int call = 1; feed_some(&r, call, 0);) call++;
        const size_t n = outputs(&r.p[2]);
        float *y = download(g, r.x[2].y.p, n * sizeof *y);
        if (first) assert_memory_equal(first, y, n * sizeof *y);
        if (!first)
            first = y;
        else
            free(y);
        close_run(&r);
    }
    free(first);
}

int main(void)
{
    struct CMUnitTest tests[2 + COUNT(cases) + COUNT(turned) + COUNT(real)] = {
        cmocka_unit_test(test_turns), cmocka_unit_test(test_repeatable)};
    size_t n = 2;
    n = add_cases(tests, n, test_setting, cases, COUNT(cases), sizeof *cases);
    n = add_cases(tests, n, test_unrotated, turned, COUNT(turned), sizeof *turned);
    add_cases(tests, n, test_real_size, real, COUNT(real), sizeof *real);
    return cmocka_run_group_tests(tests, open_step_gpu, close_gpu);
}
