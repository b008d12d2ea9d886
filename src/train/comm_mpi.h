/* comm_mpi.h - the table through which comm.c reaches MPI.
 *
 * What calls MPI is a shared module of its own, libstill-mpi.so (comm_mpi.c), loaded into
 * a process that a launcher started; so neither the command nor libstill needs MPI to be
 * installed. The module is of the same version as the library that loads it. */
#ifndef STI_TRAIN_COMM_MPI_H
#define STI_TRAIN_COMM_MPI_H

#include "base/error.h"

typedef struct sti_mpi sti_mpi;

/* y [n] += x [n] */
typedef void (*sti_mpi_add)(void *y, const void *x, size_t n);

typedef struct sti_mpi_module {
    const char *(*version)(void); /* of still */
    /* expected: ranks the launcher speaks of, 0 if it does not. */
    still_status (*join)(int expected, sti_mpi **out, still_error *err);
    void (*leave)(sti_mpi *m, bool failed); /* m may be NULL */
    int (*rank)(const sti_mpi *m);
    int (*size)(const sti_mpi *m);
    /* x [n], elements of `size` bytes, becomes the sum over ranks. */
    still_status (*sum)(sti_mpi *m, void *x, size_t n, size_t size, sti_mpi_add add,
                        still_error *err);
    /* `bytes` of rank root, on all ranks. */
    still_status (*tell)(sti_mpi *m, int root, void *x, size_t bytes, still_error *err);
} sti_mpi_module;

/* The module's one symbol: returns its table, which lives as long as the process. */
#define STI_MPI_ENTRY "sti_mpi_module_v1"
typedef const sti_mpi_module *(*sti_mpi_entry)(void);

/* Loads the module. An error says where it was sought, or why it does not load. */
still_status sti_mpi_load(const sti_mpi_module **out, still_error *err);

#endif
