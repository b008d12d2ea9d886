/* test_attention_call.c - attention for other programs: the cpu's numbers and gradients are
 * those of ref for every method it takes, arrays may begin anywhere, and calls that cannot
 * be computed are refused by name. */
#include "../run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "still.h"

enum { B = 2, T = 50, H = 4, G = 2, D = 12, ARRAYS = 10 };

/* Inputs in the order of still_attention_args, and a gradient for each. All begin one
 * float after what malloc gives: nobody promises more than the alignment of a float. */
typedef struct problem {
    still_method method;
    size_t n[ARRAYS];
    float *in[ARRAYS], *grad[ARRAYS], *y, *dy;
    int32_t *route;
    void *block[2 * ARRAYS + 3];
    int n_blocks;
} problem;

static void *room(problem *p, size_t n)
{
    float *x = calloc(n + 1, sizeof *x);
    assert_non_null(x);
    p->block[p->n_blocks++] = x;
    return x + 1;
}

static float noise(uint64_t i)
{
    return (float)(sti_mix64(i) >> 40) / (float)(1 << 23) - 1; /* [-1, 1) */
}

static problem make(const char *name)
{
    problem p = {0};
    still_error e;
    must(still_method_init(&p.method, name, 8, &e), &e);
    if (strcmp(name, "still") == 0) {
        p.method.select = 3;
        p.method.cap = 7;
    }
    const size_t S = p.method.per_head ? H : G, q = B * T * H * D, k = B * T * G * D;
    const size_t n[ARRAYS] = {q, k, k, q, H, H, H * D * D, S * D * D, H, S};
    memcpy(p.n, n, sizeof n);
    for (int i = 0; i < ARRAYS; i++) {
        p.in[i] = room(&p, n[i]);
        p.grad[i] = room(&p, n[i]);
        const float scale = i < 4 ? 2 : 0.4f;
        for (size_t j = 0; j < n[i]; j++)
            p.in[i][j] = scale * noise((uint64_t)i * 1000003 + j);
    }
    p.y = room(&p, q);
    p.dy = room(&p, q);
    p.route = room(&p, B * T * S);
    for (size_t j = 0; j < q; j++) p.dy[j] = noise(77777777 + j);
    return p;
}

static void drop(problem *p)
{
    for (int i = 0; i < p->n_blocks; i++) free(p->block[i]);
}

static still_attention_args args_of(problem *p)
{
    float **in = p->in, **g = p->grad;
    return (still_attention_args){.size = sizeof(still_attention_args),
                                  .method = &p->method,
                                  .batch = B,
                                  .tokens = T,
                                  .heads = H,
                                  .kv_heads = G,
                                  .head_dim = D,
                                  .q = in[0],
                                  .k = in[1],
                                  .v = in[2],
                                  .gate_logit = in[3],
                                  .alpha = in[4],
                                  .window_logit = in[5],
                                  .map_q = in[6],
                                  .map_k = in[7],
                                  .bias_q = in[8],
                                  .bias_k = in[9],
                                  .route = p->route,
                                  .y = p->y,
                                  .dy = p->dy,
                                  .dq = g[0],
                                  .dk = g[1],
                                  .dv = g[2],
                                  .dgate_logit = g[3],
                                  .dalpha = g[4],
                                  .dwindow_logit = g[5],
                                  .dmap_q = g[6],
                                  .dmap_k = g[7],
                                  .dbias_q = g[8],
                                  .dbias_k = g[9]};
}

static still_attention *open_backend(const char *backend)
{
    still_error e;
    still_attention *a;
    const still_attention_params p = {
        .size = sizeof p, .backend = backend, .threads = 2};
    must(still_attention_new(&p, &a, &e), &e);
    return a;
}

static void run(const char *backend, problem *p)
{
    still_error e;
    still_attention *a = open_backend(backend);
    const still_attention_args x = args_of(p);
    must(still_attention_forward(a, &x, &e), &e);
    must(still_attention_backward(a, &x, &e), &e);
    still_attention_free(a);
}

/* Within 1e-4 of the largest number; a NaN never is. */
static void assert_same(const float *x, const float *want, size_t n, const char *what,
                        int i)
{
    double most = 1e-3;
    for (size_t j = 0; j < n; j++) most = fmax(most, fabs((double)want[j]));
    for (size_t j = 0; j < n; j++)
        if (!(fabs((double)x[j] - (double)want[j]) <= 1e-4 * most))
            fail_msg("%s, array %d, element %zu: %.7g, expected %.7g", what, i, j,
                     (double)x[j], (double)want[j]);
}

static void agrees(const char *name)
{
    problem cpu = make(name), ref = make(name);
    run("cpu", &cpu);
    run("ref", &ref);
    const size_t S = cpu.n[9];
    assert_memory_equal(cpu.route, ref.route, B * T * S * sizeof *cpu.route);
    assert_same(cpu.y, ref.y, cpu.n[0], name, -1);
    for (int i = 0; i < ARRAYS; i++)
        assert_same(cpu.grad[i], ref.grad[i], cpu.n[i], name, i);
    drop(&cpu);
    drop(&ref);
}

static bool all_zero(const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (x[i] != 0) return false;
    return true;
}

static void cpu_is_ref(void **state)
{
    (void)state;
    static const char *const name[] = {"still", "lolcats", "hedgehog",
                                       "t2r",   "swa",     "softmax"};
    for (size_t i = 0; i < sizeof name / sizeof *name; i++) agrees(name[i]);
}

/* Every input that the method has gets a gradient, and no other. */
static void gradients_are_there(void **state)
{
    (void)state;
    problem p = make("still");
    run("cpu", &p);
    for (int i = 0; i < ARRAYS; i++) {
        const bool none = i == 5 || i == 8 || i == 9; /* lolcats', t2r's */
        assert_true(all_zero(p.grad[i], p.n[i]) == none);
    }
    drop(&p);
}

/* With nothing given but q, k and v the operator runs as training starts; a layer that
 * the method leaves alone is softmax. */
static void start_values(void **state)
{
    (void)state;
    still_error e;
    still_attention *a = open_backend("cpu");
    problem p = make("still"), full = make("softmax");
    still_attention_args x = args_of(&p);
    x.gate_logit = x.alpha = x.map_q = x.map_k = NULL;
    must(still_attention_forward(a, &x, &e), &e);
    for (size_t i = 0; i < p.n[3]; i++) p.in[3][i] = 0;
    for (size_t i = 0; i < p.n[4]; i++) p.in[4][i] = 0;
    float *without = malloc(p.n[0] * sizeof *without);
    assert_non_null(without);
    memcpy(without, p.y, p.n[0] * sizeof *without);
    for (int m = 6; m < 8; m++)
        for (size_t i = 0; i < p.n[m]; i++)
            p.in[m][i] = i % (D * D) / D == i % D ? 1 : 0;
    x = args_of(&p);
    must(still_attention_forward(a, &x, &e), &e);
    assert_same(p.y, without, p.n[0], "identity", 0);
    free(without);

    p.method.first_layer = 1;
    x.layers = 2;
    must(still_attention_forward(a, &x, &e), &e);
    const still_attention_args y = args_of(&full);
    must(still_attention_forward(a, &y, &e), &e);
    assert_same(p.y, full.y, p.n[0], "softmax", 0);
    drop(&p);
    drop(&full);
    still_attention_free(a);
}

/* Caps of one layer are those of that layer alone. */
static void layers_have_caps(void **state)
{
    (void)state;
    still_error e;
    still_attention *a = open_backend("cpu");
    problem p = make("still"), plain = make("still");
    strcpy(p.method.caps, "1:2");
    still_attention_args x = args_of(&p), y = args_of(&plain);
    x.layers = y.layers = 2;
    const size_t bytes = B * T * G * sizeof *p.route;
    must(still_attention_forward(a, &x, &e), &e);
    must(still_attention_forward(a, &y, &e), &e);
    assert_memory_equal(p.route, plain.route, bytes);
    x.layer = y.layer = 1;
    must(still_attention_forward(a, &x, &e), &e);
    must(still_attention_forward(a, &y, &e), &e);
    assert_memory_not_equal(p.route, plain.route, bytes);
    drop(&p);
    drop(&plain);
    still_attention_free(a);
}

static void refused(still_attention *a, const still_attention_args *x,
                    still_status code, const char *says)
{
    still_error e = {0};
    assert_int_equal(still_attention_forward(a, x, &e), code);
    if (!strstr(e.text, says)) fail_msg("'%s' does not say '%s'", e.text, says);
    assert_int_equal(still_attention_backward(a, x, &e), code);
}

static void says_what_is_wrong(void **state)
{
    (void)state;
    still_error e;
    still_attention *a = NULL;
    still_attention_params params = {.size = sizeof params, .backend = "abacus"};
    assert_int_equal(still_attention_new(&params, &a, &e), STILL_E_ARG);
    assert_non_null(strstr(e.text, "abacus"));
    assert_null(a);
    params.backend = "bf16";
    assert_int_equal(still_attention_new(&params, &a, &e), STILL_E_UNSUPPORTED);
    struct {
        still_attention_params known;
        int more[2];
    } later = {.known = {.size = sizeof later}, .more = {0, 1}};
    assert_int_equal(still_attention_new(&later.known, &a, &e), STILL_E_UNSUPPORTED);
    assert_non_null(strstr(e.text, "later libstill"));
    must(still_attention_new(NULL, &a, &e), &e); /* all defaults */

    problem p = make("still");
    const still_attention_args good = args_of(&p);
    still_attention_args x = good;
#define REFUSED(change, code, says)                                                    \
    do {                                                                               \
        x = good;                                                                      \
        change;                                                                        \
        refused(a, &x, code, says);                                                    \
    } while (0)
    REFUSED(x.size = 0, STILL_E_ARG, "size");
    REFUSED(x.size = sizeof x + 1, STILL_E_ARG, "size");
    REFUSED(x.tokens = 0, STILL_E_ARG, "tokens");
    REFUSED((x.batch = 1 << 20, x.tokens = 1 << 20), STILL_E_ARG, "tokens");
    REFUSED(x.kv_heads = 3, STILL_E_ARG, "kv heads");
    REFUSED(x.kv_heads = 0, STILL_E_ARG, "kv heads");
    REFUSED(x.head_dim = -1, STILL_E_ARG, "head size");
    REFUSED(x.head_dim = 1 << 20, STILL_E_ARG, "of size");
    REFUSED(x.layer = 1, STILL_E_ARG, "layer 1 of 1");
    REFUSED(x.k = NULL, STILL_E_ARG, "NULL");
    REFUSED(x.route = NULL, STILL_E_ARG, "route");
    REFUSED((x.y = NULL, x.dy = NULL), STILL_E_ARG, "y is NULL");
    still_method m = p.method;
    m.positions = STILL_POSITIONS_CAPPED;
    REFUSED(x.method = &m, STILL_E_UNSUPPORTED, "sessions only");
    must(still_method_init(&m, "liger", 8, &e), &e);
    REFUSED(x.method = &m, STILL_E_UNSUPPORTED, "liger");
    m = p.method;
    m.select = 9;
    REFUSED(x.method = &m, STILL_E_ARG, "select");
#undef REFUSED
    /* A program that was built before the last members of the struct. */
    x = good;
    x.size = offsetof(still_attention_args, dy);
    must(still_attention_forward(a, &x, &e), &e);
    assert_int_equal(still_attention_backward(a, &x, &e), STILL_E_ARG);
    drop(&p);
    still_attention_free(a);
    still_attention_free(NULL);
}

RUN_TESTS(cmocka_unit_test(cpu_is_ref), cmocka_unit_test(gradients_are_there),
          cmocka_unit_test(start_values), cmocka_unit_test(layers_have_caps),
          cmocka_unit_test(says_what_is_wrong))
