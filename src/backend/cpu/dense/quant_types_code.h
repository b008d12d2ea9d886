/* quant_types_code.h - the kernels of single types behind a switch over the type; see
 * sti_quant_kernels. Included by files that have defined gemv_<type> for every quantized
 * type, and unpack(type, ...). */
#ifndef STI_BACKEND_CPU_DENSE_QUANT_TYPES_CODE_H
#define STI_BACKEND_CPU_DENSE_QUANT_TYPES_CODE_H

#include "backend/cpu/dense/matmul.h"

static void gemv_any(sti_dtype t, const uint8_t *w, const uint8_t *a, int R, int nb,
                     float *c)
{
#define CASE(type)                                                                     \
    case STI_##type: gemv_##type(w, a, R, nb, c); break;
    switch (t) {
        STI_QUANT_TYPES(CASE)
    default: break;
    }
#undef CASE
}

static void unpack_any(const uint8_t *group, int b, int nb, const sti_panel *p, int g)
{
#define CASE(type)                                                                     \
    case STI_##type: unpack(STI_##type, group, b, nb, p, g); break;
    switch (p->type) {
        STI_QUANT_TYPES(CASE)
    default: break;
    }
#undef CASE
}

#endif
