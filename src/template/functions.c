/* functions.c - the functions that every template has, and which methods a value has, with
 * those of lists, dicts, loops and cyclers. Methods that change a value in place do not
 * exist, as in Jinja2's immutable sandbox. */
#include <locale.h>

#include "template/eval.h"

static sti_tval fn_namespace(sti_run *r, sti_tval self, const sti_tval *arg,
                             const sti_targs *all)
{
    (void)self, (void)arg;
    sti_tval out = sti_t_dict(r, 4);
    for (size_t k = 0; k < all->list->n && !r->failed; k++) {
        const sti_tval v = all->list->v[k];
        if (v.kind != STI_T_DICT)
            return sti_run_fail(r, STILL_E_FORMAT, "%s where a dict is expected",
                                sti_t_kind_name(v));
        for (size_t i = 0; i < v.u.d->n && !r->failed; i++)
            sti_t_put(r, out.u.d, v.u.d->pair[i].key, v.u.d->pair[i].v);
    }
    for (size_t i = 0; all->named && i < all->named->n && !r->failed; i++)
        sti_t_put(r, out.u.d, all->named->pair[i].key, all->named->pair[i].v);
    if (!r->failed) out.kind = STI_T_NAMESPACE;
    return out;
}

/* dict(d, a=1), dict([(k, v), ...]). */
static sti_tval fn_dict(sti_run *r, sti_tval self, const sti_tval *arg,
                        const sti_targs *all)
{
    const sti_tval first = all->list->n ? all->list->v[0] : STI_T_UNDEF;
    if (all->list->n == 0 || first.kind == STI_T_DICT) {
        sti_tval out = fn_namespace(r, self, arg, all);
        if (!r->failed) out.kind = STI_T_DICT;
        return out;
    }
    const sti_tval out = sti_t_dict(r, 4);
    const sti_tlist *pairs = sti_t_each(r, first);
    for (size_t i = 0; pairs && i < pairs->n && !r->failed; i++) {
        const sti_tlist *pair = sti_t_each(r, pairs->v[i]);
        if (pair && pair->n != 2)
            return sti_run_fail(r, STILL_E_FORMAT, "dict() takes pairs");
        if (pair) sti_t_put(r, out.u.d, pair->v[0], pair->v[1]);
    }
    return out;
}

static sti_tval fn_range(sti_run *r, sti_tval self, const sti_tval *arg,
                         const sti_targs *all)
{
    enum { MOST = 100000 }; /* as in Jinja2's sandbox */
    (void)self, (void)all;
    const bool one = arg[1].kind == STI_T_MISSING;
    const int64_t from = one ? 0 : sti_arg_int(r, arg[0], 0),
                  to = sti_arg_int(r, one ? arg[0] : arg[1], 0),
                  step = sti_arg_int(r, arg[2], 1);
    if (step == 0)
        return sti_run_fail(r, STILL_E_FORMAT, "the step of a range is zero");
    const sti_tval out = sti_t_list(r, STI_T_RANGE, 0);
    for (int64_t i = from; (step > 0 ? i < to : i > to) && !r->failed;) {
        if (out.u.l->n == MOST)
            return sti_run_fail(r, STILL_E_LIMIT, "a range of more than %d numbers",
                                MOST);
        sti_t_append(r, out.u.l, sti_t_int(i));
        if (__builtin_add_overflow(i, step, &i)) break;
    }
    return out;
}

static sti_tval cycler(sti_run *r, sti_tkind kind, sti_tlist *items)
{
    sti_tcycler *c = sti_run_take(r, 1, sizeof *c);
    if (!c) return STI_T_UNDEF;
    *c = (sti_tcycler){items, 0};
    return (sti_tval){.kind = kind, .u.cycler = c};
}

static sti_tval fn_cycler(sti_run *r, sti_tval self, const sti_tval *arg,
                          const sti_targs *all)
{
    (void)self, (void)arg;
    if (!all->list->n)
        return sti_run_fail(r, STILL_E_FORMAT,
                            "cycler() needs something to cycle through");
    return cycler(r, STI_T_CYCLER, all->list);
}

static sti_tval fn_joiner(sti_run *r, sti_tval self, const sti_tval *arg,
                          const sti_targs *all)
{
    (void)self, (void)all;
    const sti_tval items = sti_t_list(r, STI_T_PLAIN, 1);
    sti_t_append(r, items.u.l,
                 arg[0].kind == STI_T_MISSING ? sti_t_puts(r, ", ") : arg[0]);
    return r->failed ? STI_T_UNDEF : cycler(r, STI_T_JOINER, items.u.l);
}

static sti_tval fn_raise(sti_run *r, sti_tval self, const sti_tval *arg,
                         const sti_targs *all)
{
    (void)self, (void)all;
    const sti_tstr *s = sti_t_str(r, arg[0]);
    return sti_run_fail(r, STILL_E_ARG, "%.*s", (int)(s->n < 500 ? s->n : 500), s->p);
}

static sti_tval fn_strftime(sti_run *r, sti_tval self, const sti_tval *arg,
                            const sti_targs *all)
{
    enum { MOST = 256 };
    (void)self, (void)all;
    char format[MOST], text[MOST];
    struct tm now = {0};
    const sti_tstr *s = sti_arg_string(r, arg[0]);
    if (!s || s->n >= MOST)
        return sti_run_fail(r, STILL_E_FORMAT,
                            "strftime_now takes a format of at most %d "
                            "bytes",
                            MOST - 1);
    for (size_t i = 0; i < s->n; i++) format[i] = s->p[i];
    format[s->n] = 0;
    const time_t clock = time(NULL);
    if (r->now)
        now = *r->now;
    else
        localtime_r(&clock, &now);
    locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (!c) return sti_run_fail(r, STILL_E_MEMORY, "out of memory");
    const size_t n = strftime_l(text, sizeof text, format, &now, c);
    freelocale(c);
    sti_tout out = {0};
    sti_tout_put(r, &out, text, n, 0);
    return sti_tout_take(r, &out);
}

static const sti_tbuiltin rows[] = {
    {"namespace", NULL, 0, fn_namespace},
    {"dict", NULL, 0, fn_dict},
    {"range", "start stop step", 1, fn_range},
    {"cycler", NULL, 0, fn_cycler},
    {"joiner", "sep", 0, fn_joiner},
    {"raise_exception", "message", 1, fn_raise},
    {"strftime_now", "format", 1, fn_strftime},
};

sti_ttable sti_functions(void)
{
    return STI_TABLE(rows);
}

/* ---- Methods ------------------------------------------------------------- */

#define METHOD(name)                                                                   \
    static sti_tval name(sti_run *r, sti_tval self, const sti_tval *arg,               \
                         const sti_targs *all)
#define UNUSED (void)r, (void)self, (void)arg, (void)all

/* ---- Dicts --------------------------------------------------------------- */

METHOD(m_get)
{
    UNUSED;
    const sti_tval *v =
        sti_t_can_be_key(r, arg[0]) ? sti_t_get(r, self.u.d, arg[0]) : NULL;
    if (v) return *v;
    return arg[1].kind == STI_T_MISSING ? STI_T_NIL : arg[1];
}

METHOD(m_keys)
{
    UNUSED;
    const sti_tval out = sti_t_list(r, STI_T_KEYS, 0);
    for (size_t i = 0; i < self.u.d->n && !r->failed; i++)
        sti_t_append(r, out.u.l, self.u.d->pair[i].key);
    return out;
}

METHOD(m_values)
{
    UNUSED;
    const sti_tval out = sti_t_list(r, STI_T_VALUES, 0);
    for (size_t i = 0; i < self.u.d->n && !r->failed; i++)
        sti_t_append(r, out.u.l, self.u.d->pair[i].v);
    return out;
}

METHOD(m_items)
{
    UNUSED;
    const sti_tval out = sti_t_list(r, STI_T_ITEMS, 0);
    for (size_t i = 0; i < self.u.d->n && !r->failed; i++) {
        const sti_tval pair = sti_t_list(r, STI_T_TUPLE, 2);
        sti_t_append(r, pair.u.l, self.u.d->pair[i].key);
        sti_t_append(r, pair.u.l, self.u.d->pair[i].v);
        sti_t_append(r, out.u.l, pair);
    }
    return out;
}

METHOD(m_same) /* copy(): values do not change */
{
    UNUSED;
    return self;
}

static const sti_tbuiltin dict_rows[] = {
    {"get", "key default", 1, m_get}, {"keys", "", 0, m_keys},
    {"values", "", 0, m_values},      {"items", "", 0, m_items},
    {"copy", "", 0, m_same},
};

/* ---- Lists --------------------------------------------------------------- */

METHOD(m_index)
{
    UNUSED;
    for (size_t i = 0; i < self.u.l->n && !r->failed; i++)
        if (sti_t_equal(r, self.u.l->v[i], arg[0])) return sti_t_int((int64_t)i);
    return sti_run_fail(r, STILL_E_FORMAT, "the value is not in the list");
}

METHOD(m_count)
{
    UNUSED;
    int64_t n = 0;
    for (size_t i = 0; i < self.u.l->n && !r->failed; i++)
        n += sti_t_equal(r, self.u.l->v[i], arg[0]);
    return sti_t_int(n);
}

static const sti_tbuiltin list_rows[] = {
    {"index", "value", 1, m_index},
    {"count", "value", 1, m_count},
    {"copy", "", 0, m_same},
};

/* ---- Loops and cyclers --------------------------------------------------- */

METHOD(m_cycle)
{
    UNUSED;
    return sti_loop_cycle(r, self.u.loop, all);
}

METHOD(m_changed)
{
    UNUSED;
    return sti_loop_changed(r, self.u.loop, all);
}

static const sti_tbuiltin loop_rows[] = {
    {"cycle", NULL, 0, m_cycle},
    {"changed", NULL, 0, m_changed},
};

METHOD(m_next)
{
    UNUSED;
    sti_tcycler *c = self.u.cycler;
    const sti_tval v = c->items->v[c->at];
    c->at = (c->at + 1) % c->items->n;
    return v;
}

METHOD(m_reset)
{
    UNUSED;
    self.u.cycler->at = 0;
    return STI_T_NIL;
}

static const sti_tbuiltin cycler_rows[] = {
    {"next", "", 0, m_next},
    {"reset", "", 0, m_reset},
};

/* ---- All ----------------------------------------------------------------- */

/* Methods of Python that would change the value. */
static bool changes(sti_tval self, const sti_tstr *name)
{
    static const char *const lists[] = {"append", "clear",  "extend",  "insert",
                                        "pop",    "remove", "reverse", "sort"};
    static const char *const dicts[] = {"clear", "pop", "popitem", "setdefault",
                                        "update"};
    const bool list = self.kind == STI_T_LIST;
    const char *const *known = list ? lists : dicts;
    const size_t n = list ? sizeof lists / sizeof *lists : sizeof dicts / sizeof *dicts;
    for (size_t i = 0; i < n; i++)
        if (sti_t_is(name, known[i])) return true;
    return false;
}

const sti_tbuiltin *sti_method_find(sti_run *r, sti_tval self, const sti_tstr *name)
{
    sti_ttable t = {0};
    switch (self.kind) {
    case STI_T_STRING: t = sti_string_methods(); break;
    case STI_T_LIST:
        if (self.u.l->shape <= STI_T_RANGE) t = STI_TABLE(list_rows);
        break;
    case STI_T_DICT: t = STI_TABLE(dict_rows); break;
    case STI_T_LOOP: t = STI_TABLE(loop_rows); break;
    case STI_T_CYCLER: t = STI_TABLE(cycler_rows); break;
    default: return NULL;
    }
    const bool list = self.kind == STI_T_LIST && self.u.l->shape == STI_T_PLAIN;
    if ((list || self.kind == STI_T_DICT) && changes(self, name)) {
        sti_run_fail(r, STILL_E_UNSUPPORTED,
                     "'%.*s' would change %s, which templates may not", (int)name->n,
                     name->p, sti_t_kind_name(self));
        return NULL;
    }
    return sti_table_find(t, name);
}
