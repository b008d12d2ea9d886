/* openapi.c - see openapi.h. Bodies of chat and completions are described by the table that
 * reads them (fields.h), so the two cannot disagree. */
#include "server/openapi.h"

#include <string.h>

#include "server/fields.h"

/* What answers an endpoint has beside 200, by the kind of request. */
static json_t *responses(const char *type, bool body, bool generates)
{
    json_t *all = json_object();
    sti_json_set(&all, "200",
                 json_pack("{s:s, s:{s:{s:{}}}}", "description", "the answer",
                           "content", type, "schema"));
    sti_json_set(&all, "401",
                 json_pack("{s:s}", "description", "an API key is needed"));
    if (body) {
        sti_json_set(&all, "400",
                     json_pack("{s:s, s:{s:{s:{s:s}}}}", "description",
                               "the request is wrong: error.message says how",
                               "content", "application/json", "schema", "$ref",
                               "#/components/schemas/Error"));
        sti_json_set(&all, "413",
                     json_pack("{s:s}", "description", "the body is too large"));
    }
    if (generates) {
        sti_json_set(
            &all, "429",
            json_pack("{s:s}", "description",
                      "the queue is full: Retry-After says when to try again"));
        sti_json_set(&all, "503",
                     json_pack("{s:s}", "description", "the server is stopping"));
    }
    return all;
}

static void add(json_t **paths, const char *method, const char *path,
                const char *summary, const char *type, json_t *schema, bool generates)
{
    bool body = schema != NULL;
    json_t *operation = json_pack("{s:s, s:o}", "summary", summary, "responses",
                                  responses(type, body, generates));
    if (body)
        sti_json_set(&operation, "requestBody",
                     json_pack("{s:b, s:{s:{s:o}}}", "required", 1, "content",
                               "application/json", "schema", schema));
    sti_json_set(paths, path, json_pack("{s:o}", method, operation));
}

static json_t *object(const char *text)
{
    json_t *v = NULL;
    return sti_json_read("schema", text, strlen(text), 0, &v, NULL) ? NULL : v;
}

json_t *srv_openapi(void)
{
    static const char JSON[] = "application/json";
    json_t *paths = json_object();
    add(&paths, "post", "/v1/chat/completions", "continues a conversation", JSON,
        srv_fields_schema(SRV_CHAT), true);
    add(&paths, "post", "/v1/completions", "continues texts, or scores them", JSON,
        srv_fields_schema(SRV_TEXTS), true);
    add(&paths, "get", "/v1/models", "the model", JSON, NULL, false);
    add(&paths, "post", "/tokenize", "text to token ids", JSON,
        object(
            "{\"type\":\"object\",\"required\":[\"prompt\"],\"properties\":{\"prompt\":"
            "{\"type\":\"string\"},\"add_special_tokens\":{\"type\":\"boolean\"}}}"),
        false);
    add(&paths, "post", "/detokenize", "token ids to text", JSON,
        object(
            "{\"type\":\"object\",\"required\":[\"tokens\"],\"properties\":{\"tokens\":"
            "{\"type\":\"array\",\"items\":{\"type\":\"integer\",\"minimum\":0}}}}"),
        false);
    add(&paths, "get", "/tokenizer_info", "special tokens, chat template", JSON, NULL,
        false);
    add(&paths, "get", "/health", "whether it answers", JSON, NULL, false);
    add(&paths, "get", "/metrics", "figures for Prometheus", "text/plain", NULL, false);
    json_t *error = object(
        "{\"type\":\"object\",\"required\":[\"error\"],\"properties\":{\"error\":"
        "{\"type\":\"object\",\"required\":[\"message\",\"type\",\"code\"],"
        "\"properties\":{\"message\":{\"type\":\"string\"},\"type\":{\"type\":"
        "\"string\"},\"param\":{\"type\":[\"string\",\"null\"]},\"code\":{\"type\":"
        "\"string\"}}}}}");
    return json_pack(
        "{s:s, s:{s:s, s:s}, s:o, s:{s:{s:o}, s:{s:{s:s, s:s}}}, s:[{s:[]}]}",
        "openapi", "3.1.0", "info", "title", "still", "version", still_version(),
        "paths", paths, "components", "schemas", "Error", error, "securitySchemes",
        "key", "type", "http", "scheme", "bearer", "security", "key");
}
