/* The reference of Liger and SUPRA: against their sums written out over all pairs, cut
 * anywhere, and gradients against differences. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../../run.h"

#include "backend/ref/hybrid/hybrid.h"
#include "ops/linear.h"

enum { T = 21, H = 4, G = 2, D = 6, WINDOW = 5, NQ = T * H * D, NK = T * G * D };
enum { MQ = H * D * H * D, MK = G * D * G * D };

typedef still_status (*entry)(const sti_linear_args64 *, still_error *);

typedef struct problem {
    double q[NQ], k[NK], v[NK], map_q[MQ], map_k[MK], bias_q[H * D], bias_k[G * D];
    double inv_freq[D / 2], y[NQ], dy[NQ];
    sti_linear_state st;
    sti_block block;
    bool liger;
} problem;

static void fill(double *x, size_t n, uint64_t *rng, double scale)
{
    for (size_t i = 0; i < n; i++) {
        *rng = *rng * 6364136223846793005u + 1442695040888963407u;
        x[i] = scale * ((double)(*rng >> 33) / (1u << 30) - 1);
    }
}

static problem *make(bool liger)
{
    problem *p = calloc(1, sizeof *p);
    assert_non_null(p);
    uint64_t rng = 77;
    p->liger = liger;
    fill(p->q, NQ, &rng, 1.5);
    fill(p->k, NK, &rng, 1.5);
    fill(p->v, NK, &rng, 1);
    fill(p->map_q, MQ, &rng, 0.4);
    fill(p->map_k, MK, &rng, 0.6);
    fill(p->bias_q, H * D, &rng, 0.3);
    fill(p->bias_k, G * D, &rng, 0.3);
    fill(p->dy, NQ, &rng, 1);
    for (int i = 0; i < D / 2; i++) p->inv_freq[i] = pow(10000, -2.0 * i / D);
    const sti_linear_shape shape = {H, G, D};
    const int window = liger ? WINDOW : 0;
    sti_carve c = {0};
    sti_linear_state_carve(&p->st, &c, &shape, window, sizeof(double), sizeof(double));
    assert_true(sti_block_new(&p->block, c.used));
    c = (sti_carve){.base = p->block.p};
    sti_linear_state_carve(&p->st, &c, &shape, window, sizeof(double), sizeof(double));
    return p;
}

static void drop(problem *p)
{
    sti_block_free(&p->block);
    free(p);
}

static sti_linear_args64 args(problem *p, int from, int n)
{
    sti_linear_args64 a = {.shape = {H, G, D},
                           .T = n,
                           .window = p->liger ? WINDOW : 0,
                           .in = {.q = p->q + (size_t)from * H * D,
                                  .k = p->k + (size_t)from * G * D,
                                  .v = p->v + (size_t)from * G * D,
                                  .inv_freq = p->inv_freq},
                           .state = &p->st,
                           .y = p->y + (size_t)from * H * D,
                           .dy = p->dy};
    if (!p->liger) {
        a.in.map_q = p->map_q;
        a.in.map_k = p->map_k;
        a.in.bias_q = p->bias_q;
        a.in.bias_k = p->bias_k;
    }
    return a;
}

static void feed(problem *p, int from, int n)
{
    const sti_linear_args64 a = args(p, from, n);
    still_error err;
    assert_int_equal(p->liger ? sti_ref_liger_forward(&a, &err)
                              : sti_ref_supra_forward(&a, &err),
                     STILL_OK);
}

static void run(problem *p)
{
    memset(p->block.p, 0, p->block.bytes);
    p->st.pos = 0;
    feed(p, 0, T);
}

static void rotated(const problem *p, const double *x, int64_t t, double *out)
{
    memcpy(out, x, D * sizeof *x);
    sti_ref_rope(out, D, t, p->inv_freq, false);
}

/* Liger: the weight of channel i of token j at t is the product of the gates between.
 */
static void liger_naive(const problem *p, int t, int h, double *y)
{
    const int g = h / (H / G);
    double pq[D], q[D], k[D], weight[T];
    memcpy(pq, p->q + (t * H + h) * D, sizeof pq);
    sti_ref_softmax(pq, D);
    memset(y, 0, D * sizeof *y);
    for (int j = 0; j <= t; j++) {
        double pk[D], w = 0;
        memcpy(pk, p->k + (j * G + g) * D, sizeof pk);
        sti_ref_softmax(pk, D);
        for (int i = 0; i < D; i++) {
            double decay = 1;
            for (int s = j + 1; s <= t; s++)
                decay *= pow(sti_ref_sigmoid(p->k[(s * G + g) * D + i]), 1.0 / 16);
            w += pq[i] * pk[i] * decay;
        }
        sti_ref_axpy(w / 2, p->v + (j * G + g) * D, y, D);
    }
    const int first = t < WINDOW ? 0 : t - WINDOW + 1;
    rotated(p, p->q + (t * H + h) * D, t, q);
    for (int j = first; j <= t; j++) {
        rotated(p, p->k + (j * G + g) * D, j, k);
        weight[j] = sti_ref_logit(q, k, D);
    }
    sti_ref_softmax(weight + first, t - first + 1);
    for (int j = first; j <= t; j++)
        sti_ref_axpy(weight[j] / 2, p->v + (j * G + g) * D, y, D);
}

static void supra_features(const problem *p, const double *x, const double *W,
                           const double *b, int heads, int h, int t, double *out)
{
    double f[D];
    for (int e = 0; e < D; e++) {
        f[e] = b[h * D + e];
        for (int i = 0; i < heads * D; i++) f[e] += x[i] * W[i * heads * D + h * D + e];
        f[e] = fmax(f[e], 0);
    }
    rotated(p, f, t, out);
}

static void supra_naive(const problem *p, int t, int h, double *y)
{
    const int g = h / (H / G);
    double fq[D], fk[D], mean = 0, var = 0;
    supra_features(p, p->q + t * H * D, p->map_q, p->bias_q, H, h, t, fq);
    memset(y, 0, D * sizeof *y);
    for (int j = 0; j <= t; j++) {
        supra_features(p, p->k + j * G * D, p->map_k, p->bias_k, G, g, j, fk);
        const double w = sti_ref_logit(fq, fk, D) * pow(1 - pow(2, -5 - h), t - j);
        sti_ref_axpy(w, p->v + (j * G + g) * D, y, D);
    }
    for (int e = 0; e < D; e++) mean += y[e] / D;
    for (int e = 0; e < D; e++) var += (y[e] - mean) * (y[e] - mean) / D;
    for (int e = 0; e < D; e++) y[e] = (y[e] - mean) / sqrt(var + 1e-5);
}

static void test_sums(void **state)
{
    (void)state;
    for (int liger = 0; liger < 2; liger++) {
        problem *p = make(liger);
        run(p);
        for (int t = 0; t < T; t++)
            for (int h = 0; h < H; h++) {
                double y[D];
                (liger ? liger_naive : supra_naive)(p, t, h, y);
                for (int e = 0; e < D; e++)
                    assert_true(fabs(p->y[(t * H + h) * D + e] - y[e]) < 1e-12);
            }
        drop(p);
    }
}

static void test_any_cut(void **state)
{
    (void)state;
    for (int liger = 0; liger < 2; liger++) {
        problem *p = make(liger);
        double whole[NQ];
        run(p);
        memcpy(whole, p->y, sizeof whole);
        memset(p->block.p, 0, p->block.bytes);
        p->st.pos = 0;
        for (int at = 0, n = 1; at < T; at += n, n = n % 4 + 1) {
            if (n > T - at) n = T - at;
            feed(p, at, n);
        }
        assert_memory_equal(whole, p->y, sizeof whole);
        drop(p);
    }
}

/* Slopes of sum y.dy through the recurrent form. */
static void test_gradients(void **state)
{
    (void)state;
    static double g[3 * NQ + MQ + MK];
    for (int liger = 0; liger < 2; liger++) {
        problem *p = make(liger);
        double *gq = g, *gk = gq + NQ, *gv = gk + NK, *gmq = gv + NK, *gmk = gmq + MQ,
               *gbq = gmk + MK, *gbk = gbq + H * D;
        memset(g, 0, sizeof g);
        sti_linear_args64 a = args(p, 0, T);
        a.grad = (sti_linear_grad64){gq, gk, gv, gmq, gmk, gbq, gbk};
        still_error err;
        assert_int_equal(liger ? sti_ref_liger_backward(&a, &err)
                               : sti_ref_supra_backward(&a, &err),
                         STILL_OK);
        const struct {
            double *x, *g;
            int n;
        } field[] = {{p->q, gq, NQ},         {p->k, gk, NK},
                     {p->v, gv, NK},         {p->map_q, gmq, MQ},
                     {p->map_k, gmk, MK},    {p->bias_q, gbq, H * D},
                     {p->bias_k, gbk, G * D}};
        for (int f = 0; f < (liger ? 3 : 7); f++)
            for (int i = f; i < field[f].n; i += 13) {
                const double at = field[f].x[i], h = 1e-6;
                field[f].x[i] = at + h;
                run(p);
                const double up = sti_ref_dot(p->y, p->dy, NQ);
                field[f].x[i] = at - h;
                run(p);
                const double down = sti_ref_dot(p->y, p->dy, NQ);
                field[f].x[i] = at;
                const double slope = (up - down) / (2 * h);
                if (!(fabs(slope - field[f].g[i]) <= 1e-6 * (1 + fabs(slope))))
                    fail_msg("%s field %d element %d: %g, by differences %g",
                             liger ? "liger" : "supra", f, i, field[f].g[i], slope);
            }
        drop(p);
    }
}

static void test_far_gates(void **state)
{
    (void)state;
    problem *p = make(true);
    for (int i = 0; i < NK; i++) p->k[i] *= 1000; /* sigmoid at both of its ends */
    run(p);
    for (int i = 0; i < NQ; i++) assert_true(isfinite(p->y[i]));
    drop(p);
}

static void test_bad_arguments(void **state)
{
    (void)state;
    problem *p = make(true);
    sti_linear_args64 a = args(p, 0, T);
    still_error err;
    a.window = 0;
    assert_int_equal(sti_ref_liger_forward(&a, &err), STILL_E_ARG);
    assert_int_equal(sti_ref_liger_backward(&a, &err), STILL_E_ARG);
    a.shape.G = 3;
    const entry all[] = {sti_ref_liger_forward, sti_ref_liger_backward,
                         sti_ref_supra_forward, sti_ref_supra_backward};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        assert_int_equal(all[i](&a, &err), STILL_E_ARG);
    drop(p);
}

RUN_TESTS(cmocka_unit_test(test_sums), cmocka_unit_test(test_any_cut),
          cmocka_unit_test(test_gradients), cmocka_unit_test(test_far_gates),
          cmocka_unit_test(test_bad_arguments))
