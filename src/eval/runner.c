/* runner.c - the sessions that items are run on.
 *
 * Sessions are as long as the longest item so far, because some methods copy and clear
 * whole attention caches, and most questions are short. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/cores.h"
#include "base/pool.h"
#include "base/sized.h"
#include "eval/eval.h"

enum { LEAST_SESSIONS = 3, SESSIONS = 32, FIRST_CTX = 256, MOST_THREADS = 32 };
/* Rows per pass: what a CPU's caches hold, and what keeps a GPU busy. */
enum { BATCH = 256, BATCH_FAR = 8192 };
/* Memory for sessions: on a CPU, and on a GPU if it has that much. */
static const size_t MOST_BYTES = (size_t)1 << 30, MOST_BYTES_FAR = (size_t)64 << 30;

still_status sti_runner_open(still_model *m, const still_session_params *p,
                             sti_runner *r, still_error *err)
{
    *r = (sti_runner){.m = m, .tk = still_model_tokenizer(m)};
    STI_TRY(STI_TAKE(&r->params, p, still_session_params, err));
    if (!r->tk)
        return sti_fail(err, STILL_E_ARG,
                        "%s: has no tokenizer, and tasks are text; put tokenizer.json "
                        "or tokenizer.model beside the weights",
                        m->info.path);
    r->limit = r->params.ctx ? r->params.ctx : m->info.ctx_train;
    if (r->limit < 2)
        return sti_fail(err, STILL_E_ARG, "a context of %d tokens is too short",
                        r->limit);
    if (r->params.batch == 0) r->params.batch = m->be->host_memory ? BATCH : BATCH_FAR;
    r->params.rollback = 0;
    if (r->params.method)
        r->method = *r->params.method;
    else if (m->info.method)
        r->method = *m->info.method;
    else
        STI_TRY(still_method_init(&r->method, "softmax", 0, err));
    /* Sessions differ in length, but must compute the same. */
    if (r->method.positions == STILL_POSITIONS_AUTO)
        r->method.positions = r->limit > m->info.ctx_train ? STILL_POSITIONS_CAPPED
                                                           : STILL_POSITIONS_ABSOLUTE;
    r->params.method = &r->method;
    STI_TRY(sti_runner_need(r, 1, 1, err));
    if (!m->be->host_memory) {
        const int cores = sti_cores();
        STI_TRY(
            sti_pool_new(cores < MOST_THREADS ? cores : MOST_THREADS, &r->pool, err));
    }
    memcpy(r->settings, r->s[0]->settings, sizeof r->settings);
    return STILL_OK;
}

static void free_sessions(sti_runner *r, int keep)
{
    while (r->n_sessions > keep) still_session_free(r->s[--r->n_sessions]);
}

void sti_runner_close(sti_runner *r)
{
    free_sessions(r, 0);
    free(r->stem);
    sti_pool_free(r->pool);
    r->n_stem = 0;
    r->stem = NULL;
    r->pool = NULL;
}

/* ---- Threads ------------------------------------------------------------- */

typedef struct sweep {
    sti_runner_fn *fn;
    void *arg;
    int n;
    atomic_int next;
    struct {
        int i; /* n: none */
        still_status st;
        still_error err;
    } failed[MOST_THREADS]; /* the first of each worker */
} sweep;

static void work(void *arg, int worker, int workers)
{
    sweep *d = arg;
    (void)workers;
    still_error err;
    for (int i; (i = atomic_fetch_add(&d->next, 1)) < d->n;) {
        const still_status st = d->fn(d->arg, i, &err);
        if (st == STILL_OK || d->failed[worker].i < d->n) continue;
        d->failed[worker].i = i;
        d->failed[worker].st = st;
        d->failed[worker].err = err;
    }
}

still_status sti_runner_each(sti_runner *r, int n, sti_runner_fn *fn, void *arg,
                             still_error *err)
{
    sweep d = {.fn = fn, .arg = arg, .n = n};
    const int workers = r->pool ? sti_pool_threads(r->pool) : 1;
    int first = 0;
    for (int i = 0; i < workers; i++) d.failed[i].i = n;
    if (r->pool)
        sti_pool_run(r->pool, work, &d);
    else
        work(&d, 0, 1);
    for (int i = 1; i < workers; i++)
        if (d.failed[i].i < d.failed[first].i) first = i;
    if (d.failed[first].i == n) return STILL_OK;
    if (err) *err = d.failed[first].err;
    return d.failed[first].st;
}

/* ---- Sessions ------------------------------------------------------------ */

static int round_up(int ctx, int limit)
{
    int capacity = FIRST_CTX;
    while (capacity < ctx && capacity <= limit / 2) capacity *= 2;
    if (capacity < ctx || capacity > limit) capacity = limit;
    return capacity;
}

static still_status add_session(sti_runner *r, still_error *err)
{
    still_session **s = &r->s[r->n_sessions];
    STI_TRY(still_session_new(r->m, &r->params, s, err));
    r->n_sessions++;
    return sti_session_widen(*s, r->params.batch, err);
}

still_status sti_runner_need(sti_runner *r, int ctx, int sessions, still_error *err)
{
    const bool far = !r->m->be->host_memory;
    if (r->n_sessions == 0 || ctx > r->ctx) {
        still_bill bill;
        free_sessions(r, 0);
        r->n_stem = 0;
        r->ctx = r->params.ctx = round_up(ctx, r->limit);
        STI_TRY(still_model_bill(r->m, &r->params, &bill, err));
        const size_t fit = (far ? MOST_BYTES_FAR : MOST_BYTES) / (bill.cache + 1);
        const size_t enough = far ? STI_MOST_SESSIONS : SESSIONS;
        r->most = (int)(fit < enough ? fit : enough);
    }
    if (sessions > r->most) sessions = r->most;
    if (sessions < LEAST_SESSIONS) sessions = LEAST_SESSIONS;
    while (r->n_sessions < sessions) {
        const still_status st = add_session(r, err);
        if (st == STILL_OK) continue;
        if (!far || st != STILL_E_MEMORY || r->n_sessions < 2 * LEAST_SESSIONS)
            return st;
        /* The GPU has less memory: leave some for passes. */
        r->most = r->n_sessions - r->n_sessions / 4;
        free_sessions(r, r->most);
        break;
    }
    return STILL_OK;
}
