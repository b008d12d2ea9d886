/* expression.c - the value of an expression. */
#include "template/eval.h"

#include "base/utf8.h"

static sti_tval undefined(const sti_tnode *why)
{
    return (sti_tval){.kind = STI_T_UNDEFINED, .u.why = why};
}

/* ---- Looking into values ------------------------------------------------- */

static sti_tval bind(sti_run *r, sti_tval self, const sti_tbuiltin *what)
{
    sti_tmethod *m = sti_run_take(r, 1, sizeof *m);
    if (!m) return STI_T_UNDEF;
    *m = (sti_tmethod){self, what};
    return (sti_tval){.kind = STI_T_METHOD, .u.method = m};
}

/* of.name: a method before a member, as in Jinja2. */
sti_tval sti_attribute(sti_run *r, sti_tval of, const sti_tstr *name,
                       const sti_tnode *why)
{
    if (r->failed) return STI_T_UNDEF;
    if (of.kind == STI_T_UNDEFINED) return sti_fail_undefined(r, of);
    const sti_tbuiltin *method = sti_method_find(r, of, name);
    if (r->failed) return STI_T_UNDEF;
    if (method) return bind(r, of, method);
    if (of.kind == STI_T_LOOP) return sti_loop_attribute(of.u.loop, name);
    if (of.kind == STI_T_DICT || of.kind == STI_T_NAMESPACE) {
        const sti_tval *v =
            sti_t_get(r, of.u.d, (sti_tval){.kind = STI_T_STRING, .u.s = name});
        return v ? *v : undefined(why);
    }
    if (of.kind == STI_T_LIST && of.u.l->shape == STI_T_GROUP) {
        if (sti_t_is(name, "grouper")) return of.u.l->v[0];
        if (sti_t_is(name, "list")) return of.u.l->v[1];
    }
    if (of.kind == STI_T_CYCLER && sti_t_is(name, "current"))
        return of.u.cycler->items->v[of.u.cycler->at];
    if (of.kind == STI_T_MACRO && sti_t_is(name, "name")) return of.u.m->node->value;
    if (of.kind == STI_T_MACRO && sti_t_is(name, "arguments")) {
        const sti_tval out = sti_t_list(r, STI_T_TUPLE, 0);
        for (const sti_tnode *q = of.u.m->node->other; q && !r->failed; q = q->next)
            sti_t_append(r, out.u.l, q->value);
        return out;
    }
    return undefined(why);
}

static sti_tval character(sti_run *r, const sti_tstr *s, int64_t i,
                          const sti_tnode *why)
{
    const int64_t n = (int64_t)sti_t_chars(s);
    size_t len;
    sti_run_step(r, s->n / 32);
    if (i < 0) i += n;
    if (i < 0 || i >= n) return undefined(why);
    const size_t at = sti_t_byte_of(s, (size_t)i);
    sti_utf8_decode(s->p + at, &len);
    return sti_t_sub(r, s, at, len);
}

/* of[key]: a member before a method. */
sti_tval sti_item(sti_run *r, sti_tval of, sti_tval key, const sti_tnode *why)
{
    if (r->failed) return STI_T_UNDEF;
    if (of.kind == STI_T_UNDEFINED) return sti_fail_undefined(r, of);
    if (of.kind == STI_T_DICT) {
        const sti_tval *v = sti_t_get(r, of.u.d, key);
        if (v) return *v;
    }
    const bool whole = key.kind == STI_T_INT || key.kind == STI_T_BOOL;
    if (whole && of.kind == STI_T_LIST && of.u.l->shape <= STI_T_RANGE) {
        const int64_t n = (int64_t)of.u.l->n;
        int64_t i = sti_t_whole(key);
        if (i < 0) i += n;
        return i >= 0 && i < n ? of.u.l->v[i] : undefined(why);
    }
    if (of.kind == STI_T_STRING && whole)
        return character(r, of.u.s, sti_t_whole(key), why);
    if (key.kind == STI_T_STRING) return sti_attribute(r, of, key.u.s, why);
    return undefined(why);
}

/* ---- Nodes --------------------------------------------------------------- */

static sti_tval elements(sti_run *r, const sti_tnode *n)
{
    const sti_tval out =
        sti_t_list(r, n->kind == STI_N_TUPLE ? STI_T_TUPLE : STI_T_PLAIN, 0);
    for (const sti_tnode *e = n->list; e && !r->failed; e = e->next)
        sti_t_append(r, out.u.l, sti_eval(r, e));
    return out;
}

static sti_tval pairs(sti_run *r, const sti_tnode *n)
{
    const sti_tval out = sti_t_dict(r, 0);
    for (const sti_tnode *k = n->list; k && !r->failed; k = k->next->next) {
        const sti_tval key = sti_eval(r, k);
        sti_t_put(r, out.u.d, key, sti_eval(r, k->next));
    }
    return out;
}

static sti_tval optional(sti_run *r, const sti_tnode *n)
{
    return n ? sti_eval(r, n) : STI_T_NIL;
}

static sti_tval item(sti_run *r, const sti_tnode *n)
{
    const sti_tval of = sti_eval(r, n->a);
    if (n->b->kind == STI_N_SLICE) {
        const sti_tval from = optional(r, n->b->a), to = optional(r, n->b->b),
                       step = optional(r, n->b->c);
        r->at = n->at;
        return r->failed ? STI_T_UNDEF : sti_slice(r, of, from, to, step);
    }
    const sti_tval key = sti_eval(r, n->b);
    r->at = n->at;
    return sti_item(r, of, key, n);
}

static sti_tval call(sti_run *r, const sti_tnode *n)
{
    const sti_tval what = sti_eval(r, n->a);
    if (what.kind == STI_T_UNDEFINED) {
        r->at = n->a->at;
        return sti_fail_undefined(r, what);
    }
    const sti_targs all = sti_eval_arguments(r, n->list);
    r->at = n->at;
    return r->failed ? STI_T_UNDEF : sti_call(r, what, &all);
}

static sti_tval filter(sti_run *r, const sti_tnode *n)
{
    const sti_tval v = sti_eval(r, n->a);
    const sti_targs all = sti_eval_arguments(r, n->list);
    r->at = n->at;
    return r->failed ? STI_T_UNDEF : sti_filter(r, n->value.u.s, v, &all);
}

static sti_tval test(sti_run *r, const sti_tnode *n)
{
    const sti_tval v = sti_eval(r, n->a);
    const sti_targs all = sti_eval_arguments(r, n->list);
    r->at = n->at;
    return sti_t_bool(!r->failed && sti_test(r, n->value.u.s, v, &all));
}

static sti_tval sign(sti_run *r, const sti_tnode *n)
{
    const sti_tval v = sti_eval(r, n->a);
    r->at = n->at;
    if (v.kind == STI_T_UNDEFINED) return sti_fail_undefined(r, v);
    if (!sti_t_number(v))
        return sti_run_fail(r, STILL_E_FORMAT, "%s has no sign", sti_t_kind_name(v));
    return sti_binary(r, '*', sti_t_int(n->kind == STI_N_MINUS ? -1 : 1), v);
}

static sti_tval compare(sti_run *r, const sti_tnode *n)
{
    sti_tval left = sti_eval(r, n->a);
    bool holds = true;
    for (const sti_tnode *o = n->list; o && holds && !r->failed; o = o->next) {
        const sti_tval right = sti_eval(r, o->a);
        r->at = o->at;
        holds = sti_compare(r, o->op, left, right);
        left = right;
    }
    return sti_t_bool(holds);
}

static sti_tval concat(sti_run *r, const sti_tnode *n)
{
    sti_tout out = {0};
    for (const sti_tnode *e = n->list; e && !r->failed; e = e->next)
        sti_tout_str(r, &out, sti_eval(r, e));
    return sti_tout_take(r, &out);
}

static sti_tval binary(sti_run *r, const sti_tnode *n)
{
    const sti_tval a = sti_eval(r, n->a), b = sti_eval(r, n->b);
    r->at = n->at;
    return sti_binary(r, n->op, a, b);
}

static sti_tval value(sti_run *r, const sti_tnode *n)
{
    switch (n->kind) {
    case STI_N_CONST: return n->value;
    case STI_N_NAME: {
        const sti_tval *v = sti_scope_find(r, n->value.u.s);
        return v ? *v : undefined(n);
    }
    case STI_N_LIST:
    case STI_N_TUPLE: return elements(r, n);
    case STI_N_DICT: return pairs(r, n);
    case STI_N_ATTRIBUTE: {
        const sti_tval of = sti_eval(r, n->a);
        r->at = n->at;
        return sti_attribute(r, of, n->value.u.s, n);
    }
    case STI_N_ITEM: return item(r, n);
    case STI_N_CALL: return call(r, n);
    case STI_N_FILTER: return filter(r, n);
    case STI_N_TEST: return test(r, n);
    case STI_N_NOT: return sti_t_bool(!sti_t_true(r, sti_eval(r, n->a)));
    case STI_N_MINUS:
    case STI_N_PLUS: return sign(r, n);
    case STI_N_AND:
    case STI_N_OR: {
        const sti_tval a = sti_eval(r, n->a);
        return sti_t_true(r, a) == (n->kind == STI_N_OR) ? a : sti_eval(r, n->b);
    }
    case STI_N_BINARY: return binary(r, n);
    case STI_N_CONCAT: return concat(r, n);
    case STI_N_COMPARE: return compare(r, n);
    case STI_N_CHOICE:
        if (sti_t_true(r, sti_eval(r, n->a))) return sti_eval(r, n->b);
        return n->c ? sti_eval(r, n->c) : undefined(n);
    default: return sti_run_fail(r, STILL_E_FORMAT, "no expression");
    }
}

sti_tval sti_eval(sti_run *r, const sti_tnode *n)
{
    sti_tval v = STI_T_UNDEF;
    if (sti_run_enter(r)) {
        r->at = n->at;
        v = value(r, n);
    }
    sti_run_leave(r);
    return r->failed ? STI_T_UNDEF : v;
}
