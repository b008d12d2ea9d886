/* convert.c - see convert.h: what all converters share. */
#include "cli/data/convert.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/utf8.h"
#include "cli/cli.h"
#include "cli/data/zip.h"

/* Of a published text. The largest, the training text of WikiText-2 and HotpotQA, have 11
 * and 46 MB. */
static const uint64_t MOST_TEXT = (uint64_t)256 << 20;

const cli_converter *cli_converter_find(const char *name)
{
    static const cli_converter *const tables[] = {
        cli_convert_choice, cli_convert_question, cli_convert_text};
    for (size_t t = 0; t < sizeof tables / sizeof *tables; t++)
        for (const cli_converter *c = tables[t]; c->name; c++)
            if (!strcmp(c->name, name)) return c;
    return NULL;
}

/* ---- Published files ----------------------------------------------------- */

char *cli_make_path(const cli_make *m, size_t i)
{
    sti_buf b = {0};
    sti_buf_printf(&b, "%s/%s", m->folder, m->file[i]);
    if (b.failed) sti_buf_free(&b);
    return b.p;
}

still_status cli_make_read(const cli_make *m, size_t i, sti_buf *out, still_error *err)
{
    char *path = cli_make_path(m, i), *text = NULL;
    size_t n = 0;
    if (!path) return sti_fail_memory(err, m->file[i], 0);
    const still_status st = cli_read(path, (size_t)MOST_TEXT, &text, &n, err);
    if (st == STILL_OK) *out = (sti_buf){.p = text, .n = n, .capacity = n + 1};
    free(path);
    return st;
}

static still_status read_at(void *user, uint64_t at, void *p, size_t n,
                            still_error *err)
{
    FILE *f = user;
    if (fseeko(f, (off_t)at, SEEK_SET) == 0 && fread(p, 1, n, f) == n) return STILL_OK;
    return sti_fail(err, STILL_E_IO, "an archive cannot be read");
}

static still_status unzip(const char *path, FILE *f, const char *tail, sti_buf *out,
                          still_error *err)
{
    struct stat info;
    cli_zip *z = NULL;
    size_t entry = 0;
    if (fstat(fileno(f), &info))
        return sti_fail(err, STILL_E_IO, "%s: cannot be read", path);
    still_status st = cli_zip_open(path, (uint64_t)info.st_size, read_at, f, &z, err);
    if (st == STILL_OK) st = cli_zip_find(z, tail, &entry, err);
    if (st == STILL_OK) st = cli_zip_read(z, entry, MOST_TEXT, out, err);
    cli_zip_close(z);
    return st;
}

/* FOLDER/ARCHIVE.PART: a part that was fetched without the rest. *here: it is there. */
static still_status read_part(const cli_make *m, size_t i, const char *tail,
                              sti_buf *out, bool *here, still_error *err)
{
    sti_buf path = {0};
    char *text = NULL;
    size_t n = 0;
    sti_buf_printf(&path, "%s/%s.%s", m->folder, m->file[i], tail);
    *here = !path.failed && !strchr(tail, '/') && access(path.p, F_OK) == 0;
    const still_status st =
        *here ? cli_read(path.p, (size_t)MOST_TEXT, &text, &n, err) : STILL_OK;
    if (*here && st == STILL_OK) *out = (sti_buf){.p = text, .n = n, .capacity = n + 1};
    sti_buf_free(&path);
    return st;
}

still_status cli_make_unzip(const cli_make *m, size_t i, const char *tail, sti_buf *out,
                            still_error *err)
{
    bool here;
    STI_TRY(read_part(m, i, tail, out, &here, err));
    if (here) return STILL_OK;
    char *path = cli_make_path(m, i);
    if (!path) return sti_fail_memory(err, m->file[i], 0);
    FILE *f = fopen(path, "rb");
    const still_status st = f ? unzip(path, f, tail, out, err)
                              : sti_fail(err, STILL_E_IO, "%s: cannot be opened", path);
    if (f) fclose(f);
    free(path);
    return st;
}

/* ---- What is made -------------------------------------------------------- */

still_status cli_make_put_text(cli_make *m, int k, const char *p, size_t n,
                               still_error *err)
{
    STI_TRY(sti_new_file_put(m->out[k].file, p, n, err));
    m->out[k].bytes += n;
    return STILL_OK;
}

still_status cli_make_put(cli_make *m, int k, json_t *v, still_error *err)
{
    char *text = v ? sti_json_text(v, JSON_COMPACT) : NULL;
    json_decref(v);
    if (!text) return sti_fail_memory(err, m->out[k].name, 0);
    still_status st = cli_make_put_text(m, k, text, strlen(text), err);
    if (st == STILL_OK) st = cli_make_put_text(m, k, "\n", 1, err);
    free(text);
    m->out[k].records++;
    if (st == STILL_OK && cli_interrupted())
        st = sti_fail(err, STILL_E_CANCELLED, "interrupted");
    return st;
}

json_int_t cli_make_index(const cli_make *m, int k)
{
    return (json_int_t)m->out[k].records;
}

static still_status open_outputs(cli_make *m, const cli_converter *c, const char *to,
                                 still_error *err)
{
    for (int k = 0; k < CLI_MAKES && c->makes[k]; k++) {
        sti_buf path = {0};
        sti_buf_printf(&path, "%s/%s", to, c->makes[k]);
        m->out[k].name = c->makes[k];
        const still_status st = path.failed
                                    ? sti_fail_memory(err, to, 0)
                                    : sti_new_file_open(path.p, &m->out[k].file, err);
        sti_buf_free(&path);
        if (st != STILL_OK) return st;
    }
    return STILL_OK;
}

/* Each file must have got something: an archive of empty files is a wrong one. */
static still_status close_outputs(cli_make *m, still_status st, still_error *err)
{
    for (int k = 0; k < CLI_MAKES && m->out[k].name && st == STILL_OK; k++)
        if (m->out[k].bytes == 0)
            st = sti_fail(err, STILL_E_FORMAT, "%s/%s: has no records for %s",
                          m->folder, m->file[0], m->out[k].name);
    for (int k = 0; k < CLI_MAKES && m->out[k].name; k++) {
        if (st == STILL_OK)
            st = sti_new_file_finish(m->out[k].file, err);
        else
            sti_new_file_abort(m->out[k].file);
        m->out[k].file = NULL;
    }
    return st;
}

still_status cli_convert(const cli_converter *c, const char *folder,
                         const char *const *file, size_t n, const char *to, cli_make *m,
                         still_error *err)
{
    *m = (cli_make){.folder = folder, .file = file, .n = n};
    still_status st = open_outputs(m, c, to, err);
    if (st == STILL_OK) st = c->run(m, err);
    return close_outputs(m, st, err);
}

/* ---- Lines and fields ---------------------------------------------------- */

void cli_lines_open(cli_lines *l, const char *what, const sti_buf *text)
{
    const char *p = text->n ? text->p : "";
    *l = (cli_lines){.what = what, .unit = "", .p = p, .end = p + text->n};
}

bool cli_lines_next(cli_lines *l)
{
    if (l->p == l->end) return false;
    const char *newline = memchr(l->p, '\n', (size_t)(l->end - l->p));
    const char *stop = newline ? newline : l->end;
    l->line = l->p;
    l->n = (size_t)(stop - l->p);
    if (l->n && l->line[l->n - 1] == '\r') l->n--;
    l->p = newline ? newline + 1 : l->end;
    l->number++;
    return true;
}

still_status cli_lines_bad(const cli_lines *l, const char *why, still_error *err)
{
    return sti_fail(err, STILL_E_FORMAT, "%s:%s%zu: %s", l->what, l->unit, l->number,
                    why);
}

still_status cli_lines_json(const cli_lines *l, json_t **out, still_error *err)
{
    *out = NULL;
    size_t n = l->n;
    while (n && strchr(" \t", l->line[n - 1])) n--;
    if (n == 0) return STILL_OK;
    const still_status st = sti_json_read_line(l->line, n, STI_JSON_OBJECT, out, err);
    if (st != STILL_OK) sti_fail_prefix(err, st, "%s:%zu", l->what, l->number);
    return st;
}

still_status cli_field_text(const cli_lines *l, const json_t *v, const char *key,
                            const char **out, still_error *err)
{
    *out = json_string_value(json_object_get(v, key));
    if (*out) return STILL_OK;
    return sti_fail(err, STILL_E_FORMAT, "%s:%s%zu: \"%s\" is not a text", l->what,
                    l->unit, l->number, key);
}

still_status cli_field_texts(const cli_lines *l, const json_t *v, const char *key,
                             json_t **out, still_error *err)
{
    *out = json_object_get(v, key);
    bool all = json_is_array(*out);
    for (size_t i = 0; all && i < json_array_size(*out); i++)
        all = json_is_string(json_array_get(*out, i));
    if (all) return STILL_OK;
    return sti_fail(err, STILL_E_FORMAT, "%s:%s%zu: \"%s\" is not a list of texts",
                    l->what, l->unit, l->number, key);
}

static char peek(const sti_buf *text, size_t *at)
{
    while (*at < text->n && strchr(" \t\r\n", text->p[*at]) && text->p[*at]) ++*at;
    return *at < text->n ? text->p[*at] : 0;
}

still_status cli_make_elements(cli_make *m, const char *what, const sti_buf *text,
                               cli_element_fn fn, still_error *err)
{
    size_t at = 0;
    cli_lines l = {.what = what, .unit = "record "};
    if (peek(text, &at) != '[')
        return sti_fail(err, STILL_E_FORMAT, "%s: is not a JSON array", what);
    at++;
    for (bool more = peek(text, &at) != ']'; more;) {
        const char *why = NULL;
        json_t *v = sti_json_next(text->p, text->n, &at, STI_JSON_OBJECT, &why);
        l.number++;
        if (!v)
            return why ? cli_lines_bad(&l, why, err) : sti_fail_memory(err, what, at);
        const still_status st = fn(m, &l, v, err);
        json_decref(v);
        if (st != STILL_OK) return st;
        const char c = peek(text, &at);
        if (c != ',' && c != ']') return cli_lines_bad(&l, "expected ',' or ']'", err);
        more = c == ',';
        at += more;
    }
    at++;
    return peek(text, &at) || at < text->n
               ? cli_lines_bad(&l, "something follows the array", err)
               : STILL_OK;
}
