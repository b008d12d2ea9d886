/* test_hybrid_cpu.c - the hybrid operator of the cpu backend for sessions, every
 * instruction set here: against the reference in double over random settings, and bit
 * for bit against itself under other cuts of the prompt, other batches of sessions and
 * other thread counts. */
#include "hybrid_problem.h"

#include <stdio.h>

#include "ops/ops.h"

static const char *const isa_name[] = {"portable", "avx2", "avx512"};
enum { N_ISA = 3 };

static sti_dev *new_dev(const char *isa, int threads)
{
    const sti_dev_params p = {.threads = threads, .isa = isa, .max_k = 64};
    still_error err;
    sti_dev *dev;
    still_status st = sti_backend_find("cpu")->dev_new(&p, &dev, &err);
    if (st == STILL_E_UNSUPPORTED) return NULL; /* this processor lacks it */
    assert_int_equal(st, STILL_OK);
    return dev;
}

static void free_dev(sti_dev *dev)
{
    sti_backend_find("cpu")->dev_free(dev);
}

/* ---- A session of the cpu backend over the inputs of a problem ---------------------- */

typedef struct session {
    const problem *p;
    float *q, *k, *v, *gate, *alpha, *window, *map_q, *map_k, *bias_q, *bias_k, *q_raw;
    float *inv_freq;
    float *y, *score_head, *score;
    int32_t *fold, *salient;
    sti_hybrid_state st;
    sti_block block;
    int past;
} session;

static float *narrow(const double *x, size_t n)
{
    float *y = malloc((n ? n : 1) * sizeof *y);
    assert_non_null(y);
    for (size_t i = 0; i < n; i++) y[i] = (float)x[i];
    return y;
}

static session open_session(const problem *p, size_t kv_size)
{
    const size_t T = (size_t)p->T, H = (size_t)p->shape.H, G = (size_t)p->shape.G;
    const size_t D = (size_t)p->shape.D, S = (size_t)p->S, map = D * (size_t)p->shape.F;
    session x = {.p = p,
                 .q = narrow(p->q, T * H * D),
                 .k = narrow(p->k, T * G * D),
                 .v = narrow(p->v, T * G * D),
                 .gate = narrow(p->gate, T * H * D),
                 .alpha = narrow(p->alpha, H),
                 .window = narrow(p->window, H),
                 .map_q = p->map_q ? narrow(p->map_q, H * map) : NULL,
                 .map_k = p->map_k ? narrow(p->map_k, S * map) : NULL,
                 .bias_q = narrow(p->bias_q, H),
                 .bias_k = narrow(p->bias_k, S),
                 .y = calloc(T * H * D, sizeof(float)),
                 .score_head = calloc(T * H, sizeof(float)),
                 .score = calloc(T * S, sizeof(float)),
                 .fold = malloc(T * S * sizeof(int32_t)),
                 .salient = calloc(T * S, sizeof(int32_t))};
    for (size_t i = 0; i < T * S; i++) x.fold[i] = -1;
    sti_carve c = {0};
    sti_hybrid_state_carve(&x.st, &c, &p->set, &p->shape, p->T, kv_size, sizeof(float));
    assert_true(sti_block_new(&x.block, c.used));
    c = (sti_carve){.base = x.block.p};
    sti_hybrid_state_carve(&x.st, &c, &p->set, &p->shape, p->T, kv_size, sizeof(float));
    return x;
}

static void close_session(session *x)
{
    void *all[] = {x->q,      x->k,      x->v, x->gate,       x->alpha, x->window, x->map_q,
                   x->map_k,  x->bias_q, x->bias_k, x->y, x->score_head, x->score, x->fold,
                   x->salient, x->q_raw, x->inv_freq};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    sti_block_free(&x->block);
}

static sti_hybrid_args next_args(session *x, int n)
{
    const problem *p = x->p;
    const size_t at = (size_t)x->past, H = (size_t)p->shape.H, G = (size_t)p->shape.G;
    const size_t D = (size_t)p->shape.D, S = (size_t)p->S;
    return (sti_hybrid_args){.set = &p->set,
                             .shape = p->shape,
                             .T = n,
                             .in = {.q = x->q + at * H * D,
                                    .k = x->k + at * G * D,
                                    .v = x->v + at * G * D,
                                    .gate_logit = x->gate + at * H * D,
                                    .alpha = x->alpha,
                                    .window_logit = x->window,
                                    .map_q = x->map_q,
                                    .map_k = x->map_k,
                                    .bias_q = x->bias_q,
                                    .bias_k = x->bias_k,
                                    .q_raw = x->q_raw ? x->q_raw + at * H * D : NULL,
                                    .inv_freq = x->inv_freq},
                             .state = &x->st,
                             .y = x->y + at * H * D,
                             .trace = {.score_head = x->score_head + at * H,
                                       .score = x->score + at * S,
                                       .salient = x->salient + at * S,
                                       .fold_chunk = x->fold}};
}

/* Feeds each of several sessions its next n[i] tokens in one call. */
static void feed_cpu(sti_dev *dev, session *const *x, const int *n, int count)
{
    sti_hybrid_args a[8];
    still_error err;
    for (int i = 0; i < count; i++) a[i] = next_args(x[i], n[i]);
    if (sti_backend_find("cpu")->hybrid(dev, a, count, &err) != STILL_OK)
        fail_msg("%s", err.text);
    for (int i = 0; i < count; i++) {
        x[i]->past += n[i];
        assert_int_equal(x[i]->st.pos, x[i]->past);
    }
}

static void feed_all(sti_dev *dev, session *x, int step)
{
    while (x->past < x->p->T) {
        int n = x->p->T - x->past < step ? x->p->T - x->past : step;
        feed_cpu(dev, &x, &n, 1);
    }
}

/* The reference sees what the cpu backend sees: inputs in float, keys and values as
 * they are stored. */
static void round_inputs(problem *p, size_t kv_size)
{
    const size_t T = (size_t)p->T, H = (size_t)p->shape.H, G = (size_t)p->shape.G;
    const size_t D = (size_t)p->shape.D, map = D * (size_t)p->shape.F;
    const struct {
        double *x;
        size_t n;
    } all[] = {{p->q, T * H * D},     {p->k, T * G * D},
               {p->v, T * G * D},     {p->gate, T * H * D},
               {p->alpha, H},         {p->window, H},
               {p->map_q, H * map},   {p->map_k, (size_t)p->S * map},
               {p->bias_q, H},        {p->bias_k, (size_t)p->S}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        for (size_t j = 0; all[i].x && j < all[i].n; j++)
            all[i].x[j] = (double)(float)all[i].x[j];
    if (kv_size == 2 && p->set.has_window)
        for (size_t j = 0; j < T * G * D; j++) {
            p->k[j] = (double)sti_f16_to_f32(sti_f32_to_f16((float)p->k[j]));
            p->v[j] = (double)sti_f16_to_f32(sti_f32_to_f16((float)p->v[j]));
        }
}

/* ---- Against the reference ---------------------------------------------------------- */

static double error_of(const float *got, const double *want, size_t n)
{
    double size = 0, worst = 0;
    for (size_t i = 0; i < n; i++) size = fmax(size, fabs(want[i]));
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(got[i])) return INFINITY;
        worst = fmax(worst, fabs((double)got[i] - want[i]));
    }
    return size > 0 ? worst / size : worst;
}

/* Whether the routes are the same; two tokens whose scores differ by less than rounding
 * may have changed places. */
static bool same_route(const problem *p, const session *x)
{
    const size_t n = (size_t)p->T * (size_t)p->S;
    if (!memcmp(p->fold, x->fold, n * sizeof *x->fold)) return true;
    for (size_t a = 0; a < n; a++) {
        if (p->fold[a] == x->fold[a]) continue;
        bool tied = false;
        for (size_t b = a % (size_t)p->S; b < n; b += (size_t)p->S)
            tied = tied || (b != a && p->fold[b] != x->fold[b] &&
                            fabs(p->score[a] - p->score[b]) < 1e-4);
        if (!tied && !sti_score_at(p->set.score)->leave)
            fail_msg("token %zu folded at %d, expected %d", a, x->fold[a], p->fold[a]);
    }
    return false;
}

static int compare(sti_dev *dev, problem *p, size_t kv_size, int step, double limit)
{
    const size_t T = (size_t)p->T, S = (size_t)p->S, D = (size_t)p->shape.D;
    round_inputs(p, kv_size);
    feed(p, 0, p->T);
    session x = open_session(p, kv_size);
    feed_all(dev, &x, step);
    int compared = 0;
    if (p->set.has_window && !sti_score_at(p->set.score)->leave) {
        const double e = error_of(x.score, p->score, T * S);
        if (!(e <= limit)) fail_msg("score: relative error %g", e);
    }
    if (same_route(p, &x)) {
        double e = error_of(x.y, p->y, outputs(p));
        if (!(e <= limit)) fail_msg("y: relative error %g", e);
        assert_memory_equal(x.salient, p->salient, T * S * sizeof *x.salient);
        assert_memory_equal(x.st.folded, p->st.folded, S * sizeof *x.st.folded);
        if (p->set.has_linear) {
            e = error_of(x.st.lin_s, p->st.lin_s, S * (size_t)p->P * D);
            if (!(e <= limit)) fail_msg("s: relative error %g", e);
            e = error_of(x.st.lin_z, p->st.lin_z, S * (size_t)p->P);
            if (!(e <= limit)) fail_msg("z: relative error %g", e);
        }
        compared = 1;
    }
    close_session(&x);
    return compared;
}

static void test_random_settings(void **state)
{
    (void)state;
    for (int i = 0; i < N_ISA; i++) {
        sti_dev *dev = new_dev(isa_name[i], 2);
        if (!dev) continue;
        int compared = 0;
        for (uint64_t seed = 0; seed < 200; seed++) {
            problem p = any_problem(3000 + seed);
            static const int step[] = {1, 2, 5, 1000};
            compared += compare(dev, &p, seed % 2 ? 2 : 4, step[seed / 2 % 4], 1e-5);
            drop(&p);
        }
        assert_in_range(compared, 190, 200);
        free_dev(dev);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_settings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
