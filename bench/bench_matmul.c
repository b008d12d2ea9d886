/* bench_matmul.c - the matrix products of a model, without a model around them.
 *
 *     bench_matmul [--isa NAME] [--threads N] [--runs N] [TYPE...]
 *
 * For each type and instruction set: checks products against a loop in double, then
 * times decode (one token through the layers and the output matrix), passes of several
 * rows likewise (the sessions of a server, a token with guesses), and prefill (a batch
 * through the layers). Shapes are SmolLM2-135M's; for K types, whose rows are
 * multiples of 256, four layers of Llama 3.2 1B. Median and spread over the runs; GB/s
 * are weight bytes as multiplied, GFLOP/s count a multiplication and an addition. */
#include <math.h>

#include "products.h"

typedef struct shape {
    int hidden, ffn, kv, vocab, layers, batch;
} shape;
static const shape SMOLLM2 = {576, 1536, 192, 49152, 30, 512};
static const shape LLAMA_1B = {2048, 8192, 512, 32768, 4, 512};
enum { MAX_LAYERS = 30 };
static const int few_rows[] = {2, 4, 6, 8, 12, 16, 24, 32, 48, 64};
enum { N_FEW = sizeof few_rows / sizeof *few_rows, MOST_FEW = 64 };

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
static void fill_type(sti_dtype t, void *out, int64_t n, uint32_t seed)
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
            if (t == STI_Q2_K || t == STI_Q4_K || t == STI_Q5_K)
                memcpy(p + at + 2, &d, 2);
        }
        p += m / info->block * info->bytes;
    }
}

static void make(const sti_backend *be, sti_dev *dev, matrix *m, sti_dtype type,
                 int64_t N, int64_t K, uint32_t seed)
{
    new_source(m, type, N, K);
    fill_type(type, m->src.p, N * K, seed);
    bind_source(be, dev, m);
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
    fill_type(type, raw, (int64_t)N * K, 7);
    sti_dequant(type, raw, w, (int64_t)N * K);
    uint32_t s = 99;
    for (int i = 0; i < M * K; i++) x[i] = uniform(&s);
    make(be, dev, &m, type, N, K, 7);
    sti_matmul_args a = {.x = x, .M = M, .n = 1, .w = {&m.w}, .y = {y}};
    must(be->matmul(dev, &a, &err), &err);
    double diff = 0, norm = 0;
    for (int i = 0; i < M; i++) {
        for (int j = 0; j < N; j++) {
            double sum = 0;
            for (int k = 0; k < K; k++) sum += (double)x[i * K + k] * w[j * K + k];
            diff += pow(y[i * N + j] - sum, 2);
            norm += sum * sum;
        }
    }
    discard(be, dev, &m);
    free(x);
    free(y);
    free(w);
    free(raw);
    return sqrt(diff / norm);
}

typedef struct stack {
    shape d;
    matrix layer[MAX_LAYERS][7], out; /* q k v, o, gate up, down */
    float *x, *q, *k, *v, *gate, *up, *logits;
} stack;

/* M rows through the layers, `outputs` of them through the output matrix. */
static void run(const sti_backend *be, sti_dev *dev, stack *s, int M, int outputs)
{
    still_error err;
    still_status st = STILL_OK;
    for (int l = 0; l < s->d.layers && st == STILL_OK; l++) {
        matrix *m = s->layer[l];
        sti_matmul_args qkv = {.x = s->x,
                               .M = M,
                               .n = 3,
                               .y = {s->q, s->k, s->v},
                               .w = {&m[0].w, &m[1].w, &m[2].w}};
        sti_matmul_args o = {.x = s->q,
                             .M = M,
                             .n = 1,
                             .w = {&m[3].w},
                             .y = {s->gate},
                             .accumulate = true};
        sti_matmul_args ffn = {
            .x = s->x, .M = M, .n = 2, .y = {s->gate, s->up}, .w = {&m[4].w, &m[5].w}};
        sti_matmul_args down = {.x = s->up,
                                .M = M,
                                .n = 1,
                                .w = {&m[6].w},
                                .y = {s->q},
                                .accumulate = true};
        st = be->matmul(dev, &qkv, &err);
        if (st == STILL_OK) st = be->matmul(dev, &o, &err);
        if (st == STILL_OK) st = be->matmul(dev, &ffn, &err);
        if (st == STILL_OK) st = be->matmul(dev, &down, &err);
    }
    sti_matmul_args out = {
        .x = s->x, .M = outputs, .n = 1, .w = {&s->out.w}, .y = {s->logits}};
    if (st == STILL_OK) st = be->matmul(dev, &out, &err);
    must(st, &err);
}

/* Seconds: median, best, worst of n. */
static void measure(const sti_backend *be, sti_dev *dev, stack *s, int M, int outputs,
                    int n, double t[3])
{
    double each[10 * MAX_RUNS];
    run(be, dev, s, M, outputs);
    for (int i = 0; i < n; i++) {
        double t0 = now_of(be->dev_threads(dev));
        run(be, dev, s, M, outputs);
        each[i] = now_of(be->dev_threads(dev)) - t0;
    }
    sort_times(each, n);
    t[0] = each[n / 2];
    t[1] = each[0];
    t[2] = each[n - 1];
}

/* All weights and activations; the weight bytes of the layers. */
static size_t make_stack(const sti_backend *be, sti_dev *dev, stack *s, sti_dtype type,
                         sti_block *io)
{
    const shape d = s->d;
    const size_t part = (size_t)d.batch * (size_t)d.ffn;
    if (!sti_block_new(io, sizeof(float) * (6 * part + MOST_FEW * (size_t)d.vocab)))
        die("no memory for activations");
    float **field[] = {&s->x, &s->q, &s->k, &s->v, &s->gate, &s->up, &s->logits};
    for (size_t i = 0; i < 7; i++) *field[i] = (float *)io->p + i * part;
    uint32_t seed = 5;
    for (size_t i = 0; i < 6 * part; i++) s->x[i] = uniform(&seed);

    size_t bytes = 0;
    const int N[] = {d.hidden, d.kv, d.kv, d.hidden, d.ffn, d.ffn, d.hidden};
    for (int l = 0; l < d.layers; l++) {
        for (int i = 0; i < 7; i++) {
            make(be, dev, &s->layer[l][i], type, N[i], i == 6 ? d.ffn : d.hidden, 11);
            bytes += bytes_of(&s->layer[l][i]);
        }
    }
    sti_dtype out = type == STI_Q4_0 || type == STI_Q4_1 ? STI_Q8_0 : type;
    make(be, dev, &s->out, out, d.vocab, d.hidden, 11);
    return bytes;
}

static void free_stack(const sti_backend *be, sti_dev *dev, stack *s)
{
    for (int l = 0; l < s->d.layers; l++) {
        for (int i = 0; i < 7; i++) discard(be, dev, &s->layer[l][i]);
    }
    discard(be, dev, &s->out);
    free(s);
}

static void bench(const sti_backend *be, const char *isa, int threads, int runs,
                  const sti_dtype_info *type)
{
    const shape d = type->block == 256 ? LLAMA_1B : SMOLLM2;
    still_error err;
    sti_dev *dev;
    sti_dev_params params = {.threads = threads, .isa = isa, .max_k = d.ffn};
    if (be->dev_new(&params, &dev, &err) != STILL_OK) {
        printf("%-5s %s\n", type->name, err.text);
        return;
    }
    double e1 = verify(be, dev, type->type, 1), e2 = verify(be, dev, type->type, 37);
    /* Activations of 8 bits leave an error near 0.5%; a wrong kernel leaves 100%. */
    if (!(e1 < 0.01 && e2 < 0.01)) die("products are wrong");

    stack *s = sti_alloc(1, sizeof *s);
    sti_block io;
    if (!s) die("no memory");
    s->d = d;
    double bytes = (double)make_stack(be, dev, s, type->type, &io);
    double per_token =
        2.0 * d.layers *
        (2.0 * d.hidden * d.hidden + 2.0 * d.hidden * d.kv + 3.0 * d.hidden * d.ffn);
    double t[3];
    measure(be, dev, s, 1, 1, runs * 10, t);
    printf("%-5s %-9s decode  %7.1f tok/s (%.1f..%.1f)  %5.1f GB/s   error %.4f\n",
           type->name, be->dev_isa(dev), 1 / t[0], 1 / t[2], 1 / t[1],
           (bytes + (double)bytes_of(&s->out)) / t[0] * 1e-9, e2);
    printf("%-5s %-9s rows   ", type->name, be->dev_isa(dev));
    for (int i = 0; i < N_FEW; i++) {
        double few[3];
        measure(be, dev, s, few_rows[i], few_rows[i], runs, few);
        printf(" %d: %.2f", few_rows[i], few[0] / t[0]);
    }
    printf(" (times one row's)\n");
    measure(be, dev, s, d.batch, 0, runs, t);
    printf("%-5s %-9s prefill %7.1f tok/s (%.1f..%.1f)  %5.0f GFLOP/s\n", type->name,
           be->dev_isa(dev), d.batch / t[0], d.batch / t[2], d.batch / t[1],
           d.batch * per_token / t[0] * 1e-9);
    fflush(stdout);
    free_stack(be, dev, s);
    sti_block_free(&io);
    be->dev_free(dev);
}

int main(int argc, char **argv)
{
    options o = {.runs = 5,
                 .n_types = 6,
                 .type = {STI_Q4_1, STI_Q4_0, STI_Q8_0, STI_Q4_K, STI_F16, STI_F32}};
    parse(argc, argv, &o);
    for (int t = 0; t < o.n_types; t++)
        for (int i = 0; i < N_ISA; i++)
            if (is_wanted(&o, all_isas[i]))
                bench(sti_backend_find("cpu"), all_isas[i], o.threads, o.runs,
                      sti_dtype_find((int)o.type[t]));
    return 0;
}
