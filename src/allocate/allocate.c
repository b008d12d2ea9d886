/* allocate.c - still_allocate: probes, ranks and caps in a row. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "allocate/allocate.h"

enum { PROBES = 24, PASSAGES = 4 }; /* about 1200 tokens each */

static still_status rank_all(still_model *m, const still_allocate_params *p, int probes,
                             double *gain, still_error *err)
{
    const size_t heads = (size_t)m->cfg.layers * (size_t)m->cfg.kv_heads;
    const still_tokenizer *tk = still_model_tokenizer(m);
    for (int i = 0; i < probes; i++) {
        sti_probe probe;
        STI_TRY(sti_probe_make(tk, p->seed, i, PASSAGES, &probe, err));
        const still_status st = sti_rank_heads(m, &probe, gain, err);
        free(probe.tok);
        STI_TRY(st);
        if (p->progress && !p->progress(p->user, (uint64_t)i + 1, (uint64_t)probes))
            return sti_fail(err, STILL_E_CANCELLED, "the allocation was stopped");
    }
    double sum = 0;
    for (size_t i = 0; i < heads; i++) sum += gain[i] /= probes;
    if (!(sum > 0) || !isfinite(sum))
        return sti_fail(err, STILL_E_NUMERIC,
                        "%s: no head looks back at a fact (attention on it: %g)",
                        m->info.path, sum);
    return STILL_OK;
}

/* What is allocated: the method asked for or trained, else still, every token of which
 * can be chosen, by the score that keeps facts whole. */
static still_status start_method(const still_model *m, const still_method *asked,
                                 still_method *out, still_error *err)
{
    if (asked) {
        *out = *asked;
    } else if (m->info.method) {
        *out = *m->info.method;
    } else {
        STI_TRY(still_method_init(out, "still", 0, err));
        out->select = out->chunk;
        snprintf(out->score, sizeof out->score, "distinct");
        out->positions = STILL_POSITIONS_CAPPED;
    }
    out->caps[0] = 0;
    return STILL_OK;
}

static still_status check_model(const still_model *m, still_error *err)
{
    if (!m->be->host_memory)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "backend %s does not tell its attention weights: allocate with "
                        "--backend cpu",
                        m->be->name);
    if (!still_model_tokenizer(m))
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "%s: has no tokenizer, and probes are text", m->info.path);
    return STILL_OK;
}

/* The caps of the method as an array. */
static still_status fill_caps(const still_model *m, still_allocation *a,
                              still_error *err)
{
    const int G = m->cfg.kv_heads;
    sti_attn_config cfg = {.ctx = m->info.ctx_train};
    const sti_attn_layer first = sti_model_attn_layer(m, 0);
    STI_TRY(sti_attn_configure(&a->method, &first, m->cfg.layers, m->info.ctx_train,
                               &cfg, err));
    for (int l = 0; l < m->cfg.layers; l++) {
        const sti_attn_layer layer = sti_model_attn_layer(m, l);
        const sti_hybrid_settings set = sti_attn_hybrid_settings(&cfg, &layer);
        for (int g = 0; g < G; g++) a->cap[l * G + g] = sti_hybrid_cap(&set, g);
    }
    return STILL_OK;
}

static still_status run(still_model *m, const still_allocate_params *p,
                        still_allocation *a, still_error *err)
{
    still_method method;
    still_bill bill;
    size_t budget = p->budget;
    STI_TRY(start_method(m, p->method, &method, err));
    if (p->key_bits) method.key_bits = p->key_bits;
    if (p->value_bits) method.value_bits = p->value_bits;
    if (method.per_head)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "caps are allocated to kv heads: use --heads shared");
    const int ctx = m->info.ctx_train;
    if (budget == 0) { /* what the method takes as it is */
        const still_method *now = m->info.method ? m->info.method : &method;
        STI_TRY(still_model_bill(m, &(still_session_params){.method = now, .ctx = ctx},
                                 &bill, err));
        budget = bill.cache;
    }
    STI_TRY(rank_all(m, p, p->probes > 0 ? p->probes : PROBES, a->gain, err));
    STI_TRY(sti_choose_caps(m, &method, a->gain, budget, &a->method, &a->chosen, err));
    STI_TRY(still_model_bill(
        m, &(still_session_params){.method = &a->method, .ctx = ctx}, &bill, err));
    a->bytes = bill.cache;
    return fill_caps(m, a, err);
}

still_status still_allocate(still_model *m, const still_allocate_params *p,
                            still_allocation **out, still_error *err)
{
    const still_allocate_params none = {0};
    const size_t heads = (size_t)m->cfg.layers * (size_t)m->cfg.kv_heads;
    *out = NULL;
    STI_TRY(check_model(m, err));
    still_allocation *a =
        sti_alloc(1, sizeof *a + heads * (sizeof *a->gain + sizeof *a->cap));
    if (!a) return sti_fail_memory(err, "an allocation", heads * sizeof *a->gain);
    a->layers = m->cfg.layers;
    a->heads = m->cfg.kv_heads;
    a->gain = (double *)(a + 1);
    a->cap = (int *)(a->gain + heads);
    const still_status st = run(m, p ? p : &none, a, err);
    if (st == STILL_OK)
        *out = a;
    else
        free(a);
    return st;
}

void still_allocation_free(still_allocation *a)
{
    free(a);
}
