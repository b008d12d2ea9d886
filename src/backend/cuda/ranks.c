/* ranks.c - sums over the GPUs of several processes, by NCCL. Compiled where CMake
 * found it.
 *
 * As between processes without one (train/comm_mpi.c): every number belongs to a rank,
 * which gets all ranks' values of it, adds them in the order of the ranks and sends the
 * result to all. NCCL's own reductions move as much, but promise no order. */
#include "backend/cuda/ranks.h"

#include <nccl.h>
#include <string.h>

_Static_assert(sizeof(ncclUniqueId) <= STI_RANKS_ID, "a meeting fits its place");

enum { BLOCK = 16 << 20 }; /* numbers added at once */

static still_status check(ncclResult_t e, const char *what, still_error *err)
{
    if (e == ncclSuccess || e == ncclInProgress) return STILL_OK;
    return sti_fail(err, STILL_E_IO, "cuda: %s: NCCL: %s (NCCL_DEBUG=WARN says more)",
                    what, ncclGetErrorString(e));
}

still_status sti_cuda_ranks_name(sti_dev *dev, uint8_t name[STI_DEVICE_NAME],
                                 still_error *err)
{
    struct cudaDeviceProp p;
    STI_CUDA(cudaGetDeviceProperties(&p, dev->ordinal), "asking what the GPU is");
    memset(name, 0, STI_DEVICE_NAME);
    memcpy(name, p.uuid.bytes, sizeof p.uuid.bytes);
    return STILL_OK;
}

still_status sti_cuda_ranks_new_id(uint8_t place[STI_RANKS_ID], still_error *err)
{
    ncclUniqueId id;
    STI_TRY(check(ncclGetUniqueId(&id), "calling the other ranks", err));
    memset(place, 0, STI_RANKS_ID);
    memcpy(place, &id, sizeof id);
    return STILL_OK;
}

still_status sti_cuda_ranks_join(sti_dev *dev, const uint8_t place[STI_RANKS_ID],
                                 int rank, int size, still_error *err)
{
    ncclUniqueId id;
    memcpy(&id, place, sizeof id);
    STI_TRY(check(ncclCommInitRank(&dev->ranks, size, id, rank),
                  "meeting the other ranks", err));
    dev->rank = rank;
    dev->n_ranks = size;
    return STILL_OK;
}

void sti_cuda_ranks_leave(sti_dev *dev)
{
    /* Without waiting for the others: they may be gone. */
    if (dev->ranks) (void)ncclCommAbort(dev->ranks);
    dev->ranks = NULL;
}

/* Rank r's share of n numbers: [*first, *first + result). */
static size_t share(const sti_dev *dev, size_t n, int r, size_t *first)
{
    const size_t each = (n + (size_t)dev->n_ranks - 1) / (size_t)dev->n_ranks;
    *first = each * (size_t)r < n ? each * (size_t)r : n;
    return n - *first < each ? n - *first : each;
}

/* Every share of x to its owner; `parts` [n_ranks, own share] gets this rank's. */
static ncclResult_t deal(sti_dev *dev, const float *x, size_t n, float *parts)
{
    size_t first;
    const size_t own = share(dev, n, dev->rank, &first);
    ncclResult_t e = ncclGroupStart();
    for (int r = 0; r < dev->n_ranks && e == ncclSuccess; r++) {
        const size_t theirs = share(dev, n, r, &first);
        e = ncclSend(x + first, theirs, ncclFloat, r, dev->ranks, dev->stream);
        if (e == ncclSuccess)
            e = ncclRecv(parts + (size_t)r * own, own, ncclFloat, r, dev->ranks,
                         dev->stream);
    }
    const ncclResult_t end = ncclGroupEnd();
    return e == ncclSuccess ? end : e;
}

/* This rank's share to all, theirs to this one. */
static ncclResult_t collect(sti_dev *dev, float *x, size_t n, const float *sum)
{
    size_t first;
    const size_t own = share(dev, n, dev->rank, &first);
    ncclResult_t e = ncclGroupStart();
    for (int r = 0; r < dev->n_ranks && e == ncclSuccess; r++) {
        const size_t theirs = share(dev, n, r, &first);
        e = ncclSend(sum, own, ncclFloat, r, dev->ranks, dev->stream);
        if (e == ncclSuccess)
            e = ncclRecv(x + first, theirs, ncclFloat, r, dev->ranks, dev->stream);
    }
    const ncclResult_t end = ncclGroupEnd();
    return e == ncclSuccess ? end : e;
}

still_status sti_cuda_ranks_sum(sti_dev *dev, float *x, size_t n, still_error *err)
{
    static const char what[] = "adding over ranks";
    for (size_t at = 0; at < n; at += BLOCK) {
        const size_t count = n - at < BLOCK ? n - at : BLOCK;
        size_t first;
        const size_t own = share(dev, count, dev->rank, &first);
        void *scratch;
        STI_TRY(sti_cuda_scratch(dev, (size_t)dev->n_ranks * own * sizeof *x + 1,
                                 &scratch, err));
        STI_TRY(check(deal(dev, x + at, count, scratch), what, err));
        STI_TRY(sti_cuda_add_in_order(dev, scratch, dev->n_ranks, own, err));
        STI_TRY(check(collect(dev, x + at, count, scratch), what, err));
    }
    return STILL_OK;
}
