/* sha256.c - see sha256.h. Written out here because a library's digest must be
 * allocated and its first use initializes the library; both can fail wherever
 * something is named. The function itself is one page that never changes. */
#include "base/sha256.h"

#include <string.h>

/* The first 32 bits of the fractional parts of the cube roots of the first 64 primes. */
static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4,
    0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe,
    0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f,
    0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7,
    0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
    0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
    0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116,
    0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
    0xc67178f2};

static inline uint32_t turn(uint32_t x, int n)
{
    return x >> n | x << (32 - n);
}

static inline uint32_t big_endian(const unsigned char *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

/* Round i of a block: the indices of a .. h rotate instead of their values. */
static inline void round_of(uint32_t x[8], int i, uint32_t kw)
{
#define AT(n) x[((n)-i) & 7]
    const uint32_t a = AT(0), e = AT(4);
    const uint32_t one = AT(7) + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) +
                         (AT(6) ^ (e & (AT(5) ^ AT(6)))) + kw;
    AT(3) += one;
    AT(7) = one + (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) +
            ((a & AT(1)) | (AT(2) & (a | AT(1))));
#undef AT
}

static void take_block(uint32_t h[8], const unsigned char *block)
{
    uint32_t w[64], x[8];
    for (int i = 0; i < 16; i++) w[i] = big_endian(block + 4 * i);
    for (int i = 16; i < 64; i++) {
        const uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + (turn(a, 7) ^ turn(a, 18) ^ a >> 3) + w[i - 7] +
               (turn(b, 17) ^ turn(b, 19) ^ b >> 10);
    }
    memcpy(x, h, sizeof x);
    for (int i = 0; i < 64; i += 8) {
        round_of(x, 0, K[i] + w[i]);
        round_of(x, 1, K[i + 1] + w[i + 1]);
        round_of(x, 2, K[i + 2] + w[i + 2]);
        round_of(x, 3, K[i + 3] + w[i + 3]);
        round_of(x, 4, K[i + 4] + w[i + 4]);
        round_of(x, 5, K[i + 5] + w[i + 5]);
        round_of(x, 6, K[i + 6] + w[i + 6]);
        round_of(x, 7, K[i + 7] + w[i + 7]);
    }
    for (int i = 0; i < 8; i++) h[i] += x[i];
}

void sti_sha256_start(sti_sha256 *s)
{
    *s = (sti_sha256){.h = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f,
                            0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};
}

void sti_sha256_add(sti_sha256 *s, const void *p, size_t n)
{
    const unsigned char *at = p;
    const size_t held = s->bytes % 64;
    s->bytes += n;
    if (held + n < 64) {
        if (n) memcpy(s->block + held, at, n);
        return;
    }
    if (held) {
        memcpy(s->block + held, at, 64 - held);
        take_block(s->h, s->block);
        at += 64 - held;
        n -= 64 - held;
    }
    for (; n >= 64; at += 64, n -= 64) take_block(s->h, at);
    memcpy(s->block, at, n);
}

/* A one bit, zeros, and the number of bits in the last eight bytes of a block. */
void sti_sha256_end(sti_sha256 *s, unsigned char out[STI_SHA256])
{
    static const unsigned char PAD[64] = {0x80};
    unsigned char bits[8];
    for (int i = 0; i < 8; i++) bits[i] = (unsigned char)(s->bytes * 8 >> (56 - 8 * i));
    sti_sha256_add(s, PAD, 1 + (119 - s->bytes % 64) % 64);
    sti_sha256_add(s, bits, sizeof bits);
    for (int i = 0; i < STI_SHA256; i++)
        out[i] = (unsigned char)(s->h[i / 4] >> (24 - 8 * (i % 4)));
}

void sti_sha256_of(const void *p, size_t n, unsigned char out[STI_SHA256])
{
    sti_sha256 s;
    sti_sha256_start(&s);
    sti_sha256_add(&s, p, n);
    sti_sha256_end(&s, out);
}
