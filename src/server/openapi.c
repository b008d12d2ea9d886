/* openapi.c - see openapi.h. Bodies of chat and completions are described by the table that
 * reads them (fields.h), so the two cannot disagree. */
#include "server/openapi.h"

#include <string.h>

#include "server/fields.h"

/* What an endpoint is, beside its path. */
typedef struct operation {
    const char *method, *summary;
    const char *type;    /* of its answer */
    const char *streams; /* of an answer that is a stream; NULL: there is none */
    json_t *body;        /* its schema, taken; NULL: it has none */
    const char *name;    /* of the parameter in its path; NULL: it has none */
    bool open;           /* needs no key */
} operation;

static json_t *described(const char *text)
{
    return json_pack("{s:s}", "description", text);
}

/* An answer that is an error. */
static json_t *failure(const char *text)
{
    return json_pack("{s:s, s:{s:{s:{s:s}}}}", "description", text, "content",
                     "application/json", "schema", "$ref",
                     "#/components/schemas/Error");
}

static json_t *responses(const operation *o)
{
    json_t *all = json_object(), *types = json_object();
    json_t *answer = described("the answer");
    sti_json_set(&types, o->type, json_pack("{s:{}}", "schema"));
    if (o->streams) sti_json_set(&types, o->streams, json_pack("{s:{}}", "schema"));
    sti_json_set(&answer, "content", types);
    sti_json_set(&all, "200", answer);
    if (!o->open) sti_json_set(&all, "401", failure("an API key is needed"));
    if (o->name) sti_json_set(&all, "404", failure("there is none of this name"));
    if (o->body) {
        sti_json_set(&all, "400",
                     failure("the request is wrong: error.message says how"));
        sti_json_set(&all, "413", failure("the body is too large"));
    }
    if (o->streams) {
        sti_json_set(&all, "429",
                     failure("the queue is full: Retry-After says when to try again"));
        sti_json_set(&all, "503", failure("the server is stopping"));
    }
    return all;
}

static void add(json_t **paths, const char *path, operation o)
{
    json_t *v =
        json_pack("{s:s, s:o}", "summary", o.summary, "responses", responses(&o));
    if (o.body)
        sti_json_set(&v, "requestBody",
                     json_pack("{s:b, s:{s:{s:o}}}", "required", 1, "content",
                               "application/json", "schema", o.body));
    if (o.name)
        sti_json_set(&v, "parameters",
                     json_pack("[{s:s, s:s, s:b, s:{s:s}}]", "name", o.name, "in",
                               "path", "required", 1, "schema", "type", "string"));
    if (o.open) sti_json_set(&v, "security", json_array());
    sti_json_set(paths, path, json_pack("{s:o}", o.method, v));
}

static json_t *object(const char *text)
{
    json_t *v = NULL;
    return sti_json_read("schema", text, strlen(text), 0, &v, NULL) ? NULL : v;
}

static json_t *paths_of_api(void)
{
    static const char JSON[] = "application/json", EVENTS[] = "text/event-stream";
    json_t *paths = json_object();
    add(&paths, "/v1/chat/completions",
        (operation){"post", "continues a conversation", JSON, EVENTS,
                    srv_fields_schema(SRV_CHAT), NULL, false});
    add(&paths, "/v1/completions",
        (operation){"post", "continues texts, or scores them", JSON, EVENTS,
                    srv_fields_schema(SRV_TEXTS), NULL, false});
    add(&paths, "/tokenize",
        (operation){"post", "text to token ids", JSON, NULL,
                    object("{\"type\":\"object\",\"required\":[\"prompt\"],"
                           "\"properties\":{\"prompt\":{\"type\":\"string\"},"
                           "\"add_special_tokens\":{\"type\":[\"boolean\",\"null\"]},"
                           "\"model\":{}},\"additionalProperties\":{\"type\":"
                           "\"null\"}}"),
                    NULL, false});
    add(&paths, "/detokenize",
        (operation){"post", "token ids to text", JSON, NULL,
                    object("{\"type\":\"object\",\"required\":[\"tokens\"],"
                           "\"properties\":{\"tokens\":{\"type\":\"array\",\"items\":"
                           "{\"type\":\"integer\",\"minimum\":0}},\"model\":{}},"
                           "\"additionalProperties\":{\"type\":\"null\"}}"),
                    NULL, false});
    static const struct {
        const char *path;
        operation of;
    } get[] = {
        {"/", {"get", "a page to chat with the model", "text/html", .open = true}},
        {"/health", {"get", "whether it answers", JSON, .open = true}},
        {"/metrics", {"get", "figures for Prometheus", "text/plain", .open = false}},
        {"/openapi.json", {"get", "this description", JSON, .open = true}},
        {"/v1/models", {"get", "the model", JSON, .open = false}},
        {"/v1/models/{name}", {"get", "the model", JSON, .name = "name"}},
        {"/tokenizer_info",
         {"get", "special tokens, chat template", JSON, .open = false}},
    };
    for (size_t i = 0; i < sizeof get / sizeof *get; i++)
        add(&paths, get[i].path, get[i].of);
    return paths;
}

json_t *srv_openapi(bool keys)
{
    json_t *error = object(
        "{\"type\":\"object\",\"required\":[\"error\"],\"properties\":{\"error\":"
        "{\"type\":\"object\",\"required\":[\"message\",\"type\",\"code\"],"
        "\"properties\":{\"message\":{\"type\":\"string\"},\"type\":{\"type\":"
        "\"string\"},\"param\":{\"type\":[\"string\",\"null\"]},\"code\":{\"type\":"
        "\"string\"}}}}}");
    json_t *doc =
        json_pack("{s:s, s:{s:s, s:s}, s:o, s:{s:{s:o}, s:{s:{s:s, s:s}}}}", "openapi",
                  "3.1.0", "info", "title", "still", "version", still_version(),
                  "paths", paths_of_api(), "components", "schemas", "Error", error,
                  "securitySchemes", "key", "type", "http", "scheme", "bearer");
    if (keys) sti_json_set(&doc, "security", json_pack("[{s:[]}]", "key"));
    return doc;
}
