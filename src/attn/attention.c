/* attention.c - a layer's attention for programs that have a model of their own: the
 * parallel form of the hybrid operator, forwards and backwards, on arrays of the caller.
 *
 * A call is checked, its method becomes settings as a session's would, and a backend's
 * entries do the rest; nothing is copied. Layers that a method leaves alone, and the
 * method softmax, are the setting of the operator that keeps every token exact, as in
 * training (train/attend.c). */
#include <stdlib.h>
#include <string.h>

#include "attn/attn.h"
#include "base/sized.h"

struct still_attention {
    const sti_backend *be;
    sti_dev *dev;
};

enum { SOFTMAX_CHUNK = 64 }; /* any will do where every token is kept */

void still_attention_free(still_attention *a)
{
    if (!a) return;
    if (a->dev) a->be->dev_free(a->dev);
    free(a);
}

still_status still_attention_new(const still_attention_params *params,
                                 still_attention **out, still_error *err)
{
    *out = NULL;
    still_attention_params p;
    STI_TRY(STI_TAKE(&p, params, still_attention_params, err));
    const sti_backend *be = sti_backend_find(p.backend);
    if (!be)
        return sti_fail(err, STILL_E_ARG, "backend '%s' is not in this build: %s",
                        p.backend, sti_backend_names());
    if (!be->hybrid_route || !be->hybrid_parallel || !be->hybrid_backward)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "backend %s has no hybrid attention over whole sequences: use "
                        "cpu",
                        be->name);
    still_attention *a = sti_alloc(1, sizeof *a);
    if (!a) return sti_fail_memory(err, "attention", sizeof *a);
    a->be = be;
    const sti_dev_params dev = {.threads = p.threads,
                                .isa = p.isa,
                                .max_k = 1,
                                .callers_gpu = true,
                                .stream = p.stream};
    const still_status st = be->dev_new(&dev, &a->dev, err);
    if (st != STILL_OK) {
        free(a);
        return st;
    }
    *out = a;
    return STILL_OK;
}

/* ---- A call -------------------------------------------------------------- */

static still_status check_shape(const still_attention_args *x, still_error *err)
{
    if (x->batch < 1 || x->tokens < 1 || (int64_t)x->batch * x->tokens > INT32_MAX / 2)
        return sti_fail(
            err, STILL_E_ARG,
            "attention: %d sequences of %d tokens, expected at least one of "
            "each and %d tokens at most",
            x->batch, x->tokens, INT32_MAX / 2);
    const int layers = x->layers ? x->layers : 1;
    if (layers < 1 || layers > 1 << 16 || x->layer < 0 || x->layer >= layers)
        return sti_fail(err, STILL_E_ARG, "attention: layer %d of %d", x->layer,
                        layers);
    /* The rest of the shape: sti_hybrid_check. Products stay far below SIZE_MAX. */
    if (x->heads > 1 << 16 || x->head_dim > STI_HEAD_DIM_MAX)
        return sti_fail(
            err, STILL_E_ARG,
            "attention: %d heads of size %d, at most %d of %d are supported", x->heads,
            x->head_dim, 1 << 16, STI_HEAD_DIM_MAX);
    return STILL_OK;
}

static still_status settings_of(const still_attention_args *x, sti_hybrid_settings *out,
                                still_error *err)
{
    const sti_attn_layer layer = {.index = x->layer,
                                  .heads = x->heads,
                                  .kv_heads = x->kv_heads,
                                  .head_dim = x->head_dim};
    const sti_hybrid_shape shape = sti_attn_hybrid_shape(&layer);
    still_method usual;
    sti_attn_config cfg = {0};
    STI_TRY(check_shape(x, err));
    STI_TRY(still_method_init(&usual, "still", 0, err));
    const still_method *m = x->method ? x->method : &usual;
    STI_TRY(sti_attn_configure(m, &layer, x->layers ? x->layers : 1, 0, &cfg, err));
    const sti_attn_engine *engine = sti_attn_engine_of(&cfg, x->layer);
    if (engine == &sti_attn_softmax) {
        sti_hybrid_preset("softmax", SOFTMAX_CHUNK, out);
    } else if (engine == &sti_attn_hybrid) {
        *out = sti_attn_hybrid_settings(&cfg, &layer);
    } else {
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "attention: method %s is not one of the hybrid operator: use "
                        "still, lolcats, hedgehog, t2r, swa or softmax",
                        m->name);
    }
    if (sti_hybrid_needs_raw(out))
        return sti_fail(
            err, STILL_E_UNSUPPORTED,
            "attention: positions are capped in sessions only: use absolute "
            "ones");
    return sti_hybrid_check(out, &shape, err);
}

static still_status missing(const char *what, still_error *err)
{
    return sti_fail(err, STILL_E_ARG, "attention: %s is NULL, expected an array", what);
}

/* Checks a call and fills what both directions need of it. set: where args->set points. */
static still_status begin(const still_attention_args *given, still_attention_args *x,
                          sti_hybrid_settings *set, sti_hybrid_parallel_args *args,
                          still_error *err)
{
    if (!given) return missing("still_attention_args", err);
    STI_TRY(STI_TAKE(x, given, still_attention_args, err));
    STI_TRY(settings_of(x, set, err));
    if (!x->q || !x->k || !x->v) return missing("q, k or v", err);
    if (!x->route) return missing("route", err);
    *args = (sti_hybrid_parallel_args){
        .set = set,
        .shape = {x->heads, x->kv_heads, x->head_dim, x->head_dim},
        .B = x->batch,
        .T = x->tokens,
        .in = {.q = x->q, .k = x->k, .v = x->v},
        .fold_chunk = x->route};
    /* What the method has no use for is not read, whatever a backend would make of it. */
    sti_hybrid_in *in = &args->in;
    if (set->gate) in->gate_logit = x->gate_logit;
    if (set->alpha) in->alpha = x->alpha;
    if (set->window_factor) in->window_logit = x->window_logit;
    if (set->has_linear) {
        in->map_q = x->map_q;
        in->map_k = x->map_k;
    }
    if (set->map == STI_MAP_RELU) {
        in->bias_q = x->bias_q;
        in->bias_k = x->bias_k;
    }
    return STILL_OK;
}

still_status still_attention_forward(still_attention *a, const still_attention_args *x,
                                     still_error *err)
{
    still_attention_args own;
    sti_hybrid_settings set;
    sti_hybrid_parallel_args args;
    STI_TRY(begin(x, &own, &set, &args, err));
    if (!own.y) return missing("y", err);
    args.y = own.y;
    STI_TRY(a->be->hybrid_route(a->dev, &args, err));
    return a->be->hybrid_parallel(a->dev, &args, err);
}

still_status still_attention_backward(still_attention *a, const still_attention_args *x,
                                      still_error *err)
{
    still_attention_args own;
    sti_hybrid_settings set;
    sti_hybrid_parallel_args args;
    STI_TRY(begin(x, &own, &set, &args, err));
    if (!own.dy) return missing("dy", err);
    args.dy = own.dy;
    /* An input that was not given has no gradient, but for those that have a start value. */
    sti_hybrid_grad *g = &args.grad;
    g->q = own.dq;
    g->k = own.dk;
    g->v = own.dv;
    if (args.in.gate_logit) g->gate_logit = own.dgate_logit;
    if (set.alpha) g->alpha = own.dalpha;
    if (set.window_factor) g->window_logit = own.dwindow_logit;
    if (set.has_linear) {
        g->map_q = own.dmap_q;
        g->map_k = own.dmap_k;
    }
    if (set.map == STI_MAP_RELU) {
        g->bias_q = own.dbias_q;
        g->bias_k = own.dbias_k;
    }
    return a->be->hybrid_backward(a->dev, &args, err);
}
