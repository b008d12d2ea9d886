/* comm.c - joining a job of several processes, and the job of one; see comm.h.
 *
 * Launchers set variables in the environment. Without them MPI is never loaded and no
 * socket opened, so a plain run pays nothing for it. If a launcher is detected but the
 * others cannot be found, that is an error: N processes that each believe they are
 * alone would write the same folder. */
#include "train/comm.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/sha256.h"
#include "train/comm_mpi.h"
#include "train/comm_tcp.h"

struct sti_comm {
    const sti_ranks_table *table;
    sti_ranks *ranks; /* NULL: one rank */
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

/* A number that a launcher must have set, first <= x <= last. */
static still_status number_of(const char *name, long first, long last, int *x,
                              still_error *err)
{
    const char *text = getenv(name);
    char *end = NULL;
    const long n = text ? strtol(text, &end, 10) : -1;
    if (!text || end == text || *end || n < first || n > last)
        return sti_fail(err, STILL_E_ARG,
                        "started as one of several processes, but %s is %s%s%s, "
                        "expected %ld to %ld",
                        name, text ? "'" : "", text ? text : "not set", text ? "'" : "",
                        first, last);
    *x = (int)n;
    return STILL_OK;
}

/* What the processes of one job have in common, and those of another have not. */
static void name_job(unsigned char token[static STI_TOKEN])
{
    static const char *const name[] = {"TORCHELASTIC_RUN_ID",
                                       "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID",
                                       "SLURM_STEP_ID"};
    sti_sha256 h;
    sti_sha256_start(&h);
    for (size_t i = 0; i < sizeof name / sizeof *name; i++) {
        const char *text = getenv(name[i]);
        if (text) sti_sha256_add(&h, text, strlen(text));
        sti_sha256_add(&h, "", 1);
    }
    sti_sha256_end(&h, token);
}

/* Meets the other processes where MASTER_ADDR and MASTER_PORT say, rank and size being in
 * the variables of these names. */
static still_status meet(sti_comm *c, const char *rank, int size, still_error *err)
{
    sti_meeting w = {.host = getenv("MASTER_ADDR"), .size = size, .seconds = 300};
    const char *store = getenv("TORCHELASTIC_USE_AGENT_STORE");
    if (!w.host || !*w.host)
        return sti_fail(err, STILL_E_ARG,
                        "started as one of %d processes, but MASTER_ADDR, the machine "
                        "of rank 0, is not set",
                        size);
    STI_TRY(number_of(rank, 0, size - 1, &w.rank, err));
    if (getenv("STILL_RANKS_PORT")) {
        STI_TRY(number_of("STILL_RANKS_PORT", 1, 65535, &w.port, err));
    } else {
        STI_TRY(number_of("MASTER_PORT", 1, 65534, &w.port, err));
        /* torchrun itself listens there. */
        if (store && strcmp(store, "True") == 0) w.port++;
    }
    int seconds = 0;
    if (getenv("STILL_RANKS_TIMEOUT")) {
        STI_TRY(number_of("STILL_RANKS_TIMEOUT", 1, 1 << 20, &seconds, err));
        w.seconds = seconds;
    }
    name_job(w.token);
    c->table = sti_tcp_table();
    return sti_tcp_join(&w, &c->ranks, err);
}

static still_status join_mpi(sti_comm *c, int ranks, still_error *err)
{
    const sti_mpi_module *module;
    const still_status st = sti_mpi_load(&module, err);
    if (st != STILL_OK) return ranks == 1 ? STILL_OK : st; /* alone it needs no MPI */
    c->table = &module->table;
    return module->join(ranks, &c->ranks, err);
}

/* torchrun goes before MPI, under whose launcher it may have been started; RANK and
 * MASTER_ADDR without it come after, since scripts set them under mpirun, too. */
static still_status join(sti_comm *c, still_error *err)
{
    const launch l = launch_of();
    const int torch = getenv("RANK") ? count_of("WORLD_SIZE") : 0;
    if (getenv("TORCHELASTIC_RUN_ID") && torch > 0)
        return torch > 1 ? meet(c, "RANK", torch, err) : STILL_OK;
    if (l.mpi) return join_mpi(c, l.ranks, err);
    if (torch > 1 && getenv("MASTER_ADDR")) return meet(c, "RANK", torch, err);
    if (l.ranks < 2) return STILL_OK;
    if (getenv("MASTER_ADDR")) return meet(c, "SLURM_PROCID", l.ranks, err);
    return sti_fail(err, STILL_E_UNSUPPORTED,
                    "started by srun as one of %d tasks that cannot find each other; "
                    "use srun --mpi=pmix, or set MASTER_ADDR to the machine of task 0 "
                    "and MASTER_PORT to a free port",
                    l.ranks);
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

/* ---- Calls: alone, or with others ---------------------------------------- */

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
    if (c && c->ranks) c->table->leave(c->ranks, c->failed);
    free(c);
}

int sti_comm_rank(const sti_comm *c)
{
    return c->ranks ? c->table->rank(c->ranks) : 0;
}

int sti_comm_size(const sti_comm *c)
{
    return c->ranks ? c->table->size(c->ranks) : 1;
}

still_status sti_comm_sum(sti_comm *c, float *x, size_t n, still_error *err)
{
    if (!c->ranks) return STILL_OK;
    return c->table->sum(c->ranks, x, n, sizeof *x, add_floats, err);
}

still_status sti_comm_sum_doubles(sti_comm *c, double *x, size_t n, still_error *err)
{
    if (!c->ranks) return STILL_OK;
    return c->table->sum(c->ranks, x, n, sizeof *x, add_doubles, err);
}

still_status sti_comm_tell(sti_comm *c, int root, void *x, size_t bytes,
                           still_error *err)
{
    if (!c->ranks) return STILL_OK;
    return c->table->tell(c->ranks, root, x, bytes, err);
}

still_status sti_comm_agree(sti_comm *c, int root, still_status st, still_error *err)
{
    if (!c->ranks) return st;
    struct {
        still_status status;
        still_error error;
    } said = {.status = st};
    if (st != STILL_OK && err) said.error = *err;
    STI_TRY(c->table->tell(c->ranks, root, &said, sizeof said, err));
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
