/* double_model.c - see double_model.h. Rows are M = B T; everything is [M, .]. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../run.h"

#include "base/random.h"
#include "double_model.h"

enum { MAX_BLOCKS = 512, PARTS = STI_PARTS };

typedef struct matrix { /* y = W x + bias */
    const double *w;    /* [N, K] */
    const double *bias; /* [N] or NULL */
    int N, K;           /* N 0: there is none */
} matrix;

typedef struct layer {
    matrix part[PARTS];
    double *input;   /* [M, hidden] at the start */
    double *teacher; /* [M, H D]: its attention's output; stage 1 */
    int32_t *fold;   /* [M, H]: the route at the start */
    double *top;     /* [M, H]: M at the start */
} layer;

typedef struct parts {
    int M;
    double share;
    bool decided;
    matrix embed, final_norm, head;
    layer *layer;                     /* [layers] */
    int32_t *nothing;                 /* [M, H]: a route on which no token is folded */
    int32_t *local;                   /* likewise: that of a sliding window */
    double *x, *h, *q, *k, *v, *gate; /* a layer, as in sti_acts */
    double *y, *g, *u, *low, *dropped, *out;
    double *logits, *teacher; /* [M, vocab]; teacher: log-probabilities, with kd */
    void *block[MAX_BLOCKS];
    int n_blocks;
} parts;

static void *take(parts *p, size_t n, size_t size)
{
    void *block = calloc(n, size);
    if (!block || p->n_blocks == MAX_BLOCKS) abort();
    return p->block[p->n_blocks++] = block;
}

static double *reals(parts *p, size_t n)
{
    return take(p, n, sizeof(double));
}

/* ---- Numbers ------------------------------------------------------------- */

static double *read_tensor(parts *p, const sti_tensor *t, int n)
{
    double *out = reals(p, (size_t)n);
    float *row = malloc((size_t)n * sizeof *row);
    assert_non_null(row);
    sti_dequant(t->type, t->data, row, n);
    for (int i = 0; i < n; i++) out[i] = (double)row[i];
    free(row);
    return out;
}

/* Norms are matrices of one row. */
static matrix read_part(double_model *d, sti_part part, int l)
{
    const sti_store *s = &d->t->m->store;
    const sti_config *g = &d->t->m->cfg;
    if (!sti_config_has(g, part)) return (matrix){0};
    const sti_tensor *w = sti_config_tensor(g, s, part, l, false),
                     *bias = sti_config_tensor(g, s, part, l, true);
    if (!w) return (matrix){0};
    const int N = w->n_dims == 2 ? (int)w->dim[0] : 1, K = (int)w->dim[w->n_dims - 1];
    double *own = read_tensor(d->parts, w, N * K);
    for (int i = 0; w->n_dims == 1 && i < K; i++) own[i] += g->form.norm_offset;
    matrix m = {
        .w = own, .bias = bias ? read_tensor(d->parts, bias, N) : NULL, .N = N, .K = K};
    if (!sti_rotary_moves(g) || (part != STI_PART_Q && part != STI_PART_K)) return m;
    /* What is trained sees rows as they are used. */
    double *moved = reals(d->parts, (size_t)N * (size_t)K);
    for (int r = 0; r < N; r++) {
        const int from = r - r % g->head_dim + sti_rotary_row(g, r % g->head_dim);
        memcpy(moved + (size_t)r * (size_t)K, m.w + (size_t)from * (size_t)K,
               (size_t)K * sizeof *moved);
    }
    m.w = moved;
    return m;
}

/* A trained entry; those without a second dimension are read by their w alone. */
static matrix trained(const double_model *d, int l, sti_trained kind, sti_target target)
{
    const sti_adapter *a = d->t->adapter;
    for (size_t i = 0; i < a->n_entries; i++) {
        const sti_adapter_entry *e = &a->entry[i];
        if (e->layer == l && e->kind == kind && e->target == target)
            return (matrix){
                .w = d->value + e->at, .N = (int)e->dim[0], .K = (int)e->dim[1]};
    }
    return (matrix){0};
}

/* ---- Operators ----------------------------------------------------------- */

/* Four partial sums, so that the processor need not wait for each addition. */
static double dot(const double *a, const double *b, int n)
{
    double s[4] = {0};
    int i = 0;
    for (; i + 4 <= n; i += 4)
        for (int j = 0; j < 4; j++) s[j] += a[i + j] * b[i + j];
    for (; i < n; i++) s[0] += a[i] * b[i];
    return (s[0] + s[1]) + (s[2] + s[3]);
}

/* y = [y +] scale x W^T + bias */
static void multiply(const parts *p, const matrix *w, const double *x, double scale,
                     bool add, double *y)
{
    for (int m = 0; m < p->M; m++, x += w->K, y += w->N)
        for (int n = 0; n < w->N; n++)
            y[n] = (add ? y[n] : 0) + scale * dot(x, w->w + (size_t)n * w->K, w->K) +
                   (w->bias ? w->bias[n] : 0);
}

/* rows of `width`, as many as the norm is wide or heads in them; y may be x. */
static void norm_rows(const double_model *d, const matrix *g, const double *x,
                      int width, double *y)
{
    for (int m = 0; m < d->parts->M * (width / g->K); m++, x += g->K, y += g->K) {
        const double r =
            1 / sqrt(dot(x, x, g->K) / g->K + (double)d->t->m->cfg.rms_eps);
        for (int i = 0; i < g->K; i++) y[i] = x[i] * r * g->w[i];
    }
}

/* Without a norm x stays as it is. */
static void norm(const double_model *d, const matrix *g, const double *x, double *y)
{
    const int hidden = d->t->m->cfg.hidden;
    if (g->N)
        norm_rows(d, g, x, hidden, y);
    else
        memmove(y, x, (size_t)d->parts->M * (size_t)hidden * sizeof *y);
}

static void rotate(const double_model *d, int l, double *x, int heads)
{
    const sti_config *g = &d->t->m->cfg;
    const int half = g->head_dim / 2;
    const float *inv_freq = sti_config_inv_freq(g, l, d->t->batch.T);
    for (int m = 0; m < d->parts->M; m++)
        for (int h = 0; h < heads; h++, x += g->head_dim)
            for (int i = 0; i < half; i++) {
                const double angle = (double)(m % d->t->batch.T) * (double)inv_freq[i];
                double *a = g->rope_interleaved ? x + 2 * i : x + i,
                       *b = g->rope_interleaved ? a + 1 : a + half;
                const double u = *a, v = *b;
                *a = u * cos(angle) - v * sin(angle);
                *b = v * cos(angle) + u * sin(angle);
            }
}

/* What dropout leaves of a low-rank input: see sti_dropout; the step's key is 0. */
static const double *drop(const double_model *d, int l, sti_target target,
                          const double *x, int width)
{
    const double p = d->t->p.lora_dropout;
    if (p <= 0) return x;
    const uint64_t key = sti_mix64(sti_mix64((uint64_t)(l * STI_TARGETS + target)));
    const uint64_t limit = (uint64_t)((double)(float)p * 0x1p53);
    for (int i = 0; i < d->parts->M * width; i++)
        d->parts->dropped[i] =
            sti_mix64(key + (uint64_t)i) >> 11 < limit ? 0 : x[i] / (1 - p);
    return d->parts->dropped;
}

/* y += scale drop(x) A^T B^T */
static void add_low_rank(const double_model *d, int l, sti_target target,
                         const double *x, double *y)
{
    const sti_lora_spec *lora = &d->t->adapter->spec.lora;
    const matrix a = trained(d, l, STI_TRAINED_LORA_A, target),
                 b = trained(d, l, STI_TRAINED_LORA_B, target);
    if (!a.N) return;
    multiply(d->parts, &a, drop(d, l, target, x, a.K), 1, false, d->parts->low);
    multiply(d->parts, &b, d->parts->low, (double)lora->alpha / lora->rank, true, y);
}

/* ---- A layer ------------------------------------------------------------- */

/* q, k, v and gate from the layer's input; low-rank additions if it is the student. */
static void project(const double_model *d, int l, const double *x, bool student)
{
    parts *p = d->parts;
    const layer *L = &p->layer[l];
    norm(d, &L->part[STI_PART_ATTN_NORM], x, p->h);
    multiply(p, &L->part[STI_PART_Q], p->h, 1, false, p->q);
    multiply(p, &L->part[STI_PART_K], p->h, 1, false, p->k);
    multiply(p, &L->part[STI_PART_V], p->h, 1, false, p->v);
    if (student) {
        const matrix gate = trained(d, l, STI_TRAINED_GATE, STI_TARGETS);
        multiply(p, &gate, p->h, 1, false, p->gate);
        add_low_rank(d, l, STI_TARGET_Q, p->h, p->q);
        add_low_rank(d, l, STI_TARGET_K, p->h, p->k);
        add_low_rank(d, l, STI_TARGET_V, p->h, p->v);
        add_low_rank(d, l, STI_TARGET_GATE, p->h, p->gate);
    }
    const sti_config *g = &d->t->m->cfg;
    const int qd = g->heads * g->head_dim, kd = g->kv_heads * g->head_dim;
    if (L->part[STI_PART_Q_NORM].N) {
        norm_rows(d, &L->part[STI_PART_Q_NORM], p->q, qd, p->q);
        norm_rows(d, &L->part[STI_PART_K_NORM], p->k, kd, p->k);
    }
    for (int i = 0; i < p->M * qd; i++)
        p->q[i] *= g->form.attn_scale * sqrt(g->head_dim);
    rotate(d, l, p->q, g->heads);
    rotate(d, l, p->k, g->kv_heads);
}

/* The operator's arguments for q, k, v as they are, softmax if it is the teacher. */
static sti_hybrid_parallel_args64 arguments(const double_model *d, int l, bool student,
                                            sti_hybrid_settings *set)
{
    const sti_trainer *t = d->t;
    const sti_attn_layer attn = sti_model_attn_layer(t->m, l);
    parts *p = d->parts;
    sti_hybrid_parallel_args64 a = {.set = set,
                                    .shape = sti_attn_hybrid_shape(&attn),
                                    .B = t->batch.B,
                                    .T = t->batch.T,
                                    .in = {.q = p->q, .k = p->k, .v = p->v},
                                    .fold_chunk = p->nothing,
                                    .y = p->y};
    assert_true(sti_hybrid_preset("softmax", t->cfg.hybrid.chunk, set));
    if (!student || !sti_attn_converts(&t->cfg, l)) {
        const int window = t->m->cfg.window[l], T = t->batch.T;
        if (!window) return a;
        /* Token j is seen by queries before j + window: folded there, in chunks of one
         * token, it is gone. */
        assert_true(sti_hybrid_preset("softmax", 1, set));
        for (int i = 0; i < p->M * a.shape.G; i++)
            p->local[i] = i / a.shape.G % T + window;
        a.fold_chunk = p->local;
        return a;
    }
    *set = sti_attn_hybrid_settings(&t->cfg, &attn);
    a.in.map_q = trained(d, l, STI_TRAINED_MAP_Q, STI_TARGETS).w;
    a.in.map_k = trained(d, l, STI_TRAINED_MAP_K, STI_TARGETS).w;
    a.in.bias_q = trained(d, l, STI_TRAINED_BIAS_Q, STI_TARGETS).w;
    a.in.bias_k = trained(d, l, STI_TRAINED_BIAS_K, STI_TARGETS).w;
    a.in.alpha = trained(d, l, STI_TRAINED_ALPHA, STI_TARGETS).w;
    a.in.window_logit = trained(d, l, STI_TRAINED_WINDOW, STI_TARGETS).w;
    if (set->gate) a.in.gate_logit = p->gate;
    a.fold_chunk = p->layer[l].fold;
    if (p->decided)
        a.max_in = p->layer[l].top;
    else
        a.max_out = p->layer[l].top;
    return a;
}

/* y of the layer's attention. */
static void attend(const double_model *d, int l, const double *x, bool student)
{
    still_error e;
    sti_hybrid_settings set;
    project(d, l, x, student);
    const sti_hybrid_parallel_args64 a = arguments(d, l, student, &set);
    if (a.max_out) must(sti_ref_hybrid_route(&a, &e), &e);
    must(sti_ref_hybrid_parallel(&a, &e), &e);
}

/* x += residual_scale norm(out) */
static void add_half(const double_model *d, const matrix *g, double *out, double *x)
{
    const sti_config *c = &d->t->m->cfg;
    if (g->N) norm(d, g, out, out);
    for (int i = 0; i < d->parts->M * c->hidden; i++)
        x[i] += c->form.residual_scale * out[i];
}

static double activation(sti_activation act, double x)
{
    const double cube = x + 0.044715 * x * x * x;
    if (act == STI_GELU_TANH) return x / 2 * (1 + tanh(sqrt(2 / M_PI) * cube));
    return x / (1 + exp(-x));
}

/* x, the layer's input, becomes its output, given y. */
static void finish(const double_model *d, int l, double *x, bool student)
{
    parts *p = d->parts;
    const matrix *part = p->layer[l].part;
    multiply(p, &part[STI_PART_O], p->y, 1, false, p->out);
    if (student) add_low_rank(d, l, STI_TARGET_O, p->y, p->out);
    add_half(d, &part[STI_PART_ATTN_OUT_NORM], p->out, x);
    norm(d, &part[STI_PART_FFN_NORM], x, p->h);
    multiply(p, &part[STI_PART_GATE], p->h, 1, false, p->g);
    multiply(p, &part[STI_PART_UP], p->h, 1, false, p->u);
    for (int i = 0; i < p->M * part[STI_PART_UP].N; i++)
        p->g[i] = activation(d->t->m->cfg.form.act, p->g[i]) * p->u[i];
    multiply(p, &part[STI_PART_DOWN], p->g, 1, false, p->out);
    add_half(d, &part[STI_PART_FFN_OUT_NORM], p->out, x);
}

/* ---- Losses -------------------------------------------------------------- */

/* p->x, the residual stream behind the last layer -> log-probabilities. The logits of
 * a tiny model are small. */
static void predict(const double_model *d, double *out)
{
    parts *p = d->parts;
    const matrix *head = p->head.N ? &p->head : &p->embed;
    norm(d, &p->final_norm, p->x, p->h);
    multiply(p, head, p->h, 1 / d->t->m->cfg.form.logit_scale, false, out);
    for (int m = 0; m < p->M; m++, out += head->N) {
        double sum = 0;
        for (int i = 0; i < head->N; i++) sum += exp(out[i]);
        for (int i = 0; i < head->N; i++) out[i] -= log(sum);
    }
}

static double next_token_loss(const double_model *d)
{
    const sti_trainer *t = d->t;
    const parts *p = d->parts;
    const int V = t->m->cfg.vocab;
    double loss = 0;
    for (int m = 0; m < p->M; m++) {
        const double *own = p->logits + (size_t)m * V;
        if (m % t->batch.T == t->batch.T - 1 || !t->counts[m + 1]) continue;
        loss -= own[t->ids[m + 1]];
        for (int i = 0; p->teacher && i < V; i++) {
            const double want = p->teacher[(size_t)m * V + i];
            loss += t->p.kd * exp(want) * (want - own[i]);
        }
    }
    return p->share * loss;
}

/* Stage 1's term of a layer: y, or the weights behind it, against the teacher's. */
static double transfer_loss(const double_model *d, int l)
{
    const sti_trainer *t = d->t;
    const parts *p = d->parts;
    const int layers = sti_attn_converted(&t->cfg), heads = t->m->cfg.heads,
              width = heads * t->m->cfg.head_dim;
    double sum = 0;
    attend(d, l, p->layer[l].input, true);
    if (t->p.match_weights) {
        still_error e;
        sti_hybrid_settings set;
        const sti_hybrid_parallel_args64 a = arguments(d, l, true, &set);
        must(sti_ref_hybrid_match(&a, 0, &sum, &e), &e);
        return p->share * sum / layers / heads;
    }
    for (int i = 0; i < p->M * width; i++)
        sum += pow(p->y[i] - p->layer[l].teacher[i], 2);
    return 1000 * p->share * sum / layers / width;
}

double double_model_loss(double_model *d, int first)
{
    const sti_trainer *t = d->t;
    parts *p = d->parts;
    double loss = 0;
    if (t->stage == 1) {
        for (int l = first; l <= t->cfg.last; l++)
            if (sti_attn_converts(&t->cfg, l)) loss += transfer_loss(d, l);
        return loss;
    }
    const size_t bytes = (size_t)p->M * (size_t)t->m->cfg.hidden * sizeof(double);
    memcpy(p->x, p->layer[first].input, bytes);
    for (int l = first; l < t->m->cfg.layers; l++) {
        if (!p->decided) memcpy(p->layer[l].input, p->x, bytes);
        attend(d, l, p->x, true);
        finish(d, l, p->x, true);
    }
    predict(d, p->logits);
    return next_token_loss(d);
}

/* ---- Making -------------------------------------------------------------- */

static void allocate(double_model *d)
{
    const sti_config *g = &d->t->m->cfg;
    parts *p = d->parts;
    const size_t M = (size_t)p->M, H = (size_t)g->heads, D = (size_t)g->head_dim,
                 hidden = (size_t)g->hidden;
    double **const row[] = {&p->x,       &p->h,      &p->q,  &p->k, &p->v,
                            &p->gate,    &p->y,      &p->g,  &p->u, &p->low,
                            &p->dropped, &p->logits, &p->out};
    size_t widest = H * D > hidden ? H * D : hidden;
    if (widest < (size_t)g->ffn) widest = (size_t)g->ffn;
    if (widest < (size_t)g->vocab) widest = (size_t)g->vocab;
    for (size_t i = 0; i < sizeof row / sizeof *row; i++)
        *row[i] = reals(p, M * widest);
    if (d->t->p.kd > 0) p->teacher = reals(p, M * (size_t)g->vocab);
    p->nothing = take(p, M * H, sizeof *p->nothing);
    memset(p->nothing, -1, M * H * sizeof *p->nothing);
    p->local = take(p, M * H, sizeof *p->local);
    p->layer = take(p, (size_t)g->layers, sizeof *p->layer);
    for (int l = 0; l < g->layers; l++)
        p->layer[l] = (layer){.input = reals(p, M * hidden),
                              .teacher = reals(p, M * H * D),
                              .fold = take(p, M * H, sizeof(int32_t)),
                              .top = reals(p, M * H)};
}

static void read_weights(double_model *d)
{
    parts *p = d->parts;
    p->embed = read_part(d, STI_PART_EMBED, 0);
    p->final_norm = read_part(d, STI_PART_FINAL_NORM, 0);
    if (!d->t->m->cfg.tied) p->head = read_part(d, STI_PART_HEAD, 0);
    for (int l = 0; l < d->t->m->cfg.layers; l++)
        for (int i = STI_PART_ATTN_NORM; i < PARTS; i++)
            p->layer[l].part[i] = read_part(d, (sti_part)i, l);
    const sti_adapter *a = d->t->adapter;
    d->value = reals(p, a->n_values);
    for (size_t i = 0; i < a->n_values; i++) d->value[i] = (double)a->value[i];
}

/* The teacher's way through the layers: what it computes is kept where a loss asks. */
static void teach(const double_model *d)
{
    parts *p = d->parts;
    const sti_config *g = &d->t->m->cfg;
    const size_t M = (size_t)p->M, hidden = (size_t)g->hidden,
                 width = (size_t)(g->heads * g->head_dim);
    for (size_t m = 0; m < M; m++)
        for (size_t i = 0; i < hidden; i++)
            p->x[m * hidden + i] =
                g->form.embed_scale * p->embed.w[(size_t)d->t->ids[m] * hidden + i];
    for (int l = 0; l < g->layers; l++) {
        memcpy(p->layer[l].input, p->x, M * hidden * sizeof(double));
        attend(d, l, p->x, false);
        memcpy(p->layer[l].teacher, p->y, M * width * sizeof(double));
        finish(d, l, p->x, false);
    }
    if (p->teacher) predict(d, p->teacher);
}

double_model double_model_new(const sti_trainer *t, double share)
{
    double_model d = {.t = t, .parts = calloc(1, sizeof(parts))};
    assert_non_null(d.parts);
    d.parts->M = t->batch.B * t->batch.T;
    d.parts->share = share;
    allocate(&d);
    read_weights(&d);
    teach(&d);
    double_model_loss(&d, 0);
    d.parts->decided = true;
    return d;
}

void double_model_free(double_model *d)
{
    for (int i = 0; i < d->parts->n_blocks; i++) free(d->parts->block[i]);
    free(d->parts);
}
