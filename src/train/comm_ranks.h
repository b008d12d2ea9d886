/* comm_ranks.h - the table through which comm.c reaches the other ranks: over MPI
 * (comm_mpi.c) or over sockets (comm_tcp.c). */
#ifndef STI_TRAIN_COMM_RANKS_H
#define STI_TRAIN_COMM_RANKS_H

#include "base/error.h"

typedef struct sti_ranks sti_ranks;

/* y [n] += x [n] */
typedef void (*sti_ranks_add)(void *y, const void *x, size_t n);

typedef struct sti_ranks_table {
    void (*leave)(sti_ranks *m, bool failed); /* m may be NULL */
    int (*rank)(const sti_ranks *m);
    int (*size)(const sti_ranks *m);
    /* x [n], elements of `size` bytes, becomes the sum over ranks, added in their order. */
    still_status (*sum)(sti_ranks *m, void *x, size_t n, size_t size, sti_ranks_add add,
                        still_error *err);
    /* `bytes` of rank root, on all ranks. */
    still_status (*tell)(sti_ranks *m, int root, void *x, size_t bytes,
                         still_error *err);
} sti_ranks_table;

#endif
