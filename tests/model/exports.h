/* exports.h - what the tests of exports share: an adapter of random numbers, and how far
 * the logits of two models are from each other. */
#ifndef TESTS_EXPORTS_H
#define TESTS_EXPORTS_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../run.h"

#include "base/random.h"
#include "model/model.h"

enum { T = 96, RANK = 4 };
#define FOLDER FIXTURES "/train/model"

static char scratch[] = "/tmp/still-export-XXXXXX";

static char *in_scratch(const char *name)
{
    static char path[32][256];
    static int next;
    char *p = path[next++ % 32];
    snprintf(p, sizeof path[0], "%s/%s", scratch, name);
    return p;
}

static inline bool exists(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0;
}

static inline float noise(uint64_t i)
{
    return (float)(sti_mix64(i) >> 40) / (float)(1 << 23) - 1; /* [-1, 1) */
}

/* An adapter with random numbers in every entry. */
static inline void make_adapter(const char *base, const char *method, const char *dir,
                                int first_layer)
{
    still_error e;
    still_model *m;
    sti_adapter *a;
    sti_adapter_spec spec = {.lora = {RANK, 8, 31}, .base_name = "the base"};
    must(still_model_open(base, NULL, &m, &e), &e);
    must(still_method_init(&spec.method, method, 8, &e), &e);
    if (strcmp(method, "still") == 0) {
        spec.method.select = 2;
        spec.method.cap = 8;
    }
    spec.method.first_layer = first_layer;
    sti_model_fingerprint(m, false, spec.base);
    const sti_adapter_home home = sti_model_home(m);
    must(sti_adapter_new(&home, &spec, &a, &e), &e);
    for (size_t i = 0; i < a->n_entries; i++) {
        const sti_adapter_entry *t = &a->entry[i];
        for (size_t j = 0; j < t->n; j++)
            a->value[t->at + j] += 0.15f * noise(i * 1000003 + j);
    }
    assert_int_equal(mkdir(dir, 0777), 0);
    must(sti_adapter_write(a, dir, &e), &e);
    sti_adapter_free(a);
    still_model_free(m);
}

static inline still_status export(const char *model, const char *adapter,
                                  const char *format, const char *dtype,
                                  const char *path, still_error *e)
{
    return still_export(model,
                        &STILL_PARAMS(still_export_params, .format = format,
                                      .path = path, .adapter = adapter, .dtype = dtype),
                        e);
}

/* Logits after T tokens, in two pieces, so that chunks leave the window. merged: what the
 * model must say of its types. */
static inline void opened_logits(const char *model, const still_model_params *p,
                                 const char *merged, float *out, int *vocab)
{
    still_error e;
    still_model *m;
    still_session *s;
    int32_t tok[T];
    must(still_model_open(model, p, &m, &e), &e);
    const char *types = still_model_get_info(m)->merged;
    assert_string_equal(types ? types : "", merged ? merged : "");
    *vocab = still_model_get_info(m)->vocab;
    must(still_session_new(
             m, &STILL_PARAMS(still_session_params, .ctx = T, .cache = "f32"), &s, &e),
         &e);
    for (int i = 0; i < T; i++)
        tok[i] = (int32_t)(sti_mix64((uint64_t)i) % (uint64_t)*vocab);
    must(still_session_feed(s, tok, T / 2, &e), &e);
    must(still_session_feed(s, tok + T / 2, T - T / 2, &e), &e);
    memcpy(out, still_session_logits(s), (size_t)*vocab * sizeof *out);
    still_session_free(s);
    still_model_free(m);
}

static inline void logits_of(const char *model, const char *adapter, float *out,
                             int *vocab)
{
    opened_logits(
        model, &STILL_PARAMS(still_model_params, .adapter = adapter, .no_merge = true),
        NULL, out, vocab);
}

static inline double distance(const char *model, const char *adapter, const char *other,
                              const char *other_adapter)
{
    static float a[1024], b[1024];
    int n, k;
    double worst = 0, size = 0;
    logits_of(model, adapter, a, &n);
    logits_of(other, other_adapter, b, &k);
    assert_int_equal(n, k);
    for (int i = 0; i < n; i++) {
        worst = fmax(worst, fabs((double)a[i] - b[i]));
        size = fmax(size, fabs(a[i]));
    }
    assert_true(size > 0.1);
    return worst;
}

static inline int begin(void **state)
{
    (void)state;
    return mkdtemp(scratch) ? 0 : -1;
}

static inline int end(void **state)
{
    (void)state;
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", scratch);
    return system(command);
}

#endif
