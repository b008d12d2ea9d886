/* Sessions allocate nothing once they are made, whatever the method: every allocator is
 * wrapped and counted, the mapping of large blocks among them, while tokens are fed, in
 * batches and one by one. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>

#include "../oom.h"
#include "../run.h"

#include "still.h"

void *__real_mmap(void *at, size_t n, int access, int flags, int fd, off_t from);
void *__wrap_mmap(void *at, size_t n, int access, int flags, int fd, off_t from);

void *__wrap_mmap(void *at, size_t n, int access, int flags, int fd, off_t from)
{
    allocations++;
    return __real_mmap(at, n, access, flags, fd, from);
}

enum { SESSIONS = 3, BATCH = 96, STEPS = 60 };

/* The model is new and has computed nothing: what sessions reserved must do. */
static void feed_with(const char *name, int chunk)
{
    still_error e;
    still_model *m;
    still_method how;
    still_session *s[SESSIONS];
    const still_session_params p = {
        .size = sizeof p, .ctx = 250, .batch = BATCH, .method = &how, .rollback = 2};
    assert_int_equal(still_model_open(FIXTURES "/models/llama3",
                                      &STILL_PARAMS(still_model_params, .threads = 2),
                                      &m, &e),
                     STILL_OK);
    assert_int_equal(still_method_init(&how, name, chunk, &e), STILL_OK);
    for (int j = 0; j < SESSIONS; j++)
        assert_int_equal(still_session_new(m, &p, &s[j], &e), STILL_OK);
    const long before = allocations;
    int32_t prompt[BATCH] = {1, 2, 3, 4, 5, 6};
    assert_int_equal(still_session_feed(s[1], prompt, BATCH, &e), STILL_OK);
    for (int t = 0; t < STEPS; t++) {
        int32_t tok[SESSIONS] = {t, 2 * t, 3 * t};
        assert_int_equal(still_session_feed(s[0], tok, 1, &e), STILL_OK);
        assert_int_equal(still_session_step(s, tok, SESSIONS, &e), STILL_OK);
    }
    const long allocated = allocations - before;
    if (allocated != 0) fail_msg("%s: %ld allocations while feeding", name, allocated);
    for (int j = 0; j < SESSIONS; j++) still_session_free(s[j]);
    still_model_free(m);
}

static void feeding_allocates_nothing(void **state)
{
    (void)state;
    const char *name;
    for (int i = 0; (name = still_method_at(i, NULL)); i++) {
        feed_with(name, 8);
        feed_with(name, 512);
    }
}

RUN_TESTS(cmocka_unit_test(feeding_allocates_nothing))
