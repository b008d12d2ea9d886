/* sequence.c - see sequence.h.
 *
 * A failure ends the one sequence it happens to: its session is emptied before another
 * uses it. */
#include "server/sequence.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/hash.h"
#include "base/mem.h"
#include "base/process.h"

/* Models and settings whose pasts are not the same have, but for chance, other numbers;
 * the files themselves know for sure. */
static uint64_t number_of(const srv_scheduler_params *p, const still_method *method,
                          int limit)
{
    const still_model_info *i = still_model_get_info(p->model);
    const sti_hash_key key = {{1, 2}};
    char text[sizeof method->caps + 512];
    const size_t n =
        (size_t)snprintf(text, sizeof text, "%.200s %d %d %d %llu %zu %d",
                         i->name ? i->name : "", i->layers, i->hidden, i->vocab,
                         (unsigned long long)i->params, i->file_bytes, limit);
    if (method)
        snprintf(text + n, sizeof text - n, " %s %d %d %d %d %d %s %s", method->name,
                 method->chunk, method->select, method->cap, method->key_bits,
                 method->value_bits, method->score, method->caps);
    return sti_hash_bytes(&key, text, strlen(text));
}

static still_status open_disk(const srv_scheduler_params *p, const still_method *method,
                              srv_host *h, still_error *err)
{
    h->tree.path = sti_alloc((size_t)h->limit, sizeof *h->tree.path);
    if (!h->tree.path) return sti_fail_memory(err, p->cache_dir, (size_t)h->limit * 4);
    return srv_prefix_disk_open(
        &(srv_prefix_disk_params){.folder = p->cache_dir,
                                  .limit = p->cache_bytes,
                                  .model = number_of(p, method, h->limit),
                                  .most_tokens = h->limit},
        &h->tree.disk, err);
}

still_status srv_host_init(const srv_scheduler_params *p, int limit, srv_host *out,
                           still_error *err)
{
    const still_model_info *info = still_model_get_info(p->model);
    const still_method *method = p->session.method ? p->session.method : info->method;
    const bool softmax = !method || strcmp(method->name, "softmax") == 0;
    const size_t words = ((size_t)info->vocab + 63) / 64;
    *out = (srv_host){.model = p->model,
                      .tk = still_model_tokenizer(p->model),
                      .vocab = info->vocab,
                      .limit = limit,
                      .no_end = sti_alloc(words, sizeof *out->no_end),
                      .allowed = sti_alloc(words, sizeof *out->allowed),
                      .chunk = !softmax && method->chunk > 0 ? method->chunk : 1,
                      .tree = {.limit = p->cache_bytes, .cuts = softmax}};
    if (!out->no_end || !out->allowed)
        return sti_fail_memory(err, "end tokens", words * 8);
    for (int32_t i = 0; i < info->vocab; i++)
        if (!out->tk || !still_tokenizer_is_end(out->tk, i))
            out->no_end[i / 64] |= (uint64_t)1 << (i % 64);
    return p->cache_dir && p->cache_bytes > 0 ? open_disk(p, method, out, err)
                                              : STILL_OK;
}

void srv_host_free(srv_host *h)
{
    srv_prefix_disk *disk = h->tree.disk;
    free(h->no_end);
    free(h->allowed);
    srv_prefix_tree_free(&h->tree);
    srv_prefix_disk_close(disk);
    *h = (srv_host){0};
}

/* ---- Ends ---------------------------------------------------------------- */

static void end(srv_sequence *q, srv_finish why)
{
    q->over = true;
    q->finish = why;
}

void srv_sequence_fail(srv_sequence *q, const still_error *err)
{
    end(q, SRV_FAILED);
    q->slot->error = *err;
}

/* Whatever comes next in this conversation begins with what the session holds now. */
static void keep_past(srv_host *h, const srv_sequence *q)
{
    const srv_slot *slot = q->slot;
    if (!slot || q->finish == SRV_FAILED) return;
    if (still_session_length(slot->session) - q->cached >= SRV_LEAST_GAIN)
        srv_prefix_tree_put(&h->tree, slot->id, slot->session);
}

void srv_sequence_finish(srv_host *h, srv_sequence *q)
{
    const double now = sti_now();
    const double began = q->began > 0 ? q->began : now;
    const double read = q->read > 0 ? q->read : now;
    srv_result r = {.finish = q->finish,
                    .prompt_tokens = q->work->n_prompt,
                    .cached_tokens = q->cached,
                    .made = q->made,
                    .queued_s = began - q->added,
                    .prompt_s = read - began,
                    .decode_s = now - read,
                    .session = q->slot ? q->slot->session : NULL};
    const bool scores = q->work->score_prompt;
    if (q->finish == SRV_FAILED && q->slot) r.error = q->slot->error;
    still_sampler_free(q->sampler);
    q->sampler = NULL;
    q->work->done(q->work->user, &r); /* the work is gone */
    if (!scores) keep_past(h, q);
}

/* ---- Its prompt ---------------------------------------------------------- */

static still_status check(srv_host *h, const srv_work *w, still_error *err)
{
    if (w->n_prompt < 1 || w->n_prompt > h->limit)
        return sti_fail(err, STILL_E_LIMIT,
                        "the prompt has %d tokens, the context holds 1 to %d: shorten "
                        "it, or start the server with a larger --ctx",
                        w->n_prompt, h->limit);
    for (int i = 0; i < w->n_prompt; i++)
        if (w->prompt[i] < 0 || w->prompt[i] >= h->vocab)
            return sti_fail(err, STILL_E_ARG,
                            "token %d of the prompt is %d, the vocabulary has %d", i,
                            w->prompt[i], h->vocab);
    if (w->n_top < -1 || w->n_top > SRV_MOST_TOP)
        return sti_fail(err, STILL_E_ARG, "%d alternatives per token, at most %d",
                        w->n_top, SRV_MOST_TOP);
    return STILL_OK;
}

/* Whether the most likely token is always the one that is chosen. */
static bool changes_nothing(const still_sampler_params *p)
{
    return p->temperature == 0 && (p->repeat_penalty == 0 || p->repeat_penalty == 1) &&
           p->presence_penalty == 0 && p->frequency_penalty == 0 && p->n_bias == 0;
}

static still_status make_sampler(srv_host *h, srv_sequence *q, still_error *err)
{
    const srv_work *w = q->work;
    if (w->max_tokens == 0 || (changes_nothing(&w->sampling) && !w->min_tokens &&
                               !w->ignore_eos && !w->matcher))
        return STILL_OK;
    STI_TRY(still_sampler_new(&w->sampling, h->vocab, &q->sampler, err));
    for (int i = 0; i < w->n_prompt; i++)
        still_sampler_accept_prompt(q->sampler, w->prompt[i]);
    return STILL_OK;
}

int srv_common(const int32_t *a, int n, const int32_t *b, int m)
{
    int same = 0;
    while (same < n && same < m && a[same] == b[same]) same++;
    return same;
}

/* Keeps what the session holds of the prompt, and of that what is scored. The last common
 * token is fed again: its row is about the first that differs. */
static void keep_scored(srv_sequence *q)
{
    const srv_work *w = q->work;
    srv_slot *slot = q->slot;
    srv_scores *c = slot->scores;
    const int k = w->n_top > 0 ? w->n_top : 1;
    int at, same = srv_common(w->prompt, w->n_prompt, slot->id,
                              still_session_length(slot->session));
    c->n = k > c->k ? 0 : srv_common(w->prompt, w->n_prompt, c->id, c->n);
    if (k > c->k) c->k = k;
    if (same > c->n) same = c->n;
    if (same > 0) same--;
    if (still_session_rollback(slot->session, same, &at, NULL) != STILL_OK)
        still_session_reset(slot->session);
    q->cached = still_session_length(slot->session);
}

/* ---- Sharing ------------------------------------------------------------- */

int srv_sequence_offers(const srv_host *h, const srv_sequence *q, int common)
{
    return common == q->work->n_prompt ? common : common / h->chunk * h->chunk;
}

bool srv_sequence_mark(srv_sequence *q, int length)
{
    int i = 0;
    if (still_session_length(q->slot->session) >= length) return false;
    while (i < q->n_marks && q->mark[i] < length) i++;
    if (i < q->n_marks && q->mark[i] == length) return true;
    if (q->n_marks == SRV_MARKS) return false;
    for (int j = q->n_marks++; j > i; j--) q->mark[j] = q->mark[j - 1];
    q->mark[i] = length;
    return true;
}

/* Puts its past into the tree where others wait for it, and at the end of its prompt: the
 * same prompt may come again, or its answer come back as other tokens. */
static void keep_marks(srv_host *h, srv_sequence *q)
{
    const srv_slot *slot = q->slot;
    const int at = still_session_length(slot->session);
    bool keep = !h->tree.cuts && !q->reading && at - q->cached >= SRV_LEAST_GAIN;
    while (q->n_marks > 0 && q->mark[0] <= at) {
        keep = true;
        q->n_marks--;
        memmove(q->mark, q->mark + 1, (size_t)q->n_marks * sizeof *q->mark);
    }
    if (keep) srv_prefix_tree_put(&h->tree, slot->id, slot->session);
}

/* The longest past that its prompt begins with. Where it leaves a text that came before,
 * others will probably leave it, too. */
static void take_over(srv_host *h, srv_sequence *q)
{
    const srv_work *w = q->work;
    still_session *s = q->slot->session;
    const srv_prefix_match m = srv_prefix_tree_find(&h->tree, w->prompt, w->n_prompt);
    still_status st = STILL_E_LIMIT;
    int at;
    still_snapshot *stored =
        h->tree.disk ? srv_prefix_disk_get(h->tree.disk, s, w->prompt, w->n_prompt,
                                           m.length + SRV_LEAST_GAIN)
                     : NULL;
    if (stored) {
        st = still_session_restore(s, stored, NULL);
        still_snapshot_free(stored);
    } else if (m.past && m.length >= SRV_LEAST_GAIN / 4) {
        st = still_session_restore(s, m.past, NULL);
        if (st == STILL_OK && m.length < still_session_length(s))
            st = still_session_rollback(s, m.length, &at, NULL);
    }
    if (st != STILL_OK) still_session_reset(s);
    q->cached = still_session_length(s);
    if (h->tree.limit > 0) *(q->cached > 0 ? &h->hits : &h->misses) += 1;
    const int parts = m.shared / h->chunk * h->chunk;
    if (!h->tree.cuts && parts - q->cached >= SRV_LEAST_GAIN)
        (void)srv_sequence_mark(q, parts);
}

void srv_sequence_begin(srv_host *h, srv_sequence *q)
{
    still_error err;
    const srv_work *w = q->work;
    srv_slot *slot = q->slot;
    q->began = sti_now();
    q->reading = true;
    if (check(h, w, &err) != STILL_OK || make_sampler(h, q, &err) != STILL_OK) {
        srv_sequence_fail(q, &err);
        return;
    }
    if (w->score_prompt)
        keep_scored(q);
    else
        take_over(h, q);
    memcpy(slot->id, w->prompt, (size_t)w->n_prompt * sizeof *slot->id);
}

/* Row i of the scores is about token i+1, hence the offsets; that of a piece's last token
 * is in the session's logits when the next piece begins. */
static still_status feed_scored(srv_host *h, srv_sequence *q, int n, still_error *err)
{
    srv_slot *slot = q->slot;
    srv_scores *c = slot->scores;
    const int at = still_session_length(slot->session);
    const size_t k = (size_t)c->k, next = (size_t)at + 1;
    if (at > 0 && c->n <= at)
        srv_rank(still_session_logits(slot->session), h->vocab, slot->id[at], c->k,
                 c->logprob + at, c->top + (size_t)at * k,
                 c->top_logprob + (size_t)at * k);
    STI_TRY(still_session_top_logprobs(slot->session, slot->id + at, n, c->k,
                                       c->logprob + next, c->top + next * k,
                                       c->top_logprob + next * k, err));
    memcpy(c->id + at, slot->id + at, (size_t)n * sizeof *c->id);
    if (c->n < at + n) c->n = at + n;
    return STILL_OK;
}

static void hand_out_scores(srv_sequence *q)
{
    const srv_work *w = q->work;
    const srv_scores *c = q->slot->scores;
    for (int i = 0; i < w->n_prompt && !q->over; i++) {
        const size_t row = (size_t)i * (size_t)c->k;
        const bool known = i > 0 && w->n_top >= 0;
        srv_token t = {.id = w->prompt[i],
                       .prompt = true,
                       .logprob = known ? c->logprob[i] : NAN,
                       .top = c->top + row,
                       .top_logprob = c->top_logprob + row,
                       .n_top = known ? w->n_top : 0};
        if (!w->token(w->user, &t)) end(q, SRV_STOP);
    }
}

static void begin_answer(srv_host *h, srv_sequence *q)
{
    const srv_work *w = q->work;
    q->reading = false;
    q->read = sti_now();
    if (w->score_prompt)
        hand_out_scores(q);
    else if (w->max_tokens != 0 || q->n_marks > 0)
        keep_marks(h, q);
    if (q->over) return;
    if (w->max_tokens == 0)
        end(q, SRV_LENGTH);
    else
        srv_sequence_choose(h, q, -1);
}

/* All of the prompt was there already: its logits are, too. */
int srv_sequence_read(srv_host *h, srv_sequence *q, int n)
{
    still_error err;
    srv_slot *slot = q->slot;
    const srv_work *w = q->work;
    const int at = still_session_length(slot->session), left = w->n_prompt - at;
    if (n > left) n = left;
    if (q->n_marks > 0 && n > q->mark[0] - at) n = q->mark[0] - at;
    still_status st = w->score_prompt
                          ? feed_scored(h, q, n, &err)
                          : still_session_feed(slot->session, slot->id + at, n, &err);
    if (st != STILL_OK) {
        srv_sequence_fail(q, &err);
        return 0;
    }
    if (n == left)
        begin_answer(h, q);
    else if (q->n_marks > 0 && q->mark[0] == at + n)
        keep_marks(h, q);
    return n;
}

/* ---- Its tokens ---------------------------------------------------------- */

bool srv_sequence_needs_logits(const srv_sequence *q)
{
    const srv_work *w = q->work;
    return !changes_nothing(&w->sampling) || w->matcher || w->n_top >= 0;
}

static bool is_end(const srv_host *h, int32_t id)
{
    return !(h->no_end[id / 64] >> (id % 64) & 1);
}

static bool may_end(const srv_sequence *q)
{
    return !q->work->ignore_eos && q->made >= q->work->min_tokens;
}

static int32_t most_likely(const float *logits, int vocab)
{
    int32_t best = 0;
    for (int32_t i = 1; i < vocab; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

/* What must be over may end, whatever was asked for. */
static still_status sample_matched(srv_host *h, srv_sequence *q, const float *logits,
                                   int32_t *id, still_error *err)
{
    still_matcher *m = q->work->matcher;
    if (may_end(q) || still_matcher_done(m))
        return still_sampler_sample_matched(q->sampler, m, logits, id, err);
    STI_TRY(still_matcher_mask(m, h->allowed, err));
    for (int i = 0; i < (h->vocab + 63) / 64; i++) h->allowed[i] &= h->no_end[i];
    return still_sampler_sample_masked(q->sampler, logits, h->allowed, id, err);
}

/* Whether the most likely token is the one to choose. A matcher has then accepted it. */
static bool takes_top(const srv_host *h, const srv_sequence *q, int32_t top)
{
    still_matcher *m = q->work->matcher;
    if (!changes_nothing(&q->work->sampling)) return false;
    if (is_end(h, top)) return may_end(q) && (!m || still_matcher_can_end(m));
    return !m || still_matcher_accept(m, top, NULL) == STILL_OK;
}

static still_status sample(srv_host *h, srv_sequence *q, const float *logits,
                           int32_t *id, still_error *err)
{
    const srv_work *w = q->work;
    if (!q->sampler) {
        *id = most_likely(logits, h->vocab);
        return STILL_OK;
    }
    if (w->matcher)
        STI_TRY(sample_matched(h, q, logits, id, err));
    else
        STI_TRY(still_sampler_sample_masked(q->sampler, logits,
                                            may_end(q) ? NULL : h->no_end, id, err));
    still_sampler_accept(q->sampler, *id);
    return w->matcher && !is_end(h, *id) ? still_matcher_accept(w->matcher, *id, err)
                                         : STILL_OK;
}

void srv_sequence_choose(srv_host *h, srv_sequence *q, int32_t top)
{
    still_error err;
    const srv_work *w = q->work;
    int32_t ids[SRV_MOST_TOP], id = top;
    float logprobs[SRV_MOST_TOP], logprob = NAN;
    const float *logits = still_session_logits(q->slot->session);
    const int held = still_session_length(q->slot->session);
    const bool taken = top >= 0 && takes_top(h, q, top);
    if (!taken && sample(h, q, logits, &id, &err) != STILL_OK) {
        srv_sequence_fail(q, &err);
        return;
    }
    const int n_top = w->n_top > 0 ? w->n_top : 0;
    if (w->n_top >= 0) srv_rank(logits, h->vocab, id, n_top, &logprob, ids, logprobs);
    q->pending = id;
    q->made++;
    srv_token t = {.id = id,
                   .end = is_end(h, id),
                   .logprob = logprob,
                   .top = ids,
                   .top_logprob = logprobs,
                   .n_top = n_top};
    if (!w->token(w->user, &t) || t.end ||
        (w->matcher && still_matcher_done(w->matcher)))
        end(q, SRV_STOP);
    else if (q->made == w->max_tokens || held == h->limit)
        end(q, SRV_LENGTH);
    else
        q->slot->id[held] = id;
}
