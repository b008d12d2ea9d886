/* gemm_code.h - the kernels of gemm.h over the vectors of simd.h. */
#ifndef STI_BACKEND_CPU_TRAIN_GEMM_CODE_H
#define STI_BACKEND_CPU_TRAIN_GEMM_CODE_H

#include "backend/cpu/dense/matmul_float_code.h"
#include "backend/cpu/train/gemm.h"

/* 32 registers: 8 x 3 sums, 3 of B, one of A. 16 registers: 6 x 2, 2 of B, one of A. */
enum {
    GEMM_ROWS = V_REGS == 32 ? 8 : 6,
    GEMM_VECTORS = V_REGS == 32 ? 3 : 2,
    GEMM_STRIP = GEMM_VECTORS * VL,
    GEMM_DEPTH = STI_GEMM_DEPTH,
};

/* ---- Products ------------------------------------------------------------ */

/* One tile, of which the first `vectors` of a strip are wanted. */
STI_INLINE void gemm_tile(const bool across, const int vectors, const float *a,
                          int depth, const float *b, float *C, int64_t ldc, int rows,
                          int cols, float scale, bool add)
{
    vf s[GEMM_ROWS][GEMM_VECTORS];
    STI_UNROLL for (int i = 0; i < GEMM_ROWS; i++)
    {
        STI_UNROLL for (int j = 0; j < vectors; j++) s[i][j] = vf_set(0);
    }
    for (int k = 0; k < depth; k++, b += GEMM_STRIP, a += across ? GEMM_ROWS : 1) {
        vf v[GEMM_VECTORS];
        STI_UNROLL for (int j = 0; j < vectors; j++) v[j] = vf_load(b + j * VL);
        STI_UNROLL for (int i = 0; i < GEMM_ROWS; i++)
        {
            const vf x = vf_set(a[across ? i : i * GEMM_DEPTH]);
            STI_UNROLL for (int j = 0; j < vectors; j++) s[i][j] =
                vf_fma(x, v[j], s[i][j]);
        }
    }
    const vf by = vf_set(scale);
    if (rows == GEMM_ROWS && cols == vectors * VL) {
        STI_UNROLL for (int i = 0; i < GEMM_ROWS; i++)
        {
            STI_UNROLL for (int j = 0; j < vectors; j++)
            {
                float *to = C + i * ldc + j * VL;
                vf_store(to,
                         add ? vf_fma(by, s[i][j], vf_load(to)) : vf_mul(by, s[i][j]));
            }
        }
        return;
    }
    float sums[GEMM_ROWS][GEMM_STRIP]; /* an edge of C */
    STI_UNROLL for (int i = 0; i < GEMM_ROWS; i++)
    {
        STI_UNROLL for (int j = 0; j < vectors; j++)
            vf_store(sums[i] + j * VL, s[i][j]);
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j += VL) {
            const int n = cols - j < VL ? cols - j : VL;
            const vf x = vf_load(sums[i] + j);
            float *to = C + i * ldc + j;
            vf_store_part(to, add ? vf_fma(by, x, vf_load_part(to, n)) : vf_mul(by, x),
                          n);
        }
}

STI_INLINE void gemm_sweep_strips(const bool across, const float *a, int depth,
                                  const float *b, float *C, int64_t ldc, int rows,
                                  int cols, float scale, bool add)
{
    for (; cols > 0;
         cols -= GEMM_STRIP, C += GEMM_STRIP, b += GEMM_DEPTH * GEMM_STRIP) {
        const int n = cols < GEMM_STRIP ? cols : GEMM_STRIP;
        if (n > 2 * VL)
            gemm_tile(across, GEMM_VECTORS, a, depth, b, C, ldc, rows, n, scale, add);
        else if (n > VL)
            gemm_tile(across, 2, a, depth, b, C, ldc, rows, n, scale, add);
        else
            gemm_tile(across, 1, a, depth, b, C, ldc, rows, n, scale, add);
    }
}

static void gemm_sweep(const float *a, bool across, int depth, const float *b, float *C,
                       int64_t ldc, int rows, int cols, float scale, bool add)
{
    if (across)
        gemm_sweep_strips(true, a, depth, b, C, ldc, rows, cols, scale, add);
    else
        gemm_sweep_strips(false, a, depth, b, C, ldc, rows, cols, scale, add);
}

/* ---- Copies of B --------------------------------------------------------- */

/* Where column c of row q lies. A vector of columns never straddles strips. */
STI_INLINE float *gemm_place(float *b, int q, int c)
{
    return b + (size_t)(c / GEMM_STRIP) * (GEMM_DEPTH * GEMM_STRIP) +
           (size_t)(q * GEMM_STRIP + c % GEMM_STRIP);
}

STI_INLINE void gemm_copy_typed(const sti_dtype t, const uint8_t *from, int cols,
                                float *b, int q)
{
    int c = 0;
    for (; c + VL <= cols; c += VL)
        vf_store(gemm_place(b, q, c), load_weights(t, from, c));
    if (c < cols) {
        vf_store(gemm_place(b, q, c), load_weights_part(t, from, c, cols - c));
        c += VL;
    }
    for (; c % GEMM_STRIP != 0; c += VL) vf_store(gemm_place(b, q, c), vf_set(0));
}

static void gemm_copy_row(sti_dtype t, const uint8_t *from, int cols, float *b, int q)
{
    if (t == STI_F32)
        gemm_copy_typed(STI_F32, from, cols, b, q);
    else if (t == STI_F16)
        gemm_copy_typed(STI_F16, from, cols, b, q);
    else
        gemm_copy_typed(STI_BF16, from, cols, b, q);
}

/* One block of a group as bytes, row by row. */
STI_INLINE void gemm_expand(const bool wide, const uint32_t flip, const uint8_t *from,
                            uint8_t q[STI_GROUP][STI_BLOCK_K])
{
    for (int p = 0; p < (wide ? 8 : 4); p++)
        for (int r = 0; r < STI_GROUP; r++) {
            uint32_t v;
            memcpy(&v, from + 64 * p + 4 * r, 4);
            const uint32_t low = wide ? v ^ flip : v & 0x0f0f0f0fu;
            memcpy(q[r] + 4 * p, &low, 4);
            if (wide) continue;
            const uint32_t high = v >> 4 & 0x0f0f0f0fu;
            memcpy(q[r] + 16 + 4 * p, &high, 4);
        }
}

/* w = (q - centre) d + m. Signed bytes are read as w + 128, whichever way they lie. */
STI_INLINE void gemm_copy_blocks(const sti_layout l, bool flip, const uint8_t *from,
                                 int nb, int n, float *b, int q)
{
    const bool wide = l == STI_L_S8 || l == STI_L_S8_MIN;
    const bool has_min = l == STI_L_U4_MIN || l == STI_L_S8_MIN;
    const vf centre = vf_set(wide ? 128.0f : l == STI_L_U4 ? 8.0f : 0.0f);
    const uint32_t to_unsigned = flip ? 0 : 0x80808080u;
    for (int k = 0; k < nb; k++, from += sti_packed_block(l)) {
        uint8_t bytes[STI_GROUP][STI_BLOCK_K];
        float d[STI_GROUP], m[STI_GROUP];
        uint16_t half[2 * STI_GROUP];
        gemm_expand(wide, to_unsigned, from, bytes);
        memcpy(half, from + (wide ? 512 : 256), has_min ? 64 : 32);
        for (int r = 0; r < STI_GROUP; r += VL) {
            vf_store(d + r, vf_load_f16(half + r));
            if (has_min) vf_store(m + r, vf_load_f16(half + STI_GROUP + r));
        }
        for (int c = 0; c < STI_BLOCK_K; c += VL) {
            float *to = gemm_place(b, q, k * STI_BLOCK_K + c);
            for (int r = 0; r < n; r++, to += GEMM_STRIP) {
                const vf x = vf_sub(vf_load_u8(bytes[r] + c), centre),
                         by = vf_set(d[r]);
                vf_store(to, has_min ? vf_fma(x, by, vf_set(m[r])) : vf_mul(x, by));
            }
        }
    }
    for (int c = nb * STI_BLOCK_K; c % GEMM_STRIP != 0; c += VL)
        for (int r = 0; r < n; r++) vf_store(gemm_place(b, q + r, c), vf_set(0));
}

static void gemm_copy_group(sti_layout l, bool flip, const uint8_t *from, int nb, int n,
                            float *b, int q)
{
    switch (l) {
    case STI_L_U4: gemm_copy_blocks(STI_L_U4, flip, from, nb, n, b, q); return;
    case STI_L_U4_MIN: gemm_copy_blocks(STI_L_U4_MIN, flip, from, nb, n, b, q); return;
    case STI_L_S8: gemm_copy_blocks(STI_L_S8, flip, from, nb, n, b, q); return;
    default: gemm_copy_blocks(STI_L_S8_MIN, flip, from, nb, n, b, q); return;
    }
}

#endif
