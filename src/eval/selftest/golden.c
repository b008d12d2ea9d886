/* golden.c - see golden.h. */
#include "eval/selftest/golden.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

still_status sti_golden_open(const char *path, sti_golden *g, still_error *err)
{
    *g = (sti_golden){.err = err};
    STI_TRY(sti_store_open(path, &g->store, err));
    if (json_is_object(g->store.st_meta)) return STILL_OK;
    sti_store_close(&g->store);
    return sti_fail(err, STILL_E_FORMAT, "%s: no metadata, expected a golden case",
                    path);
}

void sti_golden_close(sti_golden *g)
{
    for (int i = 0; i < g->n_held; i++) free(g->held[i]);
    sti_store_close(&g->store);
}

/* ---- The cases of a folder ----------------------------------------------- */

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static still_status run_file(const sti_suite_run *r, char *file, sti_golden_fn one,
                             still_error *err)
{
    char path[4096];
    if (snprintf(path, sizeof path, "%s/%s", r->dir, file) >= (int)sizeof path)
        return sti_fail(err, STILL_E_ARG, "%s: path too long", r->dir);
    sti_golden g;
    STI_TRY(sti_golden_open(path, &g, err));
    *strrchr(file, '.') = '\0';
    still_status st = one(r, file, &g, err);
    sti_golden_close(&g);
    return st;
}

still_status sti_golden_each(const sti_suite_run *r, sti_golden_fn one,
                             still_error *err)
{
    enum { MOST = 1024 };
    DIR *d = opendir(r->dir);
    if (!d) return sti_fail(err, STILL_E_IO, "%s: cannot be read as a folder", r->dir);
    char **file = sti_alloc(MOST, sizeof *file);
    size_t n = 0;
    for (struct dirent *e; file && n < MOST && (e = readdir(d));) {
        const char *dot = strrchr(e->d_name, '.');
        if (dot && strcmp(dot, ".safetensors") == 0 &&
            (file[n] = sti_strdup(e->d_name)))
            n++;
    }
    closedir(d);
    still_status st = STILL_OK;
    if (n == 0)
        st = sti_fail(err, STILL_E_FORMAT, "%s: no .safetensors file in it", r->dir);
    else
        qsort(file, n, sizeof *file, by_name);
    for (size_t i = 0; i < n; i++) {
        if (st == STILL_OK) st = run_file(r, file[i], one, err);
        free(file[i]);
    }
    free(file);
    return st;
}

/* ---- Metadata ------------------------------------------------------------ */

static void fail_key(sti_golden *g, const char *key, const char *expected)
{
    if (g->status == STILL_OK)
        g->status = sti_fail(g->err, STILL_E_FORMAT, "%s: metadata '%s' is not %s",
                             g->store.path, key, expected);
}

/* The value of a key, a new reference; NULL if it is absent or not JSON. */
static json_t *meta_value(sti_golden *g, const char *key)
{
    const char *text = json_string_value(json_object_get(g->store.st_meta, key));
    json_t *v = NULL;
    if (text && sti_json_read(key, text, strlen(text), STI_JSON_ANY, &v, NULL) ==
                    STILL_E_MEMORY)
        g->status = sti_fail_memory(g->err, key, strlen(text));
    return v;
}

int sti_golden_int(sti_golden *g, const char *key, int lo, int hi)
{
    json_t *v = meta_value(g, key);
    json_int_t n = json_integer_value(v);
    bool good = json_is_integer(v) && n >= lo && n <= hi;
    if (!good) fail_key(g, key, "an integer in range");
    json_decref(v);
    return good ? (int)n : lo;
}

double sti_golden_real(sti_golden *g, const char *key)
{
    json_t *v = meta_value(g, key);
    double x = json_number_value(v);
    if (!json_is_number(v)) fail_key(g, key, "a number");
    json_decref(v);
    return x;
}

bool sti_golden_flag(sti_golden *g, const char *key)
{
    json_t *v = meta_value(g, key);
    bool on = json_is_true(v);
    if (!json_is_boolean(v)) fail_key(g, key, "true or false");
    json_decref(v);
    return on;
}

bool sti_golden_is(sti_golden *g, const char *key, const char *word)
{
    json_t *v = meta_value(g, key);
    bool same = json_is_string(v) && strcmp(json_string_value(v), word) == 0;
    if (!json_is_string(v)) fail_key(g, key, "a string");
    json_decref(v);
    return same;
}

/* ---- Tensors ------------------------------------------------------------- */

static void *hold(sti_golden *g, size_t n, size_t size)
{
    if (g->status != STILL_OK) return NULL;
    void *p =
        g->n_held < (int)(sizeof g->held / sizeof *g->held) ? sti_alloc(n, size) : NULL;
    if (p)
        g->held[g->n_held++] = p;
    else
        g->status = sti_fail_memory(g->err, g->store.path, n * size);
    return p;
}

double *sti_golden_take(sti_golden *g, size_t n)
{
    return hold(g, n, sizeof(double));
}

int32_t *sti_golden_take_int(sti_golden *g, size_t n)
{
    return hold(g, n, sizeof(int32_t));
}

/* The tensor if it is of type t with n elements. */
static const sti_tensor *find(sti_golden *g, const char *name, sti_dtype t, size_t n)
{
    const sti_tensor *x = sti_store_find(&g->store, name);
    size_t bytes;
    if (g->status == STILL_OK &&
        (!x || x->type != t || !sti_dtype_bytes(t, n, &bytes) || x->bytes != bytes))
        g->status = sti_fail(g->err, STILL_E_FORMAT,
                             "%s: tensor '%s' is not of %zu elements of type %s",
                             g->store.path, name, n, sti_dtype_find(t)->name);
    return g->status == STILL_OK ? x : NULL;
}

int sti_golden_dim(sti_golden *g, const char *name, int i)
{
    const sti_tensor *x = sti_store_find(&g->store, name);
    if (x && i < x->n_dims && x->dim[i] >= 1 && x->dim[i] <= 1 << 20)
        return (int)x->dim[i];
    if (g->status == STILL_OK)
        g->status =
            sti_fail(g->err, STILL_E_FORMAT, "%s: tensor '%s' has no dimension %d",
                     g->store.path, name, i);
    return 1;
}

double *sti_golden_flat(sti_golden *g, const char *name, size_t n)
{
    const sti_tensor *x = find(g, name, STI_F64, n);
    double *out = x ? sti_golden_take(g, n) : NULL;
    if (out) memcpy(out, x->data, x->bytes);
    return out;
}

double *sti_golden_flat_opt(sti_golden *g, const char *name, size_t n)
{
    return sti_store_find(&g->store, name) ? sti_golden_flat(g, name, n) : NULL;
}

/* out[t, h] = in[h, t], elements of `bytes` bytes. */
static void turn(const unsigned char *in, unsigned char *out, int heads, int T,
                 size_t bytes)
{
    for (size_t h = 0; h < (size_t)heads; h++)
        for (size_t t = 0; t < (size_t)T; t++)
            memcpy(out + (t * (size_t)heads + h) * bytes,
                   in + (h * (size_t)T + t) * bytes, bytes);
}

double *sti_golden_rows(sti_golden *g, const char *name, int heads, int T, int width)
{
    const size_t n = (size_t)heads * (size_t)T * (size_t)width;
    const sti_tensor *x = find(g, name, STI_F64, n);
    double *out = x ? sti_golden_take(g, n) : NULL;
    if (out)
        turn(x->data, (unsigned char *)out, heads, T, (size_t)width * sizeof(double));
    return out;
}

double *sti_golden_rows_opt(sti_golden *g, const char *name, int heads, int T,
                            int width)
{
    return sti_store_find(&g->store, name) ? sti_golden_rows(g, name, heads, T, width)
                                           : NULL;
}

int32_t *sti_golden_rows_int(sti_golden *g, const char *name, int heads, int T)
{
    const size_t n = (size_t)heads * (size_t)T;
    const sti_tensor *x = find(g, name, STI_I32, n);
    int32_t *out = x ? sti_golden_take_int(g, n) : NULL;
    if (out) turn(x->data, (unsigned char *)out, heads, T, sizeof(int32_t));
    return out;
}

double sti_golden_error(const double *got, const double *want, size_t n)
{
    double worst = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        const double d = fabs(got[i] - want[i]);
        if (!(d <= worst)) worst = isnan(d) ? INFINITY : d;
        size = fmax(size, fabs(want[i]));
    }
    return size > 0 ? worst / size : worst;
}
