/* ruler_qa.c - questions whose answer is in one or a few of many documents.
 *
 * Question i is number i of the file, in order. Its own documents are always there; n
 * counts them and the others. With SQuAD the others come from the same article as long
 * as it has any.
 *
 * Draws of a sample: which others; then the order of all. Documents are known by their
 * text: the same text in two records is one document. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "eval/generated/ruler.h"

typedef struct question {
    const char *text;
    const json_t *answers; /* array of strings, or one string */
    size_t record;
} question;

/* Record i of the file brings raw documents first[i]..first[i+1]-1: SQuAD one, HotpotQA
 * about ten. id[raw] is a document's number by its text. */
typedef struct qa {
    json_t *records;
    char **raw;
    size_t n_raw, raw_capacity;
    size_t *first; /* [records + 1] */
    size_t first_capacity;
    uint32_t *id;     /* [n_raw] */
    const char **doc; /* [n_docs], in order of their bytes */
    uint32_t n_docs;
    question *question;
    size_t n_questions, question_capacity;
    bool hotpot;
} qa;

/* ---- Reading ------------------------------------------------------------- */

/* The array, with room for one more element; NULL, and the old one intact, if there is
 * no memory. */
static void *reserve(void *array, size_t n, size_t *capacity, size_t size)
{
    if (n < *capacity) return array;
    const size_t wanted = *capacity ? 2 * *capacity : 256;
    void *grown = sti_grow(array, wanted, size);
    if (grown) *capacity = wanted;
    return grown;
}

/* Takes ownership of text, even if it fails. */
static still_status add_document(qa *own, char *text, still_error *err)
{
    char **raw =
        text ? reserve(own->raw, own->n_raw, &own->raw_capacity, sizeof *raw) : NULL;
    if (!raw) {
        free(text);
        return sti_fail_memory(err, "documents", own->n_raw * sizeof *raw);
    }
    own->raw = raw;
    own->raw[own->n_raw++] = text;
    if (own->n_raw > UINT32_MAX / 2)
        return sti_fail(err, STILL_E_LIMIT, "more than %u documents", UINT32_MAX / 2);
    return STILL_OK;
}

static still_status add_question(qa *own, const char *text, const json_t *answers,
                                 still_error *err)
{
    const size_t n = own->n_questions;
    question *q = reserve(own->question, n, &own->question_capacity, sizeof *q);
    if (!q) return sti_fail_memory(err, "questions", n * sizeof *q);
    own->question = q;
    q[own->n_questions++] =
        (question){text, answers, json_array_size(own->records) - 1};
    return STILL_OK;
}

/* "title\n" and all sentences as they are. */
static still_status add_paragraph(qa *own, const json_t *p, still_error *err)
{
    const char *title;
    json_t *sentences;
    STI_TRY(sti_field_string(p, "title", &title, err));
    STI_TRY(sti_field_array(p, "sentences", &sentences, err));
    if (!sti_all_strings(sentences))
        return sti_fail(err, STILL_E_FORMAT, "'sentences' are not all strings");
    sti_buf b = {0};
    sti_buf_printf(&b, "%s\n", title);
    for (size_t i = 0; i < json_array_size(sentences); i++)
        sti_buf_puts(&b, json_string_value(json_array_get(sentences, i)));
    if (b.failed) {
        sti_buf_free(&b);
        return sti_fail_memory(err, title, 0);
    }
    return add_document(own, b.p, err);
}

static still_status add_hotpot(qa *own, const json_t *rec, still_error *err)
{
    const char *text, *answer;
    json_t *context;
    STI_TRY(sti_field_string(rec, "question", &text, err));
    STI_TRY(sti_field_string(rec, "answer", &answer, err));
    STI_TRY(sti_field_array(rec, "context", &context, err));
    for (size_t i = 0; i < json_array_size(context); i++)
        STI_TRY(add_paragraph(own, json_array_get(context, i), err));
    return add_question(own, text, json_object_get(rec, "answer"), err);
}

/* Questions without an answer are skipped. */
static still_status add_squad(qa *own, const json_t *rec, still_error *err)
{
    const char *title, *context, *text;
    json_t *qas, *answers;
    STI_TRY(sti_field_string(rec, "title", &title, err));
    STI_TRY(sti_field_string(rec, "context", &context, err));
    STI_TRY(sti_field_array(rec, "qas", &qas, err));
    STI_TRY(add_document(own, sti_strdup(context), err));
    for (size_t i = 0; i < json_array_size(qas); i++) {
        const json_t *one = json_array_get(qas, i);
        STI_TRY(sti_field_string(one, "question", &text, err));
        STI_TRY(sti_field_array(one, "answers", &answers, err));
        if (!sti_all_strings(answers))
            return sti_fail(err, STILL_E_FORMAT, "'answers' are not all strings");
        if (json_array_size(answers)) STI_TRY(add_question(own, text, answers, err));
    }
    return STILL_OK;
}

static still_status add_record(void *user, json_t *rec, still_error *err)
{
    qa *own = user;
    const size_t n = json_array_size(own->records);
    size_t *first = reserve(own->first, n + 1, &own->first_capacity, sizeof *first);
    if (!first) return sti_fail_memory(err, "records", n * sizeof *first);
    own->first = first;
    sti_json_append(&own->records, json_incref(rec));
    if (!own->records) return sti_fail_memory(err, "a record", 0);
    own->first[n] = own->n_raw;
    STI_TRY(own->hotpot ? add_hotpot(own, rec, err) : add_squad(own, rec, err));
    own->first[n + 1] = own->n_raw;
    return STILL_OK;
}

/* ---- Documents by their text --------------------------------------------- */

typedef struct entry {
    const char *text;
    uint32_t raw;
} entry;

static int by_text(const void *a, const void *b)
{
    return strcmp(((const entry *)a)->text, ((const entry *)b)->text);
}

static still_status number_documents(qa *own, still_error *err)
{
    const size_t n = own->n_raw;
    entry *e = sti_alloc(n, sizeof *e);
    own->id = sti_alloc(n, sizeof *own->id);
    own->doc = sti_alloc(n, sizeof *own->doc);
    if (!e || !own->id || !own->doc) {
        free(e);
        return sti_fail_memory(err, "documents", n * sizeof *e);
    }
    for (size_t i = 0; i < n; i++) e[i] = (entry){own->raw[i], (uint32_t)i};
    qsort(e, n, sizeof *e, by_text);
    for (size_t i = 0; i < n; i++) {
        if (i == 0 || strcmp(e[i].text, e[i - 1].text) != 0)
            own->doc[own->n_docs++] = e[i].text;
        own->id[e[i].raw] = own->n_docs - 1;
    }
    free(e);
    return STILL_OK;
}

static still_status load(sti_ruler *r, still_error *err)
{
    const sti_qa_variant *v = r->variant;
    qa *own = r->own = sti_alloc(1, sizeof *own);
    if (!own || !(own->records = json_array()))
        return sti_fail_memory(err, r->name, sizeof *own);
    own->hotpot = v->hotpot;
    STI_TRY(sti_source_read(r->p.data_dir, v->file, add_record, own, err));
    if (!own->n_questions || !own->n_raw)
        return sti_fail(err, STILL_E_FORMAT, "%s/%s: has no questions with documents",
                        r->p.data_dir, v->file);
    return number_documents(own, err);
}

static void free_own(void *p)
{
    qa *own = p;
    for (size_t i = 0; i < own->n_raw; i++) free(own->raw[i]);
    json_decref(own->records);
    free(own->raw);
    free(own->first);
    free(own->id);
    free(own->doc);
    free(own->question);
    free(own);
}

/* ---- A sample ------------------------------------------------------------ */

typedef struct choice {
    unsigned char *taken; /* [n_docs] */
    uint32_t *pick;       /* [n_docs], the first n of them chosen */
    uint32_t n;
} choice;

static void take_range(choice *c, const qa *own, size_t from, size_t to)
{
    for (size_t i = own->first[from]; i < own->first[to]; i++) {
        const uint32_t id = own->id[i];
        if (c->taken[id]) continue;
        c->taken[id] = 1;
        c->pick[c->n++] = id;
    }
}

/* Records [*from, *to) around a record whose title is the same: its article. */
static void article_of(const qa *own, size_t record, size_t *from, size_t *to)
{
    const json_t *title =
        json_object_get(json_array_get(own->records, record), "title");
    *from = record;
    *to = record + 1;
    for (; *from > 0; --*from)
        if (!json_equal(title, json_object_get(json_array_get(own->records, *from - 1),
                                               "title")))
            break;
    for (; *to < json_array_size(own->records); ++*to)
        if (!json_equal(title,
                        json_object_get(json_array_get(own->records, *to), "title")))
            break;
}

/* The question's own documents, then those of its article, then any, n in all. */
static void choose(const qa *own, const question *q, uint32_t n, sti_draws *d,
                   choice *c)
{
    if (n > own->n_docs) n = own->n_docs; /* a record may repeat a document */
    take_range(c, own, q->record, q->record + 1);
    if (c->n >= n) return;
    if (!own->hotpot) {
        size_t from, to;
        const uint32_t before = c->n;
        article_of(own, q->record, &from, &to);
        take_range(c, own, from, to);
        if (c->n > n) {
            sti_draw_choice(d, c->pick + before, c->n - before, n - before);
            c->n = n;
        }
    }
    uint32_t all = c->n;
    for (uint32_t id = 0; id < own->n_docs; id++)
        if (!c->taken[id]) c->pick[all++] = id;
    if (c->n < n) sti_draw_choice(d, c->pick + c->n, all - c->n, n - c->n);
    c->n = n;
}

static still_status draw(const sti_ruler *r, uint64_t i, uint64_t n, sti_draws *d,
                         sti_sample *out, still_error *err)
{
    static const char instruction[] = "Answer the question based on the given "
                                      "documents. Only give me the answer and do "
                                      "not output any other words.";
    const qa *own = r->own;
    const question *q = &own->question[i];
    choice c = {.taken = sti_alloc(own->n_docs, 1),
                .pick = sti_alloc(own->n_docs, sizeof *c.pick)};
    const bool ok = c.taken && c.pick;
    if (ok) {
        choose(own, q, (uint32_t)n, d, &c);
        sti_draw_choice(d, c.pick, c.n, c.n);
        sti_buf_printf(&out->prompt, "%s\n\nThe following are given documents.\n\n",
                       instruction);
        for (uint32_t k = 0; k < c.n; k++)
            sti_buf_printf(&out->prompt, "Document %u:\n%s\n\n", k + 1,
                           own->doc[c.pick[k]]);
        sti_buf_printf(&out->prompt, "%s\n\nQuestion: %s Answer:", instruction,
                       q->text);
    }
    free(c.taken);
    free(c.pick);
    if (!ok) return sti_fail_memory(err, r->name, own->n_docs);
    if (json_is_string(q->answers))
        sti_sample_expect(out, json_string_value(q->answers));
    for (size_t k = 0; k < json_array_size(q->answers); k++)
        sti_sample_expect(out, json_string_value(json_array_get(q->answers, k)));
    return STILL_OK;
}

static uint64_t least(const sti_ruler *r, uint64_t i)
{
    const qa *own = r->own;
    const size_t record = own->question[i].record;
    const uint64_t n = own->first[record + 1] - own->first[record];
    return n ? n : 1;
}

static uint64_t most(const sti_ruler *r)
{
    return ((const qa *)r->own)->n_docs;
}

static uint64_t available(const sti_ruler *r)
{
    return ((const qa *)r->own)->n_questions;
}

const sti_ruler_kind sti_ruler_qa = {
    .unit = 10,
    .unit_short = 10,
    .free = free_own,
    STI_NAMED_5(, load, draw, least, most, available),
};
