/* salient.h - the salient list of a selection head: its slots, and the far keys in front.
 *
 * Far keys come first in a list (see position_cap in ops/hybrid.h), else slots are in no
 * order: a token that joins takes the place of an evicted one, since keys are slow to
 * move. Keys lie in panels, values in rows. Quantized keys (ops/salient.h) lie in panels
 * of words (qk_logits_levels of attn_tile.h). */
#ifndef STI_BACKEND_CPU_HYBRID_SALIENT_H
#define STI_BACKEND_CPU_HYBRID_SALIENT_H

#include "backend/cpu/hybrid/hybrid.h"

typedef struct sti_hyb_list {
    const sti_hyb *h;
    const sti_hybrid_state *st;
    int sel;
    size_t first; /* slot 0 in the arrays of all selection heads */
    int capacity;
    int32_t *count;
} sti_hyb_list;

sti_hyb_list sti_hyb_list_of(const sti_hyb *h, const sti_hybrid_state *st, int sel);

static inline bool sti_hyb_is_far(const sti_hyb_list *l, int slot)
{
    return l->st->sal_far && l->st->sal_far[l->first + (size_t)slot];
}

/* How many there are. */
int sti_hyb_far_keys(const sti_hyb_list *l);

/* Stores a token in a slot, quantized if the list is. key, value [D]: in the type of the
 * window. */
void sti_hyb_set_slot(const sti_hyb_list *l, int slot, const void *key,
                      const void *value, float score, int32_t position);
/* Key and value [D] of a slot as numbers. */
void sti_hyb_read_slot(const sti_hyb_list *l, int slot, float *key, float *value);

/* Moves the last far keys into evicted slots among the far keys; their old slots become
 * free instead. evicted: in order. */
void sti_hyb_fill_far_gaps(const sti_hyb_list *l, int32_t *evicted, int n);
/* Moves keys that are far from the last token of chunk c to the front of the list, where
 * they are kept without RoPE. */
void sti_hyb_make_far(const sti_hyb_list *l, const sti_hybrid_args *a, int64_t c);

#endif
