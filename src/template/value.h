/* value.h - what templates compute with, the state of a run, and strings whose bytes know
 * where they came from. */
#ifndef STI_TEMPLATE_VALUE_H
#define STI_TEMPLATE_VALUE_H

#include <locale.h>
#include <stdint.h>

#include "base/error.h"
#include "template/template.h"

/* ---- Memory (memory.c) --------------------------------------------------- */

/* Taken piece by piece, freed as a whole, with a cap since templates are untrusted. */
typedef struct sti_arena_block sti_arena_block;

typedef struct sti_arena {
    sti_arena_block *block; /* the newest first */
    size_t used, room;      /* of the newest */
    size_t total, limit;    /* bytes of all blocks */
    bool over;              /* the last failure was the limit, not memory */
} sti_arena;

/* n zeroed bytes, aligned for any value; NULL: no memory, or beyond the limit. */
void *sti_arena_take(sti_arena *a, size_t n);
void sti_arena_free(sti_arena *a);

/* ---- Values -------------------------------------------------------------- */

typedef struct sti_tnode sti_tnode; /* ast.h */
typedef struct sti_tscope sti_tscope;
typedef struct sti_tloop sti_tloop;

typedef enum sti_tkind {
    STI_T_UNDEFINED,
    STI_T_MISSING, /* an argument that was not given */
    STI_T_NONE,
    STI_T_BOOL,
    STI_T_INT,
    STI_T_REAL,
    STI_T_STRING,
    STI_T_LIST,
    STI_T_DICT,
    STI_T_NAMESPACE,
    STI_T_MACRO,
    STI_T_METHOD,   /* of a value */
    STI_T_FUNCTION, /* row of sti_functions() */
    STI_T_LOOP,
    STI_T_CYCLER,
    STI_T_JOINER
} sti_tkind;

/* Bytes and their marks: 1 is content, 0 the template's. mark NULL: all are `all`. */
typedef struct sti_tstr {
    const char *p;
    const unsigned char *mark;
    size_t n;
    unsigned char all;
    bool safe; /* Markup of Jinja2: what is added to it is escaped */
} sti_tstr;

typedef struct sti_tlist sti_tlist;
typedef struct sti_tdict sti_tdict;
typedef struct sti_tmacro sti_tmacro;
typedef struct sti_tmethod sti_tmethod;
typedef struct sti_tcycler sti_tcycler;

typedef struct sti_tval {
    sti_tkind kind;
    union {
        const sti_tnode *why; /* undefined: the name or attribute; may be NULL */
        bool b;
        int64_t i;
        double f;
        const sti_tstr *s;
        sti_tlist *l;
        sti_tdict *d; /* also namespaces */
        sti_tmacro *m;
        sti_tmethod *method;
        sti_tloop *loop;
        sti_tcycler *cycler; /* also joiners */
        size_t function;
    } u;
} sti_tval;

/* A lazy list is a Python generator: always true, without length, read once. Ranges and
 * what a dict's keys(), values() and items() give are neither lists nor JSON. */
typedef enum sti_tshape {
    STI_T_PLAIN,
    STI_T_TUPLE,
    STI_T_GROUP, /* a tuple of groupby, which also has the members grouper and list */
    STI_T_RANGE,
    STI_T_KEYS,
    STI_T_VALUES,
    STI_T_ITEMS,
    STI_T_LAZY
} sti_tshape;
struct sti_tlist {
    sti_tval *v;
    size_t n, capacity;
    sti_tshape shape;
};
typedef struct sti_tpair {
    sti_tval key, v;
} sti_tpair;
struct sti_tdict {
    sti_tpair *pair;
    size_t n, capacity;
};
struct sti_tmacro {
    const sti_tnode *node; /* macro or call block: parameters and body */
    sti_tscope *scope;     /* where it was defined */
};
struct sti_tmethod {
    sti_tval self;
    const struct sti_tbuiltin *what;
};
struct sti_tcycler {
    sti_tlist *items; /* of a joiner: its separator */
    size_t at;        /* of a joiner: how often it was called */
};

/* A string, or output, as it grows. */
typedef struct sti_tout {
    char *p;
    unsigned char *mark;
    size_t n, capacity;
} sti_tout;

/* A run. The first failure stays: `failed` is set, every function then returns an
 * undefined value at once, and loops end since sti_run_step is false. */
typedef struct sti_run {
    sti_arena mem;
    still_error *err;
    still_status status;
    bool failed;
    const sti_template *t;
    uint32_t at; /* offset in the template of what is being evaluated */
    int depth;
    uint64_t steps, most_steps;
    size_t most_output;
    sti_tscope *scope;
    sti_tout *out;
    const struct tm *now;
    locale_t letters; /* with the case of characters, made when first needed; or 0 */
} sti_run;

#define STI_T_UNDEF ((sti_tval){.kind = STI_T_UNDEFINED})
#define STI_T_NIL ((sti_tval){.kind = STI_T_NONE})

/* ---- The run (memory.c) ----------------------------------------------------- */

/* Records the first failure with the current line and column; undefined. */
sti_tval sti_run_fail(sti_run *r, still_status code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void *sti_run_take(sti_run *r, size_t n, size_t size); /* NULL: failed */
/* Counts work; false: the run has failed, or now does because it takes too long. */
bool sti_run_step(sti_run *r, size_t cost);
/* One level deeper; false: failed. Leave also after failure. */
bool sti_run_enter(sti_run *r);
static inline void sti_run_leave(sti_run *r)
{
    r->depth--;
}

/* ---- Making values (value.c) --------------------------------------------- */

static inline sti_tval sti_t_bool(bool b)
{
    return (sti_tval){.kind = STI_T_BOOL, .u.b = b};
}
static inline sti_tval sti_t_int(int64_t i)
{
    return (sti_tval){.kind = STI_T_INT, .u.i = i};
}
static inline sti_tval sti_t_real(double f)
{
    return (sti_tval){.kind = STI_T_REAL, .u.f = f};
}
sti_tval sti_t_text(sti_run *r, const char *p, size_t n); /* the template's; borrowed */
sti_tval sti_t_puts(sti_run *r, const char *s);           /* the same, a constant */
sti_tval sti_t_sub(sti_run *r, const sti_tstr *s, size_t from, size_t n);
sti_tval sti_t_safe(sti_run *r, const sti_tstr *s);
sti_tval sti_t_list(sti_run *r, sti_tshape shape, size_t capacity);
void sti_t_append(sti_run *r, sti_tlist *l, sti_tval v);
sti_tval sti_t_dict(sti_run *r, size_t capacity);
void sti_t_put(sti_run *r, sti_tdict *d, sti_tval key, sti_tval v);
bool sti_t_can_be_key(sti_run *r, sti_tval key); /* false: failed */
const sti_tval *sti_t_get(sti_run *r, const sti_tdict *d, sti_tval key);
const sti_tval *sti_t_get_text(sti_run *r, const sti_tdict *d, const char *key);
/* A JSON value as content, at the template's mercy but for its strings' marks. */
sti_tval sti_t_from_json(sti_run *r, const json_t *v);
sti_tval sti_t_messages(sti_run *r, const json_t *v); /* roles are the template's */

/* ---- Asking values (value.c, order.c) ------------------------------------ */

bool sti_t_true(sti_run *r, sti_tval v);
const char *sti_t_kind_name(sti_tval v); /* "a string", for errors */
bool sti_t_is(const sti_tstr *s, const char *text);
bool sti_t_same_text(const sti_tstr *a, const sti_tstr *b);
static inline bool sti_t_is_tuple(sti_tval v)
{
    return v.kind == STI_T_LIST &&
           (v.u.l->shape == STI_T_TUPLE || v.u.l->shape == STI_T_GROUP);
}
static inline bool sti_t_is_list(sti_tval v) /* or a tuple */
{
    return v.kind == STI_T_LIST && v.u.l->shape <= STI_T_GROUP;
}
static inline bool sti_t_number(sti_tval v)
{
    return v.kind == STI_T_INT || v.kind == STI_T_REAL || v.kind == STI_T_BOOL;
}
static inline int64_t sti_t_whole(sti_tval v) /* of INT or BOOL */
{
    return v.kind == STI_T_BOOL ? v.u.b : v.u.i;
}
static inline double sti_t_double(sti_tval v)
{
    return v.kind == STI_T_REAL ? v.u.f : (double)sti_t_whole(v);
}
static inline unsigned char sti_t_mark(const sti_tstr *s, size_t i)
{
    return s->mark ? s->mark[i] : s->all;
}
bool sti_t_equal(sti_run *r, sti_tval a, sti_tval b);
/* <0, 0, >0; fails if the two have no order. */
int sti_t_compare(sti_run *r, sti_tval a, sti_tval b);
bool sti_t_contains(sti_run *r, sti_tval whole, sti_tval part);
void sti_t_sort(sti_run *r, sti_tval *key, sti_tval *item, size_t n, bool down);
/* The elements of what can be iterated: characters, keys, elements; NULL: failed. A lazy
 * list is empty afterwards. */
sti_tlist *sti_t_each(sti_run *r, sti_tval v);
int64_t sti_t_length(sti_run *r, sti_tval v);

/* ---- Text (text.c) ------------------------------------------------------- */

void sti_tout_room(sti_run *r, sti_tout *o, size_t n); /* for n more bytes */
void sti_tout_put(sti_run *r, sti_tout *o, const char *p, size_t n, unsigned char mark);
void sti_tout_puts(sti_run *r, sti_tout *o, const char *s);
void sti_tout_part(sti_run *r, sti_tout *o, const sti_tstr *s, size_t from, size_t n);
void sti_tout_str(sti_run *r, sti_tout *o, sti_tval v);  /* Python's str() */
void sti_tout_repr(sti_run *r, sti_tout *o, sti_tval v); /* Python's repr() */
sti_tval sti_tout_take(sti_run *r, sti_tout *o);
const sti_tstr *sti_t_str(sti_run *r, sti_tval v);           /* str(); never NULL */
const sti_tstr *sti_t_escape(sti_run *r, const sti_tstr *s); /* for HTML; safe */
/* A real as Python writes it; room for 40 characters. */
void sti_t_real_text(double f, char *out);
/* json.dumps: indent NULL for one line; the separators are strings. */
typedef struct sti_tjson {
    bool ascii, sorted;
    const sti_tstr *indent, *item, *key;
} sti_tjson;
void sti_tout_json(sti_run *r, sti_tout *o, sti_tval v, const sti_tjson *how);

/* ---- Characters (chars.c) ------------------------------------------------ */

bool sti_t_space(uint32_t c);                          /* str.isspace */
size_t sti_t_chars(const sti_tstr *s);                 /* code points */
size_t sti_t_byte_of(const sti_tstr *s, size_t chars); /* offset of a code point */
/* Positions of what is left of s without characters of `set` (NULL: white space). */
void sti_t_strip(const sti_tstr *s, const sti_tstr *set, bool left, bool right,
                 size_t *from, size_t *to);
/* Offset of the first (last) occurrence in s[from..to), SIZE_MAX: none. */
size_t sti_t_find(sti_run *r, const sti_tstr *s, const sti_tstr *what, size_t from,
                  size_t to, bool last);
/* How many times a pattern of PCRE2, which never matches an empty string, is in s. */
int64_t sti_t_matches(sti_run *r, const sti_tstr *s, const char *pattern);
typedef enum sti_tcase {
    STI_T_UPPER,
    STI_T_LOWER,
    STI_T_TITLE,  /* str.title: words are runs of letters */
    STI_T_TITLES, /* the filter's: words end at white space, hyphens and brackets */
    STI_T_CAPITAL,
    STI_T_SWAPPED
} sti_tcase;
sti_tval sti_t_recase(sti_run *r, const sti_tstr *s, sti_tcase to);
/* Lines without their ends; with `keep` with them. */
sti_tval sti_t_lines(sti_run *r, const sti_tstr *s, bool keep);

#endif
