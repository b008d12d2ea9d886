/* hybrid_step.cuh - what the parts of the step kernel share: its arguments, the shared
 * memory of a block, and which session, heads and unit a block works for. Included by
 * hybrid_step.cu alone, which says how the kernel works. */
#ifndef STI_BACKEND_CUDA_HYBRID_STEP_CUH
#define STI_BACKEND_CUDA_HYBRID_STEP_CUH

#include "backend/cuda/hybrid_device.cuh"
#include "backend/cuda/mma.cuh"

enum {
    THREADS = 128, /* a small block: what a pair needs is cut finely */
    WARPS = THREADS / 32,
    MAX_D = STI_STEP_MAX_D,
    MAX_P = STI_STEP_MAX_P,
    HALF_D = MAX_D / 2, /* heads of tensor cores are at most as large */
    MAX_HEADS = 4,      /* query heads that meet keys at once */
    KEYS_AHEAD = 4,
    GROUP = 4,      /* vectors of maps and state that a thread asks for at once, */
    RING = 4,       /* so many times ahead */
    PART_HEAD = 4,  /* floats of a unit's result before those of the output */
    TILE_BLOCKS = 4 /* of a multiprocessor, of the kernel for tensor cores */
};
#define LOG2_E 1.4426950408889634f

typedef struct step_plan {
    int heads;                 /* at once */
    int head_parts, row_parts; /* state units: (part of the heads, part of the rows) */
    int part_heads, part_rows; /* in each but the last */
    int map_deep,
        state_deep;  /* rows of a map, of the state, that a vector a thread is */
    int state_units; /* the first ones: they take longest */
    int key_units;
    bool early; /* all run at once: units begin while the kernel before still runs */
} step_plan;

typedef struct step_args {
    sti_cuda_shape h;
    const sti_cuda_session *session;
    int t;
    step_plan plan;
    float *part;  /* [n, S, units, group, part_row]: maximum and sum of the weights,
                     maximum and sum of those that the score looks at, sum of values;
                     of state units: phi.z, three zeros, phi s */
    float *logit; /* [n, H, 2C + 2]: of the window's tokens, oldest first, those that
                     are wanted; then maximum and sum of all of them */
} step_args;

/* Keys, or values, of a selection head by place: the slots of the ring, then those of
 * the list. Where they lie depends on no position, so that they can be asked for before
 * it is known which of them the token sees. Places behind the last are the first one.
 */
template <typename KV> struct token_rows {
    const KV *window, *salient; /* where place 0 is, or would be */
    int ring, places, D;

    __device__ __forceinline__ const KV *at(int i) const
    {
        const int place = i < places ? i : 0;
        return (place < ring ? window : salient) + (int64_t)place * D;
    }
};

/* Which places the token at `pos` sees. */
typedef struct sight {
    int tokens, slot; /* of the window; ring slot of the oldest */
    int ring, salient;

    /* How many of the window's tokens are older. */
    __device__ __forceinline__ int age(int i) const
    {
        return i < slot ? i - slot + ring : i - slot;
    }
    __device__ __forceinline__ bool in_window(int i) const
    {
        return i < ring && age(i) < tokens;
    }
    __device__ __forceinline__ bool sees(int i) const
    {
        return i < ring ? age(i) < tokens : i - ring < salient;
    }
    /* The slot of the new token: the ring does not have it yet. */
    __device__ __forceinline__ int fresh() const
    {
        const int i = slot + tokens - 1;
        return i < ring ? i : i - ring;
    }
    /* One of the n tokens before the new one. */
    __device__ __forceinline__ bool recent(int i, int n) const
    {
        return i < ring && age(i) < tokens - 1 && age(i) >= tokens - 1 - n;
    }
} sight;

/* Maximum m of logits, and the sum of 2^(logit - m). */
typedef struct logit_sum {
    float m, l;

    __device__ __forceinline__ void clear()
    {
        m = -INFINITY;
        l = 0;
    }
    __device__ __forceinline__ void join(float other_m, float other_l)
    {
        const float top = fmaxf(m, other_m), base = top > -INFINITY ? top : 0;
        l = l * exp2_fast(m - base) + other_l * exp2_fast(other_m - base);
        m = top;
    }
    /* A logit of -infinity is none. */
    template <int N> __device__ __forceinline__ void add(const float (&x)[N])
    {
        float top = m;
#pragma unroll
        for (int i = 0; i < N; i++) top = fmaxf(top, x[i]);
        const float base = top > -INFINITY ? top : 0;
        l *= exp2_fast(m - base);
#pragma unroll
        for (int i = 0; i < N; i++) l += exp2_fast(x[i] - base);
        m = top;
    }
    /* With what the lane `apart` lanes away has. */
    __device__ __forceinline__ void join_lane(int apart)
    {
        join(__shfl_xor_sync(~0u, m, apart), __shfl_xor_sync(~0u, l, apart));
    }
} logit_sum;

/* Units that have arrived are counted in the top bits of folded[sel], whose count of
 * tokens is far from them: a counter that is zero before every launch and needs no
 * memory of its own. The last unit to arrive puts it back. */
#define ARRIVED ((unsigned long long)1 << 48)

/* Where a session is: as memory has it, and what it means for token t. */
typedef struct moment {
    int pos;
    int64_t folded;

    __device__ __forceinline__ void load(const sti_cuda_session &s, int sel)
    {
        pos = *s.pos;
        folded = __ldcg(reinterpret_cast<const long long *>(s.folded + sel));
    }
    __device__ __forceinline__ moment of_token(int t, bool has_window) const
    {
        const int64_t tokens = folded & (int64_t)(ARRIVED - 1);
        /* without a window the new token is one of them */
        return moment{pos + t, tokens + (has_window ? 0 : 1)};
    }
} moment;

template <typename KV, int HEADS> struct step_shared {
    sti_cuda_session session;
    moment now;
    sight see;
    bool last;
    token_rows<KV> keys_at, values_at;
    float *logits;                     /* of the first head */
    alignas(16) float x[HEADS][MAX_D]; /* q as far keys see it, or before RoPE */
    union {
        struct {
            alignas(16) KV k[MAX_D]; /* the new token, as the window keeps it */
            alignas(16) KV v[MAX_D];
            alignas(16) uint4 operand[HALF_D]; /* queries as tensor cores want them */
            alignas(16) float q[HEADS][MAX_D];
            float o[WARPS][HEADS][MAX_D + 2];
            logit_sum all[WARPS][HEADS], recent[WARPS][HEADS];
        } keys;
        struct {
            float4 ring[RING][GROUP][THREADS]; /* of each thread its own vectors */
            alignas(16) float phi[HEADS][MAX_P];
            float z[MAX_P];
        } state;
        float score[1024]; /* of the query heads, by the unit that arrives last */
    };
};

/* ---- The block's place ---------------------------------------------------------- */

STI_DEVICE int units_of(const step_plan &p)
{
    return p.state_units + p.key_units;
}
STI_DEVICE int selector()
{
    return (int)blockIdx.y;
}
STI_DEVICE int this_session()
{
    return (int)blockIdx.z;
}
STI_DEVICE int this_unit()
{
    return (int)blockIdx.x;
}
STI_DEVICE int first_head(const step_args &a)
{
    return selector() * a.h.group;
}
/* Where the query of head `head` of the selection head begins. */
STI_DEVICE size_t query_at(const step_args &a, int head)
{
    return ((size_t)a.t * a.h.H + first_head(a) + head) * a.h.D;
}
STI_DEVICE int kv_head(const step_args &a)
{
    return first_head(a) / a.h.per_kv;
}
/* Floats of a result; what is of the output begins at a vector of 16 bytes. */
static __host__ __device__ __forceinline__ int part_row(int D)
{
    return PART_HEAD + (D + 3) / 4 * 4;
}
/* Result of a unit for query head `head` of the selection head. */
STI_DEVICE float *part_at(const step_args &a, int unit, int head)
{
    const size_t pair = (size_t)this_session() * a.h.S + selector();
    return a.part +
           ((pair * units_of(a.plan) + unit) * a.h.group + head) * part_row(a.h.D);
}
STI_DEVICE float *logits_at(const step_args &a, int head)
{
    return a.logit +
           ((size_t)this_session() * a.h.H + first_head(a) + head) * (2 * a.h.C + 2);
}
/* Whether the score is that of the weight the new token gives itself. */
STI_DEVICE bool looks_at_itself(const sti_cuda_shape &h)
{
    return h.score == STI_SCORE_S3 && h.select > 0;
}

/* Whether the key at place i, which is seen, is kept as it was before RoPE. */
template <typename KV, int HEADS>
STI_DEVICE bool is_far(const step_shared<KV, HEADS> &sh, int i)
{
    const int slot = i - sh.keys_at.ring;
    return slot >= 0 &&
           sh.session.sal_far[(size_t)selector() * sh.session.room + slot] != 0;
}

/* `heads` rows of D numbers, zero up to ROW and in rows that are not there. */
template <int HEADS, int ROW>
STI_DEVICE void load_rows(float (*to)[MAX_D], const float *from, int heads, int D)
{
    enum { EACH = (HEADS * ROW + THREADS - 1) / THREADS };
    float own[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int i = k * THREADS + (int)threadIdx.x, head = i / ROW, e = i % ROW;
        own[k] = head < heads && e < D ? from[head * D + e] : 0;
    }
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        const int i = k * THREADS + (int)threadIdx.x;
        if (i < HEADS * ROW) to[i / ROW][i % ROW] = own[k];
    }
}

#endif
