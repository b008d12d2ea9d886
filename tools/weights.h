/* weights.h - random weights of any stored type, at the speed of the disk.
 *
 * A weight matrix [N, K] gets independent values of mean 0 and deviation 1/sqrt(K): a
 * normalized input of K elements then gives outputs of deviation 1, so activations
 * neither vanish nor grow beyond what the residual sums add, in any number of layers.
 *
 * Quantized blocks are random bits with chosen scales. A level's mean is half a step
 * off zero (or, for types with a minimum, is cancelled by it exactly); a scale of
 * random sign removes that mean, which would otherwise add up over K. */
#ifndef TOOLS_WEIGHTS_H
#define TOOLS_WEIGHTS_H

#include <math.h>
#include <string.h>

#include "base/random.h"
#include "file/blocks.h"

typedef struct rng {
    uint64_t s[4];
} rng;

static inline uint64_t rotl(uint64_t x, int k)
{
    return x << k | x >> (64 - k);
}

static inline uint64_t rng_next(rng *r) /* xoshiro256** */
{
    uint64_t *s = r->s, out = rotl(s[1] * 5, 7) * 9, t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotl(s[3], 45);
    return out;
}

static inline void rng_seed(rng *r, uint64_t seed) /* splitmix64 fills the state */
{
    for (int i = 0; i < 4; i++, seed += STI_MIX64_STEP) r->s[i] = sti_mix64(seed);
}

static inline void fill_bits(rng *r, unsigned char *p, size_t n)
{
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t v = rng_next(r);
        memcpy(p, &v, 8);
    }
    uint64_t v = rng_next(r);
    memcpy(p, &v, n);
}

/* Uniform in mean +- spread * sqrt(3), so `spread` is the deviation. */
static inline void fill_floats(rng *r, float *x, size_t n, float mean, float spread)
{
    const float step = spread * sqrtf(3.0f) * 0x1p-23f;
    for (size_t i = 0; i < n; i++)
        x[i] = mean + step * (float)((int32_t)(rng_next(r) >> 40) - (1 << 23));
}

/* Deviation of a uniform choice of n consecutive levels. */
static inline float deviation(int n)
{
    return sqrtf(((float)n * (float)n - 1) / 12);
}

/* +-d, the sign from the low bit of a random byte. */
static inline float either(float d, uint8_t bits)
{
    return bits & 1 ? -d : d;
}

/* Scales and equal minima of eight groups, 32..63, where the block has random bytes:
 * the inverse of sti_scale_min. */
static inline void pack_equal_scales(uint8_t b[12])
{
    uint8_t s[8];
    for (int j = 0; j < 8; j++) s[j] = (uint8_t)(32 | (b[j] & 31));
    for (int j = 0; j < 4; j++) {
        b[j] = (uint8_t)(s[j] | (s[j + 4] >> 4) << 6);
        b[j + 4] = b[j];
        b[j + 8] = (uint8_t)((s[j + 4] & 15) | (s[j + 4] & 15) << 4);
    }
}

/* Root mean square of the scales above: uniform on 32..63. */
#define SCALE_RMS 48.38f

/* Sets the scales of n random blocks of type t to give values of deviation `dev`. */
static inline bool set_scales(sti_dtype t, void *p, size_t n, float dev)
{
#define EACH(type) for (type *b = p; n > 0; n--, b++)
    switch (t) {
    case STI_Q4_0:
        EACH(sti_block_q4_0)
        {
            sti_store_f16(b->d, either(dev / deviation(16), b->d[0]));
        }
        return true;
    case STI_Q5_0:
        EACH(sti_block_q5_0)
        {
            sti_store_f16(b->d, either(dev / deviation(32), b->d[0]));
        }
        return true;
    case STI_Q8_0:
        EACH(sti_block_q8_0)
        {
            sti_store_f16(b->d, either(dev / deviation(256), b->d[0]));
        }
        return true;
    case STI_Q4_1:
        EACH(sti_block_q4_1)
        {
            sti_store_f16(b->d, dev / deviation(16));
            sti_store_f16(b->m, -7.5f * dev / deviation(16));
        }
        return true;
    case STI_Q5_1:
        EACH(sti_block_q5_1)
        {
            sti_store_f16(b->d, dev / deviation(32));
            sti_store_f16(b->m, -15.5f * dev / deviation(32));
        }
        return true;
    case STI_Q2_K:
        EACH(sti_block_q2_k)
        {
            /* scale = minimum = 8..15, root mean square 11.7 */
            float d = dev / (deviation(4) * 11.73f);
            sti_store_f16(b->d, d);
            sti_store_f16(b->dmin, 1.5f * d);
            for (int i = 0; i < 16; i++)
                b->scale[i] = (uint8_t)((8 | (b->scale[i] & 7)) * 0x11);
        }
        return true;
    case STI_Q3_K:
        EACH(sti_block_q3_k)
        {
            sti_store_f16(b->d, either(dev / (deviation(8) * deviation(64)), b->d[0]));
        }
        return true;
    case STI_Q4_K:
        EACH(sti_block_q4_k)
        {
            float d = dev / (deviation(16) * SCALE_RMS);
            sti_store_f16(b->d, d);
            sti_store_f16(b->dmin, 7.5f * d);
            pack_equal_scales(b->scale);
        }
        return true;
    case STI_Q5_K:
        EACH(sti_block_q5_k)
        {
            float d = dev / (deviation(32) * SCALE_RMS);
            sti_store_f16(b->d, d);
            sti_store_f16(b->dmin, 15.5f * d);
            pack_equal_scales(b->scale);
        }
        return true;
    case STI_Q6_K:
        EACH(sti_block_q6_k)
        {
            sti_store_f16(b->d,
                          either(dev / (deviation(64) * deviation(256)), b->d[0]));
        }
        return true;
    /* Root mean squares of the tables: 67.4, 5.85. */
    case STI_IQ4_NL:
        EACH(sti_block_iq4_nl) sti_store_f16(b->d, either(dev / 67.4f, b->d[0]));
        return true;
    case STI_IQ4_XS:
        EACH(sti_block_iq4_xs)
        sti_store_f16(b->d, either(dev / (67.4f * deviation(64)), b->d[0]));
        return true;
    case STI_MXFP4:
        EACH(sti_block_mxfp4) b->e = (uint8_t)(128 + lrintf(log2f(dev / 5.85f)));
        return true;
    default: return false;
    }
#undef EACH
}

#endif
