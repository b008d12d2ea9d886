/* comm_tcp.c - the calls of ranks over sockets; see comm_tcp.h.
 *
 * Everything goes through rank 0: it adds what the others send, in the order of the ranks,
 * block by block, and sends each block back. So the bits are those of MPI (comm_mpi.c), and
 * a single connection a rank is all there is to set up; but what rank 0 sends and receives
 * grows with the number of ranks. A dozen are fine; for more there is MPI.
 *
 * A process that ends closes its sockets; those that wait for it see that and end, too. */
#include "train/comm_tcp.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"

enum { BLOCK = 1 << 20 };

struct sti_ranks {
    int rank, size;
    int *fd;             /* [size], see sti_tcp_meet */
    unsigned char *part; /* [BLOCK]: what another rank adds */
};

/* Goes before every block: all ranks must be in the same call, with as many bytes. */
typedef struct head {
    uint32_t call, root;
    uint64_t bytes;
} head;

enum { SUM = 1, TELL = 2 };

static still_status ended(const sti_ranks *m, int rank, int bad, still_error *err)
{
    const bool plain = bad == EPIPE || bad == ECONNRESET;
    return sti_fail(err, STILL_E_IO, "rank %d of %d ended%s%s", rank, m->size,
                    plain ? "" : ": ", plain ? "" : strerror(bad));
}

static still_status send_to(const sti_ranks *m, int rank, const head *h, const void *x,
                            still_error *err)
{
    int bad = sti_tcp_send(m->fd[rank], h, sizeof *h, 0);
    if (!bad) bad = sti_tcp_send(m->fd[rank], x, h->bytes, 0);
    return bad ? ended(m, rank, bad, err) : STILL_OK;
}

static still_status receive_from(const sti_ranks *m, int rank, const head *want,
                                 void *x, still_error *err)
{
    head h;
    int bad = sti_tcp_receive(m->fd[rank], &h, sizeof h, 0);
    if (!bad &&
        (h.call != want->call || h.root != want->root || h.bytes != want->bytes))
        return sti_fail(err, STILL_E_IO,
                        "rank %d of %d does something else than rank %d: all must be "
                        "started with the same arguments",
                        rank, m->size, m->rank);
    if (!bad) bad = sti_tcp_receive(m->fd[rank], x, want->bytes, 0);
    return bad ? ended(m, rank, bad, err) : STILL_OK;
}

static still_status sum_block(sti_ranks *m, unsigned char *x, size_t n, size_t size,
                              sti_ranks_add add, still_error *err)
{
    const head h = {.call = SUM, .bytes = n * size};
    if (m->rank != 0) {
        STI_TRY(send_to(m, 0, &h, x, err));
        return receive_from(m, 0, &h, x, err);
    }
    for (int r = 1; r < m->size; r++) {
        STI_TRY(receive_from(m, r, &h, m->part, err));
        add(x, m->part, n);
    }
    for (int r = 1; r < m->size; r++) STI_TRY(send_to(m, r, &h, x, err));
    return STILL_OK;
}

static still_status sum(sti_ranks *m, void *x, size_t n, size_t size, sti_ranks_add add,
                        still_error *err)
{
    const size_t block = (size_t)BLOCK / size;
    for (size_t at = 0; at < n; at += block)
        STI_TRY(sum_block(m, (unsigned char *)x + at * size,
                          n - at < block ? n - at : block, size, add, err));
    return STILL_OK;
}

static still_status tell(sti_ranks *m, int root, void *x, size_t bytes,
                         still_error *err)
{
    const head h = {.call = TELL, .root = (uint32_t)root, .bytes = bytes};
    if (m->rank == root && root != 0) return send_to(m, 0, &h, x, err);
    if (m->rank != 0) return receive_from(m, 0, &h, x, err);
    if (root != 0) STI_TRY(receive_from(m, root, &h, x, err));
    for (int r = 1; r < m->size; r++)
        if (r != root) STI_TRY(send_to(m, r, &h, x, err));
    return STILL_OK;
}

static void leave(sti_ranks *m, bool failed)
{
    (void)failed; /* closing tells the others either way */
    if (!m) return;
    for (int r = 0; m->fd && r < m->size; r++)
        if (m->fd[r] >= 0) close(m->fd[r]);
    free(m->fd);
    free(m->part);
    free(m);
}

static int rank_of(const sti_ranks *m)
{
    return m->rank;
}

static int size_of(const sti_ranks *m)
{
    return m->size;
}

still_status sti_tcp_join(const sti_meeting *w, sti_ranks **out, still_error *err)
{
    *out = NULL;
    sti_ranks *m = sti_alloc(1, sizeof *m);
    if (!m) return sti_fail_memory(err, "ranks", sizeof *m);
    m->rank = w->rank;
    m->part = sti_alloc(BLOCK, 1);
    m->fd = sti_alloc((size_t)w->size, sizeof *m->fd);
    still_status st =
        m->part && m->fd ? STILL_OK : sti_fail_memory(err, "ranks", BLOCK);
    if (st == STILL_OK) st = sti_tcp_meet(w, m->fd, err);
    if (st != STILL_OK) {
        leave(m, true);
        return st;
    }
    m->size = w->size;
    *out = m;
    return STILL_OK;
}

const sti_ranks_table *sti_tcp_table(void)
{
    static const sti_ranks_table table = {
        .leave = leave, .rank = rank_of, .size = size_of, .sum = sum, .tell = tell};
    return &table;
}
