/* fuzz_tar.c - tar archives, gzipped or not: every entry is read, or passed over. */
#include <string.h>

#include "cli/data/tar.h"
#include "memory_file.h"

/* Bytes of an entry; false: it is damaged. */
static bool read_entry(cli_tar *t, const cli_tar_entry *e, uint64_t *budget)
{
    char part[1000];
    uint64_t sum = 0;
    for (size_t got = 1; got > 0 && *budget > sum; sum += got)
        if (cli_tar_read(t, part, sizeof part, &got, NULL) != STILL_OK) return false;
    if (sum > e->size) abort();
    *budget -= sum < *budget ? sum : *budget;
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char path[32];
    int fd = memory_file(data, n, path);
    cli_tar *t;
    cli_tar_entry e;
    still_error err = {0};
    uint64_t budget = 4 << 20; /* gzip packs a thousandfold */
    bool more = cli_tar_open(path, &t, &err) == STILL_OK;
    for (int i = 0; more && i < 64 && budget; i++) {
        if (cli_tar_next(t, &e, &more, &err) != STILL_OK) {
            if (!err.text[0]) abort();
            break;
        }
        if (!more) break;
        if (memchr(e.name, 0, sizeof e.name) == NULL || e.size > (uint64_t)4 << 30)
            abort();
        if (i % 3 != 1 && !read_entry(t, &e, &budget)) break;
    }
    cli_tar_close(t);
    close(fd);
    return 0;
}
