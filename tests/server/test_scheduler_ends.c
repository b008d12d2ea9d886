/* Where a text ends: at an end token, not before min_tokens, not at all with ignore_eos, and
 * where what it is to look like says so. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../run.h"

#include "server/scheduler.h"

enum { CTX = 64, MOST = 24 };

static char dir[] = "/tmp/still-ends-XXXXXX";
static still_model *model;
static const still_tokenizer *tk;
static srv_scheduler *scheduler;
static int32_t eos;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t change = PTHREAD_COND_INITIALIZER;

static int begin(void **state)
{
    (void)state;
    char path[200], line[600];
    still_error e;
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/tiny.gguf", dir);
    snprintf(line, sizeof line, "%s/make-model tiny %s >/dev/null", STILL_TOOLS, path);
    assert_int_equal(system(line), 0);
    must(still_model_open(path, &STILL_PARAMS(still_model_params, .threads = 1), &model,
                          &e),
         &e);
    unlink(path);
    tk = still_model_tokenizer(model);
    assert_non_null(tk);
    eos = still_tokenizer_eos(tk);
    assert_true(eos >= 0 && still_tokenizer_is_end(tk, eos));
    must(srv_scheduler_new(
             &(srv_scheduler_params){
                 .model = model,
                 .session = {.size = sizeof(still_session_params), .ctx = CTX},
                 .parallel = 2,
                 .queue = 8},
             &scheduler, &e),
         &e);
    return 0;
}

static int end(void **state)
{
    (void)state;
    srv_scheduler_free(scheduler);
    still_model_free(model);
    return rmdir(dir);
}

typedef struct job {
    srv_work work;
    int32_t prompt[3];
    char text[400];
    size_t n_text;
    int32_t made[CTX];
    int n, ends;
    bool done;
    srv_result result;
} job;

static bool take(void *user, const srv_token *t)
{
    job *j = user;
    size_t n = 0;
    const char *piece = still_tokenizer_piece(tk, t->id, false, &n);
    j->made[j->n++] = t->id;
    j->ends += t->end;
    if (piece && j->n_text + n < sizeof j->text) {
        memcpy(j->text + j->n_text, piece, n);
        j->n_text += n;
    }
    return true;
}

static void done(void *user, const srv_result *r)
{
    job *j = user;
    pthread_mutex_lock(&lock);
    j->result = *r;
    j->done = true;
    pthread_cond_signal(&change);
    pthread_mutex_unlock(&lock);
}

static job make_job(int seed)
{
    return (job){.prompt = {5 + seed, 17, 40},
                 .work = {.n_prompt = 3,
                          .max_tokens = MOST,
                          .n_top = -1,
                          .sampling = {.size = sizeof(still_sampler_params),
                                       .temperature = 1,
                                       .seed = (uint64_t)seed},
                          .token = take,
                          .done = done}};
}

static void run(job *j)
{
    srv_work *w = &j->work;
    w->prompt = j->prompt;
    w->user = j;
    assert_int_equal(srv_scheduler_add(scheduler, &w, 1), SRV_ADDED);
    pthread_mutex_lock(&lock);
    while (!j->done) pthread_cond_wait(&change, &lock);
    pthread_mutex_unlock(&lock);
    if (j->result.finish == SRV_FAILED) fail_msg("%s", j->result.error.text);
    assert_int_equal(j->result.made, j->n);
}

/* An end token that is always the most likely. */
static void end_tokens(void **state)
{
    (void)state;
    const still_logit_bias likely = {eos, 1000};
    static const struct {
        int min_tokens;
        bool ignore_eos;
        int made, ends;
        srv_finish finish;
    } c[] = {{0, false, 1, 1, SRV_STOP},     {1, false, 2, 1, SRV_STOP},
             {7, false, 8, 1, SRV_STOP},     {MOST, false, MOST, 0, SRV_LENGTH},
             {0, true, MOST, 0, SRV_LENGTH}, {3, true, MOST, 0, SRV_LENGTH}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++)
        for (int greedy = 0; greedy < 2; greedy++) {
            job j = make_job((int)i);
            if (greedy) j.work.sampling.temperature = 0;
            j.work.sampling.bias = &likely;
            j.work.sampling.n_bias = 1;
            j.work.min_tokens = c[i].min_tokens;
            j.work.ignore_eos = c[i].ignore_eos;
            run(&j);
            assert_int_equal(j.n, c[i].made);
            assert_int_equal(j.ends, c[i].ends);
            assert_int_equal(j.result.finish, c[i].finish);
        }
}

/* What a session says whose end tokens are never chosen; returns how often one of them
 * was the most likely after the first token. */
static int never_ending(const job *j, int32_t *out)
{
    still_error e;
    still_session *s;
    int ends = 0;
    const int vocab = still_model_get_info(model)->vocab;
    must(still_session_new(model, &STILL_PARAMS(still_session_params, .ctx = CTX), &s,
                           &e),
         &e);
    must(still_session_feed(s, j->prompt, 3, &e), &e);
    for (int n = 0; n < MOST; n++) {
        const float *l = still_session_logits(s);
        int32_t best = 0, other = -1;
        for (int32_t i = 0; i < vocab; i++) {
            if (l[i] > l[best]) best = i;
            if (!still_tokenizer_is_end(tk, i) && (other < 0 || l[i] > l[other]))
                other = i;
        }
        ends += n > 0 && best != other;
        out[n] = other;
        must(still_session_feed(s, &other, 1, &e), &e);
    }
    still_session_free(s);
    return ends;
}

/* Greedy, and an end token is the most likely now and then: the next best is taken. The
 * prompts are such that it happens. */
static void next_best(void **state)
{
    (void)state;
    int32_t want[MOST];
    int found = 0;
    for (int seed = 0; seed < 3000 && found < 3; seed++) {
        job j = make_job(0);
        j.prompt[0] = 5 + seed % 250;
        j.prompt[1] = 5 + seed / 250;
        j.work.sampling.temperature = 0;
        j.work.ignore_eos = true;
        if (never_ending(&j, want) == 0) continue;
        found++;
        run(&j);
        assert_int_equal(j.n, MOST);
        assert_memory_equal(j.made, want, sizeof want);
    }
    assert_true(found > 0);
}

/* What a grammar allows, and no more than that; two of them at once. */
static void grammars(void **state)
{
    (void)state;
    static const char text[] = "root ::= \"yes\" | \"no\" | \"maybe\" [0-9] [0-9]*";
    still_error e;
    still_grammar *g;
    int longer = 0;
    must(still_grammar_open_gbnf(tk, text, strlen(text), &g, &e), &e);
    for (int i = 0; i < 40; i++) {
        job j = make_job(i);
        if (i % 4 == 0) j.work.sampling.temperature = 0;
        j.work.min_tokens = i % 3 == 2 ? 8 : 0;
        must(still_matcher_new(g, still_model_get_info(model)->vocab, &j.work.matcher,
                               &e),
             &e);
        run(&j);
        still_matcher_free(j.work.matcher);
        const bool maybe = strncmp(j.text, "maybe", 5) == 0;
        if (!maybe) {
            assert_true(strcmp(j.text, "yes") == 0 || strcmp(j.text, "no") == 0);
            assert_int_equal(j.result.finish, SRV_STOP);
            continue;
        }
        assert_true(j.n_text > 5 && strspn(j.text + 5, "0123456789") == j.n_text - 5);
        if (j.work.min_tokens) assert_true(j.n >= 8);
        longer++;
    }
    assert_true(longer > 0);
    still_grammar_free(g);
}

static bool take_slowly(void *user, const srv_token *t)
{
    nanosleep(&(struct timespec){.tv_nsec = 100 * 1000 * 1000}, NULL);
    return take(user, t);
}

/* A scheduler that ends: what takes longer than it may is cancelled, the rest is done. */
static void deadlines(void **state)
{
    (void)state;
    static const struct {
        double seconds;
        int most;
        srv_finish finish;
    } c[] = {{0.05, -1, SRV_CANCELLED}, {0, -1, SRV_CANCELLED}, {3600, 2, SRV_LENGTH}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        still_error e;
        srv_scheduler *s;
        job running = make_job(1), waiting = make_job(2);
        job *const both[] = {&running, &waiting};
        const srv_scheduler_params p = {
            .model = model,
            .session = {.size = sizeof(still_session_params), .ctx = CTX},
            .parallel = 1,
            .queue = 8};
        must(srv_scheduler_new(&p, &s, &e), &e);
        for (int k = 0; k < 2; k++) {
            srv_work *w = &both[k]->work;
            w->prompt = both[k]->prompt;
            w->user = both[k];
            w->token = take_slowly;
            w->max_tokens = c[i].most;
            w->ignore_eos = true;
            assert_int_equal(srv_scheduler_add(s, &w, 1), SRV_ADDED);
        }
        srv_scheduler_stop(s, c[i].seconds);
        for (int k = 0; k < 2; k++) {
            assert_true(both[k]->done);
            assert_int_equal(both[k]->result.finish, c[i].finish);
            assert_true(both[k]->n < CTX - 3);
        }
        srv_scheduler_free(s);
    }
}

RUN_TESTS_IN(begin, end, cmocka_unit_test(end_tokens), cmocka_unit_test(next_best),
             cmocka_unit_test(grammars), cmocka_unit_test(deadlines))
