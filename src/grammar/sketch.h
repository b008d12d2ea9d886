/* sketch.h - an automaton as parsers draw it: states, and arcs that read nothing, a byte of
 * a range, or all of another rule.
 *
 * Functions draw between two states that the caller made. Whatever would go beyond the
 * limits, or found no memory, is left out and remembered (`failed`): a parser looks once an
 * element, and reports it with the place it has come to. */
#ifndef STI_GRAMMAR_SKETCH_H
#define STI_GRAMMAR_SKETCH_H

#include "base/error.h"
#include "base/hash.h"

enum {
    STI_GRAMMAR_TEXT = 1 << 20, /* bytes of a grammar or schema */
    STI_GRAMMAR_DEPTH = 128,    /* groups in groups, schemas in schemas */
    STI_GRAMMAR_RULES = 1 << 14,
    STI_GRAMMAR_STATES = 1 << 17, /* after repetitions are written out */
    STI_GRAMMAR_ARCS = 1 << 19
};

typedef enum sti_arc_kind { STI_ARC_EMPTY, STI_ARC_BYTE, STI_ARC_RULE } sti_arc_kind;

typedef struct sti_arc {
    int32_t from, to;
    int32_t rule; /* STI_ARC_RULE */
    unsigned char kind, lo, hi;
} sti_arc;

/* Everything a rule needs lies in a range of states and of arcs of its own. */
typedef struct sti_sketch_rule {
    char *name;       /* of a schema: its JSON pointer */
    int line, column; /* where it is defined, or first used; 0: a schema's */
    bool drawn;
    int32_t first, last; /* states */
    int32_t state[2], arc[2];
} sti_sketch_rule;

typedef struct sti_sketch {
    sti_arc *arc;
    int32_t n_arcs, arc_room, n_states;
    sti_sketch_rule *rule;
    int32_t n_rules, rule_room;
    int32_t *slot; /* [mask+1] rules by name, 1 more than their number; 0: empty */
    size_t mask;
    sti_hash_key key;
    still_status failed; /* STILL_E_LIMIT or STILL_E_MEMORY */
} sti_sketch;

void sti_sketch_free(sti_sketch *k);
/* The line for what failed; `where` leads it: "grammar: line 3, column 7". */
still_status sti_sketch_fail(const sti_sketch *k, const char *where, still_error *err);

int32_t sti_sketch_state(sti_sketch *k);
void sti_sketch_empty(sti_sketch *k, int32_t from, int32_t to);
void sti_sketch_byte(sti_sketch *k, int32_t from, int32_t to, unsigned lo, unsigned hi);
void sti_sketch_call(sti_sketch *k, int32_t from, int32_t to, int32_t rule);
void sti_sketch_text(sti_sketch *k, int32_t from, int32_t to, const char *p, size_t n);

/* One character of a set, as UTF-8. Surrogates are not characters. */
typedef struct sti_range {
    uint32_t lo, hi;
} sti_range;
void sti_sketch_chars(sti_sketch *k, int32_t from, int32_t to, const sti_range *r,
                      size_t n);

/* A part drawn since a mark, with a first and a last state of its own. */
typedef struct sti_mark {
    int32_t state, arc;
} sti_mark;
typedef struct sti_part {
    int32_t first, last;
} sti_part;
sti_mark sti_sketch_mark(const sti_sketch *k);
/* The part min to max times; max < 0: any number. */
sti_part sti_sketch_repeat(sti_sketch *k, sti_mark since, sti_part part, int64_t min,
                           int64_t max);

/* The rule of that name, new if there is none; -1: failed. */
int32_t sti_sketch_find_rule(sti_sketch *k, const char *name, size_t n);
/* From here on arcs and states are the rule's. */
void sti_sketch_begin(sti_sketch *k, int32_t rule);
void sti_sketch_end(sti_sketch *k, int32_t rule);

#endif
