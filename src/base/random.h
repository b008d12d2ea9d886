/* random.h - one mixing function for everything that is random and must repeat. */
#ifndef STI_BASE_RANDOM_H
#define STI_BASE_RANDOM_H

#include <stdint.h>

/* splitmix64: a bijection whose outputs for 0, 1, 2, ... look random. Its outputs for
 * multiples of STI_MIX64_STEP are the generator of that name. */
#define STI_MIX64_STEP 0x9e3779b97f4a7c15u
static inline uint64_t sti_mix64(uint64_t x)
{
    x += STI_MIX64_STEP;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

#endif
