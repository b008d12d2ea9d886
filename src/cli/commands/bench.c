/* bench.c - still bench: time and memory by length, methods side by side.
 *
 * The library measures one point at a time (still_bench_prefill and so on); here are
 * the loops around it. Each round runs all methods of a length in turn, so that
 * drift of the machine affects all of them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/fetch/cache.h"
#include "cli/near.h"
#include "cli/progress.h"
#include "cli/report/bench.h"
#include "cli/run.h"

typedef struct job {
    const cli_options *o;
    still_model *m;
    cli_bench b;
    still_bench_result sample[CLI_BENCH_COLUMNS][CLI_BENCH_ROUNDS];
    cli_progress bar;
    uint64_t done; /* before the running point */
} job;

/* ---- What to measure ----------------------------------------------------- */

static bool is_shape(const char *name)
{
    const char *known;
    for (int i = 0; (known = still_shape_at(i)); i++)
        if (strcmp(known, name) == 0) return true;
    return false;
}

static int unknown_shape(const char *name)
{
    char list[512] = "";
    const char *known;
    for (int i = 0, n = 0; (known = still_shape_at(i)) && n < (int)sizeof list; i++)
        n += snprintf(list + n, sizeof list - (size_t)n, " %s", known);
    return cli_usage("bench", "--shape: '%s' is none of:%s", name, list);
}

static int read_kind(job *j)
{
    static const char *const kinds[] = {[CLI_BENCH_PREFILL] = "prefill",
                                        [CLI_BENCH_DECODE] = "decode",
                                        [CLI_BENCH_TRAIN] = "train"};
    static const int batch[] = {
        [CLI_BENCH_PREFILL] = 1, [CLI_BENCH_DECODE] = 12, [CLI_BENCH_TRAIN] = 1};
    const cli_options *o = j->o;
    for (int i = 0; i < 3; i++) {
        if (strcmp(o->arg[0], kinds[i]) != 0) continue;
        j->b.what = kinds[i];
        j->b.kind = (cli_bench_kind)i;
        j->b.batch = o->batch ? (int)o->batch : batch[i];
    }
    cli_near near = {0};
    for (int i = 0; i < 3; i++) cli_near_consider(&near, o->arg[0], kinds[i]);
    if (!j->b.what && near.name)
        return cli_usage("bench", "'%s' is unknown, did you mean %s?", o->arg[0],
                         near.name);
    if (!j->b.what)
        return cli_usage("bench", "'%s' is none of: prefill decode train", o->arg[0]);
    if (o->shape && o->n_args > 1)
        return cli_usage("bench", "MODEL and --shape exclude each other");
    if (o->shape && !is_shape(o->shape)) return unknown_shape(o->shape);
    if (o->micro_batch > j->b.batch)
        return cli_usage("bench", "--micro %lld is more than the batch of %d",
                         (long long)o->micro_batch, j->b.batch);
    j->b.rounds = (int)o->rounds;
    j->b.rows = (int)o->batch_rows;
    return CLI_OK;
}

static int read_lengths(job *j)
{
    const char *text = j->o->lengths;
    if (!text) text = j->b.kind == CLI_BENCH_TRAIN ? "1K" : "1K,2K,4K,8K,16K,32K,64K";
    int status =
        cli_read_lengths("bench", text, j->b.length, CLI_BENCH_LENGTHS, &j->b.lengths);
    for (int i = 0; status == CLI_OK && i < j->b.lengths; i++)
        if (j->b.length[i] < (j->b.kind == CLI_BENCH_TRAIN ? 2 : 1))
            status = cli_usage("bench", "--lengths: %d is too short", j->b.length[i]);
    if (status == CLI_OK && j->b.lengths == 0)
        status = cli_usage("bench", "--lengths: the list is empty");
    return status;
}

static int open_model(job *j)
{
    const cli_options *o = j->o;
    still_error err;
    if (!o->shape) {
        j->b.model = o->n_args > 1 ? o->arg[1] : cli_default_model(o);
        return cli_open_model(o, j->b.model, &j->m);
    }
    still_model_params params;
    const int status = cli_model_params(o, &params);
    if (status != CLI_OK) return status;
    j->b.model = o->shape;
    if (still_model_open_shape(o->shape, &params, &j->m, &err))
        return cli_fail_error(&err);
    return CLI_OK;
}

static int add_column(job *j, const char *name)
{
    cli_options o = *j->o;
    still_method method;
    const bool train = j->b.kind == CLI_BENCH_TRAIN;
    o.method = name;
    if (train && strcmp(name, "softmax") == 0)
        return cli_usage("bench", "softmax is what training starts from: there is "
                                  "nothing to time");
    for (int i = 0; i < j->b.columns; i++)
        if (strcmp(j->b.column[i].method.name, name) == 0) return CLI_OK;
    int status = cli_read_method(&o, j->m, &method);
    if (status != CLI_OK) return status;
    for (int stage = train; stage <= 2 * train; stage++) {
        if (j->b.columns == CLI_BENCH_COLUMNS)
            return cli_usage("bench", "--against: too many methods");
        cli_bench_column *c = &j->b.column[j->b.columns++];
        *c = (cli_bench_column){.method = method, .stage = stage};
        if (stage)
            snprintf(c->title, sizeof c->title, "%.15s stage %d", name, stage);
        else
            snprintf(c->title, sizeof c->title, "%.15s", name);
    }
    return CLI_OK;
}

/* The methods of --against, then --method unless it is among them. */
static int read_methods(job *j)
{
    const cli_options *o = j->o;
    const still_method *trained = still_model_get_info(j->m)->method;
    const char *against = o->against;
    if (!against)
        against = trained || j->b.kind == CLI_BENCH_TRAIN ? "" : "softmax,lolcats";
    while (*against) {
        char name[32];
        const int n = (int)strcspn(against, ",");
        snprintf(name, sizeof name, "%.*s", n, against);
        if (!cli_is_method(name))
            return cli_usage("bench", "--against: '%.*s' is not a method", n, against);
        int status = add_column(j, name);
        if (status != CLI_OK) return status;
        against += n;
        against += *against == ',';
    }
    return add_column(j, o->method ? o->method : trained ? trained->name : "still");
}

/* ---- Measuring ----------------------------------------------------------- */

static bool on_tick(void *user, uint64_t done, uint64_t total)
{
    job *j = user;
    (void)total;
    if (j->b.kind == CLI_BENCH_PREFILL) cli_progress_update(&j->bar, j->done + done);
    return !cli_interrupted();
}

static uint64_t work_of(const job *j, int row)
{
    return j->b.kind == CLI_BENCH_PREFILL
               ? (uint64_t)j->b.length[row] * (uint64_t)j->b.batch
               : 1;
}

static still_status measure(job *j, int row, const cli_bench_column *c,
                            still_bench_result *out, still_error *err)
{
    const cli_options *o = j->o;
    const still_session_params session = {.size = sizeof session,
                                          .batch = j->b.rows,
                                          .cache = o->cache,
                                          .method = &c->method};
    const still_bench_params p = {.size = sizeof p,
                                  .session = &session,
                                  .length = j->b.length[row],
                                  .batch = j->b.batch,
                                  .steps = (int)o->steps,
                                  .stage = c->stage,
                                  .micro_batch = (int)o->micro_batch,
                                  .seed = o->seed,
                                  .progress = on_tick,
                                  .user = j};
    switch (j->b.kind) {
    case CLI_BENCH_PREFILL: return still_bench_prefill(j->m, &p, out, err);
    case CLI_BENCH_DECODE: return still_bench_decode(j->m, &p, out, err);
    default: return still_bench_train(j->m, &p, out, err);
    }
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median of a field of n samples. */
static double median(const still_bench_result *s, int n, size_t field)
{
    double x[CLI_BENCH_ROUNDS];
    for (int i = 0; i < n; i++) memcpy(&x[i], (const char *)&s[i] + field, sizeof x[i]);
    qsort(x, (size_t)n, sizeof *x, by_value);
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

static void sum_up(const still_bench_result *s, int n, cli_bench_point *p)
{
    still_bench_result r = s[0];
    r.seconds = median(s, n, offsetof(still_bench_result, seconds));
    r.median = median(s, n, offsetof(still_bench_result, median));
    r.boundary = median(s, n, offsetof(still_bench_result, boundary));
    p->low = p->high = s[0].seconds;
    for (int i = 1; i < n; i++) {
        if (s[i].seconds < p->low) p->low = s[i].seconds;
        if (s[i].seconds > p->high) p->high = s[i].seconds;
        if (s[i].fastest < r.fastest) r.fastest = s[i].fastest;
        if (s[i].slowest > r.slowest) r.slowest = s[i].slowest;
        if (s[i].peak > r.peak) r.peak = s[i].peak;
    }
    p->r = r;
    p->measured = true;
}

/* One run of a point. If it does not fit, or the backend lacks the method, the point
 * says so; any other failure ends the command. */
static int run_point(job *j, int row, int column, int round)
{
    still_error err;
    cli_bench_point *p = &j->b.point[row][column];
    const cli_bench_column *c = &j->b.column[column];
    if (!*p->reason) {
        snprintf(j->bar.note, sizeof j->bar.note, "%s %d", c->title, j->b.length[row]);
        const still_status st = measure(j, row, c, &j->sample[column][round], &err);
        if (st == STILL_E_CANCELLED || cli_interrupted()) return CLI_INTERRUPTED;
        if (st != STILL_OK && st != STILL_E_MEMORY && st != STILL_E_UNSUPPORTED)
            return cli_fail_error(&err);
        if (st != STILL_OK) snprintf(p->reason, sizeof p->reason, "%.255s", err.text);
        p->does_not_fit = st == STILL_E_MEMORY;
    }
    j->done += work_of(j, row);
    cli_progress_update(&j->bar, j->done);
    return CLI_OK;
}

/* All methods at one length. */
static int run_row(job *j, int row)
{
    for (int round = 0; round < j->b.rounds; round++)
        for (int i = 0; i < j->b.columns; i++) {
            const int status = run_point(j, row, i, round);
            if (status != CLI_OK) return status;
        }
    for (int i = 0; i < j->b.columns; i++)
        if (!*j->b.point[row][i].reason)
            sum_up(j->sample[i], j->b.rounds, &j->b.point[row][i]);
    return CLI_OK;
}

static int run_rows(job *j)
{
    const bool text = !j->o->json && !j->o->to_stdout;
    uint64_t total = 0;
    for (int row = 0; row < j->b.lengths; row++)
        total += work_of(j, row) * (uint64_t)j->b.columns * (uint64_t)j->b.rounds;
    if (text) cli_bench_print_head(&j->b);
    cli_progress_begin(&j->bar, j->o->quiet, j->b.what,
                       j->b.kind == CLI_BENCH_PREFILL ? "tok" : "runs", 0, total);
    int status = CLI_OK;
    for (int row = 0; row < j->b.lengths && status == CLI_OK; row++) {
        status = run_row(j, row);
        cli_progress_end(&j->bar);
        if (status == CLI_OK && text) cli_bench_print_row(&j->b, row);
    }
    return status;
}

/* Shows the figures measured so far, if the run was interrupted. */
static int report(job *j, int status)
{
    const cli_options *o = j->o;
    if (status != CLI_OK && status != CLI_INTERRUPTED) return status;
    j->b.interrupted = status == CLI_INTERRUPTED;
    int written = o->json ? cli_bench_print_json(&j->b) : CLI_OK;
    if (written == CLI_OK) written = cli_bench_write_csv(&j->b, o->csv);
    if (written == CLI_OK) written = cli_bench_write_svg(&j->b, o->svg);
    return written == CLI_OK ? status : written;
}

int cli_cmd_bench(const cli_options *o)
{
    job *j = calloc(1, sizeof *j);
    if (!j) return cli_fail("out of memory");
    j->o = o;
    int status = read_kind(j);
    if (status == CLI_OK) status = read_lengths(j);
    if (status == CLI_OK) status = open_model(j);
    if (status == CLI_OK) status = read_methods(j);
    if (status == CLI_OK) {
        j->b.info = still_model_get_info(j->m);
        status = report(j, run_rows(j));
    }
    still_model_free(j->m);
    free(j);
    return status;
}
