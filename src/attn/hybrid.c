/* hybrid.c - methods that are settings of the hybrid operator (ops/hybrid.h). */
#include <limits.h>

#include "attn/attn.h"

sti_hybrid_shape sti_attn_hybrid_shape(const sti_attn_layer *l)
{
    return (sti_hybrid_shape){l->heads, l->kv_heads, l->head_dim, l->head_dim};
}

/* The cap of a selection head. */
static int cap_of(const sti_attn_config *cfg, int layer, int sel)
{
    for (int i = 0; i < cfg->n_caps; i++) {
        const sti_attn_cap *c = &cfg->caps[i];
        if (layer >= c->first && layer <= c->last && sel >= c->first_head &&
            sel <= c->last_head)
            return c->cap;
    }
    return cfg->hybrid.cap;
}

/* The random score draws other numbers in every layer. A state that is held to the
 * weight of the exact tokens follows their number. */
sti_hybrid_settings sti_attn_hybrid_settings(const sti_attn_config *cfg,
                                             const sti_attn_layer *l)
{
    sti_hybrid_settings s = cfg->hybrid;
    s.layer = l->index;
    if (cfg->n_caps == 0) return s;
    const sti_hybrid_shape shape = sti_attn_hybrid_shape(l);
    const int S = sti_hybrid_selection_heads(&s, &shape),
              first = cap_of(cfg, l->index, 0);
    int most = first;
    for (int i = 0; i < S && i < STI_UNEVEN_HEADS_MAX; i++) {
        s.head_cap[i] = cap_of(cfg, l->index, i);
        s.uneven = s.uneven || s.head_cap[i] != first;
        if (s.head_cap[i] > most) most = s.head_cap[i];
    }
    if (s.state_cap > 0) s.state_cap += most - s.cap;
    s.cap = most;
    return s;
}

int sti_attn_unfolded(const sti_attn_config *c)
{
    if (c->method->engine != &sti_attn_hybrid || !c->hybrid.has_linear) return INT_MAX;
    if (!c->hybrid.has_window) return 0;
    return c->hybrid.chunk > INT_MAX / 2 ? INT_MAX : 2 * c->hybrid.chunk;
}

sti_hybrid_in sti_attn_hybrid_in(const sti_attn_layer *l)
{
    const sti_attn_params *p = &l->trained;
    return (sti_hybrid_in){.alpha = p->alpha,
                           .window_logit = p->window_logit,
                           .map_q = p->map_q,
                           .map_k = p->map_k,
                           .bias_q = p->bias_q,
                           .bias_k = p->bias_k};
}

static void carve_hybrid(const sti_backend *be, const sti_attn_config *cfg,
                         const sti_attn_layer *l, sti_carve *c, sti_attn_memory *out)
{
    size_t kv = sti_attn_kv_size(be, cfg);
    sti_hybrid_shape shape = sti_attn_hybrid_shape(l);
    const sti_hybrid_settings set = sti_attn_hybrid_settings(cfg, l);
    sti_hybrid_state_carve(&out->hybrid, c, &set, &shape, cfg->ctx, kv, be->state_real);
}

static still_status reserve(const sti_backend *be, sti_dev *dev,
                            const sti_attn_config *cfg, const sti_attn_layer *l,
                            still_error *err)
{
    sti_hybrid_shape shape = sti_attn_hybrid_shape(l);
    const sti_hybrid_settings set = sti_attn_hybrid_settings(cfg, l);
    if (!be->hybrid) return sti_attn_no_kernels(be, cfg, err);
    return be->hybrid_reserve(dev, &set, &shape, cfg->batch, err);
}

static size_t scratch_bytes(const sti_backend *be, const sti_dev *dev,
                            const sti_attn_config *cfg, const sti_attn_layer *l)
{
    const sti_hybrid_shape shape = sti_attn_hybrid_shape(l);
    const sti_hybrid_settings set = sti_attn_hybrid_settings(cfg, l);
    return be->hybrid_bytes ? be->hybrid_bytes(dev, &set, &shape, cfg->batch) : 0;
}

/* RoPE on q and k (raw q saved if needed); skipped if the backend applies it. */
static still_status apply_rope(const sti_backend *be, sti_dev *dev,
                               const sti_attn_config *cfg, const sti_attn_layer *l,
                               const sti_attn_io *io, const sti_hybrid_settings *set,
                               sti_hybrid_args *args, still_error *err)
{
    const size_t q_row = (size_t)l->heads * (size_t)l->head_dim;
    const bool raw = sti_hybrid_needs_raw(set);
    const bool skip =
        be->hybrid_applies_rope && be->hybrid_applies_rope(args, io->n_rows);
    for (int i = 0; (raw || skip) && i < io->n_rows; i++) {
        sti_hybrid_in *in = &args[i].in;
        in->unrotated = skip;
        in->inv_freq = sti_attn_inv_freq(l, cfg->ctx);
        in->interleaved = l->interleaved;
        if (!skip) in->q_raw = io->q_raw + (size_t)io->rows[i].row0 * q_row;
    }
    if (skip) return STILL_OK;
    if (raw)
        STI_TRY(be->mem_move(dev, io->q_raw, io->q,
                             (size_t)io->M * q_row * sizeof(float), err));
    return sti_attn_rope(be, dev, cfg, l, io, err);
}

static still_status forward(const sti_backend *be, sti_dev *dev,
                            const sti_attn_config *cfg, const sti_attn_layer *l,
                            const sti_attn_io *io, still_error *err)
{
    sti_hybrid_settings set = sti_attn_hybrid_settings(cfg, l);
    sti_hybrid_args *args = io->scratch;
    size_t q_row = (size_t)l->heads * (size_t)l->head_dim;
    size_t k_row = (size_t)l->kv_heads * (size_t)l->head_dim;
    for (int i = 0; i < io->n_rows; i++) {
        const sti_attn_seq *r = &io->rows[i];
        size_t q0 = (size_t)r->row0 * q_row, k0 = (size_t)r->row0 * k_row;
        r->memory->hybrid.pos = r->past;
        args[i] = (sti_hybrid_args){.set = &set,
                                    .shape = sti_attn_hybrid_shape(l),
                                    .T = r->n,
                                    .in = sti_attn_hybrid_in(l),
                                    .state = &r->memory->hybrid,
                                    .y = io->o + q0};
        args[i].in.q = io->q + q0;
        args[i].in.k = io->k + k0;
        args[i].in.v = io->v + k0;
        if (io->gate_logit) args[i].in.gate_logit = io->gate_logit + q0;
    }
    STI_TRY(apply_rope(be, dev, cfg, l, io, &set, args, err));
    return be->hybrid(dev, args, io->n_rows, err);
}

static bool sound(const sti_attn_config *cfg, const sti_attn_layer *l,
                  const sti_attn_memory *m, int length)
{
    const sti_hybrid_state *st = &m->hybrid;
    sti_hybrid_shape shape = sti_attn_hybrid_shape(l);
    const sti_hybrid_settings set = sti_attn_hybrid_settings(cfg, l);
    int S = sti_hybrid_selection_heads(&set, &shape);
    for (int s = 0; st->folded && s < S; s++)
        if (st->folded[s] < 0 || st->folded[s] > length) return false;
    for (int s = 0; st->sal_count && s < S; s++) {
        const sti_hybrid_list list = sti_hybrid_list_of(&set, st, s);
        int n = st->sal_count[s];
        if (n < 0 || n > list.capacity) return false;
        for (int i = 0; i < n; i++) {
            int32_t pos = st->sal_pos[list.first + (size_t)i];
            if (pos < 0 || pos >= length) return false;
        }
    }
    return true;
}

/* Up to the end of a chunk a token only fills its own slot of the window. Its first one
 * lets another chunk retire, and the slots of that are free then. Weights that earlier
 * keys receive are sums, and so is a state without a window. */
static int undoable(const sti_attn_config *cfg, int past)
{
    const sti_hybrid_settings *set = &cfg->hybrid;
    if (!set->has_window || sti_score_at(set->score)->received) return 1;
    return set->chunk - past % set->chunk;
}

const sti_attn_engine sti_attn_hybrid = {carve_hybrid, reserve, scratch_bytes,
                                         forward,      sound,   undoable};
