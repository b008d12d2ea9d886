/* test_dense.c - products of the cuda backend with weights of every type.
 *
 * They are compared with sums in double over dequantized weights, which is `ref`.
 * x and w are rounded to half on the way, 2^-11 of each at worst and independent of
 * each other, so an element may be off by a few 2^-12 of sqrt(sum (x w)^2): LOOSE is
 * ten of these. Weights stored in float are multiplied in float: TIGHT. */
#include "dense_problem.h"

static const double LOOSE = 2.5e-3, TIGHT = 3e-5;

/* One element: sum_k x_k w_k, and how far it may be off. */
static void expect(const float *x, const float *w, int64_t K, sti_dtype t, double *want,
                   double *tol)
{
    double sum = 0, squares = 0, size = 0;
    for (int64_t k = 0; k < K; k++) {
        double p = (double)x[k] * w[k];
        sum += p;
        squares += p * p;
        size += (double)x[k] * x[k];
    }
    *want = sum;
    /* The floor: weights below the smallest halves. */
    double part = t == STI_F32 ? TIGHT : LOOSE;
    /* Their scales and minima are rounded to half, and partly cancel. */
    if (sti_dtype_find((int)t)->block == 256) part *= 4;
    *tol = part * sqrt(squares) + 1e-6 * sqrt(size) + 1e-6;
}

/* ---- Products ------------------------------------------------------------ */

enum { NORM = 1, ADD = 2, BIAS = 4, KEEP = 8, MODES = 16 };

/* One call for n matrices [N_i, K] in one of the MODES, checked against double loops;
 * every `every`-th column; x up to `size`. */
static void check_sized(sti_dev *dev, source *s, sti_weight *w, int n, int M, int mode,
                        int64_t every, float size)
{
    const int64_t K = w[0].K;
    const float eps = 1e-5f;
    still_error err;
    float *x = floats(M * K, size, 7u + (uint32_t)M), *g = floats(K, 1, 8),
          *h = copy(x, M * K);
    sti_block gx = there(x, M * K), gg = there(g, K), room = there(NULL, M * K);
    sti_block gy[STI_MATMUL_MAX], gb[STI_MATMUL_MAX];
    float *y0[STI_MATMUL_MAX], *bias[STI_MATMUL_MAX];
    sti_matmul_args a = {.x = gx.p, .M = M, .n = n, .accumulate = (mode & ADD) != 0};
    if (mode & NORM) {
        sti_dev *ref = ref_dev();
        sti_rmsnorm_args r = {.x = x, .g = g, .y = h, .M = M, .K = (int)K, .eps = eps};
        OK(sti_backend_find("ref")->rmsnorm(ref, &r, &err));
        sti_backend_find("ref")->dev_free(ref);
        a.norm = gg.p;
        a.eps = eps;
        a.normed = room.p;
        a.keep_normed = (mode & KEEP) != 0;
    }
    for (int i = 0; i < n; i++) {
        y0[i] = floats(M * w[i].N, 3, 9u + (uint32_t)i);
        bias[i] = floats(w[i].N, 5, 10u + (uint32_t)i);
        gy[i] = there(y0[i], M * w[i].N);
        gb[i] = there(bias[i], w[i].N);
        a.w[i] = &w[i];
        a.y[i] = gy[i].p;
        a.bias[i] = mode & BIAS && i != 1 ? gb[i].p : NULL;
    }
    OK(cuda()->matmul(dev, &a, &err));
    for (int i = 0; i < n; i++) {
        float *y = back(&gy[i], M * w[i].N);
        for (int m = 0; m < M; m++)
            for (int64_t j = 0; j < w[i].N; j += every) {
                double want, tol;
                int64_t at = m * w[i].N + j;
                expect(h + m * K, s[i].value + j * K, K, w[i].type, &want, &tol);
                if (mode & ADD) want += y0[i][at];
                if (a.bias[i]) want += bias[i][j];
                near(y[at], want, tol, "product", w[i].type, M, at);
            }
        cuda()->mem_free(dev, &gb[i]);
        free(y);
        free(y0[i]);
        free(bias[i]);
    }
    float *kept = back(&room, M * K);
    if ((mode & NORM) && (mode & KEEP))
        for (int64_t i = 0; i < M * K; i++)
            near(kept[i], h[i], 1e-6 * fabs(h[i]), "normed input", w[0].type, M, i);
    cuda()->mem_free(dev, &gx);
    cuda()->mem_free(dev, &gg);
    free(kept);
    free(x);
    free(g);
    free(h);
}

static void check_product(sti_dev *dev, source *s, sti_weight *w, int n, int M,
                          int mode, int64_t every)
{
    check_sized(dev, s, w, n, M, mode, every, 2);
}

static void every_type(void **state)
{
    (void)state;
    static const int64_t size[][2] = {{1, 7}, {33, 101}, {70, 576}, {48, 1536}};
    sti_dev *dev = need_gpu()->dev;
    for (int t = 0; t < N_TYPES; t++)
        for (size_t k = 0; k < sizeof size / sizeof *size; k++) {
            source s = make_source(TYPES[t], size[k][0], columns(TYPES[t], size[k][1]),
                                   1 + (uint32_t)t);
            sti_weight w = weight(dev, &s);
            for (int r = 0; r < N_ROWS; r++)
                check_product(dev, &s, &w, 1, ROWS[r], (r + t + (int)k * 3) % MODES, 1);
            cuda()->weight_free(dev, &w);
            free_source(&s);
        }
}

static void every_mode(void **state)
{
    (void)state;
    static const sti_dtype some[] = {STI_Q4_1, STI_Q8_0, STI_F16, STI_F32};
    sti_dev *dev = need_gpu()->dev;
    for (size_t t = 0; t < sizeof some / sizeof *some; t++) {
        source s = make_source(some[t], 50, 288, 3);
        sti_weight w = weight(dev, &s);
        for (int mode = 0; mode < MODES; mode++) {
            check_product(dev, &s, &w, 1, 1, mode, 1);
            check_product(dev, &s, &w, 1, 13, mode, 1);
            check_product(dev, &s, &w, 1, 40, mode, 1);
        }
        cuda()->weight_free(dev, &w);
        free_source(&s);
    }
}

/* Up to four matrices of like and unlike types in one call. */
static void several_matrices(void **state)
{
    (void)state;
    static const int64_t N[STI_MATMUL_MAX] = {48, 17, 5, 160};
    sti_dev *dev = need_gpu()->dev;
    for (int t = 0; t < N_TYPES; t++)
        for (int n = 2; n <= STI_MATMUL_MAX; n++) {
            source s[STI_MATMUL_MAX];
            sti_weight w[STI_MATMUL_MAX];
            for (int i = 0; i < n; i++) {
                s[i] = make_source(TYPES[(t + (n == 2 ? 0 : 4 * i)) % N_TYPES], N[i],
                                   512, 3);
                w[i] = weight(dev, &s[i]);
            }
            check_product(dev, s, w, n, 1, (t + n) % MODES, 1);
            check_product(dev, s, w, n, 6, (t + n + 5) % MODES, 1);
            check_product(dev, s, w, n, 12, (t + n + 9) % MODES, 1);
            check_product(dev, s, w, n, 29, (t + n + 13) % MODES, 1);
            for (int i = 0; i < n; i++) {
                cuda()->weight_free(dev, &w[i]);
                free_source(&s[i]);
            }
        }
}

/* n matrices [N_i, K] of types type[i % 2] in one call of M rows, in two modes. */
static void try_matrices(sti_dev *dev, const sti_dtype type[2], const int64_t *N, int n,
                         int64_t K, int M, int mode, int64_t every)
{
    source s[STI_MATMUL_MAX];
    sti_weight w[STI_MATMUL_MAX];
    for (int i = 0; i < n; i++) {
        s[i] = make_source(type[i % 2], N[i], K, 21 + (uint32_t)i);
        w[i] = weight(dev, &s[i]);
    }
    check_product(dev, s, w, n, M, mode % MODES, every);
    check_product(dev, s, w, n, M, (mode + 7) % MODES, every);
    for (int i = 0; i < n; i++) {
        cuda()->weight_free(dev, &w[i]);
        free_source(&s[i]);
    }
}

/* Every pair of kinds shares a launch, also one with more tiles than blocks of one kind
 * would be. */
static void unlike_matrices(void **state)
{
    (void)state;
    static const sti_dtype kind[] = {STI_Q4_1, STI_Q8_0, STI_Q5_1, STI_Q6_K, STI_F16};
    static const int64_t N[STI_MATMUL_MAX] = {80, 17, 33, 160},
                         many[2] = {24000, 20011};
    static const int rows[] = {1, 5, 8, 16};
    enum { KINDS = sizeof kind / sizeof *kind };
    sti_dev *dev = need_gpu()->dev;
    for (int i = 0; i < KINDS; i++)
        for (int j = 0; j < KINDS; j++)
            for (int r = 0; r < 4; r++)
                try_matrices(dev, (const sti_dtype[2]){kind[i], kind[j]}, N, 4, 768,
                             rows[r], i + 3 * j + r, 1);
    try_matrices(dev, (const sti_dtype[2]){STI_Q4_1, STI_Q8_0}, many, 2, 64, 2, NORM,
                 1);
}

/* Rows by the dozen: few tiles and many, with K of whole steps of 64 and not, up to
 * products so large that cuBLASLt makes them. */
typedef struct dozen {
    const char *name;
    int M;
    int64_t K, N[STI_MATMUL_MAX];
} dozen;

#define DOZEN(m, k, ...)                                                               \
    {                                                                                  \
        .name = #m " rows of " #k, .M = m, .K = k, .N = { __VA_ARGS__ }                \
    }

static const dozen dozens[] = {
    DOZEN(9, 72, 40, 17, 5, 130),
    DOZEN(12, 576, 576, 192, 192, 576),
    DOZEN(16, 136, 4200, 1024, 1030, 2300),
    DOZEN(17, 576, 576, 192, 192, 576),
    DOZEN(32, 1000, 33, 64, 65, 1),
    DOZEN(21, 64, 4200, 1024, 1030, 2300),
    DOZEN(40, 320, 4200, 1024, 1030, 2300),
    DOZEN(256, 576, 576, 192, 192, 576),
    DOZEN(100, 776, 2300, 70, 20, 2000),
    DOZEN(600, 64, 4096, 4100, 8, 200),
    /* Clusters share tiles: parts alike and not, of all sizes of a tile. */
    DOZEN(12, 7168, 1030, 64, 7, 3000),
    DOZEN(9, 3992, 33, 64, 65, 1),
    DOZEN(20, 1096, 700, 33, 1, 64),
    DOZEN(32, 4096, 500, 64, 64, 64),
    DOZEN(256, 1536, 576, 192, 192, 576),
    DOZEN(50, 2008, 130, 2, 63, 64),
    DOZEN(65, 200, 64, 1, 200, 17),
    DOZEN(40, 5000, 70, 3, 129, 64),
    DOZEN(200, 1544, 600, 33, 130, 577),
};

static void rows_by_the_dozen(void **state)
{
    static const sti_dtype same[][2] = {
        {STI_F16, STI_F16}, {STI_Q4_1, STI_Q8_0}, {STI_F32, STI_F16}};
    sti_dev *dev = need_gpu()->dev;
    const dozen *c = *state;
    for (int t = 0; t < 3; t++) {
        if (t == 1 && c->K % 32 != 0) continue;
        for (int n = 1; n <= STI_MATMUL_MAX; n += 3)
            try_matrices(dev, same[t], c->N, n, c->K, c->M,
                         (int)(c - dozens) + 5 * t + n, c->M > 32 ? 13 : 3);
    }
}

/* So many rows of W that a warp takes a tile by itself, of one matrix and of two. */
static void many_tiles(void **state)
{
    (void)state;
    static const sti_dtype kind[] = {STI_Q4_1, STI_Q8_0, STI_Q5_1, STI_F16};
    static const int64_t N[2] = {60001, 20017}, head[1] = {70000};
    static const int rows[] = {1, 3, 8, 13};
    sti_dev *dev = need_gpu()->dev;
    for (int t = 0; t < 4; t++)
        for (int r = 0; r < (kind[t] == STI_F16 ? 3 : 4); r++)
            for (int n = 1; n <= 2; n++)
                try_matrices(dev, (const sti_dtype[2]){kind[t], kind[t]}, N, n, 96,
                             rows[r], t + 3 * r + n, 37);
    try_matrices(dev, (const sti_dtype[2]){STI_Q4_1}, head, 1, 576, 1, NORM, 61);
}

/* Rows short enough for gemv_short.cuh and the first that are not, of sizes that halves
 * cannot hold before they are normed. */
static void short_rows(void **state)
{
    (void)state;
    static const sti_dtype kind[] = {STI_Q4_1, STI_Q8_0, STI_Q5_1, STI_F16};
    static const int64_t N[STI_MATMUL_MAX] = {64, 17, 5, 160},
                         K[] = {32, 96, 512, 544, 992, 1024, 1056};
    static const int rows[] = {1, 2, 8, 9, 16};
    enum { KINDS = sizeof kind / sizeof *kind, LENGTHS = sizeof K / sizeof *K };
    sti_dev *dev = need_gpu()->dev;
    for (int t = 0; t < KINDS; t++)
        for (int k = 0; k < LENGTHS; k++) {
            source s[STI_MATMUL_MAX];
            sti_weight w[STI_MATMUL_MAX];
            for (int i = 0; i < STI_MATMUL_MAX; i++) {
                s[i] = make_source(kind[t], N[i], K[k] - (kind[t] == STI_F16 ? 4 : 0),
                                   41 + (uint32_t)i);
                w[i] = weight(dev, &s[i]);
            }
            for (int r = 0; r < 5; r++)
                check_product(dev, s, w, STI_MATMUL_MAX, rows[r], (t + k + r) % KEEP,
                              1);
            check_sized(dev, s, w, STI_MATMUL_MAX, 1, NORM, 1, 1e6f);
            check_sized(dev, s, w, STI_MATMUL_MAX, 11, NORM | BIAS, 1, 1e-4f);
            for (int i = 0; i < STI_MATMUL_MAX; i++) {
                cuda()->weight_free(dev, &w[i]);
                free_source(&s[i]);
            }
        }
}

/* Rows too long for shared memory. */
static void long_rows(void **state)
{
    (void)state;
    static const sti_dtype some[] = {STI_Q4_K, STI_Q6_K, STI_Q5_K, STI_F16, STI_F32};
    static const int rows[] = {1, 3, 4, 8, 16, 20};
    sti_dev *dev = need_gpu()->dev;
    for (size_t t = 0; t < sizeof some / sizeof *some; t++) {
        source s = make_source(some[t], 40, 14336, 5);
        sti_weight w = weight(dev, &s);
        for (size_t r = 0; r < sizeof rows / sizeof *rows; r++)
            for (int mode = 0; mode < MODES; mode += 3)
                check_product(dev, &s, &w, 1, rows[r], mode, 3);
        cuda()->weight_free(dev, &w);
        free_source(&s);
    }
}

/* So large that blocks take several tiles, and that without a copy in half its rows are
 * made half in two parts. */
static void large_matrix(void **state)
{
    (void)state;
    sti_dev *dev = need_gpu()->dev;
    source s = make_source(STI_Q4_0, 40007, 2048, 6);
    sti_weight w = weight(dev, &s);
    check_product(dev, &s, &w, 1, 1, NORM, 61);
    check_product(dev, &s, &w, 1, 18, NORM | BIAS, 61);
    check_product(dev, &s, &w, 1, 70, NORM | BIAS | ADD, 61);
    cuda()->weight_free(dev, &w);
    free_source(&s);
}

/* A row's result does not depend on the rows beside it. */
static void batches_change_nothing(void **state)
{
    (void)state;
    enum { M = 16, N = 90, K = 768 };
    sti_dev *dev = need_gpu()->dev;
    still_error err;
    for (int t = 0; t < N_TYPES; t++) {
        const bool floats_16 = TYPES[t] == STI_F16 || TYPES[t] == STI_BF16;
        const int most = TYPES[t] == STI_F32 || floats_16 ? 8 : M;
        source s = make_source(TYPES[t], N, K, 4);
        sti_weight w = weight(dev, &s);
        float *x = floats(M * K, 3, 5), *g = floats(K, 1, 6);
        sti_block gx = there(x, M * K), gg = there(g, K);
        sti_block room = there(NULL, M * K), one = there(NULL, M * N);
        sti_block all = there(NULL, M * N);
        sti_matmul_args a = {
            .n = 1, .norm = gg.p, .eps = 1e-5f, .normed = room.p, .w = {&w}};
        a.x = gx.p;
        a.M = most;
        a.y[0] = all.p;
        OK(cuda()->matmul(dev, &a, &err));
        for (int m = 0; m < most; m++) {
            a.x = (float *)gx.p + m * K;
            a.M = 1;
            a.y[0] = (float *)one.p + m * N;
            OK(cuda()->matmul(dev, &a, &err));
        }
        float *y = back(&all, M * N), *z = back(&one, M * N);
        assert_memory_equal(y, z, sizeof *y * (size_t)(most * N));
        cuda()->mem_free(dev, &gx);
        cuda()->mem_free(dev, &gg);
        cuda()->mem_free(dev, &room);
        cuda()->weight_free(dev, &w);
        free_source(&s);
        free(x);
        free(g);
        free(y);
        free(z);
    }
}

static void refusals(void **state)
{
    (void)state;
    sti_dev *dev = need_gpu()->dev;
    still_error err;
    sti_weight w;
    source s = make_source(STI_F32, 4, 96, 1);
    s.t.type = STI_I32;
    assert_int_equal(cuda()->weight_new(dev, &s.t, &w, &err), STILL_E_UNSUPPORTED);
    s.t.type = STI_Q8_0;
    s.t.dim[1] = 40; /* no whole blocks */
    assert_int_equal(cuda()->weight_new(dev, &s.t, &w, &err), STILL_E_FORMAT);
    s.t.n_dims = 1;
    assert_int_equal(cuda()->weight_new(dev, &s.t, &w, &err), STILL_E_FORMAT);
    free_source(&s);
}

int main(void)
{
    struct CMUnitTest tests[10 + COUNT(dozens)] = {
        cmocka_unit_test(every_type),       cmocka_unit_test(every_mode),
        cmocka_unit_test(several_matrices), cmocka_unit_test(unlike_matrices),
        cmocka_unit_test(many_tiles),       cmocka_unit_test(short_rows),
        cmocka_unit_test(long_rows),        cmocka_unit_test(large_matrix),
        cmocka_unit_test(refusals),         cmocka_unit_test(batches_change_nothing)};
    add_cases(tests, 10, rows_by_the_dozen, dozens, COUNT(dozens), sizeof *dozens);
    return cmocka_run_group_tests_name("dense", tests, open_dense_gpu, close_gpu) +
           cmocka_run_group_tests_name("dense, without copies", tests, open_frugal_gpu,
                                       close_frugal_gpu);
}
