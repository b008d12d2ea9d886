/* full_attention.c - scores of tokens by the model's full attention; see saliency.h.
 *
 * For every query the softmax over everything it sees is computed, row by row: its
 * weight on itself gives one score, its weights on tokens that have left the window
 * add to the other. Keys of a head are transposed to [D, T] first, so that a row of
 * logits is a sum of long vectors, which compilers vectorize well. */
#include <math.h>
#include <stdlib.h>

#include "eval/saliency/saliency.h"

typedef struct job {
    const sti_full_attention_args *a;
    float *whole;          /* [H,T] */
    double *received;      /* [H,T]: sums */
    unsigned char *memory; /* of all workers */
    size_t bytes;          /* of one */
} job;

typedef struct worker {
    float *keys; /* [D,T] */
    float *row;  /* [T]: logits, then weights, of one query */
} worker;

static void carve_worker(const sti_full_attention_args *a, sti_carve *c, worker *w)
{
    w->keys = sti_carve_take(c, (size_t)a->D * (size_t)a->T, sizeof(float));
    w->row = sti_carve_take(c, (size_t)a->T, sizeof(float));
}

static void turn_keys(const sti_full_attention_args *a, int kv, float *keys)
{
    for (int t = 0; t < a->T; t++) {
        const float *k = a->k + ((size_t)t * (size_t)a->G + (size_t)kv) * (size_t)a->D;
        for (int d = 0; d < a->D; d++)
            keys[(size_t)d * (size_t)a->T + (size_t)t] = k[d];
    }
}

/* row[j] += x k_j over one dimension, or over four at a time. */
static void add_one(float *restrict row, const float *restrict k, float x, int n)
{
    for (int j = 0; j < n; j++) row[j] += x * k[j];
}
static void add_four(float *restrict row, const float *restrict k, size_t T,
                     const float *x, int n)
{
    const float *k1 = k + T, *k2 = k1 + T, *k3 = k2 + T;
    for (int j = 0; j < n; j++)
        row[j] += (x[0] * k[j] + x[1] * k1[j]) + (x[2] * k2[j] + x[3] * k3[j]);
}

/* row[0..n) becomes exp(q.k_j / sqrt(D) - largest) of keys [first, first + n); returns
 * its sum. */
static double weigh(const sti_full_attention_args *a, const worker *w, const float *q,
                    int first, int n)
{
    const size_t T = (size_t)a->T;
    const float *keys = w->keys + first;
    const float scale = 1 / sqrtf((float)a->D);
    float top = -INFINITY;
    double sum = 0;
    int d = 0;
    for (int j = 0; j < n; j++) w->row[j] = 0;
    for (; d + 4 <= a->D; d += 4) add_four(w->row, keys + (size_t)d * T, T, q + d, n);
    for (; d < a->D; d++) add_one(w->row, keys + (size_t)d * T, q[d], n);
    for (int j = 0; j < n; j++) top = w->row[j] > top ? w->row[j] : top;
    for (int j = 0; j < n; j++) {
        w->row[j] = expf(scale * (w->row[j] - top));
        sum += (double)w->row[j];
    }
    return sum;
}

static void attend(const job *j, const worker *w, int h)
{
    const sti_full_attention_args *a = j->a;
    const sti_score *s3 = sti_score_at(STI_SCORE_S3);
    float *whole = j->whole + (size_t)h * (size_t)a->T;
    double *received = j->received + (size_t)h * (size_t)a->T;
    turn_keys(a, h / (a->H / a->G), w->keys);
    for (int t = 0; t < a->T; t++) {
        const float *q = a->q + ((size_t)t * (size_t)a->H + (size_t)h) * (size_t)a->D;
        const int first = a->window > 0 && t >= a->window ? t - a->window + 1 : 0;
        const int n = t + 1 - first;
        const double sum = weigh(a, w, q, first, n);
        whole[t] = (float)s3->arrive(&(sti_score_stats){
            .self = (double)w->row[n - 1] / sum, .eps = a->eps, .position = t});
        /* Tokens of chunks that left the window before t. */
        const int left = (t / a->chunk - 1) * a->chunk - first;
        for (int i = 0; i < left; i++) received[first + i] += (double)w->row[i] / sum;
    }
}

static void work(void *v, int me, int workers)
{
    const job *j = v;
    worker w;
    sti_carve c = {.base = j->memory + (size_t)me * j->bytes};
    carve_worker(j->a, &c, &w);
    for (int h = me; h < j->a->H; h += workers) attend(j, &w, h);
}

/* Means over the query heads of each selection head. */
static void gather(const job *j)
{
    const sti_full_attention_args *a = j->a;
    const int group = a->H / a->S;
    const size_t T = (size_t)a->T;
    for (int s = 0; s < a->S; s++)
        for (int t = 0; t < a->T; t++) {
            const int64_t queries =
                a->T - ((int64_t)t / a->chunk + 2) * (int64_t)a->chunk;
            double whole = 0, received = 0;
            for (int h = s * group; h < (s + 1) * group; h++) {
                whole += (double)j->whole[(size_t)h * T + (size_t)t];
                received += j->received[(size_t)h * T + (size_t)t];
            }
            const size_t at = (size_t)s * T + (size_t)t;
            a->whole[at] = (float)(whole / group);
            a->received[at] =
                queries > 0 ? (float)(received / (group * (double)queries)) : NAN;
        }
}

still_status sti_saliency_full_attention(const sti_full_attention_args *a,
                                         sti_pool *pool, still_error *err)
{
    job j = {.a = a};
    worker w;
    sti_carve one = {0};
    sti_block block = {0};
    carve_worker(a, &one, &w);
    j.bytes = (one.used + STI_CARVE_ALIGN - 1) / STI_CARVE_ALIGN * STI_CARVE_ALIGN;
    const size_t workers = (size_t)sti_pool_threads(pool),
                 rows = (size_t)a->H * (size_t)a->T;
    for (int pass = 0; pass < 2; pass++) {
        sti_carve c = {.base = block.p};
        j.memory = sti_carve_take(&c, workers, j.bytes);
        j.whole = sti_carve_take(&c, rows, sizeof *j.whole);
        j.received = sti_carve_take(&c, rows, sizeof *j.received);
        if (pass == 0 && !sti_block_new(&block, c.used))
            return sti_fail_memory(err, "attention over the whole text", c.used);
    }
    sti_pool_run(pool, work, &j);
    gather(&j);
    sti_block_free(&block);
    return STILL_OK;
}
