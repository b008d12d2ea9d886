/* comm.c - joining a job of several processes, and the job of one; see comm.h.
 *
 * Launchers set variables in the environment. Without them MPI is never loaded, so a
 * plain run pays nothing for it. If a launcher is detected but MPI cannot be used,
 * that is an error: N processes that each believe they are alone would write the
 * same folder. */
#include "train/comm.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "train/comm_mpi.h"

struct sti_comm {
    const sti_mpi_module *module;
    sti_mpi *mpi; /* NULL: one rank */
    bool failed;
    int failed_rank; /* agreed on by all ranks; -1: none */
};

/* ---- The launcher -------------------------------------------------------- */

/* A count in the environment; 0: none. */
static int count_of(const char *name)
{
    const char *text = getenv(name);
    const long n = text ? strtol(text, NULL, 10) : 0;
    return n > 0 && n < 1 << 24 ? (int)n : 0;
}

typedef struct launch {
    bool mpi;  /* the launcher works with MPI */
    int ranks; /* how many it started; 0: it does not say */
} launch;

static launch launch_of(void)
{
    static const char *const size[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE",
                                       "MV2_COMM_WORLD_SIZE", "MPI_LOCALNRANKS"};
    static const char *const mark[] = {"PMIX_RANK", "PMI_RANK", "PMI_FD"};
    launch l = {0};
    for (size_t i = 0; i < sizeof size / sizeof *size; i++) {
        const int n = count_of(size[i]);
        l.mpi = l.mpi || n > 0;
        if (n > l.ranks) l.ranks = n;
    }
    for (size_t i = 0; i < sizeof mark / sizeof *mark; i++)
        l.mpi = l.mpi || getenv(mark[i]);
    const int tasks = count_of("SLURM_STEP_NUM_TASKS"); /* set by srun, not by sbatch */
    if (tasks > l.ranks) l.ranks = tasks;
    return l;
}

/* Processes that torchrun started (it sets RANK, WORLD_SIZE and where they would meet);
 * 0: it did not. They meet through PyTorch, which is not here. */
static int torchrun_ranks(void)
{
    const bool meets = getenv("TORCHELASTIC_RUN_ID") || getenv("MASTER_ADDR");
    return meets && getenv("RANK") ? count_of("WORLD_SIZE") : 0;
}

static still_status join(sti_comm *c, still_error *err)
{
    const launch l = launch_of();
    const int torch = torchrun_ranks();
    if (!l.mpi && torch > 1)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "started by torchrun as one of %d processes (WORLD_SIZE) that "
                        "cannot find each other; use mpirun -n %d, or unset RANK and "
                        "WORLD_SIZE for a process that is to work alone",
                        torch, torch);
    if (!l.mpi && l.ranks > 1)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "started by srun as one of %d tasks that cannot find each "
                        "other; use srun --mpi=pmix, or mpirun",
                        l.ranks);
    if (!l.mpi) return STILL_OK;
    const still_status st = sti_mpi_load(&c->module, err);
    if (st != STILL_OK) return l.ranks == 1 ? STILL_OK : st; /* alone it needs no MPI */
    return c->module->join(l.ranks, &c->mpi, err);
}

still_status sti_comm_new(sti_comm **out, still_error *err)
{
    *out = NULL;
    sti_comm *c = sti_alloc(1, sizeof *c);
    if (!c) return sti_fail_memory(err, "ranks", sizeof *c);
    c->failed_rank = -1;
    const still_status st = join(c, err);
    if (st != STILL_OK) {
        free(c);
        return st;
    }
    *out = c;
    return STILL_OK;
}

/* ---- Calls: alone, or over MPI ------------------------------------------- */

static void add_floats(void *y, const void *x, size_t n)
{
    float *to = y;
    const float *from = x;
    for (size_t i = 0; i < n; i++) to[i] += from[i];
}

static void add_doubles(void *y, const void *x, size_t n)
{
    double *to = y;
    const double *from = x;
    for (size_t i = 0; i < n; i++) to[i] += from[i];
}

void sti_comm_free(sti_comm *c)
{
    if (c && c->mpi) c->module->leave(c->mpi, c->failed);
    free(c);
}

int sti_comm_rank(const sti_comm *c)
{
    return c->mpi ? c->module->rank(c->mpi) : 0;
}

int sti_comm_size(const sti_comm *c)
{
    return c->mpi ? c->module->size(c->mpi) : 1;
}

still_status sti_comm_sum(sti_comm *c, float *x, size_t n, still_error *err)
{
    if (!c->mpi) return STILL_OK;
    return c->module->sum(c->mpi, x, n, sizeof *x, add_floats, err);
}

still_status sti_comm_sum_doubles(sti_comm *c, double *x, size_t n, still_error *err)
{
    if (!c->mpi) return STILL_OK;
    return c->module->sum(c->mpi, x, n, sizeof *x, add_doubles, err);
}

still_status sti_comm_tell(sti_comm *c, int root, void *x, size_t bytes,
                           still_error *err)
{
    if (!c->mpi) return STILL_OK;
    return c->module->tell(c->mpi, root, x, bytes, err);
}

still_status sti_comm_agree(sti_comm *c, int root, still_status st, still_error *err)
{
    if (!c->mpi) return st;
    struct {
        still_status status;
        still_error error;
    } said = {.status = st};
    if (st != STILL_OK && err) said.error = *err;
    STI_TRY(c->module->tell(c->mpi, root, &said, sizeof said, err));
    if (said.status == STILL_OK) return STILL_OK;
    if (err) *err = said.error;
    c->failed_rank = root;
    return said.status;
}

still_status sti_comm_settle(sti_comm *c, still_status st, still_error *err)
{
    if (sti_comm_size(c) == 1) return st;
    for (int r = 0; r < sti_comm_size(c); r++) STI_TRY(sti_comm_agree(c, r, st, err));
    return STILL_OK;
}

int sti_comm_failed_rank(const sti_comm *c)
{
    return c ? c->failed_rank : -1;
}

void sti_comm_fail(sti_comm *c)
{
    if (c) c->failed = true;
}

still_status sti_comm_any(sti_comm *c, bool *x, still_error *err)
{
    double count = *x;
    STI_TRY(sti_comm_sum_doubles(c, &count, 1, err));
    *x = count > 0;
    return STILL_OK;
}
