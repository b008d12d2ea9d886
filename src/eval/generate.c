/* generate.c - items with a generated answer: prompts are read together, then all
 * sessions decode greedily, one token per step, until each has reached an end token
 * or its limit. A step returns ids, not logits. */
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "eval/eval.h"
#include "session/feed_batch.h"

typedef struct writing {
    sti_ids prompt;
    still_decoder *decoder;
    sti_buf text;
    still_session *s;
    int32_t next; /* the most likely id after its past */
    int left;     /* tokens it may still generate; 0: finished */
} writing;

/* Items being prepared. */
typedef struct desk {
    sti_runner *r;
    const sti_item *item;
    sti_answer *out;
    writing *w;
} desk;

static still_status begin(void *arg, int i, still_error *err)
{
    const desk *d = arg;
    writing *w = &d->w[i];
    sti_answer *out = &d->out[i];
    *out = (sti_answer){0};
    *w = (writing){.left = d->item[i].max_new};
    sti_buf_put(&w->text, "", 0);
    STI_TRY(sti_encode_prompt(d->r->tk, &d->item[i], d->r->limit, &w->prompt,
                              &out->plain, err));
    out->cut = w->prompt.cut;
    return still_decoder_new(d->r->tk, false, &w->decoder, err);
}

/* Takes the text of the next token, or ends with it. */
static still_status take_next(const sti_runner *r, writing *w, still_error *err)
{
    if (w->left == 0) return STILL_OK;
    if (still_tokenizer_is_end(r->tk, w->next)) {
        w->left = 0;
        return STILL_OK;
    }
    const char *text;
    size_t n;
    STI_TRY(still_decoder_push(w->decoder, w->next, &text, &n, err));
    sti_buf_put(&w->text, text, n);
    w->left--;
    return STILL_OK;
}

/* Which of the n sessions of the last step take part in the next. A GPU replays the
 * graph of a known set of sessions, which saves more than finished sessions cost:
 * they stay until they are half of the set. */
static int keep(const sti_runner *r, writing **in, int n, int active)
{
    const bool all = !r->m->be->host_memory && 2 * active > n;
    int kept = 0;
    for (int i = 0; i < n; i++) {
        const still_session *s = in[i]->s;
        const bool fits = still_session_length(s) < still_session_limit(s);
        if (in[i]->left > 0 || (all && fits)) in[kept++] = in[i];
    }
    return kept;
}

static still_status generate_all(sti_runner *r, writing *w, int n, still_error *err)
{
    writing *in[STI_MOST_SESSIONS];
    still_session *s[STI_MOST_SESSIONS];
    int32_t tok[STI_MOST_SESSIONS], top[STI_MOST_SESSIONS];
    for (int i = 0; i < n; i++) in[i] = &w[i];
    for (;;) {
        int active = 0;
        for (int i = 0; i < n; i++) {
            STI_TRY(take_next(r, in[i], err));
            active += in[i]->left > 0;
        }
        if (active == 0) return STILL_OK;
        if (r->poll && !r->poll(r->user))
            return sti_fail(err, STILL_E_CANCELLED, "stopped while writing");
        n = keep(r, in, n, active);
        for (int i = 0; i < n; i++) {
            s[i] = in[i]->s;
            tok[i] = in[i]->next;
        }
        STI_TRY(still_session_step_top(s, tok, n, top, err));
        for (int i = 0; i < n; i++) in[i]->next = top[i];
        r->fed += (uint64_t)active;
    }
}

static still_status finish_answer(writing *w, sti_answer *out, still_error *err)
{
    const char *text;
    size_t n;
    still_decoder_flush(w->decoder, &text, &n);
    sti_buf_put(&w->text, text, n);
    if (w->text.failed) return sti_fail_memory(err, "output", w->text.n);
    out->output = w->text.p; /* ownership moves */
    w->text = (sti_buf){0};
    return STILL_OK;
}

/* Reads the prompts of as many items as there are sessions, from w[0]. */
static still_status read_prompts(sti_runner *r, writing *w, int n, still_error *err)
{
    sti_piece piece[STI_MOST_SESSIONS];
    for (int i = 0; i < n; i++) {
        const sti_ids *p = &w[i].prompt;
        w[i].s = r->s[1 + i];
        still_session_reset(w[i].s);
        piece[i] = (sti_piece){
            .s = w[i].s, .tok = p->id, .n = p->n, .from = p->n, .next_top = &w[i].next};
        r->fed += (uint64_t)p->n;
    }
    return sti_session_feed_batch(piece, n, r->poll, r->user, err);
}

static still_status run(sti_runner *r, const sti_item *item, int n, writing *w,
                        sti_answer *out, still_error *err)
{
    int longest = 1;
    desk d = {.r = r, .item = item, .out = out, .w = w};
    STI_TRY(sti_runner_each(r, n, begin, &d, err));
    for (int i = 0; i < n; i++)
        if (w[i].prompt.n + w[i].left > longest) longest = w[i].prompt.n + w[i].left;
    STI_TRY(sti_runner_need(r, longest, 1 + n, err));
    for (int at = 0; at < n;) {
        const int taken = n - at < r->n_sessions - 1 ? n - at : r->n_sessions - 1;
        STI_TRY(read_prompts(r, w + at, taken, err));
        STI_TRY(generate_all(r, w + at, taken, err));
        at += taken;
    }
    for (int i = 0; i < n; i++) STI_TRY(finish_answer(&w[i], &out[i], err));
    return STILL_OK;
}

still_status sti_run_generate(sti_runner *r, const sti_item *item, int n,
                              sti_answer *out, still_error *err)
{
    writing *w = sti_alloc((size_t)n, sizeof *w);
    if (!w) return sti_fail_memory(err, "outputs", (size_t)n * sizeof *w);
    const uint64_t before = r->fed;
    still_status st = run(r, item, n, w, out, err);
    r->counted += r->fed - before;
    for (int i = 0; i < n; i++) {
        free(w[i].prompt.id);
        still_decoder_free(w[i].decoder);
        sti_buf_free(&w[i].text);
    }
    free(w);
    return st;
}
