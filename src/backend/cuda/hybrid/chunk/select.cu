/* select.cu - which tokens stay exact, for all chunks of a piece.
 *
 * A token is one number, smaller is better: its score turned round, then its position,
 * so equal scores keep the earlier one and no two tokens are equal.
 *
 * rank: every leaving chunk on its own, all at once. A token's rank is the number of
 *   better ones; the `select` best become candidates, in order; the others are folded.
 * merge: the list after leave k is the best `room` of the list before and the
 *   candidates. Both are sorted, so an element's new place is its own index plus the
 *   number of better ones in the other list, a binary search. One block per selection
 * head takes the leaves in turn: a step is one barrier and some 10 reads of shared
 * memory (about 0.3 us), less than the launches of a parallel scan would cost. What
 * falls off the end of the list is folded with the chunk's own; nothing depends on the
 * order in which threads run. */
#include "backend/cuda/hybrid/chunk/chunk.h"
#include "backend/cuda/hybrid/score.cuh"

enum { MERGE_THREADS = 512, BATCH = 1024, ORDER_THREADS = 256 };

typedef unsigned long long token_key; /* as long as uint64_t, and what CUDA prints */

static __device__ __forceinline__ token_key key_of(float score, int position)
{
    const uint32_t bits = __float_as_uint(score + 0.0f); /* -0 is 0 */
    const uint32_t rising = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (token_key)~rising << 32 | (uint32_t)position;
}
static __device__ __forceinline__ float score_of(token_key key)
{
    const uint32_t rising = ~(uint32_t)(key >> 32);
    return __uint_as_float(rising & 0x80000000u ? rising & 0x7fffffffu : ~rising);
}
static __device__ __forceinline__ int position_of(token_key key)
{
    return (int)(uint32_t)key;
}

/* ---- Rank ---------------------------------------------------------------- */

/* Grid (retired, selection heads), a thread a token. */
template <class Pieces>
static __global__ void __launch_bounds__(STI_CHUNK_MAX_C)
    rank_kernel(const __grid_constant__ Pieces pieces)
{
    __shared__ token_key keys[STI_CHUNK_MAX_C];
    int k = (int)blockIdx.x, retired;
    const sti_chunk_piece &c = pieces.find(k, retired);
    const int g = (int)blockIdx.y, i = (int)threadIdx.x;
    const int C = c.h.C;
    const int position = (c.first_retire + k - 2) * C + i,
              row = window_row(c, position);
    const size_t list = (size_t)k * c.h.S + g;
    int rank = i;
    if (c.select > 0) {
        float score = c.score[(size_t)g * c.rows + row];
        if (c.h.score == STI_SCORE_RECEIVED) score = mean_received(score, C, i);
        const token_key own = key_of(score, position);
        keys[i] = own;
        __syncthreads();
        rank = 0;
        for (int j = 0; j < C; j++) rank += keys[j] < own;
        if (rank < c.select) c.candidate[list * c.select + rank] = own;
    }
    if (rank >= c.select) c.fold[list * C + rank - c.select] = row;
}

/* ---- Merge --------------------------------------------------------------- */

typedef struct sorted_list {
    token_key key[STI_CHUNK_MAX_CAP];
    int row[STI_CHUNK_MAX_CAP];
} sorted_list;

typedef struct merge_shared {
    sorted_list list[2];
    token_key candidate[BATCH]; /* of as many leaves as fit */
} merge_shared;

/* Elements of a sorted array that are better than `key`. */
static __device__ __forceinline__ int better_than(const token_key *a, int n,
                                                  token_key key)
{
    int lo = 0;
    while (n > 0) {
        const int half = n >> 1;
        if (a[lo + half] < key) {
            lo += half + 1;
            n -= half + 1;
        } else {
            n = half;
        }
    }
    return lo;
}

/* The session's list, sorted into `to`; `from` is for the unsorted keys. */
static __device__ void sort_list(const sti_chunk_piece &c, int g, int n,
                                 token_key *from, sorted_list *to)
{
    for (int i = (int)threadIdx.x; i < n; i += MERGE_THREADS) {
        const size_t at = (size_t)g * c.capacity + i;
        from[i] = key_of(c.s.sal_score[at], c.s.sal_pos[at]);
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < n; i += MERGE_THREADS) {
        const token_key own = from[i];
        int rank = 0;
        for (int j = 0; j < n; j++) rank += from[j] < own;
        to->key[rank] = own;
        to->row[rank] = i;
    }
}

/* One leave: n tokens of `from` and the candidates to `to`, to the rows of the list
 * after it and, beyond its end, to the rows folded. */
static __device__ __forceinline__ void merge(const sti_chunk_piece &c, int g, int k,
                                             int n, const sorted_list *from,
                                             const token_key *candidate,
                                             sorted_list *to)
{
    const size_t list = (size_t)k * c.h.S + g;
    int32_t *salient = c.salient + list * c.capacity;
    int32_t *fold = c.fold + list * c.h.C + (c.h.C - c.select);
    for (int i = (int)threadIdx.x; i < n + c.select; i += MERGE_THREADS) {
        token_key key;
        int row, place;
        if (i < n) {
            key = from->key[i];
            row = from->row[i];
            place = i + better_than(candidate, c.select, key);
        } else {
            key = candidate[i - n];
            row = window_row(c, position_of(key));
            place = i - n + better_than(from->key, n, key);
        }
        if (place < c.capacity) {
            to->key[place] = key;
            to->row[place] = row;
            salient[place] = row;
        } else {
            fold[place - c.capacity] = row;
        }
    }
}

/* Grid (pieces with retired, selection heads). Candidates of many leaves are fetched at
 * once: a step that waited for memory would take three times as long. */
template <class Pieces>
static __global__ void __launch_bounds__(MERGE_THREADS)
    merge_kernel(const __grid_constant__ Pieces pieces)
{
    __shared__ merge_shared r;
    int piece = (int)blockIdx.x, one;
    const sti_chunk_piece &c = pieces.find(piece, one);
    const int g = (int)blockIdx.y, tid = (int)threadIdx.x, at_once = BATCH / c.select;
    sort_list(c, g, salient_after(c, g, 0), r.list[1].key, &r.list[0]);
    for (int from = 0; from < c.n_retired; from += at_once) {
        const int retired = min(at_once, c.n_retired - from);
        for (int i = tid; i < retired * c.select; i += MERGE_THREADS) {
            const size_t retire = (size_t)(from + i / c.select);
            r.candidate[i] =
                c.candidate[(retire * c.h.S + g) * c.select + i % c.select];
        }
        __syncthreads();
        for (int k = from; k < from + retired; k++) {
            merge(c, g, k, salient_after(c, g, k), &r.list[k & 1],
                  r.candidate + (k - from) * c.select, &r.list[(k + 1) & 1]);
            __syncthreads();
        }
    }
    const sorted_list *last = &r.list[c.n_retired & 1];
    for (int i = tid; i < salient_after(c, g, c.n_retired); i += MERGE_THREADS) {
        c.s.sal_score[(size_t)g * c.capacity + i] = score_of(last->key[i]);
        c.s.sal_pos[(size_t)g * c.capacity + i] = position_of(last->key[i]);
    }
}

static int retired_of(const sti_chunk_piece &c)
{
    return c.n_retired;
}

static int merges_of(const sti_chunk_piece &c)
{
    return c.n_retired > 0;
}

/* ---- Order --------------------------------------------------------------- */

/* With a position cap: near tokens of a list before far ones, both as they were. Grid
 * (lists, selection heads): list n is that after n leaves. */
template <class Pieces>
static __global__ void __launch_bounds__(ORDER_THREADS)
    order_kernel(const __grid_constant__ Pieces pieces)
{
    __shared__ unsigned char is_near[STI_CHUNK_MAX_CAP];
    int n = (int)blockIdx.x, lists;
    const sti_chunk_piece &c = pieces.find(n, lists);
    const int g = (int)blockIdx.y, tid = (int)threadIdx.x;
    const size_t list = (size_t)n * c.h.S + g;
    const int32_t *from = n > 0 ? c.salient + (list - c.h.S) * c.capacity : NULL;
    const int tokens = salient_after(c, g, n);
    for (int i = tid; i < tokens; i += ORDER_THREADS)
        is_near[i] = !is_far(c, n, position_of_row(c, g, from ? from[i] : i));
    __syncthreads();
    for (int i = tid; i < max(tokens, 1); i += ORDER_THREADS) {
        int before = 0, all = 0;
        for (int j = 0; j < tokens; j++) {
            before += j < i && is_near[j];
            all += is_near[j];
        }
        if (i == 0) c.near[list] = all;
        if (i >= tokens) continue;
        const int place = is_near[i] ? before : all + i - before;
        c.order[list * c.capacity + place] = from ? from[i] : i;
    }
}

static int lists_of(const sti_chunk_piece &c)
{
    return c.n_retired + 1;
}

static still_status order_lists(const sti_chunk_group *g, still_error *err)
{
    return launch_units(g, lists_of, [&](unsigned units, const auto &pieces) {
        const dim3 grid(units, (unsigned)g->c->h.S);
        order_kernel<<<grid, ORDER_THREADS, 0, g->stream>>>(pieces);
        STI_CUDA(cudaGetLastError(), "hybrid attention, far tokens");
        return STILL_OK;
    });
}

extern "C" still_status sti_chunk_select(const sti_chunk_group *g, still_error *err)
{
    const sti_cuda_hybrid_params *h = &g->c->h;
    STI_TRY(launch_units(g, retired_of, [&](unsigned units, const auto &pieces) {
        const dim3 grid(units, (unsigned)h->S);
        rank_kernel<<<grid, (unsigned)h->C, 0, g->stream>>>(pieces);
        STI_CUDA(cudaGetLastError(), "hybrid attention, ranks");
        return STILL_OK;
    }));
    if (g->c->select == 0) return STILL_OK;
    STI_TRY(launch_units(g, merges_of, [&](unsigned units, const auto &pieces) {
        const dim3 grid(units, (unsigned)h->S);
        merge_kernel<<<grid, MERGE_THREADS, 0, g->stream>>>(pieces);
        STI_CUDA(cudaGetLastError(), "hybrid attention, salient lists");
        return STILL_OK;
    }));
    return h->position_cap > 0 ? order_lists(g, err) : STILL_OK;
}
