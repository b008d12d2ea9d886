/* The reference of the hybrid operator: golden cases of another implementation, and the
 * identities that must hold for any settings. */
#include "../../hybrid_problem.h"

#include "eval/selftest/selftest.h"

enum { PROBLEMS = 120 }; /* random ones for each identity */

/* ---- Golden cases -------------------------------------------------------- */

static void count_case(void *user, const still_check_case *c)
{
    ++*(int *)user;
    for (int i = 0; i < c->n_checks; i++)
        if (!c->check[i].passed)
            print_error("%s: %s is %g, limit %g\n", c->name, c->check[i].name,
                        c->check[i].value, c->check[i].limit);
}

static void test_golden(void **state)
{
    (void)state;
    still_selftest_params p = {
        .size = sizeof p, .model = &STILL_PARAMS(still_model_params, .backend = "ref")};
    int failed = 0, cases = 0;
    still_error err = {0};
    const sti_suite_run run = {"operator", FIXTURES "/operator", &p, count_case, &cases,
                               &failed};
    assert_int_equal(sti_selftest_operator(&run, &err), STILL_OK);
    assert_int_equal(cases, 4);
    assert_int_equal(failed, 0);
}

/* ---- Identities ---------------------------------------------------------- */

/* Window, salient cache and state hold every token of the past exactly once. */
static void test_partition(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < PROBLEMS; seed++) {
        problem p = any_problem(seed);
        for (int t = 0; t < p.T; t++) {
            feed(&p, t, 1);
            const int C = p.set.chunk;
            const int window = !p.set.has_window ? 0 : t < C ? t + 1 : t % C + C + 1;
            for (int s = 0; s < p.S; s++)
                assert_int_equal(window + p.st.sal_count[s] + p.st.folded[s], t + 1);
        }
        run_parallel(&p); /* and the mask says the same, token by token */
        for (int s = 0; s < p.S; s++) {
            int place[4] = {0};
            for (int j = 0; j < p.T; j++)
                place[sti_hybrid_place(&p.set, p.T - 1, j,
                                       p.fold_parallel[j * p.S + s])]++;
            assert_int_equal(place[STI_PLACE_SALIENT], p.st.sal_count[s]);
            assert_int_equal(place[STI_PLACE_LINEAR], p.st.folded[s]);
            const int32_t *at =
                p.st.sal_pos + sti_hybrid_list_of(&p.set, &p.st, s).first;
            for (int i = 0; i < p.st.sal_count[s]; i++) {
                const int32_t j = at[i];
                assert_int_equal(
                    sti_hybrid_place(&p.set, p.T - 1, j, p.fold_parallel[j * p.S + s]),
                    STI_PLACE_SALIENT);
                for (int l = 0; l < i; l++) assert_int_not_equal(at[l], j);
            }
            if (p.set.cap >= 0)
                assert_in_range(p.st.sal_count[s], 0, sti_hybrid_cap(&p.set, s));
        }
        drop(&p);
    }
}

static void assert_forms_agree(problem *p)
{
    feed(p, 0, p->T);
    run_parallel(p);
    const size_t n = (size_t)p->T * (size_t)p->S;
    assert_memory_equal(p->salient, p->salient_parallel, n * sizeof(int32_t));
    if (p->set.has_window) {
        assert_memory_equal(p->fold, p->fold_parallel, n * sizeof(int32_t));
        if (!sti_score_at(p->set.score)->retire)
            assert_close(p->score, p->score_parallel, n, 1e-13);
    }
    assert_close(p->y, p->y_parallel, outputs(p), 1e-12);
}

static void test_recurrent_is_parallel(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 2 * PROBLEMS; seed++) {
        problem p = draw_problem(1000 + seed, seed >= PROBLEMS);
        assert_forms_agree(&p);
        drop(&p);
    }
}

static void test_any_cut_and_clear(void **state)
{
    (void)state;
    uint64_t rng = 5;
    for (uint64_t seed = 0; seed < 2 * PROBLEMS; seed++) {
        problem p = draw_problem(2000 + seed, seed >= PROBLEMS);
        feed(&p, 0, p.T);
        double *whole = malloc(outputs(&p) * sizeof *whole);
        memcpy(whole, p.y, outputs(&p) * sizeof *whole);
        memset(p.y, 0, outputs(&p) * sizeof *p.y);
        sti_hybrid_state_clear(&p.st, &p.set, &p.shape);
        for (int t = 0, n; t < p.T; t += n) {
            n = 1 + below(&rng, p.T - t);
            feed(&p, t, n);
        }
        assert_memory_equal(whole, p.y, outputs(&p) * sizeof *whole);
        free(whole);
        drop(&p);
    }
}

static void test_all_salient_is_softmax(void **state)
{
    (void)state;
    sti_hybrid_settings s = preset("still", 4);
    s.select = 4;
    s.cap = STI_CAP_NONE;
    problem p = make(s, (sti_hybrid_shape){6, 2, 8, 8}, 45, 3);
    feed(&p, 0, p.T);
    for (int t = 0; t < p.T; t++)
        for (int h = 0; h < 6; h++) {
            const double *q = p.q + (t * 6 + h) * 8;
            double w[45], y[8] = {0};
            for (int j = 0; j <= t; j++)
                w[j] = sti_ref_logit(q, p.k + (j * 2 + h / 3) * 8, 8);
            sti_ref_softmax(w, t + 1);
            for (int j = 0; j <= t; j++)
                sti_ref_axpy(w[j], p.v + (j * 2 + h / 3) * 8, y, 8);
            assert_close(p.y + (t * 6 + h) * 8, y, 8, 1e-13);
        }
    drop(&p);
}

static void test_batch_is_separate_sequences(void **state)
{
    (void)state;
    problem p = make(preset("still", 3), (sti_hybrid_shape){4, 2, 6, 6}, 40, 11);
    sti_hybrid_parallel_args64 a = parallel_args(&p);
    still_error err;
    a.B = 2; /* tokens 0..19 and 20..39 as sequences of their own */
    a.T = 20;
    assert_int_equal(sti_ref_hybrid_route(&a, &err), STILL_OK);
    assert_int_equal(sti_ref_hybrid_parallel(&a, &err), STILL_OK);
    feed(&p, 0, 20);
    sti_hybrid_state_clear(&p.st, &p.set, &p.shape);
    feed(&p, 20, 20);
    assert_close(p.y, p.y_parallel, outputs(&p), 1e-12);
    drop(&p);
}

/* ---- Odd sizes and numbers ----------------------------------------------- */

static void test_odd_sizes(void **state)
{
    (void)state;
    static const struct {
        int C, select, cap, T, H, G, D;
    } odd[] = {
        {4, 1, 8, 1, 4, 2, 8},    {4, 1, 8, 4, 4, 2, 8},   {4, 1, 8, 8, 4, 2, 8},
        {4, 1, 8, 9, 4, 2, 8},    {1, 0, 0, 20, 4, 2, 8},  {1, 1, 3, 20, 4, 2, 8},
        {4, 4, 5, 40, 4, 2, 8},   {4, 2, 0, 40, 4, 2, 8},  {4, 2, 6, 40, 5, 1, 8},
        {4, 1, 4, 24, 2, 1, 64},  {4, 1, 4, 24, 2, 1, 80}, {4, 1, 4, 24, 2, 1, 128},
        {8, 2, -1, 60, 3, 3, 16},
    };
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        sti_hybrid_settings s = preset("still", odd[i].C);
        s.select = odd[i].select;
        s.cap = odd[i].cap;
        problem p = make(s, (sti_hybrid_shape){odd[i].H, odd[i].G, odd[i].D, odd[i].D},
                         odd[i].T, 100 + i);
        assert_forms_agree(&p);
        drop(&p);
    }
}

/* Logits of +-200 and more, keys and queries of norm 0, huge alphas: never NaN. */
static void test_extreme_numbers(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 80; seed++) {
        problem p = draw_problem(3000 + seed, seed >= 40);
        const size_t D = (size_t)p.shape.D, nq = outputs(&p);
        const size_t nk = (size_t)p.T * (size_t)p.shape.G * D;
        for (size_t i = 0; i < nq; i++) p.q[i] *= 15;
        for (size_t i = 0; i < nk; i++) p.k[i] *= 15;
        for (int h = 0; h < p.shape.H; h++) p.alpha[h] *= 2000;
        for (int t = 0; t < p.T; t += 3)
            memset(p.k + (size_t)t * (size_t)p.shape.G * D, 0, D * sizeof *p.k);
        for (int t = 1; t < p.T; t += 4)
            memset(p.q + (size_t)t * (size_t)p.shape.H * D, 0, D * sizeof *p.q);
        assert_forms_agree(&p);

        double *dq = calloc(nq, sizeof *dq), *dk = calloc(nk, sizeof *dk);
        sti_hybrid_parallel_args64 a = parallel_args(&p);
        double *dy = calloc(nq, sizeof *dy);
        for (size_t i = 0; i < nq; i++) dy[i] = p.v[i % nk];
        a.dy = dy;
        a.grad = (sti_hybrid_grad64){.q = dq, .k = dk};
        still_error err;
        assert_int_equal(sti_ref_hybrid_backward(&a, &err), STILL_OK);
        for (size_t i = 0; i < nq; i++) assert_true(isfinite(dq[i]));
        for (size_t i = 0; i < nk; i++) assert_true(isfinite(dk[i]));
        free(dq);
        free(dk);
        free(dy);
        drop(&p);
    }
}

/* Weights so far apart that one side, or both, come out as 0. */
static void test_vanishing_weights(void **state)
{
    (void)state;
    for (int scale = 0; scale < 2; scale++)
        for (double alpha = -1e4; alpha <= 1e4; alpha += 1e4) {
            sti_hybrid_settings s = preset("still", 2);
            s.la_scale = scale ? STI_SCALE_WINDOW : STI_SCALE_EXACT;
            s.select = s.cap = 0;
            problem p = make(s, (sti_hybrid_shape){1, 1, 2, 2}, 9, 1);
            free(p.map_q);
            free(p.map_k);
            p.map_q = p.map_k = NULL; /* identity */
            p.alpha[0] = alpha;
            for (int t = 0; t < p.T; t++) { /* opposite: phi(q).phi(k) is 0 too */
                p.q[2 * t] = 3000;
                p.k[2 * t] = -3000;
                p.q[2 * t + 1] = p.k[2 * t + 1] = 0;
            }
            assert_forms_agree(&p);
            drop(&p);
        }
}

/* Keys so long that softmax leaves one feature: the others have the floor, each time. */
static void test_floor(void **state)
{
    (void)state;
    problem p = make(preset("hedgehog", 4), (sti_hybrid_shape){2, 1, 8, 8}, 40, 6);
    assert_true(p.set.feature_floor > 0);
    for (size_t i = 0; i < 40 * 8; i++) p.k[i] *= 1000;
    feed(&p, 0, p.T);
    const double *z = p.st.lin_z;
    int at_floor = 0;
    for (int s = 0; s < p.S; s++)
        for (int i = 0; i < p.P; i++) {
            const double least = (double)p.st.folded[s] * p.set.feature_floor;
            assert_true(z[s * p.P + i] >= least * (1 - 1e-9));
            at_floor += z[s * p.P + i] < 2 * least;
        }
    assert_true(at_floor > 0 && p.st.folded[0] > 0);
    drop(&p);
}

/* Equal scores: the earlier token stays, in selection and in eviction. */
static void test_ties_keep_the_earlier(void **state)
{
    (void)state;
    sti_hybrid_settings s = preset("still", 4);
    s.score = STI_SCORE_KEYNORM;
    s.select = 2;
    s.cap = 3;
    problem p = make(s, (sti_hybrid_shape){2, 1, 4, 4}, 17, 1);
    for (int i = 0; i < p.T * 4; i++) p.k[i] = 1;
    assert_forms_agree(&p);
    /* Chunk 0 keeps 0, 1; chunk 1 offers 4, 5, and 5 is one too many; of chunk 2 none
     * is kept. Tokens 12.. are still in the window. */
    static const int32_t want[17] = {-1, -1, 2, 2,  -1, 3,  3,  3, 4,
                                     4,  4,  4, -1, -1, -1, -1, -1};
    assert_memory_equal(p.fold, want, sizeof want);
    drop(&p);
}

/* ---- Positions ----------------------------------------------------------- */

/* A cap beyond the sequence changes nothing. */
static void test_distant_cap(void **state)
{
    (void)state;
    sti_hybrid_settings set = preset("still", 4);
    problem p = make(set, (sti_hybrid_shape){4, 2, 6, 6}, 60, 21);
    rotate(&p);
    feed(&p, 0, p.T);
    set.position_cap = 60;
    problem capped = make(set, p.shape, p.T, 21);
    rotate(&capped);
    feed(&capped, 0, p.T);
    assert_memory_equal(p.y, capped.y, outputs(&p) * sizeof(double));
    drop(&p);
    drop(&capped);
}

/* At a cap of two chunks every salient key is far: the last query sees all of them at
 * that distance, and its window as it is. */
static void test_all_far(void **state)
{
    (void)state;
    enum { C = 4, T = 30, D = 6, L = 2 * C };
    sti_hybrid_settings set = preset("softmax", C);
    set.position_cap = L;
    problem p = make(set, (sti_hybrid_shape){1, 1, D, D}, T, 22);
    double *k_raw = malloc(T * D * sizeof *k_raw);
    memcpy(k_raw, p.k, T * D * sizeof *k_raw);
    rotate(&p);
    feed(&p, 0, 17);
    feed(&p, 17, T - 17);

    const sti_hybrid_in64 in = inputs(&p);
    const int last = T - 1, window = (last / C - 1) * C;
    double far[D], logit[T], want[D] = {0};
    memcpy(far, p.q_raw + last * D, sizeof far);
    sti_ref_rope(far, D, L, in.inv_freq, in.interleaved);
    for (int j = 0; j < T; j++)
        logit[j] = j < window ? sti_ref_logit(far, k_raw + j * D, D)
                              : sti_ref_logit(p.q + last * D, p.k + j * D, D);
    sti_ref_softmax(logit, T);
    for (int j = 0; j < T; j++) sti_ref_axpy(logit[j], p.v + j * D, want, D);
    assert_close(p.y + last * D, want, D, 1e-12);
    free(k_raw);
    drop(&p);
}

/* Features without positions are those of keys that were never rotated, whether they
 * were folded from the window or, far or near, from the list. */
static void test_features_without_positions(void **state)
{
    (void)state;
    for (int cap = 0; cap <= 24; cap += 12) {
        sti_hybrid_settings set = preset("still", 4);
        set.cap = 6;
        set.score = STI_SCORE_RANDOM; /* routes alike, whatever the keys are */
        problem raw = make(set, (sti_hybrid_shape){4, 2, 6, 6}, 60, 23);
        feed(&raw, 0, raw.T);
        set.position_cap = cap;
        set.feature_positions = STI_FEATURES_NONE;
        problem p = make(set, raw.shape, raw.T, 23);
        rotate(&p);
        feed(&p, 0, p.T);
        assert_close(p.st.lin_s, raw.st.lin_s, (size_t)(p.S * p.P * 6), 1e-12);
        assert_close(p.st.lin_z, raw.st.lin_z, (size_t)(p.S * p.P), 1e-12);
        drop(&raw);
        drop(&p);
    }
}

/* ---- A quantized salient cache -------------------------------------------- */

/* Keys and values as the cache would store them. */
static void round_tokens(problem *p)
{
    const int D = p->shape.D;
    float x[STI_HEAD_DIM_MAX];
    for (int i = 0; i < p->T * p->shape.G; i++)
        for (int values = 0; values < 2; values++) {
            double *at = (values ? p->v : p->k) + i * D;
            for (int e = 0; e < D; e++) x[e] = (float)at[e];
            if (values)
                sti_salient_round_value(p->set.value_bits, x, D, x);
            else
                sti_salient_round_key(p->set.key_bits, x, D, x);
            for (int e = 0; e < D; e++) at[e] = (double)x[e];
        }
}

/* Tokens that rounding leaves alone: a quantized cache then changes no output, and no
 * gradient, which passes the rounding as if it were not there. */
static void test_rounded_tokens_stay(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 40; seed++) {
        problem p = draw_problem(5000 + seed, true);
        round_tokens(&p);
        const size_t nq = outputs(&p), nk = (size_t)(p.T * p.shape.G * p.shape.D);
        const size_t map = (size_t)(p.S * p.shape.D * p.shape.F);
        double *grad[2];
        double *y[2];
        for (int plain = 0; plain < 2; plain++) {
            if (plain) p.set.key_bits = p.set.value_bits = 0;
            run_parallel(&p);
            y[plain] = malloc(nq * sizeof(double));
            memcpy(y[plain], p.y_parallel, nq * sizeof(double));
            double *g = grad[plain] = calloc(nq + 2 * nk + map, sizeof *g);
            sti_hybrid_parallel_args64 a = parallel_args(&p);
            a.dy = y[plain];
            a.grad = (sti_hybrid_grad64){
                .q = g, .k = g + nq, .v = g + nq + nk, .map_k = g + nq + 2 * nk};
            still_error err;
            assert_int_equal(sti_ref_hybrid_backward(&a, &err), STILL_OK);
        }
        assert_close(y[0], y[1], nq, 1e-14);
        assert_close(grad[0], grad[1], nq + 2 * nk + map, 1e-14);
        for (int i = 0; i < 2; i++) {
            free(y[i]);
            free(grad[i]);
        }
        drop(&p);
    }
}

/* The last query of a sequence, written out: exact tokens in its window, rounded ones
 * where they are salient or were, exact ones where they were folded at once. */
static void test_stored_tokens_are_seen(void **state)
{
    (void)state;
    enum { C = 4, T = 83, D = 40 };
    for (int v = 0; v < 4; v++) {
        sti_hybrid_settings set = preset("still", C);
        set.select = 3;
        set.cap = 7;
        set.key_bits = v / 2 ? 5 : 8;
        set.value_bits = v % 2 ? 3 : 4;
        set.score = STI_SCORE_RANDOM;
        set.gate = set.alpha = set.norm_preserved = false;
        problem p = make(set, (sti_hybrid_shape){1, 1, D, D}, T, 31 + (uint64_t)v);
        problem rounded = make(set, p.shape, T, 31 + (uint64_t)v);
        round_tokens(&rounded);
        feed(&p, 0, T);
        const double *q = p.q + (T - 1) * D;
        const sti_hybrid_in64 in = inputs(&p);
        const sti_ref_map map_q = sti_ref_map_q(&set, &p.shape, &in, 0),
                          map_k = sti_ref_map_k(&set, &p.shape, &in, 0);
        double num[D] = {0}, den = 0, phi_q[2 * D], phi_k[2 * D];
        int stored = 0, evicted = 0;
        sti_ref_map_forward(&map_q, q, phi_q);
        for (int j = 0; j < T; j++) {
            const bool window = j / C >= (T - 1) / C - 1;
            const bool joined = !window && (p.fold[j] < 0 || p.fold[j] > j / C + 2);
            const problem *from = joined ? &rounded : &p;
            const double *k = from->k + j * D;
            double w;
            if (window || p.fold[j] < 0) {
                w = exp(sti_ref_logit(q, k, D));
            } else {
                sti_ref_map_forward(&map_k, k, phi_k);
                w = sti_ref_dot(phi_q, phi_k, 2 * D);
            }
            stored += joined && p.fold[j] < 0;
            evicted += joined && p.fold[j] >= 0;
            den += w;
            sti_ref_axpy(w, from->v + j * D, num, D);
        }
        assert_int_equal(stored, 7);
        assert_true(evicted > 3);
        for (int e = 0; e < D; e++) num[e] /= den;
        assert_close(p.y + (T - 1) * D, num, D, 1e-12);
        drop(&p);
        drop(&rounded);
    }
}

/* A key that turns far is turned back from what was stored, and rounded again. */
static void test_far_keys_are_rounded(void **state)
{
    (void)state;
    enum { C = 4, T = 12, D = 32 };
    sti_hybrid_settings set = preset("softmax", C);
    set.position_cap = 2 * C;
    set.key_bits = 8;
    problem p = make(set, (sti_hybrid_shape){1, 1, D, D}, T, 41);
    rotate(&p);
    feed(&p, 0, T);
    assert_int_equal(p.st.sal_count[0], C);
    const sti_hybrid_in64 in = inputs(&p);
    for (int j = 0; j < C; j++) {
        float x[D], got[D];
        double turned[D];
        for (int e = 0; e < D; e++) x[e] = (float)p.k[j * D + e];
        sti_salient_round_key(8, x, D, x);
        for (int e = 0; e < D; e++) turned[e] = (double)x[e];
        sti_ref_rope(turned, D, -j, in.inv_freq, in.interleaved);
        for (int e = 0; e < D; e++) x[e] = (float)turned[e];
        sti_salient_round_key(8, x, D, x);
        sti_salient_unpack_key(8, sti_hybrid_salient_key(&set, &p.st, D, (size_t)j), D,
                               got);
        assert_int_equal(p.st.sal_far[j], 1);
        assert_memory_equal(got, x, sizeof x);
    }
    drop(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),
        cmocka_unit_test(test_partition),
        cmocka_unit_test(test_recurrent_is_parallel),
        cmocka_unit_test(test_any_cut_and_clear),
        cmocka_unit_test(test_all_salient_is_softmax),
        cmocka_unit_test(test_batch_is_separate_sequences),
        cmocka_unit_test(test_odd_sizes),
        cmocka_unit_test(test_extreme_numbers),
        cmocka_unit_test(test_vanishing_weights),
        cmocka_unit_test(test_floor),
        cmocka_unit_test(test_ties_keep_the_earlier),
        cmocka_unit_test(test_distant_cap),
        cmocka_unit_test(test_all_far),
        cmocka_unit_test(test_features_without_positions),
        cmocka_unit_test(test_rounded_tokens_stay),
        cmocka_unit_test(test_stored_tokens_are_seen),
        cmocka_unit_test(test_far_keys_are_rounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
