/* request.c - see request.h: prompts, and what the tokenizer's endpoints take. The fields
 * that chat and completions share are read by fields.c. */
#include "server/request.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"

static still_status read_object(const char *text, size_t n, json_t **out,
                                still_error *err)
{
    return sti_json_read("the body", text ? text : "", n,
                         STI_JSON_OBJECT | STI_JSON_NUL | STI_JSON_ONCE, out, err);
}

static still_status read_ids(const json_t *list, const char *name, int vocab,
                             int32_t **out, size_t *n, still_error *err)
{
    size_t i;
    const json_t *value;
    *n = json_array_size(list);
    *out = sti_alloc(*n ? *n : 1, sizeof **out);
    if (!*out) return sti_fail_memory(err, name, *n * sizeof **out);
    json_array_foreach(list, i, value)
    {
        json_int_t id = json_integer_value(value);
        if (json_is_integer(value) && id >= 0 && id < vocab) {
            (*out)[i] = (int32_t)id;
            continue;
        }
        free(*out);
        *out = NULL;
        if (!json_is_integer(value))
            return sti_fail(err, STILL_E_ARG,
                            "'%s': entry %zu is not a token id (a whole number)", name,
                            i);
        return sti_fail(err, STILL_E_ARG,
                        "'%s': entry %zu is %lld, token ids go from 0 to %d", name, i,
                        (long long)id, vocab - 1);
    }
    return STILL_OK;
}

static still_status read_prompt(const json_t *value, int vocab, srv_prompt *out,
                                still_error *err)
{
    if (json_is_string(value)) {
        out->text = json_string_value(value);
        out->n_text = json_string_length(value);
        return STILL_OK;
    }
    if (!json_is_array(value))
        return sti_fail(err, STILL_E_ARG,
                        "'prompt' must be a string, a list of token ids, or a list of "
                        "either");
    if (json_array_size(value) == 0)
        return sti_fail(err, STILL_E_ARG, "'prompt' has a list without token ids");
    return read_ids(value, "prompt", vocab, &out->id, &out->n, err);
}

/* A list that begins with a number is one prompt of ids; any other is several
 * prompts. */
static still_status read_prompts(const json_t *value, int vocab, srv_completion *c,
                                 still_error *err)
{
    if (!value) return sti_fail(err, STILL_E_ARG, "'prompt' is missing");
    const json_t *first = json_array_get(value, 0);
    bool several = json_is_array(value) && (!first || !json_is_number(first));
    size_t n = several ? json_array_size(value) : 1;
    if (n < 1 || n > SRV_MOST_PROMPTS)
        return sti_fail(err, STILL_E_ARG, "'prompt' has %zu entries, 1 to %d can be", n,
                        SRV_MOST_PROMPTS);
    c->prompt = sti_alloc(n, sizeof *c->prompt);
    if (!c->prompt) return sti_fail_memory(err, "prompts", n * sizeof *c->prompt);
    c->n_prompts = n;
    for (size_t i = 0; i < n; i++)
        STI_TRY(read_prompt(several ? json_array_get(value, i) : value, vocab,
                            &c->prompt[i], err));
    return STILL_OK;
}

srv_options srv_plain_options(void)
{
    return (srv_options){.max_tokens = 16,
                         .n = 1,
                         .logprobs = -1,
                         .temperature = 1,
                         .top_p = 1,
                         .repeat_penalty = 1,
                         .parallel_calls = true};
}

static still_status read_completion(int vocab, srv_completion *c, still_error *err)
{
    srv_options *o = &c->options;
    STI_TRY(srv_fields_read(c->body, SRV_TEXTS, vocab, o, err));
    STI_TRY(read_prompts(srv_field_of(c->body, "prompt"), vocab, c, err));
    if (c->n_prompts * (size_t)o->n > SRV_MOST_SEQUENCES)
        return sti_fail(err, STILL_E_ARG,
                        "%zu prompts with 'n' %d are more than %d sequences",
                        c->n_prompts, o->n, SRV_MOST_SEQUENCES);
    if (o->logprobs > vocab) o->logprobs = vocab;
    return STILL_OK;
}

still_status srv_completion_read(const char *text, size_t n, int vocab,
                                 const srv_options *defaults, srv_completion *out,
                                 still_error *err)
{
    *out = (srv_completion){.options = *defaults};
    STI_TRY(read_object(text, n, &out->body, err));
    still_status status = read_completion(vocab, out, err);
    if (status != STILL_OK) srv_completion_free(out);
    return status;
}

void srv_completion_free(srv_completion *c)
{
    for (size_t i = 0; i < c->n_prompts; i++) free(c->prompt[i].id);
    free(c->prompt);
    srv_options_free(&c->options);
    json_decref(c->body);
    *c = (srv_completion){0};
}

still_status srv_tokenize_read(const char *text, size_t n, srv_tokenize *out,
                               still_error *err)
{
    *out = (srv_tokenize){.add_special = true};
    STI_TRY(read_object(text, n, &out->body, err));
    static const char *const names[] = {"prompt", "add_special_tokens", "model", NULL};
    const json_t *prompt = srv_field_of(out->body, "prompt");
    const json_t *special = srv_field_of(out->body, "add_special_tokens");
    still_status status = srv_names_check(out->body, "", names, err);
    if (special) out->add_special = json_is_true(special);
    if (status == STILL_OK && special && !json_is_boolean(special))
        status =
            sti_fail(err, STILL_E_ARG, "'add_special_tokens' must be true or false");
    else if (status == STILL_OK && !json_is_string(prompt))
        status = sti_fail(err, STILL_E_ARG, "'prompt' must be a string");
    if (status != STILL_OK) {
        json_decref(out->body);
        *out = (srv_tokenize){0};
        return status;
    }
    out->text = json_string_value(prompt);
    out->n_text = json_string_length(prompt);
    return STILL_OK;
}

still_status srv_detokenize_read(const char *text, size_t n, int vocab, int32_t **id,
                                 size_t *n_ids, still_error *err)
{
    json_t *body;
    *id = NULL;
    STI_TRY(read_object(text, n, &body, err));
    static const char *const names[] = {"tokens", "model", NULL};
    const json_t *list = srv_field_of(body, "tokens");
    still_status status = srv_names_check(body, "", names, err);
    if (status == STILL_OK)
        status = json_is_array(list) ? read_ids(list, "tokens", vocab, id, n_ids, err)
                                     : sti_fail(err, STILL_E_ARG,
                                                "'tokens' must be a list of token ids");
    json_decref(body);
    return status;
}
