/* hash.h - SipHash-1-3: a keyed hash for tables that files fill.
 *
 * Without the key nobody can choose entries that collide, so filling a table of n
 * entries takes time proportional to n, whoever wrote the file. Each table draws its
 * own key. The key decides where entries lie, never what a look-up finds. */
#ifndef STI_BASE_HASH_H
#define STI_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/random.h"

typedef struct sti_hash_key {
    uint64_t k[2];
} sti_hash_key;

/* A fresh key from the system's source of random numbers. */
sti_hash_key sti_hash_key_new(void);

typedef struct sti_sip {
    uint64_t v[4];
} sti_sip;

static inline uint64_t sti_rotl64(uint64_t x, int n)
{
    return x << n | x >> (64 - n);
}

/* The two halves of a 128-bit product, xored. */
static inline uint64_t sti_fold64(uint64_t a, uint64_t b)
{
    __extension__ typedef unsigned __int128 wide;
    const wide product = (wide)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline sti_sip sti_sip_new(const sti_hash_key *key)
{
    return (sti_sip){{key->k[0] ^ 0x736f6d6570736575u, key->k[1] ^ 0x646f72616e646f6du,
                      key->k[0] ^ 0x6c7967656e657261u,
                      key->k[1] ^ 0x7465646279746573u}};
}

static inline void sti_sip_round(sti_sip *s)
{
    uint64_t *v = s->v;
    v[0] += v[1];
    v[2] += v[3];
    v[1] = sti_rotl64(v[1], 13) ^ v[0];
    v[3] = sti_rotl64(v[3], 16) ^ v[2];
    v[0] = sti_rotl64(v[0], 32);
    v[2] += v[1];
    v[0] += v[3];
    v[1] = sti_rotl64(v[1], 17) ^ v[2];
    v[3] = sti_rotl64(v[3], 21) ^ v[0];
    v[2] = sti_rotl64(v[2], 32);
}

static inline void sti_sip_word(sti_sip *s, uint64_t word)
{
    s->v[3] ^= word;
    sti_sip_round(s);
    s->v[0] ^= word;
}

static inline uint64_t sti_sip_end(sti_sip *s)
{
    s->v[2] ^= 0xff;
    for (int i = 0; i < 3; i++) sti_sip_round(s);
    return s->v[0] ^ s->v[1] ^ s->v[2] ^ s->v[3];
}

/* The bytes of the last, unfinished word, n < 8, lowest first. */
static inline uint64_t sti_sip_tail(const unsigned char *p, size_t n)
{
    uint64_t word = 0;
    if (n >= 4) { /* two overlapping halves */
        uint32_t low, high;
        memcpy(&low, p, 4);
        memcpy(&high, p + n - 4, 4);
        word = low | (uint64_t)high << 8 * (n - 4);
    } else if (n) { /* first, middle and last byte */
        word = p[0] | (uint64_t)p[n / 2] << 8 * (n / 2) |
               (uint64_t)p[n - 1] << 8 * (n - 1);
    }
    return word;
}

static inline uint64_t sti_hash_bytes(const sti_hash_key *key, const void *data,
                                      size_t n)
{
    const unsigned char *p = data;
    const uint64_t length = (uint64_t)n << 56;
    sti_sip s = sti_sip_new(key);
    for (; n >= 8; p += 8, n -= 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        sti_sip_word(&s, word);
    }
    sti_sip_word(&s, length | sti_sip_tail(p, n));
    return sti_sip_end(&s);
}

/* Hash of two numbers, for tables that are queried once per pair of symbols of a text,
 * where SipHash would take as long as everything else: the product of both, each masked
 * by half of the key, folded to 64 bits and folded again. */
static inline uint64_t sti_hash_pair(const sti_hash_key *key, uint64_t a, uint64_t b)
{
    return sti_fold64(sti_fold64(a ^ key->k[0], b ^ key->k[1]), STI_MIX64_STEP);
}

#endif
