/* stream.h - releases generated text as early as possible, but never a byte of a stop
 * string, even when one spans several tokens. */
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
    sti_buf text; /* all bytes received; the first `out` of them are released */
    size_t out;
} cli_stream;

/* Takes n bytes. *show and *n_show are what may be shown now, valid until the next
 * push. True: a stop string has appeared; the text ends before it, push no more. */
bool cli_stream_push(cli_stream *s, const char *bytes, size_t n, const char **show,
                     size_t *n_show);
/* No more bytes will come: releases what was held back for a stop string. */
void cli_stream_end(cli_stream *s, const char **show, size_t *n_show);
void cli_stream_free(cli_stream *s);

#endif
