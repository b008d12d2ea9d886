/* route.cu - which token is folded when, for whole sequences: delayed selection (STILL
 * eq. 8) and eviction.
 *
 * With scores made (score.cu): for each chunk and selection head, the mean over query
 * heads and the `select` best in order; then, where the cap can be exceeded, one block
 * per selection head merges the chunks' lists in order of time and folds what does not
 * fit. Bounded by latency. */
#include "backend/cuda/hybrid/order.cuh"
#include "backend/cuda/hybrid/train/tile.cuh"

/* Chunk c of one selection head: its `select` best, best first, into `best`; the others
 * are folded at c + 2, if there is such a chunk. */
static __global__ void __launch_bounds__(THREADS) rank_kernel(const sti_hybrid_train p)
{
    token_order *order = (token_order *)block_memory(); /* [span] */
    const int c = (int)blockIdx.x, sel = (int)blockIdx.y, b = (int)blockIdx.z;
    const int first = c * p.span, n = span_end(p, c) - first;
    const bool retires = c + 2 < p.spans;
    for (int i = (int)threadIdx.x; retires && i < n; i += THREADS) {
        double sum = 0;
        for (int h = sel * p.h.group; h < (sel + 1) * p.h.group; h++)
            sum += (double)p.score_head[row_at(p, p.h.H, b, h, first + i)] / p.h.group;
        order[i] = order_of((float)sum, first + i);
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < n; i += THREADS) {
        int rank = 0;
        for (int j = 0; retires && j < n; j++) rank += order[j] > order[i];
        const bool stays = !retires || rank < p.h.select;
        p.fold[token_at(p, p.h.S, b, sel, first + i)] = stays ? -1 : c + 2;
        if (retires && stays)
            p.best[span_at(p, b, sel, c) * p.h.select + rank] = order[i];
    }
}

/* One selection head, chunk after chunk: the place of an entry in the merged list is
 * its place in its own plus the number of better ones in the other. */
static __global__ void __launch_bounds__(2 * THREADS)
    merge_kernel(const sti_hybrid_train p, int in_shared)
{
    const int sel = (int)blockIdx.x, b = (int)blockIdx.y;
    token_order *fresh = (token_order *)block_memory(); /* [select] */
    token_order *now = in_shared ? fresh + p.h.select
                                 : p.kept + ((size_t)b * p.h.S + sel) * 2 * p.capacity;
    token_order *next = now + p.capacity;
    const int cap = salient_list_of(p.h, p.h.cap, sel).capacity;
    int kept = 0;
    for (int c = 0; c + 2 < p.spans; c++) {
        const token_order *best = p.best + span_at(p, b, sel, c) * p.h.select;
        for (int i = (int)threadIdx.x; i < p.h.select; i += (int)blockDim.x)
            fresh[i] = best[i];
        __syncthreads();
        for (int i = (int)threadIdx.x; i < kept + p.h.select; i += (int)blockDim.x) {
            const bool old = i < kept;
            const token_order x = old ? now[i] : fresh[i - kept];
            const int to = old ? i + count_better(fresh, p.h.select, x)
                               : i - kept + count_better(now, kept, x);
            if (to < cap)
                next[to] = x;
            else
                p.fold[token_at(p, p.h.S, b, sel, position_in(x))] = c + 2;
        }
        kept = min(kept + p.h.select, cap);
        __syncthreads();
        token_order *swap = now;
        now = next;
        next = swap;
    }
}

bool sti_hybrid_train_evicts(const sti_hybrid_train *p)
{
    return p->h.cap >= 0 && p->spans > 2 &&
           (p->h.lists || (int64_t)p->h.select * (p->spans - 2) > p->h.cap);
}

size_t sti_hybrid_train_choose_shared(const sti_hybrid_train *p)
{
    return ((size_t)p->h.select + 2 * (size_t)p->capacity) * sizeof(token_order);
}

still_status sti_hybrid_train_choose(sti_dev *dev, const sti_hybrid_train *p,
                                     still_error *err)
{
    const char *what = "hybrid training: choice of salient tokens";
    const int ahead = 4; /* scores that the compiled loop over them may read in vain */
    STI_TRY(launch(dev, what, err, rank_kernel, dim3(p->spans, p->h.S, p->B), THREADS,
                   (size_t)(p->span + ahead) * sizeof(token_order), *p));
    if (!sti_hybrid_train_evicts(p)) return STILL_OK;
    const bool in_shared = p->kept == NULL;
    return launch(dev, what, err, merge_kernel, dim3(p->h.S, p->B), 2 * THREADS,
                  in_shared ? sti_hybrid_train_choose_shared(p)
                            : (size_t)p->h.select * sizeof(token_order),
                  *p, (int)in_shared);
}
