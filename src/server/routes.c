/* routes.c - see routes.h. The tokenizer endpoints have vLLM's shapes, which
 * lm-evaluation-harness uses with tokenizer_backend=remote. A tokenizer does not change
 * once it is open, so any thread may read it. */
#include "server/routes.h"

#include <stdlib.h>
#include <string.h>

static void health(const srv_call *call, srv_reply *reply)
{
    (void)call;
    reply->status = 200;
    srv_reply_json(reply, json_pack("{s:s}", "status", "ok"));
}

static void models(const srv_call *call, srv_reply *reply)
{
    const srv_engine *e = call->engine;
    reply->status = 200;
    srv_reply_json(reply, json_pack("{s:s, s:[{s:s, s:s, s:s, s:i, s:i}]}", "object",
                                    "list", "data", "id", e->name, "object", "model",
                                    "owned_by", "still", "max_model_len",
                                    e->cache.limit, "vocabulary", e->cache.vocab));
}

static void completions(const srv_call *call, srv_reply *reply)
{
    srv_completion q;
    still_error err;
    if (srv_completion_read(call->body->p, call->body->n, call->engine->cache.vocab, &q,
                            &err)) {
        srv_reply_failure(reply, &err);
        return;
    }
    srv_complete(call->engine, &q, call->gone, call->user, reply);
    srv_completion_free(&q);
}

static void tokenize(const srv_call *call, srv_reply *reply)
{
    srv_tokenize q;
    still_error err;
    int32_t *id = NULL;
    size_t n = 0;
    if (srv_tokenize_read(call->body->p, call->body->n, &q, &err)) {
        srv_reply_failure(reply, &err);
        return;
    }
    unsigned flags = STILL_ENCODE_SPECIAL | (q.add_special ? STILL_ENCODE_BOS : 0);
    if (srv_encode(call->engine->tk, q.text, q.n_text, flags, &id, &n, &err)) {
        srv_reply_failure(reply, &err);
    } else {
        sti_buf *b = &reply->body;
        reply->status = 200;
        sti_buf_printf(b, "{\"count\":%zu,\"max_model_len\":%d,\"tokens\":[", n,
                       call->engine->cache.limit);
        for (size_t i = 0; i < n; i++) sti_buf_printf(b, i ? ",%d" : "%d", (int)id[i]);
        sti_buf_puts(b, "]}");
    }
    free(id);
    json_decref(q.body);
}

/* Special tokens are written out, so that /tokenize gives the same ids back. */
static void detokenize(const srv_call *call, srv_reply *reply)
{
    still_error err;
    still_decoder *d = NULL;
    sti_buf text = {0};
    const char *part;
    size_t n = 0, n_part;
    int32_t *id = NULL;
    int vocab = still_tokenizer_vocab_size(call->engine->tk);
    still_status status =
        srv_detokenize_read(call->body->p, call->body->n, vocab, &id, &n, &err);
    if (status == STILL_OK)
        status = still_decoder_new(call->engine->tk, true, &d, &err);
    for (size_t i = 0; i < n && status == STILL_OK; i++) {
        status = still_decoder_push(d, id[i], &part, &n_part, &err);
        if (status == STILL_OK) sti_buf_put(&text, part, n_part);
    }
    if (status == STILL_OK) {
        still_decoder_flush(d, &part, &n_part);
        sti_buf_put(&text, part, n_part);
        reply->status = 200;
        sti_buf_puts(&reply->body, "{\"prompt\":");
        srv_put_string(&reply->body, text.n ? text.p : "", text.n);
        sti_buf_puts(&reply->body, "}");
        reply->body.failed = reply->body.failed || text.failed;
    } else {
        srv_reply_failure(reply, &err);
    }
    still_decoder_free(d);
    sti_buf_free(&text);
    free(id);
}

/* The text of a special token; null if there is none. */
static json_t *special(const still_tokenizer *tk, int32_t id)
{
    size_t n;
    const char *piece = id < 0 ? NULL : still_tokenizer_piece(tk, id, true, &n);
    json_t *text = piece ? json_stringn(piece, n) : NULL;
    return text ? text : json_null();
}

static void tokenizer_info(const srv_call *call, srv_reply *reply)
{
    const still_tokenizer *tk = call->engine->tk;
    const char *chat = still_tokenizer_chat_template(tk);
    json_t *template = chat ? json_string(chat) : NULL;
    reply->status = 200;
    srv_reply_json(
        reply, json_pack("{s:s, s:o, s:o, s:n, s:b, s:i, s:i, s:o}", "tokenizer_class",
                         "still", "bos_token", special(tk, still_tokenizer_bos(tk)),
                         "eos_token", special(tk, still_tokenizer_eos(tk)), "pad_token",
                         "add_bos_token", (int)still_tokenizer_adds_bos(tk),
                         "vocab_size", still_tokenizer_vocab_size(tk),
                         "model_max_length", call->engine->cache.limit, "chat_template",
                         template ? template : json_null()));
}

static const srv_route routes[] = {
    {"GET", "/health", SRV_HERE, true, health},
    {"GET", "/v1/models", SRV_HERE, false, models},
    {"GET", "/tokenizer_info", SRV_HERE, false, tokenizer_info},
    {"POST", "/tokenize", SRV_TEXT, false, tokenize},
    {"POST", "/detokenize", SRV_TEXT, false, detokenize},
    {"POST", "/v1/completions", SRV_MODEL, false, completions},
};

const srv_route *srv_route_find(const char *method, const char *path,
                                const char **allow)
{
    *allow = NULL;
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
        if (strcmp(routes[i].path, path) != 0) continue;
        if (strcmp(routes[i].method, method) == 0) return &routes[i];
        *allow = routes[i].method;
    }
    return NULL;
}
