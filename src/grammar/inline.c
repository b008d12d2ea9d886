/* inline.c - draws rules where they are called.
 *
 * A call costs the machine a frame, and tokens that read beyond the end of a rule cannot be
 * looked up by state: they depend on the caller. That is fine for a string, whose end is a
 * quote, and slow for a word, which may end at every token. So a rule is drawn into its
 * callers if it is small, or if it can be over without having ended: it has a state that
 * may end it and may go on. Recursive rules, and those that lead to them, stay calls. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "grammar/automaton.h"

enum {
    TINY = 8,      /* states: drawn in every caller */
    SMALL = 256,   /* states: if its end is open */
    MOST = 1 << 15 /* states of the result; from there on calls stay calls */
};

/* Whether a state that ends the rule has more to read. Empty arcs are followed from each
 * state that a byte leads to; stamp: [n_states], zeroed. */
static bool end_is_open(const sti_sketch *k, const sti_rules *r,
                        const sti_sketch_rule *rule, int32_t *stamp, int32_t *stack)
{
    for (int32_t a = rule->arc[0]; a < rule->arc[1]; a++) {
        int32_t n = 0;
        bool ends = false, reads = false;
        if (k->arc[a].kind == STI_ARC_EMPTY) continue;
        stack[n++] = k->arc[a].to;
        stamp[k->arc[a].to] = a + 1;
        while (n) {
            const int32_t s = stack[--n];
            ends |= s == rule->last;
            for (int32_t i = r->out[s]; i < r->out[s + 1]; i++) {
                const sti_arc *arc = &k->arc[r->arc[i]];
                reads |= arc->kind != STI_ARC_EMPTY;
                if (arc->kind == STI_ARC_BYTE ||
                    (arc->kind == STI_ARC_RULE && !r->empty[arc->rule]) ||
                    stamp[arc->to] == a + 1)
                    continue;
                stamp[arc->to] = a + 1;
                stack[n++] = arc->to;
            }
        }
        if (ends && reads) return true;
    }
    return false;
}

/* A range of states and arcs of `list` (NULL: of k itself, whose list moves as it grows)
 * once more at the end of k; what was state s is then s + the result. Calls of rules that
 * are drawn into their callers become what they call: those lie in k already, at
 * k->rule[..], and have no such calls left. */
static int32_t draw(sti_sketch *k, const sti_arc *list, const sti_sketch_rule *what,
                    const bool *into)
{
    const int32_t move = k->n_states - what->state[0];
    for (int32_t i = what->state[0]; i < what->state[1]; i++) sti_sketch_state(k);
    for (int32_t i = what->arc[0]; i < what->arc[1] && !k->failed; i++) {
        const sti_arc *arcs = list ? list : k->arc;
        if (!arcs) break; /* there are none */
        const sti_arc a = arcs[i];
        const int32_t from = a.from + move, to = a.to + move;
        if (a.kind == STI_ARC_EMPTY) {
            sti_sketch_empty(k, from, to);
        } else if (a.kind == STI_ARC_BYTE) {
            sti_sketch_byte(k, from, to, a.lo, a.hi);
        } else if (!into || !into[a.rule] || k->n_states >= MOST) {
            sti_sketch_call(k, from, to, a.rule);
        } else {
            const sti_sketch_rule rule = k->rule[a.rule];
            const int32_t moved = draw(k, NULL, &rule, NULL);
            sti_sketch_empty(k, from, rule.first + moved);
            sti_sketch_empty(k, rule.last + moved, to);
        }
    }
    return move;
}

static void draw_rule(sti_sketch *to, const sti_sketch *k, int32_t rule,
                      const bool *into)
{
    const sti_sketch_rule *old = &k->rule[rule];
    sti_sketch_rule *fresh = &to->rule[rule];
    fresh->state[0] = to->n_states;
    fresh->arc[0] = to->n_arcs;
    const int32_t move = draw(to, k->arc, old, into);
    fresh->first = old->first + move;
    fresh->last = old->last + move;
    sti_sketch_end(to, rule);
}

static void draw_all(sti_sketch *to, const sti_sketch *k, const sti_rules *r,
                     bool *into, int32_t *stamp, int32_t *stack)
{
    for (int32_t i = 0; i < r->n_flat && !to->failed; i++) {
        const int32_t rule = r->bottom_up[i];
        const sti_sketch_rule *old = &k->rule[rule];
        const int32_t size = old->state[1] - old->state[0];
        draw_rule(to, k, rule, into);
        /* Only then: a rule is drawn into those that come after it. */
        into[rule] = old->drawn &&
                     (size <= TINY ||
                      (to->rule[rule].state[1] - to->rule[rule].state[0] <= SMALL &&
                       end_is_open(k, r, old, stamp, stack)));
    }
    for (int32_t i = 0; i < k->n_rules && !to->failed; i++)
        if (!to->rule[i].drawn && k->rule[i].drawn) draw_rule(to, k, i, into);
}

still_status sti_sketch_inline(const sti_sketch *k, const sti_rules *r, sti_sketch *out,
                               still_error *err)
{
    const size_t states = (size_t)k->n_states + 1, rules = (size_t)k->n_rules + 1;
    sti_sketch to = {0};
    bool *into = sti_alloc(rules, sizeof *into);
    int32_t *stamp = sti_alloc(states, sizeof *stamp);
    int32_t *stack = sti_alloc(states, sizeof *stack);
    to.rule = sti_alloc(rules, sizeof *to.rule);
    if (!into || !stamp || !stack || !to.rule) to.failed = STILL_E_MEMORY;
    for (int32_t i = 0; i < k->n_rules && !to.failed; i++) {
        to.rule[i] = (sti_sketch_rule){.name = sti_strdup(k->rule[i].name),
                                       .line = k->rule[i].line,
                                       .column = k->rule[i].column};
        to.n_rules = i + 1;
        if (!to.rule[i].name) to.failed = STILL_E_MEMORY;
    }
    if (!to.failed) draw_all(&to, k, r, into, stamp, stack);
    free(into);
    free(stamp);
    free(stack);
    if (to.failed) {
        const still_status status = sti_sketch_fail(&to, "grammar", err);
        sti_sketch_free(&to);
        return status;
    }
    *out = to;
    return STILL_OK;
}
