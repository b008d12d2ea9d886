/* test_not_finite.c - a NaN or an infinity in a row of activations comes out of every
 * product of that row, whatever the type of the weights and the instruction set, and
 * out of no other; numbers that are merely huge are numbers. */
#include "../../../run.h"
#include "../../matrix.h"
#include "../cpu_device.h"

static const sti_dtype types[] = {STI_Q4_0,  STI_Q4_1, STI_Q5_0,   STI_Q5_1,
                                  STI_Q8_0,  STI_Q2_K, STI_Q3_K,   STI_Q4_K,
                                  STI_Q5_K,  STI_Q6_K, STI_IQ4_NL, STI_IQ4_XS,
                                  STI_MXFP4, STI_F32,  STI_F16,    STI_BF16};
enum { N_TYPES = sizeof types / sizeof *types, K = 512, N = 37, M = 12 };

/* What row m of x holds at one place; 0: what it held. */
static const float odd[M] = {0, NAN, 0, INFINITY, -INFINITY, -NAN, 1e30f, 0, -1e36f};

static bool is_number(int row)
{
    return isfinite(odd[row]);
}

typedef struct problem {
    sti_dev *dev;
    source s;
    sti_weight w;
    float *x; /* [M, K], row m with odd[m] */
} problem;

static bool open_problem(const char *isa, sti_dtype type, problem *p)
{
    p->dev = dev_of(cpu(), (sti_dev_params){.threads = 2, .isa = isa, .max_k = K});
    if (!p->dev) return false;
    p->s = make_source(type, N, K, 3);
    assert_int_equal(cpu()->weight_new(p->dev, &p->s.t, &p->w, NULL), STILL_OK);
    p->x = floats(M * K, 1, 5);
    for (int m = 0; m < M; m++)
        if (odd[m] != 0) p->x[m * K + 70 + m] = odd[m];
    return true;
}

static void close_problem(problem *p)
{
    cpu()->weight_free(p->dev, &p->w);
    free_source(&p->s);
    free_dev(p->dev);
    free(p->x);
}

/* y[n, N] = rows [first, first + n) of x. */
static void multiply(const problem *p, const float *norm, int first, int n, float *y)
{
    float room[M * K];
    sti_matmul_args a = {.x = p->x + first * K,
                         .M = n,
                         .n = 1,
                         .norm = norm,
                         .eps = 1e-5f,
                         .normed = room,
                         .w = {&p->w},
                         .y = {y}};
    assert_int_equal(cpu()->matmul(p->dev, &a, NULL), STILL_OK);
}

static void check_row(const float *y, int row, const char *what, sti_dtype type)
{
    for (int j = 0; j < N; j++)
        if (isfinite(y[j]) != is_number(row))
            fail_msg("%s, type %d, row %d with %g: product %d is %g", what, (int)type,
                     row, (double)odd[row], j, (double)y[j]);
}

/* As a batch, which takes panels, and row by row. Rows of 1e30 differ from what double
 * gives by the rounding of their block to 15 bits. */
static void products(void **state)
{
    (void)state;
    for (int i = 0; i < N_ISA; i++) {
        for (int t = 0; t < N_TYPES; t++) {
            problem p;
            if (!open_problem(isa_name[i], types[t], &p)) continue;
            float all[M * N], one[N];
            multiply(&p, NULL, 0, M, all);
            for (int m = 0; m < M; m++) {
                multiply(&p, NULL, m, 1, one);
                check_row(one, m, isa_name[i], types[t]);
                check_row(all + m * N, m, isa_name[i], types[t]);
                if (is_number(m)) assert_memory_equal(one, all + m * N, sizeof one);
            }
            for (int j = 0; j < N; j++) {
                double want = 0, size = 0;
                for (int k = 0; k < K; k++) {
                    want += (double)p.x[6 * K + k] * p.s.value[j * K + k];
                    size = fmax(size, fabs((double)p.s.value[j * K + k]));
                }
                assert_true(fabs(all[6 * N + j] - want) <= 1e30 * size * 3e-3);
            }
            close_problem(&p);
        }
    }
}

/* The same of rows that are normed first; a NaN in the norm is one in every row. A row
 * whose squares leave the range of float is normed all the same. */
static void normed_products(void **state)
{
    (void)state;
    for (int i = 0; i < N_ISA; i++) {
        for (int t = 0; t < N_TYPES; t++) {
            problem p;
            if (!open_problem(isa_name[i], types[t], &p)) continue;
            float *norm = floats(K, 1, 8), y[M * N], size = 0;
            multiply(&p, norm, 0, M, y);
            for (int m = 0; m < M; m++) check_row(y + m * N, m, isa_name[i], types[t]);
            for (int j = 0; j < N; j++) size = fmaxf(size, fabsf(y[6 * N + j]));
            assert_true(size > 0); /* not normed to nothing */
            norm[100] = NAN;
            multiply(&p, norm, 0, M, y);
            for (int j = 0; j < M * N; j++) assert_false(isfinite(y[j]));
            free(norm);
            close_problem(&p);
        }
    }
}

/* A row or two take a path of their own. */
static void ffn_forward(void **state)
{
    (void)state;
    enum { FFN = 256 };
    for (int i = 0; i < N_ISA; i++) {
        for (int t = 0; t < N_TYPES; t++) {
            sti_dev *dev = dev_of(
                cpu(), (sti_dev_params){.threads = 2, .isa = isa_name[i], .max_k = K});
            if (!dev) continue;
            source s[2] = {make_source(types[t], FFN, K, 3),
                           make_source(types[t], K, FFN, 4)};
            sti_weight w[2];
            for (int k = 0; k < 2; k++)
                assert_int_equal(cpu()->weight_new(dev, &s[k].t, &w[k], NULL),
                                 STILL_OK);
            float *norm = floats(K, 1, 8), scratch_h[3 * K], room[2 * 3 * FFN];
            for (int n = 1; n <= 3; n++) {
                float *x = floats((size_t)(n * K), 1, 5);
                norm[100] = NAN;
                sti_ffn_args a = {.x = x,
                                  .M = n,
                                  .w = {.gate = &w[0],
                                        .up = &w[0],
                                        .down = &w[1],
                                        .norm = norm,
                                        .eps = 1e-5f},
                                  .scratch_h = scratch_h,
                                  .scratch = room};
                assert_int_equal(cpu()->ffn_forward(dev, &a, NULL), STILL_OK);
                for (int j = 0; j < n * K; j++) assert_false(isfinite(x[j]));
                free(x);
            }
            free(norm);
            for (int k = 0; k < 2; k++) {
                cpu()->weight_free(dev, &w[k]);
                free_source(&s[k]);
            }
            free_dev(dev);
        }
    }
}

RUN_TESTS(cmocka_unit_test(products), cmocka_unit_test(normed_products),
          cmocka_unit_test(ffn_forward))
