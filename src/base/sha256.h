/* sha256.h - SHA-256 (FIPS 180-4): names for models, data and runs. It allocates
 * nothing and cannot fail, so naming something cannot fail either. */
#ifndef STI_BASE_SHA256_H
#define STI_BASE_SHA256_H

#include <stddef.h>
#include <stdint.h>

enum { STI_SHA256 = 32 }; /* bytes of a digest */

typedef struct sti_sha256 {
    uint32_t h[8];
    uint64_t bytes;          /* taken so far */
    unsigned char block[64]; /* the last bytes % 64 of them */
} sti_sha256;

void sti_sha256_start(sti_sha256 *s);
void sti_sha256_add(sti_sha256 *s, const void *p, size_t n);
void sti_sha256_end(sti_sha256 *s, unsigned char out[STI_SHA256]);
/* Digest of one range of bytes. */
void sti_sha256_of(const void *p, size_t n, unsigned char out[STI_SHA256]);

#endif
