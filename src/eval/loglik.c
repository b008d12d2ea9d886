/* loglik.c - ranking continuations.
 *
 * The options of a question share a prefix. It is computed once, in a session of the
 * question; options continue from copies of it, the last one in the session itself.
 * Questions that share a prefix (worked examples) share a stem, which is kept from
 * one round to the next. A round takes as many questions of one stem as there are
 * sessions for, and runs everything independent in one batch: first the prefixes of
 * all questions, then all options. */
#include <stdlib.h>
#include <string.h>

#include "eval/eval.h"
#include "session/feed_batch.h"

enum { LEAST_STEM = 48 }; /* shortest stem that is worth a copy per question */

typedef struct question {
    const sti_item *it;
    sti_answer *out;
    sti_ids opt[STI_MOST_OPTIONS];
    int shared;  /* tokens that all options begin with, all of them context */
    int pending; /* options not yet computed */
    still_session *s;
} question;

/* ---- Preparing ----------------------------------------------------------- */

static int common(const int32_t *a, int na, const int32_t *b, int nb)
{
    int n = 0;
    while (n < na && n < nb && a[n] == b[n]) n++;
    return n;
}

/* Tokens of option i fed after the shared ones; the last is only a target. */
static int own_tokens(const question *q, int i)
{
    int n = q->opt[i].n - 1 - q->shared;
    return n > 0 ? n : 0;
}

/* Items being prepared. */
typedef struct desk {
    sti_runner *r;
    const sti_item *item;
    sti_answer *out;
    question *q;
} desk;

static still_status prepare(void *arg, int at, still_error *err)
{
    const desk *d = arg;
    const sti_item *it = &d->item[at];
    sti_answer *out = &d->out[at];
    question *q = &d->q[at];
    *q = (question){.it = it, .out = out};
    *out = (sti_answer){.greedy = true};
    if (it->n_options < 1 || it->n_options > STI_MOST_OPTIONS)
        return sti_fail(err, STILL_E_LIMIT, "item %s has %d options, at most %d can be",
                        it->id, it->n_options, STI_MOST_OPTIONS);
    STI_TRY(sti_encode_options(d->r->tk, it->option, it->n_options, d->r->limit, q->opt,
                               err));
    q->shared = q->opt[0].n_context;
    for (int i = 0; i < it->n_options; i++) {
        const sti_ids *o = &q->opt[i];
        out->cut = out->cut || o->cut;
        q->shared = common(q->opt[0].id, q->shared, o->id, o->n_context);
    }
    /* If an option adds no token, one of the shared ones becomes its own. */
    for (int i = 0; i < it->n_options; i++)
        if (q->shared > q->opt[i].n - 1) q->shared = q->opt[i].n - 1;
    if (q->shared < 0 || d->r->recompute) q->shared = 0;
    return STILL_OK;
}

static void release(question *q)
{
    for (int i = 0; i < STI_MOST_OPTIONS; i++) free(q->opt[i].id);
}

/* Sessions it takes to compute all options of a question at once. */
static int sessions_for(const question *q)
{
    int n = 0;
    for (int i = 0; i < q->it->n_options; i++) n += own_tokens(q, i) > 0;
    return n > 1 ? n : 1;
}

/* Sessions for all questions, and what computing every option alone would take. */
static still_status reserve_sessions(sti_runner *r, const question *q, int n,
                                     still_error *err)
{
    int longest = 1, sessions = 1;
    for (int i = 0; i < n; i++) {
        sessions += sessions_for(&q[i]);
        for (int k = 0; k < q[i].it->n_options; k++) {
            const int fed = q[i].opt[k].n - 1;
            if (fed > longest) longest = fed;
            if (fed > 0) r->counted += (uint64_t)fed;
        }
    }
    return sti_runner_need(r, longest, sessions, err);
}

/* ---- The stem ------------------------------------------------------------ */

/* How many tokens of all questions session 0 holds; feeds the stem if worthwhile. */
static still_status find_stem(sti_runner *r, question *const *q, int n, int *stem,
                              still_error *err)
{
    *stem = 0;
    int same = q[0]->shared - 1, held = 0;
    for (int i = 1; i < n; i++)
        same = common(q[0]->opt[0].id, same, q[i]->opt[0].id, q[i]->shared - 1);
    if (r->recompute || same < LEAST_STEM) return STILL_OK;
    if (r->n_stem <= same) held = common(q[0]->opt[0].id, same, r->stem, r->n_stem);
    if (r->n_stem > 0 && held == r->n_stem && (same - held < LEAST_STEM || n == 1)) {
        *stem = held;
        return STILL_OK;
    }
    if (n == 1) return STILL_OK;
    int32_t *copy = sti_grow(r->stem, (size_t)same, sizeof *copy);
    if (!copy) return sti_fail_memory(err, "stem", (size_t)same * sizeof *copy);
    r->stem = copy;
    r->n_stem = 0;
    memcpy(r->stem, q[0]->opt[0].id, (size_t)same * sizeof *copy);
    still_session_reset(r->s[0]);
    const sti_piece piece = {.s = r->s[0], .tok = r->stem, .n = same, .from = same};
    STI_TRY(sti_session_feed_batch(&piece, 1, r->poll, r->user, err));
    r->fed += (uint64_t)same;
    *stem = r->n_stem = same;
    return STILL_OK;
}

/* ---- Beginnings, then options -------------------------------------------- */

static void add(question *q, int option, float logprob, int32_t top, int32_t target)
{
    q->out->sum[option] += (double)logprob;
    if (top != target) q->out->greedy = false;
}

static still_status feed_beginnings(sti_runner *r, question *const *q, int n,
                                    still_error *err)
{
    int stem, n_pieces = 0;
    if (n < 1) return STILL_OK;
    STI_TRY(find_stem(r, q, n, &stem, err));
    sti_piece piece[STI_MOST_SESSIONS];
    int of[STI_MOST_SESSIONS];
    int32_t next[STI_MOST_SESSIONS][STI_MOST_OPTIONS], top[STI_MOST_SESSIONS];
    float logprob[STI_MOST_SESSIONS][STI_MOST_OPTIONS];
    for (int i = 0; i < n; i++) {
        still_session_reset(q[i]->s);
        if (q[i]->shared == 0) continue;
        if (stem > 0) STI_TRY(sti_session_copy(q[i]->s, r->s[0], err));
        for (int k = 0; k < q[i]->it->n_options; k++)
            next[n_pieces][k] = q[i]->opt[k].id[q[i]->shared];
        of[n_pieces] = i;
        piece[n_pieces] = (sti_piece){.s = q[i]->s,
                                      .tok = q[i]->opt[0].id + stem,
                                      .n = q[i]->shared - stem,
                                      .from = q[i]->shared,
                                      .next = next[n_pieces],
                                      .n_next = q[i]->it->n_options,
                                      .next_logprob = logprob[n_pieces],
                                      .next_top = &top[n_pieces]};
        r->fed += (uint64_t)(q[i]->shared - stem);
        n_pieces++;
    }
    STI_TRY(sti_session_feed_batch(piece, n_pieces, r->poll, r->user, err));
    for (int p = 0; p < n_pieces; p++) {
        question *a = q[of[p]];
        for (int k = 0; k < a->it->n_options; k++)
            if (a->opt[k].n_context == a->shared)
                add(a, k, logprob[p][k], top[p], next[p][k]);
    }
    return STILL_OK;
}

typedef struct job {
    question *q;
    int option;
} job;

/* Options that have sessions, computed together. */
static still_status feed_options(sti_runner *r, const job *jobs,
                                 still_session *const *s, int n, still_error *err)
{
    sti_piece piece[STI_MOST_SESSIONS];
    float last[STI_MOST_SESSIONS];
    int32_t last_top[STI_MOST_SESSIONS];
    size_t rows = 0, at = 0;
    for (int i = 0; i < n; i++) rows += (size_t)own_tokens(jobs[i].q, jobs[i].option);
    float *logprob = sti_alloc(rows, sizeof *logprob);
    int32_t *top = sti_alloc(rows, sizeof *top);
    still_status st = logprob && top ? STILL_OK : sti_fail_memory(err, "scores", rows);
    for (int i = 0; i < n && st == STILL_OK; i++) {
        const question *q = jobs[i].q;
        const sti_ids *o = &q->opt[jobs[i].option];
        const int own = own_tokens(q, jobs[i].option),
                  first = o->n_context - q->shared; /* of the own that is a target */
        piece[i] = (sti_piece){.s = s[i],
                               .tok = o->id + q->shared,
                               .n = own,
                               .from = first > 0 ? first - 1 : 0,
                               .logprob = logprob + at,
                               .top = top + at,
                               .next = &o->id[o->n - 1],
                               .n_next = o->n_context < o->n ? 1 : 0,
                               .next_logprob = &last[i],
                               .next_top = &last_top[i]};
        at += (size_t)own;
    }
    r->fed += rows;
    if (st == STILL_OK) st = sti_session_feed_batch(piece, n, r->poll, r->user, err);
    for (int i = 0; i < n && st == STILL_OK; i++) {
        const sti_piece *p = &piece[i];
        for (int k = p->from; k < p->n - 1; k++)
            add(jobs[i].q, jobs[i].option, p->logprob[k], p->top[k], p->tok[k + 1]);
        if (p->n_next) add(jobs[i].q, jobs[i].option, last[i], last_top[i], p->next[0]);
    }
    free(logprob);
    free(top);
    return st;
}

/* All options of a round, in waves if there are fewer sessions than options. */
static still_status run_options(sti_runner *r, question *const *q, int n,
                                still_error *err)
{
    int at_q = 0, at_option = 0;
    for (int i = 0; i < n; i++) {
        q[i]->pending = 0;
        for (int k = 0; k < q[i]->it->n_options; k++)
            q[i]->pending += own_tokens(q[i], k) > 0;
    }
    while (at_q < n) {
        job jobs[STI_MOST_SESSIONS];
        still_session *s[STI_MOST_SESSIONS];
        int n_jobs = 0, free_session = 1 + n;
        for (; at_q < n; at_q += at_option == 0) {
            question *a = q[at_q];
            if (own_tokens(a, at_option) > 0) {
                still_session *mine = a->s;
                if (a->pending > 1) {
                    if (free_session == r->n_sessions) break;
                    mine = r->s[free_session++];
                    STI_TRY(sti_session_copy(mine, a->s, err));
                }
                a->pending--;
                s[n_jobs] = mine;
                jobs[n_jobs++] = (job){a, at_option};
            }
            at_option = (at_option + 1) % a->it->n_options;
        }
        if (n_jobs) STI_TRY(feed_options(r, jobs, s, n_jobs, err));
    }
    return STILL_OK;
}

/* ---- Rounds -------------------------------------------------------------- */

/* Tokens that two questions begin with and that a stem could hold. */
static int alike(const question *a, const question *b)
{
    return common(a->opt[0].id, a->shared - 1, b->opt[0].id, b->shared - 1);
}

/* How many questions make the next round: as many as there are sessions for, and either
 * all share a stem, which no question may shorten to less than half, or none does. */
static int next_round(sti_runner *r, question *q, int n, question **round)
{
    int taken = 0, used = 1, same = n > 1 ? alike(&q[0], &q[1]) : 0;
    while (taken < n && taken < r->n_sessions - 1) {
        const int need = sessions_for(&q[taken]);
        if (taken > 0 && used + need > r->n_sessions) break;
        if (taken > 1) {
            const int with = alike(&q[0], &q[taken]);
            if (same >= LEAST_STEM ? with < same / 2
                                   : alike(&q[taken - 1], &q[taken]) >= LEAST_STEM)
                break;
            if (with < same) same = with;
        }
        q[taken].s = r->s[1 + taken];
        round[taken] = &q[taken];
        used += need;
        taken++;
    }
    return taken;
}

static still_status run(sti_runner *r, question *q, int n, still_error *err)
{
    STI_TRY(reserve_sessions(r, q, n, err));
    for (int i = 0; i < n;) {
        question *round[STI_MOST_SESSIONS];
        const int taken = next_round(r, q + i, n - i, round);
        STI_TRY(feed_beginnings(r, round, taken, err));
        STI_TRY(run_options(r, round, taken, err));
        i += taken;
    }
    return STILL_OK;
}

still_status sti_run_loglik(sti_runner *r, const sti_item *item, int n, sti_answer *out,
                            still_error *err)
{
    question *q = sti_alloc((size_t)n, sizeof *q);
    if (!q) return sti_fail_memory(err, "questions", (size_t)n * sizeof *q);
    desk d = {.r = r, .item = item, .out = out, .q = q};
    still_status st = sti_runner_each(r, n, prepare, &d, err);
    if (st == STILL_OK) st = run(r, q, n, err);
    for (int i = 0; i < n; i++) release(&q[i]);
    free(q);
    return st;
}
