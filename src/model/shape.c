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
#include "model/config.h"

static const sti_shape shapes[] = {
    /* name, family, layers, hidden, ffn, heads, kv, head, vocab, ctx, theta, eps, tied,
     * rope factor, window */
    {"smollm2-135m", STI_LLAMA, 30, 576, 1536, 9, 3, 64, 49152, 8192, 1e5, 1e-5, true,
     0, 0},
    {"smollm2-360m", STI_LLAMA, 32, 960, 2560, 15, 5, 64, 49152, 8192, 1e5, 1e-5, true,
     0, 0},
    {"smollm2-1.7b", STI_LLAMA, 24, 2048, 8192, 32, 32, 64, 49152, 8192, 1.3e5, 1e-5,
     true, 0, 0},
    {"llama3.2-1b", STI_LLAMA, 16, 2048, 8192, 32, 8, 64, 128256, 131072, 5e5, 1e-5,
     true, 32, 0},
    {"llama3.2-3b", STI_LLAMA, 28, 3072, 8192, 24, 8, 128, 128256, 131072, 5e5, 1e-5,
     true, 32, 0},
    {"llama3-8b", STI_LLAMA, 32, 4096, 14336, 32, 8, 128, 128256, 8192, 5e5, 1e-5,
     false, 0, 0},
    {"llama3.1-8b", STI_LLAMA, 32, 4096, 14336, 32, 8, 128, 128256, 131072, 5e5, 1e-5,
     false, 8, 0},
    {"llama3-70b", STI_LLAMA, 80, 8192, 28672, 64, 8, 128, 128256, 8192, 5e5, 1e-5,
     false, 0, 0},
    {"llama3.1-70b", STI_LLAMA, 80, 8192, 28672, 64, 8, 128, 128256, 131072, 5e5, 1e-5,
     false, 8, 0},
    {"mistral-7b", STI_MISTRAL, 32, 4096, 14336, 32, 8, 128, 32000, 32768, 1e4, 1e-5,
     false, 0, 4096},
    {"qwen2-0.5b", STI_QWEN2, 24, 896, 4864, 14, 2, 64, 151936, 131072, 1e6, 1e-6, true,
     0, 0},
    {"qwen2-1.5b", STI_QWEN2, 28, 1536, 8960, 12, 2, 128, 151936, 131072, 1e6, 1e-6,
     true, 0, 0},
    {"qwen2-7b", STI_QWEN2, 28, 3584, 18944, 28, 4, 128, 152064, 131072, 1e6, 1e-6,
     false, 0, 0},
    {"tiny", STI_LLAMA, 2, 256, 512, 4, 2, 64, 512, 2048, 1e4, 1e-5, false, 0, 0},
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
    static const char *const class_of[] = {"LlamaForCausalLM", "MistralForCausalLM",
                                           "Qwen2ForCausalLM"};
    static const char *const type_of[] = {"llama", "mistral", "qwen2"};
    json_t *c = json_pack(
        "{s:[s], s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:f, s:s, s:b}",
        "architectures", class_of[s->family], "model_type", type_of[s->family],
        "torch_dtype", torch_dtype, "hidden_size", s->hidden, "intermediate_size",
        s->ffn, "num_hidden_layers", s->layers, "num_attention_heads", s->heads,
        "num_key_value_heads", s->kv_heads, "head_dim", s->head_dim, "vocab_size",
        s->vocab, "max_position_embeddings", s->ctx, "rope_theta", s->theta,
        "rms_norm_eps", s->eps, "hidden_act", "silu", "tie_word_embeddings", s->tied);
    if (s->window) sti_json_set(&c, "sliding_window", json_integer(s->window));
    if (s->rope_factor > 0)
        sti_json_set(&c, "rope_scaling",
                     json_pack("{s:s, s:f, s:f, s:f, s:i}", "rope_type", "llama3",
                               "factor", s->rope_factor, "low_freq_factor", 1.0,
                               "high_freq_factor", 4.0,
                               "original_max_position_embeddings", 8192));
    return c;
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

/* Where tensors lie: each for itself, or one place for all with rows of a length. */
typedef struct place {
    int64_t columns; /* 0: norms, which share theirs always */
    size_t at, bytes;
} place;

typedef struct builder {
    const sti_shape *shape;
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

static bool is_norm(sti_part part)
{
    return part == STI_PART_ATTN_NORM || part == STI_PART_FFN_NORM ||
           part == STI_PART_FINAL_NORM;
}

/* rows 0: a vector. */
static still_status add(builder *b, sti_part part, int layer, bool bias, int64_t rows,
                        int64_t columns, still_error *err)
{
    char name[128];
    sti_store *s = b->s;
    sti_tensor *t = &s->tensor[s->n_tensors];
    sti_config_tensor_name(s, part, layer, bias, name, sizeof name);
    *t = (sti_tensor){.name = sti_strdup(name),
                      .type = STI_F16,
                      .n_dims = rows ? 2 : 1,
                      .dim = {rows ? rows : columns, rows ? columns : 0},
                      .bytes = (size_t)(rows ? rows : 1) * (size_t)columns * 2,
                      .path = s->path};
    if (!t->name) return sti_fail_memory(err, name, sizeof name);
    b->place_of[s->n_tensors++] = find_place(b, is_norm(part) ? 0 : columns, t->bytes);
    s->file_bytes += t->bytes;
    return STILL_OK;
}

static still_status add_layer(builder *b, int l, still_error *err)
{
    const sti_shape *s = b->shape;
    const int64_t q = (int64_t)s->heads * s->head_dim,
                  kv = (int64_t)s->kv_heads * s->head_dim;
    STI_TRY(add(b, STI_PART_ATTN_NORM, l, false, 0, s->hidden, err));
    STI_TRY(add(b, STI_PART_Q, l, false, q, s->hidden, err));
    STI_TRY(add(b, STI_PART_K, l, false, kv, s->hidden, err));
    STI_TRY(add(b, STI_PART_V, l, false, kv, s->hidden, err));
    if (s->family == STI_QWEN2) {
        STI_TRY(add(b, STI_PART_Q, l, true, 0, q, err));
        STI_TRY(add(b, STI_PART_K, l, true, 0, kv, err));
        STI_TRY(add(b, STI_PART_V, l, true, 0, kv, err));
    }
    STI_TRY(add(b, STI_PART_O, l, false, s->hidden, q, err));
    STI_TRY(add(b, STI_PART_FFN_NORM, l, false, 0, s->hidden, err));
    STI_TRY(add(b, STI_PART_GATE, l, false, s->ffn, s->hidden, err));
    STI_TRY(add(b, STI_PART_UP, l, false, s->ffn, s->hidden, err));
    return add(b, STI_PART_DOWN, l, false, s->hidden, s->ffn, err);
}

static still_status add_all(builder *b, still_error *err)
{
    const sti_shape *s = b->shape;
    STI_TRY(add(b, STI_PART_EMBED, 0, false, s->vocab, s->hidden, err));
    STI_TRY(add(b, STI_PART_FINAL_NORM, 0, false, 0, s->hidden, err));
    if (!s->tied) STI_TRY(add(b, STI_PART_HEAD, 0, false, s->vocab, s->hidden, err));
    for (int l = 0; l < s->layers; l++) STI_TRY(add_layer(b, l, err));
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
    b->capacity = 3 + 12 * (size_t)b->shape->layers;
    s->tensor = sti_alloc(b->capacity, sizeof *s->tensor);
    b->place = sti_alloc(b->capacity, sizeof *b->place);
    b->place_of = sti_alloc(b->capacity, sizeof *b->place_of);
    if (!s->path || !s->config || !s->tensor || !b->place || !b->place_of)
        return sti_fail_memory(err, b->shape->name, b->capacity * sizeof *s->tensor);
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
    free(b.place);
    free(b.place_of);
    if (st != STILL_OK) sti_store_close(out);
    return st;
}
