/* hybrid_step_join.cuh - what the unit that arrives last does: joins the results of all
 * units to the output, and gives the new token its score. */
#ifndef STI_BACKEND_CUDA_HYBRID_STEP_JOIN_CUH
#define STI_BACKEND_CUDA_HYBRID_STEP_JOIN_CUH

#include "backend/cuda/hybrid_step.cuh"

/* ---- Output --------------------------------------------------------------------- */

typedef struct weights {
    float keep, linear;
} weights;

/* What the softmax sums and the linear term are multiplied by; sti_ref_scales_of. M and
 * the result are relative to 2^M. */
STI_DEVICE weights weights_of(const sti_cuda_shape &h, int head, float M,
                              int64_t folded)
{
    weights w = {1, 0};
    float alpha = h.alpha ? h.alpha[head] * LOG2_E : 0;
    if (h.state_cap > 0 && folded > h.state_cap)
        alpha += log2f((float)((double)h.state_cap / (double)folded));
    if (h.has_linear && folded > 0) {
        if (h.la_scale == STI_SCALE_EXACT) {
            const float top = fmaxf(M, alpha);
            w.keep = exp2f(M - top);
            w.linear = exp2f(alpha - top);
        } else {
            w.keep = M > -INFINITY ? exp2f(-fmaxf(alpha, 0)) : 0;
            w.linear = exp2f(fminf(alpha, 0));
        }
    }
    if (h.window_factor)
        w.keep *= h.window_logit ? 1 / (1 + expf(-h.window_logit[head])) : 0.1f;
    return w;
}

template <typename KV, int HEADS>
STI_DEVICE void write_output(const step_args &a, const step_shared<KV, HEADS> &sh)
{
    const sti_cuda_shape &h = a.h;
    const int D = h.D, units = units_of(a.plan);
    for (int i = (int)threadIdx.x; i < h.group * D; i += THREADS) {
        const int n = i / D, e = i - n * D;
        const size_t at = ((size_t)a.t * h.H + first_head(a) + n) * D + e;
        float M = -INFINITY, L = 0, o = 0, linear = 0, sum = 0;
#pragma unroll 8
        for (int u = a.plan.state_units; u < units; u++) {
            const float *from = part_at(a, u, n);
            const float m = __ldcg(from + D), l = __ldcg(from + D + 1);
            const float x = __ldcg(from + e), top = fmaxf(M, m);
            const float base = top > -INFINITY ? top : 0;
            const float keep = exp2f(M - base), add = exp2f(m - base);
            L = L * keep + l * add;
            o = o * keep + x * add;
            M = top;
        }
        const int rows = sh.folded > 0 ? a.plan.row_parts : 0;
#pragma unroll 4
        for (int u = 0; u < rows; u++) {
            const float *from = part_at(a, n / part_heads(a) * rows + u, n);
            linear += __ldcg(from + e);
            sum += __ldcg(from + D);
        }
        const weights w = weights_of(h, first_head(a) + n, M, sh.folded);
        const float gate =
            h.gate && sh.session.gate ? 2 / (1 + expf(-sh.session.gate[at])) : 1;
        const float den = h.den_eps + w.keep * L + w.linear * sum;
        sh.session.y[at] =
            (w.keep * o + w.linear * gate * linear) / fmaxf(den, FLT_MIN);
    }
}

/* ---- Score ---------------------------------------------------------------------- */

/* Largest of n logits and the sum of 2^(logit - m), by a warp. */
STI_DEVICE void warp_softmax(const float *logit, int n, float *m, float *l)
{
    float top = -INFINITY, sum = 0;
#pragma unroll 4
    for (int i = (int)threadIdx.x % 32; i < n; i += 32) {
        const float x = __ldcg(logit + i), next = fmaxf(top, x);
        sum = sum * exp2f(top - next) + exp2f(x - next);
        top = next;
    }
    *m = warp_max(top);
    *l = warp_sum(top > -INFINITY ? sum * exp2f(top - *m) : 0);
}

/* Score of the new token for one query head, by a warp. */
template <typename KV, int HEADS>
STI_DEVICE float head_score(const step_args &a, const step_shared<KV, HEADS> &sh, int n)
{
    const sti_cuda_shape &h = a.h;
    if (h.score == STI_SCORE_RANDOM) return random_score(h, first_head(a) + n, sh.pos);
    if (h.score == STI_SCORE_KEYNORM) {
        float square = 0;
        for (int e = (int)threadIdx.x % 32; e < h.D; e += 32) {
            const float x = widen(sh.k[e]);
            square = fmaf(x, x, square);
        }
        return -sqrtf(warp_sum(square));
    }
    const int tokens = window_of(sh.pos, h.C).tokens, others = min(h.C, tokens) - 1;
    const float *last = logits_at(a, n) + tokens - 1;
    const float own = __ldcg(last);
    float m, l;
    warp_softmax(last - others, others, &m, &l);
    const float top = fmaxf(m, own);
    return saliency(exp2f(own - top), l * exp2f(m - top), h.eps);
}

/* Earlier tokens of the window receive the weight that the new one gives them. */
template <typename KV, int HEADS>
STI_DEVICE void give_weights(const step_args &a, const step_shared<KV, HEADS> &sh)
{
    const sti_cuda_shape &h = a.h;
    const int warp = (int)threadIdx.x / 32;
    const sti_window w = window_of(sh.pos, h.C);
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
            sum += exp2f(__ldcg(logit + i) - __ldcg(logit + 2 * h.C)) /
                   __ldcg(logit + 2 * h.C + 1);
        }
        float *to = received + (w.slot + i) % (2 * h.C);
        *to = i < w.tokens - 1 ? *to + sum / (float)h.group : 0;
    }
}

template <typename KV, int HEADS>
STI_DEVICE void write_score(const step_args &a, step_shared<KV, HEADS> &sh)
{
    const sti_cuda_shape &h = a.h;
    const int warp = (int)threadIdx.x / 32;
    const size_t slot = (size_t)selector() * 2 * h.C + sh.pos % (2 * h.C);
    if (h.score == STI_SCORE_RECEIVED) {
        give_weights(a, sh);
        if (threadIdx.x == 0) sh.session.win_score[slot] = 0;
        return;
    }
    float sum = 0;
    for (int n = warp; n < h.group; n += WARPS) sum += head_score(a, sh, n);
    if (threadIdx.x % 32 == 0) sh.sum[warp] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    sum = 0;
    for (int w = 0; w < WARPS; w++) sum += sh.sum[w];
    sh.session.win_score[slot] = sum / (float)h.group;
}

#endif
