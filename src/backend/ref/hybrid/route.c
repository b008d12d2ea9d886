/* route.c - which token is folded when: selection and eviction (STILL eq. 8), and the
 * routing of whole sequences made of them (Alg. 1).
 *
 * Routing reads q and k only. Its result is one number for each token and selection
 * head, the chunk at whose first token it is folded into the linear state (-1: never),
 * and that number is all the parallel form needs to know. Selection is a constant for
 * the gradient. */
#include <stdlib.h>
#include <string.h>

#include "backend/ref/hybrid/hybrid.h"

/* STILL eq. 5, through the table of scores. */
double sti_ref_score(const sti_hybrid_settings *set, double *logit, int n,
                     const double *key, int D, int64_t position, int h)
{
    const sti_score *score = sti_score_at(set->score);
    if (score->definition) return score->definition(logit, n, set->eps);
    if (!score->arrive) return 0;
    sti_ref_softmax(logit, n);
    return score->arrive(&(sti_score_stats){.self = logit[n - 1],
                                            .key_norm = sqrt(sti_ref_dot(key, key, D)),
                                            .eps = set->eps,
                                            .seed = set->seed,
                                            .position = position,
                                            .layer = set->layer,
                                            .head = h});
}

double sti_ref_likeness(const double *k, int n, size_t step, int D, int i)
{
    double mean[STI_HEAD_DIM_MAX] = {0};
    for (int j = 0; j < n; j++) {
        const double *key = k + (size_t)j * step, norm = sqrt(sti_ref_dot(key, key, D));
        if (norm > 0) sti_ref_axpy(1 / norm, key, mean, D);
    }
    const double *key = k + (size_t)i * step;
    const double norms = sqrt(sti_ref_dot(key, key, D) * sti_ref_dot(mean, mean, D));
    return norms > 0 ? sti_ref_dot(key, mean, D) / norms : 0;
}

/* One sequence, its arrays offset to its first token. */
typedef struct sequence {
    const sti_hybrid_settings *set;
    sti_ref_dims d;
    int T;
    const double *q, *k;          /* [T,H,D], [T,G,D] */
    double *weight;               /* [2C]: logits, then weights, of one query */
    double *score_head;           /* [T,H] */
    double *score;                /* [T,S]: final */
    int32_t *fold_chunk;          /* [T,S] */
    sti_ref_candidate *candidate; /* [T], of one selection head */
} sequence;

/* weight[j - first] = logit(t, j) for first <= j <= t; returns their number. */
static int logits_of(const sequence *s, int t, int first, int h)
{
    const sti_ref_dims *d = &s->d;
    const double *q = s->q + ((size_t)t * d->H + h) * d->D;
    for (int j = first; j <= t; j++) {
        const double *k = s->k + ((size_t)j * d->G + h / d->per_kv) * d->D;
        s->weight[j - first] = sti_ref_logit(q, k, d->D);
    }
    return t - first + 1;
}

/* Sum over the queries t > j of j's own and next chunk of the weight they give j in
 * the softmax over their window; divided at the end by how many there are. */
static void received_weights(const sequence *s, int h, double *received)
{
    const int C = s->set->chunk;
    for (int t = 0; t < s->T; t++) {
        const int first = (int)sti_ref_window_start(s->set, t);
        const int n = logits_of(s, t, first, h);
        sti_ref_softmax(s->weight, n);
        for (int j = first; j < t; j++) received[j] += s->weight[j - first];
    }
    for (int j = 0; j < s->T; j++) {
        int end = (j / C + 2) * C; /* first query that no longer counts */
        int queries = (end < s->T ? end : s->T) - 1 - j;
        if (queries > 0) received[j] /= queries;
    }
}

/* The score that token t retires with; g: its kv head. */
static double final_score(const sequence *s, int g, int t, double arrived,
                          double received)
{
    const sti_ref_dims *d = &s->d;
    const sti_score *score = sti_score_at(s->set->score);
    sti_score_end e = {.arrived = arrived, .received = received, .position = t};
    if (score->likeness) {
        const int C = s->set->chunk, first = t / C * C;
        const int n = s->T - first < C ? s->T - first : C;
        const size_t row = (size_t)d->G * (size_t)d->D;
        e.likeness = sti_ref_likeness(s->k + (size_t)first * row + (size_t)g * d->D, n,
                                      row, d->D, t - first);
    }
    return score->retire(&e);
}

/* STILL Alg. 1, the score of every token: eq. 2 to 5 for s3. */
static void score_tokens(const sequence *s, double *received)
{
    const sti_ref_dims *d = &s->d;
    const sti_score *score = sti_score_at(s->set->score);
    memset(s->score, 0, (size_t)s->T * d->S * sizeof *s->score);
    for (int h = 0; h < d->H; h++) {
        for (int t = 0; t < s->T; t++) {
            const int n = logits_of(s, t, (int)sti_ref_score_start(s->set, t), h);
            const double *key = s->k + ((size_t)t * d->G + h / d->per_kv) * d->D;
            const double one = sti_ref_score(s->set, s->weight, n, key, d->D, t, h);
            s->score_head[(size_t)t * d->H + h] = one;
            s->score[(size_t)t * d->S + h / d->per_sel] += one / d->per_sel;
        }
    }
    if (!score->retire) return;
    /* received [T]: mean over the query heads of one selection head. */
    for (int sel = 0; sel < d->S; sel++) {
        double *total = received + s->T;
        memset(total, 0, (size_t)s->T * sizeof *total);
        for (int h = sel * d->per_sel; h < (sel + 1) * d->per_sel; h++) {
            memset(received, 0, (size_t)s->T * sizeof *received);
            if (score->received) received_weights(s, h, received);
            sti_ref_axpy(1.0 / d->per_sel, received, total, s->T);
            for (int t = 0; t < s->T; t++) {
                double *one = &s->score_head[(size_t)t * d->H + h];
                *one = final_score(s, h / d->per_kv, t, *one, received[t]);
            }
        }
        for (int t = 0; t < s->T; t++) {
            double *one = &s->score[(size_t)t * d->S + sel];
            *one = final_score(s, sel * d->per_sel / d->per_kv, t, *one, total[t]);
        }
    }
}

/* ---- Selection and eviction ---------------------------------------------- */

/* STILL eq. 8. */
void sti_ref_select_top(sti_ref_candidate *chunk, int n, int select)
{
    for (int i = 0; i < n; i++) {
        int better = 0;
        for (int j = 0; j < n; j++)
            better += sti_ref_better(chunk[j].score, chunk[j].position, chunk[i].score,
                                     chunk[i].position);
        chunk[i].stays = better < select;
    }
}

void sti_ref_evict_over_cap(sti_ref_candidate *c, int n, int cap)
{
    int kept = 0;
    for (int i = 0; i < n; i++) kept += c[i].stays;
    for (; cap != STI_CAP_NONE && kept > cap; kept--) {
        sti_ref_candidate *worst = NULL;
        for (int i = 0; i < n; i++)
            if (c[i].stays && (!worst || sti_ref_better(worst->score, worst->position,
                                                        c[i].score, c[i].position)))
                worst = &c[i];
        if (worst) worst->stays = false; /* more than `cap` stay, so there is one */
    }
}

/* STILL Alg. 1, the selection of one head: chunk a leaves at the first token of chunk
 * a + 2, and what does not stay then is folded then. */
static void route_head(const sequence *s, int sel)
{
    const int C = s->set->chunk, S = s->d.S;
    int32_t *fold = s->fold_chunk + sel; /* stride S */
    sti_ref_candidate *c = s->candidate;
    for (int j = 0; j < s->T; j++) {
        fold[(size_t)j * S] = -1;
        c[j] = (sti_ref_candidate){s->score[(size_t)j * S + sel], j, false};
    }
    for (int now = 2; now * C < s->T; now++) {
        const int first = (now - 2) * C, end = first + C;
        sti_ref_select_top(c + first, C, s->set->select);
        sti_ref_evict_over_cap(c, end, sti_hybrid_cap(s->set, sel));
        for (int j = 0; j < end; j++)
            if (!c[j].stays && fold[(size_t)j * S] < 0) fold[(size_t)j * S] = now;
    }
}

still_status sti_ref_hybrid_route(const sti_hybrid_parallel_args64 *a, still_error *err)
{
    STI_TRY(sti_hybrid_check(a->set, &a->shape, err));
    const sti_ref_dims d = sti_ref_dims_of(a->set, &a->shape);
    const size_t T = (size_t)a->T, H = (size_t)d.H, S = (size_t)d.S;
    if (!a->set->has_window) { /* every token is linear at once: nothing to decide */
        for (size_t i = 0; i < (size_t)a->B * T * S; i++) a->fold_chunk[i] = -1;
        return STILL_OK;
    }
    const size_t n = 2 * (size_t)a->set->chunk + T * (H + S + 2);
    double *work = sti_alloc(n, sizeof *work);
    sti_ref_candidate *candidate = sti_alloc(T, sizeof *candidate);
    if (!work || !candidate) {
        free(work);
        free(candidate);
        return sti_fail_memory(err, "hybrid attention, routing",
                               n * sizeof *work + T * sizeof *candidate);
    }
    for (size_t b = 0; b < (size_t)a->B; b++) {
        double *score_head = work + 2 * (size_t)a->set->chunk;
        double *score = score_head + T * H, *received = score + T * S;
        sequence s = {
            .set = a->set,
            .d = d,
            .T = a->T,
            .q = a->in.q + b * T * H * (size_t)d.D,
            .k = a->in.k + b * T * (size_t)d.G * (size_t)d.D,
            .weight = work,
            .score_head = score_head,
            .score = score,
            .fold_chunk = a->fold_chunk + b * T * S,
            .candidate = candidate,
        };
        score_tokens(&s, received);
        for (int sel = 0; sel < d.S; sel++) route_head(&s, sel);
        if (a->trace.score_head)
            memcpy(a->trace.score_head + b * T * H, score_head, T * H * sizeof *work);
        if (a->trace.score)
            memcpy(a->trace.score + b * T * S, score, T * S * sizeof *work);
    }
    free(work);
    free(candidate);
    return STILL_OK;
}
