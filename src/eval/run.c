/* run.c - still_eval_run: tasks, blocks of items, ranks.
 *
 * Items are read in order, in blocks; ranks take those that the log does not have in
 * turn. They exchange their records as text, so every rank adds up the same figures
 * in the order of the items, and rank 0 writes the log. A block is logged completely
 * or not at all, so an interrupted run loses at most one. */
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/process.h"
#include "base/sha256.h"
#include "base/sized.h"
#include "eval/eval.h"
#include "eval/generated/generated.h"
#include "train/comm.h"

/* Items per block and rank. On a CPU: what an interruption may cost. On a GPU, which
 * takes about a second for them: as many as there can be sessions. */
enum { BLOCK_RANK = 32, BLOCK_WRITE = 8, BLOCK_FAR = 255, MOST_BLOCK = 4096 };

typedef struct job {
    const still_eval_params *p;
    still_model *m;
    sti_runner runner;
    sti_comm *comm;
    sti_log *log; /* of rank 0; may be NULL */
} job;

/* One task at one length. */
typedef struct course {
    job *j;
    const sti_eval_task *task;
    sti_source *source;
    uint64_t total, asked, done;
    json_t *known; /* {id: record} of the log */
    char run[17];
    sti_item *item; /* [block] */
    json_t **record;
    int block;
    sti_tally tally;
    still_eval_result *result;
    double start;
    uint64_t fed, counted; /* of the runner when it began */
} course;

/* ---- What a run is ------------------------------------------------------- */

/* SHA-256 of a task's files in the folder; missing ones are skipped, since frozen
 * sets may replace them. */
static still_status digest_data(const sti_eval_task *t, const char *dir, char hex[65],
                                still_error *err)
{
    sti_sha256 sha;
    sti_sha256_start(&sha);
    for (const char *at = t->files ? t->files : ""; *at;) {
        const int n = (int)strcspn(at, " ");
        static const char *const end[] = {"", ".gz"};
        for (int e = 0; e < 2; e++) {
            char path[STI_PATH_ROOM];
            sti_map map;
            snprintf(path, sizeof path, "%s/%.*s%s", dir, n, at, end[e]);
            still_status st = sti_map_open(path, &map, err);
            if (st == STILL_E_MEMORY) return st;
            if (st != STILL_OK) continue;
            sti_sha256_add(&sha, map.data, map.size);
            sti_map_close(&map);
            break;
        }
        at += n;
        at += strspn(at, " ");
    }
    unsigned char digest[STI_SHA256];
    sti_sha256_end(&sha, digest);
    sti_hex(digest, STI_SHA256, hex);
    return STILL_OK;
}

/* Everything that an item's record depends on. */
static still_status describe_course(const course *c, const sti_task_params *tp,
                                    json_t **out, still_error *err)
{
    const job *j = c->j;
    unsigned char print[STI_FINGERPRINT];
    char model[2 * STI_FINGERPRINT + 1], data[65];
    sti_model_fingerprint(j->m, true, print);
    sti_hex(print, STI_FINGERPRINT, model);
    STI_TRY(digest_data(c->task, tp->data_dir, data, err));
    *out = json_pack("{s:s,s:s,s:i,s:s,s:i,s:i,s:i,s:I,s:s}", "model", model,
                     "settings", j->runner.settings, "ctx", j->runner.limit, "task",
                     c->task->name, "length", tp->length, "shots", tp->shots, "samples",
                     tp->samples, "seed", (json_int_t)tp->seed, "data", data);
    return *out ? STILL_OK : sti_fail_memory(err, "log", 0);
}

/* ---- Ranks --------------------------------------------------------------- */

/* Broadcasts the text in b from rank `root` to all ranks. */
static still_status tell(sti_comm *comm, int root, sti_buf *b, still_error *err)
{
    uint64_t n = b->n;
    STI_TRY(sti_comm_tell(comm, root, &n, sizeof n, err));
    if (sti_comm_rank(comm) == root)
        return n ? sti_comm_tell(comm, root, b->p, (size_t)n, err) : STILL_OK;
    sti_buf_free(b);
    if (n == 0) return STILL_OK;
    char *text = n < SIZE_MAX ? malloc((size_t)n + 1) : NULL;
    if (!text) return sti_fail_memory(err, "records", (size_t)n);
    *b = (sti_buf){.p = text, .n = (size_t)n, .capacity = (size_t)n + 1};
    text[n] = 0;
    return sti_comm_tell(comm, root, text, (size_t)n, err);
}

static still_status dump(const json_t *o, sti_buf *b, still_error *err)
{
    char *text = sti_json_text(o, JSON_COMPACT | JSON_REAL_PRECISION(17));
    sti_buf_clear(b);
    if (text) sti_buf_puts(b, text);
    const bool ok = text && !b->failed;
    free(text);
    return ok ? STILL_OK : sti_fail_memory(err, "records", b->n);
}

static still_status parse(const sti_buf *b, json_t **out, still_error *err)
{
    return sti_json_read("records", b->p ? b->p : "", b->n, 0, out, err);
}

/* Rank 0 reads the log; the others learn what it holds. */
static still_status begin_log(course *c, const json_t *header, still_error *err)
{
    job *j = c->j;
    still_status st = STILL_OK;
    if (sti_comm_rank(j->comm) == 0)
        st = sti_log_begin(j->log, header, c->run, &c->known, err);
    STI_TRY(sti_comm_settle(j->comm, st, err));
    STI_TRY(sti_comm_tell(j->comm, 0, c->run, sizeof c->run, err));
    if (sti_comm_size(j->comm) == 1) return STILL_OK;
    sti_buf text = {0};
    st = c->known ? dump(c->known, &text, err) : STILL_OK;
    st = sti_comm_settle(j->comm, st, err);
    if (st == STILL_OK) st = tell(j->comm, 0, &text, err);
    if (st == STILL_OK && !c->known) st = parse(&text, &c->known, err);
    sti_buf_free(&text);
    return st;
}

/* ---- A block ------------------------------------------------------------- */

static still_status read_block(course *c, int *n, still_error *err)
{
    *n = 0;
    while (*n < c->block && c->asked < c->total) {
        sti_item *it = &c->item[*n];
        STI_TRY(c->task->next(c->source, it, err));
        if (!it->memory) {
            c->total = c->asked; /* fewer than it said */
            break;
        }
        ++*n;
        c->asked++;
    }
    return STILL_OK;
}

/* Whether item i of a block, the k-th that is not known, is this rank's. */
static bool is_mine(const course *c, int k)
{
    return k % sti_comm_size(c->j->comm) == sti_comm_rank(c->j->comm);
}

/* Answers this rank's items; *text: their records, as {position in block: record}. */
static still_status answer_mine(course *c, int n, sti_buf *text, still_error *err)
{
    sti_runner *r = &c->j->runner;
    sti_item *mine = sti_alloc((size_t)n, sizeof *mine);
    sti_answer *answer = sti_alloc((size_t)n, sizeof *answer);
    int *place = sti_alloc((size_t)n, sizeof *place), count = 0;
    json_t *all = json_object();
    still_status st = STILL_OK;
    if (!mine || !answer || !place || !all)
        st = sti_fail_memory(err, "a block", (size_t)n * sizeof *mine);
    for (int i = 0, k = 0; i < n && st == STILL_OK; i++) {
        if (json_object_get(c->known, c->item[i].id)) continue;
        if (is_mine(c, k++)) {
            mine[count] = c->item[i]; /* borrowed */
            place[count++] = i;
        }
    }
    if (st == STILL_OK && count > 0)
        st = mine[0].kind == STI_ITEM_CHOICE
                 ? sti_run_loglik(r, mine, count, answer, err)
                 : sti_run_generate(r, mine, count, answer, err);
    for (int i = 0; i < count && st == STILL_OK; i++) {
        char key[16];
        snprintf(key, sizeof key, "%d", place[i]);
        sti_json_set(&all, key, sti_record_make(c->run, c->task, &mine[i], &answer[i]));
    }
    if (st == STILL_OK) st = dump(all, text, err);
    for (int i = 0; answer && i < count; i++) free(answer[i].output);
    json_decref(all);
    free(mine);
    free(answer);
    free(place);
    return st;
}

/* Stores the records of one rank at their positions. */
static still_status place_records(course *c, int n, const sti_buf *text,
                                  still_error *err)
{
    json_t *all, *record;
    const char *key;
    STI_TRY(parse(text, &all, err));
    json_object_foreach(all, key, record)
    {
        const long i = strtol(key, NULL, 10);
        if (i >= 0 && i < n && !c->record[i]) c->record[i] = json_incref(record);
    }
    json_decref(all);
    return STILL_OK;
}

static still_status exchange(course *c, int n, sti_buf *mine, still_error *err)
{
    for (int root = 0; root < sti_comm_size(c->j->comm); root++) {
        sti_buf text = {0};
        const bool own = root == sti_comm_rank(c->j->comm);
        if (own) {
            text = *mine;
            *mine = (sti_buf){0};
        }
        still_status st = tell(c->j->comm, root, &text, err);
        if (st == STILL_OK) st = place_records(c, n, &text, err);
        sti_buf_free(&text);
        STI_TRY(st);
    }
    return STILL_OK;
}

static void update_result(course *c)
{
    const sti_runner *r = &c->j->runner;
    sti_tally_result(&c->tally, c->result);
    c->result->seconds = sti_now() - c->start;
    c->result->tokens = r->fed - c->fed;
    c->result->tokens_alone = r->counted - c->counted;
}

/* Adds item i to the tally and the log. */
static still_status report(course *c, int i, still_error *err)
{
    const still_eval_params *p = c->j->p;
    const json_t *old = json_object_get(c->known, c->item[i].id);
    const json_t *record = old ? old : c->record[i];
    if (!record)
        return sti_fail(err, STILL_E_ARG, "%s: no rank answered item %s", c->task->name,
                        c->item[i].id);
    sti_tally_add(&c->tally, record);
    c->done++;
    c->result->resumed += old != NULL;
    if (sti_comm_rank(c->j->comm) != 0) return STILL_OK;
    if (!old) STI_TRY(sti_log_add(c->j->log, record, err));
    if (!p->each) return STILL_OK;
    char *text = sti_json_text(record, JSON_COMPACT | JSON_REAL_PRECISION(17));
    if (!text) return sti_fail_memory(err, "a record", 0);
    update_result(c);
    const still_eval_item item = {.record = text,
                                  .done = c->done,
                                  .total = c->total,
                                  .resumed = old != NULL,
                                  .running = c->result};
    const bool go_on = p->each(p->user, &item);
    free(text);
    if (go_on) return STILL_OK;
    return sti_fail(err, STILL_E_CANCELLED, "stopped after %llu items of %s",
                    (unsigned long long)c->done, c->task->name);
}

/* One block; *more false at the end. */
static still_status run_block(course *c, bool *more, still_error *err)
{
    int n = 0;
    sti_buf mine = {0};
    still_status st = read_block(c, &n, err);
    *more = n > 0;
    if (st == STILL_OK && n > 0) st = answer_mine(c, n, &mine, err);
    st = sti_comm_settle(c->j->comm, st, err);
    if (st == STILL_OK && n > 0) st = exchange(c, n, &mine, err);
    for (int i = 0; i < n && st == STILL_OK; i++) st = report(c, i, err);
    st = sti_comm_settle(c->j->comm, st, err);
    for (int i = 0; i < n; i++) {
        sti_item_free(&c->item[i]);
        json_decref(c->record[i]);
        c->record[i] = NULL;
    }
    sti_buf_free(&mine);
    return st;
}

/* ---- A task -------------------------------------------------------------- */

static still_status begin_course(course *c, int length, still_error *err)
{
    job *j = c->j;
    const still_eval_params *p = j->p;
    const sti_task_params tp = {.data_dir = p->data,
                                .tk = j->runner.tk,
                                .shots = p->shots == 0  ? -1
                                         : p->shots < 0 ? 0
                                                        : p->shots,
                                .length = length,
                                .samples = p->samples,
                                .seed = p->seed,
                                .ctx_limit = j->runner.limit};
    STI_TRY(c->task->open(&tp, &c->source, err));
    c->total = c->task->count(c->source);
    if (c->total == 0) c->total = UINT64_MAX;
    if (p->limit && p->limit < c->total) c->total = p->limit;
    const int per_rank = !j->m->be->host_memory ? BLOCK_FAR
                         : c->task->score       ? BLOCK_WRITE
                                                : BLOCK_RANK;
    c->block = per_rank * sti_comm_size(j->comm);
    if (c->block > MOST_BLOCK) c->block = MOST_BLOCK;
    c->item = sti_alloc((size_t)c->block, sizeof *c->item);
    c->record = sti_alloc((size_t)c->block, sizeof *c->record);
    if (!c->item || !c->record)
        return sti_fail_memory(err, "a block", (size_t)c->block * sizeof *c->item);
    json_t *header;
    STI_TRY(describe_course(c, &tp, &header, err));
    still_status st = begin_log(c, header, err);
    json_decref(header);
    return st;
}

static still_status run_course(job *j, const sti_eval_task *t, int length,
                               still_eval_result *out, still_error *err)
{
    course c = {.j = j,
                .task = t,
                .result = out,
                .start = sti_now(),
                .fed = j->runner.fed,
                .counted = j->runner.counted};
    *out = (still_eval_result){.length = length, .rank = sti_comm_rank(j->comm)};
    snprintf(out->task, sizeof out->task, "%s", t->name);
    snprintf(out->metric, sizeof out->metric, "%s", t->metric);
    still_status st = sti_comm_settle(j->comm, begin_course(&c, length, err), err);
    for (bool more = true; more && st == STILL_OK;) st = run_block(&c, &more, err);
    update_result(&c);
    if (st == STILL_OK) {
        double sum[2] = {(double)out->tokens, (double)out->tokens_alone};
        st = sti_comm_sum_doubles(j->comm, sum, 2, err);
        out->tokens = (uint64_t)sum[0];
        out->tokens_alone = (uint64_t)sum[1];
    }
    if (c.source) t->close(c.source);
    json_decref(c.known);
    free(c.item);
    free(c.record);
    return st;
}

/* How many lengths a task is to run at, and the i-th of them (0: it has none). */
static int lengths_of(const sti_eval_task *t, const still_eval_params *p)
{
    if (!t->lengths) return 1;
    int n = p->n_lengths;
    if (n == 0)
        while (t->lengths[n]) n++;
    return n;
}

static int length_at(const sti_eval_task *t, const still_eval_params *p, int i)
{
    if (!t->lengths) return 0;
    return p->n_lengths > 0 ? p->length[i] : t->lengths[i];
}

/* All lengths of a task. */
static still_status run_task(job *j, const char *name, still_eval_result *out, int cap,
                             int *n, still_error *err)
{
    const sti_eval_task *t = sti_task_find(name);
    if (!t) return sti_fail(err, STILL_E_ARG, "there is no task '%s'", name);
    for (int i = 0; i < lengths_of(t, j->p); i++) {
        if (*n == cap) return sti_fail(err, STILL_E_ARG, "more than %d results", cap);
        STI_TRY(run_course(j, t, length_at(t, j->p, i), &out[*n], err));
        ++*n;
    }
    return STILL_OK;
}

static still_status run_all(job *j, still_eval_result *out, int cap, int *n,
                            still_error *err)
{
    const still_eval_params *p = j->p;
    for (int i = 0; i < p->n_tasks; i++) /* check all names before anything runs */
        if (!sti_task_find(p->task[i]))
            return sti_fail(err, STILL_E_ARG, "there is no task '%s'", p->task[i]);
    still_status st = sti_runner_open(j->m, p->session, &j->runner, err);
    j->runner.recompute = p->recompute;
    j->runner.poll = p->poll;
    j->runner.user = p->user;
    if (st == STILL_OK && sti_comm_rank(j->comm) == 0)
        st = sti_log_open(p->log, &j->log, err);
    STI_TRY(sti_comm_settle(j->comm, st, err));
    for (int i = 0; i < p->n_tasks; i++)
        STI_TRY(run_task(j, p->task[i], out, cap, n, err));
    return STILL_OK;
}

still_status still_eval_run(still_model *m, const still_eval_params *params,
                            still_eval_result *out, int cap, int *n, still_error *err)
{
    *n = 0;
    still_eval_params own;
    const still_eval_params *p = &own;
    STI_TRY(STI_TAKE(&own, params, still_eval_params, err));
    if (!p->data || p->n_tasks < 1)
        return sti_fail(err, STILL_E_ARG,
                        "an evaluation needs tasks and a data folder");
    job j = {.p = p, .m = m};
    STI_TRY(sti_comm_new(&j.comm, err));
    const still_status st = run_all(&j, out, cap, n, err);
    if (st != STILL_OK) {
        const int failed = sti_comm_failed_rank(j.comm), rank = sti_comm_rank(j.comm);
        if (failed < 0)
            sti_comm_fail(j.comm); /* the others do not know */
        else if (failed != rank && err)
            err->text[0] = 0;
    }
    sti_log_close(j.log);
    sti_runner_close(&j.runner);
    sti_comm_free(j.comm);
    return st;
}

still_status still_eval_write_datasets(const still_model *m,
                                       const still_eval_params *params, const char *dir,
                                       still_error *err)
{
    still_eval_params own;
    const still_eval_params *p = &own;
    STI_TRY(STI_TAKE(&own, params, still_eval_params, err));
    for (int i = 0; i < p->n_tasks; i++) {
        const sti_eval_task *t = sti_task_find(p->task[i]);
        if (!t) return sti_fail(err, STILL_E_ARG, "there is no task '%s'", p->task[i]);
        if (!t->lengths)
            return sti_fail(
                err, STILL_E_ARG,
                "task %s reads its questions from files: there is nothing to "
                "freeze",
                t->name);
        for (int k = 0; k < lengths_of(t, p); k++) {
            const sti_task_params tp = {.data_dir = p->data,
                                        .tk = still_model_tokenizer(m),
                                        .shots = -1,
                                        .length = length_at(t, p, k),
                                        .samples = p->samples,
                                        .seed = p->seed,
                                        .ctx_limit =
                                            still_model_get_info(m)->ctx_train};
            char *path = sti_dataset_file_path(dir, t->name, tp.length);
            if (!path) return sti_fail_memory(err, dir, 0);
            const still_status st = sti_dataset_file_write(t, &tp, path, err);
            free(path);
            STI_TRY(st);
        }
    }
    return STILL_OK;
}

const char *still_eval_task_at(int i, const char **summary, const char **files,
                               const int **lengths)
{
    const sti_eval_task *t = i < 0 ? NULL : sti_task_at(i);
    if (t && summary) *summary = t->summary;
    if (t && files) *files = t->files;
    if (t && lengths) *lengths = t->lengths;
    return t ? t->name : NULL;
}
