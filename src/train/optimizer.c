/* optimizer.c - AdamW over the entries a stage trains, with float masters: the
 * adapter's values are the masters themselves. */
#include <math.h>

#include "train/train.h"

double sti_schedule(double peak, uint64_t s, uint64_t n, double warmup)
{
    const uint64_t warm = (uint64_t)ceil(warmup * (double)n);
    if (s < warm) return peak * (double)(s + 1) / (double)warm;
    if (n <= warm) return peak;
    const double done = (double)(s - warm) / (double)(n - warm);
    return peak * (0.1 + 0.9 * 0.5 * (1 + cos(3.14159265358979323846 * done)));
}

static still_train_group group_of(sti_trained kind)
{
    switch (kind) {
    case STI_TRAINED_ALPHA:
    case STI_TRAINED_WINDOW: return STILL_GROUP_SCALARS;
    case STI_TRAINED_GATE: return STILL_GROUP_GATE;
    case STI_TRAINED_LORA_A:
    case STI_TRAINED_LORA_B: return STILL_GROUP_LORA;
    default: return STILL_GROUP_MAPS;
    }
}

bool sti_trains(const sti_trainer *t, int stage, const sti_adapter_entry *e)
{
    const still_train_group g = group_of(e->kind);
    if (t->p.lr_scale[g] < 0) return false;
    if (stage == 1) return g != STILL_GROUP_LORA;
    return g == STILL_GROUP_LORA || (g != STILL_GROUP_GATE && !t->p.freeze_maps);
}

/* The entries that the stage trains, as spans of the adapter's arrays; returns how
 * many. */
static int list_spans(const sti_trainer *t)
{
    int n = 0;
    for (size_t i = 0; i < t->adapter->n_entries; i++) {
        const sti_adapter_entry *e = &t->adapter->entry[i];
        if (sti_trains(t, t->stage, e)) t->span[n++] = (sti_span){e->at, e->n};
    }
    return n;
}

static const sti_adapter_entry *entry_at(const sti_trainer *t, size_t at)
{
    const sti_adapter_entry *e = t->adapter->entry;
    while (e->at != at) e++;
    return e;
}

/* Names the first entry whose gradient is not finite. */
static still_status name_nan_gradient(const sti_trainer *t, int n, still_error *err)
{
    for (int i = 0; i < n; i++) {
        const sti_adapter_entry *e = entry_at(t, t->span[i].at);
        if (!isfinite(t->square[i]))
            return sti_fail(err, STILL_E_NUMERIC,
                            "stage %d, step %llu: the gradient of '%s' (layer %d) "
                            "is not a number; the last checkpoint is good: try a "
                            "smaller learning rate",
                            t->stage, (unsigned long long)t->step, e->name, e->layer);
    }
    return sti_fail(err, STILL_E_NUMERIC,
                    "stage %d, step %llu: the gradient's norm overflows; the last "
                    "checkpoint is good: try a smaller learning rate",
                    t->stage, (unsigned long long)t->step);
}

still_status sti_optimizer_step(sti_trainer *t, double *norm, still_error *err)
{
    still_model *m = t->m;
    sti_adapter *a = t->adapter;
    const int n = list_spans(t);
    double square = 0;
    STI_TRY(m->be->sum_squares(m->dev, t->grad, t->span, n, t->square, err));
    for (int i = 0; i < n; i++) square += t->square[i];
    *norm = sqrt(square);
    if (!isfinite(*norm)) return name_nan_gradient(t, n, err);
    const double scale = *norm > t->p.clip ? t->p.clip / (*norm + 1e-6) : 1;
    const double lr = sti_schedule(t->p.lr[t->stage], t->step, t->steps, t->p.warmup);
    for (int i = 0; i < n; i++) {
        const sti_adapter_entry *e = entry_at(t, t->span[i].at);
        t->adam[i] =
            (sti_adam_args){.x = a->seen + e->at,
                            .m = t->moment1 + e->at,
                            .v = t->moment2 + e->at,
                            .grad = t->grad + e->at,
                            .n = e->n,
                            .scale = (float)scale,
                            .lr = (float)(lr * t->p.lr_scale[group_of(e->kind)]),
                            .beta1 = (float)t->p.beta1,
                            .beta2 = (float)t->p.beta2,
                            .eps = 1e-8f,
                            .decay = (float)t->p.decay,
                            .c1 = 1 - pow(t->p.beta1, (double)(t->step + 1)),
                            .c2 = 1 - pow(t->p.beta2, (double)(t->step + 1))};
    }
    STI_TRY(m->be->adam(m->dev, t->adam, n, err));
    /* Values that are not finite must not reach a checkpoint. */
    STI_TRY(m->be->sum_squares(m->dev, a->seen, t->span, n, t->square, err));
    for (int i = 0; i < n; i++) {
        const sti_adapter_entry *e = entry_at(t, t->span[i].at);
        if (!isfinite(t->square[i]))
            return sti_fail(err, STILL_E_NUMERIC,
                            "stage %d, step %llu: the step makes '%s' (layer %d) no "
                            "number; the last checkpoint is good: try a smaller "
                            "learning rate",
                            t->stage, (unsigned long long)t->step, e->name, e->layer);
    }
    return STILL_OK;
}
