/* rules.c - what can be said of rules before any text is read: which may be empty, which
 * begin with themselves, which never end, and an order in which each comes after those it
 * calls. All in time linear in the sketch: it may come from anyone. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "grammar/automaton.h"

void sti_rules_free(sti_rules *r)
{
    free(r->arc);
    free(r->out);
    free(r->empty);
    free(r->begins);
    free(r->bottom_up);
    *r = (sti_rules){0};
}

void sti_rule_where(const sti_sketch_rule *r, char *out, size_t room)
{
    if (r->line)
        snprintf(out, room, "grammar: line %d, column %d: rule '%.64s'", r->line,
                 r->column, r->name);
    else
        snprintf(out, room, "schema: %.400s", r->name);
}

/* ---- Spreading along arcs ------------------------------------------------ */

/* What can be reached from the first states of rules, where a call can be passed once its
 * rule has been passed from end to end. */
typedef struct spread {
    const sti_sketch *k;
    const sti_rules *r;
    bool bytes;        /* arcs that read bytes are passed, too */
    bool *reached;     /* [n_states] */
    bool *passed;      /* [n_rules] its last state was reached */
    int32_t *waiting;  /* [n_rules] first arc that waits for it; -1: none */
    int32_t *next;     /* [n_arcs] the next that waits for the same rule */
    int32_t *stack, n; /* states to go on from */
    int32_t *owner;    /* [n_states] the rule whose last state it is; -1: none */
} spread;

static void reach(spread *w, int32_t state)
{
    if (w->reached[state]) return;
    w->reached[state] = true;
    w->stack[w->n++] = state;
}

static void go_on(spread *w)
{
    while (w->n) {
        const int32_t s = w->stack[--w->n], rule = w->owner[s];
        if (rule >= 0) {
            w->passed[rule] = true;
            for (int32_t a = w->waiting[rule]; a >= 0; a = w->next[a])
                reach(w, w->k->arc[a].to);
            w->waiting[rule] = -1;
        }
        for (int32_t i = w->r->out[s]; i < w->r->out[s + 1]; i++) {
            const int32_t a = w->r->arc[i];
            const sti_arc *arc = &w->k->arc[a];
            const bool call = arc->kind == STI_ARC_RULE;
            if (call && !w->passed[arc->rule]) {
                w->next[a] = w->waiting[arc->rule];
                w->waiting[arc->rule] = a;
            } else if (call || w->bytes || arc->kind == STI_ARC_EMPTY) {
                reach(w, arc->to);
            }
        }
    }
}

/* Fills reached [n_states] and passed [n_rules]. */
static still_status spread_all(const sti_sketch *k, const sti_rules *r, bool bytes,
                               bool *reached, bool *passed, still_error *err)
{
    const size_t states = (size_t)k->n_states + 1, rules = (size_t)k->n_rules + 1;
    spread w = {.k = k, .r = r, .bytes = bytes, .reached = reached, .passed = passed};
    w.waiting = sti_alloc(rules, sizeof *w.waiting);
    w.next = sti_alloc((size_t)k->n_arcs + 1, sizeof *w.next);
    w.stack = sti_alloc(states, sizeof *w.stack);
    w.owner = sti_alloc(states, sizeof *w.owner);
    const bool room = w.waiting && w.next && w.stack && w.owner;
    if (room) {
        for (size_t i = 0; i < states; i++) w.owner[i] = -1;
        for (int32_t i = 0; i < k->n_rules; i++) {
            w.waiting[i] = -1;
            if (k->rule[i].drawn) w.owner[k->rule[i].last] = i;
        }
        for (int32_t i = 0; i < k->n_rules; i++)
            if (k->rule[i].drawn) reach(&w, k->rule[i].first);
        go_on(&w);
    }
    free(w.waiting);
    free(w.next);
    free(w.stack);
    free(w.owner);
    if (!room) return sti_fail_memory(err, "grammar", states * sizeof *w.stack);
    return STILL_OK;
}

/* ---- Order --------------------------------------------------------------- */

/* Rules whose calls are all to rules already in the list, until there are no more: those
 * left call themselves somehow. */
static still_status order(const sti_sketch *k, sti_rules *r, still_error *err)
{
    const size_t rules = (size_t)k->n_rules + 1;
    int32_t *open = sti_alloc(rules, sizeof *open); /* calls to rules not in the list */
    int32_t *first = sti_alloc(rules + 1, sizeof *first); /* calls by the rule called */
    int32_t *caller = sti_alloc((size_t)k->n_arcs + 1, sizeof *caller);
    if (open && first && caller) {
        for (int32_t i = 0; i < k->n_arcs; i++)
            if (k->arc[i].kind == STI_ARC_RULE) first[k->arc[i].rule + 1]++;
        for (size_t i = 1; i <= rules; i++) first[i] += first[i - 1];
        for (int32_t i = 0; i < k->n_rules; i++)
            for (int32_t a = k->rule[i].arc[0]; a < k->rule[i].arc[1]; a++)
                if (k->arc[a].kind == STI_ARC_RULE) {
                    caller[first[k->arc[a].rule]++] = i;
                    open[i]++;
                }
        for (int32_t i = 0; i < k->n_rules; i++)
            if (!open[i]) r->bottom_up[r->n_flat++] = i;
        for (int32_t i = 0; i < r->n_flat; i++) {
            const int32_t done = r->bottom_up[i];
            for (int32_t c = done ? first[done - 1] : 0; c < first[done]; c++)
                if (--open[caller[c]] == 0) r->bottom_up[r->n_flat++] = caller[c];
        }
    }
    const bool room = open && first && caller;
    free(open);
    free(first);
    free(caller);
    if (!room) return sti_fail_memory(err, "grammar", rules * sizeof *open);
    return STILL_OK;
}

static void index_arcs(const sti_sketch *k, sti_rules *r)
{
    for (int32_t i = 0; i < k->n_arcs; i++) r->out[k->arc[i].from + 1]++;
    for (int32_t s = 0; s < k->n_states; s++) r->out[s + 1] += r->out[s];
    for (int32_t i = k->n_arcs; i-- > 0;) r->arc[--r->out[k->arc[i].from + 1]] = i;
    /* Each out[s+1] has become the start of s's arcs. */
    memmove(r->out, r->out + 1, (size_t)k->n_states * sizeof *r->out);
    r->out[k->n_states] = k->n_arcs;
}

still_status sti_rules_find(const sti_sketch *k, sti_rules *out, still_error *err)
{
    const size_t states = (size_t)k->n_states + 1, rules = (size_t)k->n_rules + 1;
    sti_rules r = {0};
    still_status status = STILL_OK;
    r.arc = sti_alloc((size_t)k->n_arcs + 1, sizeof *r.arc);
    r.out = sti_alloc(states + 1, sizeof *r.out);
    r.empty = sti_alloc(rules, sizeof *r.empty);
    r.begins = sti_alloc(states, sizeof *r.begins);
    r.bottom_up = sti_alloc(rules, sizeof *r.bottom_up);
    if (!r.arc || !r.out || !r.empty || !r.begins || !r.bottom_up)
        status = sti_fail_memory(err, "grammar", states * 8);
    if (status == STILL_OK) {
        index_arcs(k, &r);
        status = spread_all(k, &r, false, r.begins, r.empty, err);
    }
    if (status == STILL_OK) status = order(k, &r, err);
    if (status != STILL_OK) {
        sti_rules_free(&r);
        return status;
    }
    *out = r;
    return STILL_OK;
}

/* ---- Checks -------------------------------------------------------------- */

/* A rule that calls itself before anything is read; -1: none. Rules are visited depth
 * first; `open` ones are on the way from the first, so a call to one closes a circle. */
static int32_t left_recursive(const sti_sketch *k, const sti_rules *r, int32_t *place,
                              int32_t *path, unsigned char *seen)
{
    enum { OPEN = 1, DONE = 2 };
    for (int32_t i = 0; i < k->n_rules; i++) {
        int32_t n = 0;
        if (seen[i] || !k->rule[i].drawn) continue;
        path[n++] = i;
        seen[i] = OPEN;
        place[i] = k->rule[i].arc[0];
        while (n) {
            const int32_t rule = path[n - 1];
            if (place[rule] == k->rule[rule].arc[1]) {
                seen[rule] = DONE;
                n--;
                continue;
            }
            const sti_arc *arc = &k->arc[place[rule]++];
            if (arc->kind != STI_ARC_RULE || !r->begins[arc->from]) continue;
            if (seen[arc->rule] == OPEN) return arc->rule;
            if (seen[arc->rule] || !k->rule[arc->rule].drawn) continue;
            seen[arc->rule] = OPEN;
            place[arc->rule] = k->rule[arc->rule].arc[0];
            path[n++] = arc->rule;
        }
    }
    return -1;
}

still_status sti_rules_check(const sti_sketch *k, const sti_rules *r, still_error *err)
{
    const size_t rules = (size_t)k->n_rules + 1;
    char where[512];
    int32_t *place = sti_alloc(rules, sizeof *place);
    int32_t *path = sti_alloc(rules, sizeof *path);
    unsigned char *seen = sti_alloc(rules, 1);
    bool *reached = sti_alloc((size_t)k->n_states + 1, sizeof *reached);
    bool *ends = sti_alloc(rules, sizeof *ends);
    still_status status = STILL_OK;
    if (!place || !path || !seen || !reached || !ends)
        status = sti_fail_memory(err, "grammar", rules * sizeof *place);
    if (status == STILL_OK) {
        const int32_t bad = left_recursive(k, r, place, path, seen);
        if (bad >= 0) {
            sti_rule_where(&k->rule[bad], where, sizeof where);
            status =
                sti_fail(err, STILL_E_UNSUPPORTED,
                         "%s is left-recursive: it can begin with itself; write it "
                         "as a repetition, or with the recursion last",
                         where);
        }
    }
    if (status == STILL_OK) status = spread_all(k, r, true, reached, ends, err);
    for (int32_t i = 0; i < k->n_rules && status == STILL_OK; i++)
        if (k->rule[i].drawn && !ends[i]) {
            sti_rule_where(&k->rule[i], where, sizeof where);
            status =
                sti_fail(err, STILL_E_UNSUPPORTED,
                         "%s never ends: every way through it comes back to it", where);
        }
    free(place);
    free(path);
    free(seen);
    free(reached);
    free(ends);
    return status;
}
