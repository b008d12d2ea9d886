/* sketch.c - see sketch.h. */
#include "grammar/sketch.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

void sti_sketch_free(sti_sketch *k)
{
    for (int32_t i = 0; i < k->n_rules; i++) free(k->rule[i].name);
    free(k->rule);
    free(k->slot);
    free(k->arc);
    *k = (sti_sketch){0};
}

still_status sti_sketch_fail(const sti_sketch *k, const char *where, still_error *err)
{
    if (k->failed == STILL_E_MEMORY)
        return sti_fail_memory(err, "grammar",
                               2 * (size_t)k->arc_room * sizeof *k->arc);
    return sti_fail(
        err, STILL_E_LIMIT,
        "%s: too large: with repetitions written out, a grammar may have %d "
        "states, %d arcs and %d rules; repeat less often",
        where, STI_GRAMMAR_STATES, STI_GRAMMAR_ARCS, STI_GRAMMAR_RULES);
}

/* ---- States and arcs ----------------------------------------------------- */

int32_t sti_sketch_state(sti_sketch *k)
{
    if (k->n_states == STI_GRAMMAR_STATES && !k->failed) k->failed = STILL_E_LIMIT;
    return k->failed ? 0 : k->n_states++;
}

static void add_arc(sti_sketch *k, sti_arc arc)
{
    if (k->failed) return;
    if (k->n_arcs == STI_GRAMMAR_ARCS) {
        k->failed = STILL_E_LIMIT;
        return;
    }
    if (k->n_arcs == k->arc_room) {
        const int32_t room = k->arc_room ? 2 * k->arc_room : 256;
        sti_arc *grown = sti_grow(k->arc, (size_t)room, sizeof *grown);
        if (!grown) {
            k->failed = STILL_E_MEMORY;
            return;
        }
        k->arc = grown;
        k->arc_room = room;
    }
    k->arc[k->n_arcs++] = arc;
}

void sti_sketch_empty(sti_sketch *k, int32_t from, int32_t to)
{
    add_arc(k, (sti_arc){.from = from, .to = to, .kind = STI_ARC_EMPTY});
}

void sti_sketch_byte(sti_sketch *k, int32_t from, int32_t to, unsigned lo, unsigned hi)
{
    add_arc(k, (sti_arc){.from = from,
                         .to = to,
                         .kind = STI_ARC_BYTE,
                         .lo = (unsigned char)lo,
                         .hi = (unsigned char)hi});
}

void sti_sketch_call(sti_sketch *k, int32_t from, int32_t to, int32_t rule)
{
    add_arc(k, (sti_arc){.from = from, .to = to, .kind = STI_ARC_RULE, .rule = rule});
}

void sti_sketch_text(sti_sketch *k, int32_t from, int32_t to, const char *p, size_t n)
{
    if (n == 0) sti_sketch_empty(k, from, to);
    for (size_t i = 0; i < n && !k->failed; i++) {
        const int32_t next = i + 1 < n ? sti_sketch_state(k) : to;
        const unsigned char byte = (unsigned char)p[i];
        sti_sketch_byte(k, from, next, byte, byte);
        from = next;
    }
}

/* ---- Characters ---------------------------------------------------------- */

/* Characters lo..hi that all take `left` more bytes, 6 bits each, below the bits of a
 * first byte. Where the range does not fill whole blocks of following bytes it is cut into
 * parts that do. */
static void draw_utf8(sti_sketch *k, int32_t from, int32_t to, uint32_t lo, uint32_t hi,
                      int left, unsigned lead)
{
    const int shift = 6 * left;
    const uint32_t rest = ((uint32_t)1 << shift) - 1;
    if (left == 0) {
        sti_sketch_byte(k, from, to, lead | lo, lead | hi);
        return;
    }
    if (lo >> shift != hi >> shift) {
        if (lo & rest) { /* the first block is not whole */
            draw_utf8(k, from, to, lo, lo | rest, left, lead);
            draw_utf8(k, from, to, (lo | rest) + 1, hi, left, lead);
            return;
        }
        if ((hi & rest) != rest) { /* nor is the last */
            draw_utf8(k, from, to, lo, (hi & ~rest) - 1, left, lead);
            draw_utf8(k, from, to, hi & ~rest, hi, left, lead);
            return;
        }
    }
    const int32_t next = sti_sketch_state(k);
    sti_sketch_byte(k, from, next, lead | lo >> shift, lead | hi >> shift);
    /* All blocks are whole, or there is one. */
    draw_utf8(k, next, to, lo & rest, hi & rest, left - 1, 0x80);
}

void sti_sketch_chars(sti_sketch *k, int32_t from, int32_t to, const sti_range *r,
                      size_t n)
{
    static const struct {
        uint32_t lo, hi;
        int left;
        unsigned lead;
    } form[] = {{0, 0x7F, 0, 0},
                {0x80, 0x7FF, 1, 0xC0},
                {0x800, 0xD7FF, 2, 0xE0},
                {0xE000, 0xFFFF, 2, 0xE0},
                {0x10000, 0x10FFFF, 3, 0xF0}};
    for (size_t i = 0; i < n && !k->failed; i++)
        for (size_t f = 0; f < sizeof form / sizeof *form; f++) {
            const uint32_t lo = r[i].lo > form[f].lo ? r[i].lo : form[f].lo;
            const uint32_t hi = r[i].hi < form[f].hi ? r[i].hi : form[f].hi;
            if (lo <= hi) draw_utf8(k, from, to, lo, hi, form[f].left, form[f].lead);
        }
}

/* ---- Repetition ---------------------------------------------------------- */

sti_mark sti_sketch_mark(const sti_sketch *k)
{
    return (sti_mark){k->n_states, k->n_arcs};
}

/* The states and arcs from `since` up to `until` once more. */
static sti_part copy(sti_sketch *k, sti_mark since, sti_mark until, sti_part part)
{
    const int32_t move = k->n_states - since.state;
    for (int32_t i = since.state; i < until.state; i++) sti_sketch_state(k);
    for (int32_t i = since.arc; i < until.arc && !k->failed; i++) {
        sti_arc arc = k->arc[i];
        arc.from += move;
        arc.to += move;
        add_arc(k, arc);
    }
    return (sti_part){part.first + move, part.last + move};
}

sti_part sti_sketch_repeat(sti_sketch *k, sti_mark since, sti_part part, int64_t min,
                           int64_t max)
{
    const sti_mark until = sti_sketch_mark(k);
    const int32_t first = sti_sketch_state(k), last = sti_sketch_state(k);
    int32_t at = first;
    sti_part one = part;
    for (int64_t i = 0; i < min && !k->failed; i++) {
        if (i > 0) one = copy(k, since, until, part);
        sti_sketch_empty(k, at, one.first);
        at = one.last;
    }
    if (max < 0) { /* the last of those that must be goes round */
        if (min == 0) {
            sti_sketch_empty(k, at, one.first);
            sti_sketch_empty(k, at, last);
        }
        sti_sketch_empty(k, one.last, one.first);
        at = one.last;
    }
    for (int64_t i = min; i < max && !k->failed; i++) {
        if (i > 0) one = copy(k, since, until, part);
        sti_sketch_empty(k, at, last);
        sti_sketch_empty(k, at, one.first);
        at = one.last;
    }
    sti_sketch_empty(k, at, last);
    return (sti_part){first, last};
}

/* ---- Rules --------------------------------------------------------------- */

/* The slot of a name: its rule's, or an empty one. */
static int32_t *find_slot(const sti_sketch *k, const char *name, size_t n)
{
    size_t i = sti_hash_bytes(&k->key, name, n) & k->mask;
    for (;; i = (i + 1) & k->mask) {
        if (!k->slot[i]) return &k->slot[i];
        const char *other = k->rule[k->slot[i] - 1].name;
        if (!strncmp(other, name, n) && !other[n]) return &k->slot[i];
    }
}

/* Room for twice as many rules, in a table half as full again. */
static bool grow_rules(sti_sketch *k)
{
    const int32_t room = k->rule_room ? 2 * k->rule_room : 32;
    sti_sketch_rule *rule = sti_grow(k->rule, (size_t)room, sizeof *rule);
    if (rule) k->rule = rule;
    int32_t *slot = rule ? sti_alloc(2 * (size_t)room, sizeof *slot) : NULL;
    if (!slot) return false;
    if (!k->rule_room) k->key = sti_hash_key_new();
    free(k->slot);
    k->slot = slot;
    k->mask = 2 * (size_t)room - 1;
    k->rule_room = room;
    for (int32_t i = 0; i < k->n_rules; i++)
        *find_slot(k, k->rule[i].name, strlen(k->rule[i].name)) = i + 1;
    return true;
}

int32_t sti_sketch_find_rule(sti_sketch *k, const char *name, size_t n)
{
    int32_t *slot = k->mask ? find_slot(k, name, n) : NULL;
    if (slot && *slot) return *slot - 1;
    if (k->n_rules == STI_GRAMMAR_RULES && !k->failed) k->failed = STILL_E_LIMIT;
    if (k->failed) return -1;
    char *own = sti_strndup(name, n);
    if (!own || (k->n_rules == k->rule_room && !grow_rules(k))) {
        free(own);
        k->failed = STILL_E_MEMORY;
        return -1;
    }
    slot = find_slot(k, name, n);
    k->rule[k->n_rules] = (sti_sketch_rule){.name = own};
    *slot = ++k->n_rules;
    return k->n_rules - 1;
}

void sti_sketch_begin(sti_sketch *k, int32_t rule)
{
    if (k->failed) return;
    sti_sketch_rule *r = &k->rule[rule];
    const sti_mark here = sti_sketch_mark(k);
    r->state[0] = here.state;
    r->arc[0] = here.arc;
    r->first = sti_sketch_state(k);
    r->last = sti_sketch_state(k);
}

void sti_sketch_end(sti_sketch *k, int32_t rule)
{
    if (k->failed) return;
    sti_sketch_rule *r = &k->rule[rule];
    const sti_mark here = sti_sketch_mark(k);
    r->state[1] = here.state;
    r->arc[1] = here.arc;
    r->drawn = true;
}
