/* ref.c - the reference backend: every operator as plainly as it can be said.
 *
 * This is the specification. Weights are dequantized to float as they are used, sums
 * run in double, keys and values are kept as the cache type says. Where a fast backend
 * disagrees beyond its rounding, the fast backend is wrong. Threads split rows of the
 * output only, so they change no number. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/host.h"
#include "backend/ref/float_ref.h"
#include "backend/ref/ref.h"
#include "base/mem.h"
#include "base/named.h"

extern const sti_backend sti_backend_ref;

static void dev_free(sti_dev *d)
{
    if (!d) return;
    sti_pool_free(d->pool);
    free(d->row);
    free(d->weights);
    free(d);
}

static still_status dev_new(const sti_dev_params *p, sti_dev **out, still_error *err)
{
    *out = NULL;
    if (p->isa && strcmp(p->isa, "portable") != 0)
        return sti_fail(err, STILL_E_ARG, "backend ref has no instruction set '%s'",
                        p->isa);
    sti_dev *d = sti_alloc(1, sizeof *d);
    if (!d) return sti_fail_memory(err, "ref device", sizeof *d);
    d->p = *p;
    still_status st = sti_pool_new(p->threads, &d->pool, err);
    if (st == STILL_OK) {
        size_t n = (size_t)sti_pool_threads(d->pool) * (size_t)p->max_k;
        d->row = sti_alloc(n, sizeof *d->row);
        if (!d->row) st = sti_fail_memory(err, "ref device", n * sizeof *d->row);
    }
    if (st != STILL_OK) {
        dev_free(d);
        return st;
    }
    *out = d;
    return STILL_OK;
}

static const char *dev_isa(const sti_dev *d)
{
    (void)d;
    return "portable";
}

static int dev_threads(const sti_dev *d)
{
    return sti_pool_threads(d->pool);
}

static still_status dev_reserve(sti_dev *d, int rows, still_error *err)
{
    (void)d;
    (void)rows;
    (void)err;
    return STILL_OK;
}

static size_t dev_bytes(const sti_dev *d, int rows)
{
    (void)rows;
    return (size_t)dev_threads(d) * ((size_t)d->p.max_k * sizeof(float));
}

static size_t weight_bytes(const sti_dev *d, const sti_tensor *t)
{
    (void)d;
    (void)t;
    return 0;
}

static still_status weight_new(sti_dev *d, const sti_tensor *t, sti_weight *w,
                               still_error *err)
{
    if (t->n_dims != 2 || t->dim[1] > d->p.max_k)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: tensor '%s' is not a matrix of at most %d columns",
                        t->path, t->name, d->p.max_k);
    *w = (sti_weight){
        .src = t, .N = t->dim[0], .K = t->dim[1], .type = t->type, .data = t->data};
    return STILL_OK;
}

static void weight_free(sti_dev *d, sti_weight *w)
{
    (void)d;
    *w = (sti_weight){0};
}

/* ---- y = x W^T ----------------------------------------------------------- */

/* Four partial sums, so that the processor need not wait for each addition. */
static double dot(const float *a, const float *b, int64_t n)
{
    double s[4] = {0};
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        for (int j = 0; j < 4; j++) s[j] += (double)a[i + j] * b[i + j];
    for (; i < n; i++) s[0] += (double)a[i] * b[i];
    return (s[0] + s[1]) + (s[2] + s[3]);
}

typedef struct task {
    sti_dev *d;
    const void *args;
} task;

static void matmul_work(void *v, int w, int workers)
{
    const task *t = v;
    const sti_matmul_args *a = t->args;
    float *row = t->d->row + (size_t)w * (size_t)t->d->p.max_k;
    for (int i = 0; i < a->n; i++) {
        const sti_weight *W = a->w[i];
        size_t row_bytes = W->src->bytes / (size_t)W->N;
        int64_t lo, hi;
        sti_split(W->N, 1, w, workers, &lo, &hi);
        for (int64_t n = lo; n < hi; n++) {
            sti_dequant(W->type, (const char *)W->data + (size_t)n * row_bytes, row,
                        W->K);
            for (int m = 0; m < a->M; m++) {
                double y = dot(a->x + (int64_t)m * W->K, row, W->K);
                float *out = a->y[i] + (int64_t)m * W->N + n;
                if (a->bias[i]) y += a->bias[i][n];
                *out = (float)(a->accumulate ? *out + y : y);
            }
        }
    }
}

static still_status rmsnorm(sti_dev *d, const sti_rmsnorm_args *a, still_error *err)
{
    (void)d;
    (void)err;
    for (int m = 0; m < a->M; m++) {
        const float *x = a->x + (int64_t)m * a->K;
        float *y = a->y + (int64_t)m * a->K;
        double ss = 0;
        for (int i = 0; i < a->K; i++) ss += (double)x[i] * x[i];
        double r = 1 / sqrt(ss / a->K + a->eps);
        for (int i = 0; i < a->K; i++) {
            const double v = x[i] * r * a->g[i];
            y[i] = (float)(a->add ? y[i] + v : v);
        }
    }
    return STILL_OK;
}

static still_status matmul(sti_dev *d, const sti_matmul_args *a, still_error *err)
{
    sti_matmul_args normed = *a;
    if (a->norm) {
        sti_rmsnorm_args norm = {.x = a->x,
                                 .g = a->norm,
                                 .y = a->normed,
                                 .M = a->M,
                                 .K = (int)a->w[0]->K,
                                 .eps = a->eps};
        STI_TRY(rmsnorm(d, &norm, err));
        normed.x = a->normed;
    }
    sti_pool_run(d->pool, matmul_work, &(task){d, &normed});
    return STILL_OK;
}

static still_status embed(sti_dev *d, const sti_embed_args *a, still_error *err)
{
    (void)d;
    (void)err;
    size_t row_bytes = a->w->src->bytes / (size_t)a->w->N;
    for (int m = 0; m < a->M; m++)
        sti_dequant(a->w->type,
                    (const char *)a->w->src->data + (size_t)a->tok[m] * row_bytes,
                    a->y + (int64_t)m * a->w->K, a->w->K);
    return STILL_OK;
}

/* ---- Small operators ----------------------------------------------------- */

static void rope_heads(const sti_rope_args *a, float *x, int heads)
{
    int half = a->D / 2;
    for (int m = 0; m < a->M; m++)
        for (int i = 0; i < half; i++) {
            double angle = (double)a->pos[m] * a->inv_freq[i];
            double c = cos(angle), s = a->back ? -sin(angle) : sin(angle);
            for (int h = 0; h < heads; h++) {
                float *head = x + ((int64_t)m * heads + h) * a->D;
                float *p = a->interleaved ? head + 2 * i : head + i;
                float *q = a->interleaved ? p + 1 : p + half;
                double u = *p, v = *q;
                *p = (float)(u * c - v * s);
                *q = (float)(v * c + u * s);
            }
        }
}

static still_status rope(sti_dev *d, const sti_rope_args *a, still_error *err)
{
    (void)d;
    (void)err;
    rope_heads(a, a->x, a->heads);
    if (a->also) rope_heads(a, a->also, a->also_heads);
    return STILL_OK;
}

static still_status swiglu(sti_dev *d, const sti_swiglu_args *a, still_error *err)
{
    (void)d;
    (void)err;
    for (int64_t i = 0; i < (int64_t)a->M * a->K; i++) {
        const double g = a->gate[i];
        a->y[i] = (float)(g / (1 + exp(-sti_ref_slope(a->act, g))) * a->up[i]);
    }
    return STILL_OK;
}

static still_status ffn_forward(sti_dev *d, const sti_ffn_args *a, still_error *err)
{
    return sti_host_ffn_forward(&sti_backend_ref, d, a, err);
}

static still_status matmul_lora(sti_dev *d, const sti_matmul_lora_args *a,
                                still_error *err)
{
    return sti_host_matmul_lora(&sti_backend_ref, d, a, err);
}

static still_status ffn_train(sti_dev *d, const sti_ffn_train_args *a, still_error *err)
{
    return sti_host_ffn_train(&sti_backend_ref, d, a, err);
}

static still_status ffn_back(sti_dev *d, const sti_ffn_train_args *a, still_error *err)
{
    return sti_host_ffn_back(&sti_backend_ref, d, a, err);
}

/* ---- Softmax attention --------------------------------------------------- */

static float cache_get(sti_dtype t, const void *base, size_t i)
{
    return t == STI_F32 ? ((const float *)base)[i]
                        : sti_f16_to_f32(((const uint16_t *)base)[i]);
}

static void cache_put(sti_dtype t, void *base, size_t i, float v)
{
    if (t == STI_F32)
        ((float *)base)[i] = v;
    else
        ((uint16_t *)base)[i] = sti_f32_to_f16(v);
}

/* One query row of one head: logits over the visible keys, softmax, weighted sum. */
static void attend(const sti_attn_args *a, const sti_attn_segment *s, int i, int h,
                   double *w)
{
    int D = a->D, g = h / (a->H / a->G), t = s->past + i;
    int first = a->window > 0 && t - a->window + 1 > 0 ? t - a->window + 1 : 0;
    const float *q = a->q + ((int64_t)(s->row0 + i) * a->H + h) * D;
    float *o = a->o + ((int64_t)(s->row0 + i) * a->H + h) * D;
    double max = -INFINITY, sum = 0;
    for (int j = first; j <= t; j++) {
        size_t row =
            ((size_t)g * (size_t)s->capacity + (size_t)(j % s->capacity)) * (size_t)D;
        double l = 0;
        for (int e = 0; e < D; e++)
            l += (double)q[e] * cache_get(a->cache, s->K, row + (size_t)e);
        w[j - first] = l / sqrt(D);
        if (w[j - first] > max) max = w[j - first];
    }
    for (int j = first; j <= t; j++) sum += w[j - first] = exp(w[j - first] - max);
    for (int e = 0; e < D; e++) {
        double y = 0;
        for (int j = first; j <= t; j++) {
            size_t row = ((size_t)g * (size_t)s->capacity + (size_t)(j % s->capacity)) *
                         (size_t)D;
            y += w[j - first] * cache_get(a->cache, s->V, row + (size_t)e);
        }
        o[e] = (float)(y / sum);
    }
}

/* Stores k and v of token i of a segment in its cache. */
static void remember(const sti_attn_args *a, const sti_attn_segment *s, int i)
{
    for (int g = 0; g < a->G; g++)
        for (int e = 0; e < a->D; e++) {
            size_t to = ((size_t)g * (size_t)s->capacity +
                         (size_t)((s->past + i) % s->capacity)) *
                            (size_t)a->D +
                        (size_t)e;
            int64_t from = ((int64_t)(s->row0 + i) * a->G + g) * a->D + e;
            cache_put(a->cache, s->K, to, a->k[from]);
            cache_put(a->cache, s->V, to, a->v[from]);
        }
}

static void attn_work(void *v, int w, int workers)
{
    const task *t = v;
    const sti_attn_args *a = t->args;
    double *weights = t->d->weights + (size_t)w * t->d->capacity;
    for (int s = 0; s < a->n_seg; s++)
        for (int i = 0; i < a->seg[s].n; i++)
            for (int h = 0; h < a->H; h++)
                if ((i * a->H + h) % workers == w) attend(a, &a->seg[s], i, h, weights);
}

static still_status softmax_attn(sti_dev *d, const sti_attn_args *a, still_error *err)
{
    size_t longest = 0;
    for (int s = 0; s < a->n_seg; s++) {
        size_t n = (size_t)a->seg[s].past + (size_t)a->seg[s].n;
        if (n > longest) longest = n;
    }
    if (longest > d->capacity) {
        size_t n = (size_t)dev_threads(d) * longest;
        double *w = sti_grow(d->weights, n, sizeof *w);
        if (!w) return sti_fail_memory(err, "ref attention", n * sizeof *w);
        d->weights = w;
        d->capacity = longest;
    }
    for (int s = 0; s < a->n_seg; s++)
        for (int i = 0; i < a->seg[s].n; i++) remember(a, &a->seg[s], i);
    sti_pool_run(d->pool, attn_work, &(task){d, a});
    return STILL_OK;
}

static void logprob_work(void *v, int w, int workers)
{
    const sti_logprob_args *a = ((const task *)v)->args;
    for (int m = w; m < a->M; m += workers) {
        const float *l = a->logits + (int64_t)m * a->V;
        int top = 0;
        for (int i = 1; i < a->V; i++)
            if (l[i] > l[top]) top = i;
        double others = 0; /* the top itself adds 1 */
        for (int i = 0; i < a->V; i++)
            if (i != top) others += exp((double)l[i] - l[top]);
        a->top[m] = top;
        a->logprob[m] = (float)((double)l[a->target[m]] - l[top] - log1p(others));
    }
}

static still_status logprob(sti_dev *d, const sti_logprob_args *a, still_error *err)
{
    (void)err;
    sti_pool_run(d->pool, logprob_work, &(task){d, a});
    return STILL_OK;
}

const sti_backend sti_backend_ref = {
    .name = "ref",
    .cache = STI_F32,
    STI_HOST_MEMORY,
    .mem_peak = sti_host_mem_peak,
    STI_NAMED_4(, dev_new, dev_free, dev_isa, dev_threads),
    STI_NAMED_2(, dev_reserve, dev_bytes),
    STI_NAMED_3(, weight_new, weight_free, weight_bytes),
    STI_NAMED_4(, matmul, embed, rmsnorm, rope),
    STI_NAMED_2(, swiglu, ffn_forward),
    .scale_columns = sti_host_scale_columns,
    STI_NAMED_3(, matmul_lora, ffn_train, ffn_back),
    STI_NAMED_2(, softmax_attn, logprob),
    STI_NAMED_2(sti_ref_, matmul_back, matmul_grad),
    STI_NAMED_2(sti_ref_, rmsnorm_back, swiglu_back),
    STI_NAMED_3(sti_ref_, loss, adam, sum_squares),
    STI_HOST_TRAINING,
    .state_kv = sizeof(double),
    .state_real = sizeof(double),
    STI_NAMED_2(sti_ref_, hybrid_reserve, hybrid),
    .hybrid_route = sti_ref_hybrid_route_float,
    .hybrid_parallel = sti_ref_hybrid_parallel_float,
    .hybrid_backward = sti_ref_hybrid_backward_float,
    .hybrid_match = sti_ref_hybrid_match_float,
    STI_NAMED_3(sti_ref_, linear_reserve, linear, linear_backward),
};
