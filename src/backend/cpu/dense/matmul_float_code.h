/* matmul_float_code.h - products with float weights, rows as stored (F32, F16, BF16).
 *
 * Lanes run along k: element (x row, w row) is one register of partial sums, fused
 * multiply-adds over k in order, a tail padded with zeros, then vf_hsum. Tiles of
 * FLOAT_W_ROWS weight rows by FLOAT_X_ROWS rows of x share their loads; a smaller tile
 * computes each element by the same steps. */
#ifndef STI_BACKEND_CPU_DENSE_MATMUL_FLOAT_CODE_H
#define STI_BACKEND_CPU_DENSE_MATMUL_FLOAT_CODE_H

#include "backend/cpu/dense/matmul.h"

/* 32 registers: 4 x 6 sums, 4 weights, one x. 16 registers: 4 x 2, 4 weights, one x. */
enum { FLOAT_W_ROWS = 4, FLOAT_X_ROWS = V_REGS == 32 ? 6 : 2 };

STI_INLINE vf load_bf16(const uint16_t *p)
{
#if defined(__AVX512F__)
    __m512i v = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
#elif defined(__AVX2__)
    __m256i v = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
#else
    float x[VL];
    for (int i = 0; i < VL; i++) x[i] = sti_bf16_to_f32(p[i]);
    return vf_load(x);
#endif
}

/* VL weights from element k on. Files promise no alignment and vf_load needs none.
 * (A copy of 32 bytes would be stored in two halves, and loading the whole would wait
 * for both to leave the store buffer.) */
STI_INLINE vf load_weights(const sti_dtype t, const uint8_t *row, int64_t k)
{
    if (t == STI_F32) return vf_load((const float *)(const void *)(row + k * 4));
    uint16_t h[VL];
    memcpy(h, row + k * 2, sizeof h);
    return t == STI_F16 ? vf_load_f16(h) : load_bf16(h);
}

STI_INLINE vf load_weights_part(const sti_dtype t, const uint8_t *row, int64_t k, int n)
{
    uint8_t pad[VL * 4] = {0};
    size_t size = t == STI_F32 ? 4 : 2;
    memcpy(pad, row + (size_t)k * size, (size_t)n * size);
    return load_weights(t, pad, 0);
}

/* c[i][j], i < rows of x, j < FLOAT_W_ROWS, ldc = STI_GROUP. A single row of x is bound
 * by memory: rows are too short for the hardware to see a stream, so the place `ahead`
 * bytes on is asked for. */
STI_INLINE void float_tile(const sti_dtype t, const int rows,
                           const uint8_t *const w[FLOAT_W_ROWS], size_t ahead,
                           const float *x, size_t ldx, int64_t K, float *c)
{
    const size_t size = t == STI_F32 ? 4 : 2;
    vf s[FLOAT_X_ROWS][FLOAT_W_ROWS];
    STI_UNROLL for (int i = 0; i < rows; i++)
    {
        STI_UNROLL for (int j = 0; j < FLOAT_W_ROWS; j++) s[i][j] = vf_set(0);
    }
    int64_t k = 0;
    for (; k + VL <= K; k += VL) {
        vf v[FLOAT_W_ROWS];
        STI_UNROLL for (int j = 0; j < FLOAT_W_ROWS; j++)
        {
            v[j] = load_weights(t, w[j], k);
            if (rows == 1) __builtin_prefetch(w[j] + ahead + (size_t)k * size, 0, 2);
        }
        STI_UNROLL for (int i = 0; i < rows; i++)
        {
            vf xi = vf_load(x + (size_t)i * ldx + k);
            STI_UNROLL for (int j = 0; j < FLOAT_W_ROWS; j++) s[i][j] =
                vf_fma(v[j], xi, s[i][j]);
        }
    }
    if (k < K) {
        const int n = (int)(K - k);
        STI_UNROLL for (int j = 0; j < FLOAT_W_ROWS; j++)
        {
            vf v = load_weights_part(t, w[j], k, n);
            STI_UNROLL for (int i = 0; i < rows; i++) s[i][j] =
                vf_fma(v, vf_load_part(x + (size_t)i * ldx + k, n), s[i][j]);
        }
    }
    STI_UNROLL for (int i = 0; i < rows; i++)
    {
        STI_UNROLL for (int j = 0; j < FLOAT_W_ROWS; j++) c[i * STI_GROUP + j] =
            vf_hsum(s[i][j]);
    }
}

/* See sti_dense_kernels.product_float. Rows past n repeat the last one; c has space for
 * them. */
STI_INLINE void product_float(const sti_dtype t, const uint8_t *w, size_t stride, int n,
                              const float *x, size_t ldx, int R, int64_t K, float *c)
{
    const size_t ahead = FLOAT_W_ROWS * stride;
    for (int j0 = 0; j0 < n; j0 += FLOAT_W_ROWS) {
        const uint8_t *row[FLOAT_W_ROWS];
        for (int j = 0; j < FLOAT_W_ROWS; j++)
            row[j] = w + stride * (size_t)(j0 + j < n ? j0 + j : n - 1);
        int i = 0;
        for (; i + FLOAT_X_ROWS <= R; i += FLOAT_X_ROWS)
            float_tile(t, FLOAT_X_ROWS, row, ahead, x + (size_t)i * ldx, ldx, K,
                       c + i * STI_GROUP + j0);
        for (; i + 2 <= R; i += 2)
            float_tile(t, 2, row, ahead, x + (size_t)i * ldx, ldx, K,
                       c + i * STI_GROUP + j0);
        if (i < R)
            float_tile(t, 1, row, ahead, x + (size_t)i * ldx, ldx, K,
                       c + i * STI_GROUP + j0);
    }
}

/* See sti_dense_kernels.store. */
STI_INLINE void store_rows(float *y, int64_t ldy, const float *c, int ldc, int R,
                           int cols, const float *bias, const bool accumulate)
{
    for (int i = 0; i < R; i++, y += ldy, c += ldc) {
        int j = 0;
        for (; j + VL <= cols; j += VL) {
            vf v = vf_load(c + j);
            if (bias) v = vf_add(v, vf_load(bias + j));
            if (accumulate) v = vf_add(vf_load(y + j), v);
            vf_store(y + j, v);
        }
        for (; j < cols; j++) {
            float v = bias ? c[j] + bias[j] : c[j];
            y[j] = accumulate ? y[j] + v : v;
        }
    }
}

static void dense_store(float *y, int64_t ldy, const float *c, int ldc, int R, int cols,
                        const float *bias, bool accumulate)
{
    if (accumulate)
        store_rows(y, ldy, c, ldc, R, cols, bias, true);
    else
        store_rows(y, ldy, c, ldc, R, cols, bias, false);
}

static void dense_product_float(sti_dtype t, const void *w, size_t stride, int n,
                                const float *x, size_t ldx, int R, int64_t K, float *c)
{
    if (t == STI_F32)
        product_float(STI_F32, w, stride, n, x, ldx, R, K, c);
    else if (t == STI_F16)
        product_float(STI_F16, w, stride, n, x, ldx, R, K, c);
    else
        product_float(STI_BF16, w, stride, n, x, ldx, R, K, c);
}

#endif
