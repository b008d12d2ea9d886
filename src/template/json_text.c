/* json_text.c - the filter tojson: Python's json.dumps, character for character. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"
#include "template/value.h"

static void put_string(sti_run *r, sti_tout *o, const sti_tstr *s, bool ascii)
{
    static const char special[] = "\"\\\b\f\n\r\t", letter[] = "\"\\bfnrt";
    sti_tout_puts(r, o, "\"");
    for (size_t i = 0, len; i < s->n && sti_run_step(r, 1); i += len) {
        const uint32_t c = sti_utf8_decode(s->p + i, &len);
        const char *found = c && c < 0x80 ? strchr(special, (int)c) : NULL;
        const unsigned char mark = sti_t_mark(s, i);
        char room[16];
        int n = 0;
        if (found)
            n = snprintf(room, sizeof room, "\\%c", letter[found - special]);
        else if (c >= 0x10000 && ascii)
            n = snprintf(room, sizeof room, "\\u%04x\\u%04x",
                         (unsigned)(0xD800 + ((c - 0x10000) >> 10)),
                         (unsigned)(0xDC00 + ((c - 0x10000) & 0x3FF)));
        else if (c < 0x20 || (c > 0x7F && ascii))
            n = snprintf(room, sizeof room, "\\u%04x", (unsigned)c);
        if (n)
            sti_tout_put(r, o, room, (size_t)n, mark);
        else
            sti_tout_part(r, o, s, i, len);
    }
    sti_tout_puts(r, o, "\"");
}

static void put_real(sti_run *r, sti_tout *o, double f)
{
    char room[48];
    if (isfinite(f))
        sti_t_real_text(f, room);
    else
        snprintf(room, sizeof room, "%s",
                 isnan(f) ? "NaN"
                 : f < 0  ? "-Infinity"
                          : "Infinity");
    sti_tout_puts(r, o, room);
}

static void put_scalar(sti_run *r, sti_tout *o, sti_tval v)
{
    if (v.kind == STI_T_NONE)
        sti_tout_puts(r, o, "null");
    else if (v.kind == STI_T_BOOL)
        sti_tout_puts(r, o, v.u.b ? "true" : "false");
    else if (v.kind == STI_T_INT)
        sti_tout_repr(r, o, v);
    else if (v.kind == STI_T_REAL)
        put_real(r, o, v.u.f);
    else
        sti_run_fail(r, STILL_E_FORMAT, "tojson: %s is no JSON value",
                     sti_t_kind_name(v));
}

static void new_line(sti_run *r, sti_tout *o, const sti_tjson *how, int level)
{
    if (!how->indent) return;
    sti_tout_puts(r, o, "\n");
    for (int i = 0; i < level && !r->failed; i++)
        sti_tout_part(r, o, how->indent, 0, how->indent->n);
}

static void put(sti_run *r, sti_tout *o, sti_tval v, const sti_tjson *how, int level);

static void put_key(sti_run *r, sti_tout *o, sti_tval key, const sti_tjson *how)
{
    const bool text = key.kind == STI_T_STRING;
    if (!text) sti_tout_puts(r, o, "\"");
    if (text)
        put_string(r, o, key.u.s, how->ascii);
    else
        put_scalar(r, o, key);
    if (!text) sti_tout_puts(r, o, "\"");
    sti_tout_part(r, o, how->key, 0, how->key->n);
}

static void put_dict(sti_run *r, sti_tout *o, const sti_tdict *d, const sti_tjson *how,
                     int level)
{
    sti_tval *key = sti_run_take(r, d->n, sizeof *key);
    if (!key) return;
    for (size_t i = 0; i < d->n; i++) key[i] = d->pair[i].key;
    if (how->sorted) sti_t_sort(r, key, key, d->n, false);
    sti_tout_puts(r, o, "{");
    for (size_t i = 0; i < d->n && !r->failed; i++) {
        if (i) sti_tout_part(r, o, how->item, 0, how->item->n);
        new_line(r, o, how, level + 1);
        put_key(r, o, key[i], how);
        const sti_tval *v =
            how->sorted ? sti_t_get(r, d, key[i]) : (const sti_tval *)&d->pair[i].v;
        if (v) put(r, o, *v, how, level + 1);
    }
    if (d->n) new_line(r, o, how, level);
    sti_tout_puts(r, o, "}");
}

static void put(sti_run *r, sti_tout *o, sti_tval v, const sti_tjson *how, int level)
{
    if (!sti_run_enter(r)) {
        sti_run_leave(r);
        return;
    }
    if (v.kind == STI_T_STRING) {
        put_string(r, o, v.u.s, how->ascii);
    } else if (v.kind == STI_T_DICT) {
        put_dict(r, o, v.u.d, how, level);
    } else if (sti_t_is_list(v)) {
        sti_tout_puts(r, o, "[");
        for (size_t i = 0; i < v.u.l->n && !r->failed; i++) {
            if (i) sti_tout_part(r, o, how->item, 0, how->item->n);
            new_line(r, o, how, level + 1);
            put(r, o, v.u.l->v[i], how, level + 1);
        }
        if (v.u.l->n) new_line(r, o, how, level);
        sti_tout_puts(r, o, "]");
    } else {
        put_scalar(r, o, v);
    }
    sti_run_leave(r);
}

void sti_tout_json(sti_run *r, sti_tout *o, sti_tval v, const sti_tjson *how)
{
    put(r, o, v, how, 0);
}
