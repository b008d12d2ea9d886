/* cuda_layer.h - what the parts of cuda_layer.c share: the device, random inputs, times
 * by CUDA events and the lines of the report. */
#ifndef BENCH_CUDA_LAYER_H
#define BENCH_CUDA_LAYER_H

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/cuda.h"
#include "base/random.h"

enum {
    LEAST = 3,
    USUAL = 10,
    MOST = 30,
    WARM = 3,
    MOST_LAYERS = 512,
    MOST_LINES = 256
};
static const double ENOUGH = 0.5; /* seconds a figure may take */

typedef struct dims {
    const char *name;
    int H, G, D;
} dims;
static const dims LLAMA = {"llama3.1-8b", 32, 8, 128},
                  SMOL = {"smollm2-135m", 9, 3, 64};

typedef struct bench {
    const sti_backend *be;
    sti_dev *dev;
    dims d;
    size_t l2;
    int rows;
    cudaEvent_t start, stop;
    sti_block q, k, v, gate, y; /* floats of `rows` rows */
    sti_block alpha, window, map_q, map_k;
    uint64_t passes; /* made so far: their keys */
    char json[MOST_LINES * 256];
    size_t json_used;
} bench;

static inline void must(still_status st, const still_error *e)
{
    if (st == STILL_OK) return;
    fprintf(stderr, "cuda_layer: %s\n", e->text);
    exit(1);
}

static inline void check(cudaError_t e)
{
    if (e == cudaSuccess) return;
    fprintf(stderr, "cuda_layer: %s\n", cudaGetErrorString(e));
    exit(1);
}

/* ---- Memory -------------------------------------------------------------- */

/* n floats mean + spread * uniform(-1, 1) on the device; diagonal: of matrices [.,D,D],
 * plus 1. */
static inline sti_block floats(bench *b, size_t n, float mean, float spread,
                               int diagonal)
{
    still_error e;
    sti_block out;
    must(b->be->mem_new(b->dev, n * sizeof(float), &out, &e), &e);
    if (mean == 0 && spread == 0) return out; /* it comes zeroed */
    float *x = malloc(n * sizeof *x);
    if (!x) exit(1);
    for (size_t i = 0; i < n; i++) {
        const float u = (float)(sti_mix64(i) >> 40) * 0x1p-23f - 1;
        x[i] = mean + spread * u;
        if (diagonal && i / (size_t)diagonal % (size_t)diagonal == i % (size_t)diagonal)
            x[i] += 1;
    }
    must(b->be->mem_move(b->dev, out.p, x, n * sizeof *x, &e), &e);
    free(x);
    return out;
}

static inline void drop(bench *b, sti_block *x)
{
    b->be->mem_free(b->dev, x);
}

static inline void open_inputs(bench *b, const dims *d, int rows)
{
    const size_t H = (size_t)d->H, G = (size_t)d->G, D = (size_t)d->D, R = (size_t)rows;
    b->d = *d;
    b->q = floats(b, R * H * D, 0, 1.7f, 0);
    b->k = floats(b, R * G * D, 0, 1.7f, 0);
    b->v = floats(b, R * G * D, 0, 1.7f, 0);
    b->gate = floats(b, R * H * D, 0, 1.7f, 0);
    b->y = floats(b, R * H * D, 0, 0, 0);
    b->alpha = floats(b, H, 0, 0.1f, 0);
    b->window = floats(b, H, -2.2f, 0.1f, 0);
    b->map_q = floats(b, H * D * D, 0, 0.05f, d->D);
    b->map_k = floats(b, H * D * D, 0, 0.05f, d->D); /* of G or of H heads */
}

static inline void close_inputs(bench *b)
{
    sti_block *all[] = {&b->q,     &b->k,      &b->v,     &b->gate, &b->y,
                        &b->alpha, &b->window, &b->map_q, &b->map_k};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) drop(b, all[i]);
}

/* ---- Timing -------------------------------------------------------------- */

typedef void action(bench *b, void *what);

static inline int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static inline double time_once(bench *b, action *before, action *run, void *what)
{
    float ms;
    if (before) before(b, what);
    check(cudaEventRecord(b->start, b->dev->stream));
    run(b, what);
    check(cudaEventRecord(b->stop, b->dev->stream));
    check(cudaEventSynchronize(b->stop));
    check(cudaEventElapsedTime(&ms, b->start, b->stop));
    return (double)ms * 1e-3;
}

/* Median seconds; *runs: how many it is of. */
static inline double measure(bench *b, action *before, action *run, void *what,
                             int *runs)
{
    double seconds[MOST], once = 0;
    for (int i = 0; i < WARM && (i < 1 || once * (WARM + USUAL) < ENOUGH * 4); i++)
        once = time_once(b, before, run, what);
    int n = once > 0 ? (int)(ENOUGH / once) : MOST;
    n = n < LEAST ? LEAST : n > MOST ? MOST : n;
    if (n < USUAL && once * USUAL < 4 * ENOUGH) n = USUAL;
    for (int i = 0; i < n; i++) seconds[i] = time_once(b, before, run, what);
    qsort(seconds, (size_t)n, sizeof *seconds, by_value);
    *runs = n;
    return seconds[n / 2];
}

/* One line of the table and one of JSON. */
static inline void report(bench *b, const char *what, const char *how, int tokens,
                          int batch, double seconds, int runs, double rate,
                          const char *unit)
{
    const bool us = seconds < 0.01;
    printf("| %-12s | %-12s | %-24s | %7d | %5d | %9.2f %s | %3d | %8.1f %s |\n",
           b->d.name, what, how, tokens, batch, seconds * (us ? 1e6 : 1e3),
           us ? "us" : "ms", runs, rate, unit);
    fflush(stdout);
    const size_t room = sizeof b->json - b->json_used;
    const int n =
        snprintf(b->json + b->json_used, room,
                 "{\"shape\":\"%s\",\"what\":\"%s\",\"how\":\"%s\",\"tokens\":%d,"
                 "\"batch\":%d,\"seconds\":%.9g,\"runs\":%d,\"rate\":%.6g,"
                 "\"unit\":\"%s\"}\n",
                 b->d.name, what, how, tokens, batch, seconds, runs, rate, unit);
    if (n > 0 && (size_t)n < room) b->json_used += (size_t)n;
}

/* NaN would be timed like any other result, so check. */
static inline void check_finite(bench *b, size_t n)
{
    still_error e;
    float *y = malloc(n * sizeof *y);
    if (!y) exit(1);
    must(b->be->mem_move(b->dev, y, b->y.p, n * sizeof *y, &e), &e);
    for (size_t i = 0; i < n; i++)
        if (!isfinite(y[i])) {
            fprintf(stderr, "cuda_layer: output %zu is %g\n", i, (double)y[i]);
            exit(1);
        }
    free(y);
}

#endif
