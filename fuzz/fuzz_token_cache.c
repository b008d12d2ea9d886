/* fuzz_token_cache.c - token caches: as the bytes are, and with checksums put right, so
 * that what lies behind them is reached. What opens holds ids of the vocabulary only.
 */
#include <string.h>
#include <zlib.h>

#include "memory_file.h"
#include "train/data/parts.h"

static void try_cache(const uint8_t *data, size_t n, const unsigned char *key,
                      int vocab)
{
    char path[32];
    sti_cache c;
    still_error err = {0};
    int fd = memory_file(data, n, path);
    if (sti_cache_open(path, key, vocab, &c, &err) == STILL_OK) {
        if (strlen(c.head->first_broken) >= sizeof c.head->first_broken) abort();
        for (uint64_t i = 0; i < c.head->tokens; i++)
            if ((int)(c.entry[i] & ~STI_CACHE_OUTPUT) >= vocab) abort();
        sti_cache_close(&c);
    } else if (c.map.data || !err.text[0]) {
        abort();
    }
    close(fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const unsigned char zero[STI_DATA_DIGEST];
    sti_cache_header h;
    try_cache(data, n, zero, 10);
    if (n < sizeof h) return 0;
    uint8_t *copy = malloc(n);
    if (!copy) abort();
    memcpy(copy, data, n);
    memcpy(&h, data, sizeof h);
    h.body_crc = (uint32_t)crc32_z(0, data + sizeof h, n - sizeof h);
    h.head_crc = sti_cache_head_crc(&h);
    memcpy(copy, &h, sizeof h);
    try_cache(copy, n, h.key, (int)(h.vocab & 0x7FFFFFFF));
    free(copy);
    return 0;
}
