/* bench.c - timing prefill and decode of a model; see "Measuring" in still.h.
 *
 * Each call allocates and frees everything its point needs, so that the peak memory
 * is the point's own. It times what a caller waits for: the calls of
 * still_session_feed and still_session_step_top, with results in host memory. */
#include <stdlib.h>
#include <string.h>

#include "base/process.h"
#include "base/random.h"
#include "base/sized.h"
#include "session/session.h"

enum {
    STEPS = 32,
    WARM_STEPS =
        3, /* a backend may run a pass, record it, and replay it from then on */
    BOUNDARIES = 5, /* timed steps that begin a chunk */
    PASSES = 4      /* per call of feed, if a pass is too short to poll after each */
};

typedef struct bench {
    still_model *m;
    still_bench_params p;      /* defaults filled in */
    still_session_params with; /* of every session */
    still_session **s;         /* [p.batch] */
    int32_t *tok, *top;        /* [the longer of batch and length], [batch] */
    double *seconds;           /* [steps] */
    uint64_t done, total;
} bench;

static void free_bench(bench *b)
{
    still_error unused;
    for (int i = 0; b->s && i < b->p.batch; i++) still_session_free(b->s[i]);
    free(b->s);
    free(b->tok);
    free(b->top);
    free(b->seconds);
    (void)sti_model_stand_in(b->m, NULL, &unused); /* removing it cannot fail */
}

/* The system promises host memory whether it has it or not, so check first. */
static still_status check_memory(const bench *b, still_error *err)
{
    still_bill bill;
    if (!b->m->be->host_memory) return STILL_OK;
    STI_TRY(still_model_bill(b->m, &b->with, &bill, err));
    const size_t left = sti_memory_free();
    const double need = (double)b->p.batch * (double)bill.cache + (double)bill.scratch;
    if (need <= (double)left) return STILL_OK;
    return sti_fail(err, STILL_E_MEMORY,
                    "%d sessions of %d tokens need %.1f GB of memory, %.1f GB are free",
                    b->p.batch, b->with.ctx, need / 1e9, (double)left / 1e9);
}

static still_status make_sessions(bench *b, still_error *err)
{
    STI_TRY(sti_model_stand_in(
        b->m, b->with.method ? b->with.method : b->m->info.method, err));
    (void)sti_model_peak(b->m, true);
    STI_TRY(check_memory(b, err));
    for (int i = 0; i < b->p.batch; i++)
        STI_TRY(still_session_new(b->m, &b->with, &b->s[i], err));
    return STILL_OK;
}

/* prompt: as many random ids are needed as a prompt has tokens. */
static still_status begin(bench *b, still_model *m, const still_bench_params *params,
                          bool prompt, still_error *err)
{
    *b = (bench){.m = m};
    const still_bench_params *p = &b->p;
    STI_TRY(STI_TAKE(&b->p, params, still_bench_params, err));
    STI_TRY(STI_TAKE(&b->with, p->session, still_session_params, err));
    if (p->length < 1 || p->batch < 0 || p->batch > 65536 || p->steps < 0)
        return sti_fail(err, STILL_E_ARG,
                        "%d sequences of %d tokens and %d steps cannot be measured",
                        p->batch, p->length, p->steps);
    if (b->p.batch == 0) b->p.batch = 1;
    if (b->p.steps == 0) b->p.steps = STEPS;
    const size_t batch = (size_t)b->p.batch, length = (size_t)b->p.length;
    const size_t ids = prompt && length > batch ? length : batch;
    b->s = sti_alloc(batch, sizeof *b->s);
    b->tok = sti_alloc(ids, sizeof *b->tok);
    b->top = sti_alloc(batch, sizeof *b->top);
    b->seconds = sti_alloc((size_t)b->p.steps, sizeof *b->seconds);
    if (!b->s || !b->tok || !b->top || !b->seconds)
        return sti_fail_memory(err, "benchmark", ids * sizeof *b->tok);
    for (size_t i = 0; i < ids; i++)
        b->tok[i] = (int32_t)(sti_mix64(b->p.seed + i) % (uint64_t)m->cfg.vocab);
    return STILL_OK;
}

static still_status tell(bench *b, int more, still_error *err)
{
    b->done += (uint64_t)more;
    if (!b->p.progress || b->p.progress(b->p.user, b->done, b->total)) return STILL_OK;
    return sti_fail(err, STILL_E_CANCELLED, "the measurement was stopped");
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n)
{
    qsort(x, (size_t)n, sizeof *x, by_value);
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

static void finish_result(const bench *b, still_bench_result *out)
{
    out->peak = sti_model_peak(b->m, false);
    out->state = (size_t)b->p.batch * b->s[0]->state_bytes;
}

/* ---- Prefill ------------------------------------------------------------- */

/* Feeds the first n tokens, in calls between which the caller can cancel. */
static still_status feed(bench *b, still_session *s, int n, bool count,
                         still_error *err)
{
    const int part = s->cfg.batch * (b->m->be->host_memory ? 1 : PASSES);
    for (int at = 0; at < n; at += part) {
        const int rows = n - at < part ? n - at : part;
        STI_TRY(still_session_feed(s, b->tok + at, rows, err));
        STI_TRY(tell(b, count ? rows : 0, err));
    }
    return STILL_OK;
}

/* Runs a pass of each size that will be timed. */
static still_status warm_up(bench *b, still_error *err)
{
    still_session *s = b->s[0];
    const int pass = s->cfg.batch, rest = b->p.length % pass;
    STI_TRY(feed(b, s, b->p.length < pass ? b->p.length : pass, false, err));
    if (b->p.length > pass && rest) {
        still_session_reset(s);
        STI_TRY(feed(b, s, rest, false, err));
    }
    still_session_reset(s);
    return STILL_OK;
}

static still_status prefill(bench *b, still_bench_result *out, still_error *err)
{
    b->with.ctx = b->p.length;
    b->total = (uint64_t)b->p.batch * (uint64_t)b->p.length;
    STI_TRY(make_sessions(b, err));
    STI_TRY(warm_up(b, err));
    const double start = sti_now();
    for (int i = 0; i < b->p.batch; i++)
        STI_TRY(feed(b, b->s[i], b->p.length, true, err));
    const double seconds = sti_now() - start;
    *out = (still_bench_result){.seconds = seconds,
                                .median = seconds,
                                .fastest = seconds,
                                .slowest = seconds,
                                .tokens = b->total};
    finish_result(b, out);
    return STILL_OK;
}

still_status still_bench_prefill(still_model *m, const still_bench_params *p,
                                 still_bench_result *out, still_error *err)
{
    bench b;
    still_status st = begin(&b, m, p, true, err);
    if (st == STILL_OK) st = prefill(&b, out, err);
    free_bench(&b);
    return st;
}

/* ---- Decode -------------------------------------------------------------- */

/* One step of all sessions at `length` tokens. Only the position tells a method
 * which step begins a chunk, so steps of either kind can be timed separately. */
static still_status step_at(bench *b, int length, double *seconds, still_error *err)
{
    for (int i = 0; i < b->p.batch; i++) b->s[i]->length = length;
    const double start = sti_now();
    STI_TRY(still_session_step_top(b->s, b->tok, b->p.batch, b->top, err));
    *seconds = sti_now() - start;
    return tell(b, 1, err);
}

/* Period of the steps that do more work (chunk boundaries); 0: none. */
static int chunk_of(const bench *b)
{
    const sti_attn_config *c = &b->s[0]->cfg;
    const bool leaves = c->method->engine == &sti_attn_hybrid && c->hybrid.has_window;
    return leaves && c->hybrid.chunk > 1 ? c->hybrid.chunk : 0;
}

/* Times consecutive steps within chunks; skips those that begin a chunk. */
static still_status time_steps(bench *b, int chunk, still_bench_result *out,
                               still_error *err)
{
    int at = b->p.length;
    double sum = 0, unused;
    for (int i = -WARM_STEPS; i < b->p.steps; i++, at++) {
        if (chunk && at % chunk == 0) at++;
        STI_TRY(step_at(b, at, i < 0 ? &unused : &b->seconds[i], err));
        if (i >= 0) sum += b->seconds[i];
    }
    out->seconds = sum / b->p.steps;
    out->median = median(b->seconds, b->p.steps);
    out->fastest = b->seconds[0];
    out->slowest = b->seconds[b->p.steps - 1];
    return STILL_OK;
}

static still_status time_boundaries(bench *b, int chunk, still_bench_result *out,
                                    still_error *err)
{
    const int at = (b->p.length + chunk - 1) / chunk * chunk;
    double seconds[BOUNDARIES], unused;
    for (int i = -WARM_STEPS; i < BOUNDARIES; i++)
        STI_TRY(step_at(b, at, i < 0 ? &unused : &seconds[i], err));
    out->boundary = median(seconds, BOUNDARIES);
    out->seconds += (out->boundary - out->seconds) / chunk;
    return STILL_OK;
}

static still_status decode(bench *b, still_bench_result *out, still_error *err)
{
    const int64_t steps = 2 * ((int64_t)b->p.steps + WARM_STEPS + 1); /* at most */
    const still_method *how = b->with.method ? b->with.method : b->m->info.method;
    const int64_t chunk_room = how ? how->chunk : 0; /* to the next boundary */
    const int64_t ctx = b->p.length + (steps > chunk_room ? steps : chunk_room + 1);
    if (ctx > INT32_MAX)
        return sti_fail(err, STILL_E_ARG, "%lld tokens are too many", (long long)ctx);
    b->with.ctx = (int)ctx;
    b->with.batch = b->p.batch;
    STI_TRY(make_sessions(b, err));
    const int chunk = chunk_of(b);
    b->total =
        (uint64_t)(WARM_STEPS + b->p.steps) + (chunk ? WARM_STEPS + BOUNDARIES : 0);
    STI_TRY(sti_session_fill_synthetic(b->s[0], b->p.length, b->p.seed, err));
    for (int i = 1; i < b->p.batch; i++)
        STI_TRY(sti_session_fill_like(b->s[i], b->s[0], err));
    *out = (still_bench_result){.tokens = (uint64_t)b->p.batch};
    STI_TRY(time_steps(b, chunk, out, err));
    if (chunk) STI_TRY(time_boundaries(b, chunk, out, err));
    finish_result(b, out);
    return STILL_OK;
}

still_status still_bench_decode(still_model *m, const still_bench_params *p,
                                still_bench_result *out, still_error *err)
{
    bench b;
    still_status st = begin(&b, m, p, false, err);
    if (st == STILL_OK) st = decode(&b, out, err);
    free_bench(&b);
    return st;
}
