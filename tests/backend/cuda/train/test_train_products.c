/* test_train_products.c - products of training on the GPU against `ref`: with weights
 * that change, back through weights, gradients of matrices, low-rank additions. */
#include "../../../run.h"
#include "train_arrays.h"

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
                  normed = add(&a, (size_t)M * (size_t)K, 0, 0, 0);
        sti_matmul_args want = {.x = a.here[x],
                                .M = M,
                                .n = n,
                                .norm = cases[i].norm ? a.here[g] : NULL,
                                .eps = 1e-5f,
                                .normed = a.here[normed],
                                .keep_normed = cases[i].norm,
                                .accumulate = cases[i].accumulate};
        sti_matmul_args got = want;
        got.x = on_gpu(&a, x, 0);
        got.norm = cases[i].norm ? on_gpu(&a, g, 0) : NULL;
        got.normed = on_gpu(&a, normed, 0);
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
        if (cases[i].norm)
            hold(error_of(&a, normed, 0), FLOATS, "normed rows", M, 0, K);
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
              normed = add(&a, M * K, 0, 0, 0),
              from = add(&a, M * (size_t)c->N[0], 1, 6, 0);
    sti_matmul_lora_args want = {.scale = 0.3f}, got = want;
    want.product = (sti_matmul_args){.x = a.here[x],
                                     .M = c->M,
                                     .n = c->n,
                                     .norm = c->norm ? a.here[g] : NULL,
                                     .eps = 1e-5f,
                                     .normed = a.here[normed],
                                     .keep_normed = c->norm,
                                     .accumulate = c->from};
    got.product = want.product;
    got.product.x = on_gpu(&a, x, 0);
    got.product.norm = c->norm ? on_gpu(&a, g, 0) : NULL;
    got.product.normed = on_gpu(&a, normed, 0);
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
    if (c->norm) hold(error_of(&a, normed, 0), FLOATS, "normed rows", c->M, 0, c->K);
    end(&a);
}

static void test_matmul_added(void **state)
{
    devices *d = begin(state);
    for (size_t i = 0; i < sizeof addeds / sizeof *addeds; i++)
        check_added(d, &addeds[i]);
}

RUN_TESTS_IN(setup, teardown, cmocka_unit_test(test_matmul_back),
             cmocka_unit_test(test_matmul_grad), cmocka_unit_test(test_grads_of_a_list),
             cmocka_unit_test(test_trained_products),
             cmocka_unit_test(test_matmul_added))
