/* talk_file.c - conversations in files. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/new_file.h"
#include "cli/chat/talk.h"

enum { MOST = 1 << 28 }; /* bytes of a file */

/* The messages of a file; *list: json_decref(*all) it. */
static still_status read_messages(const char *path, json_t **all, const json_t **list,
                                  still_error *err)
{
    char *text;
    size_t n, i;
    const json_t *m;
    *all = NULL;
    STI_TRY(cli_read(path, MOST, &text, &n, err));
    const still_status st = sti_json_read(path, text, n, 0, all, err);
    free(text);
    STI_TRY(st);
    *list = json_is_array(*all) ? *all : json_object_get(*all, "messages");
    if (!json_is_array(*list))
        return sti_fail(err, STILL_E_FORMAT, "%s: has no list of messages", path);
    json_array_foreach(*list, i, m)
    {
        const char *role = json_string_value(json_object_get(m, "role"));
        const json_t *content = json_object_get(m, "content");
        const bool known =
            role && (!strcmp(role, "user") || !strcmp(role, "assistant") ||
                     (!strcmp(role, "system") && i == 0));
        if (!known)
            return sti_fail(err, STILL_E_FORMAT,
                            "%s: message %zu is neither a user's nor an assistant's%s",
                            path, i, i ? "" : " nor the system's");
        if (!json_is_string(content))
            return sti_fail(err, STILL_E_FORMAT, "%s: message %zu has no text", path,
                            i);
    }
    return STILL_OK;
}

int cli_talk_save(const cli_talk *c, const char *path)
{
    still_error err;
    json_t *old, *list = json_array();
    const json_t *messages;
    for (size_t i = 0; i < c->n; i++)
        sti_json_append(
            &list,
            json_pack("{s:s, s:o}", "role", c->msg[i].role, "content",
                      cli_json_text(c->msg[i].content, strlen(c->msg[i].content))));
    json_t *all = json_pack("{s:o}", "messages", list);
    char *text = sti_json_text(all, JSON_INDENT(2));
    json_decref(all);
    if (!text) return cli_fail("out of memory: a conversation of %zu messages", c->n);
    int status = CLI_OK;
    if (access(path, F_OK) == 0) {
        const still_status st = read_messages(path, &old, &messages, &err);
        json_decref(old);
        if (st != STILL_OK)
            status = cli_fail("%s: is there and is no conversation; /save to another "
                              "name, or remove it",
                              path);
    }
    if (status == CLI_OK && sti_write_file(path, text, strlen(text), &err))
        status = cli_fail_error(&err);
    free(text);
    return status;
}

int cli_talk_load(cli_talk *c, const char *path)
{
    still_error err;
    json_t *all;
    const json_t *list, *m;
    size_t i;
    int status = CLI_OK;
    if (read_messages(path, &all, &list, &err)) {
        json_decref(all);
        return cli_fail_error(&err);
    }
    cli_talk_system(c, "");
    json_array_foreach(list, i, m)
    {
        const char *role = json_string_value(json_object_get(m, "role"));
        const json_t *content = json_object_get(m, "content");
        if (status == CLI_OK)
            status =
                cli_talk_add(c,
                             !strcmp(role, "user")     ? "user"
                             : !strcmp(role, "system") ? "system"
                                                       : "assistant",
                             json_string_value(content), json_string_length(content));
    }
    json_decref(all);
    if (status != CLI_OK) cli_talk_system(c, ""); /* half a conversation is none */
    return status;
}
