/* levels.cuh - tokens of a quantized list (stored.cuh) as operands of tensor cores, for
 * the products of tiles.cuh. A batch is copied to shared memory as it lies in the list,
 * in runs of 16 bytes; each lane takes the words it multiplies from there. The numbers
 * of a row may come in any order, if those of the other operand do.
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
#include "backend/cuda/ptx/memory.cuh"
#include "backend/cuda/ptx/mma.cuh"

/* ---- A batch in shared memory -------------------------------------------- */

/* Low bits, high bits or scales of a list, and where those of a batch are copied to. A
 * list may begin anywhere, but copies take 16 bytes from an address that is a multiple of
 * 16: they begin `skip` bytes before it. Batches are multiples of 16 bytes apart, so that
 * is the same for all of them. */
typedef struct level_run {
    const uint8_t *from; /* `skip` bytes before the list */
    int skip, bytes;     /* of a token */
    int to;              /* in the batch */
    int first;           /* copy of 16 bytes of the batch */
} level_run;

typedef struct level_runs {
    level_run run[3];
    int copies;
} level_runs;

/* A batch has TILES tiles of 16 tokens, rows of at most ROW numbers. */
template <int TILES, int ROW> struct level_batch {
    enum { BATCH = 16 * TILES, GROUPS = ROW / 32 };
    enum { LOW = 0, HIGH = LOW + BATCH * GROUPS * 32 + 16 };
    enum { SCALE = HIGH + BATCH * GROUPS * 4 + 16 };
    enum { END = SCALE + BATCH * GROUPS * 4 + 16 };
    const uint8_t *low, *high, *scale; /* in shared memory */
    int groups;

    __device__ __forceinline__ level_batch(const uint4 *staged, const level_runs &runs,
                                           int groups_)
    {
        const uint8_t *at = reinterpret_cast<const uint8_t *>(staged);
        low = at + LOW + runs.run[0].skip;
        high = at + HIGH + runs.run[1].skip;
        scale = at + SCALE + runs.run[2].skip;
        groups = groups_;
    }
    static __device__ __forceinline__ level_runs runs_of(const stored_rows &list)
    {
        const uint8_t *const from[3] = {list.low, list.high,
                                        reinterpret_cast<const uint8_t *>(list.scale)};
        const int bytes[3] = {list.width() * 4, list.high ? 4 : 0,
                              list.values() ? 4 : 2};
        level_runs to;
        to.copies = 0;
#pragma unroll
        for (int i = 0; i < 3; i++) {
            const int skip = (int)((uintptr_t)from[i] & 15),
                      all = bytes[i] * list.groups;
            to.run[i] = level_run{from[i] - skip, skip, all,
                                  i == 0   ? LOW
                                  : i == 1 ? HIGH
                                           : SCALE,
                                  to.copies};
            to.copies += (skip + BATCH * all + 15) / 16;
        }
        return to;
    }
    /* Starts the copy of the tokens from slot `first` of a list of `capacity` on, by a
     * warp; zeros behind its end. */
    static __device__ __forceinline__ void copy(uint4 *staged, const level_runs &runs,
                                                int first, int capacity)
    {
        const int left = min(capacity - first, (int)BATCH), copies = runs.copies;
        const int high = runs.run[1].first, scale = runs.run[2].first;
        const uint32_t at = shared_address(staged);
        if (left <= 0) return; /* of all lanes */
#pragma unroll 1
        for (int i = (int)threadIdx.x % 32; i < copies; i += 32) {
            const level_run r = runs.run[(int)(i >= high) + (int)(i >= scale)];
            const int byte = (i - r.first) * 16, end = r.skip + left * r.bytes - byte;
            cp_async16_part(at + (uint32_t)(r.to + byte),
                            r.from + (uint32_t)(first * r.bytes + byte),
                            max(min(end, 16), 0));
        }
    }
    template <typename T>
    static __device__ __forceinline__ T load(const uint8_t *from, int at)
    {
        return *reinterpret_cast<const T *>(from + at);
    }
};

/* ---- Keys ---------------------------------------------------------------- */

/* Number of a group that comes first in word k, 0 <= k < 4, of a lane's operand. */
STI_DEVICE int key_number(int bits, int k, int t)
{
    return bits == 8 ? 8 * t + 2 * k : 4 * t + k % 2 * 2 + k / 2 * 16;
}

template <int TILES, int ROW> struct key_levels : level_batch<TILES, ROW> {
    typedef level_batch<TILES, ROW> batch;
    using batch::batch;

    /* Group `at` of the batch, in the lane's order: its operand, and its scale. */
    template <int BITS>
    __device__ __forceinline__ float operand(int at, int t, uint32_t (&to)[4]) const
    {
        uint32_t level[2];
        if (BITS == 8) {
            const uint2 both = batch::template load<uint2>(this->low, at * 32 + 8 * t);
            level[0] = both.x;
            level[1] = both.y;
        } else {
            level[0] = batch::template load<uint32_t>(this->low, at * 16 + 4 * t);
            level[1] = batch::template load<uint32_t>(this->high, at * 4);
        }
        key_halves<BITS>(level, t, to);
        return half_bits(batch::template load<uint16_t>(this->scale, at * 2));
    }
    /* logit[2 u], logit[2 u + 1] of rows g and g + 8 of tile u. */
    template <int BITS>
    __device__ __forceinline__ void dot(const uint4 *query,
                                        float (&logit)[2 * TILES]) const
    {
        const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int r = 0; r < 2 * TILES; r++) logit[r] = 0;
#pragma unroll
        for (int c = 0; c < batch::GROUPS; c++) {
            if (c >= this->groups) break; /* what lies behind D is zero */
            const uint4 q = query[c * 32 + lane];
#pragma unroll
            for (int u = 0; u < TILES; u++) {
                uint32_t one[4], two[4]; /* rows g, g + 8 */
                const int at = (16 * u + g) * this->groups + c;
                const float d = operand<BITS>(at, t, one),
                            e = operand<BITS>(at + 8 * this->groups, t, two);
                const uint32_t low[4] = {one[0], two[0], one[1], two[1]},
                               high[4] = {one[2], two[2], one[3], two[3]};
                float sum[4] = {0, 0, 0, 0};
                mma(sum, low, q.x, q.y);
                mma(sum, high, q.z, q.w);
                logit[2 * u] = fmaf(d, sum[0] + sum[1], logit[2 * u]);
                logit[2 * u + 1] = fmaf(e, sum[2] + sum[3], logit[2 * u + 1]);
            }
        }
    }
};

/* ---- Values -------------------------------------------------------------- */

template <int TILES, int ROW> struct value_levels : level_batch<TILES, ROW> {
    typedef level_batch<TILES, ROW> batch;
    using batch::batch;
    enum { WORDS = ROW / 64, TOKENS = 4 * TILES };

    /* Which number of the row output i, 0 <= i < 8, of word j is. */
    static __device__ __forceinline__ int number(int bits, int j, int i)
    {
        const int w = (int)threadIdx.x % 32 / 4 + 8 * j, b = i / 2, s = i % 2;
        return w / 4 * 32 + b +
               (bits == 4 ? w % 4 * 4 + 16 * s : w % 4 / 2 * 4 + w % 2 * 16 + 8 * s);
    }
    /* Eight levels of group `at`, a nibble each, and the group's scales. */
    template <int BITS>
    __device__ __forceinline__ uint32_t nibbles(int at, int w, uint32_t *scales) const
    {
        *scales = batch::template load<uint32_t>(this->scale, at * 4);
        if (BITS == 4)
            return batch::template load<uint32_t>(this->low, at * 16 + 4 * w);
        return value_nibbles<BITS>(
            batch::template load<uint32_t>(this->low, at * 8 + w / 2 * 4),
            batch::template load<uint32_t>(this->high, at * 4), w);
    }
    /* o [WORDS][8] = keep o + sum of weight v; weights as operands. */
    template <int BITS>
    __device__ __forceinline__ void add(const uint32_t (&weight)[TILES][2], float keep,
                                        float (&o)[WORDS][8]) const
    {
        const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int j = 0; j < WORDS; j++) {
            uint32_t level[TOKENS], d[TOKENS / 2], m[TOKENS / 2];
            const int group = g / 4 + 2 * j;
#pragma unroll
            for (int k = 0; k < TOKENS; k += 2) { /* two tokens: scales together */
                uint32_t one = 0, two = 0;
                level[k] = level[k + 1] = 0;
                if (group < this->groups) {
                    const int slot = 16 * (k / 4) + 8 * (k % 4 / 2) + 2 * t;
                    const int at = slot * this->groups + group;
                    level[k] = nibbles<BITS>(at, g % 4, &one);
                    level[k + 1] = nibbles<BITS>(at + this->groups, g % 4, &two);
                }
                d[k / 2] = __byte_perm(one, two, 0x5410);
                m[k / 2] = __byte_perm(one, two, 0x7632);
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
                        value_halves(level[k], level[k + 1], b, d[k / 2], m[k / 2],
                                     &part[p], &part[p + 1]);
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
