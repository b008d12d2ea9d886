/* Allocations that fail, one after the other: a scheduler is made whole or not at all, and
 * one that runs loses at most the request, never what comes after it. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "../run.h"

#include "../oom.h"

#include "server/scheduler.h"

enum { CTX = 200, VOCAB = 384, PROMPT = 90, MADE = 5, MOST = 400 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t change = PTHREAD_COND_INITIALIZER;

typedef struct job {
    srv_scheduler *scheduler;
    struct job *next; /* added when this one is done */
    bool last_to_fail;
    srv_work work;
    int32_t prompt[PROMPT], made[MADE];
    int n;
    bool done, refused, reached;
    srv_finish finish;
    still_status code;
} job;

static bool take(void *user, const srv_token *t)
{
    job *j = user;
    j->made[j->n++] = t->id;
    return true;
}

static void add(srv_scheduler *s, job *j)
{
    srv_work *w = &j->work;
    j->scheduler = s;
    const srv_added added = srv_scheduler_add(s, &w, 1);
    if (added == SRV_ADDED) return;
    pthread_mutex_lock(&lock);
    j->done = j->refused = true;
    pthread_cond_signal(&change);
    pthread_mutex_unlock(&lock);
}

/* By the scheduler's thread, which keeps pasts between one request and the next. */
static void done(void *user, const srv_result *r)
{
    job *j = user;
    if (j->last_to_fail) {
        j->reached = countdown < 0;
        countdown = -1;
    }
    if (j->next) add(j->scheduler, j->next);
    pthread_mutex_lock(&lock);
    j->finish = r->finish;
    j->code = r->error.code;
    j->done = true;
    pthread_cond_signal(&change);
    pthread_mutex_unlock(&lock);
}

static void wait_for(job *j)
{
    pthread_mutex_lock(&lock);
    while (!j->done) pthread_cond_wait(&change, &lock);
    pthread_mutex_unlock(&lock);
}

static void make_job(job *j, int seed)
{
    static const still_logit_bias bias[] = {{3, 1}};
    *j = (job){0};
    for (int i = 0; i < PROMPT; i++) j->prompt[i] = (i * 31 + seed * 7) % VOCAB;
    j->work = (srv_work){.prompt = j->prompt,
                         .n_prompt = PROMPT,
                         .max_tokens = MADE,
                         .n_top = 2,
                         .sampling = {.size = sizeof(still_sampler_params),
                                      .temperature = 1,
                                      .seed = 4,
                                      .presence_penalty = 1,
                                      .bias = bias,
                                      .n_bias = 1},
                         .token = take,
                         .done = done,
                         .user = j};
}

static still_model *open_model(void)
{
    still_model *m;
    still_error e;
    if (still_model_open(FIXTURES "/models/llama3",
                         &STILL_PARAMS(still_model_params, .threads = 1), &m, &e))
        fail_msg("%s", e.text);
    return m;
}

static srv_scheduler_params params(still_model *m)
{
    static still_method how;
    assert_int_equal(still_method_init(&how, "still", 8, NULL), STILL_OK);
    return (srv_scheduler_params){.model = m,
                                  .session = {.size = sizeof(still_session_params),
                                              .ctx = CTX,
                                              .batch = 16,
                                              .method = &how},
                                  .parallel = 2,
                                  .queue = 2,
                                  .cache_bytes = 3 << 20};
}

static void making_one(void **state)
{
    (void)state;
    still_model *m = open_model();
    const srv_scheduler_params p = params(m);
    int i = 0;
    for (bool reached = true; reached && i < MOST; i++) {
        srv_scheduler *s;
        still_error e = {0};
        countdown = i;
        const still_status st = srv_scheduler_new(&p, &s, &e);
        reached = countdown < 0;
        countdown = -1;
        if (st != STILL_OK) {
            assert_true(e.code == STILL_E_MEMORY || e.code == STILL_E_IO);
            assert_null(s);
        }
        assert_true(st == STILL_OK || reached);
        srv_scheduler_free(s);
    }
    assert_in_range(i, 5, MOST - 1);
    still_model_free(m);
}

static void check(const job *j)
{
    if (!j->refused && j->finish == SRV_FAILED)
        assert_int_equal(j->code, STILL_E_MEMORY);
}

/* Three requests in a row, each added when the one before is done; the allocation that
 * fails is one of the first two's. */
static bool lose_one(still_model *m, int i, const int32_t *want, int *lost)
{
    const srv_scheduler_params p = params(m);
    srv_scheduler *s;
    job j[3];
    assert_int_equal(srv_scheduler_new(&p, &s, NULL), STILL_OK);
    for (int k = 0; k < 3; k++) make_job(&j[k], k % 2);
    j[0].next = &j[1];
    j[1].next = &j[2];
    j[1].last_to_fail = true;
    countdown = i;
    add(s, &j[0]);
    if (j[0].refused) {
        add(s, &j[1]);
        ++*lost;
    }
    wait_for(&j[1]);
    if (j[1].refused) { /* by a thread that goes on all the same */
        srv_scheduler_stop(s, -1);
        srv_scheduler_free(s);
        j[1].reached = countdown < 0;
        countdown = -1;
        ++*lost;
        return j[1].reached;
    }
    wait_for(&j[2]);
    srv_scheduler_stop(s, -1);
    srv_scheduler_free(s);
    check(&j[0]);
    check(&j[1]);
    *lost += j[0].finish == SRV_FAILED || j[1].finish == SRV_FAILED;
    assert_false(j[2].refused);
    assert_int_equal(j[2].finish, SRV_LENGTH);
    assert_memory_equal(j[2].made, want, sizeof j[2].made);
    return j[1].reached;
}

static void one_request_at_a_time(void **state)
{
    (void)state;
    still_model *m = open_model();
    const srv_scheduler_params p = params(m);
    srv_scheduler *s;
    job want;
    assert_int_equal(srv_scheduler_new(&p, &s, NULL), STILL_OK);
    make_job(&want, 0);
    add(s, &want);
    wait_for(&want);
    srv_scheduler_stop(s, -1);
    srv_scheduler_free(s);
    assert_int_equal(want.finish, SRV_LENGTH);
    int i = 0, lost = 0;
    while (i < MOST && lose_one(m, i, want.made, &lost)) i++;
    assert_in_range(i, 5, MOST - 1);
    assert_true(lost > 0);
    still_model_free(m);
}

RUN_TESTS(cmocka_unit_test(making_one), cmocka_unit_test(one_request_at_a_time))
