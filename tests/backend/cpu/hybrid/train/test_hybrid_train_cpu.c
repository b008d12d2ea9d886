/* test_hybrid_train_cpu.c - the hybrid operator over whole sequences on the cpu
 * backend, every instruction set here: routing, outputs and gradients against the
 * reference in double over many settings, and the same bits from any number of threads.
 */
#include "../../../hybrid_batch.h"
#include "../../cpu_device.h"

/* Routes (the result stays in fold_f), then runs both ways with the routing `fold`. */
static void run_cpu(sti_dev *dev, batch *x, int32_t *fold)
{
    sti_hybrid_parallel_args a = args32(x);
    still_error err;
    for (int f = 0; f < FIELDS; f++) memset(x->grad_f[f], 0, x->n[f] * sizeof(float));
    assert_int_equal(cpu()->hybrid_route(dev, &a, &err), STILL_OK);
    a.fold_chunk = fold;
    assert_int_equal(cpu()->hybrid_parallel(dev, &a, &err), STILL_OK);
    assert_int_equal(cpu()->hybrid_backward(dev, &a, &err), STILL_OK);
}

static void expect(const char *what, const batch *x, const float *got,
                   const double *want, size_t n, double size, double limit)
{
    expect_error(what, x, relative_error(got, want, n, size), limit);
}

static void compare(batch *x, double limit)
{
    const size_t rows = (size_t)x->B * (size_t)x->T;
    if (x->set.has_window) {
        expect("score", x, x->score_f, x->score, x->routes, 0, limit);
        expect_routes(x, x->fold_f);
    }
    for (size_t i = 0; i < x->routes; i++)
        assert_int_equal(x->salient[i], x->salient_f[i]);
    expect("y", x, x->y_f, x->y, x->n[Q], 0, limit);
    if (x->set.has_window)
        expect("max", x, x->max_f, x->max, rows * (size_t)x->shape.H, 0, limit);
    for (int f = 0; f < FIELDS; f++) {
        if (!is_read(&x->set, f)) continue;
        /* Where there is but one kind of term, or one feature, its weight cancels, and
         * the gradient is what rounding leaves of a sum of larger numbers. */
        const double size = f == ALPHA || f == WINDOW ? 1 : 0.02;
        expect(field_name[f], x, x->grad_f[f], x->grad[f], x->n[f], size, limit);
    }
}

static void check(const char *isa, batch *x, double limit)
{
    sti_dev *dev = new_dev(isa, 2);
    if (!dev) return;
    run_ref(x);
    run_cpu(dev, x, x->fold);
    compare(x, limit);
    free_dev(dev);
}

/* Settings of every kind on small shapes. */
static void test_any_settings(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 400; seed++) {
        problem p = draw_problem(seed, seed > 240); /* the last quantized */
        batch x = make_batch(p.set, p.shape, 1 + (int)(seed % 2), p.T, 1, seed);
        if (seed <= 240 || p.set.select > 0)
            check(isa_name[seed % N_ISA], &x, seed > 240 ? 5e-5 : 2e-5); /* long sums */
        drop_batch(&x);
        drop(&p);
    }
}

static void test_real_shapes(void **state)
{
    (void)state;
    for (int i = 0; i < N_REAL_SHAPES; i++)
        for (int isa = 0; isa < N_ISA; isa++) {
            const shape_case *c = &real_shapes[i];
            batch x =
                make_batch(settings_of(c), shape_of(c), 1, c->T, 1.5, (uint64_t)i + 1);
            check(isa_name[isa], &x, 2e-5);
            drop_batch(&x);
        }
}

static void test_edges(void **state)
{
    (void)state;
    for (int i = 0; i < N_EDGES; i++) {
        batch x = edge_batch(i);
        check(NULL, &x, 2e-5);
        drop_batch(&x);
    }
}

static void test_zero_vectors(void **state)
{
    (void)state;
    batch x = batch_of_zeros();
    check(NULL, &x, 2e-5);
    drop_batch(&x);
}

/* Keys that repeat have norms that repeat: of equal scores the earlier token stays, as in
 * sessions. */
static void test_ties(void **state)
{
    (void)state;
    sti_hybrid_settings set = preset("still", 8);
    set.score = STI_SCORE_KEYNORM;
    set.select = 3;
    set.cap = 7;
    for (int i = 0; i < N_ISA; i++)
        for (int period = 1; period <= 3; period++) {
            batch x = make_batch(set, (sti_hybrid_shape){4, 2, 16, 16}, 1, 70, 1, 5);
            for (int t = period; t < x.T; t++) {
                const int from = t % period * 32;
                memcpy(x.in[K] + t * 32, x.in[K] + from, 32 * sizeof *x.in[K]);
                memcpy(x.in_f[K] + t * 32, x.in_f[K] + from, 32 * sizeof *x.in_f[K]);
            }
            sti_dev *dev = new_dev(isa_name[i], 2);
            if (dev) {
                run_ref(&x);
                run_cpu(dev, &x, x.fold);
                assert_memory_equal(x.fold_f, x.fold, x.routes * sizeof *x.fold);
                free_dev(dev);
            }
            drop_batch(&x);
        }
}

/* M given from outside is used as it is. */
static void test_max_in(void **state)
{
    (void)state;
    sti_hybrid_settings s = preset("lolcats", 8);
    batch x = make_batch(s, small_shape, 1, 50, 1, 9);
    sti_dev *dev = new_dev(NULL, 1);
    run_ref(&x);
    const size_t n = 50 * 2;
    for (size_t i = 0; i < n; i++) {
        x.max[i] = (double)(float)(x.max[i] + 0.25);
        x.max_f[i] = (float)x.max[i];
    }
    const float *max_f = x.max_f;
    sti_hybrid_parallel_args64 a = args64(&x);
    sti_hybrid_parallel_args b = args32(&x);
    still_error err;
    a.max_in = x.max;
    b.max_in = max_f;
    a.max_out = NULL;
    b.max_out = NULL;
    b.fold_chunk = x.fold;
    assert_int_equal(sti_ref_hybrid_parallel(&a, &err), STILL_OK);
    assert_int_equal(cpu()->hybrid_parallel(dev, &b, &err), STILL_OK);
    expect("y", &x, x.y_f, x.y, x.n[Q], 0, 1e-6);
    free_dev(dev);
    drop_batch(&x);
}

/* One, two and five threads, and a batch cut in two: the same bits. */
static void test_threads(void **state)
{
    (void)state;
    sti_hybrid_settings s = preset("still", 32);
    const sti_hybrid_shape shape = {6, 2, 32, 32};
    batch x = make_batch(s, shape, 2, 210, 1, 3),
          y = make_batch(s, shape, 2, 210, 1, 3);
    sti_dev *one = new_dev(NULL, 1);
    run_cpu(one, &x, x.fold_f);
    for (int threads = 2; threads <= 5; threads += 3) {
        sti_dev *many = new_dev(NULL, threads);
        run_cpu(many, &y, y.fold_f);
        assert_memory_equal(x.fold_f, y.fold_f, 2 * 210 * 2 * sizeof(int32_t));
        assert_memory_equal(x.y_f, y.y_f, x.n[Q] * sizeof(float));
        for (int f = 0; f < FIELDS; f++)
            assert_memory_equal(x.grad_f[f], y.grad_f[f], x.n[f] * sizeof(float));
        free_dev(many);
    }
    /* The second sequence alone. */
    sti_hybrid_parallel_args a = args32(&y);
    const size_t half = y.n[Q] / 2, half_k = y.n[K] / 2;
    still_error err;
    a.B = 1;
    a.in.q += half;
    a.in.k += half_k;
    a.in.v += half_k;
    a.in.gate_logit += half;
    a.trace = (sti_hybrid_trace){0};
    memset(y.y_f, 0, y.n[Q] * sizeof(float));
    assert_int_equal(cpu()->hybrid_route(one, &a, &err), STILL_OK);
    assert_int_equal(cpu()->hybrid_parallel(one, &a, &err), STILL_OK);
    assert_memory_equal(y.y_f, x.y_f + half, half * sizeof(float));
    free_dev(one);
    drop_batch(&x);
    drop_batch(&y);
}

/* Gradients not asked for are not needed by the others: each alone is the same bits. */
static void test_wanted_alone(void **state)
{
    (void)state;
    static const char *const method[] = {"still", "lolcats", "t2r"};
    sti_dev *dev = new_dev(NULL, 1);
    for (size_t m = 0; m < sizeof method / sizeof *method; m++) {
        batch x = make_batch(preset(method[m], 16), (sti_hybrid_shape){4, 2, 16, 16}, 1,
                             100, 1, 4);
        run_cpu(dev, &x, x.fold_f);
        for (int f = 0; f < FIELDS; f++) {
            float *alone = zeros(x.n[f], sizeof *alone), *none[FIELDS] = {0};
            none[f] = alone;
            sti_hybrid_parallel_args a = args32(&x);
            a.grad = FIELDS_OF(sti_hybrid_grad, none);
            still_error err;
            assert_int_equal(cpu()->hybrid_backward(dev, &a, &err), STILL_OK);
            assert_memory_equal(alone, x.grad_f[f], x.n[f] * sizeof(float));
            free(alone);
        }
        drop_batch(&x);
    }
    free_dev(dev);
}

/* A session that is fed the whole sequence, and the parallel form with the routing the
 * session chose: the same outputs, token by token. */
static void test_session_is_parallel(void **state)
{
    (void)state;
    static const char *const method[] = {"still", "lolcats", "hedgehog",
                                         "t2r",   "swa",     "softmax"};
    for (size_t m = 0; m < sizeof method / sizeof *method; m++) {
        const sti_hybrid_shape shape = {4, 2, 32, 32};
        batch x = make_batch(preset(method[m], 16), shape, 1, 150, 1, m + 1);
        sti_dev *dev = dev_of(
            cpu(),
            (sti_dev_params){
                .threads = 2, .max_k = 64, .heads = 4, .kv_heads = 2, .head_dim = 32});
        still_error err;
        sti_hybrid_state st;
        sti_block block;
        sti_carve c = {0};
        sti_hybrid_state_carve(&st, &c, &x.set, &shape, x.T, sizeof(float),
                               sizeof(float));
        assert_true(sti_block_new(&block, c.used));
        c = (sti_carve){.base = block.p};
        sti_hybrid_state_carve(&st, &c, &x.set, &shape, x.T, sizeof(float),
                               sizeof(float));
        for (int i = 0; i < x.T * x.S; i++) x.fold_f[i] = -1;
        const sti_hybrid_args session = {.set = &x.set,
                                         .shape = shape,
                                         .T = x.T,
                                         .in = FIELDS_OF(sti_hybrid_in, x.in_f),
                                         .state = &st,
                                         .y = x.y_f,
                                         .trace = {.fold_chunk = x.fold_f}};
        assert_int_equal(cpu()->hybrid(dev, &session, 1, &err), STILL_OK);
        for (size_t i = 0; i < x.n[Q]; i++) x.y[i] = (double)x.y_f[i];
        const sti_hybrid_parallel_args a = args32(&x);
        assert_int_equal(cpu()->hybrid_parallel(dev, &a, &err), STILL_OK);
        expect("y", &x, x.y_f, x.y, x.n[Q], 0, 5e-6);
        free_dev(dev);
        sti_block_free(&block);
        drop_batch(&x);
    }
}

static void test_bad_arguments(void **state)
{
    (void)state;
    sti_dev *dev = new_dev(NULL, 1);
    batch x = make_batch(preset("still", 4), small_shape, 1, 9, 1, 5);
    still_error err;
    sti_hybrid_parallel_args a = args32(&x);
    a.shape.G = 3;
    assert_int_equal(cpu()->hybrid_route(dev, &a, &err), STILL_E_ARG);
    assert_int_equal(cpu()->hybrid_parallel(dev, &a, &err), STILL_E_ARG);
    assert_int_equal(cpu()->hybrid_backward(dev, &a, &err), STILL_E_ARG);
    drop_batch(&x);
    free_dev(dev);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_settings),
        cmocka_unit_test(test_real_shapes),
        cmocka_unit_test(test_edges),
        cmocka_unit_test(test_zero_vectors),
        cmocka_unit_test(test_ties),
        cmocka_unit_test(test_max_in),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_wanted_alone),
        cmocka_unit_test(test_session_is_parallel),
        cmocka_unit_test(test_bad_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
