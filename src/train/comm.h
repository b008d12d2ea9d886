/* comm.h - several processes that train as one (data parallel).
 *
 * They meet over MPI (mpirun, srun) or over sockets (torchrun, srun). A process that none
 * of these started is alone, and every call returns at once. One rank computes each
 * sum, in the order of the ranks, so that all ranks hold the same bits and a run can be
 * repeated. All calls except rank and size wait for every rank, and all ranks make them
 * in the same order.
 *
 * A rank that fails alone exits without telling the others. Over sockets, and with MPI on
 * the same machine, they notice that its process is gone, elsewhere the launcher does:
 * their call fails, or they are ended. No rank waits forever. */
#ifndef STI_TRAIN_COMM_H
#define STI_TRAIN_COMM_H

#include "base/error.h"

typedef struct sti_comm sti_comm;

/* Joins the job this process was started in. May be called more than once. */
still_status sti_comm_new(sti_comm **out, still_error *err);
void sti_comm_free(sti_comm *c);
/* Call before sti_comm_free on a rank that gives up: others may be waiting for it,
 * so the whole job must fail. It ends when this process exits, so that its message
 * comes first. */
void sti_comm_fail(sti_comm *c);
int sti_comm_rank(const sti_comm *c);
int sti_comm_size(const sti_comm *c);

/* Replaces x by its sum over ranks, on all ranks. */
still_status sti_comm_sum(sti_comm *c, float *x, size_t n, still_error *err);
still_status sti_comm_sum_doubles(sti_comm *c, double *x, size_t n, still_error *err);
/* Logical or over ranks. */
still_status sti_comm_any(sti_comm *c, bool *x, still_error *err);
/* Broadcasts `bytes` bytes from rank `root`. */
still_status sti_comm_tell(sti_comm *c, int root, void *x, size_t bytes,
                           still_error *err);
/* The status of rank `root`, with its message, on all ranks. */
still_status sti_comm_agree(sti_comm *c, int root, still_status st, still_error *err);
/* The status of the first rank that failed, with its message, on all ranks. */
still_status sti_comm_settle(sti_comm *c, still_status st, still_error *err);
/* The rank whose failure all ranks agreed on; only it needs to report. -1: none. */
int sti_comm_failed_rank(const sti_comm *c);

#endif
