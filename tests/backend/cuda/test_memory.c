/* test_memory.c - a GPU whose memory runs out in the middle of a run: calls either work
 * with what was reserved or fail with STILL_E_MEMORY, and sessions are what they were.
 * And a limit of what a model may take. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_runtime.h>

#include "../../run.h"
#include "../../skip.h"
#include "ops/ops.h"
#include "still.h"

enum { PROMPT = 150, MORE = 90, CHUNK = 16, HOGS = 256 };

/* All of the GPU's memory that can be had, in ever smaller blocks. */
typedef struct hog {
    void *block[HOGS];
    int n;
} hog;

static void take_all(hog *h)
{
    size_t size = (size_t)64 << 30;
    cudaDeviceSynchronize();
    while (size >= 1 << 16 && h->n < HOGS)
        if (cudaMalloc(&h->block[h->n], size) == cudaSuccess)
            h->n++;
        else
            size /= 2;
    (void)cudaGetLastError();
}

static void give_back(hog *h)
{
    while (h->n > 0) cudaFree(h->block[--h->n]);
}

static still_status try_model(size_t memory, still_model **m, still_error *e)
{
    const still_model_params p = {
        .size = sizeof p, .backend = "cuda", .gpu_memory = memory};
    return still_model_open(FIXTURES "/models/llama3", &p, m, e);
}

static still_model *open_model_in(size_t memory)
{
    still_model *m;
    still_error e;
    must(try_model(memory, &m, &e), &e);
    return m;
}

static still_model *open_model(void)
{
    return open_model_in(0);
}

static still_session *open_session(still_model *m, const char *method)
{
    still_session *s;
    still_error e;
    still_method how;
    must(still_method_init(&how, method, CHUNK, &e), &e);
    const still_session_params p = {
        .size = sizeof p, .ctx = 512, .batch = 256, .method = &how};
    must(still_session_new(m, &p, &s, &e), &e);
    return s;
}

static void make_ids(int32_t *ids, int n, int vocab)
{
    for (int i = 0; i < n; i++) ids[i] = (int32_t)((i * 7919 + 13) % vocab);
}

static void check_logits(const char *method, const still_session *calm,
                         const still_session *s, int vocab)
{
    const float *want = still_session_logits(calm), *got = still_session_logits(s);
    float largest = 0, worst = 0;
    for (int i = 0; i < vocab; i++) {
        const float d = want[i] > got[i] ? want[i] - got[i] : got[i] - want[i];
        const float size = want[i] < 0 ? -want[i] : want[i];
        if (!(d <= worst)) worst = d;
        if (size > largest) largest = size;
    }
    if (!(worst <= 2e-2f * largest))
        fail_msg("%s: logits off by %g of %g", method, (double)worst, (double)largest);
}

/* Feeds again and again until it works, with memory given back after the first failure;
 * the logits must be those of a session that never saw any trouble. */
static void check_method(const char *method)
{
    still_model *m = open_model();
    const int vocab = still_model_get_info(m)->vocab;
    int32_t ids[PROMPT + MORE];
    still_error e;
    make_ids(ids, PROMPT + MORE, vocab);
    still_session *calm = open_session(m, method), *s = open_session(m, method);
    must(still_session_feed(calm, ids, PROMPT + MORE, &e), &e);

    hog h = {.n = 0};
    must(still_session_feed(s, ids, 5, &e), &e);
    take_all(&h);
    assert_true(h.n > 0);
    still_session *none = NULL;
    const still_session_params huge = {.size = sizeof huge, .ctx = 1 << 22};
    assert_int_equal(still_session_new(m, &huge, &none, &e), STILL_E_MEMORY);
    assert_null(none);
    still_status st = still_session_feed(s, ids + 5, PROMPT - 5, &e);
    if (st != STILL_OK) {
        assert_int_equal(st, STILL_E_MEMORY);
        assert_int_equal(still_session_length(s), 5);
        give_back(&h);
        must(still_session_feed(s, ids + 5, PROMPT - 5, &e), &e);
    }
    for (int i = PROMPT; i < PROMPT + MORE; i++) {
        st = still_session_feed(s, ids + i, 1, &e);
        if (st == STILL_OK) continue;
        assert_int_equal(st, STILL_E_MEMORY);
        give_back(&h);
        must(still_session_feed(s, ids + i, 1, &e), &e);
    }
    check_logits(method, calm, s, vocab);
    give_back(&h);
    still_session_free(s);
    still_session_free(calm);
    still_model_free(m);
}

static void need_a_gpu(void)
{
    int n = 0;
    if (!sti_backend_find("cuda") || cudaGetDeviceCount(&n) != cudaSuccess || n == 0)
        skip_because("no GPU");
}

/* A model that was given so many bytes stays within them: what does not fit says what is
 * missing, and prompts go through in smaller pieces with the same result. */
static void test_limit(void **state)
{
    (void)state;
    enum { N = 900, CTX = 2048 };
    need_a_gpu();
    still_error e;
    still_model *m = NULL, *all = open_model();
    const int vocab = still_model_get_info(all)->vocab;
    int32_t ids[N];
    make_ids(ids, N, vocab);
    assert_int_equal(try_model(20 << 20, &m, &e), STILL_E_MEMORY);
    assert_null(m);
    assert_non_null(strstr(e.text, "--gpu-memory"));

    static const char *const method[] = {"softmax", "still"};
    for (int i = 0; i < 2; i++) {
        still_method how;
        must(still_method_init(&how, method[i], CHUNK, &e), &e);
        /* a score that other rounding, of pieces of another size, does not change */
        if (i == 1) snprintf(how.score, sizeof how.score, "random");
        still_session_params p = {
            .size = sizeof p, .ctx = CTX, .batch = 64, .method = &how};
        still_bill least, whole, cut;
        still_session *calm, *s;
        must(still_model_bill(all, &p, &least, &e), &e);
        p.batch = CTX;
        must(still_model_bill(all, &p, &whole, &e), &e);
        assert_true(whole.device > least.device && whole.device < whole.total);
        const size_t limit = least.device + (whole.device - least.device) / 2;
        m = open_model_in(limit);
        must(still_model_bill(m, &p, &cut, &e), &e);
        assert_true(cut.device <= limit && cut.scratch < whole.scratch);
        assert_int_equal(cut.cache, whole.cache);
        must(still_session_new(all, &p, &calm, &e), &e);
        must(still_session_new(m, &p, &s, &e), &e);
        must(still_session_feed(calm, ids, N, &e), &e);
        must(still_session_feed(s, ids, N, &e), &e);
        check_logits(method[i], calm, s, vocab);
        if (i == 0) { /* a cache that grows with the context */
            still_session *none = NULL;
            p.ctx = 1 << 22;
            assert_int_equal(still_session_new(m, &p, &none, &e), STILL_E_MEMORY);
            assert_null(none);
            assert_non_null(strstr(e.text, "--gpu-memory"));
            assert_non_null(strstr(e.text, "smaller context"));
        }
        still_session_free(s);
        still_session_free(calm);
        still_model_free(m);
    }
    still_model_free(all);
}

static void test_sessions_survive(void **state)
{
    (void)state;
    need_a_gpu();
    check_method("softmax");
    check_method("still");
    check_method("lolcats");
    check_method("liger");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_sessions_survive),
                                       cmocka_unit_test(test_limit)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
