/* decode.cu - one new row of each session against its cache of halves.
 *
 * Bounded by memory: every key and value is read once for all query heads of its kv
 * head. A row's keys are cut into pieces (cut_keys); a fixed number of blocks walks
 * over the pieces of all sessions and kv heads, and join() adds pieces in order. Tensor
 * cores do the arithmetic, so a block is never far behind its copies.
 *
 * A warp takes 16 keys at a time and copies them, keys and values, into shared memory
 * of its own: no barrier. One copy of the warp is 512 bytes on end, so that every
 * request is for whole lines of memory; what lies in shared memory is swizzled such
 * that the reads below meet no bank twice. The sums may run over dims in any order.
 * With lane = 4 r + q:
 *
 * S[8 heads, 16 keys] = Q K^T. Q is `a` (rows 8..15 are zero), K is `b`: lane needs key
 * r of each 8, any four dims a step; 16 bytes at dim 32 i + 8 q are two steps.
 *
 * O^T[D, 8 heads] = V^T P^T. V^T is `a`, P is `b`, just as S left it: lane needs keys
 * 2q, 2q+1, 2q+8, 2q+9 at any two dims a step; 16 bytes at dim 64 i + 8 r of each key
 * are four steps, once pairs of keys have been put side by side. */
#include "backend/cuda/ptx/pdl.cuh"
#include "backend/cuda/softmax/parts.cuh"

using namespace sti_attn;

namespace
{

enum { STAGES = 2, TILE = 16, HEADS = 8 };

/* Heads of up to DP dims. A block takes 64 KB of shared memory at most, so that every
 * GPU from sm_80 on runs it and three of them share a multiprocessor here. */
template <int DP> struct plan {
    static constexpr int WARPS = DP == 256 ? 2 : 4;
    static constexpr int THREADS = WARPS * 32;
    static constexpr int BLOCKS = DP == 64 ? 4 : 3; /* of a multiprocessor */
    static constexpr int UNITS = DP / 8;            /* of 16 bytes, of a row */
    static constexpr int STAGE = 2 * TILE * UNITS;  /* units of a warp: keys, values */
    static constexpr size_t SHARED = sizeof(uint4) * WARPS * STAGES * STAGE;
};

/* One piece of a row's keys, for up to HEADS query heads of one kv head. */
struct piece {
    const half *K, *V; /* [capacity, D] */
    int row, capacity; /* cache row of the piece's first key */
    int count, D;
};

/* ---- Copies -------------------------------------------------------------- */

/* Unit u of a tile's row lies at u ^ swizzle(row). Eight lanes read at once, and must
 * find eight different units modulo 8: of keys, units 4 i + q of rows r, r + 1 (r
 * even); of values, units 8 i + r, + 1 (r even) of rows 2 q + n. */
static __device__ __forceinline__ int swizzle(int row)
{
    return (row & 6) ^ (row & 1) << 2;
}

/* Keys [16 tile, 16 tile + 16) of a piece, and their values, to the stage at `to`. */
template <int DP>
static __device__ __forceinline__ void fetch(const piece &p, int tile, uint32_t to)
{
    constexpr int UNITS = plan<DP>::UNITS, ROWS = 32 / UNITS; /* rows of one copy */
    int lane = threadIdx.x % 32, unit = lane % UNITS;
#pragma unroll
    for (int i = 0; i < TILE; i += ROWS) {
        int row = i + lane / UNITS, key = tile * TILE + row;
        bool there = key < p.count, some = there && 8 * unit < p.D;
        size_t from = (size_t)ring_row(p.row, there ? key : 0, p.capacity) * p.D +
                      (some ? 8 * unit : 0);
        uint32_t at = to + (row * UNITS + (unit ^ swizzle(row))) * 16;
        cp_async16_or_zero<128>(at, p.K + from, some);
        cp_async16_or_zero<128>(at + TILE * UNITS * 16, p.V + from, some);
    }
}

/* Queries of heads r as the fragment described above: query[i] are dims 32 i + 8 q +
 * 0..7 in pairs. */
template <int DP>
static __device__ __forceinline__ void
fetch_query(uint32_t (&query)[DP / 32][4], const float *q_rows, int heads, int D)
{
    int lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
#pragma unroll
    for (int i = 0; i < DP / 32; i++) {
        int dim = 32 * i + 8 * q;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (r < heads && dim < D) {
            const float4 *from = reinterpret_cast<const float4 *>(q_rows + r * D + dim);
            x = pack_saturated8(from[0], from[1]);
        }
        query[i][0] = x.x, query[i][1] = x.y, query[i][2] = x.z, query[i][3] = x.w;
    }
}

/* The new token's key and value, rounded as the cache keeps them. */
template <int DP>
static __device__ void store_new(const piece &p, int row, const float *k,
                                 const float *v)
{
    half *K = const_cast<half *>(p.K) + (size_t)row * p.D;
    half *V = const_cast<half *>(p.V) + (size_t)row * p.D;
    for (int d = threadIdx.x; d < p.D; d += plan<DP>::THREADS) {
        K[d] = to_half(k[d]);
        V[d] = to_half(v[d]);
    }
}

/* ---- Arithmetic of a warp ------------------------------------------------ */

/* Sums over the tiles a warp has seen. Head r: largest logit m, l = sum 2^(logit - m)
 * over this lane's keys. Heads 2q, 2q+1: sum[4 i + j] are dims 64 i + 8 r + 2 j, + 1 as
 * (dim, 2q), (dim, 2q+1), (dim+1, 2q), (dim+1, 2q+1). */
template <int DP> struct sums {
    float m, l, sum[DP / 16][4];
};

/* Weights of the tile's keys for head r: w[0] keys 2q, 2q+1, w[1] keys 2q+8, 2q+9. */
template <int DP>
static __device__ __forceinline__ void weigh(sums<DP> &x, uint32_t (&w)[2],
                                             const uint32_t (&query)[DP / 32][4],
                                             const uint4 *keys, int left, float scale)
{
    constexpr int UNITS = plan<DP>::UNITS;
    int lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
    const uint4 *even = keys + r * UNITS + (q ^ swizzle(r)); /* units 4 i + q, i even */
    const uint4 *odd = keys + r * UNITS + (4 ^ q ^ swizzle(r));
    float s[2][4] = {};
#pragma unroll
    for (int i = 0; i < DP / 32; i++)
#pragma unroll
        for (int side = 0; side < 2; side++) {
            uint4 k = (i % 2 ? odd : even)[side * 8 * UNITS + i / 2 * 8];
            mma(s[side], {query[i][0], 0, query[i][1], 0}, k.x, k.y);
            mma(s[side], {query[i][2], 0, query[i][3], 0}, k.z, k.w);
        }
    float top = x.m;
#pragma unroll
    for (int side = 0; side < 2; side++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            bool there = side * 8 + 2 * q + e < left;
            s[side][e] = there ? s[side][e] * scale : -INFINITY;
            top = fmaxf(top, s[side][e]);
        }
    top = quad_max(top); /* finite: a tile has a key at least */
    float shrink = exp2_fast(x.m - top), total = 0;
#pragma unroll
    for (int side = 0; side < 2; side++) {
        float a = exp2_fast(s[side][0] - top), b = exp2_fast(s[side][1] - top);
        total += a + b;
        w[side] = pack_half2(a, b);
    }
    x.l = x.l * shrink + total;
    x.m = top;
    if (__any_sync(~0u, shrink != 1.f)) {
        float even = __shfl_sync(~0u, shrink, 8 * q);
        float odd = __shfl_sync(~0u, shrink, 8 * q + 4);
#pragma unroll
        for (int i = 0; i < DP / 16; i++) {
            x.sum[i][0] *= even, x.sum[i][2] *= even;
            x.sum[i][1] *= odd, x.sum[i][3] *= odd;
        }
    }
}

template <int DP>
static __device__ __forceinline__ void add_values(sums<DP> &x, const uint32_t (&w)[2],
                                                  const uint4 *values)
{
    constexpr int UNITS = plan<DP>::UNITS;
    int lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
    const uint4 *even = values + 2 * q * UNITS + (r ^ swizzle(2 * q));
    const uint4 *odd = values + (2 * q + 1) * UNITS + (r ^ swizzle(2 * q + 1));
#pragma unroll
    for (int i = 0; i < DP / 64; i++) {
        uint32_t v[4][4];
#pragma unroll
        for (int n = 0; n < 4; n++)
            *reinterpret_cast<uint4 *>(v[n]) =
                (n % 2 ? odd : even)[n / 2 * 8 * UNITS + i * 8];
#pragma unroll
        for (int j = 0; j < 4; j++)
            mma(x.sum[4 * i + j],
                {__byte_perm(v[0][j], v[1][j], 0x5410),
                 __byte_perm(v[0][j], v[1][j], 0x7632),
                 __byte_perm(v[2][j], v[3][j], 0x5410),
                 __byte_perm(v[2][j], v[3][j], 0x7632)},
                w[0], w[1]);
    }
}

/* Every WARPS-th tile of a piece. `stage` is this warp's shared memory. */
template <int DP>
static __device__ __forceinline__ void walk(sums<DP> &x, const piece &p,
                                            const float *q_rows, int heads, float scale,
                                            uint4 *stage)
{
    constexpr int WARPS = plan<DP>::WARPS, SIZE = plan<DP>::STAGE;
    int warp = threadIdx.x / 32, tiles = (p.count + TILE - 1) / TILE;
    uint32_t to = shared_address(stage);
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
        int tile = warp + s * WARPS;
        if (tile < tiles) fetch<DP>(p, tile, to + s * SIZE * 16);
        cp_async_commit();
    }
    uint32_t query[DP / 32][4];
    fetch_query<DP>(query, q_rows, heads, p.D);
    x.m = -INFINITY, x.l = 0;
#pragma unroll
    for (int i = 0; i < DP / 16; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) x.sum[i][e] = 0;

    int s = 0;
    for (int tile = warp; tile < tiles; tile += WARPS) {
        cp_async_wait<STAGES - 1>();
        __syncwarp(); /* those of all lanes have come */
        const uint4 *here = stage + s * SIZE;
        uint32_t w[2];
        weigh<DP>(x, w, query, here, p.count - tile * TILE, scale);
        add_values<DP>(x, w, here + SIZE / 2);
        __syncwarp(); /* and have been read by all */
        int next = tile + STAGES * WARPS;
        if (next < tiles) fetch<DP>(p, next, to + s * SIZE * 16);
        cp_async_commit();
        s = s + 1 == STAGES ? 0 : s + 1;
    }
    cp_async_wait<0>();
}

/* ---- Joining the warps of a block ---------------------------------------- */

/* The block's sums in shared memory. */
template <int DP> struct joined {
    float (*sum)[HEADS][DP];        /* [WARPS] */
    float (*m)[HEADS], (*l)[HEADS]; /* [WARPS] */
};

template <int DP>
static __device__ __forceinline__ void store_warp(const sums<DP> &x,
                                                  const joined<DP> &to)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
    float l = quad_sum(x.l);
    if (q == 0) to.m[warp][r] = x.m, to.l[warp][r] = l;
#pragma unroll
    for (int i = 0; i < DP / 16; i++)
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            int dim = 64 * (i / 4) + 8 * r + 2 * (i % 4);
            *reinterpret_cast<float2 *>(&to.sum[warp][2 * q + odd][dim]) =
                make_float2(x.sum[i][odd], x.sum[i][2 + odd]);
        }
}

/* Head h of all warps: weights of the warps into w, the common maximum and sum out. */
template <int DP>
static __device__ __forceinline__ float2 weigh_warps(const joined<DP> &x, int h,
                                                     float (&w)[plan<DP>::WARPS])
{
    constexpr int WARPS = plan<DP>::WARPS;
    float top = -INFINITY, total = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) top = fmaxf(top, x.m[i][h]);
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
        w[i] = exp2_fast(x.m[i][h] - top);
        total += w[i] * x.l[i][h];
    }
    return make_float2(top, total);
}

/* ---- Kernels ------------------------------------------------------------- */

/* first[s] = number of pieces of the segments before s, times kv heads and `chunks`. */
static __device__ void count_items(const sti_cuda_attn &a, int chunks, int *count,
                                   int *first)
{
    for (int s = threadIdx.x; s < a.n_seg; s += blockDim.x)
        count[s] = cut_keys(a, past_of(a, s)).pieces * a.G * chunks;
    __syncthreads();
    for (int s = threadIdx.x; s <= a.n_seg; s += blockDim.x) {
        int sum = 0;
        for (int i = 0; i < s; i++) sum += count[i];
        first[s] = sum;
    }
    __syncthreads();
}

/* Item = (segment, kv head, chunk of its query heads, piece), the last one fastest. */
template <int DP>
__global__ void __launch_bounds__(plan<DP>::THREADS, plan<DP>::BLOCKS)
    decode(const __grid_constant__ sti_cuda_attn a, sti_cuda_attn_parts parts)
{
    constexpr int WARPS = plan<DP>::WARPS;
    extern __shared__ uint4 stage[]; /* [WARPS, STAGES, STAGE] */
    __shared__ int count[STI_CUDA_ATTN_SEGS], first[STI_CUDA_ATTN_SEGS + 1];
    __shared__ float m[WARPS][HEADS], l[WARPS][HEADS];
    static_assert(sizeof(float[WARPS][HEADS][DP]) <= plan<DP>::SHARED, "capacity");

    int group = a.H / a.G, chunks = (group + HEADS - 1) / HEADS, D = a.D;
    int warp = threadIdx.x / 32, s = 0;
    joined<DP> join = {reinterpret_cast<float(*)[HEADS][DP]>(stage), m, l};
    pdl_trigger();
    pdl_wait();
    count_items(a, chunks, count, first);

    for (int item = blockIdx.x; item < first[a.n_seg]; item += gridDim.x) {
        while (item >= first[s + 1]) s++;
        int t = past_of(a, s), row0 = a.seg[s].row0, capacity = a.seg[s].capacity;
        cut c = cut_keys(a, t);
        int index = (item - first[s]) % c.pieces, rest = (item - first[s]) / c.pieces;
        int g = rest / chunks, head = g * group + rest % chunks * HEADS;
        int heads = min((int)HEADS, (g + 1) * group - head);
        int begin = c.first + index * c.piece;
        size_t cache = (size_t)g * capacity * D;
        piece p = {static_cast<const half *>(a.seg[s].K) + cache,
                   static_cast<const half *>(a.seg[s].V) + cache,
                   begin % capacity,
                   capacity,
                   min(c.piece, t + 1 - begin),
                   D};
        if (index == c.pieces - 1) { /* no other block reads this row */
            size_t at = ((size_t)row0 * a.G + g) * D;
            store_new<DP>(p, t % capacity, a.k + at, a.v + at);
            __syncthreads();
        }
        size_t out = (size_t)row0 * a.H + head;
        sums<DP> x;
        walk<DP>(x, p, a.q + out * D, heads, a.scale,
                 stage + warp * STAGES * plan<DP>::STAGE);
        __syncthreads();
        store_warp<DP>(x, join);
        __syncthreads();
        size_t part = ((size_t)s * a.H + head) * parts.pieces + index;
        for (int h = 0; h < heads; h++, part += parts.pieces) {
            float w[WARPS];
            float2 stat = weigh_warps<DP>(join, h, w);
            bool whole = c.pieces == 1;
            float scale = whole ? 1 / stat.y : 1;
            float *to = whole ? a.o + (out + h) * D : parts.sum + part * D;
            for (int d = threadIdx.x; d < D; d += plan<DP>::THREADS) {
                float sum = 0;
#pragma unroll
                for (int i = 0; i < WARPS; i++) sum += w[i] * join.sum[i][h][d];
                to[d] = sum * scale;
            }
            if (!whole && threadIdx.x == 0) parts.stat[part] = stat;
        }
        __syncthreads();
    }
}

/* o = sum over pieces, in order. Block (h, s): head h of segment s; a thread a dim. */
__global__ void __launch_bounds__(STI_CUDA_ATTN_MAX_D)
    join_pieces(const __grid_constant__ sti_cuda_attn a, sti_cuda_attn_parts parts)
{
    __shared__ float weight[STI_CUDA_ATTN_SPLITS];
    int h = blockIdx.x, s = blockIdx.y, D = a.D, d = threadIdx.x;
    pdl_trigger();
    pdl_wait();
    int n = cut_keys(a, past_of(a, s)).pieces;
    if (n == 1) return; /* already there */
    size_t part = ((size_t)s * a.H + h) * parts.pieces;
    float top = -INFINITY, total = 0, sum = 0;
    for (int i = 0; i < n; i++) top = fmaxf(top, parts.stat[part + i].x);
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        weight[i] = exp2_fast(parts.stat[part + i].x - top);
    __syncthreads();
    for (int i = 0; i < n; i++) total += weight[i] * parts.stat[part + i].y;
    if (d >= D) return;
    const float *from = parts.sum + part * D + d;
#pragma unroll 8
    for (int i = 0; i < n; i++) sum += weight[i] * from[(size_t)i * D];
    a.o[((size_t)a.seg[s].row0 * a.H + h) * D + d] = sum / total;
}

template <int DP>
still_status launch(sti_dev *dev, const sti_cuda_attn *a, const sti_cuda_attn_parts *p,
                    still_error *err)
{
    size_t bytes = plan<DP>::SHARED;
    STI_CUDA(cudaFuncSetAttribute(
                 decode<DP>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes),
             "attention: shared memory of decode");
    STI_CUDA(cudaFuncSetAttribute(decode<DP>,
                                  cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared),
             "attention: shared memory of decode");
    int chunks = (a->H / a->G + HEADS - 1) / HEADS;
    int64_t items = (int64_t)a->n_seg * a->G * chunks * p->pieces;
    int64_t blocks = (int64_t)dev->sms * plan<DP>::BLOCKS;
    STI_CUDA(pdl_launch(dev, decode<DP>,
                        dim3((unsigned)(items < blocks ? items : blocks)),
                        dim3(plan<DP>::THREADS), (size_t)bytes, *a, *p),
             "attention: decode");
    return STILL_OK;
}

} // namespace

extern "C" still_status sti_cuda_attn_decode(sti_dev *dev, const sti_cuda_attn *a,
                                             const sti_cuda_attn_parts *p,
                                             still_error *err)
{
    if (a->D <= 64) return launch<64>(dev, a, p, err);
    if (a->D <= 128) return launch<128>(dev, a, p, err);
    return launch<256>(dev, a, p, err);
}

extern "C" still_status sti_cuda_attn_join(sti_dev *dev, const sti_cuda_attn *a,
                                           const sti_cuda_attn_parts *p,
                                           still_error *err)
{
    if (p->pieces < 2) return STILL_OK;
    dim3 grid((unsigned)a->H, (unsigned)a->n_seg);
    STI_CUDA(pdl_launch(dev, join_pieces, grid, dim3((unsigned)(a->D + 31) / 32 * 32),
                        0, *a, *p),
             "attention: join");
    return STILL_OK;
}
