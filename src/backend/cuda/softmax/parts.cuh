/* parts.cuh - device code that the attention kernels share: where a row's keys are, and
 * how blocks copy queries, keys and values to shared memory. */
#ifndef STI_BACKEND_CUDA_SOFTMAX_PARTS_CUH
#define STI_BACKEND_CUDA_SOFTMAX_PARTS_CUH

#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/softmax/softmax.h"

namespace sti_attn
{

/* ---- Positions and pieces ------------------------------------------------ */

static __device__ __forceinline__ int past_of(const sti_cuda_attn &a, int s)
{
    return a.pos ? a.pos[a.seg[s].row0] : a.seg[s].past;
}

/* Oldest token that token t sees. */
static __device__ __forceinline__ int first_key(int t, int window)
{
    return window > 0 && t >= window ? t - window + 1 : 0;
}

/* The keys of a row that decodes, [first, first + count), in `pieces` pieces of `piece`
 * keys. The cut follows from the row's own position and the size of the launch: other
 * rows change nothing unless they make it a crowd, and a captured launch may be
 * replayed at any depth. */
typedef struct cut {
    int first, count, piece, pieces;
} cut;
static __device__ __forceinline__ cut cut_keys(const sti_cuda_attn &a, int t)
{
    bool crowd = a.n_seg * a.G >= STI_CUDA_ATTN_CROWD;
    int splits = crowd ? (int)STI_CUDA_ATTN_CROWD_SPLITS : (int)STI_CUDA_ATTN_SPLITS;
    int least = crowd ? (int)STI_CUDA_ATTN_CROWD_PIECE : (int)STI_CUDA_ATTN_PIECE;
    cut c;
    c.first = first_key(t, a.window);
    c.count = t + 1 - c.first;
    int even = (c.count + splits - 1) / splits;
    c.piece = max(least, (even + 15) / 16 * 16);
    c.pieces = (c.count + c.piece - 1) / c.piece;
    return c;
}

/* Cache row of the token `after` tokens behind the one in row `row`; after <
 * capacity. */
static __device__ __forceinline__ int ring_row(int row, int after, int capacity)
{
    int at = row + after;
    return at >= capacity ? at - capacity : at;
}

/* ---- Blocks of prefill --------------------------------------------------- */

/* What a block works on: some rows, from `row` on, of a segment's n; keys [first, end).
 */
typedef struct job {
    const half *K, *V; /* [capacity, D] of the kv head */
    int D, capacity, row, n;
    int past, first, end, window;
    int first_row; /* cache row of key `first` */
    size_t out;    /* where the head's row 0 is in q and o */
} job;

/* Blocks of `rows` rows run over segments, kv heads, tiles of rows (those that see most
 * first), query heads of the kv head: blocks that run together share keys, which then
 * stay in L2. */
static __device__ __forceinline__ job find_job(const sti_cuda_attn &a, int rows)
{
    int at = blockIdx.x, s = 0, group = a.H / a.G, tiles;
    for (;; s++) {
        tiles = (a.seg[s].n + rows - 1) / rows;
        if (at < tiles * a.H) break;
        at -= tiles * a.H;
    }
    int g = at / (tiles * group), rest = at % (tiles * group);
    size_t cache = (size_t)g * a.seg[s].capacity * a.D;
    job b;
    b.K = static_cast<const half *>(a.seg[s].K) + cache;
    b.V = static_cast<const half *>(a.seg[s].V) + cache;
    b.D = a.D, b.capacity = a.seg[s].capacity, b.n = a.seg[s].n, b.window = a.window;
    b.row = (tiles - 1 - rest / group) * rows;
    b.past = past_of(a, s);
    b.first = first_key(b.past + b.row, a.window);
    b.end = b.past + min(b.row + rows, b.n);
    b.first_row = b.first % b.capacity;
    b.out = ((size_t)a.seg[s].row0 * a.H + g * group + rest % group) * a.D;
    return b;
}

/* A row's weights are 2^(logit - m), where m follows the largest logit only when it has
 * grown by more than this: weights stay below 2^8, far inside half's range, and sums
 * are rarely scaled. */
static constexpr float SLACK = 8;

/* ---- Copies -------------------------------------------------------------- */

/* A Tile says how rows of halves lie in shared memory: KEYS and ROWS (of queries),
 * WORDS of 16 bytes of a row, STEP rows that a block copies at once, ROW bytes from a
 * row to the next, and place, the byte offset of a word. STEP is a multiple of 8, so
 * that a thread's words swap places alike in all its rows. */

/* Keys [off, off + KEYS) after `first`, of K or V, to a tile at `to`; those that do not
 * exist are zero. */
template <class Tile>
static __device__ __forceinline__ void fetch_keys(const job &b, const half *from,
                                                  int off, uint32_t to)
{
    constexpr int STEP = Tile::STEP, KEYS = Tile::KEYS;
    int word = threadIdx.x % Tile::WORDS, row = threadIdx.x / Tile::WORDS;
    int start = ring_row(b.first_row, off, b.capacity), left = b.end - b.first - off;
    bool inside = word * 8 < b.D;
    from += inside ? word * 8 : 0;
    to += Tile::place(row, word);
    if (start + KEYS <= b.capacity && left >= KEYS) {
        from += (size_t)(start + row) * b.D;
#pragma unroll
        for (int i = 0; i < KEYS / STEP; i++)
            cp_async16_or_zero<128>(to + i * STEP * Tile::ROW, from + i * STEP * b.D,
                                    inside);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < KEYS / STEP; i++) {
        bool there = row + i * STEP < left;
        int at = ring_row(start, there ? row + i * STEP : 0, b.capacity);
        cp_async16_or_zero<128>(to + i * STEP * Tile::ROW, from + (size_t)at * b.D,
                                there && inside);
    }
}

/* Queries as halves; rows and dims that do not exist are zero. ld: floats between rows.
 */
template <class Tile>
static __device__ __forceinline__ void fetch_queries(const job &b, const float *q,
                                                     size_t ld, char *to)
{
    int word = threadIdx.x % Tile::WORDS, row = threadIdx.x / Tile::WORDS;
    q += b.row * ld + word * 8;
#pragma unroll 4
    for (int i = row; i < Tile::ROWS; i += Tile::STEP) {
        uint4 x = make_uint4(0, 0, 0, 0);
        if (word * 8 < b.D && b.row + i < b.n) {
            const float4 *from = reinterpret_cast<const float4 *>(q + i * ld);
            x = pack_saturated8(from[0], from[1]);
        }
        *reinterpret_cast<uint4 *>(to + Tile::place(i, word)) = x;
    }
}

} // namespace sti_attn

#endif
