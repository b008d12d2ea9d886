/* convert_question.c - SQuAD, HotpotQA, bAbI, and the instructions of Alpaca. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"
#include "cli/data/convert.h"
#include "cli/data/tar.h"

/* ---- SQuAD 2.0: articles of paragraphs; a record is a paragraph ----------- */

/* The question with the texts of its answers, which are none where it has none. */
static still_status squad_question(const cli_lines *l, const json_t *q, json_t **qas,
                                   still_error *err)
{
    const char *id, *question, *text;
    const json_t *answers = json_object_get(q, "answers");
    STI_TRY(cli_field_text(l, q, "id", &id, err));
    STI_TRY(cli_field_text(l, q, "question", &question, err));
    if (!json_is_array(answers)) return cli_lines_bad(l, "\"answers\" is no list", err);
    json_t *texts = json_array();
    for (size_t i = 0; i < json_array_size(answers); i++) {
        const still_status st =
            cli_field_text(l, json_array_get(answers, i), "text", &text, err);
        if (st != STILL_OK) {
            json_decref(texts);
            return st;
        }
        sti_json_append(&texts, json_string(text));
    }
    sti_json_append(qas, json_pack("{s:s,s:s,s:o}", "id", id, "question", question,
                                   "answers", texts));
    return STILL_OK;
}

static still_status squad_paragraph(cli_make *m, const cli_lines *l, const char *title,
                                    const json_t *paragraph, still_error *err)
{
    const char *context;
    const json_t *questions = json_object_get(paragraph, "qas");
    STI_TRY(cli_field_text(l, paragraph, "context", &context, err));
    if (!json_is_array(questions)) return cli_lines_bad(l, "\"qas\" is no list", err);
    json_t *qas = json_array();
    for (size_t i = 0; i < json_array_size(questions); i++) {
        const still_status st =
            squad_question(l, json_array_get(questions, i), &qas, err);
        if (st != STILL_OK) {
            json_decref(qas);
            return st;
        }
    }
    return cli_make_put(m, 0,
                        json_pack("{s:I,s:s,s:s,s:o}", "index", cli_make_index(m, 0),
                                  "title", title, "context", context, "qas", qas),
                        err);
}

static still_status squad_articles(cli_make *m, const json_t *root, still_error *err)
{
    cli_lines l = {.what = m->file[0], .unit = "article "};
    const json_t *articles = json_object_get(root, "data");
    for (size_t i = 0; i < json_array_size(articles); i++) {
        const json_t *article = json_array_get(articles, i),
                     *paragraphs = json_object_get(article, "paragraphs");
        const char *title;
        l.number = i + 1;
        STI_TRY(cli_field_text(&l, article, "title", &title, err));
        for (size_t k = 0; k < json_array_size(paragraphs); k++)
            STI_TRY(squad_paragraph(m, &l, title, json_array_get(paragraphs, k), err));
    }
    return STILL_OK;
}

static still_status run_squad(cli_make *m, still_error *err)
{
    sti_buf text = {0};
    json_t *root = NULL;
    still_status st = cli_make_read(m, 0, &text, err);
    if (st == STILL_OK)
        st = sti_json_read(m->file[0], text.p, text.n, STI_JSON_OBJECT, &root, err);
    if (st == STILL_OK) st = squad_articles(m, root, err);
    json_decref(root);
    sti_buf_free(&text);
    return st;
}

/* ---- HotpotQA ------------------------------------------------------------ */

/* [title, [sentence, ...]] as an object. */
static still_status hotpot_paragraph(const cli_lines *l, const json_t *pair,
                                     json_t **out, still_error *err)
{
    const json_t *title = json_array_get(pair, 0);
    json_t *sentences = json_array_get(pair, 1);
    bool ok =
        json_array_size(pair) == 2 && json_is_string(title) && json_is_array(sentences);
    for (size_t i = 0; ok && i < json_array_size(sentences); i++)
        ok = json_is_string(json_array_get(sentences, i));
    if (!ok) return cli_lines_bad(l, "\"context\" is not titles and sentences", err);
    sti_json_append(out, json_pack("{s:s,s:O}", "title", json_string_value(title),
                                   "sentences", sentences));
    return STILL_OK;
}

static still_status hotpot_record(cli_make *m, const cli_lines *l, const json_t *v,
                                  still_error *err)
{
    const char *id, *question, *answer, *type, *level;
    const json_t *pairs = json_object_get(v, "context");
    json_t *facts = json_object_get(v, "supporting_facts");
    STI_TRY(cli_field_text(l, v, "_id", &id, err));
    STI_TRY(cli_field_text(l, v, "question", &question, err));
    STI_TRY(cli_field_text(l, v, "answer", &answer, err));
    STI_TRY(cli_field_text(l, v, "type", &type, err));
    STI_TRY(cli_field_text(l, v, "level", &level, err));
    if (!json_is_array(facts) || json_array_size(pairs) == 0)
        return cli_lines_bad(l, "\"supporting_facts\" or \"context\" is no list", err);
    json_t *context = json_array();
    for (size_t i = 0; i < json_array_size(pairs); i++) {
        const still_status st =
            hotpot_paragraph(l, json_array_get(pairs, i), &context, err);
        if (st != STILL_OK) {
            json_decref(context);
            return st;
        }
    }
    return cli_make_put(m, 0,
                        json_pack("{s:I,s:s,s:s,s:s,s:s,s:s,s:O,s:o}", "index",
                                  cli_make_index(m, 0), "id", id, "question", question,
                                  "answer", answer, "type", type, "level", level,
                                  "supporting_facts", facts, "context", context),
                        err);
}

static still_status each_element(cli_make *m, cli_element_fn fn, still_error *err)
{
    sti_buf text = {0};
    still_status st = cli_make_read(m, 0, &text, err);
    if (st == STILL_OK) st = cli_make_elements(m, m->file[0], &text, fn, err);
    sti_buf_free(&text);
    return st;
}

static still_status run_hotpotqa(cli_make *m, still_error *err)
{
    return each_element(m, hotpot_record, err);
}

/* ---- Alpaca -------------------------------------------------------------- */

static still_status alpaca_record(cli_make *m, const cli_lines *l, const json_t *v,
                                  still_error *err)
{
    const char *instruction, *input, *output;
    STI_TRY(cli_field_text(l, v, "instruction", &instruction, err));
    STI_TRY(cli_field_text(l, v, "input", &input, err));
    STI_TRY(cli_field_text(l, v, "output", &output, err));
    return cli_make_put(m, 0,
                        json_pack("{s:I,s:s,s:s,s:s}", "index", cli_make_index(m, 0),
                                  "instruction", instruction, "input", input, "output",
                                  output),
                        err);
}

static still_status run_alpaca(cli_make *m, still_error *err)
{
    return each_element(m, alpaca_record, err);
}

/* ---- bAbI: numbered lines; number 1 begins a story ----------------------- */

/*   1 Mary moved to the bathroom.
 *   2 John went to the hallway.
 *   3 Where is Mary? TAB bathroom TAB 1 */
enum { TASKS = 5, MOST_STORY = 4096, MOST_BABI = 64 << 20 };

typedef struct story {
    char task[16];
    json_t *facts;
    int fact[MOST_STORY]; /* of each line: its place in facts, or -1 */
    int lines, stories;
} story;

/* A number and what follows it. */
static bool number(const char **p, const char *end, int most, int *out)
{
    long v = 0;
    const char *c = *p;
    while (c < end && *c >= '0' && *c <= '9' && v <= most) v = v * 10 + (*c++ - '0');
    const bool any = c > *p && v <= most;
    *p = c;
    *out = (int)v;
    return any;
}

static void trim(const char **p, const char **end)
{
    while (*p < *end && **p == ' ') ++*p;
    while (*p < *end && (*end)[-1] == ' ') --*end;
}

/* The places of the facts that an answer follows from. */
static still_status supporting(const story *s, const cli_lines *l, const char *p,
                               json_t **out, still_error *err)
{
    const char *end = l->line + l->n;
    *out = json_array();
    for (int line; trim(&p, &end), p < end;) {
        if (!number(&p, end, s->lines, &line) || line < 1 || s->fact[line] < 0) {
            json_decref(*out);
            return cli_lines_bad(l, "the answer's facts are not lines before it", err);
        }
        sti_json_append(out, json_integer(s->fact[line]));
    }
    return STILL_OK;
}

static still_status babi_question(cli_make *m, story *s, const cli_lines *l,
                                  const char *p, const char *tab, still_error *err)
{
    const char *line_end = l->line + l->n, *a = tab + 1, *end = tab;
    const char *second = memchr(a, '\t', (size_t)(line_end - a)),
               *a_end = second ? second : line_end;
    json_t *facts = NULL, *places;
    trim(&p, &end);
    trim(&a, &a_end);
    if (p == end || a == a_end || !second)
        return cli_lines_bad(l, "a question has no answer or no facts", err);
    STI_TRY(supporting(s, l, second + 1, &places, err));
    facts = json_array(); /* those so far: later questions see more */
    for (size_t i = 0; i < json_array_size(s->facts); i++)
        sti_json_append(&facts, json_incref(json_array_get(s->facts, i)));
    return cli_make_put(m, 0,
                        json_pack("{s:I,s:s,s:i,s:o,s:s%,s:s%,s:o}", "index",
                                  cli_make_index(m, 0), "task", s->task, "story",
                                  s->stories - 1, "facts", facts, "question", p,
                                  (size_t)(end - p), "answer", a, (size_t)(a_end - a),
                                  "supporting", places),
                        err);
}

static still_status babi_line(cli_make *m, story *s, const cli_lines *l,
                              still_error *err)
{
    const char *p = l->line, *end = l->line + l->n;
    int at;
    if (sti_utf8_span(p, l->n) != l->n || memchr(p, 0, l->n))
        return cli_lines_bad(l, "no UTF-8", err);
    if (l->n == 0) return STILL_OK;
    if (!number(&p, end, MOST_STORY - 1, &at) || p == end || *p != ' ')
        return cli_lines_bad(l, "does not begin with its number", err);
    if (at == 1) {
        json_decref(s->facts);
        s->facts = json_array();
        s->lines = 0;
        s->stories++;
    }
    if (!s->facts || at != s->lines + 1)
        return cli_lines_bad(l, "its number does not follow the one before", err);
    s->lines = at;
    s->fact[at] = -1;
    const char *tab = memchr(p, '\t', (size_t)(end - p));
    if (tab) return babi_question(m, s, l, p, tab, err);
    trim(&p, &end);
    s->fact[at] = (int)json_array_size(s->facts);
    sti_json_append(&s->facts, json_stringn(p, (size_t)(end - p)));
    return s->facts ? STILL_OK : sti_fail_memory(err, l->what, l->n);
}

static still_status babi_task(cli_make *m, int task, const sti_buf *text,
                              still_error *err)
{
    cli_lines l;
    char what[32];
    still_status st = STILL_OK;
    story *s = sti_alloc(1, sizeof *s);
    if (!s) return sti_fail_memory(err, "a story", sizeof *s);
    snprintf(s->task, sizeof s->task, "qa%d", task);
    snprintf(what, sizeof what, "en-10k/qa%d_*_test.txt", task);
    if (text->n == 0)
        st = sti_fail(err, STILL_E_FORMAT, "%s: has no file %s", m->file[0], what);
    cli_lines_open(&l, what, text);
    while (st == STILL_OK && cli_lines_next(&l)) st = babi_line(m, s, &l, err);
    json_decref(s->facts);
    free(s);
    return st;
}

/* The number of the task whose test part an entry is; 0: none. */
static int task_of(const char *path)
{
    const char *folder = strstr(path, "en-10k/qa");
    const size_t n = strlen(path);
    if (!folder || (folder > path && folder[-1] != '/')) return 0;
    const char digit = folder[9];
    if (digit < '1' || digit > '0' + TASKS || folder[10] != '_' || n < 9 ||
        strcmp(path + n - 9, "_test.txt") != 0)
        return 0;
    return digit - '0';
}

static still_status read_tasks(cli_tar *t, sti_buf *text, still_error *err)
{
    cli_tar_entry e;
    char part[16 << 10];
    for (bool more;;) {
        STI_TRY(cli_tar_next(t, &e, &more, err));
        if (!more) return STILL_OK;
        const int task = e.plain ? task_of(e.name) : 0;
        if (!task) continue;
        if (e.size > MOST_BABI || text[task].n)
            return sti_fail(err, STILL_E_FORMAT, "%s: is too large, or there twice",
                            e.name);
        for (size_t got = 1; got > 0;) {
            STI_TRY(cli_tar_read(t, part, sizeof part, &got, err));
            sti_buf_put(&text[task], part, got);
        }
        if (text[task].failed) return sti_fail_memory(err, e.name, (size_t)e.size);
    }
}

static still_status run_babi(cli_make *m, still_error *err)
{
    sti_buf text[TASKS + 1] = {{0}};
    cli_tar *t = NULL;
    char *path = cli_make_path(m, 0);
    still_status st =
        path ? cli_tar_open(path, &t, err) : sti_fail_memory(err, m->file[0], 0);
    if (st == STILL_OK) st = read_tasks(t, text, err);
    cli_tar_close(t);
    for (int i = 1; i <= TASKS; i++) {
        if (st == STILL_OK) st = babi_task(m, i, &text[i], err);
        sti_buf_free(&text[i]);
    }
    free(path);
    return st;
}

/* -------------------------------------------------------------------------- */

const cli_converter cli_convert_question[] = {
    {"squad", {"squad_v2_dev.jsonl"}, 1, run_squad},
    {"hotpotqa", {"hotpotqa_dev_distractor.jsonl"}, 1, run_hotpotqa},
    {"babi", {"babi_qa1_qa5_test.jsonl"}, 1, run_babi},
    {"alpaca", {"alpaca_original.jsonl"}, 1, run_alpaca},
    {"alpaca-cleaned", {"alpaca_cleaned.jsonl"}, 1, run_alpaca},
    {.name = NULL},
};
