/* digest.h - checksums of files on disk. */
#ifndef CLI_FETCH_DIGEST_H
#define CLI_FETCH_DIGEST_H

#include "still.h"

typedef enum cli_digest {
    CLI_SHA256,  /* of the bytes; 64 hex digits */
    CLI_GIT_BLOB /* sha1 of "blob SIZE\0" and the bytes; 40 hex digits */
} cli_digest;

/* Hex digest of a file; cb counts bytes and may be NULL. */
still_status cli_digest_file(const char *path, cli_digest kind, char hex[65],
                             still_progress_fn cb, void *user, still_error *err);

/* Compares a file with an expected sum, whose length tells its kind. STILL_E_FORMAT
 * if the file is another. */
still_status cli_check_sum(const char *path, const char *sum, still_progress_fn cb,
                           void *user, still_error *err);
/* Whether s is `n` lower-case hex digits. */
bool cli_is_hex(const char *s, size_t n);

#endif
