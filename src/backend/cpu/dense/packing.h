/* packing.h - quantized weights as the cpu backend keeps them: repacked copies.
 *
 * 16 rows are a group. A group is blocks of 32 k in their order, and a block is 8 steps
 * of 4 k, each 64 bytes once unpacked, [16 rows][4 k], so that a SIMD lane of 32 bits is
 * a row. Quants are cut into planes of 64 bytes that hold a field of several steps:
 *
 *     8 bits   8 planes             plane p: step p
 *     4 bits   4 planes             field f of plane i: step 4f + i
 *     2 bits   2 planes             field f of plane i: step 2f + i
 *     1 bit    1 plane              bit p: step p
 *
 * Types of 3, 5 and 6 bits have their low 2 or 4 bits first, then planes of what is
 * above. After the planes of a block come its scales:
 *
 *     f16 d[16], f16 m[16] where the type has a minimum        w = d (q - centre) + m
 *
 * K types keep the integers of the file, 32 bytes a block, and lead every 8 blocks (a
 * super-block) with f16 d[16] and, where there is a minimum, f16 -dmin[16]:
 *
 *     q4_k, q5_k   u8 scale[16], u8 min[16]                    D = d scale, M = -dmin min
 *     q3_k, q6_k   s8 scale[2][16], for each half of the block
 *     q2_k         u8 scale and min [2][16], 4 bits each
 *     iq4_xs       s8 scale[16]
 *
 * Types with a table keep places in it; unpacked they are signed bytes as 8-bit quants are.
 * The scale of mxfp4, a power of two, is an f16 like the others: below
 * 2^-24 it is 0, and above 2^15 infinite.
 *
 * So no other number is rounded, and a copy is no larger than the file but for the scales of
 * q3_k, q4_k and q5_k, which take 8 bits for 6: 3.6%, 2.8% and 2.3%. */
#ifndef STI_BACKEND_CPU_DENSE_PACKING_H
#define STI_BACKEND_CPU_DENSE_PACKING_H

#include "backend/cpu/simd.h"
#include "file/blocks.h"

enum {
    STI_GROUP = 16,    /* rows of a group */
    STI_BLOCK_K = 32,  /* k of a block */
    STI_SUPER_K = 256, /* k of a super-block */
    STI_STEP = 64,     /* bytes of an unpacked step, of a plane */
};

typedef struct sti_packing {
    int low, high; /* bits of the first planes, bits above them */
    int centre;    /* is taken off every quant; 8-bit quants are signed instead */
    int subs;      /* scales of a block: 1, or 2 for its halves */
    int unit;      /* blocks of a super-block, 1 without */
    bool min;
    const int8_t *table; /* [16] values that quants stand for, or NULL */
} sti_packing;

/* X(type) for every type that is packed. */
#define STI_QUANT_TYPES(X)                                                             \
    X(Q4_0)                                                                            \
    X(Q4_1)                                                                            \
    X(Q5_0)                                                                            \
    X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_NL) X(IQ4_XS) X(MXFP4)

/* A constant where t is one. Not for floats. */
STI_INLINE sti_packing sti_packing_of(sti_dtype t)
{
    switch (t) {
    case STI_Q4_0: return (sti_packing){4, 0, 8, 1, 1, false, NULL};
    case STI_Q4_1: return (sti_packing){4, 0, 0, 1, 1, true, NULL};
    case STI_Q5_0: return (sti_packing){4, 1, 16, 1, 1, false, NULL};
    case STI_Q5_1: return (sti_packing){4, 1, 0, 1, 1, true, NULL};
    case STI_Q2_K: return (sti_packing){2, 0, 0, 2, 8, true, NULL};
    case STI_Q3_K: return (sti_packing){2, 1, 4, 2, 8, false, NULL};
    case STI_Q4_K: return (sti_packing){4, 0, 0, 1, 8, true, NULL};
    case STI_Q5_K: return (sti_packing){4, 1, 0, 1, 8, true, NULL};
    case STI_Q6_K: return (sti_packing){4, 2, 32, 2, 8, false, NULL};
    case STI_IQ4_NL: return (sti_packing){4, 0, 0, 1, 1, false, sti_iq4_values};
    case STI_IQ4_XS: return (sti_packing){4, 0, 0, 1, 8, false, sti_iq4_values};
    case STI_MXFP4: return (sti_packing){4, 0, 0, 1, 1, false, sti_mxfp4_values};
    default: return (sti_packing){8, 0, 0, 1, 1, false, NULL}; /* Q8_0 */
    }
}

/* Whether unpacked quants are signed bytes (w + 128 where s8_flip of matmul.h says so). */
STI_INLINE bool sti_is_signed(sti_packing f)
{
    return f.low == 8 || f.table;
}

/* Bytes of the quants of a block, of a block, of what leads a super-block. */
STI_INLINE size_t sti_quant_bytes(sti_packing f)
{
    return (size_t)STI_STEP * (size_t)(f.low + f.high);
}
STI_INLINE size_t sti_block_bytes(sti_packing f)
{
    const bool one = f.unit > 1 && f.subs == 1 && !f.min; /* a byte a row */
    return sti_quant_bytes(f) + (f.unit == 1 && f.min ? 64 : one ? 16 : 32);
}
STI_INLINE size_t sti_head_bytes(sti_packing f)
{
    return f.unit == 1 ? 0 : f.min ? 64 : 32;
}

/* Bytes of nb blocks, whole super-blocks. */
STI_INLINE size_t sti_packed_bytes(sti_packing f, size_t nb)
{
    return nb / (size_t)f.unit * sti_head_bytes(f) + nb * sti_block_bytes(f);
}

/* Where the super-block of block b begins, from the start of the group. */
STI_INLINE size_t sti_super_at(sti_packing f, int b)
{
    return sti_packed_bytes(f, (size_t)(b - b % f.unit));
}
/* Where block b is in its super-block. */
STI_INLINE size_t sti_block_at(sti_packing f, int b)
{
    return sti_head_bytes(f) + (size_t)(b % f.unit) * sti_block_bytes(f);
}

#endif
