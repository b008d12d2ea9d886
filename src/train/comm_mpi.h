/* comm_mpi.h - MPI as a module.
 *
 * The code that calls MPI is a separate shared module, libstill-mpi.so (comm_mpi.c),
 * which is loaded only into a process that a launcher started; so neither the
 * command nor libstill needs MPI to be installed. The module and the library that
 * loads it must have the same version. */
#ifndef STI_TRAIN_COMM_MPI_H
#define STI_TRAIN_COMM_MPI_H

#include "train/comm_ranks.h"

typedef struct sti_mpi_module {
    const char *(*version)(void); /* of still */
    /* expected: the number of ranks the launcher announced; 0: unknown. */
    still_status (*join)(int expected, sti_ranks **out, still_error *err);
    sti_ranks_table table;
} sti_mpi_module;

/* The module's one symbol: returns its table, which lives as long as the process. */
#define STI_MPI_ENTRY "sti_mpi_module_v1"
typedef const sti_mpi_module *(*sti_mpi_entry)(void);

/* Loads the module. An error says where it was searched for, or why it did not load. */
still_status sti_mpi_load(const sti_mpi_module **out, still_error *err);

#endif
