/* prefix_disk.h - pasts in a folder, so that conversations go on after a restart, and more
 * of them than the memory holds.
 *
 * A past is two files: NAME.past, as still_snapshot_save writes it, and NAME.ids, its
 * tokens, which appears last and makes it count. Both appear whole or not at all and have
 * checksums. A thread of its own writes them. Files of other models are left alone. */
#ifndef SERVER_PREFIX_DISK_H
#define SERVER_PREFIX_DISK_H

#include "still.h"

typedef struct srv_prefix_disk srv_prefix_disk;

typedef struct srv_prefix_disk_params {
    const char *folder; /* made if it is not there */
    size_t limit;       /* bytes of files; the longest unused are removed */
    uint64_t model;  /* tells models and settings apart; the .past files know better */
    int most_tokens; /* of a past */
} srv_prefix_disk_params;

/* Reads what the folder has. */
still_status srv_prefix_disk_open(const srv_prefix_disk_params *p,
                                  srv_prefix_disk **out, still_error *err);
/* Writes what is still to be written. NULL is fine. */
void srv_prefix_disk_close(srv_prefix_disk *d);

/* Takes a past over, whose n tokens are id, and writes it some time. While too many wait it
 * is dropped, or (wait) this call waits. */
void srv_prefix_disk_put(srv_prefix_disk *d, const int32_t *id, int n, bool has_logits,
                         still_snapshot *past, bool wait);

/* The longest past that the n tokens begin with, if it has more than `more_than` of them;
 * NULL: there is none, or it cannot be read. s: a session that it is for. Free it. */
still_snapshot *srv_prefix_disk_get(srv_prefix_disk *d, const still_session *s,
                                    const int32_t *id, int n, int more_than);

typedef struct srv_prefix_disk_counts {
    int pasts;    /* now there */
    size_t bytes; /* of their files */
    uint64_t found, written, failed,
        removed; /* so far: read again, put there, could not
                                                 be, gone for want of room */
} srv_prefix_disk_counts;
/* Any thread. */
srv_prefix_disk_counts srv_prefix_disk_figures(srv_prefix_disk *d);

#endif
