/* hybrid_step_tiles.cuh - a key unit on tensor cores: half keys, heads of up to 128
 * numbers. The parts of hybrid_step_keys.cuh that depend on how keys lie in registers,
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
 * t. Neither shared memory nor other warps are met until the end of the run.
 *
 * A warp asks for 8 KB at a time, 16 warps a multiprocessor: 128 KB in flight. */
#ifndef STI_BACKEND_CUDA_HYBRID_STEP_TILES_CUH
#define STI_BACKEND_CUDA_HYBRID_STEP_TILES_CUH

#include "backend/cuda/hybrid_step.cuh"
#include "backend/cuda/mma.cuh"

typedef struct tile_keys {
} tile_keys;
/* Rows of up to ROW numbers; a warp takes TILES tiles at once. */
template <int ROW_> struct tile_layout {
    typedef tile_keys kind;
    enum { ROW = ROW_, CHUNKS = ROW / 32, TILES = ROW <= 64 ? 2 : 1 };

    /* Softmax of query t over the keys the warp has seen, l those of this lane; of o
     * the numbers dim(c, word). */
    struct running {
        float m, l, o[CHUNKS][4];

        __device__ __forceinline__ void clear()
        {
            m = -INFINITY;
            l = 0;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
#pragma unroll
                for (int i = 0; i < 4; i++) o[c][i] = 0;
        }
    };
    static __device__ __forceinline__ int dim(int c, int word, int g)
    {
        return c * 32 + g / 2 * 8 + word * 2 + g % 2;
    }
};

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

/* Queries as operands: of lane 4 g + t half g % 2 of query g / 2, in the order in which
 * the lane has keys. */
template <typename Layout>
STI_DEVICE void ready_queries(tile_keys, step_shared<__half, MAX_HEADS> &sh,
                              const float (*q)[MAX_D])
{
    __syncthreads(); /* nobody uses the former ones */
    for (int i = (int)threadIdx.x; i < Layout::ROW; i += THREADS) {
        const int g = i % 32 / 4, t = i % 4;
        const float *x = q[g / 2] + i / 32 * 32 + t * 8;
        uint32_t word[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            __half high[2], low[2];
            split_half(x[2 * k], &high[0], &low[0]);
            split_half(x[2 * k + 1], &high[1], &low[1]);
            const __half2 both = g % 2 ? __halves2half2(low[0], low[1])
                                       : __halves2half2(high[0], high[1]);
            memcpy(&word[k], &both, sizeof both);
        }
        sh.operand[i] = make_uint4(word[0], word[1], word[2], word[3]);
    }
    __syncthreads();
}

/* What a lane has of a row of keys or values. */
template <int CHUNKS>
STI_DEVICE void load_tile_row(uint4 (&to)[CHUNKS], const __half *row, int D)
{
    const int own = (int)threadIdx.x % 4 * 8;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        to[c] = make_uint4(0, 0, 0, 0);
        if (c * 32 + own < D)
            to[c] = *reinterpret_cast<const uint4 *>(row + c * 32 + own);
    }
}

/* Rows i, i + 8, ...; row `any` instead of those that are not there. Where they lie is
 * worked out anew every time: there are not registers enough to keep it. */
template <int TILES, int CHUNKS>
STI_DEVICE void load_tiles(uint4 (&to)[TILES][2][CHUNKS],
                           const token_rows<__half> &from, int i,
                           const bool (&seen)[TILES][2], int any, int D)
{
    asm volatile("" ::: "memory");
#pragma unroll
    for (int u = 0; u < 2 * TILES; u++) {
        const int row = seen[u / 2][u % 2] ? i + u * 8 : any;
        load_tile_row(to[u / 2][u % 2], from.at(row), D);
    }
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

/* Takes in tiles of keys; a logit of -infinity is none. */
template <typename Layout, int TILES, int CHUNKS>
STI_DEVICE void soften_tiles(typename Layout::running &r, float (&logit)[TILES][2],
                             const uint4 (&v)[TILES][2][CHUNKS])
{
    float top = r.m;
#pragma unroll
    for (int u = 0; u < TILES; u++) top = fmaxf(top, fmaxf(logit[u][0], logit[u][1]));
    top = rows_max(top);
    const float base = top > -INFINITY ? top : 0, keep = exp2f(r.m - base);
    uint32_t weight[TILES][2];
    r.m = top;
    r.l *= keep;
#pragma unroll
    for (int u = 0; u < TILES; u++) {
        const float p[2] = {exp2f(logit[u][0] - base), exp2f(logit[u][1] - base)};
        r.l += p[0] + p[1];
        turn_weights(p, weight[u]);
    }
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

/* Queries that are ready meet the keys of the run, those that are far or those that are
 * not.
 */
template <typename Layout>
STI_DEVICE void
meet_keys(tile_keys, const step_args &a, const step_shared<__half, MAX_HEADS> &sh,
          bool far, const float (*)[MAX_D], int first, typename Layout::running &r)
{
    enum { TILES = Layout::TILES, KEYS = 16 * TILES };
    const int warp = (int)threadIdx.x / 32, g = (int)threadIdx.x % 32 / 4;
    const int query = first + (int)threadIdx.x % 4;
    const bool keeps = keeps_logits(a.h) && query < a.h.group;
    const float scale = a.h.scale * LOG2_E;
#pragma unroll 1
    for (int base = sh.lo + warp * KEYS; base < sh.hi; base += WARPS * KEYS) {
        uint4 k[TILES][2][Layout::CHUNKS], v[TILES][2][Layout::CHUNKS];
        bool seen[TILES][2];
#pragma unroll
        for (int u = 0; u < 2 * TILES; u++) {
            const int i = base + u * 8 + g;
            bool &wanted = seen[u / 2][u % 2];
            wanted = i < sh.hi;
            if (a.h.position_cap > 0 && wanted) wanted = far == is_far(sh, i);
        }
        load_tiles(k, sh.keys_at, base + g, seen, sh.lo, a.h.D);
        load_tiles(v, sh.values_at, base + g, seen, sh.lo, a.h.D);
        float logit[TILES][2];
#pragma unroll
        for (int u = 0; u < TILES; u++) dot_tile(k[u], sh.operand, logit[u]);
#pragma unroll
        for (int u = 0; u < 2 * TILES; u++) {
            float &x = logit[u / 2][u % 2];
            x = seen[u / 2][u % 2] ? x * scale : -INFINITY;
        }
        soften_tiles<Layout>(r, logit, v);
#pragma unroll
        for (int u = 0; u < 2 * TILES; u++) {
            const int i = base + u * 8 + g;
            if (keeps && seen[u / 2][u % 2] && i < sh.keys_at.tokens)
                sh.logits[query * (2 * a.h.C + 2) + i] = logit[u / 2][u % 2];
        }
    }
}

/* What a warp has, to shared memory. */
template <typename Layout>
STI_DEVICE void leave_to_join(tile_keys, step_shared<__half, MAX_HEADS> &sh,
                              typename Layout::running &r)
{
    const int warp = (int)threadIdx.x / 32, g = (int)threadIdx.x % 32 / 4;
    const int t = (int)threadIdx.x % 4;
    const float l = rows_sum(r.l);
#pragma unroll
    for (int c = 0; c < Layout::CHUNKS; c++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sh.keys.o[warp][t][Layout::dim(c, i, g)] = r.o[c][i];
    if (g > 0) return;
    sh.keys.m[warp][t] = r.m;
    sh.keys.l[warp][t] = l;
}

#endif
