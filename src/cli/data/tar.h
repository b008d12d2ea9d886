/* tar.h - the entries of a tar archive, gzipped or not, in the order they come.
 *
 * Names are for the caller to compare: nothing is written anywhere. Plain headers, with the
 * prefix of ustar; what GNU and pax add for longer names comes as entries that are no plain
 * files. */
#ifndef CLI_DATA_TAR_H
#define CLI_DATA_TAR_H

#include "base/error.h"

typedef struct cli_tar cli_tar;

enum { CLI_TAR_NAME = 260 }; /* prefix/name and a NUL */

typedef struct cli_tar_entry {
    char name[CLI_TAR_NAME];
    uint64_t size;
    bool plain; /* a regular file */
} cli_tar_entry;

still_status cli_tar_open(const char *path, cli_tar **out, still_error *err);
void cli_tar_close(cli_tar *t); /* NULL is fine */
/* What was not read of the entry before is passed over. *more false: the end. */
still_status cli_tar_next(cli_tar *t, cli_tar_entry *e, bool *more, still_error *err);
/* Up to n bytes of the entry; *got 0 at its end. */
still_status cli_tar_read(cli_tar *t, void *p, size_t n, size_t *got, still_error *err);

#endif
