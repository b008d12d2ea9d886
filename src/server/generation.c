/* generation.c - see generation.h.
 *
 * Lock order: a generation's lock may be taken while the scheduler's is held, never the
 * other way round; so works are cancelled without it. */
#include "server/generation.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/error.h"
#include "base/mem.h"
#include "base/process.h"
#include "base/random.h"
#include "server/kept.h"
#include "server/prompts.h"
#include "server/sequence.h"

/* Bytes of a stream that may wait for a slow reader. One that is further behind is cut
 * off: it would hold a session, and memory, for as long as it likes. */
enum { MOST_WAITING = 1 << 20 };

struct srv_generation {
    const srv_api *api;
    srv_mover mover; /* resume NULL: it has left */
    srv_asked asked;
    srv_reading how;
    srv_head head;
    uint64_t seed;
    uint64_t id; /* not of the seed: ids of calls must differ in a conversation */
    struct sequence *sequence; /* [n] */
    size_t n;

    pthread_mutex_t lock; /* of everything below */
    int references;       /* the mover; all that runs */
    size_t running;       /* sequences */
    bool paused, cut;     /* the mover waits; the stream was broken off */
    bool cancelled;
    sti_buf out;       /* events */
    size_t taken;      /* bytes of out */
    double said;       /* when something was last put there */
    still_error error; /* the first */
    srv_usage usage;
    const char *finish;
};

typedef struct sequence {
    srv_generation *of;
    srv_choice choice;
    size_t index;
    int calls_sent;
    bool role_sent;
    const char *finish; /* NULL: it runs */
    sti_buf kept;       /* what the model kept, if that was asked for */
} sequence;

static uint64_t clock_bits(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void free_generation(srv_generation *g)
{
    for (size_t i = 0; g->sequence && i < g->n; i++) {
        srv_choice_free(&g->sequence[i].choice);
        sti_buf_free(&g->sequence[i].kept);
    }
    free(g->sequence);
    srv_asked_free(&g->asked);
    sti_buf_free(&g->out);
    pthread_mutex_destroy(&g->lock);
    free(g);
}

/* Called with the lock, which is then free. */
static void unlock_and_drop(srv_generation *g)
{
    bool last = --g->references == 0;
    pthread_mutex_unlock(&g->lock);
    if (last) free_generation(g);
}

static void wake(srv_generation *g)
{
    if (!g->paused || !g->mover.resume) return;
    g->paused = false;
    g->mover.resume(g->mover.user);
}

/* ---- The scheduler's thread ---------------------------------------------- */

static srv_part part_of(const sequence *s)
{
    const srv_choice *c = &s->choice;
    return (srv_part){.index = s->index,
                      .text = c->text.p,
                      .n = c->text.n,
                      .call = c->calls.call,
                      .n_calls = c->calls.n,
                      .call_seed = s->of->id,
                      .logprobs = c->how->options->logprobs >= 0 ? &c->logprobs : NULL,
                      .finish = s->finish,
                      .kept = s->kept.n ? &s->kept : NULL};
}

/* What a sequence has that the stream has not. */
static void send_news(sequence *s)
{
    srv_generation *g = s->of;
    srv_choice *c = &s->choice;
    srv_part p = part_of(s);
    p.first = !s->role_sent;
    p.finish = NULL;
    p.kept = NULL;
    p.call_at = s->calls_sent;
    p.call += s->calls_sent;
    p.n_calls -= s->calls_sent;
    if (!p.n && !p.n_calls && !(p.first && g->head.chat)) return;
    s->role_sent = true;
    s->calls_sent = c->calls.n;
    srv_put_event(&g->out, &g->head, &p);
    sti_buf_clear(&c->text);
    srv_logprobs_clear(&c->logprobs);
    g->said = sti_now();
}

static bool on_token(void *user, const srv_token *t)
{
    sequence *s = user;
    srv_generation *g = s->of;
    bool more = srv_choice_take(&s->choice, t);
    if (!g->how.options->stream || t->prompt) return more;
    pthread_mutex_lock(&g->lock);
    if (s->choice.text.n || s->choice.calls.n > s->calls_sent || !s->role_sent)
        send_news(s);
    if (g->out.n - g->taken > MOST_WAITING) g->cut = true;
    more = more && !g->cut && g->mover.resume;
    wake(g);
    pthread_mutex_unlock(&g->lock);
    return more;
}

static void fail(srv_generation *g, const still_error *err)
{
    if (g->error.code == STILL_OK) g->error = *err;
}

static void note_end(sequence *s, const srv_result *r)
{
    static const char *const reasons[SRV_FINISHES] = {[SRV_STOP] = "stop",
                                                      [SRV_LENGTH] = "length",
                                                      [SRV_CANCELLED] = "cancelled",
                                                      [SRV_FAILED] = "error"};
    srv_generation *g = s->of;
    still_error err;
    s->finish = reasons[r->finish];
    if (s->choice.calls.n && r->finish != SRV_CANCELLED) s->finish = "tool_calls";
    if (r->finish == SRV_FAILED) {
        err = r->error;
        /* The limits of a grammar, not of the context: that ends a text. */
        if (g->asked.grammar && err.code == STILL_E_LIMIT) err.code = STILL_E_ARG;
        fail(g, &err);
    }
    if (r->finish == SRV_CANCELLED) {
        sti_fail(&err, STILL_E_CANCELLED,
                 "the server is stopping: the request was cancelled");
        fail(g, &err);
    }
    if (srv_choice_failed(&s->choice)) {
        (void)sti_fail_memory(&err, "the answer", 0);
        fail(g, &err);
    }
    if (s->index == 0) g->finish = s->finish;
    if (s->index % (size_t)g->how.options->n == 0) {
        g->usage.prompt += (uint64_t)s->choice.work.n_prompt;
        g->usage.cached += (uint64_t)r->cached_tokens;
    }
    g->usage.made += (uint64_t)r->made;
}

static void put_error(srv_generation *g)
{
    srv_reply reply = {0};
    srv_reply_failure(&reply, &g->error);
    srv_put_error_event(&g->out, reply.body.n ? reply.body.p : "{}", reply.body.n);
    sti_buf_free(&reply.body);
}

/* The last event of a sequence, and of the stream. */
static void send_end(sequence *s)
{
    srv_generation *g = s->of;
    if (g->error.code == STILL_OK) {
        send_news(s);
        srv_part last = {.index = s->index,
                         .finish = s->finish,
                         .kept = s->kept.n ? &s->kept : NULL};
        srv_logprobs rest = s->choice.logprobs; /* of tokens without text */
        if (rest.tokens.n) last.logprobs = &rest;
        srv_put_event(&g->out, &g->head, &last);
    }
    if (g->running > 0) return;
    if (g->error.code != STILL_OK) {
        put_error(g);
        return;
    }
    if (g->head.usage) srv_put_usage_event(&g->out, &g->head, &g->usage);
    srv_put_done(&g->out);
}

/* While the session is there. */
static still_status note_kept(sequence *s, const srv_result *r, still_error *err)
{
    const srv_choice *c = &s->choice;
    if (!s->of->how.options->kept || !r->session || r->finish > SRV_LENGTH ||
        c->ids.failed)
        return STILL_OK;
    return srv_kept_put(&s->kept,
                        &(srv_kept){.model = s->of->api->model,
                                    .session = r->session,
                                    .prompt = c->work.prompt,
                                    .n_prompt = c->work.n_prompt,
                                    .made = (const int32_t *)(const void *)c->ids.p,
                                    .n_made = (int)(c->ids.n / sizeof(int32_t)),
                                    .queued_s = r->queued_s,
                                    .prompt_s = r->prompt_s,
                                    .decode_s = r->decode_s},
                        err);
}

static void on_done(void *user, const srv_result *r)
{
    still_error err;
    sequence *s = user;
    srv_generation *g = s->of;
    if (r->finish != SRV_FAILED) srv_choice_end(&s->choice);
    const still_status kept = note_kept(s, r, &err);
    pthread_mutex_lock(&g->lock);
    note_end(s, r);
    if (kept != STILL_OK) fail(g, &err);
    g->running--;
    if (g->how.options->stream) {
        send_end(s);
        wake(g);
    } else if (g->running == 0) {
        wake(g);
    }
    if (g->running == 0)
        unlock_and_drop(g);
    else
        pthread_mutex_unlock(&g->lock);
}

/* ---- Starting ------------------------------------------------------------ */

static still_sampler_params sampling_of(const srv_options *o, uint64_t seed)
{
    return STILL_PARAMS(still_sampler_params, .temperature = (float)o->temperature,
                        .top_p = (float)o->top_p, .min_p = (float)o->min_p,
                        .top_k = o->top_k, .repeat_penalty = (float)o->repeat_penalty,
                        .presence_penalty = (float)o->presence_penalty,
                        .frequency_penalty = (float)o->frequency_penalty,
                        .bias = o->bias, .n_bias = o->n_bias, .seed = seed);
}

static still_status prepare(srv_generation *g, size_t i, still_error *err)
{
    const srv_options *o = g->how.options;
    const srv_prompt *p = &g->asked.prompt[i / (size_t)o->n];
    sequence *s = &g->sequence[i];
    *s = (sequence){.of = g, .index = i};
    s->choice.work = (srv_work){.prompt = p->id,
                                .n_prompt = (int)p->n,
                                .max_tokens = o->max_tokens,
                                .min_tokens = o->min_tokens,
                                .ignore_eos = o->ignore_eos,
                                .score_prompt = o->echo && o->logprobs >= 0,
                                .n_top = o->logprobs,
                                .sampling = sampling_of(o, g->seed + i),
                                .token = on_token,
                                .done = on_done,
                                .user = s};
    if (g->api->most_tokens > 0 &&
        (o->max_tokens < 0 || o->max_tokens > g->api->most_tokens))
        s->choice.work.max_tokens = g->api->most_tokens;
    if (g->asked.grammar)
        STI_TRY(still_matcher_new(g->asked.grammar, g->api->vocab,
                                  &s->choice.work.matcher, err));
    return srv_choice_init(&s->choice, &g->how, p, err);
}

static still_status prepare_all(srv_generation *g, const char *body, size_t n,
                                srv_work ***work, still_error *err)
{
    STI_TRY(srv_asked_read(g->api, body, n, &g->asked, err));
    const srv_options *o = g->asked.options;
    g->how = (srv_reading){.tk = g->api->tk,
                           .options = o,
                           .tools = g->asked.tools,
                           .chat = g->head.chat,
                           .written = &g->asked.written};
    g->head.usage = o->usage;
    g->seed = o->has_seed ? o->seed : sti_mix64(clock_bits() ^ (uintptr_t)g);
    g->id = sti_mix64(clock_bits() ^ g->seed);
    snprintf(g->head.id, sizeof g->head.id, "%s-%016llx",
             g->head.chat ? "chatcmpl" : "cmpl", (unsigned long long)g->id);
    g->n = g->asked.n_prompts * (size_t)o->n;
    g->sequence = sti_alloc(g->n, sizeof *g->sequence);
    *work = sti_alloc(g->n, sizeof **work);
    if (!g->sequence || !*work) return sti_fail_memory(err, "choices", g->n);
    for (size_t i = 0; i < g->n; i++) {
        STI_TRY(prepare(g, i, err));
        (*work)[i] = &g->sequence[i].choice.work;
    }
    g->running = g->n;
    return STILL_OK;
}

/* The references are counted before the scheduler sees the works: it may be done with
 * them before it returns. */
srv_generation *srv_generation_new(const srv_api *api, bool chat, const char *body,
                                   size_t n, const srv_mover *mover, srv_reply *reply)
{
    still_error err;
    srv_work **work = NULL;
    srv_added added = SRV_ENDING;
    srv_generation *g = sti_alloc(1, sizeof *g);
    if (!g) {
        srv_reply_error(reply, 500, "out_of_memory", "out of memory: the request");
        return NULL;
    }
    pthread_mutex_init(&g->lock, NULL);
    g->api = api;
    g->asked.chat = chat;
    g->mover = *mover;
    g->references = 2;
    g->said = sti_now();
    g->head = (srv_head){.model = api->name, .created = time(NULL), .chat = chat};
    still_status status = prepare_all(g, body, n, &work, &err);
    if (status == STILL_OK) added = srv_scheduler_add(api->scheduler, work, (int)g->n);
    free(work);
    if (status == STILL_OK && added == SRV_ADDED) return g;
    if (status != STILL_OK)
        srv_reply_failure(reply, &err);
    else if (added == SRV_QUEUE_FULL)
        srv_reply_error(reply, 429, "queue_full",
                        "all places are taken and the queue is full: try again later");
    else
        srv_reply_error(reply, 503, "unavailable", "the server is stopping");
    free_generation(g);
    return NULL;
}

/* ---- The mover's thread -------------------------------------------------- */

bool srv_generation_streams(const srv_generation *g)
{
    return g->how.options->stream;
}

void srv_generation_wait(srv_generation *g)
{
    pthread_mutex_lock(&g->lock);
    g->paused = true;
    if (g->running == 0) wake(g);
    pthread_mutex_unlock(&g->lock);
}

void srv_generation_reply(srv_generation *g, srv_reply *reply)
{
    sti_buf *b = &reply->body;
    if (g->error.code != STILL_OK) {
        srv_reply_failure(reply, &g->error);
        return;
    }
    reply->status = 200;
    sti_buf_clear(b);
    srv_put_open(b, &g->head);
    for (size_t i = 0; i < g->n; i++) {
        srv_part p = part_of(&g->sequence[i]);
        if (i) sti_buf_puts(b, ",");
        srv_put_choice(b, &g->head, &p);
    }
    srv_put_close(b, &g->usage);
}

size_t srv_generation_read(srv_generation *g, char *p, size_t n, bool *end,
                           bool *broken)
{
    pthread_mutex_lock(&g->lock);
    size_t have = g->out.n - g->taken, take = have < n ? have : n;
    *broken = g->cut || g->out.failed;
    *end = *broken || (have == 0 && g->running == 0);
    if (*end) take = 0;
    if (take) {
        memcpy(p, g->out.p + g->taken, take);
        g->taken += take;
        if (g->taken == g->out.n) {
            sti_buf_clear(&g->out);
            g->taken = 0;
        }
    } else if (!*end) {
        g->paused = true;
        g->mover.pause(g->mover.user);
    }
    pthread_mutex_unlock(&g->lock);
    return take;
}

void srv_generation_ping(srv_generation *g, double now, double silence)
{
    pthread_mutex_lock(&g->lock);
    if (g->how.options->stream && g->paused && g->running > 0 &&
        now - g->said >= silence) {
        srv_put_ping(&g->out);
        g->said = now;
        wake(g);
    }
    pthread_mutex_unlock(&g->lock);
}

void srv_generation_cancel(srv_generation *g)
{
    pthread_mutex_lock(&g->lock);
    bool again = g->cancelled;
    g->cancelled = true;
    pthread_mutex_unlock(&g->lock);
    for (size_t i = 0; i < g->n && !again; i++)
        srv_scheduler_cancel(g->api->scheduler, &g->sequence[i].choice.work);
}

void srv_generation_leave(srv_generation *g)
{
    pthread_mutex_lock(&g->lock);
    g->mover.resume = NULL;
    bool running = g->running > 0;
    pthread_mutex_unlock(&g->lock);
    if (running) srv_generation_cancel(g);
    pthread_mutex_lock(&g->lock);
    unlock_and_drop(g);
}

srv_usage srv_generation_usage(srv_generation *g, const char **finish)
{
    pthread_mutex_lock(&g->lock);
    srv_usage u = g->usage;
    *finish = g->finish ? g->finish : "";
    pthread_mutex_unlock(&g->lock);
    return u;
}
