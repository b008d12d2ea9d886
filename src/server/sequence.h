/* sequence.h - one sequence of the scheduler: its prompt into a session, its tokens out.
 *
 * All of this runs on the scheduler's thread, but for `cancelled`. */
#ifndef SERVER_SEQUENCE_H
#define SERVER_SEQUENCE_H

#include <stdatomic.h>

#include "server/prefix_tree.h"
#include "server/scheduler.h"

/* What sequences know of the model. */
typedef struct srv_host {
    still_model *model;
    const still_tokenizer *tk;
    int vocab, limit;
    uint64_t *no_end;  /* bits of all tokens but those that end a text */
    uint64_t *allowed; /* room for as many */
    int chunk;         /* of the method; 1: it has none */
    srv_prefix_tree tree;
    uint64_t hits, misses; /* prompts that began with a kept past, and others */
} srv_host;

still_status srv_host_init(const srv_scheduler_params *p, int limit, srv_host *out,
                           still_error *err);
void srv_host_free(srv_host *h);

/* Log-probabilities of the prompt that was scored last. The choices of a question share
 * their beginning, so what it says of that is kept for the next one. */
typedef struct srv_scores {
    int n;          /* leading tokens that are known */
    int k;          /* alternatives per token */
    int32_t *id;    /* [limit] */
    float *logprob; /* [limit]: log p(id[i] | before); undefined at 0 */
    int32_t *top;   /* [limit, k] */
    float *top_logprob;
} srv_scores;

still_status srv_scores_init(int limit, srv_scores *out, still_error *err);
void srv_scores_free(srv_scores *c);

/* A session and what it holds. */
typedef struct srv_slot {
    still_session *session;
    int32_t *id; /* [limit]: its tokens, and the rest of a prompt that is being read */
    srv_scores *scores; /* of the slot that scores prompts */
    struct srv_sequence *sequence;
    still_error error; /* of the sequence, if it failed */
} srv_slot;

enum {
    SRV_MARKS = 4,
    SRV_LEAST_GAIN = 64 /* tokens that make a snapshot worth its time */
};

typedef struct srv_sequence {
    struct srv_sequence *next; /* in the queue */
    struct srv_group *group;
    srv_work *work;
    atomic_bool cancelled;
    srv_slot *slot;         /* NULL: it waits */
    still_sampler *sampler; /* NULL: greedy, with nothing that changes logits */
    bool reading;           /* not all of its prompt is in the session */
    bool over;              /* with this result: */
    srv_finish finish;
    int mark[SRV_MARKS],
        n_marks; /* lengths at which its past is kept for others; rising */
    int cached, made;
    int32_t pending;            /* generated, not fed yet */
    struct srv_sequence *after; /* whose past it waits for, up to so many tokens */
    int after_length;
    int64_t waited;            /* tokens of other prompts that went before its own */
    double added, began, read; /* when */
} srv_sequence;

int srv_common(const int32_t *a, int n, const int32_t *b, int m); /* leading tokens */

/* It has a slot, and begins to read. Failures end it. */
void srv_sequence_begin(srv_host *h, srv_sequence *q);
/* Up to n more tokens of its prompt; returns how many it took. After the last one the
 * scores are handed out and the first token is generated. */
int srv_sequence_read(srv_host *h, srv_sequence *q, int n);
/* Whether its next token is chosen from logits, even where the most likely id does not end
 * a text. Where it does they are needed because it may be too early for that. */
bool srv_sequence_needs_logits(const srv_sequence *q);
/* Its pending token was fed, and what it needs is there. top: the most likely id; -1: not
 * known, and the session has logits. */
void srv_sequence_choose(srv_host *h, srv_sequence *q, int32_t top);
void srv_sequence_fail(srv_sequence *q, const still_error *err);
/* Tokens of its prompt that a text which shares `common` of them can take over. */
int srv_sequence_offers(const srv_host *h, const srv_sequence *q, int common);
/* Its past will be kept when it has read so many tokens; false: it is past that, or has
 * too many marks. */
bool srv_sequence_mark(srv_sequence *q, int length);
/* Calls done, and keeps its past. */
void srv_sequence_finish(srv_host *h, srv_sequence *q);

/* log p of a token and the k most likely of a row of logits, best first. */
void srv_rank(const float *logits, int vocab, int32_t id, int k, float *logprob,
              int32_t *top, float *top_logprob);

#endif
