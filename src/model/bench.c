/* bench.c - what benchmarks ask of a model that nobody else does: stand-ins for
 * adapters, and the most memory it has taken. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "model/model.h"
#include "model/shape.h"

/* ---- Stand-ins ----------------------------------------------------------- */

/* Whether the two have the same entries. */
static bool alike(const still_method *a, const still_method *b)
{
    return strcmp(a->name, b->name) == 0 && a->per_head == b->per_head &&
           a->gate == b->gate && a->first_layer == b->first_layer &&
           a->last_layer == b->last_layer;
}

/* Gates as sti_adapter_read would have them: 8 bits beside quantized weights, halves
 * beside others. */
static sti_dtype gate_type(const still_model *m)
{
    const sti_dtype t = m->layer[0].q.w.type;
    return t == STI_F32 || t == STI_F16 || t == STI_BF16 ? STI_F16 : STI_Q8_0;
}

static still_status bind_gate(const still_model *m, sti_adapter *a,
                              const sti_adapter_entry *e, still_error *err)
{
    size_t bytes;
    sti_adapter_matrix *gate = &a->layer[e->layer].gate;
    sti_dtype type = gate_type(m);
    if (!sti_dtype_bytes(type, (uint64_t)e->n, &bytes))
        return sti_fail(err, STILL_E_UNSUPPORTED, "a gate of rows of %lld numbers",
                        (long long)e->dim[1]);
    void *data = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!data) return sti_fail_memory(err, e->name, bytes);
    sti_random_weights(type, 1 / sqrt((double)e->dim[1]),
                       sti_mix64(1000 + (uint64_t)e->layer), data, bytes);
    still_status st = sti_adapter_matrix_bind(a, e, type, data, bytes, gate, err);
    a->resident += gate->w.own.bytes ? gate->w.own.bytes : bytes;
    if (st == STILL_OK && gate->w.own.bytes == 0) {
        gate->owned = data; /* the backend multiplies straight from it */
        return STILL_OK;
    }
    free(data);
    gate->src.data = NULL;
    return st;
}

static still_status make(still_model *m, const still_method *method, sti_adapter **out,
                         still_error *err)
{
    const sti_adapter_home home = sti_model_home(m);
    const sti_adapter_spec spec = {.method = *method};
    STI_TRY(sti_adapter_make(&home, &spec, false, false, false, out, err));
    sti_adapter *a = *out;
    still_status st = sti_adapter_bind(a, false, err);
    for (size_t i = 0; i < a->n_entries && st == STILL_OK; i++)
        if (a->entry[i].kind == STI_TRAINED_GATE)
            st = bind_gate(m, a, &a->entry[i], err);
    if (st != STILL_OK) {
        sti_adapter_free(a);
        *out = NULL;
    }
    return st;
}

/* The stand-in for a method, made if there is none yet. */
static still_status find(still_model *m, const still_method *method, sti_adapter **out,
                         still_error *err)
{
    for (int i = 0; i < m->n_stand_ins; i++)
        if (alike(&m->stand_in[i]->spec.method, method)) {
            *out = m->stand_in[i];
            return STILL_OK;
        }
    const size_t n = (size_t)m->n_stand_ins;
    sti_adapter **grown = sti_grow(m->stand_in, n + 1, sizeof(sti_adapter *));
    if (!grown) return sti_fail_memory(err, "adapter", (n + 1) * sizeof(sti_adapter *));
    m->stand_in = grown;
    STI_TRY(make(m, method, out, err));
    m->stand_in[m->n_stand_ins++] = *out;
    return STILL_OK;
}

still_status sti_model_stand_in(still_model *m, const still_method *method,
                                still_error *err)
{
    sti_adapter *a = NULL;
    if (m->info.method) return STILL_OK;
    if (method && strcmp(method->name, "softmax") != 0)
        STI_TRY(find(m, method, &a, err));
    if (a && a->n_entries == 0) a = NULL; /* nothing to add */
    if (a == m->adapter) return STILL_OK;
    m->adapter = a;
    sti_model_scratch_free(m); /* it has room for gates or it has not */
    return STILL_OK;
}

void sti_model_stand_ins_free(still_model *m)
{
    for (int i = 0; i < m->n_stand_ins; i++) {
        if (m->adapter == m->stand_in[i]) m->adapter = NULL;
        sti_adapter_free(m->stand_in[i]);
    }
    free(m->stand_in);
    m->stand_in = NULL;
    m->n_stand_ins = 0;
}

/* ---- Memory -------------------------------------------------------------- */

/* Bytes of a GPU that its matrices take. */
static size_t weights_of_adapter(const sti_adapter *a)
{
    size_t bytes = 0;
    for (int l = 0; l < a->n_layers; l++) {
        const sti_adapter_layer *L = &a->layer[l];
        bytes += L->gate.w.own.bytes;
        for (int t = 0; t < STI_TARGETS; t++)
            bytes += L->lora[t].a.w.own.bytes + L->lora[t].b.w.own.bytes;
    }
    return bytes;
}

size_t sti_model_peak(still_model *m, bool restart)
{
    if (restart) sti_model_scratch_free(m);
    size_t bytes = m->be->mem_peak ? m->be->mem_peak(m->dev, restart) : 0;
    for (int i = 0; i < m->n_stand_ins; i++) {
        const sti_adapter *a = m->stand_in[i];
        if (a == m->adapter) continue;
        const size_t idle = m->be->host_memory
                                ? a->block.bytes + a->resident
                                : a->mirror.bytes + weights_of_adapter(a);
        bytes = bytes > idle ? bytes - idle : 0;
    }
    return bytes;
}
