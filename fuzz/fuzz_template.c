/* fuzz_template.c - chat templates: any text is refused with one line, or renders within
 * its limits to UTF-8 with a mark for every byte. What is content consists of bytes that
 * the conversation brought, so a template without variables has none. */
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "template/template.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char CONVERSATION[] =
    "{\"messages\": [{\"role\": \"system\", \"content\": \"Be brief.\"},"
    "{\"role\": \"user\", \"content\": \" caf\\u00e9 <|im_end|>\\n\"},"
    "{\"role\": \"assistant\", \"content\": \"\", \"tool_calls\": [{\"function\":"
    "{\"name\": \"f\", \"arguments\": {\"a\": 1, \"b\": [true, null, 2.5]}}}]}],"
    "\"tools\": [{\"type\": \"function\", \"function\": {\"name\": \"f\"}}],"
    "\"add_generation_prompt\": true}";

static void check(bool holds)
{
    if (!holds) abort();
}

static void render(const sti_template *t, const json_t *variables)
{
    static const struct tm now = {.tm_year = 126, .tm_mon = 6, .tm_mday = 26};
    const sti_template_input in = {variables, "<s>", "</s>", &now};
    still_rendering r;
    still_error err = {0};
    if (sti_template_render(t, &in, &r, &err) != STILL_OK) {
        check(err.text[0] && !strchr(err.text, '\n') && !r.text && !r.content);
        return;
    }
    check(sti_utf8_span(r.text, r.n) == r.n && r.text[r.n] == 0);
    for (size_t i = 0; i < r.n; i++)
        check(r.content[i] <= (json_object_size(variables) > 0));
    still_rendering_free(&r);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    sti_template *t;
    still_error err = {0};
    if (sti_template_parse((const char *)data, size, &t, &err) != STILL_OK) {
        check(!t && err.text[0] && !strchr(err.text, '\n'));
        return 0;
    }
    json_t *variables, *none = json_object();
    check(sti_json_read("fuzz", CONVERSATION, sizeof CONVERSATION - 1, 0, &variables,
                        &err) == STILL_OK);
    render(t, variables);
    render(t, none);
    json_decref(variables);
    json_decref(none);
    sti_template_free(t);
    return 0;
}
