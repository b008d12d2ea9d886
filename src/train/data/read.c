/* read.c - records of training text, and the document each of them makes.
 *
 * JSON lines are read one at a time, whatever the file's size. The text of a JSON file
 * is held in memory and its records are parsed one at a time. The contents tell the two
 * apart, because names do not: many .json files hold lines.
 *
 * An unusable record is described, not fatal: the caller decides. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/data/parts.h"

struct sti_records {
    char *path;
    sti_lines *lines;   /* JSONL, or */
    char *whole;        /* the text of a JSON file and */
    sti_elements array; /* the array in it */
    size_t number;      /* of the record or line last handed out, from 1 */
    sti_buf text;
    char broken[200];
};

/* ---- From a record to a document ----------------------------------------- */

static sti_str string_of(const json_t *v) /* empty if it is none */
{
    return (sti_str){json_string_value(v), json_string_length(v)};
}

static void put_string(sti_buf *b, sti_str s)
{
    sti_buf_put(b, s.p, s.n);
}

static void put_prompt(sti_buf *b, sti_str instruction, sti_str input)
{
    sti_buf_puts(b, input.n
                        ? "Below is an instruction that describes a task, paired with "
                          "an input that provides further context. Write a response "
                          "that appropriately completes the request.\n\n"
                        : "Below is an instruction that describes a task. Write a "
                          "response that appropriately completes the request.\n\n");
    sti_buf_puts(b, "### Instruction:\n");
    put_string(b, instruction);
    if (input.n) {
        sti_buf_puts(b, "\n\n### Input:\n");
        put_string(b, input);
    }
    sti_buf_puts(b, "\n\n### Response:\n");
}

static still_status broken(sti_records *r, sti_record *rec, const char *why)
{
    snprintf(r->broken, sizeof r->broken, "%s %zu: %.160s",
             r->lines ? "line" : "record", r->number, why);
    *rec = (sti_record){.broken = r->broken};
    return STILL_OK;
}

/* A record with instruction and output is used as such even if it also has a "text"
 * that joins the two, because then prompt and output can be told apart. */
static still_status make_document(sti_records *r, const json_t *v, sti_record *rec,
                                  still_error *err)
{
    const json_t *instruction = json_object_get(v, "instruction");
    const json_t *input = json_object_get(v, "input");
    const json_t *output = json_object_get(v, "output");
    const json_t *text = json_object_get(v, "text");
    if (!json_is_object(v)) return broken(r, rec, "is no JSON object");
    bool plain = text && (!instruction || !output);
    if (!plain) {
        if (!instruction && !output)
            return broken(r, rec, "no field 'text', nor 'instruction' and 'output'");
        if (!output) return broken(r, rec, "no field 'output'");
        if (!instruction) return broken(r, rec, "no field 'instruction'");
        if (!json_is_string(instruction))
            return broken(r, rec, "'instruction' is no string");
        if (!json_is_string(output)) return broken(r, rec, "'output' is no string");
        if (input && !json_is_null(input) && !json_is_string(input))
            return broken(r, rec, "'input' is neither a string nor null");
        if (!json_string_length(output)) return broken(r, rec, "'output' is empty");
    } else {
        if (!json_is_string(text)) return broken(r, rec, "'text' is no string");
        if (!json_string_length(text)) return broken(r, rec, "'text' is empty");
    }
    sti_buf_clear(&r->text);
    if (!plain) put_prompt(&r->text, string_of(instruction), string_of(input));
    size_t prompt = r->text.n;
    put_string(&r->text, string_of(plain ? text : output));
    if (r->text.failed) return sti_fail_memory(err, r->path, r->text.n);
    *rec = (sti_record){.text = r->text.p, .n = r->text.n, .prompt = prompt};
    return STILL_OK;
}

/* ---- Lines --------------------------------------------------------------- */

static still_status next_line(sti_records *r, sti_record *rec, bool *more,
                              still_error *err)
{
    char *line;
    size_t n;
    do {
        STI_TRY(sti_lines_next(r->lines, &line, &n, err));
        if (!line) return STILL_OK;
        r->number++;
    } while (strspn(line, " \t\r") == n);
    *more = true;
    json_t *v;
    still_error why;
    still_status status = sti_json_read_line(line, n, STI_JSON_NUL, &v, &why);
    if (status == STILL_E_MEMORY) return sti_fail_memory(err, r->path, n);
    if (status != STILL_OK) return broken(r, rec, why.text);
    status = make_document(r, v, rec, err);
    json_decref(v);
    return status;
}

/* ---- Whole files --------------------------------------------------------- */

static still_status load_whole(sti_records *r, still_error *err)
{
    size_t n;
    STI_TRY(still_text_read(r->path, &r->whole, &n, err));
    return sti_elements_open(&r->array, r->path, r->whole, n, err);
}

static still_status next_element(sti_records *r, sti_record *rec, bool *more,
                                 still_error *err)
{
    json_t *v;
    STI_TRY(sti_elements_next(&r->array, &v, err));
    if (!v) return STILL_OK;
    *more = true;
    r->number++;
    const still_status status = make_document(r, v, rec, err);
    json_decref(v);
    return status;
}

/* Whether a first line that begins an object begins a file that is one JSON value: the
 * line does not end the object, or the object has "data". */
static still_status begins_whole(const char *line, size_t n, bool *whole,
                                 still_error *err)
{
    json_t *v;
    const still_status st = sti_json_read_line(line, n, STI_JSON_NUL, &v, err);
    if (st == STILL_E_MEMORY) return st;
    while (n && strchr(" \t\r", line[n - 1])) n--;
    *whole = v ? json_is_array(json_object_get(v, "data")) : n && line[n - 1] != '}';
    json_decref(v);
    return STILL_OK;
}

/* Whether the file is one JSON value and not lines of them. *certain: an array is known
 * by its first byte; an object is a guess. */
static still_status looks_whole(const char *path, bool *whole, bool *certain,
                                still_error *err)
{
    sti_lines *l;
    char first = 0, *line;
    size_t n;
    STI_TRY(sti_lines_open(path, &l, err));
    still_status status = sti_lines_peek(l, &first, err);
    *whole = *certain = first == '[';
    if (status == STILL_OK && first == '{') {
        do status = sti_lines_next(l, &line, &n, err);
        while (status == STILL_OK && line && strspn(line, " \t\r") == n);
        if (status == STILL_OK && line) status = begins_whole(line, n, whole, err);
        if (status == STILL_E_LIMIT) { /* no record is so long: all of it in one line */
            *whole = true;
            status = STILL_OK;
        }
    }
    sti_lines_close(l);
    return status;
}

/* ---- The reader ---------------------------------------------------------- */

static still_status open_records(sti_records *r, still_error *err)
{
    bool whole, certain;
    STI_TRY(looks_whole(r->path, &whole, &certain, err));
    if (whole) {
        still_status status = load_whole(r, err);
        /* JSON lines whose first line is truncated look like a whole file too. */
        if (status != STILL_E_FORMAT || certain || r->array.is_json) return status;
        free(r->whole);
        r->whole = NULL;
    }
    return sti_lines_open(r->path, &r->lines, err);
}

still_status sti_records_open(const char *path, sti_records **out, still_error *err)
{
    *out = NULL;
    sti_records *r = sti_alloc(1, sizeof *r);
    if (!r || !(r->path = sti_strdup(path))) {
        free(r);
        return sti_fail_memory(err, path, sizeof *r);
    }
    still_status status = open_records(r, err);
    if (status != STILL_OK)
        sti_records_close(r);
    else
        *out = r;
    return status;
}

still_status sti_records_next(sti_records *r, sti_record *rec, bool *more,
                              still_error *err)
{
    *more = false;
    return r->lines ? next_line(r, rec, more, err) : next_element(r, rec, more, err);
}

uint64_t sti_records_offset(const sti_records *r, uint64_t size)
{
    if (r->lines) return sti_lines_offset(r->lines);
    const double part = (double)r->array.at / (double)r->array.n;
    return (uint64_t)((double)size * part);
}

void sti_records_close(sti_records *r)
{
    if (!r) return;
    sti_lines_close(r->lines);
    free(r->whole);
    sti_buf_free(&r->text);
    free(r->path);
    free(r);
}
