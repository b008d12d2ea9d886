/* ids.c - see ids.h. */
#include "cli/ids.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/json.h"
#include "base/mem.h"

static still_status outside(still_error *err, size_t i, long long id, int vocab)
{
    return sti_fail(err, STILL_E_ARG,
                    "id %zu of the list is %lld, the vocabulary has "
                    "0..%d",
                    i, id, vocab - 1);
}

static still_status from_json(const char *text, int vocab, int32_t *ids, size_t *n,
                              still_error *err)
{
    json_t *root;
    STI_TRY(sti_json_read("ids", text, strlen(text), STI_JSON_ONCE, &root, err));
    still_status status = STILL_OK;
    const json_t *list = json_is_object(root) ? json_object_get(root, "ids") : root;
    if (!json_is_array(list))
        status = sti_fail(err, STILL_E_FORMAT,
                          "ids: expected a JSON list of numbers, or {\"ids\": [...]}");
    *n = status == STILL_OK ? json_array_size(list) : 0;
    for (size_t i = 0; i < *n && status == STILL_OK; i++) {
        const json_t *item = json_array_get(list, i);
        json_int_t id = json_integer_value(item);
        if (!json_is_integer(item))
            status = sti_fail(err, STILL_E_FORMAT,
                              "ids: entry %zu of the list is not a whole number", i);
        else if (id < 0 || id >= vocab)
            status = outside(err, i, id, vocab);
        else
            ids[i] = (int32_t)id;
    }
    json_decref(root);
    return status;
}

static still_status from_words(const char *text, int vocab, int32_t *ids, size_t *n,
                               still_error *err)
{
    static const char SPACE[] = " ,\t\r\n";
    *n = 0;
    for (text += strspn(text, SPACE); *text; text += strspn(text, SPACE)) {
        char *end;
        long long id = strtoll(text, &end, 10);
        if (end == text || (*end && !strchr(SPACE, *end)))
            return sti_fail(err, STILL_E_FORMAT, "ids: '%.*s' is not a whole number",
                            (int)strcspn(text, SPACE), text);
        if (id < 0 || id >= vocab) return outside(err, *n, id, vocab);
        ids[(*n)++] = (int32_t)id;
        text = end;
    }
    return STILL_OK;
}

still_status cli_parse_ids(const char *text, int vocab, int32_t **ids, size_t *n,
                           still_error *err)
{
    *ids = NULL;
    /* Every id takes at least a digit and a separator. */
    int32_t *list = sti_alloc(strlen(text) / 2 + 1, sizeof *list);
    if (!list) return sti_fail_memory(err, "ids", strlen(text));
    const char *start = text + strspn(text, " \t\r\n");
    bool json = *start == '[' || *start == '{';
    still_status status = json ? from_json(start, vocab, list, n, err)
                               : from_words(start, vocab, list, n, err);
    if (status != STILL_OK) {
        free(list);
        return status;
    }
    *ids = list;
    return STILL_OK;
}
