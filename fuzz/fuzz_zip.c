/* fuzz_zip.c - zip archives: the directory, and every entry of it. */
#include <string.h>

#include "cli/data/zip.h"
#include "memory_file.h"

enum { MOST = 1 << 20 };

typedef struct archive {
    const uint8_t *p;
    size_t n;
} archive;

/* The reader must never ask for bytes that are not there. */
static still_status read_at(void *user, uint64_t at, void *p, size_t n,
                            still_error *err)
{
    const archive *a = user;
    (void)err;
    if (at > a->n || n > a->n - at) abort();
    memcpy(p, a->p + at, n);
    return STILL_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    archive a = {data, n};
    still_error err = {0};
    cli_zip *z;
    if (cli_zip_open("fuzz", n, read_at, &a, &z, &err) != STILL_OK) {
        if (z || !err.text[0]) abort();
        return 0;
    }
    size_t found;
    if (cli_zip_find(z, "dev.jsonl", &found, &err) == STILL_OK &&
        found >= cli_zip_count(z))
        abort();
    for (size_t i = 0; i < cli_zip_count(z) && i < 16; i++) {
        sti_buf text = {0};
        sti_buf_puts(&text, "before");
        if (cli_zip_read(z, i, MOST, &text, &err) == STILL_OK && text.n > MOST + 6)
            abort();
        if (memcmp(text.p, "before", 6) != 0) abort();
        sti_buf_free(&text);
    }
    cli_zip_close(z);
    return 0;
}
