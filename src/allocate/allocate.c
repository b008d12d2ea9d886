/* allocate.c - still_allocate: probes, or what an earlier run kept of them, and caps. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "allocate/allocate.h"
#include "base/sized.h"
#include "session/session.h"

enum { PROBES = 24, PASSAGES = 4 }; /* about 1200 tokens each */

static still_status rank_all(still_model *m, const still_allocate_params *p,
                             double *gain, still_error *err)
{
    const size_t heads = (size_t)m->cfg.layers * (size_t)m->cfg.kv_heads;
    const still_tokenizer *tk = still_model_tokenizer(m);
    for (int i = 0; i < p->probes; i++) {
        sti_probe probe;
        STI_TRY(sti_probe_make(tk, p->seed, i, PASSAGES, &probe, err));
        const still_status st = sti_rank_heads(m, &probe, gain, err);
        free(probe.tok);
        STI_TRY(st);
        if (p->progress && !p->progress(p->user, (uint64_t)i + 1, (uint64_t)p->probes))
            return sti_fail(err, STILL_E_CANCELLED, "the allocation was stopped");
    }
    double sum = 0;
    for (size_t i = 0; i < heads; i++) sum += gain[i] /= p->probes;
    if (!(sum > 0) || !isfinite(sum))
        return sti_fail(err, STILL_E_NUMERIC,
                        "%s: no head looks back at a fact (attention on it: %g)",
                        m->info.path, sum);
    return STILL_OK;
}

/* Probes read attention from keys and queries in the program's own memory, and fast, and
 * they ask the model as it was before any adapter: another model is opened a second time,
 * plain and on the cpu. */
static still_status rank_on_cpu(still_model *m, const still_allocate_params *p,
                                double *gain, still_error *err)
{
    if (strcmp(m->be->name, "cpu") == 0 && !m->adapter)
        return rank_all(m, p, gain, err);
    still_model *plain;
    STI_TRY(still_model_open(m->info.path,
                             &STILL_PARAMS(still_model_params, .backend = "cpu"),
                             &plain, err));
    const still_status st = rank_all(plain, p, gain, err);
    still_model_free(plain);
    return st;
}

static void note(const still_allocate_params *p, const char *line)
{
    if (p->note) p->note(p->user, line);
}

/* Gains from the file that an earlier run kept, or from probes, and then kept. A file
 * that cannot be read or written costs time, and is no failure. */
static still_status find_gains(still_model *m, const still_allocate_params *p,
                               double *gain, still_error *err)
{
    char *path = NULL, name[STI_KEPT_NAME];
    still_error why;
    if (!p->folder) return rank_on_cpu(m, p, gain, err);
    sti_kept_name(m, name);
    STI_TRY(sti_kept_path(name, p, &path, err));
    if (access(path, F_OK) == 0) {
        if (sti_kept_read(path, name, m, p, gain, &why) == STILL_OK) {
            free(path);
            return STILL_OK;
        }
        note(p, why.text);
        memset(gain, 0, (size_t)m->cfg.layers * (size_t)m->cfg.kv_heads * sizeof *gain);
    }
    const still_status st = rank_on_cpu(m, p, gain, err);
    if (st == STILL_OK && sti_kept_write(path, name, m, p, gain, &why) != STILL_OK)
        note(p, why.text);
    free(path);
    return st;
}

/* What is allocated: the method asked for or trained, else still without training. */
static still_status start_method(const still_model *m, const still_method *asked,
                                 still_method *out, still_error *err)
{
    if (asked)
        *out = *asked;
    else if (m->info.method)
        *out = *m->info.method;
    else
        STI_TRY(still_method_untrained(out, 0, err));
    out->caps[0] = 0;
    return STILL_OK;
}

/* The caps of the method as an array; 0 in layers that keep their own attention. */
static still_status fill_caps(const still_model *m, still_allocation *a,
                              still_error *err)
{
    const int G = m->cfg.kv_heads;
    sti_attn_config cfg = {.ctx = m->info.ctx_train};
    const sti_attn_layer first = sti_model_attn_layer(m, 0);
    STI_TRY(sti_attn_configure(&a->method, &first, m->cfg.layers, m->info.ctx_train,
                               &cfg, err));
    for (int l = 0; l < m->cfg.layers; l++) {
        if (!sti_attn_converts(&cfg, l)) continue;
        const sti_attn_layer layer = sti_model_attn_layer(m, l);
        const sti_hybrid_settings set = sti_attn_hybrid_settings(&cfg, &layer);
        for (int g = 0; g < G; g++) a->cap[l * G + g] = sti_hybrid_cap(&set, g);
    }
    return STILL_OK;
}

/* What the adapter's method takes as it is; without an adapter what the method takes with
 * one cap for all heads, a linear state and keys and values that are not quantized, so
 * that leaving the state out and quantizing buy tokens. */
static still_status usual_bytes(const still_model *m, const still_method *method,
                                size_t *out, still_error *err)
{
    still_method usual = m->info.method ? *m->info.method : *method;
    if (!m->info.method) {
        usual.forget = false;
        usual.positions = STILL_POSITIONS_ABSOLUTE;
        usual.key_bits = usual.value_bits = 0;
    }
    return sti_session_full_bytes(
        m,
        &STILL_PARAMS(still_session_params, .method = &usual, .ctx = m->info.ctx_train),
        out, err);
}

static still_status check_method(const still_method *method, still_error *err)
{
    if (strcmp(method->name, "still") != 0)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "caps are chosen for the method still, not for %s",
                        method->name);
    if (method->select == 0)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "there are no caps to choose: with --select 0 no token is kept "
                        "beyond the window");
    if (method->per_head)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "caps are chosen for kv heads: use --heads shared");
    return STILL_OK;
}

static still_status run(still_model *m, const still_allocate_params *p,
                        still_allocation *a, still_error *err)
{
    still_method method;
    size_t budget = p->budget;
    STI_TRY(start_method(m, p->method, &method, err));
    if (p->key_bits) method.key_bits = p->key_bits;
    if (p->value_bits) method.value_bits = p->value_bits;
    STI_TRY(check_method(&method, err));
    const int ctx = m->info.ctx_train;
    if (budget == 0) STI_TRY(usual_bytes(m, &method, &budget, err));
    STI_TRY(sti_check_budget(m, &method, budget, p->shrink, err));
    STI_TRY(find_gains(m, p, a->gain, err));
    STI_TRY(sti_choose_caps(m, &method, a->gain, budget, p->shrink, &a->method,
                            &a->chosen, err));
    STI_TRY(sti_session_full_bytes(
        m, &STILL_PARAMS(still_session_params, .method = &a->method, .ctx = ctx),
        &a->bytes, err));
    return fill_caps(m, a, err);
}

still_status still_allocate(still_model *m, const still_allocate_params *p,
                            still_allocation **out, still_error *err)
{
    still_allocate_params with;
    const size_t heads = (size_t)m->cfg.layers * (size_t)m->cfg.kv_heads;
    *out = NULL;
    STI_TRY(STI_TAKE(&with, p, still_allocate_params, err));
    if (!still_model_tokenizer(m))
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "%s: has no tokenizer, and probes are text", m->info.path);
    if (with.probes <= 0) with.probes = PROBES;
    still_allocation *a =
        sti_alloc(1, sizeof *a + heads * (sizeof *a->gain + sizeof *a->cap));
    if (!a) return sti_fail_memory(err, "an allocation", heads * sizeof *a->gain);
    a->layers = m->cfg.layers;
    a->heads = m->cfg.kv_heads;
    a->gain = (double *)(a + 1);
    a->cap = (int *)(a->gain + heads);
    const still_status st = run(m, &with, a, err);
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
