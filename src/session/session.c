/* session.c - feeding tokens.
 *
 * A session is one block of memory, made and touched when it is created: the bill that
 * still_model_bill states is paid up front, and a decode step allocates nothing. Its
 * length grows only after a whole call has succeeded, so a failed call leaves it as it
 * was: what was written beyond the length is never read. */
#include "session/session.h"

#include <stdlib.h>
#include <string.h>

enum { DEFAULT_BATCH = 512 };

static still_status settle(const still_model *m, const still_session_params *params,
                           still_session_params *out, sti_dtype *cache, still_error *err)
{
    still_session_params p = params ? *params : (still_session_params){0};
    if (p.ctx == 0) p.ctx = m->cfg.ctx_train;
    if (p.batch == 0) p.batch = DEFAULT_BATCH;
    if (p.ctx < 1 || p.batch < 1)
        return sti_fail(err, STILL_E_ARG,
                        "context %d and batch %d must be at least 1", p.ctx, p.batch);
    if (p.batch > p.ctx) p.batch = p.ctx;
    /* A model stored in f32 is there for precision: so are its keys and values. */
    *cache = m->layer[0].k.w.type == STI_F32 ? STI_F32 : m->be->cache;
    if (p.cache) {
        const sti_dtype_info *t = sti_dtype_by_name(p.cache);
        if (!t || (t->type != STI_F16 && t->type != STI_F32))
            return sti_fail(err, STILL_E_ARG, "cache type '%s' is not f16 or f32",
                            p.cache);
        *cache = t->type;
    }
    *out = p;
    return STILL_OK;
}

/* The one description of a session's memory: counts when c->base is NULL. */
static void carve(const still_model *m, still_session *s, sti_carve *c)
{
    s->state_bytes = 0;
    for (int l = 0; l < m->cfg.layers; l++)
        if (!sti_add(s->state_bytes,
                     sti_model_state_bytes(m, s->method, s->cache, l, s->ctx, s->batch),
                     &s->state_bytes))
            s->state_bytes = SIZE_MAX / 2;
    s->state = sti_carve_take(c, s->state_bytes, 1);
    sti_scratch_carve(m, s->batch, c, &s->scratch);
    s->logits = sti_carve_take(c, (size_t)m->cfg.vocab, sizeof *s->logits);
}

static still_status plan(const still_model *m, const still_session_params *params,
                         still_session *s, sti_carve *c, still_error *err)
{
    still_session_params p = {0};
    STI_TRY(settle(m, params, &p, &s->cache, err));
    s->method = sti_attn_find(NULL);
    s->ctx = p.ctx;
    s->batch = p.batch;
    carve(m, s, c);
    return STILL_OK;
}

still_status still_session_new(still_model *m, const still_session_params *p,
                               still_session **out, still_error *err)
{
    *out = NULL;
    still_session draft = {.model = m};
    sti_carve c = {0};
    STI_TRY(plan(m, p, &draft, &c, err));
    STI_TRY(m->be->dev_reserve(m->dev, draft.batch, err));
    if (!sti_block_new(&draft.memory, c.used))
        return sti_fail(err, STILL_E_MEMORY,
                        "a session of %d tokens needs %.1f GB of memory, which is not "
                        "there: use a smaller context",
                        draft.ctx, (double)c.used / 1e9);
    still_session *s = sti_alloc(1, sizeof *s);
    if (!s) {
        sti_block_free(&draft.memory);
        return sti_fail_memory(err, "session", sizeof *s);
    }
    memset(draft.memory.p, 0, draft.memory.bytes);
    *s = draft;
    c = (sti_carve){.base = s->memory.p};
    carve(m, s, &c);
    *out = s;
    return STILL_OK;
}

void still_session_free(still_session *s)
{
    if (!s) return;
    sti_block_free(&s->memory);
    free(s);
}

/* The sequence's share of a batch that holds its next n tokens. */
static sti_sequence sequence(const still_session *s, int past, int n)
{
    return (sti_sequence){
        .n = n, .past = past, .ctx = s->ctx, .batch = s->batch, .state = s->state};
}

static still_status check_room(const still_session *s, int n, still_error *err)
{
    if (n < 0) return sti_fail(err, STILL_E_ARG, "%d tokens cannot be fed", n);
    if (n > s->ctx - s->length)
        return sti_fail(err, STILL_E_LIMIT,
                        "%d tokens do not fit: the session holds %d of %d; use a larger "
                        "context or a shorter prompt",
                        n, s->length, s->ctx);
    return STILL_OK;
}

/* What to do with the rows of a batch once the layers are through with them: row i is
 * token at + i of the call. */
typedef struct score_request {
    const int32_t *tok;
    int n;
    float *logprob;
    int32_t *top;
} score_request;

/* log p of each row's next token, a slice of rows at a time. */
static still_status score_rows(still_session *s, const score_request *r, int at, int rows,
                               still_error *err)
{
    still_model *m = s->model;
    int32_t unused_top[STI_HEAD_ROWS];
    for (int i = 0; i < rows; i += STI_HEAD_ROWS) {
        int n = rows - i < STI_HEAD_ROWS ? rows - i : STI_HEAD_ROWS;
        if (at + i + n > r->n - 1) n = r->n - 1 - (at + i); /* the last has no next */
        if (n <= 0) break;
        STI_TRY(sti_model_logits(m, &s->scratch, i, n, s->scratch.logits, err));
        STI_TRY(m->be->logprob(m->dev,
                               &(sti_logprob_args){.logits = s->scratch.logits,
                                                   .target = r->tok + at + i + 1,
                                                   .M = n,
                                                   .V = m->cfg.vocab,
                                                   .logprob = r->logprob + at + i,
                                                   .top = r->top ? r->top + at + i
                                                                 : unused_top},
                               err));
    }
    return STILL_OK;
}

static still_status feed(still_session *s, const int32_t *tok, int n,
                         const score_request *score, still_error *err)
{
    STI_TRY(check_room(s, n, err));
    if (n == 0) return STILL_OK;
    STI_TRY(sti_model_check_tokens(s->model, tok, n, err));
    int rows = 0;
    for (int at = 0; at < n; at += rows) {
        rows = n - at < s->batch ? n - at : s->batch;
        sti_sequence q = sequence(s, s->length + at, rows);
        STI_TRY(sti_model_forward(s->model, s->method, s->cache, &s->scratch, tok + at,
                                  &q, 1, err));
        if (score) STI_TRY(score_rows(s, score, at, rows, err));
    }
    STI_TRY(sti_model_logits(s->model, &s->scratch, rows - 1, 1, s->logits, err));
    s->length += n;
    return STILL_OK;
}

still_status still_session_feed(still_session *s, const int32_t *tok, int n,
                                still_error *err)
{
    return feed(s, tok, n, NULL, err);
}

still_status still_session_score(still_session *s, const int32_t *tok, int n,
                                 float *logprob, int32_t *top, still_error *err)
{
    return feed(s, tok, n, &(score_request){tok, n, logprob, top}, err);
}

still_status still_session_step(still_session **s, const int32_t *tok, int n,
                                still_error *err)
{
    if (n <= 0) return STILL_OK;
    still_model *m = s[0]->model;
    sti_scratch *scratch = &s[0]->scratch;
    for (int i = 0; i < n; i++) {
        if (s[i]->model != m)
            return sti_fail(err, STILL_E_ARG, "session %d is of another model", i);
        if (s[i]->cache != s[0]->cache || s[i]->method != s[0]->method)
            return sti_fail(err, STILL_E_ARG,
                            "session %d keeps its past in another way than session 0", i);
        STI_TRY(check_room(s[i], 1, err));
    }
    STI_TRY(sti_model_check_tokens(m, tok, n, err));
    sti_sequence seq[STI_HEAD_ROWS];
    int most = scratch->rows < STI_HEAD_ROWS ? scratch->rows : STI_HEAD_ROWS;
    size_t vocab = (size_t)m->cfg.vocab;
    for (int at = 0; at < n; at += most) {
        int rows = n - at < most ? n - at : most;
        for (int i = 0; i < rows; i++) seq[i] = sequence(s[at + i], s[at + i]->length, 1);
        STI_TRY(sti_model_forward(m, s[0]->method, s[0]->cache, scratch, tok + at, seq,
                                  rows, err));
        STI_TRY(sti_model_logits(m, scratch, 0, rows, scratch->logits, err));
        for (int i = 0; i < rows; i++)
            memcpy(s[at + i]->logits, scratch->logits + (size_t)i * vocab,
                   vocab * sizeof(float));
    }
    for (int i = 0; i < n; i++) s[i]->length++;
    return STILL_OK;
}

const float *still_session_logits(const still_session *s)
{
    return s->length ? s->logits : NULL;
}

int still_session_length(const still_session *s)
{
    return s->length;
}

int still_session_limit(const still_session *s)
{
    return s->ctx;
}

void still_session_reset(still_session *s)
{
    s->length = 0;
}

/* ---- The bill ------------------------------------------------------------------ */

/* Code, libraries and tables of a running program; measured, see docs/perf.md. */
static const size_t RUNTIME_BYTES = 8u << 20;

static void add_weight(const sti_weight *w, still_bill *b)
{
    if (w->own.bytes)
        b->weights_resident += w->own.bytes;
    else
        b->weights_mapped += w->src->bytes;
}

still_status still_model_bill(const still_model *m, const still_session_params *p,
                              still_bill *out, still_error *err)
{
    still_session s = {0};
    sti_carve c = {0};
    STI_TRY(plan(m, p, &s, &c, err));
    still_bill b = {.cache = s.state_bytes, .scratch = c.used - s.state_bytes};
    b.scratch += m->be->dev_bytes(m->dev, s.batch);
    for (int i = 0; i < m->cfg.layers; i++) {
        const sti_layer *L = &m->layer[i];
        const sti_linear *all[] = {&L->q, &L->k, &L->v, &L->o, &L->gate, &L->up, &L->down};
        for (size_t j = 0; j < sizeof all / sizeof *all; j++) add_weight(&all[j]->w, &b);
    }
    add_weight(sti_model_head(m), &b);
    if (!m->cfg.tied) {
        /* Only rows of tokens that occur are read, a page or two each. */
        size_t rows = (size_t)s.ctx * 8192;
        b.weights_mapped += rows < m->embed.src->bytes ? rows : m->embed.src->bytes;
        b.weights_resident += m->embed.own.bytes;
    }
    b.weights_resident += m->vectors_room * sizeof(float);
    b.runtime = RUNTIME_BYTES + (m->tokenizer ? sti_tokenizer_bytes(m->tokenizer) : 0);
    b.total = b.weights_mapped + b.weights_resident + b.cache + b.scratch + b.runtime;
    *out = b;
    return STILL_OK;
}
