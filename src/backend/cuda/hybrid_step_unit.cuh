/* hybrid_step_unit.cuh - a key unit: the queries of a selection head meet a run of the
 * window's and the salient keys. Layout says how: on tensor cores
 * (hybrid_step_tiles.cuh) or without (hybrid_step_keys.cuh). */
#ifndef STI_BACKEND_CUDA_HYBRID_STEP_UNIT_CUH
#define STI_BACKEND_CUDA_HYBRID_STEP_UNIT_CUH

#include "backend/cuda/hybrid_step_keys.cuh"
#include "backend/cuda/hybrid_step_tiles.cuh"

template <typename KV, int HEADS>
STI_DEVICE token_rows<KV> rows_of(const step_args &a, const step_shared<KV, HEADS> &sh,
                                  const void *window, const void *salient,
                                  const KV *fresh)
{
    const size_t C = a.h.C, D = a.h.D, room = sh.session.room;
    const sti_window w = window_of(sh.pos, a.h.C);
    return token_rows<KV>{static_cast<const KV *>(window) + kv_head(a) * 2 * C * D,
                          fresh,
                          static_cast<const KV *>(salient) + selector() * room * D,
                          w.tokens,
                          w.slot,
                          2 * a.h.C,
                          a.h.D};
}

/* Joins the warps into the unit's result. */
template <typename Layout, typename KV, int HEADS>
STI_DEVICE void store_part(const step_args &a, step_shared<KV, HEADS> &sh, int first,
                           typename Layout::running &r)
{
    const int D = a.h.D;
    leave_to_join<Layout>(typename Layout::kind(), sh, r);
    __syncthreads();
    for (int i = (int)threadIdx.x; i < HEADS * Layout::ROW; i += THREADS) {
        const int n = i / Layout::ROW, e = i % Layout::ROW;
        if (e >= D || first + n >= a.h.group) continue;
        float top = -INFINITY, l = 0, o = 0;
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, sh.keys.m[w][n]);
        const float base = top > -INFINITY ? top : 0;
        for (int w = 0; w < WARPS; w++) {
            const float keep = exp2f(sh.keys.m[w][n] - base);
            l += keep * sh.keys.l[w][n];
            o += keep * sh.keys.o[w][n][e];
        }
        float *to = part_at(a, this_unit(), first + n);
        to[e] = o;
        if (e == 0) {
            to[D] = top;
            to[D + 1] = l;
        }
    }
}

/* x = R(position_cap) q_raw: the query as far keys, kept as before RoPE, see it. */
template <typename KV, int HEADS>
STI_DEVICE void turn_queries(const step_args &a, step_shared<KV, HEADS> &sh)
{
    const int half = a.h.D / 2;
    for (int i = (int)threadIdx.x; i < HEADS * half; i += THREADS) {
        float *x = sh.x[i / half];
        const int2 at = pair_at(a.h, i % half);
        turn_pair(a.h, i % half, a.h.position_cap, &x[at.x], &x[at.y]);
    }
}

/* The new token goes to the ring. Selection heads may share a kv head: one of them. */
template <typename KV, int HEADS>
STI_DEVICE void enter(const step_args &a, const step_shared<KV, HEADS> &sh)
{
    if (first_head(a) % a.h.per_kv != 0) return;
    const size_t slot = (size_t)sh.pos % (2 * a.h.C);
    const size_t at = ((size_t)kv_head(a) * 2 * a.h.C + slot) * a.h.D;
    for (int e = (int)threadIdx.x; e < a.h.D; e += THREADS) {
        static_cast<KV *>(sh.session.win_k)[at + e] = sh.k[e];
        static_cast<KV *>(sh.session.win_v)[at + e] = sh.v[e];
    }
}

/* Run number `index` of the window's and the salient keys, in shared memory: the loops
 * over keys need all registers. */
template <typename KV, int HEADS>
STI_DEVICE void find_run(const step_args &a, step_shared<KV, HEADS> &sh, int index)
{
    const sti_cuda_session &s = sh.session;
    sh.keys_at = rows_of(a, sh, s.win_k, s.sal_k, sh.k);
    sh.values_at = rows_of(a, sh, s.win_v, s.sal_v, sh.v);
    sh.logits = logits_at(a, 0);
    const int keys = sh.keys_at.tokens + sh.salient, units = a.plan.key_units;
    const int each = ((keys + units - 1) / units + 15) & ~15; /* whole tiles */
    sh.lo = min(index * each, keys);
    sh.hi = min(sh.lo + each, keys);
}

template <typename Layout, typename KV, int HEADS>
STI_DEVICE void key_unit(const step_args &a, step_shared<KV, HEADS> &sh, int index)
{
    if (threadIdx.x == 0) find_run(a, sh, index);
    if (index == 0) enter(a, sh);
    __syncthreads();
#pragma unroll 1
    for (int first = 0; first < a.h.group; first += HEADS) {
        const size_t at = ((size_t)a.t * a.h.H + first_head(a) + first) * a.h.D;
        const int heads = min(HEADS, a.h.group - first);
        const bool meets_far = a.h.position_cap > 0 && sh.hi > sh.keys_at.tokens;
        if (first > 0) {
            __syncthreads();
            load_rows<HEADS, Layout::ROW>(sh.q, sh.session.q + at, heads, a.h.D);
        }
        if (meets_far) {
            load_rows<HEADS, Layout::ROW>(sh.x, sh.session.q_raw + at, heads, a.h.D);
            __syncthreads();
            turn_queries(a, sh);
        }
        if (first > 0 || meets_far) __syncthreads();
        typename Layout::running r;
        r.clear();
#pragma unroll 1
        for (int far = 0; far <= (int)meets_far; far++) {
            const float(*q)[MAX_D] = far ? sh.x : sh.q;
            ready_queries<Layout>(typename Layout::kind(), sh, q);
            meet_keys<Layout>(typename Layout::kind(), a, sh, far != 0, q, first, r);
        }
        store_part<Layout>(a, sh, first, r);
    }
}

#endif
