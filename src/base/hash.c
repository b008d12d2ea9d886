/* hash.c - where keys come from; see hash.h. */
#include "base/hash.h"

#include <sys/random.h>

#include "base/process.h"
#include "base/random.h"

sti_hash_key sti_hash_key_new(void)
{
    sti_hash_key key;
    if (getrandom(&key, sizeof key, 0) == (ssize_t)sizeof key) return key;
    /* Fallback without getrandom: an address and the time. */
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    const uint64_t seed = (uint64_t)t.tv_nsec ^ (uint64_t)(uintptr_t)&key;
    key.k[0] = sti_mix64(seed ^ (uint64_t)t.tv_sec << 32);
    key.k[1] = sti_mix64(key.k[0] ^ (uint64_t)(uintptr_t)&sti_hash_key_new);
    return key;
}
