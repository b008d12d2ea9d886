/* machine.c - see machine.h. */
#include "grammar/machine.h"

#include <stdlib.h>

#include "base/mem.h"

still_status sti_machine_init(sti_machine *m, const sti_automaton *a, still_error *err)
{
    *m = (sti_machine){.a = a};
    m->item = sti_alloc(STI_MACHINE_ITEMS, sizeof *m->item);
    m->frame = sti_alloc(STI_MACHINE_FRAMES, sizeof *m->frame);
    m->link = sti_alloc(STI_MACHINE_LINKS, sizeof *m->link);
    if (m->item && m->frame && m->link) return STILL_OK;
    sti_machine_free(m);
    return sti_fail_memory(err, "grammar", STI_MACHINE_ITEMS * sizeof(sti_item));
}

void sti_machine_free(sti_machine *m)
{
    free(m->item);
    free(m->frame);
    free(m->link);
    *m = (sti_machine){0};
}

/* Takes n from the work that may still be done; false: that is used up. */
static bool afford(sti_machine *m, int32_t n)
{
    m->work -= n;
    if (m->work < 0) m->full = true;
    return m->work >= 0;
}

void sti_machine_add(sti_machine *m, int32_t first, int32_t state, int32_t frame)
{
    if (m->full || !afford(m, m->n_items - first)) return;
    for (int32_t i = first; i < m->n_items; i++)
        if (m->item[i].state == state && m->item[i].frame == frame) return;
    if (m->n_items == STI_MACHINE_ITEMS) {
        m->full = true;
        return;
    }
    m->item[m->n_items++] = (sti_item){state, frame};
}

static void add_link(sti_machine *m, int32_t frame, int32_t back, int32_t caller)
{
    for (int32_t l = m->frame[frame].link; l >= 0; l = m->link[l].next)
        if (!afford(m, 1) || (m->link[l].back == back && m->link[l].frame == caller))
            return;
    if (m->n_links == STI_MACHINE_LINKS) {
        m->full = true;
        return;
    }
    m->link[m->n_links] = (sti_link){back, caller, m->frame[frame].link};
    m->frame[frame].link = m->n_links++;
}

/* The frame of a rule that is called at this byte; *fresh: it was not called yet. */
static int32_t frame_of(sti_machine *m, int32_t rule, bool *fresh)
{
    *fresh = false;
    if (!afford(m, m->n_frames - m->fresh)) return -1;
    for (int32_t f = m->fresh; f < m->n_frames; f++)
        if (m->frame[f].rule == rule) return f;
    if (m->n_frames == STI_MACHINE_FRAMES) {
        m->full = true;
        return -1;
    }
    *fresh = true;
    m->frame[m->n_frames] = (sti_frame){rule, -1};
    return m->n_frames++;
}

static void call(sti_machine *m, int32_t first, const sti_call *c, int32_t caller)
{
    bool fresh;
    const int32_t frame = frame_of(m, c->rule, &fresh);
    if (frame < 0) return;
    if (fresh) sti_machine_add(m, first, m->a->start[c->rule], frame);
    /* Callers of a frame made at this byte may not be known yet. Frame 0 has none, and
     * must see its end. */
    if (c->tail && caller < m->fresh && caller > 0)
        for (int32_t l = m->frame[caller].link; l >= 0; l = m->link[l].next)
            add_link(m, frame, m->link[l].back, m->link[l].frame);
    else
        add_link(m, frame, c->back, caller);
}

void sti_machine_close(sti_machine *m, int32_t first)
{
    m->ended = false;
    for (int32_t i = first; i < m->n_items && !m->full; i++) {
        const sti_item it = m->item[i];
        const sti_state *s = &m->a->state[it.state];
        /* A rule does not end at the byte it is called at (automaton.h). */
        if (s->final && it.frame < m->fresh) {
            m->ended |= it.frame == 0;
            for (int32_t l = m->frame[it.frame].link; l >= 0; l = m->link[l].next)
                sti_machine_add(m, first, m->link[l].back, m->link[l].frame);
        }
        for (int32_t c = s->call; c < s[1].call; c++)
            call(m, first, &m->a->call[c], it.frame);
    }
}

void sti_machine_start(sti_machine *m, int32_t state)
{
    m->n_items = m->n_links = 0;
    m->n_frames = m->fresh = 1;
    m->frame[0] = (sti_frame){-1, -1};
    m->full = false;
    m->item[m->n_items++] = (sti_item){state, 0};
}

void sti_machine_step(sti_machine *m, int32_t lo, int32_t hi, unsigned char byte)
{
    const int32_t first = m->n_items;
    m->fresh = m->n_frames;
    for (int32_t i = lo; i < hi && !m->full; i++) {
        const sti_item it = m->item[i];
        const sti_state *s = &m->a->state[it.state];
        if (!afford(m, 1 + s[1].edge - s->edge)) break;
        for (int32_t j = s->edge; j < s[1].edge; j++) {
            const sti_edge *e = &m->a->edge[j];
            if (e->lo > byte) break;
            if (byte <= e->hi) sti_machine_add(m, first, e->to, it.frame);
        }
    }
    sti_machine_close(m, first);
}
