/* bench_attn.c - softmax attention of the cpu backend alone: compares one call with a
 * double loop, then times decode at several depths and prefill of several lengths.
 *
 *     bench_attn [ISA [THREADS [H G D]]]
 *
 * GFLOP/s counts the 4 D operations of every visible (query head, key) pair; GB/s the
 * cache bytes that decode has to read. Decode cycles through enough copies of the cache
 * ("layers") that none of it is still in L2 the next time. */
#include <math.h>

#include "bench.h"
#include "ops/ops.h"

enum { REPEAT = 9, LAYERS = 8, MAX_ROWS = 4096 };

typedef struct bench {
    const sti_backend *b;
    sti_dev *dev;
    int H, G, D, capacity;
    float *q, *k, *v, *o;
    uint16_t *K[LAYERS], *V[LAYERS];
} bench;

static void attend(bench *t, int layer, int n, int past)
{
    sti_attn_segment s = {0, n, past, t->K[layer], t->V[layer], t->capacity};
    sti_attn_args a = {t->q, t->k, t->v, t->o, t->H, t->G, t->D, 0, STI_F16, &s, 1};
    still_error err;
    must(t->b->softmax_attn(t->dev, &a, &err), &err);
}

/* Largest error of the last call's rows against a double loop over the cache. */
static double error_of(const bench *t, int n, int past)
{
    double worst = 0, *w = malloc((size_t)(past + n) * sizeof *w);
    if (!w) exit(1);
    for (int i = 0; i<n; i += n> 64 ? n / 16 + 1 : 1)
        for (int h = 0; h < t->H; h++) {
            const float *q =
                t->q + ((size_t)i * (size_t)t->H + (size_t)h) * (size_t)t->D;
            const float *o = t->o + (q - t->q);
            size_t head =
                (size_t)(h / (t->H / t->G)) * (size_t)t->capacity * (size_t)t->D;
            double max = -INFINITY, sum = 0;
            for (int j = 0; j <= past + i; j++) {
                const uint16_t *k = t->K[0] + head + (size_t)j * (size_t)t->D;
                w[j] = 0;
                for (int d = 0; d < t->D; d++)
                    w[j] += q[d] * (double)sti_f16_to_f32(k[d]);
                w[j] /= sqrt(t->D);
                max = fmax(max, w[j]);
            }
            for (int j = 0; j <= past + i; j++) sum += w[j] = exp(w[j] - max);
            for (int d = 0; d < t->D; d++) {
                const uint16_t *v = t->V[0] + head + d;
                double y = 0;
                for (int j = 0; j <= past + i; j++)
                    y += w[j] * (double)sti_f16_to_f32(v[(size_t)j * (size_t)t->D]);
                worst = fmax(worst, fabs(y / sum - (double)o[d]));
            }
        }
    free(w);
    return worst;
}

static void report(bench *t, const char *what, int n, int past, int calls)
{
    double s[REPEAT];
    for (int r = -1; r < REPEAT; r++) {
        double from = now();
        for (int i = 0; i < calls; i++) attend(t, i % LAYERS, n, past);
        if (r >= 0) s[r] = (now() - from) / calls;
    }
    sort_times(s, REPEAT);
    double mid = s[REPEAT / 2];
    double pairs = (double)t->H * ((double)n * past + 0.5 * n * (n + 1.0));
    double bytes = 4.0 * t->G * t->D * (double)(past + n);
    printf("%-8s %6d @ %-6d %10.1f us  %7.1f GFLOP/s  %6.1f GB/s  (spread %.0f%%)\n",
           what, n, past, mid * 1e6, pairs * 4 * t->D / mid * 1e-9, bytes / mid * 1e-9,
           100 * (s[REPEAT - 2] - s[1]) / mid);
}

int main(int argc, char **argv)
{
    bench t = {
        .b = sti_backend_find("cpu"), .H = 9, .G = 3, .D = 64, .capacity = 8192 + 4096};
    const int threads = number_at(2, argc, argv, 2);
    if (argc > 5) {
        t.H = atoi(argv[3]);
        t.G = atoi(argv[4]);
        t.D = atoi(argv[5]);
    }
    if (t.H < 1 || t.G < 1 || t.D < 1 || t.H % t.G) {
        fprintf(stderr, "usage: bench_attn [ISA|best [THREADS [H G D]]]\n");
        return 2;
    }
    still_error err;
    sti_dev_params p = {.threads = threads,
                        .isa = isa_of(argc, argv),
                        .max_k = 64,
                        .heads = t.H,
                        .kv_heads = t.G,
                        .head_dim = t.D};
    must(t.b->dev_new(&p, &t.dev, &err), &err);
    must(t.b->dev_reserve(t.dev, MAX_ROWS, &err), &err);
    size_t nq = (size_t)MAX_ROWS * (size_t)(t.H * t.D);
    size_t nk = (size_t)MAX_ROWS * (size_t)(t.G * t.D);
    t.q = floats(nq, 1, 1);
    t.o = floats(nq, 0, 0);
    t.k = floats(nk, 1, 2);
    t.v = floats(nk, 1, 3);
    for (int l = 0; l < LAYERS; l++) {
        size_t bytes =
            (size_t)t.G * (size_t)t.capacity * (size_t)t.D * sizeof(uint16_t);
        sti_block K, V;
        if (!sti_block_new(&K, bytes) || !sti_block_new(&V, bytes)) die("no memory");
        t.K[l] = K.p;
        t.V[l] = V.p;
        for (int past = 0; past < t.capacity; past += MAX_ROWS)
            attend(&t, l, past ? 1 : MAX_ROWS, past);
        for (int g = 0; g < t.G; g++) /* copy the first 4096 rows into the rest */
            for (int i = MAX_ROWS; i < t.capacity; i += MAX_ROWS) {
                size_t head = (size_t)g * (size_t)t.capacity, D = (size_t)t.D;
                memcpy(t.K[l] + (head + (size_t)i) * D, t.K[l] + head * D,
                       MAX_ROWS * D * 2);
                memcpy(t.V[l] + (head + (size_t)i) * D, t.V[l] + head * D,
                       MAX_ROWS * D * 2);
            }
    }
    printf("%s, %d threads, H %d G %d D %d\n", t.b->dev_isa(t.dev), threads, t.H, t.G,
           t.D);
    attend(&t, 0, 300, 200);
    double e = error_of(&t, 300, 200);
    attend(&t, 0, 1, 4000);
    e = fmax(e, error_of(&t, 1, 4000));
    printf("largest error %.2g\n", e);
    if (!(e < 1e-5)) return 1;

    static const int depth[] = {0, 128, 512, 1024, 2048, 4096, 8191};
    for (size_t i = 0; i < sizeof depth / sizeof *depth; i++)
        report(&t, "decode", 1, depth[i], depth[i] < 1024 ? 512 : 64);
    report(&t, "prefill", 16, 4096, 8);
    report(&t, "prefill", 128, 0, 64);
    report(&t, "prefill", 512, 0, 8);
    report(&t, "prefill", 512, 4096, 2);
    report(&t, "prefill", 4096, 0, 1);
    return 0; /* the system takes the memory back */
}
