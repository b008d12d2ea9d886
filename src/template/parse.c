/* parse.c - statements, and a template from its text. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"
#include "template/ast.h"

enum {
    MOST_TEXT = 1 << 20,
    MOST_MEMORY = 256 << 20, /* a node takes more than the character it stands for */
    MOST_DEPTH = 150
};

/* ---- What both parts use ------------------------------------------------- */

still_status sti_template_fail(const sti_template *t, uint32_t at, still_status code,
                               const char *text, still_error *err)
{
    unsigned line = 1, column = 1;
    for (size_t i = 0; i < at && i < t->n; i++) {
        const unsigned char c = (unsigned char)t->text[i];
        column = c == '\n' ? 1 : column + ((c & 0xC0) != 0x80);
        line += c == '\n';
    }
    return sti_fail(err, code, "chat template, line %u, column %u: %s", line, column,
                    text);
}

sti_tnode *sti_parse_fail(sti_tparser *p, still_status code, const char *fmt, ...)
{
    char text[256];
    p->spare = (sti_tnode){.kind = STI_N_CONST};
    if (p->failed) return &p->spare;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    p->failed = true;
    p->status = sti_template_fail(p->t, p->token->at, code, text, p->err);
    return &p->spare;
}

sti_tnode *sti_parse_node(sti_tparser *p, sti_tnode_kind kind)
{
    sti_tnode *n = p->failed ? NULL : sti_arena_take(&p->t->mem, sizeof *n);
    if (!n) n = sti_parse_fail(p, STILL_E_MEMORY, "out of memory");
    n->kind = kind;
    n->at = p->token->at;
    n->depth = 1;
    return n;
}

void sti_parse_adopt(sti_tparser *p, sti_tnode *parent, const sti_tnode *child)
{
    if (!child || child->depth < parent->depth) return;
    parent->depth = child->depth + 1;
    if (parent->depth > MOST_DEPTH)
        sti_parse_fail(p, STILL_E_LIMIT, "nested more than %d deep", MOST_DEPTH);
}

bool sti_parse_deeper(sti_tparser *p)
{
    if (++p->depth > MOST_DEPTH)
        sti_parse_fail(p, STILL_E_LIMIT, "nested more than %d deep", MOST_DEPTH);
    return !p->failed;
}

bool sti_parse_is_op(const sti_tparser *p, int op)
{
    return p->token->kind == STI_TOK_OPERATOR && p->token->op == op;
}

bool sti_parse_is_name(const sti_tparser *p, const char *name)
{
    return p->token->kind == STI_TOK_NAME && p->token->n == strlen(name) &&
           !memcmp(p->t->text + p->token->at, name, p->token->n);
}

bool sti_parse_skip_op(sti_tparser *p, int op)
{
    const bool is = sti_parse_is_op(p, op);
    p->token += is;
    return is;
}

bool sti_parse_skip_name(sti_tparser *p, const char *name)
{
    const bool is = sti_parse_is_name(p, name);
    p->token += is;
    return is;
}

void sti_parse_expect_op(sti_tparser *p, int op)
{
    if (!sti_parse_skip_op(p, op))
        sti_parse_fail(p, STILL_E_FORMAT, "expected '%c'", (char)op);
}

sti_tval sti_parse_name(sti_tparser *p)
{
    sti_tstr *s = sti_arena_take(&p->t->mem, sizeof *s);
    static const sti_tstr nothing = {.p = "", .n = 0};
    sti_tval v = {.kind = STI_T_STRING, .u.s = &nothing};
    if (p->token->kind != STI_TOK_NAME) {
        sti_parse_fail(p, STILL_E_FORMAT, "expected a name");
    } else if (!s) {
        sti_parse_fail(p, STILL_E_MEMORY, "out of memory");
    } else {
        *s = (sti_tstr){.p = p->t->text + p->token->at, .n = p->token->n};
        v.u.s = s;
        p->token++;
    }
    return v;
}

static void adopt_all(sti_tparser *p, sti_tnode *parent, const sti_tnode *child)
{
    for (; child && !p->failed; child = child->next) sti_parse_adopt(p, parent, child);
}

/* ---- Statements ---------------------------------------------------------- */

static sti_tnode *body(sti_tparser *p, const char *const *ends);

static void block_end(sti_tparser *p)
{
    if (p->token->kind == STI_TOK_BLOCK_END)
        p->token++;
    else
        sti_parse_fail(p, STILL_E_FORMAT, "expected %%}");
}

/* From the end of a tag to one of `ends`, a NULL-terminated list, whose name is then the
 * current token. */
static sti_tnode *body_until(sti_tparser *p, const char *const *ends)
{
    sti_parse_skip_op(p, ':');
    block_end(p);
    sti_tnode *n = body(p, ends);
    if (p->token->kind == STI_TOK_END)
        sti_parse_fail(p, STILL_E_FORMAT, "the template ends before {%% %s %%}",
                       ends[0]);
    return n;
}

/* The same up to one end, which is taken. */
static sti_tnode *body_to(sti_tparser *p, const char *end)
{
    const char *const ends[] = {end, NULL};
    sti_tnode *n = body_until(p, ends);
    p->token += !p->failed;
    return n;
}

static sti_tnode *parse_if(sti_tparser *p)
{
    static const char *const ends[] = {"endif", "elif", "else", NULL};
    sti_tnode *n = sti_parse_node(p, STI_N_IF), **tail = &n->list;
    for (bool more = true; more && !p->failed;) {
        sti_tnode *branch = sti_parse_node(p, STI_N_BRANCH);
        const bool otherwise = sti_parse_is_name(p, "else");
        p->token++; /* if, elif, else */
        if (!otherwise) branch->a = sti_parse_tuple(p, false);
        branch->list = otherwise ? body_to(p, "endif") : body_until(p, ends);
        more = !otherwise && !sti_parse_skip_name(p, "endif");
        sti_parse_adopt(p, branch, branch->a);
        adopt_all(p, branch, branch->list);
        sti_parse_adopt(p, n, branch);
        if (p->failed) break;
        *tail = branch;
        tail = &branch->next;
    }
    return n;
}

static sti_tnode *parse_for(sti_tparser *p)
{
    static const char *const ends[] = {"endfor", "else", NULL};
    sti_tnode *n = sti_parse_node(p, STI_N_FOR);
    p->token++;
    n->a = sti_parse_target(p, false);
    if (!sti_parse_skip_name(p, "in"))
        return sti_parse_fail(p, STILL_E_FORMAT, "expected in");
    n->b = sti_parse_tuple(p, false);
    if (sti_parse_skip_name(p, "if")) n->c = sti_parse_expression(p);
    n->op = sti_parse_skip_name(p, "recursive");
    p->loops++;
    n->list = body_until(p, ends);
    p->loops--;
    if (sti_parse_skip_name(p, "else"))
        n->other = body_to(p, "endfor");
    else
        p->token += !p->failed;
    sti_parse_adopt(p, n, n->a);
    sti_parse_adopt(p, n, n->b);
    sti_parse_adopt(p, n, n->c);
    adopt_all(p, n, n->list);
    adopt_all(p, n, n->other);
    return n;
}

static sti_tnode *parse_set(sti_tparser *p)
{
    sti_tnode *n = sti_parse_node(p, STI_N_SET);
    p->token++;
    n->a = sti_parse_target(p, true);
    if (sti_parse_skip_op(p, '=')) {
        n->b = sti_parse_tuple(p, true);
    } else {
        n->kind = STI_N_SET_BLOCK;
        if (sti_parse_is_op(p, '|')) n->b = sti_parse_filters(p, NULL, false);
        n->list = body_to(p, "endset");
        adopt_all(p, n, n->list);
    }
    sti_parse_adopt(p, n, n->a);
    sti_parse_adopt(p, n, n->b);
    return n;
}

/* (a, b=1): NAMEs whose `a` is the default, into n->other. */
static void signature(sti_tparser *p, sti_tnode *n)
{
    sti_tnode **tail = &n->other, *before = NULL;
    sti_parse_expect_op(p, '(');
    while (!p->failed && !sti_parse_is_op(p, ')')) {
        if (n->other) sti_parse_expect_op(p, ',');
        if (sti_parse_is_op(p, ')')) break;
        sti_tnode *parameter = sti_parse_node(p, STI_N_NAME);
        parameter->value = sti_parse_name(p);
        if (sti_parse_skip_op(p, '='))
            parameter->a = sti_parse_expression(p);
        else if (before)
            sti_parse_fail(p, STILL_E_FORMAT,
                           "a parameter without a default follows one that has it");
        before = parameter->a;
        sti_parse_adopt(p, parameter, parameter->a);
        sti_parse_adopt(p, n, parameter);
        if (p->failed) return;
        *tail = parameter;
        tail = &parameter->next;
    }
    sti_parse_expect_op(p, ')');
}

/* The body of a macro or call block, and which of the special names it reads. */
static void macro_body(sti_tparser *p, sti_tnode *n, const char *end)
{
    const unsigned reads = p->reads;
    const int loops = p->loops;
    p->reads = 0;
    p->loops = 0;
    n->list = body_to(p, end);
    n->op = (int)p->reads;
    p->reads |= reads; /* as Jinja2, which looks into the macros inside */
    p->loops = loops;
    adopt_all(p, n, n->list);
}

static sti_tnode *parse_macro(sti_tparser *p)
{
    sti_tnode *n = sti_parse_node(p, STI_N_MACRO);
    p->token++;
    n->value = sti_parse_name(p);
    signature(p, n);
    macro_body(p, n, "endmacro");
    return n;
}

static sti_tnode *parse_call(sti_tparser *p)
{
    sti_tnode *n = sti_parse_node(p, STI_N_CALL_BLOCK);
    p->token++;
    if (sti_parse_is_op(p, '(')) signature(p, n);
    n->a = sti_parse_expression(p);
    if (!p->failed && n->a->kind != STI_N_CALL)
        return sti_parse_fail(p, STILL_E_FORMAT, "expected a call");
    sti_parse_adopt(p, n, n->a);
    macro_body(p, n, "endcall");
    return n;
}

static sti_tnode *parse_filter(sti_tparser *p)
{
    sti_tnode *n = sti_parse_node(p, STI_N_FILTER_BLOCK);
    p->token++;
    n->a = sti_parse_filters(p, NULL, true);
    n->list = body_to(p, "endfilter");
    sti_parse_adopt(p, n, n->a);
    adopt_all(p, n, n->list);
    return n;
}

static sti_tnode *parse_with(sti_tparser *p)
{
    sti_tnode *n = sti_parse_node(p, STI_N_WITH), **tail = &n->other;
    p->token++;
    while (!p->failed && p->token->kind != STI_TOK_BLOCK_END) {
        if (n->other) sti_parse_expect_op(p, ',');
        sti_tnode *set = sti_parse_node(p, STI_N_SET);
        set->a = sti_parse_node(p, STI_N_NAME);
        set->a->value = sti_parse_name(p);
        sti_parse_expect_op(p, '=');
        set->b = sti_parse_expression(p);
        sti_parse_adopt(p, set, set->b);
        sti_parse_adopt(p, n, set);
        if (p->failed) break;
        *tail = set;
        tail = &set->next;
    }
    n->list = body_to(p, "endwith");
    adopt_all(p, n, n->list);
    return n;
}

static sti_tnode *parse_generation(sti_tparser *p)
{
    sti_tnode *n = sti_parse_node(p, STI_N_SCOPE);
    p->token++;
    n->list = body_to(p, "endgeneration");
    adopt_all(p, n, n->list);
    return n;
}

static sti_tnode *parse_jump(sti_tparser *p)
{
    sti_tnode *n =
        sti_parse_node(p, sti_parse_is_name(p, "break") ? STI_N_BREAK : STI_N_CONTINUE);
    if (!p->loops)
        return sti_parse_fail(p, STILL_E_FORMAT, "break and continue belong in a for");
    p->token++;
    return n;
}

static sti_tnode *statement(sti_tparser *p)
{
    static const struct {
        const char *name;
        sti_tnode *(*parse)(sti_tparser *);
    } known[] = {{"if", parse_if},      {"for", parse_for},
                 {"set", parse_set},    {"macro", parse_macro},
                 {"call", parse_call},  {"filter", parse_filter},
                 {"with", parse_with},  {"generation", parse_generation},
                 {"break", parse_jump}, {"continue", parse_jump}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (sti_parse_is_name(p, known[i].name)) return known[i].parse(p);
    if (p->token->kind != STI_TOK_NAME)
        return sti_parse_fail(p, STILL_E_FORMAT, "expected the name of a statement");
    return sti_parse_fail(p, STILL_E_UNSUPPORTED, "unknown statement '%.*s'",
                          (int)(p->token->n < 40 ? p->token->n : 40),
                          p->t->text + p->token->at);
}

static sti_tnode *data(sti_tparser *p)
{
    sti_tnode *n = sti_parse_node(p, STI_N_DATA);
    sti_tstr *s = sti_arena_take(&p->t->mem, sizeof *s);
    if (!s) return sti_parse_fail(p, STILL_E_MEMORY, "out of memory");
    *s = (sti_tstr){.p = p->t->text + p->token->at, .n = p->token->n};
    n->value = (sti_tval){.kind = STI_T_STRING, .u.s = s};
    p->token++;
    return n;
}

static sti_tnode *print(sti_tparser *p)
{
    sti_tnode *n = sti_parse_node(p, STI_N_PRINT);
    p->token++;
    n->a = sti_parse_tuple(p, true);
    sti_parse_adopt(p, n, n->a);
    if (!p->failed && p->token->kind != STI_TOK_PRINT_END)
        sti_parse_fail(p, STILL_E_FORMAT, "expected }}");
    p->token += !p->failed;
    return n;
}

static sti_tnode *body(sti_tparser *p, const char *const *ends)
{
    sti_tnode *first = NULL, **tail = &first;
    if (!sti_parse_deeper(p)) return NULL;
    while (!p->failed && p->token->kind != STI_TOK_END) {
        sti_tnode *n;
        if (p->token->kind == STI_TOK_DATA) {
            n = data(p);
        } else if (p->token->kind == STI_TOK_PRINT_BEGIN) {
            n = print(p);
        } else {
            p->token++;
            const char *const *end = ends;
            while (end && *end && !sti_parse_is_name(p, *end)) end++;
            if (end && *end) break;
            n = statement(p);
            block_end(p);
        }
        if (p->failed) break;
        *tail = n;
        tail = &n->next;
    }
    p->depth--;
    return first;
}

/* ---- Templates ----------------------------------------------------------- */

/* Copies the text with \n for \r\n and \r, without one newline at the end. */
static still_status copy_text(sti_template *t, const char *text, size_t n,
                              still_error *err)
{
    if (n > MOST_TEXT)
        return sti_fail(err, STILL_E_LIMIT,
                        "chat template: %zu bytes, expected at most %d", n, MOST_TEXT);
    t->text = sti_arena_take(&t->mem, n + 1);
    if (!t->text) return sti_fail_memory(err, "chat template", n);
    for (size_t i = 0; i < n; i++) {
        const bool pair = text[i] == '\r' && i + 1 < n && text[i + 1] == '\n';
        if (!pair) t->text[t->n++] = text[i] == '\r' ? '\n' : text[i];
    }
    if (t->n && t->text[t->n - 1] == '\n') t->n--;
    const size_t good = sti_utf8_span(t->text, t->n);
    if (good < t->n)
        return sti_template_fail(t, (uint32_t)good, STILL_E_FORMAT, "no UTF-8", err);
    return STILL_OK;
}

still_status sti_template_parse(const char *text, size_t n, sti_template **out,
                                still_error *err)
{
    *out = NULL;
    sti_template *t = sti_alloc(1, sizeof *t);
    if (!t) return sti_fail_memory(err, "chat template", sizeof *t);
    t->mem.limit = MOST_MEMORY;
    still_status st = copy_text(t, text, n, err);
    if (st == STILL_OK) st = sti_template_lex(t, err);
    if (st == STILL_OK) {
        sti_tparser p = {.t = t, .token = t->token, .err = err};
        t->body = body(&p, NULL);
        st = p.status;
    }
    if (st != STILL_OK) {
        sti_template_free(t);
        return st;
    }
    *out = t;
    return STILL_OK;
}

void sti_template_free(sti_template *t)
{
    if (!t) return;
    sti_arena_free(&t->mem);
    free(t);
}
