/* The pieces of the hybrid operator: gradients against differences, feature maps,
 * scores, settings and the size of a state. */
#include "../../../run.h"
#include "../../hybrid_problem.h"

/* ---- Gradients ----------------------------------------------------------- */

/* sum y.dy with the routing, and M, as they are in p. */
static double loss(problem *p, const double *dy)
{
    sti_hybrid_parallel_args64 a = parallel_args(p);
    still_error err;
    a.max_in = p->max;
    a.max_out = NULL;
    assert_int_equal(sti_ref_hybrid_parallel(&a, &err), STILL_OK);
    return sti_ref_dot(p->y_parallel, dy, (int)outputs(p));
}

static void test_gradients(void **state)
{
    (void)state;
    enum { FIELDS = 10, SAMPLES = 4 };
    for (uint64_t seed = 0; seed < 60; seed++) {
        problem p = any_problem(4000 + seed);
        uint64_t rng = seed;
        const size_t D = (size_t)p.shape.D, H = (size_t)p.shape.H, S = (size_t)p.S;
        const size_t nq = outputs(&p), nk = (size_t)p.T * (size_t)p.shape.G * D;
        const size_t map = D * (size_t)p.shape.F;
        double *x[FIELDS] = {p.q,      p.k,     p.v,     p.gate,   p.alpha,
                             p.window, p.map_q, p.map_k, p.bias_q, p.bias_k};
        const size_t n[FIELDS] = {nq, nk, nk, nq, H, H, H * map, S * map, H, S};
        const bool used[FIELDS] = {true,
                                   true,
                                   true,
                                   p.set.gate,
                                   p.set.alpha,
                                   p.set.window_factor,
                                   true,
                                   true,
                                   p.set.map == STI_MAP_RELU,
                                   p.set.map == STI_MAP_RELU};
        double *g[FIELDS], *dy = normals(&rng, nq, 1);
        for (int i = 0; i < FIELDS; i++) g[i] = calloc(n[i], sizeof(double));
        run_parallel(&p);
        sti_hybrid_parallel_args64 a = parallel_args(&p);
        a.max_in = p.max;
        a.dy = dy;
        a.grad = (sti_hybrid_grad64){g[0], g[1], g[2], g[3], g[4],
                                     g[5], g[6], g[7], g[8], g[9]};
        still_error err;
        assert_int_equal(sti_ref_hybrid_backward(&a, &err), STILL_OK);
        for (int i = 0; i < FIELDS; i++) {
            double size = 1e-3;
            for (size_t j = 0; j < n[i]; j++) size = fmax(size, fabs(g[i][j]));
            for (int k = 0; used[i] && k < SAMPLES; k++) {
                const size_t j = (size_t)below(&rng, (int)n[i]);
                const double at = x[i][j], h = 1e-5;
                x[i][j] = at + h;
                const double up = loss(&p, dy);
                x[i][j] = at - h;
                const double down = loss(&p, dy);
                x[i][j] = at;
                const double slope = (up - down) / (2 * h);
                if (!(fabs(slope - g[i][j]) <= 1e-6 * size))
                    fail_msg("problem %d field %d element %zu: %g, by differences %g",
                             (int)seed, i, j, g[i][j], slope);
            }
        }
        for (int i = 0; i < FIELDS; i++) free(g[i]);
        free(dy);
        drop(&p);
    }
}

/* ---- Maps ---------------------------------------------------------------- */

static void test_maps(void **state)
{
    (void)state;
    const double x[3] = {3, -4, 0}, half[9] = {0.5, 0, 0, 0, 0.5, 0, 0, 0, 0.5};
    double phi[6], other[6];
    sti_ref_map m = {.norm_preserved = true, .D = 3, .F = 3};
    sti_ref_map_forward(&m, x, phi); /* identity: [softmax(x), softmax(-x)] */
    const double sum = exp(3) + exp(-4) + 1;
    assert_true(fabs(phi[0] - exp(3) / sum) < 1e-15);
    assert_true(fabs(phi[1] - exp(-4) / sum) < 1e-15);
    assert_true(fabs(phi[0] + phi[1] + phi[2] - 1) < 1e-15);
    assert_true(fabs(phi[3] + phi[4] + phi[5] - 1) < 1e-15);
    m.W = half; /* the norm undoes the factor */
    sti_ref_map_forward(&m, x, other);
    assert_close(other, phi, 6, 1e-15);
    m.norm_preserved = false;
    sti_ref_map_forward(&m, x, other);
    assert_true(fabs(other[0] - phi[0]) > 0.01);
    m.floor = 0.2;
    sti_ref_map_forward(&m, x, other);
    for (int i = 0; i < 6; i++) assert_true(other[i] >= 0.2);

    m = (sti_ref_map){
        .kind = STI_MAP_RELU, .D = 3, .F = 2, .bias = 0.5, .floor = 1e-12};
    sti_ref_map_forward(&m, x, phi); /* the first two columns of the identity */
    assert_true(phi[0] == 3.5 && phi[1] == 1e-12);
}

/* ---- Scores and settings ------------------------------------------------- */

static void test_scores(void **state)
{
    (void)state;
    const sti_score *s3 = sti_score_at(STI_SCORE_S3);
    uint64_t rng = 9;
    for (int round = 0; round < 200; round++) {
        double logit[16];
        const int n = 1 + below(&rng, 16);
        const double scale = pow(10, uniform(&rng) * 3 - 1);
        for (int i = 0; i < n; i++) logit[i] = scale * normal(&rng);
        const double by_definition = s3->definition(logit, n, 1e-6);
        sti_ref_softmax(logit, n);
        const double closed =
            s3->arrive(&(sti_score_stats){.self = logit[n - 1], .eps = 1e-6});
        assert_true(fabs(by_definition - closed) <= 1e-5);
    }
    /* The first token gives itself everything: the highest score there is. */
    assert_true(fabs(s3->definition(&(double){7}, 1, 1e-6) - log(1e6 + 1)) < 1e-12);

    const sti_score *random = sti_score_at(STI_SCORE_RANDOM);
    double sum = 0;
    for (int i = 0; i < 1000; i++)
        sum += random->arrive(&(sti_score_stats){.seed = 1, .position = i});
    assert_true(fabs(sum / 1000 - 0.5) < 0.03);
    assert_true(random->arrive(&(sti_score_stats){.head = 1}) !=
                random->arrive(&(sti_score_stats){.layer = 1}));

    sti_score_kind kind;
    assert_true(sti_score_find("received", &kind) && kind == STI_SCORE_RECEIVED);
    assert_false(sti_score_find("nothing", &kind));
    assert_null(sti_score_at(STI_SCORE_COUNT));
}

static void test_bad_settings(void **state)
{
    (void)state;
    const sti_hybrid_shape good = {4, 2, 8, 8};
    still_error err;
    sti_hybrid_settings s = preset("still", 8);
    assert_int_equal(sti_hybrid_check(&s, &good, &err), STILL_OK);
    assert_int_equal(sti_hybrid_check(&s, &(sti_hybrid_shape){3, 2, 8, 8}, &err),
                     STILL_E_ARG);
    assert_int_equal(sti_hybrid_check(&s, &(sti_hybrid_shape){4, 2, 8, 9}, &err),
                     STILL_E_ARG);
    assert_int_equal(sti_hybrid_check(&s, &(sti_hybrid_shape){4, 2, 1024, 8}, &err),
                     STILL_E_ARG);
    s.select = 9;
    assert_int_equal(sti_hybrid_check(&s, &good, &err), STILL_E_ARG);
    assert_non_null(strstr(err.text, "select 9"));
    s = preset("still", 8);
    s.cap = -2;
    assert_int_equal(sti_hybrid_check(&s, &good, &err), STILL_E_ARG);
    s = preset("hedgehog", 8);
    s.select = 1;
    assert_int_equal(sti_hybrid_check(&s, &good, &err), STILL_E_ARG);
    assert_false(sti_hybrid_preset("liger", 8, &s));

    /* Without a cap the state is made for a length, and says so. */
    problem p = make(preset("softmax", 4), good, 12, 1);
    feed(&p, 0, 12);
    sti_hybrid_args64 a = {.set = &p.set,
                           .shape = p.shape,
                           .T = 1,
                           .in = inputs(&p),
                           .state = &p.st,
                           .y = p.y};
    assert_int_equal(sti_ref_hybrid_forward(&a, &err), STILL_E_LIMIT);
    assert_int_equal(p.st.pos, 12);
    drop(&p);
}

/* The bill of a state: known up front, the same for any length once there is a cap. */
static void test_state_size(void **state)
{
    (void)state;
    sti_hybrid_settings s = preset("still", 128);
    s.cap = 256;
    const sti_hybrid_shape shape = {9, 3, 64, 64};
    sti_hybrid_state st;
    sti_carve now = {0}, later = {0};
    sti_hybrid_state_carve(&st, &now, &s, &shape, 4096, 2, 4);
    sti_hybrid_state_carve(&st, &later, &s, &shape, 1 << 20, 2, 4);
    assert_int_equal(now.used, later.used);
    const size_t kv = 2u * 3 * (256 + 256) * 64 * 2,
                 scores = 3u * (256 + 256 + 256) * 4;
    const size_t linear = 3u * 128 * 65 * 4;
    assert_in_range(now.used, kv + scores + linear, kv + scores + linear + 1024);
}

RUN_TESTS(cmocka_unit_test(test_gradients), cmocka_unit_test(test_maps),
          cmocka_unit_test(test_scores), cmocka_unit_test(test_bad_settings),
          cmocka_unit_test(test_state_size))
