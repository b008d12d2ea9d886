/* chunk.h - what the kernels of the chunk-parallel hybrid operator (STILL Alg. 1)
 * share.
 *
 * A piece is T tokens of a session, from position pos on; it may begin and end inside a
 * chunk. Pieces of many sessions are a group and share launches: a kernel's units of
 * work (tiles, chunks, retirements) are counted over all of them. Kernels run one after
 * the other on the device's stream:
 *
 *   pack      keys and values, old and new, as halves in one buffer    pack.cu
 *   score     the score of every new token (eq. 2 to 5)                score.cu
 *             one made of weights that later tokens give it            received.cu
 *   select    the salient list of each chunk, the rows folded (eq. 8)  select.cu
 *   state     what each chunk folds, then running sums (eq. 9)         state.cu
 *   output    queries against window, list and state (eq. 7, 10, 11)   output.cu
 *             the same on Hopper                                       output_hopper.cu
 *   tail      window and list of the sessions after the pieces         pack.cu
 *
 * Methods without a window have kernels of their own: no_window.cu.
 *
 * A selection head (S of them: kv heads, or with per_head query heads, which then each
 * have a copy of their keys) has rows of keys, values and scores: first the salient
 * list as the session brought it ([0, capacity)), then tokens in order, position `base`
 * at row `capacity`. base begins a chunk, the oldest that the piece needs: the chunk
 * before that of token pos - 1, and the session's ring holds all tokens from there on.
 * Where salient tokens are quantized, each token has a second row, `stored` rows behind
 * the first: what comes out of the cache once it has joined the list.
 *
 * A chunk c >= 2 that begins in the piece retires chunk c - 2. Retirement k happens at
 * the start of chunk first_retire + k. How many tokens are salient or folded after it
 * follows from the counts that the session brought, which only the device knows.
 *
 * Where keys are wanted as they were before RoPE (sti_hybrid_needs_raw) they are rows
 * of a second buffer, k_raw, made from the others. With a position cap the list that
 * the queries of a chunk see is ordered: near tokens first, then those that are seen at
 * the capped distance; which is which follows from position and chunk. A quantized key
 * that becomes far has its stored value rotated back and is rounded once more: k_far
 * has what is stored then, k and k_raw what is before. */
#ifndef STI_BACKEND_CUDA_HYBRID_CHUNK_CHUNK_H
#define STI_BACKEND_CUDA_HYBRID_CHUNK_CHUNK_H

#include "backend/cuda/hybrid/params.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    STI_CHUNK_PIECE = 8192,  /* tokens taken at once, at most; bounds the scratch */
    STI_CHUNK_SESSIONS = 64, /* of a group, at most */
    STI_CHUNK_SCRATCH = 64 << 20, /* bytes of a group of more than one, at most */
    STI_CHUNK_FOLDED = 32,        /* tokens of a chunk where there is no window */
    STI_CHUNK_MAX_C = 512,
    STI_CHUNK_MAX_SCORED = 256, /* where tokens are chosen: keys in shared memory */
    STI_CHUNK_MAX_CAP = 1 << 14 /* rows of a piece fit 16 bits */
};

#ifdef __cplusplus
typedef __half sti_chunk_half;
#else
typedef uint16_t sti_chunk_half; /* C has no such type; it only hands them on */
#endif

typedef struct sti_chunk_piece {
    sti_cuda_hybrid_params h;
    sti_cuda_hybrid_session s; /* q, k, v, gate and y begin at the piece */
    int major, sms;            /* of the device */
    int pos, T;
    bool first; /* piece of a call: maps are still to be made halves */
    bool raw;   /* there is k_raw */
    int base;
    int first_chunk, n_chunks; /* those that queries are in */
    int first_retire, n_retired;
    int select, capacity; /* of the largest list; both 0 if one of them is */
    int rows;       /* of a selection head: the list, then the tokens from base on */
    bool quantized; /* salient keys or values are */
    bool turned;    /* so are keys that become far: k_far is not k_raw */
    int stored;     /* rows from a token's row to that of what is stored; 0: the same */
    /* Scratch. L retirements, N chunks, both at most. */
    sti_chunk_half *k, *v;        /* [S, rows, D] */
    sti_chunk_half *k_raw;        /* [S, rows, D], if raw */
    sti_chunk_half *k_far;        /* [S, rows, D], if raw: rows of the list once far */
    const sti_chunk_half *fold_k; /* k or k_raw: what features are made of */
    sti_salient_row list_k,
        list_v;   /* [S, capacity]: the list as it came, if quantized */
    float *score; /* [S, rows]; of `received` sums */
    float *norm;  /* [H, T], for `received` */
    sti_chunk_half *map_q, *map_k; /* [H, D, D], [S, D, D] or NULL */
    int32_t *count;                /* [S]: salient tokens before the piece */
    int64_t *folded;               /* [S]: folded tokens before the piece */
    uint64_t *candidate;  /* [L, S, select]: selected tokens (order.cuh), best first */
    uint64_t *list_order; /* [S, capacity]: the list as the session brought it */
    int32_t *salient; /* [L, S, capacity]: rows of the list after each, best first */
    int32_t *fold;    /* [L, S, C]: rows folded at each */
    /* With a position cap: */
    float *cap_rope;      /* [D/2, 2]: cosine and sine of the rotation by the cap */
    int32_t *position;    /* [S, capacity]: of the list as the session brought it */
    int32_t *order;       /* [L + 1, S, capacity]: rows of the list after so many
                             retirements, near ones first */
    int32_t *near;        /* [L + 1, S]: how many those are */
    float *ds, *dz;       /* [L, S, P, D], [L, S, P]: what each adds to the state */
    sti_chunk_half *mean; /* [N, S, P, D]: s / z, for the queries of a chunk */
    float *z;             /* [N, S, P]: z times state_scale */
    float *phi_q, *phi_k; /* [T, H, P], [T, S, P] without a window; ds, dz of every
                              chunk are then the only others, and become sums */
} sti_chunk_piece;

/* Pieces that share launches; settings and shape are those of all. */
typedef struct sti_chunk_group {
    cudaStream_t stream;
    const sti_chunk_piece *c;     /* [n], the program's */
    const sti_chunk_piece *table; /* the same on the device; NULL if there is one */
    int n;
} sti_chunk_group;

/* Whether the chunk-parallel form takes these settings and this shape; the recurrent
 * form runs the others. */
bool sti_cuda_hybrid_chunk_supported(const sti_cuda_hybrid_params *h);
/* Bytes of scratch for T rows, of one session or of many. */
size_t sti_cuda_hybrid_chunk_scratch(const sti_cuda_hybrid_params *h, int T);

/* The next tokens (T of them) of n sessions, from positions pos on (any position, any
 * T). Sessions are on the host. */
still_status sti_cuda_hybrid_chunk_run(sti_dev *, const sti_cuda_hybrid_params *h,
                                       const sti_cuda_hybrid_session *session,
                                       const int64_t *pos, int n, still_error *err);

/* Each queues its part of a group. */
still_status sti_chunk_pack(const sti_chunk_group *, still_error *);
still_status sti_chunk_score(const sti_chunk_group *, still_error *);
still_status sti_chunk_received(const sti_chunk_group *, still_error *);
still_status sti_chunk_select(const sti_chunk_group *, still_error *);
still_status sti_chunk_state(const sti_chunk_group *, still_error *);
still_status sti_chunk_output(const sti_chunk_group *, still_error *);
/* The same on Hopper, where it runs. */
bool sti_chunk_output_hopper_runs(const sti_chunk_piece *);
still_status sti_chunk_output_hopper(const sti_chunk_group *, still_error *);
still_status sti_chunk_tail(const sti_chunk_group *, still_error *);
/* All of it, for methods without a window. */
still_status sti_chunk_no_window(const sti_chunk_group *, still_error *);

#ifdef __cplusplus
}
#endif

#ifdef __CUDACC__

/* ---- Whose unit a block has ---------------------------------------------- */

/* A kernel is made twice: a single piece comes as an argument, where its numbers cost
 * no registers; several wait in memory. find: the piece that `unit` of the launch
 * belongs to; unit then counts from that piece's first, and it has `units`. */
struct one_piece {
    sti_chunk_piece c;
    __device__ __forceinline__ const sti_chunk_piece &find(int &, int &) const
    {
        return c;
    }
};
struct many_pieces {
    const sti_chunk_piece *table;
    int n;
    int first[STI_CHUNK_SESSIONS + 1]; /* units of piece i: first[i] .. first[i + 1] */
    __device__ __forceinline__ const sti_chunk_piece &find(int &unit, int &units) const
    {
        int lo = 0, hi = n; /* the last whose first is not behind the unit */
        while (hi - lo > 1) {
            const int mid = (lo + hi) / 2;
            if (first[mid] <= unit)
                lo = mid;
            else
                hi = mid;
        }
        unit -= first[lo];
        units = first[lo + 1] - first[lo];
        return table[lo];
    }
};

/* launch(units, pieces) of a group in which a piece has units_of(piece) of them; none:
 * nothing is launched. */
template <class Count, class Launch>
static still_status launch_units(const sti_chunk_group *g, Count units_of,
                                 Launch launch)
{
    if (g->n == 1) {
        const int units = units_of(g->c[0]);
        return units > 0 ? launch((unsigned)units, one_piece{g->c[0]}) : STILL_OK;
    }
    many_pieces m;
    m.table = g->table;
    m.n = g->n;
    m.first[0] = 0;
    for (int i = 0; i < g->n; i++) m.first[i + 1] = m.first[i] + units_of(g->c[i]);
    const int units = m.first[g->n];
    return units > 0 ? launch((unsigned)units, m) : STILL_OK;
}

/* ---- Counting ------------------------------------------------------------ */

/* The kv head of a selection head. */
static __device__ __forceinline__ int kv_head(const sti_chunk_piece &c, int g)
{
    return g / (c.h.S / c.h.G);
}
/* Retirements before the queries of this chunk. */
static __device__ __forceinline__ int retired_until(const sti_chunk_piece &c, int chunk)
{
    return min(max(chunk - c.first_retire + 1, 0), c.n_retired);
}
/* Salient tokens of selection head g after n retirements. */
static __device__ __forceinline__ int salient_after(const sti_chunk_piece &c, int g,
                                                    int n)
{
    const int capacity = salient_list_of(c.h, c.capacity, g).capacity;
    const int64_t wanted = c.count[g] + (int64_t)c.select * n;
    return wanted < capacity ? (int)wanted : capacity;
}
/* Where the session keeps slot 0 of the list. */
static __device__ __forceinline__ size_t list_slot(const sti_chunk_piece &c, int g)
{
    return (size_t)salient_list_of(c.h, c.capacity, g).first;
}
static __device__ __forceinline__ int64_t folded_after(const sti_chunk_piece &c, int g,
                                                       int n)
{
    return c.folded[g] + (int64_t)c.h.C * n - (salient_after(c, g, n) - c.count[g]);
}
/* Rows folded at retirement k. */
static __device__ __forceinline__ int fold_count(const sti_chunk_piece &c, int g, int k)
{
    return c.h.C - (salient_after(c, g, k + 1) - salient_after(c, g, k));
}
static __device__ __forceinline__ int window_row(const sti_chunk_piece &c, int position)
{
    return c.capacity + position - c.base;
}
/* The same token once it is salient. */
static __device__ __forceinline__ int salient_row(const sti_chunk_piece &c,
                                                  int position)
{
    return window_row(c, position) + c.stored;
}
/* Whether a row is one of the list, as it came or as it will be. */
static __device__ __forceinline__ bool is_salient_row(const sti_chunk_piece &c, int row)
{
    return row < c.capacity || (c.stored > 0 && row >= c.capacity + c.stored);
}
/* Position of a row, where there is a position cap. */
static __device__ __forceinline__ int position_of_row(const sti_chunk_piece &c, int g,
                                                      int row)
{
    if (row < c.capacity) return c.position[(size_t)g * c.capacity + row];
    return c.base + row - c.capacity - (is_salient_row(c, row) ? c.stored : 0);
}
/* Whether a salient token is far for queries after n retirements: as far from the last
 * token of their chunk as the cap, or more. */
static __device__ __forceinline__ bool is_far(const sti_chunk_piece &c, int n,
                                              int position)
{
    return (c.first_retire + n) * c.h.C - 1 - position >= c.h.position_cap;
}

/* A power of two that keeps phi z of n folded tokens in half's range: features are at
 * most max(1, floor), so z is at most n times that, and the product below 2^15. */
static __device__ __forceinline__ float state_scale(const sti_chunk_piece &c, int64_t n)
{
    const float top = fmaxf(1.0f, c.h.feature_floor), most = (float)n * top * top;
    const int e = (int)(__float_as_uint(most) >> 23) - 127;
    return __uint_as_float((uint32_t)(127 + 14 - e) << 23);
}

#endif

#endif
