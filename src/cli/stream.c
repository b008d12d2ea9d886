/* stream.c - see stream.h.
 *
 * Holds back the longest suffix of the text that is a prefix of some stop string. So
 * a stop string can only start at or after `out`, and each push looks at a few
 * bytes. */
#include "cli/stream.h"

#include <string.h>

/* Start of the first stop string in p[0..n), n if there is none. */
static size_t find_stop(const cli_stream *s, const char *p, size_t n)
{
    size_t first = n;
    for (int i = 0; i < s->n_stops; i++) {
        const char *hit = memmem(p, n, s->stop[i], strlen(s->stop[i]));
        if (hit && (size_t)(hit - p) < first) first = (size_t)(hit - p);
    }
    return first;
}

/* Length of the longest end of p[0..n) that is the beginning of a stop string. */
static size_t held_back(const cli_stream *s, const char *p, size_t n)
{
    size_t most = 0;
    for (int i = 0; i < s->n_stops; i++) {
        size_t length = strlen(s->stop[i]) - 1;
        if (length > n) length = n;
        for (; length > most; length--)
            if (!memcmp(p + n - length, s->stop[i], length)) most = length;
    }
    return most;
}

static void let_out(cli_stream *s, size_t end, const char **show, size_t *n_show)
{
    *show = s->text.p ? s->text.p + s->out : "";
    *n_show = end - s->out;
    s->out = end;
}

bool cli_stream_push(cli_stream *s, const char *bytes, size_t n, const char **show,
                     size_t *n_show)
{
    sti_buf_put(&s->text, bytes, n);
    const char *fresh = s->text.p ? s->text.p + s->out : "";
    size_t length = s->text.n - s->out;
    size_t stop = find_stop(s, fresh, length);
    if (stop < length) {
        s->text.n = s->out + stop;
        let_out(s, s->text.n, show, n_show);
        return true;
    }
    let_out(s, s->text.n - held_back(s, fresh, length), show, n_show);
    return false;
}

void cli_stream_end(cli_stream *s, const char **show, size_t *n_show)
{
    let_out(s, s->text.n, show, n_show);
}

void cli_stream_free(cli_stream *s)
{
    sti_buf_free(&s->text);
    *s = (cli_stream){0};
}
