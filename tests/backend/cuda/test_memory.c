/* test_memory.c - a GPU whose memory runs out in the middle of a run: calls either work
 * with what was reserved or fail with STILL_E_MEMORY, and sessions are what they were.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <cuda_runtime.h>

#include "../../skip.h"
#include "ops/ops.h"
#include "still.h"

enum { PROMPT = 150, MORE = 90, CHUNK = 16, HOGS = 256 };

static void must(still_status st, const still_error *e)
{
    if (st != STILL_OK) fail_msg("%s", e->text);
}

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

static still_model *open_model(void)
{
    still_model *m;
    still_error e;
    must(still_model_open(FIXTURES "/models/llama3",
                          &(still_model_params){.backend = "cuda"}, &m, &e),
         &e);
    return m;
}

static still_session *open_session(still_model *m, const char *method)
{
    still_session *s;
    still_error e;
    still_method how;
    must(still_method_init(&how, method, CHUNK, &e), &e);
    const still_session_params p = {.ctx = 512, .batch = 256, .method = &how};
    must(still_session_new(m, &p, &s, &e), &e);
    return s;
}

static void make_ids(int32_t *ids, int n, int vocab)
{
    for (int i = 0; i < n; i++) ids[i] = (int32_t)((i * 7919 + 13) % vocab);
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
    const still_session_params huge = {.ctx = 1 << 22};
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
    give_back(&h);
    still_session_free(s);
    still_session_free(calm);
    still_model_free(m);
}

static void test_sessions_survive(void **state)
{
    (void)state;
    int n = 0;
    if (!sti_backend_find("cuda") || cudaGetDeviceCount(&n) != cudaSuccess || n == 0)
        skip_because("no GPU");
    check_method("softmax");
    check_method("still");
    check_method("lolcats");
    check_method("liger");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_sessions_survive)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
