/* scheduler.h - all conversations of a server on one model, in steps that they share.
 *
 * One thread runs the model. Each turn of its loop is one decode step for every sequence
 * that has its prompt, and then pieces of prompts for a time that depends on the step's, so
 * that prompts hold nobody up and none of them waits for long.
 * Sessions are made at the start: that many sequences run at once, others wait in a queue
 * of a bounded number of requests. */
#ifndef SERVER_SCHEDULER_H
#define SERVER_SCHEDULER_H

#include "server/prefix_disk.h"
#include "still.h"

typedef struct srv_scheduler srv_scheduler;

enum { SRV_MOST_TOP = 20 }; /* alternatives per token */

typedef struct srv_scheduler_params {
    still_model *model; /* with a tokenizer; used by the scheduler's thread */
    still_session_params
        session;        /* of all sequences; read, not kept. rollback: of the one
                                     session that scores prompts */
    int parallel;       /* sequences at once: sessions; 0: 1 */
    int queue;          /* requests that wait; 0: none */
    size_t cache_bytes; /* of pasts that are kept for texts that begin alike; 0: none */
    const char
        *cache_dir; /* a folder where pasts go for which there is no room, and all of
                              them at the end; they are found again. As many bytes as
                              cache_bytes. NULL: none */
    int piece;      /* tokens of a prompt between two steps of others; 0: as
                                     many, of as many prompts, as take about as long
                                     as a step */
} srv_scheduler_params;

/* Makes the sessions and starts the thread. */
still_status srv_scheduler_new(const srv_scheduler_params *p, srv_scheduler **out,
                               still_error *err);
/* Any thread, more than once: takes no more work; cancel: ends what it has at the next
 * token, without it that is finished. */
void srv_scheduler_end(srv_scheduler *s, bool cancel);
/* Ends it and waits until the last sequence is done. What is not done after so many
 * seconds is cancelled; negative: it is waited for. */
void srv_scheduler_stop(srv_scheduler *s, double seconds);
void srv_scheduler_free(srv_scheduler *s); /* cancels and stops; NULL is fine */

int srv_scheduler_limit(
    const srv_scheduler *s); /* tokens of a sequence, with its prompt */

/* ---- Work ---------------------------------------------------------------- */

/* A generated token or, with score_prompt, one of the prompt, which come first. */
typedef struct srv_token {
    int32_t id;
    bool prompt;
    bool end;      /* it ends the text and has no part in it */
    float logprob; /* by the model, before sampling's settings; NaN: not known (first
                          token of a prompt) or not asked for */
    const int32_t *top; /* [n_top], most likely first; valid during the call */
    const float *top_logprob;
    int n_top; /* 0 where logprob is NaN */
} srv_token;

typedef enum srv_finish {
    SRV_STOP,      /* an end token, or token() said so */
    SRV_LENGTH,    /* max_tokens, or the context is full */
    SRV_CANCELLED, /* srv_scheduler_cancel, or stopping */
    SRV_FAILED,
    SRV_FINISHES
} srv_finish;

typedef struct srv_result {
    srv_finish finish;
    still_error error; /* of SRV_FAILED */
    int prompt_tokens, cached_tokens, made;
    double queued_s, prompt_s, decode_s;
    const still_session
        *session; /* as it is now, for the call of done only; NULL: it never
                                     had one. Its last token, if there is one, was not fed */
} srv_result;

/* One sequence. It and all it points to stay as they are until done. */
typedef struct srv_work {
    const int32_t *prompt; /* [n_prompt] 1 to the limit */
    int n_prompt;
    int max_tokens;    /* negative: until the context is full; 0: the prompt alone */
    int min_tokens;    /* before it may end by itself */
    bool ignore_eos;   /* end tokens are never chosen */
    bool score_prompt; /* token() for those of the prompt, with log-probabilities */
    int n_top;         /* alternatives per token, up to SRV_MOST_TOP; -1: no
                          log-probabilities */
    still_sampler_params sampling;
    still_matcher *matcher; /* what may be written; NULL: anything */
    /* Both are called by the scheduler's thread and must be quick. token: false ends the
     * sequence here (a stop string, a client that has gone). done: once, last; the work is
     * the caller's again. */
    bool (*token)(void *user, const srv_token *t);
    void (*done)(void *user, const srv_result *r);
    void *user;
    struct srv_sequence *own; /* the scheduler's; NULL when it is added */
} srv_work;

typedef enum srv_added { SRV_ADDED, SRV_QUEUE_FULL, SRV_ENDING } srv_added;
/* Any thread. n sequences of one request, all or none of them: the queue counts requests.
 * Those with a common beginning compute it once. */
srv_added srv_scheduler_add(srv_scheduler *s, srv_work *const *w, int n);
/* Any thread: ends it at its next token; done is called as always. Nothing happens if it
 * was not added, or is done. */
void srv_scheduler_cancel(srv_scheduler *s, const srv_work *w);

/* ---- Figures ------------------------------------------------------------- */

enum { SRV_STEP_BUCKETS = 14 };
extern const double
    srv_step_bounds[SRV_STEP_BUCKETS]; /* seconds; the last is infinite */

typedef struct srv_metrics {
    uint64_t requests, refused;      /* taken; turned away because the queue was full */
    uint64_t finished[SRV_FINISHES]; /* sequences */
    uint64_t prompt_tokens, cached_tokens,
        made_tokens; /* in; of these not computed; out */
    /* Pasts that are kept: prompts that began with one, and that did not; bytes, at most,
     * how many; given up to make room. */
    uint64_t cache_hits, cache_misses, cache_given_up;
    size_t cache_bytes, cache_limit;
    int cache_pasts;
    bool has_disk;
    srv_prefix_disk_counts disk;  /* those in the folder */
    int parallel, active, queued; /* sequences at most, now; requests that wait */
    /* Decode steps by duration. */
    uint64_t steps, step_count[SRV_STEP_BUCKETS];
    double step_seconds, prompt_seconds; /* in steps, in prompts */
} srv_metrics;
/* Any thread. */
void srv_scheduler_metrics(srv_scheduler *s, srv_metrics *out);

#endif
