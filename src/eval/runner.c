/* runner.c - the sessions that items are run on.
 *
 * Sessions are as long as the longest item so far: attention caches are copied and
 * cleared as a whole by some methods, and most questions are short. */
#include <stdlib.h>
#include <string.h>

#include "eval/eval.h"

enum { LEAST_SESSIONS = 3, SESSIONS = 32, FIRST_CTX = 256, BATCH = 256 };
/* Of sessions: of a machine's memory, and of a GPU's. */
static const size_t MOST_BYTES = (size_t)1 << 30, MOST_BYTES_FAR = (size_t)8 << 30;

still_status sti_runner_open(still_model *m, const still_session_params *p,
                             sti_runner *r, still_error *err)
{
    *r = (sti_runner){.m = m, .tk = still_model_tokenizer(m)};
    if (!r->tk)
        return sti_fail(err, STILL_E_ARG,
                        "%s: has no tokenizer, and tasks are text; put tokenizer.json "
                        "or tokenizer.model beside the weights",
                        m->info.path);
    if (p) r->params = *p;
    r->limit = r->params.ctx ? r->params.ctx : m->info.ctx_train;
    if (r->limit < 2)
        return sti_fail(err, STILL_E_ARG, "a context of %d tokens is too short",
                        r->limit);
    /* What a processor's caches hold; a GPU takes as many rows as it likes. */
    if (r->params.batch == 0) r->params.batch = m->be->host_memory ? BATCH : 0;
    r->params.rollback = 0;
    if (r->params.method)
        r->method = *r->params.method;
    else if (m->info.method)
        r->method = *m->info.method;
    else
        STI_TRY(still_method_init(&r->method, "softmax", 0, err));
    /* Sessions differ in length, what they compute must not. */
    if (r->method.positions == STILL_POSITIONS_AUTO)
        r->method.positions = r->limit > m->info.ctx_train ? STILL_POSITIONS_CAPPED
                                                           : STILL_POSITIONS_ABSOLUTE;
    r->params.method = &r->method;
    STI_TRY(sti_runner_need(r, 1, err));
    memcpy(r->settings, r->s[0]->settings, sizeof r->settings);
    return STILL_OK;
}

void sti_runner_close(sti_runner *r)
{
    for (int i = 0; i < r->n_sessions; i++) still_session_free(r->s[i]);
    free(r->stem);
    r->n_sessions = r->n_stem = 0;
    r->stem = NULL;
}

static int round_up(int ctx, int limit)
{
    int room = FIRST_CTX;
    while (room < ctx && room <= limit / 2) room *= 2;
    if (room < ctx || room > limit) room = limit;
    return room;
}

still_status sti_runner_need(sti_runner *r, int ctx, still_error *err)
{
    if (r->n_sessions && ctx <= r->ctx) return STILL_OK;
    sti_runner_close(r);
    still_bill bill;
    r->ctx = r->params.ctx = round_up(ctx, r->limit);
    STI_TRY(still_model_bill(r->m, &r->params, &bill, err));
    const size_t most = r->m->be->host_memory ? MOST_BYTES : MOST_BYTES_FAR;
    const size_t fit = most / (bill.cache + 1);
    const size_t enough = r->m->be->host_memory ? SESSIONS : STI_MOST_SESSIONS;
    int n = (int)(fit < enough ? fit : enough);
    if (n < LEAST_SESSIONS) n = LEAST_SESSIONS;
    while (r->n_sessions < n) {
        STI_TRY(still_session_new(r->m, &r->params, &r->s[r->n_sessions], err));
        r->n_sessions++;
    }
    return STILL_OK;
}
