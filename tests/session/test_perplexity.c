/* Perplexity: a window longer than the pieces it is fed in is scored as if it were fed
 * at once, windows do not see each other, and the figure is what its numbers say. */
#include <math.h>
#include <stdlib.h>

#include "../run.h"

#include "base/random.h"
#include "still.h"

/* Two borders between pieces of 2048, and a part of a third. */
enum { N = 4500, VOCAB = 512 };

static still_model *model;
static int32_t ids[N];

static int set_up(void **state)
{
    (void)state;
    still_error e;
    must(still_model_open_shape("tiny", &STILL_PARAMS(still_model_params, .threads = 2),
                                &model, &e),
         &e);
    for (int i = 0; i < N; i++) ids[i] = (int32_t)(sti_mix64((uint64_t)i) % VOCAB);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    still_model_free(model);
    return 0;
}

static still_session *new_session(const char *method)
{
    still_error e;
    still_method m;
    still_session *s;
    must(still_method_init(&m, method, 32, &e), &e);
    must(still_session_new(model,
                           &STILL_PARAMS(still_session_params, .ctx = N, .method = &m),
                           &s, &e),
         &e);
    return s;
}

/* each[i], from a window that begins at `start`, is what one call for all of the window
 * gives for token i; the first of a window has no probability. Adds up what it saw. */
static void check_window(still_session *s, int start, int n, const float *each,
                         double *nll)
{
    still_error e;
    float *want = malloc((size_t)n * sizeof *want);
    assert_non_null(want);
    still_session_reset(s);
    must(still_session_logprobs(s, ids + start, n, want, NULL, &e), &e);
    assert_true(isnan(each[start]));
    for (int i = 1; i < n; i++) {
        if (!(fabsf(each[start + i] - want[i - 1]) <= 2e-5f))
            fail_msg("token %d of a window of %d: %.8g, not %.8g", i, n,
                     each[start + i], want[i - 1]);
        *nll -= want[i - 1];
    }
    free(want);
}

static void check(const char *method, int ctx, int n)
{
    still_error e;
    still_perplexity r;
    float *each = malloc((size_t)n * sizeof *each);
    assert_non_null(each);
    still_session *s = new_session(method);
    must(still_perplexity_run(s, ids, (size_t)n, ctx, each, NULL, NULL, &r, &e), &e);
    double nll = 0;
    int windows = 0, counted = 0;
    for (int start = 0; start + 1 < n; start += ctx, windows++) {
        const int len = n - start < ctx ? n - start : ctx;
        check_window(s, start, len, each, &nll);
        counted += len - 1;
    }
    assert_int_equal(r.windows, windows);
    assert_int_equal(r.n, counted);
    assert_true(fabs(r.nll - nll) <= 1e-6 * nll);
    assert_true(fabs(r.value - exp(nll / counted)) <= 1e-5 * r.value);
    still_session_free(s);
    free(each);
}

static void pieces_change_nothing(void **state)
{
    (void)state;
    check("softmax", N, 2300);
    check("still", N, N);
    check("still", N, 2048);     /* one piece, full */
    check("still", N, 2048 + 1); /* the second piece is one token */
}

static void windows_are_apart(void **state)
{
    (void)state;
    check("still", 2100, N);
    check("still", 300, 901); /* a token is left that predicts nothing */
}

typedef struct watch {
    int calls, stop_at;
    uint64_t last;
} watch;

static bool on_progress(void *user, uint64_t done, uint64_t total)
{
    watch *w = user;
    assert_int_equal(total, N);
    assert_true(done > w->last && done <= total);
    w->last = done;
    return ++w->calls != w->stop_at;
}

/* Told after each piece; stopped, it has the figure of what was fed. */
static void told_and_stopped(void **state)
{
    (void)state;
    still_error e;
    still_perplexity r, part;
    still_session *s = new_session("still");
    watch w = {0};
    must(still_perplexity_run(s, ids, N, N, NULL, on_progress, &w, &r, &e), &e);
    assert_int_equal(w.calls, 3);
    assert_int_equal(w.last, N);
    w = (watch){.stop_at = 2};
    assert_int_equal(
        still_perplexity_run(s, ids, N, N, NULL, on_progress, &w, &part, &e),
        STILL_E_CANCELLED);
    assert_int_equal(part.n, 2 * 2048 - 1);
    assert_true(part.nll < r.nll && part.value > 1 && part.stderr_ > 0);
    still_session_free(s);
}

static void refusals(void **state)
{
    (void)state;
    still_error e;
    still_perplexity r;
    still_session *s = new_session("still");
    assert_int_equal(still_perplexity_run(s, ids, N, 1, NULL, NULL, NULL, &r, &e),
                     STILL_E_ARG);
    assert_int_equal(still_perplexity_run(s, ids, N, N + 1, NULL, NULL, NULL, &r, &e),
                     STILL_E_ARG);
    assert_int_equal(still_perplexity_run(s, ids, 1, N, NULL, NULL, NULL, &r, &e),
                     STILL_E_ARG);
    /* The first of a piece is scored by other code than the rest: it looks as well. */
    int32_t bad[2050];
    for (int i = 0; i < 2050; i++) bad[i] = ids[i];
    bad[2048] = VOCAB;
    assert_int_equal(still_perplexity_run(s, bad, 2050, N, NULL, NULL, NULL, &r, &e),
                     STILL_E_ARG);
    still_session_free(s);
}

RUN_TESTS_IN(set_up, tear_down, cmocka_unit_test(pieces_change_nothing),
             cmocka_unit_test(windows_are_apart), cmocka_unit_test(told_and_stopped),
             cmocka_unit_test(refusals))
