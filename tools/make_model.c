/* make_model.c - writes a random model of a published shape, as GGUF or as a Hugging
 * Face folder, so that full-size files can be tested without anyone's weights.
 *
 * It first plans all tensors and their sizes, so that impossible types and a full
 * disk are found before a byte is written, then streams the plan. */
#include <getopt.h>
#include <limits.h>
#include <sys/stat.h>

#include "base/buf.h"
#include "common.h"
#include "model/shape.h"
#include "vocab.h"
#include "weights.h"

static const char *const TOOL = "make-model";
static const size_t SHARD_BYTES = 5000000000; /* at most, in a Hugging Face folder */
enum { CHUNK = 1 << 18 };                     /* elements made at once */

typedef enum role { WEIGHT, NORM, BIAS, ROPE, ROPE_LONG } role;

typedef struct item {
    char name[80];
    role role;
    sti_dtype type;
    int n_dims;
    int64_t dim[2];
    size_t bytes;
} item;

typedef struct plan {
    sti_shape shape;
    sti_config cfg;
    bool gguf;
    sti_dtype type;
    bool mixed; /* Q6_K where it helps most, see in_more_bits */
    item *item;
    size_t n, capacity;
    uint64_t bytes;
} plan;

/* ---- The plan ------------------------------------------------------------ */

/* Whether llama.cpp's mixes (Q4_K_M, Q5_K_M) give a matrix more bits: the output, and
 * values and down in the first and the last eighth of the layers and in a third of those
 * between. */
static bool in_more_bits(const sti_shape *s, const char *name, int layer)
{
    if (strstr(name, "attn_v.weight") || strstr(name, "ffn_down.weight")) {
        const int eighth = s->layers / 8;
        return layer < eighth || layer >= 7 * s->layers / 8 ||
               (layer - eighth) % 3 == 2;
    }
    return strcmp(name, s->tied ? "token_embd.weight" : "output.weight") == 0;
}

static still_status add(plan *p, role what, int64_t rows, int64_t cols,
                        still_error *err, const char *name, int layer)
{
    if (p->n == p->capacity) {
        size_t capacity = p->capacity ? 2 * p->capacity : 256;
        item *grown = sti_grow(p->item, capacity, sizeof *grown);
        if (!grown) return sti_fail_memory(err, "plan", capacity * sizeof *grown);
        p->item = grown;
        p->capacity = capacity;
    }
    item it = {.role = what, .n_dims = rows ? 2 : 1};
    snprintf(it.name, sizeof it.name, "%s", name);
    it.type = p->gguf && what != WEIGHT ? STI_F32 : p->type;
    if (p->mixed && what == WEIGHT && in_more_bits(&p->shape, name, layer))
        it.type = STI_Q6_K;
    it.dim[0] = rows ? rows : cols;
    it.dim[1] = rows ? cols : 1;
    const sti_dtype_info *info = sti_dtype_find((int)it.type);
    if (cols % info->block != 0)
        return sti_fail(err, STILL_E_ARG,
                        "tensor '%s' has rows of %lld elements, %s needs a multiple of "
                        "%d: choose another type",
                        it.name, (long long)cols, info->name, info->block);
    uint64_t elements = (uint64_t)(rows ? rows : 1) * (uint64_t)cols;
    if (!sti_dtype_bytes(it.type, elements, &it.bytes))
        return sti_fail(err, STILL_E_ARG, "tensor '%s' is too large", it.name);
    p->bytes += it.bytes;
    p->item[p->n++] = it;
    return STILL_OK;
}

/* A part of a layer; where parts are fused, the first brings them all. */
static still_status add_part(plan *p, sti_part part, int layer, still_error *err)
{
    const sti_config *c = &p->cfg;
    sti_part_shape s = sti_config_shape(c, part);
    char name[80];
    if (!sti_config_has(c, part)) return STILL_OK;
    sti_config_fused_name(c, p->gguf, part, layer, name, sizeof name);
    if (name[0] && part == STI_PART_Q)
        s.rows += 2 * sti_config_shape(c, STI_PART_K).rows;
    else if (name[0])
        s.rows *= 2;
    else if (sti_config_joined(c, part))
        return STILL_OK;
    else
        sti_config_tensor_name(c, p->gguf, part, layer, false, name, sizeof name);
    STI_TRY(add(p, s.cols ? WEIGHT : NORM, s.cols ? s.rows : 0,
                s.cols ? s.cols : s.rows, err, name, layer));
    if (!sti_shape_biased(&p->shape, part)) return STILL_OK;
    sti_config_tensor_name(c, p->gguf, part, layer, true, name, sizeof name);
    return add(p, BIAS, 0, s.rows, err, name, layer);
}

static still_status plan_tensors(plan *p, still_error *err)
{
    const sti_config *c = &p->cfg;
    const int half = c->rotary / 2;
    STI_TRY(add_part(p, STI_PART_EMBED, 0, err));
    if (p->gguf && c->long_from) {
        STI_TRY(add(p, ROPE, 0, half, err, "rope_factors_short.weight", 0));
        STI_TRY(add(p, ROPE_LONG, 0, half, err, "rope_factors_long.weight", 0));
    } else if (p->gguf && sti_config_divided(c)) {
        STI_TRY(add(p, ROPE, 0, half, err, "rope_freqs.weight", 0));
    }
    for (int l = 0; l < c->layers; l++)
        for (int part = STI_PART_ATTN_NORM; part < STI_PARTS; part++)
            STI_TRY(add_part(p, (sti_part)part, l, err));
    STI_TRY(add_part(p, STI_PART_FINAL_NORM, 0, err));
    return add_part(p, STI_PART_HEAD, 0, err);
}

/* ---- Data ---------------------------------------------------------------- */

static still_status put_item(sti_writer *w, const plan *p, const item *it, rng *r,
                             float *x, unsigned char *bytes, progress *bar,
                             still_error *err)
{
    const sti_dtype_info *info = sti_dtype_find((int)it->type);
    size_t left = it->bytes / (size_t)info->bytes * (size_t)info->block;
    /* Norms are about 1 as they are used. */
    float mean =
        it->role == NORM ? 1 - (p->gguf ? 0 : (float)p->cfg.form.norm_offset) : 0;
    float spread = it->role == WEIGHT ? 1 / sqrtf((float)it->dim[1]) : 0.02f;
    while (left > 0) {
        size_t n = left < CHUNK ? left : CHUNK;
        size_t size = n / (size_t)info->block * (size_t)info->bytes;
        if (info->block > 1) {
            fill_bits(r, bytes, size);
            set_scales(it->type, bytes, n / (size_t)info->block, spread);
        } else {
            if (it->role == ROPE || it->role == ROPE_LONG)
                for (size_t i = 0; i < n; i++)
                    x[i] = (float)sti_config_divisor(
                        &p->cfg, it->role == ROPE ? STI_TABLE_GLOBAL : STI_TABLE_LONG,
                        (int)i);
            else
                fill_floats(r, x, n, mean, spread);
            sti_quant(it->type, x, bytes, (int64_t)n);
        }
        STI_TRY(sti_writer_data(w, bytes, size, err));
        progress_add(bar, size);
        left -= n;
    }
    return STILL_OK;
}

/* Headers, then data of items [lo, hi). */
static still_status put_items(sti_writer *w, const plan *p, size_t lo, size_t hi,
                              rng *r, progress *bar, still_error *err)
{
    for (size_t i = lo; i < hi; i++) {
        const item *it = &p->item[i];
        STI_TRY(sti_writer_tensor(w, it->name, it->type, it->n_dims, it->dim, err));
    }
    float *x = sti_alloc(CHUNK, sizeof *x);
    unsigned char *bytes = sti_alloc(CHUNK, sizeof(float));
    still_status status =
        x && bytes ? STILL_OK : sti_fail_memory(err, "buffers", CHUNK * sizeof(float));
    for (size_t i = lo; status == STILL_OK && i < hi; i++)
        status = put_item(w, p, &p->item[i], r, x, bytes, bar, err);
    free(x);
    free(bytes);
    return status;
}

/* ---- GGUF ---------------------------------------------------------------- */

static still_status put_meta(sti_writer *w, const plan *p, still_error *err)
{
    const sti_shape *s = &p->shape;
    STI_TRY(sti_config_put_gguf(&p->cfg, w, err));
    STI_TRY(sti_writer_meta_u32(w, "general.file_type", file_type(p->type), err));
    const bool spm = strncmp(s->name, "mistral", 7) == 0;
    const bool small =
        strncmp(s->name, "smollm2", 7) == 0 || strcmp(s->name, "tiny") == 0;
    return put_vocab(w, s->vocab, !spm && !small, err);
}

static still_status write_gguf(const plan *p, const char *path, rng *r, progress *bar,
                               still_error *err)
{
    sti_writer *w;
    STI_TRY(sti_writer_gguf(path, &w, err));
    still_status status = put_meta(w, p, err);
    if (status == STILL_OK) status = put_items(w, p, 0, p->n, r, bar, err);
    if (status == STILL_OK) return sti_writer_finish(w, err);
    sti_writer_abort(w);
    return status;
}

/* ---- Hugging Face folder ------------------------------------------------- */

static json_t *make_config(const plan *p)
{
    return sti_shape_config(&p->shape, p->type == STI_F32   ? "float32"
                                       : p->type == STI_F16 ? "float16"
                                                            : "bfloat16");
}

static still_status put_json(const char *dir, const char *name, json_t *v,
                             still_error *err)
{
    sti_buf path = {0};
    sti_buf_printf(&path, "%s/%s", dir, name);
    char *text = v ? sti_json_text(v, JSON_INDENT(2) | JSON_PRESERVE_ORDER) : NULL;
    still_status status = text && !path.failed ? sti_write_text(path.p, text, err)
                                               : sti_fail_memory(err, dir, 0);
    free(text);
    sti_buf_free(&path);
    json_decref(v);
    return status;
}

static still_status remove_in(const char *dir, const char *name, still_error *err)
{
    sti_buf path = {0};
    sti_buf_printf(&path, "%s/%s", dir, name);
    bool ok = !path.failed && (unlink(path.p) == 0 || errno == ENOENT);
    sti_buf_free(&path);
    return ok ? STILL_OK : sti_fail(err, STILL_E_IO, "%s/%s: cannot remove", dir, name);
}

/* Items [lo, hi) as shard k of n; their places go into weight_map. */
static still_status put_shard(const plan *p, const char *dir, size_t lo, size_t hi,
                              int k, int n, json_t **weight_map, rng *r, progress *bar,
                              still_error *err)
{
    char name[64] = "model.safetensors";
    sti_buf path = {0};
    if (n > 1) snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", k, n);
    sti_buf_printf(&path, "%s/%s", dir, name);
    if (path.failed) return sti_fail_memory(err, dir, 64);
    json_t *metadata = json_pack("{s:s}", "format", "pt");
    sti_writer *w = NULL;
    still_status status = metadata ? sti_writer_safetensors(path.p, metadata, &w, err)
                                   : sti_fail_memory(err, dir, 0);
    json_decref(metadata);
    sti_buf_free(&path);
    if (status != STILL_OK) return status;
    for (size_t i = lo; i < hi; i++)
        sti_json_set(weight_map, p->item[i].name, json_string(name));
    status = put_items(w, p, lo, hi, r, bar, err);
    if (status == STILL_OK) return sti_writer_finish(w, err);
    sti_writer_abort(w);
    return status;
}

/* End of the shard that begins at lo: as many items as fit, one at least. */
static size_t shard_end(const plan *p, size_t lo)
{
    size_t hi = lo, bytes = 0;
    while (hi < p->n && (hi == lo || bytes + p->item[hi].bytes <= SHARD_BYTES))
        bytes += p->item[hi++].bytes;
    return hi;
}

static still_status write_folder(const plan *p, const char *dir, rng *r, progress *bar,
                                 still_error *err)
{
    if (mkdir(dir, 0777) != 0 && errno != EEXIST)
        return sti_fail(err, STILL_E_IO, "%s: cannot create: %s", dir, strerror(errno));
    static const char *const STALE[] = {"config.json", "model.safetensors",
                                        "model.safetensors.index.json"};
    for (size_t i = 0; i < sizeof STALE / sizeof *STALE; i++)
        STI_TRY(remove_in(dir, STALE[i], err)); /* not a model until it is complete */
    int n = 0, k = 0;
    for (size_t lo = 0; lo < p->n; lo = shard_end(p, lo)) n++;
    json_t *weight_map = json_object();
    still_status status = STILL_OK;
    for (size_t lo = 0; status == STILL_OK && lo < p->n; lo = shard_end(p, lo))
        status =
            put_shard(p, dir, lo, shard_end(p, lo), ++k, n, &weight_map, r, bar, err);
    if (status == STILL_OK && n > 1)
        status = put_json(dir, "model.safetensors.index.json",
                          json_pack("{s:{s:I}, s:O}", "metadata", "total_size",
                                    (json_int_t)p->bytes, "weight_map", weight_map),
                          err);
    json_decref(weight_map);
    if (status != STILL_OK) return status;
    return put_json(dir, "config.json", make_config(p),
                    err); /* last: now it is a model */
}

/* ---- Command line -------------------------------------------------------- */

static void usage(FILE *f)
{
    fprintf(f, "usage: make-model SHAPE OUT [options]\n"
               "Writes a random model of a published shape.\n\n"
               "  --type TYPE    of the matrices (default q4_0; bf16 in safetensors):\n"
               "                ");
    for (int i = 0; sti_dtype_at(i) && sti_dtype_at(i)->type != STI_F64; i++)
        fprintf(f, " %s", sti_dtype_at(i)->name);
    fprintf(
        f,
        "\n"
        "                 or a mix with q6_k, as llama.cpp makes it: q4_k_m q5_k_m\n"
        "  --format F     gguf (default), or safetensors: OUT is then a folder\n"
        "  --seed N       of the random numbers (default 1)\n"
        "  --layers N     instead of the shape's own\n"
        "  --vocab N      instead of the shape's own, at least %d\n"
        "  --force        overwrite OUT\n\nshapes:",
        MIN_VOCAB);
    for (int i = 0; sti_shape_at(i); i++)
        fprintf(f, "%s%s", i % 6 ? " " : "\n  ", sti_shape_at(i)->name);
    fputc('\n', f);
}

static bool parse_int(const char *s, long min, long max, long *out)
{
    char *end;
    errno = 0;
    *out = strtol(s, &end, 10);
    return errno == 0 && end != s && *end == 0 && *out >= min && *out <= max;
}

typedef struct options {
    const char *shape, *out, *type, *format;
    long seed, layers, vocab; /* 0: the shape's own */
    bool force;
} options;

/* Exit status, or -1 to continue. */
static int parse(int argc, char **argv, options *o)
{
    static const struct option LONG[] = {{"type", required_argument, NULL, 't'},
                                         {"format", required_argument, NULL, 'f'},
                                         {"seed", required_argument, NULL, 's'},
                                         {"layers", required_argument, NULL, 'l'},
                                         {"vocab", required_argument, NULL, 'v'},
                                         {"force", no_argument, NULL, 'F'},
                                         {"help", no_argument, NULL, 'h'},
                                         {0}};
    *o = (options){.format = "gguf", .seed = 1};
    for (int c; (c = getopt_long(argc, argv, "h", LONG, NULL)) != -1;) {
        bool ok = true;
        switch (c) {
        case 't': o->type = optarg; break;
        case 'f': o->format = optarg; break;
        case 's': ok = parse_int(optarg, 0, LONG_MAX, &o->seed); break;
        case 'l': ok = parse_int(optarg, 1, 1000, &o->layers); break;
        case 'v': ok = parse_int(optarg, MIN_VOCAB, 10000000, &o->vocab); break;
        case 'F': o->force = true; break;
        case 'h': usage(stdout); return 0;
        default: usage(stderr); return 2;
        }
        if (!ok) return complain(TOOL, 2, "'%s' is not a number in range", optarg);
    }
    if (argc - optind != 2) {
        usage(stderr);
        return 2;
    }
    o->shape = argv[optind];
    o->out = argv[optind + 1];
    return -1;
}

static int make_plan(const options *o, plan *p, still_error *err)
{
    const sti_shape *s = sti_shape_find(o->shape);
    if (!s) return complain(TOOL, 2, "unknown shape '%s'; --help lists them", o->shape);
    p->gguf = strcmp(o->format, "gguf") == 0;
    if (!p->gguf && strcmp(o->format, "safetensors") != 0)
        return complain(TOOL, 2, "unknown format '%s', expected gguf or safetensors",
                        o->format);
    const char *name = o->type ? o->type : p->gguf ? "q4_0" : "bf16";
    p->mixed = strcmp(name, "q4_k_m") == 0 || strcmp(name, "q5_k_m") == 0;
    const sti_dtype_info *type =
        p->mixed ? sti_dtype_find(name[1] == '4' ? STI_Q4_K : STI_Q5_K)
                 : sti_dtype_by_name(name);
    if (!type || type->type == STI_F64 || type->type == STI_I32 ||
        type->type == STI_I64)
        return complain(TOOL, 2, "unknown type '%s'; --help lists them", name);
    if (!p->gguf && type->block > 1)
        return complain(TOOL, 2, "safetensors hold f32, f16 or bf16, not %s", name);
    p->shape = *s;
    p->type = type->type;
    if (o->layers) p->shape.layers = (int)o->layers;
    if (o->vocab) p->shape.vocab = (int)o->vocab;
    if (sti_shape_read(&p->shape, &p->cfg, err) != STILL_OK ||
        plan_tensors(p, err) != STILL_OK)
        return complain(TOOL, 1, "%s", err->text);
    return -1;
}

int main(int argc, char **argv)
{
    options o;
    plan p = {0};
    still_error err;
    int status = parse(argc, argv, &o);
    if (status >= 0) return status;
    status = make_plan(&o, &p, &err);
    if (status < 0 && !o.force && access(o.out, F_OK) == 0)
        status = complain(TOOL, 1, "%s exists; --force overwrites it", o.out);
    if (status < 0) {
        rng r;
        progress bar;
        rng_seed(&r, (uint64_t)o.seed);
        progress_start(&bar, TOOL, p.bytes);
        still_status s = check_free_space(o.out, p.bytes + (16 << 20), &err);
        if (s == STILL_OK)
            s = p.gguf ? write_gguf(&p, o.out, &r, &bar, &err)
                       : write_folder(&p, o.out, &r, &bar, &err);
        status = s == STILL_OK ? 0 : complain(TOOL, 1, "%s", err.text);
    }
    sti_config_free(&p.cfg);
    free(p.item);
    return status;
}
