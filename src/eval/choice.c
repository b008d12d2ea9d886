/* choice.c - multiple-choice tasks: PIQA, ARC, HellaSwag, WinoGrande, MMLU, LAMBADA.
 *
 * A file is read and checked completely when its task is opened, so that a malformed
 * record is found before a model has run for an hour; an item's texts are made on
 * demand. All strings of an item are in one block, with its options at the start. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/error.h"
#include "base/mem.h"
#include "eval/generated/sources.h"
#include "eval/task.h"
#include "eval/text.h"

enum { MOST_OPTIONS = 16 };

/* An item under construction: options as offsets into `text`. */
typedef struct draft {
    sti_buf text;
    size_t context[MOST_OPTIONS], continuation[MOST_OPTIONS];
    int length[MOST_OPTIONS];
    int n, gold;
    bool greedy;
} draft;

/* Worked examples of one subject of MMLU, as text of its prompts. */
typedef struct shots {
    char *subject;
    sti_buf text;
    int n;
} shots;

typedef struct form form;
struct sti_source {
    const form *form;
    json_t *records; /* array */
    size_t at;
    int shots;
    shots *subject;
    size_t n_subjects;
};

struct form {
    const char *name, *file, *shot_file; /* shot_file NULL: it has no worked examples */
    int shots;                           /* the task's own */
    still_status (*build)(const sti_source *s, const json_t *rec, draft *d,
                          still_error *err);
};

/* ---- Texts of a draft ---------------------------------------------------- */

/* Everything appended between two calls of begin() is one string. */
static size_t begin(draft *d)
{
    if (d->text.n) sti_buf_put(&d->text, "", 1);
    return d->text.n;
}

static void add_option(draft *d, size_t context, const char *choice)
{
    d->context[d->n] = context;
    d->continuation[d->n] = begin(d);
    d->length[d->n++] = sti_text_code_points(choice);
    sti_buf_printf(&d->text, " %s", choice);
}

/* ---- Fields -------------------------------------------------------------- */

/* A whole number from lo to hi. */
static still_status field_int(const json_t *rec, const char *key, int lo, int hi,
                              int *out, still_error *err)
{
    const json_t *v = json_object_get(rec, key);
    const json_int_t x = json_integer_value(v);
    if (!json_is_integer(v) || x < lo || x > hi)
        return sti_fail(err, STILL_E_FORMAT,
                        "\"%s\" is not a whole number from %d to %d", key, lo, hi);
    *out = (int)x;
    return STILL_OK;
}

/* A list of two to MOST_OPTIONS strings, and the index of the right one. */
static still_status field_choices(const json_t *rec, const char *key, const char *gold,
                                  json_t **list, int *answer, still_error *err)
{
    STI_TRY(sti_field_array(rec, key, list, err));
    const size_t n = json_array_size(*list);
    if (n < 2 || n > MOST_OPTIONS || !sti_all_strings(*list))
        return sti_fail(err, STILL_E_FORMAT,
                        "\"%s\" is not a list of 2 to %d strings (it has %zu elements)",
                        key, MOST_OPTIONS, n);
    return field_int(rec, gold, 0, (int)n - 1, answer, err);
}

static const char *choice_at(const json_t *list, size_t i)
{
    return json_string_value(json_array_get(list, i));
}

/* ---- The tasks ----------------------------------------------------------- */

static still_status build_piqa(const sti_source *s, const json_t *rec, draft *d,
                               still_error *err)
{
    (void)s;
    const char *goal, *sol1, *sol2;
    STI_TRY(sti_field_string(rec, "goal", &goal, err));
    STI_TRY(sti_field_string(rec, "sol1", &sol1, err));
    STI_TRY(sti_field_string(rec, "sol2", &sol2, err));
    STI_TRY(field_int(rec, "label", 0, 1, &d->gold, err));
    size_t context = begin(d);
    sti_buf_printf(&d->text, "Question: %s\nAnswer:", goal);
    add_option(d, context, sol1);
    add_option(d, context, sol2);
    return STILL_OK;
}

static still_status build_arc(const sti_source *s, const json_t *rec, draft *d,
                              still_error *err)
{
    (void)s;
    const char *question;
    json_t *choices;
    STI_TRY(sti_field_string(rec, "question", &question, err));
    STI_TRY(field_choices(rec, "choices", "answer", &choices, &d->gold, err));
    size_t context = begin(d);
    sti_buf_printf(&d->text, "Question: %s\nAnswer:", question);
    for (size_t i = 0; i < json_array_size(choices); i++)
        add_option(d, context, choice_at(choices, i));
    return STILL_OK;
}

static still_status build_hellaswag(const sti_source *s, const json_t *rec, draft *d,
                                    still_error *err)
{
    (void)s;
    const char *label, *a, *b;
    json_t *endings;
    STI_TRY(sti_field_string(rec, "activity_label", &label, err));
    STI_TRY(sti_field_string(rec, "ctx_a", &a, err));
    STI_TRY(sti_field_string(rec, "ctx_b", &b, err));
    STI_TRY(field_choices(rec, "endings", "label", &endings, &d->gold, err));
    sti_buf raw = {0}, ending = {0};
    sti_buf_printf(&raw, "%s: %s ", label, a);
    sti_text_capitalize(&raw, b);
    size_t context = begin(d);
    sti_text_clean(&d->text, raw.p ? raw.p : "");
    for (size_t i = 0; i < json_array_size(endings); i++) {
        sti_buf_clear(&ending);
        sti_buf_put(&ending, "", 0);
        sti_text_clean(&ending, choice_at(endings, i));
        if (!ending.failed) add_option(d, context, ending.p);
        d->text.failed = d->text.failed || ending.failed;
    }
    d->text.failed = d->text.failed || raw.failed;
    sti_buf_free(&raw);
    sti_buf_free(&ending);
    return STILL_OK;
}

/* The context has the gap filled in; the ranked text after it is the same for both. */
static still_status build_winogrande(const sti_source *s, const json_t *rec, draft *d,
                                     still_error *err)
{
    (void)s;
    const char *sentence, *option[2];
    STI_TRY(sti_field_string(rec, "sentence", &sentence, err));
    STI_TRY(sti_field_string(rec, "option1", &option[0], err));
    STI_TRY(sti_field_string(rec, "option2", &option[1], err));
    STI_TRY(field_int(rec, "answer", 1, 2, &d->gold, err));
    d->gold--;
    const char *gap = strchr(sentence, '_');
    if (!gap)
        return sti_fail(err, STILL_E_FORMAT, "\"sentence\" has no gap, marked by _");
    const char *rest = gap + 1;
    size_t n = strlen(rest);
    sti_text_strip(&rest, &n);
    sti_buf after = {0};
    sti_buf_put(&after, rest, n);
    for (int i = 0; i < 2; i++) {
        size_t context = begin(d);
        sti_buf_printf(&d->text, "%.*s%s", (int)(gap - sentence), sentence, option[i]);
        if (after.p) add_option(d, context, after.p);
    }
    d->text.failed = d->text.failed || after.failed;
    sti_buf_free(&after);
    return STILL_OK;
}

static still_status build_lambada(const sti_source *s, const json_t *rec, draft *d,
                                  still_error *err)
{
    (void)s;
    const char *text, *target;
    STI_TRY(sti_field_string(rec, "context", &text, err));
    STI_TRY(sti_field_string(rec, "target", &target, err));
    if (!*target) return sti_fail(err, STILL_E_FORMAT, "\"target\" is empty");
    size_t context = begin(d);
    sti_buf_puts(&d->text, text);
    add_option(d, context, target);
    d->greedy = true;
    return STILL_OK;
}

/* ---- MMLU ---------------------------------------------------------------- */

static still_status put_question(const json_t *rec, sti_buf *b, int *gold,
                                 still_error *err)
{
    const char *question;
    json_t *choices;
    STI_TRY(sti_field_string(rec, "question", &question, err));
    STI_TRY(field_choices(rec, "choices", "answer", &choices, gold, err));
    if (json_array_size(choices) != 4)
        return sti_fail(err, STILL_E_FORMAT, "\"choices\" has %zu elements, expected 4",
                        json_array_size(choices));
    size_t n = strlen(question);
    sti_text_strip(&question, &n);
    sti_buf_put(b, question, n);
    for (int i = 0; i < 4; i++)
        sti_buf_printf(b, "\n%c. %s", 'A' + i, choice_at(choices, (size_t)i));
    sti_buf_puts(b, "\nAnswer:");
    return STILL_OK;
}

static shots *find_shots(const sti_source *s, const char *subject)
{
    for (size_t i = 0; i < s->n_subjects; i++)
        if (strcmp(s->subject[i].subject, subject) == 0) return &s->subject[i];
    return NULL;
}

static still_status build_mmlu(const sti_source *s, const json_t *rec, draft *d,
                               still_error *err)
{
    const char *subject;
    STI_TRY(sti_field_string(rec, "subject", &subject, err));
    const shots *worked = find_shots(s, subject);
    if (s->shots > 0 && (!worked || worked->n < s->shots))
        return sti_fail(err, STILL_E_FORMAT,
                        "subject '%s' has %d worked examples in %s, %d are asked for",
                        subject, worked ? worked->n : 0, s->form->shot_file, s->shots);
    size_t context = begin(d);
    sti_buf_puts(&d->text, "The following are multiple choice questions (with answers) "
                           "about ");
    for (const char *c = subject; *c; c++)
        sti_buf_put(&d->text, *c == '_' ? " " : c, 1);
    sti_buf_puts(&d->text, ".\n\n");
    if (worked) sti_buf_put(&d->text, worked->text.p, worked->text.n);
    STI_TRY(put_question(rec, &d->text, &d->gold, err));
    static const char *const letter[] = {"A", "B", "C", "D"};
    for (int i = 0; i < 4; i++) add_option(d, context, letter[i]);
    return STILL_OK;
}

/* A record of the dev file: one more worked example, if its subject lacks some. */
static still_status take_shot(void *user, json_t *rec, still_error *err)
{
    sti_source *s = user;
    const char *subject;
    int gold;
    STI_TRY(sti_field_string(rec, "subject", &subject, err));
    shots *worked = find_shots(s, subject);
    if (!worked) {
        shots *grown = sti_grow(s->subject, s->n_subjects + 1, sizeof *grown);
        if (!grown) return sti_fail_memory(err, "subjects", sizeof *grown);
        s->subject = grown;
        worked = &grown[s->n_subjects];
        *worked = (shots){.subject = sti_strdup(subject)};
        if (!worked->subject) return sti_fail_memory(err, "subjects", strlen(subject));
        s->n_subjects++;
    }
    if (worked->n == s->shots) return STILL_OK;
    STI_TRY(put_question(rec, &worked->text, &gold, err));
    sti_buf_printf(&worked->text, " %c\n\n", 'A' + gold);
    if (worked->text.failed) return sti_fail_memory(err, "subjects", worked->text.n);
    worked->n++;
    return STILL_OK;
}

/* ---- A source ------------------------------------------------------------ */

static const form forms[] = {
    {"piqa", "piqa_valid.jsonl", NULL, 0, build_piqa},
    {"arc_easy", "arc_easy_test.jsonl", NULL, 0, build_arc},
    {"arc_challenge", "arc_challenge_test.jsonl", NULL, 0, build_arc},
    {"hellaswag", "hellaswag_valid.jsonl", NULL, 0, build_hellaswag},
    {"winogrande", "winogrande_xl_valid.jsonl", NULL, 0, build_winogrande},
    {"mmlu", "mmlu_test.jsonl", "mmlu_dev.jsonl", 5, build_mmlu},
    {"lambada", "lambada_openai_test.jsonl", NULL, 0, build_lambada},
};

static void set_id(const sti_source *s, const json_t *rec, size_t number, char out[64])
{
    const json_t *index = json_object_get(rec, "index");
    const long long id =
        json_is_integer(index) ? json_integer_value(index) : (long long)number;
    const char *subject =
        s->form->shot_file ? json_string_value(json_object_get(rec, "subject")) : NULL;
    snprintf(out, 64, "%.40s%s%lld", subject ? subject : "", subject ? "/" : "", id);
}

/* Moves a draft into an item's one block. */
static still_status finish_item(draft *d, sti_item *it, still_error *err)
{
    const size_t head = (size_t)d->n * sizeof(sti_option);
    char *block = d->text.failed ? NULL : malloc(head + d->text.n + 1);
    if (!block) return sti_fail_memory(err, "a question", head + d->text.n);
    char *text = block + head;
    memcpy(text, d->text.p, d->text.n + 1);
    it->memory = block;
    it->option = (sti_option *)(void *)block;
    for (int i = 0; i < d->n; i++)
        it->option[i] = (sti_option){.context = text + d->context[i],
                                     .continuation = text + d->continuation[i],
                                     .length = d->length[i]};
    it->n_options = d->n;
    it->gold = d->gold;
    it->greedy = d->greedy;
    return STILL_OK;
}

static still_status make_item(const sti_source *s, const json_t *rec, size_t number,
                              sti_item *it, still_error *err)
{
    draft d = {0};
    *it = (sti_item){.kind = STI_ITEM_CHOICE};
    set_id(s, rec, number, it->id);
    still_status st = s->form->build(s, rec, &d, err);
    if (st == STILL_OK) st = finish_item(&d, it, err);
    sti_buf_free(&d.text);
    return st;
}

/* Keeps a record if an item can be made of it. */
static still_status take_record(void *user, json_t *rec, still_error *err)
{
    sti_source *s = user;
    sti_item it;
    STI_TRY(make_item(s, rec, json_array_size(s->records), &it, err));
    sti_item_free(&it);
    sti_json_append(&s->records, json_incref(rec));
    return s->records ? STILL_OK : sti_fail_memory(err, "records", 0);
}

static void close_source(sti_source *s)
{
    if (!s) return;
    json_decref(s->records);
    for (size_t i = 0; i < s->n_subjects; i++) {
        free(s->subject[i].subject);
        sti_buf_free(&s->subject[i].text);
    }
    free(s->subject);
    free(s);
}

static still_status open_source(const form *f, const sti_task_params *p,
                                sti_source **out, still_error *err)
{
    *out = NULL;
    if (p->shots > 0 && !f->shot_file)
        return sti_fail(err, STILL_E_ARG,
                        "%s is measured without worked examples: its data has none "
                        "(%d are asked for)",
                        f->name, p->shots);
    sti_source *s = sti_alloc(1, sizeof *s);
    if (!s || !(s->records = json_array())) {
        free(s);
        return sti_fail_memory(err, f->name, sizeof *s);
    }
    s->form = f;
    s->shots = p->shots < 0 ? f->shots : p->shots;
    still_status st = STILL_OK;
    if (s->shots > 0)
        st = sti_source_read(p->data_dir, f->shot_file, take_shot, s, err);
    if (st == STILL_OK) st = sti_source_read(p->data_dir, f->file, take_record, s, err);
    if (st == STILL_OK && json_array_size(s->records) == 0)
        st = sti_fail(err, STILL_E_FORMAT, "%s/%s: has no records", p->data_dir,
                      f->file);
    if (st != STILL_OK)
        close_source(s);
    else
        *out = s;
    return st;
}

static still_status next_item(sti_source *s, sti_item *it, still_error *err)
{
    *it = (sti_item){0};
    if (s->at == json_array_size(s->records)) return STILL_OK;
    STI_TRY(make_item(s, json_array_get(s->records, s->at), s->at, it, err));
    s->at++;
    return STILL_OK;
}

static uint64_t count_items(const sti_source *s)
{
    return json_array_size(s->records);
}

/* ---- Rows of the table --------------------------------------------------- */

#define OPENS(name, i)                                                                 \
    static still_status open_##name(const sti_task_params *p, sti_source **out,        \
                                    still_error *err)                                  \
    {                                                                                  \
        return open_source(&forms[i], p, out, err);                                    \
    }
OPENS(piqa, 0)
OPENS(arc_easy, 1)
OPENS(arc_challenge, 2)
OPENS(hellaswag, 3)
OPENS(winogrande, 4)
OPENS(mmlu, 5)
OPENS(lambada, 6)

#define ROW(id, what, compare, needs)                                                  \
    {                                                                                  \
        .name = #id, .summary = what, .metric = compare, .files = needs,               \
        .open = open_##id, .next = next_item, .count = count_items,                    \
        .close = close_source                                                          \
    }

const sti_eval_task sti_task_choice[] = {
    ROW(piqa, "everyday physics: which of two solutions", "acc", "piqa_valid.jsonl"),
    ROW(arc_easy, "school science, easy set", "acc", "arc_easy_test.jsonl"),
    ROW(arc_challenge, "school science, hard set", "acc_norm",
        "arc_challenge_test.jsonl"),
    ROW(hellaswag, "which of four endings follows", "acc_norm",
        "hellaswag_valid.jsonl"),
    ROW(winogrande, "who or what a sentence speaks of", "acc",
        "winogrande_xl_valid.jsonl"),
    ROW(mmlu, "57 subjects, five worked examples each", "acc",
        "mmlu_test.jsonl mmlu_dev.jsonl"),
    ROW(lambada, "the last word of a passage", "acc", "lambada_openai_test.jsonl"),
    {.name = NULL},
};
