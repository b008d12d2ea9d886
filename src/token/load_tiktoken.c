/* load_tiktoken.c - tiktoken rank files, as Llama 3 and Qwen ship them: a line is the
 * base64 of a token's bytes, a space, its rank (also its id). Such a file has neither a
 * splitting rule nor special tokens. The rule comes from outside; without one only Llama
 * 3's file is known, by its number of ranks. Special tokens go with the rule. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "token/tokenizer.h"

static still_status read_line(still_tokenizer *tk, const char *p, size_t n, char *bytes,
                              still_error *err)
{
    sti_vocab *v = &tk->v;
    const char *space = memchr(p, ' ', n);
    size_t coded = space ? (size_t)(space - p) : 0, len, rank = 0;
    bool good = space && coded + 1 < n && coded <= STI_MAX_PIECE &&
                sti_bytes_of_base64(p, coded, bytes, &len) && len;
    for (size_t i = coded + 1; good && i < n; i++) {
        good = p[i] >= '0' && p[i] <= '9' && rank < STI_MAX_TOKENS;
        rank = 10 * rank + (size_t)(p[i] - '0');
    }
    if (!good)
        return sti_fail(err, STILL_E_FORMAT,
                        "tiktoken ranks: line %d is no base64 token with a rank",
                        v->n + 1);
    if (rank != (size_t)v->n)
        return sti_fail(err, STILL_E_FORMAT,
                        "tiktoken ranks: line %d has rank %zu, expected %d", v->n + 1,
                        rank, v->n);
    return sti_tokenizer_add_bytes(tk, bytes, len, err);
}

/* Llama 3 has 256 special tokens after the ranks, most of them reserved. */
static still_status add_llama3_specials(still_tokenizer *tk, still_error *err)
{
    static const char *const named[] = {
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|reserved_special_token_0|>",
        "<|reserved_special_token_1|>",
        "<|finetune_right_pad_id|>",
        "<|step_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
        "<|image|>",
    };
    enum { NAMED = sizeof named / sizeof *named, ALL = 256 };
    tk->bos = tk->v.n;
    tk->eos = tk->v.n + 1;
    tk->add_bos = true;
    for (int i = 0; i < ALL; i++) {
        char name[48];
        if (i < NAMED)
            snprintf(name, sizeof name, "%s", named[i]);
        else
            snprintf(name, sizeof name, "<|reserved_special_token_%d|>", i - NAMED + 2);
        STI_TRY(sti_vocab_add(&tk->v, name, strlen(name), STI_KIND_CONTROL, err));
    }
    return STILL_OK;
}

/* Those that all of Qwen's vocabularies have; what follows them differs. */
static still_status add_qwen_specials(still_tokenizer *tk, still_error *err)
{
    static const char *const named[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
    for (size_t i = 0; i < sizeof named / sizeof *named; i++)
        STI_TRY(
            sti_vocab_add(&tk->v, named[i], strlen(named[i]), STI_KIND_CONTROL, err));
    return STILL_OK;
}

static still_status read_ranks(still_tokenizer *tk, const char *p, size_t n,
                               still_error *err)
{
    char *bytes = sti_alloc(STI_MAX_PIECE + 4, 1);
    if (!bytes) return sti_fail_memory(err, "tiktoken ranks", STI_MAX_PIECE);
    still_status st = STILL_OK;
    for (size_t i = 0; i < n && st == STILL_OK;) {
        const char *newline = memchr(p + i, '\n', n - i);
        size_t len = newline ? (size_t)(newline - p) - i : n - i, next = i + len + 1;
        if (len && p[i + len - 1] == '\r') len--;
        if (len) st = read_line(tk, p + i, len, bytes, err);
        i = next;
    }
    free(bytes);
    return st;
}

still_status sti_tokenizer_load_tiktoken(still_tokenizer *tk, const char *p, size_t n,
                                         const char *rule, still_error *err)
{
    enum { LLAMA3_RANKS = 128000 };
    const sti_rule *found;
    STI_TRY(read_ranks(tk, p, n, err));
    STI_TRY(sti_tokenizer_check_bytes(tk, "tiktoken ranks", err));
    if (!rule && tk->v.n != LLAMA3_RANKS)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "tiktoken ranks: %d of them do not say how text is split; name "
                        "the rule (--split; llama-bpe or qwen2, for example)",
                        tk->v.n);
    if (!rule) rule = "llama-bpe";
    STI_TRY(sti_split_add_named(&tk->split, rule, strlen(rule), &found, err));
    tk->nfc = found->nfc;
    tk->ignore_merges = true; /* tiktoken looks a piece up before it merges */
    if (found->stage[0] == sti_split_llama3 && found->ignores_merges)
        STI_TRY(add_llama3_specials(tk, err));
    if (!strcmp(found->name, "qwen2")) STI_TRY(add_qwen_specials(tk, err));
    STI_TRY(sti_tokenizer_index(tk, NULL, err));
    return sti_tokenizer_merges_by_id(tk, err);
}
