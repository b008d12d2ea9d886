/* digest.c - see digest.h. Git's own object names serve for small files of a hub, which
 * are stored in git and not as large-file pointers with a sha256. */
#include "cli/fetch/digest.h"
#include "base/buf.h"

#include <errno.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/error.h"

enum { CHUNK = 1 << 20 };

static still_status digest_stream(FILE *f, const char *path, uint64_t size,
                                  EVP_MD_CTX *ctx, still_progress_fn cb, void *user,
                                  still_error *err)
{
    char *part = malloc(CHUNK);
    if (!part) return sti_fail_memory(err, path, CHUNK);
    still_status status = STILL_OK;
    uint64_t done = 0;
    for (size_t n; status == STILL_OK && (n = fread(part, 1, CHUNK, f)) > 0;) {
        if (!EVP_DigestUpdate(ctx, part, n))
            status = sti_fail(err, STILL_E_IO, "%s: the checksum failed", path);
        done += n;
        if (cb && !cb(user, done, size))
            status = sti_fail(err, STILL_E_CANCELLED, "interrupted");
    }
    if (status == STILL_OK && ferror(f))
        status = sti_fail(err, STILL_E_IO, "%s: %s", path, strerror(errno));
    free(part);
    return status;
}

still_status cli_digest_file(const char *path, cli_digest kind, char hex[65],
                             still_progress_fn cb, void *user, still_error *err)
{
    struct stat st;
    FILE *f = fopen(path, "rb");
    if (!f || fstat(fileno(f), &st)) {
        still_status status =
            sti_fail(err, STILL_E_IO, "%s: %s", path, strerror(errno));
        if (f) fclose(f);
        return status;
    }
    unsigned char raw[EVP_MAX_MD_SIZE];
    unsigned n = 0;
    still_status status = STILL_OK;
    EVP_MD_CTX *ctx = EVP_MD_CTX_new();
    if (!ctx ||
        !EVP_DigestInit_ex(ctx, kind == CLI_SHA256 ? EVP_sha256() : EVP_sha1(), NULL))
        status = sti_fail(err, STILL_E_MEMORY, "%s: cannot start a checksum", path);
    if (status == STILL_OK && kind == CLI_GIT_BLOB) {
        char head[32];
        int length = snprintf(head, sizeof head, "blob %lld", (long long)st.st_size);
        EVP_DigestUpdate(ctx, head, (size_t)length + 1); /* with its NUL */
    }
    if (status == STILL_OK)
        status = digest_stream(f, path, (uint64_t)st.st_size, ctx, cb, user, err);
    if (status == STILL_OK && !EVP_DigestFinal_ex(ctx, raw, &n))
        status = sti_fail(err, STILL_E_IO, "%s: the checksum failed", path);
    if (status == STILL_OK) sti_hex(raw, n < 32 ? n : 32, hex);
    EVP_MD_CTX_free(ctx);
    fclose(f);
    return status;
}

bool cli_is_hex(const char *s, size_t n)
{
    return strlen(s) == n && strspn(s, "0123456789abcdef") == n;
}

still_status cli_check_sum(const char *path, const char *sum, still_progress_fn cb,
                           void *user, still_error *err)
{
    char hex[65];
    cli_digest kind = strlen(sum) == 64 ? CLI_SHA256 : CLI_GIT_BLOB;
    STI_TRY(cli_digest_file(path, kind, hex, cb, user, err));
    if (!strcmp(hex, sum)) return STILL_OK;
    return sti_fail(err, STILL_E_FORMAT, "%s: checksum is %s, expected %s", path, hex,
                    sum);
}
