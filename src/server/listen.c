/* listen.c - see listen.h. We make the socket rather than libmicrohttpd, so that an
 * error has the system's message. */
#include "server/listen.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/error.h"

enum { BACKLOG = SOMAXCONN }; /* many may come at once */

static int open_socket(const struct addrinfo *a)
{
    int yes = 1;
    int fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK,
                    a->ai_protocol);
    if (fd < 0) return -1;
    /* Allow a port whose last connections still linger. */
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, BACKLOG) == 0) return fd;
    int saved = errno;
    close(fd);
    errno = saved;
    return -1;
}

static int bound_port(int fd, bool *local)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } at = {.v6 = {0}};
    socklen_t n = sizeof at;
    *local = false;
    if (getsockname(fd, &at.any, &n) != 0) return 0;
    if (at.any.sa_family == AF_INET6) {
        *local = IN6_IS_ADDR_LOOPBACK(&at.v6.sin6_addr);
        return ntohs(at.v6.sin6_port);
    }
    *local = ntohl(at.v4.sin_addr.s_addr) >> 24 == 127;
    return ntohs(at.v4.sin_port);
}

still_status srv_listen(const char *host, int port, int *fd, int *bound, bool *local,
                        still_error *err)
{
    char service[16];
    struct addrinfo want = {.ai_family = AF_UNSPEC,
                            .ai_socktype = SOCK_STREAM,
                            .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *list = NULL;
    *fd = -1;
    snprintf(service, sizeof service, "%d", port);
    int found = getaddrinfo(host, service, &want, &list);
    if (found != 0)
        return sti_fail(err, STILL_E_ARG, "cannot listen on host '%s': %s", host,
                        gai_strerror(found));
    for (const struct addrinfo *a = list; a && *fd < 0; a = a->ai_next)
        *fd = open_socket(a);
    int saved = errno;
    freeaddrinfo(list);
    if (*fd < 0)
        return sti_fail(err, STILL_E_IO, "cannot listen on %s, port %d: %s", host, port,
                        strerror(saved));
    *bound = bound_port(*fd, local);
    return STILL_OK;
}

bool srv_peer_gone(int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLRDHUP};
    return poll(&p, 1, 0) > 0 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR));
}

bool srv_peer_done(int fd)
{
    char byte;
    return srv_peer_gone(fd) && recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) <= 0;
}
