/* dequant.c - stored numbers to float; see blocks.h for the layouts.
 *
 * The order of the operations is GGML's, so results agree bit for bit. Sources are
 * read as bytes: a tensor in a file has no alignment one may rely on. */
#include <string.h>

#include "file/blocks.h"

static void dequant_q4_0(const sti_block_q4_0 *b, float *y, int64_t n)
{
    for (; n > 0; n--, b++, y += STI_QK) {
        float d = sti_load_f16(b->d);
        for (int i = 0; i < 16; i++) {
            y[i] = (float)((b->q[i] & 15) - 8) * d;
            y[i + 16] = (float)((b->q[i] >> 4) - 8) * d;
        }
    }
}

static void dequant_q4_1(const sti_block_q4_1 *b, float *y, int64_t n)
{
    for (; n > 0; n--, b++, y += STI_QK) {
        float d = sti_load_f16(b->d), m = sti_load_f16(b->m);
        for (int i = 0; i < 16; i++) {
            y[i] = (float)(b->q[i] & 15) * d + m;
            y[i + 16] = (float)(b->q[i] >> 4) * d + m;
        }
    }
}

static uint32_t load_u32(const uint8_t p[4])
{
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static void dequant_q5_0(const sti_block_q5_0 *b, float *y, int64_t n)
{
    for (; n > 0; n--, b++, y += STI_QK) {
        float d = sti_load_f16(b->d);
        uint32_t high = load_u32(b->high);
        for (int i = 0; i < 16; i++) {
            int lo = (b->q[i] & 15) | (int)(high >> i & 1) << 4;
            int hi = b->q[i] >> 4 | (int)(high >> (i + 16) & 1) << 4;
            y[i] = (float)(lo - 16) * d;
            y[i + 16] = (float)(hi - 16) * d;
        }
    }
}

static void dequant_q5_1(const sti_block_q5_1 *b, float *y, int64_t n)
{
    for (; n > 0; n--, b++, y += STI_QK) {
        float d = sti_load_f16(b->d), m = sti_load_f16(b->m);
        uint32_t high = load_u32(b->high);
        for (int i = 0; i < 16; i++) {
            int lo = (b->q[i] & 15) | (int)(high >> i & 1) << 4;
            int hi = b->q[i] >> 4 | (int)(high >> (i + 16) & 1) << 4;
            y[i] = (float)lo * d + m;
            y[i + 16] = (float)hi * d + m;
        }
    }
}

static void dequant_q8_0(const sti_block_q8_0 *b, float *y, int64_t n)
{
    for (; n > 0; n--, b++, y += STI_QK) {
        float d = sti_load_f16(b->d);
        for (int i = 0; i < STI_QK; i++) y[i] = (float)(int8_t)b->q[i] * d;
    }
}

static void widen_f16(const unsigned char *p, float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, p + 2 * i, 2);
        y[i] = sti_f16_to_f32(h);
    }
}

static void widen_bf16(const unsigned char *p, float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, p + 2 * i, 2);
        y[i] = sti_bf16_to_f32(h);
    }
}

/* y[i] = (float)x[i] for x of another arithmetic type. */
#define CONVERT(type)                                                                  \
    for (int64_t i = 0; i < n; i++) {                                                  \
        type v;                                                                        \
        memcpy(&v, (const unsigned char *)src + (size_t)i * sizeof v, sizeof v);       \
        dst[i] = (float)v;                                                             \
    }

void sti_dequant(sti_dtype t, const void *src, float *dst, int64_t n)
{
    switch (t) {
    case STI_F32: memcpy(dst, src, (size_t)n * sizeof *dst); return;
    case STI_F16: widen_f16(src, dst, n); return;
    case STI_BF16: widen_bf16(src, dst, n); return;
    case STI_Q4_0: dequant_q4_0(src, dst, n / STI_QK); return;
    case STI_Q4_1: dequant_q4_1(src, dst, n / STI_QK); return;
    case STI_Q5_0: dequant_q5_0(src, dst, n / STI_QK); return;
    case STI_Q5_1: dequant_q5_1(src, dst, n / STI_QK); return;
    case STI_Q8_0: dequant_q8_0(src, dst, n / STI_QK); return;
    case STI_Q2_K: sti_dequant_q2_k(src, dst, n / STI_QK_K); return;
    case STI_Q3_K: sti_dequant_q3_k(src, dst, n / STI_QK_K); return;
    case STI_Q4_K: sti_dequant_q4_k(src, dst, n / STI_QK_K); return;
    case STI_Q5_K: sti_dequant_q5_k(src, dst, n / STI_QK_K); return;
    case STI_Q6_K: sti_dequant_q6_k(src, dst, n / STI_QK_K); return;
    case STI_IQ4_NL: sti_dequant_iq4_nl(src, dst, n / STI_QK); return;
    case STI_IQ4_XS: sti_dequant_iq4_xs(src, dst, n / STI_QK_K); return;
    case STI_MXFP4: sti_dequant_mxfp4(src, dst, n / STI_QK); return;
    case STI_F64: CONVERT(double) return;
    case STI_I32: CONVERT(int32_t) return;
    case STI_I64: CONVERT(int64_t) return;
    }
}
