/* rank.c - how much each kv head looks back at a fact; see allocate.h.
 *
 * The probe is one sequence from its beginning, so layers run in the form that training
 * has (train/layer.h), with the model's own softmax attention: what a head does before
 * anything is taken from it. Only the queries of the answer are looked at, so this costs
 * no more than reading the probe. */
#include <math.h>
#include <stdlib.h>

#include "allocate/allocate.h"
#include "train/layer.h"

typedef struct run {
    still_model *m;
    const sti_probe *p;
    sti_batch batch;
    sti_acts acts;
    sti_block work; /* acts and all below */
    float *x;       /* [T, hidden] */
    double *weight; /* [T]: of one query */
} run;

static void lay_out(run *r, sti_carve *c)
{
    const size_t T = (size_t)r->batch.T;
    sti_acts_carve(r->m, 1, r->batch.T, 0, false, 1, c, &r->acts);
    r->x = sti_carve_take(c, T * (size_t)r->m->cfg.hidden, sizeof *r->x);
    r->weight = sti_carve_take(c, T, sizeof *r->weight);
    sti_batch_carve(&r->batch, c);
}

static still_status prepare(run *r, still_error *err)
{
    const int n = r->p->n;
    r->batch = (sti_batch){.B = 1, .T = n};
    sti_carve c = {0};
    lay_out(r, &c);
    if (!sti_block_new(&r->work, c.used))
        return sti_fail_memory(err, "activations of a probe", c.used);
    c = (sti_carve){.base = r->work.p};
    lay_out(r, &c);
    return r->m->be->dev_reserve(r->m->dev, n, err);
}

/* Softmax weight that query t of head h gives the value. */
static double weight_on_value(run *r, int layer, int t, int h)
{
    const sti_config *g = &r->m->cfg;
    const size_t D = (size_t)g->head_dim, H = (size_t)g->heads, G = (size_t)g->kv_heads;
    const size_t kv = (size_t)h / (H / G);
    const float *q = r->acts.qr + ((size_t)t * H + (size_t)h) * D;
    const int window = g->window[layer];
    const int first = window > 0 && t >= window ? t - window + 1 : 0;
    double top = -INFINITY, sum = 0, on_value = 0;
    for (int j = first; j <= t; j++) {
        const float *k = r->acts.kr + ((size_t)j * G + kv) * D;
        float dot = 0;
        for (size_t d = 0; d < D; d++) dot += q[d] * k[d];
        r->weight[j] = (double)dot / sqrt((double)D);
        top = fmax(top, r->weight[j]);
    }
    for (int j = first; j <= t; j++) {
        const double w = exp(r->weight[j] - top);
        sum += w;
        if (j >= r->p->value.first && j < r->p->value.first + r->p->value.n)
            on_value += w;
    }
    return on_value / sum;
}

static void look_at(run *r, int layer, double *gain)
{
    const sti_config *g = &r->m->cfg;
    const int group = g->heads / g->kv_heads, first = r->p->answer.first - 1;
    for (int kv = 0; kv < g->kv_heads; kv++) {
        double best = 0;
        for (int h = kv * group; h < (kv + 1) * group; h++) {
            double sum = 0;
            for (int i = 0; i < r->p->answer.n; i++)
                sum += weight_on_value(r, layer, first + i, h);
            best = fmax(best, sum / r->p->answer.n);
        }
        gain[(size_t)layer * (size_t)g->kv_heads + (size_t)kv] += best;
    }
}

static still_status run_layers(run *r, double *gain, still_error *err)
{
    still_model *m = r->m;
    /* Nothing goes back: what is kept of a layer is scratch of its feed-forward. */
    sti_grads scratch = {.dh = r->acts.h, .feed = r->acts.feed};
    const sti_attn_config softmax = {.last = -1};
    const sti_layer_job job = {.m = m,
                               .cfg = &softmax,
                               .want = STI_WANT_OUTPUT,
                               .batch = &r->batch,
                               .acts = &r->acts,
                               .back = &scratch};
    STI_TRY(sti_model_embed(m, r->p->tok, r->batch.T, r->x, err));
    for (int l = 0; l < m->cfg.layers; l++) {
        STI_TRY(sti_layer_attend(&job, l, r->x, err));
        if (!m->cfg.kept[l]) look_at(r, l, gain);
        if (l + 1 < m->cfg.layers) STI_TRY(sti_layer_finish(&job, l, r->x, r->x, err));
    }
    return STILL_OK;
}

still_status sti_rank_heads(still_model *m, const sti_probe *p, double *gain,
                            still_error *err)
{
    run r = {.m = m, .p = p};
    still_status st = prepare(&r, err);
    if (st == STILL_OK) st = run_layers(&r, gain, err);
    sti_block_free(&r.work);
    return st;
}
