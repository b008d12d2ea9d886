/* operators.c - arithmetic on numbers, strings and lists, comparisons and slices, as
 * Python has them; whole numbers have 64 bits. */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "template/eval.h"

sti_tval sti_fail_undefined(sti_run *r, sti_tval v)
{
    const sti_tnode *n = v.u.why;
    if (!n || (n->kind != STI_N_NAME && n->kind != STI_N_ATTRIBUTE))
        return sti_run_fail(r, STILL_E_FORMAT, "the value is undefined");
    const sti_tstr *s = n->value.u.s;
    return sti_run_fail(r, STILL_E_FORMAT,
                        n->kind == STI_N_NAME ? "'%.*s' is undefined"
                                              : "there is no attribute '%.*s'",
                        (int)(s->n < 80 ? s->n : 80), s->p);
}

/* ---- Arithmetic ---------------------------------------------------------- */

static sti_tval overflow(sti_run *r)
{
    return sti_run_fail(r, STILL_E_LIMIT, "a whole number beyond 64 bits");
}

static int64_t floor_divide(int64_t a, int64_t b)
{
    const int64_t q = a / b;
    return q - (a % b != 0 && (a < 0) != (b < 0));
}

static sti_tval power(sti_run *r, int64_t base, int64_t exponent)
{
    int64_t v = 1;
    if (exponent < 0) return sti_t_real(pow((double)base, (double)exponent));
    if (base >= -1 && base <= 1)
        return sti_t_int(exponent == 0                     ? 1
                         : base == -1 && exponent % 2 == 0 ? 1
                                                           : base);
    for (; exponent > 0; exponent--)
        if (__builtin_mul_overflow(v, base, &v)) return overflow(r);
    return sti_t_int(v);
}

static sti_tval whole(sti_run *r, int op, int64_t a, int64_t b)
{
    int64_t v = 0;
    bool over = false;
    if ((op == '/' || op == '%' || op == STI_OP_FLOOR) && b == 0)
        return sti_run_fail(r, STILL_E_FORMAT, "division by zero");
    switch (op) {
    case '+': over = __builtin_add_overflow(a, b, &v); break;
    case '-': over = __builtin_sub_overflow(a, b, &v); break;
    case '*': over = __builtin_mul_overflow(a, b, &v); break;
    case '/': return sti_t_real((double)a / (double)b);
    case STI_OP_POWER: return power(r, a, b);
    default:
        if (b == -1) { /* INT64_MIN / -1 */
            over = op == STI_OP_FLOOR && __builtin_sub_overflow((int64_t)0, a, &v);
            break;
        }
        v = floor_divide(a, b);
        if (op == '%') v = a - v * b;
    }
    return over ? overflow(r) : sti_t_int(v);
}

static sti_tval real(sti_run *r, int op, double a, double b)
{
    if ((op == '/' || op == '%' || op == STI_OP_FLOOR) && b == 0)
        return sti_run_fail(r, STILL_E_FORMAT, "division by zero");
    switch (op) {
    case '+': return sti_t_real(a + b);
    case '-': return sti_t_real(a - b);
    case '*': return sti_t_real(a * b);
    case '/': return sti_t_real(a / b);
    case STI_OP_POWER:
        return a < 0 && b != floor(b)
                   ? sti_run_fail(r, STILL_E_UNSUPPORTED, "a complex number")
                   : sti_t_real(pow(a, b));
    default: {
        double m = fmod(a, b);
        if (m == 0)
            m = copysign(0, b);
        else if ((m < 0) != (b < 0))
            m += b;
        /* a - m is a multiple of b, but for rounding */
        return sti_t_real(op == '%' ? m : nearbyint((a - m) / b));
    }
    }
}

/* ---- Strings and lists --------------------------------------------------- */

static sti_tval add_strings(sti_run *r, const sti_tstr *a, const sti_tstr *b)
{
    sti_tout out = {0};
    const bool safe = a->safe || b->safe;
    if (safe) a = sti_t_escape(r, a), b = sti_t_escape(r, b);
    sti_tout_room(r, &out, a->n + b->n);
    sti_tout_part(r, &out, a, 0, a->n);
    sti_tout_part(r, &out, b, 0, b->n);
    const sti_tval v = sti_tout_take(r, &out);
    return safe && !r->failed ? sti_t_safe(r, v.u.s) : v;
}

/* Of what is made from parts of v. */
static sti_tshape shape_of(sti_tval v)
{
    return sti_t_is_tuple(v) ? STI_T_TUPLE : v.u.l->shape;
}

static sti_tval add_lists(sti_run *r, sti_tval left, sti_tval right)
{
    const sti_tlist *a = left.u.l, *b = right.u.l;
    const sti_tval out = sti_t_list(r, shape_of(left), a->n + b->n);
    for (size_t i = 0; i < a->n && !r->failed; i++) sti_t_append(r, out.u.l, a->v[i]);
    for (size_t i = 0; i < b->n && !r->failed; i++) sti_t_append(r, out.u.l, b->v[i]);
    return out;
}

/* Fills `out`, which has room for it, with s again and again up to n bytes. What there is
 * is doubled: the work is that of the bytes, which the room was charged for, and not of
 * the repetitions. */
static void repeat_text(sti_run *r, sti_tout *out, const sti_tstr *s, size_t n)
{
    if (n) sti_tout_part(r, out, s, 0, s->n);
    while (!r->failed && out->n < n) {
        const size_t k = out->n < n - out->n ? out->n : n - out->n;
        memcpy(out->p + out->n, out->p, k);
        memcpy(out->mark + out->n, out->mark, k);
        out->n += k;
    }
}

static sti_tval repeat(sti_run *r, sti_tval v, int64_t times)
{
    if (v.kind == STI_T_STRING) {
        sti_tout out = {0};
        size_t n = 0;
        if (times > 0 && !sti_mul(v.u.s->n, (size_t)times, &n)) n = SIZE_MAX;
        sti_tout_room(r, &out, n);
        repeat_text(r, &out, v.u.s, n);
        const sti_tval all = sti_tout_take(r, &out);
        return v.u.s->safe && !r->failed ? sti_t_safe(r, all.u.s) : all;
    }
    const sti_tval out = sti_t_list(r, shape_of(v), 0);
    for (int64_t i = 0; i < times && v.u.l->n && !r->failed; i++)
        for (size_t k = 0; k < v.u.l->n && !r->failed; k++)
            sti_t_append(r, out.u.l, v.u.l->v[k]);
    return out;
}

static bool repeatable(sti_tval v)
{
    return v.kind == STI_T_STRING || sti_t_is_list(v);
}

static bool is_whole(sti_tval v)
{
    return v.kind == STI_T_INT || v.kind == STI_T_BOOL;
}

sti_tval sti_binary(sti_run *r, int op, sti_tval a, sti_tval b)
{
    if (r->failed) return STI_T_UNDEF;
    if (sti_t_number(a) && sti_t_number(b))
        return is_whole(a) && is_whole(b)
                   ? whole(r, op, sti_t_whole(a), sti_t_whole(b))
                   : real(r, op, sti_t_double(a), sti_t_double(b));
    if (op == '%' && a.kind == STI_T_STRING) {
        sti_targs all = {sti_t_list(r, STI_T_PLAIN, 1).u.l, NULL};
        if (sti_t_is_tuple(b))
            all.list = b.u.l;
        else
            sti_t_append(r, all.list, b);
        return r->failed ? STI_T_UNDEF : sti_format_percent(r, a.u.s, &all);
    }
    if (op == '+' && a.kind == STI_T_STRING && b.kind == STI_T_STRING)
        return add_strings(r, a.u.s, b.u.s);
    if (op == '+' && sti_t_is_list(a) && sti_t_is_list(b) &&
        sti_t_is_tuple(a) == sti_t_is_tuple(b))
        return add_lists(r, a, b);
    if (op == '*' && repeatable(a) && is_whole(b)) return repeat(r, a, sti_t_whole(b));
    if (op == '*' && repeatable(b) && is_whole(a)) return repeat(r, b, sti_t_whole(a));
    if (a.kind == STI_T_UNDEFINED) return sti_fail_undefined(r, a);
    if (b.kind == STI_T_UNDEFINED) return sti_fail_undefined(r, b);
    return sti_run_fail(r, STILL_E_FORMAT, "this operator does not take %s and %s",
                        sti_t_kind_name(a), sti_t_kind_name(b));
}

bool sti_compare(sti_run *r, int op, sti_tval a, sti_tval b)
{
    if (r->failed) return false;
    switch (op) {
    case STI_OP_EQUAL: return sti_t_equal(r, a, b);
    case STI_OP_UNEQUAL: return !sti_t_equal(r, a, b);
    case STI_OP_IN: return sti_t_contains(r, b, a);
    case STI_OP_NOT_IN: return !sti_t_contains(r, b, a);
    default: break;
    }
    if (a.kind == STI_T_UNDEFINED || b.kind == STI_T_UNDEFINED) {
        sti_fail_undefined(r, a.kind == STI_T_UNDEFINED ? a : b);
        return false;
    }
    if ((a.kind == STI_T_REAL && isnan(a.u.f)) ||
        (b.kind == STI_T_REAL && isnan(b.u.f)))
        return false;
    const int order = sti_t_compare(r, a, b);
    return op == '<'                 ? order < 0
           : op == '>'               ? order > 0
           : op == STI_OP_LESS_EQUAL ? order <= 0
                                     : order >= 0;
}

/* ---- Slices -------------------------------------------------------------- */

/* Python's slice.indices for one bound. */
static int64_t bound(sti_run *r, sti_tval v, int64_t n, int64_t otherwise, bool down)
{
    const int64_t lowest = down ? -1 : 0, highest = down ? n - 1 : n;
    if (v.kind == STI_T_NONE || v.kind == STI_T_MISSING) return otherwise;
    int64_t i = sti_arg_int(r, v, 0);
    if (i < 0) i = i < -n ? lowest : i + n;
    return i < lowest ? lowest : i > highest ? highest : i;
}

static sti_tval slice_string(sti_run *r, const sti_tstr *s, int64_t from, int64_t to,
                             int64_t step)
{
    sti_run_step(r, s->n / 32);
    if (step == 1) {
        if (to < from) to = from;
        const size_t a = sti_t_byte_of(s, (size_t)from),
                     b = sti_t_byte_of(s, (size_t)to);
        return sti_t_sub(r, s, a, b - a);
    }
    sti_tout out = {0};
    const sti_tval v = {.kind = STI_T_STRING, .u.s = s};
    const sti_tlist *c = sti_t_each(r, v);
    for (int64_t i = from; c && (step > 0 ? i < to : i > to) && !r->failed; i += step)
        sti_tout_str(r, &out, c->v[i]);
    return sti_tout_take(r, &out);
}

sti_tval sti_slice(sti_run *r, sti_tval of, sti_tval from, sti_tval to, sti_tval step)
{
    if (of.kind == STI_T_UNDEFINED) return sti_fail_undefined(r, of);
    const bool range = of.kind == STI_T_LIST && of.u.l->shape == STI_T_RANGE;
    if (!repeatable(of) && !range)
        return sti_run_fail(r, STILL_E_FORMAT, "%s has no slices", sti_t_kind_name(of));
    const int64_t n = sti_t_length(r, of);
    int64_t by = sti_arg_int(r, step, 1);
    if (by == 0) return sti_run_fail(r, STILL_E_FORMAT, "the step of a slice is zero");
    if (by > n) by = n + 1; /* the first element alone, without overflow */
    if (by < -n) by = -n - 1;
    const int64_t a = bound(r, from, n, by > 0 ? 0 : n - 1, by < 0),
                  b = bound(r, to, n, by > 0 ? n : -1, by < 0);
    if (r->failed) return STI_T_UNDEF;
    if (of.kind == STI_T_STRING) return slice_string(r, of.u.s, a, b, by);
    const sti_tval out = sti_t_list(r, shape_of(of), 0);
    for (int64_t i = a; (by > 0 ? i < b : i > b) && !r->failed; i += by)
        sti_t_append(r, out.u.l, of.u.l->v[i]);
    return out;
}
