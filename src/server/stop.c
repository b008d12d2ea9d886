/* stop.c - see stop.h. */
#include "server/stop.h"

#include <string.h>

size_t srv_overlap(const char *text, size_t n, const char *word, size_t n_word)
{
    size_t most = n < n_word - 1 ? n : n_word - 1;
    for (size_t k = most; k > 0; k--)
        if (memcmp(text + n - k, word, k) == 0) return k;
    return 0;
}

bool srv_stops_push(srv_stops *s, const char *text, size_t n, sti_buf *out)
{
    if (s->found) return false;
    if (s->n == 0) {
        sti_buf_put(out, text, n);
        return true;
    }
    sti_buf_put(&s->held, text, n);
    if (s->held.failed) out->failed = true;
    if (s->held.n == 0 || s->held.failed) return true;
    size_t first = s->held.n, keep = 0;
    for (int i = 0; i < s->n; i++) {
        const char *hit = memmem(s->held.p, s->held.n, s->stop[i].p, s->stop[i].n);
        if (hit && (size_t)(hit - s->held.p) < first) first = (size_t)(hit - s->held.p);
        size_t part = srv_overlap(s->held.p, s->held.n, s->stop[i].p, s->stop[i].n);
        if (part > keep) keep = part;
    }
    if (first < s->held.n) {
        sti_buf_put(out, s->held.p, first);
        sti_buf_clear(&s->held);
        s->found = true;
        return false;
    }
    size_t go = s->held.n - keep;
    sti_buf_put(out, s->held.p, go);
    memmove(s->held.p, s->held.p + go, keep);
    s->held.n = keep;
    return true;
}

void srv_stops_end(srv_stops *s, sti_buf *out)
{
    if (!s->found && s->held.n) sti_buf_put(out, s->held.p, s->held.n);
    sti_buf_clear(&s->held);
    s->found = true;
}

void srv_stops_free(srv_stops *s)
{
    sti_buf_free(&s->held);
    *s = (srv_stops){0};
}
