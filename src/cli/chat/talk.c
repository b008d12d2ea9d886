/* talk.c - see talk.h. */
#include "cli/chat/talk.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

enum {
    USUAL_CONTEXT = 8192, /* most by default where memory grows with it */
    ENDLESS = 16777216,   /* where it does not: what --ctx takes at most */
};

/* ---- What the session holds ---------------------------------------------- */

static void forget_seen(cli_seen *s)
{
    free(s->text);
    s->text = NULL;
    cli_reply_free(&s->reply);
}

static void forget_before(cli_talk *c)
{
    forget_seen(&c->before.seen);
    still_snapshot_free(c->before.state);
    memset(&c->before, 0, sizeof c->before);
}

static void look_up(cli_talk *c, const int32_t *ids, size_t n)
{
    for (size_t i = 0; c->lookup && i < n; i++) still_lookup_accept(c->lookup, ids[i]);
}

/* After the session has gone back: it holds the first ids of those it held. */
static void look_up_anew(cli_talk *c)
{
    if (!c->lookup) return;
    still_lookup_reset(c->lookup);
    look_up(c, c->held, c->seen.n_ids);
}

static void forget_session(cli_talk *c)
{
    still_session_reset(c->session);
    forget_seen(&c->seen);
    c->seen.n_ids = 0;
    look_up_anew(c);
    forget_before(c);
}

static int hold(cli_talk *c, const int32_t *ids, size_t n)
{
    if (c->seen.n_ids + n > c->held_room) {
        const size_t room = 2 * (c->seen.n_ids + n);
        int32_t *grown = sti_grow(c->held, room, sizeof *grown);
        if (!grown) return cli_fail("out of memory: %zu tokens", room);
        c->held = grown;
        c->held_room = room;
    }
    if (n) memcpy(c->held + c->seen.n_ids, ids, n * sizeof *ids);
    c->seen.n_ids += n;
    return CLI_OK;
}

int cli_talk_sampler(cli_talk *c)
{
    cli_options o = c->o;
    still_sampler *fresh;
    o.seed += c->samplers++; /* another one draws other numbers */
    const int status = cli_open_sampler(&o, c->model, &fresh);
    if (status != CLI_OK) return status;
    still_sampler_free(c->sampler);
    c->sampler = fresh;
    const size_t n = c->seen.n_ids, last = (size_t)o.repeat_last;
    for (size_t i = n > last ? n - last : 0; i < n; i++)
        still_sampler_accept(fresh, c->held[i]);
    return CLI_OK;
}

/* Remembers how things are before message c->n - 1 is fed. What the session holds moves
 * there: `seen` is then empty, but for its ids. */
static void keep_before(cli_talk *c)
{
    const bool exact = strcmp(c->method.name, "softmax") == 0;
    forget_before(c);
    c->before.set = true;
    c->before.n = c->n - 1;
    c->before.seen = c->seen;
    c->seen.text = NULL;
    c->seen.reply = (cli_reply){0};
    /* Without a copy, for want of memory or as a growing past would be copied each time,
     * the conversation is read again. Before the first message there is nothing to copy. */
    if (!exact && c->constant && c->before.seen.n_ids > 0 &&
        still_session_snapshot(c->session, &c->before.state, NULL) != STILL_OK)
        c->before.state = NULL;
}

/* Back to how it was before the last message, if that is what c->n messages are. */
static void go_to_before(cli_talk *c)
{
    int at = -1;
    const size_t n = c->before.seen.n_ids;
    if (c->before.set && c->before.n == c->n) {
        if (n == 0) {
            still_session_reset(c->session);
            at = 0;
        } else if (c->before.state) {
            if (still_session_restore(c->session, c->before.state, NULL) == STILL_OK)
                at = (int)n;
        } else if (still_session_rollback(c->session, (int)n, &at, NULL) != STILL_OK) {
            at = -1;
        }
    }
    forget_seen(&c->seen);
    if (at >= 0 && (size_t)at == n) {
        c->seen = c->before.seen;
        c->before.seen = (cli_seen){0};
    } else if (at >= 0) {
        c->seen.n_ids = (size_t)at; /* a boundary before it */
    }
    forget_before(c);
    look_up_anew(c);
    cli_talk_sampler(c); /* one that remembers what was taken back is no disaster */
}

/* Goes back to where the session agrees with ids, and removes from ids those it then
 * holds. At least one id is left to feed. */
static void go_back(cli_talk *c, int32_t *ids, size_t *n)
{
    size_t same = 0, kept = c->before.state ? c->before.seen.n_ids : 0;
    const size_t held = c->seen.n_ids;
    int at = 0;
    while (same < held && same + 1 < *n && c->held[same] == ids[same]) same++;
    if (still_session_rollback(c->session, (int)same, &at, NULL) != STILL_OK) at = 0;
    if (kept > (size_t)at && kept <= same &&
        still_session_restore(c->session, c->before.state, NULL) == STILL_OK)
        at = (int)kept;
    if (at == 0) still_session_reset(c->session);
    forget_seen(&c->seen);
    c->seen.n_ids = (size_t)at;
    *n -= (size_t)at;
    memmove(ids, ids + at, *n * sizeof *ids);
    look_up_anew(c);
    if (same < held) cli_talk_sampler(c);
}

/* ---- Messages ------------------------------------------------------------ */

int cli_talk_add(cli_talk *c, const char *role, const char *text, size_t n)
{
    if (c->n == c->room) {
        const size_t room = c->room ? 2 * c->room : 16;
        still_message *grown = sti_grow(c->msg, room, sizeof *grown);
        if (!grown) return cli_fail("out of memory: %zu messages", room);
        c->msg = grown;
        c->room = room;
    }
    char *copy = sti_strndup(text, n);
    if (!copy) return cli_fail("out of memory: a message of %zu bytes", n);
    c->msg[c->n++] = (still_message){role, copy};
    return CLI_OK;
}

static void remove_message(cli_talk *c, size_t i)
{
    free((char *)c->msg[i].content);
    memmove(c->msg + i, c->msg + i + 1, (c->n - i - 1) * sizeof *c->msg);
    c->n--;
}

static bool has_system(const cli_talk *c)
{
    return c->n > 0 && !strcmp(c->msg[0].role, "system");
}

/* Drops the oldest question and its answer; false if only the newest is left. */
static bool drop_oldest_turn(cli_talk *c)
{
    size_t first = has_system(c);
    if (c->n < first + 2) return false;
    do remove_message(c, first);
    while (c->n > first + 1 && strcmp(c->msg[first].role, "user") != 0);
    return true;
}

void cli_talk_reset(cli_talk *c)
{
    while (c->n > (size_t)has_system(c)) remove_message(c, c->n - 1);
    forget_session(c);
}

int cli_talk_system(cli_talk *c, const char *text)
{
    while (c->n) remove_message(c, c->n - 1);
    forget_session(c);
    return *text ? cli_talk_add(c, "system", text, strlen(text)) : CLI_OK;
}

const char *cli_talk_last(const cli_talk *c)
{
    for (size_t i = c->n; i-- > 0;)
        if (!strcmp(c->msg[i].role, "user")) return c->msg[i].content;
    return NULL;
}

bool cli_talk_undo(cli_talk *c)
{
    if (!cli_talk_last(c)) return false;
    while (strcmp(c->msg[c->n - 1].role, "user") != 0) remove_message(c, c->n - 1);
    remove_message(c, c->n - 1);
    go_to_before(c);
    return true;
}

/* ---- A turn -------------------------------------------------------------- */

/* The part of text that follows what the session holds; NULL if text does not
 * continue it. Templates trim a reply or add a space before it, so white space
 * around it is ignored. */
static const char *unseen(const cli_talk *c, const char *text)
{
    const cli_reply *r = &c->seen.reply;
    if (!c->seen.text || r->cut) return NULL;
    size_t n = strlen(c->seen.text);
    if (strncmp(text, c->seen.text, n) != 0) return NULL;
    text += n;
    const char *said = r->text.n ? r->text.p : "";
    size_t length = r->text.n;
    while (length && isspace((unsigned char)*said)) said++, length--;
    while (length && isspace((unsigned char)said[length - 1])) length--;
    while (isspace((unsigned char)*text) && length) text++;
    return strncmp(text, said, length) == 0 ? text + length : NULL;
}

/* Ids to feed for `r`, the whole conversation: the reply's tokens that were shown
 * but not fed, then the unseen text. *fresh: the session must go back first. */
static int ids_for(const cli_talk *c, const still_rendering *r, int32_t **ids,
                   size_t *n, bool *fresh)
{
    const char *rest = unseen(c, r->text);
    const cli_reply *reply = &c->seen.reply;
    *fresh = !rest;
    if (!rest) rest = r->text;
    int status = cli_chat_encode(c->tk, r, (size_t)(rest - r->text), ids, n);
    size_t owed = *fresh ? 0 : reply->n_tokens - reply->n_fed;
    if (status != CLI_OK || !owed) return status;
    int32_t *all = sti_alloc(owed + *n, sizeof *all);
    if (!all) {
        free(*ids);
        *ids = NULL;
        return cli_fail("out of memory: %zu tokens", owed + *n);
    }
    memcpy(all, reply->token + reply->n_fed, owed * sizeof *all);
    memcpy(all + owed, *ids, *n * sizeof *all);
    free(*ids);
    *ids = all;
    *n += owed;
    return CLI_OK;
}

static void note_dropped(const cli_talk *c, size_t limit, int dropped)
{
    if (!dropped || c->o.quiet) return;
    cli_note("[the context of %zu tokens is full: forgot the oldest %d turn%s. %s]\n",
             limit, dropped, dropped > 1 ? "s" : "",
             c->constant ? "Without --ctx there is no limit"
                         : "A larger --ctx holds more; --method still has no limit");
}

/* Renders the conversation and finds what to feed, dropping old turns until it fits
 * with room for a reply. */
static int prepare(cli_talk *c, still_rendering *r, int32_t **ids, size_t *n)
{
    still_error err;
    size_t limit = (size_t)still_session_limit(c->session);
    size_t capacity = (size_t)c->o.n < limit / 4 ? (size_t)c->o.n : limit / 4;
    int dropped = 0;
    for (;;) {
        bool fresh;
        *ids = NULL;
        const still_conversation talk = {.size = sizeof talk,
                                         .message = c->msg,
                                         .n_messages = c->n,
                                         .add_generation_prompt = true,
                                         .variables = c->form.variables};
        if (still_chat_render(c->tk, c->form.text, &talk, r, &err))
            return cli_fail_error(&err);
        int status = ids_for(c, r, ids, n, &fresh);
        if (status != CLI_OK) {
            still_rendering_free(r);
            return status;
        }
        size_t held = fresh ? 0 : (size_t)still_session_length(c->session);
        if (held + *n == 0) {
            still_rendering_free(r);
            free(*ids);
            *ids = NULL;
            return cli_fail("the chat template writes nothing for this conversation: "
                            "name another with --chat-template");
        }
        if (held + *n + capacity <= limit) {
            if (fresh) go_back(c, *ids, n);
            note_dropped(c, limit, dropped);
            return CLI_OK;
        }
        still_rendering_free(r);
        free(*ids);
        *ids = NULL;
        if (!drop_oldest_turn(c))
            return cli_fail(
                "the message has %zu tokens, the context holds %zu of which "
                "%zu are kept for the reply: shorten it or raise --ctx",
                *n, limit, capacity);
        dropped++;
    }
}

static int print_reply(const cli_talk *c)
{
    const cli_reply *r = &c->seen.reply;
    if (!c->o.json) {
        cli_put("\n", 1);
        cli_flush();
        if (r->stop && !strcmp(r->stop, "length") && !c->o.quiet)
            fputs("[the reply was cut: see -n (/set n-predict) and --ctx]\n", stderr);
        return CLI_OK;
    }
    return cli_print_json(
        json_pack("{s:o, s:s, s:I, s:I, s:f, s:f, s:I, s:I}", "reply",
                  cli_json_text(r->text.p, r->text.n), "stop", r->stop, "prompt_tokens",
                  (json_int_t)c->last.prompt, "tokens", (json_int_t)r->n_tokens,
                  "prefill_s", c->last.prompt_s, "decode_s", r->seconds, "held",
                  (json_int_t)still_session_length(c->session), "peak_rss",
                  (json_int_t)cli_peak_rss()));
}

/* Feeds ids and generates the reply. What the session holds is right also after
 * failure. */
static int answer(cli_talk *c, const int32_t *ids, size_t n)
{
    const double start = cli_now();
    int status = cli_feed(&c->o, c->session, ids, n);
    const size_t fed = (size_t)still_session_length(c->session) - c->seen.n_ids;
    c->last.prompt_s = cli_now() - start;
    c->last.prompt = n;
    for (size_t i = 0; i < fed; i++) still_sampler_accept(c->sampler, ids[i]);
    look_up(c, ids, fed);
    const int held = hold(c, ids, fed);
    if (status == CLI_OK) status = held;
    if (status != CLI_OK) return status;
    cli_reply *r = &c->seen.reply;
    const cli_generator by = {c->sampler, c->rule.matcher, c->lookup, c->tk};
    status = cli_generate(&c->o, c->session, &by, r);
    if (status == CLI_OK) status = hold(c, r->token, r->n_fed);
    c->last.reply = r->n_tokens;
    c->last.reply_s = r->seconds;
    return status;
}

static void count(cli_talk *c)
{
    c->total.turns++;
    c->total.prompt += c->last.prompt;
    c->total.prompt_s += c->last.prompt_s;
    c->total.reply += c->last.reply;
    c->total.reply_s += c->last.reply_s;
}

int cli_talk_turn(cli_talk *c, const char *message)
{
    still_rendering r = {0};
    int32_t *ids = NULL;
    size_t n = 0;
    int status = cli_talk_add(c, "user", message, strlen(message));
    if (status != CLI_OK) return status;
    status = prepare(c, &r, &ids, &n);
    if (status != CLI_OK || !ids) {
        remove_message(c, c->n - 1);
        return status;
    }
    keep_before(c);
    status = answer(c, ids, n);
    free(ids);
    if (status == CLI_OK && cli_interrupted() && !c->seen.reply.text.n)
        status = CLI_INTERRUPTED;
    if (status != CLI_OK) {
        still_rendering_free(&r);
        remove_message(c, c->n - 1);
        if (status == CLI_INTERRUPTED)
            go_to_before(c);
        else
            forget_session(c); /* its numbers may be bad */
        return status;
    }
    c->seen.text = r.text;
    r.text = NULL;
    still_rendering_free(&r);
    count(c);
    status = print_reply(c);
    const sti_buf *said = &c->seen.reply.text;
    const int added = cli_talk_add(c, "assistant", said->n ? said->p : "", said->n);
    return status == CLI_OK ? added : status;
}

/* ---- Opening ------------------------------------------------------------- */

/* Whether the session's memory is the same at any length, and what it is. */
static int open_session(cli_talk *c)
{
    still_error err;
    still_bill half, whole;
    const cli_options *o = &c->o;
    const int trained = still_model_get_info(c->model)->ctx_train;
    int status = cli_read_method(o, c->model, &c->method);
    if (status != CLI_OK) return status;
    still_session_params p = cli_session_params(o, &c->method, ENDLESS / 2);
    if (still_model_bill(c->model, &p, &half, &err)) return cli_fail_error(&err);
    p.ctx = ENDLESS;
    if (still_model_bill(c->model, &p, &whole, &err)) return cli_fail_error(&err);
    c->constant = half.total == whole.total;
    if (o->ctx)
        p.ctx = (int)o->ctx;
    else if (!c->constant)
        p.ctx = trained && trained < USUAL_CONTEXT ? trained : USUAL_CONTEXT;
    if (still_model_bill(c->model, &p, &whole, &err) ||
        still_session_new(c->model, &p, &c->session, &err))
        return cli_fail_error(&err);
    c->bytes = whole.cache;
    return CLI_OK;
}

int cli_talk_open(cli_talk *c, const cli_options *o)
{
    c->o = *o;
    int status = cli_constraint_check("chat", o);
    if (status == CLI_OK) status = cli_chat_template_read("chat", o, &c->form);
    if (status == CLI_OK) status = cli_open_model(o, o->arg[0], &c->model);
    if (status == CLI_OK) status = cli_need_tokenizer(c->model, &c->tk);
    if (status != CLI_OK) return status;
    const still_model_info *info = still_model_get_info(c->model);
    if (!c->form.text && !still_tokenizer_chat_template(c->tk))
        return cli_fail(
            "%s: brings no chat template: name one with --chat-template, or "
            "use `still generate` for plain text",
            info->path);
    cli_usual_sampling(&c->o, info);
    status = cli_constraint_open(o, c->model, &c->rule);
    if (status == CLI_OK) status = open_session(c);
    if (status == CLI_OK) status = cli_open_lookup(o, &c->lookup);
    return status == CLI_OK ? cli_talk_sampler(c) : status;
}

void cli_talk_close(cli_talk *c)
{
    while (c->n) remove_message(c, c->n - 1);
    free(c->msg);
    cli_chat_template_free(&c->form);
    forget_before(c);
    forget_seen(&c->seen);
    free(c->held);
    still_lookup_free(c->lookup);
    still_sampler_free(c->sampler);
    cli_constraint_close(&c->rule);
    still_session_free(c->session);
    still_model_free(c->model);
}
