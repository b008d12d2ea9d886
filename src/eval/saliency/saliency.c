/* saliency.c - which tokens a method keeps, and whether it chose well; see "Saliency"
 * in still.h.
 *
 * The text is one sequence from its beginning, so layers run in the form that
 * training uses (train/layer.h), which keeps the queries and keys of a layer
 * together. The backend's own routing entry gives the method's decisions: its scores
 * and, for each token, the chunk in which it is folded. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/sized.h"
#include "eval/saliency/saliency.h"
#include "session/session.h"
#include "train/layer.h"

typedef struct run {
    still_model *m;
    still_saliency *out;
    const still_saliency_params *p;
    sti_attn_config cfg;
    sti_pool *pool;
    sti_batch batch;
    sti_acts acts;
    sti_block work; /* acts and all below */
    float *x;       /* [T, hidden] */
    float *score;   /* [T, S] */
    int32_t *fold;  /* [T, S] */
} run;

/* ---- Settings ------------------------------------------------------------ */

/* The method, as a session of the model takes it. */
static still_status configure(run *r, int n, still_error *err)
{
    still_model *m = r->m;
    still_method *method = &r->out->method;
    const still_method *own = r->p->method ? r->p->method : m->info.method;
    if (own)
        *method = *own;
    else
        STI_TRY(still_method_init(method, "still", 0, err));
    /* The text is seen from its beginning, so positions need no cap. */
    method->positions = STILL_POSITIONS_ABSOLUTE;
    if (!m->be->host_memory)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "backend %s does not tell its scores: use --backend cpu",
                        m->be->name);
    still_session *s;
    STI_TRY(still_session_new(
        m, &STILL_PARAMS(still_session_params, .ctx = n, .method = method), &s, err));
    r->cfg = s->cfg;
    still_session_free(s);
    if (r->cfg.method->engine != &sti_attn_hybrid || !r->cfg.hybrid.has_window ||
        r->cfg.hybrid.select == 0)
        return sti_fail(err, STILL_E_ARG,
                        "method %s chooses no tokens by a score: use --method still, "
                        "and --select of at least 1",
                        method->name);
    return STILL_OK;
}

static still_status check_length(const run *r, const int32_t *tok, int n,
                                 still_error *err)
{
    const int64_t C = r->cfg.hybrid.chunk;
    if (n <= 3 * C)
        return sti_fail(err, STILL_E_ARG,
                        "%d tokens, at least %lld are needed: only then a second chunk "
                        "of %lld leaves the window; give a longer text, or a "
                        "smaller chunk",
                        n, (long long)(3 * C + 1), (long long)C);
    return sti_model_check_tokens(r->m, tok, n, err);
}

/* ---- Memory -------------------------------------------------------------- */

static size_t carve_result(still_saliency *s, unsigned char *base)
{
    sti_carve c = {.base = base, .used = sizeof *s};
    const size_t heads = (size_t)s->layers * (size_t)s->heads,
                 cells = heads * (size_t)s->tokens;
    s->local = sti_carve_take(&c, cells, sizeof *s->local);
    s->whole = sti_carve_take(&c, cells, sizeof *s->whole);
    s->received = sti_carve_take(&c, cells, sizeof *s->received);
    s->folded = sti_carve_take(&c, cells, sizeof *s->folded);
    s->with_whole = sti_carve_take(&c, heads, sizeof *s->with_whole);
    s->with_received = sti_carve_take(&c, heads, sizeof *s->with_received);
    s->layer_whole = sti_carve_take(&c, (size_t)s->layers, sizeof *s->layer_whole);
    s->layer_received =
        sti_carve_take(&c, (size_t)s->layers, sizeof *s->layer_received);
    s->by_score = sti_carve_take(&c, (size_t)s->scores * cells, sizeof *s->by_score);
    return c.used;
}

/* The result is one allocation, its arrays behind it. */
static still_status make_result(run *r, still_error *err)
{
    const size_t bytes = carve_result(r->out, NULL);
    still_saliency *s = sti_alloc(1, bytes);
    if (!s) return sti_fail_memory(err, "scores of all tokens", bytes);
    *s = *r->out;
    carve_result(s, (unsigned char *)s);
    r->out = s;
    return STILL_OK;
}

static void carve_run(run *r, sti_carve *c)
{
    const still_model *m = r->m;
    const size_t T = (size_t)r->batch.T, S = (size_t)r->out->heads;
    const int rank = sti_adapter_rank(m->adapter);
    sti_acts_carve(m, 1, r->batch.T, rank, false, 1, c, &r->acts);
    r->x = sti_carve_take(c, T * (size_t)m->cfg.hidden, sizeof *r->x);
    r->score = sti_carve_take(c, T * S, sizeof *r->score);
    r->fold = sti_carve_take(c, T * S, sizeof *r->fold);
    sti_batch_carve(&r->batch, c);
}

static still_status reserve_memory(run *r, int n, still_error *err)
{
    r->batch = (sti_batch){.B = 1, .T = n};
    sti_carve c = {0};
    carve_run(r, &c);
    if (!sti_block_new(&r->work, c.used))
        return sti_fail_memory(err, "activations of all tokens", c.used);
    c = (sti_carve){.base = r->work.p};
    carve_run(r, &c);
    STI_TRY(sti_pool_new(r->m->info.threads, &r->pool, err));
    return r->m->be->dev_reserve(r->m->dev, n, err);
}

/* ---- A layer ------------------------------------------------------------- */

/* Token by token, as a backend writes them, into rows by head. */
static void put_scores(const run *r, float *rows)
{
    const still_saliency *s = r->out;
    for (int h = 0; h < s->heads; h++)
        for (int t = 0; t < s->tokens; t++)
            *rows++ = r->score[(size_t)t * (size_t)s->heads + (size_t)h];
}

/* What every score says; r->fold is scratch. */
static still_status ask_scores(run *r, const sti_hybrid_parallel_args *own, size_t at,
                               still_error *err)
{
    const still_saliency *s = r->out;
    const size_t cells = (size_t)s->layers * (size_t)s->heads * (size_t)s->tokens;
    for (int i = 0; i < s->scores; i++) {
        sti_hybrid_settings set = *own->set;
        sti_hybrid_parallel_args a = *own;
        if (!sti_score_find(s->score_name[i], &set.score)) continue;
        a.set = &set;
        STI_TRY(r->m->be->hybrid_route(r->m->dev, &a, err));
        put_scores(r, s->by_score + (size_t)i * cells + at);
    }
    return STILL_OK;
}

/* What the method decides: r->score and r->fold, then into the result's rows. */
static still_status decide(run *r, int layer, size_t at, still_error *err)
{
    const still_model *m = r->m;
    still_saliency *s = r->out;
    const sti_attn_layer l = sti_model_attn_layer(m, layer);
    const sti_hybrid_settings set = sti_attn_hybrid_settings(&r->cfg, &l);
    sti_hybrid_parallel_args a = {.set = &set,
                                  .shape = sti_attn_hybrid_shape(&l),
                                  .B = 1,
                                  .T = s->tokens,
                                  .in = sti_attn_hybrid_in(&l),
                                  .fold_chunk = r->fold,
                                  .trace.score = r->score};
    a.in.q = r->acts.qr;
    a.in.k = r->acts.kr;
    a.in.v = r->acts.v;
    STI_TRY(ask_scores(r, &a, at, err));
    STI_TRY(m->be->hybrid_route(m->dev, &a, err));
    put_scores(r, s->local + at);
    for (int h = 0; h < s->heads; h++)
        for (int t = 0; t < s->tokens; t++, at++) {
            const size_t from = (size_t)t * (size_t)s->heads + (size_t)h;
            s->folded[at] = r->fold[from] < 0 ? -1 : r->fold[from] * set.chunk;
        }
    return STILL_OK;
}

static still_status measure(run *r, int layer, still_error *err)
{
    const sti_config *g = &r->m->cfg;
    still_saliency *s = r->out;
    const int C = r->cfg.hybrid.chunk, select = r->cfg.hybrid.select;
    const size_t head = (size_t)(layer - s->first_layer) * (size_t)s->heads,
                 at = head * (size_t)s->tokens;
    STI_TRY(decide(r, layer, at, err));
    STI_TRY(sti_saliency_full_attention(
        &(sti_full_attention_args){.q = r->acts.qr,
                                   .k = r->acts.kr,
                                   .T = s->tokens,
                                   .H = g->heads,
                                   .G = g->kv_heads,
                                   .D = g->head_dim,
                                   .S = s->heads,
                                   .window = g->window[layer],
                                   .chunk = C,
                                   .eps = r->cfg.hybrid.eps,
                                   .whole = s->whole + at,
                                   .received = s->received + at},
        r->pool, err));
    for (int h = 0; h < s->heads; h++) {
        /* From the second chunk on. */
        const size_t from = at + (size_t)h * (size_t)s->tokens + (size_t)C;
        const float *const other[] = {s->whole + from, s->received + from};
        still_agreement *const to[] = {s->with_whole, s->with_received};
        for (int i = 0; i < 2; i++)
            STI_TRY(sti_saliency_agreement(s->local + from, other[i], C,
                                           s->left / C - 1, select,
                                           &to[i][head + (size_t)h], err));
    }
    return STILL_OK;
}

static still_status run_layers(run *r, const int32_t *tok, still_error *err)
{
    still_model *m = r->m;
    /* Nothing goes back: what is kept of a layer is scratch for its feed-forward. */
    sti_grads scratch = {.dh = r->acts.h, .feed = r->acts.feed};
    const sti_layer_job job = {.m = m,
                               .cfg = &r->cfg,
                               .adapter = m->adapter,
                               .gates = m->adapter,
                               .want = STI_WANT_OUTPUT,
                               .batch = &r->batch,
                               .acts = &r->acts,
                               .back = &scratch};
    STI_TRY(sti_model_embed(m, tok, r->batch.T, r->x, err));
    for (int l = 0; l <= r->cfg.last; l++) {
        STI_TRY(sti_layer_attend(&job, l, r->x, err));
        if (sti_attn_converts(&r->cfg, l)) STI_TRY(measure(r, l, err));
        if (l < r->cfg.last) STI_TRY(sti_layer_finish(&job, l, r->x, r->x, err));
        if (r->p->progress &&
            !r->p->progress(r->p->user, (uint64_t)(l + 1), (uint64_t)(r->cfg.last + 1)))
            return sti_fail(err, STILL_E_CANCELLED, "the measurement was stopped");
    }
    return STILL_OK;
}

/* ---- The whole ----------------------------------------------------------- */

static still_agreement mean(const still_agreement *a, int n)
{
    still_agreement sum = {0};
    int defined = 0;
    for (int i = 0; i < n; i++) {
        sum.overlap += a[i].overlap / n;
        sum.captured += a[i].captured / n;
        if (isnan(a[i].correlation)) continue;
        sum.correlation += a[i].correlation;
        defined++;
    }
    sum.correlation = defined ? sum.correlation / defined : NAN;
    return sum;
}

static void add_means(still_saliency *s)
{
    for (int l = 0; l < s->layers; l++) {
        const size_t head = (size_t)l * (size_t)s->heads;
        s->layer_whole[l] = mean(s->with_whole + head, s->heads);
        s->layer_received[l] = mean(s->with_received + head, s->heads);
    }
    s->mean_whole = mean(s->with_whole, s->layers * s->heads);
    s->mean_received = mean(s->with_received, s->layers * s->heads);
}

static still_status begin(run *r, const int32_t *tok, int n, still_error *err)
{
    still_saliency *s = r->out;
    STI_TRY(configure(r, n, err));
    STI_TRY(check_length(r, tok, n, err));
    const int C = r->cfg.hybrid.chunk;
    s->tokens = n;
    s->first_layer = r->cfg.first;
    s->layers = r->cfg.last - r->cfg.first + 1;
    s->heads = r->cfg.hybrid.per_head ? r->m->cfg.heads : r->m->cfg.kv_heads;
    s->left = ((n - 1) / C - 1) * C;
    _Static_assert((int)STI_SCORE_COUNT <= (int)STILL_SCORES_MAX, "room for names");
    for (int i = 0; r->p->all_scores && i < STI_SCORE_COUNT; i++)
        if (sti_score_at((sti_score_kind)i))
            s->score_name[s->scores++] = sti_score_at((sti_score_kind)i)->name;
    return reserve_memory(r, n, err);
}

still_status still_saliency_run(still_model *m, const int32_t *tok, int n,
                                const still_saliency_params *p, still_saliency **out,
                                still_error *err)
{
    still_saliency_params own;
    still_saliency draft = {0}; /* until its size is known */
    run r = {.m = m, .p = &own, .out = &draft};
    *out = NULL;
    STI_TRY(STI_TAKE(&own, p, still_saliency_params, err));
    if (n < 1) return sti_fail(err, STILL_E_ARG, "a text of %d tokens", n);
    still_status st = begin(&r, tok, n, err);
    if (st == STILL_OK) st = make_result(&r, err);
    if (st == STILL_OK) st = run_layers(&r, tok, err);
    if (st == STILL_OK) {
        add_means(r.out);
        *out = r.out;
    } else if (r.out != &draft) {
        free(r.out);
    }
    sti_pool_free(r.pool);
    sti_block_free(&r.work);
    return st;
}

void still_saliency_free(still_saliency *s)
{
    free(s);
}
