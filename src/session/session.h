/* session.h - one sequence: its memory, its length, its last logits. */
#ifndef STI_SESSION_SESSION_H
#define STI_SESSION_SESSION_H

#include "model/model.h"

typedef struct sti_boundary { /* the past as it was at a chunk boundary */
    int length;               /* 0: empty slot */
    unsigned char *state;
} sti_boundary;

enum { STI_SETTINGS_LINE = 512 };

struct still_session {
    still_model *model;
    sti_attn_config cfg;
    /* Everything the meaning of its memory depends on, as text: sessions with equal
     * lines can be computed together and take each other's past. */
    char settings[STI_SETTINGS_LINE];
    int rollback; /* boundaries kept */
    int length;
    bool has_logits;
    sti_block memory;     /* everything below lies in it */
    unsigned char *state; /* all layers' memories, one after the other */
    size_t state_bytes;
    sti_attn_memory *layer; /* [layers]: where each lies in state */
    sti_boundary *boundary; /* [rollback], a ring by chunk number */
    sti_scratch scratch;
    float *logits; /* [vocab] after the last token */
};

/* A session with the settings of another. */
still_status sti_session_like(const still_session *s, still_session **out,
                              still_error *err);
/* Tokens between the boundaries it keeps: a chunk, or a batch for methods without. */
int sti_session_chunk(const still_session *s);
/* Keeps the past if it stands at a chunk boundary and boundaries are kept. */
void sti_session_mark(still_session *s, int length);
/* Whether its past can be cut to any length because nothing was folded. */
bool sti_session_keeps_all(const still_session *s);

#endif
