/* comm_meet.c - the processes of a job find each other over TCP; see comm_tcp.h.
 *
 * Rank 0 listens at the address that the launcher named. The others connect and say who
 * they are; when all are there, rank 0 stops listening and then tells them, so that a
 * process that joins twice cannot be taken for one of the first meeting. Any other
 * connection is closed, and no more is read from it than a greeting has. The token keeps
 * jobs apart; it is no secret, and the network must be trusted. */
#include "train/comm_tcp.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "base/process.h"

/* In the byte order of the machine: one of another order is a stranger. */
static const uint64_t GREETING = 0x316b6e61726c6c69u, WELCOME = 0x656d6f636c657721u;

typedef struct greeting {
    uint64_t magic;
    unsigned char token[STI_TOKEN];
    char version[16];
    int32_t rank, size;
} greeting;

enum { STRANGER_SECONDS = 2, CONNECT_SECONDS = 5, PAUSE_NS = 100000000 };

/* ---- Bytes --------------------------------------------------------------- */

/* Waits until fd is ready; 0 or an errno. */
static int await(int fd, short events, double until)
{
    for (;;) {
        const double left = until > 0 ? until - sti_now() : 0;
        if (until > 0 && left <= 0) return ETIMEDOUT;
        struct pollfd p = {.fd = fd, .events = events};
        const int n = poll(&p, 1, until > 0 ? (int)(left * 1000) + 1 : -1);
        if (n > 0) return 0;
        if (n < 0 && errno != EINTR) return errno;
    }
}

int sti_tcp_send(int fd, const void *p, size_t n, double until)
{
    for (const char *at = p; n > 0;) {
        const ssize_t sent = send(fd, at, n, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) {
            at += sent;
            n -= (size_t)sent;
            continue;
        }
        const int bad = errno;
        if (bad != EAGAIN && bad != EINTR) return bad;
        const int why = bad == EAGAIN ? await(fd, POLLOUT, until) : 0;
        if (why) return why;
    }
    return 0;
}

int sti_tcp_receive(int fd, void *p, size_t n, double until)
{
    for (char *at = p; n > 0;) {
        const ssize_t got = recv(fd, at, n, MSG_DONTWAIT);
        if (got == 0) return EPIPE;
        if (got > 0) {
            at += got;
            n -= (size_t)got;
            continue;
        }
        const int bad = errno;
        if (bad != EAGAIN && bad != EINTR) return bad;
        const int why = bad == EAGAIN ? await(fd, POLLIN, until) : 0;
        if (why) return why;
    }
    return 0;
}

/* A machine that is switched off says nothing: ask now and then whether it is there. */
static void prepare(int fd)
{
    const int yes = 1, idle = 15, every = 5, times = 6, most_ms = 60000;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every, sizeof every);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &times, sizeof times);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &most_ms, sizeof most_ms);
}

static int look_up(const sti_meeting *w, struct addrinfo **list)
{
    char service[16];
    const struct addrinfo want = {.ai_socktype = SOCK_STREAM,
                                  .ai_flags = AI_NUMERICSERV};
    snprintf(service, sizeof service, "%d", w->port);
    return getaddrinfo(w->host, service, &want, list);
}

/* ---- Rank 0 -------------------------------------------------------------- */

static still_status open_door(const sti_meeting *w, int *door, still_error *err)
{
    struct addrinfo *list = NULL;
    const int found = look_up(w, &list), yes = 1;
    if (found)
        return sti_fail(err, STILL_E_ARG, "MASTER_ADDR '%s': %s", w->host,
                        gai_strerror(found));
    const int fd = socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int bad = fd < 0 ? errno : 0;
    if (!bad) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (!bad && (bind(fd, list->ai_addr, list->ai_addrlen) || listen(fd, w->size)))
        bad = errno;
    freeaddrinfo(list);
    if (!bad) {
        *door = fd;
        return STILL_OK;
    }
    if (fd >= 0) close(fd);
    return sti_fail(err, STILL_E_IO, "rank 0 cannot listen on %s, port %d: %s; %s",
                    w->host, w->port, strerror(bad),
                    bad == EADDRINUSE
                        ? "name a port that is free in STILL_RANKS_PORT, for all ranks"
                        : "MASTER_ADDR must be an address of the machine of rank 0");
}

static bool closed(int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLRDHUP};
    return poll(&p, 1, 0) > 0;
}

/* Accepts a rank that has connected, or closes the connection. Only a process of this job
 * can make it fail. */
static still_status take_in(const sti_meeting *w, int fd, int *of, int *here,
                            still_error *err)
{
    greeting g;
    const int bad = sti_tcp_receive(fd, &g, sizeof g, sti_now() + STRANGER_SECONDS);
    if (bad || g.magic != GREETING || memcmp(g.token, w->token, STI_TOKEN) != 0) {
        close(fd);
        return STILL_OK;
    }
    g.version[sizeof g.version - 1] = 0;
    still_status st = STILL_OK;
    if (strcmp(g.version, still_version()) != 0)
        st = sti_fail(err, STILL_E_UNSUPPORTED,
                      "rank %d is still %s, rank 0 is still %s: all must be the same",
                      g.rank, g.version, still_version());
    else if (g.size != w->size || g.rank < 1 || g.rank >= w->size)
        st = sti_fail(err, STILL_E_ARG,
                      "a process says that it is rank %d of %d, rank 0 is one of %d",
                      g.rank, g.size, w->size);
    else if (of[g.rank] >= 0 && !closed(of[g.rank]))
        st = sti_fail(err, STILL_E_ARG, "two processes say that they are rank %d",
                      g.rank);
    if (st != STILL_OK) {
        close(fd);
        return st;
    }
    if (of[g.rank] >= 0)
        close(of[g.rank]); /* it has come again */
    else
        ++*here;
    of[g.rank] = fd;
    prepare(fd);
    return STILL_OK;
}

static still_status take_in_all(const sti_meeting *w, int door, int *fd,
                                still_error *err)
{
    const double until = sti_now() + w->seconds;
    for (int here = 1; here < w->size;) {
        int bad = await(door, POLLIN, until);
        if (bad == ETIMEDOUT)
            return sti_fail(err, STILL_E_IO,
                            "rank 0 waited %g s at %s, port %d: %d of %d ranks are "
                            "there; STILL_RANKS_TIMEOUT=SECONDS waits longer",
                            w->seconds, w->host, w->port, here, w->size);
        const int s = bad ? -1 : accept4(door, NULL, NULL, SOCK_CLOEXEC);
        if (!bad && s < 0) bad = errno;
        if (s >= 0)
            STI_TRY(take_in(w, s, fd, &here, err));
        else if (bad != EINTR && bad != EAGAIN && bad != ECONNABORTED && bad != EPROTO)
            return sti_fail(err, STILL_E_IO, "rank 0 at %s, port %d: %s", w->host,
                            w->port, strerror(bad));
    }
    return STILL_OK;
}

static still_status host_meeting(const sti_meeting *w, int *fd, still_error *err)
{
    int door;
    STI_TRY(open_door(w, &door, err));
    const still_status st = take_in_all(w, door, fd, err);
    close(door);
    STI_TRY(st);
    for (int r = 1; r < w->size; r++) {
        const int bad = sti_tcp_send(fd[r], &WELCOME, sizeof WELCOME, 0);
        if (bad)
            return sti_fail(err, STILL_E_IO, "rank %d of %d ended: %s", r, w->size,
                            strerror(bad));
    }
    return STILL_OK;
}

/* ---- The others ---------------------------------------------------------- */

static int connect_to(const sti_meeting *w, const char **why)
{
    struct addrinfo *list = NULL;
    const struct timeval most = {.tv_sec = CONNECT_SECONDS}, ever = {0};
    const int found = look_up(w, &list);
    if (found) {
        *why = gai_strerror(found);
        return -1;
    }
    int fd = socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &most, sizeof most);
    if (fd < 0 || connect(fd, list->ai_addr, list->ai_addrlen)) {
        *why = errno == EINPROGRESS ? "no answer" : strerror(errno);
        if (fd >= 0) close(fd);
        fd = -1;
    } else {
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &ever, sizeof ever);
        prepare(fd);
    }
    freeaddrinfo(list);
    return fd;
}

/* Rank 0 may not listen yet, and another job may still be leaving its port: try again. */
static still_status attend_meeting(const sti_meeting *w, int *fd, still_error *err)
{
    const double until = sti_now() + w->seconds;
    greeting g = {.magic = GREETING, .rank = w->rank, .size = w->size};
    memcpy(g.token, w->token, STI_TOKEN);
    snprintf(g.version, sizeof g.version, "%s", still_version());
    const char *why = "no answer";
    do {
        uint64_t answer = 0;
        const int s = connect_to(w, &why);
        if (s >= 0) {
            int bad = sti_tcp_send(s, &g, sizeof g, until);
            if (!bad) bad = sti_tcp_receive(s, &answer, sizeof answer, until);
            if (!bad && answer == WELCOME) {
                *fd = s;
                return STILL_OK;
            }
            close(s);
            why = bad == ETIMEDOUT ? "not all ranks came"
                  : bad            ? "it hung up, so another job may be there"
                                   : "it is no rank of still";
        }
        nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
    } while (sti_now() < until);
    return sti_fail(
        err, STILL_E_IO,
        "rank %d of %d did not reach rank 0 at %s, port %d, in %g s: %s; "
        "STILL_RANKS_TIMEOUT=SECONDS waits longer, STILL_RANKS_PORT names another "
        "port",
        w->rank, w->size, w->host, w->port, w->seconds, why);
}

still_status sti_tcp_meet(const sti_meeting *w, int *fd, still_error *err)
{
    for (int r = 0; r < w->size; r++) fd[r] = -1;
    const still_status st =
        w->rank == 0 ? host_meeting(w, fd, err) : attend_meeting(w, fd, err);
    for (int r = 0; st != STILL_OK && r < w->size; r++) {
        if (fd[r] >= 0) close(fd[r]);
        fd[r] = -1;
    }
    return st;
}
