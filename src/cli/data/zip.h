/* zip.h - the entries of a zip archive, one at a time into memory.
 *
 * The archive is read through a function, so that it may lie in a file, in memory or on a
 * server. What it says is not trusted: places and sizes are checked against its length, an
 * entry unpacks to the size that the directory states and no further, and its CRC must
 * match. Names are only compared, never used as paths. Stored and deflated entries; no
 * encryption, no archives of several parts, none beyond 4 GiB (zip64). */
#ifndef CLI_DATA_ZIP_H
#define CLI_DATA_ZIP_H

#include "base/buf.h"
#include "base/error.h"

/* Fills p with the n bytes from `at` on; n bytes are there. */
typedef still_status (*cli_read_at)(void *user, uint64_t at, void *p, size_t n,
                                    still_error *err);

typedef struct cli_zip cli_zip;

/* `what` names the archive in errors. */
still_status cli_zip_open(const char *what, uint64_t size, cli_read_at read, void *user,
                          cli_zip **out, still_error *err);
void cli_zip_close(cli_zip *z); /* NULL is fine */

/* The only entry whose name is `tail` or ends in /tail; an error if there is none, or more
 * than one. */
still_status cli_zip_find(const cli_zip *z, const char *tail, size_t *out,
                          still_error *err);
size_t cli_zip_count(const cli_zip *z);
/* Appends an entry's bytes to *out. More than `most` of them are an error. */
still_status cli_zip_read(const cli_zip *z, size_t entry, uint64_t most, sti_buf *out,
                          still_error *err);

#endif
