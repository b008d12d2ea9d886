/* swiglu_bwd.cu - gradients of the gated activation, in float and as the feed-forward
 * half of a layer keeps them between its products (ffn.c). Bound by memory. */
#include "backend/cuda/dense/dequant.cuh"
#include "backend/cuda/ptx/bf16.cuh"
#include "backend/cuda/train/kernels.h"

enum { THREADS = 256 };

static int blocks_for(size_t n)
{
    const size_t blocks = (n + THREADS - 1) / THREADS;
    return (int)(blocks < 65535 ? blocks : 65535);
}

/* s = 1 / (1 + e^-g):  dg = dy u s (1 + g (1 - s)),  du = dy g s. One exponential, of
 * what is negative, gives both s and 1 - s to full precision. */
__device__ void gate_back(float g, float u, float dy, float *dg, float *du)
{
    const float e = expf(-fabsf(g)), inverse = 1 / (1 + e);
    const float s = g < 0 ? e * inverse : inverse, rest = g < 0 ? inverse : e * inverse;
    *dg = dy * u * s * (1 + g * rest);
    *du = dy * g * s;
}

/* GELU is g / (1 + e^-z):  dg = dy u s (1 + g (1 - s) dz/dg). */
__global__ void gelu_back(sti_swiglu_back_args a, size_t n)
{
    const size_t step = (size_t)gridDim.x * THREADS;
    const float slope = (float)STI_GELU_SLOPE, cube = (float)STI_GELU_CUBE;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step) {
        const float g = a.gate[i], u = a.up[i], dy = a.dy[i];
        const float z = slope * (g + cube * g * g * g),
                    dz = slope * (1 + 3 * cube * g * g);
        const float e = expf(-fabsf(z)), inverse = 1 / (1 + e);
        const float s = z < 0 ? e * inverse : inverse,
                    rest = z < 0 ? inverse : e * inverse;
        a.dgate[i] = dy * u * s * (1 + g * rest * dz);
        a.dup[i] = dy * g * s;
    }
}

__global__ void gated_back(sti_swiglu_back_args a, size_t n)
{
    const size_t step = (size_t)gridDim.x * THREADS;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step)
        gate_back(a.gate[i], a.up[i], a.dy[i], &a.dgate[i], &a.dup[i]);
}

/* n fours. */
__global__ void gated_back4(sti_swiglu_back_args a, size_t n)
{
    const size_t step = (size_t)gridDim.x * THREADS;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < n; i += step) {
        const float4 g = ((const float4 *)a.gate)[i], u = ((const float4 *)a.up)[i],
                     dy = ((const float4 *)a.dy)[i];
        float4 dg, du;
        gate_back(g.x, u.x, dy.x, &dg.x, &du.x);
        gate_back(g.y, u.y, dy.y, &dg.y, &du.y);
        gate_back(g.z, u.z, dy.z, &dg.z, &du.z);
        gate_back(g.w, u.w, dy.w, &dg.w, &du.w);
        ((float4 *)a.dgate)[i] = dg;
        ((float4 *)a.dup)[i] = du;
    }
}

still_status sti_cuda_gated_back(sti_dev *dev, const sti_swiglu_back_args *a,
                                 still_error *err)
{
    const size_t n = (size_t)a->M * (size_t)a->K;
    if (n == 0) return STILL_OK;
    if (a->act == STI_GELU_TANH)
        gelu_back<<<blocks_for(n), THREADS, 0, dev->stream>>>(*a, n);
    else if (n % 4 == 0 && sti_cuda_aligned(a->gate) && sti_cuda_aligned(a->up) &&
             sti_cuda_aligned(a->dy) && sti_cuda_aligned(a->dgate) &&
             sti_cuda_aligned(a->dup))
        gated_back4<<<blocks_for(n / 4), THREADS, 0, dev->stream>>>(*a, n / 4);
    else
        gated_back<<<blocks_for(n), THREADS, 0, dev->stream>>>(*a, n);
    STI_CUDA(cudaGetLastError(), "swiglu_back");
    return STILL_OK;
}

/* Two numbers of each: words of halves and of bfloat16; b: biases of the two, or NULL.
 */
__device__ __forceinline__ void gate_back2(uint32_t g, uint32_t u, uint32_t dy,
                                           const float *gate_bias, const float *up_bias,
                                           uint32_t *dg, uint32_t *du)
{
    float2 a = __half22float2(bits_half2(g)), b = __half22float2(bits_half2(u));
    const float2 d = unpack_bf16(dy);
    if (gate_bias) a.x += gate_bias[0], a.y += gate_bias[1];
    if (up_bias) b.x += up_bias[0], b.y += up_bias[1];
    float2 to_gate, to_up;
    gate_back(a.x, b.x, d.x, &to_gate.x, &to_up.x);
    gate_back(a.y, b.y, d.y, &to_gate.y, &to_up.y);
    *dg = pack_bf16(to_gate.x, to_gate.y);
    *du = pack_bf16(to_up.x, to_up.y);
}

/* Eight columns a thread; columns: of a row of gate, in eights; n: of all rows. */
__global__ void __launch_bounds__(THREADS)
    gated_back8(const __grid_constant__ sti_cuda_gated_back_args a, size_t n,
                int columns)
{
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    const size_t row = i / (size_t)columns;
    const int k = (int)(i - row * (size_t)columns);
    const uint4 g = ((const uint4 *)a.gate)[i], u = ((const uint4 *)a.up)[i],
                dy = ((const uint4 *)a.dy)[i];
    const float *gb = a.gate_bias ? a.gate_bias + 8 * k : nullptr,
                *ub = a.up_bias ? a.up_bias + 8 * k : nullptr;
    uint4 dg, du;
    gate_back2(g.x, u.x, dy.x, gb, ub, &dg.x, &du.x);
    gate_back2(g.y, u.y, dy.y, gb ? gb + 2 : gb, ub ? ub + 2 : ub, &dg.y, &du.y);
    gate_back2(g.z, u.z, dy.z, gb ? gb + 4 : gb, ub ? ub + 4 : ub, &dg.z, &du.z);
    gate_back2(g.w, u.w, dy.w, gb ? gb + 6 : gb, ub ? ub + 6 : ub, &dg.w, &du.w);
    uint4 *d = (uint4 *)a.d + row * 2 * (size_t)columns + k;
    d[0] = dg;
    d[columns] = du;
}

still_status sti_cuda_gated_back_half(sti_dev *dev, const sti_cuda_gated_back_args *a,
                                      still_error *err)
{
    const size_t n = (size_t)a->M * (size_t)a->K / 8;
    if (n == 0) return STILL_OK;
    gated_back8<<<(unsigned)((n + THREADS - 1) / THREADS), THREADS, 0, dev->stream>>>(
        *a, n, a->K / 8);
    STI_CUDA(cudaGetLastError(), "swiglu_back in half");
    return STILL_OK;
}
