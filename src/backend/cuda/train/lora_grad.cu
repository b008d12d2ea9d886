/* lora_grad.cu - gradients of matrices of low rank: sums over all rows m,
 *
 *   out[r, c] += scale sum_m l[m, r] x[m, c]        l of few columns, x wide,
 *
 * for several at once, those that read the same x together. Bound by reading every x
 * once, as floats; a library would take each x once a matrix. In TF32.
 *
 * A block takes 64 columns of one x and a stretch of rows, its warps 16 rows in turn.
 * C of mma is [ranks, columns]: l stands in A, eight ranks ("a slot") a half of it, x
 * in B. Which column a lane has is free: lane 4 g + t takes columns 4 g .. 4 g + 3 of
 * 32 of row t and row t + 4, four numbers at a time, so that tile j of four has the
 * columns 4 n + j. Blocks leave their sums in `part`, and a second kernel adds those of
 * all stretches in order. */
#include "backend/cuda/ptx/tf32.cuh"
#include "backend/cuda/train/kernels.h"

namespace
{

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    COLUMNS = 64, /* of a block */
    ROWS = 16,    /* of a warp at once */
    SLOTS = STI_CUDA_GRAD_SLOTS,
    RANKS = 8 * SLOTS,
    SUMS = RANKS * COLUMNS /* of a block */
};

/* Which x has tile `tile` of all; it becomes its own. */
__device__ __forceinline__ int matrix_of(const sti_cuda_lora_grads_args &a, int *tile)
{
    int i = 0;
    while (*tile >= (a.of[i].W + COLUMNS - 1) / COLUMNS)
        *tile -= (a.of[i++].W + COLUMNS - 1) / COLUMNS;
    return i;
}

__device__ __forceinline__ float4 rounded4(float4 v)
{
    return make_float4(tf32(v.x), tf32(v.y), tf32(v.z), tf32(v.w));
}

/* Columns c .. c + 3 of x, and rank g of all slots, in row m; zeros past the ends. */
__device__ __forceinline__ float4 load_x(const sti_cuda_lora_grad &s, int m, int end,
                                         int c)
{
    return m < end && c < s.W ? *(const float4 *)(s.x + (int64_t)m * s.W + c)
                              : make_float4(0, 0, 0, 0);
}

__device__ __forceinline__ float load_l(const sti_cuda_lora_grad &s, int slot, int m,
                                        int end, int g)
{
    const sti_cuda_lora_slot &l = s.slot[slot];
    return m < end && slot < s.n && g < l.ranks ? l.l[(int64_t)m * l.R + g] : 0;
}

/* Sums of all warps into shared memory [RANKS, COLUMNS], one after the other. */
__device__ void add_warps(float (*sum)[COLUMNS], const float (&c)[SLOTS / 2][8][4],
                          int g, int t)
{
    for (int w = 0; w < WARPS; w++) {
        if ((int)threadIdx.x / 32 == w)
#pragma unroll
            for (int i = 0; i < SLOTS / 2; i++)
#pragma unroll
                for (int n = 0; n < 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int rank = 16 * i + g + 8 * (e / 2),
                                  column = 32 * (n / 4) + 4 * (2 * t + e % 2) + n % 4;
                        if (w == 0)
                            sum[rank][column] = c[i][n][e];
                        else
                            sum[rank][column] += c[i][n][e];
                    }
        __syncthreads();
    }
}

__global__ void __launch_bounds__(THREADS, 2)
    sum_rows(const __grid_constant__ sti_cuda_lora_grads_args a, int stretch,
             float *part)
{
    __shared__ float sum[RANKS][COLUMNS];
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int tile = blockIdx.x;
    const sti_cuda_lora_grad &s = a.of[matrix_of(a, &tile)];
    const int c0 = tile * COLUMNS + 4 * g, first = (int)blockIdx.y * stretch,
              end = min(a.M, first + stretch);
    float c[SLOTS / 2][8][4] = {};
    for (int m0 = first + (int)threadIdx.x / 32 * ROWS; m0 < end; m0 += WARPS * ROWS) {
#pragma unroll
        for (int k = 0; k < ROWS; k += 8) { /* rows t and t + 4 of eight */
            const int m = m0 + k + t;
            float4 x[2][2];
            float l[2][SLOTS];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                x[i][0] = load_x(s, m + 4 * i, end, c0);
                x[i][1] = load_x(s, m + 4 * i, end, c0 + 32);
#pragma unroll
                for (int j = 0; j < SLOTS; j++)
                    l[i][j] = load_l(s, j, m + 4 * i, end, g);
            }
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float4 u = rounded4(x[0][h]), v = rounded4(x[1][h]);
#pragma unroll
                for (int i = 0; i < SLOTS / 2; i++) {
                    if (2 * i >= s.n) continue;
                    const float r[4] = {tf32(l[0][2 * i]), tf32(l[0][2 * i + 1]),
                                        tf32(l[1][2 * i]), tf32(l[1][2 * i + 1])};
                    mma_tf32(c[i][4 * h], r, u.x, v.x);
                    mma_tf32(c[i][4 * h + 1], r, u.y, v.y);
                    mma_tf32(c[i][4 * h + 2], r, u.z, v.z);
                    mma_tf32(c[i][4 * h + 3], r, u.w, v.w);
                }
            }
        }
    }
    add_warps(sum, c, g, t);
    float *out = part + ((int64_t)blockIdx.y * gridDim.x + blockIdx.x) * SUMS;
    for (int e = threadIdx.x; e < SUMS; e += THREADS)
        out[e] = sum[e / COLUMNS][e % COLUMNS];
}

/* A block adds THREADS of a tile's sums. */
__global__ void __launch_bounds__(THREADS)
    add_stretches(const __grid_constant__ sti_cuda_lora_grads_args a, int stretches,
                  const float *part)
{
    int tile = blockIdx.x;
    const sti_cuda_lora_grad &s = a.of[matrix_of(a, &tile)];
    const int e = (int)blockIdx.y * THREADS + (int)threadIdx.x, rank = e / COLUMNS,
              c = tile * COLUMNS + e % COLUMNS;
    if (rank / 8 >= s.n || c >= s.W) return;
    const sti_cuda_lora_slot &l = s.slot[rank / 8];
    const int r = rank % 8;
    if (r >= l.ranks) return;
    float v = 0;
    for (int p = 0; p < stretches; p++)
        v += part[((int64_t)p * gridDim.x + blockIdx.x) * SUMS + e];
    l.out[l.trans ? (int64_t)c * l.R + r : (int64_t)r * s.W + c] += l.scale * v;
}

int tiles_of(const sti_cuda_lora_grads_args *a)
{
    int n = 0;
    for (int i = 0; i < a->n; i++) n += (a->of[i].W + COLUMNS - 1) / COLUMNS;
    return n;
}

} // namespace

still_status sti_cuda_lora_grads(sti_dev *dev, const sti_cuda_lora_grads_args *a,
                                 still_error *err)
{
    /* Four blocks an SM, and stretches that keep all warps busy. */
    const int tiles = tiles_of(a), step = WARPS * ROWS;
    if (tiles < 1 || a->M < 1) return STILL_OK;
    const int wanted = (4 * dev->sms + tiles - 1) / tiles,
              steps = (a->M + step - 1) / step;
    const int stretch = (steps + wanted - 1) / wanted * step,
              stretches = (a->M + stretch - 1) / stretch;
    void *part;
    STI_TRY(sti_cuda_scratch(
        dev, (size_t)stretches * (size_t)tiles * SUMS * sizeof(float), &part, err));
    sum_rows<<<dim3((unsigned)tiles, (unsigned)stretches), THREADS, 0, dev->stream>>>(
        *a, stretch, (float *)part);
    add_stretches<<<dim3((unsigned)tiles, SUMS / THREADS), THREADS, 0, dev->stream>>>(
        *a, stretches, (const float *)part);
    STI_CUDA(cudaGetLastError(), "gradients of a low rank");
    return STILL_OK;
}
