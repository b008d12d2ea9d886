/* Sequences that share a model: each says what it says alone, whatever the others do, and
 * every one is told its end once. */
#include <dirent.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "../run.h"

#include "server/scheduler.h"

enum { CTX = 96, BIG = 256, VOCAB = 384, CHUNK = 8, JOBS = 9 };

static still_model *open_model(void)
{
    still_model *m;
    still_error e;
    must(still_model_open(FIXTURES "/models/llama3",
                          &STILL_PARAMS(still_model_params, .threads = 1), &m, &e),
         &e);
    return m;
}

/* ---- Waiting for results ------------------------------------------------- */

typedef struct board { /* what callbacks leave for the test */
    pthread_mutex_t lock;
    pthread_cond_t change;
} board;
static board shared = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER};

typedef struct job {
    srv_work work;
    int32_t prompt[BIG];
    int32_t made[BIG];
    float logprob[BIG];
    int n, prompt_tokens, stop_after; /* token() says stop after so many; 0: never */
    int hold_at;                      /* token() waits at this one until `go` */
    bool go, at_hold;
    int done;
    srv_result result;
    int held; /* tokens in the session at the end */
} job;

static bool take(void *user, const srv_token *t)
{
    job *j = user;
    if (t->prompt) {
        j->logprob[j->prompt_tokens++] = t->logprob;
        return true;
    }
    if (j->n < BIG) j->made[j->n] = t->id;
    j->n++;
    pthread_mutex_lock(&shared.lock);
    if (j->n == j->hold_at) {
        j->at_hold = true;
        pthread_cond_broadcast(&shared.change);
        while (!j->go) pthread_cond_wait(&shared.change, &shared.lock);
    }
    pthread_mutex_unlock(&shared.lock);
    return j->n != j->stop_after;
}

static void done(void *user, const srv_result *r)
{
    job *j = user;
    pthread_mutex_lock(&shared.lock);
    j->result = *r;
    j->held = r->session ? still_session_length(r->session) : -1;
    j->done++;
    pthread_cond_broadcast(&shared.change);
    pthread_mutex_unlock(&shared.lock);
}

static void wait_done(job *j)
{
    pthread_mutex_lock(&shared.lock);
    while (!j->done) pthread_cond_wait(&shared.change, &shared.lock);
    pthread_mutex_unlock(&shared.lock);
}

static void wait_hold(job *j)
{
    pthread_mutex_lock(&shared.lock);
    while (!j->at_hold) pthread_cond_wait(&shared.change, &shared.lock);
    pthread_mutex_unlock(&shared.lock);
}

static void let_go(job *j)
{
    pthread_mutex_lock(&shared.lock);
    j->go = true;
    pthread_cond_broadcast(&shared.change);
    pthread_mutex_unlock(&shared.lock);
}

static void make_job(job *j, int seed, int n_prompt, int max_tokens)
{
    *j = (job){0};
    for (int i = 0; i < n_prompt; i++)
        j->prompt[i] = (int32_t)((unsigned)(i * 31 + seed * 7 + i * i) % VOCAB);
    j->work = (srv_work){.prompt = j->prompt,
                         .n_prompt = n_prompt,
                         .max_tokens = max_tokens,
                         .sampling.size = sizeof j->work.sampling,
                         .n_top = -1,
                         .token = take,
                         .done = done,
                         .user = j};
}

static srv_scheduler *begin(still_model *m, const still_method *method,
                            srv_scheduler_params p)
{
    srv_scheduler *s;
    still_error e;
    p.model = m;
    p.session.size = sizeof p.session;
    if (!p.session.ctx) p.session.ctx = CTX;
    p.session.batch = 16;
    p.session.method = method;
    must(srv_scheduler_new(&p, &s, &e), &e);
    return s;
}

static void add(srv_scheduler *s, job *j)
{
    srv_work *w = &j->work;
    assert_int_equal(srv_scheduler_add(s, &w, 1), SRV_ADDED);
}

/* ---- The same alone and together ----------------------------------------- */

/* What a session of its own and a sampler say. */
static int alone(still_model *m, const still_method *method, int limit, const job *j,
                 int32_t *out)
{
    still_error e;
    still_session *s;
    still_sampler *sampler;
    int n = 0;
    must(still_session_new(m,
                           &STILL_PARAMS(still_session_params, .ctx = limit,
                                         .batch = 16, .method = method),
                           &s, &e),
         &e);
    must(still_sampler_new(&j->work.sampling, VOCAB, &sampler, &e), &e);
    for (int i = 0; i < j->work.n_prompt; i++)
        still_sampler_accept_prompt(sampler, j->prompt[i]);
    must(still_session_feed(s, j->prompt, j->work.n_prompt, &e), &e);
    while (n < j->work.max_tokens) {
        must(still_sampler_sample(sampler, still_session_logits(s), &out[n], &e), &e);
        still_sampler_accept(sampler, out[n]);
        n++;
        if (n == j->work.max_tokens || still_session_length(s) == limit) break;
        must(still_session_feed(s, &out[n - 1], 1, &e), &e);
    }
    still_sampler_free(sampler);
    still_session_free(s);
    return n;
}

static void all_together(const char *name, int parallel, int piece, bool sampled)
{
    still_error e;
    still_method method;
    still_model *m = open_model();
    job *j = calloc(JOBS, sizeof *j);
    srv_work *w[JOBS];
    must(still_method_init(&method, name, CHUNK, &e), &e);
    for (int i = 0; i < JOBS; i++) {
        make_job(&j[i], i, 1 + i * 37 % 60, 5 + i * 3);
        if (sampled && i % 3 != 2)
            j[i].work.sampling =
                STILL_PARAMS(still_sampler_params, .temperature = 1, .top_p = 0.9f,
                             .seed = (uint64_t)i, .frequency_penalty = i % 2 ? 0.5f : 0,
                             .repeat_penalty = i % 2 ? 1.1f : 0);
        w[i] = &j[i].work;
    }
    srv_scheduler *s = begin(
        m, &method,
        (srv_scheduler_params){.parallel = parallel, .queue = JOBS, .piece = piece});
    assert_int_equal(srv_scheduler_limit(s), CTX);
    for (int i = 0; i < 4; i++) add(s, &j[i]);
    assert_int_equal(srv_scheduler_add(s, w + 4, JOBS - 4), SRV_ADDED);
    srv_scheduler_stop(s, -1);
    srv_metrics figures;
    srv_scheduler_metrics(s, &figures);
    srv_scheduler_free(s);
    uint64_t made = 0;
    for (int i = 0; i < JOBS; i++) {
        int32_t want[CTX];
        int n = alone(m, &method, CTX, &j[i], want);
        assert_int_equal(j[i].done, 1);
        if (j[i].result.finish == SRV_FAILED) fail_msg("%s", j[i].result.error.text);
        assert_int_equal(j[i].result.made, n);
        assert_int_equal(j[i].n, n);
        assert_memory_equal(j[i].made, want, (size_t)n * sizeof *want);
        assert_int_equal(j[i].result.prompt_tokens, j[i].work.n_prompt);
        made += (uint64_t)n;
    }
    assert_int_equal(figures.requests, 5);
    assert_int_equal(figures.made_tokens, made);
    assert_int_equal(figures.active, 0);
    assert_int_equal(figures.queued, 0);
    assert_int_equal(figures.finished[SRV_LENGTH] + figures.finished[SRV_STOP], JOBS);
    free(j);
    still_model_free(m);
}

static void same_as_alone(void **state)
{
    (void)state;
    all_together("softmax", 1, 0, false);
    all_together("softmax", 3, 5, true);
    all_together("still", 4, 0, true);
    all_together("still", JOBS, 3, false);
    all_together("still", 2, 7, true);
    all_together("liger", 3, 4, true);
}

/* ---- Pasts that are shared ----------------------------------------------- */

static void run(srv_scheduler *s, job *j)
{
    add(s, j);
    wait_done(j);
    if (j->result.finish == SRV_FAILED) fail_msg("%s", j->result.error.text);
}

static void says_the_same(still_model *m, const still_method *method, const job *j)
{
    int32_t want[BIG];
    const int n = alone(m, method, BIG, j, want);
    assert_int_equal(j->n, n);
    assert_memory_equal(j->made, want, (size_t)n * sizeof *want);
}

/* A conversation goes on where it was; the same prompt is not read again; what several
 * begin with is kept from the second on. */
static void goes_on(const char *name, bool cuts)
{
    still_error e;
    still_method method;
    still_model *m = open_model();
    job *j = calloc(7, sizeof *j);
    must(still_method_init(&method, name, CHUNK, &e), &e);
    srv_scheduler *s =
        begin(m, &method,
              (srv_scheduler_params){
                  .parallel = 2,
                  .queue = 4,
                  .cache_bytes = 256u << 20,
                  .session = {.size = sizeof(still_session_params), .ctx = BIG}});
    make_job(&j[0], 1, 150, 30);
    run(s, &j[0]);
    assert_int_equal(j[0].result.cached_tokens, 0);
    make_job(&j[1], 1, 200, 10); /* the next turn: its answer, and a question */
    memcpy(j[1].prompt + 150, j[0].made, (size_t)j[0].n * sizeof *j[0].made);
    run(s, &j[1]);
    assert_int_equal(j[1].result.cached_tokens, 150 + 29);
    make_job(&j[2], 1, 150, 12); /* tried again */
    run(s, &j[2]);
    assert_int_equal(j[2].result.cached_tokens, cuts ? 149 : 150);
    make_job(&j[3], 1, 150, 12); /* others with the same beginning */
    make_job(&j[4], 1, 140, 12);
    for (int i = 100; i < 150; i++) j[3].prompt[i] = 7 * i % VOCAB;
    for (int i = 100; i < 140; i++) j[4].prompt[i] = 11 * i % VOCAB;
    run(s, &j[3]);
    assert_int_equal(j[3].result.cached_tokens, cuts ? 100 : 0);
    run(s, &j[4]);
    assert_int_equal(j[4].result.cached_tokens, cuts ? 100 : 100 / CHUNK * CHUNK);
    srv_metrics figures;
    srv_scheduler_metrics(s, &figures);
    assert_true(figures.cache_pasts > 0 && figures.cache_bytes > 0);
    assert_true(figures.cache_bytes <= figures.cache_limit && !figures.has_disk);
    assert_int_equal(figures.cache_hits, cuts ? 4 : 3);
    assert_int_equal(figures.cache_misses, cuts ? 1 : 2);
    assert_int_equal(figures.cached_tokens,
                     (150 + 29) + (cuts ? 149 + 100 + 100 : 150 + 96));
    srv_scheduler_free(s);
    for (int i = 0; i < 5; i++) says_the_same(m, &method, &j[i]);
    free(j);
    still_model_free(m);
}

static void conversations_go_on(void **state)
{
    (void)state;
    goes_on("still", false);
    goes_on("softmax", true);
}

/* The next server finds what the last one left, and says the same. */
static void after_a_restart(void **state)
{
    (void)state;
    char folder[] = "/tmp/still-restart-XXXXXX", path[400];
    still_error e;
    still_method method;
    still_model *m = open_model();
    job *j = calloc(2, sizeof *j);
    assert_non_null(mkdtemp(folder));
    must(still_method_init(&method, "still", CHUNK, &e), &e);
    const srv_scheduler_params p = {
        .cache_bytes = 256u << 20,
        .cache_dir = folder,
        .session = {.size = sizeof(still_session_params), .ctx = BIG}};
    make_job(&j[0], 1, 150, 30);
    srv_scheduler *s = begin(m, &method, p);
    run(s, &j[0]);
    srv_scheduler_free(s);
    make_job(&j[1], 1, 200, 10);
    memcpy(j[1].prompt + 150, j[0].made, (size_t)j[0].n * sizeof *j[0].made);
    s = begin(m, &method, p);
    srv_metrics figures;
    srv_scheduler_metrics(s, &figures);
    assert_int_equal(figures.disk.pasts, 1); /* the prompt's end is continued */
    run(s, &j[1]);
    assert_int_equal(j[1].result.cached_tokens, 150 + 29);
    srv_scheduler_metrics(s, &figures);
    assert_true(figures.has_disk);
    assert_int_equal(figures.disk.found, 1);
    assert_int_equal(figures.cache_hits, 1);
    srv_scheduler_free(s);
    says_the_same(m, &method, &j[1]);
    DIR *d = opendir(folder);
    for (const struct dirent *f; (f = readdir(d));) {
        snprintf(path, sizeof path, "%s/%s", folder, f->d_name);
        unlink(path);
    }
    closedir(d);
    assert_int_equal(rmdir(folder), 0);
    free(j);
    still_model_free(m);
}

/* Several answers to one prompt, and prompts that begin alike, all at once: the beginning
 * is read once. */
static void together(const char *name)
{
    enum { N = 6 };
    still_error e;
    still_method method;
    still_model *m = open_model();
    job *j = calloc(N, sizeof *j);
    srv_work *w[N];
    must(still_method_init(&method, name, CHUNK, &e), &e);
    for (int i = 0; i < N; i++) {
        make_job(&j[i], 1, 180, 15);
        j[i].work.sampling =
            STILL_PARAMS(still_sampler_params, .temperature = 1, .seed = (uint64_t)i);
        for (int k = 120; k < 180 && i >= 3; k++) j[i].prompt[k] = k * (5 + i) % VOCAB;
        w[i] = &j[i].work;
    }
    srv_scheduler *s =
        begin(m, &method,
              (srv_scheduler_params){
                  .parallel = N,
                  .queue = 1,
                  .piece = 16,
                  .cache_bytes = 256u << 20,
                  .session = {.size = sizeof(still_session_params), .ctx = BIG}});
    assert_int_equal(srv_scheduler_add(s, w, N), SRV_ADDED);
    srv_scheduler_stop(s, -1);
    srv_scheduler_free(s);
    for (int i = 0; i < N; i++) {
        says_the_same(m, &method, &j[i]);
        if (i > 0) assert_true(j[i].result.cached_tokens >= (i < 3 ? 179 : 120));
    }
    free(j);
    still_model_free(m);
}

static void beginnings_are_read_once(void **state)
{
    (void)state;
    together("still");
    together("softmax");
}

/* ---- Queue, cancelling, ends --------------------------------------------- */

/* One runs, one waits, the third is refused; what was cancelled says so. */
static void queue_is_bounded(void **state)
{
    (void)state;
    still_model *m = open_model();
    job *j = calloc(4, sizeof *j);
    for (int i = 0; i < 4; i++) make_job(&j[i], i, 10, 20);
    j[0].hold_at = 2;
    srv_scheduler *s =
        begin(m, NULL, (srv_scheduler_params){.parallel = 1, .queue = 1});
    add(s, &j[0]);
    wait_hold(&j[0]);
    srv_work *two[] = {&j[1].work, &j[2].work}, *more = &j[3].work;
    assert_int_equal(srv_scheduler_add(s, two, 2), SRV_ADDED); /* one request */
    assert_int_equal(srv_scheduler_add(s, &more, 1), SRV_QUEUE_FULL);
    srv_metrics figures;
    srv_scheduler_metrics(s, &figures);
    assert_int_equal(figures.active, 1);
    assert_int_equal(figures.queued, 1);
    assert_int_equal(figures.refused, 1);
    srv_scheduler_cancel(s, &j[1].work);
    srv_scheduler_cancel(s, &j[3].work); /* is not there */
    let_go(&j[0]);
    wait_done(&j[2]);
    assert_int_equal(j[0].result.finish, SRV_LENGTH);
    assert_int_equal(j[0].result.made, 20);
    assert_int_equal(j[0].held, 29); /* the last was not fed */
    assert_int_equal(j[1].result.finish, SRV_CANCELLED);
    assert_int_equal(j[1].held, -1);
    assert_int_equal(j[2].result.finish, SRV_LENGTH);
    srv_scheduler_end(s, false);
    assert_int_equal(srv_scheduler_add(s, &more, 1), SRV_ENDING);
    srv_scheduler_free(s);
    for (int i = 0; i < 4; i++) assert_int_equal(j[i].done, i < 3);
    free(j);
    still_model_free(m);
}

static void cancelled_while_it_runs(void **state)
{
    (void)state;
    still_model *m = open_model();
    job *j = calloc(3, sizeof *j);
    for (int i = 0; i < 3; i++) make_job(&j[i], i, 10, 20);
    j[0].hold_at = 3;
    j[1].stop_after = 4;
    srv_scheduler *s =
        begin(m, NULL, (srv_scheduler_params){.parallel = 2, .queue = 1});
    add(s, &j[1]);
    add(s, &j[0]);
    wait_hold(&j[0]);
    srv_scheduler_cancel(s, &j[0].work);
    let_go(&j[0]);
    wait_done(&j[0]);
    wait_done(&j[1]);
    assert_int_equal(j[0].result.finish, SRV_CANCELLED);
    assert_int_equal(j[0].result.made, 3);
    assert_int_equal(j[1].result.finish, SRV_STOP);
    assert_int_equal(j[1].result.made, 4);
    j[2].hold_at = 1;
    add(s, &j[2]);
    wait_hold(&j[2]);
    srv_scheduler_end(s, true);
    let_go(&j[2]);
    srv_scheduler_free(s);
    assert_int_equal(j[2].result.finish, SRV_CANCELLED);
    assert_int_equal(j[2].result.made, 1);
    free(j);
    still_model_free(m);
}

/* Wrong work fails alone; a full context ends a sequence; a prompt may be all there is. */
static void ends(void **state)
{
    (void)state;
    still_model *m = open_model();
    job *j = calloc(6, sizeof *j);
    make_job(&j[0], 0, CTX, 20);
    make_job(&j[1], 1, 10, 20);
    j[1].work.n_prompt = CTX + 1;
    make_job(&j[2], 2, 10, 20);
    j[2].prompt[3] = VOCAB;
    make_job(&j[3], 3, 10, 0);
    make_job(&j[4], 4, 10, 20);
    j[4].work.sampling.temperature = -1;
    make_job(&j[5], 5, CTX - 3, -1);
    srv_scheduler *s =
        begin(m, NULL, (srv_scheduler_params){.parallel = 2, .queue = 6});
    for (int i = 0; i < 6; i++) add(s, &j[i]);
    srv_scheduler_stop(s, -1);
    srv_scheduler_free(s);
    assert_int_equal(j[0].result.finish, SRV_LENGTH);
    assert_int_equal(j[0].result.made, 1);
    assert_int_equal(j[1].result.finish, SRV_FAILED);
    assert_int_equal(j[1].result.error.code, STILL_E_LIMIT);
    assert_int_equal(j[2].result.finish, SRV_FAILED);
    assert_int_equal(j[2].result.error.code, STILL_E_ARG);
    assert_int_equal(j[3].result.finish, SRV_LENGTH);
    assert_int_equal(j[3].result.made, 0);
    assert_int_equal(j[4].result.finish, SRV_FAILED);
    assert_int_equal(j[5].result.finish, SRV_LENGTH);
    assert_int_equal(j[5].result.made, 4);
    free(j);
    still_model_free(m);
}

/* ---- Scores -------------------------------------------------------------- */

static void check_scores(still_model *m, const still_method *method, const job *j)
{
    still_error e;
    still_session *s;
    float want[CTX];
    const int n = j->work.n_prompt;
    must(still_session_new(m,
                           &STILL_PARAMS(still_session_params, .ctx = CTX, .batch = 16,
                                         .method = method),
                           &s, &e),
         &e);
    must(still_session_logprobs(s, j->prompt, n, want, NULL, &e), &e);
    still_session_free(s);
    assert_int_equal(j->prompt_tokens, n);
    assert_true(isnan(j->logprob[0]));
    for (int i = 1; i < n; i++)
        if (fabsf(j->logprob[i] - want[i - 1]) > 2e-5f)
            fail_msg("token %d of %d: %g, alone %g", i, n, (double)j->logprob[i],
                     (double)want[i - 1]);
}

/* Choices of questions: the beginning is shared, what is said of it is the same. */
static void score(const char *name, int rollback, uint64_t reused)
{
    enum { N = 12 };
    still_error e;
    still_method method;
    still_model *m = open_model();
    job *j = calloc(N, sizeof *j);
    srv_work *w[N];
    must(still_method_init(&method, name, CHUNK, &e), &e);
    for (int i = 0; i < N; i++) {
        make_job(&j[i], i / 4, 40 + i % 3 * 20, i % 5 == 4 ? 3 : 0);
        for (int k = 36; k < j[i].work.n_prompt; k++)
            j[i].prompt[k] = (j[i].prompt[k] + i % 4) % VOCAB;
        j[i].work.score_prompt = true;
        j[i].work.n_top = 2;
        w[i * 5 % N] = &j[i].work; /* they are put in order */
    }
    srv_scheduler *s =
        begin(m, &method,
              (srv_scheduler_params){.parallel = 2,
                                     .queue = 1,
                                     .session = {.size = sizeof(still_session_params),
                                                 .rollback = rollback}});
    assert_int_equal(srv_scheduler_add(s, w, N), SRV_ADDED);
    srv_scheduler_stop(s, -1);
    srv_metrics figures;
    srv_scheduler_metrics(s, &figures);
    srv_scheduler_free(s);
    for (int i = 0; i < N; i++) {
        if (j[i].result.finish == SRV_FAILED) fail_msg("%s", j[i].result.error.text);
        check_scores(m, &method, &j[i]);
    }
    assert_int_equal(figures.cached_tokens, reused);
    free(j);
    still_model_free(m);
}

static void prompts_are_scored(void **state)
{
    (void)state;
    score("softmax", 0, 9 * 35);
    score("still", 8, 9 * 32);
    score("still", 0, 0);
}

static void bad_params(void **state)
{
    (void)state;
    srv_scheduler *s;
    still_error e;
    still_model *m = open_model();
    assert_int_equal(
        srv_scheduler_new(&(srv_scheduler_params){.model = m, .parallel = -1}, &s, &e),
        STILL_E_ARG);
    assert_null(s);
    assert_int_equal(
        srv_scheduler_new(&(srv_scheduler_params){.model = m, .queue = -1}, &s, &e),
        STILL_E_ARG);
    still_model_free(m);
}

RUN_TESTS(cmocka_unit_test(same_as_alone), cmocka_unit_test(conversations_go_on),
          cmocka_unit_test(after_a_restart), cmocka_unit_test(beginnings_are_read_once),
          cmocka_unit_test(queue_is_bounded), cmocka_unit_test(cancelled_while_it_runs),
          cmocka_unit_test(ends), cmocka_unit_test(prompts_are_scored),
          cmocka_unit_test(bad_params))
