/* call.c - arguments, and calling what can be called. */
#include <string.h>

#include "template/eval.h"

const sti_tbuiltin *sti_table_find(sti_ttable t, const sti_tstr *name)
{
    const sti_tbuiltin *row = t.row;
    for (size_t i = 0; i < t.n; i++)
        if (sti_t_is(name, row[i].name)) return row + i;
    return NULL;
}

/* ---- Arguments ----------------------------------------------------------- */

static void add_all(sti_run *r, sti_targs *a, sti_tval v)
{
    const sti_tlist *l = sti_t_each(r, v);
    for (size_t i = 0; l && i < l->n; i++) sti_t_append(r, a->list, l->v[i]);
}

static void add_named(sti_run *r, sti_targs *a, sti_tval name, sti_tval v)
{
    if (!a->named) a->named = sti_t_dict(r, 4).u.d;
    if (r->failed) return;
    if (name.kind != STI_T_STRING)
        sti_run_fail(r, STILL_E_FORMAT, "the name of an argument is %s",
                     sti_t_kind_name(name));
    sti_t_put(r, a->named, name, v);
}

sti_targs sti_eval_arguments(sti_run *r, const sti_tnode *first)
{
    sti_targs a = {sti_t_list(r, STI_T_PLAIN, 4).u.l, NULL};
    for (const sti_tnode *n = first; n && !r->failed; n = n->next) {
        const sti_tval v = sti_eval(r, n->a);
        if (n->op == STI_ARG_NAMED) {
            add_named(r, &a, n->value, v);
        } else if (n->op == STI_ARG_LIST) {
            add_all(r, &a, v);
        } else if (n->op == STI_ARG_DICT) {
            if (v.kind != STI_T_DICT)
                sti_run_fail(r, STILL_E_FORMAT, "%s behind **, expected a dict",
                             sti_t_kind_name(v));
            for (size_t i = 0; !r->failed && i < v.u.d->n; i++)
                add_named(r, &a, v.u.d->pair[i].key, v.u.d->pair[i].v);
        } else {
            sti_t_append(r, a.list, v);
        }
    }
    return a;
}

/* Index of a parameter by its name in "a b c"; -1: none. */
static int parameter_of(const char *parameters, const sti_tstr *name)
{
    int i = 0;
    for (const char *p = parameters; *p; i++) {
        const size_t n = strcspn(p, " ");
        if (n == name->n && !memcmp(p, name->p, n)) return i;
        p += n + (p[n] == ' ');
    }
    return -1;
}

static int count_parameters(const char *parameters)
{
    int n = *parameters != 0;
    for (const char *p = parameters; *p; p++) n += *p == ' ';
    return n;
}

sti_tval sti_call_builtin(sti_run *r, const sti_tbuiltin *b, sti_tval self,
                          const sti_targs *all)
{
    sti_tval arg[STI_MOST_PARAMETERS];
    if (!sti_run_step(r, 1)) return STI_T_UNDEF;
    if (!b->parameters) return b->fn(r, self, NULL, all);
    const int n = count_parameters(b->parameters);
    for (int i = 0; i < STI_MOST_PARAMETERS; i++)
        arg[i] = (sti_tval){.kind = STI_T_MISSING};
    if (all->list->n > (size_t)n)
        return sti_run_fail(r, STILL_E_FORMAT, "%s has %d parameters, not %zu", b->name,
                            n, all->list->n);
    for (size_t i = 0; i < all->list->n; i++) arg[i] = all->list->v[i];
    for (size_t i = 0; all->named && i < all->named->n; i++) {
        const sti_tstr *name = all->named->pair[i].key.u.s;
        const int k = parameter_of(b->parameters, name);
        if (k < 0 || arg[k].kind != STI_T_MISSING)
            return sti_run_fail(r, STILL_E_FORMAT, "%s has no parameter '%.*s'%s",
                                b->name, (int)name->n, name->p,
                                k < 0 ? "" : " left to set");
        arg[k] = all->named->pair[i].v;
    }
    for (int i = 0; i < b->required; i++)
        if (arg[i].kind == STI_T_MISSING)
            return sti_run_fail(r, STILL_E_FORMAT, "%s needs %d arguments (%s)",
                                b->name, b->required, b->parameters);
    return b->fn(r, self, arg, all);
}

int64_t sti_arg_int(sti_run *r, sti_tval v, int64_t otherwise)
{
    if (v.kind == STI_T_MISSING || v.kind == STI_T_NONE) return otherwise;
    if (v.kind == STI_T_INT || v.kind == STI_T_BOOL) return sti_t_whole(v);
    sti_run_fail(r, STILL_E_FORMAT, "%s where a whole number is expected",
                 sti_t_kind_name(v));
    return otherwise;
}

const sti_tstr *sti_arg_string(sti_run *r, sti_tval v)
{
    if (v.kind == STI_T_STRING) return v.u.s;
    if (v.kind != STI_T_MISSING && v.kind != STI_T_NONE)
        sti_run_fail(r, STILL_E_FORMAT, "%s where a string is expected",
                     sti_t_kind_name(v));
    return NULL;
}

bool sti_arg_true(sti_run *r, sti_tval v, bool otherwise)
{
    return v.kind == STI_T_MISSING ? otherwise : sti_t_true(r, v);
}

/* ---- Calls --------------------------------------------------------------- */

static sti_tval call_joiner(sti_run *r, sti_tcycler *c)
{
    return c->at++ ? c->items->v[0] : sti_t_puts(r, "");
}

sti_tval sti_call(sti_run *r, sti_tval what, const sti_targs *all)
{
    switch (what.kind) {
    case STI_T_MACRO: return sti_call_macro(r, what.u.m, all);
    case STI_T_METHOD:
        return sti_call_builtin(r, what.u.method->what, what.u.method->self, all);
    case STI_T_FUNCTION:
        return sti_call_builtin(r, &sti_functions().row[what.u.function], STI_T_NIL,
                                all);
    case STI_T_LOOP: return sti_loop_recurse(r, what.u.loop, all);
    case STI_T_JOINER: return call_joiner(r, what.u.cycler);
    case STI_T_UNDEFINED: return sti_fail_undefined(r, what);
    default:
        return sti_run_fail(r, STILL_E_FORMAT, "%s cannot be called",
                            sti_t_kind_name(what));
    }
}

sti_tval sti_filter(sti_run *r, const sti_tstr *name, sti_tval self,
                    const sti_targs *all)
{
    const sti_tbuiltin *b = sti_table_find(sti_text_filters(), name);
    if (!b) b = sti_table_find(sti_list_filters(), name);
    if (b) return sti_call_builtin(r, b, self, all);
    return sti_run_fail(r, STILL_E_UNSUPPORTED, "unknown filter '%.*s'",
                        (int)(name->n < 40 ? name->n : 40), name->p);
}

bool sti_test(sti_run *r, const sti_tstr *name, sti_tval self, const sti_targs *all)
{
    const sti_tbuiltin *b = sti_table_find(sti_tests(), name);
    if (!b) {
        sti_run_fail(r, STILL_E_UNSUPPORTED, "unknown test '%.*s'",
                     (int)(name->n < 40 ? name->n : 40), name->p);
        return false;
    }
    return sti_t_true(r, sti_call_builtin(r, b, self, all));
}
