/* test_train_ops.c - the operators of training on the GPU against those of `ref`, over
 * shapes that take each of their paths: whole fours and odd columns, few and many rows.
 *
 * Products round both sides to bfloat16 (what goes back through weights, 2^-9 at worst)
 * or to half or TF32 (2^-11), which on average over a sum is about a third of that on
 * each side: bounds are two to three times what follows, of the norm of the result.
 * Everything else is float, and sums in another order. */
#include "../../skip.h"
#include "../matrix.h"

#include <math.h>
#include <stdio.h>

static const double BF16 = 4e-3, HALF = 1e-3, FLOATS = 1e-5;

static const sti_backend *cuda(void)
{
    return sti_backend_find("cuda");
}

static const sti_backend *ref(void)
{
    return sti_backend_find("ref");
}

typedef struct devices {
    sti_dev *gpu, *here;
} devices;

static int setup(void **state)
{
    static devices d;
    still_error err;
    const sti_dev_params p = {
        .threads = 1, .max_k = 16384, .heads = 8, .kv_heads = 4, .head_dim = 64};
    d = (devices){0};
    if (cuda() && cuda()->dev_new(&p, &d.gpu, &err) != STILL_OK) d.gpu = NULL;
    if (ref()->dev_new(&p, &d.here, &err) != STILL_OK) return -1;
    *state = &d;
    return 0;
}

static int teardown(void **state)
{
    devices *d = *state;
    if (d->gpu) cuda()->dev_free(d->gpu);
    ref()->dev_free(d->here);
    return 0;
}

static devices *begin(void **state)
{
    devices *d = *state;
    if (!d->gpu) skip_because("no GPU");
    return d;
}

#define OK(call)                                                                       \
    do {                                                                               \
        if ((call) != STILL_OK) fail_msg("%s: %s", #call, err.text);                   \
    } while (0)

/* ---- Numbers here and there ---------------------------------------------- */

enum { BLOCKS = 24 };

/* Arrays of a test in both memories; all end with it. */
typedef struct arrays {
    devices *d;
    float *here[BLOCKS];
    sti_block there[BLOCKS];
    size_t n[BLOCKS];
    int count;
} arrays;

/* n random floats, or zeros; `off` floats after a multiple of 16 bytes on the GPU. */
static int add(arrays *a, size_t n, float gain, uint32_t seed, size_t off)
{
    still_error err;
    const int i = a->count++;
    assert_true(i < BLOCKS);
    a->n[i] = n;
    a->here[i] = malloc((n + 1) * sizeof(float));
    assert_non_null(a->here[i]);
    for (size_t k = 0; k < n; k++) a->here[i][k] = gain * uniform(&seed);
    OK(cuda()->mem_new(a->d->gpu, (n + off) * sizeof(float), &a->there[i], &err));
    float *to = (float *)a->there[i].p + off;
    OK(cuda()->mem_move(a->d->gpu, to, a->here[i], n * sizeof(float), &err));
    return i;
}

static float *on_gpu(const arrays *a, int i, size_t off)
{
    return (float *)a->there[i].p + off;
}

/* |gpu - ref| / |ref| of an array. */
static double error_of(arrays *a, int i, size_t off)
{
    still_error err;
    float *got = malloc((a->n[i] + 1) * sizeof *got);
    double wrong = 0, size = 0;
    assert_non_null(got);
    OK(cuda()->mem_move(a->d->gpu, got, on_gpu(a, i, off), a->n[i] * sizeof *got,
                        &err));
    for (size_t k = 0; k < a->n[i]; k++) {
        const double want = a->here[i][k], e = got[k] - want;
        wrong += e * e;
        size += want * want;
    }
    free(got);
    return sqrt(wrong / (size + 1e-30));
}

static void end(arrays *a)
{
    for (int i = 0; i < a->count; i++) {
        free(a->here[i]);
        cuda()->mem_free(a->d->gpu, &a->there[i]);
    }
}

static void hold(double error, double bound, const char *what, int M, int N, int K)
{
    if (!(error <= bound))
        fail_msg("%s of %d x %d x %d: off by %.2g, at most %.2g is allowed", what, M, N,
                 K, error, bound);
}

/* ---- Products ------------------------------------------------------------ */

/* A matrix in both memories. trained: floats on the GPU that stay where they are. */
typedef struct matrix {
    source s;
    sti_weight here, there;
    sti_block floats;
    sti_tensor seen;
} matrix;

static void open_matrix(devices *d, sti_dtype type, bool trained, int N, int K,
                        uint32_t seed, matrix *m)
{
    still_error err;
    *m = (matrix){.s = make_source(trained ? STI_F32 : type, N, K, seed)};
    OK(ref()->weight_new(d->here, &m->s.t, &m->here, &err));
    if (!trained) {
        OK(cuda()->weight_new(d->gpu, &m->s.t, &m->there, &err));
        return;
    }
    const size_t bytes = (size_t)N * (size_t)K * sizeof(float);
    OK(cuda()->mem_new(d->gpu, bytes + 4, &m->floats, &err));
    /* As in an adapter: after whatever comes before it. */
    float *at = (float *)m->floats.p + (seed % 2);
    OK(cuda()->mem_move(d->gpu, at, m->s.value, bytes, &err));
    m->seen = m->s.t;
    m->seen.data = (void *)at;
    OK(cuda()->weight_new(d->gpu, &m->seen, &m->there, &err));
    assert_null(m->there.own.p);
}

static void close_matrix(devices *d, matrix *m)
{
    ref()->weight_free(d->here, &m->here);
    cuda()->weight_free(d->gpu, &m->there);
    cuda()->mem_free(d->gpu, &m->floats);
    free_source(&m->s);
}

typedef struct back_case {
    int M, K, n, N[STI_BACK_MAX];
    sti_dtype type;
    unsigned trained; /* bit i: matrix i */
    bool accumulate;
    float scale;
} back_case;

static const back_case backs[] = {
    {1, 64, 1, {64}, STI_F32, 0, false, 0},
    {70, 96, 2, {160, 32}, STI_Q4_1, 0, true, 0.5f},
    {257, 576, 4, {576, 192, 192, 576}, STI_Q4_1, 8, false, 0},
    {33, 576, 4, {8, 8, 8, 8}, STI_F32, 15, true, 0},
    {19, 72, 3, {5, 12, 3}, STI_F16, 2, true, 0},
    {64, 8, 1, {576}, STI_F32, 1, false, 2}, /* thin */
    {31, 4, 2, {96, 33}, STI_F32, 3, true, 0.25f},
    {600, 576, 3, {8, 8, 8}, STI_F32, 7, true, 0}, /* up from a low rank */
    {257, 100, 1, {5}, STI_F32, 1, false, 0},
    {30, 260, 4, {3, 4, 1, 7}, STI_F32, 15, true, 3},
    {40, 64, 4, {16, 16, 8, 8}, STI_F32, 15, true, 0}, /* not so low */
    {40, 100, 1, {384}, STI_BF16, 0, false, 0},
    {9, 256, 1, {49152}, STI_Q8_0, 0, false, 0},
    /* with low-rank additions */
    {300, 576, 8, {576, 192, 192, 576, 8, 8, 8, 8}, STI_Q4_1, 0xf8, false, 0},
    {77, 64, 2, {64, 4}, STI_Q8_0, 2, false, 0},
    {50, 100, 7, {40, 20, 20, 40, 4, 3, 4}, STI_F16, 0x78, true, 0},
};

static void run_back(devices *d, const back_case *c, int times)
{
    still_error err;
    matrix m[STI_BACK_MAX];
    arrays a = {.d = d};
    sti_matmul_back_args want = {.M = c->M,
                                 .n = c->n,
                                 .accumulate = c->accumulate,
                                 .scale = c->scale},
                         got = want;
    const int dx = add(&a, (size_t)c->M * (size_t)c->K, 0.3f, 5, 0);
    for (int i = 0; i < c->n; i++) {
        open_matrix(d, c->type, c->trained >> i & 1, c->N[i], c->K, 11u + (uint32_t)i,
                    &m[i]);
        /* Gradients are small numbers. */
        const int dy = add(&a, (size_t)c->M * (size_t)c->N[i], 1e-6f, 3u + (uint32_t)i,
                           (size_t)(c->N[i] % 2));
        want.dy[i] = a.here[dy];
        got.dy[i] = on_gpu(&a, dy, (size_t)(c->N[i] % 2));
        want.w[i] = &m[i].here;
        got.w[i] = &m[i].there;
    }
    if (c->accumulate)
        for (size_t k = 0; k < a.n[dx]; k++) a.here[dx][k] *= 1e-5f;
    OK(cuda()->mem_move(d->gpu, on_gpu(&a, dx, 0), a.here[dx], a.n[dx] * sizeof(float),
                        &err));
    want.dx = a.here[dx];
    got.dx = on_gpu(&a, dx, 0);
    for (int r = 0; r < times; r++) {
        /* The second time weights in training have other numbers. */
        for (int i = 0; i < c->n && r > 0; i++) {
            if (!(c->trained >> i & 1)) continue;
            const size_t n = (size_t)c->N[i] * (size_t)c->K;
            for (size_t k = 0; k < n; k++)
                ((float *)m[i].s.t.data)[k] *= k % 2 ? -1 : 0.5f;
            OK(cuda()->mem_move(d->gpu, (void *)m[i].seen.data, m[i].s.t.data,
                                n * sizeof(float), &err));
        }
        OK(ref()->matmul_back(d->here, &want, &err));
        OK(cuda()->matmul_back(d->gpu, &got, &err));
    }
    hold(error_of(&a, dx, 0), BF16, "matmul_back", c->M, c->N[0], c->K);
    for (int i = 0; i < c->n; i++) close_matrix(d, &m[i]);
    end(&a);
}

static void test_matmul_back(void **state)
{
    devices *d = begin(state);
    for (size_t i = 0; i < sizeof backs / sizeof *backs; i++) {
        run_back(d, &backs[i], 2);
        run_back(d, &backs[i], 1); /* other weights, at addresses that were in use */
    }
}

static void test_matmul_grad(void **state)
{
    static const int shape[][3] = {{1, 3, 5},     {100, 8, 64},     {333, 64, 8},
                                   {64, 64, 100}, {8192, 128, 160}, {4097, 130, 128},
                                   {77, 136, 200}};
    devices *d = begin(state);
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++) {
        still_error err;
        const int M = shape[i][0], N = shape[i][1], K = shape[i][2];
        arrays a = {.d = d};
        const int dy = add(&a, (size_t)M * (size_t)N, 1e-6f, 1, 0),
                  x = add(&a, (size_t)M * (size_t)K, 2, 2, 0),
                  dw = add(&a, (size_t)N * (size_t)K, 1e-5f, 3, 0);
        sti_matmul_grad_args g = {a.here[dy], a.here[x], a.here[dw], M, N, K, 0.5f};
        OK(ref()->matmul_grad(d->here, &g, 1, &err));
        g.dy = on_gpu(&a, dy, 0);
        g.x = on_gpu(&a, x, 0);
        g.dw = on_gpu(&a, dw, 0);
        OK(cuda()->matmul_grad(d->gpu, &g, 1, &err));
        const bool wide = N >= 128 && K >= 128 && N % 8 == 0 && K % 8 == 0;
        hold(error_of(&a, dw, 0), wide ? BF16 : HALF, "matmul_grad", M, N, K);
        end(&a);
    }
}

/* Those of low-rank additions at once: A of all reads one x, B reads low ranks. */
static void check_grads(devices *d, int M, int K, int rank, int n, const int *N)
{
    enum { MOST = 2 * STI_MATMUL_MAX };
    still_error err;
    arrays a = {.d = d};
    sti_matmul_grad_args want[MOST], got[MOST];
    int dw[MOST];
    /* As in an adapter, where ours adds them up: after whatever comes before. */
    const size_t rows = (size_t)M, R = (size_t)rank, off = rank <= 32;
    const int x = add(&a, rows * (size_t)K, 2, 1, 0);
    for (int i = 0; i < n; i++) {
        const size_t wide = (size_t)N[i];
        const uint32_t seed = 10u * (uint32_t)i;
        const int dy = add(&a, rows * wide, 1e-6f, seed + 2, 0),
                  low = add(&a, rows * R, 1, seed + 3, 0),
                  dlow = add(&a, rows * R, 1e-6f, seed + 4, 0);
        dw[2 * i] = add(&a, wide * R, 1e-6f, seed + 5, off);
        dw[2 * i + 1] = add(&a, R * (size_t)K, 1e-6f, seed + 6, off);
        want[2 * i] = (sti_matmul_grad_args){
            a.here[dy], a.here[low], a.here[dw[2 * i]], M, N[i], rank, 1};
        want[2 * i + 1] = (sti_matmul_grad_args){
            a.here[dlow], a.here[x], a.here[dw[2 * i + 1]], M, rank, K, 0.5f};
        got[2 * i] = (sti_matmul_grad_args){on_gpu(&a, dy, 0),
                                            on_gpu(&a, low, 0),
                                            on_gpu(&a, dw[2 * i], off),
                                            M,
                                            N[i],
                                            rank,
                                            1};
        got[2 * i + 1] = (sti_matmul_grad_args){on_gpu(&a, dlow, 0),
                                                on_gpu(&a, x, 0),
                                                on_gpu(&a, dw[2 * i + 1], off),
                                                M,
                                                rank,
                                                K,
                                                0.5f};
    }
    OK(ref()->matmul_grad(d->here, want, 2 * n, &err));
    OK(cuda()->matmul_grad(d->gpu, got, 2 * n, &err));
    for (int i = 0; i < 2 * n; i++)
        hold(error_of(&a, dw[i], off), HALF, "matmul_grad of a list", M, want[i].N,
             want[i].K);
    end(&a);
}

static void test_grads_of_a_list(void **state)
{
    devices *d = begin(state);
    check_grads(d, 5000, 576, 8, 4, (const int[]){576, 192, 192, 576});
    check_grads(d, 257, 64, 4, 4, (const int[]){64, 32, 36, 100});
    check_grads(d, 1, 16, 8, 1, (const int[]){12});
    check_grads(d, 130, 128, 12, 3, (const int[]){128, 68, 64});
    check_grads(d, 300, 96, 32, 2, (const int[]){96, 64});
    check_grads(d, 40, 100, 40, 2, (const int[]){64, 33}); /* too many ranks */
}

/* Forwards with weights in training: ranks, gates, and both beside frozen ones. */
static void test_trained_products(void **state)
{
    static const struct {
        int M, K, n, N[STI_MATMUL_MAX];
        unsigned trained;
        bool norm, accumulate;
    } cases[] = {
        {300, 576, 4, {8, 8, 8, 8}, 15, false, false}, /* thin */
        {1, 64, 1, {8}, 1, false, false},
        {17, 64, 2, {16, 8}, 3, false, false},
        {1000, 128, 1, {32}, 1, false, false},
        {129, 64, 3, {8, 4, 8}, 7, false, false}, /* not of eights */
        {40, 40, 2, {8, 8}, 3, false, false},
        {200, 8, 1, {576}, 1, false, true},
        {50, 4, 1, {96}, 1, false, true},
        {2048, 8, 1, {64}, 1, false, true},
        {515, 20, 1, {132}, 1, false, true},
        {100, 13, 1, {64}, 1, false, true},
        {300, 8, 1, {33}, 1, false, true}, /* not of fours */
        {65, 576, 4, {576, 192, 192, 576}, 8, true, false},
        {300, 96, 3, {32, 64, 160}, 5, true, false},
    };
    devices *d = begin(state);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        still_error err;
        arrays a = {.d = d};
        matrix m[STI_MATMUL_MAX];
        int y[STI_MATMUL_MAX];
        const int M = cases[i].M, K = cases[i].K, n = cases[i].n;
        const int x = add(&a, (size_t)M * (size_t)K, 2, 1, 0),
                  g = add(&a, (size_t)K, 1, 2, 0),
                  room = add(&a, (size_t)M * (size_t)K, 0, 0, 0);
        sti_matmul_args want = {.x = a.here[x],
                                .M = M,
                                .n = n,
                                .norm = cases[i].norm ? a.here[g] : NULL,
                                .eps = 1e-5f,
                                .normed = a.here[room],
                                .keep_normed = cases[i].norm,
                                .accumulate = cases[i].accumulate};
        sti_matmul_args got = want;
        got.x = on_gpu(&a, x, 0);
        got.norm = cases[i].norm ? on_gpu(&a, g, 0) : NULL;
        got.normed = on_gpu(&a, room, 0);
        for (int k = 0; k < n; k++) {
            open_matrix(d, STI_Q8_0, cases[i].trained >> k & 1, cases[i].N[k], K,
                        21u + (uint32_t)k, &m[k]);
            y[k] = add(&a, (size_t)M * (size_t)cases[i].N[k], 1, 4, 0);
            want.w[k] = &m[k].here;
            got.w[k] = &m[k].there;
            want.y[k] = a.here[y[k]];
            got.y[k] = on_gpu(&a, y[k], 0);
        }
        OK(ref()->matmul(d->here, &want, &err));
        OK(cuda()->matmul(d->gpu, &got, &err));
        for (int k = 0; k < n; k++) {
            hold(error_of(&a, y[k], 0), HALF, "matmul", M, cases[i].N[k], K);
            close_matrix(d, &m[k]);
        }
        if (cases[i].norm) hold(error_of(&a, room, 0), FLOATS, "normed rows", M, 0, K);
        end(&a);
    }
}

/* Products with low-rank additions. */
typedef struct added_case {
    int M, K, n, N[STI_MATMUL_MAX], rank;
    unsigned trained, added; /* bit i: matrix i */
    sti_dtype type;
    bool norm, bias, from;
} added_case;

static const added_case addeds[] = {
    {300, 576, 4, {576, 192, 192, 576}, 8, 8, 15, STI_Q8_0, true, false, false},
    {130, 576, 1, {576}, 8, 0, 1, STI_Q4_1, false, true, true},
    {77, 64, 3, {64, 32, 40}, 8, 0, 5, STI_F16, true, true, false},
    {65, 128, 2, {96, 33}, 16, 2, 3, STI_BF16, false, false, false},
    {1000, 96, 1, {64}, 32, 0, 1, STI_Q8_0, false, false, false},
    {17, 64, 1, {48}, 8, 0, 1, STI_Q8_0, false, false, true},
    /* These by the plain operators. */
    {90, 64, 2, {64, 64}, 4, 0, 3, STI_Q8_0, true, false, false},
    {60, 64, 2, {64, 64}, 8, 0, 3, STI_F32, true, false, false},
    {40, 96, 1, {64}, 8, 0, 0, STI_Q8_0, false, true, true},
    {5, 64, 4, {64, 32, 32, 64}, 8, 8, 15, STI_Q8_0, true, false, false},
};

/* Additions as large as what they are added to. */
static void check_added(devices *d, const added_case *c)
{
    still_error err;
    arrays a = {.d = d};
    matrix m[STI_MATMUL_MAX], down[STI_MATMUL_MAX], up[STI_MATMUL_MAX];
    int y[STI_MATMUL_MAX], low[STI_MATMUL_MAX] = {0};
    const size_t M = (size_t)c->M, K = (size_t)c->K;
    const int x = add(&a, M * K, 2, 1, 0), g = add(&a, K, 1, 2, 0),
              room = add(&a, M * K, 0, 0, 0),
              from = add(&a, M * (size_t)c->N[0], 1, 6, 0);
    sti_matmul_lora_args want = {.scale = 0.3f}, got = want;
    want.product = (sti_matmul_args){.x = a.here[x],
                                     .M = c->M,
                                     .n = c->n,
                                     .norm = c->norm ? a.here[g] : NULL,
                                     .eps = 1e-5f,
                                     .normed = a.here[room],
                                     .keep_normed = c->norm,
                                     .accumulate = c->from};
    got.product = want.product;
    got.product.x = on_gpu(&a, x, 0);
    got.product.norm = c->norm ? on_gpu(&a, g, 0) : NULL;
    got.product.normed = on_gpu(&a, room, 0);
    want.from = c->from ? a.here[from] : NULL;
    got.from = c->from ? on_gpu(&a, from, 0) : NULL;
    for (int k = 0; k < c->n; k++) {
        const size_t N = (size_t)c->N[k], R = (size_t)c->rank;
        open_matrix(d, c->type, c->trained >> k & 1, c->N[k], c->K, 21u + (uint32_t)k,
                    &m[k]);
        open_matrix(d, STI_F32, true, c->rank, c->K, 31u + (uint32_t)k, &down[k]);
        open_matrix(d, STI_F32, true, c->N[k], c->rank, 41u + (uint32_t)k, &up[k]);
        y[k] = add(&a, M * N, 1, 4, 0);
        want.product.w[k] = &m[k].here;
        got.product.w[k] = &m[k].there;
        want.product.y[k] = a.here[y[k]];
        got.product.y[k] = on_gpu(&a, y[k], 0);
        const int bias = add(&a, N, 1, 5, 0);
        want.product.bias[k] = c->bias ? a.here[bias] : NULL;
        got.product.bias[k] = c->bias ? on_gpu(&a, bias, 0) : NULL;
        if (!(c->added >> k & 1)) continue;
        low[k] = add(&a, M * R, 0, 0, 0);
        want.add[k] = (sti_lora_args){&down[k].here, &up[k].here, a.here[low[k]]};
        got.add[k] =
            (sti_lora_args){&down[k].there, &up[k].there, on_gpu(&a, low[k], 0)};
    }
    OK(ref()->matmul_lora(d->here, &want, &err));
    OK(cuda()->matmul_lora(d->gpu, &got, &err));
    for (int k = 0; k < c->n; k++) {
        hold(error_of(&a, y[k], 0), 1.5 * HALF, "matmul_lora", c->M, c->N[k], c->K);
        if (c->added >> k & 1)
            hold(error_of(&a, low[k], 0), HALF, "low", c->M, c->rank, c->K);
        close_matrix(d, &m[k]);
        close_matrix(d, &down[k]);
        close_matrix(d, &up[k]);
    }
    if (c->norm) hold(error_of(&a, room, 0), FLOATS, "normed rows", c->M, 0, c->K);
    end(&a);
}

static void test_matmul_added(void **state)
{
    devices *d = begin(state);
    for (size_t i = 0; i < sizeof addeds / sizeof *addeds; i++)
        check_added(d, &addeds[i]);
}

/* ---- Rows ---------------------------------------------------------------- */

static void test_rows(void **state)
{
    static const int shape[][3] = {/* rows, columns, floats off alignment */
                                   {1, 4, 0},      {7, 33, 0},   {300, 576, 0},
                                   {513, 1024, 0}, {260, 64, 1}, {9, 1028, 0},
                                   {3, 4096, 0},   {70, 100, 0}, {1, 1, 0}};
    devices *d = begin(state);
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++) {
        still_error err;
        const int M = shape[i][0], K = shape[i][1];
        const size_t n = (size_t)M * (size_t)K, off = (size_t)shape[i][2];
        arrays a = {.d = d};
        const int x = add(&a, n, 3, 1, off), g = add(&a, (size_t)K, 2, 2, off),
                  dy = add(&a, n, 1e-5f, 3, off), dx = add(&a, n, 1e-5f, 4, off),
                  y = add(&a, n, 0, 5, off);
        sti_rmsnorm_args f = {a.here[x], a.here[g], a.here[y], M, K, 1e-5f};
        sti_rmsnorm_back_args b = {a.here[x], a.here[g], a.here[dy], a.here[dx],
                                   M,         K,         1e-5f};
        OK(ref()->rmsnorm(d->here, &f, &err));
        OK(ref()->rmsnorm_back(d->here, &b, &err));
        f.x = b.x = on_gpu(&a, x, off);
        f.g = b.g = on_gpu(&a, g, off);
        f.y = on_gpu(&a, y, off);
        b.dy = on_gpu(&a, dy, off);
        b.dx = on_gpu(&a, dx, off);
        OK(cuda()->rmsnorm(d->gpu, &f, &err));
        OK(cuda()->rmsnorm_back(d->gpu, &b, &err));
        hold(error_of(&a, y, off), FLOATS, "rmsnorm", M, 1, K);
        hold(error_of(&a, dx, off), FLOATS, "rmsnorm_back", M, 1, K);

        const int gate = add(&a, n, 12, 6, off), up = add(&a, n, 2, 7, off),
                  dg = add(&a, n, 1e-5f, 8, off), du = add(&a, n, 0, 9, off);
        sti_swiglu_back_args s = {a.here[gate], a.here[up], a.here[dg], a.here[dg],
                                  a.here[du],   M,          K};
        OK(ref()->swiglu_back(d->here, &s, &err));
        s.gate = on_gpu(&a, gate, off);
        s.up = on_gpu(&a, up, off);
        s.dy = s.dgate = on_gpu(&a, dg, off);
        s.dup = on_gpu(&a, du, off);
        OK(cuda()->swiglu_back(d->gpu, &s, &err));
        hold(error_of(&a, dg, off), FLOATS, "swiglu_back, gate", M, 1, K);
        hold(error_of(&a, du, off), FLOATS, "swiglu_back, up", M, 1, K);

        double want[2], got[2];
        sti_block sums;
        OK(cuda()->mem_new(d->gpu, sizeof got, &sums, &err));
        sti_compare_args c = {a.here[x], a.here[y], n, 0.1f, want};
        OK(ref()->compare(d->here, &c, &err));
        c = (sti_compare_args){on_gpu(&a, x, off), on_gpu(&a, y, off), n, 0.1f, sums.p};
        OK(cuda()->compare(d->gpu, &c, &err));
        OK(cuda()->mem_move(d->gpu, got, sums.p, sizeof got, &err));
        cuda()->mem_free(d->gpu, &sums);
        hold(error_of(&a, y, off), 1e-4, "compare", M, 1, K);
        hold(fabs(got[0] / want[0] - 1), 1e-4, "compare: error", M, 1, K);
        hold(fabs(got[1] / want[1] - 1), 1e-9, "compare: size", M, 1, K);
        end(&a);
    }
}

/* ---- The feed-forward half of a layer ------------------------------------ */

typedef struct feed_case {
    int M, K, ffn;
    sti_dtype type;
    bool bias;
} feed_case;

enum { GATE, UP, DOWN, FEED }; /* its matrices */

/* Forwards and backwards by one backend; arrays of it. */
static void run_feed(const sti_backend *be, sti_dev *dev, sti_ffn_train_args f,
                     const sti_weight *w[FEED], float *const bias[FEED])
{
    still_error err;
    f.w.gate = w[GATE];
    f.w.up = w[UP];
    f.w.down = w[DOWN];
    f.w.gate_bias = bias[GATE];
    f.w.up_bias = bias[UP];
    f.w.down_bias = bias[DOWN];
    OK(be->ffn_train(dev, &f, &err));
    OK(be->ffn_back(dev, &f, &err));
    /* What is kept does not hang on the output. */
    f.y = NULL;
    OK(be->mem_clear(dev, f.kept, 8 * (size_t)f.M * (size_t)f.w.gate->N, &err));
    OK(be->ffn_train(dev, &f, &err));
    OK(be->ffn_back(dev, &f, &err));
}

static void check_feed(devices *d, const feed_case *c)
{
    const int M = c->M, K = c->K, ffn = c->ffn;
    const size_t n = (size_t)M * (size_t)K, wide = 2 * (size_t)M * (size_t)ffn;
    arrays a = {.d = d};
    matrix m[FEED];
    const int x = add(&a, n, 2, 1, 0), norm = add(&a, (size_t)K, 1, 2, 0),
              kept = add(&a, wide, 0, 3, 0), y = add(&a, n, 0, 4, 0),
              dx = add(&a, n, 1e-6f, 5, 0), scratch_h = add(&a, n, 0, 6, 0),
              room = add(&a, wide, 0, 7, 0);
    const sti_weight *here[FEED], *there[FEED];
    float *bias[2][FEED] = {{0}};
    for (int i = 0; i < FEED; i++) {
        const int N = i == DOWN ? K : ffn;
        open_matrix(d, c->type, false, N, i == DOWN ? ffn : K, 31u + (uint32_t)i,
                    &m[i]);
        here[i] = &m[i].here;
        there[i] = &m[i].there;
        const int b = add(&a, (size_t)N, 1, 8u + (uint32_t)i, 0);
        bias[0][i] = c->bias ? a.here[b] : NULL;
        bias[1][i] = c->bias ? on_gpu(&a, b, 0) : NULL;
    }
    const sti_ffn_train_args want = {.x = a.here[x],
                                     .M = M,
                                     .w = {.norm = a.here[norm], .eps = 1e-5f},
                                     .kept = a.here[kept],
                                     .y = a.here[y],
                                     .dx = a.here[dx],
                                     .scratch_h = a.here[scratch_h],
                                     .scratch = a.here[room]};
    const sti_ffn_train_args got = {.x = on_gpu(&a, x, 0),
                                    .M = M,
                                    .w = {.norm = on_gpu(&a, norm, 0), .eps = 1e-5f},
                                    .kept = on_gpu(&a, kept, 0),
                                    .y = on_gpu(&a, y, 0),
                                    .dx = on_gpu(&a, dx, 0),
                                    .scratch_h = on_gpu(&a, scratch_h, 0),
                                    .scratch = on_gpu(&a, room, 0)};
    run_feed(ref(), d->here, want, here, bias[0]);
    run_feed(cuda(), d->gpu, got, there, bias[1]);
    hold(error_of(&a, x, 0), 0, "ffn_train: x", M, ffn, K);
    hold(error_of(&a, y, 0), 2 * HALF, "ffn_train", M, ffn, K);
    /* Twice back: the second time what comes in is off already. */
    hold(error_of(&a, dx, 0), 2 * BF16, "ffn_back", M, ffn, K);
    for (int i = 0; i < FEED; i++) close_matrix(d, &m[i]);
    end(&a);
}

static void test_feed(void **state)
{
    static const feed_case cases[] = {
        {1, 64, 96, STI_Q8_0, false},    {70, 64, 160, STI_F16, true},
        {33, 96, 352, STI_Q8_0, true},   {129, 576, 512, STI_Q4_1, false},
        {300, 128, 256, STI_BF16, true}, {40, 64, 96, STI_F32, true},
        {17, 100, 60, STI_F16, true}, /* these two by the plain operators */
    };
    devices *d = begin(state);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check_feed(d, &cases[i]);
}

/* ---- Loss, optimizer ----------------------------------------------------- */

enum { LOSS_MOST = 6, HEAD = 64 };

typedef struct loss_case {
    int M, V;
    float gain, kd;
    bool teacher;
} loss_case;

static void check_loss(devices *d, const loss_case *c, bool head)
{
    still_error err;
    const int M = c->M, V = c->V;
    const size_t n = (size_t)M * (size_t)V, bytes = 2 * LOSS_MOST * sizeof(double);
    arrays a = {.d = d};
    matrix m;
    const int x = add(&a, n, c->gain, 1, 0), t = add(&a, n, 4, 2, 0),
              dx = add(&a, (size_t)M * HEAD, 1, 3, 0);
    int32_t target[LOSS_MOST];
    float weight[LOSS_MOST];
    double want[2][LOSS_MOST] = {{0}}, got[2][LOSS_MOST];
    sti_block sums;
    OK(cuda()->mem_new(d->gpu, bytes, &sums, &err));
    open_matrix(d, STI_Q8_0, false, V, HEAD, 9, &m);
    for (int i = 0; i < M; i++) {
        target[i] = (int32_t)((int64_t)i * (V - 1) / (M - 1));
        weight[i] = i == 1 ? 0 : 0.25f * (float)(i + 1);
    }
    sti_loss_args l = {.logits = a.here[x],
                       .teacher = c->teacher ? a.here[t] : NULL,
                       .target = target,
                       .weight = weight,
                       .kd = c->kd,
                       .M = M,
                       .V = V,
                       .loss = want[0],
                       .kl = c->teacher ? want[1] : NULL,
                       .head = head ? &m.here : NULL,
                       .dx = a.here[dx]};
    OK(ref()->loss(d->here, &l, &err));
    l.logits = on_gpu(&a, x, 0);
    l.teacher = c->teacher ? on_gpu(&a, t, 0) : NULL;
    l.loss = sums.p;
    l.kl = c->teacher ? l.loss + LOSS_MOST : NULL;
    l.head = head ? &m.there : NULL;
    l.dx = on_gpu(&a, dx, 0);
    OK(cuda()->loss(d->gpu, &l, &err));
    OK(cuda()->mem_move(d->gpu, got, sums.p, bytes, &err));
    if (!head) hold(error_of(&a, x, 0), 1e-4, "gradient of the loss", M, 1, V);
    hold(error_of(&a, dx, 0), head ? BF16 : 0, "loss: dx", M, HEAD, V);
    for (int i = 0; i < M; i++) {
        hold(fabs(got[0][i] - want[0][i]), 1e-5 * (1 + fabs(want[0][i])), "loss", M, i,
             V);
        hold(fabs(got[1][i] - want[1][i]), 1e-4 * (1 + fabs(want[1][i])), "kl", M, i,
             V);
    }
    close_matrix(d, &m);
    cuda()->mem_free(d->gpu, &sums);
    end(&a);
}

static void test_loss(void **state)
{
    static const loss_case cases[] = {
        {6, 384, 5, 0, false}, {3, 50257, 8, 0.5f, true}, {2, 49152, 20, 0, false},
        {5, 7, 3, 2, true},    {4, 4100, 300, 0, false},  {2, 4099, 2, 0, true}};
    devices *d = begin(state);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check_loss(d, &cases[i], false);
        check_loss(d, &cases[i], true);
    }
}

/* Arrays of several sizes and rates at once, twice. */
static void test_adam(void **state)
{
    enum { LISTS = 4, PARTS = 4 };
    static const size_t size[LISTS] = {1, 577, 70000, 33};
    devices *d = begin(state);
    still_error err;
    arrays a = {.d = d};
    sti_adam_args want[LISTS], got[LISTS];
    for (int i = 0; i < LISTS; i++) {
        const int x = add(&a, size[i], 1, 1, 1), g = add(&a, size[i], 1e-3f, 2, 1),
                  m = add(&a, size[i], 1e-3f, 3, 1), v = add(&a, size[i], 0, 4, 1);
        want[i] = (sti_adam_args){.x = a.here[x],
                                  .m = a.here[m],
                                  .v = a.here[v],
                                  .grad = a.here[g],
                                  .n = size[i],
                                  .scale = 0.5f,
                                  .lr = 0.01f * (float)(i + 1),
                                  .beta1 = 0.9f,
                                  .beta2 = 0.95f,
                                  .eps = 1e-8f,
                                  .decay = 0.1f,
                                  .c1 = 0.1,
                                  .c2 = 0.05};
        got[i] = want[i];
        got[i].x = on_gpu(&a, x, 1);
        got[i].m = on_gpu(&a, m, 1);
        got[i].v = on_gpu(&a, v, 1);
        got[i].grad = on_gpu(&a, g, 1);
    }
    for (int times = 0; times < 2; times++) {
        OK(ref()->adam(d->here, want, LISTS, &err));
        OK(cuda()->adam(d->gpu, got, LISTS, &err));
    }
    for (int i = 0; i < LISTS * PARTS; i++)
        hold(error_of(&a, i, 1), FLOATS, "adam", i / PARTS, i % PARTS, 0);
    end(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_matmul_back),
        cmocka_unit_test(test_matmul_grad),
        cmocka_unit_test(test_grads_of_a_list),
        cmocka_unit_test(test_trained_products),
        cmocka_unit_test(test_matmul_added),
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_feed),
        cmocka_unit_test(test_loss),
        cmocka_unit_test(test_adam),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
