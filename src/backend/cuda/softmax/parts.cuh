/* parts.cuh - device code that the attention kernels share: where a row's
 * keys are, and thin names for the instructions they are built from. */
#ifndef STI_BACKEND_CUDA_SOFTMAX_PARTS_CUH
#define STI_BACKEND_CUDA_SOFTMAX_PARTS_CUH

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
 * rows change nothing unless they make it a crowd, and a recorded launch may be
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

/* Cache row of the token `after` tokens behind the one in row `row`; after < room. */
static __device__ __forceinline__ int ring_row(int row, int after, int room)
{
    int at = row + after;
    return at >= room ? at - room : at;
}

/* ---- Blocks of prefill --------------------------------------------------- */

/* What a block works on: some rows, from `row` on, of a segment's n; keys [first, end).
 */
typedef struct job {
    const half *K, *V; /* [room, D] of the kv head */
    int D, room, row, n;
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
    size_t cache = (size_t)g * a.seg[s].room * a.D;
    job b;
    b.K = static_cast<const half *>(a.seg[s].K) + cache;
    b.V = static_cast<const half *>(a.seg[s].V) + cache;
    b.D = a.D, b.room = a.seg[s].room, b.n = a.seg[s].n, b.window = a.window;
    b.row = (tiles - 1 - rest / group) * rows;
    b.past = past_of(a, s);
    b.first = first_key(b.past + b.row, a.window);
    b.end = b.past + min(b.row + rows, b.n);
    b.first_row = b.first % b.room;
    b.out = ((size_t)a.seg[s].row0 * a.H + g * group + rest % group) * a.D;
    return b;
}

/* A row's weights are 2^(logit - m), where m follows the largest logit only when it has
 * grown by more than this: weights stay below 2^8, far inside half's range, and sums
 * are rarely scaled. */
static constexpr float SLACK = 8;

/* ---- Numbers ------------------------------------------------------------- */

/* To half; what is too large becomes the largest half, NaN stays. */
static __device__ __forceinline__ float in_range(float x)
{
    return x > 65504.f ? 65504.f : x < -65504.f ? -65504.f : x;
}
static __device__ __forceinline__ uint32_t pack(float lo, float hi)
{
    half2 h = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<uint32_t *>(&h);
}
static __device__ __forceinline__ uint4 pack8(const float4 &a, const float4 &b)
{
    return make_uint4(
        pack(in_range(a.x), in_range(a.y)), pack(in_range(a.z), in_range(a.w)),
        pack(in_range(b.x), in_range(b.y)), pack(in_range(b.z), in_range(b.w)));
}

/* 2^x; 2^-inf = 0. */
static __device__ __forceinline__ float power2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Over the four lanes that hold one row of a matrix fragment. */
static __device__ __forceinline__ float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
static __device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* ---- Instructions -------------------------------------------------------- */

/* Copies 16 bytes to shared memory, or writes zeros if there are none to copy. */
static __device__ __forceinline__ void copy16(uint32_t to, const void *from, bool some)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(from), "r"(some ? 16 : 0)
                 : "memory");
}
static __device__ __forceinline__ void copies_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* Waits until at most N of this thread's groups of copies are under way. */
template <int N> static __device__ __forceinline__ void copies_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* c[16, 8] += a[16, 16] b[16, 8]. Of lane = 4 r + q, with k = 2 q:
 *   a: rows r, r+8 at k, k+1; rows r, r+8 at k+8, k+9     b: column r at k, k+1; k+8,
 * k+9 c: row r at columns k, k+1; row r+8 likewise */
static __device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1,
                                           uint32_t a2, uint32_t a3, uint32_t b0,
                                           uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
        "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* Four 8x8 matrices of halves; lane l gives the address of row l % 8 of matrix l / 8
 * and gets of each matrix elements (r, 2q), (r, 2q+1); transposed: (2q, r), (2q+1, r).
 */
static __device__ __forceinline__ void load4(uint32_t (&x)[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}
static __device__ __forceinline__ void load4_transposed(uint32_t (&x)[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}
static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

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
    int start = ring_row(b.first_row, off, b.room), left = b.end - b.first - off;
    bool inside = word * 8 < b.D;
    from += inside ? word * 8 : 0;
    to += Tile::place(row, word);
    if (start + KEYS <= b.room && left >= KEYS) {
        from += (size_t)(start + row) * b.D;
#pragma unroll
        for (int i = 0; i < KEYS / STEP; i++)
            copy16(to + i * STEP * Tile::ROW, from + i * STEP * b.D, inside);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < KEYS / STEP; i++) {
        bool there = row + i * STEP < left;
        int at = ring_row(start, there ? row + i * STEP : 0, b.room);
        copy16(to + i * STEP * Tile::ROW, from + (size_t)at * b.D, there && inside);
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
            x = pack8(from[0], from[1]);
        }
        *reinterpret_cast<uint4 *>(to + Tile::place(i, word)) = x;
    }
}

} // namespace sti_attn

#endif
