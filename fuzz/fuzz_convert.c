/* fuzz_convert.c - published data sets into our files. The first byte chooses a converter,
 * the rest is a text of the set: the file itself, or what every entry of its archive holds
 * (zip and tar have targets of their own; here they only hand out the text). What is behind
 * the first byte FF is a second text, the labels of PIQA.
 *
 * Each record that is made must be a JSON object on a line, with its number. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "cli/cli.h"
#include "cli/data/convert.h"
#include "cli/data/tar.h"
#include "cli/data/zip.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static sti_buf text[2];

/* ---- Where texts come from ----------------------------------------------- */

bool cli_interrupted(void)
{
    return false;
}

still_status cli_read(const char *path, size_t cap, char **out, size_t *n,
                      still_error *err)
{
    (void)path, (void)cap;
    *n = text[0].n;
    *out = sti_strndup(text[0].n ? text[0].p : "", text[0].n);
    if (*out && text[0].n) memcpy(*out, text[0].p, text[0].n); /* also behind a NUL */
    return *out ? STILL_OK : sti_fail_memory(err, "text", *n);
}

struct cli_zip {
    int unused;
};
static cli_zip zip;

still_status cli_zip_open(const char *what, uint64_t size, cli_read_at read, void *user,
                          cli_zip **out, still_error *err)
{
    (void)what, (void)size, (void)read, (void)user, (void)err;
    *out = &zip;
    return STILL_OK;
}

void cli_zip_close(cli_zip *z)
{
    (void)z;
}

still_status cli_zip_find(const cli_zip *z, const char *tail, size_t *out,
                          still_error *err)
{
    (void)z, (void)err;
    *out = strstr(tail, ".lst") != NULL;
    return STILL_OK;
}

still_status cli_zip_read(const cli_zip *z, size_t entry, uint64_t most, sti_buf *out,
                          still_error *err)
{
    (void)z, (void)most, (void)err;
    sti_buf_put(out, text[entry].n ? text[entry].p : "", text[entry].n);
    return STILL_OK;
}

struct cli_tar {
    size_t entry, at;
};
static cli_tar tar;

still_status cli_tar_open(const char *path, cli_tar **out, still_error *err)
{
    (void)path, (void)err;
    tar = (cli_tar){0};
    *out = &tar;
    return STILL_OK;
}

void cli_tar_close(cli_tar *t)
{
    (void)t;
}

still_status cli_tar_next(cli_tar *t, cli_tar_entry *e, bool *more, still_error *err)
{
    static const char *const name[] = {
        "data/test/b_test.csv",    "data/dev/a_dev.csv",
        "data/val/a_val.csv",      "data/test/a_test.csv",
        "t/en-10k/qa1_x_test.txt", "t/en-10k/qa2_x_test.txt",
        "t/en-10k/qa3_x_test.txt", "t/en-10k/qa4_x_test.txt",
        "t/en-10k/qa5_x_test.txt"};
    (void)err;
    *more = t->entry < sizeof name / sizeof *name;
    *e = (cli_tar_entry){.size = text[0].n, .plain = true};
    if (*more) snprintf(e->name, sizeof e->name, "%s", name[t->entry++]);
    t->at = 0;
    return STILL_OK;
}

still_status cli_tar_read(cli_tar *t, void *p, size_t n, size_t *got, still_error *err)
{
    (void)err;
    *got = text[0].n - t->at < n ? text[0].n - t->at : n;
    if (*got) memcpy(p, text[0].p + t->at, *got);
    t->at += *got;
    return STILL_OK;
}

/* ---- Where files go ------------------------------------------------------ */

struct sti_new_file {
    sti_buf text;
    bool records; /* not words */
};

still_status sti_new_file_open(const char *path, sti_new_file **out, still_error *err)
{
    *out = sti_alloc(1, sizeof **out);
    if (!*out) return sti_fail_memory(err, path, 1);
    (*out)->records = strstr(path, ".jsonl") != NULL;
    return STILL_OK;
}

still_status sti_new_file_put(sti_new_file *f, const void *p, size_t n,
                              still_error *err)
{
    (void)err;
    sti_buf_put(&f->text, p, n);
    return STILL_OK;
}

void sti_new_file_abort(sti_new_file *f)
{
    if (f) sti_buf_free(&f->text);
    free(f);
}

static void check_records(const sti_buf *b)
{
    json_int_t number = 0;
    for (const char *p = b->p, *end = b->p + b->n; p < end; number++) {
        const char *newline = memchr(p, '\n', (size_t)(end - p));
        json_t *v;
        if (!newline ||
            sti_json_read_line(p, (size_t)(newline - p), STI_JSON_OBJECT, &v, NULL))
            abort();
        if (json_integer_value(json_object_get(v, "index")) != number) abort();
        json_decref(v);
        p = newline + 1;
    }
}

still_status sti_new_file_finish(sti_new_file *f, still_error *err)
{
    (void)err;
    if (!f->text.n) abort();
    if (f->records) check_records(&f->text);
    sti_new_file_abort(f);
    return STILL_OK;
}

/* -------------------------------------------------------------------------- */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const char *const name[] = {
        "piqa",  "arc",      "hellaswag", "winogrande", "mmlu",  "lambada", "wikitext2",
        "squad", "hotpotqa", "essays",    "babi",       "books", "alpaca",  "words"};
    static const char *const file[] = {"null", "null"};
    if (n < 1) return 0;
    const cli_converter *c =
        cli_converter_find(name[data[0] % (sizeof name / sizeof *name)]);
    const uint8_t *second = memchr(data + 1, 0xff, n - 1), *end = data + n;
    sti_buf_put(&text[0], data + 1, (size_t)((second ? second : end) - data - 1));
    if (second) sti_buf_put(&text[1], second + 1, (size_t)(end - second - 1));
    still_error err = {0};
    cli_make m;
    if (cli_convert(c, "/dev", file, c->files ? c->files : 2, "to", &m, &err) !=
            STILL_OK &&
        !err.text[0])
        abort();
    sti_buf_free(&text[0]);
    sti_buf_free(&text[1]);
    return 0;
}
