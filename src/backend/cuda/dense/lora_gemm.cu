/* lora_gemm.cu - products of many rows with matrices of low rank in training: down,
 *
 *   y_i[M, N_i] = x[M, K] W_i^T       for all matrices that read one x,
 *
 * and up, y[M, N] = [y +] x[M, R] W^T. Both are bound by the wide side's way through
 * memory, once, as floats; a library would take it once a matrix, with passes before
 * that round to half. Down may also write x and y as halves side by side: see
 * train/lora.c.
 *
 * Down: a block keeps all W as half in shared memory, a warp takes 16 rows. Of 16
 * columns, lane 4 g + t has the four from 4 t on of rows g and g + 8 and takes the same
 * four of W: the order of a product's terms is free, and both are then read four
 * numbers at a time. Up: a lane keeps its columns of W in registers and goes through
 * rows, adding in float. */
#include "backend/cuda/dense/lora_gemm.h"

#include "backend/cuda/dense/dequant.cuh"
#include "backend/cuda/ptx/mma.cuh"

namespace
{

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    ROWS = 16,          /* of a warp */
    TILES = 4,          /* of 8 columns: all there may be */
    AHEAD = 6,          /* steps of 16 columns loaded before they are multiplied */
    SHARED = 48 * 1024, /* bytes */
    BLOCKS = 4          /* an SM */
};

/* Columns from one row of W to the next: eight rows' fours lie in different banks. */
__host__ __device__ int row_of(int K)
{
    return K + (64 + 16 - K % 64) % 64;
}

__device__ void load_weights(const sti_cuda_lora_down_args &a, int ld, __half *w)
{
    for (int i = 0; i < a.n; w += a.N[i++] * ld) {
        const int n = a.N[i] * a.K;
#pragma unroll 8
        for (int e = threadIdx.x; e < n; e += THREADS)
            w[e / a.K * ld + e % a.K] = to_half(a.w[i][e]);
    }
}

/* Columns 2 t and 2 t + 1 of tile `tile` for rows `row` and `row` + 8. */
__device__ void store(const sti_cuda_lora_down_args &a, int tile, int row, int t,
                      const float (&c)[4])
{
    int column = 8 * tile, i = 0;
    while (column >= a.N[i]) column -= a.N[i++];
#pragma unroll
    for (int h = 0; h < 2; h++, row += 8) {
        if (row >= a.M) return;
        const float2 v = make_float2(a.scale * c[2 * h], a.scale * c[2 * h + 1]);
        *(float2 *)(a.y[i] + (int64_t)row * a.N[i] + column + 2 * t) = v;
        if (a.half)
            *(uint32_t *)(a.half + (int64_t)row * a.ld + a.K + 8 * tile + 2 * t) =
                pack_saturated(a.half_scale * v.x, a.half_scale * v.y);
    }
}

/* Four columns of x from `column` on, for rows `row` and `row` + 8 as mma wants them.
 */
__device__ __forceinline__ void store_x(const sti_cuda_lora_down_args &a, int row,
                                        int column, const uint32_t (&x)[4])
{
    uint16_t *y = a.half + (int64_t)row * a.ld + column;
    if (row < a.M) *(uint2 *)y = make_uint2(x[0], x[2]);
    if (row + 8 < a.M) *(uint2 *)(y + 8 * a.ld) = make_uint2(x[1], x[3]);
}

__global__ void __launch_bounds__(THREADS)
    lora_down(const __grid_constant__ sti_cuda_lora_down_args a, int columns)
{
    extern __shared__ __align__(16) __half w[]; /* [columns, ld] */
    const int ld = row_of(a.K), steps = a.K / 16;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    load_weights(a, ld, w);
    __syncthreads();
    const int all = gridDim.x * WARPS * ROWS;
    for (int row0 = (blockIdx.x * WARPS + threadIdx.x / 32) * ROWS; row0 < a.M;
         row0 += all) {
        const float4 *up =
            (const float4 *)(a.x + (int64_t)min(row0 + g, a.M - 1) * a.K) + t;
        const float4 *low =
            (const float4 *)(a.x + (int64_t)min(row0 + g + 8, a.M - 1) * a.K) + t;
        float c[TILES][4] = {};
        for (int s0 = 0; s0 < steps; s0 += AHEAD) {
            float4 u[AHEAD], v[AHEAD];
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
                if (s0 + j < steps) {
                    u[j] = up[4 * (s0 + j)];
                    v[j] = low[4 * (s0 + j)];
                }
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                if (s0 + j >= steps) continue;
                const uint32_t x[4] = {
                    pack_saturated(u[j].x, u[j].y), pack_saturated(v[j].x, v[j].y),
                    pack_saturated(u[j].z, u[j].w), pack_saturated(v[j].z, v[j].w)};
                if (a.half) store_x(a, row0 + g, 16 * (s0 + j) + 4 * t, x);
#pragma unroll
                for (int n = 0; n < TILES; n++) {
                    if (8 * n >= columns) continue;
                    const uint2 b =
                        *(const uint2 *)(w + (8 * n + g) * ld + 16 * (s0 + j) + 4 * t);
                    mma(c[n], x, b.x, b.y);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < TILES; n++)
            if (8 * n < columns) store(a, n, row0 + g, t, c[n]);
    }
}

enum { UP_ROWS = 256, UP_MOST = 32 }; /* rows of a block; the highest rank */

template <int V> struct __align__(4 * V) columns
{
    float v[V];
};

/* R: the rank, rounded up; V: columns of a lane. */
template <int R, int V>
__global__ void __launch_bounds__(THREADS)
    lora_up(const __grid_constant__ sti_cuda_lora_up_args a)
{
    enum { BATCH = 16 / V }; /* rows loaded before they are added to */
    __shared__ __align__(16) float x[UP_ROWS][R];
    const int c = (int)(blockIdx.x * 32 + threadIdx.x % 32) * V;
    const int m0 = (int)blockIdx.y * UP_ROWS, rows = min((int)UP_ROWS, a.M - m0);
    for (int e = threadIdx.x; e < UP_ROWS * R; e += THREADS) {
        const int m = e / R, j = e % R;
        x[m][j] = m < rows && j < a.R ? a.x[(int64_t)(m0 + m) * a.R + j] : 0;
    }
    float w[R][V];
#pragma unroll
    for (int j = 0; j < R; j++)
#pragma unroll
        for (int v = 0; v < V; v++)
            w[j][v] = c < a.N && j < a.R ? a.w[(int64_t)(c + v) * a.R + j] : 0;
    __syncthreads();
    if (c >= a.N) return;
    float *y = a.y + (int64_t)m0 * a.N + c;
    for (int b = threadIdx.x / 32; b < rows; b += BATCH * WARPS) {
        columns<V> sum[BATCH] = {};
#pragma unroll
        for (int k = 0; k < BATCH; k++)
            if (a.accumulate && b + k * WARPS < rows)
                sum[k] = *(const columns<V> *)(y + (int64_t)(b + k * WARPS) * a.N);
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            const int m = min(b + k * WARPS, UP_ROWS - 1);
#pragma unroll
            for (int j = 0; j < R; j += 4) {
                const float4 f = *(const float4 *)&x[m][j];
#pragma unroll
                for (int v = 0; v < V; v++)
                    sum[k].v[v] += (f.x * w[j][v] + f.y * w[j + 1][v]) +
                                   (f.z * w[j + 2][v] + f.w * w[j + 3][v]);
            }
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++)
            if (b + k * WARPS < rows)
                *(columns<V> *)(y + (int64_t)(b + k * WARPS) * a.N) = sum[k];
    }
}

template <int R, int V>
void launch_up(const sti_dev *dev, const sti_cuda_lora_up_args *a)
{
    const dim3 grid((unsigned)((a->N + 32 * V - 1) / (32 * V)),
                    (unsigned)(((int64_t)a->M + UP_ROWS - 1) / UP_ROWS));
    lora_up<R, V><<<grid, THREADS, 0, dev->stream>>>(*a);
}

int columns_of(const sti_cuda_lora_down_args *a)
{
    int n = 0;
    for (int i = 0; i < a->n; i++) n += a->N[i];
    return n;
}

/* A warp a row of all matrices. */
__global__ void __launch_bounds__(THREADS)
    concat_lora(const __grid_constant__ sti_cuda_concat_lora_args s, int rows)
{
    const int lane = threadIdx.x % 32, all = blockIdx.x * WARPS + threadIdx.x / 32;
    if (all >= rows) return;
    int row = all, i = 0;
    while (row >= s.N[i]) row -= s.N[i++];
    uint16_t *y = s.y + (int64_t)all * s.ld;
    const uint16_t *half = s.half[i] + (int64_t)row * s.K;
    const float *w = (const float *)s.w[i] + (int64_t)row * s.K;
    for (int k = 4 * lane; k < s.K; k += 4 * 32)
        *(uint2 *)(y + k) = s.half[i] ? *(const uint2 *)(half + k)
                                      : make_uint2(pack_saturated(w[k], w[k + 1]),
                                                   pack_saturated(w[k + 2], w[k + 3]));
    const float *b = s.b[i] + (int64_t)row * s.R[i];
    for (int k = s.K + 2 * lane; k < s.ld; k += 2 * 32) {
        const int r = k - s.at[i];
        const bool own = r >= 0 && r < s.R[i];
        *(uint32_t *)(y + k) =
            own ? pack_saturated(s.gain * b[r], s.gain * b[r + 1]) : 0;
    }
}

} // namespace

bool sti_cuda_lora_down_fits(const sti_cuda_lora_down_args *a)
{
    bool fits = a->K % 16 == 0 && sti_cuda_aligned(a->x);
    for (int i = 0; i < a->n; i++)
        fits = fits && a->N[i] % 8 == 0 && a->N[i] <= 8 * TILES &&
               ((uintptr_t)a->y[i] & 7) == 0;
    if (!fits || columns_of(a) > 8 * TILES) return false;
    return (size_t)columns_of(a) * (size_t)row_of(a->K) * sizeof(__half) <= SHARED;
}

still_status sti_cuda_lora_down(sti_dev *dev, const sti_cuda_lora_down_args *a,
                                still_error *err)
{
    const int columns = columns_of(a), most = BLOCKS * dev->sms;
    const int64_t tiles = ((int64_t)a->M + WARPS * ROWS - 1) / (WARPS * ROWS);
    const unsigned blocks = (unsigned)(tiles < most ? tiles : most);
    const size_t bytes = (size_t)columns * (size_t)row_of(a->K) * sizeof(__half);
    lora_down<<<blocks, THREADS, bytes, dev->stream>>>(*a, columns);
    STI_CUDA(cudaGetLastError(), "a product down to a low rank");
    return STILL_OK;
}

bool sti_cuda_lora_up_fits(const sti_cuda_lora_up_args *a)
{
    return a->R <= UP_MOST && a->N % 4 == 0 && sti_cuda_aligned(a->y);
}

still_status sti_cuda_lora_up(sti_dev *dev, const sti_cuda_lora_up_args *a,
                              still_error *err)
{
    if (a->R <= 8)
        launch_up<8, 4>(dev, a);
    else if (a->R <= 16)
        launch_up<16, 4>(dev, a);
    else
        launch_up<UP_MOST, 2>(dev, a);
    STI_CUDA(cudaGetLastError(), "a product up from a low rank");
    return STILL_OK;
}

still_status sti_cuda_concat_lora(sti_dev *dev, const sti_cuda_concat_lora_args *a,
                                  still_error *err)
{
    int rows = 0;
    for (int i = 0; i < a->n; i++) rows += a->N[i];
    concat_lora<<<(unsigned)((rows + WARPS - 1) / WARPS), THREADS, 0, dev->stream>>>(
        *a, rows);
    STI_CUDA(cudaGetLastError(), "concatenating weights and additions");
    return STILL_OK;
}
