/* automaton.h - a grammar as the machine runs it: states without empty arcs.
 *
 * A state has edges that read a byte, calls that read all of another rule and come back to
 * a state, and may end its rule. No call reads nothing: where a rule may be empty, what
 * follows it is also reached directly. So a rule that was called at one byte ends at a
 * later one, which keeps the machine simple (machine.h). */
#ifndef STI_GRAMMAR_AUTOMATON_H
#define STI_GRAMMAR_AUTOMATON_H

#include "grammar/sketch.h"

typedef struct sti_edge {
    unsigned char lo, hi;
    int32_t to;
} sti_edge;

typedef struct sti_call {
    int32_t rule, back; /* back: the state after it */
    bool tail;          /* nothing can follow but the end of the calling rule */
} sti_call;

typedef struct sti_state {
    int32_t edge, call; /* the first of its own; those of state i end at state i+1's */
    int32_t kind;       /* states of one kind read the same tokens */
    bool final;
} sti_state;

typedef struct sti_automaton {
    sti_state *state; /* [n_states+1] state 0 calls the root rule, and then ends */
    sti_edge *edge;   /* of a state: by lo */
    sti_call *call;
    int32_t *start; /* [n_rules] first state of a rule; -1: it is not used */
    int32_t n_states, n_edges, n_calls, n_rules, n_kinds;
} sti_automaton;

/* Checks the rules (all are there, none begins with itself, all end) and makes the automaton
 * of everything that `root` uses. look: bytes that states of one kind are equal for. */
still_status sti_automaton_make(const sti_sketch *k, int32_t root, int look,
                                sti_automaton *out, still_error *err);
void sti_automaton_free(sti_automaton *a);

/* ---- Parts of making it -------------------------------------------------- */

/* What can be said of a sketch's rules (rules.c). */
typedef struct sti_rules {
    int32_t *arc; /* arcs by the state they leave: arc[out[s]] .. arc[out[s+1]-1] */
    int32_t *out; /* [n_states+1] */
    bool *empty;  /* [n_rules] may read nothing */
    bool *begins; /* [n_states] a rule may come here before it reads anything */
    int32_t
        *bottom_up; /* [n_flat] rules whose calls lead to no recursion, called first */
    int32_t n_flat;
} sti_rules;
still_status sti_rules_find(const sti_sketch *k, sti_rules *out, still_error *err);
void sti_rules_free(sti_rules *r);
/* An error for the first rule that begins with itself, or has no end. */
still_status sti_rules_check(const sti_sketch *k, const sti_rules *r, still_error *err);
/* "grammar: line 3, column 1: rule 'x'" or "schema: /properties/x". */
void sti_rule_where(const sti_sketch_rule *r, char *out, size_t room);

/* The sketch with small rules, and those whose end only the next byte shows, drawn where
 * they are called (inline.c). */
still_status sti_sketch_inline(const sti_sketch *k, const sti_rules *r, sti_sketch *out,
                               still_error *err);

#endif
