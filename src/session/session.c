/* session.c - a session: its settings, its memory, and what that takes.
 *
 * A session is one block of memory, allocated when it is created: a decode step allocates
 * nothing. Caches are touched at once; states of constant size take memory as they fill, and
 * still_model_bill states what a context of so many tokens fills. */
#include "session/session.h"
#include "base/sized.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    MOST_ROLLBACK = 4096,
    LEAST_ROWS = 64 /* of a pass that a GPU's memory makes smaller */
};

/* An adapter is valid only for the method it was trained for. Sizes (chunk, cap,
 * select) and the score may differ; the meaning of its tensors may not. */
static still_status check_method(const still_model *m, const still_method *method,
                                 still_error *err)
{
    const still_method *t = m->info.method;
    if (!t) return STILL_OK;
    /* Without LoRA the projections are the teacher's, so softmax gives the teacher. */
    if (method && strcmp(method->name, "softmax") == 0 &&
        m->adapter->spec.lora.rank == 0)
        return STILL_OK;
    if (!method || strcmp(method->name, t->name) != 0)
        return sti_fail(err, STILL_E_ARG,
                        "the adapter was trained for method %s, not %s: open the base "
                        "model for that",
                        t->name, method ? method->name : "softmax");
    if (method->per_head != t->per_head || method->gate != t->gate ||
        method->forget != t->forget || method->norm_preserved != t->norm_preserved ||
        method->window_scale != t->window_scale ||
        method->first_layer != t->first_layer || method->last_layer != t->last_layer)
        return sti_fail(err, STILL_E_ARG,
                        "the adapter was trained with other heads, state, gate, map, "
                        "scale or layers than asked for: those are part of it");
    return STILL_OK;
}

static still_status configure(const still_model *m, const still_session_params *params,
                              still_session *s, still_error *err)
{
    still_session_params p = *params;
    if (p.ctx == 0) p.ctx = m->cfg.ctx_train;
    if (p.batch == 0) p.batch = m->be->batch;
    if (p.ctx < 1 || p.batch < 1)
        return sti_fail(err, STILL_E_ARG, "context %d and batch %d must be at least 1",
                        p.ctx, p.batch);
    if (p.rollback < 0 || p.rollback > MOST_ROLLBACK)
        return sti_fail(err, STILL_E_ARG,
                        "rollback of %d chunks is not between 0 and %d", p.rollback,
                        MOST_ROLLBACK);
    if (p.batch > p.ctx) p.batch = p.ctx;
    /* A model stored in f32 is meant for precision, so its keys and values are f32
     * too. */
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

size_t sti_session_lay_out(const still_session *s, void *base, sti_attn_memory *layer)
{
    const still_model *m = s->model;
    sti_carve c = {.base = base};
    sti_attn_memory unused;
    for (int l = 0; l < m->cfg.layers; l++) {
        sti_attn_layer of = sti_model_attn_layer(m, l);
        sti_attn_engine_of(&s->cfg, l)
            ->carve_memory(m->be, &s->cfg, &of, &c, layer ? &layer[l] : &unused);
    }
    sti_carve_take(&c, 0, 1); /* up to the next line */
    return c.used;
}

/* Copies of the state that a session with boundaries keeps. */
static size_t copies(const still_session *s)
{
    return sti_session_keeps_all(s) ? 0 : (size_t)s->rollback;
}

static void carve_tables(still_session *s, sti_carve *c)
{
    const sti_config *g = &s->model->cfg;
    s->layer = sti_carve_take(c, (size_t)g->layers, sizeof *s->layer);
    s->boundary = sti_carve_take(c, (size_t)s->rollback, sizeof *s->boundary);
    s->logits = sti_carve_take(c, (size_t)g->vocab, sizeof *s->logits);
}

/* ---- Memory -------------------------------------------------------------- */

/* Bytes of all states, SIZE_MAX if no number tells. */
static size_t states_bytes(const still_session *s)
{
    size_t bytes;
    return sti_mul(sti_session_lay_out(s, NULL, NULL), 1 + copies(s), &bytes)
               ? bytes
               : SIZE_MAX;
}

/* Scratch of the device: one block for whichever operator runs. */
static size_t device_scratch(const still_model *m, const sti_attn_config *cfg)
{
    size_t most = m->be->dev_bytes(m->dev, cfg->batch);
    for (int l = 0; l < m->cfg.layers; l++) {
        const sti_attn_layer layer = sti_model_attn_layer(m, l);
        const size_t n =
            sti_attn_engine_of(cfg, l)->scratch_bytes(m->be, m->dev, cfg, &layer);
        if (n > most) most = n;
    }
    return most;
}

/* What passes of cfg->batch rows need beyond what there is. New activations are allocated
 * before the old ones are freed. */
static size_t growth(const still_model *m, const sti_attn_config *cfg)
{
    const size_t operators = device_scratch(m, cfg), now = m->be->dev_bytes(m->dev, 0);
    return (cfg->batch > m->scratch.rows ? sti_model_scratch_bytes(m, cfg->batch) : 0) +
           (operators > now ? operators - now : 0);
}

/* Halves the rows of a pass, down to `least`, until these and `more` bytes fit a GPU's
 * memory. */
static void fit_rows(const still_model *m, size_t more, int least, sti_attn_config *cfg)
{
    if (!m->be->mem_left) return;
    const size_t left = m->be->mem_left(m->dev);
    while (cfg->batch / 2 >= least && (more > left || growth(m, cfg) > left - more))
        cfg->batch /= 2;
}

/* ",17-18:768,23-23/0-0:512": layers, heads unless they are all, and their cap. */
static void describe_caps(const still_session *s, char *out, size_t size)
{
    const sti_attn_config *c = &s->cfg;
    const sti_config *g = &s->model->cfg;
    const int heads = c->hybrid.per_head ? g->heads : g->kv_heads;
    size_t n = 0;
    out[0] = 0;
    for (int i = 0; i < c->n_caps && n < size; i++) {
        const sti_attn_cap *cap = &c->caps[i];
        char some[32] = "";
        if (cap->first_head > 0 || cap->last_head < heads - 1)
            snprintf(some, sizeof some, "/%d-%d", cap->first_head, cap->last_head);
        n += (size_t)snprintf(out + n, size - n, ",%d-%d%s:%d", cap->first, cap->last,
                              some, cap->cap);
    }
}

static void describe_session(still_session *s)
{
    const sti_attn_config *c = &s->cfg;
    const sti_hybrid_settings *h = &c->hybrid;
    char caps[STI_SETTINGS_LINE - 768];
    sti_hybrid_settings usual;
    describe_caps(s, caps, sizeof caps);
    char bits[40] = ""; /* said only where it matters, so that older files match */
    if (h->key_bits || h->value_bits)
        snprintf(bits, sizeof bits, " cache-type-k=%d cache-type-v=%d", h->key_bits,
                 h->value_bits);
    const bool forgets = sti_hybrid_preset(c->method->name, 1, &usual) &&
                         usual.has_linear && !h->has_linear;
    snprintf(s->settings, sizeof s->settings,
             "method=%s backend=%s cache=%s%s layers=%d-%d chunk=%d select=%d cap=%d%s "
             "score=%d per_head=%d window_scale=%d map=%d norm=%d gate=%d factor=%d "
             "positions=%d features=%d state=%d seed=%llu window=%d%s",
             c->method->name, s->model->be->name, c->cache == STI_F32 ? "f32" : "f16",
             bits, c->first, c->last, h->chunk, h->select, h->cap, caps, (int)h->score,
             h->per_head, h->la_scale == STI_SCALE_WINDOW, (int)h->map,
             h->norm_preserved, h->gate, h->window_factor, h->position_cap,
             (int)h->feature_positions, h->state_cap, (unsigned long long)h->seed,
             c->window, forgets ? " forgets" : "");
}

/* A state of which a short conversation uses little takes memory where it is written. */
static bool is_sparse(const still_session *s)
{
    return s->model->be->host_memory && !sti_session_keeps_all(s);
}

static bool memory_new(still_session *s, size_t bytes, still_error *why)
{
    if (is_sparse(s)) return sti_block_new_sparse(&s->memory, bytes);
    return s->model->be->mem_new(s->model->dev, bytes, &s->memory, why) == STILL_OK;
}

static still_status allocate(still_session *s, still_error *err)
{
    still_model *m = s->model;
    sti_carve tables = {0};
    carve_tables(s, &tables);
    s->state_bytes = sti_session_lay_out(s, NULL, NULL);
    const size_t bytes = states_bytes(s);
    still_error why;
    if (!memory_new(s, bytes, &why))
        return sti_fail(err, STILL_E_MEMORY,
                        "a session of %d tokens needs %.1f GB of memory, which is not "
                        "there: use a smaller context%s%s",
                        s->cfg.ctx, (double)bytes / 1e9, m->be->host_memory ? "" : "; ",
                        m->be->host_memory ? "" : why.text);
    if (!sti_block_new(&s->tables, tables.used))
        return sti_fail_memory(err, "session", tables.used);
    tables = (sti_carve){.base = s->tables.p};
    carve_tables(s, &tables);
    s->state = s->memory.p;
    sti_session_lay_out(s, s->state, s->layer);
    for (size_t i = 0; i < copies(s); i++)
        s->boundary[i].state = s->state + (i + 1) * s->state_bytes;
    return STILL_OK;
}

/* Scratch for passes of cfg->batch rows. */
static still_status reserve(still_model *m, const sti_attn_config *cfg,
                            still_error *err)
{
    for (int l = 0; l < m->cfg.layers; l++) {
        sti_attn_layer layer = sti_model_attn_layer(m, l);
        STI_TRY(sti_attn_engine_of(cfg, l)->reserve(m->be, m->dev, cfg, &layer, err));
    }
    STI_TRY(m->be->dev_reserve(m->dev, cfg->batch, err));
    return sti_model_reserve(m, cfg->batch, err);
}

still_status sti_session_widen(still_session *s, int rows, still_error *err)
{
    if (rows <= s->rows) return STILL_OK;
    sti_attn_config wide = s->cfg;
    wide.batch = rows;
    fit_rows(s->model, 0, s->rows, &wide);
    STI_TRY(reserve(s->model, &wide, err));
    s->rows = wide.batch;
    return STILL_OK;
}

static still_status make(const still_session *draft, still_session **out,
                         still_error *err)
{
    still_model *m = draft->model;
    STI_TRY(reserve(m, &draft->cfg, err));
    still_session *s = sti_alloc(1, sizeof *s);
    if (!s) return sti_fail_memory(err, "session", sizeof *s);
    *s = *draft;
    s->rows = s->cfg.batch;
    describe_session(s);
    still_status st = allocate(s, err);
    if (st != STILL_OK) {
        still_session_free(s);
        return st;
    }
    s->number = ++m->sessions;
    *out = s;
    return STILL_OK;
}

still_status still_session_new(still_model *m, const still_session_params *params,
                               still_session **out, still_error *err)
{
    *out = NULL;
    still_session draft = {.model = m};
    still_session_params p;
    STI_TRY(STI_TAKE(&p, params, still_session_params, err));
    STI_TRY(check_method(m, p.method ? p.method : m->info.method, err));
    STI_TRY(configure(m, &p, &draft, err));
    fit_rows(m, states_bytes(&draft), LEAST_ROWS, &draft.cfg);
    return make(&draft, out, err);
}

still_status sti_session_like(const still_session *s, int ctx, still_session **out,
                              still_error *err)
{
    *out = NULL;
    still_session draft = {.model = s->model, .cfg = s->cfg, .rollback = s->rollback};
    draft.cfg.ctx = ctx;
    return make(&draft, out, err);
}

void still_session_free(still_session *s)
{
    if (!s) return;
    s->model->be->mem_free(s->model->dev, &s->memory);
    sti_block_free(&s->tables);
    free(s);
}

/* ---- Small questions ----------------------------------------------------- */

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
    /* A cache is read only up to the length, but states are sums that start at zero. */
    still_error unused;
    if (!sti_session_keeps_all(s))
        (void)s->model->be->mem_clear(s->model->dev, s->state, s->state_bytes, &unused);
    for (int i = 0; i < s->rollback; i++) s->boundary[i].length = 0;
    s->length = 0;
    s->has_logits = false;
    s->written = 0;
    sti_session_forget_ahead(s);
}

/* ---- The bill ------------------------------------------------------------ */

/* Bytes of a layer's lists that chunks retired by the end of the context cannot fill: each
 * puts `select` tokens in a list. */
static size_t free_slots(const sti_attn_config *cfg, const sti_attn_layer *of,
                         const sti_hybrid_state *st)
{
    const sti_hybrid_settings set = sti_attn_hybrid_settings(cfg, of);
    const sti_hybrid_shape shape = sti_attn_hybrid_shape(of);
    const int64_t retired = (cfg->ctx - 1) / set.chunk - 1;
    const int64_t most = (retired > 0 ? retired : 0) * set.select;
    size_t slots = 0;
    for (int i = 0; i < sti_hybrid_selection_heads(&set, &shape); i++) {
        const int64_t capacity = sti_hybrid_list_of(&set, st, i).capacity;
        if (capacity > most) slots += (size_t)(capacity - most);
    }
    return slots * sti_session_salient_bytes(&set, st, shape.D);
}

/* What a context of few tokens leaves untouched of a sparse state: of the window only the
 * first rows are written until it is full, keys in panels of 16, each array in whole pages;
 * then lists begin to fill. */
static size_t untouched(const still_session *s)
{
    enum { PANEL = 16 };
    const still_model *m = s->model;
    const size_t page = sti_page_size();
    const size_t n = ((size_t)s->cfg.ctx + PANEL - 1) / PANEL * PANEL;
    const bool folds = s->cfg.ctx > sti_attn_unfolded(&s->cfg);
    size_t free = 0;
    if (!s->cfg.hybrid.has_linear || !s->cfg.hybrid.has_window) return 0;
    for (int l = 0; l < m->cfg.layers; l++) {
        const sti_attn_layer of = sti_model_attn_layer(m, l);
        sti_carve c = {0};
        sti_attn_memory memory;
        if (sti_attn_engine_of(&s->cfg, l) != &sti_attn_hybrid) continue;
        sti_attn_hybrid.carve_memory(m->be, &s->cfg, &of, &c, &memory);
        const size_t head = n * (size_t)of.head_dim * memory.hybrid.kv_size + page;
        const size_t used =
            2 * (size_t)of.kv_heads * head + 2 * page; /* scores, counts */
        if (folds)
            free += free_slots(&s->cfg, &of, &memory.hybrid);
        else if (used < c.used)
            free += c.used - used;
    }
    return free;
}

still_status sti_session_full_bytes(const still_model *m,
                                    const still_session_params *params, size_t *out,
                                    still_error *err)
{
    still_session s = {0};
    still_session_params p;
    STI_TRY(STI_TAKE(&p, params, still_session_params, err));
    STI_TRY(configure(m, &p, &s, err));
    if (p.method) STI_TRY(check_method(m, p.method, err));
    s.model = (still_model *)m;
    *out = sti_session_lay_out(&s, NULL, NULL);
    return STILL_OK;
}

enum {
    RUNTIME = 27 << 19,     /* 13.5 MiB: code, libraries and tables of a program */
    RUNNING = 3 << 18,      /* 0.75 MiB: what those grow by while it generates */
    FAULT_AROUND = 1 << 16, /* bytes of a file that come with the first one touched */
};

/* The program itself: what the process held beside the weights once the model was open,
 * and what it touches later. */
static size_t runtime(const still_model *m, size_t weights)
{
    const size_t tokenizer = m->tokenizer ? sti_tokenizer_bytes(m->tokenizer) : 0;
    if (!m->rss) return RUNTIME + tokenizer;
    return (m->rss > weights ? m->rss - weights : 0) + RUNNING;
}

static void add_weight(const still_model *m, const sti_weight *w, still_bill *b)
{
    if (w->own.bytes)
        b->weights_resident += w->own.bytes;
    else if (w->src >= m->own && w->src < m->own + m->n_own)
        b->weights_resident += w->src->bytes;
    else
        b->weights_mapped += w->src->bytes;
}

still_status still_model_bill(const still_model *m, const still_session_params *params,
                              still_bill *out, still_error *err)
{
    still_session s = {0};
    still_session_params p;
    STI_TRY(STI_TAKE(&p, params, still_session_params, err));
    STI_TRY(configure(m, &p, &s, err));
    s.model = (still_model *)m;
    fit_rows(m, states_bytes(&s), LEAST_ROWS, &s.cfg);
    sti_carve tables = {0};
    carve_tables(&s, &tables);
    still_bill b = {.cache = sti_session_lay_out(&s, NULL, NULL)};
    b.rollback = copies(&s) * b.cache;
    if (is_sparse(&s)) b.cache -= untouched(&s);
    const size_t scratch =
        sti_model_scratch_bytes(m, s.cfg.batch) + device_scratch(m, &s.cfg);
    b.scratch = tables.used + sti_model_table_bytes(s.cfg.batch) + scratch;
    for (int i = 0; i < m->cfg.layers; i++) {
        const sti_layer *L = &m->layer[i];
        const sti_linear *all[] = {&L->q,    &L->k,  &L->v,   &L->o,
                                   &L->gate, &L->up, &L->down};
        for (size_t j = 0; j < sizeof all / sizeof *all; j++)
            add_weight(m, &all[j]->w, &b);
    }
    add_weight(m, sti_model_head(m), &b);
    if (!m->cfg.tied) {
        /* Of a mapped one only rows of tokens that occur are read. */
        const size_t rows = (size_t)s.cfg.ctx * FAULT_AROUND, all = m->embed.src->bytes;
        b.weights_resident += m->embed.own.bytes;
        if (!m->embed.own.bytes) b.weights_mapped += rows < all ? rows : all;
    }
    b.weights_resident += m->vectors_capacity * sizeof(float);
    if (m->adapter)
        b.weights_resident +=
            m->adapter->n_values * sizeof(float) + m->adapter->resident;
    b.runtime = runtime(m, m->be->host_memory ? b.weights_resident : 0);
    if (m->adapter && s.cfg.ctx > sti_attn_unfolded(&s.cfg)) /* read later */
        b.weights_resident += m->adapter->maps.bytes;
    b.total = b.weights_mapped + b.weights_resident + b.cache + b.rollback + b.scratch +
              b.runtime;
    if (b.total < m->peak_rss) b.total = m->peak_rss; /* opening it took more */
    if (!m->be->host_memory)
        b.device = b.weights_resident + b.cache + b.rollback + scratch;
    *out = b;
    return STILL_OK;
}
