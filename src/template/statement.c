/* statement.c - variables, statements, macros and what they print. */
#include "template/eval.h"

/* ---- Variables ----------------------------------------------------------- */

typedef struct sti_tvariable {
    const sti_tstr *name;
    sti_tval v;
    struct sti_tvariable *next;
} variable;

sti_tscope *sti_scope_new(sti_run *r, sti_tscope *parent)
{
    sti_tscope *s = sti_run_take(r, 1, sizeof *s);
    if (s) s->parent = parent;
    return s;
}

static variable *find_in(sti_run *r, const sti_tscope *s, const sti_tstr *name)
{
    for (variable *v = s->first; v && sti_run_step(r, 1); v = v->next)
        if (sti_t_same_text(v->name, name)) return v;
    return NULL;
}

void sti_scope_set(sti_run *r, const sti_tstr *name, sti_tval v)
{
    if (r->failed) return;
    variable *found = find_in(r, r->scope, name);
    if (!found && (found = sti_run_take(r, 1, sizeof *found))) {
        found->name = name;
        found->next = r->scope->first;
        r->scope->first = found;
    }
    if (found) found->v = v;
}

const sti_tval *sti_scope_find(sti_run *r, const sti_tstr *name)
{
    for (const sti_tscope *s = r->scope; s && sti_run_step(r, 1); s = s->parent) {
        const variable *v = find_in(r, s, name);
        if (v) return &v->v;
    }
    return NULL;
}

static void assign_attribute(sti_run *r, const sti_tnode *target, sti_tval v)
{
    const sti_tval *of = sti_scope_find(r, target->a->value.u.s);
    if (r->failed) return;
    if (of && of->kind == STI_T_NAMESPACE)
        sti_t_put(r, of->u.d, target->value, v);
    else
        sti_run_fail(r, STILL_E_FORMAT,
                     "'%.*s' is no namespace, so its attributes "
                     "cannot be set",
                     (int)target->a->value.u.s->n, target->a->value.u.s->p);
}

void sti_assign(sti_run *r, const sti_tnode *target, sti_tval v)
{
    if (r->failed) return;
    if (target->kind == STI_N_NAME) {
        sti_scope_set(r, target->value.u.s, v);
    } else if (target->kind == STI_N_ATTRIBUTE) {
        assign_attribute(r, target, v);
    } else { /* a tuple */
        const sti_tlist *l = sti_t_each(r, v);
        const sti_tnode *t = target->list;
        size_t n = 0;
        for (; t; t = t->next) n++;
        if (l && l->n != n) {
            sti_run_fail(r, STILL_E_FORMAT, "%zu values for %zu variables", l->n, n);
            return;
        }
        t = target->list;
        for (size_t i = 0; l && i < n; i++, t = t->next) sti_assign(r, t, l->v[i]);
    }
}

/* ---- Macros -------------------------------------------------------------- */

sti_tval sti_capture(sti_run *r, const sti_tnode *first)
{
    sti_tout out = {0}, *outer = r->out;
    sti_tscope *scope = r->scope;
    r->scope = sti_scope_new(r, scope);
    r->out = &out;
    if (r->scope) sti_exec(r, first);
    r->out = outer;
    r->scope = scope;
    return sti_tout_take(r, &out);
}

static void set_text(sti_run *r, const char *name, sti_tval v)
{
    const sti_tval key = sti_t_puts(r, name);
    if (!r->failed) sti_scope_set(r, key.u.s, v);
}

/* What was given beyond the parameters: varargs and kwargs, if the body reads them. */
static void set_others(sti_run *r, const sti_tnode *n, const sti_targs *all,
                       size_t taken)
{
    const sti_tval list = sti_t_list(r, STI_T_TUPLE, 0), dict = sti_t_dict(r, 0);
    for (size_t i = taken; i < all->list->n && !r->failed; i++)
        sti_t_append(r, list.u.l, all->list->v[i]);
    for (size_t i = 0; all->named && i < all->named->n && !r->failed; i++) {
        const sti_tpair *p = &all->named->pair[i];
        bool known = (n->op & 4) && sti_t_is(p->key.u.s, "caller");
        size_t k = 0;
        for (const sti_tnode *q = n->other; q && !known; q = q->next)
            known = k++ >= taken && sti_t_same_text(q->value.u.s, p->key.u.s);
        if (!known) sti_t_put(r, dict.u.d, p->key, p->v);
    }
    if (r->failed) return;
    if ((list.u.l->n && !(n->op & 1)) || (dict.u.d->n && !(n->op & 2))) {
        sti_run_fail(r, STILL_E_FORMAT, "the macro has no place for %s argument",
                     list.u.l->n ? "this many" : "this named");
        return;
    }
    if (n->op & 1) set_text(r, "varargs", list);
    if (n->op & 2) set_text(r, "kwargs", dict);
}

static void bind_parameters(sti_run *r, const sti_tnode *n, const sti_targs *all)
{
    size_t i = 0;
    for (const sti_tnode *q = n->other; q && !r->failed; q = q->next, i++) {
        const sti_tval *named = all->named ? sti_t_get(r, all->named, q->value) : NULL;
        if (named && i < all->list->n && !(n->op & 2)) {
            sti_run_fail(r, STILL_E_FORMAT, "argument '%.*s' is given twice",
                         (int)q->value.u.s->n, q->value.u.s->p);
            return;
        }
        sti_tval v = {.kind = STI_T_UNDEFINED, .u.why = q};
        if (i < all->list->n)
            v = all->list->v[i];
        else if (named)
            v = *named;
        else if (q->a)
            v = sti_eval(r, q->a);
        sti_scope_set(r, q->value.u.s, v);
    }
    set_others(r, n, all, i < all->list->n ? i : all->list->n);
    if (!(n->op & 4) || r->failed) return;
    const sti_tval *caller =
        all->named ? sti_t_get_text(r, all->named, "caller") : NULL;
    if (caller) set_text(r, "caller", *caller);
}

sti_tval sti_call_macro(sti_run *r, const sti_tmacro *m, const sti_targs *all)
{
    sti_tscope *scope = r->scope;
    sti_tval v = STI_T_UNDEF;
    if (sti_run_enter(r) && (r->scope = sti_scope_new(r, m->scope))) {
        bind_parameters(r, m->node, all);
        v = sti_capture(r, m->node->list);
    }
    r->scope = scope;
    sti_run_leave(r);
    return v;
}

static sti_tval new_macro(sti_run *r, const sti_tnode *n)
{
    sti_tmacro *m = sti_run_take(r, 1, sizeof *m);
    if (!m) return STI_T_UNDEF;
    *m = (sti_tmacro){n, r->scope};
    return (sti_tval){.kind = STI_T_MACRO, .u.m = m};
}

/* {% call f(x) %}: f gets the body as the macro `caller`. */
static void call_block(sti_run *r, const sti_tnode *n)
{
    const sti_tval what = sti_eval(r, n->a->a);
    sti_targs all = sti_eval_arguments(r, n->a->list);
    if (!all.named) all.named = sti_t_dict(r, 1).u.d;
    if (r->failed) return;
    sti_t_put(r, all.named, sti_t_puts(r, "caller"), new_macro(r, n));
    r->at = n->a->at;
    if (!r->failed) sti_tout_str(r, r->out, sti_call(r, what, &all));
}

/* ---- Blocks -------------------------------------------------------------- */

/* filter: FILTERs of which the innermost has no value. */
static sti_tval filtered(sti_run *r, const sti_tnode *n, sti_tval v)
{
    if (!n || r->failed) return v;
    v = filtered(r, n->a, v);
    const sti_targs all = sti_eval_arguments(r, n->list);
    r->at = n->at;
    return r->failed ? STI_T_UNDEF : sti_filter(r, n->value.u.s, v, &all);
}

static void assign_block(sti_run *r, const sti_tnode *n, bool set)
{
    const sti_tval text = sti_capture(r, n->list);
    if (r->failed) return;
    const sti_tval v = filtered(r, set ? n->b : n->a, text);
    if (set)
        sti_assign(r, n->a, v);
    else if (!r->failed && v.kind != STI_T_STRING)
        sti_run_fail(r, STILL_E_FORMAT, "the filter of a block makes %s, not a string",
                     sti_t_kind_name(v));
    else if (!r->failed)
        sti_tout_str(r, r->out, v);
}

/* The values are those of the scope around it. */
static void exec_with(sti_run *r, const sti_tnode *n, sti_flow *flow)
{
    sti_tscope *outer = r->scope, *inner = sti_scope_new(r, outer);
    for (const sti_tnode *set = n->other; set && !r->failed; set = set->next) {
        r->scope = outer;
        const sti_tval v = sti_eval(r, set->b);
        r->scope = inner;
        sti_assign(r, set->a, v);
    }
    if (!r->failed) {
        r->scope = inner;
        *flow = sti_exec(r, n->list);
    }
    r->scope = outer;
}

static sti_flow exec_if(sti_run *r, const sti_tnode *n)
{
    for (const sti_tnode *b = n->list; b && !r->failed; b = b->next)
        if (!b->a || sti_t_true(r, sti_eval(r, b->a)))
            return r->failed ? STI_FLOW_ON : sti_exec(r, b->list);
    return STI_FLOW_ON;
}

static sti_flow exec_one(sti_run *r, const sti_tnode *n)
{
    sti_flow flow = STI_FLOW_ON;
    sti_tval v;
    switch (n->kind) {
    case STI_N_DATA: sti_tout_part(r, r->out, n->value.u.s, 0, n->value.u.s->n); break;
    case STI_N_PRINT:
        v = sti_eval(r, n->a);
        if (!r->failed) sti_tout_str(r, r->out, v);
        break;
    case STI_N_IF: return exec_if(r, n);
    case STI_N_FOR: sti_exec_for(r, n); break;
    case STI_N_SET:
        v = sti_eval(r, n->b);
        r->at = n->at;
        sti_assign(r, n->a, v);
        break;
    case STI_N_SET_BLOCK: assign_block(r, n, true); break;
    case STI_N_FILTER_BLOCK: assign_block(r, n, false); break;
    case STI_N_MACRO: sti_scope_set(r, n->value.u.s, new_macro(r, n)); break;
    case STI_N_CALL_BLOCK: call_block(r, n); break;
    case STI_N_WITH:
    case STI_N_SCOPE: exec_with(r, n, &flow); break;
    case STI_N_BREAK: return STI_FLOW_BREAK;
    case STI_N_CONTINUE: return STI_FLOW_CONTINUE;
    default: sti_run_fail(r, STILL_E_FORMAT, "no statement");
    }
    return flow;
}

sti_flow sti_exec(sti_run *r, const sti_tnode *first)
{
    sti_flow flow = STI_FLOW_ON;
    if (sti_run_enter(r))
        for (const sti_tnode *n = first; n && flow == STI_FLOW_ON && !r->failed;
             n = n->next) {
            sti_run_step(r, 1);
            r->at = n->at;
            flow = exec_one(r, n);
        }
    sti_run_leave(r);
    return flow;
}
