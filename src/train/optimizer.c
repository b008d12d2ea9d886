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

/* Names the first entry whose gradient is no number. */
static still_status blame(const sti_trainer *t, still_error *err)
{
    for (size_t i = 0; i < t->adapter->n_entries; i++) {
        const sti_adapter_entry *e = &t->adapter->entry[i];
        for (size_t k = 0; k < e->n; k++)
            if (!isfinite(t->grad[e->at + k]))
                return sti_fail(err, STILL_E_NUMERIC,
                                "stage %d, step %llu: the gradient of '%s' (layer %d) "
                                "is not a number; the last checkpoint is good: try a "
                                "smaller learning rate",
                                t->stage, (unsigned long long)t->step, e->name,
                                e->layer);
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
    double square = 0;
    for (size_t i = 0; i < a->n_entries; i++) {
        const sti_adapter_entry *e = &a->entry[i];
        double one = 0;
        if (!sti_trains(t, t->stage, e)) continue;
        STI_TRY(m->be->sum_squares(m->dev, t->grad + e->at, e->n, &one, err));
        square += one;
    }
    *norm = sqrt(square);
    if (!isfinite(*norm)) return blame(t, err);
    const double scale = *norm > t->p.clip ? t->p.clip / (*norm + 1e-6) : 1;
    const double lr = sti_schedule(t->p.lr[t->stage], t->step, t->steps, t->p.warmup);
    for (size_t i = 0; i < a->n_entries; i++) {
        const sti_adapter_entry *e = &a->entry[i];
        if (!sti_trains(t, t->stage, e)) continue;
        STI_TRY(m->be->adam(
            m->dev,
            &(sti_adam_args){.x = a->value + e->at,
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
                             .c2 = 1 - pow(t->p.beta2, (double)(t->step + 1))},
            err));
        /* Such values must not reach a checkpoint. */
        double square_of_values = 0;
        STI_TRY(
            m->be->sum_squares(m->dev, a->value + e->at, e->n, &square_of_values, err));
        if (!isfinite(square_of_values))
            return sti_fail(err, STILL_E_NUMERIC,
                            "stage %d, step %llu: the step makes '%s' (layer %d) no "
                            "number; the last checkpoint is good: try a smaller "
                            "learning rate",
                            t->stage, (unsigned long long)t->step, e->name, e->layer);
    }
    return STILL_OK;
}
