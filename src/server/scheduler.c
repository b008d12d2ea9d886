/* scheduler.c - see scheduler.h.
 *
 * The lock guards the queue, which sequence a slot has, and the figures. Sequences and
 * sessions belong to the thread that runs the model, which holds the lock only between
 * turns: callbacks are called without it, so they may add and cancel. */
#include "server/scheduler.h"

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/error.h"
#include "base/mem.h"
#include "base/process.h"
#include "server/pieces.h"
#include "server/sequence.h"

enum {
    SPREAD = 16, /* turns over which prompts that wait are spread, if they are short */
    MOST_PARALLEL = 4096,
    MOST_WAIT = 1 << 24 /* seconds for what is still computed when it ends */
};
/* Between two steps others are read, begun and ended for as long as so many steps take:
 * nobody waits for a token much longer than twice as long as usual. */
static const double PIECE_STEPS = 1.25;
static const double LEAST_STEPS = 0.5; /* of them for prompts, whatever the rest took */

const double srv_step_bounds[SRV_STEP_BUCKETS] = {
    0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5, INFINITY};

/* The sequences of a request. */
typedef struct srv_group {
    int waiting, left; /* without a session; not done */
    srv_sequence sequence[];
} srv_group;

struct srv_scheduler {
    srv_host host;
    srv_slot *slot; /* [parallel]; the first one scores prompts */
    srv_scores scores;
    int parallel, most_queued, piece;
    double step_s;     /* of a decode step: a running mean */
    srv_pieces pieces; /* of prompts, between two steps */
    /* [parallel], of a step */
    still_session **session;
    int32_t *id, *top;
    bool *keep; /* its logits */
    srv_sequence **decoding;

    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t change;
    pthread_cond_t ended; /* `over` has become true */
    bool running, ending, over;
    srv_sequence *first, *last;  /* the queue */
    int waiting, waiting_scored; /* sequences in it, those that score their prompt */
    int to_end;                  /* those that were cancelled */
    srv_metrics metrics;
};

/* ---- The queue ----------------------------------------------------------- */

static int by_ids(const void *a, const void *b)
{
    const srv_work *x = ((const srv_sequence *)a)->work;
    const srv_work *y = ((const srv_sequence *)b)->work;
    const int at = srv_common(x->prompt, x->n_prompt, y->prompt, y->n_prompt);
    if (at < x->n_prompt && at < y->n_prompt)
        return x->prompt[at] < y->prompt[at] ? -1 : 1;
    return (x->n_prompt > y->n_prompt) - (x->n_prompt < y->n_prompt);
}

/* Prompts that are scored come in the order of their ids: those that begin alike follow one
 * another, and their session walks them like a tree. */
static srv_group *make_group(srv_work *const *w, int n)
{
    srv_group *g = sti_alloc(1, sizeof *g + (size_t)n * sizeof *g->sequence);
    if (!g) return NULL;
    const double now = sti_now();
    for (int i = 0; i < n; i++) {
        g->sequence[i].group = g;
        g->sequence[i].work = w[i];
        g->sequence[i].added = now;
    }
    if (w[0]->score_prompt) qsort(g->sequence, (size_t)n, sizeof *g->sequence, by_ids);
    for (int i = 0; i + 1 < n; i++) g->sequence[i].next = &g->sequence[i + 1];
    g->waiting = g->left = n;
    return g;
}

srv_added srv_scheduler_add(srv_scheduler *s, srv_work *const *w, int n)
{
    if (n < 1) return SRV_ADDED;
    srv_group *g = make_group(w, n);
    pthread_mutex_lock(&s->lock);
    srv_added answer = s->ending ? SRV_ENDING : SRV_ADDED;
    /* Whoever finds a free session does not wait. */
    const bool room = s->metrics.active + s->waiting < s->parallel;
    if (answer == SRV_ADDED && (!g || (!room && s->metrics.queued >= s->most_queued)))
        answer = SRV_QUEUE_FULL;
    if (answer == SRV_ADDED) {
        if (s->last)
            s->last->next = g->sequence;
        else
            s->first = g->sequence;
        s->last = &g->sequence[n - 1];
        s->waiting += n;
        for (int i = 0; i < n; i++) {
            s->waiting_scored += w[i]->score_prompt;
            g->sequence[i].work->own = &g->sequence[i];
        }
        s->metrics.queued++;
        s->metrics.requests++;
        pthread_cond_signal(&s->change);
    } else if (answer == SRV_QUEUE_FULL) {
        s->metrics.refused++;
    }
    pthread_mutex_unlock(&s->lock);
    if (answer != SRV_ADDED) free(g);
    return answer;
}

/* Locked. */
static void cancel_one(srv_scheduler *s, srv_sequence *q)
{
    if (!q->slot && !q->cancelled) s->to_end++;
    q->cancelled = true;
}

void srv_scheduler_cancel(srv_scheduler *s, const srv_work *w)
{
    pthread_mutex_lock(&s->lock);
    if (w->own) cancel_one(s, w->own);
    pthread_cond_signal(&s->change);
    pthread_mutex_unlock(&s->lock);
}

/* A sequence that leaves the queue. Locked. */
static void leave(srv_scheduler *s, srv_sequence *q, srv_sequence *before)
{
    if (before)
        before->next = q->next;
    else
        s->first = q->next;
    if (s->last == q) s->last = before;
    q->next = NULL;
    s->waiting--;
    s->waiting_scored -= q->work->score_prompt;
    s->to_end -= q->cancelled;
    if (--q->group->waiting == 0) s->metrics.queued--;
}

static srv_slot *free_slot(srv_scheduler *s, bool scores, bool spare_first)
{
    const int least = spare_first && !scores ? 1 : 0;
    for (int i = s->parallel - 1; i >= least; i--)
        if (!s->slot[i].sequence && (!scores || i == 0)) return &s->slot[i];
    return NULL;
}

/* Whether a prompt that is being read begins like this one and is not there yet: its past
 * is then kept, which is quicker than reading the same tokens twice. Scheduler's thread. */
static bool wait_for_another(srv_scheduler *s, srv_sequence *q)
{
    const srv_work *w = q->work;
    srv_host *h = &s->host;
    if (h->tree.limit == 0 || w->score_prompt) return false;
    for (int i = 0; i < s->parallel; i++) {
        srv_sequence *r = s->slot[i].sequence;
        if (!r || !r->reading || r->over || r->work->score_prompt) continue;
        if (q->after && q->after != r) continue; /* it has been compared before */
        if (q->after && still_session_length(r->slot->session) < q->after_length)
            return true;
        const int common =
            srv_common(w->prompt, w->n_prompt, r->work->prompt, r->work->n_prompt);
        const int offer = srv_sequence_offers(h, r, common);
        if (offer - still_session_length(r->slot->session) < SRV_LEAST_GAIN) continue;
        if (!srv_sequence_mark(r, offer)) continue;
        q->after = r;
        q->after_length = offer;
        return true;
    }
    return false;
}

/* Takes the first that has been cancelled, or that a free session suits, out of the queue;
 * NULL if there is none. Locked. */
static srv_sequence *next_in_queue(srv_scheduler *s)
{
    bool scorer_waits = false;
    if (s->to_end == 0 && s->metrics.active == s->parallel) return NULL;
    for (srv_sequence *q = s->first, *before = NULL; q; before = q, q = q->next) {
        const bool scores = q->work->score_prompt;
        if (scorer_waits && s->waiting == s->waiting_scored && s->to_end == 0)
            return NULL;
        srv_slot *slot = q->cancelled ? NULL : free_slot(s, scores, scorer_waits);
        scorer_waits = scorer_waits || scores;
        if (!q->cancelled && (!slot || wait_for_another(s, q))) continue;
        leave(s, q, before);
        q->slot = slot;
        if (slot) {
            slot->sequence = q;
            s->metrics.active++;
        }
        return q;
    }
    return NULL;
}

/* ---- A turn -------------------------------------------------------------- */

/* Locked, scheduler's thread. */
static void note_cache(srv_scheduler *s)
{
    const srv_host *h = &s->host;
    srv_metrics *m = &s->metrics;
    m->cache_hits = h->hits;
    m->cache_misses = h->misses;
    m->cache_given_up = h->tree.given_up;
    m->cache_bytes = h->tree.bytes;
    m->cache_limit = h->tree.limit;
    m->cache_pasts = h->tree.pasts;
}

/* Called with the lock, which is free while done runs. */
static void finish(srv_scheduler *s, srv_sequence *q)
{
    srv_metrics *m = &s->metrics;
    if (q->slot) {
        q->slot->sequence = NULL;
        m->active--;
        if (!q->reading) m->prompt_tokens += (uint64_t)q->work->n_prompt;
        m->cached_tokens += (uint64_t)q->cached;
    }
    m->made_tokens += (uint64_t)q->made;
    m->finished[q->finish]++;
    q->work->own = NULL;
    pthread_mutex_unlock(&s->lock);
    if (q->slot && q->finish == SRV_FAILED) still_session_reset(q->slot->session);
    srv_sequence_finish(&s->host, q);
    pthread_mutex_lock(&s->lock);
    note_cache(s);
    if (--q->group->left == 0) free(q->group);
}

/* Fills free sessions from the queue. Locked between sequences. */
static void admit(srv_scheduler *s)
{
    srv_sequence *q;
    while ((q = next_in_queue(s))) {
        if (!q->slot) {
            q->finish = SRV_CANCELLED;
            finish(s, q);
            continue;
        }
        pthread_mutex_unlock(&s->lock);
        srv_sequence_begin(&s->host, q);
        pthread_mutex_lock(&s->lock);
        if (q->over) finish(s, q);
    }
}

static void end_those_over(srv_scheduler *s)
{
    for (int i = 0; i < s->parallel; i++) {
        srv_sequence *q = s->slot[i].sequence;
        if (!q) continue;
        if (q->cancelled && !q->over) {
            q->over = true;
            q->finish = SRV_CANCELLED;
        }
        if (q->over) finish(s, q);
    }
}

static double mean_of(double mean, double now)
{
    return mean > 0 ? 0.8 * mean + 0.2 * now : now;
}

static void count_step(srv_scheduler *s, double seconds)
{
    int b = 0;
    while (seconds > srv_step_bounds[b]) b++;
    s->step_s = mean_of(s->step_s, seconds);
    pthread_mutex_lock(&s->lock);
    s->metrics.steps++;
    s->metrics.step_count[b]++;
    s->metrics.step_seconds += seconds;
    pthread_mutex_unlock(&s->lock);
}

/* One token for all that have their prompt; returns how many those are. */
static int decode(srv_scheduler *s)
{
    still_error err;
    int n = 0;
    for (int i = 0; i < s->parallel; i++) {
        srv_sequence *q = s->slot[i].sequence;
        if (!q || q->reading || q->over) continue;
        s->decoding[n] = q;
        s->session[n] = s->slot[i].session;
        s->keep[n] = srv_sequence_needs_logits(q);
        s->id[n++] = q->pending;
    }
    if (n == 0) return 0;
    const double start = sti_now();
    (void)still_session_step_some(s->session, s->id, n, s->keep, s->host.no_end, s->top,
                                  &err);
    for (int i = 0; i < n; i++)
        if (s->top[i] >= 0)
            srv_sequence_choose(&s->host, s->decoding[i], s->top[i]);
        else
            srv_sequence_fail(s->decoding[i], &err);
    count_step(s, sti_now() - start);
    return n;
}

/* The prompt whose turn it is: the one with the fewest tokens left, but every token that
 * goes before a prompt counts in its favour, so that a long one waits for no more tokens
 * than it has. */
static srv_sequence *next_prompt(srv_scheduler *s)
{
    srv_sequence *best = NULL;
    int64_t least = 0;
    for (int i = 0; i < s->parallel; i++) {
        srv_sequence *q = s->slot[i].sequence;
        if (!q || !q->reading || q->over) continue;
        const int left = q->work->n_prompt - still_session_length(q->slot->session);
        const int64_t rank = left - q->waited;
        if (best && (rank > least || (rank == least && q->added >= best->added)))
            continue;
        best = q;
        least = rank;
    }
    return best;
}

static void read_piece(srv_scheduler *s, srv_sequence *q, int most, bool others_decode)
{
    const double start = sti_now();
    const int n = srv_sequence_read(&s->host, q, most);
    const double seconds = sti_now() - start;
    if (others_decode && n >= SRV_LEAST_PIECE) srv_pieces_note(&s->pieces, n, seconds);
    for (int i = 0; i < s->parallel; i++) {
        srv_sequence *other = s->slot[i].sequence;
        if (other && other != q && other->reading) other->waited += n;
    }
    pthread_mutex_lock(&s->lock);
    s->metrics.prompt_seconds += seconds;
    pthread_mutex_unlock(&s->lock);
}

static int count_prompts(const srv_scheduler *s)
{
    int n = 0;
    for (int i = 0; i < s->parallel; i++) {
        const srv_sequence *q = s->slot[i].sequence;
        n += q && q->reading && !q->over;
    }
    return n;
}

/* A piece of one prompt while nobody decodes; else pieces while there is time, at least
 * one, and of no more prompts than lets all that wait begin within SPREAD turns, so that
 * turns take about equally long. The time is counted and not the tokens: that of short
 * prompts, and of their ends, goes by other laws than that of long ones. other_s: seconds
 * of this turn that went neither into a step nor into prompts. */
static void read_prompts(srv_scheduler *s, bool others_decode, double other_s)
{
    const double start = sti_now();
    double left = PIECE_STEPS * s->step_s - other_s;
    if (left < LEAST_STEPS * s->step_s) left = LEAST_STEPS * s->step_s;
    const double end = start + left;
    srv_sequence *q = next_prompt(s);
    if (!q) return;
    if (!others_decode) {
        read_piece(s, q, SRV_WHOLE_PIECE, false);
        return;
    }
    int most = s->piece > 0 ? 1 : (count_prompts(s) + SPREAD - 1) / SPREAD;
    do {
        read_piece(s, q, s->piece > 0 ? s->piece : srv_pieces_fit(&s->pieces, left),
                   true);
        left = end - sti_now();
        q = next_prompt(s);
    } while (q && --most > 0 && srv_pieces_any(&s->pieces, left));
}

static void *run(void *arg)
{
    srv_scheduler *s = arg;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        const double start = sti_now();
        admit(s);
        end_those_over(s);
        if (s->first && s->metrics.active == 0) continue; /* a session became free */
        if (s->metrics.active == 0) {
            if (s->ending) break;
            pthread_cond_wait(&s->change, &s->lock);
            continue;
        }
        pthread_mutex_unlock(&s->lock);
        const double other_s = sti_now() - start;
        const bool others = decode(s) > 0;
        read_prompts(s, others, other_s);
        pthread_mutex_lock(&s->lock);
        note_cache(s);
    }
    s->over = true;
    pthread_cond_signal(&s->ended);
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* ---- The scheduler ------------------------------------------------------- */

static still_status make_slots(srv_scheduler *s, const srv_scheduler_params *p,
                               still_error *err)
{
    const size_t n = (size_t)s->parallel;
    s->slot = sti_alloc(n, sizeof *s->slot);
    s->session = sti_alloc(n, sizeof *s->session);
    s->decoding = sti_alloc(n, sizeof *s->decoding);
    s->id = sti_alloc(n, sizeof *s->id);
    s->top = sti_alloc(n, sizeof *s->top);
    s->keep = sti_alloc(n, sizeof *s->keep);
    if (!s->slot || !s->session || !s->decoding || !s->id || !s->top || !s->keep)
        return sti_fail_memory(err, "scheduler", n * sizeof *s->slot);
    still_session_params params = p->session;
    for (size_t i = 0; i < n; i++, params.rollback = 0) {
        srv_slot *slot = &s->slot[i];
        STI_TRY(still_session_new(p->model, &params, &slot->session, err));
        s->host.limit = still_session_limit(slot->session);
        slot->id = sti_alloc((size_t)s->host.limit, sizeof *slot->id);
        if (!slot->id) return sti_fail_memory(err, "scheduler", n);
    }
    STI_TRY(srv_scores_init(s->host.limit, &s->scores, err));
    s->slot[0].scores = &s->scores;
    return srv_host_init(p, s->host.limit, &s->host, err);
}

static still_status start(srv_scheduler *s, still_error *err)
{
    sigset_t all, before;
    sigfillset(&all); /* signals are for the thread that waits for them */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(&s->thread, NULL, run, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed)
        return sti_fail(err, STILL_E_IO, "cannot start a thread: %s", strerror(failed));
    s->running = true;
    return STILL_OK;
}

still_status srv_scheduler_new(const srv_scheduler_params *p, srv_scheduler **out,
                               still_error *err)
{
    *out = NULL;
    if (p->parallel < 0 || p->parallel > MOST_PARALLEL || p->queue < 0 || p->piece < 0)
        return sti_fail(
            err, STILL_E_ARG,
            "%d sequences at once, %d requests that wait: 1 to %d, and 0 or "
            "more",
            p->parallel, p->queue, MOST_PARALLEL);
    srv_scheduler *s = sti_alloc(1, sizeof *s);
    if (!s) return sti_fail_memory(err, "scheduler", sizeof *s);
    s->parallel = s->metrics.parallel = p->parallel ? p->parallel : 1;
    s->most_queued = p->queue;
    s->piece = p->piece;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->change, NULL);
    pthread_condattr_t by_clock;
    pthread_condattr_init(&by_clock);
    pthread_condattr_setclock(&by_clock, CLOCK_MONOTONIC);
    pthread_cond_init(&s->ended, &by_clock);
    pthread_condattr_destroy(&by_clock);
    still_status st = make_slots(s, p, err);
    if (st == STILL_OK) st = start(s, err);
    if (st == STILL_OK)
        *out = s;
    else
        srv_scheduler_free(s);
    return st;
}

void srv_scheduler_end(srv_scheduler *s, bool cancel)
{
    pthread_mutex_lock(&s->lock);
    s->ending = true;
    for (srv_sequence *q = s->first; q && cancel; q = q->next) cancel_one(s, q);
    for (int i = 0; i < s->parallel && cancel && s->slot; i++)
        if (s->slot[i].sequence) cancel_one(s, s->slot[i].sequence);
    pthread_cond_signal(&s->change);
    pthread_mutex_unlock(&s->lock);
}

/* False: some sequences are not done by then. */
static bool wait_until_over(srv_scheduler *s, double seconds)
{
    struct timespec until;
    const double most = seconds < MOST_WAIT ? seconds : MOST_WAIT;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += (time_t)most;
    until.tv_nsec += (long)((most - floor(most)) * 1e9);
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&s->lock);
    while (!s->over && pthread_cond_timedwait(&s->ended, &s->lock, &until) == 0)
        continue;
    const bool over = s->over;
    pthread_mutex_unlock(&s->lock);
    return over;
}

void srv_scheduler_stop(srv_scheduler *s, double seconds)
{
    srv_scheduler_end(s, false);
    if (s->running && seconds >= 0 && !wait_until_over(s, seconds))
        srv_scheduler_end(s, true);
    if (s->running) pthread_join(s->thread, NULL);
    s->running = false;
}

void srv_scheduler_free(srv_scheduler *s)
{
    if (!s) return;
    srv_scheduler_end(s, true);
    srv_scheduler_stop(s, -1);
    for (int i = 0; i < s->parallel && s->slot; i++) {
        still_session_free(s->slot[i].session);
        free(s->slot[i].id);
    }
    srv_scores_free(&s->scores);
    srv_host_free(&s->host);
    free(s->slot);
    free(s->session);
    free(s->decoding);
    free(s->id);
    free(s->top);
    free(s->keep);
    pthread_cond_destroy(&s->change);
    pthread_cond_destroy(&s->ended);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

int srv_scheduler_limit(const srv_scheduler *s)
{
    return s->host.limit;
}

void srv_scheduler_metrics(srv_scheduler *s, srv_metrics *out)
{
    pthread_mutex_lock(&s->lock);
    *out = s->metrics;
    pthread_mutex_unlock(&s->lock);
    out->has_disk = s->host.tree.disk != NULL;
    if (out->has_disk) out->disk = srv_prefix_disk_figures(s->host.tree.disk);
}
