/* kept.c - see kept.h. */
#include "cli/data/kept.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/new_file.h"
#include "cli/cli.h"

enum { MOST_KEPT = 16 << 20 };

still_status cli_kept_read(const char *folder, json_t **out, still_error *err)
{
    char *text = NULL;
    size_t n = 0;
    sti_buf path = {0};
    *out = NULL;
    sti_buf_printf(&path, "%s/" CLI_KEPT, folder);
    still_status st = path.failed ? sti_fail_memory(err, folder, 0) : STILL_OK;
    if (st == STILL_OK && access(path.p, F_OK) != 0) {
        *out = json_object();
        if (!*out) st = sti_fail_memory(err, CLI_KEPT, 0);
    } else if (st == STILL_OK) {
        st = cli_read(path.p, MOST_KEPT, &text, &n, err);
        if (st == STILL_OK)
            st = sti_json_read(path.p, text, n, STI_JSON_OBJECT, out, err);
    }
    free(text);
    sti_buf_free(&path);
    return st;
}

still_status cli_kept_write(const char *folder, const json_t *kept, still_error *err)
{
    sti_buf path = {0};
    sti_buf_printf(&path, "%s/" CLI_KEPT, folder);
    char *text = sti_json_text(kept, JSON_INDENT(1) | JSON_SORT_KEYS);
    const still_status st = text && !path.failed
                                ? sti_write_file(path.p, text, strlen(text), err)
                                : sti_fail_memory(err, CLI_KEPT, 0);
    free(text);
    sti_buf_free(&path);
    return st;
}

const json_t *cli_kept_file(const json_t *kept, const char *kind, const char *name)
{
    return json_object_get(json_object_get(kept, kind), name);
}

const char *cli_kept_sum(const json_t *kept, const char *kind, const char *name)
{
    return json_string_value(
        json_object_get(cli_kept_file(kept, kind, name), "sha256"));
}

void cli_kept_set(json_t **kept, const char *kind, const char *name, json_t *v)
{
    json_t *of = json_incref(json_object_get(*kept, kind));
    if (!of) of = json_object();
    sti_json_set(&of, name, v);
    sti_json_set(kept, kind, of);
}
