/* comm_mpi.h - what comm.c needs of MPI; comm_mpi.c exists where MPI was found. */
#ifndef STI_TRAIN_COMM_MPI_H
#define STI_TRAIN_COMM_MPI_H

#include "base/error.h"

typedef struct sti_mpi sti_mpi;

/* expected: ranks the launcher speaks of, 0 if it does not. */
still_status sti_mpi_join(int expected, sti_mpi **out, still_error *err);
void sti_mpi_leave(sti_mpi *m, bool failed);
int sti_mpi_rank(const sti_mpi *m);
int sti_mpi_size(const sti_mpi *m);

/* x [n], elements of `size` bytes, becomes the sum over ranks; add: y [n] += x [n]. */
typedef void (*sti_mpi_add)(void *y, const void *x, size_t n);
still_status sti_mpi_sum(sti_mpi *m, void *x, size_t n, size_t size, sti_mpi_add add,
                         still_error *err);
/* `bytes` of rank root, on all ranks. */
still_status sti_mpi_tell(sti_mpi *m, int root, void *x, size_t bytes,
                          still_error *err);

#endif
