/* test_dense_rows.c - what the cuda backend does with rows: the feed-forward half of a
 * layer, embeddings, norms, swiglu, rope, log-probabilities, against the entries of
 * `ref`. */
#include "../../../run.h"
#include "dense_problem.h"

/* ---- Feed-forward -------------------------------------------------------- */

/* x += W_down (silu(W_gate h + b) * (W_up h + b)) + b by the entries of ref. */
static void feed_ref(sti_ffn_args a, source s[3])
{
    const sti_backend *ref = sti_backend_find("ref");
    sti_dev *dev = ref_dev();
    still_error err;
    sti_weight w[3];
    int64_t K = s[0].t.dim[1], ffn = s[0].t.dim[0], n = a.M * ffn;
    for (int i = 0; i < 3; i++) OK(ref->weight_new(dev, &s[i].t, &w[i], &err));
    sti_rmsnorm_args norm = {.x = a.x,
                             .g = a.w.norm,
                             .y = a.scratch_h,
                             .M = a.M,
                             .K = (int)K,
                             .eps = a.w.eps};
    sti_matmul_args both = {.x = a.scratch_h,
                            .M = a.M,
                            .n = 2,
                            .w = {&w[0], &w[1]},
                            .bias = {a.w.gate_bias, a.w.up_bias},
                            .y = {a.scratch, a.scratch + n}};
    sti_swiglu_args gated = {.gate = a.scratch,
                             .up = a.scratch + n,
                             .y = a.scratch,
                             .M = a.M,
                             .K = (int)ffn};
    sti_matmul_args down = {.x = a.scratch,
                            .M = a.M,
                            .n = 1,
                            .w = {&w[2]},
                            .bias = {a.w.down_bias},
                            .y = {a.x},
                            .accumulate = true};
    OK(ref->rmsnorm(dev, &norm, &err));
    OK(ref->matmul(dev, &both, &err));
    OK(ref->swiglu(dev, &gated, &err));
    OK(ref->matmul(dev, &down, &err));
    for (int i = 0; i < 3; i++) ref->weight_free(dev, &w[i]);
    ref->dev_free(dev);
}

static void check_feed(sti_dev *dev, source s[3], sti_weight w[3], int M, bool bias)
{
    const int64_t K = w[0].K, ffn = w[0].N;
    still_error err;
    float *x0 = floats(M * K, 4, 3), *x = copy(x0, M * K), *g = floats(K, 0.2f, 4);
    float *b = floats(ffn, 1, 5), *h = floats(M * K, 0, 1),
          *room = floats(2 * M * ffn, 0, 1);
    sti_block gx = there(x0, M * K), gg = there(g, K), gb = there(b, ffn);
    sti_block gh = there(NULL, M * K), groom = there(NULL, 2 * M * ffn);
    sti_ffn_args a = {
        .x = gx.p,
        .M = M,
        .w = {.gate = &w[0], .up = &w[1], .down = &w[2], .norm = gg.p, .eps = 1e-6f},
        .scratch_h = gh.p,
        .scratch = groom.p};
    sti_ffn_args r = {.x = x,
                      .M = M,
                      .w = {.norm = g, .eps = 1e-6f},
                      .scratch_h = h,
                      .scratch = room};
    if (bias) { /* ffn is not below K: one vector serves all */
        a.w.gate_bias = a.w.up_bias = a.w.down_bias = gb.p;
        r.w.gate_bias = r.w.up_bias = r.w.down_bias = b;
    }
    OK(cuda()->ffn_forward(dev, &a, &err));
    feed_ref(r, s);
    float *y = back(&gx, M * K);
    for (int m = 0; m < M; m++) {
        double squares = 0;
        for (int64_t k = 0; k < K; k++) {
            double d = (double)x[m * K + k] - x0[m * K + k];
            squares += d * d;
        }
        double rms = sqrt(squares / (double)K);
        double tol = (w[0].type == STI_F32 ? 5e-5 : 1.5e-2) * rms + 1e-5;
        for (int64_t k = 0; k < K; k++)
            near(y[m * K + k], x[m * K + k], tol, "feed-forward", w[0].type, M,
                 m * K + k);
    }
    cuda()->mem_free(dev, &gg);
    cuda()->mem_free(dev, &gb);
    cuda()->mem_free(dev, &gh);
    cuda()->mem_free(dev, &groom);
    free(x0);
    free(x);
    free(g);
    free(b);
    free(h);
    free(room);
    free(y);
}

static void ffn_forward(void **state)
{
    (void)state;
    static const int64_t size[][2] = {{256, 512}, {60, 101}, {64, 2048}};
    sti_dev *dev = need_gpu()->dev;
    for (int t = 0; t < N_TYPES; t++)
        for (int k = 0; k < 3; k++) { /* the last: products too large for gemm.cu */
            source s[3];
            sti_weight w[3];
            int64_t K = columns(TYPES[t], size[k][0]),
                    ffn = columns(TYPES[t], size[k][1]);
            for (int i = 0; i < 3; i++) { /* up of another kind now and then */
                sti_dtype type = k == 1 && i == 1 && t % 3 == 0 ? STI_F16 : TYPES[t];
                s[i] = make_source(type, i == 2 ? K : ffn, i == 2 ? ffn : K,
                                   11 + (uint32_t)(i + t));
                w[i] = weight(dev, &s[i]);
            }
            for (int r = 0; r < N_ROWS; r++)
                if (k == 0 || (k == 1 && ROWS[r] < 40) || r == N_ROWS - 1)
                    check_feed(dev, s, w, ROWS[r], (r + t) % 2 == 1);
            for (int i = 0; i < 3; i++) {
                cuda()->weight_free(dev, &w[i]);
                free_source(&s[i]);
            }
        }
}

/* Few rows on the short way, up to the longest, and past it on the way down. */
static void short_feed_forward(void **state)
{
    (void)state;
    static const sti_dtype kind[] = {STI_Q4_1, STI_Q8_0, STI_Q5_1, STI_F16};
    static const int64_t size[][2] = {{64, 96}, {576, 1536}, {1024, 2048}, {96, 2080}};
    static const int rows[] = {1, 2, 8, 13};
    sti_dev *dev = need_gpu()->dev;
    for (int t = 0; t < 4; t++)
        for (int k = 0; k < 4; k++) {
            const int64_t K = size[k][0], ffn = size[k][1];
            source s[3];
            sti_weight w[3];
            for (int i = 0; i < 3; i++) {
                s[i] = make_source(kind[t], i == 2 ? K : ffn, i == 2 ? ffn : K,
                                   51 + (uint32_t)i);
                w[i] = weight(dev, &s[i]);
            }
            for (int r = 0; r < 4; r++)
                check_feed(dev, s, w, rows[r], (r + t + k) % 2 == 0);
            for (int i = 0; i < 3; i++) {
                cuda()->weight_free(dev, &w[i]);
                free_source(&s[i]);
            }
        }
}

/* Products of rows by the dozen whose tiles clusters share. */
static void shared_feed_forward(void **state)
{
    (void)state;
    static const sti_dtype some[] = {STI_F16, STI_Q4_1};
    static const int rows[] = {9, 16, 20, 33, 130, 257};
    enum { N = sizeof rows / sizeof *rows };
    enum { K = 576, FFN = 1536 };
    sti_dev *dev = need_gpu()->dev;
    for (int t = 0; t < 2; t++) {
        source s[3];
        sti_weight w[3];
        for (int i = 0; i < 3; i++) {
            s[i] = make_source(some[t], i == 2 ? K : FFN, i == 2 ? FFN : K,
                               31 + (uint32_t)i);
            w[i] = weight(dev, &s[i]);
        }
        for (int r = 0; r < N; r++) check_feed(dev, s, w, rows[r], r % 2 == 0);
        for (int i = 0; i < 3; i++) {
            cuda()->weight_free(dev, &w[i]);
            free_source(&s[i]);
        }
    }
}

/* ---- Rows ---------------------------------------------------------------- */

static void embedding(void **state)
{
    (void)state;
    enum { N = 45, K = 768 };
    sti_dev *dev = need_gpu()->dev;
    still_error err;
    for (int t = 0; t < N_TYPES; t++) {
        source s = make_source(TYPES[t], N, K, 6);
        sti_weight w = weight(dev, &s);
        int32_t tok[] = {3, N - 1, 0, 17, 8, 3};
        sti_block gy = there(NULL, 6 * K);
        sti_embed_args a = {.w = &w, .tok = tok, .M = 6, .y = gy.p};
        OK(cuda()->embed(dev, &a, &err));
        tok[4] = N;
        assert_int_equal(cuda()->embed(dev, &a, &err), STILL_E_ARG);
        tok[4] = -1;
        assert_int_equal(cuda()->embed(dev, &a, &err), STILL_E_ARG);
        tok[4] = 8;
        float *y = back(&gy, 6 * K);
        /* Scales of K types are rounded to half, bf16 is; the others are exact. */
        bool rounded =
            sti_dtype_find((int)TYPES[t])->block == 256 || TYPES[t] == STI_BF16;
        for (int i = 0; i < 6 * K; i++) {
            double want = s.value[tok[i / K] * K + i % K];
            near(y[i], want, rounded ? 4e-3 + 1e-3 * fabs(want) : 0, "embedding",
                 TYPES[t], 6, i);
        }
        cuda()->weight_free(dev, &w);
        free_source(&s);
        free(y);
    }
}

static void rmsnorm(void **state)
{
    (void)state;
    static const int size[][2] = {
        {1, 576},   {64, 576}, {3, 1},    {5, 7},     {2, 33},     {1, 8192}, {7, 100},
        {40, 1023}, {3, 4099}, {2, 5004}, {300, 576}, {257, 1024}, {260, 4}};
    const sti_backend *ref = sti_backend_find("ref");
    sti_dev *dev = need_gpu()->dev, *rd = ref_dev();
    still_error err;
    for (size_t k = 0; k < sizeof size / sizeof *size; k++) {
        int M = size[k][0], K = size[k][1];
        float *x = floats(M * K, 30, 1), *g = floats(K, 2, 2), *want = copy(x, M * K);
        sti_block gx = there(x, M * K), gg = there(g, K);
        sti_block from = there(x, M * K);
        sti_rmsnorm_args here = {want, g, want, M, K, 1e-5f, false},
                         on = {gx.p, gg.p, gx.p, M, K, 1e-5f, false};
        OK(ref->rmsnorm(rd, &here, &err));
        OK(cuda()->rmsnorm(dev, &on, &err));
        here.x = x; /* and once more, added */
        on.x = from.p;
        here.add = on.add = true;
        OK(ref->rmsnorm(rd, &here, &err));
        OK(cuda()->rmsnorm(dev, &on, &err));
        cuda()->mem_free(dev, &from);
        OK(ref->scale_columns(rd, &(sti_scale_columns_args){want, g, M, K}, &err));
        OK(cuda()->scale_columns(dev, &(sti_scale_columns_args){gx.p, gg.p, M, K},
                                 &err));
        float *y = back(&gx, M * K);
        for (int i = 0; i < M * K; i++)
            near(y[i], want[i], 2e-6 * fabs(want[i]), "rmsnorm", STI_F32, M, i);
        cuda()->mem_free(dev, &gg);
        free(x);
        free(g);
        free(want);
        free(y);
    }
    ref->dev_free(rd);
}

static void swiglu(void **state)
{
    (void)state;
    static const int size[][2] = {{1, 1536}, {64, 1536}, {1, 1}, {3, 7}, {9, 1000}};
    const sti_backend *ref = sti_backend_find("ref");
    sti_dev *dev = need_gpu()->dev, *rd = ref_dev();
    still_error err;
    for (size_t k = 0; k < sizeof size / sizeof *size; k++) {
        int M = size[k][0], K = size[k][1];
        float *x = floats(M * K, k % 2 ? 120 : 8, 3), *u = floats(M * K, 2, 4);
        float *want = copy(x, M * K);
        sti_block gx = there(x, M * K), gu = there(u, M * K);
        const sti_activation act = k % 2 ? STI_SILU : STI_GELU_TANH;
        OK(ref->swiglu(rd, &(sti_swiglu_args){want, u, want, M, K, act}, &err));
        OK(cuda()->swiglu(dev, &(sti_swiglu_args){gx.p, gu.p, gx.p, M, K, act}, &err));
        float *y = back(&gx, M * K);
        for (int i = 0; i < M * K; i++)
            near(y[i], want[i], (act == STI_SILU ? 1e-6 : 2e-5) * fabs(want[i]) + 1e-35,
                 "swiglu", STI_F32, M, i);
        cuda()->mem_free(dev, &gu);
        free(x);
        free(u);
        free(want);
        free(y);
    }
    ref->dev_free(rd);
}

static void check_rope(sti_dev *dev, int M, int heads, int also, int D, bool inter,
                       bool turn_back)
{
    const sti_backend *ref = sti_backend_find("ref");
    sti_dev *rd = ref_dev();
    still_error err;
    int n = M * heads * D, k = M * also * D;
    float *x = floats(n, 3, 5), *z = floats(k > 0 ? k : 1, 3, 6),
          *freq = floats(D / 2, 0, 0);
    int32_t *pos = malloc(sizeof *pos * (size_t)M);
    assert_non_null(pos);
    for (int i = 0; i < D / 2; i++) freq[i] = (float)pow(1e4, -2.0 * i / D);
    for (int m = 0; m < M; m++)
        pos[m] = m % 3 == 0 ? m : m % 3 == 1 ? 1000003 - 7919 * m : 4096 * m + 11;
    sti_block gx = there(x, n), gz = there(z, k > 0 ? k : 1);
    sti_rope_args a = {.x = gx.p,
                       .also = also ? gz.p : NULL,
                       .pos = pos,
                       .inv_freq = freq,
                       .M = M,
                       .heads = heads,
                       .also_heads = also,
                       .D = D,
                       .interleaved = inter,
                       .back = turn_back};
    OK(cuda()->rope(dev, &a, &err));
    a.also = NULL; /* one at a time */
    a.also_heads = 0;
    a.x = x;
    OK(ref->rope(rd, &a, &err));
    if (also) {
        a.x = z;
        a.heads = also;
        OK(ref->rope(rd, &a, &err));
    }
    float *y = back(&gx, n), *v = back(&gz, k > 0 ? k : 1);
    for (int i = 0; i < n; i++) near(y[i], x[i], 1.5e-6, "rope", STI_F32, M, i);
    for (int i = 0; i < k; i++) near(v[i], z[i], 1.5e-6, "rope, also", STI_F32, M, i);
    ref->dev_free(rd);
    free(x);
    free(z);
    free(freq);
    free(pos);
    free(y);
    free(v);
}

static void rope(void **state)
{
    (void)state;
    static const int size[][4] = {{1, 9, 3, 64}, {100, 3, 1, 64}, {5, 2, 0, 80},
                                  {3, 1, 1, 2},  {4, 17, 2, 34},  {90, 32, 8, 128}};
    sti_dev *dev = need_gpu()->dev;
    still_error err;
    for (size_t k = 0; k < sizeof size / sizeof *size; k++)
        for (int way = 0; way < 4; way++)
            check_rope(dev, size[k][0], size[k][1], size[k][2], size[k][3], way & 1,
                       way & 2);
    float freq = 1;
    int32_t pos = 1;
    sti_rope_args odd = {.pos = &pos, .inv_freq = &freq, .M = 1, .heads = 1, .D = 3};
    assert_int_equal(cuda()->rope(dev, &odd, &err), STILL_E_ARG);
}

static void logprob(void **state)
{
    (void)state;
    static const int size[][2] = {{1, 49152}, {256, 49152}, {33, 1001}, {2, 1},
                                  {3, 5},     {1, 130},     {300, 50},  {2, 256000}};
    const sti_backend *ref = sti_backend_find("ref");
    sti_dev *dev = need_gpu()->dev, *rd = ref_dev();
    still_error err;
    for (size_t k = 0; k < sizeof size / sizeof *size; k++) {
        int M = size[k][0], V = size[k][1];
        float *x = floats((int64_t)M * V, k == 2 ? 300 : 20, 6), p[300], want[300];
        int32_t target[300], top[300], want_top[300];
        for (int m = 0; m < M; m++) target[m] = (V - 1) * m / M;
        if (V > 4) x[V - 1] = x[V / 2] = 400; /* equal maxima: the first is the top */
        if (V > 40) x[V / 2 + 1] = -INFINITY;
        sti_block gx = there(x, (int64_t)M * V);
        sti_logprob_args a = {gx.p, target, M, V, p, top},
                         r = {x, target, M, V, want, want_top};
        OK(cuda()->logprob(dev, &a, &err));
        OK(ref->logprob(rd, &r, &err));
        for (int m = 0; m < M; m++) {
            assert_int_equal(top[m], want_top[m]);
            near(p[m], want[m], 2e-7 * fabs(want[m]) + 1e-6, "logprob", STI_F32, M, m);
        }
        target[0] = V;
        assert_int_equal(cuda()->logprob(dev, &a, &err), STILL_E_ARG);
        cuda()->mem_free(dev, &gx);
        free(x);
    }
    ref->dev_free(rd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(ffn_forward),
                                       cmocka_unit_test(short_feed_forward),
                                       cmocka_unit_test(shared_feed_forward),
                                       cmocka_unit_test(embedding),
                                       cmocka_unit_test(rmsnorm),
                                       cmocka_unit_test(swiglu),
                                       cmocka_unit_test(rope),
                                       cmocka_unit_test(logprob)};
    return cmocka_run_group_tests_name("rows", tests, open_dense_gpu, close_gpu) +
           cmocka_run_group_tests_name("rows, without copies", tests, open_frugal_gpu,
                                       close_frugal_gpu);
}
