/* dtype.h - element types of stored tensors, their block layouts and conversions.
 *
 * Numbers equal GGUF's type ids. Rows of quantized types are sequences of blocks;
 * a row's element count must be a multiple of the block's. */
#ifndef STI_FILE_DTYPE_H
#define STI_FILE_DTYPE_H

#include "base/error.h"

typedef enum sti_dtype {
    STI_F32 = 0,
    STI_F16 = 1,
    STI_Q4_0 = 2,
    STI_Q4_1 = 3,
    STI_Q5_0 = 6,
    STI_Q5_1 = 7,
    STI_Q8_0 = 8,
    STI_Q2_K = 10,
    STI_Q3_K = 11,
    STI_Q4_K = 12,
    STI_Q5_K = 13,
    STI_Q6_K = 14,
    STI_IQ4_NL = 20,
    STI_IQ4_XS = 23,
    STI_MXFP4 = 39,
    STI_BF16 = 30,
    STI_F64 = 28, /* golden data only */
    STI_I32 = 26, /* golden data only */
    STI_I64 = 27  /* golden data only */
} sti_dtype;

typedef struct sti_dtype_info {
    sti_dtype type;
    const char *name; /* as users write it: "q4_0", "f16" */
    int block;        /* elements a block */
    int bytes;        /* bytes a block */
} sti_dtype_info;

const sti_dtype_info *sti_dtype_find(int type);            /* NULL: unknown */
const sti_dtype_info *sti_dtype_by_name(const char *name); /* case-insensitive */
const sti_dtype_info *sti_dtype_at(int i);                 /* i-th; NULL past the end */

/* Bytes of n elements; false if n is no multiple of the block or it overflows. */
bool sti_dtype_bytes(sti_dtype t, uint64_t n, size_t *bytes);

/* n elements (a multiple of the block) to float. src needs no alignment. */
void sti_dequant(sti_dtype t, const void *src, float *dst, int64_t n);
/* n floats to type t; false for types that cannot be written (K types, tables). */
bool sti_quant(sti_dtype t, const float *src, void *dst, int64_t n);

float sti_f16_to_f32(uint16_t h);
uint16_t sti_f32_to_f16(float f); /* nearest even, overflow to infinity */
uint16_t sti_f32_to_bf16(float f);
static inline float sti_bf16_to_f32(uint16_t h)
{
    union {
        uint32_t u;
        float f;
    } v = {(uint32_t)h << 16};
    return v.f;
}

#endif
