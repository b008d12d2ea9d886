/* golden.h - cases of golden data: a safetensors file with its settings in the
 * metadata.
 *
 * Golden tensors are head-major [heads, T, width]; ours are token-major, so reading
 * transposes them. Reading stops at the first failure: `status` keeps it, later
 * reads return NULL, and a case checks once, after its last read. The case owns what
 * was read. */
#ifndef STI_EVAL_SELFTEST_GOLDEN_H
#define STI_EVAL_SELFTEST_GOLDEN_H

#include "eval/selftest/selftest.h"
#include "file/store.h"

typedef struct sti_golden {
    sti_store store;
    still_status status;
    still_error *err;
    void *held[96];
    int n_held;
} sti_golden;

still_status sti_golden_open(const char *path, sti_golden *g, still_error *err);
void sti_golden_close(sti_golden *g);

/* Runs `one` on every *.safetensors file of r->dir, by name; name has no extension. */
typedef still_status (*sti_golden_fn)(const sti_suite_run *r, const char *name,
                                      sti_golden *g, still_error *err);
still_status sti_golden_each(const sti_suite_run *r, sti_golden_fn one,
                             still_error *err);

/* Metadata: JSON values in strings. An integer must lie in [lo, hi]. */
int sti_golden_int(sti_golden *g, const char *key, int lo, int hi);
double sti_golden_real(sti_golden *g, const char *key);
bool sti_golden_flag(sti_golden *g, const char *key);
bool sti_golden_is(sti_golden *g, const char *key, const char *word);

/* Dimension i of a tensor, for files whose metadata does not say it. */
int sti_golden_dim(sti_golden *g, const char *name, int i);

/* n zeroed numbers. */
double *sti_golden_take(sti_golden *g, size_t n);
int32_t *sti_golden_take_int(sti_golden *g, size_t n);
/* A copy of an F64 tensor of n numbers. _opt: NULL, without failure, if it is absent.
 */
double *sti_golden_flat(sti_golden *g, const char *name, size_t n);
double *sti_golden_flat_opt(sti_golden *g, const char *name, size_t n);
/* [heads, T, width] (width 1: [heads, T]) as [T, heads, width]. */
double *sti_golden_rows(sti_golden *g, const char *name, int heads, int T, int width);
double *sti_golden_rows_opt(sti_golden *g, const char *name, int heads, int T,
                            int width);
int32_t *sti_golden_rows_int(sti_golden *g, const char *name, int heads, int T);

/* max |got - want| / max |want|; infinity where got is not a number. */
double sti_golden_error(const double *got, const double *want, size_t n);

#endif
