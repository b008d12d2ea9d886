/* Bodies of requests: what is read from good ones, what bad ones are told. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "../run.h"

#include "server/request.h"

static srv_completion read_good(const char *text)
{
    srv_completion c;
    still_error e = {0};
    const srv_options plain = srv_plain_options();
    if (srv_completion_read(text, strlen(text), 100, &plain, &c, &e))
        fail_msg("%s", e.text);
    return c;
}

static void defaults(void **state)
{
    (void)state;
    srv_completion c =
        read_good("{\"prompt\":\"hi\\u0000!\",\"echo\":null,\"frob\":null}");
    const srv_options *o = &c.options;
    assert_int_equal(c.n_prompts, 1);
    assert_int_equal(c.prompt[0].n_text, 4);
    assert_memory_equal(c.prompt[0].text, "hi\0!", 5);
    assert_null(c.prompt[0].id);
    assert_int_equal(o->max_tokens, 16);
    assert_int_equal(o->logprobs, -1);
    assert_int_equal(o->n, 1);
    assert_true(o->temperature == 1 && o->top_p == 1 && o->min_p == 0);
    assert_false(o->echo || o->has_seed || o->n_stops || o->stream || o->ignore_eos);
    srv_completion_free(&c);
}

static void all_fields(void **state)
{
    (void)state;
    srv_completion c = read_good(
        "{\"prompt\":[3,99],\"max_tokens\":0,\"logprobs\":5,\"echo\":true,"
        "\"temperature\":0.5,\"top_p\":0.25,\"min_p\":1,\"top_k\":7,\"seed\":-1,"
        "\"stop\":[\"a\",\"bc\"],\"n\":3,\"stream\":true,\"suffix\":\"\","
        "\"stream_options\":{\"include_usage\":true},\"best_of\":1,"
        "\"logit_bias\":{\"7\":-100,\"99\":1.5},\"presence_penalty\":-2,"
        "\"frequency_penalty\":0.5,\"repeat_penalty\":1.25,\"ignore_eos\":true,"
        "\"min_tokens\":4,\"model\":\"any\",\"user\":\"u\"}");
    const srv_options *o = &c.options;
    assert_int_equal(c.n_prompts, 1);
    assert_int_equal(c.prompt[0].n, 2);
    assert_int_equal(c.prompt[0].id[1], 99);
    assert_int_equal(o->max_tokens, 0);
    assert_int_equal(o->min_tokens, 4);
    assert_int_equal(o->logprobs, 5);
    assert_int_equal(o->top_k, 7);
    assert_int_equal(o->n, 3);
    assert_true(o->temperature == 0.5 && o->top_p == 0.25 && o->min_p == 1 && o->echo);
    assert_true(o->presence_penalty == -2 && o->frequency_penalty == 0.5);
    assert_true(o->repeat_penalty == 1.25 && o->ignore_eos && o->stream && o->usage);
    assert_true(o->has_seed && o->seed == UINT64_MAX);
    assert_int_equal(o->n_stops, 2);
    assert_memory_equal(o->stop[1].p, "bc", o->stop[1].n);
    assert_int_equal(o->n_bias, 2);
    assert_true(o->bias[0].id == 7 && o->bias[0].bias == -100);
    assert_true(o->bias[1].id == 99 && o->bias[1].bias == 1.5F);
    srv_completion_free(&c);
}

static void several_prompts(void **state)
{
    (void)state;
    srv_completion c = read_good("{\"prompt\":[[1,2],\"text\",[3]]}");
    assert_int_equal(c.n_prompts, 3);
    assert_int_equal(c.prompt[0].n, 2);
    assert_string_equal(c.prompt[1].text, "text");
    assert_int_equal(c.prompt[2].id[0], 3);
    srv_completion_free(&c);
}

static void wrong(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        still_status code;
        const char *words;
    } bad[] = {
        {"", STILL_E_FORMAT, "the body: line 1, column 1: "},
        {"[]", STILL_E_FORMAT, "not a JSON object"},
        {"{\"prompt\":\"\xff\"}", STILL_E_FORMAT, "no UTF-8"},
        {"{}", STILL_E_ARG, "'prompt' is missing"},
        {"{\"prompt\":[]}", STILL_E_ARG, "0 entries"},
        {"{\"prompt\":[[1],[]]}", STILL_E_ARG, "without token ids"},
        {"{\"prompt\":[1,100]}", STILL_E_ARG, "entry 1 is 100"},
        {"{\"prompt\":[1,1e300]}", STILL_E_ARG, "entry 1 is not a token id"},
        {"{\"prompt\":[\"a\",7]}", STILL_E_ARG, "'prompt' must be"},
        {"{\"prompt\":\"a\",\"max_tokens\":1.0}", STILL_E_ARG, "'max_tokens'"},
        {"{\"prompt\":\"a\",\"top_p\":1.5}", STILL_E_ARG, "from 0 to 1"},
        {"{\"prompt\":\"a\",\"best_of\":3}", STILL_E_UNSUPPORTED, "'best_of'"},
        {"{\"prompt\":\"a\",\"suffix\":\"x\"}", STILL_E_UNSUPPORTED, "'suffix'"},
        {"{\"prompt\":\"a\",\"presence_penalty\":3}", STILL_E_ARG, "presence"},
        {"{\"prompt\":\"a\",\"stop\":\"\"}", STILL_E_ARG, "none empty"},
        {"{\"prompt\":\"a\",\"stream\":1}", STILL_E_ARG, "'stream'"},
        {"{\"prompt\":\"a\",\"n\":129}", STILL_E_ARG, "'n' must be"},
        {"{\"prompt\":\"a\",\"frob\":[1]}", STILL_E_UNSUPPORTED, "'frob'"},
        {"{\"prompt\":\"a\",\"messages\":[]}", STILL_E_UNSUPPORTED, "'messages'"},
        {"{\"prompt\":\"a\",\"stream_options\":{}}", STILL_E_ARG, "'stream': true"},
        {"{\"prompt\":\"a\",\"stream\":true,\"stream_options\":{\"x\":1}}",
         STILL_E_UNSUPPORTED, "'stream_options.x'"},
        {"{\"prompt\":\"a\",\"logit_bias\":{\"100\":1}}", STILL_E_ARG, "0 to 99"},
        {"{\"prompt\":\"a\",\"logit_bias\":{\"1 \":1}}", STILL_E_ARG, "no token id"},
        {"{\"prompt\":\"a\",\"logit_bias\":{\"1\":101}}", STILL_E_ARG, "-100 to 100"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        srv_completion c;
        still_error e = {0};
        const srv_options plain = srv_plain_options();
        still_status got =
            srv_completion_read(bad[i].text, strlen(bad[i].text), 100, &plain, &c, &e);
        if (got != bad[i].code) fail_msg("%s: %d, %s", bad[i].text, got, e.text);
        if (!strstr(e.text, bad[i].words)) fail_msg("%s: %s", bad[i].text, e.text);
        assert_null(c.body);
        assert_null(c.prompt);
    }
}

static void tokenizer_bodies(void **state)
{
    (void)state;
    still_error e;
    srv_tokenize t;
    int32_t *id;
    size_t n;
    const char *text = "{\"prompt\":\"ab\",\"add_special_tokens\":false}";
    assert_int_equal(srv_tokenize_read(text, strlen(text), &t, &e), STILL_OK);
    assert_true(t.n_text == 2 && !t.add_special);
    json_decref(t.body);
    text = "{\"prompt\":\"ab\",\"add_bos\":false}";
    assert_int_equal(srv_tokenize_read(text, strlen(text), &t, &e),
                     STILL_E_UNSUPPORTED);
    assert_non_null(strstr(e.text, "'add_bos'"));
    assert_int_equal(srv_tokenize_read("{\"prompt\":3}", 12, &t, &e), STILL_E_ARG);
    assert_int_equal(srv_detokenize_read("{\"tokens\":[4,5]}", 16, 100, &id, &n, &e),
                     STILL_OK);
    assert_true(n == 2 && id[0] == 4 && id[1] == 5);
    free(id);
    assert_int_equal(srv_detokenize_read("{\"tokens\":[-4]}", 15, 100, &id, &n, &e),
                     STILL_E_ARG);
    assert_null(id);
    assert_int_equal(srv_detokenize_read("{}", 2, 100, &id, &n, &e), STILL_E_ARG);
}

RUN_TESTS(cmocka_unit_test(defaults), cmocka_unit_test(all_fields),
          cmocka_unit_test(several_prompts), cmocka_unit_test(wrong),
          cmocka_unit_test(tokenizer_bodies))
