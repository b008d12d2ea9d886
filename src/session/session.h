/* session.h - one sequence: its memory, its length, its last logits. */
#ifndef STI_SESSION_SESSION_H
#define STI_SESSION_SESSION_H

#include "model/model.h"

struct still_session {
    still_model *model;
    const sti_attn_method *method;
    sti_dtype cache;
    int ctx, batch, length;
    sti_block memory;     /* everything below lies in it */
    unsigned char *state; /* of all layers */
    size_t state_bytes;
    sti_scratch scratch;
    float *logits; /* [vocab] after the last token */
};

#endif
