/* cuda_layer_softmax.h - prefill and decode of softmax attention (cuda_layer.c). */
#ifndef BENCH_CUDA_LAYER_SOFTMAX_H
#define BENCH_CUDA_LAYER_SOFTMAX_H

#include "cuda_layer.h"

typedef struct caches { /* [layers * batch] */
    int batch, layers, tokens;
    bool in_pass;
    uint64_t key[2];
    int32_t *zero, *position;
    sti_attn_segment *seg; /* [layers * batch] */
    sti_block memory;
} caches;

static inline void open_caches(bench *b, caches *c, int batch, int tokens)
{
    still_error e;
    const int capacity = tokens + 8;
    const size_t half =
        (size_t)b->d.G * (size_t)capacity * (size_t)b->d.D * sizeof(uint16_t);
    *c = (caches){.batch = batch, .tokens = tokens};
    const size_t layers = 2 * b->l2 / (2 * half * (size_t)batch) + 1;
    c->layers = layers > MOST_LAYERS ? MOST_LAYERS : (int)layers;
    if (batch == 1) c->layers = 1; /* prefill */
    const size_t n = (size_t)batch * (size_t)c->layers;
    c->seg = calloc(n, sizeof *c->seg);
    c->zero = calloc((size_t)batch, sizeof *c->zero);
    c->position = calloc((size_t)batch, sizeof *c->position);
    if (!c->seg || !c->zero || !c->position) exit(1);
    must(b->be->mem_new(b->dev, n * 2 * half, &c->memory, &e), &e);
    /* Random halves, 0.25 to 2 and their negatives, doubled in place. */
    size_t done = 1 << 20;
    uint16_t *x = malloc(done);
    if (!x) exit(1);
    for (size_t i = 0; i < done / 2; i++)
        x[i] = (uint16_t)(0x3400 + (sti_mix64(i) & 0x8bff));
    if (done > c->memory.bytes) done = c->memory.bytes;
    must(b->be->mem_move(b->dev, c->memory.p, x, done, &e), &e);
    free(x);
    for (size_t m; done < c->memory.bytes; done += m) {
        m = c->memory.bytes - done < done ? c->memory.bytes - done : done;
        must(b->be->mem_move(b->dev, (char *)c->memory.p + done, c->memory.p, m, &e),
             &e);
    }
    for (size_t i = 0; i < n; i++)
        c->seg[i] = (sti_attn_segment){.row0 = (int)(i % (size_t)batch),
                                       .n = 1,
                                       .past = tokens,
                                       .K = (char *)c->memory.p + 2 * i * half,
                                       .V = (char *)c->memory.p + (2 * i + 1) * half,
                                       .capacity = capacity};
}

static inline void close_caches(bench *b, caches *c)
{
    drop(b, &c->memory);
    free(c->seg);
    free(c->zero);
    free(c->position);
}

static inline void attend(bench *b, const sti_attn_segment *seg, int n)
{
    still_error e;
    must(b->be->softmax_attn(b->dev,
                             &(sti_attn_args){.q = b->q.p,
                                              .k = b->k.p,
                                              .v = b->v.p,
                                              .o = b->y.p,
                                              .H = b->d.H,
                                              .G = b->d.G,
                                              .D = b->d.D,
                                              .cache = STI_F16,
                                              .seg = seg,
                                              .n_seg = n},
                             &e),
         &e);
}

static inline void prefill_cache(bench *b, void *what)
{
    const caches *c = what;
    for (int at = 0; at < c->tokens; at += b->rows) {
        sti_attn_segment seg = c->seg[0];
        seg.n = c->tokens - at < b->rows ? c->tokens - at : b->rows;
        seg.past = at;
        attend(b, &seg, 1);
    }
}

static inline void prefill_softmax(bench *b)
{
    for (int tokens = 1024; tokens <= 65536; tokens *= 2) {
        caches c;
        int runs;
        open_caches(b, &c, 1, tokens);
        const double t = measure(b, NULL, prefill_cache, &c, &runs);
        const double flops = 2.0 * tokens * tokens * b->d.H * b->d.D;
        report(b, "prefill", "softmax", tokens, 1, t, runs, flops / t * 1e-12,
               "TFLOP/s");
        close_caches(b, &c);
    }
    check_finite(b, (size_t)b->d.H * (size_t)b->d.D * 64);
}

static inline void step_cache(bench *b, void *what)
{
    still_error e;
    caches *c = what;
    bool done = false;
    for (int i = 0; i < c->batch; i++) c->position[i] = c->tokens;
    if (c->in_pass) {
        const sti_pass pass = {.tok = c->zero,
                               .pos = c->position,
                               .M = c->batch,
                               .key = c->key,
                               .n_key = 2,
                               .one_each = true};
        must(b->be->pass_begin(b->dev, &pass, &done, &e), &e);
    }
    for (int l = 0; l < c->layers && !done; l++)
        attend(b, c->seg + l * c->batch, c->batch);
    if (c->in_pass) must(b->be->pass_end(b->dev, true, &e), &e);
}

static inline void decode_softmax(bench *b, int batch, int most)
{
    for (int tokens = 1024; tokens <= most; tokens *= 2) {
        caches c;
        open_caches(b, &c, batch, tokens);
        c.key[0] = (uint64_t)(uintptr_t)c.memory.p;
        c.key[1] = ++b->passes;
        const double bytes = 4.0 * tokens * b->d.G * b->d.D * batch;
        for (int in_pass = 1; in_pass >= 0; in_pass--) {
            int runs;
            c.in_pass = in_pass;
            const double t = measure(b, NULL, step_cache, &c, &runs) / c.layers;
            report(b, "decode", in_pass ? "softmax, pass" : "softmax, no pass", tokens,
                   batch, t, runs, bytes / t * 1e-9, "GB/s");
        }
        close_caches(b, &c);
    }
    check_finite(b, (size_t)batch * (size_t)b->d.H * (size_t)b->d.D);
}

#endif
