#include "backend/host.h"

#include <string.h>

#include "base/process.h"
#include "base/random.h"

still_status sti_host_mem_new(sti_dev *dev, size_t bytes, sti_block *out,
                              still_error *err)
{
    (void)dev;
    if (sti_block_new(out, bytes)) {
        memset(out->p, 0, bytes); /* touched now, not in the middle of a run */
        return STILL_OK;
    }
    return sti_fail_memory(err, "memory of the operators", bytes);
}

void sti_host_mem_free(sti_dev *dev, sti_block *b)
{
    (void)dev;
    sti_block_free(b);
}

still_status sti_host_mem_move(sti_dev *dev, void *to, const void *from, size_t bytes,
                               still_error *err)
{
    (void)dev;
    (void)err;
    if (bytes > 0) memmove(to, from, bytes);
    return STILL_OK;
}

still_status sti_host_mem_clear(sti_dev *dev, void *p, size_t bytes, still_error *err)
{
    (void)dev;
    (void)err;
    if (bytes > 0) memset(p, 0, bytes);
    return STILL_OK;
}

size_t sti_host_mem_peak(sti_dev *dev, bool restart)
{
    (void)dev;
    if (restart) sti_peak_rss_restart();
    return sti_peak_rss();
}

still_status sti_host_feed_forward(const sti_backend *be, sti_dev *dev,
                                   const sti_feed_forward_args *a, still_error *err)
{
    float *gate = a->room, *up = a->room + (size_t)a->M * (size_t)a->gate->N;
    STI_TRY(be->matmul(dev,
                       &(sti_matmul_args){.x = a->x,
                                          .M = a->M,
                                          .n = 2,
                                          .norm = a->norm,
                                          .eps = a->eps,
                                          .room = a->room_h,
                                          .w = {a->gate, a->up},
                                          .bias = {a->gate_bias, a->up_bias},
                                          .y = {gate, up}},
                       err));
    STI_TRY(be->swiglu(
        dev,
        &(sti_swiglu_args){
            .gate = gate, .up = up, .y = gate, .M = a->M, .K = (int)a->gate->N},
        err));
    return be->matmul(dev,
                      &(sti_matmul_args){.x = gate,
                                         .M = a->M,
                                         .n = 1,
                                         .w = {a->down},
                                         .bias = {a->down_bias},
                                         .y = {a->x},
                                         .accumulate = true},
                      err);
}

still_status sti_host_compare(sti_dev *dev, const sti_compare_args *a, still_error *err)
{
    (void)dev;
    (void)err;
    double error = 0, size = 0;
    for (size_t i = 0; i < a->n; i++) {
        const float d = a->y[i] - a->o[i];
        error += (double)d * d;
        size += (double)a->o[i] * a->o[i];
        a->y[i] = a->factor * d;
    }
    *a->error = error;
    *a->size = size;
    return STILL_OK;
}

still_status sti_host_dropout(sti_dev *dev, const sti_dropout_args *a, still_error *err)
{
    (void)dev;
    (void)err;
    const float keep = 1 / (1 - a->p);
    const uint64_t limit = (uint64_t)((double)a->p * 0x1p53);
    for (size_t i = 0; i < a->n; i++) {
        const float left = sti_mix64(a->key + i) >> 11 < limit ? 0 : a->x[i] * keep;
        a->y[i] = a->add ? a->y[i] + left : left;
    }
    return STILL_OK;
}

still_status sti_host_scale(sti_dev *dev, float *x, size_t n, float by,
                            still_error *err)
{
    (void)dev;
    (void)err;
    for (size_t i = 0; i < n; i++) x[i] *= by;
    return STILL_OK;
}
