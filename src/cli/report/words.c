/* words.c - see words.h. A word is a run of tokens: the first begins behind a space or
 * behind something that is no letter, the others begin with a letter. All of them get
 * the class of the whole word. Only tokens that have left the window are counted. */
#include "cli/report/words.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "base/utf8.h"

enum { WORD_ROOM = 64 };

const char *cli_word_class_name(cli_word_class c)
{
    static const char *const name[] = {
        [CLI_NEGATION] = "negation",
        [CLI_MODALITY] = "modality",
        [CLI_QUANTIFICATION] = "quantification",
        [CLI_NAME] = "names",
        [CLI_DIGITS] = "digits",
        [CLI_PUNCTUATION] = "punctuation",
        [CLI_SPACE] = "space",
        [CLI_OTHER_WORD] = "other words",
    };
    return name[c];
}

/* ---- Characters ---------------------------------------------------------- */

typedef enum kind { K_END, K_SPACE, K_LETTER, K_DIGIT, K_QUOTE, K_MARK } kind;

/* The kind of the character at p, *length its bytes. A part of a character counts as a
 * letter: tokens of scripts that are spelled in bytes. */
static kind kind_at(const char *p, size_t n, size_t *length)
{
    size_t bad;
    bool cut;
    *length = 1;
    if (!n) return K_END;
    const unsigned char c = (unsigned char)*p;
    if (c < 0x80) {
        if (isspace(c)) return K_SPACE;
        if (isdigit(c)) return K_DIGIT;
        return isalpha(c) ? K_LETTER : c == '\'' ? K_QUOTE : K_MARK;
    }
    if (!sti_utf8_char(p, n, &bad, &cut)) return K_LETTER;
    const uint32_t u = sti_utf8_decode(p, length);
    if (u == 0x2019) return K_QUOTE;
    if (u == 0xA0 || u == 0x3000) return K_SPACE;
    if (u < 0xC0 || (u >= 0x2000 && u < 0x2C00) || (u >= 0x3001 && u < 0x3040) ||
        (u >= 0xFF00 && u < 0xFF10))
        return K_MARK;
    return K_LETTER;
}

typedef struct piece {
    const char *p; /* without spaces in front of it and behind it */
    size_t n;
    bool spaced, broken; /* a space, a line break in front of it or in it */
    kind first, last;
    bool ends_sentence; /* its last character does */
} piece;

static piece piece_of(const cli_saliency *r, int t)
{
    piece w = {0};
    size_t length;
    w.p = still_tokenizer_piece(r->tk, r->ids[t], true, &w.n);
    if (!w.p) w.p = "", w.n = 0;
    for (size_t i = 0; i < w.n; i++) w.broken = w.broken || w.p[i] == '\n';
    while (kind_at(w.p, w.n, &length) == K_SPACE) {
        w.p += length;
        w.n -= length;
        w.spaced = true;
    }
    while (w.n && isspace((unsigned char)w.p[w.n - 1])) w.n--;
    w.first = w.last = kind_at(w.p, w.n, &length);
    for (size_t i = 0; i < w.n; i += length)
        w.last = kind_at(w.p + i, w.n - i, &length);
    w.ends_sentence = w.n && (strchr(".!?:;\"", w.p[w.n - 1]) || w.last == K_QUOTE ||
                              (w.last == K_MARK && w.p[w.n - 1] < 0));
    return w;
}

/* ---- Words --------------------------------------------------------------- */

static bool listed(const char *list, const char *word)
{
    const size_t n = strlen(word);
    for (const char *at = list; *at; at += strspn(at, " ")) {
        const size_t length = strcspn(at, " ");
        if (length == n && memcmp(at, word, n) == 0) return true;
        at += length;
    }
    return false;
}

/* By the word in lower case. nothing, none and nobody say how many: the paper counts
 * nothing among the quantifiers. */
static cli_word_class class_of_word(const char *lower, bool name)
{
    if (listed("not no never nor neither cannot without nowhere n't", lower))
        return CLI_NEGATION;
    if (listed("will would may might can could shall should must ought", lower))
        return CLI_MODALITY;
    if (listed(
            "all any some every each many much most more few fewer less least several "
            "both half none nothing nobody everything everyone everybody something "
            "anything anyone someone enough",
            lower))
        return CLI_QUANTIFICATION;
    return name ? CLI_NAME : CLI_OTHER_WORD;
}

/* Tokens [t, end) are a word, of which the window may still hold a part. */
static cli_word_class read_word(const cli_saliency *r, int t, int *end, bool begins)
{
    char lower[WORD_ROOM + 1] = "";
    size_t n = 0;
    bool capital = false, small = false;
    for (*end = t; *end < r->s->tokens; ++*end) {
        const piece w = piece_of(r, *end);
        if (*end > t && (w.spaced || w.first != K_LETTER)) break;
        for (size_t i = 0; i < w.n; i++) {
            const unsigned char c = (unsigned char)w.p[i];
            if (n == 0 && i == 0) capital = isupper(c);
            small = small || islower(c);
            if (n < WORD_ROOM) lower[n++] = (char)tolower(c);
        }
        if (w.last != K_LETTER) {
            ++*end;
            break;
        }
    }
    lower[n] = 0;
    return class_of_word(lower, capital && small && !begins);
}

/* Fills class for every token that left the window; first[t] is 1 where a word begins. */
static void classify(const cli_saliency *r, unsigned char *class, unsigned char *first)
{
    bool begins = true; /* a sentence */
    kind before = K_END;
    for (int t = 0, end; t < r->s->left; t = end) {
        const piece w = piece_of(r, t);
        cli_word_class c = CLI_PUNCTUATION;
        end = t + 1;
        begins = begins || w.broken;
        if (w.n == 0)
            c = CLI_SPACE;
        else if (w.first == K_DIGIT)
            c = CLI_DIGITS;
        else if (w.first == K_LETTER)
            c = read_word(r, t, &end, begins);
        else if (w.first == K_QUOTE && w.last == K_LETTER && before == K_LETTER)
            /* don't, she'll; but 's and 'd mean many things */
            c = w.p[w.n - 1] == 't'   ? CLI_NEGATION
                : w.p[w.n - 1] == 'l' ? CLI_MODALITY
                                      : CLI_OTHER_WORD;
        for (int i = t; i < end && i < r->s->left; i++) {
            class[i] = (unsigned char)c;
            first[i] = i == t;
        }
        const piece last = piece_of(r, end - 1);
        if (last.n) {
            begins = last.ends_sentence || t == 0;
            before = last.last;
        }
    }
}

/* ---- Counting ------------------------------------------------------------ */

static void name_token(const piece *w, bool first, cli_word *out)
{
    size_t n = 0;
    if (!first) out->text[n++] = '-';
    /* Whole characters only. */
    for (size_t i = 0, length; i < w->n; i += length) {
        (void)kind_at(w->p + i, w->n - i, &length);
        if (n + length >= sizeof out->text) break;
        memcpy(out->text + n, w->p + i, length);
        n += length;
    }
    for (size_t i = 0; i < n && out->class != CLI_NAME; i++)
        if (out->text[i] >= 'A' && out->text[i] <= 'Z') out->text[i] += 'a' - 'A';
    out->text[n] = 0;
}

static int by_text(const void *a, const void *b)
{
    const cli_word *x = a, *y = b;
    const int order = strcmp(x->text, y->text);
    return order ? order : (int)x->class - (int)y->class;
}

static int by_kept(const void *a, const void *b)
{
    const cli_word *x = a, *y = b;
    if (x->kept != y->kept) return x->kept > y->kept ? -1 : 1;
    return by_text(a, b);
}

/* Entries of the same token become one. */
static int merge(cli_word *w, int n)
{
    int last = 0;
    for (int i = 1; i < n; i++) {
        if (by_text(&w[last], &w[i]) == 0) {
            w[last].times += w[i].times;
            w[last].kept += w[i].kept;
        } else {
            w[++last] = w[i];
        }
    }
    return last + 1;
}

still_status cli_words_count(const cli_saliency *r, const double *chosen,
                             cli_words *out, still_error *err)
{
    const size_t n = (size_t)r->s->left;
    unsigned char *class = sti_alloc(2 * n, 1);
    double all = 0;
    *out = (cli_words){.word = sti_alloc(n, sizeof *out->word)};
    if (!class || !out->word) {
        free(class);
        cli_words_free(out);
        return sti_fail_memory(err, "counts of tokens", n);
    }
    classify(r, class, class + n);
    for (size_t t = 0; t < n; t++) all += chosen[t];
    for (size_t t = 0; t < n; t++) {
        const piece w = piece_of(r, (int)t);
        out->word[t] = (cli_word){
            .class = (cli_word_class) class[t], .times = 1, .kept = chosen[t]};
        name_token(&w, class[n + t], &out -> word[t]);
        if (w.n == 0)
            snprintf(out->word[t].text, sizeof out->word[t].text, "%s",
                     w.broken ? "\\n" : "\" \"");
        out->in_text[class[t]] += 1 / (double)n;
        if (all > 0) out->in_kept[class[t]] += chosen[t] / all;
    }
    free(class);
    qsort(out->word, n, sizeof *out->word, by_text);
    out->n = merge(out->word, (int)n);
    qsort(out->word, (size_t)out->n, sizeof *out->word, by_kept);
    return STILL_OK;
}

void cli_words_free(cli_words *w)
{
    free(w->word);
    *w = (cli_words){0};
}
