/* comm_mpi.c - ranks over MPI: the module libstill-mpi.so, built where CMake found MPI.
 *
 * Sums: a block of at most BLOCK bytes is cut into one slice per rank. Every rank sends
 * every slice to its owner, which adds them in the order of the ranks and sends the
 * result to all. So each rank transfers about twice the data, whatever the number of
 * ranks, and one rank adds each number in a fixed order: MPI's own reductions promise
 * neither the order nor the same bits everywhere.
 *
 * Waiting: all transfers are non-blocking, and one loop waits for them. It sleeps
 * between polls, because a waiting rank must not take cores from the threads of a
 * computing one; and it checks that the processes on this machine are alive, because
 * MPI itself would wait for a dead one until the launcher ends the job.
 *
 * MPI can be initialized only once per process, so it is finalized when the process
 * exits. */
#include "train/comm_mpi.h"
#include "base/process.h"

#include <errno.h>
#include <mpi.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"

enum { BLOCK = 4 << 20, TAG = 1, NAME_ROOM = 64 };

/* Where a rank runs; ranks on one host and in one PID namespace can see whether the
 * other is alive. */
typedef struct place {
    char host[NAME_ROOM], space[NAME_ROOM];
    long process;
} place;

struct sti_ranks {
    MPI_Comm comm;
    int rank, size;
    bool ours;        /* we started MPI */
    place *at;        /* [size] */
    MPI_Request *req; /* [2 size] */
    void *parts;      /* [BLOCK]: contributions to this rank's slice */
};

/* ---- Errors -------------------------------------------------------------- */

static still_status fail_mpi(const sti_ranks *m, int code, const char *what,
                             still_error *err)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    return sti_fail(err, STILL_E_IO, "rank %d of %d: %s: %s", m->rank, m->size, what,
                    text);
}

static bool gone(const sti_ranks *m, int rank)
{
    const place *me = &m->at[m->rank], *other = &m->at[rank];
    return rank != m->rank && other->process > 0 &&
           strcmp(me->host, other->host) == 0 && strcmp(me->space, other->space) == 0 &&
           kill((pid_t)other->process, 0) != 0 && errno == ESRCH;
}

/* Waits for the first n requests. After a failure they are abandoned: the job is
 * over. */
static still_status wait_all(sti_ranks *m, int n, const char *what, still_error *err)
{
    const double start = sti_now();
    double looked = start;
    for (;;) {
        int done = 0;
        const int code = MPI_Testall(n, m->req, &done, MPI_STATUSES_IGNORE);
        if (code != MPI_SUCCESS) return fail_mpi(m, code, what, err);
        if (done) return STILL_OK;
        const double t = sti_now();
        if (t - start < 0.0005) continue; /* usually the others arrive this soon */
        if (t - looked > 0.05) {
            looked = t;
            for (int r = 0; r < m->size; r++)
                if (gone(m, r))
                    return sti_fail(err, STILL_E_IO,
                                    "rank %d of %d ended (process %ld)", r, m->size,
                                    m->at[r].process);
        }
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
}

/* ---- Joining and leaving ------------------------------------------------- */

static void end_mpi(void)
{
    int ended = 0;
    MPI_Finalized(&ended);
    if (!ended) MPI_Finalize();
}

/* Registered after end_mpi, so it runs before it, and does not return. */
static void end_job(void)
{
    int ended = 0;
    MPI_Finalized(&ended);
    if (!ended) MPI_Abort(MPI_COMM_WORLD, 1);
}

static still_status start_mpi(bool *ours, still_error *err)
{
    int started = 0, ended = 0, level;
    MPI_Initialized(&started);
    MPI_Finalized(&ended);
    *ours = false;
    if (ended)
        return sti_fail(err, STILL_E_ARG,
                        "MPI has been ended in this process and cannot start again");
    if (started) return STILL_OK;
    *ours = true;
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &level) != MPI_SUCCESS)
        return sti_fail(err, STILL_E_IO, "MPI does not start");
    return atexit(end_mpi) == 0 ? STILL_OK : sti_fail_memory(err, "MPI", 0);
}

static still_status find_places(sti_ranks *m, still_error *err)
{
    place me = {.process = (long)getpid()};
    gethostname(me.host, sizeof me.host - 1);
    if (readlink("/proc/self/ns/pid", me.space, sizeof me.space - 1) < 0)
        me.process = 0; /* unknown to others */
    const int code = MPI_Allgather(&me, (int)sizeof me, MPI_BYTE, m->at, (int)sizeof me,
                                   MPI_BYTE, m->comm);
    return code == MPI_SUCCESS ? STILL_OK : fail_mpi(m, code, "meeting", err);
}

static still_status enter(sti_ranks *m, int expected, still_error *err)
{
    STI_TRY(start_mpi(&m->ours, err));
    MPI_Comm_rank(MPI_COMM_WORLD, &m->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &m->size);
    if (m->size == 1 && expected > 1)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "the launcher started %d processes, but MPI sees one: the "
                        "launcher must belong to the MPI that still was built with "
                        "(srun: --mpi=pmix)",
                        expected);
    int code = MPI_Comm_dup(MPI_COMM_WORLD, &m->comm);
    if (code != MPI_SUCCESS) return fail_mpi(m, code, "joining", err);
    code = MPI_Comm_set_errhandler(m->comm, MPI_ERRORS_RETURN);
    if (code != MPI_SUCCESS) return fail_mpi(m, code, "joining", err);
    const size_t size = (size_t)m->size;
    m->at = sti_alloc(size, sizeof *m->at);
    m->req = sti_alloc(2 * size, sizeof *m->req);
    m->parts = sti_alloc(BLOCK, 1);
    if (!m->at || !m->req || !m->parts) return sti_fail_memory(err, "ranks", BLOCK);
    return find_places(m, err);
}

static void leave(sti_ranks *m, bool failed)
{
    if (!m) return;
    /* A program that started MPI itself also ends its job itself. */
    if (failed && m->ours && m->size > 1) atexit(end_job);
    if (!failed) MPI_Comm_free(&m->comm);
    free(m->at);
    /* After a failure MPI may still write to what was being received. */
    if (!failed) free(m->req);
    if (!failed) free(m->parts);
    free(m);
}

static still_status join(int expected, sti_ranks **out, still_error *err)
{
    *out = NULL;
    sti_ranks *m = sti_alloc(1, sizeof *m);
    if (!m) return sti_fail_memory(err, "ranks", sizeof *m);
    m->comm = MPI_COMM_NULL;
    const still_status st = enter(m, expected, err);
    if (st != STILL_OK) {
        leave(m, true);
        return st;
    }
    *out = m;
    return STILL_OK;
}

static int rank_of(const sti_ranks *m)
{
    return m->rank;
}

static int size_of(const sti_ranks *m)
{
    return m->size;
}

/* ---- Calls --------------------------------------------------------------- */

/* Elements of rank r's slice of n: [*first, *first + result). */
static size_t slice_of(const sti_ranks *m, size_t n, int r, size_t *first)
{
    const size_t each = (n + (size_t)m->size - 1) / (size_t)m->size;
    *first = each * (size_t)r < n ? each * (size_t)r : n;
    return n - *first < each ? n - *first : each;
}

static int send_to(sti_ranks *m, const void *x, size_t bytes, int to, int *n)
{
    return MPI_Isend(x, (int)bytes, MPI_BYTE, to, TAG, m->comm, &m->req[(*n)++]);
}

static int receive_from(sti_ranks *m, void *x, size_t bytes, int from, int *n)
{
    return MPI_Irecv(x, (int)bytes, MPI_BYTE, from, TAG, m->comm, &m->req[(*n)++]);
}

/* One block: size * slice <= BLOCK bytes. */
static still_status sum_block(sti_ranks *m, unsigned char *x, size_t n, size_t size,
                              sti_ranks_add add, still_error *err)
{
    static const char what[] = "summing gradients";
    size_t first, theirs;
    const size_t mine = slice_of(m, n, m->rank, &first);
    unsigned char *own = x + first * size, *parts = m->parts;
    const size_t bytes = mine * size;
    int n_req = 0, code = MPI_SUCCESS;
    for (int r = 0; r < m->size && code == MPI_SUCCESS; r++) {
        if (r == m->rank) continue;
        const size_t count = slice_of(m, n, r, &theirs);
        code = receive_from(m, parts + (size_t)r * bytes, bytes, r, &n_req);
        if (code == MPI_SUCCESS)
            code = send_to(m, x + theirs * size, count * size, r, &n_req);
    }
    if (code != MPI_SUCCESS) return fail_mpi(m, code, what, err);
    memcpy(parts + (size_t)m->rank * bytes, own, bytes);
    STI_TRY(wait_all(m, n_req, what, err));

    memcpy(own, parts, bytes);
    for (int r = 1; r < m->size; r++) add(own, parts + (size_t)r * bytes, mine);

    n_req = 0;
    for (int r = 0; r < m->size && code == MPI_SUCCESS; r++) {
        if (r == m->rank) continue;
        const size_t count = slice_of(m, n, r, &theirs);
        code = receive_from(m, x + theirs * size, count * size, r, &n_req);
        if (code == MPI_SUCCESS) code = send_to(m, own, bytes, r, &n_req);
    }
    if (code != MPI_SUCCESS) return fail_mpi(m, code, what, err);
    return wait_all(m, n_req, what, err);
}

static still_status sum(sti_ranks *m, void *x, size_t n, size_t size, sti_ranks_add add,
                        still_error *err)
{
    if (m->size == 1) return STILL_OK;
    /* Slices are rounded up, so a block leaves room for one element a rank. */
    const size_t block = (size_t)BLOCK / size - (size_t)m->size;
    for (size_t at = 0; at < n; at += block)
        STI_TRY(sum_block(m, (unsigned char *)x + at * size,
                          n - at < block ? n - at : block, size, add, err));
    return STILL_OK;
}

static still_status tell(sti_ranks *m, int root, void *x, size_t bytes,
                         still_error *err)
{
    int n_req = 0, code = MPI_SUCCESS;
    if (m->rank != root)
        code = receive_from(m, x, bytes, root, &n_req);
    else
        for (int r = 0; r < m->size && code == MPI_SUCCESS; r++)
            if (r != root) code = send_to(m, x, bytes, r, &n_req);
    if (code != MPI_SUCCESS) return fail_mpi(m, code, "agreeing", err);
    return wait_all(m, n_req, "agreeing", err);
}

/* ---- The table ----------------------------------------------------------- */

STILL_API const sti_mpi_module *sti_mpi_module_v1(void);

const sti_mpi_module *sti_mpi_module_v1(void)
{
    static const sti_mpi_module table = {
        .version = still_version,
        .join = join,
        .table = {.leave = leave,
                  .rank = rank_of,
                  .size = size_of,
                  .sum = sum,
                  .tell = tell},
    };
    return &table;
}
