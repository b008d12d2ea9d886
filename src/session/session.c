/* session.c - feeding tokens.
 *
 * A session is one block of memory, made and touched when it is created: the bill that
 * still_model_bill states is paid up front, and a decode step allocates nothing.
 * Everything a call could object to is checked before the first row is computed, so a
 * call that fails leaves the session as it was. */
#include "session/session.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEFAULT_BATCH = 512, MOST_ROLLBACK = 4096 };

/* An adapter's numbers mean something for the method they were trained for only. Sizes
 * (chunk, cap, select) and the score may differ; what the tensors stand for may not. */
static still_status check_method(const still_model *m, const still_method *method,
                                 still_error *err)
{
    const still_method *t = m->info.method;
    if (!t) return STILL_OK;
    /* Without low-rank additions the projections are the teacher's: softmax is its. */
    if (method && strcmp(method->name, "softmax") == 0 &&
        m->adapter->spec.lora.rank == 0)
        return STILL_OK;
    if (!method || strcmp(method->name, t->name) != 0)
        return sti_fail(err, STILL_E_ARG,
                        "the adapter was trained for method %s, not %s: open the base "
                        "model for that",
                        t->name, method ? method->name : "softmax");
    if (method->per_head != t->per_head || method->gate != t->gate ||
        method->norm_map != t->norm_map || method->window_scale != t->window_scale ||
        method->first_layer != t->first_layer || method->last_layer != t->last_layer)
        return sti_fail(err, STILL_E_ARG,
                        "the adapter was trained with other heads, gate, map, scale or "
                        "layers than asked for: those are part of it");
    return STILL_OK;
}

static still_status configure(const still_model *m, const still_session_params *params,
                              still_session *s, still_error *err)
{
    still_session_params p = params ? *params : (still_session_params){0};
    if (p.ctx == 0) p.ctx = m->cfg.ctx_train;
    if (p.batch == 0) p.batch = DEFAULT_BATCH;
    if (p.ctx < 1 || p.batch < 1)
        return sti_fail(err, STILL_E_ARG, "context %d and batch %d must be at least 1",
                        p.ctx, p.batch);
    if (p.rollback < 0 || p.rollback > MOST_ROLLBACK)
        return sti_fail(err, STILL_E_ARG,
                        "rollback of %d chunks is not between 0 and %d", p.rollback,
                        MOST_ROLLBACK);
    if (p.batch > p.ctx) p.batch = p.ctx;
    /* A model stored in f32 is there for precision: so are its keys and values. */
    sti_dtype cache = m->layer[0].k.w.type == STI_F32 ? STI_F32 : m->be->cache;
    if (p.cache) {
        const sti_dtype_info *t = sti_dtype_by_name(p.cache);
        if (!t || (t->type != STI_F16 && t->type != STI_F32))
            return sti_fail(err, STILL_E_ARG, "cache type '%s' is not f16 or f32",
                            p.cache);
        cache = t->type;
    }
    s->cfg = (sti_attn_config){.cache = cache, .ctx = p.ctx, .batch = p.batch};
    s->rollback = p.rollback;
    sti_attn_layer layer = sti_model_attn_layer(m, 0);
    if (!p.method) p.method = m->info.method;
    return sti_attn_configure(p.method, &layer, m->cfg.layers, m->cfg.ctx_train,
                              &s->cfg, err);
}

bool sti_session_keeps_all(const still_session *s)
{
    return s->cfg.method->engine == &sti_attn_softmax;
}

/* The one description of a session's memory: counts when c->base is NULL. The states
 * come first and lie together, so that copying a past is copying one range. */
static void carve(const still_model *m, still_session *s, sti_carve *c)
{
    size_t layers = (size_t)m->cfg.layers;
    sti_attn_memory unused;
    sti_attn_memory *table = s->layer;
    size_t start = c->used;
    s->state = c->base ? c->base + start : NULL;
    for (int l = 0; l < m->cfg.layers; l++) {
        sti_attn_layer layer = sti_model_attn_layer(m, l);
        sti_attn_engine_of(&s->cfg, l)
            ->carve(m->be, &s->cfg, &layer, c, table ? &table[l] : &unused);
    }
    sti_carve_take(c, 0, 1); /* up to the next line */
    s->state_bytes = c->used - start;
    s->layer = sti_carve_take(c, layers, sizeof *s->layer);
    s->boundary = sti_carve_take(c, (size_t)s->rollback, sizeof *s->boundary);
    int copies = sti_session_keeps_all(s) ? 0 : s->rollback;
    for (int i = 0; i < copies; i++) {
        unsigned char *p = sti_carve_take(c, s->state_bytes, 1);
        if (c->base) s->boundary[i] = (sti_boundary){.state = p};
    }
    sti_scratch_carve(m, s->cfg.batch, c, &s->scratch);
    s->logits = sti_carve_take(c, (size_t)m->cfg.vocab, sizeof *s->logits);
}

static void describe(still_session *s)
{
    const sti_attn_config *c = &s->cfg;
    const sti_hybrid_settings *h = &c->hybrid;
    snprintf(s->settings, sizeof s->settings,
             "method=%s backend=%s cache=%s layers=%d-%d chunk=%d select=%d cap=%d "
             "score=%d per_head=%d window_scale=%d map=%d norm=%d gate=%d factor=%d "
             "positions=%d features=%d state=%d seed=%llu window=%d",
             c->method->name, s->model->be->name, c->cache == STI_F32 ? "f32" : "f16",
             c->first, c->last, h->chunk, h->select, h->cap, (int)h->score, h->per_head,
             h->la_scale == STI_SCALE_WINDOW, (int)h->map, h->norm_preserved, h->gate,
             h->window_factor, h->position_cap, (int)h->feature_positions, h->state_cap,
             (unsigned long long)h->seed, c->window);
}

static still_status make(const still_session *draft, still_session **out,
                         still_error *err)
{
    still_model *m = draft->model;
    for (int l = 0; l < m->cfg.layers; l++) {
        sti_attn_layer layer = sti_model_attn_layer(m, l);
        STI_TRY(sti_attn_engine_of(&draft->cfg, l)
                    ->reserve(m->be, m->dev, &draft->cfg, &layer, err));
    }
    STI_TRY(m->be->dev_reserve(m->dev, draft->cfg.batch, err));
    still_session *s = sti_alloc(1, sizeof *s);
    if (!s) return sti_fail_memory(err, "session", sizeof *s);
    *s = *draft;
    describe(s);
    sti_carve c = {0};
    carve(m, s, &c);
    if (!sti_block_new(&s->memory, c.used)) {
        free(s);
        return sti_fail(err, STILL_E_MEMORY,
                        "a session of %d tokens needs %.1f GB of memory, which is not "
                        "there: use a smaller context",
                        draft->cfg.ctx, (double)c.used / 1e9);
    }
    memset(s->memory.p, 0, s->memory.bytes);
    /* Twice: the first pass finds where the table of layers lies, the second fills it.
     */
    for (int pass = 0; pass < 2; pass++) {
        c = (sti_carve){.base = s->memory.p};
        carve(m, s, &c);
    }
    *out = s;
    return STILL_OK;
}

still_status still_session_new(still_model *m, const still_session_params *p,
                               still_session **out, still_error *err)
{
    *out = NULL;
    still_session draft = {.model = m};
    STI_TRY(check_method(m, p && p->method ? p->method : m->info.method, err));
    STI_TRY(configure(m, p, &draft, err));
    return make(&draft, out, err);
}

still_status sti_session_like(const still_session *s, still_session **out,
                              still_error *err)
{
    *out = NULL;
    still_session draft = {.model = s->model, .cfg = s->cfg, .rollback = s->rollback};
    return make(&draft, out, err);
}

void still_session_free(still_session *s)
{
    if (!s) return;
    sti_block_free(&s->memory);
    free(s);
}

static still_status check_room(const still_session *s, int n, still_error *err)
{
    if (n < 0) return sti_fail(err, STILL_E_ARG, "%d tokens cannot be fed", n);
    if (n > s->cfg.ctx - s->length)
        return sti_fail(
            err, STILL_E_LIMIT,
            "%d tokens do not fit: the session holds %d of %d; use a larger "
            "context or a shorter prompt",
            n, s->length, s->cfg.ctx);
    return STILL_OK;
}

/* ---- Feeding one session ------------------------------------------------------------
 */

typedef struct score_request {
    const int32_t *tok;
    int n;
    float *logprob;
    int32_t *top; /* [n-1], or [n-1, k] with top_logprob; may be NULL */
    int k;
    float *top_logprob; /* NULL: only the most likely is asked for */
} score_request;

/* The k most likely of a row of logits, whose `target` has log-probability lp. */
static void best_of_row(const float *logits, int vocab, int32_t target, float lp, int k,
                        int32_t *top, float *top_logprob)
{
    int have = 0;
    for (int32_t id = 0; id < vocab; id++) {
        if (have == k && !(logits[id] > logits[top[k - 1]])) continue;
        int at = have < k ? have++ : k - 1;
        for (; at > 0 && logits[id] > logits[top[at - 1]]; at--) top[at] = top[at - 1];
        top[at] = id;
    }
    for (int i = 0; i < k; i++) top_logprob[i] = lp + (logits[top[i]] - logits[target]);
}

/* log p of the next token of each row of a batch, a slice of rows at a time; row 0 is
 * token `at` of the call. */
static still_status score_rows(still_session *s, const score_request *r, int at,
                               int rows, still_error *err)
{
    still_model *m = s->model;
    int32_t own_top[STI_HEAD_ROWS];
    bool one = r->top && !r->top_logprob;
    for (int i = 0; i < rows; i += STI_HEAD_ROWS) {
        int n = rows - i < STI_HEAD_ROWS ? rows - i : STI_HEAD_ROWS;
        if (at + i + n > r->n - 1) n = r->n - 1 - (at + i); /* the last has no next */
        if (n <= 0) break;
        STI_TRY(sti_model_logits(m, &s->scratch, i, n, s->scratch.logits, err));
        STI_TRY(
            m->be->logprob(m->dev,
                           &(sti_logprob_args){.logits = s->scratch.logits,
                                               .target = r->tok + at + i + 1,
                                               .M = n,
                                               .V = m->cfg.vocab,
                                               .logprob = r->logprob + at + i,
                                               .top = one ? r->top + at + i : own_top},
                           err));
        for (int j = 0; j < n && r->top && r->top_logprob; j++) {
            size_t row = (size_t)(at + i + j), k = (size_t)r->k;
            best_of_row(s->scratch.logits + (size_t)j * (size_t)m->cfg.vocab,
                        m->cfg.vocab, r->tok[row + 1], r->logprob[row], r->k,
                        r->top + row * k, r->top_logprob + row * k);
        }
    }
    return STILL_OK;
}

/* Rows of the next call: a batch, cut where a boundary is to be kept. */
static int rows_of(const still_session *s, int length, int left)
{
    int rows = left < s->cfg.batch ? left : s->cfg.batch;
    if (s->rollback > 0 && !sti_session_keeps_all(s)) {
        int chunk = sti_session_chunk(s);
        int to_boundary = chunk - length % chunk;
        if (to_boundary < rows) rows = to_boundary;
    }
    return rows;
}

static still_status feed(still_session *s, const int32_t *tok, int n,
                         const score_request *score, still_error *err)
{
    STI_TRY(check_room(s, n, err));
    if (n == 0) return STILL_OK;
    STI_TRY(sti_model_check_tokens(s->model, tok, n, err));
    int rows = 0;
    for (int at = 0; at < n; at += rows) {
        int past = s->length + at;
        rows = rows_of(s, past, n - at);
        sti_sequence q = {.n = rows, .past = past, .memory = s->layer};
        STI_TRY(
            sti_model_forward(s->model, &s->cfg, &s->scratch, tok + at, &q, 1, err));
        if (score) STI_TRY(score_rows(s, score, at, rows, err));
        sti_session_mark(s, past + rows);
    }
    STI_TRY(sti_model_logits(s->model, &s->scratch, rows - 1, 1, s->logits, err));
    s->length += n;
    s->has_logits = true;
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
    return feed(s, tok, n, &(score_request){tok, n, logprob, top, 1, NULL}, err);
}

still_status still_session_score_top(still_session *s, const int32_t *tok, int n, int k,
                                     float *logprob, int32_t *top, float *top_logprob,
                                     still_error *err)
{
    int vocab = s->model->cfg.vocab;
    if (k < 1 || k > vocab)
        return sti_fail(err, STILL_E_ARG, "the %d most likely of %d tokens", k, vocab);
    return feed(s, tok, n, &(score_request){tok, n, logprob, top, k, top_logprob}, err);
}

/* ---- Stepping several ---------------------------------------------------------------
 */

still_status still_session_step(still_session **s, const int32_t *tok, int n,
                                still_error *err)
{
    if (n <= 0) return STILL_OK;
    still_model *m = s[0]->model;
    sti_scratch *scratch = &s[0]->scratch;
    for (int i = 0; i < n; i++) {
        if (s[i]->model != m)
            return sti_fail(err, STILL_E_ARG, "session %d is of another model", i);
        if (strcmp(s[i]->settings, s[0]->settings) != 0)
            return sti_fail(err, STILL_E_ARG,
                            "session %d keeps its past in another way than session 0",
                            i);
        STI_TRY(check_room(s[i], 1, err));
    }
    STI_TRY(sti_model_check_tokens(m, tok, n, err));
    sti_sequence seq[STI_HEAD_ROWS];
    int most = scratch->rows < STI_HEAD_ROWS ? scratch->rows : STI_HEAD_ROWS;
    size_t vocab = (size_t)m->cfg.vocab;
    for (int at = 0; at < n; at += most) {
        int rows = n - at < most ? n - at : most;
        for (int i = 0; i < rows; i++)
            seq[i] = (sti_sequence){
                .n = 1, .past = s[at + i]->length, .memory = s[at + i]->layer};
        STI_TRY(sti_model_forward(m, &s[0]->cfg, scratch, tok + at, seq, rows, err));
        STI_TRY(sti_model_logits(m, scratch, 0, rows, scratch->logits, err));
        for (int i = 0; i < rows; i++)
            memcpy(s[at + i]->logits, scratch->logits + (size_t)i * vocab,
                   vocab * sizeof(float));
    }
    for (int i = 0; i < n; i++) {
        s[i]->length++;
        s[i]->has_logits = true;
        sti_session_mark(s[i], s[i]->length);
    }
    return STILL_OK;
}

/* ---- Small questions
 * ------------------------------------------------------------------ */

const float *still_session_logits(const still_session *s)
{
    return s->has_logits ? s->logits : NULL;
}

int still_session_length(const still_session *s)
{
    return s->length;
}

int still_session_limit(const still_session *s)
{
    return s->cfg.ctx;
}

void still_session_reset(still_session *s)
{
    /* A cache is read up to the length only; states are sums that start at zero. */
    if (!sti_session_keeps_all(s)) memset(s->state, 0, s->state_bytes);
    for (int i = 0; i < s->rollback; i++) s->boundary[i].length = 0;
    s->length = 0;
    s->has_logits = false;
}

/* ---- The bill
 * ------------------------------------------------------------------------- */

/* Code, libraries and tables of a running program; measured, see docs/perf.md. */
static const size_t RUNTIME_BYTES = 27u << 19; /* 13.5 MiB */

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
    STI_TRY(configure(m, p, &s, err));
    sti_carve c = {0};
    carve(m, &s, &c);
    still_bill b = {.cache = s.state_bytes};
    if (!sti_session_keeps_all(&s)) b.rollback = (size_t)s.rollback * s.state_bytes;
    b.scratch = c.used - b.cache - b.rollback + m->be->dev_bytes(m->dev, s.cfg.batch);
    for (int i = 0; i < m->cfg.layers; i++) {
        const sti_layer *L = &m->layer[i];
        const sti_linear *all[] = {&L->q,    &L->k,  &L->v,   &L->o,
                                   &L->gate, &L->up, &L->down};
        for (size_t j = 0; j < sizeof all / sizeof *all; j++)
            add_weight(&all[j]->w, &b);
    }
    add_weight(sti_model_head(m), &b);
    if (!m->cfg.tied) {
        /* Only rows of tokens that occur are read, a page or two each. */
        size_t rows = (size_t)s.cfg.ctx * 8192;
        b.weights_mapped += rows < m->embed.src->bytes ? rows : m->embed.src->bytes;
        b.weights_resident += m->embed.own.bytes;
    }
    b.weights_resident += m->vectors_room * sizeof(float);
    if (m->adapter)
        b.weights_resident +=
            m->adapter->n_values * sizeof(float) + m->adapter->resident;
    b.runtime = RUNTIME_BYTES + (m->tokenizer ? sti_tokenizer_bytes(m->tokenizer) : 0);
    b.total = b.weights_mapped + b.weights_resident + b.cache + b.rollback + b.scratch +
              b.runtime;
    *out = b;
    return STILL_OK;
}
