/* bench_hybrid.c - the hybrid operator of the cpu backend alone, as a session runs it:
 * compares a short stream with the reference in double, then times prefill of several
 * lengths and decode at several depths.
 *
 *     bench_hybrid [ISA|best [THREADS [C [CAP [H G D]]]]]
 *
 * Times are per token and layer; "30 layers" is that times 30 (SmolLM2-135M).
 * Prefill comes in pieces of 512 tokens. GFLOP/s counts products of queries with
 * window, salient keys and state. Decode cycles through enough layers that no state
 * is still in L2 the next time, and includes retiring chunks. The fastest of a few
 * runs is printed beside the median, since other work on the machine only adds time. */
#include <math.h>

#include "bench.h"
#include "ops/ops.h"

enum { REPEAT = 5, LAYERS = 30, PIECE = 512, CHECKED = 1500 };

typedef struct bench {
    const sti_backend *b;
    sti_dev *dev;
    sti_hybrid_settings set;
    sti_hybrid_shape shape;
    float *q, *k, *v, *gate, *y; /* PIECE tokens */
    sti_hybrid_state st[LAYERS];
    sti_block block[LAYERS];
} bench;

static void *new_state(const bench *t, sti_hybrid_state *st, sti_block *block,
                       int64_t tokens, size_t kv, size_t real)
{
    sti_carve c = {0};
    sti_hybrid_state_carve(st, &c, &t->set, &t->shape, tokens, kv, real);
    if (!sti_block_new(block, c.used)) exit(1);
    c = (sti_carve){.base = block->p};
    sti_hybrid_state_carve(st, &c, &t->set, &t->shape, tokens, kv, real);
    return block->p;
}

static void feed(bench *t, int layer, int from, int n)
{
    const size_t q = (size_t)t->shape.H * (size_t)t->shape.D;
    const size_t k = (size_t)t->shape.G * (size_t)t->shape.D, at = (size_t)from;
    sti_hybrid_args a = {.set = &t->set,
                         .shape = t->shape,
                         .T = n,
                         .in = {.q = t->q + at * q,
                                .k = t->k + at * k,
                                .v = t->v + at * k,
                                .gate_logit = t->gate + at * q},
                         .state = &t->st[layer],
                         .y = t->y + at * q};
    still_error err;
    must(t->b->hybrid(t->dev, &a, 1, &err), &err);
}

/* Feeds layer 0 `tokens` tokens; what comes in repeats every PIECE. */
static void stream(bench *t, int layer, int tokens)
{
    for (int n; tokens > 0; tokens -= n) {
        n = tokens < PIECE ? tokens : PIECE;
        feed(t, layer, 0, n);
    }
}

/* ---- Verify -------------------------------------------------------------- */

/* Largest difference to the reference on a state in double, over CHECKED tokens, fed
 * in odd pieces; keys and values as they are stored. */
static double verify(bench *t)
{
    const size_t q = (size_t)t->shape.H * (size_t)t->shape.D;
    const size_t k = (size_t)t->shape.G * (size_t)t->shape.D;
    double *in = malloc(PIECE * (3 * q + 2 * k) * sizeof *in), worst = 0;
    sti_hybrid_state st;
    sti_block block;
    new_state(t, &st, &block, CHECKED, sizeof(double), sizeof(double));
    if (!in) exit(1);
    double *q64 = in, *k64 = q64 + PIECE * q, *v64 = k64 + PIECE * k;
    double *g64 = v64 + PIECE * k, *y64 = g64 + PIECE * q;
    for (size_t i = 0; i < PIECE * q; i++) {
        q64[i] = t->q[i];
        g64[i] = t->gate[i];
    }
    for (size_t i = 0; i < PIECE * k; i++) {
        k64[i] = sti_f16_to_f32(sti_f32_to_f16(t->k[i]));
        v64[i] = sti_f16_to_f32(sti_f32_to_f16(t->v[i]));
    }
    for (int done = 0, n; done < CHECKED; done += n) {
        n = CHECKED - done < 129 ? CHECKED - done : done % 2 ? 129 : 1;
        sti_hybrid_args64 a = {.set = &t->set,
                               .shape = t->shape,
                               .T = n,
                               .in = {.q = q64, .k = k64, .v = v64, .gate_logit = g64},
                               .state = &st,
                               .y = y64};
        still_error err;
        must(sti_ref_hybrid_forward(&a, &err), &err);
        feed(t, 0, 0, n);
        for (size_t i = 0; i < (size_t)n * q; i++)
            worst = fmax(worst, fabs((double)t->y[i] - y64[i]));
    }
    sti_block_free(&block);
    free(in);
    sti_hybrid_state_clear(&t->st[0], &t->set, &t->shape);
    return worst;
}

/* ---- Time ---------------------------------------------------------------- */

static void prefill(bench *t, int tokens)
{
    double s[REPEAT];
    int repeat = tokens > 16384 ? 2 : REPEAT;
    for (int r = 0; r < repeat; r++) {
        sti_hybrid_state_clear(&t->st[0], &t->set, &t->shape);
        const double from = now();
        stream(t, 0, tokens);
        s[r] = (now() - from) / tokens;
    }
    sort_times(s, repeat);
    const double P = sti_hybrid_features(&t->set, &t->shape), D = t->shape.D;
    const double keys = 1.5 * t->set.chunk + (t->set.cap > 0 ? t->set.cap : 0);
    const double flop = t->shape.H * (4 * keys * D + 2 * P * D);
    printf("prefill %6d  %8.3f us  median %8.3f  30 layers %.3f ms  %6.1f GFLOP/s\n",
           tokens, s[0] * 1e6, s[repeat / 2] * 1e6, s[0] * 30e3, flop / s[0] * 1e-9);
}

static void decode(bench *t, int depth)
{
    double s[REPEAT];
    for (int l = 0; l < LAYERS; l++) {
        sti_hybrid_state_clear(&t->st[l], &t->set, &t->shape);
        stream(t, l, depth);
    }
    for (int r = 0; r < REPEAT; r++) {
        const int tokens = t->set.chunk;
        const double from = now();
        for (int i = 0; i < tokens; i++)
            for (int l = 0; l < LAYERS; l++) feed(t, l, i % PIECE, 1);
        s[r] = (now() - from) / tokens / LAYERS;
    }
    sort_times(s, REPEAT);
    printf("decode @%6d  %8.3f us  median %8.3f  30 layers %.3f ms\n", depth,
           s[0] * 1e6, s[REPEAT / 2] * 1e6, s[0] * 30e3);
}

int main(int argc, char **argv)
{
    const int threads = number_at(2, argc, argv, 2);
    bench t = {.b = sti_backend_find("cpu"), .shape = {9, 3, 64, 64}};
    if (argc > 7)
        t.shape = (sti_hybrid_shape){atoi(argv[5]), atoi(argv[6]), atoi(argv[7]),
                                     atoi(argv[7])};
    sti_hybrid_preset("still", number_at(3, argc, argv, 128), &t.set);
    t.set.cap = number_at(4, argc, argv, t.set.cap);
    still_error err;
    const sti_dev_params p = {
        .threads = threads, .isa = isa_of(argc, argv), .max_k = 64};
    must(t.b->dev_new(&p, &t.dev, &err), &err);
    must(t.b->hybrid_reserve(t.dev, &t.set, &t.shape, PIECE, &err), &err);
    const size_t q = (size_t)PIECE * (size_t)(t.shape.H * t.shape.D);
    const size_t k = (size_t)PIECE * (size_t)(t.shape.G * t.shape.D);
    t.q = floats(q, 2, 1);
    t.k = floats(k, 2, 2);
    t.v = floats(k, 2, 3);
    t.gate = floats(q, 2, 4);
    t.y = floats(q, 2, 5);
    for (int l = 0; l < LAYERS; l++)
        new_state(&t, &t.st[l], &t.block[l], 1 << 17, 2, sizeof(float));
    printf("%s, %d threads, C %d, select %d, cap %d, H %d G %d D %d; %.1f MB of state "
           "in %d layers\n",
           t.b->dev_isa(t.dev), threads, t.set.chunk, t.set.select, t.set.cap,
           t.shape.H, t.shape.G, t.shape.D, LAYERS * (double)t.block[0].bytes * 1e-6,
           LAYERS);
    const double e = verify(&t);
    printf("largest error %.2g\n", e);
    if (!(e < 1e-4)) return 1;
    for (int n = 4096; n <= 65536; n *= 4) prefill(&t, n);
    for (int n = 512; n <= 32768; n *= 8) decode(&t, n);
    return 0; /* the system takes the memory back */
}
