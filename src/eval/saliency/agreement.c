/* agreement.c - how far two scores select the same tokens; see saliency.h.
 *
 * A method selects among the tokens of one chunk, so scores are compared within
 * chunks: over a whole text, any drift with the position would look like agreement
 * or the lack of it. */
#include <math.h>
#include <stdlib.h>

#include "eval/saliency/saliency.h"

typedef struct scored {
    float score;
    int token;
} scored;

/* The order in which tokens are chosen. */
static int by_score(const void *a, const void *b)
{
    const scored *x = a, *y = b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    return x->token < y->token ? -1 : 1;
}

static void in_order(const float *score, int n, scored *out)
{
    for (int i = 0; i < n; i++) out[i] = (scored){score[i], i};
    qsort(out, (size_t)n, sizeof *out, by_score);
}

/* rank[token]: its place; equal scores share the mean of theirs. */
static void ranks(const scored *order, int n, double *rank)
{
    for (int i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && order[end].score == order[i].score;) end++;
        for (int k = i; k < end; k++) rank[order[k].token] = 0.5 * (i + end - 1);
    }
}

/* Pearson's coefficient of ranks, whose mean is (n - 1) / 2; NaN if one side has only
 * equals. */
static double correlation(const double *x, const double *y, int n)
{
    double xy = 0, xx = 0, yy = 0;
    for (int i = 0; i < n; i++) {
        const double dx = x[i] - 0.5 * (n - 1), dy = y[i] - 0.5 * (n - 1);
        xy += dx * dy;
        xx += dx * dx;
        yy += dy * dy;
    }
    return xx > 0 && yy > 0 ? xy / sqrt(xx * yy) : NAN;
}

/* The memory of a comparison, for chunks of C tokens. */
typedef struct scratch {
    scored *x, *y;           /* [C]: tokens in order of either score */
    double *rank_x, *rank_y; /* [C] */
    bool *chosen;            /* [C] */
} scratch;

static void carve_scratch(size_t C, sti_carve *c, scratch *r)
{
    r->x = sti_carve_take(c, C, sizeof *r->x);
    r->y = sti_carve_take(c, C, sizeof *r->y);
    r->rank_x = sti_carve_take(c, C, sizeof *r->rank_x);
    r->rank_y = sti_carve_take(c, C, sizeof *r->rank_y);
    r->chosen = sti_carve_take(c, C, sizeof *r->chosen);
}

/* How many of the `select` first tokens of both orders are the same; marks those of x.
 */
static int common(const scratch *r, int chunk, int select)
{
    int n = 0;
    for (int i = 0; i < chunk; i++) r->chosen[r->x[i].token] = i < select;
    for (int i = 0; i < select; i++) n += r->chosen[r->y[i].token];
    return n;
}

/* The share of all scores of y that the `select` first tokens of x have. */
static double captured(const scratch *r, int chunk, int select)
{
    double all = 0, part = 0;
    for (int i = 0; i < chunk; i++) {
        const double score = (double)r->y[i].score;
        all += score;
        if (r->chosen[r->y[i].token]) part += score;
    }
    return all > 0 ? part / all : (double)select / chunk;
}

still_status sti_saliency_agreement(const float *a, const float *b, int chunk,
                                    int chunks, int select, still_agreement *out,
                                    still_error *err)
{
    const size_t C = (size_t)chunk;
    sti_carve c = {0};
    sti_block block;
    scratch r;
    carve_scratch(C, &c, &r);
    if (!sti_block_new(&block, c.used)) return sti_fail_memory(err, "ranks", c.used);
    c = (sti_carve){.base = block.p};
    carve_scratch(C, &c, &r);
    double shared = 0, taken = 0, sum = 0;
    int defined = 0;
    for (int i = 0; i < chunks; i++) {
        in_order(a + (size_t)i * C, chunk, r.x);
        in_order(b + (size_t)i * C, chunk, r.y);
        shared += common(&r, chunk, select);
        taken += captured(&r, chunk, select);
        ranks(r.x, chunk, r.rank_x);
        ranks(r.y, chunk, r.rank_y);
        const double rho = correlation(r.rank_x, r.rank_y, chunk);
        if (isnan(rho)) continue;
        sum += rho;
        defined++;
    }
    *out = (still_agreement){
        .overlap = shared / ((double)chunks * select),
        .correlation = defined ? sum / defined : NAN,
        .captured = taken / chunks,
    };
    sti_block_free(&block);
    return STILL_OK;
}
