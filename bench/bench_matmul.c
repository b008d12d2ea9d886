/* bench_matmul.c - the matrix products of SmolLM2-135M, without a model around them.
 *
 *     bench_matmul [--isa NAME] [--threads N] [--runs N] [TYPE...]
 *
 * For each type and instruction set: checks products against a loop in double, then
 * times decode (one token through 30 layers and the output matrix) and prefill (512
 * tokens through the layers). Median and spread over the runs; GB/s are weight bytes
 * as multiplied, GFLOP/s count a multiplication and an addition. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ops/ops.h"

enum { HIDDEN = 576, FFN = 1536, KV = 192, VOCAB = 49152, LAYERS = 30, BATCH = 512 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void die(const char *what)
{
    fprintf(stderr, "bench_matmul: %s\n", what);
    exit(1);
}

static uint32_t next(uint32_t *s)
{
    *s ^= *s << 13;
    *s ^= *s >> 17;
    *s ^= *s << 5;
    return *s;
}

static float uniform(uint32_t *s)
{
    return (float)(next(s) >> 8) * 0x1p-23f - 1.0f;
}

/* n random elements of type t with standard deviation near 0.03. */
static void fill(sti_dtype t, void *out, int64_t n, uint32_t seed)
{
    uint32_t s = seed;
    float row[256];
    const sti_dtype_info *info = sti_dtype_find((int)t);
    uint8_t *p = out;
    for (int64_t i = 0; i < n; i += 256) {
        int m = n - i < 256 ? (int)(n - i) : 256;
        for (int j = 0; j < m; j++) row[j] = 0.05f * uniform(&s);
        if (!sti_quant(t, row, p, m)) { /* K types: random bytes, tame scales */
            for (int j = 0; j < info->bytes; j++) p[j] = (uint8_t)(next(&s) >> 11);
            uint16_t d = sti_f32_to_f16(t == STI_Q6_K ? 4e-5f : 1e-4f);
            size_t at = t == STI_Q6_K   ? 208
                        : t == STI_Q3_K ? 108
                        : t == STI_Q2_K ? 80
                                        : 0;
            memcpy(p + at, &d, 2);
            if (t != STI_Q6_K && t != STI_Q3_K) memcpy(p + at + 2, &d, 2);
        }
        p += m / info->block * info->bytes;
    }
}

typedef struct matrix {
    sti_tensor t;
    sti_block src;
    sti_weight w;
} matrix;

static void make(const sti_backend *be, sti_dev *dev, matrix *m, sti_dtype type,
                 int64_t N, int64_t K, uint32_t seed)
{
    still_error err;
    size_t bytes;
    if (!sti_dtype_bytes(type, (uint64_t)(N * K), &bytes) ||
        !sti_block_new(&m->src, bytes))
        die("cannot make a matrix");
    m->t = (sti_tensor){.name = "bench", .type = type, .n_dims = 2, .dim = {N, K},
                        .data = m->src.p, .bytes = bytes, .path = "memory"};
    fill(type, m->src.p, N * K, seed);
    if (be->weight_new(dev, &m->t, &m->w, &err) != STILL_OK) die(err.text);
    if (m->w.own.p) sti_block_free(&m->src);
}

static size_t bytes_of(const matrix *m)
{
    return m->w.own.p ? m->w.own.bytes : m->t.bytes;
}

/* Relative error of a small product against double on dequantized weights. */
static double verify(const sti_backend *be, sti_dev *dev, sti_dtype type, int M)
{
    enum { N = 100, K = 768 };
    matrix m = {0};
    still_error err;
    size_t bytes;
    float *x = sti_alloc((size_t)M * K, sizeof *x), *y = sti_alloc((size_t)M * N, 4);
    float *w = sti_alloc((size_t)N * K, sizeof *w);
    void *raw = NULL;
    if (!x || !y || !w || !sti_dtype_bytes(type, N * K, &bytes) ||
        !(raw = sti_alloc(bytes, 1)))
        die("no memory");
    fill(type, raw, (int64_t)N * K, 7);
    sti_dequant(type, raw, w, (int64_t)N * K);
    uint32_t s = 99;
    for (int i = 0; i < M * K; i++) x[i] = uniform(&s);
    make(be, dev, &m, type, N, K, 7);
    sti_matmul_args a = {.x = x, .M = M, .n = 1, .w = {&m.w}, .y = {y}};
    if (be->matmul(dev, &a, &err) != STILL_OK) die(err.text);
    double diff = 0, norm = 0;
    for (int i = 0; i < M; i++) {
        for (int j = 0; j < N; j++) {
            double sum = 0;
            for (int k = 0; k < K; k++) sum += (double)x[i * K + k] * w[j * K + k];
            diff += pow(y[i * N + j] - sum, 2);
            norm += sum * sum;
        }
    }
    be->weight_free(dev, &m.w);
    sti_block_free(&m.src);
    free(x);
    free(y);
    free(w);
    free(raw);
    return sqrt(diff / norm);
}

typedef struct stack {
    matrix qkv[LAYERS][3], o[LAYERS], ffn[LAYERS][2], down[LAYERS], out;
    float *x, *q, *k, *v, *gate, *up, *logits;
} stack;

static void run(const sti_backend *be, sti_dev *dev, stack *s, int M, bool output)
{
    still_error err;
    still_status st = STILL_OK;
    for (int l = 0; l < LAYERS && st == STILL_OK; l++) {
        sti_matmul_args qkv = {.x = s->x, .M = M, .n = 3, .y = {s->q, s->k, s->v}};
        for (int i = 0; i < 3; i++) qkv.w[i] = &s->qkv[l][i].w;
        sti_matmul_args o = {.x = s->q, .M = M, .n = 1, .w = {&s->o[l].w},
                             .y = {s->gate}, .accumulate = true};
        sti_matmul_args ffn = {.x = s->x, .M = M, .n = 2, .y = {s->gate, s->up},
                               .w = {&s->ffn[l][0].w, &s->ffn[l][1].w}};
        sti_matmul_args down = {.x = s->up, .M = M, .n = 1, .w = {&s->down[l].w},
                                .y = {s->q}, .accumulate = true};
        st = be->matmul(dev, &qkv, &err);
        if (st == STILL_OK) st = be->matmul(dev, &o, &err);
        if (st == STILL_OK) st = be->matmul(dev, &ffn, &err);
        if (st == STILL_OK) st = be->matmul(dev, &down, &err);
    }
    sti_matmul_args out = {.x = s->x, .M = 1, .n = 1, .w = {&s->out.w}, .y = {s->logits}};
    if (output && st == STILL_OK) st = be->matmul(dev, &out, &err);
    if (st != STILL_OK) die(err.text);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Seconds: median, best, worst of n. */
static void measure(const sti_backend *be, sti_dev *dev, stack *s, int M, bool output,
                    int n, double t[3])
{
    double each[1000];
    run(be, dev, s, M, output);
    for (int i = 0; i < n; i++) {
        double t0 = now();
        run(be, dev, s, M, output);
        each[i] = now() - t0;
    }
    qsort(each, (size_t)n, sizeof *each, by_value);
    t[0] = each[n / 2];
    t[1] = each[0];
    t[2] = each[n - 1];
}

static void bench(const sti_backend *be, const char *isa, int threads, int runs,
                  sti_dtype type)
{
    still_error err;
    sti_dev *dev;
    sti_dev_params params = {.threads = threads, .isa = isa, .max_k = FFN};
    if (be->dev_new(&params, &dev, &err) != STILL_OK) {
        printf("%-6s %s\n", sti_dtype_find((int)type)->name, err.text);
        return;
    }
    double e1 = verify(be, dev, type, 1), e2 = verify(be, dev, type, 37);
    /* Activations of 8 bits leave an error near 0.5%; a wrong kernel leaves 100%. */
    if (!(e1 < 0.01 && e2 < 0.01)) die("products are wrong");

    stack *s = sti_alloc(1, sizeof *s);
    sti_block io = {0};
    if (!s || !sti_block_new(&io, sizeof(float) * (BATCH * (6 * FFN) + VOCAB)))
        die("no memory");
    float *p = io.p;
    float **part[] = {&s->x, &s->q, &s->k, &s->v, &s->gate, &s->up};
    for (int i = 0; i < 6; i++, p += BATCH * FFN) *part[i] = p;
    s->logits = p;
    uint32_t seed = 5;
    for (int i = 0; i < 6 * BATCH * FFN; i++) s->x[i] = uniform(&seed);

    /* 256 does not divide 576: K types are timed on rows of 512 and 1536. */
    bool k_type = sti_dtype_find((int)type)->block == 256;
    int hidden = k_type ? 512 : HIDDEN;
    size_t bytes = 0;
    double load = 0;
    for (int l = 0; l < LAYERS; l++) {
        matrix *m[] = {&s->qkv[l][0], &s->qkv[l][1], &s->qkv[l][2], &s->o[l],
                       &s->ffn[l][0], &s->ffn[l][1], &s->down[l]};
        int64_t N[] = {hidden, KV, KV, hidden, FFN, FFN, hidden};
        for (int i = 0; i < 7; i++) {
            double t0 = now();
            make(be, dev, m[i], type, N[i], i == 6 ? FFN : hidden, 11);
            load += now() - t0;
            bytes += bytes_of(m[i]);
        }
    }
    sti_dtype out = type == STI_Q4_0 || type == STI_Q4_1 ? STI_Q8_0 : type;
    make(be, dev, &s->out, out, VOCAB, hidden, 11);

    double per_token = 2.0 * LAYERS *
                       (2.0 * hidden * hidden + 2.0 * hidden * KV + 3.0 * hidden * FFN);
    double t[3];
    measure(be, dev, s, 1, true, runs * 10, t);
    printf("%-5s %-9s decode  %7.1f tok/s (%.1f..%.1f)  %5.1f GB/s   error %.4f\n",
           sti_dtype_find((int)type)->name, be->dev_isa(dev), 1 / t[0], 1 / t[2],
           1 / t[1], (double)(bytes + bytes_of(&s->out)) / t[0] * 1e-9, e2);
    measure(be, dev, s, BATCH, false, runs, t);
    printf("%-5s %-9s prefill %7.1f tok/s (%.1f..%.1f)  %5.0f GFLOP/s\n",
           sti_dtype_find((int)type)->name, be->dev_isa(dev), BATCH / t[0], BATCH / t[2],
           BATCH / t[1], BATCH * per_token / t[0] * 1e-9);
    fflush(stdout);

    for (int l = 0; l < LAYERS; l++) {
        matrix *m[] = {&s->qkv[l][0], &s->qkv[l][1], &s->qkv[l][2], &s->o[l],
                       &s->ffn[l][0], &s->ffn[l][1], &s->down[l]};
        for (int i = 0; i < 7; i++) {
            be->weight_free(dev, &m[i]->w);
            sti_block_free(&m[i]->src);
        }
    }
    be->weight_free(dev, &s->out.w);
    sti_block_free(&s->out.src);
    sti_block_free(&io);
    free(s);
    be->dev_free(dev);
}

int main(int argc, char **argv)
{
    const char *isa = NULL;
    int threads = 0, runs = 5, n_types = 0;
    sti_dtype type[16] = {STI_Q4_1, STI_Q4_0, STI_Q8_0, STI_Q4_K, STI_F16, STI_F32};
    for (int i = 1; i < argc; i++) {
        const sti_dtype_info *info = sti_dtype_by_name(argv[i]);
        if (!strcmp(argv[i], "--isa") && i + 1 < argc)
            isa = argv[++i];
        else if (!strcmp(argv[i], "--threads") && i + 1 < argc)
            threads = atoi(argv[++i]);
        else if (!strcmp(argv[i], "--runs") && i + 1 < argc)
            runs = atoi(argv[++i]);
        else if (info && n_types < 16)
            type[n_types++] = info->type;
        else
            die("usage: bench_matmul [--isa NAME] [--threads N] [--runs N] [TYPE...]");
    }
    if (runs < 1 || runs > 100) die("--runs: expected 1 to 100");
    if (n_types == 0) n_types = 6;
    static const char *const all[] = {"avx512", "avx2", "portable"};
    for (int t = 0; t < n_types; t++) {
        for (int i = 0; i < 3; i++)
            if (!isa || !strcmp(isa, all[i]))
                bench(sti_backend_find("cpu"), all[i], threads, runs, type[t]);
    }
    return 0;
}
