/* schema_number.c - numbers within bounds, compared digit by digit as they are written.
 *
 * A bound is digits before and behind the point. A number is within it if its digits before
 * the point are fewer, or equal in number and less, or equal and what is behind the point is
 * not more. Numbers with bounds are written without an exponent, with at most 15 digits
 * before the point and 15 behind it. Beside a bound that is not within itself both have 15
 * together: one digit more, and a reader's double could be the bound. */
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "grammar/schema.h"

enum {
    WHOLE = 18,
    PLACES = 15
}; /* digits; of numbers with a point: PLACES on each side */

/* ---- Whole numbers ------------------------------------------------------- */

/* n digits from lo to hi, digit by digit. */
static void draw_digits(sti_sketch *k, int32_t from, int32_t to, const char *lo,
                        const char *hi, size_t n)
{
    while (n && *lo == *hi) {
        const int32_t next = n > 1 ? sti_sketch_state(k) : to;
        sti_sketch_byte(k, from, next, (unsigned char)*lo, (unsigned char)*lo);
        from = next;
        lo++;
        hi++;
        n--;
    }
    if (n == 0) return;
    if (n == 1) {
        sti_sketch_byte(k, from, to, (unsigned char)*lo, (unsigned char)*hi);
        return;
    }
    const bool low = strspn(lo + 1, "0") < n - 1, high = strspn(hi + 1, "9") < n - 1;
    static const char zeros[] = "000000000000000000", nines[] = "999999999999999999";
    const int first = *lo + low, last = *hi - high;
    if (low) {
        const int32_t next = sti_sketch_state(k);
        sti_sketch_byte(k, from, next, (unsigned char)*lo, (unsigned char)*lo);
        draw_digits(k, next, to, lo + 1, nines + WHOLE - (n - 1), n - 1);
    }
    if (high) {
        const int32_t next = sti_sketch_state(k);
        sti_sketch_byte(k, from, next, (unsigned char)*hi, (unsigned char)*hi);
        draw_digits(k, next, to, zeros + WHOLE - (n - 1), hi + 1, n - 1);
    }
    if (first > last) return;
    for (size_t i = 1; i <= n; i++) {
        const int32_t next = i < n ? sti_sketch_state(k) : to;
        sti_sketch_byte(k, from, next, i == 1 ? (unsigned)first : '0',
                        i == 1 ? (unsigned)last : '9');
        from = next;
    }
}

/* Whole numbers 0 <= lo..hi < 10^WHOLE, without zeros in front. */
static void draw_range(sti_sketch *k, int32_t from, int32_t to, int64_t lo, int64_t hi)
{
    int64_t most = 9; /* of numbers with as many digits as lo */
    while (lo <= hi) {
        char a[24] = "", b[24] = "";
        while (most < lo) most = 10 * most + 9;
        const int64_t end = most < hi ? most : hi;
        const int n = snprintf(a, sizeof a, "%lld", (long long)lo);
        snprintf(b, sizeof b, "%lld", (long long)end);
        draw_digits(k, from, to, a, b, (size_t)n);
        lo = end + 1;
    }
}

/* ---- Behind the point ---------------------------------------------------- */

/* Digits 0..9 of a bound behind the point, with zeros up to PLACES. NULL: no bound. */
typedef struct fraction {
    const char *lo, *hi;
    bool lo_open, hi_open; /* the bound itself is not within */
    int places;            /* most digits that are written */
    int32_t state[PLACES + 1][4];
} fraction;

/* Whether a number may end after i digits; low, high: they are those of the bound so far. */
static bool may_end(const fraction *f, int i, bool low, bool high)
{
    bool at_low = low, at_high = high;
    for (int j = i; j < PLACES; j++) {
        if (low && f->lo[j] != '0') return false;
        if (high && f->hi[j] != '0') at_high = false;
    }
    return !(at_low && f->lo_open) && !(at_high && f->hi_open);
}

/* Whether some number goes on from here. */
static bool leads_on(const fraction *f, int i, bool low, bool high)
{
    if (may_end(f, i, low, high)) return true;
    if (i == f->places) return false;
    const int lo = low ? f->lo[i] : '0', hi = high ? f->hi[i] : '9';
    for (int d = lo; d <= hi; d++)
        if (leads_on(f, i + 1, low && d == lo, high && d == hi)) return true;
    return false;
}

static int32_t draw_places(sti_sketch *k, fraction *f, int i, bool low, bool high,
                           int32_t to)
{
    int32_t *state = &f->state[i][low + 2 * high];
    if (*state >= 0) return *state;
    *state = sti_sketch_state(k);
    const int32_t from = *state;
    if (i > 0 && may_end(f, i, low, high)) sti_sketch_empty(k, from, to);
    if (i == f->places) return from;
    const int lo = low ? f->lo[i] : '0', hi = high ? f->hi[i] : '9';
    for (int d = lo; d <= hi; d++) {
        const bool l = low && d == lo, h = high && d == hi;
        if (!leads_on(f, i + 1, l, h)) continue;
        sti_sketch_byte(k, from, draw_places(k, f, i + 1, l, h, to), (unsigned)d,
                        (unsigned)d);
    }
    return from;
}

/* What may follow the digits before the point: nothing, or a point and digits. False:
 * nothing can, not even that. */
static bool draw_fraction(sti_sketch *k, int32_t from, int32_t to, fraction *f)
{
    memset(f->state, -1, sizeof f->state);
    if (!leads_on(f, 0, f->lo != NULL, f->hi != NULL)) return false;
    if (may_end(f, 0, f->lo != NULL, f->hi != NULL)) sti_sketch_empty(k, from, to);
    if (f->places == 0) return true;
    const int32_t point = draw_places(k, f, 0, f->lo != NULL, f->hi != NULL, to);
    sti_sketch_byte(k, from, point, '.', '.');
    return true;
}

/* ---- Bounds -------------------------------------------------------------- */

typedef struct bound {
    bool given, open, negative;
    int64_t whole;         /* of the absolute value */
    char part[PLACES + 1]; /* digits behind the point */
    double value;
} bound;

static still_status too_fine(sti_schema *c, const char *key)
{
    return sti_schema_refuse(c, STILL_E_UNSUPPORTED, key,
                             "bounds of up to 15 digits before the point and 15 behind "
                             "it are supported");
}

/* The shortest decimal number that is the value. */
static still_status read_real(sti_schema *c, const char *key, double v, bound *b)
{
    char text[400];
    if (!(fabs(v) < 1e15)) return too_fine(c, key);
    for (int places = 0;; places++) {
        if (places > PLACES) return too_fine(c, key);
        snprintf(text, sizeof text, "%.*f", places, fabs(v));
        char *end;
        if (strtod(text, &end) == fabs(v)) break;
    }
    char *point = strpbrk(text, localeconv()->decimal_point);
    memset(b->part, '0', PLACES);
    if (point) {
        memcpy(b->part, point + 1, strlen(point + 1));
        *point = 0;
    }
    b->whole = strtoll(text, NULL, 10);
    return STILL_OK;
}

/* The bound of two keywords that is nearer; sign 1: a least, -1: a most. */
static still_status read_bound(sti_schema *c, const json_t *schema, const char *closed,
                               const char *open, int sign, bound *out)
{
    const char *const key[] = {closed, open};
    *out = (bound){0};
    for (int i = 0; i < 2; i++) {
        const json_t *v = json_object_get(schema, key[i]);
        if (!v) continue;
        if (!json_is_number(v))
            return sti_schema_refuse(c, STILL_E_FORMAT, key[i], "expected a number");
        bound b = {.given = true, .open = i == 1, .value = json_number_value(v)};
        b.negative = b.value < 0;
        memset(b.part, '0', PLACES);
        if (json_is_integer(v)) {
            const json_int_t n = json_integer_value(v);
            b.whole = n == INT64_MIN ? INT64_MAX : n < 0 ? -n : n;
        } else {
            STI_TRY(read_real(c, key[i], b.value, &b));
        }
        if (!out->given || sign * b.value > sign * out->value ||
            (b.value == out->value && b.open))
            *out = b;
    }
    return STILL_OK;
}

static bool has_part(const bound *b)
{
    return strspn(b->part, "0") < PLACES;
}

/* The nearest whole number within a bound. */
static int64_t whole_within(const bound *b, int sign)
{
    int64_t v = b->negative ? -b->whole : b->whole;
    if (has_part(b)) /* v is nearer to 0 than the bound */
        return sign > 0 ? v + !b->negative : v - b->negative;
    return b->open ? v + sign : v;
}

static still_status draw_whole(sti_schema *c, int32_t from, int32_t to, const bound *lo,
                               const bound *hi)
{
    const int64_t most = 999999999999999999;
    int64_t a = lo->given ? whole_within(lo, 1) : -most;
    int64_t b = hi->given ? whole_within(hi, -1) : most;
    a = a < -most ? -most : a;
    b = b > most ? most : b;
    if (a > b)
        return sti_schema_refuse(c, STILL_E_UNSUPPORTED,
                                 lo->given ? "minimum" : "maximum",
                                 "no whole number of up to 18 digits is within the "
                                 "bounds");
    if (b >= 0) draw_range(c->k, from, to, a > 0 ? a : 0, b);
    if (a < 0) {
        const int32_t sign = sti_sketch_state(c->k);
        sti_sketch_byte(c->k, from, sign, '-', '-');
        draw_range(c->k, sign, to, b < 0 ? -b : 1, -a);
    }
    return STILL_OK;
}

/* Digits behind the point of numbers beside a bound. */
static int places_beside(const bound *b)
{
    int places = PLACES;
    for (int64_t v = b->open ? b->whole : 0; v > 0; v /= 10) places--;
    return places;
}

/* Numbers that are not negative from lo to hi, either of which may not be given. */
static bool draw_positive(sti_sketch *k, int32_t from, int32_t to, const bound *lo,
                          const bound *hi)
{
    const int by_lo = places_beside(lo), by_hi = places_beside(hi);
    const int places = by_lo < by_hi ? by_lo : by_hi;
    const int64_t most = 999999999999999;
    const int64_t a = lo->given ? lo->whole : 0, b = hi->given ? hi->whole : most;
    bool any = false;
    if (a > b) return false;
    fraction f = {
        .lo = lo->given ? lo->part : NULL, .lo_open = lo->open, .places = places};
    if (a == b) f.hi = hi->given ? hi->part : NULL;
    f.hi_open = hi->open;
    const int32_t first = sti_sketch_state(k), last = sti_sketch_state(k);
    if (draw_fraction(k, first, to, &f)) {
        draw_range(k, from, first, a, a);
        any = true;
    }
    if (a == b) return any;
    fraction end = {
        .hi = hi->given ? hi->part : NULL, .hi_open = hi->open, .places = places};
    if (draw_fraction(k, last, to, &end)) {
        draw_range(k, from, last, b, b);
        any = true;
    }
    fraction all = {.places = places};
    const int32_t middle = sti_sketch_state(k);
    if (b - a > 1) {
        draw_fraction(k, middle, to, &all);
        draw_range(k, from, middle, a + 1, b - 1);
        any = true;
    }
    return any;
}

static still_status draw_real(sti_schema *c, int32_t from, int32_t to, const bound *lo,
                              const bound *hi)
{
    static const bound zero = {.given = true, .part = "000000000000000"};
    const int64_t most = 999999999999999;
    bool any = false;
    for (int i = 0; i < 2; i++) {
        const bound *b = i ? hi : lo;
        if (b->given && b->whole > most) return too_fine(c, i ? "maximum" : "minimum");
    }
    const bool reaches_up = !hi->given || !hi->negative;
    const bool reaches_down = !lo->given || lo->negative;
    if (reaches_up)
        any |=
            draw_positive(c->k, from, to, lo->given && !lo->negative ? lo : &zero, hi);
    if (reaches_down) { /* the same of the absolute values */
        const int32_t sign = sti_sketch_state(c->k), start = sti_sketch_state(c->k);
        const bool below = hi->given && hi->value <= 0; /* -0 is 0, too */
        if (draw_positive(c->k, start, to, below ? hi : &zero, lo)) {
            sti_sketch_byte(c->k, from, sign, '-', '-');
            sti_sketch_empty(c->k, sign, start);
            any = true;
        }
    }
    if (any) return STILL_OK;
    return sti_schema_refuse(c, STILL_E_UNSUPPORTED, lo->given ? "minimum" : "maximum",
                             "nothing is valid: no number is within the bounds");
}

still_status sti_schema_number(sti_schema *c, int32_t from, int32_t to,
                               const json_t *schema, bool whole)
{
    const json_t *step = json_object_get(schema, "multipleOf");
    bound lo, hi;
    STI_TRY(read_bound(c, schema, "minimum", "exclusiveMinimum", 1, &lo));
    STI_TRY(read_bound(c, schema, "maximum", "exclusiveMaximum", -1, &hi));
    if (step && json_number_value(step) != 1)
        return sti_schema_refuse(c, STILL_E_UNSUPPORTED, "multipleOf",
                                 "only 1 is supported");
    if (step) whole = true;
    if (!lo.given && !hi.given) {
        sti_schema_call(c, from, to, whole ? STI_JSON_INTEGER : STI_JSON_NUMBER);
        return STILL_OK;
    }
    return whole ? draw_whole(c, from, to, &lo, &hi) : draw_real(c, from, to, &lo, &hi);
}
