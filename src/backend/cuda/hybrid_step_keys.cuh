/* hybrid_step_keys.cuh - a key unit: the queries of a selection head meet a run of the
 * window's and the salient keys.
 *
 * Warps take keys in turn; every lane, or group of lanes that share a key, has a
 * running softmax of its own, so that nothing waits for anything until the end of the
 * run. */
#ifndef STI_BACKEND_CUDA_HYBRID_STEP_KEYS_CUH
#define STI_BACKEND_CUDA_HYBRID_STEP_KEYS_CUH

#include "backend/cuda/hybrid_step.cuh"

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

/* Running softmax of HEADS queries over the keys a lane has seen, and of the values the
 * part that lies in its EACH elements. */
template <int HEADS, int EACH> struct running {
    float m[HEADS], l[HEADS], o[HEADS][EACH];

    __device__ __forceinline__ void clear()
    {
#pragma unroll
        for (int n = 0; n < HEADS; n++) {
            m[n] = -INFINITY;
            l[n] = 0;
#pragma unroll
            for (int i = 0; i < EACH; i++) o[n][i] = 0;
        }
    }
    /* Everything is relative to 2^top from now on. */
    __device__ __forceinline__ float raise(int n, float top)
    {
        const float base = top > -INFINITY ? top : 0, keep = exp2f(m[n] - base);
        m[n] = top;
        l[n] *= keep;
#pragma unroll
        for (int i = 0; i < EACH; i++) o[n][i] *= keep;
        return base;
    }
    /* Joins what the lane `apart` lanes away has. */
    __device__ __forceinline__ void join(int apart)
    {
#pragma unroll
        for (int n = 0; n < HEADS; n++) {
            const float other = __shfl_xor_sync(~0u, m[n], apart);
            raise(n, fmaxf(m[n], other));
            l[n] += __shfl_xor_sync(~0u, l[n], apart);
#pragma unroll
            for (int i = 0; i < EACH; i++)
                o[n][i] += __shfl_xor_sync(~0u, o[n][i], apart);
        }
    }
};

/* A key is read by LANES lanes, CHUNKS times VEC elements each; a warp reads 32 / LANES
 * keys at once, KEYS_AHEAD times before it uses the first. */
template <typename KV, int VEC_, int LANES_, int CHUNKS_> struct key_layout {
    enum { VEC = VEC_, LANES = LANES_, CHUNKS = CHUNKS_ };
    enum { EACH = VEC * CHUNKS, ROW = LANES * EACH, KEYS = 32 / LANES };
    typedef packed<KV, VEC_> pack;
};

/* Queries lie in shared memory as they are. */
template <typename KV, int VEC, int LANES, int CHUNKS, int HEADS>
STI_DEVICE void ready_queries(key_layout<KV, VEC, LANES, CHUNKS>,
                              step_shared<KV, HEADS> &, const float (*)[MAX_D])
{
}

template <typename Layout, typename KV>
STI_DEVICE void load_row(typename Layout::pack *to, const KV *row, bool wanted, int D)
{
    const int lane = (int)threadIdx.x % Layout::LANES;
#pragma unroll
    for (int c = 0; c < Layout::CHUNKS; c++) {
        const int e = (c * Layout::LANES + lane) * Layout::VEC;
        if (wanted && e < D)
            to[c].load(row + e);
        else
            to[c].zero();
    }
}

/* Row in shared memory, the elements this lane has of a key. */
template <typename Layout> STI_DEVICE void own_elements(const float *row, float *to)
{
    const int lane = (int)threadIdx.x % Layout::LANES;
#pragma unroll
    for (int c = 0; c < Layout::CHUNKS; c++)
#pragma unroll
        for (int i = 0; i < Layout::VEC; i++)
            to[c * Layout::VEC + i] = row[(c * Layout::LANES + lane) * Layout::VEC + i];
}

/* logit[u][n] = q_n . k_u for the keys of a lane; all lanes of a key have it. Queries
 * are read again for every two keys: there are not registers enough to keep them. */
template <typename Layout, int HEADS>
STI_DEVICE void dot_keys(const typename Layout::pack (*k)[Layout::CHUNKS],
                         const float (*q)[MAX_D], float (*logit)[HEADS])
{
    static_assert(KEYS_AHEAD % 2 == 0, "keys are taken in pairs");
#pragma unroll
    for (int u = 0; u < KEYS_AHEAD; u += 2) {
        float one[Layout::EACH], two[Layout::EACH];
#pragma unroll
        for (int c = 0; c < Layout::CHUNKS; c++) {
            k[u][c].widen(one + c * Layout::VEC);
            k[u + 1][c].widen(two + c * Layout::VEC);
        }
#pragma unroll
        for (int n = 0; n < HEADS; n++) {
            float x[Layout::EACH], sum_one = 0, sum_two = 0;
            asm volatile("" ::: "memory"); /* keeps the compiler from keeping them */
            own_elements<Layout>(q[n], x);
#pragma unroll
            for (int i = 0; i < Layout::EACH; i++) {
                sum_one = fmaf(x[i], one[i], sum_one);
                sum_two = fmaf(x[i], two[i], sum_two);
            }
            logit[u][n] = sum_one;
            logit[u + 1][n] = sum_two;
        }
    }
#pragma unroll
    for (int u = 0; u < KEYS_AHEAD; u++)
#pragma unroll
        for (int n = 0; n < HEADS; n++)
#pragma unroll
            for (int i = 1; i < Layout::LANES; i <<= 1)
                logit[u][n] += __shfl_xor_sync(~0u, logit[u][n], i);
}

/* Takes in the keys of a lane; a logit of -infinity is none. */
template <typename Layout, int HEADS>
STI_DEVICE void soften(running<HEADS, Layout::EACH> &r, float (*logit)[HEADS],
                       const typename Layout::pack (*v)[Layout::CHUNKS])
{
#pragma unroll
    for (int n = 0; n < HEADS; n++) {
        float top = r.m[n];
#pragma unroll
        for (int u = 0; u < KEYS_AHEAD; u++) top = fmaxf(top, logit[u][n]);
        const float base = r.raise(n, top);
#pragma unroll
        for (int u = 0; u < KEYS_AHEAD; u++) {
            logit[u][n] = exp2f(logit[u][n] - base);
            r.l[n] += logit[u][n];
        }
    }
#pragma unroll
    for (int u = 0; u < KEYS_AHEAD; u++) {
        float value[Layout::EACH];
#pragma unroll
        for (int c = 0; c < Layout::CHUNKS; c++) v[u][c].widen(value + c * Layout::VEC);
#pragma unroll
        for (int n = 0; n < HEADS; n++)
#pragma unroll
            for (int i = 0; i < Layout::EACH; i++)
                r.o[n][i] = fmaf(logit[u][n], value[i], r.o[n][i]);
    }
}

/* Whether key i is kept as it was before RoPE. */
template <typename KV, int HEADS>
STI_DEVICE bool is_far(const step_shared<KV, HEADS> &sh, int i)
{
    const int slot = i - sh.keys_at.tokens;
    return slot >= 0 &&
           sh.session.sal_far[(size_t)selector() * sh.session.room + slot] != 0;
}

/* Queries q meet keys [lo, hi), those that are far or those that are not. */
template <typename Layout, typename KV, int HEADS>
STI_DEVICE void meet_keys(const step_args &a, const step_shared<KV, HEADS> &sh, int lo,
                          int hi, bool far, const float (*q)[MAX_D], int first,
                          running<HEADS, Layout::EACH> &r)
{
    typedef typename Layout::pack pack;
    const int warp = (int)threadIdx.x / 32, sub = (int)threadIdx.x % 32 / Layout::LANES;
    const bool first_lane = threadIdx.x % Layout::LANES == 0;
    const bool keeps = keeps_logits(a.h);
    const float scale = a.h.scale * LOG2_E;
#pragma unroll 1
    for (int base = lo; base < hi; base += KEYS_AHEAD * WARPS * Layout::KEYS) {
        pack k[KEYS_AHEAD][Layout::CHUNKS], v[KEYS_AHEAD][Layout::CHUNKS];
        bool seen[KEYS_AHEAD];
#pragma unroll
        for (int u = 0; u < KEYS_AHEAD; u++) {
            const int i = base + (u * WARPS + warp) * Layout::KEYS + sub;
            seen[u] = i < hi;
            if (a.h.position_cap > 0 && seen[u]) seen[u] = far == is_far(sh, i);
            const int row = seen[u] ? i : lo;
            load_row<Layout>(k[u], sh.keys_at.at(row), seen[u], a.h.D);
            load_row<Layout>(v[u], sh.values_at.at(row), seen[u], a.h.D);
        }
        float logit[KEYS_AHEAD][HEADS];
        dot_keys<Layout, HEADS>(k, q, logit);
#pragma unroll
        for (int u = 0; u < KEYS_AHEAD; u++) {
            const int i = base + (u * WARPS + warp) * Layout::KEYS + sub;
#pragma unroll
            for (int n = 0; n < HEADS; n++) {
                logit[u][n] = seen[u] ? logit[u][n] * scale : -INFINITY;
                if (keeps && first_lane && seen[u] && i < sh.keys_at.tokens &&
                    first + n < a.h.group)
                    logits_at(a, first + n)[i] = logit[u][n];
            }
        }
        soften<Layout, HEADS>(r, logit, v);
    }
}

/* Joins the lanes of a warp, then the warps, into the unit's result. */
template <typename Layout, typename KV, int HEADS>
STI_DEVICE void store_part(const step_args &a, step_shared<KV, HEADS> &sh, int first,
                           running<HEADS, Layout::EACH> &r)
{
    const int tid = (int)threadIdx.x, warp = tid / 32, lane = tid % 32, D = a.h.D;
#pragma unroll
    for (int apart = Layout::LANES; apart < 32; apart <<= 1) r.join(apart);
    if (lane < Layout::LANES)
#pragma unroll
        for (int n = 0; n < HEADS; n++)
#pragma unroll
            for (int c = 0; c < Layout::CHUNKS; c++)
#pragma unroll
                for (int i = 0; i < Layout::VEC; i++)
                    sh.keys.o[warp][n][(c * Layout::LANES + lane) * Layout::VEC + i] =
                        r.o[n][c * Layout::VEC + i];
    if (lane == 0)
#pragma unroll
        for (int n = 0; n < HEADS; n++) {
            sh.keys.m[warp][n] = r.m[n];
            sh.keys.l[warp][n] = r.l[n];
        }
    __syncthreads();
    for (int i = tid; i < HEADS * Layout::ROW; i += THREADS) {
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

/* Run number `index` of the window's and the salient keys. */
template <typename Layout, typename KV, int HEADS>
STI_DEVICE void key_unit(const step_args &a, step_shared<KV, HEADS> &sh, int index)
{
    const sti_cuda_session &s = sh.session;
    if (threadIdx.x == 0) {
        sh.keys_at = rows_of(a, sh, s.win_k, s.sal_k, sh.k);
        sh.values_at = rows_of(a, sh, s.win_v, s.sal_v, sh.v);
    }
    const int window = window_of(sh.pos, a.h.C).tokens, keys = window + sh.salient;
    const int each = (keys + a.plan.key_units - 1) / a.plan.key_units;
    const int lo = min(index * each, keys), hi = min(lo + each, keys);
    const bool meets_far = a.h.position_cap > 0 && hi > window;
    if (index == 0) enter(a, sh);
#pragma unroll 1
    for (int first = 0; first < a.h.group; first += HEADS) {
        const size_t at = ((size_t)a.t * a.h.H + first_head(a) + first) * a.h.D;
        const int heads = min(HEADS, a.h.group - first);
        if (first > 0) __syncthreads();
        if (first > 0) load_rows<HEADS, Layout::ROW>(sh.q, s.q + at, heads, a.h.D);
        if (meets_far) {
            load_rows<HEADS, Layout::ROW>(sh.x, s.q_raw + at, heads, a.h.D);
            __syncthreads();
            turn_queries(a, sh);
        }
        __syncthreads();
        running<HEADS, Layout::EACH> r;
        r.clear();
#pragma unroll 1
        for (int far = 0; far <= (int)meets_far; far++)
            meet_keys<Layout>(a, sh, lo, hi, far != 0, far ? sh.x : sh.q, first, r);
        store_part<Layout>(a, sh, first, r);
    }
}

#endif
