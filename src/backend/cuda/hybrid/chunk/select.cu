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
 * candidates, by a lane a retirement; a token's places are the running sums over the
 * lanes. Of a token that comes itself, better ones that were folded before do not count:
 * at most as many as the list has. Nothing depends on the order in which threads run. */
#include "backend/cuda/hybrid/chunk/chunk.h"
#include "backend/cuda/hybrid/order.cuh"
#include "backend/cuda/hybrid/score.h"
#include "backend/cuda/ptx/reduce.cuh"

enum {
    MERGE_THREADS = 256,
    MERGE_WARPS = MERGE_THREADS / 32,
    TOGETHER = 4, /* tokens of a warp */
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

/* A token on its way through the lists of its selection head. A warp knows it, each lane
 * at a retirement of its own. */
typedef struct merged_token {
    token_order key;
    int from;   /* retirement that brings it; -1: the session's list had it */
    int row;    /* its row in the list */
    int came;   /* better ones that came until now */
    int left;   /* of these, folded before the token came */
    bool there; /* there is a token, and it is not folded yet */
} merged_token;

static __device__ __forceinline__ merged_token token_at(const sti_chunk_piece &c, int g,
                                                        int i)
{
    merged_token x = {};
    if (i < c.capacity) {
        x.from = -1;
        x.there = i < salient_after(c, g, 0);
        x.row = i;
        if (x.there) x.key = c.list_order[(size_t)g * c.capacity + i];
    } else {
        const int at = i - c.capacity;
        x.from = at / c.select;
        x.there = x.from < c.n_retired;
        if (!x.there) return x;
        x.key = c.candidate[((size_t)x.from * c.h.S + g) * c.select + at % c.select];
        x.row = salient_row(c, position_in(x.key));
    }
    return x;
}

/* Tokens of the list that the session brought, not in order, that are better. */
static __device__ __forceinline__ void
count_listed(const sti_chunk_piece &c, int g, int lane, merged_token (&x)[TOGETHER])
{
    const token_order *list = c.list_order + (size_t)g * c.capacity;
    const int listed = salient_after(c, g, 0);
#pragma unroll 8
    for (int i = lane; i < listed; i += 32) {
        const token_order own = list[i];
#pragma unroll
        for (int t = 0; t < TOGETHER; t++) x[t].came += own > x[t].key;
    }
#pragma unroll
    for (int t = 0; t < TOGETHER; t++) x[t].came = warp_sum(x[t].came);
}

/* better[t]: elements of a list of n, best first, that are better than token t. All
 * together: the steps of one search wait for each other. */
static __device__ __forceinline__ void
count_better_than(int (&better)[TOGETHER], const token_order *list, int n,
                  int first_step, const merged_token (&x)[TOGETHER])
{
#pragma unroll
    for (int t = 0; t < TOGETHER; t++) better[t] = 0;
    for (int step = first_step; step > 0; step >>= 1)
#pragma unroll
        for (int t = 0; t < TOGETHER; t++) {
            const int next = better[t] + step;
            if (next <= n && list[next - 1] > x[t].key) better[t] = next;
        }
}

/* STILL eq. 9, h, of one token at 32 retirements from `first` on, a lane one, of whose
 * candidates `better` are better: to the rows of the lists after them and, where it is
 * beyond the end for the first time, to the rows folded. */
static __device__ __forceinline__ void pass_retirements(const sti_chunk_piece &c, int g,
                                                        int first, int lane,
                                                        int capacity, int better,
                                                        merged_token &x)
{
    const int k = first + lane;
    int came = better; /* until retirement k, of these 32 */
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int before = __shfl_up_sync(~0u, came, d);
        if (lane >= d) came += before;
    }
    came += x.came;
    if (x.from >= first && x.from < first + 32)
        x.left = max(__shfl_sync(~0u, came - better, x.from - first) -
                         salient_after(c, g, x.from),
                     0);
    x.came = __shfl_sync(~0u, came, 31);

    const int place = came - x.left;
    const bool here = k >= x.from && k < c.n_retired;
    const unsigned beyond = __ballot_sync(~0u, here && place >= capacity);
    const size_t list = (size_t)k * c.h.S + g;
    if (here && place < capacity)
        c.salient[list * c.capacity + place] = x.row;
    else if (lane == __ffs((int)beyond) - 1)
        c.fold[list * c.h.C + (c.h.C - c.select) + place - capacity] =
            k == x.from ? x.row - c.stored : x.row; /* it was never in the list */
    x.there = beyond == 0;
}

/* Candidates of 32 retirements, each list a line of this many: odd, so that lanes which
 * are at the same place of their lists meet different banks. */
static __host__ __device__ __forceinline__ int candidate_line(const sti_chunk_piece &c)
{
    return c.select | 1;
}

/* A warp a few tokens of the session's list or of the candidates. Grid (tokens,
 * selection heads). */
template <class Pieces>
static __global__ void __launch_bounds__(MERGE_THREADS, 4)
    merge_kernel(const __grid_constant__ Pieces pieces)
{
    extern __shared__ token_order candidate[]; /* [32, candidate_line] */
    int block = (int)blockIdx.x, blocks;
    const sti_chunk_piece &c = pieces.find(block, blocks);
    const int g = (int)blockIdx.y, lane = (int)threadIdx.x & 31;
    const int warp = (int)threadIdx.x >> 5, line = candidate_line(c);
    const int capacity = salient_list_of(c.h, c.capacity, g).capacity;
    const int first_step = 1 << (31 - __clz(c.select));
    merged_token x[TOGETHER];
#pragma unroll
    for (int t = 0; t < TOGETHER; t++)
        x[t] = token_at(c, g, (block * MERGE_WARPS + warp) * TOGETHER + t);
    count_listed(c, g, lane, x);
    for (int first = 0; first < c.n_retired; first += 32) {
        const int n = min(32, c.n_retired - first);
        __syncthreads(); /* the candidates before are read */
        for (int k = warp; k < n; k += MERGE_WARPS)
            for (int i = lane; i < c.select; i += 32)
                candidate[k * line + i] =
                    c.candidate[((size_t)(first + k) * c.h.S + g) * c.select + i];
        __syncthreads();
        int better[TOGETHER];
        count_better_than(better, candidate + lane * line, lane < n ? c.select : 0,
                          first_step, x);
#pragma unroll
        for (int t = 0; t < TOGETHER; t++)
            if (x[t].there)
                pass_retirements(c, g, first, lane, capacity, better[t], x[t]);
    }
#pragma unroll
    for (int t = 0; t < TOGETHER; t++)
        if (x[t].there && lane == t) {
            const size_t slot = list_slot(c, g) + x[t].came - x[t].left;
            c.s.sal_score[slot] = score_in(x[t].key);
            c.s.sal_pos[slot] = position_in(x[t].key);
        }
}

static int ranks_of(const sti_chunk_piece &c)
{
    return c.n_retired + (c.n_retired > 0 && c.select > 0);
}

static int merges_of(const sti_chunk_piece &c)
{
    const int tokens = c.capacity + c.n_retired * c.select;
    const int each = MERGE_WARPS * TOGETHER; /* of a block */
    return c.n_retired > 0 ? (tokens + each - 1) / each : 0;
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
        const size_t bytes = 32 * (size_t)candidate_line(*g->c) * sizeof(token_order);
        STI_CUDA(cudaFuncSetAttribute(merge_kernel<std::decay_t<decltype(pieces)>>,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      (int)bytes),
                 "hybrid attention, salient lists");
        merge_kernel<<<grid, MERGE_THREADS, bytes, g->stream>>>(pieces);
        STI_CUDA(cudaGetLastError(), "hybrid attention, salient lists");
        return STILL_OK;
    }));
    return h->position_cap > 0 ? order_lists(g, err) : STILL_OK;
}
