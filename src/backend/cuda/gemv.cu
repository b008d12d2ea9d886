/* gemv.cu - products of few rows: weights are read once, as they are kept.
 *
 * Bounded by the memory the weights come from, and for small models by latency; the
 * tensor cores only save instructions. mma.m16n8k16 multiplies 16 rows of W (its A)
 * with 8 rows of x (its B, unused ones zero), so up to 8 rows of x cost what one costs,
 * and a row's result does not depend on the others. x is rounded to half, as it is for
 * many rows.
 *
 * A block takes a tile of 16 rows of W, its 8 warps interleaved chunks of 64 columns;
 * their sums meet in shared memory and are added in the order of the warps. x is normed
 * and rounded into shared memory once per block, or read from memory if it is half
 * already. The first chunks of W are asked for before that. */
#include "backend/cuda/dequant.cuh"
#include "backend/cuda/follow.cuh"
#include "backend/cuda/mma.cuh"
#include "backend/cuda/rows.cuh"

namespace
{

enum { WARPS = STI_ROW_WARPS, THREADS = STI_ROW_THREADS, TILE = STI_CUDA_TILE };
enum {
    STAGE_MAX = 88 << 10, /* bytes of x in shared memory: with the sums, what every GPU
                             since sm_80 has; here two blocks fit an SM */
    STAGE_FREE = 38 << 10 /* with the sums, what need not be asked for */
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

/* x [M, K] as half into shared memory, normed if f.norm, zero up to whole chunks. */
__device__ __forceinline__ void stage(const sti_cuda_few &f, __half *xs, int stride)
{
    __shared__ float part[STI_CUDA_FEW][WARPS];
    const bool vec = f.K % 4 == 0 && sti_aligned16(f.x);
    const bool vec_norm = vec && sti_aligned16(f.norm),
               vec_keep = vec && sti_aligned16(f.keep);
    const int wide = (f.K + STI_CUDA_CHUNK - 1) / STI_CUDA_CHUNK * STI_CUDA_CHUNK;
    if (f.norm) {
        for (int k = 4 * threadIdx.x; k < f.K; k += 4 * THREADS)
            sti_fetch_l1(f.norm + k);
        sti_square_parts(f.x, f.M, f.K, vec, part);
        __syncthreads();
    }
    for (int m = 0; m < f.M; m++) {
        const float *x = f.x + (int64_t)m * f.K;
        const float factor = f.norm ? sti_norm_factor(part[m], f.K, f.eps) : 1;
        for (int k = 4 * threadIdx.x; k < wide; k += 4 * THREADS) {
            float4 v = sti_load4(x, k, f.K, vec);
            if (f.norm) v = sti_normed4(v, factor, sti_load4(f.norm, k, f.K, vec_norm));
            if (f.keep && blockIdx.x == 0)
                sti_store4(f.keep + (int64_t)m * f.K, k, f.K, vec_keep, v);
            *(uint2 *)(xs + m * stride + k) =
                make_uint2(sti_pack_half(v.x, v.y), sti_pack_half(v.z, v.w));
        }
    }
    __syncthreads();
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

/* c += the chunks first, first + STEP, ... of a tile of W times those of x [M, ld]. */
template <class chunk_t, int STEP, int NB, bool STAGED>
__device__ __forceinline__ void add_chunks(const sti_cuda_matrix &m, int tile,
                                           int first, const __half *x, int ld, int M,
                                           float (&c)[NB][4])
{
    enum { AHEAD = chunk_t::AHEAD, BY = AHEAD * STEP };
    const int lane = threadIdx.x % 32, g = lane / 4;
    int k = first * STI_CUDA_CHUNK + chunk_t::COLUMNS * (lane & 3);
    typename chunk_t::place place = chunk_t::find(m, tile, first, lane);
    x += (int64_t)g * ld;
    for (int left = m.chunks - first; left > 0; left -= BY) {
        chunk_t w[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++)
            if (u * STEP < left) w[u].load(place, u * STEP);
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
                    mma(c[j], a, r.b[j][2 * i], r.b[j][2 * i + 1]);
            }
        }
        chunk_t::advance(&place, BY);
        k += BY * STI_CUDA_CHUNK;
    }
}

__host__ __device__ int tiles_of(const sti_cuda_matrix &m)
{
    return (m.N + TILE - 1) / TILE;
}

/* Matrix and tile in it of the whole call's tile number. */
__device__ __forceinline__ int locate(const sti_cuda_few &f, int *tile)
{
    int i = 0;
    while (i + 1 < f.n && *tile >= tiles_of(f.w[i])) *tile -= tiles_of(f.w[i++]);
    return i;
}

template <int NB> struct tile_sums {
    float v[WARPS][TILE][8 * NB];
    __device__ __forceinline__ float total(int warp, int n, int row, int m) const
    {
        float s = 0;
        for (int w = warp; w < warp + n; w++) s += v[w][row][m];
        return s;
    }
};

__device__ __forceinline__ float silu(float x)
{
    return x / (1 + expf(-x));
}

/* GATED: warps 0-3 take the gate's tile, warps 4-7 that of up. */
template <class chunk_t, int NB, bool STAGED, bool GATED>
__global__ void __launch_bounds__(THREADS, 3)
    few_rows(const __grid_constant__ sti_cuda_few f, int tiles, int stride)
{
    extern __shared__ uint4 room[];
    __shared__ tile_sums<NB> sums;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4,
              t = lane % 4;
    constexpr int step = GATED ? WARPS / 2 : WARPS;
    const int first = warp % step;
    const __half *x = STAGED ? (const __half *)room : (const __half *)f.xh;
    sti_lead();
    {
        int tile = blockIdx.x, i = GATED ? warp / step : locate(f, &tile);
        sti_fetch_chunk(f.w[i], tile, first, lane); /* weights wait for nobody */
        sti_fetch_chunk(f.w[i], tile, first + step, lane);
    }
    sti_follow();
    if (STAGED) stage(f, (__half *)room, stride);
    for (int at = blockIdx.x; at < tiles; at += gridDim.x) {
        float c[NB][4] = {};
        int tile = at, i = GATED ? warp / step : locate(f, &tile);
        add_chunks<chunk_t, step, NB, STAGED>(f.w[i], tile, first, x, stride, f.M, c);
#pragma unroll
        for (int j = 0; j < NB; j++) {
            *(float2 *)&sums.v[warp][g][8 * j + 2 * t] = make_float2(c[j][0], c[j][1]);
            *(float2 *)&sums.v[warp][g + 8][8 * j + 2 * t] =
                make_float2(c[j][2], c[j][3]);
        }
        __syncthreads();
        const int row = threadIdx.x % TILE, m = threadIdx.x / TILE;
        const int N = f.w[GATED ? 0 : i].N, n = tile * TILE + row;
        if (m < f.M && n < N) {
            float v = sums.total(0, step, row, m);
            if (GATED) {
                float up = sums.total(step, step, row, m);
                if (f.bias[0]) v += f.bias[0][n];
                if (f.bias[1]) up += f.bias[1][n];
                ((__half *)f.yh)[(int64_t)m * N + n] = sti_to_half(silu(v) * up);
            } else {
                float *y = f.y[i] + (int64_t)m * N + n;
                if (f.bias[i]) v += f.bias[i][n];
                *y = f.accumulate ? *y + v : v;
            }
        }
        __syncthreads();
    }
}

/* Weights and sums in float: a warp a row of W. */
__global__ void __launch_bounds__(THREADS)
    few_float(const __grid_constant__ sti_cuda_few f, int rows)
{
    enum { M = STI_CUDA_FEW_FLOAT };
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
        float sum[M] = {};
        for (int k = 4 * lane; k < f.K; k += 128) {
            const float4 a = sti_load4(w, k, f.K, vec);
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
            float v = sti_warp_sum(sum[m]);
            float *y = f.y[i] + (int64_t)m * f.w[i].N + n;
            if (f.bias[i]) v += f.bias[i][n];
            if (lane == 0) *y = f.accumulate ? *y + v : v;
        }
    }
}

template <class chunk_t, int NB, bool STAGED, bool GATED>
still_status launch(sti_dev *dev, const sti_cuda_few *f, still_error *err)
{
    const int stride = STAGED ? stage_stride(f->K, chunk_t::COLUMNS) : f->w[0].ld;
    const size_t room = STAGED ? (size_t)f->M * (size_t)stride * sizeof(__half) : 0;
    int tiles = 0;
    for (int i = 0; i < (GATED ? 1 : f->n); i++) tiles += tiles_of(f->w[i]);
    /* More blocks than the GPU holds at once, so that SMs that are done take another;
     * not one per tile where tiles are many: each block norms x. */
    const int blocks = tiles < 12 * dev->sms ? tiles : 12 * dev->sms;
    auto kernel = few_rows<chunk_t, NB, STAGED, GATED>;
    if (room > STAGE_FREE)
        STI_CUDA(cudaFuncSetAttribute(
                     kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, STAGE_MAX),
                 "matmul of few rows");
    STI_CUDA(sti_launch(dev, kernel, dim3((unsigned)blocks), dim3(THREADS), room, *f,
                        tiles, stride),
             "matmul of few rows");
    return STILL_OK;
}

template <class chunk_t, int NB>
still_status launch_rows(sti_dev *dev, const sti_cuda_few *f, still_error *err)
{
    if (f->yh)
        return f->xh ? launch<chunk_t, NB, false, true>(dev, f, err)
                     : launch<chunk_t, NB, true, true>(dev, f, err);
    return f->xh ? launch<chunk_t, NB, false, false>(dev, f, err)
                 : launch<chunk_t, NB, true, false>(dev, f, err);
}

template <class chunk_t>
still_status launch_kind(sti_dev *dev, const sti_cuda_few *f, still_error *err)
{
    return f->M <= 8 ? launch_rows<chunk_t, 1>(dev, f, err)
                     : launch_rows<chunk_t, 2>(dev, f, err);
}

} // namespace

bool sti_cuda_few_fits(int M, int K)
{
    return (size_t)M * (size_t)stage_stride(K, 8) * sizeof(__half) <= STAGE_MAX;
}

still_status sti_cuda_few_rows(sti_dev *dev, const sti_cuda_few *f, still_error *err)
{
    switch (f->w[0].kind) {
    case STI_CUDA_U4: return launch_kind<sti_chunk_u4>(dev, f, err);
    case STI_CUDA_S8: return launch_kind<sti_chunk_s8<false>>(dev, f, err);
    case STI_CUDA_S8_MIN: return launch_kind<sti_chunk_s8<true>>(dev, f, err);
    default: return launch_kind<sti_chunk_half>(dev, f, err);
    }
}

still_status sti_cuda_few_float(sti_dev *dev, const sti_cuda_few *f, still_error *err)
{
    int rows = 0;
    for (int i = 0; i < f->n; i++) rows += f->w[i].N;
    const int blocks = (rows + WARPS - 1) / WARPS, most = 12 * dev->sms;
    few_float<<<(unsigned)(blocks < most ? blocks : most), THREADS, 0, dev->stream>>>(
        *f, rows);
    STI_CUDA(cudaGetLastError(), "matmul of few rows in float");
    return STILL_OK;
}
