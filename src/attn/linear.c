/* linear.c - Liger and SUPRA (ops/linear.h). They read q and k before RoPE and rotate
 * where their equations say. */
#include "attn/attn.h"

static void carve_linear(const sti_backend *be, const sti_attn_config *cfg,
                         const sti_attn_layer *l, sti_carve *c, sti_attn_memory *out)
{
    size_t kv = sti_attn_kv_size(be, cfg);
    sti_linear_shape shape = {l->heads, l->kv_heads, l->head_dim};
    sti_linear_state_carve(&out->linear, c, &shape, cfg->window, kv, be->state_real);
}

static still_status reserve(const sti_backend *be, sti_dev *dev,
                            const sti_attn_config *cfg, const sti_attn_layer *l,
                            still_error *err)
{
    sti_linear_shape shape = {l->heads, l->kv_heads, l->head_dim};
    if (!be->linear) return sti_attn_no_kernels(be, cfg, err);
    return be->linear_reserve(dev, &shape, cfg->window, cfg->batch, err);
}

static size_t scratch_bytes(const sti_backend *be, const sti_dev *dev,
                            const sti_attn_config *cfg, const sti_attn_layer *l)
{
    const sti_linear_shape shape = {l->heads, l->kv_heads, l->head_dim};
    return be->linear_bytes ? be->linear_bytes(dev, &shape, cfg->window, cfg->batch)
                            : 0;
}

static still_status forward(const sti_backend *be, sti_dev *dev,
                            const sti_attn_config *cfg, const sti_attn_layer *l,
                            const sti_attn_io *io, still_error *err)
{
    sti_linear_args *args = io->scratch;
    size_t q_row = (size_t)l->heads * (size_t)l->head_dim;
    size_t k_row = (size_t)l->kv_heads * (size_t)l->head_dim;
    for (int i = 0; i < io->n_rows; i++) {
        const sti_attn_seq *r = &io->rows[i];
        size_t q0 = (size_t)r->row0 * q_row, k0 = (size_t)r->row0 * k_row;
        r->memory->linear.pos = r->past;
        args[i] = (sti_linear_args){.shape = {l->heads, l->kv_heads, l->head_dim},
                                    .T = r->n,
                                    .window = cfg->window,
                                    .in = {.q = io->q + q0,
                                           .k = io->k + k0,
                                           .v = io->v + k0,
                                           .inv_freq = sti_attn_inv_freq(l, cfg->ctx),
                                           .interleaved = l->interleaved,
                                           .map_q = l->trained.map_q,
                                           .map_k = l->trained.map_k,
                                           .bias_q = l->trained.bias_q,
                                           .bias_k = l->trained.bias_k},
                                    .state = &r->memory->linear,
                                    .y = io->o + q0};
    }
    return be->linear(dev, args, io->n_rows, err);
}

const sti_attn_engine sti_attn_linear = {carve_linear, reserve, scratch_bytes,
                                         forward,      NULL,    NULL};
