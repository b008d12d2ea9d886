/* select.cu - which tokens stay exact, for all chunks of a piece (STILL eq. 8, 9).
 *
 *   rank    every retiring chunk on its own, all at once. A token's rank is the number
 *           of better ones (order.cuh); the `select` best become candidates, in order;
 *           the others are folded.
 *   merge   the list after retirement k is the best `capacity` of the list before and
 *           the candidates; what falls off its end is folded with the chunk's own.
 *   order   with a position cap, near tokens of each list before far ones.
 *
 * Tokens go through the merges independently of each other, since a list of n is the
 * best n of all that came so far: a token's place in it is the number of better ones that
 * came. Those of a retirement that are better are counted by a binary search of its
 * candidates. Of a token that comes itself, better ones that were folded before do not
 * count: at most as many as the list has. Nothing depends on the order in which threads
 * run. */
#include "backend/cuda/hybrid/chunk/chunk.h"
#include "backend/cuda/hybrid/order.cuh"
#include "backend/cuda/hybrid/score.h"

enum {
    MERGE_THREADS = 128,
    BATCH = 1024, /* tokens in shared memory */
    TOGETHER = 4, /* retirements whose candidates are searched at once */
    ORDER_THREADS = 256
};

/* ---- Rank ---------------------------------------------------------------- */

/* STILL eq. 8 for one chunk. Grid (retirements, selection heads), a thread a token. One
 * more block takes the session's list along, which merge writes anew. */
template <class Pieces>
static __global__ void __launch_bounds__(STI_CHUNK_MAX_C)
    rank_kernel(const __grid_constant__ Pieces pieces)
{
    __shared__ token_order keys[STI_CHUNK_MAX_C];
    int k = (int)blockIdx.x, retired;
    const sti_chunk_piece &c = pieces.find(k, retired);
    const int g = (int)blockIdx.y, i = (int)threadIdx.x;
    const int C = c.h.C;
    if (k == c.n_retired) {
        for (int at = i; at < salient_after(c, g, 0); at += C) {
            const size_t slot = list_slot(c, g) + at;
            c.list_order[(size_t)g * c.capacity + at] =
                order_of(c.s.sal_score[slot], c.s.sal_pos[slot]);
        }
        return;
    }
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

/* better[i]: elements of list i that are better than x, of n lists of `length` that
 * follow each other, best first; 0 from n on. All together: the steps of one search
 * wait for each other. */
template <int N>
static __device__ __forceinline__ void count_better_in(int (&better)[N],
                                                       const token_order *lists, int n,
                                                       int length, token_order x)
{
#pragma unroll
    for (int i = 0; i < N; i++) better[i] = 0;
    for (int step = 1 << (31 - __clz(length)); step > 0; step >>= 1)
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int next = better[i] + step;
            if (i < n && next <= length && lists[i * length + next - 1] > x)
                better[i] = next;
        }
}

/* A token on its way through the lists of its selection head. */
typedef struct merged_token {
    token_order key;
    int from;        /* retirement that brings it; -1: the session's list had it */
    int row, folded; /* its row if it stays, if it is folded now */
    int place;       /* better ones in the list it is in; before: those that came */
    bool there;      /* there is a token, and it is not folded yet */
} merged_token;

static __device__ __forceinline__ merged_token token_at(const sti_chunk_piece &c, int g,
                                                        int i)
{
    merged_token x = {};
    if (i < c.capacity) {
        x.from = -1;
        x.there = i < salient_after(c, g, 0);
        x.row = x.folded = i;
        if (x.there) x.key = c.list_order[(size_t)g * c.capacity + i];
    } else {
        const int at = i - c.capacity;
        x.from = at / c.select;
        x.there = x.from < c.n_retired;
        if (!x.there) return x;
        x.key = c.candidate[((size_t)x.from * c.h.S + g) * c.select + at % c.select];
        x.row = salient_row(c, position_in(x.key));
        x.folded = window_row(c, position_in(x.key));
    }
    return x;
}

/* STILL eq. 9, h, retirement k, of whose candidates `better` are better: to the rows of
 * the list after it or, beyond its end, to the rows folded. */
static __device__ __forceinline__ void pass_retirement(const sti_chunk_piece &c, int g,
                                                       int k, int capacity, int better,
                                                       merged_token &x)
{
    if (k == x.from) x.place = min(x.place, salient_after(c, g, k));
    x.place += better;
    if (k < x.from) return;
    const size_t list = (size_t)k * c.h.S + g;
    if (x.place < capacity) {
        c.salient[list * c.capacity + x.place] = x.row;
        x.folded = x.row; /* from now on it is what the list stores */
    } else {
        c.fold[list * c.h.C + (c.h.C - c.select) + x.place - capacity] = x.folded;
        x.there = false;
    }
}

/* A thread a token of the session's list or of the candidates. Grid (tokens, selection
 * heads). */
template <class Pieces>
static __global__ void __launch_bounds__(MERGE_THREADS)
    merge_kernel(const __grid_constant__ Pieces pieces)
{
    __shared__ token_order some[BATCH];
    int block = (int)blockIdx.x, blocks;
    const sti_chunk_piece &c = pieces.find(block, blocks);
    const int g = (int)blockIdx.y, tid = (int)threadIdx.x, at_once = BATCH / c.select;
    const int capacity = salient_list_of(c.h, c.capacity, g).capacity;
    const int listed = salient_after(c, g, 0);
    merged_token x = token_at(c, g, block * MERGE_THREADS + tid);
    for (int from = 0; from < listed; from += BATCH) {
        const int n = min(BATCH, listed - from);
        for (int i = tid; i < n; i += MERGE_THREADS)
            some[i] = c.list_order[(size_t)g * c.capacity + from + i];
        __syncthreads();
#pragma unroll 8
        for (int i = 0; i < n; i++) x.place += some[i] > x.key;
        __syncthreads();
    }
    for (int from = 0; from < c.n_retired; from += at_once) {
        const int n = min(at_once, c.n_retired - from);
        for (int i = tid; i < n * c.select; i += MERGE_THREADS) {
            const size_t retire = (size_t)(from + i / c.select);
            some[i] = c.candidate[(retire * c.h.S + g) * c.select + i % c.select];
        }
        __syncthreads();
        for (int k = 0; k < n && x.there; k += TOGETHER) {
            int better[TOGETHER];
            count_better_in(better, some + k * c.select, n - k, c.select, x.key);
#pragma unroll
            for (int i = 0; i < TOGETHER; i++)
                if (k + i < n && x.there)
                    pass_retirement(c, g, from + k + i, capacity, better[i], x);
        }
        __syncthreads();
    }
    if (!x.there) return;
    c.s.sal_score[list_slot(c, g) + x.place] = score_in(x.key);
    c.s.sal_pos[list_slot(c, g) + x.place] = position_in(x.key);
}

static int ranks_of(const sti_chunk_piece &c)
{
    return c.n_retired + (c.n_retired > 0 && c.select > 0);
}

static int merges_of(const sti_chunk_piece &c)
{
    const int tokens = c.capacity + c.n_retired * c.select;
    return c.n_retired > 0 ? (tokens + MERGE_THREADS - 1) / MERGE_THREADS : 0;
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
    STI_TRY(launch_units(g, ranks_of, [&](unsigned units, const auto &pieces) {
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
