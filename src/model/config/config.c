/* config.c - see config.h. Both readers fill the same struct, which then passes the same
 * checks, so a hostile GGUF and a hostile config.json meet the same wall. */
#include "model/config.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "file/parse.h"
#include "model/config/read.h"

enum { MOST_LAYERS = 4096 };

static still_status check_numbers(const char *path, const sti_config *c,
                                  still_error *err)
{
    const struct {
        const char *what;
        int value, most;
    } bounds[] = {{"hidden size", c->hidden, 1 << 20},
                  {"ffn size", c->ffn, 1 << 22},
                  {"heads", c->heads, 4096},
                  {"kv heads", c->kv_heads, 4096},
                  {"vocabulary", c->vocab, 1 << 24}};
    for (size_t i = 0; i < sizeof bounds / sizeof *bounds; i++)
        if (bounds[i].value < 1 || bounds[i].value > bounds[i].most)
            return sti_fail(err, STILL_E_FORMAT, "%s: %s %d is not between 1 and %d",
                            path, bounds[i].what, bounds[i].value, bounds[i].most);
    if (c->heads % c->kv_heads != 0)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: %d query heads are no multiple of %d kv heads", path,
                        c->heads, c->kv_heads);
    return STILL_OK;
}

still_status sti_config_check_heads(const char *path, const sti_config *c,
                                    still_error *err)
{
    if (c->head_dim < 1 || c->head_dim > STI_HEAD_MAX)
        return sti_fail(err, STILL_E_FORMAT, "%s: head size %d is absurd", path,
                        c->head_dim);
    if (c->head_dim % 2 != 0)
        return sti_fail(err, STILL_E_FORMAT, "%s: head size %d is odd", path,
                        c->head_dim);
    if (c->rotary < 2 || c->rotary > c->head_dim || c->rotary % 2 != 0)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: RoPE cannot turn %d of the %d numbers of a head: it turns "
                        "pairs",
                        path, c->rotary, c->head_dim);
    return STILL_OK;
}

/* ---- Layers -------------------------------------------------------------- */

still_status sti_config_new_layers(const char *path, const sti_config *c,
                                   sti_config_draft *d, still_error *err)
{
    const size_t n = (size_t)c->layers;
    if (c->layers < 1 || c->layers > MOST_LAYERS)
        return sti_fail(err, STILL_E_FORMAT, "%s: layers %d is not between 1 and %d",
                        path, c->layers, MOST_LAYERS);
    d->local = sti_alloc(n, sizeof *d->local);
    d->plain = sti_alloc(n, sizeof *d->plain);
    if (!d->local || !d->plain) return sti_fail_memory(err, "layer table", n);
    for (int l = 0; l < c->layers; l++) {
        d->local[l] = !d->arch->local_period || (l + 1) % d->arch->local_period != 0;
        d->plain[l] = d->arch->plain_period && (l + 1) % d->arch->plain_period == 0;
    }
    return STILL_OK;
}

/* A layer with a window needs constant memory as it is. Methods leave it alone where
 * others are global; where all have a window, there would be nothing to convert. */
static still_status set_layers(sti_config *c, const sti_config_draft *d,
                               still_error *err)
{
    const size_t n = (size_t)c->layers;
    int global = 0;
    c->window = sti_alloc(n, sizeof *c->window);
    c->table = sti_alloc(n, sizeof *c->table);
    c->kept = sti_alloc(n, sizeof *c->kept);
    if (!c->window || !c->table || !c->kept)
        return sti_fail_memory(err, "layer table", n * sizeof *c->window);
    for (int l = 0; l < c->layers; l++) {
        c->window[l] = d->local[l] ? d->window : 0;
        c->table[l] = d->plain[l]                                 ? STI_TABLE_NONE
                      : d->arch->local_period && c->window[l] > 0 ? STI_TABLE_LOCAL
                                                                  : STI_TABLE_GLOBAL;
        global += c->window[l] == 0;
    }
    for (int l = 0; l < c->layers; l++) c->kept[l] = global > 0 && c->window[l] > 0;
    return STILL_OK;
}

/* ---- Fused matrices ------------------------------------------------------ */

/* What lies in one matrix, rows in this order. */
typedef struct fused {
    const char *gguf, *hf;
    int n;
    sti_part part[3];
} fused;
static const fused fused_parts[] = {
    {"blk.%d.attn_qkv.weight",
     "model.layers.%d.self_attn.qkv_proj.weight",
     3,
     {STI_PART_Q, STI_PART_K, STI_PART_V}},
    {"blk.%d.ffn_up.weight",
     "model.layers.%d.mlp.gate_up_proj.weight",
     2,
     {STI_PART_GATE, STI_PART_UP}},
};
enum { N_FUSED = sizeof fused_parts / sizeof *fused_parts, MOST_VIEWS = 3 };

void sti_config_fused_name(const sti_config *c, bool gguf, sti_part part, int layer,
                           char *buf, size_t capacity)
{
    buf[0] = 0;
    for (int i = 0; c->form.fused && i < N_FUSED; i++) {
        const fused *f = &fused_parts[i];
        const char *pattern = gguf ? f->gguf : f->hf, *slot = strstr(pattern, "%d");
        if (f->part[0] == part)
            snprintf(buf, capacity, "%.*s%d%s", (int)(slot - pattern), pattern, layer,
                     slot + 2);
    }
}

bool sti_config_joined(const sti_config *c, sti_part part)
{
    for (int i = 0; c->form.fused && i < N_FUSED; i++)
        for (int k = 1; k < fused_parts[i].n; k++)
            if (fused_parts[i].part[k] == part) return true;
    return false;
}

/* Replaces a fused matrix by views of its parts: the first in its place, the others
 * behind the last tensor. */
static still_status split(sti_store *s, const sti_config *c, const fused *f, int layer,
                          sti_tensor *t, still_error *err)
{
    sti_tensor all = *t;
    const size_t bytes = all.bytes / (size_t)all.dim[0]; /* of a row */
    size_t at = 0;
    for (int i = 0; i < f->n; i++) {
        char name[128], *copy;
        const size_t rows = (size_t)sti_config_shape(c, f->part[i]).rows;
        sti_config_tensor_name(c, s->is_gguf, f->part[i], layer, false, name,
                               sizeof name);
        if (!(copy = sti_strdup(name))) return sti_fail_memory(err, name, sizeof name);
        sti_tensor *view = i == 0 ? t : &s->tensor[s->n_tensors++];
        if (i == 0) free(all.name);
        *view = all;
        view->name = copy;
        view->dim[0] = (int64_t)rows;
        view->data = (const char *)all.data + at;
        view->bytes = rows * bytes;
        at += view->bytes;
        if (at % 4 != 0) /* kernels read numbers and blocks where they lie */
            return sti_fail(err, STILL_E_UNSUPPORTED,
                            "%s: tensor '%s': %zu rows of %zu bytes cannot be taken "
                            "out of a matrix of several parts",
                            all.path, name, rows, bytes);
    }
    return STILL_OK;
}

/* The fused matrix of a layer; NULL, with STILL_OK, where its parts lie apart. */
static still_status find_fused(const sti_store *s, const sti_config *c, const fused *f,
                               int layer, sti_tensor **out, still_error *err)
{
    char name[128];
    int64_t rows = 0;
    sti_config_fused_name(c, s->is_gguf, f->part[0], layer, name, sizeof name);
    for (int i = 0; i < f->n; i++) rows += sti_config_shape(c, f->part[i]).rows;
    sti_tensor *t = (sti_tensor *)(uintptr_t)sti_store_find(s, name);
    *out = NULL;
    if (!t || sti_config_tensor(c, s, f->part[0], layer, false)) return STILL_OK;
    if (t->n_dims != 2 || t->dim[0] != rows)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: tensor '%s' is %lld x %lld, expected %lld rows", t->path,
                        name, (long long)t->dim[0],
                        (long long)(t->n_dims > 1 ? t->dim[1] : 1), (long long)rows);
    *out = t;
    return STILL_OK;
}

static still_status split_all(sti_store *s, const sti_config *c, still_error *err)
{
    const size_t n = (size_t)c->layers * N_FUSED;
    still_status st = STILL_OK;
    if (!c->form.fused) return STILL_OK;
    STI_TRY(sti_store_reserve(s, n * (MOST_VIEWS - 1), err));
    /* All are found before the first view ends the order of names. */
    sti_tensor **found = sti_alloc(n, sizeof *found);
    if (!found) return sti_fail_memory(err, s->path, n * sizeof *found);
    for (size_t i = 0; i < n && st == STILL_OK; i++)
        st = find_fused(s, c, &fused_parts[i % N_FUSED], (int)(i / N_FUSED), &found[i],
                        err);
    for (size_t i = 0; i < n && st == STILL_OK; i++)
        if (found[i])
            st = split(s, c, &fused_parts[i % N_FUSED], (int)(i / N_FUSED), found[i],
                       err);
    free(found);
    return st == STILL_OK ? sti_store_sort(s, err) : st;
}

/* ---- The whole ----------------------------------------------------------- */

static still_status read_vocabulary(const sti_store *s, sti_config *c, still_error *err)
{
    const sti_tensor *embed = sti_config_tensor(c, s, STI_PART_EMBED, 0, false);
    if (!embed || embed->n_dims != 2) {
        char name[128];
        sti_config_tensor_name(c, s->is_gguf, STI_PART_EMBED, 0, false, name,
                               sizeof name);
        return sti_fail(err, STILL_E_FORMAT, "%s: tensor '%s' is %s", s->path, name,
                        embed ? "not a matrix" : "missing");
    }
    c->vocab = embed->dim[0] > INT32_MAX ? -1 : (int)embed->dim[0];
    c->tied = json_is_true(json_object_get(s->config, "tie_word_embeddings")) ||
              !sti_config_tensor(c, s, STI_PART_HEAD, 0, false);
    return STILL_OK;
}

static still_status read_all(sti_store *s, sti_config *c, sti_config_draft *d,
                             still_error *err)
{
    STI_TRY(s->is_gguf ? sti_config_read_gguf(s, c, d, err)
                       : sti_config_read_json(s, c, d, err));
    c->of = d->arch;
    STI_TRY(read_vocabulary(s, c, err));
    STI_TRY(check_numbers(s->path, c, err));
    if (c->form.embed_scale <= 0) c->form.embed_scale = sqrt(c->hidden);
    if (c->form.attn_scale <= 0) c->form.attn_scale = 1 / sqrt(c->head_dim);
    if (sti_rotary_moves(c) && c->form.qk_norm != STI_QK_PLAIN)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "%s: RoPE that turns %d of %d numbers together with norms of "
                        "queries and keys is not supported",
                        s->path, c->rotary, c->head_dim);
    STI_TRY(set_layers(c, d, err));
    STI_TRY(sti_rope_tables(s->path, c, &d->scale, err));
    for (int i = 0; c->long_from && i < 2; i++) {
        c->divisor[i] = d->scale.divisor[i];
        d->scale.divisor[i] = NULL;
    }
    return split_all(s, c, err);
}

still_status sti_config_read(sti_store *s, sti_config *c, still_error *err)
{
    sti_config_draft d = {0};
    *c = (sti_config){0};
    if (!s->is_gguf && !s->config)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: a bare safetensors file has no configuration; open the "
                        "folder that holds its config.json",
                        s->path);
    const still_status st = read_all(s, c, &d, err);
    free(d.local);
    free(d.plain);
    sti_rope_scaling_free(&d.scale);
    if (st != STILL_OK) sti_config_free(c);
    return st;
}

void sti_config_free(sti_config *c)
{
    free(c->window);
    free(c->table);
    free(c->kept);
    free(c->inv_freq[0]);
    free(c->divisor[0]);
    free(c->divisor[1]);
    *c = (sti_config){0};
}
