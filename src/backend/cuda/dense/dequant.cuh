/* dequant.cuh - quants in the order of tensor core fragments, and back to numbers.
 *
 * The layout. Rows come in tiles of 16, columns in chunks of 64. Lane l = 4 g + t of a
 * warp owns, in every (tile, chunk), the columns 16 t .. 16 t + 15 of rows g and g + 8:
 * what it feeds to four mma.m16n8k16 (the order of k within a chunk is free as long as
 * x is read in the same one). With at = tile * chunks + chunk:
 *
 *   4 bits   uint4 at [at][lane]: words x, y are row g, words z, w row g + 8, 8 columns
 *            a word. Column 2i is nibble i, column 2i + 1 nibble i + 4: two neighbours
 *            are 16 bits apart, as the halves of a half2 are.
 *   8 bits   uint4 at [at][h][lane], h = 0: row g, h = 1: row g + 8; byte j is column
 *            j, as q + 128.
 *   scales   [at][g][group], a group being 64 / groups columns: with minima two half2
 *            (scale, minimum) of row g and of row g + 8; without, one half2, the scales
 *            of row g and of row g + 8.
 *
 * Integers become halves without conversion instructions: 1024 + q has q as its last
 * bits. Both steps that follow, minus 1024 and times scale plus minimum, round once. */
#ifndef STI_BACKEND_CUDA_DENSE_DEQUANT_CUH
#define STI_BACKEND_CUDA_DENSE_DEQUANT_CUH

#include "backend/cuda/dense/kernels.h"
#include "backend/cuda/ptx/half.cuh"
#include "backend/cuda/ptx/memory.cuh"

/* Eight 4-bit numbers to four half2 of neighbours, times scale plus minimum. */
__device__ __forceinline__ void sti_decode_u4(uint32_t v, __half2 scale, __half2 min,
                                              uint32_t out[4])
{
    const __half2 down = bits_half2(0x64006400); /* 1024 */
    const __half2 sixteenth = bits_half2(0x2c002c00),
                  sixty_four = bits_half2(0xd400d400);
    uint32_t w = v >> 8;
    __half2 q0 = __hsub2(bits_half2(and_or<0x000f000f, 0x64006400>(v)), down);
    __half2 q2 = __hsub2(bits_half2(and_or<0x000f000f, 0x64006400>(w)), down);
    /* 1024 + 16 q: q = that / 16 - 64 */
    __half2 q1 =
        __hfma2(bits_half2(and_or<0x00f000f0, 0x64006400>(v)), sixteenth, sixty_four);
    __half2 q3 =
        __hfma2(bits_half2(and_or<0x00f000f0, 0x64006400>(w)), sixteenth, sixty_four);
    out[0] = half2_bits(__hfma2(q0, scale, min));
    out[1] = half2_bits(__hfma2(q1, scale, min));
    out[2] = half2_bits(__hfma2(q2, scale, min));
    out[3] = half2_bits(__hfma2(q3, scale, min));
}

/* Four bytes q + 128 to two half2 of q. */
__device__ __forceinline__ void sti_decode_s8(uint32_t v, __half2 q[2])
{
    const __half2 down = bits_half2(0x64806480); /* 1024 + 128 */
    q[0] = __hsub2(bits_half2(__byte_perm(v, 0x64646464, 0x4140)), down);
    q[1] = __hsub2(bits_half2(__byte_perm(v, 0x64646464, 0x4342)), down);
}

/* What one lane needs of a chunk: loaded first, decoded when it has come. A `place` is
 * where the lane reads of a tile; chunk n after it is n steps ahead. fragment: two
 * arrays of eight half2, columns 2i and 2i + 1 of the lane's sixteen, of rows g and g
 * + 8. */
struct sti_chunk_u4 {
    enum { AHEAD = 4 }; /* chunks worth loading before the first is used */
    enum {
        COLUMNS = 16,
        SECOND = 8
    }; /* a lane's: COLUMNS t.., and SECOND after that */
    struct place {
        const uint4 *q;
        const uint2 *s;
        int step; /* of s */
    };
    uint4 q;
    uint2 s;
    static __device__ __forceinline__ place find(const sti_cuda_matrix &m, int tile,
                                                 int chunk, int lane)
    {
        const int64_t at = (int64_t)tile * m.chunks + chunk;
        const int group = (lane >> 2) * m.groups + ((lane & 3) * m.groups >> 2);
        return {(const uint4 *)m.w + at * 32 + lane,
                (const uint2 *)m.scale + at * 8 * m.groups + group, 8 * m.groups};
    }
    __device__ __forceinline__ void load(const place &p, int ahead)
    {
        q = load_nc16(p.q + ahead * 32);
        s = load_nc8(p.s + ahead * p.step);
    }
    static __device__ __forceinline__ void advance(place *p, int chunks)
    {
        p->q += chunks * 32;
        p->s += chunks * p->step;
    }
    __device__ __forceinline__ void fragment(uint32_t top[8], uint32_t low[8]) const
    {
        __half2 a = bits_half2(s.x), b = bits_half2(s.y);
        sti_decode_u4(q.x, __low2half2(a), __high2half2(a), top);
        sti_decode_u4(q.y, __low2half2(a), __high2half2(a), top + 4);
        sti_decode_u4(q.z, __low2half2(b), __high2half2(b), low);
        sti_decode_u4(q.w, __low2half2(b), __high2half2(b), low + 4);
    }
};

template <bool MIN> struct sti_chunk_s8 {
    enum { AHEAD = 2, COLUMNS = 16, SECOND = 8 };
    struct place {
        const uint4 *q;
        const uint32_t *s;
        int step;
    };
    uint4 q[2];
    uint2 s; /* without minima: x only */
    static __device__ __forceinline__ place find(const sti_cuda_matrix &m, int tile,
                                                 int chunk, int lane)
    {
        const int64_t at = (int64_t)tile * m.chunks + chunk;
        const int group = (lane >> 2) * m.groups + ((lane & 3) * m.groups >> 2);
        const int words = MIN ? 2 : 1;
        return {(const uint4 *)m.w + at * 64 + lane,
                (const uint32_t *)m.scale + (at * 8 * m.groups + group) * words,
                8 * m.groups * words};
    }
    __device__ __forceinline__ void load(const place &p, int ahead)
    {
        q[0] = load_nc16(p.q + ahead * 64);
        q[1] = load_nc16(p.q + ahead * 64 + 32);
        if (MIN)
            s = load_nc8(p.s + ahead * p.step);
        else
            s.x = load_nc4(p.s + ahead * p.step);
    }
    static __device__ __forceinline__ void advance(place *p, int chunks)
    {
        p->q += chunks * 64;
        p->s += chunks * p->step;
    }
    static __device__ __forceinline__ void decode(uint4 v, __half2 scale, __half2 min,
                                                  uint32_t out[8])
    {
        const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            __half2 n[2];
            sti_decode_s8(word[i], n);
            for (int j = 0; j < 2; j++)
                out[2 * i + j] =
                    half2_bits(MIN ? __hfma2(n[j], scale, min) : __hmul2(n[j], scale));
        }
    }
    __device__ __forceinline__ void fragment(uint32_t top[8], uint32_t low[8]) const
    {
        __half2 a = bits_half2(s.x), b = MIN ? bits_half2(s.y) : a;
        decode(q[0], __low2half2(a), __high2half2(a), top);
        decode(q[1], MIN ? __low2half2(b) : __high2half2(a), __high2half2(b), low);
    }
};

/* Halves lie in rows, as cuBLASLt reads them too. Here a lane's sixteen columns are
 * 8 t .. 8 t + 7 and 32 + 8 t .. : a warp's load then takes whole sectors of 32 bytes.
 * Rows past N are read as row N - 1, and not written by anyone. */
struct sti_chunk_half {
    enum { AHEAD = 2, COLUMNS = 8, SECOND = 32 };
    struct place {
        const __half *top, *low; /* rows g and g + 8, at the lane's first column */
        int left;                /* columns from there on */
    };
    uint4 a[2], b[2];
    static __device__ __forceinline__ place find(const sti_cuda_matrix &m, int tile,
                                                 int chunk, int lane)
    {
        const int row = tile * STI_CUDA_TILE + (lane >> 2), last = m.N - 1;
        const int k = chunk * STI_CUDA_CHUNK + 8 * (lane & 3);
        const __half *w = (const __half *)m.w + k;
        return {w + (int64_t)min(row, last) * m.ld,
                w + (int64_t)min(row + 8, last) * m.ld, m.ld - k};
    }
    __device__ __forceinline__ void load(const place &p, int ahead)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int k = ahead * STI_CUDA_CHUNK + 32 * i;
            const bool in = k < p.left;
            a[i] = in ? load_nc16(p.top + k) : make_uint4(0, 0, 0, 0);
            b[i] = in ? load_nc16(p.low + k) : make_uint4(0, 0, 0, 0);
        }
    }
    static __device__ __forceinline__ void advance(place *p, int chunks)
    {
        p->top += chunks * STI_CUDA_CHUNK;
        p->low += chunks * STI_CUDA_CHUNK;
        p->left -= chunks * STI_CUDA_CHUNK;
    }
    __device__ __forceinline__ void fragment(uint32_t top[8], uint32_t low[8]) const
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            top[4 * i] = a[i].x, top[4 * i + 1] = a[i].y;
            top[4 * i + 2] = a[i].z, top[4 * i + 3] = a[i].w;
            low[4 * i] = b[i].x, low[4 * i + 1] = b[i].y;
            low[4 * i + 2] = b[i].z, low[4 * i + 3] = b[i].w;
        }
    }
};

/* Prefetches a chunk of any kind. */
__device__ __forceinline__ void prefetch_chunk(const sti_cuda_matrix &m, int tile,
                                               int chunk, int lane)
{
    if (chunk >= m.chunks) return;
    const int64_t at = (int64_t)tile * m.chunks + chunk;
    if (m.kind == STI_CUDA_HALF) { /* 128 bytes of 16 rows: one lane a row is enough */
        int row = min(tile * STI_CUDA_TILE + (lane & 15), m.N - 1);
        int k = chunk * STI_CUDA_CHUNK + (lane >> 4) * 32;
        if (k < m.ld) prefetch_l2((const __half *)m.w + (int64_t)row * m.ld + k);
        return;
    }
    prefetch_l2((const char *)m.w +
                (at * 32 + lane) * (m.kind == STI_CUDA_U4 ? 16 : 32));
    if (lane < 4)
        prefetch_l2((const char *)m.scale +
                    (at * 4 + lane) * m.groups * (m.kind == STI_CUDA_S8 ? 8 : 16));
}

/* One element of a matrix of any kind, in float: for rows of embeddings. */
__device__ __forceinline__ float sti_element(const sti_cuda_matrix &m, int row, int k)
{
    if (m.kind == STI_CUDA_FLOAT) return ((const float *)m.w)[(int64_t)row * m.K + k];
    if (m.kind == STI_CUDA_HALF)
        return __half2float(((const __half *)m.w)[(int64_t)row * m.ld + k]);
    const int g = row % 8, h = row % 16 / 8, t = k % 64 / 16, j = k % 16;
    const int lane = 4 * g + t;
    const int64_t at = (int64_t)(row / STI_CUDA_TILE) * m.chunks + k / STI_CUDA_CHUNK;
    const int64_t group = (at * 8 + g) * m.groups + (t * m.groups >> 2);
    float q;
    if (m.kind == STI_CUDA_U4) {
        uint32_t word = ((const uint32_t *)m.w)[(at * 32 + lane) * 4 + 2 * h + j / 8];
        q = (float)(word >> 4 * (j % 8 / 2 + j % 2 * 4) & 15);
    } else {
        q = (float)((const uint8_t *)m.w)[((at * 2 + h) * 32 + lane) * 16 + j] - 128;
    }
    if (m.kind == STI_CUDA_S8)
        return q * __half2float(((const __half *)m.scale)[group * 2 + h]);
    __half2 s = ((const __half2 *)m.scale)[group * 2 + h];
    return q * __low2float(s) + __high2float(s);
}

#endif
