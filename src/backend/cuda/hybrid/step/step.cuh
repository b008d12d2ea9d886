/* step.cuh - what the parts of the step kernel share: its arguments, the shared
 * memory of a block, and which session, heads and unit a block works for. Included by
 * step.cu alone, which says how the kernel works. */
#ifndef STI_BACKEND_CUDA_HYBRID_STEP_STEP_CUH
#define STI_BACKEND_CUDA_HYBRID_STEP_STEP_CUH

#include "backend/cuda/hybrid/device.cuh"
#include "backend/cuda/hybrid/score.h"
#include "backend/cuda/hybrid/step/levels.cuh"
#include "backend/cuda/hybrid/step/step.h"
#include "backend/cuda/hybrid/stored.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/ptx/pdl.cuh"

enum {
    THREADS = 128, /* a small block: what a pair needs is cut finely */
    WARPS = THREADS / 32,
    MAX_D = STI_STEP_MAX_D,
    MAX_P = STI_STEP_MAX_P,
    HALF_D = MAX_D / 2, /* heads of tensor cores are at most as large */
    MAX_HEADS = 4,      /* query heads against keys at once */
    KEYS_AHEAD = 4,
    GROUP = 4,     /* vectors of maps and state that a thread fetches at once */
    PART_HEAD = 4, /* floats of a unit's result before those of the output */
    JOINED = 8192  /* floats of results that are joined at once */
};

/* Groups that a thread is ahead, for heads of up to `wide` numbers, and blocks of a
 * multiprocessor, of the kernel for tensor cores. */
static constexpr int ring_of(int wide)
{
    return wide <= 64 ? 3 : 4;
}
static constexpr int blocks_of(int wide, bool stored)
{
    return wide <= 64 && !stored ? 6 : 5; /* with levels 80 registers are too few */
}

typedef struct step_plan {
    int heads;                 /* at once */
    int head_parts, row_parts; /* state units: (part of the heads, part of the rows) */
    int part_heads, part_rows; /* in each but the last */
    int map_deep, state_deep;  /* rows of a map, of the state, that one vector a thread
                                  covers */
    int state_units;           /* of a selection head; the first ones */
    int key_units;             /* of a selection head, the largest if lists differ */
    int units;                 /* of all selection heads of a session */
    bool uneven; /* lists differ: units in front of those of each selection
                                  head, and all of them */
    uint16_t first[STI_UNEVEN_HEADS_MAX + 1];
    bool early; /* all run at once: units begin while the kernel before still runs */
} step_plan;

typedef struct step_args {
    sti_cuda_hybrid_params h;
    const sti_cuda_hybrid_session *session;
    int t;
    bool settled; /* no kernel in front writes states: they are read before it ends */
    step_plan plan;
    float *part;  /* [n, units, group, part_row]: maximum and sum of the weights,
                     maximum and sum of those that the score looks at, sum of values;
                     of state units: phi.z, three zeros, phi s */
    float *logit; /* [n, H, 2C + 2]: of the window's tokens, oldest first, those that
                     are wanted; then maximum and sum of all of them */
} step_args;

/* Keys, or values, of a selection head by place: the slots of the ring, then those of
 * the list. Where they lie depends on no position, so that they can be fetched before
 * it is known which of them the token sees. Other places, between the two or behind the
 * last, are the first one. */
template <typename KV> struct token_rows {
    const KV *window, *salient; /* where place 0 is, or would be */
    int ring, list, places, D;  /* the list's first place; behind its last */

    __device__ __forceinline__ const KV *at(int i) const
    {
        const int place = i < ring || (i >= list && i < places) ? i : 0;
        return (place < ring ? window : salient) + (int64_t)place * D;
    }
};

/* Which places the token at `pos` sees. */
typedef struct sight {
    int tokens, slot;        /* of the window; ring slot of the oldest */
    int ring, list, salient; /* of token_rows; tokens of the list */

    /* Places from here on are not seen. */
    __device__ __forceinline__ int end() const
    {
        return list + salient;
    }
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
        return i < ring ? age(i) < tokens : i >= list && i - list < salient;
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

/* Where a session is: as memory has it, and what it means for the new token. */
typedef struct moment {
    int pos, listed; /* tokens of the salient list */
    int64_t folded;

    __device__ __forceinline__ void load(const sti_cuda_hybrid_session &s, int sel,
                                         int pos_, bool has_list)
    {
        pos = pos_;
        listed = has_list ? __ldcg(s.sal_count + sel) : 0;
        folded = __ldcg(reinterpret_cast<const long long *>(s.folded + sel));
    }
    __device__ __forceinline__ moment of_token(bool has_window) const
    {
        const int64_t tokens = folded & (int64_t)(ARRIVED - 1);
        /* without a window the new token is one of them */
        return moment{pos, listed, tokens + (has_window ? 0 : 1)};
    }
} moment;

/* Which unit of which selection head a block is. */
typedef struct block_place {
    int sel, unit;
    int key_units; /* of the selection head */
    int first;     /* units of the session in front of them */
} block_place;

/* WIDE: numbers of the largest heads. */
template <typename KV, int HEADS, int WIDE> struct step_shared {
    enum { RING = ring_of(WIDE) };
    sti_cuda_hybrid_session session;
    block_place at;
    moment now;
    sight see;
    bool last;
    salient_list list; /* of the selection head */
    token_rows<KV> keys_at, values_at;
    stored_rows keys_stored, values_stored; /* its list, if quantized (bits > 0), */
    level_runs key_runs, value_runs;        /* and how it is copied */
    float *logits;                          /* of the first head */
    union {
        struct {
            alignas(16) KV k[1][WIDE]; /* the new token, as the window keeps it */
            alignas(16) KV v[1][WIDE];
            /* queries as tensor cores want them: for rows of halves, for levels */
            alignas(16) uint4 operand[2][WIDE <= HALF_D ? WIDE : 1];
            alignas(16) float q[HEADS][WIDE];
            union {
                alignas(256) uint4 staged[2][256]; /* keys, values: rows of a tile */
                float o[HEADS][WIDE + 2];
            } warp[WARPS];
            logit_sum all[WARPS][HEADS], recent[WARPS][HEADS];
        } keys;
        struct {
            float4 ring[RING][GROUP][THREADS]; /* of each thread its own vectors */
            alignas(16) float x[HEADS][WIDE];  /* queries, rotated if features are */
            alignas(16) float phi[HEADS][MAX_P];
            float z[2 * WIDE];
        } state;
        alignas(16) float results[JOINED]; /* of units, on their way to the output */
    };
};

/* ---- The block's place --------------------------------------------------- */

STI_DEVICE int this_session()
{
    return (int)blockIdx.x;
}
/* Grid (session, selection head, unit), or, where lists differ, (session, 1, unit of all
 * selection heads). Blocks begin in this order: all key units, then those of the state,
 * which are shorter, so that little is left to do when no more blocks wait. */
STI_DEVICE block_place block_place_of(const step_args &a)
{
    const step_plan &p = a.plan;
    const int block = (int)blockIdx.z, lane = (int)threadIdx.x % 32;
    if (!p.uneven) {
        const int sel = (int)blockIdx.y, keys = p.key_units;
        return {sel, block < keys ? p.state_units + block : block - keys, keys,
                sel * (p.state_units + keys)};
    }
    const int keys = p.units - a.h.S * p.state_units; /* units of all selection heads */
    int sel, unit;
    if (block < keys) {
        int begun = 0; /* selection heads whose first key unit is not behind this one */
        for (int i = lane; i - lane < a.h.S; i += 32)
            begun += __popc(__ballot_sync(
                ~0u, i < a.h.S && p.first[i] - i * p.state_units <= block));
        sel = begun - 1;
        unit = block - p.first[sel] + begun * p.state_units;
    } else {
        sel = (block - keys) / p.state_units;
        unit = (block - keys) % p.state_units;
    }
    const int first = p.first[sel];
    return {sel, unit, p.first[sel + 1] - first - p.state_units, first};
}

template <typename Shared>
STI_DEVICE int first_head(const step_args &a, const Shared &sh)
{
    return sh.at.sel * a.h.group;
}
/* Where the query of head `head` of the selection head begins. */
template <typename Shared>
STI_DEVICE size_t query_at(const step_args &a, const Shared &sh, int head)
{
    return ((size_t)a.t * a.h.H + first_head(a, sh) + head) * a.h.D;
}
template <typename Shared> STI_DEVICE int kv_head(const step_args &a, const Shared &sh)
{
    return first_head(a, sh) / a.h.per_kv;
}
/* Floats of a result; what is of the output begins at a vector of 16 bytes. */
static __host__ __device__ __forceinline__ int part_row(int D)
{
    return PART_HEAD + (D + 3) / 4 * 4;
}
/* Result of a unit for query head `head` of the selection head. */
template <typename Shared>
STI_DEVICE float *part_at(const step_args &a, const Shared &sh, int unit, int head)
{
    const size_t at = (size_t)this_session() * a.plan.units + sh.at.first + unit;
    return a.part + (at * a.h.group + head) * part_row(a.h.D);
}
template <typename Shared>
STI_DEVICE float *logits_at(const step_args &a, const Shared &sh, int head)
{
    const size_t row = (size_t)this_session() * a.h.H + first_head(a, sh) + head;
    return a.logit + row * (2 * a.h.C + 2);
}
/* Whether the score is that of the weight the new token gives itself. */
STI_DEVICE bool looks_at_itself(const sti_cuda_hybrid_params &h)
{
    return sti_score_from(h.score, STI_FROM_SELF) && h.select > 0;
}

/* Whether the key at place i, which is seen, is kept as it was before RoPE. */
template <typename KV, int HEADS, int WIDE>
STI_DEVICE bool is_far(const step_shared<KV, HEADS, WIDE> &sh, int i)
{
    const int slot = i - sh.keys_at.list;
    return slot >= 0 && sh.session.sal_far[(size_t)(sh.list.first + slot)] != 0;
}

/* ---- Rows of the new token ----------------------------------------------- */

/* Known before the kernel in front has ended: positions and frequencies come from the
 * program by copies, which no kernel overtakes. */
typedef struct foreseen {
    int pos;    /* of the token */
    float freq; /* angle of the thread's pair per position; 0: it is rotated already */
} foreseen;

/* Cosine and sine of position * freq, a product in double. */
STI_DEVICE float2 rope_at(float freq, int position)
{
    double turns = (double)position * (double)freq * 0.15915494309189535; /* / 2 pi */
    turns -= rint(turns);
    float2 t;
    sincospif((float)(2 * turns), &t.y, &t.x);
    pin(t); /* here, not after the wait behind it */
    return t;
}

/* Up to ROWS rows of D numbers on their way to shared memory, rotated when stored; zero
 * up to ROW, and where there is no row. A thread has pair() of every AT_ONCE-th row. */
template <int ROWS, int ROW> struct token_row {
    enum { PAIRS = ROW / 2, AT_ONCE = THREADS / PAIRS };
    enum { EACH = (ROWS + AT_ONCE - 1) / AT_ONCE };
    float2 x[EACH];

    static __device__ __forceinline__ int pair()
    {
        return (int)threadIdx.x % PAIRS;
    }
    static __device__ __forceinline__ int row(int k)
    {
        return (int)threadIdx.x / PAIRS + k * AT_ONCE;
    }
    static __device__ __forceinline__ float frequency(const sti_cuda_hybrid_params &h)
    {
        return pair() < h.D / 2 ? h.inv_freq[pair()] : 0;
    }
    /* Behind the last pair: any two that no other thread has. */
    static __device__ __forceinline__ int2 place(const sti_cuda_hybrid_params &h)
    {
        return pair() < h.D / 2 ? pair_at(h, pair())
                                : make_int2(2 * pair(), 2 * pair() + 1);
    }
    __device__ __forceinline__ void load(const sti_cuda_hybrid_params &h,
                                         const float *from, int rows)
    {
        const int2 at = place(h);
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const float *p = from + (int64_t)row(k) * h.D;
            x[k].x = row(k) < rows && at.x < h.D ? p[at.x] : 0;
            x[k].y = row(k) < rows && at.y < h.D ? p[at.y] : 0;
        }
    }
    template <typename T, int WIDE>
    __device__ __forceinline__ void store(const sti_cuda_hybrid_params &h,
                                          T (*to)[WIDE], float2 rope) const
    {
        const int2 at = place(h);
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            if (row(k) >= ROWS) continue;
            narrow(x[k].x * rope.x - x[k].y * rope.y, &to[row(k)][at.x]);
            narrow(x[k].y * rope.x + x[k].x * rope.y, &to[row(k)][at.y]);
        }
    }
};

#endif
