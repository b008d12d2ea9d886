/* quantize.c - rewrites a GGUF file with its matrices in another type.
 *
 * Matrices (two dimensions) are widened to float and encoded; everything else and
 * all metadata are copied, except general.file_type. A few rows are in memory at a
 * time, and pages of the source are dropped as soon as they are used. */
#include <getopt.h>
#include <math.h>

#include "common.h"

static const char *const TOOL = "quantize";
enum { CHUNK = 1 << 17 }; /* elements encoded at once */

static void usage(FILE *f)
{
    fprintf(f, "usage: quantize IN.gguf OUT.gguf TYPE [options]\n"
               "Writes IN with its matrices as TYPE: f32 f16 bf16 q4_0 q4_1 q5_0 q5_1 "
               "q8_0\n\n"
               "  --keep-embedding  leave token_embd and output as they are\n"
               "  --force           overwrite OUT\n");
}

typedef struct job {
    sti_store in;
    sti_tensor *order; /* [in.n_tensors], copies as they lie in the file */
    sti_dtype type;
    bool keep_embedding;
    progress bar; /* of source bytes */
} job;

static sti_dtype target(const job *j, const sti_tensor *t)
{
    bool embedding = strcmp(t->name, "token_embd.weight") == 0 ||
                     strcmp(t->name, "output.weight") == 0;
    return t->n_dims != 2 || (embedding && j->keep_embedding) ? t->type : j->type;
}

static int by_place(const void *a, const void *b)
{
    const char *x = ((const sti_tensor *)a)->data;
    const char *y = ((const sti_tensor *)b)->data;
    return (x > y) - (x < y);
}

static still_status put_meta(const job *j, sti_writer *w, still_error *err)
{
    for (size_t i = 0; i < j->in.n_meta; i++) {
        const sti_meta *m = &j->in.meta[i];
        /* The writer aligns to 32, the default; a copied key would contradict it. */
        if (strcmp(m->key, "general.file_type") == 0 ||
            strcmp(m->key, "general.alignment") == 0)
            continue;
        STI_TRY(sti_writer_meta_copy(w, m, err));
    }
    return sti_writer_meta_u32(w, "general.file_type", file_type(j->type), err);
}

static still_status put_headers(const job *j, sti_writer *w, still_error *err)
{
    for (size_t i = 0; i < j->in.n_tensors; i++) {
        const sti_tensor *t = &j->order[i];
        const sti_dtype_info *to = sti_dtype_find((int)target(j, t));
        int64_t cols = t->dim[t->n_dims - 1];
        if (cols % to->block != 0)
            return sti_fail(err, STILL_E_UNSUPPORTED,
                            "%s: tensor '%s' has rows of %lld elements, %s needs a "
                            "multiple of %d",
                            t->path, t->name, (long long)cols, to->name, to->block);
        STI_TRY(sti_writer_tensor(w, t->name, to->type, t->n_dims, t->dim, err));
    }
    return STILL_OK;
}

/* A NaN or infinity would silently corrupt a whole block. */
static bool all_finite(const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(x[i])) return false;
    return true;
}

/* Rows in groups of about CHUNK elements; a group is a run of blocks like any row. */
static still_status put_rows(job *j, sti_writer *w, const sti_tensor *t, sti_dtype to,
                             still_error *err)
{
    int64_t rows = t->dim[0], cols = t->dim[1];
    int64_t bunch = cols >= CHUNK ? 1 : CHUNK / cols;
    size_t in_bytes = t->bytes / (size_t)rows, out_bytes;
    if (!sti_dtype_bytes(to, (uint64_t)cols, &out_bytes))
        return sti_fail(err, STILL_E_LIMIT, "%s: tensor '%s' is too large", t->path,
                        t->name);
    float *x = sti_alloc((size_t)(bunch * cols), sizeof *x);
    unsigned char *y = sti_alloc((size_t)bunch, out_bytes);
    still_status status =
        x && y ? STILL_OK : sti_fail_memory(err, t->name, (size_t)cols * sizeof *x);
    for (int64_t r = 0; status == STILL_OK && r < rows; r += bunch) {
        int64_t n = rows - r < bunch ? rows - r : bunch;
        sti_dequant(t->type, (const char *)t->data + (size_t)r * in_bytes, x, n * cols);
        if (!all_finite(x, n * cols)) {
            status =
                sti_fail(err, STILL_E_NUMERIC,
                         "%s: tensor '%s' holds a NaN or an infinity near row %lld",
                         t->path, t->name, (long long)r);
            break;
        }
        sti_quant(to, x, y, n * cols);
        status = sti_writer_data(w, y, (size_t)n * out_bytes, err);
        progress_add(&j->bar, (size_t)n * in_bytes);
    }
    free(x);
    free(y);
    return status;
}

static still_status put_tensor(job *j, sti_writer *w, const sti_tensor *t,
                               still_error *err)
{
    sti_dtype to = target(j, t);
    still_status status;
    if (to == t->type) {
        status = sti_writer_data(w, t->data, t->bytes, err);
        progress_add(&j->bar, t->bytes);
    } else {
        status = put_rows(j, w, t, to, err);
    }
    sti_map_drop(t->data, t->bytes);
    return status;
}

/* Output size: sum over tensors, to ask for room before writing. */
static uint64_t output_bytes(const job *j)
{
    uint64_t total = 0;
    for (size_t i = 0; i < j->in.n_tensors; i++) {
        const sti_tensor *t = &j->in.tensor[i];
        const sti_dtype_info *from = sti_dtype_find((int)t->type);
        const sti_dtype_info *to = sti_dtype_find((int)target(j, t));
        total += t->bytes / (size_t)from->bytes * (size_t)from->block *
                 (uint64_t)to->bytes / (uint64_t)to->block;
    }
    return total;
}

static still_status write_all(job *j, const char *out, still_error *err)
{
    sti_writer *w;
    STI_TRY(sti_writer_gguf(out, &w, err));
    still_status status = put_meta(j, w, err);
    if (status == STILL_OK) status = put_headers(j, w, err);
    for (size_t i = 0; status == STILL_OK && i < j->in.n_tensors; i++)
        status = put_tensor(j, w, &j->order[i], err);
    if (status == STILL_OK) return sti_writer_finish(w, err);
    sti_writer_abort(w);
    return status;
}

static still_status run(job *j, const char *in, const char *out, still_error *err)
{
    STI_TRY(sti_store_open(in, &j->in, err));
    if (!j->in.is_gguf)
        return sti_fail(err, STILL_E_UNSUPPORTED, "%s: expected a GGUF file", in);
    j->order = sti_alloc(j->in.n_tensors, sizeof *j->order);
    if (!j->order) return sti_fail_memory(err, in, j->in.n_tensors * sizeof *j->order);
    uint64_t bytes = 0;
    for (size_t i = 0; i < j->in.n_tensors; i++) {
        j->order[i] = j->in.tensor[i];
        bytes += j->in.tensor[i].bytes;
    }
    if (j->in.n_tensors) qsort(j->order, j->in.n_tensors, sizeof *j->order, by_place);
    STI_TRY(check_free_space(out, output_bytes(j) + (16 << 20), err));
    progress_start(&j->bar, TOOL, bytes);
    return write_all(j, out, err);
}

int main(int argc, char **argv)
{
    static const struct option LONG[] = {{"keep-embedding", no_argument, NULL, 'k'},
                                         {"force", no_argument, NULL, 'F'},
                                         {"help", no_argument, NULL, 'h'},
                                         {0}};
    job j = {0};
    bool force = false;
    for (int c; (c = getopt_long(argc, argv, "h", LONG, NULL)) != -1;) {
        switch (c) {
        case 'k': j.keep_embedding = true; break;
        case 'F': force = true; break;
        case 'h': usage(stdout); return 0;
        default: usage(stderr); return 2;
        }
    }
    if (argc - optind != 3) {
        usage(stderr);
        return 2;
    }
    const char *in = argv[optind], *out = argv[optind + 1], *name = argv[optind + 2];
    const sti_dtype_info *type = sti_dtype_by_name(name);
    if (!type || !sti_quant(type->type, NULL, NULL, 0))
        return complain(TOOL, 2, "cannot write type '%s'; --help lists what can", name);
    if (!force && access(out, F_OK) == 0)
        return complain(TOOL, 1, "%s exists; --force overwrites it", out);
    still_error err;
    j.type = type->type;
    still_status status = run(&j, in, out, &err);
    free(j.order);
    sti_store_close(&j.in);
    return status == STILL_OK ? 0 : complain(TOOL, 1, "%s", err.text);
}
