/* weigh.cuh - features of a query, times z: the weights of the linear term
 * (linear.cuh). */
#ifndef STI_BACKEND_CUDA_HYBRID_CHUNK_WEIGH_CUH
#define STI_BACKEND_CUDA_HYBRID_CHUNK_WEIGH_CUH

#include "backend/cuda/hybrid/map.cuh"
#include "backend/cuda/ptx/half.cuh"

/* Exponentials are kept in half times 2^14. */
static constexpr float feature_unit_log2 = 14;

/* A row of u = q W, which four lanes share: u(n, e) is this lane's element e (0, 1) of
 * the n-th of D / 8 tiles of columns, and becomes the weights phi z of u and of -u, as
 * halves, which put(n, up, down) takes. Both exponentials of an element wait as two
 * halves in its place until their sums are known. z: of this lane's first column; those
 * of -u are D later. square(): |q|^2, to all four lanes. Returns the lane's part of the
 * sum of the weights as they were rounded. */
template <int D, class U, class Square, class Put>
static __device__ __forceinline__ float
weigh_row(const sti_cuda_hybrid_params &h, const float *z, U u, Square square, Put put)
{
    float uu = 0, top = -INFINITY, bottom = INFINITY;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            uu += u(n, e) * u(n, e);
            top = fmaxf(top, u(n, e));
            bottom = fminf(bottom, u(n, e));
        }
    float scale = log2_e;
    if (h.norm_preserved) scale *= norm_kept(sqrtf(square()), sqrtf(quad_sum(uu)));
    top = quad_max(top) * scale - feature_unit_log2;
    bottom = -quad_max(-bottom) * scale + feature_unit_log2;
    float sum_up = 0, sum_down = 0;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float l = u(n, e) * scale;
            const float a = exp2_fast(l - top), b = exp2_fast(bottom - l);
            sum_up += a;
            sum_down += b;
            u(n, e) = __uint_as_float(pack_half2(a, b));
        }
    const float part_up = 1.0f / quad_sum(sum_up),
                part_down = 1.0f / quad_sum(sum_down), floor = h.feature_floor;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        const float2 x = unpack_half2(__float_as_uint(u(n, 0)));
        const float2 y = unpack_half2(__float_as_uint(u(n, 1)));
        const float2 z_up = *(const float2 *)(z + n * 8);
        const float2 z_down = *(const float2 *)(z + D + n * 8);
        const uint32_t a = pack_half2(softmax_feature(x.x, part_up, floor) * z_up.x,
                                      softmax_feature(y.x, part_up, floor) * z_up.y);
        const uint32_t b =
            pack_half2(softmax_feature(x.y, part_down, floor) * z_down.x,
                       softmax_feature(y.y, part_down, floor) * z_down.y);
        const float2 a2 = unpack_half2(a), b2 = unpack_half2(b);
        sum += (a2.x + a2.y) + (b2.x + b2.y);
        put(n, a, b);
    }
    return sum;
}

#endif
