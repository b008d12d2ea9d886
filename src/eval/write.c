/* write.c - items whose answer is written: prompts are read together, then every
 * session takes one token a step, greedily, until each has met an end token or its
 * limit. */
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "eval/eval.h"
#include "session/together.h"

typedef struct writing {
    sti_ids prompt;
    still_decoder *decoder;
    sti_buf text;
    int left; /* tokens it may still write */
} writing;

static int32_t most_likely(const float *logits, int n)
{
    int best = 0;
    for (int i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

static still_status begin(sti_runner *r, const sti_item *it, sti_answer *out,
                          writing *w, still_error *err)
{
    *out = (sti_answer){0};
    *w = (writing){.left = it->max_new};
    sti_buf_put(&w->text, "", 0);
    STI_TRY(sti_encode_prompt(r->tk, it, r->limit, &w->prompt, &out->plain, err));
    out->cut = w->prompt.cut;
    return still_decoder_new(r->tk, false, &w->decoder, err);
}

/* Chooses the next token and takes its text. False: there is none, it is over. */
static still_status choose(sti_runner *r, writing *w, const still_session *s,
                           int32_t *id, bool *more, still_error *err)
{
    *more = false;
    if (w->left == 0) return STILL_OK;
    *id = most_likely(still_session_logits(s), r->m->cfg.vocab);
    if (still_tokenizer_is_end(r->tk, *id)) return STILL_OK;
    const char *text;
    size_t n;
    STI_TRY(still_decoder_push(w->decoder, *id, &text, &n, err));
    sti_buf_put(&w->text, text, n);
    *more = --w->left > 0;
    return STILL_OK;
}

static still_status write_all(sti_runner *r, writing *w, int n, still_error *err)
{
    still_session *s[STI_MOST_SESSIONS];
    int32_t tok[STI_MOST_SESSIONS];
    for (;;) {
        int active = 0;
        for (int i = 0; i < n; i++) {
            bool more;
            int32_t id;
            STI_TRY(choose(r, &w[i], r->s[1 + i], &id, &more, err));
            if (!more) {
                w[i].left = 0;
                continue;
            }
            s[active] = r->s[1 + i];
            tok[active++] = id;
        }
        if (active == 0) return STILL_OK;
        if (r->poll && !r->poll(r->user))
            return sti_fail(err, STILL_E_CANCELLED, "stopped while writing");
        STI_TRY(still_session_step(s, tok, active, err));
        r->fed += (uint64_t)active;
    }
}

static still_status finish(writing *w, sti_answer *out, still_error *err)
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

static still_status run(sti_runner *r, const sti_item *item, int n, writing *w,
                        sti_answer *out, still_error *err)
{
    int longest = 1;
    for (int i = 0; i < n; i++) {
        STI_TRY(begin(r, &item[i], &out[i], &w[i], err));
        if (w[i].prompt.n + w[i].left > longest) longest = w[i].prompt.n + w[i].left;
    }
    STI_TRY(sti_runner_need(r, longest, err));
    for (int at = 0; at < n;) {
        sti_piece piece[STI_MOST_SESSIONS];
        int taken = 0;
        for (; at + taken < n && taken < r->n_sessions - 1; taken++) {
            const sti_ids *p = &w[at + taken].prompt;
            still_session_reset(r->s[1 + taken]);
            piece[taken] = (sti_piece){.s = r->s[1 + taken],
                                       .tok = p->id,
                                       .n = p->n,
                                       .from = p->n,
                                       .keep_logits = true};
            r->fed += (uint64_t)p->n;
        }
        STI_TRY(sti_session_feed_together(piece, taken, r->poll, r->user, err));
        STI_TRY(write_all(r, w + at, taken, err));
        at += taken;
    }
    for (int i = 0; i < n; i++) STI_TRY(finish(&w[i], &out[i], err));
    return STILL_OK;
}

still_status sti_write(sti_runner *r, const sti_item *item, int n, sti_answer *out,
                       still_error *err)
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
