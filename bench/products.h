/* products.h - shared by the benchmarks of matrix products: weights, and the command
 * line that selects them. */
#ifndef BENCH_PRODUCTS_H
#define BENCH_PRODUCTS_H

#include "bench.h"
#include "ops/ops.h"

typedef struct matrix {
    sti_tensor t;
    sti_block src;
    sti_weight w;
} matrix;

/* [N,K] whose numbers the caller writes to src.p, then binds. */
static inline void new_source(matrix *m, sti_dtype type, int64_t N, int64_t K)
{
    size_t bytes;
    if (!sti_dtype_bytes(type, (uint64_t)(N * K), &bytes) ||
        !sti_block_new(&m->src, bytes))
        die("cannot make a matrix");
    m->t = (sti_tensor){.name = "bench",
                        .type = type,
                        .n_dims = 2,
                        .dim = {N, K},
                        .data = m->src.p,
                        .bytes = bytes,
                        .path = "memory"};
}

/* The backend may drop the source's pages. */
static inline void bind_source(const sti_backend *be, sti_dev *dev, matrix *m)
{
    still_error err;
    must(be->weight_new(dev, &m->t, &m->w, &err), &err);
}

static inline void discard(const sti_backend *be, sti_dev *dev, matrix *m)
{
    be->weight_free(dev, &m->w);
    sti_block_free(&m->src);
}

/* ---- Options ------------------------------------------------------------- */

enum { MAX_TYPES = 16, MAX_RUNS = 100 };
static const char *const all_isas[] = {"amx", "avx512", "avx2", "portable"};
enum { N_ISA = sizeof all_isas / sizeof *all_isas };

typedef struct options {
    const char *isa; /* NULL: all */
    int threads, runs, n_types;
    sti_dtype type[MAX_TYPES];
} options;

/* o holds the defaults. */
static inline void parse(int argc, char **argv, options *o)
{
    int n_types = 0;
    for (int i = 1; i < argc; i++) {
        const sti_dtype_info *info = sti_dtype_by_name(argv[i]);
        if (!strcmp(argv[i], "--isa") && i + 1 < argc) {
            o->isa = argv[++i];
        } else if (!strcmp(argv[i], "--threads") && i + 1 < argc) {
            o->threads = atoi(argv[++i]);
        } else if (!strcmp(argv[i], "--runs") && i + 1 < argc) {
            o->runs = atoi(argv[++i]);
        } else if (info && n_types < MAX_TYPES) {
            o->type[n_types++] = info->type;
        } else {
            fprintf(stderr,
                    "usage: %s [--isa NAME] [--threads N] [--runs N] [TYPE...]\n",
                    program_invocation_short_name);
            exit(2);
        }
    }
    if (o->runs < 1 || o->runs > MAX_RUNS) die("--runs: expected 1 to 100");
    if (n_types > 0) o->n_types = n_types;
}

static inline bool is_wanted(const options *o, const char *isa)
{
    return !o->isa || !strcmp(o->isa, isa);
}

#endif
