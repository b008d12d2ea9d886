/* bench_train_ops.c - the operators of training, without a model around them.
 *
 *     bench_train_ops [--isa NAME] [--threads N] [--runs N] [TYPE...]
 *
 * Prints the peak of the machine (multiply-adds in registers), then for each
 * instruction set the gradients of matrix products in GFLOP/s, for each weight type
 * after a check against a loop in double, and the other operators in elements a
 * nanosecond. Shapes are SmolLM2-135M's: 1024 rows of 576 and 1536 through the layers,
 * 32 to 128 rows through the head, adapters of rank 16. Median and spread. */
#include <math.h>

#include "base/pool.h"
#include "products.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { HIDDEN = 576, FFN = 1536, KV = 192, VOCAB = 49152, ROWS = 1024, RANK = 16 };

typedef struct bench {
    const sti_backend *be;
    sti_dev *dev;
    int threads, runs;
} bench;

/* ---- The peak ------------------------------------------------------------ */

enum { CHAINS = 12, STEPS = 20000000 };

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static float spin_avx512(void)
{
    __m512 s[CHAINS], x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(1e-3f), sum = x;
    for (int i = 0; i < CHAINS; i++) s[i] = _mm512_set1_ps((float)i);
    for (int k = 0; k < STEPS; k++) {
#pragma GCC unroll 16
        for (int i = 0; i < CHAINS; i++) s[i] = _mm512_fmadd_ps(s[i], x, y);
    }
    for (int i = 0; i < CHAINS; i++) sum = _mm512_add_ps(sum, s[i]);
    return _mm512_reduce_add_ps(sum);
}

__attribute__((target("avx2,fma"))) static float spin_avx2(void)
{
    __m256 s[CHAINS], x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(1e-3f), sum = x;
    float out[8];
    for (int i = 0; i < CHAINS; i++) s[i] = _mm256_set1_ps((float)i);
    for (int k = 0; k < STEPS; k++) {
#pragma GCC unroll 16
        for (int i = 0; i < CHAINS; i++) s[i] = _mm256_fmadd_ps(s[i], x, y);
    }
    for (int i = 0; i < CHAINS; i++) sum = _mm256_add_ps(sum, s[i]);
    _mm256_storeu_ps(out, sum);
    return out[0];
}

static void spin_work(void *arg, int worker, int workers)
{
    (void)workers;
    float *out = arg;
    out[16 * worker] = __builtin_cpu_supports("avx512f") ? spin_avx512() : spin_avx2();
}

static void peak(int threads)
{
    sti_pool *pool;
    float *out = floats(16 * 1024, 1, 1);
    if (!__builtin_cpu_supports("fma") ||
        sti_pool_new(threads, &pool, NULL) != STILL_OK)
        die("cannot measure the peak");
    const int lanes = __builtin_cpu_supports("avx512f") ? 16 : 8;
    double best = INFINITY;
    for (int i = 0; i < 3; i++) {
        double t = now_of(threads);
        sti_pool_run(pool, spin_work, out);
        t = now_of(threads) - t;
        if (t < best) best = t;
    }
    const int n = sti_pool_threads(pool);
    printf("peak of %d threads: %.0f GFLOP/s\n", n,
           2e-9 * lanes * CHAINS * (double)STEPS * n / best);
    sti_pool_free(pool);
    free(out);
}
#else
static void peak(int threads)
{
    (void)threads;
}
#endif

/* ---- Timing -------------------------------------------------------------- */

typedef still_status (*entry)(const bench *, const void *args);

/* Times `run` and prints its rate: `work` is in units of 1e9. */
static void measure(const bench *b, const char *what, entry run, const void *args,
                    double work, const char *unit)
{
    double t[MAX_RUNS];
    if (run(b, args) != STILL_OK) die(what);
    for (int i = 0; i < b->runs; i++) {
        t[i] = now_of(b->threads);
        run(b, args);
        t[i] = now_of(b->threads) - t[i];
    }
    sort_times(t, b->runs);
    printf("  %-34s %7.1f (%.1f..%.1f) %s\n", what, 1e-9 * work / t[b->runs / 2],
           1e-9 * work / t[b->runs - 1], 1e-9 * work / t[0], unit);
    fflush(stdout);
}

#define ENTRY(name)                                                                    \
    static still_status run_##name(const bench *b, const void *a)                      \
    {                                                                                  \
        return b->be->name(b->dev, a, NULL);                                           \
    }
ENTRY(matmul)
ENTRY(matmul_back)
ENTRY(rmsnorm_back)
ENTRY(swiglu_back)
ENTRY(loss)

static still_status run_matmul_grad(const bench *b, const void *a)
{
    return b->be->matmul_grad(b->dev, a, 1, NULL);
}

static still_status run_adam(const bench *b, const void *a)
{
    return b->be->adam(b->dev, a, 1, NULL);
}

/* ---- Matrix products ----------------------------------------------------- */

/* values: [N,K], if the numbers are wanted too. */
static void make(const bench *b, matrix *m, sti_dtype type, int64_t N, int64_t K,
                 float *values)
{
    new_source(m, type, N, K);
    float *x = floats((size_t)(N * K), 1, 5);
    if (!sti_quant(type, x, m->src.p, N * K))
        die("TYPE: this one cannot be written; try q4_1, q8_0, f16");
    free(x);
    if (values) sti_dequant(type, m->src.p, values, N * K);
    bind_source(b->be, b->dev, m);
}

/* M rows through the gradient of `n` matrices [N,K]. */
static void back(const bench *b, const char *name, sti_dtype type, int M, int n,
                 const int *N, int K)
{
    matrix m[STI_MATMUL_MAX];
    double work = 0;
    sti_matmul_back_args a = {
        .M = M, .n = n, .dx = floats((size_t)M * (size_t)K, 1, 1)};
    for (int i = 0; i < n; i++) {
        make(b, &m[i], type, N[i], K, NULL);
        a.w[i] = &m[i].w;
        a.dy[i] = floats((size_t)M * (size_t)N[i], 1, 2);
        work += 2.0 * M * N[i] * K;
    }
    char what[64];
    snprintf(what, sizeof what, "back %s %s, %d rows", sti_dtype_find((int)type)->name,
             name, M);
    measure(b, what, run_matmul_back, &a, work, "GFLOP/s");
    for (int i = 0; i < n; i++) {
        discard(b->be, b->dev, &m[i]);
        free((float *)a.dy[i]);
    }
    free(a.dx);
}

/* A small product against double. */
static void verify(const bench *b, sti_dtype type)
{
    enum { M = 37, N = 300, K = 96 };
    matrix m;
    float *dy = floats((size_t)(M * N), 1, 3), *dx = floats((size_t)(M * K), 1, 4);
    float *w = floats((size_t)(N * K), 1, 5);
    make(b, &m, type, N, K, w);
    const sti_matmul_back_args a = {.dy = {dy}, .M = M, .n = 1, .w = {&m.w}, .dx = dx};
    if (run_matmul_back(b, &a) != STILL_OK) die("matmul_back failed");
    double diff = 0, norm = 0;
    for (int i = 0; i < M; i++)
        for (int k = 0; k < K; k++) {
            double sum = 0;
            for (int n = 0; n < N; n++) sum += (double)dy[i * N + n] * w[n * K + k];
            diff += pow(dx[i * K + k] - sum, 2);
            norm += sum * sum;
        }
    if (!(diff <= 1e-12 * norm)) die("matmul_back is wrong");
    discard(b->be, b->dev, &m);
    free(dy);
    free(dx);
    free(w);
}

static void bench_back(const bench *b, sti_dtype type)
{
    verify(b, type);
    back(b, "q k v", type, ROWS, 3, (const int[]){HIDDEN, KV, KV}, HIDDEN);
    back(b, "o", type, ROWS, 1, (const int[]){HIDDEN}, HIDDEN);
    back(b, "gate up", type, ROWS, 2, (const int[]){FFN, FFN}, HIDDEN);
    back(b, "down", type, ROWS, 1, (const int[]){HIDDEN}, FFN);
    back(b, "head", type, 32, 1, (const int[]){VOCAB}, HIDDEN);
    back(b, "head", type, 128, 1, (const int[]){VOCAB}, HIDDEN);
}

static void grad(const bench *b, int M, int N, int K)
{
    const sti_matmul_grad_args a = {.dy = floats((size_t)M * (size_t)N, 1, 1),
                                    .x = floats((size_t)M * (size_t)K, 1, 2),
                                    .dw = floats((size_t)N * (size_t)K, 1, 3),
                                    .M = M,
                                    .N = N,
                                    .K = K,
                                    .scale = 1e-3f};
    char what[64];
    snprintf(what, sizeof what, "grad [%d,%d], %d rows", N, K, M);
    measure(b, what, run_matmul_grad, &a, 2.0 * M * N * K, "GFLOP/s");
    free((float *)a.dy);
    free((float *)a.x);
    free(a.dw);
}

/* The forward product with float weights, to compare with. */
static void forward(const bench *b, int M, int N, int K)
{
    matrix m;
    make(b, &m, STI_F32, N, K, NULL);
    const sti_matmul_args a = {.x = floats((size_t)M * (size_t)K, 1, 1),
                               .M = M,
                               .n = 1,
                               .w = {&m.w},
                               .y = {floats((size_t)M * (size_t)N, 1, 2)}};
    char what[64];
    snprintf(what, sizeof what, "matmul f32 [%d,%d], %d rows", N, K, M);
    measure(b, what, run_matmul, &a, 2.0 * M * N * K, "GFLOP/s");
    discard(b->be, b->dev, &m);
    free((float *)a.x);
    free(a.y[0]);
}

/* ---- The others ---------------------------------------------------------- */

static still_status run_squares(const bench *b, const void *args)
{
    const sti_adam_args *a = args;
    double sum;
    return b->be->sum_squares(b->dev, a->grad, &(sti_span){0, a->n}, 1, &sum, NULL);
}

static void bench_rows(const bench *b)
{
    enum { HEAD_ROWS = 64 };
    const size_t n = (size_t)ROWS * FFN, logits = (size_t)HEAD_ROWS * VOCAB;
    float *x[5], *l = floats(logits, 1, 6), *t = floats(logits, 1, 7);
    for (int i = 0; i < 5; i++) x[i] = floats(n, 1, (uint32_t)i);
    const char *const unit = "elements/ns";
    const sti_rmsnorm_back_args norm = {x[0], x[1], x[2], x[3], ROWS, HIDDEN, 1e-5f};
    measure(b, "rmsnorm_back [1024,576]", run_rmsnorm_back, &norm,
            (double)ROWS * HIDDEN, unit);
    const sti_swiglu_back_args act = {x[0], x[1], x[2], x[3],
                                      x[4], ROWS, FFN,  STI_SILU};
    measure(b, "swiglu_back [1024,1536]", run_swiglu_back, &act, (double)n, unit);

    int32_t target[HEAD_ROWS];
    float weight[HEAD_ROWS];
    double loss[HEAD_ROWS], kl[HEAD_ROWS];
    for (int i = 0; i < HEAD_ROWS; i++) {
        target[i] = 700 * i;
        weight[i] = 1;
    }
    sti_loss_args a = {l,     NULL, target, weight, 0,   HEAD_ROWS,
                       VOCAB, loss, kl,     NULL,   NULL};
    measure(b, "loss [64,49152]", run_loss, &a, (double)logits, unit);
    a.teacher = t;
    a.kd = 0.5f;
    measure(b, "loss [64,49152], teacher", run_loss, &a, (double)logits, unit);

    memset(x[2], 0, n * sizeof(float));
    const sti_adam_args adam = {x[0], x[1],  x[2],  x[3],  n,   1,   1e-4f,
                                0.9f, 0.99f, 1e-8f, 0.01f, 0.1, 0.01};
    measure(b, "adam, 1.6 million", run_adam, &adam, (double)n, unit);
    measure(b, "sum_squares, 1.6 million", run_squares, &adam, (double)n, unit);
    for (int i = 0; i < 5; i++) free(x[i]);
    free(l);
    free(t);
}

static void bench_isa(bench *b, const char *isa, const sti_dtype *type, int n_types)
{
    still_error err;
    const sti_dev_params params = {.threads = b->threads, .isa = isa, .max_k = FFN};
    if (b->be->dev_new(&params, &b->dev, &err) != STILL_OK) {
        printf("%s\n", err.text);
        return;
    }
    printf("%s, %d threads\n", isa, b->be->dev_threads(b->dev));
    for (int i = 0; i < n_types; i++) bench_back(b, type[i]);
    grad(b, ROWS, HIDDEN, HIDDEN);
    grad(b, 8192, HIDDEN, HIDDEN);
    grad(b, ROWS, RANK, HIDDEN);
    grad(b, ROWS, HIDDEN, RANK);
    forward(b, ROWS, HIDDEN, HIDDEN);
    forward(b, ROWS, RANK, HIDDEN);
    forward(b, ROWS, HIDDEN, RANK);
    bench_rows(b);
    b->be->dev_free(b->dev);
}

int main(int argc, char **argv)
{
    options o = {.runs = 7, .n_types = 3, .type = {STI_Q4_1, STI_Q8_0, STI_F32}};
    parse(argc, argv, &o);
    bench b = {.be = sti_backend_find("cpu"), .threads = o.threads, .runs = o.runs};
    peak(b.threads);
    for (int i = 0; i < N_ISA; i++)
        if (is_wanted(&o, all_isas[i])) bench_isa(&b, all_isas[i], o.type, o.n_types);
    return 0;
}
