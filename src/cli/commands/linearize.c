/* linearize.c - still linearize: options into a training run, and its progress. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/mem.h"
#include "cli/data/sources.h"
#include "cli/fetch/cache.h"
#include "cli/fetch/quant.h"
#include "cli/progress.h"
#include "cli/report/training.h"
#include "cli/run.h"

static const char *const group_names[STILL_GROUPS] = {
    [STILL_GROUP_MAPS] = "maps",
    [STILL_GROUP_SCALARS] = "scalars",
    [STILL_GROUP_GATE] = "gate",
    [STILL_GROUP_LORA] = "lora",
};

/* The share of their own caps with which heads train that --budget chose. */
#define SCARCE 0.125

typedef struct job {
    const cli_options *o;
    still_train_data data[CLI_LIST_MAX];
    char *name[CLI_LIST_MAX],
        *path[CLI_LIST_MAX]; /* of data, as given and where it is */
    still_train_params p;
    cli_progress bar;
    int stage; /* the bar is for */
    still_train_progress last;
    cli_training report;
    char method[160]; /* in words, for the report */
} job;

/* ---- Options ------------------------------------------------------------- */

/* FILE or FILE@WEIGHT; an @ that no number follows belongs to the name. FILE may be a data
 * set that pull-data brought. */
static int read_data(job *j)
{
    still_error err;
    const cli_list *list = &j->o->data;
    for (int i = 0; i < list->n; i++) {
        const char *text = list->item[i], *at = strrchr(text, '@');
        char *end = NULL;
        const double w = at ? strtod(at + 1, &end) : 0;
        const bool weighted = at && end != at + 1 && !*end;
        if (weighted && (!(w > 0) || !isfinite(w)))
            return cli_usage("linearize",
                             "--data: '%s': the weight must be more than 0", text);
        j->name[i] = sti_strndup(text, weighted ? (size_t)(at - text) : strlen(text));
        if (!j->name[i]) return cli_fail("out of memory");
        if (cli_data_path(j->name[i], &j->path[i], &err)) return cli_fail_error(&err);
        j->data[i] = (still_train_data){.path = j->path[i], .weight = weighted ? w : 0};
    }
    j->p.data = j->data;
    j->p.n_data = list->n;
    return CLI_OK;
}

static int read_scales(job *j)
{
    const cli_list *list = &j->o->lr_scale;
    for (int i = 0; i < list->n; i++) {
        const char *text = list->item[i], *eq = strchr(text, '=');
        char *end = NULL;
        const double x = eq ? strtod(eq + 1, &end) : 0;
        int g = 0;
        while (eq && g < STILL_GROUPS &&
               (strlen(group_names[g]) != (size_t)(eq - text) ||
                strncmp(text, group_names[g], (size_t)(eq - text)) != 0))
            g++;
        if (!eq || g == STILL_GROUPS || end == eq + 1 || *end || !(x >= 0) ||
            !isfinite(x))
            return cli_usage("linearize",
                             "--lr-scale: '%s' is not maps=X, scalars=X, gate=X or "
                             "lora=X",
                             text);
        j->p.lr_scale[g] = x == 0 ? -1 : x;
    }
    return CLI_OK;
}

static int read_targets(job *j)
{
    static const char *const names[] = {"q", "k", "v", "o", "gate"};
    for (const char *at = j->o->lora_targets; *at;) {
        const size_t n = strcspn(at, ",");
        size_t t = 0;
        while (t < 5 && (strlen(names[t]) != n || strncmp(at, names[t], n) != 0)) t++;
        if (t == 5)
            return cli_usage("linearize",
                             "--lora-targets: '%s' is not a list of q, k, v, o, gate",
                             j->o->lora_targets);
        j->p.lora_targets |= 1u << t;
        at += n + (at[n] == ',');
    }
    return CLI_OK;
}

/* The base's name in the adapter: a cached model by its name, a path as an absolute
 * path. */
static char *base_name(const char *model)
{
    const size_t n = cli_name_stem(model);
    char *whole = realpath(model, NULL), *stem = NULL, *folder = NULL;
    if (whole) return whole;
    if (model[n]) stem = sti_strndup(model, n); /* FOLDER:Q4_K_M */
    if (stem) folder = realpath(stem, NULL);
    if (!folder)
        whole = sti_strdup(model);
    else if (asprintf(&whole, "%s%s", folder, model + n) < 0)
        whole = NULL;
    free(stem);
    free(folder);
    return whole;
}

static int read_options(job *j, char **cache)
{
    const cli_options *o = j->o;
    still_error err;
    still_train_params *p = &j->p;
    *cache = NULL;
    if (o->data.n == 0)
        return cli_usage(
            "linearize",
            "--data FILE is missing; to try: --data demo/books.jsonl.gz, or "
            "`still pull-data books` and --data books");
    for (int i = 0; i < o->data.n; i++)
        if (!strcmp(o->data.item[i], "-"))
            return cli_usage("linearize",
                             "--data: standard input (-) cannot be read "
                             "again to resume; ./- is a file of that name");
    if (!o->out && !o->dry_run) return cli_usage("linearize", "--out DIR is missing");
    int status = read_data(j);
    if (status == CLI_OK) status = read_scales(j);
    if (status == CLI_OK) status = read_targets(j);
    if (status != CLI_OK) return status;
    if (cli_cache_place("tokens", "", cache, &err) || cli_make_folders(*cache, &err))
        return cli_fail_error(&err);
    p->size = sizeof *p;
    p->cache_dir = *cache;
    p->out = o->out;
    p->start = o->start;
    p->resume = o->resume;
    p->stage = strcmp(o->stage, "both") == 0 ? 0 : o->stage[0] - '0';
    p->tokens = (uint64_t)o->tokens;
    p->seq = (int)o->seq;
    p->batch = (int)o->batch;
    p->micro_batch = (int)o->micro_batch;
    p->mask_prompt = o->mask_prompt;
    p->held_out = o->held_out > 0 ? o->held_out : -1;
    p->seed = o->seed;
    p->lr[1] = o->lr1;
    p->lr[2] = o->lr2;
    p->warmup = o->warmup;
    p->clip = o->clip;
    p->decay = o->decay;
    p->lora_rank = (int)o->lora_rank;
    p->lora_alpha = o->lora_alpha;
    p->lora_dropout = o->lora_dropout;
    p->kd = o->kd;
    p->cap_share = o->cap_share > 0 ? o->cap_share : o->budget ? SCARCE : 1;
    p->match_weights = strcmp(o->loss, "weights") == 0;
    p->freeze_maps = o->freeze_maps;
    p->save_every = (uint64_t)o->save_every;
    p->validate_every = (uint64_t)o->validate_every;
    return CLI_OK;
}

/* ---- Progress ------------------------------------------------------------ */

static void print_step(const still_train_progress *p)
{
    json_t *o =
        json_pack("{s:i,s:I,s:I,s:I,s:f,s:f,s:f}", "stage", p->stage, "step",
                  (json_int_t)p->step, "steps", (json_int_t)p->steps, "tokens",
                  (json_int_t)p->tokens, "loss", p->loss, "norm", p->norm, "lr", p->lr);
    sti_json_set_real(&o, "relative", p->relative);
    sti_json_set_real(&o, "valid_loss", p->valid_loss);
    sti_json_set_real(&o, "valid_relative", p->valid_relative);
    sti_json_set_real(&o, "tokens_per_s", p->tokens_per_s);
    sti_json_set_real(&o, "seconds_left", p->seconds_left);
    sti_json_set(&o, "peak_rss", json_integer((json_int_t)p->peak_rss));
    cli_print_json(o);
}

/* The page, and what the terminal shows. */
static void watch_step(job *j, const still_train_progress *p)
{
    if (j->o->watch) j->report.columns = cli_progress_columns();
    cli_training_step(&j->report, p);
    j->bar.below = j->report.lines.p;
    cli_progress_update(&j->bar, p->tokens);
}

static bool on_step(void *user, const still_train_progress *p)
{
    job *j = user;
    if (p->stage != j->stage) {
        cli_progress_end(&j->bar);
        const uint64_t step = p->tokens / p->step;
        cli_progress_begin(&j->bar, j->o->quiet, p->stage == 1 ? "stage 1" : "stage 2",
                           "tok", p->tokens - step, step * p->steps);
        j->bar.start -= (double)step / p->tokens_per_s; /* the step is over already */
        j->stage = p->stage;
    }
    if (p->stage == 1)
        snprintf(j->bar.note, sizeof j->bar.note, "loss %.4f  rel %.4f", p->loss,
                 p->relative);
    else
        snprintf(j->bar.note, sizeof j->bar.note, "loss %.4f", p->loss);
    watch_step(j, p);
    if (j->o->json) print_step(p);
    if (!j->o->json && isfinite(p->valid_loss)) {
        cli_progress_end(&j->bar);
        cli_print("stage %d  step %llu of %llu  loss %.4f", p->stage,
                  (unsigned long long)p->step, (unsigned long long)p->steps, p->loss);
        if (p->stage == 1)
            cli_print("  relative error %.5f  held out %.5f", p->relative,
                      p->valid_relative);
        else
            cli_print("  held out %.4f", p->valid_loss);
        cli_print("  %.0f tokens/s\n", p->tokens_per_s);
        cli_flush();
    }
    j->last = *p;
    return !cli_interrupted();
}

static bool on_read(void *user, uint64_t done, uint64_t total)
{
    job *j = user;
    if (j->stage == 0) {
        cli_progress_begin(&j->bar, j->o->quiet, "tokenizing", NULL, 0, total);
        j->stage = -1;
    }
    cli_progress_update(&j->bar, done);
    return !cli_interrupted();
}

static void on_note(void *user, const char *line)
{
    job *j = user;
    cli_progress_end(&j->bar);
    cli_warn("%s", line);
}

/* ---- The plan ------------------------------------------------------------ */

static void print_time(char *out, size_t capacity, double s)
{
    if (s < 120)
        snprintf(out, capacity, "%.0f s", s);
    else if (s < 7200)
        snprintf(out, capacity, "%.0f min", s / 60);
    else
        snprintf(out, capacity, "%.1f h", s / 3600);
}

static int show_plan(const job *j, const still_train_plan *plan)
{
    json_t *list = json_array();
    const bool json = j->o->json;
    char why[256];
    if (!json)
        cli_print("%llu records of training data, %llu left out%s%s\n",
                  (unsigned long long)plan->records, (unsigned long long)plan->broken,
                  plan->broken ? ": " : "",
                  cli_line(why, sizeof why, plan->first_broken));
    for (int s = 1; s <= 2; s++) {
        char bytes[32], time[32];
        if (!plan->steps[s]) continue;
        if (json) {
            sti_json_append(&list, json_pack("{s:i,s:I,s:I,s:I,s:I,s:f}", "stage", s,
                                             "steps", (json_int_t)plan->steps[s],
                                             "tokens", (json_int_t)plan->tokens[s],
                                             "trained", (json_int_t)plan->trained[s],
                                             "peak_bytes", (json_int_t)plan->bytes[s],
                                             "seconds", plan->seconds[s]));
            continue;
        }
        print_time(time, sizeof time, plan->seconds[s]);
        cli_print("stage %d  %llu steps, %llu tokens, %.2f million numbers trained, "
                  "%s of memory, about %s (%.0f tokens/s)\n",
                  s, (unsigned long long)plan->steps[s],
                  (unsigned long long)plan->tokens[s], (double)plan->trained[s] / 1e6,
                  cli_bytes(bytes, plan->bytes[s]), time,
                  (double)plan->tokens[s] / plan->seconds[s]);
    }
    if (!json) {
        json_decref(list);
        return CLI_OK;
    }
    return cli_print_json(json_pack("{s:I,s:I,s:o}", "records",
                                    (json_int_t)plan->records, "broken",
                                    (json_int_t)plan->broken, "stages", list));
}

/* ---- The command --------------------------------------------------------- */

static int finish_command(const job *j, still_status status, const still_error *err)
{
    const bool first = j->last.step > 0; /* only the first rank receives progress */
    if (status == STILL_E_CANCELLED) {
        if (first) cli_note("still: %s; go on with --resume\n", err->text);
        return CLI_INTERRUPTED;
    }
    /* Also when interrupted: a launcher that lost a rank signals the others. An error
     * without text is reported by another rank. */
    if (status != STILL_OK) return *err->text ? cli_fail("%s", err->text) : CLI_FAILED;
    if (!first) return CLI_OK;
    if (j->o->json)
        return cli_print_json(
            json_pack("{s:s,s:f}", "done", j->o->out, "loss", j->last.loss));
    cli_print("%s is a model now: still chat %s\n", j->o->out, j->o->out);
    return CLI_OK;
}

/* The error of data that is not there says what to do about it. */
static void advise(const job *j, still_error *err)
{
    for (int i = 0; i < j->p.n_data; i++) cli_data_advise(j->name[i], j->path[i], err);
}

static int run(job *j, still_model *m)
{
    still_error err;
    if (j->o->dry_run) {
        still_train_plan plan;
        still_status status = still_linearize_plan(m, &j->p, &plan, &err);
        cli_progress_end(&j->bar);
        if (status != STILL_OK) advise(j, &err);
        if (status != STILL_OK) return finish_command(j, status, &err);
        return plan.rank == 0 ? show_plan(j, &plan) : CLI_OK;
    }
    cli_describe_method(&j->p.method, j->method, sizeof j->method);
    j->report = (cli_training){
        .folder = j->o->out, .model = j->p.base_name, .method = j->method};
    still_status status = still_linearize(m, &j->p, &err);
    cli_progress_end(&j->bar);
    cli_training_end(&j->report, status == STILL_OK            ? "done"
                                 : status == STILL_E_CANCELLED ? "interrupted"
                                                               : "failed");
    if (status != STILL_OK) advise(j, &err);
    return finish_command(j, status, &err);
}

/* The model to train is an adapter: suggests what the user may have wanted. */
static int refuse(const char *name)
{
    char base[1024];
    if (still_adapter_base(name, base, sizeof base, NULL))
        strcpy(base, "its base model");
    return cli_fail(
        "%s: is already linearized: train %s, with --start %s to go on from "
        "this one",
        name, base, name);
}

/* With --budget: what remembers most in these bytes, with caps by the heads of the model.
 * Options change the method, not the bytes. */
static int allocate(const cli_options *o, still_model *m, still_method *method)
{
    still_error err;
    still_allocation *a = NULL;
    if (strcmp(o->method, "still") != 0)
        return cli_fail("--budget chooses caps for --method still, not %s", o->method);
    if (still_method_compact(method, (int)o->chunk, &err)) return cli_fail_error(&err);
    int status = cli_change_method(o, method);
    if (status == CLI_OK) status = cli_allocate(o, m, method, &a);
    if (status == CLI_OK) *method = a->method;
    still_allocation_free(a);
    return status;
}

/* Within the window attention is the teacher's own: only what leaves it is learned. */
static void warn_short(const still_train_params *p)
{
    const still_method *m = &p->method;
    if (strcmp(m->name, "still") != 0 && strcmp(m->name, "lolcats") != 0) return;
    if (p->seq > 2 * m->chunk) return;
    cli_warn("--seq %d: no token leaves the window of two chunks of %d, so nothing is "
             "learned about what to keep; use more than %d, or a smaller --chunk",
             p->seq, m->chunk, 2 * m->chunk);
}

int cli_cmd_linearize(const cli_options *given)
{
    cli_options o = *given;
    job j = {.o = &o, .p = {.each = on_step, .reading = on_read, .note = on_note}};
    const char *name = o.arg[0] ? o.arg[0] : cli_default_model(&o);
    char *cache = NULL, *base = NULL;
    still_model *m = NULL;
    if (o.watch && (o.quiet || !cli_progress_columns()))
        cli_warn("no effect: --watch; %s; %s/report.html has the curves",
                 o.quiet ? "--quiet was given" : "standard error is no terminal",
                 o.out ? o.out : "DIR");
    if (!o.method) o.method = "still";
    o.no_allocate = true; /* training has its own --budget */
    j.p.user = &j;
    int status = read_options(&j, &cache);
    if (status == CLI_OK) status = cli_open_model(&o, name, &m);
    if (status == CLI_OK && still_model_get_info(m)->method) status = refuse(name);
    if (status == CLI_OK)
        status = o.budget ? allocate(&o, m, &j.p.method)
                          : cli_read_method(&o, m, &j.p.method);
    if (status == CLI_OK) warn_short(&j.p);
    if (status == CLI_OK && !(base = base_name(name)))
        status = cli_fail("out of memory");
    j.p.base_name = base;
    if (status == CLI_OK) status = run(&j, m);
    still_model_free(m);
    free(base);
    free(cache);
    for (int i = 0; i < CLI_LIST_MAX; i++) {
        free(j.name[i]);
        free(j.path[i]);
    }
    return status;
}
