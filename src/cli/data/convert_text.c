/* convert_text.c - WikiText-2, essays, books of Project Gutenberg, word lists. */
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/utf8.h"
#include "cli/data/convert.h"

static still_status check_text(const char *what, const sti_buf *text, still_error *err)
{
    const char *p = text->n ? text->p : "";
    if (!text->n || sti_utf8_span(p, text->n) != text->n || memchr(p, 0, text->n))
        return sti_fail(err, STILL_E_FORMAT, "%s: is empty, or not text in UTF-8",
                        what);
    return STILL_OK;
}

/* "pg1342.txt" without its last part. NULL: no memory. */
static json_t *stem(const char *name)
{
    const char *dot = strrchr(name, '.');
    return json_stringn(name, dot && dot > name ? (size_t)(dot - name) : strlen(name));
}

/* ---- WikiText: an article begins with " = Title = " ---------------------- */

/* A heading of the first level, and not of a lower one, " = = Life = = ". */
static bool is_title(const cli_lines *l)
{
    return l->n >= 7 && !memcmp(l->line, " = ", 3) && l->line[3] != '=' &&
           !memcmp(l->line + l->n - 3, " = ", 3) && l->line[l->n - 4] != '=';
}

static bool is_blank(const char *p, size_t n)
{
    while (n && *p == ' ') p++, n--;
    return n == 0;
}

/* The line after the one in l is blank, or there is none. */
static bool blank_follows(const cli_lines *l)
{
    cli_lines next = *l;
    return !cli_lines_next(&next) || is_blank(next.line, next.n);
}

static still_status put_article(cli_make *m, int k, const char *title, size_t n_title,
                                const char *p, size_t n, still_error *err)
{
    return cli_make_put(m, k,
                        json_pack("{s:I,s:s%,s:s%}", "index", cli_make_index(m, k),
                                  "title", title, n_title, "text", p, n),
                        err);
}

/* Texts are as they are; what is before the first title, an empty line, is left out. */
static still_status put_articles(cli_make *m, int k, const char *what,
                                 const sti_buf *text, still_error *err)
{
    cli_lines l;
    const char *from = NULL, *title = NULL;
    size_t n_title = 0;
    bool blank = true; /* the line before */
    STI_TRY(check_text(what, text, err));
    cli_lines_open(&l, what, text);
    while (cli_lines_next(&l)) {
        if (blank && is_title(&l) && blank_follows(&l)) {
            if (from)
                STI_TRY(put_article(m, k, title, n_title, from, (size_t)(l.line - from),
                                    err));
            from = l.line;
            title = l.line + 3;
            n_title = l.n - 6;
        }
        blank = is_blank(l.line, l.n);
    }
    if (!from) return sti_fail(err, STILL_E_FORMAT, "%s: has no articles", what);
    return put_article(m, k, title, n_title, from, (size_t)(l.end - from), err);
}

static still_status run_wikitext2(cli_make *m, still_error *err)
{
    static const char *const part[] = {"wiki.test.raw", "wiki.valid.raw",
                                       "wiki.train.raw"};
    for (int k = 0; k < 3; k++) {
        sti_buf text = {0};
        still_status st = cli_make_unzip(m, 0, part[k], &text, err);
        if (st == STILL_OK) st = put_articles(m, k, part[k], &text, err);
        sti_buf_free(&text);
        if (st != STILL_OK) return st;
    }
    return STILL_OK;
}

/* ---- Essays -------------------------------------------------------------- */

static still_status run_essays(cli_make *m, still_error *err)
{
    for (size_t i = 0; i < m->n; i++) {
        sti_buf text = {0};
        still_status st = cli_make_read(m, i, &text, err);
        if (st == STILL_OK) st = check_text(m->file[i], &text, err);
        if (st == STILL_OK)
            st = cli_make_put(m, 0,
                              json_pack("{s:I,s:o,s:s%}", "index", cli_make_index(m, 0),
                                        "name", stem(m->file[i]), "text", text.p,
                                        text.n),
                              err);
        sti_buf_free(&text);
        if (st != STILL_OK) return st;
    }
    return STILL_OK;
}

/* ---- Books: what is between two lines of asterisks ----------------------- */

typedef struct book {
    const char *title, *author; /* in the header; not ended by a NUL */
    size_t n_title, n_author;
    const char *from, *to;
} book;

static bool begins(const cli_lines *l, const char *word)
{
    const size_t n = strlen(word);
    return l->n >= n && !strncasecmp(l->line, word, n);
}

/* "Title: Emma" of the header. */
static void note(const cli_lines *l, const char *key, const char **value, size_t *n)
{
    if (*value || !begins(l, key)) return;
    const char *p = l->line + strlen(key), *end = l->line + l->n;
    while (p < end && *p == ' ') p++;
    while (p < end && end[-1] == ' ') end--;
    *value = p;
    *n = (size_t)(end - p);
}

/* Old files thank their makers in the first paragraph, and repeat in the last that the book
 * ends. */
static const char *const credits[] = {"Produced by",     "E-text prepared by",
                                      "This etext was",  "This eBook was",
                                      "HTML version by", NULL};
static const char *const farewells[] = {"End of the Project Gutenberg",
                                        "End of Project Gutenberg", NULL};

static bool begins_any(const char *p, const char *end, const char *const *words)
{
    for (; *words; words++)
        if ((size_t)(end - p) >= strlen(*words) &&
            !strncasecmp(p, *words, strlen(*words)))
            return true;
    return false;
}

static bool is_space(char c)
{
    return c == '\n' || c == '\r' || c == ' ' || c == '\t';
}

/* Empty lines at both ends, the credits and the farewell go. The first line keeps its
 * indent. */
static void trim_book(book *b)
{
    for (int round = 0; round < 2; round++) {
        const char *line = b->from;
        for (const char *c = b->from; c < b->to && is_space(*c); c++)
            if (*c == '\n') line = c + 1;
        b->from = line;
        if (round || !begins_any(b->from, b->to, credits)) break;
        const char *c = b->from; /* up to the empty line behind the paragraph */
        while (c < b->to) {
            const char *newline = memchr(c, '\n', (size_t)(b->to - c));
            const bool empty = newline && is_blank(c, (size_t)(newline - c));
            c = newline ? newline + 1 : b->to;
            if (empty) break;
        }
        b->from = c;
    }
    for (int round = 0; round < 2; round++) {
        while (b->to > b->from && is_space(b->to[-1])) b->to--;
        const char *last = b->to;
        while (last > b->from && last[-1] != '\n') last--;
        if (!begins_any(last, b->to, farewells)) break;
        b->to = last;
    }
}

static still_status find_book(const char *what, const sti_buf *text, book *b,
                              still_error *err)
{
    cli_lines l;
    *b = (book){0};
    cli_lines_open(&l, what, text);
    while (cli_lines_next(&l) && !b->to) {
        if (!b->from) {
            note(&l, "Title:", &b->title, &b->n_title);
            note(&l, "Author:", &b->author, &b->n_author);
        }
        if (!b->from && (begins(&l, "*** START OF TH") || begins(&l, "***START OF TH")))
            b->from = l.p;
        else if (b->from && (begins(&l, "*** END OF TH") || begins(&l, "***END OF TH")))
            b->to = l.line;
    }
    if (!b->to)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: has no lines *** START and *** END OF THE PROJECT "
                        "GUTENBERG EBOOK (truncated?)",
                        what);
    trim_book(b);
    if (b->from == b->to || !b->title)
        return sti_fail(err, STILL_E_FORMAT, "%s: has no Title: or no text", what);
    return STILL_OK;
}

/* Line ends become \n, and a byte order mark at the front goes. */
static void plain_lines(sti_buf *text)
{
    size_t n = 0, i = text->n >= 3 && !memcmp(text->p, "\xEF\xBB\xBF", 3) ? 3 : 0;
    for (; i < text->n; i++)
        if (text->p[i] != '\r' || i + 1 == text->n || text->p[i + 1] != '\n')
            text->p[n++] = text->p[i];
    text->n = n;
    if (text->p) text->p[n] = 0;
}

static still_status put_book(cli_make *m, size_t i, const sti_buf *text,
                             still_error *err)
{
    book b;
    const char *number = m->file[i] + strspn(m->file[i], "abcdefghijklmnopqrstuvwxyz");
    STI_TRY(find_book(m->file[i], text, &b, err));
    sti_buf body = {0}, source = {0};
    sti_buf_printf(&source, "Project Gutenberg %.*s", (int)strcspn(number, "."),
                   number);
    sti_buf_put(&body, b.from, (size_t)(b.to - b.from));
    sti_buf_put(&body, "\n", 1);
    json_t *v =
        body.failed || source.failed
            ? NULL
            : json_pack("{s:I,s:s%,s:s%,s:s,s:s%}", "index", cli_make_index(m, 0),
                        "title", b.title, b.n_title, "author", b.author ? b.author : "",
                        b.n_author, "source", source.p, "text", body.p, body.n);
    sti_buf_free(&body);
    sti_buf_free(&source);
    return cli_make_put(m, 0, v, err);
}

static still_status run_books(cli_make *m, still_error *err)
{
    for (size_t i = 0; i < m->n; i++) {
        sti_buf text = {0};
        still_status st = cli_make_read(m, i, &text, err);
        if (st == STILL_OK) st = check_text(m->file[i], &text, err);
        plain_lines(&text);
        if (st == STILL_OK) st = put_book(m, i, &text, err);
        sti_buf_free(&text);
        if (st != STILL_OK) return st;
    }
    return STILL_OK;
}

/* ---- Words --------------------------------------------------------------- */

static still_status put_words(cli_make *m, int k, const char *what, const sti_buf *text,
                              still_error *err)
{
    cli_lines l;
    STI_TRY(check_text(what, text, err));
    cli_lines_open(&l, what, text);
    while (cli_lines_next(&l)) {
        size_t n = l.n;
        while (n && is_space(l.line[n - 1])) n--;
        if (n == 0) continue;
        STI_TRY(cli_make_put_text(m, k, l.line, n, err));
        STI_TRY(cli_make_put_text(m, k, "\n", 1, err));
        m->out[k].records++;
    }
    return STILL_OK;
}

static still_status run_words(cli_make *m, still_error *err)
{
    static const char *const part[] = {"adjectivelist.txt", "nounlist.txt",
                                       "verblist.txt", "words/en"};
    for (int k = 0; k < 4; k++) {
        sti_buf text = {0};
        still_status st = cli_make_unzip(m, k == 3, part[k], &text, err);
        if (st == STILL_OK) st = put_words(m, k, part[k], &text, err);
        sti_buf_free(&text);
        if (st != STILL_OK) return st;
    }
    return STILL_OK;
}

/* -------------------------------------------------------------------------- */

const cli_converter cli_convert_text[] = {
    {"wikitext2",
     {"wikitext2_raw_test.jsonl", "wikitext2_raw_valid.jsonl",
      "wikitext2_raw_train.jsonl"},
     1,
     run_wikitext2},
    {"essays", {"paul_graham_essays.jsonl"}, 0, run_essays},
    {"books", {"gutenberg_books.jsonl"}, 0, run_books},
    {"words",
     {"words_adjectives.txt", "words_nouns.txt", "words_verbs.txt",
      "words_english.txt"},
     2,
     run_words},
    {.name = NULL},
};
