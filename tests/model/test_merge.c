/* Low-rank additions merged when a model is opened: each number of a merged matrix is
 * the sum within the rounding of its type, and the model is the one that keeps them
 * apart. */
#include "../run.h"
#include "exports.h"
#include "model/merge.h"

enum { ROWS = 37, COLS = 96 };

/* The largest error of a merged matrix, in units of its largest number. */
static double worst_error(sti_dtype type, int threads, sti_dtype *merged)
{
    static float w[ROWS * COLS], a[RANK * COLS], b[ROWS * RANK], back[ROWS * COLS];
    static unsigned char stored[ROWS * COLS * 4];
    still_error e;
    sti_pool *pool;
    sti_tensor out, t = {.name = "w",
                         .path = "test",
                         .type = type,
                         .n_dims = 2,
                         .dim = {ROWS, COLS},
                         .data = stored};
    double worst = 0, size = 0;
    for (size_t i = 0; i < ROWS * COLS; i++) w[i] = noise(i);
    for (size_t i = 0; i < RANK * COLS; i++) a[i] = noise(i + 10007);
    for (size_t i = 0; i < ROWS * RANK; i++) b[i] = noise(i + 20011);
    assert_true(sti_quant(type, w, stored, ROWS * COLS));
    assert_true(sti_dtype_bytes(type, ROWS * COLS, &t.bytes));
    sti_dequant(type, stored, w, ROWS * COLS);
    must(sti_pool_new(threads, &pool, &e), &e);
    const sti_lora_values add = {.a = a, .b = b, .rank = RANK, .scale = 0.25f};
    must(sti_merge(&t, &add, pool, &out, &e), &e);
    sti_pool_free(pool);
    sti_dequant(out.type, out.data, back, ROWS * COLS);
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < COLS; j++) {
            double sum = w[i * COLS + j];
            for (int r = 0; r < RANK; r++)
                sum += 0.25 * b[i * RANK + r] * a[r * COLS + j];
            worst = fmax(worst, fabs(sum - back[i * COLS + j]));
            size = fmax(size, fabs(sum));
        }
    *merged = out.type;
    free((void *)out.data);
    return worst / size;
}

static void numbers_are_sums(void **state)
{
    (void)state;
    /* Half a step of each type: the scale of an 8-bit block is rounded, too. */
    static const struct {
        sti_dtype from, to;
        double most;
    } c[] = {{STI_F32, STI_F32, 1e-6},     {STI_F16, STI_F16, 0.0005},
             {STI_BF16, STI_BF16, 0.004},  {STI_Q4_0, STI_Q8_0, 0.0045},
             {STI_Q4_1, STI_Q8_0, 0.0045}, {STI_Q5_1, STI_Q8_0, 0.0045},
             {STI_Q8_0, STI_Q8_0, 0.0045}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        sti_dtype merged;
        const double error = worst_error(c[i].from, 1 + (int)(i % 3), &merged);
        assert_int_equal(merged, c[i].to);
        if (error > c[i].most)
            fail_msg("type %d: error %g, expected at most %g", (int)c[i].from, error,
                     c[i].most);
    }
}

static void too_large_is_an_error(void **state)
{
    (void)state;
    still_error e;
    sti_pool *pool;
    uint16_t w[2 * 32] = {0};
    float a[32] = {[7] = 300}, b[2] = {0, 300};
    sti_tensor out, t = {.name = "w",
                         .path = "test",
                         .type = STI_F16,
                         .n_dims = 2,
                         .dim = {2, 32},
                         .data = w,
                         .bytes = sizeof w};
    must(sti_pool_new(2, &pool, &e), &e);
    const sti_lora_values add = {.a = a, .b = b, .rank = 1, .scale = 1};
    assert_int_equal(sti_merge(&t, &add, pool, &out, &e), STILL_E_NUMERIC);
    assert_non_null(strstr(e.text, "'w'"));
    assert_null(out.data);
    b[1] = 200;
    must(sti_merge(&t, &add, pool, &out, &e), &e);
    free((void *)out.data);
    sti_pool_free(pool);
}

/* ---- Models -------------------------------------------------------------- */

/* Logits with and without merging, on one backend. */
static double merging_moves(const char *model, const char *adapter, const char *backend,
                            const char *types)
{
    static float a[1024], b[1024];
    int n;
    double worst = 0;
    opened_logits(model,
                  &STILL_PARAMS(still_model_params, .adapter = adapter,
                                .backend = backend, .no_merge = true),
                  NULL, a, &n);
    opened_logits(
        model,
        &STILL_PARAMS(still_model_params, .adapter = adapter, .backend = backend),
        types, b, &n);
    for (int i = 0; i < n; i++) worst = fmax(worst, fabs((double)a[i] - b[i]));
    return worst;
}

static void a_merged_model_is_the_model(void **state)
{
    (void)state;
    still_error e;
    const char *adapter = in_scratch("m-f32"), *of_q8 = in_scratch("m-q8");
    const char *q8 = in_scratch("q8.gguf");
    make_adapter(FOLDER, "still", adapter, 0);
    assert_true(merging_moves(FOLDER, adapter, "cpu", "f32") < 2e-4);
    assert_true(merging_moves(FOLDER, adapter, "ref", "f32") < 1e-4);
    must(export(FOLDER, NULL, "gguf", "q8_0", q8, &e), &e);
    make_adapter(q8, "still", of_q8, 0);
    const double moved = merging_moves(q8, of_q8, "cpu", "q8_0");
    assert_true(moved > 0 && moved < 0.05);
    /* An exported file has the same numbers. */
    static float a[1024], b[1024];
    int n;
    must(export(q8, of_q8, "gguf", NULL, in_scratch("m.gguf"), &e), &e);
    opened_logits(q8, &STILL_PARAMS(still_model_params, .adapter = of_q8), "q8_0", a,
                  &n);
    opened_logits(
        in_scratch("m.gguf"),
        &STILL_PARAMS(still_model_params, .adapter = in_scratch("m.still.gguf")), NULL,
        b, &n);
    assert_memory_equal(a, b, (size_t)n * sizeof *a);
    /* Layers that keep softmax have no additions. */
    make_adapter(FOLDER, "still", in_scratch("m-last"), 1);
    assert_true(merging_moves(FOLDER, in_scratch("m-last"), "cpu", "f32") < 2e-4);
}

static void zeros_are_not_merged(void **state)
{
    (void)state;
    still_error e;
    still_model *m;
    sti_adapter *a;
    const char *dir = in_scratch("zero");
    sti_adapter_spec spec = {.lora = {RANK, 8, 31}, .base_name = "the base"};
    must(still_model_open(FOLDER, NULL, &m, &e), &e);
    must(still_method_init(&spec.method, "still", 8, &e), &e);
    sti_model_fingerprint(m, false, spec.base);
    const sti_adapter_home home = sti_model_home(m);
    must(sti_adapter_new(&home, &spec, &a, &e), &e);
    assert_int_equal(mkdir(dir, 0777), 0);
    must(sti_adapter_write(a, dir, &e), &e);
    sti_adapter_free(a);
    still_model_free(m);
    assert_true(merging_moves(FOLDER, dir, "cpu", NULL) == 0);
}

/* A session is bound to the numbers it was computed with. */
static void the_fingerprint_tells(void **state)
{
    (void)state;
    still_error e;
    unsigned char sum[3][STI_FINGERPRINT];
    const char *adapter = in_scratch("f-adapter");
    make_adapter(FOLDER, "still", adapter, 0);
    for (int i = 0; i < 3; i++) {
        still_model *m;
        must(still_model_open(FOLDER,
                              &STILL_PARAMS(still_model_params, .adapter = adapter,
                                            .no_merge = i == 2),
                              &m, &e),
             &e);
        sti_model_fingerprint(m, true, sum[i]);
        still_model_free(m);
    }
    assert_memory_equal(sum[0], sum[1], STI_FINGERPRINT);
    assert_memory_not_equal(sum[0], sum[2], STI_FINGERPRINT);
}

RUN_TESTS_IN(begin, end, cmocka_unit_test(numbers_are_sums),
             cmocka_unit_test(too_large_is_an_error),
             cmocka_unit_test(a_merged_model_is_the_model),
             cmocka_unit_test(zeros_are_not_merged),
             cmocka_unit_test(the_fingerprint_tells))
