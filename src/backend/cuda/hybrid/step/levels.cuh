/* levels.cuh - tokens of a quantized list (stored.cuh) as operands of tensor cores, for
 * the products of tiles.cuh. Levels come from memory to the lanes that multiply them and
 * nowhere else: the numbers of a row may be taken in any order, if those of the other
 * operand are.
 *
 *   keys    rows g and g + 8 of a tile; of a group of 32 numbers eight in each of four
 *           lanes. Levels are integers, exact in half; a group has a product of its own,
 *           which its scale multiplies in float.
 *   values  tokens 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of a tile; of 64 numbers eight in
 *           each of eight lanes. Numbers, d u + m rounded to half.
 *
 * Lane 4 g + t; the most a batch has: TILES tiles of 16 tokens, rows of ROW numbers. */
#ifndef STI_BACKEND_CUDA_HYBRID_STEP_LEVELS_CUH
#define STI_BACKEND_CUDA_HYBRID_STEP_LEVELS_CUH

#include "backend/cuda/hybrid/stored.cuh"
#include "backend/cuda/ptx/mma.cuh"

STI_DEVICE uint32_t load_word(const void *p)
{
    return *static_cast<const uint32_t *>(p);
}

/* ---- Keys ---------------------------------------------------------------- */

/* Number of a group that comes first in word k, 0 <= k < 4, of a lane's operand. */
STI_DEVICE int key_number(int bits, int k, int t)
{
    return bits == 8 ? 8 * t + 2 * k : 4 * t + k % 2 * 2 + k / 2 * 16;
}

template <int TILES, int ROW> struct key_levels {
    enum { GROUPS = ROW / 32, ROWS = 2 * TILES };
    uint32_t level[ROWS][GROUPS][2]; /* 8 bits: eight bytes; 5: low bits, high bits */
    uint32_t scale[ROWS][GROUPS / 2];

    /* Slots from `first` on of a list of `capacity`; behind it, slot 0. */
    __device__ __forceinline__ void load(const stored_rows &from, int first,
                                         int capacity)
    {
        const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
        if (first >= capacity) return; /* of all lanes */
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const int slot = first + 8 * r + g;
            const uint32_t at = (uint32_t)((slot < capacity ? slot : 0) * from.groups);
#pragma unroll
            for (int c = 0; c < GROUPS; c++) {
                uint2 x = make_uint2(0, 0);
                if (c >= from.groups) {
                    /* what lies behind D is zero */
                } else if (from.bits == 8) {
                    x = *reinterpret_cast<const uint2 *>(from.low + (at + c) * 32 +
                                                         8 * t);
                } else {
                    x.x = load_word(from.low + (at + c) * 16 + 4 * t);
                    x.y = load_word(from.high + (at + c) * 4);
                }
                level[r][c][0] = x.x;
                level[r][c][1] = x.y;
            }
#pragma unroll
            for (int c = 0; c < GROUPS; c += 2)
                scale[r][c / 2] = load_scales(from, at, c);
        }
    }
    /* Those of groups c and c + 1. */
    static __device__ __forceinline__ uint32_t load_scales(const stored_rows &from,
                                                           uint32_t at, int c)
    {
        if (c >= from.groups) return 0;
        if (from.groups % 2 == 0) return load_word(from.scale + at + c);
        const uint32_t next = c + 1 < from.groups ? from.scale[at + c + 1] : 0;
        return from.scale[at + c] | next << 16;
    }
    /* logit[2 u], logit[2 u + 1] of rows g and g + 8 of tile u. */
    template <int BITS>
    __device__ __forceinline__ void dot(const uint4 *operand,
                                        float (&logit)[ROWS]) const
    {
        const int lane = (int)threadIdx.x % 32, t = lane % 4;
#pragma unroll
        for (int r = 0; r < ROWS; r++) logit[r] = 0;
#pragma unroll
        for (int c = 0; c < GROUPS; c++) {
            const uint4 q = operand[c * 32 + lane];
#pragma unroll
            for (int u = 0; u < TILES; u++) {
                uint32_t one[4], two[4]; /* rows g, g + 8 */
                key_halves<BITS>(level[2 * u][c], t, one);
                key_halves<BITS>(level[2 * u + 1][c], t, two);
                const uint32_t low[4] = {one[0], two[0], one[1], two[1]},
                               high[4] = {one[2], two[2], one[3], two[3]};
                float sum[4] = {0, 0, 0, 0};
                mma(sum, low, q.x, q.y);
                mma(sum, high, q.z, q.w);
                logit[2 * u] = fmaf(scale_at(2 * u, c), sum[0] + sum[1], logit[2 * u]);
                logit[2 * u + 1] =
                    fmaf(scale_at(2 * u + 1, c), sum[2] + sum[3], logit[2 * u + 1]);
            }
        }
    }
    __device__ __forceinline__ float scale_at(int r, int c) const
    {
        const float2 two = unpack_half2(scale[r][c / 2]);
        return c % 2 ? two.y : two.x;
    }
};

/* ---- Values -------------------------------------------------------------- */

template <int TILES, int ROW> struct value_levels {
    enum { WORDS = ROW / 64, TOKENS = 4 * TILES };
    uint32_t low[TOKENS][WORDS], high[TOKENS][WORDS], scale[TOKENS][WORDS];

    /* Which number of the row output i, 0 <= i < 8, of word j is. */
    static __device__ __forceinline__ int number(int bits, int j, int i)
    {
        const int w = (int)threadIdx.x % 32 / 4 + 8 * j, b = i / 2, s = i % 2;
        return w / 4 * 32 + b +
               (bits == 4 ? w % 4 * 4 + 16 * s : w % 4 / 2 * 4 + w % 2 * 16 + 8 * s);
    }
    /* As key_levels. */
    __device__ __forceinline__ void load(const stored_rows &from, int first,
                                         int capacity)
    {
        const int g = (int)threadIdx.x % 32 / 4, t = (int)threadIdx.x % 4;
        if (first >= capacity) return; /* of all lanes */
#pragma unroll
        for (int k = 0; k < TOKENS; k++) {
            const int slot = first + 16 * (k / 4) + 8 * (k % 4 / 2) + 2 * t + k % 2;
            const uint32_t row = (uint32_t)((slot < capacity ? slot : 0) * from.groups);
#pragma unroll
            for (int j = 0; j < WORDS; j++) {
                const int group = g / 4 + 2 * j, w = g % 4;
                const uint32_t at = row + (uint32_t)group;
                low[k][j] = high[k][j] = scale[k][j] = 0;
                if (group >= from.groups) continue;
                if (from.bits == 4) {
                    low[k][j] = load_word(from.low + at * 16 + 4 * w);
                } else {
                    low[k][j] = load_word(from.low + at * 8 + w / 2 * 4);
                    high[k][j] = load_word(from.high + at * 4);
                }
                scale[k][j] = load_word(from.scale + 2 * at);
            }
        }
    }
    /* o [WORDS][8] = keep o + sum of weight v; weights as operands. Levels are used
     * up: registers are few. */
    template <int BITS>
    __device__ __forceinline__ void add(const uint32_t (&weight)[TILES][2], float keep,
                                        float (&o)[WORDS][8])
    {
        const int w = (int)threadIdx.x % 16 / 4; /* g % 4 */
#pragma unroll
        for (int j = 0; j < WORDS; j++) {
#pragma unroll
            for (int k = 0; k < TOKENS;
                 k += 2) { /* two tokens: their scales together */
                const uint32_t one = scale[k][j], two = scale[k + 1][j];
                low[k][j] = value_nibbles<BITS>(low[k][j], high[k][j], w);
                low[k + 1][j] = value_nibbles<BITS>(low[k + 1][j], high[k + 1][j], w);
                scale[k][j] = __byte_perm(one, two, 0x5410);
                scale[k + 1][j] = __byte_perm(one, two, 0x7632);
            }
#pragma unroll
            for (int b = 0; b < 4; b++) {
                float sum[4] = {0, 0, 0, 0};
#pragma unroll
                for (int u = 0; u < TILES; u++) {
                    uint32_t part[4];
#pragma unroll
                    for (int p = 0; p < 4; p += 2) {
                        const int k = 4 * u + p;
                        value_halves(low[k][j], low[k + 1][j], b, scale[k][j],
                                     scale[k + 1][j], &part[p], &part[p + 1]);
                    }
                    mma(sum, part, weight[u][0], weight[u][1]);
                }
                o[j][2 * b] = fmaf(o[j][2 * b], keep, sum[0] + sum[1]);
                o[j][2 * b + 1] = fmaf(o[j][2 * b + 1], keep, sum[2] + sum[3]);
            }
        }
    }
};

#endif
