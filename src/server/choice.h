/* choice.h - one sequence of an answer: from tokens to text, log-probabilities and calls.
 * Used by one thread at a time. */
#ifndef SERVER_CHOICE_H
#define SERVER_CHOICE_H

#include "server/answer.h"
#include "server/request.h"
#include "server/stop.h"

/* How all choices of a request are read. */
typedef struct srv_reading {
    const still_tokenizer *tk;
    const srv_options *options;
    const json_t *tools; /* calls are looked for; NULL: they are text */
    bool chat;
    const sti_buf *written; /* of the answer, in the prompt: how a call begins */
} srv_reading;

typedef struct srv_choice {
    const srv_reading *how;
    const srv_prompt *prompt;
    srv_work work;
    still_decoder *decoder,
        *echo; /* of the answer; of the prompt, where it is scored */
    srv_stops stops;
    srv_calls calls;
    srv_logprobs logprobs;
    sti_buf passed; /* by the stop strings, in this call */
    sti_buf text;   /* that nobody has taken yet */
    bool started;   /* the prompt is over */
    int made;
    sti_buf ids; /* of its tokens, int32_t, if what the model kept is asked for */
    still_status failed; /* a token could not be decoded */
} srv_choice;

/* For a prompt that has its ids. */
still_status srv_choice_init(srv_choice *c, const srv_reading *how,
                             const srv_prompt *prompt, still_error *err);
void srv_choice_free(srv_choice *c);

/* The next token; false: the text has ended, by a stop string, a call that is the only one,
 * or a failure. */
bool srv_choice_take(srv_choice *c, const srv_token *t);
/* There are no more tokens. */
void srv_choice_end(srv_choice *c);
/* Whether memory ran out or a token could not be decoded. */
bool srv_choice_failed(const srv_choice *c);

#endif
