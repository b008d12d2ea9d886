/* filters_list.c - filters on lists, dicts and anything that can be iterated. Those that
 * are generators in Jinja2 make lazy lists. */
#include <string.h>

#include "template/eval.h"

#define FILTER(name)                                                                   \
    static sti_tval name(sti_run *r, sti_tval v, const sti_tval *arg,                  \
                         const sti_targs *all)
#define UNUSED (void)r, (void)v, (void)arg, (void)all

/* ---- Attributes by name -------------------------------------------------- */

static const sti_tval none = {.kind = STI_T_NONE};

/* v[key]; otherwise: in place of what is undefined, unless it is none. */
static sti_tval member(sti_run *r, sti_tval v, sti_tval key, sti_tval otherwise)
{
    v = sti_item(r, v, key, NULL);
    const bool use = v.kind == STI_T_UNDEFINED && otherwise.kind != STI_T_NONE &&
                     otherwise.kind != STI_T_MISSING;
    return use ? otherwise : v;
}

/* s[from..to), such as "a.b.0", of v. */
static sti_tval follow(sti_run *r, sti_tval v, const sti_tstr *s, size_t from,
                       size_t to, sti_tval otherwise)
{
    sti_run_step(r, s->n / 64);
    while (from <= to && !r->failed) {
        const char *dot = memchr(s->p + from, '.', to - from);
        const size_t end = dot ? (size_t)(dot - s->p) : to;
        const sti_tval part = sti_t_sub(r, s, from, end - from);
        int64_t index = 0;
        bool digits = end > from && end - from < 10;
        for (size_t i = from; i < end && digits; i++) {
            digits = s->p[i] >= '0' && s->p[i] <= '9';
            index = 10 * index + (s->p[i] - '0');
        }
        if (!r->failed) v = member(r, v, digits ? sti_t_int(index) : part, otherwise);
        from = end + 1;
    }
    return v;
}

/* An attribute of v, by its name, path or index; v itself if there is none to take. */
static sti_tval lookup(sti_run *r, sti_tval v, sti_tval path, sti_tval otherwise)
{
    if (path.kind == STI_T_MISSING || path.kind == STI_T_NONE) return v;
    if (path.kind != STI_T_STRING) return member(r, v, path, otherwise);
    return follow(r, v, path.u.s, 0, path.u.s->n, otherwise);
}

static sti_tval folded(sti_run *r, sti_tval v, bool case_sensitive)
{
    return v.kind == STI_T_STRING && !case_sensitive
               ? sti_t_recase(r, v.u.s, STI_T_LOWER)
               : v;
}

/* What sorting and uniqueness go by: the attribute, lower case unless it counts. */
static sti_tval key_of(sti_run *r, sti_tval v, sti_tval path, bool case_sensitive)
{
    return folded(r, lookup(r, v, path, none), case_sensitive);
}

/* The same of each of several attributes, "a,b.c", as a list. */
static sti_tval keys_of(sti_run *r, sti_tval v, sti_tval paths, bool case_sensitive)
{
    const sti_tval out = sti_t_list(r, STI_T_PLAIN, 1);
    if (paths.kind != STI_T_STRING) {
        sti_t_append(r, out.u.l, key_of(r, v, paths, case_sensitive));
        return out;
    }
    const sti_tstr *s = paths.u.s;
    for (size_t from = 0; from <= s->n && !r->failed;) {
        const char *comma = memchr(s->p + from, ',', s->n - from);
        const size_t end = comma ? (size_t)(comma - s->p) : s->n;
        const sti_tval part = follow(r, v, s, from, end, none);
        sti_t_append(r, out.u.l, folded(r, part, case_sensitive));
        from = end + 1;
    }
    return out;
}

/* ---- Choosing and mapping ------------------------------------------------ */

/* The arguments behind the first `skip`. */
static sti_targs rest(sti_run *r, const sti_targs *all, size_t skip)
{
    const sti_tval l = sti_t_list(r, STI_T_PLAIN, 0);
    for (size_t i = skip; i < all->list->n && !r->failed; i++)
        sti_t_append(r, l.u.l, all->list->v[i]);
    return (sti_targs){l.u.l, all->named};
}

static sti_tval choose(sti_run *r, sti_tval v, const sti_targs *all, bool attribute,
                       bool wanted)
{
    const size_t skip = attribute;
    const sti_tval out = sti_t_list(r, STI_T_LAZY, 0);
    const sti_tlist *l = sti_t_true(r, v) ? sti_t_each(r, v) : NULL;
    if (all->list->n < skip)
        return sti_run_fail(r, STILL_E_FORMAT, "the name of an attribute is missing");
    const sti_targs args = rest(r, all, skip + 1);
    const sti_tval test = all->list->n > skip ? all->list->v[skip] : STI_T_NIL;
    if (test.kind != STI_T_NONE && test.kind != STI_T_STRING)
        return sti_run_fail(r, STILL_E_FORMAT, "the name of a test is %s",
                            sti_t_kind_name(test));
    for (size_t i = 0; l && i < l->n && !r->failed; i++) {
        const sti_tval x =
            attribute ? lookup(r, l->v[i], all->list->v[0], none) : l->v[i];
        const bool holds = test.kind == STI_T_NONE ? sti_t_true(r, x)
                                                   : sti_test(r, test.u.s, x, &args);
        if (holds == wanted) sti_t_append(r, out.u.l, l->v[i]);
    }
    return out;
}

FILTER(f_select)
{
    UNUSED;
    return choose(r, v, all, false, true);
}

FILTER(f_reject)
{
    UNUSED;
    return choose(r, v, all, false, false);
}

FILTER(f_selectattr)
{
    UNUSED;
    return choose(r, v, all, true, true);
}

FILTER(f_rejectattr)
{
    UNUSED;
    return choose(r, v, all, true, false);
}

/* map('filter', ...), map(attribute='a', default=x). */
FILTER(f_map)
{
    UNUSED;
    const sti_tlist *l = sti_t_true(r, v) ? sti_t_each(r, v) : NULL;
    const sti_tval out = sti_t_list(r, STI_T_LAZY, 0);
    if (r->failed) return STI_T_UNDEF;
    const bool by_filter = all->list->n > 0;
    const sti_tval *attribute =
        all->named ? sti_t_get_text(r, all->named, "attribute") : NULL;
    const sti_tval *otherwise =
        all->named ? sti_t_get_text(r, all->named, "default") : NULL;
    if (by_filter ? all->list->v[0].kind != STI_T_STRING : !attribute)
        return sti_run_fail(r, STILL_E_FORMAT,
                            "map takes a filter's name or attribute=");
    const sti_targs args = rest(r, all, 1);
    for (size_t i = 0; l && i < l->n && !r->failed; i++) {
        const sti_tval x =
            by_filter ? sti_filter(r, all->list->v[0].u.s, l->v[i], &args)
                      : lookup(r, l->v[i], *attribute, otherwise ? *otherwise : none);
        sti_t_append(r, out.u.l, x);
    }
    return out;
}

/* ---- Order --------------------------------------------------------------- */

FILTER(f_sort)
{
    UNUSED;
    const sti_tlist *l = sti_t_each(r, v);
    const sti_tval out = sti_t_list(r, STI_T_PLAIN, l ? l->n : 0);
    const bool down = sti_arg_true(r, arg[0], false),
               exact = sti_arg_true(r, arg[1], false);
    sti_tval *key = l ? sti_run_take(r, l->n, sizeof *key) : NULL;
    for (size_t i = 0; key && i < l->n && !r->failed; i++) {
        sti_t_append(r, out.u.l, l->v[i]);
        key[i] = keys_of(r, l->v[i], arg[2], exact);
    }
    if (!r->failed) sti_t_sort(r, key, out.u.l->v, out.u.l->n, down);
    return out;
}

FILTER(f_dictsort)
{
    UNUSED;
    const bool exact = sti_arg_true(r, arg[0], false),
               down = sti_arg_true(r, arg[2], false);
    const sti_tstr *by = sti_arg_string(r, arg[1]);
    const bool values = by && sti_t_is(by, "value");
    if (v.kind != STI_T_DICT)
        return sti_run_fail(r, STILL_E_FORMAT, "dictsort: %s is no dict",
                            sti_t_kind_name(v));
    const sti_tval out = sti_t_list(r, STI_T_PLAIN, v.u.d->n);
    sti_tval *key = sti_run_take(r, v.u.d->n, sizeof *key);
    for (size_t i = 0; key && i < v.u.d->n && !r->failed; i++) {
        const sti_tval pair = sti_t_list(r, STI_T_TUPLE, 2);
        sti_t_append(r, pair.u.l, v.u.d->pair[i].key);
        sti_t_append(r, pair.u.l, v.u.d->pair[i].v);
        sti_t_append(r, out.u.l, pair);
        key[i] = key_of(r, values ? v.u.d->pair[i].v : v.u.d->pair[i].key,
                        (sti_tval){.kind = STI_T_MISSING}, exact);
    }
    if (!r->failed) sti_t_sort(r, key, out.u.l->v, out.u.l->n, down);
    return out;
}

static sti_tval extreme(sti_run *r, sti_tval v, const sti_tval *arg, bool most)
{
    const sti_tlist *l = sti_t_each(r, v);
    const bool exact = sti_arg_true(r, arg[0], false);
    sti_tval best = STI_T_UNDEF, best_key = STI_T_UNDEF;
    for (size_t i = 0; l && i < l->n && !r->failed; i++) {
        const sti_tval key = key_of(r, l->v[i], arg[1], exact);
        const int order = i && !r->failed ? sti_t_compare(r, key, best_key) : 0;
        if (i && (most ? order <= 0 : order >= 0)) continue;
        best = l->v[i];
        best_key = key;
    }
    return best;
}

FILTER(f_min)
{
    UNUSED;
    return extreme(r, v, arg, false);
}

FILTER(f_max)
{
    UNUSED;
    return extreme(r, v, arg, true);
}

FILTER(f_unique)
{
    UNUSED;
    const sti_tlist *l = sti_t_each(r, v);
    const sti_tval out = sti_t_list(r, STI_T_LAZY, 0),
                   seen = sti_t_list(r, STI_T_PLAIN, 0);
    const bool exact = sti_arg_true(r, arg[0], false);
    for (size_t i = 0; l && i < l->n && !r->failed; i++) {
        const sti_tval key = key_of(r, l->v[i], arg[1], exact);
        if (r->failed || !sti_t_can_be_key(r, key) || sti_t_contains(r, seen, key))
            continue;
        sti_t_append(r, seen.u.l, key);
        sti_t_append(r, out.u.l, l->v[i]);
    }
    return out;
}

FILTER(f_reverse)
{
    UNUSED;
    if (v.kind == STI_T_STRING) return sti_slice(r, v, none, none, sti_t_int(-1));
    const bool lazy = v.kind != STI_T_LIST || v.u.l->shape != STI_T_LAZY;
    const sti_tlist *l = sti_t_each(r, v);
    const sti_tval out = sti_t_list(r, lazy ? STI_T_LAZY : STI_T_PLAIN, 0);
    for (size_t i = l ? l->n : 0; i > 0 && !r->failed; i--)
        sti_t_append(r, out.u.l, l->v[i - 1]);
    return out;
}

FILTER(f_groupby)
{
    UNUSED;
    const bool exact = sti_arg_true(r, arg[2], false);
    const sti_tlist *l = sti_t_each(r, v);
    const sti_tval out = sti_t_list(r, STI_T_PLAIN, 0),
                   sorted = sti_t_list(r, STI_T_PLAIN, l ? l->n : 0);
    sti_tval *keys = l ? sti_run_take(r, l->n, sizeof *keys) : NULL;
    for (size_t i = 0; keys && i < l->n && !r->failed; i++) {
        sti_t_append(r, sorted.u.l, l->v[i]);
        keys[i] = folded(r, lookup(r, l->v[i], arg[0], arg[1]), exact);
    }
    if (!r->failed) sti_t_sort(r, keys, sorted.u.l->v, sorted.u.l->n, false);
    sti_tval group = STI_T_UNDEF, before = STI_T_UNDEF;
    for (size_t i = 0; !r->failed && i < sorted.u.l->n; i++) {
        const sti_tval name = lookup(r, sorted.u.l->v[i], arg[0], arg[1]),
                       key = folded(r, name, exact);
        if (i == 0 || !sti_t_equal(r, key, before)) {
            const sti_tval pair = sti_t_list(r, STI_T_GROUP, 2);
            group = sti_t_list(r, STI_T_PLAIN, 0);
            sti_t_append(r, pair.u.l, name);
            sti_t_append(r, pair.u.l, group);
            sti_t_append(r, out.u.l, pair);
        }
        if (!r->failed) sti_t_append(r, group.u.l, sorted.u.l->v[i]);
        before = key;
    }
    return out;
}

/* ---- Parts and sums ------------------------------------------------------ */

FILTER(f_length)
{
    UNUSED;
    return sti_t_int(sti_t_length(r, v));
}

FILTER(f_list)
{
    UNUSED;
    sti_tlist *l = sti_t_each(r, v);
    return l ? (sti_tval){.kind = STI_T_LIST, .u.l = l} : STI_T_UNDEF;
}

FILTER(f_first)
{
    UNUSED;
    const sti_tlist *l = sti_t_each(r, v);
    return l && l->n ? l->v[0] : STI_T_UNDEF;
}

FILTER(f_last)
{
    UNUSED;
    if (v.kind == STI_T_LIST && v.u.l->shape == STI_T_LAZY)
        return sti_run_fail(r, STILL_E_FORMAT, "last: a generator cannot be reversed");
    const sti_tlist *l = sti_t_each(r, v);
    return l && l->n ? l->v[l->n - 1] : STI_T_UNDEF;
}

FILTER(f_join)
{
    UNUSED;
    const sti_tlist *l = sti_t_each(r, v);
    sti_tout out = {0};
    for (size_t i = 0; l && i < l->n && !r->failed; i++) {
        if (i && arg[0].kind != STI_T_MISSING) sti_tout_str(r, &out, arg[0]);
        sti_tout_str(r, &out, lookup(r, l->v[i], arg[1], none));
    }
    return sti_tout_take(r, &out);
}

FILTER(f_sum)
{
    UNUSED;
    const sti_tlist *l = sti_t_each(r, v);
    sti_tval sum = arg[1].kind == STI_T_MISSING ? sti_t_int(0) : arg[1];
    if (sum.kind == STI_T_STRING)
        return sti_run_fail(r, STILL_E_FORMAT, "sum: strings are not added; use join");
    for (size_t i = 0; l && i < l->n && !r->failed; i++)
        sum = sti_binary(r, '+', sum, lookup(r, l->v[i], arg[0], none));
    return sum;
}

FILTER(f_items)
{
    UNUSED;
    const sti_tval out = sti_t_list(r, STI_T_LAZY, 0);
    if (v.kind == STI_T_UNDEFINED) return out;
    if (v.kind != STI_T_DICT)
        return sti_run_fail(r, STILL_E_FORMAT, "items: %s is no dict",
                            sti_t_kind_name(v));
    for (size_t i = 0; i < v.u.d->n && !r->failed; i++) {
        const sti_tval pair = sti_t_list(r, STI_T_TUPLE, 2);
        sti_t_append(r, pair.u.l, v.u.d->pair[i].key);
        sti_t_append(r, pair.u.l, v.u.d->pair[i].v);
        sti_t_append(r, out.u.l, pair);
    }
    return out;
}

FILTER(f_attr)
{
    UNUSED;
    const sti_tstr *name = sti_arg_string(r, arg[0]);
    if (!name || (v.kind == STI_T_DICT && !sti_method_find(r, v, name)))
        return STI_T_UNDEF; /* attributes, never members */
    return sti_attribute(r, v, name, NULL);
}

FILTER(f_default)
{
    UNUSED;
    const bool use = v.kind == STI_T_UNDEFINED ||
                     (sti_arg_true(r, arg[1], false) && !sti_t_true(r, v));
    if (!use) return v;
    return arg[0].kind == STI_T_MISSING ? sti_t_puts(r, "") : arg[0];
}

/* Lists of `count` elements, the last one filled up. */
FILTER(f_batch)
{
    UNUSED;
    const sti_tlist *l = sti_t_each(r, v);
    const sti_tval out = sti_t_list(r, STI_T_LAZY, 0);
    const int64_t count = sti_arg_int(r, arg[0], 1);
    sti_tval row = STI_T_UNDEF;
    if (count < 1) return sti_run_fail(r, STILL_E_FORMAT, "batch: rows of no elements");
    for (size_t i = 0; l && i < l->n && !r->failed; i++) {
        if (i % (uint64_t)count == 0) {
            row = sti_t_list(r, STI_T_PLAIN, 0);
            sti_t_append(r, out.u.l, row);
        }
        if (!r->failed) sti_t_append(r, row.u.l, l->v[i]);
    }
    const bool fill = arg[1].kind != STI_T_MISSING && arg[1].kind != STI_T_NONE;
    while (fill && row.kind == STI_T_LIST && !r->failed && row.u.l->n < (uint64_t)count)
        sti_t_append(r, row.u.l, arg[1]);
    return out;
}

/* `count` lists of nearly the same length. */
FILTER(f_slice)
{
    UNUSED;
    const sti_tlist *l = sti_t_each(r, v);
    const sti_tval out = sti_t_list(r, STI_T_LAZY, 0);
    const int64_t count = sti_arg_int(r, arg[0], 1);
    if (count < 1) return sti_run_fail(r, STILL_E_FORMAT, "slice: no columns");
    if (!l) return STI_T_UNDEF;
    const size_t each = l->n / (uint64_t)count, longer = l->n % (uint64_t)count;
    size_t at = 0;
    for (uint64_t i = 0; i < (uint64_t)count && !r->failed; i++) {
        const sti_tval column = sti_t_list(r, STI_T_PLAIN, 0);
        for (size_t k = 0; k < each + (i < longer) && !r->failed; k++)
            sti_t_append(r, column.u.l, l->v[at++]);
        if (i >= longer && arg[1].kind != STI_T_MISSING && arg[1].kind != STI_T_NONE &&
            !r->failed)
            sti_t_append(r, column.u.l, arg[1]);
        sti_t_append(r, out.u.l, column);
    }
    return out;
}

static const sti_tbuiltin rows[] = {
    {"select", NULL, 0, f_select},
    {"reject", NULL, 0, f_reject},
    {"selectattr", NULL, 0, f_selectattr},
    {"rejectattr", NULL, 0, f_rejectattr},
    {"map", NULL, 0, f_map},
    {"sort", "reverse case_sensitive attribute", 0, f_sort},
    {"dictsort", "case_sensitive by reverse", 0, f_dictsort},
    {"min", "case_sensitive attribute", 0, f_min},
    {"max", "case_sensitive attribute", 0, f_max},
    {"unique", "case_sensitive attribute", 0, f_unique},
    {"reverse", "", 0, f_reverse},
    {"groupby", "attribute default case_sensitive", 1, f_groupby},
    {"length", "", 0, f_length},
    {"count", "", 0, f_length},
    {"list", "", 0, f_list},
    {"first", "", 0, f_first},
    {"last", "", 0, f_last},
    {"join", "d attribute", 0, f_join},
    {"sum", "attribute start", 0, f_sum},
    {"items", "", 0, f_items},
    {"attr", "name", 1, f_attr},
    {"default", "default_value boolean", 0, f_default},
    {"d", "default_value boolean", 0, f_default},
    {"batch", "linecount fill_with", 1, f_batch},
    {"slice", "slices fill_with", 1, f_slice},
};

sti_ttable sti_list_filters(void)
{
    return STI_TABLE(rows);
}
