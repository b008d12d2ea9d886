/* cuda_layer_products.h - products of a layer with its weights (cuda_layer.c). */
#ifndef BENCH_CUDA_LAYER_PRODUCTS_H
#define BENCH_CUDA_LAYER_PRODUCTS_H

#include "cuda_layer.h"
#include "model/config.h"
#include "model/shape.h"

enum { Q, K, V, GATE, O, FFN_GATE, UP, DOWN, N_WEIGHTS };

typedef struct products {
    sti_weight w[N_WEIGHTS];
    sti_block x, h, q, kv, scratch, norm;
    int M;
    bool in_pass;
    uint64_t key[2];
    int32_t zero[64];
} products;

static inline void load(bench *b, sti_store *s, products *p)
{
    static const sti_part part[] = {STI_PART_Q,  STI_PART_K,   STI_PART_V,
                                    STI_PART_Q,  STI_PART_O,   STI_PART_GATE,
                                    STI_PART_UP, STI_PART_DOWN};
    still_error e;
    sti_config c;
    must(sti_config_read(s, &c, &e), &e);
    for (int i = 0; i < N_WEIGHTS; i++) {
        const sti_tensor *t = sti_config_tensor(&c, s, part[i], 0, false);
        if (!t) exit(1);
        must(b->be->weight_new(b->dev, t, &p->w[i], &e), &e);
    }
    sti_config_free(&c);
}

static inline void multiply(bench *b, products *p)
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
                                            .scratch = p->scratch.p},
                            &e),
         &e);
}

static inline void run_products(bench *b, void *what)
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
    if (p->in_pass) must(b->be->pass_end(b->dev, true, &e), &e);
}

/* As many in a row as a prompt of 64K takes in 32 layers: the GPU's clock falls when it
 * multiplies for long. */
enum { IN_A_ROW = 256 };

static inline void run_many(bench *b, void *what)
{
    for (int i = 0; i < IN_A_ROW; i++) run_products(b, what);
}

static inline void time_products(bench *b)
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
        p.scratch = floats(b, 2 * M * (size_t)p.w[UP].N, 0, 0, 0);
        p.norm = floats(b, hidden, 1, 0, 0);
        const double t = measure(b, NULL, run_products, &p, &runs);
        if (p.M <= 64)
            report(b, "products", "pass, half weights", 1, p.M, t, runs,
                   2 * weights / t * 1e-9, "GB/s");
        else
            report(b, "products", "half weights", p.M, 1, t, runs,
                   2 * weights * p.M / t * 1e-12, "TFLOP/s");
        if (p.M > 64) {
            const double all = time_once(b, NULL, run_many, &p) / IN_A_ROW;
            report(b, "products", "half weights, in a row", p.M, 1, all, IN_A_ROW,
                   2 * weights * p.M / all * 1e-12, "TFLOP/s");
        }
        sti_block *all[] = {&p.x, &p.h, &p.q, &p.kv, &p.scratch, &p.norm};
        for (size_t k = 0; k < sizeof all / sizeof *all; k++) drop(b, all[k]);
    }
    for (int i = 0; i < N_WEIGHTS; i++) b->be->weight_free(b->dev, &p.w[i]);
    sti_store_close(&s);
}

#endif
