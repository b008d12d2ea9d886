/* device.cuh - what the kernels of the recurrent hybrid operator share: keys in
 * either precision, rotation, feature maps, and which token a session is at. The
 * meaning of each is in backend/ref/hybrid/hybrid.h. */
#ifndef STI_BACKEND_CUDA_HYBRID_DEVICE_CUH
#define STI_BACKEND_CUDA_HYBRID_DEVICE_CUH

#include <float.h>

#include "backend/cuda/hybrid/step/step.h"
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

/* ---- Rotation ------------------------------------------------------------ */

/* The two elements of pair i. */
STI_DEVICE int2 pair_at(const sti_cuda_hybrid_params &h, int i)
{
    return h.interleaved ? make_int2(2 * i, 2 * i + 1) : make_int2(i, i + h.D / 2);
}

/* Pair i turns by position * inv_freq[i]. In double, and in half turns: the angle of a
 * token a million places away has no digits to spare. */
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

/* ---- Feature map --------------------------------------------------------- */

/* phi [P] from u = x W [F] and |x|^2, by one warp; phi may be u. */
STI_DEVICE void warp_features(const sti_cuda_hybrid_params &h, const float *u,
                              float square, float bias, float *phi)
{
    enum { EACH = STI_STEP_MAX_D / 32 };
    const int F = h.F, lane = (int)threadIdx.x & 31;
    float x[EACH], sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        x[i] = lane + 32 * i < F ? u[lane + 32 * i] : 0;
        sum += x[i] * x[i];
    }
    if (h.norm_preserved) {
        const float keep = sqrtf(square) / fmaxf(sqrtf(warp_sum(sum)), 1e-6f);
#pragma unroll
        for (int i = 0; i < EACH; i++) x[i] *= keep;
    }
    if (h.map == STI_MAP_RELU) {
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (lane + 32 * i < F)
                phi[lane + 32 * i] = fmaxf(fmaxf(x[i] + bias, 0), h.feature_floor);
        return;
    }
    float top = -INFINITY, bottom = -INFINITY; /* of u and of -u */
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (lane + 32 * i < F) {
            top = fmaxf(top, x[i]);
            bottom = fmaxf(bottom, -x[i]);
        }
    top = warp_max(top);
    bottom = warp_max(bottom);
    float plus = 0, minus = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (lane + 32 * i < F) {
            plus += expf(x[i] - top);
            minus += expf(-x[i] - bottom);
        }
    plus = 1 / warp_sum(plus);
    minus = 1 / warp_sum(minus);
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (lane + 32 * i < F) {
            phi[lane + 32 * i] = fmaxf(expf(x[i] - top) * plus, h.feature_floor);
            phi[F + lane + 32 * i] =
                fmaxf(expf(-x[i] - bottom) * minus, h.feature_floor);
        }
}

/* The state's sums keep what rounding takes (Kahan): s += a x. */
STI_DEVICE void kahan_add(float *sum, float *low, float a, float x)
{
    const float was = *sum, more = fmaf(a, x, *low), now = was + more;
    *sum = now;
    *low = more - (now - was);
}

#endif
