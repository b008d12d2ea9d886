/* request.c - see request.h.
 *
 * jansson bounds nesting, checks UTF-8 and refuses numbers that do not fit; here every
 * field is checked for type and range. A null field counts as absent, because clients
 * send such fields. Unknown fields are ignored, but fields of the API that would change
 * the result and are not implemented are refused. */
#include "server/request.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"

static still_status read_object(const char *text, size_t n, json_t **out,
                                still_error *err)
{
    return sti_json_read("the body", text ? text : "", n,
                         STI_JSON_OBJECT | STI_JSON_NUL, out, err);
}

/* A field that is present and not null; else NULL. */
static const json_t *field(const json_t *body, const char *name)
{
    const json_t *value = json_object_get(body, name);
    return json_is_null(value) ? NULL : value;
}

static still_status read_int(const json_t *body, const char *name, json_int_t min,
                             json_int_t max, int *out, still_error *err)
{
    const json_t *value = field(body, name);
    if (!value) return STILL_OK;
    json_int_t v = json_integer_value(value);
    if (!json_is_integer(value) || v < min || v > max)
        return sti_fail(err, STILL_E_ARG,
                        "'%s' must be a whole number from %lld to %lld", name,
                        (long long)min, (long long)max);
    *out = (int)v;
    return STILL_OK;
}

static still_status read_real(const json_t *body, const char *name, double min,
                              double max, double *out, still_error *err)
{
    const json_t *value = field(body, name);
    if (!value) return STILL_OK;
    double v = json_number_value(value);
    if (!json_is_number(value) || !(v >= min && v <= max))
        return sti_fail(err, STILL_E_ARG, "'%s' must be a number from %g to %g", name,
                        min, max);
    *out = v;
    return STILL_OK;
}

static still_status read_bool(const json_t *body, const char *name, bool *out,
                              still_error *err)
{
    const json_t *value = field(body, name);
    if (!value) return STILL_OK;
    if (!json_is_boolean(value))
        return sti_fail(err, STILL_E_ARG, "'%s' must be true or false", name);
    *out = json_is_true(value);
    return STILL_OK;
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
    if (!value) return sti_fail(err, STILL_E_ARG, "the body has no 'prompt'");
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

static still_status read_stop(const json_t *value, srv_completion *c, still_error *err)
{
    size_t n = json_is_array(value) ? json_array_size(value) : value ? 1 : 0;
    if (n > SRV_MOST_STOPS)
        return sti_fail(err, STILL_E_ARG, "'stop' has %zu strings, at most %d can be",
                        n, SRV_MOST_STOPS);
    for (size_t i = 0; i < n; i++) {
        const json_t *s = json_is_array(value) ? json_array_get(value, i) : value;
        if (!json_is_string(s) || json_string_length(s) == 0)
            return sti_fail(err, STILL_E_ARG,
                            "'stop' must be a string or a list of strings, none empty");
        c->stop[c->n_stops++] =
            (srv_stop_text){json_string_value(s), json_string_length(s)};
    }
    return STILL_OK;
}

static still_status read_seed(const json_t *value, srv_completion *c, still_error *err)
{
    if (!value) return STILL_OK;
    if (!json_is_integer(value))
        return sti_fail(err, STILL_E_ARG, "'seed' must be a whole number");
    c->has_seed = true;
    c->seed = (uint64_t)json_integer_value(value);
    return STILL_OK;
}

/* Fields of the API that change the result and are not implemented. */
static still_status refuse_missing(const json_t *body, still_error *err)
{
    int one = 1;
    bool stream = false;
    double zero = 0;
    STI_TRY(read_int(body, "n", 1, 1, &one, err));
    STI_TRY(read_int(body, "best_of", 1, 1, &one, err));
    STI_TRY(read_real(body, "presence_penalty", 0, 0, &zero, err));
    STI_TRY(read_real(body, "frequency_penalty", 0, 0, &zero, err));
    STI_TRY(read_bool(body, "stream", &stream, err));
    if (stream)
        return sti_fail(err, STILL_E_UNSUPPORTED, "'stream' is not implemented yet");
    static const char *const missing[] = {"suffix", "logit_bias"};
    for (size_t i = 0; i < sizeof missing / sizeof *missing; i++) {
        const json_t *value = field(body, missing[i]);
        bool empty = !value || (json_is_object(value) && !json_object_size(value)) ||
                     (json_is_string(value) && !json_string_length(value));
        if (!empty)
            return sti_fail(err, STILL_E_UNSUPPORTED, "'%s' is not implemented",
                            missing[i]);
    }
    return STILL_OK;
}

static still_status read_completion(int vocab, srv_completion *c, still_error *err)
{
    const json_t *body = c->body;
    STI_TRY(read_prompts(field(body, "prompt"), vocab, c, err));
    STI_TRY(read_int(body, "max_tokens", 0, INT32_MAX, &c->max_tokens, err));
    STI_TRY(read_int(body, "logprobs", 0, SRV_MOST_LOGPROBS, &c->logprobs, err));
    STI_TRY(read_int(body, "top_k", 0, INT32_MAX, &c->top_k, err));
    STI_TRY(read_real(body, "temperature", 0, 100, &c->temperature, err));
    STI_TRY(read_real(body, "top_p", 0, 1, &c->top_p, err));
    STI_TRY(read_real(body, "min_p", 0, 1, &c->min_p, err));
    STI_TRY(read_bool(body, "echo", &c->echo, err));
    STI_TRY(read_seed(field(body, "seed"), c, err));
    STI_TRY(read_stop(field(body, "stop"), c, err));
    if (c->logprobs > vocab) c->logprobs = vocab;
    return refuse_missing(body, err);
}

still_status srv_completion_read(const char *text, size_t n, int vocab,
                                 srv_completion *out, still_error *err)
{
    *out = (srv_completion){
        .max_tokens = 16, .logprobs = -1, .temperature = 1, .top_p = 1};
    STI_TRY(read_object(text, n, &out->body, err));
    still_status status = read_completion(vocab, out, err);
    if (status != STILL_OK) srv_completion_free(out);
    return status;
}

void srv_completion_free(srv_completion *c)
{
    for (size_t i = 0; i < c->n_prompts; i++) free(c->prompt[i].id);
    free(c->prompt);
    json_decref(c->body);
    *c = (srv_completion){0};
}

still_status srv_tokenize_read(const char *text, size_t n, srv_tokenize *out,
                               still_error *err)
{
    *out = (srv_tokenize){.add_special = true};
    STI_TRY(read_object(text, n, &out->body, err));
    const json_t *prompt = field(out->body, "prompt");
    still_status status =
        read_bool(out->body, "add_special_tokens", &out->add_special, err);
    if (status == STILL_OK && !json_is_string(prompt))
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
    const json_t *list = field(body, "tokens");
    still_status status =
        json_is_array(list)
            ? read_ids(list, "tokens", vocab, id, n_ids, err)
            : sti_fail(err, STILL_E_ARG, "'tokens' must be a list of token ids");
    json_decref(body);
    return status;
}
