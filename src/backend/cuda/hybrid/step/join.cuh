/* join.cuh - the unit that arrives last joins the results of all units to the output
 * (STILL eq. 10, 11) and gives the new token its score. */
#ifndef STI_BACKEND_CUDA_HYBRID_STEP_JOIN_CUH
#define STI_BACKEND_CUDA_HYBRID_STEP_JOIN_CUH

#include "backend/cuda/hybrid/score.h"
#include "backend/cuda/hybrid/step/step.cuh"

/* ---- Output -------------------------------------------------------------- */

typedef struct weights {
    float keep, linear;
} weights;

/* STILL eq. 11: what the softmax sums and the linear term are multiplied by, as
 * sti_ref_scales_of. M and the result are relative to 2^M. */
STI_DEVICE weights weights_of(const sti_cuda_hybrid_params &h, float alpha,
                              float factor, float M, int64_t folded, int sel)
{
    const int most = state_cap_of(h, sel);
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

/* Results of units [first, end) for heads [lo, hi) of the selection head, in shared
 * memory: one wait for all of them, instead of one for each few. */
typedef struct result_range {
    int first, end, lo, hi, row; /* row: floats of a result */

    __device__ __forceinline__ int apart() const /* from a unit to the next */
    {
        return (hi - lo) * row;
    }
    /* The result of unit u for head n. */
    __device__ __forceinline__ const float *at(const float *results, int u, int n) const
    {
        return results + (u - first) * apart() + (n - lo) * row;
    }
    template <typename KV, int HEADS, int WIDE>
    __device__ __forceinline__ void fetch(const step_args &a,
                                          step_shared<KV, HEADS, WIDE> &sh) const
    {
        const int run = apart() / 4, units = end - first; /* vectors */
        const float *from = part_at(a, sh, first, lo);
        const size_t next = (size_t)a.h.group * row;
        int u = 0, v = (int)threadIdx.x;
        __syncthreads(); /* nobody uses what was there */
#pragma unroll 1
        for (int to = v; to < units * run; to += THREADS, v += THREADS) {
            for (; v >= run; v -= run) u++;
            cp_async16(shared_address(sh.results + 4 * to), from + u * next + 4 * v);
        }
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
    }
} result_range;

/* Sums over the results of units: VEC of the D numbers of a query head. */
template <int VEC> struct joined {
    float M, L, sum, o[VEC], linear[VEC];

    /* Of a head, results at `x`, `apart` floats from each other: n of key units. */
    __device__ __forceinline__ void join_keys(const float *x, int apart, int n, int e)
    {
        float top = M;
#pragma unroll 4
        for (int u = 0; u < n; u++) top = fmaxf(top, x[u * apart]);
        const float base = top > -INFINITY ? top : 0, keep = exp2_fast(M - base);
        M = top;
        L *= keep;
#pragma unroll
        for (int k = 0; k < VEC; k++) o[k] *= keep;
#pragma unroll 4
        for (int u = 0; u < n; u++, x += apart) {
            const float add = exp2_fast(x[0] - base);
            packed<float, VEC> value;
            float v[VEC];
            value.load(x + PART_HEAD + e);
            value.widen(v);
            L = fmaf(x[1], add, L);
#pragma unroll
            for (int k = 0; k < VEC; k++) o[k] = fmaf(v[k], add, o[k]);
        }
    }
    /* n of state units. */
    __device__ __forceinline__ void join_state(const float *x, int apart, int n, int e)
    {
#pragma unroll 1
        for (int u = 0; u < n; u++, x += apart) {
            packed<float, VEC> value;
            float v[VEC];
            value.load(x + PART_HEAD + e);
            value.widen(v);
            sum += x[0];
#pragma unroll
            for (int k = 0; k < VEC; k++) linear[k] += v[k];
        }
    }
    /* Head n, the units of a range. rows: state units that a head has. */
    __device__ __forceinline__ void join(const step_args &a, const float *results,
                                         const result_range &in, int rows, int n, int e)
    {
        int first = 0; /* of the state units */
#pragma unroll 1
        for (int i = n; i >= a.plan.part_heads; i -= a.plan.part_heads)
            first += a.plan.row_parts;
        const int state = max(first, in.first),
                  keys = max(a.plan.state_units, in.first);
        join_state(in.at(results, state, n), in.apart(),
                   min(first + rows, in.end) - state, e);
        join_keys(in.at(results, keys, n), in.apart(), in.end - keys, e);
    }
};

/* STILL eq. 10, the sum of eq. 1: y = (N_SA + N_LA) / (D_SA + D_LA). units: those that
 * had something to do. */
template <int VEC, typename KV, int HEADS, int WIDE>
STI_DEVICE void write_output(const step_args &a, step_shared<KV, HEADS, WIDE> &sh,
                             int units)
{
    const sti_cuda_hybrid_params &h = a.h;
    const int wide = h.D / VEC;
    const int rows = h.has_linear && sh.now.folded > 0 ? a.plan.row_parts : 0;
#pragma unroll 1
    for (int block = 0; block < h.group * wide; block += THREADS) {
        const int i = block + (int)threadIdx.x;
        const bool mine = i < h.group * wide;
        const int n = mine ? i / wide : h.group - 1,
                  e = mine ? (i - n * wide) * VEC : 0;
        const int head = first_head(a, sh) + n;
        const size_t at = query_at(a, sh, n) + e;
        const float alpha = h.alpha ? h.alpha[head] : 0;
        const float *gate = h.gate && sh.session.gate ? sh.session.gate + at : NULL;
        float g[VEC], factor = 1;
        if (h.window_factor)
            factor = h.window_logit ? 1 / (1 + expf(-h.window_logit[head])) : 0.1f;
#pragma unroll
        for (int k = 0; k < VEC; k++) g[k] = gate ? gate[k] : 0;
        joined<VEC> j = {-INFINITY, 0, 0, {}, {}};
        result_range in = {0, 0, block / wide,
                           min(h.group, (block + THREADS - 1) / wide + 1),
                           part_row(h.D)};
        const int fit = JOINED / in.apart(); /* at least 7, see part_row */
#pragma unroll 1
        for (; in.first < units; in.first = in.end) {
            in.end = min(in.first + fit, units);
            in.fetch(a, sh);
            j.join(a, sh.results, in, rows, n, e);
        }
        if (!mine) continue;
        const weights w = weights_of(h, alpha, factor, j.M, sh.now.folded, sh.at.sel);
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
template <typename KV, int HEADS, int WIDE>
STI_DEVICE float own_weight_score(const step_args &a,
                                  const step_shared<KV, HEADS, WIDE> &sh, int key_units,
                                  int n)
{
    const int last = window_of(sh.now.pos, a.h.C).tokens - 1;
    const float own = __ldcg(logits_at(a, sh, n) + last);
    logit_sum others;
    others.clear();
#pragma unroll 4
    for (int u = 0; u < key_units; u++) {
        const float4 head = __ldcg(reinterpret_cast<const float4 *>(
            part_at(a, sh, a.plan.state_units + u, n)));
        others.join(head.z, head.w);
    }
    const float top = fmaxf(others.m, own);
    return self_score(a.h.score, exp2_fast(own - top),
                      others.l * exp2_fast(others.m - top), a.h.eps);
}

/* Mean score of the query heads, by a warp. key_units: those that have window tokens. */
template <typename KV, int HEADS, int WIDE>
STI_DEVICE float mean_score(const step_args &a, const step_shared<KV, HEADS, WIDE> &sh,
                            int key_units)
{
    const sti_cuda_hybrid_params &h = a.h;
    const int lane = (int)threadIdx.x % 32;
    float sum = 0;
    if (sti_score_from(h.score, STI_FROM_KEY)) { /* heads do not differ */
        const float *k = sh.session.k + ((size_t)a.t * h.G + kv_head(a, sh)) * h.D;
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
                   ? position_score(h.score, h.seed, h.layer, first_head(a, sh) + n,
                                    sh.now.pos)
                   : own_weight_score(a, sh, key_units, n);
    return warp_sum(sum) / (float)h.group;
}

/* Adds the weights that the new token gives to earlier ones of the window. */
template <typename KV, int HEADS, int WIDE>
STI_DEVICE void give_weights(const step_args &a, const step_shared<KV, HEADS, WIDE> &sh)
{
    const sti_cuda_hybrid_params &h = a.h;
    const int warp = (int)threadIdx.x / 32;
    const sti_window w = window_of(sh.now.pos, h.C);
    float *received = sh.session.win_received + (size_t)sh.at.sel * 2 * h.C;
    for (int n = warp; n < h.group; n += WARPS) {
        float m, l, *logit = logits_at(a, sh, n);
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
            const float *logit = logits_at(a, sh, n);
            sum += exp2_fast(__ldcg(logit + i) - __ldcg(logit + 2 * h.C)) /
                   __ldcg(logit + 2 * h.C + 1);
        }
        float *to = received + (w.slot + i) % (2 * h.C);
        *to = i < w.tokens - 1 ? *to + sum / (float)h.group : 0;
    }
}

/* By the last warp, since the first ones are busy with the output. */
template <typename KV, int HEADS, int WIDE>
STI_DEVICE void write_score(const step_args &a, const step_shared<KV, HEADS, WIDE> &sh,
                            int key_units)
{
    const sti_cuda_hybrid_params &h = a.h;
    const int last = THREADS - 32;
    const size_t slot = (size_t)sh.at.sel * 2 * h.C + sh.now.pos % (2 * h.C);
    float score = 0;
    if (sti_score_from(h.score, STI_FROM_QUERIES))
        give_weights(a, sh);
    else if (!sti_score_from(h.score, STI_FROM_CHUNK) && (int)threadIdx.x >= last)
        score = mean_score(a, sh, key_units);
    if ((int)threadIdx.x == last) sh.session.win_score[slot] = score;
}

#endif
