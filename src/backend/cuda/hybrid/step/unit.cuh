/* unit.cuh - a key unit: the queries of a selection head against keys of the window and
 * of the salient list (STILL eq. 11, SA). Layout says how: on tensor cores (tiles.cuh)
 * or without (keys.cuh).
 *
 * The warps of all key units take batches of places one after the other. Each fetches
 * its first batch before anything else: where it lies depends on neither position nor
 * query. A warp has a running softmax of its own, fetches the next keys as soon as it
 * has used these, and the next values likewise: it synchronizes with its block once, at
 * the end. */
#ifndef STI_BACKEND_CUDA_HYBRID_STEP_UNIT_CUH
#define STI_BACKEND_CUDA_HYBRID_STEP_UNIT_CUH

#include "backend/cuda/hybrid/step/keys.cuh"
#include "backend/cuda/hybrid/step/tiles.cuh"

/* The first place of the list: a batch of a quantized one has nothing of the window. */
template <typename Layout> STI_DEVICE int list_place(const step_args &a)
{
    const int ring = 2 * a.h.C, whole = Layout::STORED ? Layout::BATCH : 1;
    return (ring + whole - 1) / whole * whole;
}

template <typename Layout, typename KV, int HEADS, int WIDE>
STI_DEVICE token_rows<KV>
rows_of(const step_args &a, const step_shared<KV, HEADS, WIDE> &sh,
        const salient_list &of, const void *window, const void *salient)
{
    const int64_t D = a.h.D, ring = 2 * a.h.C;
    const int list = list_place<Layout>(a);
    return token_rows<KV>{static_cast<const KV *>(window) + kv_head(a, sh) * ring * D,
                          static_cast<const KV *>(salient) + (of.first - list) * D,
                          (int)ring,
                          list,
                          list + of.capacity,
                          a.h.D};
}

/* The first batch of places of this warp, and from one to its next. */
template <typename Layout> STI_DEVICE int first_batch(int index)
{
    return (index * WARPS + (int)threadIdx.x / 32) * Layout::BATCH;
}
template <typename Layout> STI_DEVICE int next_batch(const block_place &at)
{
    return at.key_units * WARPS * Layout::BATCH;
}

/* Key units of the block's selection head that have places of the first `places`. */
template <typename Layout>
STI_DEVICE int key_units_of(const block_place &at, int places)
{
    enum { FIRST = WARPS * Layout::BATCH }; /* places of a unit's first batches */
    return min(at.key_units, (places + FIRST - 1) / FIRST);
}
/* Units that have something to do: all of the state, and of the keys those with places
 * that the token sees. */
template <typename Layout, typename KV, int HEADS, int WIDE>
STI_DEVICE int units_at_work(const step_args &a, const step_shared<KV, HEADS, WIDE> &sh)
{
    return a.plan.state_units +
           key_units_of<Layout>(sh.at, list_place<Layout>(a) + sh.now.listed);
}

/* Prefetches place i of the keys, or of the values. */
template <bool STORED, typename KV>
STI_DEVICE void prefetch_row(const token_rows<KV> &rows, const stored_rows &stored,
                             int i)
{
    enum { LINE = 64 / sizeof(KV) };
    if (STORED && stored.bits > 0 && i >= rows.list) {
        if (i < rows.places) prefetch_stored(stored.from(i - rows.list));
        return;
    }
    const KV *row = rows.at(i);
#pragma unroll 1
    for (int e = 0; e < rows.D; e += LINE) prefetch_l2(row + e);
}

/* Prefetches a warp's first batch; the second where the first is fetched already. */
template <typename Layout, typename KV, int HEADS, int WIDE>
STI_DEVICE void prefetch_keys(const step_args &a,
                              const step_shared<KV, HEADS, WIDE> &sh, int index)
{
    const int first = first_batch<Layout>(index);
    const int base = a.settled ? first + next_batch<Layout>(sh.at) : first;
    if (base >= sh.keys_at.places) return;
#pragma unroll 1
    for (int i = (int)threadIdx.x % 32; i < Layout::BATCH; i += 32) {
        prefetch_row<Layout::STORED>(sh.keys_at, sh.keys_stored, base + i);
        prefetch_row<Layout::STORED>(sh.values_at, sh.values_stored, base + i);
    }
}

/* Joins the warps into the unit's result. */
template <typename Layout, typename KV, int HEADS, int WIDE>
STI_DEVICE void store_part(const step_args &a, step_shared<KV, HEADS, WIDE> &sh,
                           int first, typename Layout::running &r)
{
    const int D = a.h.D;
    store_to_join<Layout>(typename Layout::kind(), sh, r);
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
            o += keep * sh.keys.warp[w].o[n][e];
        }
        float *to = part_at(a, sh, sh.at.unit, first + n);
        to[PART_HEAD + e] = o;
        if (e > 0) continue;
        logit_sum recent = sh.keys.recent[0][n];
#pragma unroll
        for (int w = 1; w < WARPS; w++)
            recent.join(sh.keys.recent[w][n].m, sh.keys.recent[w][n].l);
        *reinterpret_cast<float4 *>(to) = make_float4(top, l, recent.m, recent.l);
    }
}

/* Writes the new token to the ring, by one of the selection heads that share a kv head.
 * Others may read the slot meanwhile, but do not use what they read. */
template <typename KV, int HEADS, int WIDE>
STI_DEVICE void enter(const step_args &a, const step_shared<KV, HEADS, WIDE> &sh,
                      int slot)
{
    if (first_head(a, sh) % a.h.per_kv != 0) return;
    const size_t at = ((size_t)kv_head(a, sh) * 2 * a.h.C + slot) * a.h.D;
#pragma unroll 1
    for (int e = (int)threadIdx.x; e < a.h.D; e += THREADS) {
        static_cast<KV *>(sh.session.win_k)[at + e] = sh.keys.k[0][e];
        static_cast<KV *>(sh.session.win_v)[at + e] = sh.keys.v[0][e];
    }
}

/* The queries at hand against the keys, those that are far or those that are not. b has
 * started the copy of the warp's first batch. */
template <typename Layout, typename KV, int HEADS, int WIDE>
STI_DEVICE void attend_keys(const step_args &a, step_shared<KV, HEADS, WIDE> &sh,
                            int base, bool far, int first, typename Layout::batch &b,
                            typename Layout::running &r)
{
    const sight &see = sh.see;
    const int lane = (int)threadIdx.x % 32, apart = next_batch<Layout>(sh.at);
    const int end = see.end();
#pragma unroll 1
    while (base < end) {
        int next = base + apart;
        while (next < see.list && next < end &&
               !__any_sync(~0u, see.sees(next + lane % Layout::BATCH)))
            next += apart;
        b.dot(a, sh, see, base);
        b.load_keys(a, sh, next, next < end);
        b.find_seen(a, sh, see, base, far);
        b.keep_logits(a, sh, see, base, first, r);
        b.soften(a, sh, see, base, r);
        b.load_values(a, sh, next, next < end);
        base = next;
    }
}

/* Replaces the queries with others, rotated by `position`. */
template <typename Layout, typename KV, int HEADS, int WIDE>
STI_DEVICE void take_queries(const step_args &a, step_shared<KV, HEADS, WIDE> &sh,
                             const float *from, int heads, int position)
{
    token_row<HEADS, Layout::ROW> q;
    q.load(a.h, from, heads);
    __syncthreads();
    q.store(a.h, sh.keys.q, rope_at(position > 0 ? q.frequency(a.h) : 0, position));
    __syncthreads();
    Layout::queries::make(sh);
    __syncthreads();
}

/* STILL eq. 11, SA, over the keys of this unit; all units together have at most
 * 2C + cap of them (eq. 12). False if it has none. */
template <typename Layout, typename KV, int HEADS, int WIDE>
STI_DEVICE bool key_unit(const step_args &a, step_shared<KV, HEADS, WIDE> &sh,
                         const foreseen &token, int index)
{
    enum { ROW = Layout::ROW };
    const sti_cuda_hybrid_params &h = a.h;
    const sti_cuda_hybrid_session &s = sh.session;
    const int base = first_batch<Layout>(index);
    const size_t kv = ((size_t)a.t * h.G + kv_head(a, sh)) * h.D;
    typename Layout::batch b;
    b.load_keys(a, sh, base, true);
    b.load_values(a, sh, base, true);
    moment now;
    now.load(s, sh.at.sel, token.pos, true);
    const float2 rope = rope_at(token.freq, token.pos);
    pdl_wait();
    token_row<HEADS, ROW> q;
    token_row<1, ROW> k, v;
    q.load(h, s.q + query_at(a, sh, 0), min((int)HEADS, h.group));
    k.load(h, s.k + kv, 1);
    v.load(h, s.v + kv, 1);
    q.store(h, sh.keys.q, rope);
    k.store(h, sh.keys.k, rope);
    v.store(h, sh.keys.v, make_float2(1, 0)); /* as it is */
    now = now.of_token(true);
    if (threadIdx.x == 0) {
        const sti_window w = window_of(now.pos, h.C);
        sh.now = now;
        sh.see = sight{w.tokens, w.slot, 2 * h.C, sh.keys_at.list,
                       min(now.listed, sh.list.capacity)};
    }
    __syncthreads();
    if (a.plan.state_units + index >= units_at_work<Layout>(a, sh)) {
        cp_async_wait<0>();
        return false;
    }
    Layout::queries::make(sh);
    if (index == 0) enter(a, sh, sh.see.fresh());
    __syncthreads();
#pragma unroll 1
    for (int first = 0; first < h.group; first += HEADS) {
        const int heads = min((int)HEADS, h.group - first);
        typename Layout::running r;
        r.clear();
        const bool sees_far = h.position_cap > 0 && sh.see.salient > 0;
#pragma unroll 1
        for (int far = 0; far <= (int)sees_far; far++) {
            if (first + far > 0) {
                /* far keys are as before RoPE: they see R(position_cap) q */
                const float *q_from = (far ? s.q_raw : s.q) + query_at(a, sh, first);
                take_queries<Layout>(a, sh, q_from, heads,
                                     far           ? h.position_cap
                                     : h.unrotated ? sh.now.pos
                                                   : 0);
                /* with nothing to see here, the first copies may still be on their
                 * way */
                const bool some = base < sh.see.end();
                b.load_keys(a, sh, base, some);
                b.load_values(a, sh, base, some);
            }
            attend_keys<Layout>(a, sh, base, far != 0, first, b, r);
        }
        store_part<Layout>(a, sh, first, r);
    }
    return true;
}

#endif
