/* route.cu - which token is folded when, for whole sequences.
 *
 * With scores made (score.cu): for each chunk and selection head, the mean
 * over query heads and the `select` best in order; then, where the cap can be exceeded,
 * one block per selection head merges the chunks' lists in order of time and folds what
 * does not fit. Bounded by latency. */
#include "backend/cuda/hybrid/train/tile.cuh"

STI_DEVICE bool better(float a, int i, float b, int j)
{
    return a > b || (a == b && i < j);
}

/* Chunk c of one selection head: its `select` best, best first, into `best`; the others
 * are folded at c + 2, if there is such a chunk. */
static __global__ void __launch_bounds__(THREADS) rank_kernel(const sti_hybrid_train p)
{
    float *score = block_memory(); /* [span] */
    const int c = (int)blockIdx.x, sel = (int)blockIdx.y, b = (int)blockIdx.z;
    const int first = c * p.span, n = span_end(p, c) - first;
    const bool retires = c + 2 < p.spans;
    for (int i = (int)threadIdx.x; retires && i < n; i += THREADS) {
        double sum = 0;
        for (int h = sel * p.per_sel; h < (sel + 1) * p.per_sel; h++)
            sum += (double)p.score_head[row_at(p, p.H, b, h, first + i)] / p.per_sel;
        score[i] = (float)sum;
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < n; i += THREADS) {
        int rank = 0;
        for (int j = 0; retires && j < n; j++) rank += better(score[j], j, score[i], i);
        const bool stays = !retires || rank < p.select;
        p.fold[token_at(p, p.S, b, sel, first + i)] = stays ? -1 : c + 2;
        if (retires && stays)
            p.best[span_at(p, b, sel, c) * p.select + rank] =
                sti_hybrid_train_entry{score[i], first + i};
    }
}

/* Entries of a list, best first, that go before x. */
STI_DEVICE int count_better(const sti_hybrid_train_entry *list, int n,
                            sti_hybrid_train_entry x)
{
    int low = 0, high = n;
    while (low < high) {
        const int i = (low + high) / 2;
        if (better(list[i].score, list[i].token, x.score, x.token))
            low = i + 1;
        else
            high = i;
    }
    return low;
}

/* One selection head, chunk after chunk: the place of an entry in the merged list is
 * its place in its own plus the number of better ones in the other. */
static __global__ void __launch_bounds__(2 * THREADS)
    merge_kernel(const sti_hybrid_train p, int in_shared)
{
    const int sel = (int)blockIdx.x, b = (int)blockIdx.y;
    sti_hybrid_train_entry *fresh =
        (sti_hybrid_train_entry *)block_memory(); /* [select] */
    sti_hybrid_train_entry *now =
        in_shared ? fresh + p.select
                  : p.kept + ((size_t)b * p.S + sel) * 2 * p.capacity;
    sti_hybrid_train_entry *next = now + p.capacity;
    int kept = 0;
    for (int c = 0; c + 2 < p.spans; c++) {
        const sti_hybrid_train_entry *best = p.best + span_at(p, b, sel, c) * p.select;
        for (int i = (int)threadIdx.x; i < p.select; i += (int)blockDim.x)
            fresh[i] = best[i];
        __syncthreads();
        for (int i = (int)threadIdx.x; i < kept + p.select; i += (int)blockDim.x) {
            const bool old = i < kept;
            const sti_hybrid_train_entry x = old ? now[i] : fresh[i - kept];
            const int to = old ? i + count_better(fresh, p.select, x)
                               : i - kept + count_better(now, kept, x);
            if (to < p.cap)
                next[to] = x;
            else
                p.fold[token_at(p, p.S, b, sel, x.token)] = c + 2;
        }
        kept = min(kept + p.select, p.cap);
        __syncthreads();
        sti_hybrid_train_entry *swap = now;
        now = next;
        next = swap;
    }
}

bool sti_hybrid_train_evicts(const sti_hybrid_train *p)
{
    return p->cap >= 0 && p->spans > 2 && (int64_t)p->select * (p->spans - 2) > p->cap;
}

size_t sti_hybrid_train_choose_shared(const sti_hybrid_train *p)
{
    return ((size_t)p->select + 2 * (size_t)p->capacity) *
           sizeof(sti_hybrid_train_entry);
}

still_status sti_hybrid_train_choose(sti_dev *dev, const sti_hybrid_train *p,
                                     still_error *err)
{
    const char *what = "hybrid training: choice of salient tokens";
    const int ahead = 4; /* scores that the compiled loop over them may read in vain */
    STI_TRY(launch(dev, what, err, rank_kernel, dim3(p->spans, p->S, p->B), THREADS,
                   (size_t)(p->span + ahead) * sizeof(float), *p));
    if (!sti_hybrid_train_evicts(p)) return STILL_OK;
    const bool in_shared = p->kept == NULL;
    return launch(dev, what, err, merge_kernel, dim3(p->S, p->B), 2 * THREADS,
                  in_shared ? sti_hybrid_train_choose_shared(p)
                            : (size_t)p->select * sizeof(sti_hybrid_train_entry),
                  *p, (int)in_shared);
}
