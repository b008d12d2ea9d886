/* stream.h - lets generated text out as early as possible, but never a byte of a stop
 * string, also when one is spread over several tokens. */
#ifndef CLI_STREAM_H
#define CLI_STREAM_H

#include <stdbool.h>
#include <stddef.h>

#include "base/buf.h"

/* {.stop = ..., .n_stops = ...}, the rest zero. Stop strings are not empty and are
 * borrowed. */
typedef struct cli_stream {
    const char *const *stop;
    int n_stops;
    sti_buf text; /* all bytes taken; the first `out` of them were let out */
    size_t out;
} cli_stream;

/* Takes n bytes. *show and *n_show are what may be shown now, valid until the next
 * push. True: a stop string has appeared; the text ends before it, push no more. */
bool cli_stream_push(cli_stream *s, const char *bytes, size_t n, const char **show,
                     size_t *n_show);
/* No more bytes will come: what was held back for a stop string is let out. */
void cli_stream_end(cli_stream *s, const char **show, size_t *n_show);
void cli_stream_free(cli_stream *s);

#endif
