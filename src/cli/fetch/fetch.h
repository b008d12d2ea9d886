/* fetch.h - one file of a hub, resumable and verified. */
#ifndef CLI_FETCH_FETCH_H
#define CLI_FETCH_FETCH_H

#include "cli/fetch/http.h"
#include "cli/progress.h"

typedef struct cli_file {
    char *name;   /* path in the repository, checked: relative, no ".." */
    int64_t size; /* -1: the hub does not say */
    int64_t most; /* bytes of a file whose size is not known; 0: any number */
    char sum[65]; /* sha256 (64 digits) or git blob name (40); "": not said */
} cli_file;

/* Downloads url to path. While it is incomplete it is path.part, with the server's
 * tag in path.etag; a later call continues from there if the file is still the same.
 * Dropped connections are retried. After STILL_OK the file has f's size and
 * checksum, or if f had none, those of the server's headers. After failure path is
 * unchanged. */
still_status cli_fetch(cli_http *h, const char *url, const char *path, cli_file *f,
                       cli_progress *bar, still_error *err);

#endif
