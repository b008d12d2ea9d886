/* comm.h - several processes that train as one (data parallel).
 *
 * Without MPI, or when not started by mpirun or srun, there is one rank and everything
 * here is immediate. Sums are made in the order of the ranks, each number by one rank,
 * so that all ranks hold the same bits and a run can be repeated. All calls but rank
 * and size wait for every rank, and all ranks make them in the same order.
 *
 * A rank that fails alone leaves without telling the others. They notice by the
 * processes of their own machine, and by the launcher everywhere: their call fails, or
 * they are ended. Nobody waits forever. */
#ifndef STI_TRAIN_COMM_H
#define STI_TRAIN_COMM_H

#include "base/error.h"

typedef struct sti_comm sti_comm;

/* Joins the job this process was started in. Once per process is enough, more is fine.
 */
still_status sti_comm_new(sti_comm **out, still_error *err);
void sti_comm_free(sti_comm *c);
/* To be called before sti_comm_free by a rank that gives up: the others may be waiting
 * for it, so the job is to end as one that failed. That happens when this process
 * exits, so that its message comes out first. */
void sti_comm_fail(sti_comm *c);
int sti_comm_rank(const sti_comm *c);
int sti_comm_size(const sti_comm *c);

/* x becomes its sum over ranks, on all of them. */
still_status sti_comm_sum(sti_comm *c, float *x, size_t n, still_error *err);
still_status sti_comm_sum_doubles(sti_comm *c, double *x, size_t n, still_error *err);
/* Whether it is true on any rank. */
still_status sti_comm_any(sti_comm *c, bool *x, still_error *err);
/* `bytes` of rank `root`, on all ranks. */
still_status sti_comm_tell(sti_comm *c, int root, void *x, size_t bytes,
                           still_error *err);
/* The status of rank `root`, with its message, on all ranks. */
still_status sti_comm_agree(sti_comm *c, int root, still_status st, still_error *err);
/* The status of the first rank that failed, with its message, on all ranks. */
still_status sti_comm_settle(sti_comm *c, still_status st, still_error *err);
/* The rank whose failure came out of an agreement, so that all know of it and it alone
 * needs to tell; -1: there was none. */
int sti_comm_failed_rank(const sti_comm *c);

#endif
