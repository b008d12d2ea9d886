/* shape.c - see shape.h.
 *
 * The tensors of a random model lie in one memory file, not in anonymous memory:
 * backends that have made a copy drop the pages they read (sti_map_drop), and those of
 * a file come back with their contents. */
#include "model/shape.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/process.h"
#include "base/random.h"
#include "file/parse.h"

#define LLAMA3(factor)                                                                 \
    "{\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":" factor                   \
    ",\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,"                               \
    "\"original_max_position_embeddings\":8192}}"
#define GEMMA(window, more)                                                            \
    "{\"sliding_window\":" window ",\"hidden_act\":\"gelu_pytorch_tanh\","             \
    "\"rope_local_base_freq\":10000.0" more "}"
#define LINEAR_8 ",\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":8.0}"
#define GRANITE                                                                        \
    "{\"embedding_multiplier\":12.0,\"attention_multiplier\":0.015625,"                \
    "\"residual_multiplier\":0.22,\"logits_scaling\":8.0}"
/* Of 96 numbers of a head that are rotated; divisors of the same size as its own. */
#define TIMES_8(x) x "," x "," x "," x "," x "," x "," x "," x
#define TIMES_48(x)                                                                    \
    TIMES_8(x)                                                                         \
    "," TIMES_8(x) "," TIMES_8(x) "," TIMES_8(x) "," TIMES_8(x) "," TIMES_8(x)
#define PHI                                                                            \
    "{\"partial_rotary_factor\":0.75,\"original_max_position_embeddings\":4096,"       \
    "\"sliding_window\":262144,\"rope_scaling\":{\"type\":\"longrope\","               \
    "\"short_factor\":[" TIMES_48("1.0") "],\"long_factor\":[" TIMES_48("16.0") "]}}"

static const sti_shape shapes[] = {
    /* name, type, layers, hidden, ffn, heads, kv, head, vocab, ctx, theta, eps, tied,
     * more */
    {"smollm2-135m", "llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, 1e5, 1e-5, true,
     NULL},
    {"smollm2-360m", "llama", 32, 960, 2560, 15, 5, 64, 49152, 8192, 1e5, 1e-5, true,
     NULL},
    {"smollm2-1.7b", "llama", 24, 2048, 8192, 32, 32, 64, 49152, 8192, 1.3e5, 1e-5,
     true, NULL},
    {"smollm3-3b", "smollm3", 36, 2048, 11008, 16, 4, 128, 128256, 65536, 5e6, 1e-6,
     true, NULL},
    {"llama3.2-1b", "llama", 16, 2048, 8192, 32, 8, 64, 128256, 131072, 5e5, 1e-5, true,
     LLAMA3("32.0")},
    {"llama3.2-3b", "llama", 28, 3072, 8192, 24, 8, 128, 128256, 131072, 5e5, 1e-5,
     true, LLAMA3("32.0")},
    {"llama3-8b", "llama", 32, 4096, 14336, 32, 8, 128, 128256, 8192, 5e5, 1e-5, false,
     NULL},
    {"llama3.1-8b", "llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072, 5e5, 1e-5,
     false, LLAMA3("8.0")},
    {"llama3-70b", "llama", 80, 8192, 28672, 64, 8, 128, 128256, 8192, 5e5, 1e-5, false,
     NULL},
    {"llama3.1-70b", "llama", 80, 8192, 28672, 64, 8, 128, 128256, 131072, 5e5, 1e-5,
     false, LLAMA3("8.0")},
    {"mistral-7b", "mistral", 32, 4096, 14336, 32, 8, 128, 32000, 32768, 1e4, 1e-5,
     false, "{\"sliding_window\":4096}"},
    {"qwen2-0.5b", "qwen2", 24, 896, 4864, 14, 2, 64, 151936, 131072, 1e6, 1e-6, true,
     NULL},
    {"qwen2-1.5b", "qwen2", 28, 1536, 8960, 12, 2, 128, 151936, 131072, 1e6, 1e-6, true,
     NULL},
    {"qwen2-7b", "qwen2", 28, 3584, 18944, 28, 4, 128, 152064, 131072, 1e6, 1e-6, false,
     NULL},
    {"qwen3-0.6b", "qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 40960, 1e6, 1e-6, true,
     NULL},
    {"qwen3-4b", "qwen3", 36, 2560, 9728, 32, 8, 128, 151936, 40960, 1e6, 1e-6, true,
     NULL},
    {"qwen3-8b", "qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 40960, 1e6, 1e-6, false,
     NULL},
    {"gemma3-1b", "gemma3_text", 26, 1152, 6912, 4, 1, 256, 262144, 32768, 1e6, 1e-6,
     true, GEMMA("512", "")},
    {"gemma3-4b", "gemma3_text", 34, 2560, 10240, 8, 4, 256, 262208, 131072, 1e6, 1e-6,
     true, GEMMA("1024", LINEAR_8)},
    {"granite3.3-2b", "granite", 40, 2048, 8192, 32, 8, 64, 49159, 131072, 1e7, 1e-5,
     true, GRANITE},
    {"phi4-mini", "phi3", 32, 3072, 8192, 24, 8, 128, 200064, 131072, 1e4, 1e-5, true,
     PHI},
    {"olmo2-1b", "olmo2", 16, 2048, 8192, 16, 16, 128, 100352, 4096, 5e5, 1e-6, false,
     NULL},
    {"tiny", "llama", 2, 256, 512, 4, 2, 64, 512, 2048, 1e4, 1e-5, false, NULL},
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

const sti_shape *sti_shape_at(int i)
{
    return i >= 0 && i < N_SHAPES ? &shapes[i] : NULL;
}

const sti_shape *sti_shape_find(const char *name)
{
    for (int i = 0; i < N_SHAPES; i++)
        if (strcmp(shapes[i].name, name) == 0) return &shapes[i];
    return NULL;
}

json_t *sti_shape_config(const sti_shape *s, const char *torch_dtype)
{
    json_t *c = json_pack(
        "{s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:f, s:s, s:b}",
        "model_type", s->type, "torch_dtype", torch_dtype, "hidden_size", s->hidden,
        "intermediate_size", s->ffn, "num_hidden_layers", s->layers,
        "num_attention_heads", s->heads, "num_key_value_heads", s->kv_heads, "head_dim",
        s->head_dim, "vocab_size", s->vocab, "max_position_embeddings", s->ctx,
        "rope_theta", s->theta, "rms_norm_eps", s->eps, "hidden_act", "silu",
        "tie_word_embeddings", s->tied);
    json_t *more = NULL;
    const char *name = sti_config_class(s->type);
    if (name) sti_json_set(&c, "architectures", json_pack("[s]", name));
    if (!s->more) return c;
    sti_json_read("shape", s->more, strlen(s->more), STI_JSON_OBJECT, &more, NULL);
    if (!more) {
        json_decref(c);
        return NULL;
    }
    sti_json_merge(&c, more);
    return c;
}

bool sti_shape_biased(const sti_shape *s, sti_part part)
{
    return strcmp(s->type, "qwen2") == 0 &&
           (part == STI_PART_Q || part == STI_PART_K || part == STI_PART_V);
}

still_status sti_shape_read(const sti_shape *s, sti_config *out, still_error *err)
{
    char path[64];
    snprintf(path, sizeof path, "%s", s->name);
    sti_store store = {.path = path, .config = sti_shape_config(s, "float16")};
    sti_tensor embed = {.n_dims = 2, .dim = {s->vocab, s->hidden}, .path = path};
    char name[] = "model.embed_tokens.weight";
    still_status st = store.config ? sti_store_reserve(&store, 2, err)
                                   : sti_fail_memory(err, s->name, 0);
    if (st == STILL_OK) {
        embed.name = name;
        store.tensor[store.n_tensors++] = embed;
        st = sti_config_read(&store, out, err);
    }
    if (st == STILL_OK) out->tied = s->tied;
    free(store.tensor);
    json_decref(store.config);
    return st;
}

/* ---- Random numbers ------------------------------------------------------ */

void sti_random_weights(sti_dtype type, double deviation, uint64_t seed, void *out,
                        size_t bytes)
{
    enum { PERIOD = 4096, PERIODS = 31 }; /* numbers made at once */
    const sti_dtype_info *info = sti_dtype_find((int)type);
    const size_t step = PERIOD / (size_t)info->block * (size_t)info->bytes;
    const float scale = (float)(deviation * sqrt(3) * 0x1p-23);
    float x[PERIOD];
    unsigned char packed[PERIOD * sizeof(float)], *to = out;
    size_t made = 0;
    for (uint64_t at = 0; at < PERIODS && made < bytes; at++) {
        for (uint64_t i = 0; i < PERIOD; i += 2) {
            const uint64_t r = sti_mix64(seed + at * PERIOD + i);
            x[i] = scale * (float)((int32_t)(r >> 40) - (1 << 23));
            x[i + 1] = scale * (float)((int32_t)(r & 0xffffff) - (1 << 23));
        }
        const size_t n = bytes - made < step ? bytes - made : step;
        sti_quant(type, x, packed, PERIOD);
        memcpy(to + made, packed, n);
        made += n;
    }
    for (size_t n; made < bytes; made += n) { /* what there is, again */
        n = bytes - made < made ? bytes - made : made;
        memcpy(to + made, to, n);
    }
}

/* ---- The store ----------------------------------------------------------- */

/* Where tensors lie: each has a place, or all whose rows have one length share one. */
typedef struct place {
    int64_t columns; /* 0: norms, which share theirs always */
    size_t at, bytes;
} place;

typedef struct builder {
    const sti_shape *shape;
    sti_config cfg;
    bool own;
    sti_store *s;
    size_t capacity; /* for tensors */
    place *place;    /* [capacity] */
    size_t n_places, used;
    size_t *place_of; /* [capacity]: of each tensor */
} builder;

static size_t find_place(builder *b, int64_t columns, size_t bytes)
{
    size_t i = 0;
    const bool shared = !b->own || columns == 0;
    while (i < b->n_places && !(shared && b->place[i].columns == columns)) i++;
    if (i == b->n_places) b->place[b->n_places++] = (place){.columns = columns};
    if (b->place[i].bytes < bytes) b->place[i].bytes = bytes;
    return i;
}

static bool is_norm(const sti_config *c, sti_part part)
{
    return sti_config_shape(c, part).cols == 0;
}

static still_status add(builder *b, sti_part part, int layer, bool bias,
                        still_error *err)
{
    char name[128];
    sti_store *s = b->s;
    sti_tensor *t = &s->tensor[s->n_tensors];
    const sti_part_shape shape = sti_config_shape(&b->cfg, part);
    const int64_t cols = bias ? 0 : shape.cols, width = cols ? cols : shape.rows;
    sti_config_tensor_name(&b->cfg, false, part, layer, bias, name, sizeof name);
    *t = (sti_tensor){.name = sti_strdup(name),
                      .type = STI_F16,
                      .n_dims = cols ? 2 : 1,
                      .dim = {shape.rows, cols},
                      .bytes = (size_t)shape.rows * (size_t)(cols ? cols : 1) * 2,
                      .path = s->path};
    if (!t->name) return sti_fail_memory(err, name, sizeof name);
    b->place_of[s->n_tensors++] =
        find_place(b, is_norm(&b->cfg, part) ? 0 : width, t->bytes);
    s->file_bytes += t->bytes;
    return STILL_OK;
}

static still_status add_part(builder *b, sti_part part, int layer, still_error *err)
{
    if (!sti_config_has(&b->cfg, part)) return STILL_OK;
    STI_TRY(add(b, part, layer, false, err));
    return sti_shape_biased(b->shape, part) ? add(b, part, layer, true, err) : STILL_OK;
}

static still_status add_all(builder *b, still_error *err)
{
    for (int part = 0; part < STI_PART_ATTN_NORM; part++)
        STI_TRY(add_part(b, (sti_part)part, 0, err));
    for (int l = 0; l < b->shape->layers; l++)
        for (int part = STI_PART_ATTN_NORM; part < STI_PARTS; part++)
            STI_TRY(add_part(b, (sti_part)part, l, err));
    for (size_t i = 0; i < b->n_places; i++) {
        b->place[i].at = b->used;
        b->used += (b->place[i].bytes + 4095) & ~(size_t)4095;
    }
    return STILL_OK;
}

static still_status check_memory(const builder *b, still_error *err)
{
    const size_t left = sti_memory_free();
    if (b->used <= left) return STILL_OK;
    return sti_fail(err, STILL_E_MEMORY,
                    "shape %s: %.1f GB of random weights are needed in memory, %.1f GB "
                    "are free: use a smaller shape",
                    b->shape->name, (double)b->used / 1e9, (double)left / 1e9);
}

/* The memory file that will hold everything. */
static still_status map_file(builder *b, still_error *err)
{
    sti_store *s = b->s;
    s->map = sti_alloc(1, sizeof *s->map);
    char *path = sti_strdup(s->path);
    const int fd = memfd_create("still", MFD_CLOEXEC);
    void *p = MAP_FAILED;
    if (s->map && path && fd >= 0 && ftruncate(fd, (off_t)b->used) == 0)
        p = mmap(NULL, b->used, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0) close(fd);
    if (p == MAP_FAILED) {
        free(path);
        return sti_fail_memory(err, s->path, b->used);
    }
    s->map[0] = (sti_map){.path = path, .data = p, .size = b->used};
    s->n_maps = 1;
    return STILL_OK;
}

static void fill(const builder *b)
{
    unsigned char *base = (unsigned char *)(uintptr_t)b->s->map[0].data;
    for (size_t i = 0; i < b->n_places; i++) {
        const place *p = &b->place[i];
        uint16_t *one = (uint16_t *)(void *)(base + p->at);
        if (p->columns)
            sti_random_weights(STI_F16, 1 / sqrt((double)p->columns),
                               sti_mix64((uint64_t)i), one, p->bytes);
        else
            for (size_t k = 0; k < p->bytes / 2; k++) one[k] = 0x3c00; /* 1 */
    }
    for (size_t i = 0; i < b->s->n_tensors; i++)
        b->s->tensor[i].data = base + b->place[b->place_of[i]].at;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const sti_tensor *)a)->name, ((const sti_tensor *)b)->name);
}

static still_status build(builder *b, still_error *err)
{
    sti_store *s = b->s;
    s->path = sti_strdup(b->shape->name);
    s->config = sti_shape_config(b->shape, "float16");
    b->capacity = STI_PARTS + 2 * STI_PARTS * (size_t)b->shape->layers;
    s->tensor = sti_alloc(b->capacity, sizeof *s->tensor);
    b->place = sti_alloc(b->capacity, sizeof *b->place);
    b->place_of = sti_alloc(b->capacity, sizeof *b->place_of);
    if (!s->path || !s->config || !s->tensor || !b->place || !b->place_of)
        return sti_fail_memory(err, b->shape->name, b->capacity * sizeof *s->tensor);
    STI_TRY(sti_shape_read(b->shape, &b->cfg, err));
    STI_TRY(add_all(b, err));
    STI_TRY(check_memory(b, err));
    STI_TRY(map_file(b, err));
    fill(b);
    qsort(s->tensor, s->n_tensors, sizeof *s->tensor, by_name);
    return STILL_OK;
}

static still_status unknown(const char *name, still_error *err)
{
    char known[512] = "";
    for (int i = 0, n = 0; i < N_SHAPES; i++)
        n += snprintf(known + n, sizeof known - (size_t)n, "%s%s", i ? ", " : "",
                      shapes[i].name);
    return sti_fail(err, STILL_E_ARG, "shape '%s' is not known (%s)", name, known);
}

still_status sti_shape_open(const char *name, bool own, sti_store *out,
                            still_error *err)
{
    *out = (sti_store){0};
    builder b = {.shape = sti_shape_find(name), .own = own, .s = out};
    if (!b.shape) return unknown(name, err);
    still_status st = build(&b, err);
    sti_config_free(&b.cfg);
    free(b.place);
    free(b.place_of);
    if (st != STILL_OK) sti_store_close(out);
    return st;
}
