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

/* Rows of up to ROW numbers; a warp takes TILES tiles at once. */
template <int ROW_> struct tile_layout {
    enum { ROW = ROW_, CHUNKS = ROW / 32, TILES = ROW <= 64 ? 2 : 1 };

    /* Softmax of query t over the keys the warp has seen, l those of this lane. Number
     * (c, j) of o: numbers dim(c, 2j) (o[0] + o[1]) and dim(c, 2j + 1) (o[2] + o[3]).
     */
    struct running {
        float m, l, o[CHUNKS][2][4];

        __device__ __forceinline__ void clear()
        {
            m = -INFINITY;
            l = 0;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
#pragma unroll
                for (int j = 0; j < 2; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) o[c][j][i] = 0;
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
template <int ROW>
STI_DEVICE void ready_queries(tile_layout<ROW>, step_shared<__half, MAX_HEADS> &sh,
                              const float (*q)[MAX_D])
{
    __syncthreads(); /* nobody uses the former ones */
    for (int i = (int)threadIdx.x; i < ROW; i += THREADS) { /* 32 lanes, ROW / 32 */
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

/* What a lane has of its row i of keys or values. */
template <int CHUNKS>
STI_DEVICE void load_tile_row(uint4 (&to)[CHUNKS], const __half *row, bool wanted,
                              int D)
{
    const int own = (int)threadIdx.x % 4 * 8;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        to[c] = make_uint4(0, 0, 0, 0);
        if (wanted && c * 32 + own < D)
            to[c] = *reinterpret_cast<const uint4 *>(row + c * 32 + own);
    }
}

/* Logits of rows g and g + 8 for query t. */
template <int CHUNKS>
STI_DEVICE void dot_tile(const uint4 (&k)[2][CHUNKS], const uint4 *operand,
                         float *logit)
{
    const int lane = (int)threadIdx.x % 32;
    float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const uint4 q = operand[c * 32 + lane];
        const uint32_t first[4] = {k[0][c].x, k[1][c].x, k[0][c].y, k[1][c].y};
        const uint32_t second[4] = {k[0][c].z, k[1][c].z, k[0][c].w, k[1][c].w};
        mma(even, first, q.x, q.y);
        mma(odd, second, q.z, q.w);
    }
    logit[0] = (even[0] + odd[0]) + (even[1] + odd[1]);
    logit[1] = (even[2] + odd[2]) + (even[3] + odd[3]);
}

/* o += V^T p, p of rows g and g + 8. */
template <int CHUNKS>
STI_DEVICE void add_values(float (&o)[CHUNKS][2][4], const uint4 (&v)[2][CHUNKS],
                           const float *p)
{
    uint32_t weight[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        __half high, low;
        split_half(p[i], &high, &low);
        const __half2 both = __halves2half2(high, low);
        memcpy(&weight[i], &both, sizeof both);
        weight[i] = turn_square(weight[i]);
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint32_t turned[4] = {turn_square(word_of(v[0][c], 2 * j)),
                                        turn_square(word_of(v[0][c], 2 * j + 1)),
                                        turn_square(word_of(v[1][c], 2 * j)),
                                        turn_square(word_of(v[1][c], 2 * j + 1))};
            mma(o[c][j], turned, weight[0], weight[1]);
        }
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
template <int ROW, int TILES, int CHUNKS>
STI_DEVICE void soften_tiles(typename tile_layout<ROW>::running &r,
                             float (&logit)[TILES][2], const uint4 (&v)[TILES][2][CHUNKS])
{
    float top = r.m;
#pragma unroll
    for (int u = 0; u < TILES; u++) top = fmaxf(top, fmaxf(logit[u][0], logit[u][1]));
    top = rows_max(top);
    const float base = top > -INFINITY ? top : 0, keep = exp2f(r.m - base);
    r.m = top;
    r.l *= keep;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) r.o[c][j][i] *= keep;
#pragma unroll
    for (int u = 0; u < TILES; u++) {
        const float p[2] = {exp2f(logit[u][0] - base), exp2f(logit[u][1] - base)};
        r.l += p[0] + p[1];
        add_values(r.o, v[u], p);
    }
}

/* Queries that are ready meet keys [lo, hi), those that are far or those that are not.
 */
template <int ROW>
STI_DEVICE void meet_keys(tile_layout<ROW>, const step_args &a,
                          const step_shared<__half, MAX_HEADS> &sh, int lo, int hi,
                          bool far, const float (*)[MAX_D], int first,
                          typename tile_layout<ROW>::running &r)
{
    typedef tile_layout<ROW> layout;
    enum { TILES = layout::TILES, KEYS = 16 * TILES };
    const int warp = (int)threadIdx.x / 32, g = (int)threadIdx.x % 32 / 4;
    const int query = first + (int)threadIdx.x % 4;
    const bool keeps = keeps_logits(a.h) && query < a.h.group;
    const float scale = a.h.scale * LOG2_E;
#pragma unroll 1
    for (int base = lo + warp * KEYS; base < hi; base += WARPS * KEYS) {
        uint4 k[TILES][2][layout::CHUNKS], v[TILES][2][layout::CHUNKS];
        bool seen[TILES][2];
#pragma unroll
        for (int u = 0; u < 2 * TILES; u++) {
            const int i = base + u * 8 + g;
            bool &wanted = seen[u / 2][u % 2];
            wanted = i < hi;
            if (a.h.position_cap > 0 && wanted) wanted = far == is_far(sh, i);
            const int row = wanted ? i : lo;
            load_tile_row(k[u / 2][u % 2], sh.keys_at.at(row), wanted, a.h.D);
            load_tile_row(v[u / 2][u % 2], sh.values_at.at(row), wanted, a.h.D);
        }
        float logit[TILES][2];
#pragma unroll
        for (int u = 0; u < TILES; u++) dot_tile(k[u], sh.operand, logit[u]);
#pragma unroll
        for (int u = 0; u < 2 * TILES; u++) {
            const int i = base + u * 8 + g;
            float &x = logit[u / 2][u % 2];
            x = seen[u / 2][u % 2] ? x * scale : -INFINITY;
            if (keeps && seen[u / 2][u % 2] && i < sh.keys_at.tokens)
                logits_at(a, query)[i] = x;
        }
        soften_tiles<ROW>(r, logit, v);
    }
}

/* What a warp has, to shared memory. */
template <int ROW>
STI_DEVICE void leave_to_join(tile_layout<ROW>, step_shared<__half, MAX_HEADS> &sh,
                              typename tile_layout<ROW>::running &r)
{
    typedef tile_layout<ROW> layout;
    const int warp = (int)threadIdx.x / 32, g = (int)threadIdx.x % 32 / 4;
    const int t = (int)threadIdx.x % 4;
    const float l = rows_sum(r.l);
#pragma unroll
    for (int c = 0; c < layout::CHUNKS; c++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float *to = sh.keys.o[warp][t];
            to[layout::dim(c, 2 * j, g)] = r.o[c][j][0] + r.o[c][j][1];
            to[layout::dim(c, 2 * j + 1, g)] = r.o[c][j][2] + r.o[c][j][3];
        }
    if (g > 0) return;
    sh.keys.m[warp][t] = r.m;
    sh.keys.l[warp][t] = l;
}

#endif
