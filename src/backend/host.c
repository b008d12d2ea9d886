/* host.c - see host.h. */
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

/* gate and up [M, ffn] = W (rmsnorm of x) + bias; scratch_h [M, K]. */
static still_status gate_and_up(const sti_backend *be, sti_dev *dev,
                                const sti_ffn_weights *w, const float *x, int M,
                                float *scratch_h, float *gate, float *up,
                                still_error *err)
{
    return be->matmul(dev,
                      &(sti_matmul_args){.x = x,
                                         .M = M,
                                         .n = 2,
                                         .norm = w->norm,
                                         .eps = w->eps,
                                         .normed = scratch_h,
                                         .w = {w->gate, w->up},
                                         .bias = {w->gate_bias, w->up_bias},
                                         .y = {gate, up}},
                      err);
}

still_status sti_host_add_normed(const sti_backend *be, sti_dev *dev,
                                 const sti_ffn_weights *w, const float *out, int M,
                                 float *x, still_error *err)
{
    return be->rmsnorm(dev,
                       &(sti_rmsnorm_args){.x = out,
                                           .g = w->norm_out,
                                           .y = x,
                                           .M = M,
                                           .K = (int)w->gate->K,
                                           .eps = w->eps_out,
                                           .add = true},
                       err);
}

/* x[M, K] += norm_out(W_down (act(gate) * up) + bias); s [M, ffn] is scratch and may be
 * gate, and so is out [M, K], which only norm_out needs. */
static still_status add_down(const sti_backend *be, sti_dev *dev,
                             const sti_ffn_weights *w, const float *gate,
                             const float *up, int M, float *s, float *out, float *x,
                             still_error *err)
{
    const int ffn = (int)w->gate->N;
    STI_TRY(
        be->swiglu(dev,
                   &(sti_swiglu_args){
                       .gate = gate, .up = up, .y = s, .M = M, .K = ffn, .act = w->act},
                   err));
    STI_TRY(be->matmul(dev,
                       &(sti_matmul_args){.x = s,
                                          .M = M,
                                          .n = 1,
                                          .w = {w->down},
                                          .bias = {w->down_bias},
                                          .y = {w->norm_out ? out : x},
                                          .accumulate = !w->norm_out},
                       err));
    return w->norm_out ? sti_host_add_normed(be, dev, w, out, M, x, err) : STILL_OK;
}

still_status sti_host_ffn_forward(const sti_backend *be, sti_dev *dev,
                                  const sti_ffn_args *a, still_error *err)
{
    float *gate = a->scratch, *up = gate + (size_t)a->M * (size_t)a->w.gate->N;
    STI_TRY(gate_and_up(be, dev, &a->w, a->x, a->M, a->scratch_h, gate, up, err));
    return add_down(be, dev, &a->w, gate, up, a->M, gate, a->scratch_h, a->x, err);
}

still_status sti_host_ffn_train(const sti_backend *be, sti_dev *dev,
                                const sti_ffn_train_args *a, still_error *err)
{
    float *gate = a->kept, *up = gate + (size_t)a->M * (size_t)a->w.gate->N;
    STI_TRY(gate_and_up(be, dev, &a->w, a->x, a->M, a->scratch_h, gate, up, err));
    if (!a->y && !a->w.norm_out) return STILL_OK;
    /* Where only what is kept is wanted, the sum goes where nobody looks. */
    float *y = a->y ? a->y : a->scratch_h;
    STI_TRY(be->mem_move(dev, y, a->x,
                         (size_t)a->M * (size_t)a->w.gate->K * sizeof(float), err));
    return add_down(be, dev, &a->w, gate, up, a->M, a->scratch, a->kept_out, y, err);
}

still_status sti_host_ffn_back(const sti_backend *be, sti_dev *dev,
                               const sti_ffn_train_args *a, still_error *err)
{
    const int ffn = (int)a->w.gate->N;
    const size_t half = (size_t)a->M * (size_t)ffn;
    float *dgate = a->scratch, *dup = a->scratch + half;
    const float *dy = a->dx;
    if (a->w.norm_out) {
        STI_TRY(be->mem_clear(dev, a->scratch_h,
                              (size_t)a->M * (size_t)a->w.gate->K * sizeof(float),
                              err));
        STI_TRY(be->rmsnorm_back(dev,
                                 &(sti_rmsnorm_back_args){.x = a->kept_out,
                                                          .g = a->w.norm_out,
                                                          .dy = a->dx,
                                                          .dx = a->scratch_h,
                                                          .M = a->M,
                                                          .K = (int)a->w.gate->K,
                                                          .eps = a->w.eps_out},
                                 err));
        dy = a->scratch_h;
    }
    STI_TRY(be->matmul_back(
        dev,
        &(sti_matmul_back_args){
            .dy = {dy}, .M = a->M, .n = 1, .w = {a->w.down}, .dx = dgate},
        err));
    STI_TRY(be->swiglu_back(dev,
                            &(sti_swiglu_back_args){.gate = a->kept,
                                                    .up = a->kept + half,
                                                    .dy = dgate,
                                                    .dgate = dgate,
                                                    .dup = dup,
                                                    .M = a->M,
                                                    .K = ffn,
                                                    .act = a->w.act},
                            err));
    STI_TRY(
        be->matmul_back(dev,
                        &(sti_matmul_back_args){.dy = {dgate, dup},
                                                .M = a->M,
                                                .n = 2,
                                                .w = {a->w.gate, a->w.up},
                                                .dx = a->w.norm ? a->scratch_h : a->dx,
                                                .accumulate = !a->w.norm},
                        err));
    if (!a->w.norm) return STILL_OK;
    return be->rmsnorm_back(dev,
                            &(sti_rmsnorm_back_args){.x = a->x,
                                                     .g = a->w.norm,
                                                     .dy = a->scratch_h,
                                                     .dx = a->dx,
                                                     .M = a->M,
                                                     .K = (int)a->w.gate->K,
                                                     .eps = a->w.eps},
                            err);
}

still_status sti_host_matmul_lora(const sti_backend *be, sti_dev *dev,
                                  const sti_matmul_lora_args *a, still_error *err)
{
    const sti_matmul_args *p = &a->product;
    const size_t M = (size_t)p->M;
    sti_matmul_args down = {.x = p->norm ? p->normed : p->x, .M = p->M};
    if (a->from)
        STI_TRY(be->mem_move(dev, p->y[0], a->from,
                             M * (size_t)p->w[0]->N * sizeof(float), err));
    STI_TRY(be->matmul(dev, p, err));
    for (int i = 0; i < p->n; i++) {
        if (!a->add[i].a) continue;
        down.w[down.n] = a->add[i].a;
        down.y[down.n++] = a->add[i].lora_x;
    }
    if (down.n > 0) STI_TRY(be->matmul(dev, &down, err));
    for (int i = 0; i < p->n; i++) {
        const sti_lora_args *add = &a->add[i];
        if (!add->a) continue;
        STI_TRY(be->scale(dev, add->lora_x, M * (size_t)add->a->N, a->scale, err));
        STI_TRY(be->matmul(dev,
                           &(sti_matmul_args){.x = add->lora_x,
                                              .M = p->M,
                                              .n = 1,
                                              .w = {add->b},
                                              .y = {p->y[i]},
                                              .accumulate = true},
                           err));
    }
    return STILL_OK;
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
    a->sums[0] = error;
    a->sums[1] = size;
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

still_status sti_host_scale_columns(sti_dev *dev, const sti_scale_columns_args *a,
                                    still_error *err)
{
    (void)dev;
    (void)err;
    for (int m = 0; m < a->M; m++) {
        float *x = a->x + (size_t)m * (size_t)a->K;
        for (int k = 0; k < a->K; k++) x[k] *= a->g[k];
    }
    return STILL_OK;
}
