/* machine.h - runs an automaton: all ways in which bytes can be read, side by side.
 *
 * A way is an item: a state, and the frame of the rule that the state belongs to. A frame
 * has a link for each caller: the state to come back to, and that one's frame. Calls of one
 * rule at one byte share a frame, and items are kept once, so ambiguity costs memory and
 * time like its number of states, not like its number of ways. A rule that is called last
 * in another gets that one's callers (a tail call), so a list of any length written with
 * the recursion last needs one frame.
 *
 * Frames and links made while bytes are read lie behind those that were there, so going
 * back in a walk is setting three counters. */
#ifndef STI_GRAMMAR_MACHINE_H
#define STI_GRAMMAR_MACHINE_H

#include "grammar/automaton.h"

typedef struct sti_item {
    int32_t state, frame;
} sti_item;

typedef struct sti_frame {
    int32_t rule, link; /* link: the first, -1: none */
} sti_frame;

typedef struct sti_link {
    int32_t back, frame, next;
} sti_link;

enum {
    STI_MACHINE_ITEMS = 1 << 16,
    STI_MACHINE_FRAMES = 1 << 14,
    STI_MACHINE_LINKS = 1 << 16
};

typedef struct sti_machine {
    const sti_automaton *a;
    sti_item *item;
    sti_frame *frame; /* 0: of state 0, which nobody called */
    sti_link *link;
    int32_t n_items, n_frames, n_links;
    int32_t fresh; /* frames from here on were made at the last byte */
    bool ended;    /* frame 0 may end after the last byte */
    bool full;     /* something did not fit, or work is used up */
    int64_t work;  /* items and edges that may still be looked at */
} sti_machine;

still_status sti_machine_init(sti_machine *m, const sti_automaton *a, still_error *err);
void sti_machine_free(sti_machine *m);

/* One item in frame 0, and nothing else. */
void sti_machine_start(sti_machine *m, int32_t state);
/* Adds what the items from `first` on call, and what they return to. */
void sti_machine_close(sti_machine *m, int32_t first);
/* Adds an item to those from `first` on, unless it is among them. */
void sti_machine_add(sti_machine *m, int32_t first, int32_t state, int32_t frame);
/* Reads a byte: the items lo..hi-1 lead to new ones, closed, at the end of the list. */
void sti_machine_step(sti_machine *m, int32_t lo, int32_t hi, unsigned char byte);

#endif
