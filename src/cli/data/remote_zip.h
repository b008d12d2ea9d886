/* remote_zip.h - entries of a zip archive on a server, without the rest of it.
 *
 * The questions of ARC are a four-hundredth of the archive that they are published in. A
 * server that answers requests for ranges of bytes gives the archive's directory and these
 * entries alone; each is checked against its own SHA-256, since nobody saw the whole. */
#ifndef CLI_DATA_REMOTE_ZIP_H
#define CLI_DATA_REMOTE_ZIP_H

#include "base/buf.h"
#include "cli/fetch/http.h"
#include "cli/progress.h"

typedef struct cli_remote cli_remote;

/* The archive at url has `size` bytes. http stays open as long as *out. STILL_E_UNSUPPORTED:
 * the server gives no ranges. bar counts the bytes that come. */
still_status cli_remote_open(cli_http *http, const char *url, uint64_t size,
                             cli_progress *bar, cli_remote **out, still_error *err);
void cli_remote_close(cli_remote *r); /* NULL is fine */
/* Appends the entry whose name ends in `tail`, and compares its checksum. */
still_status cli_remote_read(cli_remote *r, const char *tail, const char *sum,
                             uint64_t most, sti_buf *out, still_error *err);
uint64_t cli_remote_bytes(const cli_remote *r); /* that came */

#endif
