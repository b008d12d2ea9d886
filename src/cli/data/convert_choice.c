/* convert_choice.c - PIQA, ARC, HellaSwag, WinoGrande, MMLU, LAMBADA. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"
#include "cli/data/convert.h"
#include "cli/data/csv.h"
#include "cli/data/tar.h"

/* Calls fn with each record of JSON lines. */
typedef still_status (*record_fn)(cli_make *m, int k, const cli_lines *l,
                                  const json_t *v, still_error *err);
static still_status each_record(cli_make *m, int k, const char *what,
                                const sti_buf *text, record_fn fn, still_error *err)
{
    cli_lines l;
    cli_lines_open(&l, what, text);
    while (cli_lines_next(&l)) {
        json_t *v;
        STI_TRY(cli_lines_json(&l, &v, err));
        const still_status st = v ? fn(m, k, &l, v, err) : STILL_OK;
        json_decref(v);
        if (st != STILL_OK) return st;
    }
    return STILL_OK;
}

/* The same for an entry of the set's zip archive. */
static still_status each_zipped(cli_make *m, int k, const char *tail, record_fn fn,
                                still_error *err)
{
    sti_buf text = {0};
    still_status st = cli_make_unzip(m, 0, tail, &text, err);
    if (st == STILL_OK) st = each_record(m, k, tail, &text, fn, err);
    sti_buf_free(&text);
    return st;
}

/* ---- PIQA: goals and solutions in one file, labels in another ------------ */

static still_status piqa_record(cli_make *m, const cli_lines *l, const cli_lines *label,
                                const json_t *v, still_error *err)
{
    const char *goal, *sol1, *sol2;
    STI_TRY(cli_field_text(l, v, "goal", &goal, err));
    STI_TRY(cli_field_text(l, v, "sol1", &sol1, err));
    STI_TRY(cli_field_text(l, v, "sol2", &sol2, err));
    if (label->n != 1 || (label->line[0] != '0' && label->line[0] != '1'))
        return cli_lines_bad(label, "a label is not 0 or 1", err);
    return cli_make_put(m, 0,
                        json_pack("{s:I,s:s,s:s,s:s,s:i}", "index",
                                  cli_make_index(m, 0), "goal", goal, "sol1", sol1,
                                  "sol2", sol2, "label", label->line[0] - '0'),
                        err);
}

static still_status piqa_records(cli_make *m, const sti_buf *text,
                                 const sti_buf *labels, still_error *err)
{
    cli_lines l, label;
    cli_lines_open(&l, "dev.jsonl", text);
    cli_lines_open(&label, "dev-labels.lst", labels);
    while (cli_lines_next(&l)) {
        json_t *v;
        STI_TRY(cli_lines_json(&l, &v, err));
        if (!v) continue;
        const still_status st =
            cli_lines_next(&label)
                ? piqa_record(m, &l, &label, v, err)
                : cli_lines_bad(&label, "there are fewer labels", err);
        json_decref(v);
        if (st != STILL_OK) return st;
    }
    return cli_lines_next(&label) && label.n
               ? cli_lines_bad(&label, "there are more labels than questions", err)
               : STILL_OK;
}

static still_status run_piqa(cli_make *m, still_error *err)
{
    sti_buf text = {0}, labels = {0};
    still_status st = cli_make_unzip(m, 0, "dev.jsonl", &text, err);
    if (st == STILL_OK) st = cli_make_unzip(m, 0, "dev-labels.lst", &labels, err);
    if (st == STILL_OK) st = piqa_records(m, &text, &labels, err);
    sti_buf_free(&text);
    sti_buf_free(&labels);
    return st;
}

/* ---- ARC ----------------------------------------------------------------- */

static still_status arc_record(cli_make *m, int k, const cli_lines *l, const json_t *v,
                               still_error *err)
{
    const char *id, *key, *stem;
    const json_t *question = json_object_get(v, "question"),
                 *choices = json_object_get(question, "choices");
    STI_TRY(cli_field_text(l, v, "id", &id, err));
    STI_TRY(cli_field_text(l, v, "answerKey", &key, err));
    STI_TRY(cli_field_text(l, question, "stem", &stem, err));
    json_t *texts = json_array();
    json_int_t answer = -1;
    for (size_t i = 0; i < json_array_size(choices); i++) {
        const json_t *choice = json_array_get(choices, i);
        const char *text, *label;
        still_status st = cli_field_text(l, choice, "text", &text, err);
        if (st == STILL_OK) st = cli_field_text(l, choice, "label", &label, err);
        if (st != STILL_OK) {
            json_decref(texts);
            return st;
        }
        if (!strcmp(label, key)) answer = (json_int_t)i;
        sti_json_append(&texts, json_string(text));
    }
    if (answer < 0) {
        json_decref(texts);
        return cli_lines_bad(l, "no choice has the answer's label", err);
    }
    return cli_make_put(m, k,
                        json_pack("{s:I,s:s,s:s,s:o,s:I}", "index",
                                  cli_make_index(m, k), "id", id, "question", stem,
                                  "choices", texts, "answer", answer),
                        err);
}

static still_status run_arc(cli_make *m, still_error *err)
{
    STI_TRY(each_zipped(m, 0, "ARC-Easy-Test.jsonl", arc_record, err));
    return each_zipped(m, 1, "ARC-Challenge-Test.jsonl", arc_record, err);
}

/* ---- HellaSwag ----------------------------------------------------------- */

static still_status hellaswag_record(cli_make *m, int k, const cli_lines *l,
                                     const json_t *v, still_error *err)
{
    const char *label, *a, *b, *ctx, *source, *split;
    const json_t *ind = json_object_get(v, "ind"), *right = json_object_get(v, "label");
    json_t *endings;
    STI_TRY(cli_field_text(l, v, "activity_label", &label, err));
    STI_TRY(cli_field_text(l, v, "ctx_a", &a, err));
    STI_TRY(cli_field_text(l, v, "ctx_b", &b, err));
    STI_TRY(cli_field_text(l, v, "ctx", &ctx, err));
    STI_TRY(cli_field_texts(l, v, "endings", &endings, err));
    STI_TRY(cli_field_text(l, v, "source_id", &source, err));
    STI_TRY(cli_field_text(l, v, "split_type", &split, err));
    if (!json_is_integer(ind)) return cli_lines_bad(l, "\"ind\" is not a number", err);
    if (!json_is_integer(right) || json_integer_value(right) < 0 ||
        json_integer_value(right) >= (json_int_t)json_array_size(endings))
        return cli_lines_bad(l, "\"label\" is not the number of an ending", err);
    return cli_make_put(m, k,
                        json_pack("{s:I,s:I,s:s,s:s,s:s,s:s,s:O,s:s,s:s,s:I}", "index",
                                  cli_make_index(m, k), "ind", json_integer_value(ind),
                                  "activity_label", label, "ctx_a", a, "ctx_b", b,
                                  "ctx", ctx, "endings", endings, "source_id", source,
                                  "split_type", split, "label",
                                  json_integer_value(right)),
                        err);
}

static still_status run_hellaswag(cli_make *m, still_error *err)
{
    sti_buf text = {0};
    still_status st = cli_make_read(m, 0, &text, err);
    if (st == STILL_OK)
        st = each_record(m, 0, m->file[0], &text, hellaswag_record, err);
    sti_buf_free(&text);
    return st;
}

/* ---- WinoGrande ---------------------------------------------------------- */

static still_status winogrande_record(cli_make *m, int k, const cli_lines *l,
                                      const json_t *v, still_error *err)
{
    const char *sentence, *option1, *option2, *answer;
    STI_TRY(cli_field_text(l, v, "sentence", &sentence, err));
    STI_TRY(cli_field_text(l, v, "option1", &option1, err));
    STI_TRY(cli_field_text(l, v, "option2", &option2, err));
    STI_TRY(cli_field_text(l, v, "answer", &answer, err));
    if (strcmp(answer, "1") != 0 && strcmp(answer, "2") != 0)
        return cli_lines_bad(l, "\"answer\" is not 1 or 2", err);
    return cli_make_put(m, k,
                        json_pack("{s:I,s:s,s:s,s:s,s:i}", "index",
                                  cli_make_index(m, k), "sentence", sentence, "option1",
                                  option1, "option2", option2, "answer",
                                  answer[0] - '0'),
                        err);
}

static still_status run_winogrande(cli_make *m, still_error *err)
{
    return each_zipped(m, 0, "dev.jsonl", winogrande_record, err);
}

/* ---- LAMBADA: the last word is the target -------------------------------- */

static still_status lambada_record(cli_make *m, int k, const cli_lines *l,
                                   const json_t *v, still_error *err)
{
    const char *text;
    STI_TRY(cli_field_text(l, v, "text", &text, err));
    const char *space = strrchr(text, ' ');
    if (!space || space == text || !space[1])
        return cli_lines_bad(l, "the text does not end in a space and a word", err);
    return cli_make_put(m, k,
                        json_pack("{s:I,s:s%,s:s}", "index", cli_make_index(m, k),
                                  "context", text, (size_t)(space - text), "target",
                                  space + 1),
                        err);
}

static still_status run_lambada(cli_make *m, still_error *err)
{
    sti_buf text = {0};
    still_status st = cli_make_read(m, 0, &text, err);
    if (st == STILL_OK) st = each_record(m, 0, m->file[0], &text, lambada_record, err);
    sti_buf_free(&text);
    return st;
}

/* ---- MMLU: an archive of CSV files, one for each subject and part --------- */

enum { MOST_SUBJECTS = 256, MOST_CSV = 16 << 20, NAME_ROOM = 96 };
static const char *const part_of[] = {"test", "dev", "val"}; /* of what is made */

typedef struct subject {
    char name[NAME_ROOM];
    int part;
    sti_buf text;
} subject;

typedef struct subjects {
    subject *of;
    size_t n;
} subjects;

/* test/anatomy_test.csv: whether an entry is one of these, and its subject. */
static bool is_subject(const char *path, subject *s)
{
    const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path;
    for (s->part = 0; s->part < 3; s->part++) {
        char tail[16];
        const int n_tail = snprintf(tail, sizeof tail, "_%s.csv", part_of[s->part]);
        const size_t n = strlen(base), folder = strlen(part_of[s->part]);
        if (base[0] == '.' || n <= (size_t)n_tail || n - (size_t)n_tail >= NAME_ROOM ||
            strcmp(base + n - (size_t)n_tail, tail) != 0 || !slash ||
            (size_t)(slash - path) < folder ||
            strncmp(slash - folder, part_of[s->part], folder) != 0)
            continue;
        memcpy(s->name, base, n - (size_t)n_tail);
        return sti_utf8_span(s->name, strlen(s->name)) == strlen(s->name);
    }
    return false;
}

static still_status take_subject(subjects *all, cli_tar *t, const cli_tar_entry *e,
                                 still_error *err)
{
    subject s = {0};
    if (!e->plain || !is_subject(e->name, &s)) return STILL_OK;
    if (all->n == MOST_SUBJECTS || e->size > MOST_CSV)
        return sti_fail(err, STILL_E_LIMIT,
                        "%s: too many subjects, or too large a file", e->name);
    subject *grown = sti_grow(all->of, all->n + 1, sizeof *grown);
    if (!grown) return sti_fail_memory(err, e->name, sizeof *grown);
    all->of = grown;
    grown[all->n++] = s;
    sti_buf *text = &grown[all->n - 1].text;
    char part[16 << 10];
    for (size_t got = 1; got > 0;) {
        STI_TRY(cli_tar_read(t, part, sizeof part, &got, err));
        sti_buf_put(text, part, got);
    }
    return text->failed ? sti_fail_memory(err, e->name, text->n) : STILL_OK;
}

static still_status read_subjects(subjects *all, cli_tar *t, still_error *err)
{
    cli_tar_entry e;
    for (bool more;;) {
        STI_TRY(cli_tar_next(t, &e, &more, err));
        if (!more) return STILL_OK;
        STI_TRY(take_subject(all, t, &e, err));
    }
}

static still_status put_row(cli_make *m, const subject *s, const cli_csv *c,
                            still_error *err)
{
    const char *answer = cli_csv_field(c, c->fields - 1);
    if (c->fields != 6 || strlen(answer) != 1 || !strchr("ABCD", answer[0]))
        return sti_fail(err, STILL_E_FORMAT,
                        "%s:%zu: is not a question, four choices and a letter A to D",
                        c->what, c->line);
    return cli_make_put(
        m, s->part,
        json_pack("{s:I,s:s,s:s,s:[s,s,s,s],s:i}", "index", cli_make_index(m, s->part),
                  "subject", s->name, "question", cli_csv_field(c, 0), "choices",
                  cli_csv_field(c, 1), cli_csv_field(c, 2), cli_csv_field(c, 3),
                  cli_csv_field(c, 4), "answer", answer[0] - 'A'),
        err);
}

static still_status put_subject(cli_make *m, const subject *s, still_error *err)
{
    cli_csv c;
    char what[NAME_ROOM + 16];
    snprintf(what, sizeof what, "%s_%s.csv", s->name, part_of[s->part]);
    cli_csv_open(&c, what, s->text.p ? s->text.p : "", s->text.n);
    still_status st = STILL_OK;
    for (bool more = true; st == STILL_OK && more;) {
        st = cli_csv_next(&c, &more, err);
        if (st == STILL_OK && more) st = put_row(m, s, &c, err);
    }
    cli_csv_close(&c);
    return st;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const subject *)a)->name, ((const subject *)b)->name);
}

static still_status run_mmlu(cli_make *m, still_error *err)
{
    subjects all = {0};
    cli_tar *t = NULL;
    char *path = cli_make_path(m, 0);
    still_status st =
        path ? cli_tar_open(path, &t, err) : sti_fail_memory(err, m->file[0], 0);
    if (st == STILL_OK) st = read_subjects(&all, t, err);
    cli_tar_close(t);
    if (st == STILL_OK && all.n) qsort(all.of, all.n, sizeof *all.of, by_name);
    for (size_t i = 0; i < all.n && st == STILL_OK; i++)
        st = put_subject(m, &all.of[i], err);
    for (size_t i = 0; i < all.n; i++) sti_buf_free(&all.of[i].text);
    free(all.of);
    free(path);
    return st;
}

/* -------------------------------------------------------------------------- */

const cli_converter cli_convert_choice[] = {
    {"piqa", {"piqa_valid.jsonl"}, 1, run_piqa},
    {"arc", {"arc_easy_test.jsonl", "arc_challenge_test.jsonl"}, 1, run_arc},
    {"hellaswag", {"hellaswag_valid.jsonl"}, 1, run_hellaswag},
    {"winogrande", {"winogrande_xl_valid.jsonl"}, 1, run_winogrande},
    {"mmlu", {"mmlu_test.jsonl", "mmlu_dev.jsonl", "mmlu_valid.jsonl"}, 1, run_mmlu},
    {"lambada", {"lambada_openai_test.jsonl"}, 1, run_lambada},
    {.name = NULL},
};
