/* lexer.c - cuts a template into tokens, with Jinja2's rules for white space around tags:
 *
 *   {%-  -%}  strip all white space on that side     {%+  +%}  strip nothing there
 *   {% at the start of a line takes the blanks before it (lstrip_blocks), and %} the
 *   newline behind it (trim_blocks); so do comments. {{ }} strip only with a minus. */
#include <string.h>

#include "base/utf8.h"
#include "template/ast.h"

typedef struct lexer {
    sti_template *t;
    const char *p;
    size_t n, at, capacity;
    still_error *err;
    still_status status;
} lexer;

static bool fail(lexer *x, size_t at, const char *text)
{
    if (x->status == STILL_OK)
        x->status = sti_template_fail(x->t, (uint32_t)at, STILL_E_FORMAT, text, x->err);
    return false;
}

static bool push(lexer *x, sti_ttoken_kind kind, int op, size_t at, size_t n)
{
    sti_template *t = x->t;
    if (x->status != STILL_OK) return false;
    if (t->n_tokens == x->capacity) {
        const size_t capacity = x->capacity ? 2 * x->capacity : 256;
        sti_ttoken *token = sti_arena_take(&t->mem, capacity * sizeof *token);
        if (!token) {
            x->status = sti_fail_memory(x->err, "chat template", capacity);
            return false;
        }
        if (t->n_tokens) memcpy(token, t->token, t->n_tokens * sizeof *token);
        t->token = token;
        x->capacity = capacity;
    }
    t->token[t->n_tokens++] = (sti_ttoken){kind, op, (uint32_t)at, (uint32_t)n};
    return true;
}

/* ---- White space --------------------------------------------------------- */

static size_t skip_space(const lexer *x, size_t at)
{
    size_t len;
    for (; at < x->n; at += len)
        if (!sti_t_space(sti_utf8_decode(x->p + at, &len))) break;
    return at;
}

static size_t strip_end(const lexer *x, size_t from, size_t to)
{
    const sti_tstr s = {.p = x->p + from, .n = to - from};
    size_t a, b;
    sti_t_strip(&s, NULL, false, true, &a, &b);
    return from + b;
}

/* The text from..to before a tag, without what the tag's sign strips. */
static bool push_data(lexer *x, size_t from, size_t to, char sign, bool print)
{
    if (sign == '-') {
        to = strip_end(x, from, to);
    } else if (sign != '+' && !print) {
        const char *newline = memrchr(x->p + from, '\n', to - from);
        const size_t line = newline ? (size_t)(newline - x->p) + 1 : from;
        const bool starts = newline || from == 0 || x->p[from - 1] == '\n';
        if (starts && strip_end(x, line, to) == line) to = line;
    }
    return to == from || push(x, STI_TOK_DATA, 0, from, to - from);
}

static bool here(const lexer *x, size_t at, const char *s)
{
    const size_t n = strlen(s);
    return x->n - at >= n && !memcmp(x->p + at, s, n);
}

/* The end of a tag at `at`: "%}", "-%}", "+%}" with what it strips. 0: none. */
static size_t tag_end(const lexer *x, size_t at, const char *close)
{
    const bool print = close[0] == '}';
    const char sign = at < x->n ? x->p[at] : 0;
    if (sign == '-' && here(x, at + 1, close)) return skip_space(x, at + 3);
    if (sign == '+' && !print && here(x, at + 1, close)) return at + 3;
    if (!here(x, at, close)) return 0;
    at += 2;
    return !print && at < x->n && x->p[at] == '\n' ? at + 1 : at;
}

/* ---- Inside a tag -------------------------------------------------------- */

static bool name_char(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           c == '_' || (unsigned char)c >= 0x80;
}

static bool digit(const lexer *x, size_t at)
{
    return at < x->n && x->p[at] >= '0' && x->p[at] <= '9';
}

static size_t digits(const lexer *x, size_t at)
{
    while (digit(x, at) || (at < x->n && x->p[at] == '_' && digit(x, at + 1))) at++;
    return at;
}

static bool lex_number(lexer *x)
{
    size_t end = digits(x, x->at);
    bool real = false;
    const char c = end < x->n ? x->p[end] : 0;
    if (x->p[x->at] == '0' && end == x->at + 1 && c && strchr("xXoObB", c)) {
        for (end++; end < x->n && name_char(x->p[end]);) end++;
    } else {
        const bool after_dot = x->at > 0 && x->p[x->at - 1] == '.';
        if (c == '.' && digit(x, end + 1) && !after_dot) {
            end = digits(x, end + 1);
            real = true;
        }
        if (end < x->n && (x->p[end] | 32) == 'e' && !after_dot) {
            size_t e = end + 1;
            if (e < x->n && (x->p[e] == '+' || x->p[e] == '-')) e++;
            if (digit(x, e)) {
                end = digits(x, e);
                real = true;
            }
        }
    }
    const size_t at = x->at;
    x->at = end;
    return push(x, real ? STI_TOK_REAL : STI_TOK_INT, 0, at, end - at);
}

static bool lex_string(lexer *x)
{
    const size_t at = x->at;
    const char quote = x->p[x->at++];
    while (x->at < x->n && x->p[x->at] != quote)
        x->at += x->p[x->at] == '\\' && x->at + 1 < x->n ? 2 : 1;
    if (x->at >= x->n) return fail(x, at, "this string has no end");
    x->at++;
    return push(x, STI_TOK_STRING, 0, at, x->at - at);
}

static bool lex_operator(lexer *x)
{
    static const struct {
        char text[3];
        int op;
    } two[] = {{"==", STI_OP_EQUAL},      {"!=", STI_OP_UNEQUAL},
               {"<=", STI_OP_LESS_EQUAL}, {">=", STI_OP_GREATER_EQUAL},
               {"**", STI_OP_POWER},      {"//", STI_OP_FLOOR}};
    for (size_t i = 0; i < sizeof two / sizeof *two; i++) {
        if (!here(x, x->at, two[i].text)) continue;
        x->at += 2;
        return push(x, STI_TOK_OPERATOR, two[i].op, x->at - 2, 2);
    }
    const char c = x->p[x->at];
    if (!c || !strchr("+-*/%~[](){}<>=.:|,;", c))
        return fail(x, x->at, "unexpected character");
    x->at++;
    return push(x, STI_TOK_OPERATOR, c, x->at - 1, 1);
}

/* Tokens up to `close`, which counts only where no bracket is open: {{ {'a': {}} }}. */
static bool lex_tag(lexer *x, const char *close, sti_ttoken_kind end_kind)
{
    enum { DEPTH = 256 };
    char open[DEPTH];
    size_t n_open = 0, start = x->at;
    for (;;) {
        x->at = skip_space(x, x->at);
        const size_t end = n_open ? 0 : tag_end(x, x->at, close);
        if (end) {
            const size_t at = x->at;
            x->at = end;
            return push(x, end_kind, 0, at, 2);
        }
        if (x->at >= x->n) return fail(x, start, "this tag has no end");
        const char c = x->p[x->at];
        bool ok = true;
        if (c == '(' || c == '[' || c == '{') {
            if (n_open == DEPTH) return fail(x, x->at, "too many brackets are open");
            open[n_open++] = c == '(' ? ')' : c == '[' ? ']' : '}';
        } else if (c == ')' || c == ']' || c == '}') {
            if (!n_open || open[--n_open] != c)
                return fail(x, x->at, "this bracket was not opened");
        }
        if (c >= '0' && c <= '9')
            ok = lex_number(x);
        else if (c == '\'' || c == '"')
            ok = lex_string(x);
        else if (name_char(c)) {
            const size_t at = x->at;
            while (x->at < x->n && name_char(x->p[x->at])) x->at++;
            ok = push(x, STI_TOK_NAME, 0, at, x->at - at);
        } else
            ok = lex_operator(x);
        if (!ok) return false;
    }
}

/* ---- Between tags -------------------------------------------------------- */

/* "{%- raw -%}" or "endraw" at `at`: the offset behind it; 0: something else. */
static size_t raw_tag(const lexer *x, size_t at, const char *word)
{
    at += 2;
    if (at < x->n && (x->p[at] == '-' || x->p[at] == '+')) at++;
    at = skip_space(x, at);
    if (!here(x, at, word)) return 0;
    at = skip_space(x, at + strlen(word));
    if (strcmp(word, "raw") != 0) return tag_end(x, at, "%}");
    if (here(x, at, "-%}")) return skip_space(x, at + 3);
    return here(x, at, "%}") ? at + 2 : 0;
}

static bool lex_raw(lexer *x, size_t tag)
{
    const size_t from = x->at;
    for (size_t at = from;; at++) {
        const char *found = memmem(x->p + at, x->n - at, "{%", 2);
        if (!found) return fail(x, tag, "raw has no endraw");
        at = (size_t)(found - x->p);
        const size_t end = raw_tag(x, at, "endraw");
        if (!end) continue;
        x->at = end;
        return push_data(x, from, at, x->p[at + 2], false);
    }
}

static bool lex_comment(lexer *x, size_t tag)
{
    const char *found = memmem(x->p + x->at, x->n - x->at, "#}", 2);
    if (!found && x->at == x->n) return true; /* Jinja2 lets it pass */
    if (!found) return fail(x, tag, "this comment has no end");
    size_t at = (size_t)(found - x->p);
    if (at > x->at && (x->p[at - 1] == '-' || x->p[at - 1] == '+')) at--;
    x->at = tag_end(x, at, "#}");
    return true;
}

static size_t next_tag(const lexer *x, size_t at)
{
    for (; at + 1 < x->n; at++) {
        const char *brace = memchr(x->p + at, '{', x->n - at - 1);
        if (!brace) break;
        at = (size_t)(brace - x->p);
        if (x->p[at + 1] == '%' || x->p[at + 1] == '{' || x->p[at + 1] == '#')
            return at;
    }
    return x->n;
}

static bool lex_next(lexer *x)
{
    const size_t from = x->at, tag = next_tag(x, from);
    if (tag == x->n) {
        x->at = x->n;
        return tag == from || push(x, STI_TOK_DATA, 0, from, tag - from);
    }
    const char kind = x->p[tag + 1], sign = tag + 2 < x->n ? x->p[tag + 2] : 0;
    if (!push_data(x, from, tag, sign, kind == '{')) return x->status == STILL_OK;
    const size_t raw = kind == '%' ? raw_tag(x, tag, "raw") : 0;
    x->at = tag + 2 + (sign == '-' || sign == '+');
    if (raw) {
        x->at = raw;
        return lex_raw(x, tag);
    }
    if (kind == '#') return lex_comment(x, tag);
    if (kind == '{')
        return push(x, STI_TOK_PRINT_BEGIN, 0, tag, 2) &&
               lex_tag(x, "}}", STI_TOK_PRINT_END);
    return push(x, STI_TOK_BLOCK_BEGIN, 0, tag, 2) &&
           lex_tag(x, "%}", STI_TOK_BLOCK_END);
}

still_status sti_template_lex(sti_template *t, still_error *err)
{
    lexer x = {.t = t, .p = t->text, .n = t->n, .err = err};
    while (x.at < x.n && x.status == STILL_OK) lex_next(&x);
    push(&x, STI_TOK_END, 0, t->n, 0);
    return x.status;
}
