/* babilong.c - BABILong QA1 to QA5: the facts of a bAbI story, hidden among sentences
 * of books in their own order, and a question about them.
 *
 * A context has nominal length - 300 tokens, facts included; 1024, 2048 ... stand for
 * 1000, 2000 ... Published sets count tokens of GPT-2 and take their noise from PG-19;
 * here sizes are in tokens of the evaluated model, and books come from Project
 * Gutenberg. Length 0, or any that leaves no room, is the facts alone.
 *
 * Draws of the set, whenever noise is needed: a book, and where an excerpt begins in
 * it. The next sample uses the rest of an excerpt. Draws of a sample: a gap for each
 * fact. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"
#include "eval/generated/babilong_prompts.h"
#include "eval/generated/generated.h"
#include "eval/generated/sentences.h"
#include "eval/generated/sources.h"
#include "eval/metrics.h"
#include "eval/text.h"

/* ---- A set --------------------------------------------------------------- */

enum { LEAST_TOKENS = 10, OVERHEAD = 300, FACT_TOKENS = 8, SPARE = 8 };

typedef struct cut { /* a sentence of noise, in the set's buffer behind a space */
    size_t start, n;
} cut;

typedef struct set {
    const sti_babilong_task *task;
    sti_task_params p;
    const char *name;
    uint64_t size;   /* tokens of a context; 0: facts alone */
    json_t *stories; /* records of the task that are not too long */
    json_t *books;   /* their texts */
    sti_draws draws;
    const char *excerpt; /* in a book; what is left begins at `at` */
    size_t excerpt_n, at;
    /* Of the sample that is being made. */
    sti_buf noise, context;
    cut *sentence;
    size_t n_sentences, capacity;
    int32_t *ids; /* of the last sentence, which is cut to fit */
    size_t n_ids, ids_capacity;
} set;

static uint64_t context_size(int length)
{
    const int nominal = length % 1024 == 0 ? length / 1024 * 1000 : length;
    return nominal > OVERHEAD ? (uint64_t)(nominal - OVERHEAD) : 0;
}

static json_t *facts_of(const json_t *story)
{
    return json_object_get(story, "facts");
}

static void put_facts(sti_buf *b, const json_t *facts)
{
    for (size_t i = 0; i < json_array_size(facts); i++) {
        if (i) sti_buf_puts(b, " ");
        sti_buf_puts(b, json_string_value(json_array_get(facts, i)));
    }
}

/* Tokens of facts inside a text, where a space stands before them. */
static still_status facts_tokens(set *s, const json_t *facts, uint64_t *tokens,
                                 still_error *err)
{
    sti_buf_clear(&s->context);
    sti_buf_puts(&s->context, " ");
    put_facts(&s->context, facts);
    if (s->context.failed) return sti_fail_memory(err, s->name, s->context.n);
    return sti_generated_tokens(s->p.tk, s->context.p, s->context.n, tokens, err);
}

static still_status add_story(void *user, json_t *rec, still_error *err)
{
    set *s = user;
    const char *name, *question, *answer;
    json_t *facts;
    STI_TRY(sti_field_string(rec, "task", &name, err));
    if (strcmp(name, s->task->name) != 0) return STILL_OK;
    STI_TRY(sti_field_string(rec, "question", &question, err));
    STI_TRY(sti_field_string(rec, "answer", &answer, err));
    STI_TRY(sti_field_array(rec, "facts", &facts, err));
    if (!json_array_size(facts) || !sti_all_strings(facts))
        return sti_fail(err, STILL_E_FORMAT, "'facts' are not strings, one at least");
    if (s->size) {
        uint64_t tokens;
        if (json_array_size(facts) > s->size / FACT_TOKENS) return STILL_OK;
        STI_TRY(facts_tokens(s, facts, &tokens, err));
        if (tokens > s->size) return STILL_OK;
    }
    sti_json_append(&s->stories, json_incref(rec));
    return s->stories ? STILL_OK : sti_fail_memory(err, "facts", 0);
}

static still_status add_book(void *user, json_t *rec, still_error *err)
{
    const char *text;
    json_t **books = user;
    STI_TRY(sti_field_string(rec, "text", &text, err));
    sti_json_append(books, json_incref(json_object_get(rec, "text")));
    return *books ? STILL_OK : sti_fail_memory(err, "a book", strlen(text));
}

static void close_set(void *p)
{
    set *s = p;
    json_decref(s->stories);
    json_decref(s->books);
    sti_buf_free(&s->noise);
    sti_buf_free(&s->context);
    free(s->sentence);
    free(s->ids);
    free(s);
}

static still_status fill_set(set *s, still_error *err)
{
    static const char facts[] = "babi_qa1_qa5_test.jsonl",
                      books[] = "gutenberg_books.jsonl";
    if (s->p.length < 0 || s->p.length > 1 << 24)
        return sti_fail(err, STILL_E_ARG, "%s: length %d, expected 0 to %d", s->name,
                        s->p.length, 1 << 24);
    if (!s->stories || !s->books) return sti_fail_memory(err, s->name, 0);
    STI_TRY(sti_source_read(s->p.data_dir, facts, add_story, s, err));
    if (!json_array_size(s->stories))
        return sti_fail(err, STILL_E_LIMIT,
                        "%s: no story of %s in %s/%s fits length %d", s->name,
                        s->task->name, s->p.data_dir, facts, s->p.length);
    if (!s->size) return STILL_OK;
    STI_TRY(sti_source_read(s->p.data_dir, books, add_book, &s->books, err));
    if (json_array_size(s->books)) return STILL_OK;
    return sti_fail(err, STILL_E_FORMAT, "%s/%s: has no books", s->p.data_dir, books);
}

static still_status open_set(const sti_recipe *r, const sti_task_params *p, void **out,
                             still_error *err)
{
    set *s = sti_alloc(1, sizeof *s);
    if (!s) return sti_fail_memory(err, r->name, sizeof *s);
    *s = (set){.task = r->detail, .p = *p, .name = r->name};
    s->size = context_size(p->length);
    s->draws = sti_draws_of(p->seed, r->name, p->length, 0);
    s->stories = json_array();
    s->books = json_array();
    still_status status = fill_set(s, err);
    if (status != STILL_OK)
        close_set(s);
    else
        *out = s;
    return status;
}

static uint64_t available(const void *p)
{
    return json_array_size(((const set *)p)->stories);
}

/* ---- Noise --------------------------------------------------------------- */

/* Draws an excerpt of ten characters per token of a context. Its first sentence is
 * incomplete and dropped. */
static void take_excerpt(set *s)
{
    const json_t *book = json_array_get(
        s->books, sti_draw_below(&s->draws, (uint32_t)json_array_size(s->books)));
    const char *text = json_string_value(book);
    const size_t n = json_string_length(book);
    size_t from = n ? (size_t)(sti_draw(&s->draws) % n) : 0, start, end;
    while (from > 0 && ((unsigned char)text[from] & 0xC0) == 0x80) from--;
    size_t to = from, len;
    for (uint64_t k = 10 * s->size; k > 0 && to < n; k--, to += len)
        sti_utf8_decode(text + to, &len);
    s->excerpt = text + from;
    s->excerpt_n = to - from;
    s->at = 0;
    sti_sentence_next(s->excerpt, s->excerpt_n, false, &s->at, &start, &end);
}

/* The next sentence that is not the last of its excerpt. */
static bool next_sentence(set *s, const char **p, size_t *n)
{
    size_t start, end, after, last_start, last_end;
    if (!sti_sentence_next(s->excerpt, s->excerpt_n, false, &s->at, &start, &end))
        return false;
    after = s->at;
    if (!sti_sentence_next(s->excerpt, s->excerpt_n, false, &after, &last_start,
                           &last_end))
        return false;
    *p = s->excerpt + start;
    *n = end - start;
    return true;
}

/* Appends " sentence" to s->noise and encodes it into s->ids. */
static still_status add_sentence(set *s, const char *p, size_t n, still_error *err)
{
    if (s->n_sentences == s->capacity) {
        const size_t capacity = s->capacity ? 2 * s->capacity : 64;
        cut *grown = sti_grow(s->sentence, capacity, sizeof *grown);
        if (!grown) return sti_fail_memory(err, s->name, capacity * sizeof *grown);
        s->sentence = grown;
        s->capacity = capacity;
    }
    const size_t at = s->noise.n;
    sti_buf_puts(&s->noise, " ");
    sti_buf_put(&s->noise, p, n);
    if (s->noise.failed) return sti_fail_memory(err, s->name, at + n);
    s->sentence[s->n_sentences++] = (cut){at + 1, n};
    for (;;) {
        STI_TRY(still_tokenizer_encode(s->p.tk, s->noise.p + at, n + 1, 0, s->ids,
                                       s->ids_capacity, &s->n_ids, err));
        if (s->n_ids <= s->ids_capacity) return STILL_OK;
        int32_t *grown = sti_grow(s->ids, s->n_ids, sizeof *grown);
        if (!grown) return sti_fail_memory(err, s->name, s->n_ids * sizeof *grown);
        s->ids = grown;
        s->ids_capacity = s->n_ids;
    }
}

/* Adds sentences until `capacity` tokens are full. *keep: tokens of the last one that
 * fit. Pieces have a few tokens more or less than the text they make, so the last
 * sentence must have some to spare; one that ends too close to the limit is skipped. */
static still_status fill_noise(set *s, uint64_t capacity, uint64_t *keep,
                               still_error *err)
{
    sti_buf_clear(&s->noise);
    s->n_sentences = 0;
    int barren = 0; /* consecutive excerpts without a usable sentence */
    for (uint64_t used = 0; used < capacity;) {
        const char *p;
        size_t n;
        uint64_t tokens;
        if (!next_sentence(s, &p, &n)) {
            if (++barren > 1000)
                return sti_fail(err, STILL_E_FORMAT,
                                "%s: the books of %s have no sentences of %d tokens",
                                s->name, s->p.data_dir, LEAST_TOKENS);
            take_excerpt(s);
            continue;
        }
        STI_TRY(sti_generated_tokens(s->p.tk, p, n, &tokens, err));
        if (tokens < LEAST_TOKENS) continue;
        STI_TRY(add_sentence(s, p, n, err));
        *keep = capacity - used;
        if (s->n_ids >= *keep && s->n_ids < *keep + SPARE) {
            s->noise.n = s->sentence[--s->n_sentences].start - 1;
        } else {
            used += s->n_ids;
            barren = 0;
        }
    }
    return STILL_OK;
}

/* Truncates the last sentence to its first `keep` tokens, without an incomplete
 * character and without trailing white space, which would not survive at the end of
 * a context. */
static void cut_last(set *s, uint64_t keep)
{
    cut *last = &s->sentence[s->n_sentences - 1];
    const size_t at =
        last->start - 1; /* of the space, which its first token may hold */
    s->noise.n = at;
    for (uint64_t i = 0; i < keep && i < s->n_ids; i++) {
        size_t n;
        const char *piece = still_tokenizer_piece(s->p.tk, s->ids[i], false, &n);
        if (piece) sti_buf_put(&s->noise, piece, n);
    }
    const char *p = s->noise.p + at;
    const size_t n = sti_text_strip_end(p, sti_utf8_span(p, s->noise.n - at));
    last->n = n ? n - 1 : 0;
}

/* ---- A sample ------------------------------------------------------------ */

static int by_number(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* Facts before the sentences at gap[], all joined by a space. */
static void put_context(set *s, const json_t *facts, const uint32_t *gap)
{
    const size_t n = json_array_size(facts);
    sti_buf *b = &s->context;
    sti_buf_clear(b);
    for (size_t i = 0, next = 0; i <= s->n_sentences; i++) {
        for (; next < n && gap[next] == i; next++)
            sti_buf_printf(b, "%s%s", b->n ? " " : "",
                           json_string_value(json_array_get(facts, next)));
        if (i == s->n_sentences || !s->sentence[i].n) continue;
        if (b->n) sti_buf_puts(b, " ");
        sti_buf_put(b, s->noise.p + s->sentence[i].start, s->sentence[i].n);
    }
}

/* Truncates the last sentence so that the whole context has s->size tokens, or
 * slightly fewer where borders of tokens and characters do not allow it. The tokens
 * of pieces nearly add up to those of the whole, so one or two tries suffice. */
static still_status fit_context(set *s, const json_t *facts, const uint32_t *gap,
                                uint64_t keep, still_error *err)
{
    uint64_t tokens, too_many = UINT64_MAX; /* keep that was too much */
    size_t whole = s->n_sentences ? s->n_sentences - 1 : 0;
    for (;;) {
        if (s->n_sentences) cut_last(s, keep);
        put_context(s, facts, gap);
        if (s->noise.failed || s->context.failed)
            return sti_fail_memory(err, s->name, s->context.n);
        STI_TRY(
            sti_generated_tokens(s->p.tk, s->context.p, s->context.n, &tokens, err));
        if (tokens > s->size && keep > 0) {
            const uint64_t over = tokens - s->size;
            too_many = keep;
            keep = keep > over ? keep - over : 0;
        } else if (tokens > s->size && whole > 0) {
            s->sentence[--whole].n = 0;
        } else if (tokens < s->size && keep + 1 < too_many && keep < s->n_ids) {
            const uint64_t more = s->size - tokens, most = too_many - 1 - keep;
            keep += more < most ? more : most;
        } else {
            return STILL_OK;
        }
    }
}

static still_status make_sample(void *p, uint64_t i, sti_sample *out, still_error *err)
{
    set *s = p;
    const json_t *story = json_array_get(s->stories, i);
    const json_t *facts = facts_of(story);
    const size_t n = json_array_size(facts);
    sti_buf_clear(&s->context);
    if (!s->size) {
        put_facts(&s->context, facts);
    } else {
        uint64_t tokens, keep = 0;
        STI_TRY(facts_tokens(s, facts, &tokens, err));
        STI_TRY(fill_noise(s, s->size - tokens, &keep, err));
        uint32_t *gap = sti_alloc(n, sizeof *gap);
        if (!gap) return sti_fail_memory(err, s->name, n * sizeof *gap);
        sti_draws d = sti_draws_of(s->p.seed, s->name, s->p.length, 1 + i);
        for (size_t k = 0; k < n; k++)
            gap[k] = sti_draw_below(&d, (uint32_t)s->n_sentences + 1);
        qsort(gap, n, sizeof *gap, by_number);
        still_status status = fit_context(s, facts, gap, keep, err);
        free(gap);
        STI_TRY(status);
    }
    if (s->context.failed) return sti_fail_memory(err, s->name, s->context.n);
    sti_babilong_prompt(&out->prompt, s->task, &s->context,
                        json_string_value(json_object_get(story, "question")));
    sti_sample_expect(out, json_string_value(json_object_get(story, "answer")));
    return STILL_OK;
}

/* ---- Rows ---------------------------------------------------------------- */

#define RECIPE(k)                                                                      \
    {                                                                                  \
        .name = "babilong_qa" #k, .max_new = 20, .samples = 100, .chat = true,         \
        .detail = &sti_babilong_tasks[k - 1], .open = open_set, .make = make_sample,   \
        .available = available, .close = close_set                                     \
    }

static const sti_recipe RECIPES[] = {RECIPE(1), RECIPE(2), RECIPE(3), RECIPE(4),
                                     RECIPE(5)};

const sti_recipe *sti_babilong_recipe(const char *name)
{
    for (size_t i = 0; i < sizeof RECIPES / sizeof *RECIPES; i++)
        if (strcmp(RECIPES[i].name, name) == 0) return &RECIPES[i];
    return NULL;
}

#define OPEN(k)                                                                        \
    static still_status open_qa##k(const sti_task_params *p, sti_source **out,         \
                                   still_error *err)                                   \
    {                                                                                  \
        return sti_generated_open(&RECIPES[k - 1], p, out, err);                       \
    }
OPEN(1)
OPEN(2)
OPEN(3)
OPEN(4)
OPEN(5)

static const int LENGTHS[] = {1024, 2048, 4096, 0}; /* 0K only on request */

#define ROW(k, text, metric_fn)                                                        \
    {                                                                                  \
        .name = "babilong_qa" #k, .summary = "BABILong: " text, .metric = "acc",       \
        .files = "babi_qa1_qa5_test.jsonl gutenberg_books.jsonl", .lengths = LENGTHS,  \
        .score = metric_fn, .open = open_qa##k, .next = sti_generated_next,            \
        .count = sti_generated_count, .close = sti_generated_close                     \
    }

const sti_eval_task sti_task_babilong[] = {
    ROW(1, "where a person is, from one fact", sti_babilong_places),
    ROW(2, "where a thing is, from two facts", sti_babilong_places),
    ROW(3, "where a thing was, from three facts", sti_babilong_places),
    ROW(4, "what lies where, from two facts", sti_babilong_places),
    ROW(5, "who gave what to whom", sti_babilong_gifts),
    {0},
};
