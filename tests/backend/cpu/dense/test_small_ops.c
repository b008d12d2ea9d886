/* test_small_ops.c - rmsnorm, rope, swiglu and logprob of the cpu backend, every
 * instruction set here: against double loops, row by row against the batch, and in
 * place. */
#include "../../../run.h"
#include "../cpu_device.h"

/* |y - want| <= rel |want| + abs, and a NaN never. */
static void assert_near(float y, double want, double rel, double abs, const char *isa,
                        const char *what, size_t i)
{
    if (!(fabs((double)y - want) <= rel * fabs(want) + abs))
        fail_msg("%s, %s, element %zu: %.9g, expected %.9g", isa, what, i, (double)y,
                 want);
}

static void rmsnorm_is_the_definition(void **state)
{
    (void)state;
    static const int size[][2] = {{1, 576}, {64, 576}, {3, 1},   {5, 7},
                                  {2, 33},  {1, 8192}, {7, 100}, {40, 1023}};
    for (int i = 0; i < N_ISA; i++) {
        sti_dev *dev = new_dev(isa_name[i], 2);
        if (!dev) continue;
        for (size_t k = 0; k < sizeof size / sizeof *size; k++) {
            int M = size[k][0], K = size[k][1];
            size_t n = (size_t)(M * K);
            float *x = floats(n, 30, 1), *g = floats((size_t)K, 2, 2);
            float *y = floats(n, 0, 0), *z = copy(x, n);
            memset(x, 0, (size_t)K * sizeof *x); /* a row of zeros stays one */
            memset(z, 0, (size_t)K * sizeof *x);
            sti_rmsnorm_args a = {x, g, y, M, K, 1e-5f, false};
            assert_int_equal(cpu()->rmsnorm(dev, &a, NULL), STILL_OK);
            for (int m = 0; m < M; m++) {
                double ss = 0;
                for (int j = 0; j < K; j++) ss += (double)x[m * K + j] * x[m * K + j];
                double r = 1 / sqrt(ss / K + 1e-5f);
                for (int j = 0; j < K; j++)
                    assert_near(y[m * K + j], x[m * K + j] * r * g[j], 1e-6, 0,
                                isa_name[i], "rmsnorm", (size_t)(m * K + j));
                /* The row alone, in place. */
                sti_rmsnorm_args row = {z + m * K, g, z + m * K, 1, K, 1e-5f, false};
                assert_int_equal(cpu()->rmsnorm(dev, &row, NULL), STILL_OK);
            }
            assert_memory_equal(y, z, n * sizeof *y);
            a.add = true; /* twice the same */
            assert_int_equal(cpu()->rmsnorm(dev, &a, NULL), STILL_OK);
            for (size_t j = 0; j < n; j++)
                assert_near(y[j], 2 * (double)z[j], 1e-6, 0, isa_name[i], "added", j);
            free(x);
            free(g);
            free(y);
            free(z);
        }
        free_dev(dev);
    }
}

static void swiglu_is_the_definition(void **state)
{
    (void)state;
    static const int size[][2] = {{1, 1536}, {64, 1536}, {1, 1}, {3, 7}, {9, 1000}};
    for (int i = 0; i < N_ISA; i++) {
        sti_dev *dev = new_dev(isa_name[i], 2);
        if (!dev) continue;
        for (size_t k = 0; k < sizeof size / sizeof *size; k++) {
            int M = size[k][0], K = size[k][1];
            size_t n = (size_t)(M * K);
            float *x = floats(n, k % 2 ? 100 : 8, 3), *u = floats(n, 2, 4);
            float *y = floats(n, 0, 0), *z = copy(x, n);
            sti_swiglu_args a = {x, u, y, M, K, STI_SILU};
            assert_int_equal(cpu()->swiglu(dev, &a, NULL), STILL_OK);
            for (size_t j = 0; j < n; j++) {
                double g = x[j];
                assert_near(y[j], g / (1 + exp(-g)) * u[j], 5e-7, 1e-35, isa_name[i],
                            "swiglu", j);
            }
            for (int m = 0; m < M; m++) {
                sti_swiglu_args row = {z + m * K, u + m * K, z + m * K, 1, K, STI_SILU};
                assert_int_equal(cpu()->swiglu(dev, &row, NULL), STILL_OK);
            }
            assert_memory_equal(y, z, n * sizeof *y);
            free(x);
            free(u);
            free(y);
            free(z);
        }
        /* The ends of the exponential. */
        float x[] = {-1e30f, -88.8f, -104, 88.8f, 1e30f, NAN, 0, -0.0f};
        float u[] = {1, 1, 1, 1, 1, 1, 1, 1}, y[8];
        sti_swiglu_args a = {x, u, y, 1, 8, STI_SILU};
        assert_int_equal(cpu()->swiglu(dev, &a, NULL), STILL_OK);
        assert_true(y[0] == 0 && y[2] == 0 && y[6] == 0 && y[7] == 0);
        assert_true(fabs((double)y[1]) < 1e-35);
        assert_true(y[3] == 88.8f && y[4] == 1e30f && isnan(y[5]));
        a.act = STI_GELU_TANH;
        assert_int_equal(cpu()->swiglu(dev, &a, NULL), STILL_OK);
        assert_true(y[0] == 0 && y[1] == 0 && y[2] == 0 && y[6] == 0 && y[7] == 0);
        assert_true(y[3] == 88.8f && y[4] == 1e30f && isnan(y[5]));
        free_dev(dev);
    }
}

/* GELU in the form with tanh, where tanh is not yet -1 in double. */
static void geglu_is_the_definition(void **state)
{
    (void)state;
    enum { N = 1003 };
    for (int i = 0; i < N_ISA; i++) {
        sti_dev *dev = new_dev(isa_name[i], 2);
        if (!dev) continue;
        float *x = floats(N, 6, 3), *u = floats(N, 2, 4), *y = floats(N, 0, 0);
        sti_swiglu_args a = {x, u, y, 1, N, STI_GELU_TANH};
        assert_int_equal(cpu()->swiglu(dev, &a, NULL), STILL_OK);
        for (size_t j = 0; j < N; j++) {
            const double g = (double)x[j],
                         t = tanh(sqrt(2 / M_PI) * (g + 0.044715 * g * g * g));
            assert_near(y[j], g / 2 * (1 + t) * (double)u[j], 3e-6, 1e-7, isa_name[i],
                        "geglu", j);
        }
        free(x);
        free(u);
        free(y);
        free_dev(dev);
    }
}

static void columns_are_scaled(void **state)
{
    (void)state;
    enum { M = 5, K = 33 };
    sti_dev *dev = new_dev(NULL, 1);
    float *x = floats(M * K, 3, 1), *g = floats(K, 2, 2), *y = copy(x, M * K);
    sti_scale_columns_args a = {y, g, M, K};
    assert_int_equal(cpu()->scale_columns(dev, &a, NULL), STILL_OK);
    for (int i = 0; i < M * K; i++) assert_true(y[i] == x[i] * g[i % K]);
    free(x);
    free(g);
    free(y);
    free_dev(dev);
}

static void rope_case(sti_dev *dev, const char *isa, int M, int heads, int D,
                      bool inter)
{
    size_t n = (size_t)(M * heads * D);
    float *x = floats(n, 3, 5), *freq = floats((size_t)D / 2, 0, 0);
    float *y = copy(x, n), *z = copy(x, n);
    int32_t *pos = sti_alloc((size_t)M, sizeof *pos);
    assert_non_null(pos);
    for (int i = 0; i < D / 2; i++) freq[i] = (float)pow(1e4, -2.0 * i / D);
    for (int m = 0; m < M; m++)
        pos[m] = m % 3 == 0 ? m : m % 3 == 1 ? 1000003 - 7919 * m : 4096 * m + 11;
    sti_rope_args a = {.x = y,
                       .pos = pos,
                       .inv_freq = freq,
                       .M = M,
                       .heads = heads,
                       .D = D,
                       .interleaved = inter};
    assert_int_equal(cpu()->rope(dev, &a, NULL), STILL_OK);
    for (int m = 0; m < M; m++) {
        for (int h = 0; h < heads; h++)
            for (int i = 0; i < D / 2; i++) {
                double t = (double)pos[m] * freq[i], c = cos(t), s = sin(t);
                int at = (m * heads + h) * D;
                int p = at + (inter ? 2 * i : i), q = inter ? p + 1 : p + D / 2;
                double u = x[p], v = x[q];
                /* Rounding of the products, not of the result, which may cancel. */
                assert_near(y[p], u * c - v * s, 0, 6e-7, isa, "rope", (size_t)p);
                assert_near(y[q], v * c + u * s, 0, 6e-7, isa, "rope", (size_t)q);
            }
        sti_rope_args row = {.x = z + m * heads * D,
                             .pos = pos + m,
                             .inv_freq = freq,
                             .M = 1,
                             .heads = heads,
                             .D = D,
                             .interleaved = inter};
        assert_int_equal(cpu()->rope(dev, &row, NULL), STILL_OK);
    }
    assert_memory_equal(y, z, n * sizeof *y);
    free(x);
    free(freq);
    free(y);
    free(z);
    free(pos);
}

static void rope_is_the_definition(void **state)
{
    (void)state;
    static const int size[][3] = {{1, 9, 64}, {100, 3, 64}, {5, 2, 80},  {3, 1, 2},
                                  {4, 2, 34}, {2, 2, 256},  {90, 2, 128}};
    for (int i = 0; i < N_ISA; i++) {
        sti_dev *dev = new_dev(isa_name[i], 2);
        if (!dev) continue;
        for (size_t k = 0; k < sizeof size / sizeof *size; k++)
            for (int inter = 0; inter < 2; inter++)
                rope_case(dev, isa_name[i], size[k][0], size[k][1], size[k][2],
                          inter == 1);
        float x[3] = {1, 2, 3}, freq = 1;
        int32_t pos = 1;
        still_error err;
        sti_rope_args odd = {.x = x,
                             .pos = &pos,
                             .inv_freq = &freq,
                             .M = 1,
                             .heads = 1,
                             .D = 3,
                             .interleaved = false};
        assert_int_equal(cpu()->rope(dev, &odd, &err), STILL_E_ARG);
        free_dev(dev);
    }
}

static void logprob_is_the_definition(void **state)
{
    (void)state;
    static const int size[][2] = {{1, 49152}, {33, 1000}, {2, 1}, {3, 5}, {1, 130}};
    for (int i = 0; i < N_ISA; i++) {
        sti_dev *dev = new_dev(isa_name[i], 2);
        if (!dev) continue;
        for (size_t k = 0; k < sizeof size / sizeof *size; k++) {
            int M = size[k][0], V = size[k][1];
            float *x = floats((size_t)(M * V), k == 1 ? 300 : 20, 6);
            float *y = floats((size_t)M, 0, 0);
            int32_t *target = sti_alloc((size_t)M, sizeof *target);
            int32_t *top = sti_alloc((size_t)M, sizeof *top);
            assert_true(target && top);
            for (int m = 0; m < M; m++) target[m] = (V - 1) * m / M;
            /* Two equal maxima: the first is the top. */
            if (V > 4) x[V - 1] = x[V / 2] = 400;
            sti_logprob_args a = {x, target, M, V, y, top};
            assert_int_equal(cpu()->logprob(dev, &a, NULL), STILL_OK);
            for (int m = 0; m < M; m++) {
                const float *l = x + (size_t)m * (size_t)V;
                int best = 0;
                double sum = 0;
                for (int j = 0; j < V; j++) best = l[j] > l[best] ? j : best;
                for (int j = 0; j < V; j++) sum += exp((double)l[j] - l[best]);
                double want = (double)l[target[m]] - l[best] - log(sum);
                assert_int_equal(top[m], best);
                assert_near(y[m], want, 1e-7, 1e-6, isa_name[i], "logprob", (size_t)m);
            }
            free(x);
            free(y);
            free(target);
            free(top);
        }
        free_dev(dev);
    }
}

RUN_TESTS(cmocka_unit_test(rmsnorm_is_the_definition),
          cmocka_unit_test(swiglu_is_the_definition),
          cmocka_unit_test(geglu_is_the_definition),
          cmocka_unit_test(columns_are_scaled),
          cmocka_unit_test(rope_is_the_definition),
          cmocka_unit_test(logprob_is_the_definition))
