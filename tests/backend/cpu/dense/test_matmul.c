/* test_matmul.c - the matrix products of the cpu backend: every type, every instruction
 * set this machine has, odd sizes.
 *
 * Two yardsticks, both in double on dequantized weights. `same`: with activations
 * rounded to 15 bits as matmul.h says, products may differ by float rounding only.
 * `bound`: with activations as given, products may differ by what that rounding can
 * do at worst, sum_k |w_k| d / 2. */
#include "../../../run.h"
#include "../../matrix.h"

#include <math.h>

#include "../../../skip.h"
#include "backend/cpu/cpu.h"
#include "backend/host.h"

static const sti_dtype TYPES[] = {STI_Q4_0,  STI_Q4_1, STI_Q5_0,   STI_Q5_1,
                                  STI_Q8_0,  STI_Q2_K, STI_Q3_K,   STI_Q4_K,
                                  STI_Q5_K,  STI_Q6_K, STI_IQ4_NL, STI_IQ4_XS,
                                  STI_MXFP4, STI_F32,  STI_F16,    STI_BF16};
enum { N_TYPES = sizeof TYPES / sizeof *TYPES };
static const char *const ISAS[] = {"portable", "avx2", "avx512", "amx"};

static bool is_float(sti_dtype t)
{
    return t == STI_F32 || t == STI_F16 || t == STI_BF16;
}

static sti_dev *device(const char *isa, int threads, int max_k)
{
    sti_dev *dev = NULL;
    still_error err;
    sti_dev_params p = {.threads = threads,
                        .isa = isa,
                        .max_k = max_k,
                        .heads = 2,
                        .kv_heads = 1,
                        .head_dim = 16};
    still_status st = sti_backend_find("cpu")->dev_new(&p, &dev, &err);
    if (st == STILL_E_UNSUPPORTED) {
        skip_isa(isa);
        return NULL;
    }
    assert_int_equal(st, STILL_OK);
    return dev;
}

/* Activations of uneven size: blocks of zeros, large and small ones. */
static float *make_x(int64_t n, uint32_t seed)
{
    float *x = malloc(sizeof *x * (size_t)n);
    assert_non_null(x);
    for (int64_t i = 0; i < n; i++) {
        static const float SIZE[] = {1, 0, 30, 1e-3f, 1, 2, 0.1f};
        x[i] = uniform(&seed) * SIZE[i / 32 % 7];
    }
    return x;
}

/* What the kernel should give for one element, and how far it may be off. */
typedef struct expected {
    double same, same_tol, bound, bound_tol;
} expected;

static expected expect(const float *x, const float *w, int64_t K, bool quantized)
{
    double same = 0, exact = 0, size = 0, slack = 0;
    for (int64_t b = 0; b < K; b += 32) {
        int64_t end = b + 32 < K ? b + 32 : K;
        float top = 0;
        for (int64_t k = b; k < end; k++) top = fmaxf(top, fabsf(x[k]));
        float d = top / 16256, inv = top > 1e-30f ? 16256 / top : 0.0f; /* 127 * 128 */
        for (int64_t k = b; k < end; k++) {
            double a = quantized ? (double)d * nearbyintf(x[k] * inv) : (double)x[k];
            same += a * w[k];
            exact += (double)x[k] * w[k];
            size += fabs(a * w[k]);
            slack += fabs((double)w[k]) * 0.5001 * d;
        }
    }
    /* Minima and centres are added apart from the quants they belong to, so terms up
     * to a few times larger than the products meet; 1e-5 leaves room for that. */
    double tol = 1e-5 * size + 1e-6;
    return (expected){same, tol, exact, slack + tol};
}

static void check(const float *y, double base, expected e)
{
    if (!(fabs(y[0] - base - e.same) <= e.same_tol))
        fail_msg("product %.9g, same formula %.9g +- %.2g", y[0] - base, e.same,
                 e.same_tol);
    if (!(fabs(y[0] - base - e.bound) <= e.bound_tol))
        fail_msg("product %.9g, exact %.9g +- %.2g", y[0] - base, e.bound, e.bound_tol);
}

static sti_weight make_weight(sti_dev *dev, const source *s)
{
    sti_weight w;
    still_error err;
    const sti_backend *be = sti_backend_find("cpu");
    assert_int_equal(be->weight_new(dev, &s->t, &w, &err), STILL_OK);
    assert_int_equal(w.own.bytes, be->weight_bytes(dev, &s->t));
    return w;
}

/* One matrix: values, then that M rows at once are bit for bit M single rows. */
static void check_matrix(const char *isa, sti_dtype type, int64_t N, int64_t K)
{
    enum { M = 64 };
    static const int SOME[] = {1, 2, 3, 5, 6, 7, 8, 9, 17, 32, 33, 39, 64};
    const sti_backend *be = sti_backend_find("cpu");
    sti_dev *dev = device(isa, 2, (int)K);
    if (!dev) return;
    source s = make_source(type, N, K, 1 + (uint32_t)type);
    sti_weight w = make_weight(dev, &s);
    float *x = make_x(M * K, 77);
    float *one = malloc(sizeof *one * (size_t)(M * N)), *y = malloc(sizeof *y * M * N);
    assert_true(one && y);
    still_error err;
    for (int m = 0; m < M; m++) {
        sti_matmul_args a = {
            .x = x + m * K, .M = 1, .n = 1, .w = {&w}, .y = {one + m * N}};
        assert_int_equal(be->matmul(dev, &a, &err), STILL_OK);
    }
    for (int m = 0; m < 9; m++) {
        for (int64_t j = 0; j < N; j++)
            check(one + m * N + j, 0,
                  expect(x + m * K, s.value + j * K, K, !is_float(type)));
    }
    for (size_t i = 0; i < sizeof SOME / sizeof *SOME; i++) {
        memset(y, 0xff, sizeof *y * (size_t)(M * N));
        sti_matmul_args a = {.x = x, .M = SOME[i], .n = 1, .w = {&w}, .y = {y}};
        assert_int_equal(be->matmul(dev, &a, &err), STILL_OK);
        assert_memory_equal(y, one, sizeof *y * (size_t)(SOME[i] * N));
    }
    be->weight_free(dev, &w);
    be->dev_free(dev);
    free_source(&s);
    free(x);
    free(one);
    free(y);
}

static void every_type(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        for (int t = 0; t < N_TYPES; t++) {
            int64_t block = sti_dtype_find((int)TYPES[t])->block;
            check_matrix(ISAS[i], TYPES[t], 1, block == 1 ? 7 : block);
            check_matrix(ISAS[i], TYPES[t], 33, block == 1 ? 101 : 3 * block);
            check_matrix(ISAS[i], TYPES[t], 70, block == 1 ? 1029 : 1280);
        }
    }
}

/* Three matrices of unlike types, with biases, added to what is there. Three workers, of
 * which the second begins and ends within a matrix; few rows, one, and enough for panels. */
static void several_matrices(void **state)
{
    (void)state;
    enum { K = 512, MOST = 40 };
    static const int M[3] = {11, 1, MOST};
    const int64_t N[3] = {80, 17, 37};
    const sti_backend *be = sti_backend_find("cpu");
    for (int i = 0; i < 3; i++) {
        for (int t = 0; t < N_TYPES; t++) {
            for (int n = 1; n <= 3; n++) {
                sti_dev *dev = device(ISAS[i], 3, K);
                if (!dev) continue;
                source s[3];
                sti_weight w[3];
                float *y[3], *bias[3], *x = make_x(MOST * K, 5);
                sti_matmul_args a = {
                    .x = x, .M = M[n - 1], .n = n, .accumulate = n != 2};
                for (int k = 0; k < n; k++) {
                    s[k] = make_source(TYPES[(t + 4 * k) % N_TYPES], N[k], K, 3);
                    w[k] = make_weight(dev, &s[k]);
                    y[k] = malloc(sizeof(float) * (size_t)(a.M * N[k]));
                    bias[k] = malloc(sizeof(float) * (size_t)N[k]);
                    assert_true(y[k] && bias[k]);
                    for (int64_t j = 0; j < a.M * N[k]; j++) y[k][j] = (float)j;
                    for (int64_t j = 0; j < N[k]; j++) bias[k][j] = (float)(j % 3);
                    a.w[k] = &w[k];
                    a.y[k] = y[k];
                    a.bias[k] = k == 1 ? NULL : bias[k];
                }
                still_error err;
                assert_int_equal(be->matmul(dev, &a, &err), STILL_OK);
                for (int k = 0; k < n; k++) {
                    for (int64_t e = 0; e < a.M * N[k]; e++) {
                        int64_t m = e / N[k], j = e % N[k];
                        double base = (a.bias[k] ? bias[k][j] : 0.0) +
                                      (a.accumulate ? (double)e : 0.0);
                        expected want = expect(x + m * K, s[k].value + j * K, K,
                                               !is_float(s[k].t.type));
                        want.same_tol += 1e-6 * fabs(base);
                        want.bound_tol += 1e-6 * fabs(base);
                        check(y[k] + e, base, want);
                    }
                    be->weight_free(dev, &w[k]);
                    free_source(&s[k]);
                    free(y[k]);
                    free(bias[k]);
                }
                free(x);
                be->dev_free(dev);
            }
        }
    }
}

/* More than few rows, and more groups than a worker takes as one set. */
enum { BATCH_K = 768, BATCH_N = 275, BATCH_M = 40 };

static void threads_change_nothing(void **state)
{
    (void)state;
    enum { K = BATCH_K, N = BATCH_N, M = BATCH_M };
    const sti_backend *be = sti_backend_find("cpu");
    for (int i = 0; i < 3; i++) {
        for (int t = 0; t < N_TYPES; t++) {
            float y[3][M * N], *x = make_x(M * K, 9);
            source s = make_source(TYPES[t], N, K, 4);
            int done = 0;
            for (int threads = 1; threads <= 3; threads++) {
                sti_dev *dev = device(ISAS[i], threads, K);
                if (!dev) break;
                assert_int_equal(be->dev_threads(dev), threads);
                assert_string_equal(be->dev_isa(dev), ISAS[i]);
                still_error err;
                sti_weight w = make_weight(dev, &s);
                sti_matmul_args a = {.x = x, .M = M, .n = 1, .w = {&w}, .y = {y[done]}};
                assert_int_equal(be->matmul(dev, &a, &err), STILL_OK);
                if (done++) assert_memory_equal(y[0], y[threads - 1], sizeof y[0]);
                be->weight_free(dev, &w);
                be->dev_free(dev);
            }
            free_source(&s);
            free(x);
        }
    }
}

/* Which products of a batch are taken in pairs follows the processor's maker, bits do not. */
static void pairs_change_nothing(void **state)
{
    (void)state;
    enum { K = BATCH_K, N = BATCH_N, M = BATCH_M };
    const sti_backend *be = sti_backend_find("cpu");
    for (int t = 0; t < N_TYPES; t++) {
        sti_dev *dev = device("avx512", 1, K);
        if (!dev) return;
        source s = make_source(TYPES[t], N, K, 14);
        sti_weight w = make_weight(dev, &s);
        float y[2][M * N], *x = make_x(M * K, 19);
        for (int pairs = 0; pairs < 2; pairs++) {
            dev->pairs = pairs;
            sti_matmul_args a = {.x = x, .M = M, .n = 1, .w = {&w}, .y = {y[pairs]}};
            assert_int_equal(be->matmul(dev, &a, NULL), STILL_OK);
        }
        assert_memory_equal(y[0], y[1], sizeof y[0]);
        be->weight_free(dev, &w);
        be->dev_free(dev);
        free_source(&s);
        free(x);
    }
}

/* Each row of a batch as if it were alone; every step-th is looked at. */
static void batch_as_rows(const char *isa, sti_dtype type, int M, int N, int K,
                          int step)
{
    const sti_backend *be = sti_backend_find("cpu");
    sti_dev *dev = device(isa, 2, K);
    if (!dev) return;
    source s = make_source(type, N, K, 8);
    sti_weight w = make_weight(dev, &s);
    const size_t row = (size_t)N * sizeof(float);
    float *x = make_x((int64_t)M * K, 21), *y = malloc((size_t)M * row),
          *one = malloc(row);
    assert_non_null(y);
    assert_non_null(one);
    sti_matmul_args a = {.x = x, .M = M, .n = 1, .w = {&w}, .y = {y}};
    assert_int_equal(be->matmul(dev, &a, NULL), STILL_OK);
    for (int m = 0; m < M; m += step) {
        sti_matmul_args b = {
            .x = x + (size_t)m * (size_t)K, .M = 1, .n = 1, .w = {&w}, .y = {one}};
        assert_int_equal(be->matmul(dev, &b, NULL), STILL_OK);
        assert_memory_equal(one, y + (size_t)m * (size_t)N, row);
    }
    be->weight_free(dev, &w);
    be->dev_free(dev);
    free_source(&s);
    free(x);
    free(y);
    free(one);
}

/* More rows than one unpacked panel sweeps; each of two workers has a set of groups and a
 * part of one. */
static void many_rows(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++)
        for (int t = 0; t < N_TYPES; t += 3)
            batch_as_rows(ISAS[i], TYPES[t], 391, 291, 1024, 37);
}

/* K of the shapes that people run: panels take equal parts of it, in whole super-blocks.
 * Each of two workers has full panels, of two groups. */
static void long_rows(void **state)
{
    (void)state;
    static const int K[] = {2304, 3072, 8192, 14336};
    for (int i = 0; i < 3; i++)
        for (int t = 0; t < N_TYPES; t++)
            for (size_t k = 0; k < sizeof K / sizeof *K; k++)
                batch_as_rows(ISAS[i], TYPES[t], 40, 67, K[k], 13);
}

/* The feed-forward half of a layer is what the products and the gate are, one after the
 * other, bit for bit: each of the workers has several blocks of the hidden layer, or, of
 * the last of them, fewer. */
static void ffn_as_products(const char *isa, int first_type, int threads, int M)
{
    enum { K = 512, FFN = 1280 };
    const sti_backend *be = sti_backend_find("cpu");
    sti_dev *dev = device(isa, threads, FFN);
    if (!dev) return;
    source s[3];
    sti_weight w[3];
    for (int k = 0; k < 3; k++) {
        s[k] = make_source(TYPES[(first_type + 4 * k) % N_TYPES], k < 2 ? FFN : K,
                           k < 2 ? K : FFN, (uint32_t)(31 + k));
        w[k] = make_weight(dev, &s[k]);
    }
    float *x = make_x(M * K, 3), *y = make_x(M * K, 3), *norm = make_x(K, 6),
          *bias = make_x(FFN, 7), *scratch_h = make_x(M * K, 1),
          *scratch = make_x((int64_t)2 * M * FFN, 1);
    sti_ffn_args a = {.x = x,
                      .M = M,
                      .w = {.gate = &w[0],
                            .up = &w[1],
                            .down = &w[2],
                            .gate_bias = bias,
                            .down_bias = M % 2 ? bias : NULL,
                            .norm = norm,
                            .norm_out = threads % 2 ? norm : NULL,
                            .eps = 1e-5f,
                            .eps_out = 1e-6f},
                      .scratch_h = scratch_h,
                      .scratch = scratch};
    assert_int_equal(be->ffn_forward(dev, &a, NULL), STILL_OK);
    a.x = y;
    assert_int_equal(sti_host_ffn_forward(be, dev, &a, NULL), STILL_OK);
    for (int i = 0; i < M * K; i++) assert_true(isfinite(y[i]));
    assert_memory_equal(x, y, sizeof *x * (size_t)(M * K));
    for (int k = 0; k < 3; k++) {
        be->weight_free(dev, &w[k]);
        free_source(&s[k]);
    }
    be->dev_free(dev);
    float *all[] = {x, y, norm, bias, scratch_h, scratch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static void feed_forward(void **state)
{
    (void)state;
    static const int THREADS[] = {1, 2, 3, 7}, ROWS[] = {1, 3, 8};
    for (int i = 0; i < 3; i++)
        for (int t = 0; t < N_TYPES; t++)
            for (int k = 0; k < 4; k++)
                ffn_as_products(ISAS[i], t, THREADS[k], ROWS[(t + k) % 3]);
}

/* Values at the ends of their range, in one row and in a batch: sums in 16 bits must not
 * saturate, and those in 32 bits that wrap around must come back. */
static void extremes(void **state)
{
    (void)state;
    enum { K = 256, N = 16 };
    const sti_backend *be = sti_backend_find("cpu");
    for (int i = 0; i < 3; i++) {
        for (int t = 0; t < N_TYPES; t++) {
            sti_dev *dev = device(ISAS[i], 1, K);
            if (!dev || is_float(TYPES[t])) {
                be->dev_free(dev);
                continue;
            }
            source s = make_source(TYPES[t], N, K, 2);
            /* All quants at their largest in even rows, smallest in odd ones. Scales
             * lie at the ends of a block: keep them, and K types' small ones. */
            const sti_dtype_info *info = sti_dtype_find((int)TYPES[t]);
            size_t row = (size_t)(K / info->block * info->bytes);
            for (size_t r = 0; r < N; r++) {
                for (size_t b = 0; b < row; b += (size_t)info->bytes) {
                    unsigned char *p = s.map + 2 + r * row + b;
                    size_t head = 2, tail = 0;
                    switch (TYPES[t]) {
                    case STI_Q4_1:
                    case STI_Q5_1: head = 4; break;
                    case STI_Q2_K: head = 16, tail = 4; break;
                    case STI_Q3_K: head = 0, tail = 14; break;
                    case STI_Q4_K:
                    case STI_Q5_K: head = 16; break;
                    case STI_Q6_K: head = 0, tail = 18; break;
                    case STI_IQ4_XS: head = 8; break;
                    case STI_MXFP4: head = 1; break;
                    default: break;
                    }
                    int fill = TYPES[t] == STI_Q8_0 ? (r % 2 ? 0x80 : 0x7f)
                                                    : (r % 2 ? 0x00 : 0xff);
                    memset(p + head, fill, (size_t)info->bytes - head - tail);
                }
            }
            sti_dequant(TYPES[t], s.t.data, s.value, N * K);
            for (int sign = -1; sign <= 1; sign += 2) {
                enum { M = 8 };
                float x[M * K], y[M * N];
                for (int k = 0; k < M * K; k++) x[k] = (float)sign;
                sti_weight w = make_weight(dev, &s);
                for (int rows = 1; rows <= M; rows += M - 1) {
                    sti_matmul_args a = {
                        .x = x, .M = rows, .n = 1, .w = {&w}, .y = {y}};
                    still_error err;
                    assert_int_equal(be->matmul(dev, &a, &err), STILL_OK);
                    for (int64_t j = 0; j < rows * N; j++)
                        check(y + j, 0, expect(x, s.value + j % N * K, K, true));
                }
                be->weight_free(dev, &w);
            }
            free_source(&s);
            be->dev_free(dev);
        }
    }
}

/* Every row of two groups and of one that is cut short. Copies stand alone: what the
 * source holds afterwards does not matter. */
static void embedding_of(const char *isa, sti_dtype type)
{
    enum { N = 40, K = 512 };
    const sti_backend *be = sti_backend_find("cpu");
    sti_dev *dev = device(isa, 2, K);
    if (!dev) return;
    source s = make_source(type, N, K, 6);
    sti_weight w = make_weight(dev, &s);
    if (w.own.bytes) memset((void *)s.t.data, 0x55, s.t.bytes);
    int32_t tok[N];
    static float y[N][K];
    still_error err;
    for (int i = 0; i < N; i++) tok[i] = (i * 7 + 3) % N;
    sti_embed_args a = {.w = &w, .tok = tok, .M = N, .y = y[0]};
    assert_int_equal(be->embed(dev, &a, &err), STILL_OK);
    for (int m = 0; m < N; m++)
        assert_memory_equal(y[m], s.value + tok[m] * K, sizeof y[m]);
    tok[2] = N;
    assert_int_equal(be->embed(dev, &a, &err), STILL_E_ARG);
    tok[2] = -1;
    assert_int_equal(be->embed(dev, &a, &err), STILL_E_ARG);
    be->weight_free(dev, &w);
    be->dev_free(dev);
    free_source(&s);
}

static void embedding(void **state)
{
    (void)state;
    for (int t = 0; t < N_TYPES; t++)
        for (int i = 0; i < 3; i++) embedding_of(ISAS[i], TYPES[t]);
}

static void refusals(void **state)
{
    (void)state;
    const sti_backend *be = sti_backend_find("cpu");
    still_error err;
    sti_dev *dev;
    sti_dev_params p = {.threads = 1, .isa = "mmx", .max_k = 64};
    assert_int_equal(be->dev_new(&p, &dev, &err), STILL_E_ARG);
    assert_null(dev);
    dev = device("portable", 1, 64);
    source s = make_source(STI_F32, 4, 96, 1);
    sti_weight w = make_weight(dev, &s);
    float x[96] = {0}, y[4];
    sti_matmul_args a = {.x = x, .M = 1, .n = 1, .w = {&w}, .y = {y}};
    assert_int_equal(be->matmul(dev, &a, &err), STILL_E_ARG); /* K > max_k */
    be->weight_free(dev, &w);
    s.t.type = STI_I32;
    assert_int_equal(be->weight_new(dev, &s.t, &w, &err), STILL_E_UNSUPPORTED);
    s.t.type = STI_Q8_0;
    s.t.dim[1] = 40; /* no whole blocks */
    assert_int_equal(be->weight_new(dev, &s.t, &w, &err), STILL_E_FORMAT);
    s.t.n_dims = 1;
    assert_int_equal(be->weight_new(dev, &s.t, &w, &err), STILL_E_FORMAT);
    free_source(&s);
    be->dev_free(dev);
}

RUN_TESTS(cmocka_unit_test(every_type), cmocka_unit_test(several_matrices),
          cmocka_unit_test(threads_change_nothing),
          cmocka_unit_test(pairs_change_nothing), cmocka_unit_test(many_rows),
          cmocka_unit_test(long_rows), cmocka_unit_test(feed_forward),
          cmocka_unit_test(extremes), cmocka_unit_test(embedding),
          cmocka_unit_test(refusals))
