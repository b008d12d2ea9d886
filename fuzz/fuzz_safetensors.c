/* fuzz_safetensors.c - safetensors, and whatever else a file may turn out to be. The
 * first eight bytes of the input are the header's length, cut to what follows unless
 * their top bit is set, so that most inputs get as far as their JSON. */
#include "open_store.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    uint8_t *whole = malloc(n + 1);
    uint64_t length;
    if (!whole) return 0;
    memcpy(whole, data, n);
    if (n > 8) {
        memcpy(&length, whole, 8);
        if (length >> 63 == 0) {
            length %= n - 7;
            memcpy(whole, &length, 8);
        }
    }
    open_bytes(whole, n);
    free(whole);
    return 0;
}
