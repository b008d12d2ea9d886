/* round_bf16.cu - float to bfloat16 on the way into products: rows of several matrices
 * side by side, and weights one below the other. Bound by memory. */
#include "backend/cuda/ptx/bf16.cuh"
#include "backend/cuda/train/kernels.h"

enum { THREADS = 256, WARPS = THREADS / 32 };

struct eight {
    float4 low, high;
};

/* Columns c .. c + 7 of a row of n, zeros past its end. vec: n is a multiple of 8, the
 * row begins at a multiple of 16 bytes. */
__device__ __forceinline__ eight row8(const float *x, int c, int n, bool vec)
{
    eight e;
    if (vec) {
        e.low = *(const float4 *)(x + c);
        e.high = *(const float4 *)(x + c + 4);
        return e;
    }
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = c + j < n ? x[c + j] : 0;
    e.low = make_float4(v[0], v[1], v[2], v[3]);
    e.high = make_float4(v[4], v[5], v[6], v[7]);
    return e;
}

/* The same of a row of all matrices side by side; without vec the eight may be of
 * several. */
__device__ __forceinline__ eight columns8(const sti_cuda_columns &s, int64_t row, int c,
                                          bool vec)
{
    int i = 0;
    while (i < s.n - 1 && c >= s.N[i]) c -= s.N[i++];
    if (vec) return row8(s.x[i] + row * s.N[i], c, s.N[i], true);
    float v[8];
    for (int j = 0; j < 8; j++, c++) {
        while (i < s.n - 1 && c >= s.N[i]) c -= s.N[i++];
        v[j] = c < s.N[i] ? s.x[i][row * s.N[i] + c] : 0;
    }
    return row8(v, 0, 8, false);
}

__device__ __forceinline__ uint4 rounded(const eight &e)
{
    return make_uint4(pack_bf16(e.low.x, e.low.y), pack_bf16(e.low.z, e.low.w),
                      pack_bf16(e.high.x, e.high.y), pack_bf16(e.high.z, e.high.w));
}

enum { BATCH = 3 }; /* loads of a lane before the first is looked at */

/* A warp a row of `eights` groups of eight columns. */
__global__ void __launch_bounds__(THREADS)
    round_columns(const __grid_constant__ sti_cuda_columns s, int M, int eights,
                  bool vec, uint4 *y)
{
    const int lane = threadIdx.x % 32;
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= M) return;
    for (int k = lane; k < eights; k += BATCH * 32) {
        eight v[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++)
            if (k + 32 * j < eights) v[j] = columns8(s, row, 8 * (k + 32 * j), vec);
#pragma unroll
        for (int j = 0; j < BATCH; j++)
            if (k + 32 * j < eights) y[row * eights + k + 32 * j] = rounded(v[j]);
    }
}

still_status sti_cuda_round_columns(sti_dev *dev, const sti_cuda_columns *s, int M,
                                    int ld, sti_bf16 *y, still_error *err)
{
    bool vec = true;
    for (int i = 0; i < s->n; i++)
        vec = vec && s->N[i] % 8 == 0 && sti_cuda_aligned(s->x[i]);
    if (M < 1 || ld < 1) return STILL_OK;
    round_columns<<<(M + WARPS - 1) / WARPS, THREADS, 0, dev->stream>>>(
        *s, M, ld / 8, vec, (uint4 *)y);
    STI_CUDA(cudaGetLastError(), "rounding to bfloat16");
    return STILL_OK;
}

/* A warp a row of all matrices. */
__global__ void __launch_bounds__(THREADS)
    round_rows(const __grid_constant__ sti_cuda_stack s, int rows, int eights)
{
    int row = (int)blockIdx.x * WARPS + (int)threadIdx.x / 32, i = 0;
    if (row >= rows) return;
    while (row >= s.N[i]) row -= s.N[i++];
    const float *x = s.x[i] + (int64_t)row * s.K;
    uint4 *y = (uint4 *)s.y[i] + (int64_t)row * eights;
    const bool vec = s.K % 8 == 0 && ((uintptr_t)x & 15) == 0;
    for (int k = threadIdx.x % 32; k < eights; k += 32)
        y[k] = rounded(row8(x, 8 * k, s.K, vec));
}

still_status sti_cuda_round_rows(sti_dev *dev, const sti_cuda_stack *s,
                                 still_error *err)
{
    int64_t rows = 0;
    for (int i = 0; i < s->n; i++) rows += s->N[i];
    if (rows < 1) return STILL_OK;
    round_rows<<<(unsigned)((rows + WARPS - 1) / WARPS), THREADS, 0, dev->stream>>>(
        *s, (int)rows, (s->K + 7) / 8);
    STI_CUDA(cudaGetLastError(), "rounding weights to bfloat16");
    return STILL_OK;
}
