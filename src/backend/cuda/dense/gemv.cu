/* gemv.cu - products of few rows: weights are read once, as they are kept.
 *
 * Bounded by the memory the weights come from, and for small models by latency; the
 * tensor cores only save instructions. mma.m16n8k16 multiplies 16 rows of W (its A)
 * with 8 rows of x (its B, unused ones zero), so up to 8 rows of x cost what one costs,
 * and a row's result does not depend on the others. x is rounded to half, as it is for
 * many rows.
 *
 * A block takes a tile of 16 rows of W, its 8 warps interleaved chunks of 64 columns;
 * their sums are added from shared memory in the order of the warps. Of large matrices
 * (the head) a warp takes a tile by itself. x is normed and rounded into shared memory
 * once per block; what does not fit there comes as half and is read from memory.
 *
 * Weights depend on no other kernel, so a warp has its first chunks in registers before
 * it waits for x (pdl.cuh), each chunk that has been used is replaced by the one AHEAD
 * of it, and y is loaded before the products begin. Matrices of different kinds share a
 * launch: a block finds out what its tile is made of.
 *
 * Small matrices with short rows, all but the head of a small model, go another way,
 * on which x becomes y sooner (gemv_short.cuh). */
#include "backend/cuda/dense/gemv_short.cuh"

namespace
{

enum { WARPS = STI_ROW_WARPS, THREADS = STI_ROW_THREADS, TILE = STI_CUDA_TILE };
enum {
    STAGE_MAX = 88 << 10,  /* bytes of x in shared memory: with the sums, what every GPU
                              since sm_80 has; here two blocks fit an SM */
    STAGE_FREE = 38 << 10, /* with the sums, what kernels get by default */
    BLOCKS = 12,           /* an SM, at most */
    OWN_FROM = 16          /* tiles an SM from which on a warp takes one by itself */
};

/* Halves from one staged row to the next: whole chunks, then what keeps the 16-byte
 * reads of two rows by eight lanes on different banks. With 16 columns a lane those of
 * one row lie 32 bytes apart, and the other row fits between; with 8 they fill 64
 * bytes, and the other row takes the next 64. */
__host__ __device__ int stage_stride(int K, int columns)
{
    const int wide = (K + STI_CUDA_CHUNK - 1) / STI_CUDA_CHUNK * STI_CUDA_CHUNK;
    return wide + (columns == 16 ? 8 : 32);
}

/* What the norm multiplies with: a thread's first fours, loaded before x is waited
 * for. In models that are bound by latency that is all. */
enum { HELD = 1 };
typedef sti_held<HELD> gains;

/* x [M, K] as half into shared memory, normed if f.norm, zero up to whole chunks. */
__device__ __forceinline__ void stage(const sti_cuda_gemv_args &f, const gains &gain,
                                      __half *xs, int stride)
{
    __shared__ float part[STI_CUDA_GEMV_ROWS][WARPS];
    const bool vec = f.K % 4 == 0 && sti_aligned16(f.x);
    const bool vec_norm = vec && sti_aligned16(f.norm),
               vec_keep = vec && sti_aligned16(f.keep);
    const int wide = (f.K + STI_CUDA_CHUNK - 1) / STI_CUDA_CHUNK * STI_CUDA_CHUNK;
    if (f.norm) {
        sti_square_parts(f.x, f.M, f.K, vec, part);
        __syncthreads();
    }
    for (int m = 0; m < f.M; m++) {
        const float *x = f.x + (int64_t)m * f.K;
        const float factor = f.norm ? sti_norm_factor(part[m], f.K, f.eps) : 1;
        const auto put = [&](int k, float4 g) {
            float4 v = sti_load4(x, k, f.K, vec);
            if (f.norm) v = sti_normed4(v, factor, g);
            if (f.keep && blockIdx.x == 0)
                sti_store4(f.keep + (int64_t)m * f.K, k, f.K, vec_keep, v);
            *(uint2 *)(xs + m * stride + k) =
                make_uint2(pack_saturated(v.x, v.y), pack_saturated(v.z, v.w));
        };
#pragma unroll
        for (int j = 0; j < HELD; j++)
            if (gain.column(j) < wide) put(gain.column(j), gain.v[j]);
        for (int k = gain.column(HELD); k < wide; k += 4 * THREADS)
            put(k,
                f.norm ? sti_load4(f.norm, k, f.K, vec_norm) : make_float4(1, 1, 1, 1));
    }
}

/* xh [M, ld], which is half already, likewise. */
__device__ __forceinline__ void stage_half(const sti_cuda_gemv_args &f, __half *xs,
                                           int stride)
{
    const int wide = (f.K + STI_CUDA_CHUNK - 1) / STI_CUDA_CHUNK * STI_CUDA_CHUNK;
    const int ld = (f.K + 7) / 8 * 8;
    for (int m = 0; m < f.M; m++)
        for (int k = 8 * threadIdx.x; k < wide; k += 8 * THREADS)
            *(uint4 *)(xs + m * stride + k) =
                k < ld ? *(const uint4 *)(f.xh + (int64_t)m * ld + k)
                       : make_uint4(0, 0, 0, 0);
}

/* x where and as products read it. The caller has fetched what it needs and other
 * kernels do not touch. */
template <bool STAGED>
__device__ __forceinline__ const __half *take_input(const sti_cuda_gemv_args &f,
                                                    __half *staged, int stride)
{
    gains gain;
    if (STAGED && f.norm) {
        gain.load(f.norm, f.K, f.K % 4 == 0 && sti_aligned16(f.norm));
        for (int k = gain.column(HELD); k < f.K; k += 4 * THREADS)
            prefetch_l1(f.norm + k);
    }
    pdl_wait();
    if (!STAGED) return (const __half *)f.xh;
    if (f.xh)
        stage_half(f, staged, stride);
    else
        stage(f, gain, staged, stride);
    __syncthreads();
    return staged;
}

/* What a lane needs of x for one chunk: its sixteen columns of rows g, g + 8, ...
 * left: columns from `x` on; what is staged has zeros up to whole chunks. */
template <int NB> struct rows_of_x {
    uint32_t b[NB][8];
    template <int SECOND, bool STAGED>
    __device__ __forceinline__ void load(const __half *x, int ld, int left, int rows)
    {
#pragma unroll
        for (int i = 0; i < NB; i++) {
            uint4 u = make_uint4(0, 0, 0, 0), v = u;
            if (8 * i < rows && (STAGED || left > 0))
                u = *(const uint4 *)(x + 8 * i * ld);
            if (8 * i < rows && (STAGED || left > SECOND))
                v = *(const uint4 *)(x + 8 * i * ld + SECOND);
            b[i][0] = u.x, b[i][1] = u.y, b[i][2] = u.z, b[i][3] = u.w;
            b[i][4] = v.x, b[i][5] = v.y, b[i][6] = v.z, b[i][7] = v.w;
        }
    }
};

/* A warp's chunks of one tile of W: first, first + STEP, ..., AHEAD of them loaded. */
template <class chunk_t, int STEP> struct chunk_stream {
    enum { AHEAD = chunk_t::AHEAD, BY = AHEAD * STEP, FETCHED = 9 };
    typename chunk_t::place place;
    int left; /* chunks from the next one on */
    chunk_t w[AHEAD];

    __device__ __forceinline__ void begin(const sti_cuda_matrix &m, int tile, int first)
    {
        place = chunk_t::find(m, tile, first, threadIdx.x % 32);
        left = m.chunks - first;
#pragma unroll
        for (int u = 0; u < AHEAD; u++)
            if (u * STEP < left) w[u].load(place, u * STEP);
    }

    /* Prefetches those after them; all of a row as short as that of a small model's
     * head, whose warps have one tile each. */
    __device__ __forceinline__ void fetch(const sti_cuda_matrix &m, int tile,
                                          int first) const
    {
#pragma unroll 1
        for (int u = AHEAD; u < FETCHED; u++)
            prefetch_chunk(m, tile, first + u * STEP, threadIdx.x % 32);
    }

    /* c[0] + c[1] += W x^T over all of them, x [M, ld]. Two sums, since one product
     * waits for the one before it in the same sum. */
    template <int NB, bool STAGED>
    __device__ __forceinline__ void add(const __half *x, int ld, int first, int M,
                                        float (&c)[2][NB][4])
    {
        const int lane = threadIdx.x % 32, g = lane / 4;
        int k = first * STI_CUDA_CHUNK + chunk_t::COLUMNS * (lane & 3);
        x += (int64_t)g * ld;
        for (; left > 0; left -= BY) {
#pragma unroll
            for (int u = 0; u < AHEAD; u++) {
                if (u * STEP >= left) break;
                rows_of_x<NB> r;
                uint32_t top[8], low[8];
                const int at = k + u * STEP * STI_CUDA_CHUNK;
                r.template load<chunk_t::SECOND, STAGED>(x + at, ld, ld - at, M - g);
                w[u].fragment(top, low);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const uint32_t a[4] = {top[2 * i], low[2 * i], top[2 * i + 1],
                                           low[2 * i + 1]};
#pragma unroll
                    for (int j = 0; j < NB; j++)
                        mma(c[i % 2][j], a, r.b[j][2 * i], r.b[j][2 * i + 1]);
                }
                if ((u + AHEAD) * STEP < left) w[u].load(place, (u + AHEAD) * STEP);
            }
            chunk_t::advance(&place, BY);
            k += BY * STI_CUDA_CHUNK;
        }
    }
};

template <int NB> struct tile_sums {
    float v[WARPS][TILE][8 * NB];
    __device__ __forceinline__ float total(int warp, int n, int row, int m) const
    {
        float s = 0;
        for (int w = warp; w < warp + n; w++) s += v[w][row][m];
        return s;
    }
};

/* Tiles blockIdx.x, + gridDim.x, ... of the call, which are all of one kind. GATED:
 * warps 0-3 take the gate's tile, warps 4-7 that of up. */
template <class chunk_t, int NB, bool STAGED, bool GATED>
__device__ __forceinline__ void take_tiles(const sti_cuda_gemv_args &f, int tiles,
                                           int stride, __half *staged,
                                           tile_sums<NB> &sums)
{
    constexpr int STEP = GATED ? WARPS / 2 : WARPS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4,
              t = lane % 4, first = warp % STEP;
    chunk_stream<chunk_t, STEP> w;
    int tile = blockIdx.x, i = GATED ? warp / STEP : locate(f, &tile);
    w.begin(f.w[i], tile, first);
    w.fetch(f.w[i], tile, first);
    const __half *x = take_input<STAGED>(f, staged, stride);
    for (int at = blockIdx.x; at < tiles; at += gridDim.x) {
        /* Thread = (row of the tile, row of x): what it will add to the sum. */
        const int row = threadIdx.x % TILE, m = threadIdx.x / TILE;
        const int N = f.w[GATED ? 0 : i].N, n = tile * TILE + row;
        const bool mine = m < f.M && n < N;
        float *y = GATED ? nullptr : f.y[i] + (int64_t)m * N + n;
        const float *bias = f.bias[GATED ? 0 : i];
        const float shift = mine && bias ? bias[n] : 0;
        const float before = GATED ? (mine && f.bias[1] ? f.bias[1][n] : 0)
                                   : (mine && f.accumulate ? *y : 0);
        float c[2][NB][4] = {};
        w.template add<NB, STAGED>(x, stride, first, f.M, c);
        if (at + gridDim.x < tiles) {
            tile = at + gridDim.x;
            i = GATED ? warp / STEP : locate(f, &tile);
            w.begin(f.w[i], tile, first);
        }
#pragma unroll
        for (int j = 0; j < NB; j++) {
            *(float2 *)&sums.v[warp][g][8 * j + 2 * t] =
                make_float2(c[0][j][0] + c[1][j][0], c[0][j][1] + c[1][j][1]);
            *(float2 *)&sums.v[warp][g + 8][8 * j + 2 * t] =
                make_float2(c[0][j][2] + c[1][j][2], c[0][j][3] + c[1][j][3]);
        }
        __syncthreads();
        if (mine) {
            const float v = sums.total(0, STEP, row, m) + shift;
            if (GATED)
                ((__half *)f.yh)[(int64_t)m * N + n] =
                    to_half(gated_product(v, sums.total(STEP, STEP, row, m) + before));
            else
                *y = before + v;
        }
        __syncthreads();
    }
}

/* The same with a tile a warp: where tiles are many, warps need not wait for each other
 * to add up what little each has of a row. */
template <class chunk_t, int NB, bool STAGED>
__device__ __forceinline__ void take_own_tiles(const sti_cuda_gemv_args &f, int tiles,
                                               int stride, __half *staged)
{
    const int lane = threadIdx.x % 32, by = gridDim.x * WARPS;
    int at = blockIdx.x * WARPS + threadIdx.x / 32;
    chunk_stream<chunk_t, 1> w;
    if (at < tiles) {
        int tile = at, i = locate(f, &tile);
        w.begin(f.w[i], tile, 0);
        w.fetch(f.w[i], tile, 0);
    }
    const __half *x = take_input<STAGED>(f, staged, stride);
    for (; at < tiles; at += by) {
        float c[2][NB][4] = {};
        w.template add<NB, STAGED>(x, stride, 0, f.M, c);
        int tile = at + by, i = 0;
        if (tile < tiles) {
            i = locate(f, &tile);
            w.begin(f.w[i], tile, 0);
        }
        tile = at;
        i = locate(f, &tile);
        const int N = f.w[i].N, n = tile * TILE + lane / 4;
        const float *bias = f.bias[i];
#pragma unroll
        for (int j = 0; j < NB; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int m = 8 * j + lane % 4 * 2 + e % 2, column = n + e / 2 * 8;
                if (m >= f.M || column >= N) continue;
                float *y = f.y[i] + (int64_t)m * N + column;
                const float v = c[0][j][e] + c[1][j][e] + (bias ? bias[column] : 0);
                *y = f.accumulate ? *y + v : v;
            }
    }
}

enum tiling { SHARED_TILES, GATED_TILES, OWN_TILES };

template <class chunk_t, int NB, bool STAGED, tiling HOW>
__device__ __forceinline__ void take(const sti_cuda_gemv_args &f, int tiles, int stride,
                                     __half *staged, tile_sums<NB> &sums)
{
    if constexpr (HOW == OWN_TILES)
        take_own_tiles<chunk_t, NB, STAGED>(f, tiles, stride, staged);
    else
        take_tiles<chunk_t, NB, STAGED, HOW == GATED_TILES>(f, tiles, stride, staged,
                                                            sums);
}

template <int NB, bool STAGED, tiling HOW>
__global__ void __launch_bounds__(THREADS, NB == 1 ? 3 : 2)
    gemv(const __grid_constant__ sti_cuda_gemv_args f, int tiles, int stride)
{
    extern __shared__ uint4 shared[];
    __shared__ tile_sums<NB> sums;
    __half *staged = (__half *)shared;
    int tile = blockIdx.x;
    pdl_trigger();
    switch (f.w[HOW == SHARED_TILES ? locate(f, &tile) : 0].kind) {
    case STI_CUDA_U4:
        take<sti_chunk_u4, NB, STAGED, HOW>(f, tiles, stride, staged, sums);
        break;
    case STI_CUDA_S8:
        take<sti_chunk_s8<false>, NB, STAGED, HOW>(f, tiles, stride, staged, sums);
        break;
    case STI_CUDA_S8_MIN:
        take<sti_chunk_s8<true>, NB, STAGED, HOW>(f, tiles, stride, staged, sums);
        break;
    default:
        take<sti_chunk_half, NB, STAGED, HOW>(f, tiles, stride, staged, sums);
        break;
    }
}

/* Weights and sums in float: a warp a row of W. */
__global__ void __launch_bounds__(THREADS)
    gemv_float_rows(const __grid_constant__ sti_cuda_gemv_args f, int rows)
{
    enum { M = STI_CUDA_GEMV_ROWS_FLOAT };
    __shared__ float part[M][WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool vec = f.K % 4 == 0 && sti_aligned16(f.x),
               vec_norm = vec && sti_aligned16(f.norm);
    float factor[M];
    if (f.norm) {
        sti_square_parts(f.x, f.M, f.K, vec, part);
        __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < M; m++)
        factor[m] = f.norm && m < f.M ? sti_norm_factor(part[m], f.K, f.eps) : 1;
    for (int at = blockIdx.x * WARPS + warp; at < rows; at += gridDim.x * WARPS) {
        int i = 0, n = at;
        while (i + 1 < f.n && n >= f.w[i].N) n -= f.w[i++].N;
        const float *w = (const float *)f.w[i].w + (int64_t)n * f.K;
        const bool vec_w = vec && sti_aligned16(w);
        float sum[M] = {};
        for (int k = 4 * lane; k < f.K; k += 128) {
            const float4 a = sti_load4(w, k, f.K, vec_w);
            const float4 g =
                f.norm ? sti_load4(f.norm, k, f.K, vec_norm) : make_float4(1, 1, 1, 1);
#pragma unroll
            for (int m = 0; m < M; m++) {
                if (m >= f.M) break;
                float4 v = sti_load4(f.x + (int64_t)m * f.K, k, f.K, vec);
                v = sti_normed4(v, factor[m], g);
                sum[m] += (v.x * a.x + v.y * a.y) + (v.z * a.z + v.w * a.w);
            }
        }
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (m >= f.M) break;
            float v = warp_sum(sum[m]);
            float *y = f.y[i] + (int64_t)m * f.w[i].N + n;
            if (f.bias[i]) v += f.bias[i][n];
            if (lane == 0) *y = f.accumulate ? *y + v : v;
        }
    }
}

template <int NB, bool STAGED, tiling HOW>
still_status launch(sti_dev *dev, const sti_cuda_gemv_args *f, int tiles, int blocks,
                    still_error *err)
{
    const bool half = f->w[0].kind == STI_CUDA_HALF;
    const int stride = STAGED ? stage_stride(f->K, half ? 8 : 16) : f->w[0].ld;
    const size_t bytes = STAGED ? (size_t)f->M * (size_t)stride * sizeof(__half) : 0;
    auto kernel = gemv<NB, STAGED, HOW>;
    if (bytes > STAGE_FREE)
        STI_CUDA(cudaFuncSetAttribute(
                     kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, STAGE_MAX),
                 "matmul of few rows");
    STI_CUDA(pdl_launch(dev, kernel, dim3((unsigned)blocks), dim3(THREADS), bytes, *f,
                        tiles, stride),
             "matmul of few rows");
    return STILL_OK;
}

template <int NB, bool STAGED>
still_status launch_staged(sti_dev *dev, const sti_cuda_gemv_args *f, int tiles,
                           still_error *err)
{
    bool alike = true;
    for (int i = 1; i < f->n; i++) alike = alike && f->w[i].kind == f->w[0].kind;
    /* More blocks than the GPU holds at once, so that SMs that are done take another;
     * not one per tile where tiles are many: each block norms x. But a block knows one
     * kind of tile only. */
    const int most = BLOCKS * dev->sms, few = alike && tiles > most ? most : tiles;
    if (f->yh) return launch<NB, STAGED, GATED_TILES>(dev, f, tiles, few, err);
    if (!alike || tiles < OWN_FROM * dev->sms)
        return launch<NB, STAGED, SHARED_TILES>(dev, f, tiles, few, err);
    const int blocks = (tiles + WARPS - 1) / WARPS;
    return launch<NB, STAGED, OWN_TILES>(dev, f, tiles, blocks < most ? blocks : most,
                                         err);
}

template <int NB>
still_status launch_rows(sti_dev *dev, const sti_cuda_gemv_args *f, still_error *err)
{
    int tiles = 0;
    for (int i = 0; i < (f->yh ? 1 : f->n); i++) tiles += tiles_of(f->w[i]);
    if (are_short(dev, f, tiles)) return launch_short_rows<NB>(dev, f, tiles, err);
    return sti_cuda_gemv_fits(f->M, f->K)
               ? launch_staged<NB, true>(dev, f, tiles, err)
               : launch_staged<NB, false>(dev, f, tiles, err);
}

} // namespace

bool sti_cuda_gemv_fits(int M, int K)
{
    return (size_t)M * (size_t)stage_stride(K, 8) * sizeof(__half) <= STAGE_MAX;
}

still_status sti_cuda_gemv(sti_dev *dev, const sti_cuda_gemv_args *f, still_error *err)
{
    return f->M <= 8 ? launch_rows<1>(dev, f, err) : launch_rows<2>(dev, f, err);
}

still_status sti_cuda_gemv_float(sti_dev *dev, const sti_cuda_gemv_args *f,
                                 still_error *err)
{
    int rows = 0;
    for (int i = 0; i < f->n; i++) rows += f->w[i].N;
    const int blocks = (rows + WARPS - 1) / WARPS, most = 12 * dev->sms;
    gemv_float_rows<<<(unsigned)(blocks < most ? blocks : most), THREADS, 0,
                      dev->stream>>>(*f, rows);
    STI_CUDA(cudaGetLastError(), "matmul of few rows in float");
    return STILL_OK;
}
