/* order.c - equality, order, membership and sorting, as Python has them. */
#include <string.h>

#include "template/value.h"

/* ---- Equality ------------------------------------------------------------ */

static bool equal_lists(sti_run *r, const sti_tlist *a, const sti_tlist *b)
{
    if (a == b) return true;
    if (a->n != b->n) return false;
    for (size_t i = 0; i < a->n; i++)
        if (!sti_t_equal(r, a->v[i], b->v[i])) return false;
    return true;
}

/* Two lists, two tuples or two ranges. */
static bool comparable(sti_tval a, sti_tval b)
{
    if (sti_t_is_list(a) && sti_t_is_list(b))
        return sti_t_is_tuple(a) == sti_t_is_tuple(b);
    return a.u.l == b.u.l ||
           (a.u.l->shape == STI_T_RANGE && b.u.l->shape == STI_T_RANGE);
}

static bool equal_dicts(sti_run *r, const sti_tdict *a, const sti_tdict *b)
{
    if (a->n != b->n) return false;
    for (size_t i = 0; i < a->n; i++) {
        const sti_tval *v = sti_t_get(r, b, a->pair[i].key);
        if (!v || !sti_t_equal(r, a->pair[i].v, *v)) return false;
    }
    return true;
}

static bool equal_numbers(sti_tval a, sti_tval b)
{
    if (a.kind == STI_T_REAL || b.kind == STI_T_REAL)
        return sti_t_double(a) == sti_t_double(b);
    return sti_t_whole(a) == sti_t_whole(b);
}

bool sti_t_equal(sti_run *r, sti_tval a, sti_tval b)
{
    bool same = false;
    if (sti_t_number(a) && sti_t_number(b)) return equal_numbers(a, b);
    if (a.kind != b.kind) return false;
    if (!sti_run_enter(r)) {
        sti_run_leave(r);
        return false;
    }
    switch (a.kind) {
    case STI_T_UNDEFINED:
    case STI_T_NONE: same = true; break;
    case STI_T_STRING:
        sti_run_step(r, a.u.s->n / 64);
        same = sti_t_same_text(a.u.s, b.u.s);
        break;
    case STI_T_LIST: same = comparable(a, b) && equal_lists(r, a.u.l, b.u.l); break;
    case STI_T_DICT: same = equal_dicts(r, a.u.d, b.u.d); break;
    case STI_T_FUNCTION: same = a.u.function == b.u.function; break;
    default: same = a.u.d == b.u.d; /* the same object */
    }
    sti_run_leave(r);
    return same && !r->failed;
}

/* ---- Order --------------------------------------------------------------- */

static int compare_lists(sti_run *r, const sti_tlist *a, const sti_tlist *b)
{
    for (size_t i = 0; i < a->n && i < b->n && !r->failed; i++)
        if (!sti_t_equal(r, a->v[i], b->v[i]))
            return sti_t_compare(r, a->v[i], b->v[i]);
    return (a->n > b->n) - (a->n < b->n);
}

int sti_t_compare(sti_run *r, sti_tval a, sti_tval b)
{
    int order = 0;
    if (!sti_run_enter(r)) {
        sti_run_leave(r);
        return 0;
    }
    if (sti_t_number(a) && sti_t_number(b)) {
        if (a.kind == STI_T_REAL || b.kind == STI_T_REAL) {
            const double x = sti_t_double(a), y = sti_t_double(b);
            order = (x > y) - (x < y);
        } else {
            const int64_t x = sti_t_whole(a), y = sti_t_whole(b);
            order = (x > y) - (x < y);
        }
    } else if (a.kind == STI_T_STRING && b.kind == STI_T_STRING) {
        const size_t n = a.u.s->n < b.u.s->n ? a.u.s->n : b.u.s->n;
        sti_run_step(r, n / 64);
        order = memcmp(a.u.s->p, b.u.s->p, n); /* UTF-8 is in order of code points */
        if (!order) order = (a.u.s->n > b.u.s->n) - (a.u.s->n < b.u.s->n);
    } else if (a.kind == STI_T_LIST && b.kind == STI_T_LIST && comparable(a, b) &&
               sti_t_is_list(a)) {
        order = compare_lists(r, a.u.l, b.u.l);
    } else {
        sti_run_fail(r, STILL_E_FORMAT, "%s and %s have no order", sti_t_kind_name(a),
                     sti_t_kind_name(b));
    }
    sti_run_leave(r);
    return order;
}

bool sti_t_contains(sti_run *r, sti_tval whole, sti_tval part)
{
    if (whole.kind == STI_T_STRING) {
        if (part.kind != STI_T_STRING) {
            sti_run_fail(r, STILL_E_FORMAT, "%s cannot be in a string",
                         sti_t_kind_name(part));
            return false;
        }
        return sti_t_find(r, whole.u.s, part.u.s, 0, whole.u.s->n, false) != SIZE_MAX;
    }
    if (whole.kind == STI_T_DICT)
        return sti_t_can_be_key(r, part) && sti_t_get(r, whole.u.d, part);
    const sti_tlist *l = sti_t_each(r, whole);
    for (size_t i = 0; l && i < l->n && !r->failed; i++)
        if (sti_t_equal(r, l->v[i], part)) return true;
    return false;
}

/* ---- Sorting: stable, by merging ----------------------------------------- */

static void merge(sti_run *r, const sti_tval *key, const size_t *from, size_t *to,
                  size_t left, size_t middle, size_t right, bool down)
{
    size_t a = left, b = middle;
    for (size_t i = left; i < right && !r->failed; i++) {
        bool second = a == middle;
        if (a < middle && b < right) {
            const int order = sti_t_compare(r, key[from[b]], key[from[a]]);
            second = down ? order > 0 : order < 0;
        }
        to[i] = second ? from[b++] : from[a++];
    }
}

void sti_t_sort(sti_run *r, sti_tval *key, sti_tval *item, size_t n, bool down)
{
    size_t *order = sti_run_take(r, n, sizeof *order),
           *other = sti_run_take(r, n, sizeof *other);
    sti_tval *sorted = sti_run_take(r, n, sizeof *sorted);
    if (!sorted) return;
    for (size_t i = 0; i < n; i++) order[i] = i;
    for (size_t width = 1; width < n && !r->failed; width *= 2) {
        for (size_t left = 0; left < n; left += 2 * width) {
            const size_t middle = left + width < n ? left + width : n,
                         right = left + 2 * width < n ? left + 2 * width : n;
            merge(r, key, order, other, left, middle, right, down);
        }
        size_t *swap = order;
        order = other;
        other = swap;
    }
    if (r->failed) return;
    for (size_t i = 0; i < n; i++) sorted[i] = item[order[i]];
    if (n) memcpy(item, sorted, n * sizeof *item);
}
