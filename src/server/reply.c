/* reply.c - see reply.h. */
#include "server/reply.h"

#include <stdlib.h>
#include <string.h>

static const char OUT_OF_MEMORY[] =
    "{\"error\":{\"message\":\"out of memory\",\"type\":\"server_error\","
    "\"code\":\"out_of_memory\"}}";

void srv_reply_json(srv_reply *r, json_t *body)
{
    char *text = body ? sti_json_text(body, JSON_COMPACT) : NULL;
    json_decref(body);
    if (!text) r->status = 500;
    sti_buf_clear(&r->body);
    sti_buf_puts(&r->body, text ? text : OUT_OF_MEMORY);
    free(text);
}

/* The field that a message begins with, in quotes: "'stop' must be ..."; else null. */
static json_t *field_of(const char *message)
{
    const char *end = message[0] == '\'' ? strchr(message + 1, '\'') : NULL;
    json_t *name = end ? json_stringn(message + 1, (size_t)(end - message - 1)) : NULL;
    return name ? name : json_null();
}

void srv_reply_error(srv_reply *r, int status, const char *code, const char *message)
{
    json_t *text = json_string(message);
    if (!text) { /* it quotes the client, perhaps with invalid UTF-8 */
        char ascii[sizeof(still_error)] = "";
        for (size_t i = 0; message[i] && i + 1 < sizeof ascii; i++)
            ascii[i] = message[i] & 0x80 ? '?' : message[i];
        text = json_string(ascii);
    }
    r->status = status;
    r->type = NULL;
    r->headers = NULL;
    srv_reply_json(r, json_pack("{s:{s:o, s:s, s:o, s:s}}", "error", "message", text,
                                "type",
                                status >= 500   ? "server_error"
                                : status == 429 ? "rate_limit_error"
                                : status == 401 ? "authentication_error"
                                                : "invalid_request_error",
                                "param", field_of(message), "code", code));
}

void srv_reply_failure(srv_reply *r, const still_error *err)
{
    switch (err->code) {
    case STILL_E_FORMAT: srv_reply_error(r, 400, "invalid_json", err->text); break;
    case STILL_E_ARG: srv_reply_error(r, 400, "invalid_value", err->text); break;
    case STILL_E_UNSUPPORTED: srv_reply_error(r, 400, "unsupported", err->text); break;
    case STILL_E_LIMIT:
        srv_reply_error(r, 400, "context_length_exceeded", err->text);
        break;
    case STILL_E_CANCELLED: srv_reply_error(r, 503, "unavailable", err->text); break;
    case STILL_E_MEMORY: srv_reply_error(r, 500, "out_of_memory", err->text); break;
    default: srv_reply_error(r, 500, "internal_error", err->text); break;
    }
}

void srv_put_string(sti_buf *b, const char *text, size_t n)
{
    json_t *string = json_stringn(text, n);
    if (!string) {
        sti_buf_puts(b, "\"bytes:");
        for (size_t i = 0; i < n; i++)
            sti_buf_printf(b, "\\\\x%02x", (unsigned char)text[i]);
        sti_buf_puts(b, "\"");
        return;
    }
    char *quoted = sti_json_text(string, JSON_ENCODE_ANY);
    json_decref(string);
    if (quoted)
        sti_buf_puts(b, quoted);
    else
        b->failed = true;
    free(quoted);
}
