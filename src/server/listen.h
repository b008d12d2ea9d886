/* listen.h - the socket a server listens on. */
#ifndef SERVER_LISTEN_H
#define SERVER_LISTEN_H

#include "still.h"

/* A listening TCP socket on host (a name or an address) and port (0: any free one).
 * *bound is the port it got; *local: only this machine reaches it. close() *fd. */
still_status srv_listen(const char *host, int port, int *fd, int *bound, bool *local,
                        still_error *err);
/* Whether the peer has closed its connection, as far as the system knows. */
bool srv_peer_gone(int fd);

/* The same, and all it has sent has been read. */
bool srv_peer_done(int fd);

#endif
