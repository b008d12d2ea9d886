/* dtype.c - the table of element types and the 16-bit float conversions.
 *
 * Conversions are written with selects instead of branches and without F16C, so that
 * they are exact everywhere and a compiler can vectorize loops over them. */
#include "file/dtype.h"

#include <string.h>
#include <strings.h>

static const sti_dtype_info TYPES[] = {
    {STI_F32, "f32", 1, 4},           {STI_F16, "f16", 1, 2},
    {STI_BF16, "bf16", 1, 2},         {STI_Q4_0, "q4_0", 32, 18},
    {STI_Q4_1, "q4_1", 32, 20},       {STI_Q5_0, "q5_0", 32, 22},
    {STI_Q5_1, "q5_1", 32, 24},       {STI_Q8_0, "q8_0", 32, 34},
    {STI_Q2_K, "q2_k", 256, 84},      {STI_Q3_K, "q3_k", 256, 110},
    {STI_Q4_K, "q4_k", 256, 144},     {STI_Q5_K, "q5_k", 256, 176},
    {STI_Q6_K, "q6_k", 256, 210},     {STI_IQ4_NL, "iq4_nl", 32, 18},
    {STI_IQ4_XS, "iq4_xs", 256, 136}, {STI_MXFP4, "mxfp4", 32, 17},
    {STI_F64, "f64", 1, 8},           {STI_I32, "i32", 1, 4},
    {STI_I64, "i64", 1, 8},
};
enum { N_TYPES = sizeof TYPES / sizeof *TYPES };

const sti_dtype_info *sti_dtype_at(int i)
{
    return i >= 0 && i < N_TYPES ? &TYPES[i] : NULL;
}

const sti_dtype_info *sti_dtype_find(int type)
{
    for (int i = 0; i < N_TYPES; i++)
        if ((int)TYPES[i].type == type) return &TYPES[i];
    return NULL;
}

const sti_dtype_info *sti_dtype_by_name(const char *name)
{
    for (int i = 0; i < N_TYPES; i++)
        if (strcasecmp(TYPES[i].name, name) == 0) return &TYPES[i];
    return NULL;
}

bool sti_dtype_bytes(sti_dtype t, uint64_t n, size_t *bytes)
{
    const sti_dtype_info *i = sti_dtype_find((int)t);
    if (!i || n % (uint64_t)i->block != 0) return false;
    return !__builtin_mul_overflow(n / (uint64_t)i->block, (size_t)i->bytes, bytes);
}

static inline float as_float(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline uint32_t as_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

/* f16: sign, 5 bits of exponent (bias 15), 10 of fraction. The fraction moves up by
 * 13 bits and the exponent is rebiased by 112. Subnormals: with an exponent of 113 put
 * in front they read 2^-14 + value, and the subtraction is exact. */
float sti_f16_to_f32(uint16_t h)
{
    const uint32_t magic = 113u << 23;
    uint32_t em = (uint32_t)(h & 0x7fff) << 13;
    float normal = as_float(em + (em >= 0x7c00u << 13 ? 224u << 23 : 112u << 23));
    float subnormal = as_float(em + magic) - as_float(magic);
    float magnitude = em < 0x0400u << 13 ? subnormal : normal;
    return as_float(as_bits(magnitude) | (uint32_t)(h & 0x8000) << 16);
}

uint16_t sti_f32_to_f16(float f)
{
    uint32_t bits = as_bits(f), x = bits & 0x7fffffff;
    /* Normal: rebias, add just under half of the last place kept, or half if that
     * place is odd; a carry into the exponent is right, up to infinity. */
    uint32_t normal = (x - (112u << 23) + 0xfff + (x >> 13 & 1)) >> 13;
    /* Subnormal: adding 0.5 leaves the value in units of 2^-24 in the low bits,
     * rounded by the hardware to nearest even. */
    uint32_t small = as_bits(as_float(x) + 0.5f) - as_bits(0.5f);
    uint32_t special = x > 0x7f800000 ? 0x7e00 | (x >> 13 & 0x3ff) : 0x7c00;
    uint32_t h = x >= 143u << 23 ? special : x < 113u << 23 ? small : normal;
    return (uint16_t)(h | (bits >> 16 & 0x8000));
}

uint16_t sti_f32_to_bf16(float f)
{
    uint32_t x = as_bits(f);
    if ((x & 0x7fffffff) > 0x7f800000) return (uint16_t)(x >> 16 | 0x40); /* NaN */
    return (uint16_t)((x + 0x7fff + (x >> 16 & 1)) >> 16);
}
