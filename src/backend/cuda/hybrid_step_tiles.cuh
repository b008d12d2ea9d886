/* hybrid_step_tiles.cuh - a key unit on tensor cores: half keys, heads of up to 128
 * numbers. The parts of hybrid_step_unit.cuh that depend on how keys lie in registers,
 * for tiles of 16 keys and four queries:
 *
 *   logits [16 keys, 8] += K [16 keys, 16] Q [16, 8]    D / 16 products
 *   o [16, 8]           += V^T [16, 16 keys] p [16 keys, 8]   likewise
 *
 * Queries and weights are sums of two halves, so nothing is lost to half precision: the
 * eight columns are (high, low) of each query. A lane 4 g + t (fragments: mma.cuh) has
 * of K and V rows g and g + 8, 16 bytes of every 64: as they come from memory they are
 * an operand of the first product, whose sum over D may run in any order, and turned
 * square by square one of the second. Its logits and its part of o are those of query
 * t.
 *
 * A warp asks for 8 KB at a time, 16 warps a multiprocessor: 128 KB in flight. */
#ifndef STI_BACKEND_CUDA_HYBRID_STEP_TILES_CUH
#define STI_BACKEND_CUDA_HYBRID_STEP_TILES_CUH

#include "backend/cuda/hybrid_step.cuh"
#include "backend/cuda/mma.cuh"

/* The transpose of an 8 x 8 square, lane 4 g + t has (g, 2t) and (g, 2t + 1). */
STI_DEVICE uint32_t turn_square(uint32_t x)
{
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(y) : "r"(x));
    return y;
}

/* Word i of 16 bytes. */
STI_DEVICE uint32_t word_of(const uint4 &x, int i)
{
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

/* x as the sum of two halves. */
STI_DEVICE void split_half(float x, __half *high, __half *low)
{
    narrow(x, high);
    narrow(x - widen(*high), low);
}

/* ---- Queries -------------------------------------------------------------------- */

/* Queries as operands: of lane 4 g + t half g % 2 of query g / 2, in the order in which
 * the lane has keys. A thread makes one vector of one chunk. */
template <int ROW> struct tile_queries {
    float x[8];

    __device__ __forceinline__ static int query()
    {
        return (int)threadIdx.x % 32 / 8;
    }
    __device__ __forceinline__ static int from()
    {
        return (int)threadIdx.x / 32 * 32 + (int)threadIdx.x % 4 * 8;
    }
    /* q [heads, D] */
    __device__ __forceinline__ void load(const float *q, int heads, int D)
    {
        const bool there = (int)threadIdx.x < ROW && query() < heads && from() < D;
#pragma unroll
        for (int k = 0; k < 8; k++) x[k] = there ? q[query() * D + from() + k] : 0;
    }
    __device__ __forceinline__ void load(const float (*q)[MAX_D])
    {
        if ((int)threadIdx.x < ROW)
#pragma unroll
            for (int k = 0; k < 8; k++) x[k] = q[query()][from() + k];
    }
    __device__ __forceinline__ void store(step_shared<__half, MAX_HEADS> &sh) const
    {
        static_assert(ROW <= THREADS, "a thread makes one vector");
        if ((int)threadIdx.x >= ROW) return;
        const bool want_low = threadIdx.x / 4 % 2 != 0;
        uint32_t word[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            __half high[2], low[2];
            split_half(x[2 * k], &high[0], &low[0]);
            split_half(x[2 * k + 1], &high[1], &low[1]);
            const __half2 both = want_low ? __halves2half2(low[0], low[1])
                                          : __halves2half2(high[0], high[1]);
            memcpy(&word[k], &both, sizeof both);
        }
        sh.keys.operand[threadIdx.x] = make_uint4(word[0], word[1], word[2], word[3]);
    }
};

/* ---- Products ------------------------------------------------------------------- */

/* What a lane has of a row of keys or values. What lies behind the row stays as it is:
 * zero. */
template <int CHUNKS>
STI_DEVICE void load_tile_row(uint4 (&to)[CHUNKS], const __half *row, int D)
{
    const int own = (int)threadIdx.x % 4 * 8;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        if (own < D - c * 32)
            to[c] = *reinterpret_cast<const uint4 *>(row + own + c * 32);
}

/* Logits of rows g and g + 8 for query t. */
template <int CHUNKS>
STI_DEVICE void dot_tile(const uint4 (&k)[2][CHUNKS], const uint4 *operand,
                         float *logit)
{
    const int lane = (int)threadIdx.x % 32;
    float sum[4] = {0, 0, 0, 0};
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        asm volatile("" ::: "memory"); /* the others are not read yet */
        const uint4 q = operand[c * 32 + lane];
        const uint32_t first[4] = {k[0][c].x, k[1][c].x, k[0][c].y, k[1][c].y};
        const uint32_t second[4] = {k[0][c].z, k[1][c].z, k[0][c].w, k[1][c].w};
        mma(sum, first, q.x, q.y);
        mma(sum, second, q.z, q.w);
    }
    logit[0] = sum[0] + sum[1];
    logit[1] = sum[2] + sum[3];
}

/* Weights of rows g and g + 8 as an operand. */
STI_DEVICE void turn_weights(const float *p, uint32_t *weight)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        __half high, low;
        split_half(p[i], &high, &low);
        const __half2 both = __halves2half2(high, low);
        memcpy(&weight[i], &both, sizeof both);
        weight[i] = turn_square(weight[i]);
    }
}

/* sum += V^T p for words 2 j and 2 j + 1 of a chunk. */
STI_DEVICE void add_values(float (&sum)[4], const uint4 &v0, const uint4 &v8, int j,
                           const uint32_t *weight)
{
    const uint32_t turned[4] = {
        turn_square(word_of(v0, 2 * j)), turn_square(word_of(v0, 2 * j + 1)),
        turn_square(word_of(v8, 2 * j)), turn_square(word_of(v8, 2 * j + 1))};
    mma(sum, turned, weight[0], weight[1]);
}

/* Largest of, or sum over, the lanes that have the same query. */
STI_DEVICE float rows_max(float x)
{
    for (int i = 4; i < 32; i <<= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, i));
    return x;
}
STI_DEVICE float rows_sum(float x)
{
    for (int i = 4; i < 32; i <<= 1) x += __shfl_xor_sync(~0u, x, i);
    return x;
}

/* ---- A warp's keys -------------------------------------------------------------- */

/* Softmax of query t over the keys the warp has seen, l those of this lane, as is
 * `recent`; of o the numbers tile_layout::dim(c, word). */
template <int CHUNKS> struct tile_running {
    float m, l, o[CHUNKS][4];
    logit_sum recent;

    __device__ __forceinline__ void clear()
    {
        m = -INFINITY;
        l = 0;
        recent.clear();
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int i = 0; i < 4; i++) o[c][i] = 0;
    }
};

/* 16 TILES places; of the lane row u, 0 <= u < 2 TILES, is place base + 8 u + g. */
template <int TILES, int CHUNKS> struct tile_batch {
    uint4 k[TILES][2][CHUNKS], v[TILES][2][CHUNKS];
    float logit[2 * TILES];
    bool seen[2 * TILES];

    static __device__ __forceinline__ int place(int base, int u)
    {
        return base + u * 8 + (int)threadIdx.x % 32 / 4;
    }
    __device__ __forceinline__ void clear()
    {
#pragma unroll
        for (int u = 0; u < 2 * TILES; u++)
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
                k[u / 2][u % 2][c] = v[u / 2][u % 2][c] = make_uint4(0, 0, 0, 0);
    }
    /* Where rows lie is worked out anew every time: there are not registers enough to
     * keep it. */
    static __device__ __forceinline__ void
    load(uint4 (&to)[TILES][2][CHUNKS], const token_rows<__half> &from, int base)
    {
        asm volatile("" ::: "memory");
#pragma unroll
        for (int u = 0; u < 2 * TILES; u++)
            load_tile_row(to[u / 2][u % 2], from.at(place(base, u)), from.D);
    }
    __device__ __forceinline__ void load_keys(const token_rows<__half> &from, int base)
    {
        load(k, from, base);
    }
    __device__ __forceinline__ void load_values(const token_rows<__half> &from,
                                                int base)
    {
        load(v, from, base);
    }
    /* The new token's row instead of what the ring has in its place. */
    static __device__ __forceinline__ void put_fresh(uint4 (&to)[TILES][2][CHUNKS],
                                                     const __half *row, int D,
                                                     const sight &see, int base)
    {
        const int fresh = see.fresh();
        if (fresh < base || fresh >= base + 16 * TILES) return; /* of all lanes */
#pragma unroll
        for (int u = 0; u < 2 * TILES; u++)
            if (place(base, u) == fresh) load_tile_row(to[u / 2][u % 2], row, D);
    }
    __device__ __forceinline__ void find_seen(const step_args &a,
                                              const step_shared<__half, MAX_HEADS> &sh,
                                              const sight &see, int base, bool far)
    {
#pragma unroll
        for (int u = 0; u < 2 * TILES; u++) {
            const int i = place(base, u);
            seen[u] = see.sees(i);
            if (a.h.position_cap > 0 && seen[u]) seen[u] = far == is_far(sh, i);
        }
    }
    __device__ __forceinline__ void dot(const step_shared<__half, MAX_HEADS> &sh,
                                        const sight &see, int base,
                                        const float (*)[MAX_D])
    {
        put_fresh(k, sh.keys.k, sh.keys_at.D, see, base);
#pragma unroll
        for (int u = 0; u < TILES; u++) dot_tile(k[u], sh.keys.operand, &logit[2 * u]);
    }
    /* Scales logits, and keeps those that the score wants. */
    __device__ __forceinline__ void
    keep_logits(const step_args &a, const step_shared<__half, MAX_HEADS> &sh,
                const sight &see, int base, int first, tile_running<CHUNKS> &r)
    {
        const float scale = a.h.scale * LOG2_E;
        const int query = first + (int)threadIdx.x % 4;
        const bool all = a.h.score == STI_SCORE_RECEIVED;
#pragma unroll
        for (int u = 0; u < 2 * TILES; u++)
            logit[u] = seen[u] ? logit[u] * scale : -INFINITY;
        if ((!all && !looks_at_itself(a.h)) || base >= see.ring) return;
        float recent[2 * TILES];
#pragma unroll
        for (int u = 0; u < 2 * TILES; u++) {
            const int i = place(base, u);
            recent[u] = seen[u] && see.recent(i, a.h.C - 1) ? logit[u] : -INFINITY;
            if (query < a.h.group && seen[u] &&
                (i == see.fresh() || (all && i < see.ring)))
                sh.logits[query * (2 * a.h.C + 2) + see.age(i)] = logit[u];
        }
        r.recent.add(recent);
    }
    __device__ __forceinline__ void soften(const step_shared<__half, MAX_HEADS> &sh,
                                           const sight &see, int base,
                                           tile_running<CHUNKS> &r)
    {
        float top = r.m;
#pragma unroll
        for (int u = 0; u < 2 * TILES; u++) top = fmaxf(top, logit[u]);
        top = rows_max(top);
        const float keep_from = top > -INFINITY ? top : 0;
        const float keep = exp2_fast(r.m - keep_from);
        uint32_t weight[TILES][2];
        r.m = top;
        r.l *= keep;
#pragma unroll
        for (int u = 0; u < TILES; u++) {
            const float p[2] = {exp2_fast(logit[2 * u] - keep_from),
                                exp2_fast(logit[2 * u + 1] - keep_from)};
            r.l += p[0] + p[1];
            turn_weights(p, weight[u]);
        }
        put_fresh(v, sh.keys.v, sh.values_at.D, see, base);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float sum[4] = {0, 0, 0, 0};
#pragma unroll
                for (int u = 0; u < TILES; u++)
                    add_values(sum, v[u][0][c], v[u][1][c], j, weight[u]);
                r.o[c][2 * j] = fmaf(r.o[c][2 * j], keep, sum[0] + sum[1]);
                r.o[c][2 * j + 1] = fmaf(r.o[c][2 * j + 1], keep, sum[2] + sum[3]);
            }
    }
};

/* Rows of up to ROW numbers; a warp takes TILES tiles at once. */
typedef struct tile_keys {
} tile_keys;
template <int ROW_> struct tile_layout {
    typedef tile_keys kind;
    enum { ROW = ROW_, CHUNKS = ROW / 32, TILES = ROW <= 64 ? 2 : 1 };
    enum { BATCH = 16 * TILES, OUTPUT = 4 }; /* places; numbers a thread joins */
    typedef tile_queries<ROW_> queries;
    typedef tile_batch<TILES, CHUNKS> batch;
    typedef tile_running<CHUNKS> running;

    static __device__ __forceinline__ int dim(int c, int word, int g)
    {
        return c * 32 + g / 2 * 8 + word * 2 + g % 2;
    }
};

/* What a warp has, to shared memory. */
template <typename Layout>
STI_DEVICE void leave_to_join(tile_keys, step_shared<__half, MAX_HEADS> &sh,
                              typename Layout::running &r)
{
    const int warp = (int)threadIdx.x / 32, g = (int)threadIdx.x % 32 / 4;
    const int t = (int)threadIdx.x % 4;
    const float l = rows_sum(r.l);
#pragma unroll 1
    for (int apart = 4; apart < 32; apart <<= 1) r.recent.join_lane(apart);
#pragma unroll
    for (int c = 0; c < Layout::CHUNKS; c++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sh.keys.o[warp][t][Layout::dim(c, i, g)] = r.o[c][i];
    if (g > 0) return;
    sh.keys.all[warp][t] = logit_sum{r.m, l};
    sh.keys.recent[warp][t] = r.recent;
}

#endif
