/* cuda_layer.c - one layer on the GPU: its attention by method, and its products.
 *
 *     cuda_layer [--rows N] [--only prefill|decode|products] [--json FILE]
 *
 * Timed with CUDA events around the operators as the model calls them, after runs that
 * are not counted: the median of 10 and more, fewer of what takes long.
 *
 *   prefill    N tokens of one sequence in pieces of --rows, the state carried from one
 *              to the next; N = 1K..128K (softmax to 64K). Llama 3.1 8B: 32 query
 *              heads, 8 kv heads, size 128.
 *   decode     one token for each of a batch of sequences at full state: inside a graph
 *              and outside of one; for methods with a window also the step that begins
 *              a chunk. A graph goes over enough layers to exceed the L2 cache, as in
 *              a model, where weights pass through it in between; one layer's share is
 *              printed.
 *   products   q, k, v and attention's gate, output, feed-forward of one layer, M rows.
 */
#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/cuda.h"
#include "base/process.h"
#include "base/random.h"
#include "model/config.h"
#include "model/shape.h"

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

static void must(still_status st, const still_error *e)
{
    if (st == STILL_OK) return;
    fprintf(stderr, "cuda_layer: %s\n", e->text);
    exit(1);
}

static void check(cudaError_t e)
{
    if (e == cudaSuccess) return;
    fprintf(stderr, "cuda_layer: %s\n", cudaGetErrorString(e));
    exit(1);
}

/* ---- Memory -------------------------------------------------------------- */

/* n floats mean + spread * uniform(-1, 1) on the device; diagonal: of matrices [.,D,D],
 * plus 1. */
static sti_block floats(bench *b, size_t n, float mean, float spread, int diagonal)
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

static void drop(bench *b, sti_block *x)
{
    b->be->mem_free(b->dev, x);
}

static void open_inputs(bench *b, const dims *d, int rows)
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

static void close_inputs(bench *b)
{
    sti_block *all[] = {&b->q,     &b->k,      &b->v,     &b->gate, &b->y,
                        &b->alpha, &b->window, &b->map_q, &b->map_k};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) drop(b, all[i]);
}

/* ---- Timing -------------------------------------------------------------- */

typedef void action(bench *b, void *what);

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double time_once(bench *b, action *before, action *run, void *what)
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
static double measure(bench *b, action *before, action *run, void *what, int *runs)
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
static void report(bench *b, const char *what, const char *how, int tokens, int batch,
                   double seconds, int runs, double rate, const char *unit)
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
static void check_finite(bench *b, size_t n)
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

/* ---- The hybrid operator ------------------------------------------------- */

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

static sti_hybrid_in inputs(const bench *b, const sti_hybrid_settings *set)
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

static size_t state_bytes(const bench *b, const states *s)
{
    sti_carve count = {0};
    sti_hybrid_state unused;
    sti_hybrid_state_carve(&unused, &count, &s->set, &s->shape, 1 << 17,
                           sizeof(uint16_t), b->be->state_real);
    return (count.used + 255) / 256 * 256;
}

static void open_states(bench *b, states *s, const char *method, int batch, int layers,
                        int rows)
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

static void close_states(bench *b, states *s)
{
    drop(b, &s->memory);
    free(s->st);
    free(s->args);
    free(s->zero);
    free(s->position);
}

static void empty(bench *b, void *what)
{
    still_error e;
    states *s = what;
    must(b->be->mem_clear(b->dev, s->memory.p, s->bytes, &e), &e);
    s->st[0].pos = 0;
}

static void prefill(bench *b, void *what)
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

static void prefill_hybrid(bench *b, const char *method)
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
static void fill_states(bench *b, states *s)
{
    still_error e;
    s->tokens = 2053;
    prefill(b, s);
    for (size_t i = 1; i < (size_t)s->batch * (size_t)s->layers; i++)
        must(b->be->mem_move(b->dev, (unsigned char *)s->memory.p + i * s->bytes,
                             s->memory.p, s->bytes, &e),
             &e);
}

static void step_layers(bench *b, states *s)
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

static void step(bench *b, void *what)
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
    must(b->be->pass_end(b->dev, &e), &e);
}

static void decode_hybrid(bench *b, const char *method, int batch)
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

/* ---- Softmax ------------------------------------------------------------- */

typedef struct caches { /* [layers * batch] */
    int batch, layers, tokens;
    bool in_pass;
    uint64_t key[2];
    int32_t *zero, *position;
    sti_attn_segment *seg; /* [layers * batch] */
    sti_block memory;
} caches;

static void open_caches(bench *b, caches *c, int batch, int tokens)
{
    still_error e;
    const int room = tokens + 8;
    const size_t half =
        (size_t)b->d.G * (size_t)room * (size_t)b->d.D * sizeof(uint16_t);
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
                                       .capacity = room};
}

static void close_caches(bench *b, caches *c)
{
    drop(b, &c->memory);
    free(c->seg);
    free(c->zero);
    free(c->position);
}

static void attend(bench *b, const sti_attn_segment *seg, int n)
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

static void prefill_cache(bench *b, void *what)
{
    const caches *c = what;
    for (int at = 0; at < c->tokens; at += b->rows) {
        sti_attn_segment seg = c->seg[0];
        seg.n = c->tokens - at < b->rows ? c->tokens - at : b->rows;
        seg.past = at;
        attend(b, &seg, 1);
    }
}

static void prefill_softmax(bench *b)
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

static void step_cache(bench *b, void *what)
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
    if (c->in_pass) must(b->be->pass_end(b->dev, &e), &e);
}

static void decode_softmax(bench *b, int batch, int most)
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

/* ---- Products ------------------------------------------------------------ */

enum { Q, K, V, GATE, O, FFN_GATE, UP, DOWN, N_WEIGHTS };

typedef struct products {
    sti_weight w[N_WEIGHTS];
    sti_block x, h, q, kv, room, norm;
    int M;
    bool in_pass;
    uint64_t key[2];
    int32_t zero[64];
} products;

static void load(bench *b, const sti_store *s, products *p)
{
    static const sti_part part[] = {STI_PART_Q,  STI_PART_K,   STI_PART_V,
                                    STI_PART_Q,  STI_PART_O,   STI_PART_GATE,
                                    STI_PART_UP, STI_PART_DOWN};
    still_error e;
    for (int i = 0; i < N_WEIGHTS; i++) {
        const sti_tensor *t = sti_config_tensor(s, part[i], 0, false);
        if (!t) exit(1);
        must(b->be->weight_new(b->dev, t, &p->w[i], &e), &e);
    }
}

static void multiply(bench *b, products *p)
{
    still_error e;
    float *kv = p->kv.p, *q = p->q.p;
    const size_t M = (size_t)p->M;
    must(b->be->matmul(
             b->dev,
             &(sti_matmul_args){
                 .x = p->x.p,
                 .M = p->M,
                 .n = 4,
                 .norm = p->norm.p,
                 .eps = 1e-5f,
                 .normed = p->h.p,
                 .w = {&p->w[Q], &p->w[K], &p->w[V], &p->w[GATE]},
                 .y = {q, kv, kv + M * (size_t)p->w[K].N, q + M * (size_t)p->w[Q].N}},
             &e),
         &e);
    must(b->be->matmul(b->dev,
                       &(sti_matmul_args){.x = q,
                                          .M = p->M,
                                          .n = 1,
                                          .w = {&p->w[O]},
                                          .y = {p->x.p},
                                          .accumulate = true},
                       &e),
         &e);
    must(b->be->ffn_forward(b->dev,
                            &(sti_ffn_args){.x = p->x.p,
                                            .M = p->M,
                                            .w = {.gate = &p->w[FFN_GATE],
                                                  .up = &p->w[UP],
                                                  .down = &p->w[DOWN],
                                                  .norm = p->norm.p,
                                                  .eps = 1e-5f},
                                            .scratch_h = p->h.p,
                                            .scratch = p->room.p},
                            &e),
         &e);
}

static void run_products(bench *b, void *what)
{
    still_error e;
    products *p = what;
    bool done = false;
    if (p->in_pass)
        must(b->be->pass_begin(b->dev,
                               &(sti_pass){.tok = p->zero,
                                           .pos = p->zero,
                                           .M = p->M,
                                           .key = p->key,
                                           .n_key = 2,
                                           .one_each = true},
                               &done, &e),
             &e);
    if (!done) multiply(b, p);
    if (p->in_pass) must(b->be->pass_end(b->dev, &e), &e);
}

static void time_products(bench *b)
{
    static const int rows[] = {1, 12, 64, 8192};
    still_error e;
    sti_store s;
    products p = {.key = {0x70726f64, 0}};
    must(sti_shape_open(LLAMA.name, false, &s, &e), &e);
    load(b, &s, &p);
    double weights = 0;
    for (int i = 0; i < N_WEIGHTS; i++) weights += (double)p.w[i].N * (double)p.w[i].K;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const size_t M = (size_t)rows[i], hidden = (size_t)p.w[Q].K;
        int runs;
        p.M = rows[i];
        p.in_pass = p.M <= 64;
        p.key[1] = ++b->passes;
        p.x = floats(b, M * hidden, 0, 1, 0);
        p.h = floats(b, M * hidden, 0, 0, 0);
        p.q = floats(b, 2 * M * (size_t)p.w[Q].N, 0, 0, 0);
        p.kv = floats(b, 2 * M * (size_t)p.w[K].N, 0, 0, 0);
        p.room = floats(b, 2 * M * (size_t)p.w[UP].N, 0, 0, 0);
        p.norm = floats(b, hidden, 1, 0, 0);
        const double t = measure(b, NULL, run_products, &p, &runs);
        if (p.M <= 64)
            report(b, "products", "pass, half weights", 1, p.M, t, runs,
                   2 * weights / t * 1e-9, "GB/s");
        else
            report(b, "products", "half weights", p.M, 1, t, runs,
                   2 * weights * p.M / t * 1e-12, "TFLOP/s");
        sti_block *all[] = {&p.x, &p.h, &p.q, &p.kv, &p.room, &p.norm};
        for (size_t k = 0; k < sizeof all / sizeof *all; k++) drop(b, all[k]);
    }
    for (int i = 0; i < N_WEIGHTS; i++) b->be->weight_free(b->dev, &p.w[i]);
    sti_store_close(&s);
}

/* ---- The program --------------------------------------------------------- */

static void time_prefill(bench *b)
{
    open_inputs(b, &LLAMA, b->rows);
    prefill_hybrid(b, "still");
    prefill_hybrid(b, "lolcats");
    prefill_hybrid(b, "swa");
    prefill_softmax(b);
    close_inputs(b);
}

static void time_decode(bench *b)
{
    static const char *const methods[] = {"still", "lolcats", "swa"};
    const int rows = b->rows;
    b->rows = 2053; /* states are filled in one piece */
    open_inputs(b, &LLAMA, b->rows);
    for (int i = 0; i < 3; i++) decode_hybrid(b, methods[i], 12);
    decode_softmax(b, 12, 65536);
    close_inputs(b);
    open_inputs(b, &SMOL, b->rows);
    for (int batch = 1; batch <= 256; batch *= 256) decode_hybrid(b, "still", batch);
    decode_softmax(b, 256, 4096);
    close_inputs(b);
    b->rows = rows;
}

int main(int argc, char **argv)
{
    bench b = {.be = sti_backend_find("cuda"), .rows = 8192, .d = LLAMA};
    const char *only = "", *json = NULL;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--rows") == 0 && i + 1 < argc)
            b.rows = atoi(argv[++i]);
        else if (strcmp(argv[i], "--only") == 0 && i + 1 < argc)
            only = argv[++i];
        else if (strcmp(argv[i], "--json") == 0 && i + 1 < argc)
            json = argv[++i];
        else
            b.rows = 0;
    }
    if (b.rows < 1 || !b.be) {
        fputs("usage: cuda_layer [--rows N] [--only prefill|decode|products] "
              "[--json FILE]\n",
              stderr);
        return 2;
    }
    still_error e;
    int l2 = 0;
    const double begun = sti_now();
    must(b.be->dev_new(&(sti_dev_params){.max_k = 14336,
                                         .heads = LLAMA.H,
                                         .kv_heads = LLAMA.G,
                                         .head_dim = LLAMA.D},
                       &b.dev, &e),
         &e);
    check(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, b.dev->ordinal));
    b.l2 = (size_t)l2;
    check(cudaEventCreate(&b.start));
    check(cudaEventCreate(&b.stop));
    printf("%s, L2 %.0f MB; one layer, medians, pieces of %d rows\n\n",
           b.be->dev_isa(b.dev), l2 / 1e6, b.rows);
    printf("| shape | what | how | tokens | batch | time | runs | rate |\n"
           "|---|---|---|---:|---:|---:|---:|---:|\n");
    if (!*only || strcmp(only, "prefill") == 0) time_prefill(&b);
    if (!*only || strcmp(only, "decode") == 0) time_decode(&b);
    b.d = LLAMA;
    if (!*only || strcmp(only, "products") == 0) time_products(&b);
    fprintf(stderr, "%.0f s in all\n", sti_now() - begun);
    FILE *f = json ? fopen(json, "w") : stdout;
    if (!json) putchar('\n');
    if (!f || fwrite(b.json, 1, b.json_used, f) != b.json_used) {
        fprintf(stderr, "cuda_layer: %s cannot be written\n", json ? json : "stdout");
        return 1;
    }
    if (json) fclose(f);
    (void)cudaEventDestroy(b.start);
    (void)cudaEventDestroy(b.stop);
    b.be->dev_free(b.dev);
    return 0;
}
