/* hybrid_step.cuh - what the parts of the step kernel share: its arguments, the shared
 * memory of a block, and which session, heads and unit a block works for. Included by
 * hybrid_step.cu alone, which says how the kernel works. */
#ifndef STI_BACKEND_CUDA_HYBRID_STEP_CUH
#define STI_BACKEND_CUDA_HYBRID_STEP_CUH

#include "backend/cuda/hybrid_device.cuh"

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    MAX_D = STI_STEP_MAX_D,
    MAX_P = STI_STEP_MAX_P,
    HALF_D = MAX_D / 2, /* heads of tensor cores are at most as large */
    MAX_HEADS = 4,      /* query heads that meet keys at once */
    KEYS_AHEAD = 4,
    STATE_AHEAD = 16,
    MAP_AHEAD = 16,
    PARTS = 4 * THREADS, /* floats of a vector's partial sums: 4 a thread */
    TILE_BLOCKS = 2      /* of a multiprocessor, of the kernel for tensor cores */
};
#define LOG2_E 1.4426950408889634f

typedef struct step_plan {
    int heads;                 /* at once */
    int head_parts, row_parts; /* state units: (part of the heads, part of the rows) */
    int state_units;           /* the first ones: they take longest */
    int key_units;
} step_plan;

typedef struct step_args {
    sti_cuda_shape h;
    const sti_cuda_session *session;
    int t;
    step_plan plan;
    float *part;  /* [n, S, units, group, part_row]: sum of values, its maximum, its
                     sum; of state units: phi s, phi.z */
    float *logit; /* [n, H, 2C + 2]: those of the window, then its maximum and sum */
} step_args;

/* Keys, or values, of a selection head: the window's tokens, the new one last, then the
 * salient ones. */
template <typename KV> struct token_rows {
    const KV *window, *fresh, *salient;
    int tokens, slot, ring, D;

    __device__ __forceinline__ const KV *at(int i) const
    {
        if (i >= tokens) return salient + (size_t)(i - tokens) * D;
        if (i == tokens - 1) return fresh;
        const int place = slot + i < ring ? slot + i : slot + i - ring;
        return window + (size_t)place * D;
    }
};

template <typename KV, int HEADS> struct step_shared {
    sti_cuda_session session;
    int pos, salient;
    int64_t folded;
    bool last;
    float sum[WARPS];
    token_rows<KV> keys_at, values_at;
    float *logits;           /* of the first head */
    int lo, hi;              /* the run of keys */
    alignas(16) KV k[MAX_D]; /* the new token, as the window keeps it */
    alignas(16) KV v[MAX_D];
    alignas(16) uint4 operand[HALF_D]; /* queries as tensor cores want them */
    alignas(16) float q[HEADS][MAX_D];
    alignas(16) float x[HEADS][MAX_D]; /* q as far keys see it, or before RoPE */
    union {
        struct {
            float o[WARPS][HEADS][MAX_D + 2], m[WARPS][HEADS], l[WARPS][HEADS];
        } keys;
        struct {
            alignas(16) float part[HEADS][PARTS];
            float phi[HEADS][MAX_P], phi_k[1][MAX_P];
        } state;
    };
};

/* ---- The block's place ---------------------------------------------------------- */

STI_DEVICE int units_of(const step_plan &p)
{
    return p.state_units + p.key_units;
}
STI_DEVICE int selector()
{
    return (int)blockIdx.x;
}
STI_DEVICE int this_unit()
{
    return (int)blockIdx.z;
}
STI_DEVICE int first_head(const step_args &a)
{
    return selector() * a.h.group;
}
/* Query heads of a part. */
STI_DEVICE int part_heads(const step_args &a)
{
    return (a.h.group + a.plan.head_parts - 1) / a.plan.head_parts;
}
STI_DEVICE int kv_head(const step_args &a)
{
    return first_head(a) / a.h.per_kv;
}
/* Floats of a result, in vectors of 16 bytes. */
static __host__ __device__ __forceinline__ int part_row(int D)
{
    return (D + 2 + 3) / 4 * 4;
}
/* Result of a unit for query head `head` of the selection head. */
STI_DEVICE float *part_at(const step_args &a, int unit, int head)
{
    const size_t pair = (size_t)blockIdx.y * a.h.S + selector();
    return a.part +
           ((pair * units_of(a.plan) + unit) * a.h.group + head) * part_row(a.h.D);
}
STI_DEVICE float *logits_at(const step_args &a, int head)
{
    return a.logit +
           ((size_t)blockIdx.y * a.h.H + first_head(a) + head) * (2 * a.h.C + 2);
}
/* Whether the window's logits are wanted after the keys have been met. */
STI_DEVICE bool keeps_logits(const sti_cuda_shape &h)
{
    return h.score == STI_SCORE_RECEIVED || (h.score == STI_SCORE_S3 && h.select > 0);
}

/* Whether key i is kept as it was before RoPE. */
template <typename KV, int HEADS>
STI_DEVICE bool is_far(const step_shared<KV, HEADS> &sh, int i)
{
    const int slot = i - sh.keys_at.tokens;
    return slot >= 0 &&
           sh.session.sal_far[(size_t)selector() * sh.session.room + slot] != 0;
}

/* `heads` rows of D numbers, zero up to ROW and in rows that are not there. */
template <int HEADS, int ROW>
STI_DEVICE void load_rows(float (*to)[MAX_D], const float *from, int heads, int D)
{
    for (int i = (int)threadIdx.x; i < HEADS * ROW; i += THREADS) {
        const int head = i / ROW, e = i % ROW;
        to[head][e] = head < heads && e < D ? from[head * D + e] : 0;
    }
}

#endif
