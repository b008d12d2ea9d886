/* comm_tcp.h - ranks over plain sockets, for launchers that say where to meet and bring no
 * MPI: torchrun, and srun with MASTER_ADDR and MASTER_PORT. */
#ifndef STI_TRAIN_COMM_TCP_H
#define STI_TRAIN_COMM_TCP_H

#include "train/comm_ranks.h"

enum { STI_TOKEN = 32 };

/* Where the processes of a job meet. */
typedef struct sti_meeting {
    const char *host; /* of rank 0, which listens there and nowhere else */
    int port;
    int rank, size;
    double seconds;                 /* how long to wait for the others */
    unsigned char token[STI_TOKEN]; /* the same in all processes of a job */
} sti_meeting;

/* Waits until all are there. fd [size]: sockets to the other ranks, rank 0's; the others
 * have fd[0] alone. -1 elsewhere and after a failure. */
still_status sti_tcp_meet(const sti_meeting *w, int *fd, still_error *err);

/* Sends or receives n bytes. until: by sti_now(), when to give up; 0: never. Returns 0 or
 * an errno, EPIPE where the other side has closed. */
int sti_tcp_send(int fd, const void *p, size_t n, double until);
int sti_tcp_receive(int fd, void *p, size_t n, double until);

still_status sti_tcp_join(const sti_meeting *w, sti_ranks **out, still_error *err);
const sti_ranks_table *sti_tcp_table(void);

#endif
