/* panel_code.h - the kernels of panel.h over the vectors of simd.h. */
#ifndef STI_BACKEND_CPU_PANEL_PANEL_CODE_H
#define STI_BACKEND_CPU_PANEL_PANEL_CODE_H

#include <math.h>

#include "backend/cpu/panel/panel.h"
#include "backend/cpu/simd.h"

/* ---- Products ------------------------------------------------------------ */

/* A register tile is ROWS x COLS vectors of C. 32 registers: 6 x 4 sums, 4 of B, one of
 * A; 16 registers: 6 x 2, 2 of B, one of A. DEPTH rows of B, COLS vectors wide, stay in
 * L1 while all rows of A pass. */
enum { PANEL_ROWS = 6, PANEL_COLS = V_REGS == 32 ? 4 : 2, PANEL_DEPTH = 128 };

STI_INLINE void panel_product_tile(const int rows, const int cols, int K,
                                   const float *A, size_t row, size_t col,
                                   const float *B, size_t ldb, float *C, size_t ldc,
                                   bool add)
{
    vf s[PANEL_ROWS][PANEL_COLS];
    STI_UNROLL for (int i = 0; i < rows; i++)
    {
        STI_UNROLL for (int j = 0; j < cols; j++) s[i][j] =
            add ? vf_load(C + (size_t)i * ldc + j * VL) : vf_set(0);
    }
    for (int k = 0; k < K; k++, A += col, B += ldb) {
        vf b[PANEL_COLS];
        STI_UNROLL for (int j = 0; j < cols; j++) b[j] = vf_load(B + j * VL);
        STI_UNROLL for (int i = 0; i < rows; i++)
        {
            vf a = vf_set(A[(size_t)i * row]);
            STI_UNROLL for (int j = 0; j < cols; j++) s[i][j] =
                vf_fma(a, b[j], s[i][j]);
        }
    }
    STI_UNROLL for (int i = 0; i < rows; i++)
    {
        STI_UNROLL for (int j = 0; j < cols; j++)
            vf_store(C + (size_t)i * ldc + j * VL, s[i][j]);
    }
}

/* All M rows of `cols` vectors of C, over K <= DEPTH. */
STI_INLINE void panel_product_strip(const int cols, int M, int K, const float *A,
                                    size_t row, size_t col, const float *B, size_t ldb,
                                    float *C, size_t ldc, bool add)
{
    int m = 0;
    for (; m + PANEL_ROWS <= M; m += PANEL_ROWS)
        panel_product_tile(PANEL_ROWS, cols, K, A + (size_t)m * row, row, col, B, ldb,
                           C + (size_t)m * ldc, ldc, add);
    for (; m + 2 <= M; m += 2)
        panel_product_tile(2, cols, K, A + (size_t)m * row, row, col, B, ldb,
                           C + (size_t)m * ldc, ldc, add);
    if (m < M)
        panel_product_tile(1, cols, K, A + (size_t)m * row, row, col, B, ldb,
                           C + (size_t)m * ldc, ldc, add);
}

static void panel_multiply(int M, int N, int K, const float *A, size_t row, size_t col,
                           const float *B, size_t ldb, float *C, size_t ldc, bool add)
{
    if (K == 0 && !add)
        for (int m = 0; m < M; m++) memset(C + (size_t)m * ldc, 0, (size_t)N * 4);
    for (int k = 0; k < K; k += PANEL_DEPTH, add = true) {
        const int deep = K - k < PANEL_DEPTH ? K - k : PANEL_DEPTH;
        const float *a = A + (size_t)k * col, *b = B + (size_t)k * ldb;
        int n = 0;
        for (; n + PANEL_COLS * VL <= N; n += PANEL_COLS * VL)
            panel_product_strip(PANEL_COLS, M, deep, a, row, col, b + n, ldb, C + n,
                                ldc, add);
        if (PANEL_COLS == 4 && n + 2 * VL <= N) {
            panel_product_strip(2, M, deep, a, row, col, b + n, ldb, C + n, ldc, add);
            n += 2 * VL;
        }
        for (; n < N; n += VL)
            panel_product_strip(1, M, deep, a, row, col, b + n, ldb, C + n, ldc, add);
    }
}

/* Eight rows at a time: their column is one short store, and 8 x 16 floats of x are
 * read from lines that stay in L1. */
static void panel_transpose(const float *x, size_t ldx, int rows, int cols, float scale,
                            float *y, size_t ldy)
{
    enum { STEP = 8 };
    int r = 0;
    for (; r + STEP <= rows; r += STEP)
        for (int c = 0; c < cols; c++) {
            const float *from = x + (size_t)r * ldx + c;
            float *to = y + (size_t)c * ldy + r;
            STI_UNROLL for (int i = 0; i < STEP; i++) to[i] =
                scale * from[(size_t)i * ldx];
        }
    for (int c = 0; c < cols; c++) {
        float *to = y + (size_t)c * ldy;
        for (int i = r; i < rows; i++) to[i] = scale * x[(size_t)i * ldx + c];
        memset(to + rows, 0, (ldy - (size_t)rows) * sizeof *to);
    }
}

/* ---- Lanes --------------------------------------------------------------- */

static void panel_lane_max(const float *x, int n, size_t ld, int lanes, float *top)
{
    for (int l = 0; l < lanes; l += VL) {
        vf m = vf_load(top + l);
        for (int j = 0; j < n; j++) m = vf_max(m, vf_load(x + (size_t)j * ld + l));
        vf_store(top + l, m);
    }
}

static void panel_exp_shifted(float *x, int n, size_t ld, int lanes, const float *shift,
                              float factor, float *sum)
{
    for (int l = 0; l < lanes; l += VL) {
        vf s = vf_load(sum + l), by = vf_load(shift + l), f = vf_set(factor);
        for (int j = 0; j < n; j++) {
            float *p = x + (size_t)j * ld + l;
            vf w = vf_mul(f, vf_exp(vf_sub(vf_load(p), by)));
            vf_store(p, w);
            s = vf_add(s, w);
        }
        vf_store(sum + l, s);
    }
}

static void panel_lane_sum(const float *x, int n, size_t ld, int lanes, float *sum)
{
    for (int l = 0; l < lanes; l += VL) {
        vf s = vf_load(sum + l);
        for (int j = 0; j < n; j++) s = vf_add(s, vf_load(x + (size_t)j * ld + l));
        vf_store(sum + l, s);
    }
}

static void panel_dot(const float *x, const float *d, int n, size_t ld, int lanes,
                      float *sum)
{
    for (int l = 0; l < lanes; l += VL) {
        vf s = vf_load(sum + l);
        for (int j = 0; j < n; j++) {
            const size_t at = (size_t)j * ld + (size_t)l;
            s = vf_fma(vf_load(x + at), vf_load(d + at), s);
        }
        vf_store(sum + l, s);
    }
}

static void panel_softmax_backward(const float *x, float *d, int n, size_t ld,
                                   int lanes, const float *bias, float *sum)
{
    for (int l = 0; l < lanes; l += VL) {
        vf s = vf_load(sum + l), b = vf_load(bias + l);
        for (int j = 0; j < n; j++) {
            const size_t at = (size_t)j * ld + (size_t)l;
            vf g = vf_mul(vf_load(x + at), vf_add(vf_load(d + at), b));
            vf_store(d + at, g);
            s = vf_add(s, g);
        }
        vf_store(sum + l, s);
    }
}

static void panel_exp_moments(const float *x, int n, size_t ld, int lanes,
                              const float *shift, float *sum, float *mean)
{
    for (int l = 0; l < lanes; l += VL) {
        vf s = vf_load(sum + l), m = vf_load(mean + l), by = vf_load(shift + l);
        for (int j = 0; j < n; j++) {
            const vf above = vf_sub(vf_load(x + (size_t)j * ld + l), by);
            const vf e = vf_exp(above);
            s = vf_add(s, e);
            m = vf_fma(e, above, m);
        }
        vf_store(sum + l, s);
        vf_store(mean + l, m);
    }
}

static void panel_match(float *x, const float *d, int n, size_t ld, int lanes,
                        float floor, const float *share, const float *weight,
                        float *sum)
{
    const vf least = vf_set(floor);
    for (int l = 0; l < lanes; l += VL) {
        vf s = vf_load(sum + l), a = vf_load(share + l), w = vf_load(weight + l);
        for (int j = 0; j < n; j++) {
            const size_t at = (size_t)j * ld + (size_t)l;
            const vf p = vf_load(x + at), f = vf_load(d + at);
            const vf felt = vf_max(f, least);
            s = vf_fma(p, vf_log(felt), s);
            const vf pull = vf_if_above(f, least, vf_div(vf_mul(w, p), felt));
            vf_store(x + at, vf_sub(a, pull));
        }
        vf_store(sum + l, s);
    }
}

/* ---- Rows ---------------------------------------------------------------- */

STI_INLINE float panel_dot_of(const float *x, const float *y, int n)
{
    vf s = vf_set(0);
    for (int i = 0; i < n; i += VL) s = vf_fma(vf_load(x + i), vf_load(y + i), s);
    return vf_hsum(s);
}

static void panel_row_dots(const float *x, size_t ldx, const float *y, size_t ldy,
                           int rows, int n, float *out)
{
    for (int r = 0; r < rows; r++)
        out[r] = panel_dot_of(x + (size_t)r * ldx, y + (size_t)r * ldy, n);
}

static void panel_add_scaled(float *y, const float *x, float a, int n)
{
    for (int i = 0; i < n; i += VL)
        vf_store(y + i, vf_fma(vf_set(a), vf_load(x + i), vf_load(y + i)));
}

static void panel_gate(float *y, const float *x, int n)
{
    for (int i = 0; i < n; i += VL) {
        vf e = vf_exp(vf_sub(vf_set(0), vf_load(x + i)));
        vf_store(y + i, vf_div(vf_set(2), vf_add(vf_set(1), e)));
    }
}

static void panel_softmax(float *y, const float *x, int n)
{
    const int padded = sti_panel_padded(n);
    vf top = vf_set(-INFINITY), sum = vf_set(0);
    memcpy(y, x, (size_t)n * sizeof *y);
    for (int i = n; i < padded; i++) y[i] = -INFINITY;
    for (int i = 0; i < padded; i += VL) top = vf_max(top, vf_load(y + i));
    top = vf_set(vf_hmax(top));
    for (int i = 0; i < padded; i += VL) {
        vf e = vf_exp(vf_sub(vf_load(y + i), top));
        vf_store(y + i, e);
        sum = vf_add(sum, e);
    }
    sum = vf_set(vf_hsum(sum));
    for (int i = 0; i < padded; i += VL) vf_store(y + i, vf_div(vf_load(y + i), sum));
}

static void panel_decay(float *S, size_t ld, int rows, int n, const float *keep,
                        const float *add, const float *v)
{
    for (int r = 0; r < rows; r++, S += ld) {
        const vf a = vf_set(keep[r]), b = vf_set(add[r]);
        for (int i = 0; i < n; i += VL)
            vf_store(S + i, vf_fma(a, vf_load(S + i), vf_mul(b, vf_load(v + i))));
    }
}

/* ---- Feature maps: a NaN stays one, it is no small feature --------------- */

/* What the norm does to one row: u = scale * raw. */
typedef struct panel_row_norm {
    float x, raw; /* |x|, max(|raw|, 1e-6) */
    bool kept;    /* |raw| is above 1e-6 */
    float scale;
} panel_row_norm;

STI_INLINE panel_row_norm panel_norm_of(const sti_panel_map *m, const float *x,
                                        const float *raw)
{
    if (!m->norm_preserved) return (panel_row_norm){.scale = 1};
    const float smallest = 1e-6f;
    panel_row_norm r = {.x = sqrtf(panel_dot_of(x, x, m->Dp))};
    const float norm = sqrtf(panel_dot_of(raw, raw, m->Fp));
    r.kept = norm > smallest;
    r.raw = r.kept ? norm : smallest;
    r.scale = r.x / r.raw;
    return r;
}

/* p = softmax(scale * raw); padding comes out as 0. */
STI_INLINE void panel_half_softmax(const sti_panel_map *m, const float *raw,
                                   float scale, float *p)
{
    vf top = vf_set(-INFINITY), by = vf_set(scale), sum = vf_set(0);
    for (int i = 0; i < m->Fp; i += VL) {
        vf u = vf_fma(vf_load(raw + i), by, vf_load(m->edge + i));
        vf_store(p + i, u);
        top = vf_max(top, u);
    }
    top = vf_set(vf_hmax(top));
    for (int i = 0; i < m->Fp; i += VL) {
        vf e = vf_exp(vf_sub(vf_load(p + i), top));
        vf_store(p + i, e);
        sum = vf_add(sum, e);
    }
    sum = vf_set(vf_hsum(sum));
    for (int i = 0; i < m->Fp; i += VL) vf_store(p + i, vf_div(vf_load(p + i), sum));
}

/* Features of one row before the floor. */
STI_INLINE void panel_row_features(const sti_panel_map *m, const float *raw,
                                   float scale, float *phi)
{
    if (m->kind == STI_MAP_RELU) {
        for (int i = 0; i < m->Fp; i += VL) {
            vf u = vf_fma(vf_load(raw + i), vf_set(scale), vf_set(m->bias));
            vf_store(phi + i, vf_max(vf_set(0), vf_add(u, vf_load(m->edge + i))));
        }
        return;
    }
    panel_half_softmax(m, raw, scale, phi);
    panel_half_softmax(m, raw, -scale, phi + m->Fp);
}

static void panel_features(const sti_panel_map *m, const float *x, const float *raw,
                           int rows, float *phi)
{
    for (int r = 0; r < rows; r++, x += m->Dp, raw += m->Fp, phi += m->Pp) {
        panel_row_features(m, raw, panel_norm_of(m, x, raw).scale, phi);
        for (int half = 0; half < m->Pp; half += m->Fp)
            for (int i = 0; i < m->Fp; i += VL)
                vf_store(phi + half + i,
                         vf_max(vf_load(m->floor_at + i), vf_load(phi + half + i)));
    }
}

/* du [Fp] of one row; below the floor a feature is a constant. */
STI_INLINE void panel_row_features_backward(const sti_panel_map *m, const float *phi,
                                            const float *dphi, float *du)
{
    const int Fp = m->Fp;
    if (m->kind == STI_MAP_RELU) {
        for (int i = 0; i < Fp; i++)
            du[i] = phi[i] > 0 && phi[i] >= m->floor_at[i] ? dphi[i] : 0;
        return;
    }
    /* Each half: d softmax(x)_i = p_i (dphi_i - sum p dphi); x = -u in the second. */
    memset(du, 0, (size_t)Fp * sizeof *du);
    for (int half = 0; half < 2; half++) {
        const float *p = phi + half * Fp, *d = dphi + half * Fp;
        float kept[STI_HEAD_DIM_MAX];
        for (int i = 0; i < Fp; i++) kept[i] = p[i] >= m->floor_at[i] ? d[i] : 0;
        const vf mean = vf_set(panel_dot_of(p, kept, Fp)),
                 sign = vf_set(half ? -1.0f : 1.0f);
        for (int i = 0; i < Fp; i += VL) {
            vf g = vf_mul(vf_load(p + i), vf_sub(vf_load(kept + i), mean));
            vf_store(du + i, vf_fma(sign, g, vf_load(du + i)));
        }
    }
}

/* u = raw |x| / |raw|:  draw = |x|/|raw| (du - raw (raw.du)/|raw|^2),
 * d|x| = raw.du / |raw|. At x = 0 the gradient of |x| is 0; under its floor |raw| is a
 * constant. */
static float panel_features_backward(const sti_panel_map *m, const float *x, float *raw,
                                     int rows, const float *dphi, float *dx)
{
    float phi[2 * STI_HEAD_DIM_MAX], du[STI_HEAD_DIM_MAX], bias = 0;
    for (int r = 0; r < rows; r++, x += m->Dp, raw += m->Fp, dphi += m->Pp) {
        const panel_row_norm norm = panel_norm_of(m, x, raw);
        panel_row_features(m, raw, norm.scale, phi);
        panel_row_features_backward(m, phi, dphi, du);
        if (m->kind == STI_MAP_RELU)
            for (int i = 0; i < m->F; i++) bias += du[i];
        if (m->norm_preserved) {
            const float along = panel_dot_of(raw, du, m->Fp) / norm.raw;
            if (norm.kept) panel_add_scaled(du, raw, -along / norm.raw, m->Fp);
            for (int i = 0; i < m->Fp; i++) du[i] *= norm.scale;
            if (dx && norm.x > 0)
                panel_add_scaled(dx + (size_t)r * (size_t)m->Dp, x, along / norm.x,
                                 m->Dp);
        }
        memcpy(raw, du, (size_t)m->Fp * sizeof *raw);
    }
    return bias;
}

#endif
