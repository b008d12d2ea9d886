/* dataset_file.c - generated sets as files, so that others can run exactly these
 * samples.
 *
 * A file is JSON lines:
 *     {"format": "still-eval-1", "task", "length", "seed", "max_new", "chat", "vocab"}
 *     {"id", "prompt", "expected": [...]}       one per sample
 *     {"samples": N, "sha256": "..."}           of the lines in between, with newlines
 *
 * vocab is the size of the vocabulary in whose tokens samples were measured; a set may
 * be run with another model, for which prompts have a few tokens more or less.
 *
 * The file is read twice: once to check all of it, once for the samples. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/mem.h"
#include "base/sha256.h"
#include "eval/generated/generated.h"
#include "eval/generated/sources.h"

static const char FORMAT[] = "still-eval-1";
enum { DIGEST = STI_SHA256 };

char *sti_dataset_file_path(const char *dir, const char *task, int length)
{
    sti_buf b = {0};
    sti_buf_printf(&b, "%s/%s-%d.jsonl", dir, task, length);
    if (b.failed) sti_buf_free(&b);
    return b.p;
}

static void finish_digest(sti_sha256 *sha, char hex[2 * DIGEST + 1])
{
    unsigned char sum[DIGEST];
    sti_sha256_end(sha, sum);
    sti_hex(sum, DIGEST, hex);
}

/* ---- Writing ------------------------------------------------------------- */

typedef struct writer {
    sti_new_file *file;
    sti_sha256 sha;
    const char *path;
} writer;

/* Writes v as a line and releases it; counted: the checksum includes it. */
static still_status put_line(writer *w, json_t *v, bool counted, still_error *err)
{
    char *line = v ? sti_json_text(v, JSON_COMPACT) : NULL;
    json_decref(v);
    if (!line) return sti_fail_memory(err, w->path, 0);
    const size_t n = strlen(line);
    line[n] = '\n'; /* over its NUL */
    const still_status st = sti_new_file_put(w->file, line, n + 1, err);
    if (counted) sti_sha256_add(&w->sha, line, n + 1);
    free(line);
    return st;
}

static json_t *item_json(const sti_item *it) /* NULL: no memory */
{
    json_t *expected = json_array();
    for (int i = 0; i < it->n_expected; i++)
        sti_json_append(&expected, json_string(it->expected[i]));
    return json_pack("{s:s, s:s, s:o}", "id", it->id, "prompt", it->prompt, "expected",
                     expected);
}

static still_status put_items(writer *w, const sti_recipe *r, const sti_task_params *p,
                              sti_source *s, still_error *err)
{
    uint64_t n = 0;
    STI_TRY(
        put_line(w,
                 json_pack("{s:s, s:s, s:i, s:I, s:i, s:b, s:i}", "format", FORMAT,
                           "task", r->name, "length", p->length, "seed",
                           (json_int_t)p->seed, "max_new", r->max_new, "chat",
                           (int)r->chat, "vocab", still_tokenizer_vocab_size(p->tk)),
                 false, err));
    for (;; n++) {
        sti_item it;
        STI_TRY(sti_generated_next(s, &it, err));
        if (!it.memory) break;
        json_t *v = item_json(&it);
        sti_item_free(&it);
        STI_TRY(put_line(w, v, true, err));
    }
    char hex[2 * DIGEST + 1];
    finish_digest(&w->sha, hex);
    return put_line(w, json_pack("{s:I, s:s}", "samples", (json_int_t)n, "sha256", hex),
                    false, err);
}

static still_status write_file(const char *path, const sti_recipe *r,
                               const sti_task_params *p, sti_source *s,
                               still_error *err)
{
    writer w = {.path = path};
    sti_sha256_start(&w.sha);
    STI_TRY(sti_new_file_open(path, &w.file, err));
    const still_status st = put_items(&w, r, p, s, err);
    if (st == STILL_OK) return sti_new_file_finish(w.file, err);
    sti_new_file_abort(w.file);
    return st;
}

still_status sti_dataset_file_write(const sti_eval_task *t, const sti_task_params *p,
                                    const char *path, still_error *err)
{
    const sti_recipe *r = sti_ruler_recipe(t->name);
    if (!r) r = sti_babilong_recipe(t->name);
    if (!r)
        return sti_fail(err, STILL_E_ARG,
                        "%s: only generated tasks, RULER and BABILong, can be frozen",
                        t->name);
    sti_source *s = NULL;
    still_status status = sti_generated_open_new(r, p, &s, err);
    if (status == STILL_OK) status = write_file(path, r, p, s, err);
    sti_generated_close(s);
    return status;
}

/* ---- Reading ------------------------------------------------------------- */

struct sti_dataset_file {
    char *path;
    sti_lines *lines;
    uint64_t n;
    size_t line; /* number of the line last read */
};

static still_status check_head(const json_t *v, const sti_recipe *r,
                               const sti_task_params *p, still_error *err)
{
    const char *format, *task;
    STI_TRY(sti_field_string(v, "format", &format, err));
    STI_TRY(sti_field_string(v, "task", &task, err));
    const json_t *length = json_object_get(v, "length"),
                 *seed = json_object_get(v, "seed");
    if (strcmp(format, FORMAT) != 0)
        return sti_fail(err, STILL_E_FORMAT, "format '%s', expected '%s'", format,
                        FORMAT);
    if (strcmp(task, r->name) != 0 || !json_is_integer(length) ||
        json_integer_value(length) != p->length)
        return sti_fail(err, STILL_E_FORMAT,
                        "is a set of %s, length %lld, expected %s, length %d", task,
                        (long long)json_integer_value(length), r->name, p->length);
    if (!json_is_integer(seed) || (uint64_t)json_integer_value(seed) != p->seed)
        return sti_fail(
            err, STILL_E_ARG,
            "was made with seed %lld, %llu was asked for; move the file away "
            "to make a new set",
            (long long)json_integer_value(seed), (unsigned long long)p->seed);
    return STILL_OK;
}

static still_status check_tail(const json_t *v, uint64_t n, const char *hex,
                               still_error *err)
{
    const char *sum;
    STI_TRY(sti_field_string(v, "sha256", &sum, err));
    const json_int_t samples = json_integer_value(json_object_get(v, "samples"));
    if (samples < 0 || (uint64_t)samples != n)
        return sti_fail(err, STILL_E_FORMAT, "%llu samples in the file, %lld expected",
                        (unsigned long long)n, (long long)samples);
    if (strcmp(sum, hex) != 0)
        return sti_fail(
            err, STILL_E_FORMAT,
            "the checksum is not that of the samples: the file was changed");
    return STILL_OK;
}

/* All lines: head, samples, tail. Samples are hashed one line late, because only the
 * end of the file shows that a line was the tail. */
static still_status check_lines(sti_dataset_file *f, const sti_recipe *r,
                                const sti_task_params *p, sti_sha256 *sha,
                                sti_buf *held, still_error *err)
{
    char *line, hex[2 * DIGEST + 1];
    size_t n;
    json_t *v;
    for (f->line = 0;; f->line++) {
        STI_TRY(sti_lines_next(f->lines, &line, &n, err));
        if (!line) break;
        if (f->line == 0) {
            STI_TRY(sti_json_read_line(line, n, 0, &v, err));
            still_status status = check_head(v, r, p, err);
            json_decref(v);
            STI_TRY(status);
            continue;
        }
        if (f->line > 1) {
            sti_sha256_add(sha, held->p, held->n);
            f->n++;
        }
        sti_buf_clear(held);
        sti_buf_put(held, line, n);
        sti_buf_puts(held, "\n");
        if (held->failed) return sti_fail_memory(err, f->path, n);
    }
    if (f->line < 2)
        return sti_fail(err, STILL_E_FORMAT,
                        "ends early, expected a line with a checksum");
    f->line--;
    finish_digest(sha, hex);
    STI_TRY(sti_json_read_line(held->p, held->n, 0, &v, err));
    still_status status = check_tail(v, f->n, hex, err);
    json_decref(v);
    return status;
}

static still_status reopen(sti_dataset_file *f, still_error *err)
{
    sti_lines_close(f->lines);
    f->lines = NULL;
    f->line = 0;
    return sti_lines_open(f->path, &f->lines, err);
}

static still_status check_file(sti_dataset_file *f, const sti_recipe *r,
                               const sti_task_params *p, still_error *err)
{
    sti_buf held = {0};
    STI_TRY(reopen(f, err));
    sti_sha256 sha;
    sti_sha256_start(&sha);
    still_status status = check_lines(f, r, p, &sha, &held, err);
    sti_buf_free(&held);
    if (status != STILL_OK)
        return sti_fail_prefix(err, status, "%s:%zu", f->path, f->line + 1);
    STI_TRY(reopen(f, err));
    char *line;
    size_t n;
    f->line = 1;
    return sti_lines_next(f->lines, &line, &n, err); /* the head */
}

still_status sti_dataset_file_open(const sti_recipe *r, const sti_task_params *p,
                                   sti_dataset_file **out, still_error *err)
{
    *out = NULL;
    sti_dataset_file *f = sti_alloc(1, sizeof *f);
    if (!f || !(f->path = sti_dataset_file_path(p->data_dir, r->name, p->length))) {
        free(f);
        return sti_fail_memory(err, r->name, sizeof *f);
    }
    if (access(f->path, F_OK) != 0) {
        sti_dataset_file_close(f);
        return STILL_OK;
    }
    still_status status = check_file(f, r, p, err);
    if (status != STILL_OK)
        sti_dataset_file_close(f);
    else
        *out = f;
    return status;
}

uint64_t sti_dataset_file_count(const sti_dataset_file *f)
{
    return f->n;
}

static still_status read_sample(const json_t *v, sti_sample *out, still_error *err)
{
    const char *prompt;
    json_t *expected;
    STI_TRY(sti_field_string(v, "prompt", &prompt, err));
    STI_TRY(sti_field_array(v, "expected", &expected, err));
    if (!json_array_size(expected) || json_array_size(expected) > 1 << 16 ||
        !sti_all_strings(expected))
        return sti_fail(err, STILL_E_FORMAT,
                        "'expected' are not strings, one at least");
    sti_buf_puts(&out->prompt, prompt);
    for (size_t i = 0; i < json_array_size(expected); i++)
        sti_sample_expect(out, json_string_value(json_array_get(expected, i)));
    return STILL_OK;
}

still_status sti_dataset_file_next(sti_dataset_file *f, sti_sample *out,
                                   still_error *err)
{
    char *line;
    size_t n;
    json_t *v = NULL;
    STI_TRY(sti_lines_next(f->lines, &line, &n, err));
    f->line++;
    still_status status =
        line ? sti_json_read_line(line, n, 0, &v, err)
             : sti_fail(err, STILL_E_FORMAT, "the file became shorter");
    if (status == STILL_OK) status = read_sample(v, out, err);
    json_decref(v);
    if (status != STILL_OK) sti_fail_prefix(err, status, "%s:%zu", f->path, f->line);
    return status;
}

void sti_dataset_file_close(sti_dataset_file *f)
{
    if (!f) return;
    sti_lines_close(f->lines);
    free(f->path);
    free(f);
}
