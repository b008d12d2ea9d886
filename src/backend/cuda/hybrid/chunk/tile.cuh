/* tile.cuh - a block of the output kernel (output.cu): its queries, the
 * keys they see, and how both get into shared memory. */
#ifndef STI_BACKEND_CUDA_HYBRID_CHUNK_TILE_CUH
#define STI_BACKEND_CUDA_HYBRID_CHUNK_TILE_CUH

#include "backend/cuda/hybrid/chunk/chunk.h"
#include "backend/cuda/ptx/mma.cuh"

enum { THREADS = 128, ROWS = 128, KEYS = 64 };

/* Outputs of a warp's 32 queries: C fragments [2][D/8]; row 16 i + 8 j + lane / 4 of
 * the warp has index 2 i + j in the arrays of 4. */
template <int D> struct warp_sums {
    float o[2][D / 8][4];
    float top[4]; /* running maximum of logits, in powers of two */
    float den[4]; /* this lane's part of the denominator */
};

/* ---- Which queries, which keys ------------------------------------------- */

/* Heads of a selection head that one block takes: whole chunks of them, 32 rows at
 * least. */
static __host__ __device__ __forceinline__ int
heads_of_block(const sti_cuda_hybrid_params &h)
{
    if (h.C % 32 != 0 || h.C >= ROWS) return 1;
    const int fit = ROWS / h.C;
    return fit < h.group ? fit : h.group;
}
static __host__ __device__ __forceinline__ int
tiles_of_chunk(const sti_cuda_hybrid_params &h)
{
    return (h.C + ROWS - 1) / ROWS;
}

/* Token rows count from c.base. */
typedef struct tile_place {
    int g, chunk;    /* selection head; index of the chunk in the piece */
    int head, heads; /* the block's first query head, and how many it has */
    int first, rows; /* token row of query 0; queries of a head */
    int begin, end;  /* token rows that are in the piece */
    int window;      /* token row of the first key */
    int retired;     /* retirements before the queries */
    int salient;     /* length of their list */
    int window_tiles, tiles;
} tile_place;

/* Block (x, y) of the grid; keys come in tiles of `keys`. */
static __device__ __forceinline__ tile_place place_of(const sti_chunk_piece &c, int x,
                                                      int y, int keys)
{
    tile_place p;
    const int C = c.h.C, per = heads_of_block(c.h), split = tiles_of_chunk(c.h);
    const int blocks = (c.h.group + per - 1) / per; /* of a selection head */
    p.g = x / blocks;
    const int first_head = x % blocks * per;
    p.head = p.g * c.h.group + first_head;
    p.heads = min(per, c.h.group - first_head);
    p.chunk = y / split;
    const int within = y % split * ROWS;
    const int chunk_row = (c.first_chunk + p.chunk) * C - c.base;
    p.first = chunk_row + within;
    p.rows = min(C - within, ROWS);
    p.begin = c.pos - c.base;
    p.end = p.begin + c.T;
    p.window = max(chunk_row - C, 0);
    p.retired = retired_until(c, c.first_chunk + p.chunk);
    p.salient = salient_after(c, p.g, p.retired);
    const int last = min(p.first + p.rows, p.end); /* keys from here on nobody sees */
    p.window_tiles = (last - p.window + keys - 1) / keys;
    p.tiles = p.window_tiles + (p.salient + keys - 1) / keys;
    return p;
}

/* A warp's share of it. */
typedef struct warp_place {
    int head;  /* of the block's heads */
    int first; /* token row of its query 0 */
    bool idle; /* none of its queries is wanted */
} warp_place;

static __device__ __forceinline__ warp_place warp_of(const tile_place &p, int warp)
{
    warp_place w;
    const int row = warp * 32;
    w.head = p.heads > 1 ? row / p.rows : 0;
    w.first = p.first + row - w.head * p.rows;
    const int end = min(p.first + p.rows, p.end);
    w.idle = w.head >= p.heads || w.first >= end || w.first + 32 <= p.begin;
    return w;
}

/* Whether token row t of this block is a query of the piece. */
static __device__ __forceinline__ bool wanted(const tile_place &p, int t)
{
    return t >= p.begin && t < min(p.first + p.rows, p.end);
}

static __device__ __forceinline__ int lane_row(int i, int lane)
{
    return (i >> 1) * 16 + (i & 1) * 8 + (lane >> 2);
}

/* ---- Terms --------------------------------------------------------------- */

/* STILL eq. 11: what the settings make of the two terms for one query head, as
 * ops/hybrid.h and the reference have it; exponents in powers of two. */
typedef struct head_terms {
    float alpha;  /* with the shift of state_cap */
    float factor; /* log2 of the window factor */
    bool linear;  /* something is folded */
    bool apart;   /* window scaling: the linear term waits in y */
    float unit;   /* what undoes state_scale */
} head_terms;

static __device__ __forceinline__ head_terms terms_of(const sti_chunk_piece &c, int g,
                                                      int retired, int head)
{
    head_terms t;
    const int64_t n = folded_after(c, g, retired);
    t.linear = c.h.has_linear && n > 0;
    t.apart = t.linear && c.h.la_scale == STI_SCALE_WINDOW;
    t.alpha = c.h.alpha ? c.h.alpha[head] : 0;
    const int most = state_cap_of(c.h, g);
    if (c.h.state_cap > 0 && n > most) t.alpha += logf((float)most / (float)n);
    t.alpha *= log2_e;
    t.factor = 0;
    if (c.h.window_factor) {
        const float x = c.h.window_logit ? c.h.window_logit[head] : -2.1972246f;
        t.factor = -log2f(1 + expf(-x)); /* start: sigmoid^-1(0.1) */
    }
    t.unit = t.linear ? 1 / state_scale(c, n) : 1;
    return t;
}

/* ---- Loading ------------------------------------------------------------- */

/* Where query r of the tile is in q and q_raw, in rows; -1: it is of another piece. */
static __device__ __forceinline__ int query_row(const sti_chunk_piece &c,
                                                const tile_place &p, int r)
{
    const int head = p.heads > 1 ? r / p.rows : 0;
    const int t = p.first + r - head * p.rows;
    if (head >= p.heads || !wanted(p, t)) return -1;
    return (t - p.begin) * c.h.H + p.head + head;
}

/* Queries of the array `from` as halves, those of other pieces as 0. */
template <int D>
static __device__ __forceinline__ void
load_queries(const sti_chunk_piece &c, const tile_place &p, const float *from,
             unsigned char *to)
{
    const int units = D / 8;
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < ROWS * units; i += THREADS) {
        const int r = i / units, u = i % units, row = query_row(c, p, r);
        uint4 x = make_uint4(0, 0, 0, 0);
        if (row >= 0) {
            const float4 *q = (const float4 *)(from + (size_t)row * D + u * 8);
            x = pack_half8(q[0], q[1]);
        }
        *(uint4 *)(to + unit_at<D>(r, u)) = x;
    }
}

/* Queries at the capped distance, from those before RoPE; two pairs of dims at once:
 * sums are in registers meanwhile. */
template <int D>
static __device__ __forceinline__ void
load_far_queries(const sti_chunk_piece &c, const tile_place &p, unsigned char *to)
{
    const int steps = D / 4, next = c.h.interleaved ? 2 : D / 2;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < ROWS * steps; i += THREADS) {
        const int r = i / steps, pair = i % steps * 2, row = query_row(c, p, r);
        const int d = c.h.interleaved ? 2 * pair : pair;
        uint32_t low = 0, high = 0; /* dims d, d + 1 and the two from d + next on */
        if (row >= 0) {
            const float *q = c.s.q_raw + (size_t)row * D + d;
            const float4 t = *(const float4 *)(c.cap_rope + 2 * pair);
            const float2 x = *(const float2 *)q, y = *(const float2 *)(q + next);
            if (c.h.interleaved) {
                low = pack_half2(half_range(x.x * t.x - x.y * t.y),
                                 half_range(x.y * t.x + x.x * t.y));
                high = pack_half2(half_range(y.x * t.z - y.y * t.w),
                                  half_range(y.y * t.z + y.x * t.w));
            } else {
                low = pack_half2(half_range(x.x * t.x - y.x * t.y),
                                 half_range(x.y * t.z - y.y * t.w));
                high = pack_half2(half_range(y.x * t.x + x.x * t.y),
                                  half_range(y.y * t.z + x.y * t.w));
            }
        }
        const int e = d + next;
        *(uint32_t *)(to + unit_at<D>(r, d / 8) + d % 8 * 2) = low;
        *(uint32_t *)(to + unit_at<D>(r, e / 8) + e % 8 * 2) = high;
    }
}

/* n rows of D halves that follow each other. */
template <int D>
static __device__ __forceinline__ void load_rows(uint32_t to, const __half *from, int n)
{
    const int units = D / 8;
    for (int i = (int)threadIdx.x; i < n * units; i += THREADS)
        cp_async16(to + unit_at<D>(i / units, i % units), from + (size_t)i * 8);
}

/* The rows of the keys of all tiles: the window in order, the list, both filled up to
 * whole tiles with their last key, which is then masked. They are at most 2C + cap
 * however long the text is: STILL eq. 12. */
static __device__ __forceinline__ void list_keys(const sti_chunk_piece &c,
                                                 const tile_place &p, uint16_t *list)
{
    const int window = p.window_tiles * KEYS;
    const size_t last = (size_t)(p.retired - 1) * c.h.S + p.g;
    for (int i = (int)threadIdx.x; i < p.tiles * KEYS; i += THREADS) {
        int row = c.capacity + min(p.window + i, p.end - 1);
        if (i >= window) {
            row = min(i - window, p.salient - 1);
            if (p.retired > 0) row = c.salient[last * c.capacity + row];
        }
        list[i] = (uint16_t)row; /* a piece has fewer, see STI_CHUNK_PIECE */
    }
}

/* The same with a position cap: near and far tokens fill whole tiles each. near: how
 * many are. */
static __device__ __forceinline__ void
list_near_first(const sti_chunk_piece &c, const tile_place &p, int near, uint16_t *list)
{
    const int window = p.window_tiles * KEYS,
              near_keys = (near + KEYS - 1) / KEYS * KEYS;
    const int32_t *order = c.order + ((size_t)p.retired * c.h.S + p.g) * c.capacity;
    for (int i = (int)threadIdx.x; i < p.tiles * KEYS; i += THREADS) {
        const int at = i - window;
        int row;
        if (at < 0)
            row = c.capacity + min(p.window + i, p.end - 1);
        else if (at < near_keys)
            row = order[min(at, near - 1)];
        else
            row = order[min(near + at - near_keys, p.salient - 1)];
        list[i] = (uint16_t)row;
    }
}

/* Keys (rows of `keys`, k or k_far) and values of 64 rows of the list, from `list` on,
 * to a stage. */
template <int D>
static __device__ __forceinline__ void load_keys(const sti_chunk_piece &c,
                                                 const __half *keys, int g,
                                                 const uint16_t *list, uint32_t to)
{
    enum { UNITS = D / 8 };
    const int r0 = (int)threadIdx.x / UNITS, u = (int)threadIdx.x % UNITS;
    const uint32_t first = to + unit_at<D>(r0, u); /* rows are a multiple of 8 apart */
    const uint32_t head = (uint32_t)(g * c.rows);
#pragma unroll
    for (int i = 0; i < KEYS * UNITS / THREADS; i++) {
        const int r = i * (THREADS / UNITS);
        const uint32_t at = (head + list[r0 + r]) * D + (uint32_t)u * 8;
        cp_async16(first + (uint32_t)(r * D * 2), keys + at);
        cp_async16(first + (uint32_t)((r + KEYS) * D * 2), c.v + at);
    }
    cp_async_commit();
}

#endif
