/* parse_expression.c - expressions, by Jinja2's precedence:
 * if-else, or, and, not, comparisons, + -, ~, * / // %, **, unary, then . [] () | is. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "template/ast.h"

static sti_tnode *unary(sti_tparser *p, bool filters);

static sti_tnode *pair(sti_tparser *p, sti_tnode_kind kind, int op, uint32_t at,
                       sti_tnode *a, sti_tnode *b)
{
    sti_tnode *n = sti_parse_node(p, kind);
    n->op = op;
    n->at = at;
    n->a = a;
    n->b = b;
    sti_parse_adopt(p, n, a);
    sti_parse_adopt(p, n, b);
    return n;
}

static void add(sti_tparser *p, sti_tnode *parent, sti_tnode ***tail, sti_tnode *child)
{
    sti_parse_adopt(p, parent, child);
    if (p->failed || !child)
        return; /* a node that failing functions return is not chained */
    **tail = child;
    *tail = &child->next;
}

/* ---- Constants ----------------------------------------------------------- */

/* Up to n digits of a base at s[*i]; false: there is none. */
static bool read_digits(const char *s, size_t end, size_t *i, int n, int base,
                        uint32_t *out)
{
    const size_t from = *i;
    *out = 0;
    for (; *i < end && n > 0; n--, (*i)++) {
        const char c = s[*i];
        const int v = c >= '0' && c <= '9'                 ? c - '0'
                      : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10
                                                           : 99;
        if (v >= base) break;
        *out = *out * (uint32_t)base + (uint32_t)v;
    }
    return *i > from;
}

/* The escape behind a backslash at s[*i], as Python's; out has room for 4 bytes. An
 * unknown one stays as it is; one of a character that is cut short, or given by its name,
 * fails. */
static size_t unescape(sti_tparser *p, const char *s, size_t end, size_t *i, char *out)
{
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    const char c = s[*i];
    const char *found = c ? strchr(from, c) : NULL;
    uint32_t code;
    size_t at = *i + 1;
    if (found) {
        *i = at;
        out[0] = to[found - from];
        return 1;
    }
    if (c == '\n') { /* a line goes on */
        *i = at;
        return 0;
    }
    if (c >= '0' && c <= '7' && read_digits(s, end, i, 3, 8, &code))
        return sti_utf8_encode(code, out);
    const int n = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    if (n && read_digits(s, end, &at, n, 16, &code) && at == *i + 1 + (size_t)n &&
        code <= 0x10FFFF && !(code >= 0xD800 && code < 0xE000)) {
        *i = at;
        return sti_utf8_encode(code, out);
    }
    if (n || c == 'N')
        sti_parse_fail(p, n ? STILL_E_FORMAT : STILL_E_UNSUPPORTED,
                       n ? "the escape \\%c of a string lacks its %d digits"
                         : "the escape \\%c of a string names a character; write it as "
                           "it is",
                       c, n);
    out[0] = '\\';
    return 1;
}

static sti_tnode *string(sti_tparser *p)
{
    sti_tnode *n = sti_parse_node(p, STI_N_CONST);
    size_t room = 0, length = 0;
    for (const sti_ttoken *t = p->token; t->kind == STI_TOK_STRING; t++) room += t->n;
    char *out = sti_arena_take(&p->t->mem, room + 4);
    sti_tstr *s = sti_arena_take(&p->t->mem, sizeof *s);
    if (!out || !s) return sti_parse_fail(p, STILL_E_MEMORY, "out of memory");
    for (; p->token->kind == STI_TOK_STRING; p->token++) { /* 'a' 'b' is 'ab' */
        const char *text = p->t->text + p->token->at + 1;
        const size_t end = p->token->n - 2;
        for (size_t i = 0; i < end;) {
            if (text[i] == '\\') {
                i++;
                length += unescape(p, text, end, &i, out + length);
            } else {
                out[length++] = text[i++];
            }
        }
    }
    *s = (sti_tstr){.p = out, .n = length};
    n->value = (sti_tval){.kind = STI_T_STRING, .u.s = s};
    return n;
}

static sti_tnode *number(sti_tparser *p)
{
    enum { MOST = 64 };
    char text[MOST];
    size_t n = 0;
    sti_tnode *out = sti_parse_node(p, STI_N_CONST);
    const sti_ttoken *t = p->token;
    for (size_t i = 0; i < t->n; i++) {
        if (p->t->text[t->at + i] == '_') continue;
        if (n + 1 == MOST)
            return sti_parse_fail(p, STILL_E_FORMAT, "a number of too many digits");
        text[n++] = p->t->text[t->at + i];
    }
    text[n] = 0;
    errno = 0;
    char *end;
    if (t->kind == STI_TOK_REAL) {
        out->value = sti_t_real(strtod(text, &end));
    } else {
        const char c = n > 1 ? (char)(text[1] | 32) : 0;
        const int base = c == 'x' ? 16 : c == 'o' ? 8 : c == 'b' ? 2 : 10;
        out->value = sti_t_int(strtoll(base == 10 ? text : text + 2, &end, base));
    }
    if (errno || *end || end == text)
        return sti_parse_fail(p, STILL_E_FORMAT,
                              "a malformed number, or one beyond 64 bits");
    p->token++;
    return out;
}

/* ---- Primary expressions ------------------------------------------------- */

static sti_tnode *list(sti_tparser *p, sti_tnode_kind kind, int close)
{
    sti_tnode *n = sti_parse_node(p, kind), **tail = &n->list;
    p->token++;
    while (!p->failed && !sti_parse_is_op(p, close)) {
        if (n->list) sti_parse_expect_op(p, ',');
        if (sti_parse_is_op(p, close)) break;
        add(p, n, &tail, sti_parse_expression(p));
        if (kind != STI_N_DICT) continue;
        sti_parse_expect_op(p, ':');
        add(p, n, &tail, sti_parse_expression(p));
    }
    sti_parse_expect_op(p, close);
    return n;
}

static sti_tnode *name(sti_tparser *p)
{
    static const struct {
        char text[6];
        sti_tval value;
    } word[] = {{"true", {.kind = STI_T_BOOL, .u.b = true}},
                {"True", {.kind = STI_T_BOOL, .u.b = true}},
                {"false", {.kind = STI_T_BOOL, .u.b = false}},
                {"False", {.kind = STI_T_BOOL, .u.b = false}},
                {"none", {.kind = STI_T_NONE}},
                {"None", {.kind = STI_T_NONE}}};
    static const char *const reads[] = {"varargs", "kwargs", "caller"};
    sti_tnode *n = sti_parse_node(p, STI_N_NAME);
    for (size_t i = 0; i < sizeof word / sizeof *word; i++) {
        if (!sti_parse_is_name(p, word[i].text)) continue;
        p->token++;
        n->kind = STI_N_CONST;
        n->value = word[i].value;
        return n;
    }
    for (unsigned i = 0; i < 3; i++)
        if (sti_parse_is_name(p, reads[i])) p->reads |= 1u << i;
    n->value = sti_parse_name(p);
    return n;
}

static sti_tnode *primary(sti_tparser *p)
{
    switch (p->token->kind) {
    case STI_TOK_NAME: return name(p);
    case STI_TOK_STRING: return string(p);
    case STI_TOK_INT:
    case STI_TOK_REAL: return number(p);
    default: break;
    }
    if (sti_parse_is_op(p, '[')) return list(p, STI_N_LIST, ']');
    if (sti_parse_is_op(p, '{')) return list(p, STI_N_DICT, '}');
    if (!sti_parse_skip_op(p, '('))
        return sti_parse_fail(p, STILL_E_FORMAT, "expected an expression");
    sti_tnode *n = sti_parse_is_op(p, ')') ? sti_parse_node(p, STI_N_TUPLE)
                                           : sti_parse_tuple(p, true);
    sti_parse_expect_op(p, ')');
    return n;
}

/* ---- What follows a value ------------------------------------------------ */

static bool named_argument(const sti_tparser *p)
{
    return p->token->kind == STI_TOK_NAME && p->token[1].kind == STI_TOK_OPERATOR &&
           p->token[1].op == '=';
}

/* ARGUMENTs from '(' to ')' into parent's list. */
static void arguments(sti_tparser *p, sti_tnode *parent)
{
    sti_tnode **tail = &parent->list;
    int last = STI_ARG_PLAIN;
    sti_parse_expect_op(p, '(');
    while (!p->failed && !sti_parse_is_op(p, ')')) {
        if (parent->list) sti_parse_expect_op(p, ',');
        if (sti_parse_is_op(p, ')')) break;
        sti_tnode *n = sti_parse_node(p, STI_N_ARGUMENT);
        if (sti_parse_skip_op(p, '*')) {
            n->op = STI_ARG_LIST;
        } else if (sti_parse_skip_op(p, STI_OP_POWER)) {
            n->op = STI_ARG_DICT;
        } else if (named_argument(p)) {
            n->op = STI_ARG_NAMED;
            n->value = sti_parse_name(p);
            p->token++;
        }
        if (n->op == STI_ARG_PLAIN && last != STI_ARG_PLAIN)
            sti_parse_fail(p, STILL_E_FORMAT,
                           "an argument without a name follows others");
        last = n->op;
        n->a = sti_parse_expression(p);
        sti_parse_adopt(p, n, n->a);
        add(p, parent, &tail, n);
    }
    sti_parse_expect_op(p, ')');
}

static sti_tnode *call(sti_tparser *p, sti_tnode *callee)
{
    sti_tnode *n = pair(p, STI_N_CALL, 0, callee->at, callee, NULL);
    arguments(p, n);
    return n;
}

static bool slice_ends(const sti_tparser *p)
{
    return sti_parse_is_op(p, ':') || sti_parse_is_op(p, ']') ||
           sti_parse_is_op(p, ',');
}

static sti_tnode *subscript(sti_tparser *p)
{
    sti_tnode *first = sti_parse_is_op(p, ':') ? NULL : sti_parse_expression(p);
    if (!sti_parse_skip_op(p, ':'))
        return first ? first : sti_parse_fail(p, STILL_E_FORMAT, "expected a slice");
    sti_tnode *n = pair(p, STI_N_SLICE, 0, p->token->at, first, NULL);
    if (!slice_ends(p)) n->b = sti_parse_expression(p);
    if (sti_parse_skip_op(p, ':') && !slice_ends(p)) n->c = sti_parse_expression(p);
    sti_parse_adopt(p, n, n->b);
    sti_parse_adopt(p, n, n->c);
    return n;
}

static sti_tnode *postfix(sti_tparser *p, sti_tnode *n)
{
    while (!p->failed) {
        const uint32_t at = p->token->at;
        if (sti_parse_skip_op(p, '.')) {
            if (p->token->kind == STI_TOK_INT) {
                n = pair(p, STI_N_ITEM, 0, at, n, number(p));
            } else {
                n = pair(p, STI_N_ATTRIBUTE, 0, at, n, NULL);
                n->value = sti_parse_name(p);
            }
        } else if (sti_parse_skip_op(p, '[')) {
            n = pair(p, STI_N_ITEM, 0, at, n, subscript(p));
            sti_parse_expect_op(p, ']');
        } else if (sti_parse_is_op(p, '(')) {
            n = call(p, n);
        } else {
            break;
        }
    }
    return n;
}

/* a.b.c as one name, of filters and tests. */
static sti_tval dotted(sti_tparser *p)
{
    const sti_tval first = sti_parse_name(p);
    if (sti_parse_is_op(p, '.'))
        sti_parse_fail(p, STILL_E_UNSUPPORTED,
                       "filters and tests have no dots in their names");
    return first;
}

sti_tnode *sti_parse_filters(sti_tparser *p, sti_tnode *value, bool first)
{
    while (!p->failed && (first || sti_parse_skip_op(p, '|'))) {
        sti_tnode *n = pair(p, STI_N_FILTER, 0, p->token->at, value, NULL);
        n->value = dotted(p);
        if (sti_parse_is_op(p, '(')) arguments(p, n);
        value = n;
        first = false;
    }
    return value;
}

static bool test_argument(const sti_tparser *p)
{
    switch (p->token->kind) {
    case STI_TOK_STRING:
    case STI_TOK_INT:
    case STI_TOK_REAL: return true;
    case STI_TOK_NAME:
        return !sti_parse_is_name(p, "else") && !sti_parse_is_name(p, "or") &&
               !sti_parse_is_name(p, "and") && !sti_parse_is_name(p, "if");
    default: return sti_parse_is_op(p, '[') || sti_parse_is_op(p, '{');
    }
}

static sti_tnode *test(sti_tparser *p, sti_tnode *value)
{
    const uint32_t at = p->token->at;
    const bool negated = sti_parse_skip_name(p, "not");
    sti_tnode *n = pair(p, STI_N_TEST, 0, at, value, NULL);
    n->value = dotted(p);
    if (sti_parse_is_op(p, '(')) {
        arguments(p, n);
    } else if (test_argument(p)) {
        if (sti_parse_is_name(p, "is"))
            return sti_parse_fail(p, STILL_E_FORMAT, "tests cannot be chained with is");
        sti_tnode *argument = sti_parse_node(p, STI_N_ARGUMENT), **tail = &n->list;
        argument->a = postfix(p, primary(p));
        sti_parse_adopt(p, argument, argument->a);
        add(p, n, &tail, argument);
    }
    return negated ? pair(p, STI_N_NOT, 0, at, n, NULL) : n;
}

static sti_tnode *filter_expression(sti_tparser *p, sti_tnode *n)
{
    while (!p->failed) {
        if (sti_parse_is_op(p, '|'))
            n = sti_parse_filters(p, n, false);
        else if (sti_parse_skip_name(p, "is"))
            n = test(p, n);
        else if (sti_parse_is_op(p, '('))
            n = call(p, n);
        else
            break;
    }
    return n;
}

/* ---- Operators ----------------------------------------------------------- */

static sti_tnode *unary(sti_tparser *p, bool filters)
{
    sti_tnode *n;
    const uint32_t at = p->token->at;
    const bool minus = sti_parse_is_op(p, '-');
    if (!sti_parse_deeper(p)) return sti_parse_node(p, STI_N_CONST);
    if (minus || sti_parse_is_op(p, '+')) {
        p->token++;
        n = pair(p, minus ? STI_N_MINUS : STI_N_PLUS, 0, at, unary(p, false), NULL);
    } else {
        n = primary(p);
    }
    n = postfix(p, n);
    p->depth--;
    return filters ? filter_expression(p, n) : n;
}

static sti_tnode *power(sti_tparser *p)
{
    sti_tnode *n = unary(p, true);
    for (uint32_t at = p->token->at; sti_parse_skip_op(p, STI_OP_POWER);
         at = p->token->at)
        n = pair(p, STI_N_BINARY, STI_OP_POWER, at, n, unary(p, true));
    return n;
}

static sti_tnode *product(sti_tparser *p)
{
    static const int ops[] = {'*', '/', STI_OP_FLOOR, '%'};
    sti_tnode *n = power(p);
    for (bool more = true; more && !p->failed;) {
        more = false;
        for (size_t i = 0; i < 4 && !more; i++) {
            const uint32_t at = p->token->at;
            if (!sti_parse_skip_op(p, ops[i])) continue;
            n = pair(p, STI_N_BINARY, ops[i], at, n, power(p));
            more = true;
        }
    }
    return n;
}

static sti_tnode *concat(sti_tparser *p)
{
    sti_tnode *n = product(p);
    if (!sti_parse_is_op(p, '~')) return n;
    sti_tnode *all = sti_parse_node(p, STI_N_CONCAT), **tail = &all->list;
    add(p, all, &tail, n);
    while (!p->failed && sti_parse_skip_op(p, '~')) add(p, all, &tail, product(p));
    return all;
}

static sti_tnode *sum(sti_tparser *p)
{
    sti_tnode *n = concat(p);
    for (;;) {
        const uint32_t at = p->token->at;
        const int op = sti_parse_is_op(p, '+') ? '+' : '-';
        if (p->failed || !sti_parse_skip_op(p, op)) return n;
        n = pair(p, STI_N_BINARY, op, at, n, concat(p));
    }
}

/* The comparison at the current token, which is taken; 0: none. */
static int comparison(sti_tparser *p)
{
    static const int ops[] = {STI_OP_EQUAL, STI_OP_UNEQUAL,    '<',
                              '>',          STI_OP_LESS_EQUAL, STI_OP_GREATER_EQUAL};
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
        if (sti_parse_skip_op(p, ops[i])) return ops[i];
    if (sti_parse_skip_name(p, "in")) return STI_OP_IN;
    if (!sti_parse_is_name(p, "not")) return 0;
    p->token++;
    if (sti_parse_skip_name(p, "in")) return STI_OP_NOT_IN;
    p->token--;
    return 0;
}

static sti_tnode *compare(sti_tparser *p)
{
    sti_tnode *n = sum(p), *all = NULL, **tail = NULL;
    for (uint32_t at = p->token->at; !p->failed; at = p->token->at) {
        const int op = comparison(p);
        if (!op) break;
        if (!all) {
            all = pair(p, STI_N_COMPARE, 0, at, n, NULL);
            tail = &all->list;
        }
        add(p, all, &tail, pair(p, STI_N_OPERAND, op, at, sum(p), NULL));
    }
    return all ? all : n;
}

static sti_tnode *negation(sti_tparser *p)
{
    const uint32_t at = p->token->at;
    if (!sti_parse_skip_name(p, "not")) return compare(p);
    if (!sti_parse_deeper(p)) return sti_parse_node(p, STI_N_CONST);
    sti_tnode *n = pair(p, STI_N_NOT, 0, at, negation(p), NULL);
    p->depth--;
    return n;
}

static sti_tnode *conjunction(sti_tparser *p)
{
    sti_tnode *n = negation(p);
    for (uint32_t at = p->token->at; !p->failed && sti_parse_skip_name(p, "and");
         at = p->token->at)
        n = pair(p, STI_N_AND, 0, at, n, negation(p));
    return n;
}

static sti_tnode *disjunction(sti_tparser *p)
{
    sti_tnode *n = conjunction(p);
    for (uint32_t at = p->token->at; !p->failed && sti_parse_skip_name(p, "or");
         at = p->token->at)
        n = pair(p, STI_N_OR, 0, at, n, conjunction(p));
    return n;
}

sti_tnode *sti_parse_expression(sti_tparser *p)
{
    if (!sti_parse_deeper(p)) return sti_parse_node(p, STI_N_CONST);
    sti_tnode *n = disjunction(p);
    for (uint32_t at = p->token->at; !p->failed && sti_parse_skip_name(p, "if");
         at = p->token->at) {
        sti_tnode *yes = n;
        n = pair(p, STI_N_CHOICE, 0, at, disjunction(p), yes);
        if (sti_parse_skip_name(p, "else")) n->c = sti_parse_expression(p);
        sti_parse_adopt(p, n, n->c);
    }
    p->depth--;
    return n;
}

/* ---- Tuples and targets -------------------------------------------------- */

static bool tuple_ends(const sti_tparser *p)
{
    return p->token->kind == STI_TOK_PRINT_END || p->token->kind == STI_TOK_BLOCK_END ||
           sti_parse_is_op(p, ')');
}

static sti_tnode *tuple_of(sti_tparser *p, sti_tnode *first,
                           sti_tnode *(*element)(sti_tparser *))
{
    if (!sti_parse_is_op(p, ',')) return first;
    sti_tnode *n = sti_parse_node(p, STI_N_TUPLE), **tail = &n->list;
    add(p, n, &tail, first);
    while (!p->failed && sti_parse_skip_op(p, ',')) {
        if (tuple_ends(p) || sti_parse_is_name(p, "in")) break;
        add(p, n, &tail, element(p));
    }
    return n;
}

sti_tnode *sti_parse_tuple(sti_tparser *p, bool choice)
{
    sti_tnode *(*element)(sti_tparser *) = choice ? sti_parse_expression : disjunction;
    return tuple_of(p, element(p), element);
}

static sti_tnode *target_name(sti_tparser *p)
{
    sti_tnode *n = sti_parse_node(p, STI_N_NAME);
    if (sti_parse_skip_op(p, '(')) { /* for a, (b, c) in ... */
        if (!sti_parse_deeper(p)) return n;
        n = sti_parse_target(p, false);
        p->depth--;
        sti_parse_expect_op(p, ')');
        return n;
    }
    n->value = sti_parse_name(p);
    return n;
}

sti_tnode *sti_parse_target(sti_tparser *p, bool attributes)
{
    sti_tnode *n = target_name(p);
    if (attributes && n->kind == STI_N_NAME && sti_parse_skip_op(p, '.')) {
        n = pair(p, STI_N_ATTRIBUTE, 0, n->at, n, NULL);
        n->value = sti_parse_name(p);
        return n;
    }
    return tuple_of(p, n, target_name);
}
