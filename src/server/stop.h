/* stop.h - ends a text before the first stop string in it, while it is being written.
 *
 * Text that might be the beginning of a stop string is held back until more of it is
 * known, so that what has been sent never has to be taken back. */
#ifndef SERVER_STOP_H
#define SERVER_STOP_H

#include "base/buf.h"
#include "server/fields.h"

typedef struct srv_stops {
    const srv_stop_text *stop; /* [n], borrowed */
    int n;
    sti_buf held; /* not released yet */
    bool found;   /* the text has ended */
} srv_stops;

/* Takes n more bytes and appends what can be released to out. False: a stop string was
 * found, the text before it has been released, and there is nothing more. */
bool srv_stops_push(srv_stops *s, const char *text, size_t n, sti_buf *out);
/* The text is over: releases what was held. */
void srv_stops_end(srv_stops *s, sti_buf *out);
void srv_stops_free(srv_stops *s);

/* Length of the longest end of text[0..n) that is a beginning of word and not all of it. */
size_t srv_overlap(const char *text, size_t n, const char *word, size_t n_word);

#endif
