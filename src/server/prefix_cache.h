/* prefix_cache.h - the server's one session, with the log-probabilities of its tokens.
 *
 * Requests often share a prefix: the choices of a question, the turns of a
 * conversation. The session keeps what it already holds of a prompt, with its
 * log-probabilities, and rolls back the rest, so that a shared prefix is computed
 * once. */
#ifndef STI_SERVER_PREFIX_CACHE_H
#define STI_SERVER_PREFIX_CACHE_H

#include "still.h"

typedef struct srv_prefix_cache {
    still_session *session;
    int limit, vocab;
    int n;          /* tokens the session holds */
    int32_t *id;    /* [limit] */
    int scored;     /* number of leading tokens whose scores are known */
    int k;          /* alternatives per token; 0: nothing was scored yet */
    float *logprob; /* [limit]: log p(id[i] | before); undefined at 0 */
    int32_t *top;   /* [limit, k]: the most likely ids at position i, best first */
    float *top_logprob;
    uint64_t fed, reused; /* tokens computed, tokens reused */
} srv_prefix_cache;

/* Returns true if the client has gone, so that the work can stop. */
typedef bool (*srv_gone_fn)(void *user);

still_status srv_prefix_cache_new(still_model *m, still_session *s,
                                  srv_prefix_cache *out, still_error *err);
void srv_prefix_cache_free(srv_prefix_cache *p); /* not the session */

/* Makes the session hold exactly these ids and have logits. With k > 0, logprob, top
 * and top_logprob are filled for ids 1 to n-1; the stride of the last two is p->k >= k.
 * After a failure the session holds what was fed until then. */
still_status srv_prefix_cache_set(srv_prefix_cache *p, const int32_t *id, int n, int k,
                                  srv_gone_fn gone, void *user, still_error *err);
/* One more token. */
still_status srv_prefix_cache_add(srv_prefix_cache *p, int32_t id, still_error *err);

/* log p of a token and the k most likely of a row of logits, best first. */
void srv_top_logprobs(const float *logits, int vocab, int32_t id, int k, float *logprob,
                      int32_t *top, float *top_logprob);

#endif
