/* json.h - JSON texts in and out. Values are jansson's (json_t, json_pack); reading,
 * writing, filling and taking numbers goes through here, because a failed allocation must
 * come out as one, a number must lie in its range, and no call may be ignored. */
#ifndef STI_BASE_JSON_H
#define STI_BASE_JSON_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "still.h"

/* ---- Reading (json_read.c) ----------------------------------------------- */

enum {
    STI_JSON_ANY = 1,    /* any value; without it an array or an object */
    STI_JSON_OBJECT = 2, /* an object */
    STI_JSON_ONCE = 4,   /* a name that an object has twice is an error, not the last */
    STI_JSON_NUL = 8     /* strings may hold \u0000; names never may */
};

/* The value that p[0..n) is. `what` names the text in errors. *out: json_decref it; NULL
 * on error: STILL_E_FORMAT with line and column, or STILL_E_MEMORY. */
still_status sti_json_read(const char *what, const char *p, size_t n, unsigned flags,
                           json_t **out, still_error *err);
/* The same for a line, which the caller names: "column C: ...". */
still_status sti_json_read_line(const char *p, size_t n, unsigned flags, json_t **out,
                                still_error *err);

/* The value at p[*at], anything may follow it; *at is moved behind it, or to the error.
 * NULL: *why says what is wrong, or is NULL for want of memory. */
json_t *sti_json_next(const char *p, size_t n, size_t *at, unsigned flags,
                      const char **why);

/* ---- Numbers with a range (json.c) --------------------------------------- */

/* A whole number lo..hi, or a number lo..hi, of object o. The error names what, key,
 * value and range; a missing key is one too. */
still_status sti_json_int(const char *what, const json_t *o, const char *key,
                          int64_t lo, int64_t hi, int64_t *out, still_error *err);
still_status sti_json_real(const char *what, const json_t *o, const char *key,
                           double lo, double hi, double *out, still_error *err);

/* ---- Building (json.c) --------------------------------------------------- */

/* Puts v, which is taken, into *to. If that fails, or v is NULL because making it did,
 * *to is released and becomes NULL, on which all these do nothing: a value with a part
 * missing cannot come out, and one look at the end tells (sti_json_text(NULL) is NULL,
 * and json_pack with a NULL part is too). */
void sti_json_set(json_t **to, const char *key, json_t *v);
void sti_json_append(json_t **to, json_t *v);
/* JSON has no NaN and no infinity: set_real leaves such a member out, of_real is null. */
void sti_json_set_real(json_t **to, const char *key, double v);
json_t *sti_json_of_real(double v);
/* Adds the members of `from`, which is taken. */
void sti_json_merge(json_t **to, json_t *from);
/* The value as text, flags as json_dumps has them; free() it. NULL: no memory, or no
 * value. json_dumps itself drops names that it has no room for. */
char *sti_json_text(const json_t *v, size_t flags);

#endif
