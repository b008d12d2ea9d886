/* fuzz_gguf.c - GGUF files. The magic is put in front, so that all effort goes into
 * what follows it. */
#include "open_store.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    uint8_t *whole = malloc(n + 4);
    if (!whole) return 0;
    memcpy(whole, "GGUF", 4);
    if (n > 4) memcpy(whole + 4, data + 4, n - 4);
    open_bytes(whole, n < 4 ? 4 : n);
    free(whole);
    return 0;
}
