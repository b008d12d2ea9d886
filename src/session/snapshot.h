/* snapshot.h - a past that was set aside: what it is of, and its bytes. */
#ifndef STI_SESSION_SNAPSHOT_H
#define STI_SESSION_SNAPSHOT_H

#include "session/session.h"

struct still_snapshot {
    int length;
    bool has_logits;
    const still_model *model;
    char settings[STI_SETTINGS_LINE];
    size_t whole_bytes; /* of the session's state, which depends on its context */
    size_t past_bytes;
    sti_block memory; /* the two below lie in it */
    float *logits;    /* [vocab] */
    unsigned char *past;
};

/* Called for every range of a session's state that a past of so many tokens fills: n bytes
 * at `at` of the state are those at `packed` of the past. */
typedef still_status (*sti_past_fn)(void *user, size_t at, size_t packed, size_t n,
                                    still_error *err);
/* each NULL: only counts. *bytes: of the past. */
still_status sti_session_past(const still_session *s, int length, sti_past_fn each,
                              void *user, size_t *bytes, still_error *err);

/* Room for a past of a session like s; its bytes are to be filled in. */
still_status sti_snapshot_new(const still_session *s, int length, still_snapshot **out,
                              still_error *err);

#endif
