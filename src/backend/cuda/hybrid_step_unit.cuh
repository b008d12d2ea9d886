/* hybrid_step_unit.cuh - a key unit: the queries of a selection head meet keys of the
 * window and of the salient list. Layout says how: on tensor cores
 * (hybrid_step_tiles.cuh) or without (hybrid_step_keys.cuh).
 *
 * The warps of all key units take batches of places in turn. Each asks for its first
 * one before anything else: where it lies depends on neither position nor query. It has
 * a running softmax of its own, and asks for the next keys as soon as it has used these
 * and for the next values likewise: it meets the others of its block once, at the end.
 */
#ifndef STI_BACKEND_CUDA_HYBRID_STEP_UNIT_CUH
#define STI_BACKEND_CUDA_HYBRID_STEP_UNIT_CUH

#include "backend/cuda/hybrid_step_keys.cuh"
#include "backend/cuda/hybrid_step_tiles.cuh"

template <typename KV, int HEADS>
STI_DEVICE token_rows<KV> rows_of(const step_args &a, const step_shared<KV, HEADS> &sh,
                                  const void *window, const void *salient)
{
    const int64_t D = a.h.D, ring = 2 * a.h.C, room = sh.session.room;
    return token_rows<KV>{static_cast<const KV *>(window) + kv_head(a) * ring * D,
                          static_cast<const KV *>(salient) +
                              (selector() * room - ring) * D,
                          (int)ring, (int)(ring + room), a.h.D};
}

/* The first batch of places of this warp, and from one to its next. */
template <typename Layout> STI_DEVICE int first_batch(int index)
{
    return (index * WARPS + (int)threadIdx.x / 32) * Layout::BATCH;
}
template <typename Layout> STI_DEVICE int next_batch(const step_args &a)
{
    return a.plan.key_units * WARPS * Layout::BATCH;
}

/* Memory is told of a warp's first batch. */
template <typename Layout, typename KV, int HEADS>
STI_DEVICE void expect_keys(const step_shared<KV, HEADS> &sh, int index)
{
    enum { LINE = 64 / sizeof(KV) };
    const int base = first_batch<Layout>(index), D = sh.keys_at.D;
#pragma unroll 1
    for (int i = (int)threadIdx.x % 32; i < Layout::BATCH; i += 32) {
        const KV *k = sh.keys_at.at(base + i), *v = sh.values_at.at(base + i);
#pragma unroll 1
        for (int e = 0; e < D; e += LINE) {
            expect(k + e);
            expect(v + e);
        }
    }
}

/* Joins the warps into the unit's result. */
template <typename Layout, typename KV, int HEADS>
STI_DEVICE void store_part(const step_args &a, step_shared<KV, HEADS> &sh, int first,
                           typename Layout::running &r)
{
    const int D = a.h.D;
    leave_to_join<Layout>(typename Layout::kind(), sh, r);
    __syncthreads();
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < HEADS * Layout::ROW; i += THREADS) {
        const int n = i / Layout::ROW, e = i % Layout::ROW;
        if (e >= D || first + n >= a.h.group) continue;
        float top = -INFINITY, l = 0, o = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, sh.keys.all[w][n].m);
        const float base = top > -INFINITY ? top : 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float keep = exp2_fast(sh.keys.all[w][n].m - base);
            l += keep * sh.keys.all[w][n].l;
            o += keep * sh.keys.o[w][n][e];
        }
        float *to = part_at(a, this_unit(), first + n);
        to[PART_HEAD + e] = o;
        if (e > 0) continue;
        logit_sum recent = sh.keys.recent[0][n];
#pragma unroll
        for (int w = 1; w < WARPS; w++)
            recent.join(sh.keys.recent[w][n].m, sh.keys.recent[w][n].l);
        *reinterpret_cast<float4 *>(to) = make_float4(top, l, recent.m, recent.l);
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

/* The new token goes to the ring. Selection heads may share a kv head: one of them.
 * Others may read the slot meanwhile: what they read there they do not use. */
template <typename KV, int HEADS>
STI_DEVICE void enter(const step_args &a, const step_shared<KV, HEADS> &sh, int slot)
{
    if (first_head(a) % a.h.per_kv != 0) return;
    const size_t at = ((size_t)kv_head(a) * 2 * a.h.C + slot) * a.h.D;
#pragma unroll 1
    for (int e = (int)threadIdx.x; e < a.h.D; e += THREADS) {
        static_cast<KV *>(sh.session.win_k)[at + e] = sh.keys.k[e];
        static_cast<KV *>(sh.session.win_v)[at + e] = sh.keys.v[e];
    }
}

/* Queries that are ready meet the keys, those that are far or those that are not. b has
 * the warp's first batch already if `here`. */
template <typename Layout, typename KV, int HEADS>
STI_DEVICE void meet_keys(const step_args &a, const step_shared<KV, HEADS> &sh,
                          int base, bool here, bool far, const float (*q)[MAX_D],
                          int first, typename Layout::batch &b,
                          typename Layout::running &r)
{
    const sight &see = sh.see;
    const int lane = (int)threadIdx.x % 32, apart = next_batch<Layout>(a);
    const int end = see.ring + see.salient;
    if (!here && base < end) {
        b.load_keys(sh.keys_at, base);
        b.load_values(sh.values_at, base);
    }
#pragma unroll 1
    while (base < end) {
        int next = base + apart;
        while (next < end && !__any_sync(~0u, see.sees(next + lane % Layout::BATCH)))
            next += apart;
        b.dot(sh, see, base, q);
        if (next < end) b.load_keys(sh.keys_at, next);
        b.find_seen(a, sh, see, base, far);
        b.keep_logits(a, sh, see, base, first, r);
        b.soften(sh, see, base, r);
        if (next < end) b.load_values(sh.values_at, next);
        base = next;
    }
}

template <typename Layout, typename KV, int HEADS>
STI_DEVICE void key_unit(const step_args &a, step_shared<KV, HEADS> &sh, int index)
{
    const sti_cuda_shape &h = a.h;
    const sti_cuda_session &s = sh.session;
    const int tid = (int)threadIdx.x, base = first_batch<Layout>(index);
    const int listed = s.sal_count[selector()];
    moment now;
    now.load(s, selector());
    const size_t kv = ((size_t)a.t * h.G + kv_head(a)) * h.D;
    typename Layout::batch b;
    typename Layout::queries ready;
    ready.load(s.q + query_at(a, 0), min((int)HEADS, h.group), h.D);
    b.clear();
    b.load_keys(sh.keys_at, base);
    b.load_values(sh.values_at, base);
#pragma unroll 1
    for (int e = tid; e < h.D; e += THREADS) {
        const float k = s.k[kv + e], v = s.v[kv + e];
        narrow(k, &sh.keys.k[e]);
        narrow(v, &sh.keys.v[e]);
    }
    ready.store(sh);
    now = now.of_token(a.t, true);
    const sti_window w = window_of(now.pos, h.C);
    if (tid == 0) {
        sh.now = now;
        sh.see = sight{w.tokens, w.slot, 2 * h.C, min(listed, s.room)};
    }
    __syncthreads();
    if (index == 0) enter(a, sh, sh.see.fresh());
#pragma unroll 1
    for (int first = 0; first < h.group; first += HEADS) {
        const int heads = min((int)HEADS, h.group - first);
        if (first > 0) {
            __syncthreads(); /* nobody uses the former ones, or their results */
            ready.load(s.q + query_at(a, first), heads, h.D);
            ready.store(sh);
            __syncthreads();
        }
        typename Layout::running r;
        r.clear();
        const bool meets_far = h.position_cap > 0 && sh.see.salient > 0;
#pragma unroll 1
        for (int far = 0; far <= (int)meets_far; far++) {
            if (far) {
                load_rows<HEADS, Layout::ROW>(sh.x, s.q_raw + query_at(a, first), heads,
                                              h.D);
                __syncthreads();
                turn_queries(a, sh);
                __syncthreads();
                ready.load(sh.x);
                ready.store(sh);
                __syncthreads();
            }
            meet_keys<Layout>(a, sh, base, first + far == 0, far != 0,
                              far ? sh.x : sh.keys.q, first, b, r);
        }
        store_part<Layout>(a, sh, first, r);
    }
}

#endif
