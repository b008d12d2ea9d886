/* Small vocabularies of every kind of file, against the ids of the libraries that made
 * them (fixtures/vocab/make.py). */
#include "tokens.h"

#include <jansson.h>
#include <stdio.h>

#include "base/nfc.h"

typedef struct vocabulary {
    const char *tokenizer, *golden;
    bool spm;   /* U+2581 is read as a space */
    bool lossy; /* unknown characters do not come back */
    bool front; /* a space in front does not go away again */
    bool nfc;   /* text comes back in NFC */
    const char *split;
} vocabulary;

static const vocabulary vocabularies[] = {
    {VOCAB("spm.model"), VOCAB("spm.jsonl"), .spm = true},
    {VOCAB("spm.gguf"), VOCAB("spm.jsonl"), .spm = true},
    {VOCAB("spm-nobytes.model"), VOCAB("spm-nobytes.jsonl"), .spm = true,
     .lossy = true},
    {VOCAB("spm-json.json"), VOCAB("spm-json.jsonl"), .spm = true},
    {VOCAB("metaspace.json"), VOCAB("metaspace.jsonl"), .spm = true, .front = true},
    {VOCAB("llama3.tiktoken"), VOCAB("llama3-tiktoken.jsonl"), .split = "llama-bpe"},
    {VOCAB("llama3.json"), VOCAB("llama3.jsonl"), .split = NULL},
    {VOCAB("smollm.json"), VOCAB("smollm.jsonl"), .split = NULL},
    {VOCAB("smollm.gguf"), VOCAB("smollm.jsonl"), .split = NULL},
    {VOCAB("gpt2.json"), VOCAB("gpt2.jsonl"), .front = true},
    {VOCAB("smaug.gguf"), VOCAB("llama3.jsonl"), .split = NULL},
    {VOCAB("llama3.tiktoken"), VOCAB("qwen2-tiktoken.jsonl"), .nfc = true,
     .split = "qwen2"},
    {VOCAB("llama3.tiktoken"), VOCAB("tekken-tiktoken.jsonl"), .split = "tekken"},
    {VOCAB("llama3.tiktoken"), VOCAB("gpt-4o-tiktoken.jsonl"), .split = "gpt-4o"},
    {VOCAB("qwen.json"), VOCAB("qwen.jsonl"), .nfc = true},
    {VOCAB("qwen.gguf"), VOCAB("qwen.jsonl"), .nfc = true},
    {VOCAB("tekken-hf.json"), VOCAB("tekken-hf.jsonl"), .split = NULL},
    {VOCAB("tekken.gguf"), VOCAB("tekken-hf.jsonl"), .split = NULL},
    {VOCAB("tekken"), VOCAB("tekken-own.jsonl"), .split = NULL},
    {VOCAB("tekken/tekken.json"), VOCAB("tekken-own.jsonl"), .split = NULL},
    {VOCAB("gemma.model"), VOCAB("gemma.jsonl"), .spm = true},
    {VOCAB("gemma.gguf"), VOCAB("gemma.jsonl"), .spm = true},
    {VOCAB("gemma.json"), VOCAB("gemma-json.jsonl"), .spm = true},
};

static void check_line(const still_tokenizer *tk, const vocabulary *v, const json_t *o,
                       int line)
{
    const json_t *text = json_object_get(o, "text"), *want = json_object_get(o, "ids");
    unsigned flags =
        json_is_true(json_object_get(o, "special")) ? STILL_ENCODE_SPECIAL : 0;
    const char *p = json_string_value(text);
    size_t n = json_string_length(text), count, len;
    int32_t *ids = encode(tk, p, n, flags, &count);
    bool same = count == json_array_size(want);
    for (size_t i = 0; same && i < count; i++)
        same = ids[i] == json_integer_value(json_array_get(want, i));
    if (!same) fail_msg("%s: line %d of %s differs", v->tokenizer, line, v->golden);
    /* Around added tokens a tokenizer.json may put spaces that stay. */
    bool back = !v->lossy && !v->front && !(v->spm && strstr(p, "\u2581")) &&
                !(v->spm && (flags || strstr(p, "<sym>")));
    char *text_back = decode(tk, ids, count, true, &len);
    sti_buf nfc = {0};
    if (v->nfc) {
        sti_nfc_put(p, n, &nfc);
        assert_false(nfc.failed);
        p = nfc.p ? nfc.p : "";
        n = nfc.n;
    }
    if (back && (len != n || memcmp(text_back, p, n) != 0))
        fail_msg("%s: line %d of %s comes back as '%s'", v->tokenizer, line, v->golden,
                 text_back);
    sti_buf_free(&nfc);
    free(text_back);
    free(ids);
}

static void test_golden(void **state)
{
    const vocabulary *v = *state;
    still_tokenizer *tk = open_split(v->tokenizer, v->split);
    FILE *f = fopen(v->golden, "r");
    assert_non_null(f);
    char *line = NULL;
    size_t capacity = 0;
    int n = 0;
    for (ssize_t len; (len = getline(&line, &capacity, f)) > 0;) {
        json_t *o = json_loadb(line, (size_t)len, JSON_ALLOW_NUL, NULL);
        assert_non_null(o);
        check_line(tk, v, o, ++n);
        json_decref(o);
    }
    assert_true(n > 100);
    free(line);
    fclose(f);
    still_tokenizer_free(tk);
}

int main(void)
{
    enum { N = sizeof vocabularies / sizeof *vocabularies };
    struct CMUnitTest tests[N];
    for (size_t i = 0; i < N; i++)
        tests[i] = (struct CMUnitTest){vocabularies[i].tokenizer, test_golden, NULL,
                                       NULL, (void *)&vocabularies[i]};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
