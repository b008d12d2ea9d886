/* embed.c - rows of a matrix as floats.
 *
 * Packed rows are read from the copy that is multiplied with, not from the file: the
 * embedding is the output matrix too in many models, and a row's page brings its
 * neighbours, so that a prompt would pull most of the file's matrix back into memory.
 * Packing loses nothing (packing.h), and a row is computed as sti_dequant does, so results
 * agree bit for bit. */
#include "backend/cpu/dense/matmul.h"
#include "backend/cpu/kernels.h"
#include "file/blocks.h"

/* The 32 quants of row r in the planes of a block. */
static void unpack_quants(const sti_packing f, const uint8_t *block, int r,
                          int q[STI_BLOCK_K])
{
    const uint8_t *low = block + 4 * r, *high = low + (size_t)STI_STEP * (size_t)f.low;
    for (int k = 0; k < STI_BLOCK_K; k++) {
        const int step = k / 4, at = k % 4;
        q[k] = low[step % f.low * STI_STEP + at] >> step / f.low * f.low &
               ((1 << f.low) - 1);
        if (f.high)
            q[k] |= (high[step % f.high * STI_STEP + at] >> step / f.high * f.high &
                     ((1 << f.high) - 1))
                    << f.low;
    }
}

/* Scale and minimum of row r in one half of a block; both halves have the same where
 * f.subs is 1. head: f16 d[16], f16 m[16] of the block or super-block. */
static void unpack_scales(sti_dtype t, const uint8_t *head, const uint8_t *scales,
                          int r, int half, float *d, float *m)
{
    const sti_packing f = sti_packing_of(t);
    *d = sti_load_f16(head + 2 * r);
    *m = f.min ? sti_load_f16(head + 32 + 2 * r) : 0;
    if (f.unit == 1) return;
    const uint8_t own = scales[f.subs == 2 && half ? 16 + r : r];
    if (f.subs == 1 && f.min) { /* a scale, then a minimum */
        *d *= (float)own;
        *m *= (float)scales[16 + r];
    } else if (f.min) {
        *d *= (float)(own & 15);
        *m *= (float)(own >> 4);
    } else {
        *d *= (float)(int8_t)own;
    }
}

/* Row r of a group of nb blocks. flip: 8-bit weights are stored + 128. */
static void unpack_row(sti_dtype t, const uint8_t *group, int r, int nb, bool flip,
                       float *y)
{
    const sti_packing f = sti_packing_of(t);
    for (int b = 0; b < nb; b++, y += STI_BLOCK_K) {
        const uint8_t *super = group + sti_super_at(f, b),
                      *block = super + sti_block_at(f, b),
                      *scales = block + sti_quant_bytes(f);
        int q[STI_BLOCK_K];
        unpack_quants(f, block, r, q);
        for (int half = 0; half < 2; half++) {
            float d, m;
            unpack_scales(t, f.unit == 1 ? scales : super, scales, r, half, &d, &m);
            for (int k = half * 16; k < half * 16 + 16; k++) {
                const int v = f.table      ? f.table[q[k]]
                              : f.low == 8 ? (int8_t)(q[k] ^ (flip ? 0x80 : 0))
                                           : q[k] - f.centre;
                y[k] = f.min ? (float)v * d + m : (float)v * d;
            }
        }
    }
}

still_status sti_cpu_embed(sti_dev *dev, const sti_embed_args *a, still_error *err)
{
    const sti_weight *w = a->w;
    size_t row;
    if (!sti_dtype_bytes(w->type, (uint64_t)w->K, &row))
        return sti_fail(err, STILL_E_ARG, "embed: rows of %lld are no whole blocks",
                        (long long)w->K);
    for (int m = 0; m < a->M; m++) {
        const int32_t i = a->tok[m];
        float *y = a->y + (int64_t)m * w->K;
        if (i < 0 || i >= w->N)
            return sti_fail(err, STILL_E_ARG, "embed: token %d is not in 0..%lld", i,
                            (long long)w->N - 1);
        if (sti_is_packed(w))
            unpack_row(w->type, sti_group_at(w, i / STI_GROUP), i % STI_GROUP,
                       (int)(w->K / STI_BLOCK_K), dev->k->quant->s8_flip, y);
        else
            sti_dequant(w->type, (const uint8_t *)w->data + (size_t)i * row, y, w->K);
    }
    return STILL_OK;
}
