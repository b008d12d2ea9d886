/* routes.c - see routes.h. The tokenizer endpoints have vLLM's shapes, which
 * lm-evaluation-harness uses with tokenizer_backend=remote. A tokenizer does not change
 * once it is open, so any thread may read it. */
#include "server/routes.h"

#include <stdlib.h>
#include <string.h>

#include "server/openapi.h"
#include "server/page.h"

static void health(const srv_query *q, srv_reply *reply)
{
    (void)q;
    reply->status = 200;
    srv_reply_json(reply, json_pack("{s:s}", "status", "ok"));
}

static void page(const srv_query *q, srv_reply *reply)
{
    const srv_page_file *f = srv_page_find(q->path);
    *reply = (srv_reply){.status = 200,
                         .type = f->type,
                         .headers = srv_page_headers,
                         .tag = f->tag,
                         .fixed = f->p,
                         .n_fixed = f->n};
}

static json_t *model(const srv_api *api)
{
    return json_pack("{s:s, s:s, s:i, s:s, s:i, s:i}", "id", api->name, "object",
                     "model", "created", 0, "owned_by", "still", "max_model_len",
                     api->limit, "vocabulary", api->vocab);
}

static void models(const srv_query *q, srv_reply *reply)
{
    reply->status = 200;
    srv_reply_json(reply,
                   json_pack("{s:s, s:[o]}", "object", "list", "data", model(q->api)));
}

static void one_model(const srv_query *q, srv_reply *reply)
{
    const char *name = q->path + strlen("/v1/models/");
    if (strcmp(name, q->api->name) != 0) {
        srv_reply_error(reply, 404, "model_not_found",
                        "there is no such model here: see /v1/models");
        return;
    }
    reply->status = 200;
    srv_reply_json(reply, model(q->api));
}

static void openapi(const srv_query *q, srv_reply *reply)
{
    reply->status = 200;
    srv_reply_json(reply, srv_openapi(q->keys));
}

static void tokenize(const srv_query *q, srv_reply *reply)
{
    srv_tokenize t;
    still_error err;
    int32_t *id = NULL;
    size_t n = 0;
    if (srv_tokenize_read(q->body->p, q->body->n, &t, &err)) {
        srv_reply_failure(reply, &err);
        return;
    }
    unsigned flags = STILL_ENCODE_SPECIAL | (t.add_special ? STILL_ENCODE_BOS : 0);
    if (srv_encode(q->api->tk, t.text, t.n_text, flags, &id, &n, &err)) {
        srv_reply_failure(reply, &err);
    } else {
        sti_buf *b = &reply->body;
        reply->status = 200;
        sti_buf_printf(b, "{\"count\":%zu,\"max_model_len\":%d,\"tokens\":[", n,
                       q->api->limit);
        for (size_t i = 0; i < n; i++) sti_buf_printf(b, i ? ",%d" : "%d", (int)id[i]);
        sti_buf_puts(b, "]}");
    }
    free(id);
    json_decref(t.body);
}

/* Special tokens are written out, so that /tokenize gives the same ids back. */
static void detokenize(const srv_query *q, srv_reply *reply)
{
    still_error err;
    still_decoder *d = NULL;
    sti_buf text = {0};
    const char *part;
    size_t n = 0, n_part;
    int32_t *id = NULL;
    int vocab = still_tokenizer_vocab_size(q->api->tk);
    still_status status =
        srv_detokenize_read(q->body->p, q->body->n, vocab, &id, &n, &err);
    if (status == STILL_OK) status = still_decoder_new(q->api->tk, true, &d, &err);
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

static void tokenizer_info(const srv_query *q, srv_reply *reply)
{
    const still_tokenizer *tk = q->api->tk;
    const char *chat = still_tokenizer_chat_template(tk);
    json_t *template = chat ? json_string(chat) : NULL;
    reply->status = 200;
    srv_reply_json(reply, json_pack("{s:s, s:o, s:o, s:n, s:b, s:i, s:i, s:o}",
                                    "tokenizer_class", "still", "bos_token",
                                    special(tk, still_tokenizer_bos(tk)), "eos_token",
                                    special(tk, still_tokenizer_eos(tk)), "pad_token",
                                    "add_bos_token", (int)still_tokenizer_adds_bos(tk),
                                    "vocab_size", still_tokenizer_vocab_size(tk),
                                    "model_max_length", q->api->limit, "chat_template",
                                    template ? template : json_null()));
}

static void metrics(const srv_query *q, srv_reply *reply);

static const srv_route routes[] = {
    {"GET", "/", SRV_HERE, true, false, page}, /* and all its files */
    {"GET", "/health", SRV_HERE, true, false, health},
    {"GET", "/metrics", SRV_HERE, false, false, metrics},
    {"GET", "/openapi.json", SRV_HERE, true, false, openapi},
    {"GET", "/v1/models", SRV_HERE, false, false, models},
    {"GET", "/v1/models/", SRV_HERE, false, false, one_model},
    {"GET", "/tokenizer_info", SRV_HERE, false, false, tokenizer_info},
    {"POST", "/tokenize", SRV_BY_TEXT, false, false, tokenize},
    {"POST", "/detokenize", SRV_BY_TEXT, false, false, detokenize},
    {"POST", "/v1/completions", SRV_BY_MODEL, false, false, NULL},
    {"POST", "/v1/chat/completions", SRV_BY_MODEL, false, true, NULL},
};
enum { ROUTES = sizeof routes / sizeof *routes };

static void metrics(const srv_query *q, srv_reply *reply)
{
    const char *path[ROUTES];
    srv_metrics m;
    for (size_t i = 0; i < ROUTES; i++) path[i] = routes[i].path;
    srv_scheduler_metrics(q->api->scheduler, &m);
    reply->status = 200;
    reply->type = "text/plain; version=0.0.4; charset=utf-8";
    srv_metrics_put(&reply->body, q->counts, path, ROUTES, &m);
}

static bool is_at(const srv_route *r, const char *path)
{
    size_t n = strlen(r->path);
    bool folder = n > 1 && r->path[n - 1] == '/';
    return folder ? strncmp(r->path, path, n) == 0 && path[n] : !strcmp(r->path, path);
}

const srv_route *srv_route_find(const char *method, const char *path,
                                const char **allow)
{
    *allow = NULL;
    if (strcmp(method, "HEAD") == 0) method = "GET";
    if (srv_page_find(path)) path = "/";
    for (size_t i = 0; i < ROUTES; i++) {
        if (!is_at(&routes[i], path)) continue;
        bool get = strcmp(routes[i].method, "GET") == 0;
        if (strcmp(routes[i].method, method) == 0) return &routes[i];
        *allow = get ? "GET, HEAD, OPTIONS" : "POST, OPTIONS";
    }
    return NULL;
}

const srv_route *srv_route_at(size_t i)
{
    return i < ROUTES ? &routes[i] : NULL;
}

size_t srv_route_number(const srv_route *r)
{
    return r ? (size_t)(r - routes) : ROUTES;
}
