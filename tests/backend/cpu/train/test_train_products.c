/* Matrix products of training: dx = dy W for every weight type, dw += dy^T x. The
 * reference against the definition; the cpu backend against the reference, on every
 * instruction set here and odd sizes; and bit for bit against itself with other threads
 * and other rows around. */
#include "../../../run.h"
#include "train_device.h"

#include "backend/cpu/cpu.h"

#include <stdio.h>

#include "../../matrix.h"

#include "../../../pages.h"

/* ---- Weights ------------------------------------------------------------- */

static const sti_dtype TYPES[] = {STI_F32,  STI_F16,    STI_BF16,   STI_Q4_0,
                                  STI_Q4_1, STI_Q5_0,   STI_Q5_1,   STI_Q8_0,
                                  STI_Q2_K, STI_Q3_K,   STI_Q4_K,   STI_Q5_K,
                                  STI_Q6_K, STI_IQ4_NL, STI_IQ4_XS, STI_MXFP4};
enum { N_TYPES = sizeof TYPES / sizeof *TYPES };

/* ---- matmul_back --------------------------------------------------------- */

typedef struct back_case {
    int M, n;
    int64_t K, N[STI_MATMUL_MAX];
    sti_dtype type[STI_MATMUL_MAX];
    bool accumulate;
    source s[STI_MATMUL_MAX];
    float *dy[STI_MATMUL_MAX];
    float *dx, *size; /* as it was before; largest error per unit of rounding */
} back_case;

static void fill_case(back_case *c)
{
    for (int i = 0; i < c->n; i++) {
        c->s[i] = make_source(c->type[i], c->N[i], c->K, (uint32_t)(7 + i));
        c->dy[i] = floats((size_t)(c->M * c->N[i]), 1, (uint32_t)(20 + i));
    }
    const size_t out = (size_t)(c->M * c->K);
    c->dx = floats(out, 5, 30);
    c->size = floats(out, 0, 0);
    for (int m = 0; m < c->M; m++)
        for (int64_t k = 0; k < c->K; k++) {
            double sum = fabs(c->dx[m * c->K + k]);
            for (int i = 0; i < c->n; i++)
                for (int64_t n = 0; n < c->N[i]; n++)
                    sum +=
                        fabsf(c->dy[i][m * c->N[i] + n] * c->s[i].value[n * c->K + k]);
            c->size[m * c->K + k] = (float)sum;
        }
}

static void free_case(back_case *c)
{
    for (int i = 0; i < c->n; i++) {
        free_source(&c->s[i]);
        free(c->dy[i]);
    }
    free(c->dx);
    free(c->size);
}

/* dx of rows [m0, m0 + M); the caller frees it. */
static float *back(const sti_backend *b, sti_dev *dev, const back_case *c, int m0,
                   int M)
{
    sti_weight w[STI_MATMUL_MAX];
    float *dx = copy(c->dx + m0 * c->K, (size_t)(M * c->K));
    sti_matmul_back_args a = {.M = M, .n = c->n, .dx = dx, .accumulate = c->accumulate};
    for (int i = 0; i < c->n; i++) {
        assert_int_equal(b->weight_new(dev, &c->s[i].t, &w[i], NULL), STILL_OK);
        a.w[i] = &w[i];
        a.dy[i] = c->dy[i] + m0 * c->N[i];
    }
    assert_int_equal(b->matmul_back(dev, &a, NULL), STILL_OK);
    for (int i = 0; i < c->n; i++) b->weight_free(dev, &w[i]);
    return dx;
}

/* The reference against the definition, cpu against the reference, threads and rows. */
static void check_back(back_case c)
{
    fill_case(&c);
    const size_t out = (size_t)(c.M * c.K);
    sti_dev *dev = any_dev(ref(), NULL, 2);
    float *want = back(ref(), dev, &c, 0, c.M);
    ref()->dev_free(dev);
    for (int64_t k = 0; k < c.K; k += 1 + c.K / 7) { /* of the last row */
        const int64_t m = c.M - 1;
        double sum = c.accumulate ? c.dx[m * c.K + k] : 0;
        for (int i = 0; i < c.n; i++)
            for (int64_t n = 0; n < c.N[i]; n++)
                sum += (double)c.dy[i][m * c.N[i] + n] * c.s[i].value[n * c.K + k];
        assert_near(want[m * c.K + k], sum, 1e-6, 1e-12, "ref", (size_t)k);
    }
    for (int isa = 0; isa < N_ISA; isa++) {
        float *first = NULL;
        for (int threads = 1; threads <= THREADS_MAX; threads++) {
            dev = any_dev(cpu(), isa_name[isa], threads);
            if (!dev) break;
            sti_pool_limit(dev->pool, 3); /* as if cores were lost */
            float *got = back(cpu(), dev, &c, 0, c.M);
            if (!first) {
                first = got;
                for (size_t i = 0; i < out; i++)
                    assert_near(got[i], want[i], 0, 1.5e-6 * c.size[i], isa_name[isa],
                                i);
                const int m = c.M / 2;
                float *row = back(cpu(), dev, &c, m, 1);
                assert_memory_equal(row, got + m * c.K, (size_t)c.K * sizeof *row);
                free(row);
            } else {
                assert_memory_equal(got, first, out * sizeof *got);
                free(got);
            }
            free_dev(dev);
        }
        free(first);
    }
    free(want);
    free_case(&c);
}

static void matmul_back_of_every_type(void **state)
{
    (void)state;
    for (int t = 0; t < N_TYPES; t++) {
        const int block = sti_dtype_find((int)TYPES[t])->block;
        const int64_t K = block == 256 ? 768 : block == 32 ? 224 : 207;
        check_back(
            (back_case){.M = 13, .n = 1, .K = K, .N = {299}, .type = {TYPES[t]}});
        check_back(
            (back_case){.M = 1, .n = 1, .K = block, .N = {1}, .type = {TYPES[t]}});
    }
}

static void matmul_back_of_odd_sizes(void **state)
{
    (void)state;
    static const struct {
        int M;
        int64_t N, K;
    } size[] = {{1, 1, 1},     {2, 3, 5},     {7, 257, 16},  {8, 256, 48}, {9, 33, 49},
                {200, 67, 97}, {100, 17, 33}, {6, 40, 1213}, {17, 9, 577}};
    for (size_t i = 0; i < sizeof size / sizeof *size; i++)
        check_back((back_case){.M = size[i].M,
                               .n = 1,
                               .K = size[i].K,
                               .N = {size[i].N},
                               .type = {STI_F32},
                               .accumulate = i % 2});
    check_back((back_case){.M = 11, .n = 1, .K = 1248, .N = {50}, .type = {STI_Q4_1}});
    check_back((back_case){.M = 5, .n = 1, .K = 1792, .N = {30}, .type = {STI_Q6_K}});
}

static void matmul_back_adds_up_matrices(void **state)
{
    (void)state;
    check_back((back_case){.M = 19,
                           .n = 4,
                           .K = 256,
                           .N = {48, 17, 5, 261},
                           .type = {STI_Q8_0, STI_Q4_K, STI_F16, STI_Q4_0},
                           .accumulate = true});
}

/* ---- matmul_grad --------------------------------------------------------- */

static void matmul_grad_is_the_definition(void **state)
{
    (void)state;
    static const int size[][3] = {{1, 1, 1},     {3, 2, 5},     {200, 17, 49},
                                  {700, 9, 33},  {256, 8, 48},  {257, 100, 97},
                                  {30, 5, 1300}, {64, 576, 16}, {13, 16, 576}};
    for (size_t i = 0; i < sizeof size / sizeof *size; i++) {
        const int M = size[i][0], N = size[i][1], K = size[i][2];
        const size_t out = (size_t)(N * K);
        float *dy = floats((size_t)(M * N), 1, 1), *x = floats((size_t)(M * K), 1, 2);
        float *dw = floats(out, 1, 3), *want = copy(dw, out);
        sti_matmul_grad_args a = {dy, x, want, M, N, K, 0.3f};
        sti_dev *dev = any_dev(ref(), NULL, 2);
        assert_int_equal(ref()->matmul_grad(dev, &a, 1, NULL), STILL_OK);
        ref()->dev_free(dev);
        double sum = 0; /* the last element by hand */
        for (int m = 0; m < M; m++) sum += (double)dy[m * N + N - 1] * x[m * K + K - 1];
        assert_near(want[out - 1], dw[out - 1] + (double)0.3f * sum, 1e-6, 1e-9, "ref",
                    out - 1);
        for (int isa = 0; isa < N_ISA; isa++) {
            float *first = NULL;
            for (int threads = 1; threads <= THREADS_MAX; threads++) {
                dev = any_dev(cpu(), isa_name[isa], threads);
                if (!dev) break;
                a.dw = copy(dw, out);
                assert_int_equal(cpu()->matmul_grad(dev, &a, 1, NULL), STILL_OK);
                if (first) {
                    assert_memory_equal(a.dw, first, out * sizeof *first);
                    free(a.dw);
                } else {
                    first = a.dw;
                    for (size_t e = 0; e < out; e++)
                        assert_near(first[e], want[e], 3e-7, 3e-8 * M + 1e-7,
                                    isa_name[isa], e);
                }
                free_dev(dev);
            }
            free(first);
        }
        free(dy);
        free(x);
        free(dw);
        free(want);
    }
}

/* ---- Errors, memory ------------------------------------------------------ */

static void products_refuse_and_stay_small(void **state)
{
    (void)state;
    sti_dev *dev = any_dev(cpu(), NULL, 2);
    source s = make_source(STI_F32, 40, 64, 1), other = make_source(STI_F32, 40, 32, 2);
    sti_weight w, v;
    still_error err;
    assert_int_equal(cpu()->weight_new(dev, &s.t, &w, NULL), STILL_OK);
    assert_int_equal(cpu()->weight_new(dev, &other.t, &v, NULL), STILL_OK);
    float *dy = floats(300 * 40, 1, 1), *dx = floats(300 * 64, 1, 2);
    sti_matmul_back_args a = {.dy = {dy, dy}, .M = 3, .n = 2, .w = {&w, &v}, .dx = dx};
    assert_int_equal(cpu()->matmul_back(dev, &a, &err), STILL_E_ARG);
    a.n = STI_BACK_MAX + 1;
    assert_int_equal(cpu()->matmul_back(dev, &a, &err), STILL_E_ARG);
    a.n = 1;
    assert_int_equal(cpu()->matmul_back(dev, &a, NULL), STILL_OK);
    const long before = mapped_pages();
    a.M = 300;
    const sti_matmul_grad_args grad = {dy, dx, s.value, 300, 40, 64, 1};
    assert_int_equal(cpu()->matmul_back(dev, &a, NULL), STILL_OK);
    assert_int_equal(cpu()->matmul_grad(dev, &grad, 1, NULL), STILL_OK);
    assert_int_equal(mapped_pages(), before);
    cpu()->weight_free(dev, &w);
    cpu()->weight_free(dev, &v);
    free_dev(dev);
    free(dy);
    free(dx);
    free_source(&s);
    free_source(&other);
}

RUN_TESTS(cmocka_unit_test(matmul_back_of_every_type),
          cmocka_unit_test(matmul_back_of_odd_sizes),
          cmocka_unit_test(matmul_back_adds_up_matrices),
          cmocka_unit_test(matmul_grad_is_the_definition),
          cmocka_unit_test(products_refuse_and_stay_small))
