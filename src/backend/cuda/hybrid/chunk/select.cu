/* select.cu - which tokens stay exact, for all chunks of a piece (STILL eq. 8, 9).
 *
 *   rank    every retiring chunk on its own, all at once. A token's rank is the number
 *           of better ones (order.cuh); the `select` best become candidates, in order;
 *           the others are folded.
 *   merge   the list after retirement k is the best `capacity` of the list before and
 *           the candidates. Both are sorted, so an element's new place is its own index
 *           plus the number of better ones in the other list, a binary search. What
 *           falls off the end is folded with the chunk's own.
 *   order   with a position cap, near tokens of each list before far ones.
 *
 * One block per selection head merges chunk after chunk: a step is one barrier and some
 * ten reads of shared memory, less than the launches of a parallel scan would cost.
 * Nothing depends on the order in which threads run. */
#include "backend/cuda/hybrid/chunk/chunk.h"
#include "backend/cuda/hybrid/order.cuh"
#include "backend/cuda/hybrid/score.h"

enum {
    MERGE_THREADS = 512,
    BATCH = 1024, /* candidates in shared memory */
    ORDER_THREADS = 256,
    SHARED_MOST = 99 << 10 /* bytes that a block can have on every GPU */
};

/* ---- Rank ---------------------------------------------------------------- */

/* STILL eq. 8 for one chunk. Grid (retirements, selection heads), a thread a token. */
template <class Pieces>
static __global__ void __launch_bounds__(STI_CHUNK_MAX_C)
    rank_kernel(const __grid_constant__ Pieces pieces)
{
    __shared__ token_order keys[STI_CHUNK_MAX_C];
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
        if (sti_score_from(c.h.score, STI_FROM_QUERIES))
            score = queries_score(c.h.score, score, C, i);
        const token_order own = order_of(score, position);
        keys[i] = own;
        __syncthreads();
        rank = 0;
        for (int j = 0; j < C; j++) rank += keys[j] > own;
        if (rank < c.select) c.candidate[list * c.select + rank] = own;
    }
    if (rank >= c.select) c.fold[list * C + rank - c.select] = row;
}

/* ---- Merge --------------------------------------------------------------- */

/* Tokens of a list, best first, and their rows. */
typedef struct sorted_list {
    token_order *key;
    int *row;
} sorted_list;

static size_t merge_shared_bytes(const sti_chunk_piece *c)
{
    return BATCH * sizeof(token_order) +
           2 * (size_t)c->capacity * (sizeof(token_order) + sizeof(int));
}

extern "C" bool sti_chunk_lists_shared(const sti_chunk_piece *c)
{
    return merge_shared_bytes(c) <= SHARED_MOST;
}

/* The list before (0) and after (1) an even retirement of selection head g; memory:
 * shared, if there is room for it. */
static __device__ __forceinline__ sorted_list list_at(const sti_chunk_piece &c, int g,
                                                      token_order *memory, int which)
{
    const size_t n = c.capacity;
    if (c.list_order) {
        const size_t at = ((size_t)g * 2 + which) * n;
        return {c.list_order + at, c.list_row + at};
    }
    return {memory + which * n, (int *)(memory + 2 * n) + which * n};
}

/* The session's list, sorted into `to`; `from` is for the unsorted keys. */
static __device__ void sort_list(const sti_chunk_piece &c, int g, int n,
                                 token_order *from, sorted_list to)
{
    for (int i = (int)threadIdx.x; i < n; i += MERGE_THREADS) {
        const size_t at = list_slot(c, g) + i;
        from[i] = order_of(c.s.sal_score[at], c.s.sal_pos[at]);
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < n; i += MERGE_THREADS) {
        const token_order own = from[i];
        int rank = 0;
        for (int j = 0; j < n; j++) rank += from[j] > own;
        to.key[rank] = own;
        to.row[rank] = i;
    }
}

/* STILL eq. 9, h, one retirement: n tokens of `from` and the candidates to `to`, to
 * the rows of the list after it and, beyond its end, to the rows folded. */
static __device__ __forceinline__ void merge(const sti_chunk_piece &c, int g, int k,
                                             int n, sorted_list from,
                                             const token_order *candidate,
                                             sorted_list to)
{
    const int capacity = salient_list_of(c.h, c.capacity, g).capacity;
    const size_t list = (size_t)k * c.h.S + g;
    int32_t *salient = c.salient + list * c.capacity;
    int32_t *fold = c.fold + list * c.h.C + (c.h.C - c.select);
    for (int i = (int)threadIdx.x; i < n + c.select; i += MERGE_THREADS) {
        token_order key;
        int row, place, folded; /* folded: the row if it does not stay */
        if (i < n) {
            key = from.key[i];
            row = folded = from.row[i];
            place = i + count_better(candidate, c.select, key);
        } else {
            key = candidate[i - n];
            row = salient_row(c, position_in(key));
            folded = window_row(c, position_in(key));
            place = i - n + count_better(from.key, n, key);
        }
        if (place < capacity) {
            to.key[place] = key;
            to.row[place] = row;
            salient[place] = row;
        } else {
            fold[place - capacity] = folded;
        }
    }
}

/* Grid (pieces with retirements, selection heads). Candidates of many retirements are
 * fetched at once: a step that waited for memory would take three times as long. */
template <class Pieces>
static __global__ void __launch_bounds__(MERGE_THREADS)
    merge_kernel(const __grid_constant__ Pieces pieces)
{
    extern __shared__ token_order candidate[]; /* of as many retirements as fit */
    int piece = (int)blockIdx.x, one;
    const sti_chunk_piece &c = pieces.find(piece, one);
    const int g = (int)blockIdx.y, tid = (int)threadIdx.x, at_once = BATCH / c.select;
    const sorted_list list[2] = {list_at(c, g, candidate + BATCH, 0),
                                 list_at(c, g, candidate + BATCH, 1)};
    sort_list(c, g, salient_after(c, g, 0), list[1].key, list[0]);
    for (int from = 0; from < c.n_retired; from += at_once) {
        const int retired = min(at_once, c.n_retired - from);
        for (int i = tid; i < retired * c.select; i += MERGE_THREADS) {
            const size_t retire = (size_t)(from + i / c.select);
            candidate[i] =
                c.candidate[(retire * c.h.S + g) * c.select + i % c.select];
        }
        __syncthreads();
        for (int k = from; k < from + retired; k++) {
            merge(c, g, k, salient_after(c, g, k), list[k & 1],
                  candidate + (k - from) * c.select, list[(k + 1) & 1]);
            __syncthreads();
        }
    }
    const sorted_list last = list[c.n_retired & 1];
    for (int i = tid; i < salient_after(c, g, c.n_retired); i += MERGE_THREADS) {
        c.s.sal_score[list_slot(c, g) + i] = score_in(last.key[i]);
        c.s.sal_pos[list_slot(c, g) + i] = position_in(last.key[i]);
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
 * (lists, selection heads): list n is that after n retirements. */
template <class Pieces>
static __global__ void __launch_bounds__(ORDER_THREADS)
    order_kernel(const __grid_constant__ Pieces pieces)
{
    __shared__ int warp_near[ORDER_THREADS / 32];
    int n = (int)blockIdx.x, lists;
    const sti_chunk_piece &c = pieces.find(n, lists);
    const int g = (int)blockIdx.y, tid = (int)threadIdx.x;
    const size_t list = (size_t)n * c.h.S + g;
    const int32_t *from = n > 0 ? c.salient + (list - c.h.S) * c.capacity : NULL;
    const int tokens = salient_after(c, g, n);
    const auto row_at = [&](int i) { return from ? from[i] : i; };
    const auto is_near = [&](int i) {
        return i < tokens && !is_far(c, n, position_of_row(c, g, row_at(i)));
    };
    int all = 0; /* that are near */
    for (int base = 0; base < tokens; base += ORDER_THREADS)
        all += __syncthreads_count(is_near(base + tid));
    if (tid == 0) c.near[list] = all;
    int before = 0; /* near ones before the threads' tokens */
    for (int base = 0; base < tokens; base += ORDER_THREADS) {
        const int i = base + tid;
        const bool near = is_near(i);
        const unsigned votes = __ballot_sync(~0u, near);
        if (tid % 32 == 0) warp_near[tid / 32] = __popc(votes);
        __syncthreads();
        int nearer = before + __popc(votes & ((1u << tid % 32) - 1));
        for (int w = 0; w < ORDER_THREADS / 32; w++) {
            if (w < tid / 32) nearer += warp_near[w];
            before += warp_near[w];
        }
        if (i < tokens)
            c.order[list * c.capacity + (near ? nearer : all + i - nearer)] = row_at(i);
        __syncthreads();
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
        const size_t bytes = sti_chunk_lists_shared(g->c)
                                 ? merge_shared_bytes(g->c)
                                 : BATCH * sizeof(token_order);
        STI_CUDA(cudaFuncSetAttribute(
                     merge_kernel<std::decay_t<decltype(pieces)>>,
                     cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes),
                 "hybrid attention, salient lists");
        merge_kernel<<<grid, MERGE_THREADS, bytes, g->stream>>>(pieces);
        STI_CUDA(cudaGetLastError(), "hybrid attention, salient lists");
        return STILL_OK;
    }));
    return h->position_cap > 0 ? order_lists(g, err) : STILL_OK;
}
