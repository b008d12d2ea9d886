/* attn.c - the table of methods, and the way from a user's description to settings. */
#include "attn/attn.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const sti_attn_method methods[] = {
    {"softmax", "the teacher: every key and value is kept", &sti_attn_softmax},
    {"still", "window, salient tokens by Self-Saliency Score, linear state",
     &sti_attn_hybrid},
    {"lolcats", "window and linear state, a learned window factor", &sti_attn_hybrid},
    {"hedgehog", "linear attention, softmax feature map", &sti_attn_hybrid},
    {"t2r", "linear attention, relu feature map", &sti_attn_hybrid},
    {"swa", "sliding window alone", &sti_attn_hybrid},
    {"liger", "gated linear attention from the key projection, half a window",
     &sti_attn_linear},
    {"supra", "decayed linear attention, relu map, group norm", &sti_attn_linear},
};
enum { N_METHODS = sizeof methods / sizeof *methods };

const sti_attn_method *sti_attn_at(int i)
{
    return i >= 0 && i < N_METHODS ? &methods[i] : NULL;
}

const sti_attn_method *sti_attn_find(const char *name)
{
    for (int i = 0; i < N_METHODS; i++)
        if (strcmp(methods[i].name, name) == 0) return &methods[i];
    return NULL;
}

/* Appends a name to a list in buf. */
static void add_name(char *buf, size_t capacity, const char *name)
{
    size_t n = strlen(buf);
    snprintf(buf + n, capacity - n, "%s%s", n ? ", " : "", name);
}

static still_status unknown_method(const char *name, still_error *err)
{
    char known[256] = "";
    for (int i = 0; i < N_METHODS; i++) add_name(known, sizeof known, methods[i].name);
    return sti_fail(err, STILL_E_ARG, "method '%s' is not known (%s)", name, known);
}

static still_status unknown_score(const char *name, still_error *err)
{
    char known[256] = "";
    for (int i = 0; i < STI_SCORE_COUNT; i++)
        add_name(known, sizeof known, sti_score_at((sti_score_kind)i)->name);
    return sti_fail(err, STILL_E_ARG, "score '%s' is not known (%s)", name, known);
}

const char *still_method_at(int i, const char **summary)
{
    const sti_attn_method *m = sti_attn_at(i);
    if (m && summary) *summary = m->summary;
    return m ? m->name : NULL;
}

/* Chunk sizes people use: 64 for the methods whose papers do, 128 for ours. */
static int usual_chunk(const char *name)
{
    return strcmp(name, "lolcats") == 0 || strcmp(name, "liger") == 0 ? 64 : 128;
}

still_status still_method_init(still_method *out, const char *name, int chunk,
                               still_error *err)
{
    if (!sti_attn_find(name)) return unknown_method(name, err);
    if (chunk == 0) chunk = usual_chunk(name);
    *out = (still_method){.chunk = chunk, .last_layer = -1};
    snprintf(out->name, sizeof out->name, "%s", name);
    snprintf(out->score, sizeof out->score, "s3");
    sti_hybrid_settings s;
    if (sti_hybrid_preset(name, chunk, &s)) {
        out->select = s.select;
        out->cap = s.cap;
        out->per_head = s.per_head;
        out->window_scale = s.la_scale == STI_SCALE_WINDOW;
        out->norm_preserved = s.norm_preserved;
        out->gate = s.gate;
    }
    return STILL_OK;
}

still_status still_method_compact(still_method *out, int chunk, still_error *err)
{
    STI_TRY(still_method_init(out, "still", chunk, err));
    out->select = out->chunk;
    snprintf(out->score, sizeof out->score, "distinct");
    out->gate = false;
    out->key_bits = 5;
    out->value_bits = 3;
    return STILL_OK;
}

still_status still_method_untrained(still_method *out, int chunk, still_error *err)
{
    STI_TRY(still_method_compact(out, chunk, err));
    out->positions = STILL_POSITIONS_CAPPED;
    out->forget = true;
    out->key_bits = 8;
    out->value_bits = 4;
    return STILL_OK;
}

/* A whole number at *at, which moves past it. */
static bool read_number(const char **at, int *out)
{
    char *end;
    if (**at < '0' || **at > '9') return false;
    const long v = strtol(*at, &end, 10);
    *at = end;
    *out = (int)v;
    return v <= 1 << 24;
}

/* "17-18" or "23" at *at, which moves past it; all below n. */
static bool read_range(const char **at, int n, int *first, int *last)
{
    if (!read_number(at, first)) return false;
    *last = *first;
    if (**at == '-' && (++*at, !read_number(at, last))) return false;
    return *first <= *last && *last < n;
}

/* "17-18:768", "23:512" or "18/2:3840" at *at, which moves past it. */
static bool read_cap(const char **at, int layers, int heads, sti_attn_cap *out)
{
    out->first_head = 0;
    out->last_head = heads - 1;
    if (!read_range(at, layers, &out->first, &out->last)) return false;
    if (**at == '/' &&
        (++*at, !read_range(at, heads, &out->first_head, &out->last_head)))
        return false;
    return *(*at)++ == ':' && read_number(at, &out->cap) && (!**at || **at == ',');
}

/* "17-18:768,23/0-1:512": layers, or heads of them, and their cap. */
static still_status read_caps(const char *text, int n_layers, int heads,
                              sti_attn_config *out, still_error *err)
{
    out->n_caps = 0;
    for (const char *at = text; *at; at += *at == ',') {
        const char *from = at;
        sti_attn_cap c;
        if (!read_cap(&at, n_layers, heads, &c))
            return sti_fail(
                err, STILL_E_ARG,
                "caps '%.100s': '%.60s' is not layers of 0-%d, or heads of "
                "0-%d in them, and their cap, such as 17-18:768 or 18/2:3840",
                text, from, n_layers - 1, heads - 1);
        if (out->n_caps == STI_ATTN_CAPS)
            return sti_fail(err, STILL_E_ARG, "caps '%.100s': more than %d rules", text,
                            STI_ATTN_CAPS);
        out->caps[out->n_caps++] = c;
    }
    return STILL_OK;
}

/* A hybrid method's operator settings: the preset, with what the user may change. */
static still_status hybrid_settings(const still_method *m, const sti_attn_layer *layer,
                                    int ctx, int ctx_train, sti_hybrid_settings *out,
                                    still_error *err)
{
    sti_hybrid_preset(m->name, m->chunk, out);
    if (!sti_score_find(m->score, &out->score)) return unknown_score(m->score, err);
    out->select = m->select;
    out->cap = m->cap;
    out->key_bits = m->key_bits;
    out->value_bits = m->value_bits;
    out->per_head = m->per_head;
    out->la_scale = m->window_scale ? STI_SCALE_WINDOW : STI_SCALE_EXACT;
    out->norm_preserved = m->norm_preserved;
    out->gate = m->gate;
    if (m->forget) out->has_linear = out->gate = false;
    out->seed = m->seed;
    bool capped = m->positions == STILL_POSITIONS_CAPPED ||
                  (m->positions == STILL_POSITIONS_AUTO && ctx > ctx_train);
    if (capped && out->has_window) {
        /* What keeps a stream together, measured in docs/methods.md: features without
         * positions, and a state that weighs no more than the exact tokens do. */
        out->position_cap = ctx_train;
        out->feature_positions = STI_FEATURES_NONE;
        out->state_cap = 2 * out->chunk + (out->cap > 0 ? out->cap : 2 * out->chunk);
    }
    sti_hybrid_shape shape = {layer->heads, layer->kv_heads, layer->head_dim,
                              layer->head_dim};
    return sti_hybrid_check(out, &shape, err);
}

still_status sti_attn_configure(const still_method *m, const sti_attn_layer *layer,
                                int n_layers, int ctx_train, sti_attn_config *out,
                                still_error *err)
{
    out->first = 0;
    out->last = n_layers - 1;
    out->kept = layer->kept;
    out->method = &methods[0];
    for (size_t i = 0; m && i < sizeof m->reserved / sizeof *m->reserved; i++)
        if (m->reserved[i])
            return sti_fail(
                err, STILL_E_UNSUPPORTED,
                "method %s has a setting that still %s does not know: start "
                "from still_method_init, or use a later libstill",
                m->name, still_version());
    if (!m || strcmp(m->name, methods[0].name) == 0) return STILL_OK;
    out->method = sti_attn_find(m->name);
    if (!out->method) return unknown_method(m->name, err);
    out->first = m->first_layer;
    if (m->last_layer >= 0) out->last = m->last_layer;
    if (out->first < 0 || out->last >= n_layers || out->first > out->last)
        return sti_fail(err, STILL_E_ARG,
                        "layers %d-%d cannot be converted: the model has layers 0-%d",
                        out->first, out->last, n_layers - 1);
    if (sti_attn_converted(out) == 0)
        return sti_fail(err, STILL_E_ARG,
                        "layers %d-%d have a sliding window and stay as they are: "
                        "there is nothing to convert",
                        out->first, out->last);
    if (m->chunk < 1 || m->chunk > 1 << 20)
        return sti_fail(err, STILL_E_ARG, "chunk %d is not between 1 and %d", m->chunk,
                        1 << 20);
    if (out->method->engine == &sti_attn_linear) {
        out->window = strcmp(m->name, "liger") == 0 ? m->chunk : 0;
        return STILL_OK;
    }
    const int heads = m->per_head ? layer->heads : layer->kv_heads;
    STI_TRY(read_caps(m->caps, n_layers, heads, out, err));
    if (out->n_caps > 0 && heads > STI_UNEVEN_HEADS_MAX)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "caps '%.100s': layers have %d heads that select, and only %d "
                        "can have caps of their own: use one cap for all",
                        m->caps, heads, STI_UNEVEN_HEADS_MAX);
    for (int i = 0; i < out->n_caps && m->cap < 0; i++)
        if (out->caps[i].first_head > 0 || out->caps[i].last_head < heads - 1)
            return sti_fail(err, STILL_E_ARG,
                            "caps '%.100s': heads of a layer that have a cap beside "
                            "heads that have none: use a number for all others",
                            m->caps);
    return hybrid_settings(m, layer, out->ctx, ctx_train, &out->hybrid, err);
}

bool sti_attn_converts(const sti_attn_config *c, int layer)
{
    return layer >= c->first && layer <= c->last && !(c->kept && c->kept[layer]);
}

int sti_attn_converted(const sti_attn_config *c)
{
    int n = 0;
    for (int l = c->first; l <= c->last; l++) n += sti_attn_converts(c, l);
    return n;
}

const sti_attn_engine *sti_attn_engine_of(const sti_attn_config *c, int layer)
{
    return sti_attn_converts(c, layer) ? c->method->engine : &sti_attn_softmax;
}

size_t sti_attn_kv_size(const sti_backend *be, const sti_attn_config *c)
{
    if (be->state_kv) return be->state_kv;
    return c->cache == STI_F32 ? sizeof(float) : sizeof(uint16_t);
}

still_status sti_attn_no_kernels(const sti_backend *be, const sti_attn_config *c,
                                 still_error *err)
{
    return sti_fail(err, STILL_E_UNSUPPORTED,
                    "method %s does not run on backend %s: use --backend cpu",
                    c->method->name, be->name);
}

still_status sti_attn_rope(const sti_backend *be, sti_dev *dev,
                           const sti_attn_config *cfg, const sti_attn_layer *l,
                           const sti_attn_io *io, still_error *err)
{
    sti_rope_args a = {.x = io->q,
                       .pos = io->pos,
                       .inv_freq = sti_attn_inv_freq(l, cfg->ctx),
                       .M = io->M,
                       .heads = l->heads,
                       .also = io->k,
                       .also_heads = l->kv_heads,
                       .D = l->head_dim,
                       .interleaved = l->interleaved};
    return be->rope(dev, &a, err);
}
