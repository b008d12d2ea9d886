/* value.c - making values, from the template and from JSON, and looking into them. */
#include "template/value.h"

#include <string.h>

#include "base/utf8.h"

/* ---- Strings ------------------------------------------------------------- */

static sti_tval string(sti_run *r, sti_tstr s)
{
    sti_tstr *copy = sti_run_take(r, 1, sizeof *copy);
    if (!copy) return STI_T_UNDEF;
    *copy = s;
    return (sti_tval){.kind = STI_T_STRING, .u.s = copy};
}

sti_tval sti_t_text(sti_run *r, const char *p, size_t n)
{
    return string(r, (sti_tstr){.p = p, .n = n});
}

sti_tval sti_t_puts(sti_run *r, const char *s)
{
    return sti_t_text(r, s, strlen(s));
}

sti_tval sti_t_sub(sti_run *r, const sti_tstr *s, size_t from, size_t n)
{
    sti_tstr part = *s;
    part.p += from;
    if (s->mark) part.mark += from;
    part.n = n;
    return string(r, part);
}

sti_tval sti_t_safe(sti_run *r, const sti_tstr *s)
{
    sti_tstr safe = *s;
    safe.safe = true;
    return string(r, safe);
}

bool sti_t_is(const sti_tstr *s, const char *text)
{
    return s->n == strlen(text) && !memcmp(s->p, text, s->n);
}

bool sti_t_same_text(const sti_tstr *a, const sti_tstr *b)
{
    return a->n == b->n && !memcmp(a->p, b->p, a->n);
}

/* ---- Lists and dicts ----------------------------------------------------- */

sti_tval sti_t_list(sti_run *r, sti_tshape shape, size_t capacity)
{
    sti_tlist *l = sti_run_take(r, 1, sizeof *l);
    if (!l) return STI_T_UNDEF;
    *l = (sti_tlist){NULL, 0, capacity, shape};
    if (capacity && !(l->v = sti_run_take(r, capacity, sizeof *l->v)))
        return STI_T_UNDEF;
    return (sti_tval){.kind = STI_T_LIST, .u.l = l};
}

/* Twice the room for an array of the arena; NULL: failed. */
static void *grown(sti_run *r, const void *old, size_t n, size_t *capacity, size_t size)
{
    const size_t room = *capacity ? 2 * *capacity : 4;
    void *p = sti_run_take(r, room, size);
    if (!p) return NULL;
    if (n) memcpy(p, old, n * size);
    *capacity = room;
    return p;
}

void sti_t_append(sti_run *r, sti_tlist *l, sti_tval v)
{
    if (!l || !sti_run_step(r, 1)) return;
    if (l->n == l->capacity) {
        sti_tval *p = grown(r, l->v, l->n, &l->capacity, sizeof *p);
        if (!p) return;
        l->v = p;
    }
    l->v[l->n++] = v;
}

sti_tval sti_t_dict(sti_run *r, size_t capacity)
{
    sti_tdict *d = sti_run_take(r, 1, sizeof *d);
    if (!d) return STI_T_UNDEF;
    *d = (sti_tdict){NULL, 0, capacity};
    if (capacity && !(d->pair = sti_run_take(r, capacity, sizeof *d->pair)))
        return STI_T_UNDEF;
    return (sti_tval){.kind = STI_T_DICT, .u.d = d};
}

static sti_tpair *find(sti_run *r, const sti_tdict *d, sti_tval key)
{
    const size_t length = key.kind == STI_T_STRING ? key.u.s->n : 0;
    if (!sti_run_step(r, 1 + d->n / 8 + length / 64)) return NULL;
    for (size_t i = 0; i < d->n; i++) {
        const sti_tval k = d->pair[i].key;
        if (k.kind == STI_T_STRING && key.kind == STI_T_STRING
                ? sti_t_same_text(k.u.s, key.u.s)
                : k.kind != STI_T_STRING && sti_t_equal(r, k, key))
            return &d->pair[i];
    }
    return NULL;
}

const sti_tval *sti_t_get(sti_run *r, const sti_tdict *d, sti_tval key)
{
    const sti_tpair *p = find(r, d, key);
    return p ? &p->v : NULL;
}

const sti_tval *sti_t_get_text(sti_run *r, const sti_tdict *d, const char *key)
{
    const sti_tstr s = {.p = key, .n = strlen(key)};
    return sti_t_get(r, d, (sti_tval){.kind = STI_T_STRING, .u.s = &s});
}

static void add_pair(sti_run *r, sti_tdict *d, sti_tval key, sti_tval v)
{
    if (!sti_run_step(r, 1)) return;
    if (d->n == d->capacity) {
        sti_tpair *p = grown(r, d->pair, d->n, &d->capacity, sizeof *p);
        if (!p) return;
        d->pair = p;
    }
    d->pair[d->n++] = (sti_tpair){key, v};
}

bool sti_t_can_be_key(sti_run *r, sti_tval key)
{
    const bool tuple = sti_t_is_tuple(key);
    if (key.kind == STI_T_DICT || (sti_t_is_list(key) && !tuple))
        sti_run_fail(r, STILL_E_FORMAT, "%s cannot be a key", sti_t_kind_name(key));
    if (sti_run_enter(r))
        for (size_t i = 0; tuple && i < key.u.l->n && !r->failed; i++)
            sti_t_can_be_key(r, key.u.l->v[i]);
    sti_run_leave(r);
    return !r->failed;
}

void sti_t_put(sti_run *r, sti_tdict *d, sti_tval key, sti_tval v)
{
    if (!d || !sti_t_can_be_key(r, key)) return;
    sti_tpair *p = find(r, d, key);
    if (p)
        p->v = v;
    else
        add_pair(r, d, key, v);
}

/* ---- JSON ---------------------------------------------------------------- */

static sti_tval content(sti_run *r, const char *p, size_t n)
{
    return string(r, (sti_tstr){.p = p, .n = n, .all = 1});
}

static sti_tval from_object(sti_run *r, const json_t *v)
{
    const char *name;
    json_t *member;
    sti_tval out = sti_t_dict(r, json_object_size(v));
    json_object_foreach((json_t *)v, name, member)
    {
        if (r->failed) break;
        add_pair(r, out.u.d, content(r, name, strlen(name)),
                 sti_t_from_json(r, member));
    }
    return out;
}

sti_tval sti_t_from_json(sti_run *r, const json_t *v)
{
    sti_tval out = STI_T_NIL;
    if (!sti_run_enter(r)) v = NULL;
    if (json_is_object(v)) {
        out = from_object(r, v);
    } else if (json_is_array(v)) {
        out = sti_t_list(r, STI_T_PLAIN, json_array_size(v));
        for (size_t i = 0; i < json_array_size(v) && !r->failed; i++)
            sti_t_append(r, out.u.l, sti_t_from_json(r, json_array_get(v, i)));
    } else if (json_is_string(v)) {
        out = content(r, json_string_value(v), json_string_length(v));
    } else if (json_is_integer(v)) {
        out = sti_t_int(json_integer_value(v));
    } else if (json_is_real(v)) {
        out = sti_t_real(json_real_value(v));
    } else if (json_is_boolean(v)) {
        out = sti_t_bool(json_is_true(v));
    }
    sti_run_leave(r);
    return out;
}

static bool known_role(const sti_tstr *s)
{
    static const char *const known[] = {"system", "developer", "user",   "assistant",
                                        "tool",   "function",  "ipython"};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (sti_t_is(s, known[i])) return true;
    return false;
}

sti_tval sti_t_messages(sti_run *r, const json_t *v)
{
    const sti_tval out = sti_t_from_json(r, v);
    for (size_t i = 0; out.kind == STI_T_LIST && i < out.u.l->n; i++) {
        const sti_tval m = out.u.l->v[i];
        const sti_tval *role =
            m.kind == STI_T_DICT ? sti_t_get_text(r, m.u.d, "role") : NULL;
        if (role && role->kind == STI_T_STRING && known_role(role->u.s))
            sti_t_put(r, m.u.d, sti_t_puts(r, "role"),
                      sti_t_text(r, role->u.s->p, role->u.s->n));
    }
    return out;
}

/* ---- Asking -------------------------------------------------------------- */

const char *sti_t_kind_name(sti_tval v)
{
    switch (v.kind) {
    case STI_T_UNDEFINED:
    case STI_T_MISSING: return "an undefined value";
    case STI_T_NONE: return "none";
    case STI_T_BOOL: return "a boolean";
    case STI_T_INT: return "an integer";
    case STI_T_REAL: return "a float";
    case STI_T_STRING: return "a string";
    case STI_T_LIST:
        return v.u.l->shape == STI_T_LAZY    ? "a generator"
               : v.u.l->shape == STI_T_RANGE ? "a range"
               : v.u.l->shape > STI_T_RANGE  ? "a view of a dict"
               : sti_t_is_tuple(v)           ? "a tuple"
                                             : "a list";
    case STI_T_DICT: return "a dict";
    case STI_T_NAMESPACE: return "a namespace";
    case STI_T_MACRO: return "a macro";
    case STI_T_METHOD: return "a method";
    case STI_T_FUNCTION: return "a function";
    case STI_T_LOOP: return "a loop";
    case STI_T_CYCLER: return "a cycler";
    case STI_T_JOINER: return "a joiner";
    }
    return "a value";
}

bool sti_t_true(sti_run *r, sti_tval v)
{
    switch (v.kind) {
    case STI_T_UNDEFINED:
    case STI_T_MISSING:
    case STI_T_NONE: return false;
    case STI_T_BOOL: return v.u.b;
    case STI_T_INT: return v.u.i != 0;
    case STI_T_REAL: return v.u.f != 0;
    case STI_T_STRING: return v.u.s->n > 0;
    case STI_T_LIST: return v.u.l->n > 0 || v.u.l->shape == STI_T_LAZY;
    case STI_T_DICT: return v.u.d->n > 0;
    default: return !r->failed;
    }
}

sti_tlist *sti_t_each(sti_run *r, sti_tval v)
{
    const sti_tval out = sti_t_list(r, STI_T_PLAIN, 0);
    if (r->failed) return NULL;
    if (v.kind == STI_T_LIST) {
        *out.u.l = *v.u.l;
        if (v.u.l->shape == STI_T_LAZY) v.u.l->n = 0;
        out.u.l->capacity = out.u.l->n; /* appending copies */
        out.u.l->shape = STI_T_PLAIN;
        sti_run_step(r, out.u.l->n / 16);
    } else if (v.kind == STI_T_DICT) {
        for (size_t i = 0; i < v.u.d->n && !r->failed; i++)
            sti_t_append(r, out.u.l, v.u.d->pair[i].key);
    } else if (v.kind == STI_T_STRING) {
        sti_tstr s = *v.u.s;
        s.safe = false; /* as of Markup: only its parts are Markup */
        for (size_t i = 0, len; i < s.n && !r->failed; i += len) {
            sti_utf8_decode(s.p + i, &len);
            sti_t_append(r, out.u.l, sti_t_sub(r, &s, i, len));
        }
    } else if (v.kind != STI_T_UNDEFINED) {
        sti_run_fail(r, STILL_E_FORMAT, "%s cannot be iterated", sti_t_kind_name(v));
    }
    return r->failed ? NULL : out.u.l;
}

int64_t sti_t_length(sti_run *r, sti_tval v)
{
    switch (v.kind) {
    case STI_T_UNDEFINED: return 0;
    case STI_T_STRING:
        sti_run_step(r, v.u.s->n / 64);
        return (int64_t)sti_t_chars(v.u.s);
    case STI_T_DICT: return (int64_t)v.u.d->n;
    case STI_T_LIST:
        if (v.u.l->shape != STI_T_LAZY) return (int64_t)v.u.l->n;
    /* fall through */
    default:
        sti_run_fail(r, STILL_E_FORMAT, "%s has no length", sti_t_kind_name(v));
        return 0;
    }
}
