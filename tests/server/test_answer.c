/* The texts of answers and of streams, and who may ask. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../run.h"

#include "server/access.h"
#include "server/answer.h"
#include "server/openapi.h"
#include "server/reply.h"
#include "server/routes.h"

static void equals(sti_buf *b, const char *want)
{
    assert_false(b->failed);
    assert_string_equal(b->p, want);
    sti_buf_clear(b);
}

static void events(void **state)
{
    (void)state;
    sti_buf b = {0};
    srv_head h = {.id = "x-1", .model = "m", .created = 7, .chat = true};
    srv_part p = {.index = 2, .first = true, .text = "a\n\"", .n = 3};
#define CHUNK                                                                          \
    "data: {\"id\":\"x-1\",\"object\":\"chat.completion.chunk\",\"created\":7,"        \
    "\"model\":\"m\",\"choices\":["
    srv_put_event(&b, &h, &p);
    equals(&b, CHUNK "{\"index\":2,\"delta\":{\"role\":\"assistant\",\"content\":"
                     "\"a\\n\\\"\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n");
    srv_call call = {(char *)"f", (char *)"{\"x\":1}"};
    p = (srv_part){.call = &call, .n_calls = 1, .call_at = 1};
    h.usage = true;
    srv_put_event(&b, &h, &p);
    const char *id = strstr(b.p, "\"id\":\"");
    id = id ? strstr(id + 1, "\"id\":\"") : NULL;
    assert_non_null(id);
    char want[400], name[SRV_CALL_ID + 1];
    memcpy(name, id + 6, SRV_CALL_ID);
    name[SRV_CALL_ID] = 0;
    snprintf(want, sizeof want,
             CHUNK "{\"index\":0,\"delta\":{\"tool_calls\":[{\"index\":1,\"id\":\"%s\","
                   "\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":"
                   "\"{\\\"x\\\":1}\"}}]},\"logprobs\":null,\"finish_reason\":null}],"
                   "\"usage\":null}\n\n",
             name);
    equals(&b, want);
    p = (srv_part){.finish = "stop"};
    srv_put_event(&b, &h, &p);
    equals(&b, CHUNK "{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":"
                     "\"stop\"}],\"usage\":null}\n\n");
    srv_put_usage_event(&b, &h, &(srv_usage){.prompt = 5, .cached = 4, .made = 3});
    equals(&b,
           CHUNK "],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":3,"
                 "\"total_tokens\":8,\"prompt_tokens_details\":{\"cached_tokens\":4}}"
                 "}\n\n");
    srv_put_ping(&b);
    srv_put_done(&b);
    equals(&b, ": waiting\n\ndata: [DONE]\n\n");
    sti_buf_free(&b);
}

static void whole(void **state)
{
    (void)state;
    sti_buf b = {0};
    srv_head h = {.id = "x-1", .model = "m", .created = 7};
    srv_part p = {.text = "hi", .n = 2, .finish = "length"};
    srv_put_open(&b, &h);
    srv_put_choice(&b, &h, &p);
    srv_put_close(&b, &(srv_usage){.prompt = 1, .made = 2});
    equals(&b, "{\"id\":\"x-1\",\"object\":\"text_completion\",\"created\":7,\"model\":"
               "\"m\",\"choices\":[{\"index\":0,\"text\":\"hi\",\"logprobs\":null,"
               "\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":1,"
               "\"completion_tokens\":2,\"total_tokens\":3,\"prompt_tokens_details\":"
               "{\"cached_tokens\":0}}}");
    srv_call call = {(char *)"f", (char *)"{}"};
    p = (srv_part){.call = &call, .n_calls = 1, .finish = "tool_calls"};
    h.chat = true;
    srv_put_choice(&b, &h, &p);
    assert_non_null(strstr(b.p, "\"content\":null,\"tool_calls\":[{\"id\":\""));
    sti_buf_clear(&b);
    p = (srv_part){.finish = "stop"};
    srv_put_choice(&b, &h, &p);
    assert_non_null(
        strstr(b.p, "\"message\":{\"role\":\"assistant\",\"content\":\"\","));
    sti_buf_free(&b);
}

static void errors(void **state)
{
    (void)state;
    srv_reply r = {0};
    srv_reply_error(&r, 400, "invalid_value", "'stop' must be \xff");
    assert_string_equal(r.body.p,
                        "{\"error\":{\"message\":\"'stop' must be ?\",\"type\":"
                        "\"invalid_request_error\",\"param\":\"stop\",\"code\":"
                        "\"invalid_value\"}}");
    srv_reply_error(&r, 429, "queue_full", "later");
    assert_non_null(strstr(r.body.p, "\"rate_limit_error\",\"param\":null"));
    sti_buf_free(&r.body);
}

static void access(void **state)
{
    (void)state;
    srv_access a;
    still_error e;
    static const char *const origins[] = {"https://a.example", "http://localhost:3000"};
    assert_int_equal(
        srv_access_init(&a, "# mine\nk1\r\n\nlonger-key-2\n", origins, 2, &e),
        STILL_OK);
    assert_int_equal(a.n_keys, 2);
    static const char *const good[] = {"Bearer k1", "bearer longer-key-2"};
    static const char *const bad[] = {
        NULL,         "",          "k1",       "Bearer ",       "Bearer k",
        "Bearer k1 ", "Bearer k2", "Basic k1", "Bearer # mine", "Bearer k1\n"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        assert_true(srv_access_has_key(&a, good[i]));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_false(srv_access_has_key(&a, bad[i]));
    assert_true(srv_access_allows(&a, "https://a.example"));
    assert_false(srv_access_allows(&a, "https://a.example.evil.example"));
    assert_false(srv_access_allows(&a, "null"));
    srv_access_free(&a);
    static const char *const any[] = {"*"};
    assert_int_equal(srv_access_init(&a, NULL, any, 1, &e), STILL_OK);
    assert_true(srv_access_has_key(&a, NULL) && srv_access_allows(&a, "null"));
    srv_access_free(&a);
    assert_true(srv_access_own(&a, "http://127.0.0.1:8080", "127.0.0.1:8080"));
    assert_false(srv_access_own(&a, "http://127.0.0.1:8080", "127.0.0.1:8081"));
    assert_false(srv_access_own(&a, "null", "null"));
    assert_false(srv_access_own(&a, "http://x", NULL));
    /* A name of another site that leads to this machine is not the server's own. */
    static const char *const host[] = {"127.0.0.1:80", "[::1]:8080", "localhost",
                                       "Localhost:1"};
    static const char *const name[] = {"evil.example:80", "127.0.0.1.evil.example",
                                       "localhost.evil.example:8080", "localhos"};
    char page[80];
    a.local = true;
    for (size_t i = 0; i < 4; i++) {
        snprintf(page, sizeof page, "http://%s", host[i]);
        assert_true(srv_access_own(&a, page, host[i]));
        snprintf(page, sizeof page, "http://%s", name[i]);
        assert_false(srv_access_own(&a, page, name[i]));
        a.local = false;
        assert_true(srv_access_own(&a, page, name[i]));
        a.local = true;
        a.n_keys = 1; /* which a page of another site does not have */
        assert_true(srv_access_own(&a, page, name[i]));
        a.n_keys = 0;
    }
    assert_int_equal(srv_access_init(&a, "\n# none\n", NULL, 0, &e), STILL_E_FORMAT);
    srv_access_free(&a);
    assert_int_equal(srv_access_init(&a, "k1\ntwo words\n", NULL, 0, &e),
                     STILL_E_FORMAT);
    assert_non_null(strstr(e.text, "line 2"));
    srv_access_free(&a);
}

/* Every field has a description, and only known kinds. */
static void openapi(void **state)
{
    (void)state;
    json_t *doc = srv_openapi(true);
    assert_non_null(doc);
    assert_int_equal(json_array_size(json_object_get(doc, "security")), 1);
    const json_t *paths = json_object_get(doc, "paths");
    const json_t *post =
        json_object_get(json_object_get(paths, "/v1/chat/completions"), "post");
    const json_t *schema = json_object_get(
        json_object_get(
            json_object_get(json_object_get(post, "requestBody"), "content"),
            "application/json"),
        "schema");
    const json_t *properties = json_object_get(schema, "properties");
    assert_non_null(json_object_get(properties, "messages"));
    assert_non_null(json_object_get(properties, "tools"));
    assert_null(json_object_get(properties, "prompt"));
    assert_string_equal(json_string_value(json_object_get(
                            json_object_get(schema, "additionalProperties"), "type")),
                        "null");
    /* It has all routes, and no others; whether each needs a key. */
    size_t n = 0;
    for (const srv_route *r; (r = srv_route_at(n)); n++) {
        char path[100];
        const bool folder = strlen(r->path) > 1 && r->path[strlen(r->path) - 1] == '/';
        snprintf(path, sizeof path, "%s%s", r->path, folder ? "{name}" : "");
        const json_t *operation = json_object_get(
            json_object_get(paths, path), strcmp(r->method, "GET") ? "post" : "get");
        if (!operation) fail_msg("%s %s is not described", r->method, path);
        const json_t *security = json_object_get(operation, "security");
        if (r->open != (security != NULL)) fail_msg("%s: whether it needs a key", path);
    }
    assert_int_equal(json_object_size(paths), n);
    json_decref(doc);
    doc = srv_openapi(false);
    assert_null(json_object_get(doc, "security"));
    json_decref(doc);
}

RUN_TESTS(cmocka_unit_test(events), cmocka_unit_test(whole), cmocka_unit_test(errors),
          cmocka_unit_test(access), cmocka_unit_test(openapi))
