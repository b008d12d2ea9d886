/* test_hybrid_cpu.c - the hybrid operator of the cpu backend for sessions, every
 * instruction set here: against the reference in double over random settings, and bit
 * for bit against itself under other cuts of the prompt, other batches of sessions and
 * other thread counts. */
#include "../../hybrid_problem.h"
#include "../cpu_device.h"

#include "backend/cpu/cpu.h"

/* ---- A session of the cpu backend over the inputs of a problem ----------- */

typedef struct session {
    const problem *p;
    float *q, *k, *v, *gate, *alpha, *window, *map_q, *map_k, *bias_q, *bias_k, *q_raw;
    float *inv_freq;
    float *y, *score_head, *score;
    int32_t *fold, *salient;
    sti_hybrid_state st;
    sti_block block;
    int past;
} session;

static session open_session(const problem *p, size_t kv_size)
{
    const size_t T = (size_t)p->T, H = (size_t)p->shape.H, G = (size_t)p->shape.G;
    const size_t D = (size_t)p->shape.D, S = (size_t)p->S, map = D * (size_t)p->shape.F;
    session x = {.p = p,
                 .q = narrow(p->q, T * H * D),
                 .k = narrow(p->k, T * G * D),
                 .v = narrow(p->v, T * G * D),
                 .gate = narrow(p->gate, T * H * D),
                 .alpha = narrow(p->alpha, H),
                 .window = narrow(p->window, H),
                 .map_q = p->map_q ? narrow(p->map_q, H * map) : NULL,
                 .map_k = p->map_k ? narrow(p->map_k, S * map) : NULL,
                 .bias_q = narrow(p->bias_q, H),
                 .bias_k = narrow(p->bias_k, S),
                 .q_raw = p->q_raw ? narrow(p->q_raw, T * H * D) : NULL,
                 .inv_freq = p->q_raw ? narrow(p->inv_freq, D / 2) : NULL,
                 .y = calloc(T * H * D, sizeof(float)),
                 .score_head = calloc(T * H, sizeof(float)),
                 .score = calloc(T * S, sizeof(float)),
                 .fold = malloc(T * S * sizeof(int32_t)),
                 .salient = calloc(T * S, sizeof(int32_t))};
    for (size_t i = 0; i < T * S; i++) x.fold[i] = -1;
    sti_carve c = {0};
    sti_hybrid_state_carve(&x.st, &c, &p->set, &p->shape, p->T, kv_size, sizeof(float));
    assert_true(sti_block_new(&x.block, c.used));
    c = (sti_carve){.base = x.block.p};
    sti_hybrid_state_carve(&x.st, &c, &p->set, &p->shape, p->T, kv_size, sizeof(float));
    return x;
}

static void close_session(session *x)
{
    void *all[] = {x->q,     x->k,     x->v,       x->gate,   x->alpha,   x->window,
                   x->map_q, x->map_k, x->bias_q,  x->bias_k, x->y,       x->score_head,
                   x->score, x->fold,  x->salient, x->q_raw,  x->inv_freq};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    sti_block_free(&x->block);
}

static sti_hybrid_args next_args(session *x, int n)
{
    const problem *p = x->p;
    const size_t at = (size_t)x->past, H = (size_t)p->shape.H, G = (size_t)p->shape.G;
    const size_t D = (size_t)p->shape.D, S = (size_t)p->S;
    return (sti_hybrid_args){.set = &p->set,
                             .shape = p->shape,
                             .T = n,
                             .in = {.q = x->q + at * H * D,
                                    .k = x->k + at * G * D,
                                    .v = x->v + at * G * D,
                                    .gate_logit = x->gate + at * H * D,
                                    .alpha = x->alpha,
                                    .window_logit = x->window,
                                    .map_q = x->map_q,
                                    .map_k = x->map_k,
                                    .bias_q = x->bias_q,
                                    .bias_k = x->bias_k,
                                    .q_raw = x->q_raw ? x->q_raw + at * H * D : NULL,
                                    .inv_freq = x->inv_freq},
                             .state = &x->st,
                             .y = x->y + at * H * D,
                             .trace = {.score_head = x->score_head + at * H,
                                       .score = x->score + at * S,
                                       .salient = x->salient + at * S,
                                       .fold_chunk = x->fold}};
}

enum { MOST_SESSIONS = 24 };

/* Feeds each of several sessions its next n[i] tokens in one call. */
static void feed_cpu(sti_dev *dev, session *const *x, const int *n, int count)
{
    sti_hybrid_args a[MOST_SESSIONS];
    still_error err;
    for (int i = 0; i < count; i++) a[i] = next_args(x[i], n[i]);
    if (cpu()->hybrid(dev, a, count, &err) != STILL_OK) fail_msg("%s", err.text);
    for (int i = 0; i < count; i++) {
        x[i]->past += n[i];
        assert_int_equal(x[i]->st.pos, x[i]->past);
    }
}

static void feed_all(sti_dev *dev, session *x, int step)
{
    while (x->past < x->p->T) {
        int n = x->p->T - x->past < step ? x->p->T - x->past : step;
        feed_cpu(dev, &x, &n, 1);
    }
}

/* ---- Against the reference ----------------------------------------------- */

/* Whether the routes are the same; two tokens whose scores differ by less than rounding
 * may have changed places. */
static bool same_route(const problem *p, const session *x)
{
    const size_t n = (size_t)p->T * (size_t)p->S;
    if (!memcmp(p->fold, x->fold, n * sizeof *x->fold)) return true;
    for (size_t a = 0; a < n; a++) {
        if (p->fold[a] == x->fold[a]) continue;
        bool tied = false;
        for (size_t b = a % (size_t)p->S; b < n; b += (size_t)p->S)
            tied = tied || (b != a && p->fold[b] != x->fold[b] &&
                            fabs(p->score[a] - p->score[b]) < 1e-4);
        if (!tied && !sti_score_at(p->set.score)->retire)
            fail_msg("token %zu folded at %d, expected %d", a, x->fold[a], p->fold[a]);
    }
    return false;
}

static int compare(sti_dev *dev, problem *p, size_t kv_size, int step, double limit)
{
    const size_t T = (size_t)p->T, S = (size_t)p->S, D = (size_t)p->shape.D;
    round_inputs(p, kv_size);
    sti_hybrid_state_clear(&p->st, &p->set, &p->shape);
    for (size_t i = 0; i < T * S; i++) p->fold[i] = -1;
    feed(p, 0, p->T);
    session x = open_session(p, kv_size);
    feed_all(dev, &x, step);
    int compared = 0;
    if (p->set.has_window && !sti_score_at(p->set.score)->retire) {
        const double e = relative_error(x.score, p->score, T * S, 0);
        if (!(e <= limit)) fail_msg("score: relative error %g", e);
    }
    if (same_route(p, &x)) {
        double e = relative_error(x.y, p->y, outputs(p), 0);
        if (!(e <= limit)) fail_msg("y: relative error %g", e);
        assert_memory_equal(x.salient, p->salient, T * S * sizeof *x.salient);
        assert_memory_equal(x.st.folded, p->st.folded, S * sizeof *x.st.folded);
        if (p->set.has_linear) {
            e = relative_error(x.st.lin_s, p->st.lin_s, S * (size_t)p->P * D, 0);
            if (!(e <= limit)) fail_msg("s: relative error %g", e);
            e = relative_error(x.st.lin_z, p->st.lin_z, S * (size_t)p->P, 0);
            if (!(e <= limit)) fail_msg("z: relative error %g", e);
        }
        compared = 1;
    }
    close_session(&x);
    return compared;
}

static void test_random_settings(void **state)
{
    (void)state;
    for (int i = 0; i < N_ISA; i++) {
        sti_dev *dev = new_dev(isa_name[i], 2);
        if (!dev) continue;
        int compared = 0;
        for (uint64_t seed = 0; seed < 320; seed++) { /* half of them quantized */
            problem p = draw_problem(3000 + seed, seed >= 160);
            static const int step[] = {1, 2, 5, 1000};
            compared += compare(dev, &p, seed % 2 ? 2 : 4, step[seed / 2 % 4], 1e-5);
            drop(&p);
        }
        assert_in_range(compared, 300, 320);
        free_dev(dev);
    }
}

/* Odd lengths and sizes at which some part is empty, full or not a whole vector. */
static void test_odd_cases(void **state)
{
    (void)state;
    enum { C = 16 };
    static const struct {
        int T, C, select, cap, H, G, D;
        double gain; /* of the queries: how far apart logits lie */
    } odd[] = {
        {1, C, 4, 32, 4, 2, 64, 1},
        {C, C, 4, 32, 4, 2, 64, 1},
        {2 * C, C, 4, 32, 4, 2, 64, 1},
        {2 * C + 1, C, 4, 32, 4, 2, 64, 1},
        {6 * C + 3, C, C, 32, 4, 2, 64, 1}, /* all selected */
        {6 * C + 3, C, 4, 0, 4, 2, 64, 1},  /* nowhere to keep them */
        {6 * C + 3, C, 4, STI_CAP_NONE, 4, 2, 64, 1},
        {20, 1, 1, 3, 2, 1, 64, 1}, /* chunks of one token */
        {20, 1, 0, 3, 2, 1, 8, 1},
        {7 * C, C, 4, 9, 1, 1, 64, 1}, /* one head */
        {7 * C, C, 4, 9, 6, 1, 80, 1}, /* one kv head */
        {5 * C, C, 4, 9, 4, 2, 128, 1},
        {5 * C, C, 4, 9, 2, 2, 256, 1},
        {3 * 200 + 7, 200, 30, 70, 3, 1, 24, 1}, /* chunks of more than a block */
        {7 * C, C, 4, 20, 4, 2, 64, 25},         /* logits of +-200 */
    };
    for (int i = 0; i < N_ISA; i++) {
        sti_dev *dev = new_dev(isa_name[i], 2);
        if (!dev) continue;
        for (size_t n = 0; n < sizeof odd / sizeof *odd; n++)
            for (int form = 0; form < 12; form++) { /* f16 or f32, shared or per head */
                sti_hybrid_settings set = preset("still", odd[n].C);
                set.select = odd[n].select;
                set.cap = odd[n].cap;
                set.per_head = form / 2 % 2;
                quantize(&set, form / 4);
                const sti_hybrid_shape shape = {odd[n].H, odd[n].G, odd[n].D, odd[n].D};
                problem p = make(set, shape, odd[n].T, 100 + n);
                const size_t nq = outputs(&p);
                for (size_t j = 0; j < nq; j++) p.q[j] *= odd[n].gain;
                /* Rounding of a logit is relative to its size. */
                compare(dev, &p, form % 2 ? 2 : 4, 7, odd[n].gain > 1 ? 1e-3 : 1e-5);
                drop(&p);
            }
        free_dev(dev);
    }
}

/* Keys of norm 0: uniform features, and nothing divides by the norm. */
static void test_zero_keys(void **state)
{
    (void)state;
    sti_dev *dev = new_dev(NULL, 2);
    problem p = make(preset("still", 4), (sti_hybrid_shape){4, 2, 16, 16}, 40, 3);
    for (size_t i = 0; i < 40 * 2 * 16; i++)
        if (i / 32 % 3 == 0) p.k[i] = 0;
    for (size_t i = 0; i < outputs(&p); i++)
        if (i / 64 % 5 == 0) p.q[i] = 0;
    compare(dev, &p, 4, 3, 1e-5);
    drop(&p);
    free_dev(dev);
}

/* Without maps u is x itself where the norm is kept, and its first columns else. */
static void test_identity_maps(void **state)
{
    (void)state;
    sti_dev *dev = new_dev(NULL, 2);
    for (int F = 24; F <= 32; F += 8)
        for (int kept = 0; kept < 2; kept++) {
            sti_hybrid_settings set = preset("still", 4);
            set.norm_preserved = kept;
            problem p = make(set, (sti_hybrid_shape){4, 2, 32, F}, 50, 4);
            free(p.map_q);
            free(p.map_k);
            p.map_q = p.map_k = NULL;
            compare(dev, &p, 4, 6, 1e-5);
            drop(&p);
        }
    free_dev(dev);
}

/* Keys that repeat have norms that repeat: of equal scores the earlier token stays, when a
 * chunk selects and when the cache is full. Routes must be the reference's, ties and all. */
static void test_ties(void **state)
{
    (void)state;
    const sti_hybrid_shape shape = {4, 2, 16, 16};
    for (int i = 0; i < N_ISA; i++) {
        sti_dev *dev = new_dev(isa_name[i], 2);
        if (!dev) continue;
        for (int period = 1; period <= 3; period++) {
            sti_hybrid_settings set = preset("still", 8);
            set.score = STI_SCORE_KEYNORM;
            set.select = 3;
            set.cap = 7;
            problem p = make(set, shape, 70, 5);
            for (int t = period; t < p.T; t++)
                memcpy(p.k + t * 32, p.k + t % period * 32, 32 * sizeof *p.k);
            assert_int_equal(compare(dev, &p, 4, period * 3, 1e-5), 1);
            drop(&p);
        }
        free_dev(dev);
    }
}

/* Capped positions, and features without any: some salient keys are far, some near. Then
 * the same with heads as models have them. */
static void test_positions(void **state)
{
    (void)state;
    for (int i = 0; i < N_ISA; i++) {
        sti_dev *dev = new_dev(isa_name[i], 2);
        if (!dev) continue;
        for (int n = 0; n < 96; n++) {
            static const sti_hybrid_shape large[] = {{4, 2, 128, 128},
                                                     {4, 1, 256, 256},
                                                     {7, 1, 64, 64},
                                                     {2, 2, 96, 96},
                                                     {3, 1, 80, 80}};
            sti_hybrid_settings set = preset("still", 8);
            quantize(&set, n / 16 % 3);
            set.position_cap = n % 4 == 3 ? 0 : 16 + n % 4 * 20;
            set.feature_positions =
                n % 8 / 4 || n % 4 == 3 ? STI_FEATURES_NONE : STI_FEATURES_ABSOLUTE;
            set.per_head = n / 8 % 2;
            set.select = 3;
            set.cap = 12;
            const sti_hybrid_shape shape =
                n < 48 ? (sti_hybrid_shape){4, 2, 32, 32} : large[n % 5];
            problem p = make(set, shape, n < 48 ? 130 : 90, 60 + (uint64_t)n);
            rotate(&p);
            static const int step[] = {1, 5, 200};
            /* Kept in half precision a key is rounded once more when it turns far. */
            assert_int_equal(compare(dev, &p, 4, step[n % 3], 1e-5), 1);
            compare(dev, &p, 2, step[n % 3], n / 16 % 3 ? 1e-5 : 2e-3);
            drop(&p);
        }
        free_dev(dev);
    }
}

/* ---- Against itself ------------------------------------------------------ */

/* Everything that later tokens depend on, and everything that came out. */
static void assert_same(const session *a, const session *b)
{
    const problem *p = a->p;
    const size_t T = (size_t)p->T, S = (size_t)p->S;
    assert_memory_equal(a->y, b->y, outputs(p) * sizeof(float));
    assert_memory_equal(a->score, b->score, T * S * sizeof(float));
    assert_memory_equal(a->fold, b->fold, T * S * sizeof(int32_t));
    assert_memory_equal(a->block.p, b->block.p, a->block.bytes);
}

/* Seeds 5 to 14 are quantized in one of two ways. */
static problem large_problem(uint64_t seed)
{
    sti_hybrid_settings set = preset(seed % 5 == 4 ? "hedgehog" : "still", 32);
    quantize(&set, (int)(seed / 5));
    if (set.has_window) {
        if (seed % 5 == 0) set.position_cap = 100;
        set.select = 8;
        set.cap = seed % 5 == 1 ? STI_CAP_NONE : 40;
        set.score = seed % 5 == 2 ? STI_SCORE_RECEIVED : STI_SCORE_S3;
        set.per_head = seed % 5 == 3;
        uint64_t rng = seed;
        if (seed % 5 == 3) make_uneven(&set, &rng);
    }
    problem p = make(set, (sti_hybrid_shape){6, 2, 64, 64}, 300, seed);
    if (set.position_cap) rotate(&p);
    return p;
}

static void test_cuts_and_threads(void **state)
{
    (void)state;
    for (int i = 0; i < N_ISA; i++)
        for (uint64_t seed = 0; seed < 14; seed += seed < 4 ? 1 : 2) {
            sti_dev *dev = new_dev(isa_name[i], 1);
            if (!dev) break;
            problem p = large_problem(seed);
            session whole = open_session(&p, 2);
            feed_all(dev, &whole, 1000);
            free_dev(dev);
            static const int step[] = {1, 50, 7, 1000, 1, 1};
            static const int threads[] = {1, 2, 3, 1, 2, 7};
            const int runs = i == 0 ? 6 : 4; /* who does what is the same for all */
            for (int s = 0; s < runs; s++) {
                dev = new_dev(isa_name[i], threads[s]);
                sti_pool_limit(dev->pool, 4); /* as if cores were lost */
                session x = open_session(&p, 2);
                feed_all(dev, &x, step[s]);
                assert_same(&whole, &x);
                close_session(&x);
                free_dev(dev);
            }
            close_session(&whole);
            drop(&p);
        }
}

/* Sessions enough for several rounds of units, of which rows are cut by rounds and by
 * workers. */
static void test_batches(void **state)
{
    (void)state;
    enum { N = MOST_SESSIONS };
    for (uint64_t seed = 0; seed < 14; seed += seed < 4 ? 1 : 2) {
        sti_dev *dev = new_dev(NULL, 2 + (int)seed % 4);
        problem p = large_problem(seed);
        session alone = open_session(&p, 2), batch[N], *x[N];
        feed_all(dev, &alone, 1000);
        /* Sessions at different depths, some with one token and some with more. */
        for (int i = 0; i < N; i++) {
            batch[i] = open_session(&p, 2);
            x[i] = &batch[i];
            int ahead = 11 * i;
            feed_cpu(dev, &x[i], &ahead, 1);
        }
        uint64_t rng = seed;
        for (int busy = 1; busy;) {
            session *now[N];
            int n[N], count = 0;
            busy = 0;
            for (int i = 0; i < N; i++) {
                const int left = p.T - x[i]->past;
                if (left == 0) continue;
                int some = below(&rng, 3) ? 1 : below(&rng, 60);
                now[count] = x[i];
                n[count++] = some < left ? some : left;
                busy = 1;
            }
            if (busy) feed_cpu(dev, now, n, count);
        }
        for (int i = 0; i < N; i++) {
            assert_same(&alone, x[i]);
            close_session(x[i]);
        }
        close_session(&alone);
        drop(&p);
        free_dev(dev);
    }
}

/* Window, list and state hold every token of the past exactly once. */
static void test_partition(void **state)
{
    (void)state;
    sti_dev *dev = new_dev(NULL, 2);
    for (uint64_t seed = 0; seed < 60; seed++) {
        problem p = draw_problem(4000 + seed, seed % 3 == 0);
        session x = open_session(&p, 2);
        for (int t = 0, one = 1; t < p.T; t++) {
            session *now = &x;
            feed_cpu(dev, &now, &one, 1);
            const int C = p.set.chunk;
            const int window = !p.set.has_window ? 0 : t < C ? t + 1 : t % C + C + 1;
            for (int s = 0; s < p.S; s++) {
                const int32_t *pos =
                    x.st.sal_pos + sti_hybrid_list_of(&p.set, &x.st, s).first;
                assert_int_equal(window + x.st.sal_count[s] + x.st.folded[s], t + 1);
                for (int i = 0; i < x.st.sal_count[s]; i++) {
                    assert_in_range(pos[i], 0, t - window);
                    assert_int_equal(x.fold[pos[i] * p.S + s], -1);
                    for (int l = 0; l < i; l++) assert_int_not_equal(pos[l], pos[i]);
                }
            }
        }
        close_session(&x);
        drop(&p);
    }
    free_dev(dev);
}

/* ---- A long stream ------------------------------------------------------- */

/* A million tokens that all add to the same side, the worst a sum in float can meet:
 * the state must be that of a sum in double. With a window chunks are added, without
 * one each token is. */
static void stream_drifts(const char *method, double limit)
{
    enum { TOKENS = 1000000, PIECE = 4000, D = 4, P = 2 * D };
    sti_hybrid_settings set = preset(method, 100);
    set.select = 0;
    problem p = make(set, (sti_hybrid_shape){1, 1, D, D}, PIECE, 9);
    for (size_t i = 0; i < PIECE * D; i++) p.v[i] = 1 + 0.3 * p.v[i];
    round_inputs(&p, 4);
    sti_dev *dev = new_dev(NULL, 1);
    session x = open_session(&p, 4);
    x.st.max_tokens = TOKENS;
    for (int done = 0; done < TOKENS; done += PIECE) {
        sti_hybrid_args a = next_args(&x, PIECE);
        a.trace = (sti_hybrid_trace){0};
        still_error err;
        assert_int_equal(cpu()->hybrid(dev, &a, 1, &err), STILL_OK);
    }
    double s[P * D] = {0}, z[P] = {0}, phi[P];
    const sti_hybrid_in64 in = inputs(&p);
    const sti_ref_map map = sti_ref_map_k(&set, &p.shape, &in, 0);
    for (int64_t t = 0; t < x.st.folded[0]; t++) {
        sti_ref_map_forward(&map, p.k + t % PIECE * D, phi);
        sti_ref_axpy(1, phi, z, P);
        for (int i = 0; i < P; i++)
            sti_ref_axpy(phi[i], p.v + t % PIECE * D, s + i * D, D);
    }
    assert_true(x.st.folded[0] >= TOKENS - 200);
    for (int i = 0; i < P * D; i++)
        assert_true(fabs(((float *)x.st.lin_s)[i] / s[i] - 1) < limit);
    for (int i = 0; i < P; i++)
        assert_true(fabs(((float *)x.st.lin_z)[i] / z[i] - 1) < limit);
    close_session(&x);
    drop(&p);
    free_dev(dev);
}

static void test_long_streams(void **state)
{
    (void)state;
    stream_drifts("still", 1e-4);
    stream_drifts("hedgehog", 2e-6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_settings),  cmocka_unit_test(test_odd_cases),
        cmocka_unit_test(test_zero_keys),        cmocka_unit_test(test_ties),
        cmocka_unit_test(test_identity_maps),    cmocka_unit_test(test_positions),
        cmocka_unit_test(test_cuts_and_threads), cmocka_unit_test(test_batches),
        cmocka_unit_test(test_partition),        cmocka_unit_test(test_long_streams),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
