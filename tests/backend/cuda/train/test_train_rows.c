/* test_train_rows.c - rows of training on the GPU against `ref`: norms, gates,
 * comparisons, and the feed-forward half of a layer; whole fours and odd columns, few
 * and many rows. */
#include "../../../run.h"
#include "train_arrays.h"

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
        sti_rmsnorm_args f = {a.here[x], a.here[g], a.here[y], M, K, 1e-5f, false};
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
        sti_swiglu_back_args s = {
            a.here[gate], a.here[up], a.here[dg], a.here[dg],
            a.here[du],   M,          K,          K % 2 ? STI_GELU_TANH : STI_SILU};
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

typedef struct ffn_case {
    int M, K, ffn;
    sti_dtype type;
    bool bias;
} ffn_case;

enum { GATE, UP, DOWN, MATRICES }; /* its matrices */

/* Forwards and backwards by one backend; arrays of it. */
static void run_ffn(const sti_backend *be, sti_dev *dev, sti_ffn_train_args f,
                    const sti_weight *w[MATRICES], float *const bias[MATRICES])
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

static void check_ffn(devices *d, const ffn_case *c)
{
    const int M = c->M, K = c->K, ffn = c->ffn;
    const size_t n = (size_t)M * (size_t)K, wide = 2 * (size_t)M * (size_t)ffn;
    arrays a = {.d = d};
    matrix m[MATRICES];
    const int x = add(&a, n, 2, 1, 0), norm = add(&a, (size_t)K, 1, 2, 0),
              kept = add(&a, wide, 0, 3, 0), y = add(&a, n, 0, 4, 0),
              dx = add(&a, n, 1e-6f, 5, 0), scratch_h = add(&a, n, 0, 6, 0),
              scratch = add(&a, wide, 0, 7, 0);
    const sti_weight *here[MATRICES], *there[MATRICES];
    float *bias[2][MATRICES] = {{0}};
    for (int i = 0; i < MATRICES; i++) {
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
                                     .scratch = a.here[scratch]};
    const sti_ffn_train_args got = {.x = on_gpu(&a, x, 0),
                                    .M = M,
                                    .w = {.norm = on_gpu(&a, norm, 0), .eps = 1e-5f},
                                    .kept = on_gpu(&a, kept, 0),
                                    .y = on_gpu(&a, y, 0),
                                    .dx = on_gpu(&a, dx, 0),
                                    .scratch_h = on_gpu(&a, scratch_h, 0),
                                    .scratch = on_gpu(&a, scratch, 0)};
    run_ffn(ref(), d->here, want, here, bias[0]);
    run_ffn(cuda(), d->gpu, got, there, bias[1]);
    hold(error_of(&a, x, 0), 0, "ffn_train: x", M, ffn, K);
    hold(error_of(&a, y, 0), 2 * HALF, "ffn_train", M, ffn, K);
    /* Twice back: the second time what comes in is off already. */
    hold(error_of(&a, dx, 0), 2 * BF16, "ffn_back", M, ffn, K);
    for (int i = 0; i < MATRICES; i++) close_matrix(d, &m[i]);
    end(&a);
}

static void test_ffn(void **state)
{
    static const ffn_case cases[] = {
        {1, 64, 96, STI_Q8_0, false},    {70, 64, 160, STI_F16, true},
        {33, 96, 352, STI_Q8_0, true},   {129, 576, 512, STI_Q4_1, false},
        {300, 128, 256, STI_BF16, true}, {40, 64, 96, STI_F32, true},
        {17, 100, 60, STI_F16, true}, /* these two by the plain operators */
    };
    devices *d = begin(state);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) check_ffn(d, &cases[i]);
}

RUN_TESTS_IN(setup, teardown, cmocka_unit_test(test_rows), cmocka_unit_test(test_ffn))
