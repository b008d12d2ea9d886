/* test_bf16.c - the bf16 backend rounds where frameworks do: every operator against a
 * loop in double whose steps are rounded by hand, weights of every kind, and a model.
 */
#include <math.h>
#include <stdio.h>

#include "../../run.h"
#include "../matrix.h"

static const sti_backend *bf16(void)
{
    return sti_backend_find("bf16");
}

/* Round to nearest even by the definition: a float's neighbours with 16 bits less. */
static float rounded(double x)
{
    if (!isfinite(x) || x == 0) return (float)x;
    int exponent;
    frexp(x, &exponent);
    const double unit = ldexp(1, exponent - 8); /* 8 bits of mantissa */
    return (float)(nearbyint(x / unit) * unit);
}

static sti_dev *new_dev(int max_k)
{
    still_error err;
    sti_dev *dev;
    assert_int_equal(bf16()->dev_new(&(sti_dev_params){.threads = 2,
                                                       .max_k = max_k,
                                                       .heads = 4,
                                                       .kv_heads = 2,
                                                       .head_dim = 16},
                                     &dev, &err),
                     STILL_OK);
    assert_int_equal(bf16()->dev_reserve(dev, 8, &err), STILL_OK);
    return dev;
}

static void fill(float *x, size_t n, float gain, uint32_t seed)
{
    for (size_t i = 0; i < n; i++) x[i] = rounded((double)(gain * uniform(&seed)));
}

/* Equal, or neighbours where a sum lay in the middle between two. */
static void assert_rounded(const char *what, size_t i, float y, double want,
                           double sum_error)
{
    if (y != rounded((double)y))
        fail_msg("%s, %zu: %.9g is not rounded", what, i, (double)y);
    const double unit = fabs(want) * 0x1p-8 + 1e-30;
    const double middle = fabs(fabs(want - (double)rounded(want)) - unit / 2);
    const double allowed = middle < sum_error + unit / 4 ? unit + sum_error : sum_error;
    if (!(fabs((double)y - (double)rounded(want)) <= allowed))
        fail_msg("%s, %zu: %.9g, expected %.9g of %.9g", what, i, (double)y,
                 (double)rounded(want), want);
}

static double dot(const float *x, const float *w, int64_t K)
{
    double s = 0;
    for (int64_t k = 0; k < K; k++) s += (double)x[k] * (double)rounded((double)w[k]);
    return s;
}

/* y = r(W x); y = r(y + r(W x)); y = r(W norm(x)): for weights of every kind. */
static void test_products(void **state)
{
    (void)state;
    enum { M = 5, N = 48, K = 256 };
    static const sti_dtype type[] = {STI_F32,  STI_F16,  STI_BF16,
                                     STI_Q4_1, STI_Q8_0, STI_Q6_K};
    sti_dev *dev = new_dev(K);
    float x[M * K], y[M * N], before[M * N], g[K], capacity[M * K];
    fill(x, M * K, 1, 1);
    fill(g, K, 2, 2);
    for (size_t t = 0; t < sizeof type / sizeof *type; t++) {
        source s = make_source(type[t], N, K, 7 + (uint32_t)t);
        sti_weight w;
        still_error err;
        assert_int_equal(bf16()->weight_new(dev, &s.t, &w, &err), STILL_OK);
        assert_int_equal(bf16()->weight_bytes(dev, &s.t) > 0, type[t] != STI_BF16);
        for (int form = 0; form < 3; form++) {
            fill(y, M * N, 3, 5);
            memcpy(before, y, sizeof y);
            sti_matmul_args a = {.x = x,
                                 .M = M,
                                 .n = 1,
                                 .w = {&w},
                                 .y = {y},
                                 .accumulate = form == 1,
                                 .norm = form == 2 ? g : NULL,
                                 .eps = 1e-5f,
                                 .normed = capacity};
            assert_int_equal(bf16()->matmul(dev, &a, &err), STILL_OK);
            for (size_t i = 0; i < M * N; i++) {
                const float *row = (form == 2 ? capacity : x) + i / N * K;
                const double sum = dot(row, s.value + i % N * K, K);
                const double want =
                    form == 1 ? (double)before[i] + (double)rounded(sum) : sum;
                assert_rounded("product", i, y[i], want, fabs(sum) * 0x1p-8 + 1e-4);
            }
        }
        float row[K];
        const int32_t token = N - 1;
        assert_int_equal(
            bf16()->embed(
                dev, &(sti_embed_args){.w = &w, .tok = &token, .M = 1, .y = row}, &err),
            STILL_OK);
        for (int k = 0; k < K; k++)
            assert_true(row[k] == rounded((double)s.value[(N - 1) * K + k]));
        bf16()->weight_free(dev, &w);
        free_source(&s);
    }
    bf16()->dev_free(dev);
}

static void test_norm(void **state)
{
    (void)state;
    enum { M = 3, K = 96 };
    sti_dev *dev = new_dev(K);
    float x[M * K], g[K], y[M * K];
    fill(x, M * K, 4, 3);
    fill(g, K, 1, 4);
    still_error err;
    assert_int_equal(
        bf16()->rmsnorm(
            dev,
            &(sti_rmsnorm_args){.x = x, .g = g, .y = y, .M = M, .K = K, .eps = 1e-6f},
            &err),
        STILL_OK);
    for (int m = 0; m < M; m++) {
        double squares = 0;
        for (int k = 0; k < K; k++)
            squares += (double)x[m * K + k] * (double)x[m * K + k];
        for (int k = 0; k < K; k++) {
            const double n =
                (double)rounded((double)x[m * K + k] / sqrt(squares / K + 1e-6));
            assert_rounded("norm", (size_t)(m * K + k), y[m * K + k], n * (double)g[k],
                           fabs(n * (double)g[k]) * 0x1p-8);
        }
    }
    bf16()->dev_free(dev);
}

/* Both orders of pairs; turned back, what was turned is near again. */
static void test_rope(void **state)
{
    (void)state;
    enum { M = 4, HEADS = 2, ALSO = 1, D = 16 };
    sti_dev *dev = new_dev(64);
    float inv_freq[D / 2];
    for (int i = 0; i < D / 2; i++) inv_freq[i] = powf(10000, -(float)i / (D / 2));
    const int32_t pos[M] = {0, 1, 77, 5000};
    for (int interleaved = 0; interleaved < 2; interleaved++) {
        float x[M * HEADS * D], k[M * ALSO * D], was[M * HEADS * D];
        fill(x, M * HEADS * D, 2, 11);
        fill(k, M * ALSO * D, 2, 12);
        memcpy(was, x, sizeof x);
        sti_rope_args a = {.x = x,
                           .also = k,
                           .pos = pos,
                           .inv_freq = inv_freq,
                           .M = M,
                           .heads = HEADS,
                           .also_heads = ALSO,
                           .D = D,
                           .interleaved = interleaved != 0};
        still_error err;
        assert_int_equal(bf16()->rope(dev, &a, &err), STILL_OK);
        for (int r = 0; r < M * HEADS; r++)
            for (int i = 0; i < D / 2; i++) {
                const int p = interleaved ? 2 * i : i,
                          q = interleaved ? p + 1 : i + D / 2;
                const double angle = (double)((float)pos[r / HEADS] * inv_freq[i]);
                const double c = (double)rounded(cos(angle)),
                             s = (double)rounded(sin(angle));
                const double u = (double)was[r * D + p], v = (double)was[r * D + q];
                assert_true(x[r * D + p] ==
                            rounded((double)(rounded(u * c) - rounded(v * s))));
                assert_true(x[r * D + q] ==
                            rounded((double)(rounded(v * c) + rounded(u * s))));
            }
        a.back = true;
        assert_int_equal(bf16()->rope(dev, &a, &err), STILL_OK);
        for (int i = 0; i < M * HEADS * D; i++)
            assert_true(fabsf(x[i] - was[i]) < 0.05f);
    }
    bf16()->dev_free(dev);
}

static void test_swiglu(void **state)
{
    (void)state;
    enum { K = 200 };
    sti_dev *dev = new_dev(64);
    float gate[K], up[K], y[K];
    fill(gate, K, 8, 21);
    fill(up, K, 3, 22);
    still_error err;
    assert_int_equal(
        bf16()->swiglu(
            dev, &(sti_swiglu_args){.gate = gate, .up = up, .y = y, .M = 1, .K = K},
            &err),
        STILL_OK);
    for (int i = 0; i < K; i++) {
        const double silu =
            (double)rounded((double)gate[i] / (1 + exp(-(double)gate[i])));
        assert_rounded("swiglu", (size_t)i, y[i], silu * (double)up[i],
                       fabs(silu * (double)up[i]) * 0x1p-8);
    }
    bf16()->dev_free(dev);
}

/* Results are rounded; a NaN and an infinity come through. */
static void test_attention_and_special_values(void **state)
{
    (void)state;
    enum { T = 6, H = 4, G = 2, D = 16 };
    sti_dev *dev = new_dev(64);
    float q[T * H * D], k[T * G * D], v[T * G * D], o[T * H * D], K[G * T * D],
        V[G * T * D];
    fill(q, T * H * D, 1, 31);
    fill(k, T * G * D, 1, 32);
    fill(v, T * G * D, 1, 33);
    still_error err;
    const sti_attn_segment seg = {
        .row0 = 0, .n = T, .past = 0, .K = K, .V = V, .capacity = T};
    sti_attn_args a = {.q = q,
                       .k = k,
                       .v = v,
                       .o = o,
                       .H = H,
                       .G = G,
                       .D = D,
                       .cache = STI_F32,
                       .seg = &seg,
                       .n_seg = 1};
    assert_int_equal(bf16()->softmax_attn(dev, &a, &err), STILL_OK);
    for (int h = 0; h < H; h++)
        for (int d = 0; d < D; d++) /* the first token sees itself alone */
            assert_true(o[h * D + d] == v[h / (H / G) * D + d]);
    for (size_t i = 0; i < T * H * D; i++) assert_true(o[i] == rounded((double)o[i]));

    float gate[3] = {NAN, INFINITY, -1e30f}, up[3] = {1, 1, 1}, y[3];
    assert_int_equal(
        bf16()->swiglu(
            dev, &(sti_swiglu_args){.gate = gate, .up = up, .y = y, .M = 1, .K = 3},
            &err),
        STILL_OK);
    assert_true(isnan(y[0]) && isinf(y[1]) && y[2] == 0);
    bf16()->dev_free(dev);
}

/* What the cpu backend does not multiply, this one does not either. */
static void test_refused_weights(void **state)
{
    (void)state;
    static const double data[64] = {1};
    const sti_tensor good = {.path = "f",
                             .name = "t",
                             .type = STI_F32,
                             .n_dims = 2,
                             .dim = {2, 32},
                             .data = data,
                             .bytes = 256};
    sti_tensor bad[] = {good, good, good, good, good};
    bad[0].type = STI_F64;
    bad[1].type = STI_I32;
    bad[2].type = STI_I64;
    bad[3].n_dims = 1;
    bad[4].type = STI_Q6_K; /* rows of 32 are no whole blocks */
    sti_dev *dev = new_dev(32);
    still_error err;
    sti_weight w;
    for (int i = 0; i < 5; i++)
        assert_int_equal(bf16()->weight_new(dev, &bad[i], &w, &err),
                         i < 3 ? STILL_E_UNSUPPORTED : STILL_E_FORMAT);
    assert_int_equal(bf16()->weight_new(dev, &good, &w, &err), STILL_OK);
    bf16()->weight_free(dev, &w);
    bf16()->dev_free(dev);
}

RUN_TESTS(cmocka_unit_test(test_products), cmocka_unit_test(test_norm),
          cmocka_unit_test(test_rope), cmocka_unit_test(test_swiglu),
          cmocka_unit_test(test_attention_and_special_values),
          cmocka_unit_test(test_refused_weights))
