/* eval.c - still eval: models and methods as columns, tasks and lengths as rows. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/error.h"
#include "base/mem.h"
#include "cli/fetch/cache.h"
#include "cli/near.h"
#include "cli/progress.h"
#include "cli/run.h"

enum { MOST_TASKS = 64, MOST_LENGTHS = 16, MOST_COLUMNS = 64, MOST_ROWS = 512 };

/* Tasks [first, first + n) of the list: consecutive ones with the same lengths and
 * limit. */
typedef struct group {
    int first, n;
    int length[MOST_LENGTHS], n_lengths;
    uint64_t limit;
} group;

typedef struct column {
    const char *name; /* of the model, as it was given */
    char method[16];
    char title[96];         /* of the table: the last part of a path, and the method */
    still_eval_result *row; /* [n_rows] */
    int n_rows;
} column;

typedef struct job {
    const cli_options *o;
    const char *task[MOST_TASKS];
    int n_tasks;
    group group[MOST_TASKS];
    int n_groups;
    const char *method[CLI_LIST_MAX]; /* NULL: as the options say */
    int n_methods;
    char *method_text, *data;
    column column[MOST_COLUMNS];
    int n_columns;
    /* progress */
    cli_progress bar;
    char at[64]; /* task and length the bar is for */
    int rank;
} job;

/* ---- Options ------------------------------------------------------------- */

static int list_tasks(const cli_options *o)
{
    const char *name, *summary, *files;
    json_t *list = json_array();
    for (int i = 0; (name = still_eval_task_at(i, &summary, &files, NULL)); i++) {
        if (!o->json) cli_print("%-18s %s (%s)\n", name, summary, files ? files : "");
        sti_json_append(&list, json_pack("{s:s,s:s,s:s}", "task", name, "summary",
                                         summary, "files", files ? files : ""));
    }
    if (o->json) return cli_print_json(json_pack("{s:o}", "tasks", list));
    json_decref(list);
    return CLI_OK;
}

/* Adds the task of that name, or all that begin with it and a '_'. at_lengths: the
 * entry gives lengths, so each task must have lengths. */
static int add_tasks(job *j, const char *word, bool at_lengths)
{
    const char *name;
    const int *lengths;
    const size_t n = strlen(word);
    int found = 0;
    for (int i = 0; (name = still_eval_task_at(i, NULL, NULL, &lengths)); i++) {
        if (strncmp(name, word, n) != 0 ||
            (name[n] && name[n] != '_' && word[n - 1] != '_'))
            continue;
        if (at_lengths && !lengths)
            return cli_usage("eval", "--tasks: %s has no lengths; leave out the @",
                             name);
        if (j->n_tasks == MOST_TASKS)
            return cli_usage("eval", "--tasks: more than %d tasks", MOST_TASKS);
        j->task[j->n_tasks++] = name;
        found++;
    }
    if (found) return CLI_OK;
    cli_near near = {0};
    for (int i = 0; (name = still_eval_task_at(i, NULL, NULL, NULL)); i++)
        cli_near_consider(&near, word, name);
    if (near.name)
        return cli_usage("eval", "--tasks: there is no task '%s', did you mean %s?",
                         word, near.name);
    return cli_usage("eval", "--tasks: there is no task '%s'; `still eval` lists them",
                     word);
}

static bool same_group(const group *a, const group *b)
{
    return a->limit == b->limit && a->n_lengths == b->n_lengths &&
           memcmp(a->length, b->length, sizeof a->length) == 0;
}

/* An entry of --tasks: NAME, NAME@LENGTH+LENGTH, NAME=LIMIT or NAME@LENGTH=LIMIT. The
 * rest comes from `usual`. */
static int read_entry(job *j, char *entry, const group *usual)
{
    group g = *usual;
    char *limit = strchr(entry, '='), *lengths;
    if (limit) {
        char *end;
        *limit++ = 0;
        const long long n = strtoll(limit, &end, 10); /* saturates */
        if (end == limit || *end || n < 1)
            return cli_usage("eval", "--tasks: '%s' is not a number of questions",
                             limit);
        g.limit = (uint64_t)n;
    }
    lengths = strchr(entry, '@');
    if (lengths) {
        *lengths++ = 0;
        if (!*lengths)
            return cli_usage("eval", "--tasks: '%s@' names no length", entry);
        for (char *c = lengths; *c; c++)
            if (*c == '+') *c = ',';
        memset(g.length, 0, sizeof g.length);
        int status =
            cli_read_lengths("eval", lengths, g.length, MOST_LENGTHS, &g.n_lengths);
        if (status != CLI_OK) return status;
    }
    g.first = j->n_tasks;
    if (!*entry) return cli_usage("eval", "--tasks: an entry has no name");
    int status = add_tasks(j, entry, lengths != NULL);
    if (status != CLI_OK) return status;
    g.n = j->n_tasks - g.first;
    group *last = j->n_groups ? &j->group[j->n_groups - 1] : NULL;
    if (last && same_group(last, &g))
        last->n += g.n;
    else
        j->group[j->n_groups++] = g;
    return CLI_OK;
}

static int read_tasks(job *j)
{
    group usual = {.limit = (uint64_t)j->o->limit};
    int status = cli_read_lengths("eval", j->o->lengths, usual.length, MOST_LENGTHS,
                                  &usual.n_lengths);
    char *text = sti_strdup(j->o->tasks), *rest = text, *entry;
    if (!text) return cli_fail("out of memory");
    while (status == CLI_OK && (entry = strsep(&rest, ",")))
        if (*entry) status = read_entry(j, entry, &usual);
    free(text);
    if (status == CLI_OK && j->n_tasks == 0)
        status = cli_usage("eval", "--tasks: the list is empty");
    return status;
}

static int read_methods(job *j)
{
    j->n_methods = 1; /* the method of the options */
    if (!j->o->against) return CLI_OK;
    j->method_text = sti_strdup(j->o->against);
    if (!j->method_text) return cli_fail("out of memory");
    char *rest = j->method_text, *word;
    while ((word = strsep(&rest, ","))) {
        if (!*word) continue;
        if (!cli_is_method(word) || j->n_methods == CLI_LIST_MAX)
            return cli_usage("eval", "--against: '%s' is not a method", word);
        j->method[j->n_methods++] = word;
    }
    return CLI_OK;
}

static int read_options(job *j)
{
    still_error err;
    int status = read_tasks(j);
    if (status == CLI_OK) status = read_methods(j);
    if (status != CLI_OK) return status;
    if (j->o->data_dir)
        j->data = sti_strdup(j->o->data_dir);
    else if (cli_cache_place("data", "", &j->data, &err))
        return cli_fail_error(&err);
    return j->data ? CLI_OK : cli_fail("out of memory");
}

/* ---- Progress ------------------------------------------------------------ */

static bool on_item(void *user, const still_eval_item *item)
{
    job *j = user;
    const still_eval_result *r = item->running;
    char at[64];
    if (r->length)
        snprintf(at, sizeof at, "%s %d", r->task, r->length);
    else
        snprintf(at, sizeof at, "%s", r->task);
    if (strcmp(at, j->at) != 0) {
        cli_progress_end(&j->bar);
        memcpy(j->at, at, sizeof at);
        cli_progress_begin(&j->bar, j->o->quiet, j->at, "items", item->done - 1,
                           item->total == UINT64_MAX ? 0 : item->total);
        j->bar.start -= r->seconds;
    }
    const bool norm = strcmp(r->metric, "acc_norm") == 0;
    snprintf(j->bar.note, sizeof j->bar.note, "%s %.2f", r->metric,
             100 * (norm ? r->acc_norm : r->acc));
    cli_progress_update(&j->bar, item->done);
    return !cli_interrupted();
}

static bool on_poll(void *user)
{
    (void)user;
    return !cli_interrupted();
}

/* ---- Results ------------------------------------------------------------- */

static json_t *figures(const still_eval_result *r)
{
    json_t *o = json_object();
    const bool norm = strcmp(r->metric, "acc_norm") == 0;
    sti_json_set_real(&o, "acc", r->acc);
    sti_json_set_real(&o, "acc_norm", r->acc_norm);
    sti_json_set(&o, "n", json_integer((json_int_t)r->n));
    sti_json_set_real(&o, "stderr", norm ? r->acc_norm_stderr : r->acc_stderr);
    sti_json_set_real(&o, "acc_stderr", r->acc_stderr);
    sti_json_set_real(&o, "acc_norm_stderr", r->acc_norm_stderr);
    sti_json_set_real(&o, "perplexity", r->perplexity);
    sti_json_set(&o, "metric", json_string(r->metric));
    if (r->length) sti_json_set(&o, "length", json_integer(r->length));
    sti_json_set(&o, "cut", json_integer((json_int_t)r->cut));
    sti_json_set(&o, "plain", json_integer((json_int_t)r->plain));
    sti_json_set(&o, "resumed", json_integer((json_int_t)r->resumed));
    sti_json_set(&o, "tokens", json_integer((json_int_t)r->tokens));
    sti_json_set(&o, "tokens_alone", json_integer((json_int_t)r->tokens_alone));
    sti_json_set_real(&o, "seconds", r->seconds);
    return o;
}

/* A task with several lengths: the mean over them, and each by itself. */
static json_t *over_lengths(const still_eval_result *r, int n)
{
    if (n == 1) return figures(r);
    json_t *by = json_object();
    double sum = 0, squares = 0;
    uint64_t count = 0;
    for (int i = 0; i < n; i++) {
        char key[16];
        snprintf(key, sizeof key, "%d", r[i].length);
        sti_json_set(&by, key, figures(&r[i]));
        sum += r[i].acc;
        squares += r[i].acc_stderr * r[i].acc_stderr;
        count += r[i].n;
    }
    json_t *o = json_object();
    sti_json_set_real(&o, "acc", sum / n);
    sti_json_set(&o, "n", json_integer((json_int_t)count));
    sti_json_set_real(&o, "stderr", sqrt(squares) / n);
    sti_json_set(&o, "metric", json_string(r->metric));
    sti_json_set(&o, "lengths", by);
    return o;
}

static json_t *column_json(const column *c)
{
    json_t *results = json_object();
    for (int i = 0, n; i < c->n_rows; i += n) {
        for (n = 1; i + n < c->n_rows && !strcmp(c->row[i + n].task, c->row[i].task);)
            n++;
        sti_json_set(&results, c->row[i].task, over_lengths(&c->row[i], n));
    }
    return json_pack("{s:s,s:s,s:o}", "model", c->name, "method", c->method, "results",
                     results);
}

static int print_json(const job *j)
{
    if (j->n_columns == 1) return cli_print_json(column_json(&j->column[0]));
    json_t *list = json_array();
    for (int i = 0; i < j->n_columns; i++)
        sti_json_append(&list, column_json(&j->column[i]));
    return cli_print_json(list);
}

static void print_table(const job *j)
{
    const column *first = &j->column[0];
    cli_print("| task | length | metric | n |");
    for (int i = 0; i < j->n_columns; i++) cli_print(" %s |", j->column[i].title);
    cli_print("\n|---|---:|---|---:|");
    for (int i = 0; i < j->n_columns; i++) cli_print("---:|");
    cli_print("\n");
    for (int k = 0; k < first->n_rows; k++) {
        const still_eval_result *r = &first->row[k];
        const bool norm = strcmp(r->metric, "acc_norm") == 0;
        cli_print("| %s | ", r->task);
        if (r->length) cli_print("%d", r->length);
        cli_print(" | %s | %llu |", r->metric, (unsigned long long)r->n);
        for (int i = 0; i < j->n_columns; i++) {
            if (k >= j->column[i].n_rows) {
                cli_print(" |");
                continue;
            }
            const still_eval_result *x = &j->column[i].row[k];
            const double value = norm ? x->acc_norm : x->acc,
                         error = norm ? x->acc_norm_stderr : x->acc_stderr;
            cli_print(" %.2f", 100 * value);
            if (isfinite(error)) cli_print(" ± %.2f", 100 * error);
            if (isfinite(x->perplexity)) cli_print(" (ppl %.2f)", x->perplexity);
            cli_print(" |");
        }
        cli_print("\n");
    }
}

/* Warnings about the figures, on standard error. */
static void print_remarks(const column *c)
{
    for (int i = 0; i < c->n_rows; i++) {
        const still_eval_result *r = &c->row[i];
        if (r->cut)
            cli_warn("%s, %s: %llu of %llu items were longer than the context; their "
                     "beginnings were left out",
                     c->title, r->task, (unsigned long long)r->cut,
                     (unsigned long long)r->n);
        if (r->plain)
            cli_warn(
                "%s, %s: the model has no chat template; the prompts were given as "
                "plain text",
                c->title, r->task);
    }
}

/* ---- The command --------------------------------------------------------- */

static void set_title(column *c, bool with_method)
{
    const char *slash = strrchr(c->name, '/');
    const char *base = slash && slash[1] ? slash + 1 : c->name;
    snprintf(c->title, sizeof c->title, "%.70s%s%s", base, with_method ? " " : "",
             with_method ? c->method : "");
}

/* Results of one model with one method. */
static int run_column(job *j, still_model *m, const char *name, const char *method_name)
{
    still_error err;
    still_method method;
    cli_options o = *j->o;
    if (method_name) o.method = method_name;
    int status = cli_read_method(&o, m, &method);
    if (status != CLI_OK) return status;
    column *c = &j->column[j->n_columns];
    c->row = sti_alloc(MOST_ROWS, sizeof *c->row);
    if (!c->row) return cli_fail("out of memory");
    j->n_columns++;
    c->name = name;
    memcpy(c->method, method.name, sizeof c->method);
    set_title(c, j->n_methods > 1 || strcmp(method.name, "softmax") != 0);
    const still_session_params session = {.size = sizeof session,
                                          .ctx = (int)o.ctx,
                                          .batch = (int)o.batch,
                                          .cache = o.cache,
                                          .method = &method};
    still_status st = STILL_OK;
    j->at[0] = 0;
    for (int i = 0; i < j->n_groups && st == STILL_OK; i++) {
        const group *g = &j->group[i];
        const still_eval_params p = {.size = sizeof p,
                                     .task = j->task + g->first,
                                     .n_tasks = g->n,
                                     .data = j->data,
                                     .session = &session,
                                     .limit = g->limit,
                                     .length = g->length,
                                     .n_lengths = g->n_lengths,
                                     .samples = (int)o.samples,
                                     .seed = o.seed,
                                     .shots = o.shots < 0    ? 0
                                              : o.shots == 0 ? -1
                                                             : (int)o.shots,
                                     .recompute = o.no_fork,
                                     .log = o.log,
                                     .each = on_item,
                                     .poll = on_poll,
                                     .user = j};
        int n = 0;
        st = still_eval_run(m, &p, c->row + c->n_rows, MOST_ROWS - c->n_rows, &n, &err);
        c->n_rows += n;
    }
    cli_progress_end(&j->bar);
    if (c->n_rows) j->rank = c->row[0].rank;
    if (st == STILL_E_CANCELLED) {
        if (o.log && *err.text)
            cli_note("still: stopped; the same command goes on from %s\n", o.log);
        return CLI_INTERRUPTED;
    }
    /* An error without text is reported by another rank. */
    if (st != STILL_OK) return *err.text ? cli_fail("%s", err.text) : CLI_FAILED;
    if (j->rank == 0) print_remarks(c);
    return CLI_OK;
}

/* --freeze: writes sets to files instead of running them. */
static int write_datasets(const job *j, const char *name)
{
    still_error err;
    still_model *m = NULL;
    const still_tokenizer *tk;
    const cli_options *o = j->o;
    int status = cli_open_model(o, name, &m);
    if (status == CLI_OK) status = cli_need_tokenizer(m, &tk);
    if (status == CLI_OK && cli_make_folders(o->freeze, &err))
        status = cli_fail_error(&err);
    for (int i = 0; i < j->n_groups && status == CLI_OK; i++) {
        const group *g = &j->group[i];
        const still_eval_params p = {.size = sizeof p,
                                     .task = j->task + g->first,
                                     .n_tasks = g->n,
                                     .data = j->data,
                                     .length = g->length,
                                     .n_lengths = g->n_lengths,
                                     .samples = (int)o->samples,
                                     .seed = o->seed};
        if (still_eval_write_datasets(m, &p, o->freeze, &err))
            status = cli_fail_error(&err);
    }
    if (status == CLI_OK && o->json)
        status = cli_print_json(json_pack("{s:s}", "frozen", o->freeze));
    else if (status == CLI_OK)
        cli_print("the sets are in %s: ask them with --data %s\n", o->freeze,
                  o->freeze);
    still_model_free(m);
    return status;
}

static int run_model(job *j, const char *name)
{
    still_model *m = NULL;
    int status = cli_open_model(j->o, name, &m);
    for (int i = 0; i < j->n_methods && status == CLI_OK; i++)
        status = run_column(j, m, name, j->method[i]);
    still_model_free(m);
    return status;
}

int cli_cmd_eval(const cli_options *o)
{
    if (!o->tasks)
        return o->n_args ? cli_usage("eval", "'eval' needs --tasks LIST")
                         : list_tasks(o);
    job j = {.o = o};
    int status = read_options(&j);
    const int models = o->n_args ? o->n_args : 1;
    if (status == CLI_OK && models * j.n_methods > MOST_COLUMNS)
        status = cli_usage("eval", "more than %d columns", MOST_COLUMNS);
    if (status == CLI_OK && o->freeze)
        status = write_datasets(&j, o->n_args ? o->arg[0] : cli_default_model(o));
    for (int i = 0; i < models && status == CLI_OK && !o->freeze; i++)
        status = run_model(&j, o->n_args ? o->arg[i] : cli_default_model(o));
    if (status == CLI_OK && j.rank == 0 && !o->freeze) {
        if (o->json)
            status = print_json(&j);
        else
            print_table(&j);
    }
    for (int i = 0; i < j.n_columns; i++) free(j.column[i].row);
    free(j.method_text);
    free(j.data);
    return status;
}
