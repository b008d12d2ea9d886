/* cuda_layer_hybrid.h - prefill and decode of the hybrid operator (cuda_layer.c). */
#ifndef BENCH_CUDA_LAYER_HYBRID_H
#define BENCH_CUDA_LAYER_HYBRID_H

#include "cuda_layer.h"

typedef struct states { /* [layers * batch] */
    const char *method;
    sti_hybrid_settings set;
    sti_hybrid_shape shape;
    int batch, layers, tokens;
    int64_t pos;
    bool in_pass;
    uint64_t key[2];
    int32_t *zero, *position; /* [batch] */
    sti_hybrid_state *st;
    sti_hybrid_args *args; /* [batch] */
    size_t bytes;          /* of one state */
    sti_block memory;
} states;

static inline sti_hybrid_in inputs(const bench *b, const sti_hybrid_settings *set)
{
    return (sti_hybrid_in){.q = b->q.p,
                           .k = b->k.p,
                           .v = b->v.p,
                           .gate_logit = set->gate ? b->gate.p : NULL,
                           .alpha = set->alpha ? b->alpha.p : NULL,
                           .window_logit = set->window_factor ? b->window.p : NULL,
                           .map_q = set->has_linear ? b->map_q.p : NULL,
                           .map_k = set->has_linear ? b->map_k.p : NULL};
}

static inline size_t state_bytes(const bench *b, const states *s)
{
    sti_carve count = {0};
    sti_hybrid_state unused;
    sti_hybrid_state_carve(&unused, &count, &s->set, &s->shape, 1 << 17,
                           sizeof(uint16_t), b->be->state_real);
    return (count.used + 255) / 256 * 256;
}

static inline void open_states(bench *b, states *s, const char *method, int batch,
                               int layers, int rows)
{
    still_error e;
    *s = (states){
        .method = method, .batch = batch, .shape = {b->d.H, b->d.G, b->d.D, b->d.D}};
    sti_hybrid_preset(method, strcmp(method, "lolcats") == 0 ? 64 : 128, &s->set);
    s->bytes = state_bytes(b, s);
    if (layers == 0) layers = (int)(2 * b->l2 / (s->bytes * (size_t)batch)) + 1;
    s->layers = layers > MOST_LAYERS ? MOST_LAYERS : layers;
    const size_t n = (size_t)batch * (size_t)s->layers;
    s->st = calloc(n, sizeof *s->st);
    s->args = calloc((size_t)batch, sizeof *s->args);
    s->zero = calloc((size_t)batch, sizeof *s->zero);
    s->position = calloc((size_t)batch, sizeof *s->position);
    if (!s->st || !s->args || !s->zero || !s->position) exit(1);
    must(b->be->mem_new(b->dev, n * s->bytes, &s->memory, &e), &e);
    for (size_t i = 0; i < n; i++) {
        sti_carve c = {.base = (unsigned char *)s->memory.p + i * s->bytes};
        sti_hybrid_state_carve(&s->st[i], &c, &s->set, &s->shape, 1 << 17,
                               sizeof(uint16_t), b->be->state_real);
    }
    must(b->be->hybrid_reserve(b->dev, &s->set, &s->shape, rows, &e), &e);
    must(b->be->dev_reserve(b->dev, rows, &e), &e);
}

static inline void close_states(bench *b, states *s)
{
    drop(b, &s->memory);
    free(s->st);
    free(s->args);
    free(s->zero);
    free(s->position);
}

static inline void empty(bench *b, void *what)
{
    still_error e;
    states *s = what;
    must(b->be->mem_clear(b->dev, s->memory.p, s->bytes, &e), &e);
    s->st[0].pos = 0;
}

static inline void prefill(bench *b, void *what)
{
    still_error e;
    states *s = what;
    for (int at = 0; at < s->tokens; at += b->rows) {
        const int n = s->tokens - at < b->rows ? s->tokens - at : b->rows;
        const sti_hybrid_args a = {.set = &s->set,
                                   .shape = s->shape,
                                   .T = n,
                                   .in = inputs(b, &s->set),
                                   .state = &s->st[0],
                                   .y = b->y.p};
        must(b->be->hybrid(b->dev, &a, 1, &e), &e);
    }
}

static inline void prefill_hybrid(bench *b, const char *method)
{
    states s;
    int runs;
    open_states(b, &s, method, 1, 1, b->rows);
    for (s.tokens = 1024; s.tokens <= 131072; s.tokens *= 2) {
        const double t = measure(b, empty, prefill, &s, &runs);
        report(b, "prefill", method, s.tokens, 1, t, runs, s.tokens / t * 1e-6,
               "Mtok/s");
    }
    check_finite(b, (size_t)b->d.H * (size_t)b->d.D * 64);
    close_states(b, &s);
}

/* Full: as after feeding 2053 tokens, in every layer and sequence. */
static inline void fill_states(bench *b, states *s)
{
    still_error e;
    s->tokens = 2053;
    prefill(b, s);
    for (size_t i = 1; i < (size_t)s->batch * (size_t)s->layers; i++)
        must(b->be->mem_move(b->dev, (unsigned char *)s->memory.p + i * s->bytes,
                             s->memory.p, s->bytes, &e),
             &e);
}

static inline void step_layers(bench *b, states *s)
{
    still_error e;
    const size_t q_row = (size_t)b->d.H * (size_t)b->d.D,
                 k_row = (size_t)b->d.G * (size_t)b->d.D;
    for (int l = 0; l < s->layers; l++) {
        for (int i = 0; i < s->batch; i++) {
            const size_t q0 = (size_t)i * q_row, k0 = (size_t)i * k_row;
            sti_hybrid_args *a = &s->args[i];
            *a = (sti_hybrid_args){.set = &s->set,
                                   .shape = s->shape,
                                   .T = 1,
                                   .in = inputs(b, &s->set),
                                   .state = &s->st[l * s->batch + i],
                                   .y = (float *)b->y.p + q0};
            a->in.q += q0;
            a->in.k += k0;
            a->in.v += k0;
            if (a->in.gate_logit) a->in.gate_logit += q0;
            a->state->pos = s->pos;
        }
        must(b->be->hybrid(b->dev, s->args, s->batch, &e), &e);
    }
}

static inline void step(bench *b, void *what)
{
    still_error e;
    states *s = what;
    if (!s->in_pass) {
        step_layers(b, s);
        return;
    }
    bool done = false;
    for (int i = 0; i < s->batch; i++) s->position[i] = (int32_t)s->pos;
    const sti_pass pass = {.tok = s->zero,
                           .pos = s->position,
                           .M = s->batch,
                           .key = s->key,
                           .n_key = 2,
                           .one_each = true,
                           .chunk = s->set.chunk};
    must(b->be->pass_begin(b->dev, &pass, &done, &e), &e);
    if (!done) step_layers(b, s);
    must(b->be->pass_end(b->dev, true, &e), &e);
}

static inline void decode_hybrid(bench *b, const char *method, int batch)
{
    static const struct {
        const char *how;
        int64_t pos;
        bool in_pass;
    } kinds[] = {
        {"pass", 2053, true}, {"no pass", 2053, false}, {"pass, chunk", 2048, true}};
    states s;
    open_states(b, &s, method, batch, 0, batch);
    fill_states(b, &s);
    s.key[0] = (uint64_t)(uintptr_t)s.memory.p;
    s.key[1] = ++b->passes;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        char how[64];
        int runs;
        s.pos = kinds[i].pos;
        s.in_pass = kinds[i].in_pass;
        const double t = measure(b, NULL, step, &s, &runs) / s.layers;
        snprintf(how, sizeof how, "%s, %s", method, kinds[i].how);
        report(b, "decode", how, 2053, batch, t, runs,
               (double)s.bytes * batch / t * 1e-9, "GB/s");
    }
    check_finite(b, (size_t)batch * (size_t)b->d.H * (size_t)b->d.D);
    close_states(b, &s);
}

#endif
