/* kept.h - what a session keeps of a conversation, as JSON for the page. */
#ifndef SERVER_KEPT_H
#define SERVER_KEPT_H

#include "base/buf.h"
#include "still.h"

/* One answer: the session after it, and the ids that were read and written. The session
 * holds the first still_session_length() of them; the last one written is often not read
 * any more. */
typedef struct srv_kept {
    const still_model *model;
    const still_session *session;
    const int32_t *prompt;
    int n_prompt;
    const int32_t *made;
    int n_made;
    double queued_s, prompt_s, decode_s; /* that it waited, read, wrote */
} srv_kept;

/* Appends an object to b (docs/serve.md has its fields): the text of each token; for each
 * head which tokens it keeps exact and how they rank by its score; for each token the
 * share of heads that hold it exact; bytes. Nothing is appended on failure. */
still_status srv_kept_put(sti_buf *b, const srv_kept *k, still_error *err);

#endif
