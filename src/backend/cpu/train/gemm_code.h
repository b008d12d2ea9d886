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

/* A block is unpacked as for any product, w = (q - centre) d + m, its rows are turned
 * from lanes into rows of b. Signed bytes are read as w + 128, whichever way they lie. */
static void gemm_copy_group(const sti_quant_kernels *quant, sti_dtype t,
                            const uint8_t *group, int first, int nb, int n, float *b,
                            int q)
{
    const sti_packing f = sti_packing_of(t);
    const vf centre = vf_set(sti_is_signed(f) ? 128.0f : (float)f.centre);
    const uint8_t turn = sti_is_signed(f) && !quant->s8_flip ? 0x80 : 0;
    _Alignas(64) uint8_t step[8 * STI_STEP], bytes[STI_GROUP][STI_BLOCK_K];
    _Alignas(64) float d[2][STI_GROUP], m[2][STI_GROUP] = {{0}};
    const sti_panel panel = {.type = t, .ng = 1, .q = step, .d = d[0], .m = m[0]};
    for (int k = 0; k < nb; k++) {
        quant->unpack(group, first + k, 1, &panel, 0);
        for (int p = 0; p < 8; p++)
            for (int r = 0; r < STI_GROUP; r++)
                for (int j = 0; j < 4; j++)
                    bytes[r][4 * p + j] = step[STI_STEP * p + 4 * r + j] ^ turn;
        for (int c = 0; c < STI_BLOCK_K; c += VL) {
            const int h = c / (STI_BLOCK_K / f.subs);
            float *to = gemm_place(b, q, k * STI_BLOCK_K + c);
            for (int r = 0; r < n; r++, to += GEMM_STRIP)
                vf_store(to, vf_fma(vf_sub(vf_load_u8(bytes[r] + c), centre),
                                    vf_set(d[h][r]), vf_set(m[h][r])));
        }
    }
    for (int c = nb * STI_BLOCK_K; c % GEMM_STRIP != 0; c += VL)
        for (int r = 0; r < n; r++) vf_store(gemm_place(b, q + r, c), vf_set(0));
}

#endif
