/* device.cuh - what kernels of the hybrid operator for sessions share: keys in either
 * precision, the window of a token, RoPE, sums with compensation. Their meaning is in
 * backend/ref/hybrid/hybrid.h. */
#ifndef STI_BACKEND_CUDA_HYBRID_DEVICE_CUH
#define STI_BACKEND_CUDA_HYBRID_DEVICE_CUH

#include <float.h>

#include "backend/cuda/hybrid/map.cuh"
#include "backend/cuda/ptx/half.cuh"
#include "backend/cuda/ptx/reduce.cuh"

/* ---- Keys and values as they are stored ---------------------------------- */

STI_DEVICE float widen(__half x)
{
    return __half2float(x);
}
STI_DEVICE float widen(float x)
{
    return x;
}
/* Saturates: an infinite key would make every later output NaN. */
STI_DEVICE void narrow(float x, __half *to)
{
    *to = __float2half_rn(half_range(x));
}
STI_DEVICE void narrow(float x, float *to)
{
    *to = x;
}

/* VEC elements that one load brings. */
template <typename KV, int VEC> struct packed;
template <> struct packed<__half, 8> {
    uint4 raw;
    __device__ __forceinline__ void zero()
    {
        raw = make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void load(const __half *p)
    {
        raw = *reinterpret_cast<const uint4 *>(p);
    }
    __device__ __forceinline__ void widen(float *x) const
    {
        const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 two = unpack_half2(word[i]);
            x[2 * i] = two.x;
            x[2 * i + 1] = two.y;
        }
    }
};
template <> struct packed<float, 4> {
    float4 raw;
    __device__ __forceinline__ void zero()
    {
        raw = make_float4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void load(const float *p)
    {
        raw = *reinterpret_cast<const float4 *>(p);
    }
    /* What other blocks of the launch have written. */
    __device__ __forceinline__ void load_shared_by_all(const float *p)
    {
        raw = __ldcg(reinterpret_cast<const float4 *>(p));
    }
    __device__ __forceinline__ void widen(float *x) const
    {
        x[0] = raw.x;
        x[1] = raw.y;
        x[2] = raw.z;
        x[3] = raw.w;
    }
};
template <typename KV> struct packed<KV, 1> {
    KV raw;
    __device__ __forceinline__ void zero()
    {
        narrow(0.0f, &raw);
    }
    __device__ __forceinline__ void load(const KV *p)
    {
        raw = *p;
    }
    __device__ __forceinline__ void load_shared_by_all(const KV *p)
    {
        raw = __ldcg(p);
    }
    __device__ __forceinline__ void widen(float *x) const
    {
        *x = ::widen(raw);
    }
};

/* ---- Where a session is -------------------------------------------------- */

/* The window of the token at `pos`: [first, pos], first in ring slot `slot`. */
typedef struct sti_window {
    int first, tokens, slot;
} sti_window;

STI_DEVICE sti_window window_of(int pos, int C)
{
    const int chunk = pos / C, first = chunk > 0 ? (chunk - 1) * C : 0;
    return sti_window{first, pos - first + 1, first % (2 * C)};
}

/* ---- RoPE ---------------------------------------------------------------- */

/* The two elements of pair i. */
STI_DEVICE int2 pair_at(const sti_cuda_hybrid_params &h, int i)
{
    return h.interleaved ? make_int2(2 * i, 2 * i + 1) : make_int2(i, i + h.D / 2);
}

/* Rotates pair i by position * inv_freq[i]. In double, and in units of pi: the angle of
 * a token a million places away has no digits to spare. */
STI_DEVICE void rope_pair(const sti_cuda_hybrid_params &h, int i, int position,
                          float *a, float *b)
{
    const double angle_over_pi =
        (double)position * (double)h.inv_freq[i] * 0.31830988618379067154;
    double s, c;
    sincospi(angle_over_pi, &s, &c);
    const double x = *a, y = *b;
    *a = (float)(x * c - y * s);
    *b = (float)(y * c + x * s);
}

/* s += a x, with what rounding takes kept in comp (Kahan). */
STI_DEVICE void kahan_add(float *sum, float *comp, float a, float x)
{
    const float was = *sum, more = fmaf(a, x, *comp), now = was + more;
    *sum = now;
    *comp = more - (now - was);
}

#endif
