/* join.cuh - the unit that arrives last joins the results of all units to the output
 * (STILL eq. 10, 11) and gives the new token its score. */
#ifndef STI_BACKEND_CUDA_HYBRID_STEP_JOIN_CUH
#define STI_BACKEND_CUDA_HYBRID_STEP_JOIN_CUH

#include "backend/cuda/hybrid/score.h"
#include "backend/cuda/hybrid/step/step.cuh"

/* ---- Output -------------------------------------------------------------- */

enum { JOINED = 6 }; /* results that are loaded at once */

typedef struct weights {
    float keep, linear;
} weights;

/* STILL eq. 11: what the softmax sums and the linear term are multiplied by, as
 * sti_ref_scales_of. M and the result are relative to 2^M. */
STI_DEVICE weights weights_of(const sti_cuda_hybrid_params &h, float alpha,
                              float factor, float M, int64_t folded)
{
    const int most = state_cap_of(h, selector());
    weights w = {1, 0};
    alpha *= log2_e;
    if (h.state_cap > 0 && folded > most) alpha += log2f((float)most / (float)folded);
    if (h.has_linear && folded > 0) {
        if (h.la_scale == STI_SCALE_EXACT) {
            const float top = fmaxf(M, alpha);
            w.keep = exp2_fast(M - top);
            w.linear = exp2_fast(alpha - top);
        } else {
            w.keep = M > -INFINITY ? exp2_fast(-fmaxf(alpha, 0)) : 0;
            w.linear = exp2_fast(fminf(alpha, 0));
        }
    }
    w.keep *= factor;
    return w;
}

/* Sums over the results of units: VEC of the D numbers of a query head. */
template <int VEC> struct joined {
    float M, L, sum, o[VEC], linear[VEC];

    /* Results of the `rows` state units that had head n, then those of the key units.
     * All of a batch are loaded before one is used; what is not there weighs
     * nothing. */
    __device__ __forceinline__ void join(const step_args &a, int rows, int n, int e)
    {
        const int units = rows + a.plan.key_units;
        int first = 0;
#pragma unroll 1
        for (int i = n; i >= a.plan.part_heads; i -= a.plan.part_heads)
            first += a.plan.row_parts;
        const size_t apart = (size_t)a.h.group * part_row(a.h.D);
        const float *part = part_at(a, 0, n);
#pragma unroll 1
        for (int u = 0; u < units; u += JOINED) {
            packed<float, VEC> value[JOINED];
            float2 head[JOINED];
            float top = M;
#pragma unroll
            for (int j = 0; j < JOINED; j++) {
                const int i = u + j;
                const float *from =
                    part +
                    (i < rows ? first + i : a.plan.state_units + i - rows) * apart;
                head[j] = make_float2(-INFINITY, 0);
                value[j].zero();
                if (i >= units) continue;
                head[j] = __ldcg(reinterpret_cast<const float2 *>(from));
                value[j].load_shared_by_all(from + PART_HEAD + e);
            }
#pragma unroll
            for (int j = 0; j < JOINED; j++) {
                const bool of_state = u + j < rows;
                if (of_state) {
                    float x[VEC];
                    value[j].widen(x);
                    sum += head[j].x;
#pragma unroll
                    for (int k = 0; k < VEC; k++) linear[k] += x[k];
                    head[j].x = -INFINITY;
                }
                top = fmaxf(top, head[j].x);
            }
            const float base = top > -INFINITY ? top : 0, keep = exp2_fast(M - base);
            L *= keep;
#pragma unroll
            for (int k = 0; k < VEC; k++) o[k] *= keep;
#pragma unroll
            for (int j = 0; j < JOINED; j++) {
                const float add = exp2_fast(head[j].x - base);
                float x[VEC];
                value[j].widen(x);
                L = fmaf(head[j].y, add, L);
#pragma unroll
                for (int k = 0; k < VEC; k++) o[k] = fmaf(x[k], add, o[k]);
            }
            M = top;
        }
    }
};

/* STILL eq. 10, the sum of eq. 1: y = (N_SA + N_LA) / (D_SA + D_LA). */
template <int VEC, typename KV, int HEADS, int WIDE>
STI_DEVICE void write_output(const step_args &a, step_shared<KV, HEADS, WIDE> &sh)
{
    const sti_cuda_hybrid_params &h = a.h;
    const int wide = h.D / VEC;
    const int rows = h.has_linear && sh.now.folded > 0 ? a.plan.row_parts : 0;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < h.group * wide; i += THREADS) {
        const int n = i / wide, e = (i - n * wide) * VEC;
        const int head = first_head(a) + n;
        const size_t at = query_at(a, n) + e;
        const float alpha = h.alpha ? h.alpha[head] : 0;
        const float *gate = h.gate && sh.session.gate ? sh.session.gate + at : NULL;
        float g[VEC], factor = 1;
        if (h.window_factor)
            factor = h.window_logit ? 1 / (1 + expf(-h.window_logit[head])) : 0.1f;
#pragma unroll
        for (int k = 0; k < VEC; k++) g[k] = gate ? gate[k] : 0;
        joined<VEC> j = {-INFINITY, 0, 0, {}, {}};
        j.join(a, rows, n, e);
        const weights w = weights_of(h, alpha, factor, j.M, sh.now.folded);
        const float den =
            1 / fmaxf(h.den_eps + w.keep * j.L + w.linear * j.sum, FLT_MIN);
        if (gate)
#pragma unroll
            for (int k = 0; k < VEC; k++)
                j.linear[k] *= __fdividef(2, 1 + __expf(-g[k]));
#pragma unroll
        for (int k = 0; k < VEC; k++)
            sh.session.y[at + k] = (w.keep * j.o[k] + w.linear * j.linear[k]) * den;
    }
}

/* ---- Score --------------------------------------------------------------- */

/* Largest of n logits and the sum of 2^(logit - m), by a warp. */
STI_DEVICE void warp_softmax(const float *logit, int n, float *m, float *l)
{
    float top = -INFINITY, sum = 0;
#pragma unroll 4
    for (int i = (int)threadIdx.x % 32; i < n; i += 32) {
        const float x = __ldcg(logit + i), next = fmaxf(top, x);
        sum = sum * exp2_fast(top - next) + exp2_fast(x - next);
        top = next;
    }
    *m = warp_max(top);
    *l = warp_sum(top > -INFINITY ? sum * exp2_fast(top - *m) : 0);
}

/* STILL eq. 2, eq. 3 and eq. 5: score of the new token for query head n, from the
 * weight it gives itself among the last C tokens. */
STI_DEVICE float own_weight_score(const step_args &a, int n, int pos)
{
    const int last = window_of(pos, a.h.C).tokens - 1;
    const float own = __ldcg(logits_at(a, n) + last);
    logit_sum others;
    others.clear();
#pragma unroll 4
    for (int u = 0; u < a.plan.key_units; u++) {
        const float4 head = __ldcg(
            reinterpret_cast<const float4 *>(part_at(a, a.plan.state_units + u, n)));
        others.join(head.z, head.w);
    }
    const float top = fmaxf(others.m, own);
    return self_score(a.h.score, exp2_fast(own - top),
                      others.l * exp2_fast(others.m - top), a.h.eps);
}

/* Mean score of the query heads, by a warp. */
template <typename KV, int HEADS, int WIDE>
STI_DEVICE float mean_score(const step_args &a, const step_shared<KV, HEADS, WIDE> &sh)
{
    const sti_cuda_hybrid_params &h = a.h;
    const int lane = (int)threadIdx.x % 32;
    float sum = 0;
    if (sti_score_from(h.score, STI_FROM_KEY)) { /* heads do not differ */
        const float *k = sh.session.k + ((size_t)a.t * h.G + kv_head(a)) * h.D;
        for (int e = lane; e < h.D; e += 32) {
            KV as_kept;
            narrow(k[e], &as_kept);
            const float x = widen(as_kept);
            sum = fmaf(x, x, sum);
        }
        return key_score(h.score, warp_sum(sum));
    }
#pragma unroll 1
    for (int n = lane; n < h.group; n += 32)
        sum += sti_score_from(h.score, STI_FROM_POSITION)
                   ? position_score(h.score, h.seed, h.layer, first_head(a) + n,
                                    sh.now.pos)
                   : own_weight_score(a, n, sh.now.pos);
    return warp_sum(sum) / (float)h.group;
}

/* Adds the weights that the new token gives to earlier ones of the window. */
template <typename KV, int HEADS, int WIDE>
STI_DEVICE void give_weights(const step_args &a, const step_shared<KV, HEADS, WIDE> &sh)
{
    const sti_cuda_hybrid_params &h = a.h;
    const int warp = (int)threadIdx.x / 32;
    const sti_window w = window_of(sh.now.pos, h.C);
    float *received = sh.session.win_received + (size_t)selector() * 2 * h.C;
    for (int n = warp; n < h.group; n += WARPS) {
        float m, l, *logit = logits_at(a, n);
        warp_softmax(logit, w.tokens, &m, &l);
        if (threadIdx.x % 32 == 0) {
            logit[2 * h.C] = m;
            logit[2 * h.C + 1] = l;
        }
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < w.tokens; i += THREADS) {
        float sum = 0;
        for (int n = 0; n < h.group; n++) {
            const float *logit = logits_at(a, n);
            sum += exp2_fast(__ldcg(logit + i) - __ldcg(logit + 2 * h.C)) /
                   __ldcg(logit + 2 * h.C + 1);
        }
        float *to = received + (w.slot + i) % (2 * h.C);
        *to = i < w.tokens - 1 ? *to + sum / (float)h.group : 0;
    }
}

/* By the last warp, since the first ones are busy with the output. */
template <typename KV, int HEADS, int WIDE>
STI_DEVICE void write_score(const step_args &a, const step_shared<KV, HEADS, WIDE> &sh)
{
    const sti_cuda_hybrid_params &h = a.h;
    const int last = THREADS - 32;
    const size_t slot = (size_t)selector() * 2 * h.C + sh.now.pos % (2 * h.C);
    float score = 0;
    if (sti_score_from(h.score, STI_FROM_QUERIES))
        give_weights(a, sh);
    else if (!sti_score_from(h.score, STI_FROM_CHUNK) && (int)threadIdx.x >= last)
        score = mean_score(a, sh);
    if ((int)threadIdx.x == last) sh.session.win_score[slot] = score;
}

#endif
