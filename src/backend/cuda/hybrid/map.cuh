/* map.cuh - the feature map (NP-Map, STILL eq. 6), for every form:
 *
 *   u = x W;   norm preserved: u = u |x| / max(|u|, smallest_norm)
 *   phi = max([softmax(u), softmax(-u)], floor), or max(relu(u + b), floor)
 *
 * Rows lie differently in each kernel - a warp's lanes, fragments of tensor cores,
 * parts of a stream - so what is shared is the arithmetic of a row, below. */
#ifndef STI_BACKEND_CUDA_HYBRID_MAP_CUH
#define STI_BACKEND_CUDA_HYBRID_MAP_CUH

#include "backend/cuda/hybrid/params.h"
#include "backend/cuda/ptx/reduce.cuh"

static constexpr float smallest_norm = 1e-6f; /* of u, before it divides */

/* What u is multiplied by to have the norm of x, from |x| and |u|. */
STI_DEVICE float norm_kept(float norm_x, float norm_u)
{
    return norm_x / fmaxf(norm_u, smallest_norm);
}

/* From an exponential of the row and one over their sum. */
STI_DEVICE float softmax_feature(float e, float part, float floor)
{
    return fmaxf(e * part, floor);
}

STI_DEVICE float relu_feature(float u, float floor)
{
    return fmaxf(fmaxf(u, 0), floor);
}

/* STILL eq. 6: phi [P] from u = x W [F] and |x|^2, by one warp; phi may be u. */
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
        const float keep = norm_kept(sqrtf(square), sqrtf(warp_sum(sum)));
#pragma unroll
        for (int i = 0; i < EACH; i++) x[i] *= keep;
    }
    if (h.map == STI_MAP_RELU) {
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (lane + 32 * i < F)
                phi[lane + 32 * i] = relu_feature(x[i] + bias, h.feature_floor);
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
            phi[lane + 32 * i] =
                softmax_feature(expf(x[i] - top), plus, h.feature_floor);
            phi[F + lane + 32 * i] =
                softmax_feature(expf(-x[i] - bottom), minus, h.feature_floor);
        }
}

#endif
