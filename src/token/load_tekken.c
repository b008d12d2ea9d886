/* load_tekken.c - Mistral's tekken.json: tiktoken ranks with their splitting rule.
 *
 *   {"config": {"pattern": regular expression, "default_vocab_size": ids,
 *               "default_num_special_tokens": of them, "version": "v3"},
 *    "vocab": [{"rank": 0, "token_bytes": base64, "token_str": not needed}, ...],
 *    "special_tokens": [{"rank": 0, "token_str": "<unk>"}, ...]}
 *
 * Special tokens have the first ids, the ranks follow them. The list of ranks is longer
 * than the vocabulary: the first ones count. Files up to version 7 leave the special
 * tokens out; then they are those below, and in every file the rest is filled up. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "token/tokenizer.h"

static const char what[] = "tekken.json";

enum {
    MOST_SPECIAL = 1 << 16, /* they need no text in the file; Mistral's have 1000 */
    UNNAMED = 7             /* the last version that may leave them out */
};

static still_status add_special(still_tokenizer *tk, const char *name, size_t n,
                                still_error *err)
{
    return sti_vocab_add(&tk->v, name, n, STI_KIND_CONTROL, err);
}

static still_status add_usual_specials(still_tokenizer *tk, const json_t *config,
                                       int64_t count, still_error *err)
{
    static const char *const named[] = {
        "<unk>",
        "<s>",
        "</s>",
        "[INST]",
        "[/INST]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "[TOOL_CALLS]",
        "[IMG]",
        "<pad>",
        "[IMG_BREAK]",
        "[IMG_END]",
        "[PREFIX]",
        "[MIDDLE]",
        "[SUFFIX]",
        "[SYSTEM_PROMPT]",
        "[/SYSTEM_PROMPT]",
        "[TOOL_CONTENT]",
    };
    const char *version = json_string_value(json_object_get(config, "version"));
    const bool early = version && version[0] == 'v' && version[1] >= '1' &&
                       version[1] <= '0' + UNNAMED && !version[2];
    if (!early)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: version %.16s must list its special_tokens, and does not",
                        what, version ? version : "(none)");
    for (size_t i = 0; i < sizeof named / sizeof *named && (int64_t)i < count; i++)
        STI_TRY(add_special(tk, named[i], strlen(named[i]), err));
    return STILL_OK;
}

static still_status check_rank(const json_t *o, const char *list, size_t i,
                               still_error *err)
{
    const json_t *rank = json_object_get(o, "rank");
    if (json_is_integer(rank) && json_integer_value(rank) == (json_int_t)i)
        return STILL_OK;
    return sti_fail(err, STILL_E_FORMAT, "%s: %s[%zu] has no rank, or another than %zu",
                    what, list, i, i);
}

static still_status add_specials(still_tokenizer *tk, const json_t *root,
                                 const json_t *config, int64_t count, still_error *err)
{
    const json_t *list = json_object_get(root, "special_tokens");
    if (!json_is_array(list)) {
        STI_TRY(add_usual_specials(tk, config, count, err));
    } else if (json_array_size(list) > (size_t)count) {
        return sti_fail(
            err, STILL_E_FORMAT,
            "%s: special_tokens are %zu, default_num_special_tokens is %lld", what,
            json_array_size(list), (long long)count);
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *o = json_array_get(list, i),
                     *text = json_object_get(o, "token_str");
        STI_TRY(check_rank(o, "special_tokens", i, err));
        if (!json_string_length(text))
            return sti_fail(err, STILL_E_FORMAT,
                            "%s: special_tokens[%zu] has no token_str", what, i);
        STI_TRY(
            add_special(tk, json_string_value(text), json_string_length(text), err));
    }
    while (tk->v.n < count) {
        char name[32];
        const int n = snprintf(name, sizeof name, "<SPECIAL_%d>", tk->v.n);
        STI_TRY(add_special(tk, name, (size_t)n, err));
    }
    return STILL_OK;
}

static still_status add_ranks(still_tokenizer *tk, const json_t *vocab, size_t n,
                              still_error *err)
{
    char *bytes = sti_alloc(STI_MAX_PIECE, 1);
    still_status st =
        bytes ? STILL_OK : sti_fail_memory(err, what, (size_t)STI_MAX_PIECE);
    for (size_t i = 0; i < n && st == STILL_OK; i++) {
        const json_t *o = json_array_get(vocab, i);
        const json_t *text = json_object_get(o, "token_bytes");
        const size_t coded = json_string_length(text);
        size_t len = 0;
        st = check_rank(o, "vocab", i, err);
        if (st != STILL_OK) break;
        if (coded > STI_MAX_PIECE ||
            !sti_bytes_of_base64(json_string_value(text), coded, bytes, &len) || !len)
            st = sti_fail(err, STILL_E_FORMAT,
                          "%s: vocab[%zu] has no token_bytes in base64", what, i);
        else
            st = sti_tokenizer_add_bytes(tk, bytes, len, err);
    }
    free(bytes);
    return st;
}

static still_status read_root(still_tokenizer *tk, const json_t *root, still_error *err)
{
    const json_t *config = json_object_get(root, "config");
    const json_t *vocab = json_object_get(root, "vocab");
    const json_t *pattern = json_object_get(config, "pattern");
    int64_t total, special;
    if (!json_is_array(vocab) || !json_string_length(pattern))
        return sti_fail(err, STILL_E_FORMAT, "%s: lacks vocab or config.pattern", what);
    STI_TRY(sti_json_int(what, config, "default_num_special_tokens", 0, MOST_SPECIAL,
                         &special, err));
    STI_TRY(sti_json_int(what, config, "default_vocab_size", special, STI_MAX_TOKENS,
                         &total, err));
    if ((size_t)(total - special) > json_array_size(vocab))
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: default_vocab_size is %lld, but there are %lld special "
                        "tokens and %zu others",
                        what, (long long)total, (long long)special,
                        json_array_size(vocab));
    STI_TRY(add_specials(tk, root, config, special, err));
    STI_TRY(add_ranks(tk, vocab, (size_t)(total - special), err));
    STI_TRY(sti_tokenizer_check_bytes(tk, what, err));
    STI_TRY(sti_split_add(&tk->split, json_string_value(pattern),
                          json_string_length(pattern), err));
    tk->ignore_merges = true; /* tiktoken looks a piece up before it merges */
    STI_TRY(sti_tokenizer_index(tk, NULL, err));
    tk->bos = sti_tokenizer_special_id(tk, "<s>", 3);
    tk->eos = sti_tokenizer_special_id(tk, "</s>", 4);
    tk->add_bos = true;
    return sti_tokenizer_merges_by_id(tk, err);
}

still_status sti_tokenizer_load_tekken(still_tokenizer *tk, const char *p, size_t n,
                                       still_error *err)
{
    json_t *root;
    STI_TRY(sti_json_read(what, p, n, STI_JSON_NUL, &root, err));
    still_status st = read_root(tk, root, err);
    json_decref(root);
    return st;
}
