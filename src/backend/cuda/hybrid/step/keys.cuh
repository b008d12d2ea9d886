/* keys.cuh - key units (unit.cuh) where tensor cores do not fit: keys in float, or in
 * rows of another size.
 *
 * Every lane, or group of lanes that share a key, has a running softmax of its own:
 * nothing waits until the end. */
#ifndef STI_BACKEND_CUDA_HYBRID_STEP_KEYS_CUH
#define STI_BACKEND_CUDA_HYBRID_STEP_KEYS_CUH

#include "backend/cuda/hybrid/step/step.cuh"

/* Running softmax of HEADS queries over the keys a lane has seen, and of the values the
 * part that lies in its EACH elements. */
template <int HEADS, int EACH> struct lane_softmax {
    float m[HEADS], l[HEADS], o[HEADS][EACH];
    logit_sum recent[HEADS]; /* the first lane of a key has it */

    __device__ __forceinline__ void clear()
    {
#pragma unroll
        for (int n = 0; n < HEADS; n++) {
            m[n] = -INFINITY;
            l[n] = 0;
            recent[n].clear();
#pragma unroll
            for (int i = 0; i < EACH; i++) o[n][i] = 0;
        }
    }
    /* Everything is relative to 2^top from now on. */
    __device__ __forceinline__ float raise(int n, float top)
    {
        const float base = top > -INFINITY ? top : 0, keep = exp2_fast(m[n] - base);
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
            recent[n].join_lane(apart);
#pragma unroll
            for (int i = 0; i < EACH; i++)
                o[n][i] += __shfl_xor_sync(~0u, o[n][i], apart);
        }
    }
};

/* Queries are used as they lie in shared memory. */
struct lane_queries {
    template <typename Shared> static __device__ __forceinline__ void make(Shared &)
    {
    }
};

template <typename Layout, typename KV>
STI_DEVICE void load_row(typename Layout::pack *to, const KV *row, int D)
{
    const int lane = (int)threadIdx.x % Layout::LANES;
#pragma unroll
    for (int c = 0; c < Layout::CHUNKS; c++) {
        const int e = (c * Layout::LANES + lane) * Layout::VEC;
        if (e < D)
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
            reload_memory(); /* queries are not kept in registers */
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
STI_DEVICE void soften_keys(lane_softmax<HEADS, Layout::EACH> &r, float (*logit)[HEADS],
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
            logit[u][n] = exp2_fast(logit[u][n] - base);
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

/* BATCH places; lanes of key `sub` of the warp have places base + u KEYS + sub. */
template <typename Layout, typename KV, int HEADS> struct lane_batch {
    typedef step_shared<KV, HEADS, MAX_D> shared;
    typename Layout::pack k[KEYS_AHEAD][Layout::CHUNKS], v[KEYS_AHEAD][Layout::CHUNKS];
    float logit[KEYS_AHEAD][HEADS];
    bool seen[KEYS_AHEAD];

    static __device__ __forceinline__ int place(int base, int u)
    {
        return base + u * Layout::KEYS + (int)threadIdx.x % 32 / Layout::LANES;
    }
    /* Those from place `base` on, if `there`. */
    __device__ __forceinline__ void load_keys(const step_args &, const shared &sh,
                                              int base, bool there)
    {
#pragma unroll
        for (int u = 0; there && u < KEYS_AHEAD; u++)
            load_row<Layout>(k[u], sh.keys_at.at(place(base, u)), sh.keys_at.D);
    }
    __device__ __forceinline__ void load_values(const step_args &, const shared &sh,
                                                int base, bool there)
    {
#pragma unroll
        for (int u = 0; there && u < KEYS_AHEAD; u++)
            load_row<Layout>(v[u], sh.values_at.at(place(base, u)), sh.values_at.D);
    }
    __device__ __forceinline__ void find_seen(const step_args &a, const shared &sh,
                                              const sight &see, int base, bool far)
    {
#pragma unroll
        for (int u = 0; u < KEYS_AHEAD; u++) {
            const int i = place(base, u);
            seen[u] = see.sees(i);
            if (a.h.position_cap > 0 && seen[u]) seen[u] = far == is_far(sh, i);
        }
    }
    /* The new token's row is not in the ring yet. */
    __device__ __forceinline__ void dot(const step_args &, const shared &sh,
                                        const sight &see, int base)
    {
#pragma unroll
        for (int u = 0; u < KEYS_AHEAD; u++)
            if (place(base, u) == see.fresh())
                load_row<Layout>(k[u], sh.keys.k[0], sh.keys_at.D);
        dot_keys<Layout, HEADS>(k, sh.keys.q, logit);
    }
    /* Scales logits, and keeps those that the score wants. */
    __device__ __forceinline__ void keep_logits(const step_args &a, const shared &sh,
                                                const sight &see, int base, int first,
                                                typename Layout::running &r)
    {
        const float scale = a.h.scale * log2_e;
        const bool all = sti_score_from(a.h.score, STI_FROM_QUERIES);
        const bool first_lane = threadIdx.x % Layout::LANES == 0;
#pragma unroll
        for (int n = 0; n < HEADS; n++) {
            float recent[KEYS_AHEAD];
#pragma unroll
            for (int u = 0; u < KEYS_AHEAD; u++) {
                const int i = place(base, u);
                float &x = logit[u][n];
                x = seen[u] ? x * scale : -INFINITY;
                recent[u] =
                    first_lane && seen[u] && see.recent(i, a.h.C - 1) ? x : -INFINITY;
                if (first_lane && first + n < a.h.group && seen[u] &&
                    (i == see.fresh() || (all && i < see.ring)))
                    sh.logits[(first + n) * (2 * a.h.C + 2) + see.age(i)] = x;
            }
            r.recent[n].add(recent);
        }
    }
    __device__ __forceinline__ void soften(const step_args &, const shared &sh,
                                           const sight &see, int base,
                                           typename Layout::running &r)
    {
#pragma unroll
        for (int u = 0; u < KEYS_AHEAD; u++)
            if (place(base, u) == see.fresh())
                load_row<Layout>(v[u], sh.keys.v[0], sh.values_at.D);
        soften_keys<Layout, HEADS>(r, logit, v);
    }
};

/* A key is read by LANES lanes, CHUNKS times VEC elements each; a warp reads 32 / LANES
 * keys at once, KEYS_AHEAD times before it uses the first. */
typedef struct lane_keys {
} lane_keys;
template <typename KV, int VEC_, int LANES_, int CHUNKS_, int HEADS> struct key_layout {
    typedef lane_keys kind;
    enum { STORED = false };
    enum { VEC = VEC_, LANES = LANES_, CHUNKS = CHUNKS_ };
    enum { EACH = VEC * CHUNKS, ROW = LANES * EACH, KEYS = 32 / LANES };
    enum { BATCH = KEYS_AHEAD * KEYS }; /* places */
    enum { OUTPUT = VEC < 4 ? 1 : 4 };  /* numbers that a thread joins */
    typedef packed<KV, VEC_> pack;
    typedef lane_softmax<HEADS, EACH> running;
    typedef lane_queries queries;
    typedef lane_batch<key_layout, KV, HEADS> batch;
};

/* What a warp has, to shared memory. */
template <typename Layout, typename KV, int HEADS, int WIDE>
STI_DEVICE void store_to_join(lane_keys, step_shared<KV, HEADS, WIDE> &sh,
                              lane_softmax<HEADS, Layout::EACH> &r)
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int apart = Layout::LANES; apart < 32; apart <<= 1) r.join(apart);
    if (lane < Layout::LANES)
#pragma unroll
        for (int n = 0; n < HEADS; n++)
#pragma unroll
            for (int c = 0; c < Layout::CHUNKS; c++)
#pragma unroll
                for (int i = 0; i < Layout::VEC; i++)
                    sh.keys.warp[warp]
                        .o[n][(c * Layout::LANES + lane) * Layout::VEC + i] =
                        r.o[n][c * Layout::VEC + i];
    if (lane == 0)
#pragma unroll
        for (int n = 0; n < HEADS; n++) {
            sh.keys.all[warp][n] = logit_sum{r.m[n], r.l[n]};
            sh.keys.recent[warp][n] = r.recent[n];
        }
}

#endif
