/* dequant_table.c - blocks of four bits that stand for values of a table, to float; see
 * blocks.h. */
#include "file/blocks.h"

/* Closer together around zero, as weights are. */
const int8_t sti_iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};
/* Twice the numbers of E2M1: a sign, two bits of exponent, one of fraction. */
const int8_t sti_mxfp4_values[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                     0, -1, -2, -3, -4, -6, -8, -12};

static void dequant_32(const int8_t *table, float d, const uint8_t *q, float *y)
{
    for (int i = 0; i < 16; i++) {
        y[i] = d * (float)table[q[i] & 15];
        y[i + 16] = d * (float)table[q[i] >> 4];
    }
}

void sti_dequant_iq4_nl(const sti_block_iq4_nl *b, float *y, int64_t n)
{
    for (; n > 0; n--, b++, y += STI_QK)
        dequant_32(sti_iq4_values, sti_load_f16(b->d), b->q, y);
}

void sti_dequant_iq4_xs(const sti_block_iq4_xs *b, float *y, int64_t n)
{
    for (; n > 0; n--, b++) {
        const float d = sti_load_f16(b->d);
        for (int j = 0; j < 8; j++, y += 32)
            dequant_32(sti_iq4_values, d * (float)sti_iq4_scale(b, j), b->q + 16 * j,
                       y);
    }
}

void sti_dequant_mxfp4(const sti_block_mxfp4 *b, float *y, int64_t n)
{
    for (; n > 0; n--, b++, y += STI_QK)
        dequant_32(sti_mxfp4_values, sti_mxfp4_scale(b->e), b->q, y);
}
