/* lists.cu - from the chunk in which each token is folded to lists (STILL eq. 9, h): for
 * every span the salient tokens its queries see and the tokens it folds, ascending.
 * Bounded by latency: a block reads the tokens before its span once. */
#include "backend/cuda/hybrid/train/tile.cuh"

enum { WARPS = 8 };

/* Appends tokens in order. All threads call with their token's `wanted`; returns this
 * token's place, and moves *n past all of them. */
STI_DEVICE int append(bool wanted, int *warp_count, int *n)
{
    const int lane = (int)threadIdx.x & 31, warp = (int)threadIdx.x >> 5;
    const unsigned votes = __ballot_sync(0xffffffffu, wanted);
    if (lane == 0) warp_count[warp] = __popc(votes);
    __syncthreads();
    int place = *n + __popc(votes & ((1u << lane) - 1)), all = 0;
    for (int w = 0; w < WARPS; w++) {
        if (w < warp) place += warp_count[w];
        all += warp_count[w];
    }
    *n += all;
    __syncthreads();
    return place;
}

static __global__ void __launch_bounds__(32 * WARPS)
    lists_kernel(const sti_hybrid_train p)
{
    int *warp_count = (int *)block_memory();
    const int c = (int)blockIdx.x, sel = (int)blockIdx.y, b = (int)blockIdx.z;
    const size_t span = span_at(p, b, sel, c);
    int32_t *salient = p.salient + span * p.capacity, *folds = p.folds + span * p.span;
    const int first = c * p.span;
    if (!p.h.has_window) { /* a span folds its own tokens */
        const int n = span_end(p, c) - first;
        for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x)
            folds[i] = first + i;
        if (threadIdx.x != 0) return;
        p.n_salient[span] = 0;
        p.n_folds[span] = n;
        p.n_folded[span] = first + n;
        return;
    }
    int n_salient = 0, n_folds = 0, earlier = 0;
    const int end = c >= 2 ? first - p.span : 0; /* tokens that have left the window */
    for (int j0 = 0; j0 < end; j0 += 32 * WARPS) {
        const int j = j0 + (int)threadIdx.x;
        const int fold = j < end ? fold_of(p, b, sel, j) : -1;
        int at = append(j < end && fold > c, warp_count, &n_salient);
        if (j < end && fold > c && at < p.capacity) salient[at] = j;
        at = append(j < end && fold == c, warp_count, &n_folds);
        if (j < end && fold == c && at < p.span) folds[at] = j;
        append(j < end && fold < c, warp_count, &earlier);
    }
    if (threadIdx.x != 0) return;
    p.n_salient[span] = min(n_salient, p.capacity);
    p.n_folds[span] = min(n_folds, p.span);
    p.n_folded[span] = earlier + n_folds;
}

still_status sti_hybrid_train_lists(sti_dev *dev, const sti_hybrid_train *p,
                                    still_error *err)
{
    return launch(dev, "hybrid training: lists of tokens", err, lists_kernel,
                  dim3(p->spans, p->h.S, p->B), 32 * WARPS, WARPS * sizeof(int), *p);
}
