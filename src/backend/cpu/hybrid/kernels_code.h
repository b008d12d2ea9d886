/* kernels_code.h - the kernels of kernels.h over the vectors of simd.h. */
#ifndef STI_BACKEND_CPU_HYBRID_KERNELS_CODE_H
#define STI_BACKEND_CPU_HYBRID_KERNELS_CODE_H

#include <math.h>

#include "backend/cpu/hybrid/kernels.h"
#include "backend/cpu/simd.h"

static void hyb_widen(float *y, const void *x, bool half, int n)
{
    if (!half) {
        memcpy(y, x, (size_t)n * sizeof *y);
        return;
    }
    const uint16_t *h = x;
    int i = 0;
    for (; i + VL <= n; i += VL) vf_store(y + i, vf_load_f16(h + i));
    for (; i < n; i++) y[i] = sti_f16_to_f32(h[i]);
}

static float hyb_dot(const float *a, const float *b, int n)
{
    vf sum = vf_set(0);
    for (int i = 0; i < n; i += VL)
        sum = vf_fma(vf_load_some(a + i, n - i), vf_load_some(b + i, n - i), sum);
    return vf_hsum(sum);
}

/* ---- Products ------------------------------------------------------------ */

/* R_MAX rows times N_MAX vectors fill the register file but for operands. */
enum { HYB_ROWS = 6, HYB_VECTORS = V_REGS / 8 };

/* x[n,K], its rows and the elements of a row any number of floats apart. */
typedef struct hyb_left {
    const float *x;
    size_t row, step;
} hyb_left;

STI_INLINE hyb_left hyb_left_from(hyb_left a, int row)
{
    a.x += (size_t)row * a.row;
    return a;
}

/* R rows, V whole vectors of columns. */
STI_INLINE void product_tile(const int R, const int V, int K, hyb_left x,
                             const float *B, int ldb, float *y, int ldy)
{
    vf acc[HYB_ROWS][HYB_VECTORS];
    STI_UNROLL
    for (int r = 0; r < R; r++) {
        STI_UNROLL
        for (int i = 0; i < V; i++) acc[r][i] = vf_set(0);
    }
    for (int k = 0; k < K; k++, B += ldb) {
        vf b[HYB_VECTORS];
        STI_UNROLL
        for (int i = 0; i < V; i++) b[i] = vf_load(B + i * VL);
        STI_UNROLL
        for (int r = 0; r < R; r++) {
            vf a = vf_set(x.x[(size_t)r * x.row + (size_t)k * x.step]);
            STI_UNROLL
            for (int i = 0; i < V; i++) acc[r][i] = vf_fma(a, b[i], acc[r][i]);
        }
    }
    STI_UNROLL
    for (int r = 0; r < R; r++) {
        STI_UNROLL
        for (int i = 0; i < V; i++)
            vf_store(y + (size_t)r * (size_t)ldy + i * VL, acc[r][i]);
    }
}

#define HYB_PRODUCT_CASE(R, V)                                                         \
    case R:                                                                            \
        product_tile(R, V, K, x, B, ldb, y, ldy);                                      \
        break;
#define HYB_PRODUCT_ROWS(R, V)                                                         \
    switch (R) {                                                                       \
        HYB_PRODUCT_CASE(1, V)                                                         \
        HYB_PRODUCT_CASE(2, V)                                                         \
        HYB_PRODUCT_CASE(3, V)                                                         \
        HYB_PRODUCT_CASE(4, V)                                                         \
        HYB_PRODUCT_CASE(5, V)                                                         \
        HYB_PRODUCT_CASE(6, V)                                                         \
    }

static void hyb_wide_columns(int R, int K, hyb_left x, const float *B, int ldb,
                             float *y, int ldy)
{
    HYB_PRODUCT_ROWS(R, HYB_VECTORS)
}

static void hyb_narrow_columns(int R, int K, hyb_left x, const float *B, int ldb,
                               float *y, int ldy)
{
    HYB_PRODUCT_ROWS(R, 1)
}

/* Fewer columns than a vector, one row. */
static void hyb_last_columns(int K, int N, hyb_left x, const float *B, int ldb,
                             float *y)
{
    vf acc = vf_set(0);
    for (int k = 0; k < K; k++, B += ldb)
        acc = vf_fma(vf_set(x.x[(size_t)k * x.step]), vf_load_part(B, N), acc);
    vf_store_part(y, acc, N);
}

STI_INLINE void hyb_product_any(int n, int K, int N, hyb_left x, const float *B,
                                int ldb, float *y, int ldy)
{
    for (int r = 0, R; r < n; r += R) {
        int tiles =
            (n - r + HYB_ROWS - 1) / HYB_ROWS; /* of rows, as equal as possible */
        R = (n - r + tiles - 1) / tiles;
        const hyb_left xr = hyb_left_from(x, r);
        float *yr = y + (size_t)r * (size_t)ldy;
        int c = 0;
        for (; c + HYB_VECTORS * VL <= N; c += HYB_VECTORS * VL)
            hyb_wide_columns(R, K, xr, B + c, ldb, yr + c, ldy);
        for (; c + VL <= N; c += VL)
            hyb_narrow_columns(R, K, xr, B + c, ldb, yr + c, ldy);
        for (int i = 0; c < N && i < R; i++)
            hyb_last_columns(K, N - c, hyb_left_from(xr, i), B + c, ldb,
                             yr + (size_t)i * (size_t)ldy + c);
    }
}

static void hyb_product(int n, int K, int N, const float *x, int ldx, const float *B,
                        int ldb, float *y, int ldy)
{
    hyb_product_any(n, K, N, (hyb_left){x, (size_t)ldx, 1}, B, ldb, y, ldy);
}

static void hyb_product_t(int n, int K, int N, const float *x, int ldx, const float *B,
                          int ldb, float *y, int ldy)
{
    hyb_product_any(n, K, N, (hyb_left){x, 1, (size_t)ldx}, B, ldb, y, ldy);
}

/* ---- Feature maps: a NaN stays a NaN -------------------------------------- */

static void hyb_relu_features(const sti_hybrid_features_args *a, const float *u,
                              float *phi)
{
    for (int i = 0; i < a->F; i += VL) {
        vf x = vf_fma(vf_load_some(u + i, a->F - i), vf_set(a->scale), vf_set(a->bias));
        x = vf_max(vf_set(0), x);
        vf_store_some(phi + i, vf_max(vf_set(a->floor), x), a->F - i);
    }
}

/* phi[n] /= sum, kept above floor. */
STI_INLINE void hyb_normalize(float *phi, int n, float sum, float floor)
{
    for (int i = 0; i < n; i += VL) {
        vf x = vf_div(vf_load_some(phi + i, n - i), vf_set(sum));
        vf_store_some(phi + i, vf_max(vf_set(floor), x), n - i);
    }
}

/* STILL eq. 6, second line. */
static void hyb_features(const sti_hybrid_features_args *a, float *u, float *phi)
{
    const int F = a->F;
    if (a->kind == STI_MAP_RELU) {
        hyb_relu_features(a, u, phi);
        return;
    }
    for (int i = F; i % VL != 0; i++) u[i] = u[0]; /* changes no extreme */
    vf top = vf_set(-INFINITY), bottom = vf_set(INFINITY);
    for (int i = 0; i < F; i += VL) {
        vf x = vf_mul(vf_load(u + i), vf_set(a->scale));
        vf_store(u + i, x);
        top = vf_max(top, x);
        bottom = vf_min(bottom, x);
    }
    top = vf_set(vf_hmax(top));
    bottom = vf_set(-vf_hmax(vf_sub(vf_set(0), bottom)));
    vf sum = vf_set(0), sum_minus = vf_set(0);
    for (int i = 0; i < F; i += VL) {
        const vf x = vf_load(u + i);
        vf_store_some(phi + i, vf_exp(vf_sub(x, top)), F - i);
        sum = vf_add(sum, vf_load_some(phi + i, F - i));
        vf_store_some(phi + F + i, vf_exp(vf_sub(bottom, x)), F - i);
        sum_minus = vf_add(sum_minus, vf_load_some(phi + F + i, F - i));
    }
    hyb_normalize(phi, F, vf_hsum(sum), a->floor);
    hyb_normalize(phi + F, F, vf_hsum(sum_minus), a->floor);
}

/* ---- Rows ---------------------------------------------------------------- */

/* Lanes outside [lo, hi) of the vector at j are -infinity. */
STI_INLINE vf hyb_visible(const float *s, int j, int lo, int hi)
{
    if (j >= lo && j + VL <= hi) return vf_load(s + j);
    float x[VL];
    for (int i = 0; i < VL; i++)
        x[i] = j + i >= lo && j + i < hi ? s[j + i] : -INFINITY;
    return vf_load(x);
}

static void hyb_lse(const float *s, int lo, int hi, float *m, float *l)
{
    const int first = lo / VL * VL;
    vf top = vf_set(-INFINITY), sum = vf_set(0);
    for (int j = first; j < hi; j += VL) top = vf_max(top, hyb_visible(s, j, lo, hi));
    *m = vf_hmax(top);
    top = vf_set(*m);
    for (int j = first; j < hi; j += VL)
        sum = vf_add(sum, vf_exp(vf_sub(hyb_visible(s, j, lo, hi), top)));
    *l = vf_hsum(sum);
}

static void hyb_receive(float *sum, const float *s, float m, float l, int n)
{
    for (int i = 0; i < n; i += VL) {
        const int c = n - i;
        const vf w =
            vf_div(vf_exp(vf_sub(vf_load_some(s + i, c), vf_set(m))), vf_set(l));
        vf_store_some(sum + i, vf_add(vf_load_some(sum + i, c), w), c);
    }
}

static void hyb_add(float *sum, float *comp, float a, const float *x, int n)
{
    for (int i = 0; !comp && i < n; i += VL) {
        const int c = n - i;
        const vf was = vf_load_some(sum + i, c);
        vf_store_some(sum + i, vf_fma(vf_set(a), vf_load_some(x + i, c), was), c);
    }
    if (!comp) return;
    for (int i = 0; i < n; i += VL) {
        const int c = n - i;
        const vf was = vf_load_some(sum + i, c);
        const vf more =
            vf_fma(vf_set(a), vf_load_some(x + i, c), vf_load_some(comp + i, c));
        const vf now = vf_add(was, more);
        vf_store_some(sum + i, now, c);
        vf_store_some(comp + i, vf_sub(more, vf_sub(now, was)), c);
    }
}

/* STILL eq. 7: twice the sigmoid of the gate's logits, times a. */
STI_INLINE vf hyb_gate(const float *gate, float a, int n)
{
    if (!gate) return vf_set(a);
    const vf e = vf_exp(vf_sub(vf_set(0), vf_load_some(gate, n)));
    return vf_div(vf_set(2 * a), vf_add(vf_set(1), e));
}

/* STILL eq. 10. lin: NULL while nothing is folded. */
static void hyb_output(float *y, const float *o, float keep, const float *lin,
                       const float *gate, float a, float den, int n)
{
    for (int i = 0; !lin && i < n; i += VL) {
        const vf x = vf_mul(vf_load_some(o + i, n - i), vf_set(keep));
        vf_store_some(y + i, vf_div(x, vf_set(den)), n - i);
    }
    for (int i = 0; lin && i < n; i += VL) {
        const vf x = vf_fma(vf_load_some(lin + i, n - i),
                            hyb_gate(gate ? gate + i : NULL, a, n - i),
                            vf_mul(vf_load_some(o + i, n - i), vf_set(keep)));
        vf_store_some(y + i, vf_div(x, vf_set(den)), n - i);
    }
}

#endif
