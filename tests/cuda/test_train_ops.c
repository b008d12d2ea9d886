/* test_train_ops.c - the operators of training on the GPU against those of `ref`, over
 * shapes that take each of their paths: whole fours and odd columns, few and many rows.
 *
 * Products round both sides to bfloat16 (what goes back through weights, 2^-9 at worst)
 * or to half or TF32 (2^-11), which on average over a sum is about a third of that on
 * each side: bounds are two to three times what follows, of the norm of the result.
 * Everything else is float, and sums in another order. */
#include "../backend/matrix.h"

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
    if (!d->gpu) skip();
    return d;
}

#define OK(call)                                                                       \
    do {                                                                               \
        if ((call) != STILL_OK) fail_msg("%s: %s", #call, err.text);                   \
    } while (0)

/* ---- Numbers here and there ---------------------------------------------------------
 */

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

/* ---- Products -----------------------------------------------------------------------
 */

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
    int M, K, n, N[STI_MATMUL_MAX];
    sti_dtype type;
    unsigned trained; /* bit i: matrix i */
    bool accumulate;
} back_case;

static const back_case backs[] = {
    {1, 64, 1, {64}, STI_F32, 0, false},
    {70, 96, 2, {160, 32}, STI_Q4_1, 0, true},
    {257, 576, 4, {576, 192, 192, 576}, STI_Q4_1, 8, false},
    {33, 576, 4, {8, 8, 8, 8}, STI_F32, 15, true},
    {19, 72, 3, {5, 12, 3}, STI_F16, 2, true},
    {64, 8, 1, {576}, STI_F32, 1, false}, /* thin */
    {31, 4, 2, {96, 33}, STI_F32, 3, true},
    {600, 576, 3, {8, 8, 8}, STI_F32, 7, true}, /* up from a low rank */
    {257, 100, 1, {5}, STI_F32, 1, false},
    {30, 260, 4, {3, 4, 1, 7}, STI_F32, 15, true},
    {40, 64, 4, {16, 16, 8, 8}, STI_F32, 15, true}, /* not so low */
    {40, 100, 1, {384}, STI_BF16, 0, false},
    {9, 256, 1, {49152}, STI_Q8_0, 0, false},
};

static void run_back(devices *d, const back_case *c, int times)
{
    still_error err;
    matrix m[STI_MATMUL_MAX];
    arrays a = {.d = d};
    sti_matmul_back_args want = {.M = c->M, .n = c->n, .accumulate = c->accumulate},
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
                                   {64, 64, 100}, {8192, 128, 160}, {4097, 130, 128}};
    devices *d = begin(state);
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++) {
        still_error err;
        const int M = shape[i][0], N = shape[i][1], K = shape[i][2];
        arrays a = {.d = d};
        const int dy = add(&a, (size_t)M * (size_t)N, 1e-6f, 1, 0),
                  x = add(&a, (size_t)M * (size_t)K, 2, 2, 0),
                  dw = add(&a, (size_t)N * (size_t)K, 1e-5f, 3, 0);
        sti_matmul_grad_args g = {a.here[dy], a.here[x], a.here[dw], M, N, K, 0.5f};
        OK(ref()->matmul_grad(d->here, &g, &err));
        g.dy = on_gpu(&a, dy, 0);
        g.x = on_gpu(&a, x, 0);
        g.dw = on_gpu(&a, dw, 0);
        OK(cuda()->matmul_grad(d->gpu, &g, &err));
        hold(error_of(&a, dw, 0), HALF, "matmul_grad", M, N, K);
        end(&a);
    }
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
                                .room = a.here[room],
                                .keep_normed = cases[i].norm,
                                .accumulate = cases[i].accumulate};
        sti_matmul_args got = want;
        got.x = on_gpu(&a, x, 0);
        got.norm = cases[i].norm ? on_gpu(&a, g, 0) : NULL;
        got.room = on_gpu(&a, room, 0);
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

/* ---- Rows ---------------------------------------------------------------------------
 */

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
        sti_compare_args c = {a.here[x], a.here[y], n, 0.1f, &want[0], &want[1]};
        OK(ref()->compare(d->here, &c, &err));
        c = (sti_compare_args){
            on_gpu(&a, x, off), on_gpu(&a, y, off), n, 0.1f, &got[0], &got[1]};
        OK(cuda()->compare(d->gpu, &c, &err));
        hold(error_of(&a, y, off), 1e-4, "compare", M, 1, K);
        hold(fabs(got[0] / want[0] - 1), 1e-4, "compare: error", M, 1, K);
        hold(fabs(got[1] / want[1] - 1), 1e-9, "compare: size", M, 1, K);
        end(&a);
    }
}

static void test_loss(void **state)
{
    enum { MOST = 6 };
    static const struct {
        int M, V;
        float gain, kd;
        bool teacher;
    } cases[] = {{6, 384, 5, 0, false},    {3, 50257, 8, 0.5f, true},
                 {2, 49152, 20, 0, false}, {5, 7, 3, 2, true},
                 {4, 4100, 300, 0, false}, {2, 4099, 2, 0, true}};
    devices *d = begin(state);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        still_error err;
        const int M = cases[i].M, V = cases[i].V;
        const size_t n = (size_t)M * (size_t)V;
        arrays a = {.d = d};
        const int x = add(&a, n, cases[i].gain, 1, 0), t = add(&a, n, 4, 2, 0);
        int32_t target[MOST];
        float weight[MOST];
        double loss[2][MOST], kl[2][MOST];
        for (int m = 0; m < M; m++) {
            target[m] = (int32_t)((int64_t)m * (V - 1) / (M - 1));
            weight[m] = m == 1 ? 0 : 0.25f * (float)(m + 1);
        }
        sti_loss_args l = {.logits = a.here[x],
                           .teacher = cases[i].teacher ? a.here[t] : NULL,
                           .target = target,
                           .weight = weight,
                           .kd = cases[i].kd,
                           .M = M,
                           .V = V,
                           .loss = loss[0],
                           .kl = kl[0]};
        OK(ref()->loss(d->here, &l, &err));
        l.logits = on_gpu(&a, x, 0);
        l.teacher = cases[i].teacher ? on_gpu(&a, t, 0) : NULL;
        l.loss = loss[1];
        l.kl = kl[1];
        OK(cuda()->loss(d->gpu, &l, &err));
        hold(error_of(&a, x, 0), 1e-4, "gradient of the loss", M, 1, V);
        for (int m = 0; m < M; m++) {
            hold(fabs(loss[1][m] - loss[0][m]), 1e-5 * (1 + fabs(loss[0][m])), "loss",
                 M, m, V);
            if (cases[i].teacher)
                hold(fabs(kl[1][m] - kl[0][m]), 1e-4 * (1 + fabs(kl[0][m])), "kl", M, m,
                     V);
        }
        end(&a);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_matmul_back),
        cmocka_unit_test(test_matmul_grad),
        cmocka_unit_test(test_trained_products),
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_loss),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
