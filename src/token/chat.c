/* chat.c - conversations written the way a model was trained to read them.
 *
 * Models bring a Jinja program for this. Nearly all of them are variations of three
 * families, so the program is not run: its markers identify the family, and the few
 * literals that vary within it (a default system prompt, spaces around [INST],
 * dates) are read from its text. Where a template would raise an exception, we
 * return an error. */
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/error.h"
#include "base/mem.h"
#include "base/utf8.h"

still_chat_format still_chat_format_of(const char *t)
{
    if (!t) return STILL_CHAT_NONE;
    if (strstr(t, "<|im_start|>")) return STILL_CHAT_CHATML;
    if (strstr(t, "<|start_header_id|>")) return STILL_CHAT_LLAMA3;
    /* Llama 2 has [INST] too, but puts <<SYS>> blocks inside. */
    if (strstr(t, "[INST]") && !strstr(t, "<<SYS>>")) return STILL_CHAT_MISTRAL;
    return STILL_CHAT_NONE;
}

const char *still_chat_format_name(still_chat_format f)
{
    switch (f) {
    case STILL_CHAT_NONE: return "none";
    case STILL_CHAT_CHATML: return "chatml";
    case STILL_CHAT_LLAMA3: return "llama3";
    case STILL_CHAT_MISTRAL: return "mistral";
    }
    return "unknown";
}

/* ---- Reading literals off a template ------------------------------------- */

/* Appends [p, end), with Jinja's "\n" as newlines. */
static void put_literal(sti_buf *b, const char *p, const char *end)
{
    for (; p < end; p++) {
        if (*p == '\\' && p + 1 < end && p[1] == 'n') {
            sti_buf_put(b, "\n", 1);
            p++;
        } else {
            sti_buf_put(b, p, 1);
        }
    }
}

/* The system prompt a ChatML template writes by itself: the text of a literal
 *     <|im_start|>system\n TEXT <|im_end|>
 * that runs from marker to marker without leaving its quotes. *end NULL: none. */
static const char *default_system(const char *t, const char **end)
{
    static const char open[] = "<|im_start|>system";
    for (*end = NULL; (t = strstr(t, open)); t++) {
        const char *p = t + strlen(open);
        if (*p == '\n')
            p++;
        else if (p[0] == '\\' && p[1] == 'n')
            p += 2;
        else
            continue;
        const char *stop = strstr(p, "<|im_end|>");
        if (!stop || stop == p || *p == '\'' || *p == '"') continue;
        size_t n = (size_t)(stop - p);
        if (memmem(p, n, "{{", 2) || memmem(p, n, "' +", 3) || memmem(p, n, "\" +", 3))
            continue;
        *end = stop;
        return p;
    }
    return NULL;
}

/* Appends the text after `marker`, up to a quote, a backslash or a line's end. */
static void put_after(sti_buf *b, const char *t, const char *marker)
{
    const char *p = strstr(t, marker);
    if (!p) return;
    p += strlen(marker);
    sti_buf_put(b, p, strcspn(p, "\"'\\\n"));
}

/* ---- Pieces of text ------------------------------------------------------ */

static bool is_space(uint32_t c)
{
    return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 ||
           c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 ||
           c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

/* Jinja's trim: strips white space from both ends. */
static void put_trimmed(sti_buf *b, const char *p)
{
    size_t n = strlen(p), first = n, last = 0;
    for (size_t i = 0, len, bad; i < n; i += len) {
        bool cut, space = false;
        len = sti_utf8_char(p + i, n - i, &bad, &cut);
        if (len)
            space = is_space(sti_utf8_decode(p + i, &len));
        else
            len = bad;
        if (space) continue;
        if (first == n) first = i;
        last = i + len;
    }
    if (first < n) sti_buf_put(b, p + first, last - first);
}

static bool is_role(const still_message *m, const char *role)
{
    return !strcmp(m->role, role);
}

/* ---- The three shapes ---------------------------------------------------- */

static void render_chatml(sti_buf *b, const char *t, const still_message *msg, size_t n,
                          bool prompt)
{
    const char *end, *system = default_system(t, &end);
    if (system && !is_role(&msg[0], "system")) {
        sti_buf_puts(b, "<|im_start|>system\n");
        put_literal(b, system, end);
        sti_buf_puts(b, "<|im_end|>\n");
    }
    for (size_t i = 0; i < n; i++) {
        sti_buf_puts(b, "<|im_start|>");
        sti_buf_puts(b, msg[i].role);
        sti_buf_puts(b, "\n");
        sti_buf_puts(b, msg[i].content);
        sti_buf_puts(b, "<|im_end|>\n");
    }
    if (prompt) sti_buf_puts(b, "<|im_start|>assistant\n");
}

static void put_header(sti_buf *b, const char *role)
{
    sti_buf_puts(b, "<|start_header_id|>");
    sti_buf_puts(b, role);
    sti_buf_puts(b, "<|end_header_id|>\n\n");
}

static void render_llama3(sti_buf *b, const char *t, const still_message *msg, size_t n,
                          bool prompt)
{
    size_t i = 0;
    sti_buf_puts(b, "<|begin_of_text|>");
    if (strstr(t, "Cutting Knowledge Date")) { /* 3.1 and later; the fixed date */
        put_header(b, "system");
        sti_buf_puts(b, "Cutting Knowledge Date:");
        put_after(b, t, "Cutting Knowledge Date:");
        sti_buf_puts(b, "\nToday Date: ");
        put_after(b, t, "date_string = \"");
        sti_buf_puts(b, "\n\n");
        if (is_role(&msg[0], "system")) put_trimmed(b, msg[i++].content);
        sti_buf_puts(b, "<|eot_id|>");
    }
    for (; i < n; i++) {
        put_header(b, msg[i].role);
        put_trimmed(b, msg[i].content);
        sti_buf_puts(b, "<|eot_id|>");
    }
    if (prompt) put_header(b, "assistant");
}

static still_status check_turns(const still_message *msg, size_t n, size_t first,
                                still_error *err)
{
    for (size_t i = first; i < n; i++) {
        const char *expected = (i - first) % 2 ? "assistant" : "user";
        if (!is_role(&msg[i], expected))
            return sti_fail(
                err, STILL_E_ARG,
                "chat: message %zu is from '%s', expected '%s' (this model's "
                "template wants an optional system message, then user and "
                "assistant in turn)",
                i, msg[i].role, expected);
    }
    if (first == n)
        return sti_fail(err, STILL_E_ARG, "chat: the user's message is missing");
    return STILL_OK;
}

static still_status render_mistral(sti_buf *b, const char *t, const still_message *msg,
                                   size_t n, still_error *err)
{
    size_t first = is_role(&msg[0], "system") ? 1 : 0;
    const char *open = strstr(t, " [INST]") ? " [INST] " : "[INST] ";
    const char *close = strstr(t, " [/INST]") ? " [/INST]" : "[/INST]";
    bool trailing = strstr(t, "eos_token + ' '") || strstr(t, "eos_token + \" \"");
    bool trims = strstr(t, "|trim + eos_token") || strstr(t, "| trim + eos_token");
    bool system_last = strstr(t, "loop.last and system_message") != NULL;
    STI_TRY(check_turns(msg, n, first, err));
    if (first && !strstr(t, "system"))
        return sti_fail(
            err, STILL_E_ARG,
            "chat: this model's template has no place for a system message");
    sti_buf_puts(b, "<s>");
    for (size_t i = first; i < n; i++) {
        if (is_role(&msg[i], "user")) {
            sti_buf_puts(b, open);
            if (first && i == (system_last ? n - 1 : first)) {
                sti_buf_puts(b, msg[0].content);
                sti_buf_puts(b, "\n\n");
            }
            sti_buf_puts(b, msg[i].content);
            sti_buf_puts(b, close);
        } else {
            if (!trailing) sti_buf_puts(b, " ");
            if (trims)
                put_trimmed(b, msg[i].content);
            else
                sti_buf_puts(b, msg[i].content);
            sti_buf_puts(b, trailing ? "</s> " : "</s>");
        }
    }
    return STILL_OK;
}

still_status still_chat_render(const char *chat_template, const still_message *msg,
                               size_t n, bool add_generation_prompt, char **out,
                               still_error *err)
{
    *out = NULL;
    still_chat_format format = still_chat_format_of(chat_template);
    if (format == STILL_CHAT_NONE)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        chat_template
                            ? "chat: the model's template is of no known kind "
                              "(ChatML, Llama 3, Mistral)"
                            : "chat: the model brings no chat template");
    if (!msg || !n) return sti_fail(err, STILL_E_ARG, "chat: there are no messages");
    for (size_t i = 0; i < n; i++) {
        if (!msg[i].role || !msg[i].content)
            return sti_fail(err, STILL_E_ARG, "chat: message %zu lacks role or content",
                            i);
        if (!is_role(&msg[i], "system") && !is_role(&msg[i], "user") &&
            !is_role(&msg[i], "assistant"))
            return sti_fail(
                err, STILL_E_ARG,
                "chat: message %zu is from '%.64s', expected system, user or "
                "assistant",
                i, msg[i].role);
    }
    sti_buf b = {0};
    still_status st = STILL_OK;
    if (format == STILL_CHAT_CHATML)
        render_chatml(&b, chat_template, msg, n, add_generation_prompt);
    else if (format == STILL_CHAT_LLAMA3)
        render_llama3(&b, chat_template, msg, n, add_generation_prompt);
    else
        st = render_mistral(&b, chat_template, msg, n, err);
    if (st == STILL_OK && b.failed) st = sti_fail_memory(err, "chat", b.capacity);
    if (st != STILL_OK)
        sti_buf_free(&b);
    else
        *out = b.p;
    return st;
}
