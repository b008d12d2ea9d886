/* matcher.c - how far a text has come in a grammar.
 *
 * A matcher is small: items, and the frames that they can come back to. To read bytes it is
 * copied into the grammar's machine, which has room to try things, and what is still needed
 * afterwards is copied back. So nothing is allocated, and nothing is left behind by text
 * that was read long ago. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"
#include "grammar/grammar.h"

enum { MOST_WORK = 1 << 25 }; /* items and edges looked at for one token */

void sti_matcher_load(const still_matcher *m, bool close)
{
    sti_machine *to = &m->g->m;
    memcpy(to->item, m->item, (size_t)m->n_items * sizeof *m->item);
    memcpy(to->frame, m->frame, (size_t)m->n_frames * sizeof *m->frame);
    memcpy(to->link, m->link, (size_t)m->n_links * sizeof *m->link);
    to->n_items = m->n_items;
    to->n_frames = to->fresh = m->n_frames;
    to->n_links = m->n_links;
    if (close) sti_machine_close(to, 0);
}

/* Reads the bytes of a token with the machine; the items then are those from *first on. */
static bool read_token(const still_matcher *m, int32_t id, int32_t *first)
{
    sti_machine *to = &m->g->m;
    size_t n;
    const char *p = still_tokenizer_piece(m->g->tk, id, true, &n);
    if (!p) return false;
    to->work = MOST_WORK;
    to->full = false;
    sti_matcher_load(m, true);
    *first = 0;
    for (size_t i = 0; i < n && !to->full; i++) {
        const int32_t lo = *first;
        *first = to->n_items;
        sti_machine_step(to, lo, *first, (unsigned char)p[i]);
        if (to->n_items == *first) return false;
    }
    return !to->full;
}

/* ---- Keeping what is needed ---------------------------------------------- */

/* The number a frame of the machine gets in the matcher; -1: there is no room. */
static int32_t number_of(still_grammar *g, int32_t frame, int32_t *n)
{
    if (g->next.number[frame] < 0 && *n < STI_MATCHER_FRAMES) {
        g->next.number[frame] = *n;
        g->next.old[(*n)++] = frame;
    }
    return g->next.number[frame];
}

static bool is_over(const still_grammar *g, int32_t state)
{
    const sti_state *s = &g->a.state[state];
    return s[1].edge == s->edge && s[1].call == s->call;
}

/* Takes over the machine's items from `first` on, and the frames that they can come back
 * to. False: there is no room, and the matcher is as it was. */
static bool copy_back(still_matcher *m, int32_t first)
{
    still_grammar *g = m->g;
    const sti_machine *from = &g->m;
    int32_t n_items = 0, n_frames = 0, n_links = 0;
    for (int32_t i = 0; i < from->n_frames; i++) g->next.number[i] = -1;
    number_of(g, 0, &n_frames);
    for (int32_t i = first; i < from->n_items; i++) {
        const sti_item it = from->item[i];
        /* The first follow from the others, the second have nothing more to read. */
        if (it.frame >= from->fresh || is_over(g, it.state)) continue;
        const int32_t frame = number_of(g, it.frame, &n_frames);
        if (frame < 0 || n_items == STI_MATCHER_ITEMS) return false;
        g->next.item[n_items++] = (sti_item){it.state, frame};
    }
    for (int32_t f = 0; f < n_frames; f++) { /* which become more */
        const sti_frame *old = &from->frame[g->next.old[f]];
        sti_frame *frame = &g->next.frame[f];
        *frame = (sti_frame){old->rule, -1};
        for (int32_t l = old->link; l >= 0; l = from->link[l].next) {
            const int32_t caller = number_of(g, from->link[l].frame, &n_frames);
            if (caller < 0 || n_links == STI_MATCHER_LINKS) return false;
            g->next.link[n_links] = (sti_link){from->link[l].back, caller, frame->link};
            frame->link = n_links++;
        }
    }
    memcpy(m->item, g->next.item, (size_t)n_items * sizeof *m->item);
    memcpy(m->frame, g->next.frame, (size_t)n_frames * sizeof *m->frame);
    memcpy(m->link, g->next.link, (size_t)n_links * sizeof *m->link);
    m->n_items = n_items;
    m->n_frames = n_frames;
    m->n_links = n_links;
    m->can_end = from->ended;
    return true;
}

/* ---- Tokens -------------------------------------------------------------- */

static bool is_text(const still_matcher *m, int32_t id)
{
    const still_grammar *g = m->g;
    return id >= 0 && id < g->vocab && id < m->vocab &&
           (g->text[id / 64] >> id % 64 & 1) != 0;
}

bool sti_matcher_allows(const still_matcher *m, int32_t id)
{
    int32_t first;
    if (id >= 0 && id < m->vocab && still_tokenizer_is_end(m->g->tk, id))
        return m->can_end;
    return !m->ended && is_text(m, id) && read_token(m, id, &first);
}

static still_status refuse(const still_matcher *m, int32_t id, still_error *err)
{
    char shown[64] = "";
    size_t n;
    const char *p = still_tokenizer_piece(m->g->tk, id, true, &n);
    if (p) {
        n = n < sizeof shown ? n : sizeof shown - 1;
        memcpy(shown, p, n);
        shown[n] = 0;
        sti_utf8_harmless(shown, n, false);
    }
    return sti_fail(err, STILL_E_ARG,
                    "token %d ('%s') is not one the grammar allows %s", id, shown,
                    m->ended ? "after the end" : "here");
}

still_status still_matcher_accept(still_matcher *m, int32_t id, still_error *err)
{
    int32_t first;
    if (id >= 0 && id < m->vocab && still_tokenizer_is_end(m->g->tk, id) &&
        m->can_end) {
        m->ended = true;
        return STILL_OK;
    }
    const bool fits = !m->ended && is_text(m, id) && read_token(m, id, &first);
    if (!fits && !m->g->m.full) return refuse(m, id, err);
    if (!fits || !copy_back(m, first))
        return sti_fail(err, STILL_E_LIMIT,
                        "grammar: the text is nested too deep, or in too many ways at "
                        "once: more than %d open rules",
                        STI_MATCHER_FRAMES);
    return STILL_OK;
}

bool still_matcher_can_end(const still_matcher *m)
{
    return m->can_end;
}

bool still_matcher_done(const still_matcher *m)
{
    return m->ended || (m->can_end && m->n_items == 0);
}

/* ---- Life ---------------------------------------------------------------- */

void still_matcher_reset(still_matcher *m)
{
    sti_machine *from = &m->g->m;
    from->work = MOST_WORK;
    sti_machine_start(from, 0);
    sti_machine_close(from, 0);
    m->ended = false;
    copy_back(m, 0); /* one item in frame 0 */
}

still_status still_matcher_new(still_grammar *g, int vocab, still_matcher **out,
                               still_error *err)
{
    *out = NULL;
    if (vocab < 1)
        return sti_fail(err, STILL_E_ARG, "a vocabulary of %d tokens", vocab);
    still_matcher *m = sti_alloc(1, sizeof *m);
    if (!m) return sti_fail_memory(err, "matcher", sizeof *m);
    m->g = g;
    m->vocab = vocab;
    m->item = sti_alloc(STI_MATCHER_ITEMS, sizeof *m->item);
    m->frame = sti_alloc(STI_MATCHER_FRAMES, sizeof *m->frame);
    m->link = sti_alloc(STI_MATCHER_LINKS, sizeof *m->link);
    m->bits = sti_alloc(((size_t)vocab + 63) / 64, sizeof *m->bits);
    if (!m->item || !m->frame || !m->link || !m->bits) {
        still_matcher_free(m);
        return sti_fail_memory(err, "matcher", STI_MATCHER_LINKS * sizeof *m->link);
    }
    still_matcher_reset(m);
    *out = m;
    return STILL_OK;
}

void still_matcher_free(still_matcher *m)
{
    if (!m) return;
    free(m->item);
    free(m->frame);
    free(m->link);
    free(m->bits);
    free(m);
}

still_status still_matcher_fork(const still_matcher *m, still_matcher **out,
                                still_error *err)
{
    STI_TRY(still_matcher_new(m->g, m->vocab, out, err));
    still_matcher *to = *out;
    memcpy(to->item, m->item, (size_t)m->n_items * sizeof *m->item);
    memcpy(to->frame, m->frame, (size_t)m->n_frames * sizeof *m->frame);
    memcpy(to->link, m->link, (size_t)m->n_links * sizeof *m->link);
    to->n_items = m->n_items;
    to->n_frames = m->n_frames;
    to->n_links = m->n_links;
    to->can_end = m->can_end;
    to->ended = m->ended;
    return STILL_OK;
}
