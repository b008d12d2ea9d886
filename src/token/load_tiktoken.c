/* load_tiktoken.c - tiktoken rank files, as Llama 3 ships them: a line is the base64
 * of a token's bytes, a space, its rank (also its id). Such a file has neither a
 * splitting rule nor special tokens; both are Llama 3's. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "token/tokenizer.h"

static int sextet(char c)
{
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Decodes n characters of padded base64 into out (3 bytes for 4); false if invalid. */
static bool base64(const char *p, size_t n, char *out, size_t *n_out)
{
    size_t k = 0, pad = 0;
    if (!n || n % 4) return false;
    while (pad < 2 && p[n - 1 - pad] == '=') pad++;
    for (size_t i = 0; i < n; i += 4) {
        uint32_t bits = 0;
        for (size_t j = i; j < i + 4; j++) {
            int v = j < n - pad ? sextet(p[j]) : 0;
            if (v < 0) return false;
            bits = bits << 6 | (uint32_t)v;
        }
        for (int shift = 16; shift >= 0; shift -= 8) out[k++] = (char)(bits >> shift);
    }
    *n_out = k - pad;
    return true;
}

static still_status read_line(still_tokenizer *tk, const char *p, size_t n, char *bytes,
                              still_error *err)
{
    sti_vocab *v = &tk->v;
    const char *space = memchr(p, ' ', n);
    size_t coded = space ? (size_t)(space - p) : 0, len, rank = 0;
    bool good = space && coded + 1 < n && coded <= STI_MAX_PIECE &&
                base64(p, coded, bytes, &len) && len;
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
    if (len == 1 && v->byte_id[(unsigned char)bytes[0]] < 0)
        v->byte_id[(unsigned char)bytes[0]] = v->n;
    return sti_vocab_add(v, bytes, len, STI_KIND_NORMAL, err);
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

static still_status read_ranks(still_tokenizer *tk, const char *p, size_t n,
                               still_error *err)
{
    enum { LLAMA4_RANKS = 200000 };
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
    if (st == STILL_OK && tk->v.n == LLAMA4_RANKS)
        st = sti_fail(
            err, STILL_E_UNSUPPORTED,
            "tiktoken ranks: %d of them are Llama 4's, whose splitting rule is "
            "not known here",
            LLAMA4_RANKS);
    return st;
}

still_status sti_tokenizer_load_tiktoken(still_tokenizer *tk, const char *p, size_t n,
                                         still_error *err)
{
    STI_TRY(read_ranks(tk, p, n, err));
    int ranks = tk->v.n;
    for (int b = 0; b < 256; b++)
        if (tk->v.byte_id[b] < 0)
            return sti_fail(err, STILL_E_FORMAT,
                            "tiktoken ranks: byte 0x%02X has no token among the %d", b,
                            ranks);
    STI_TRY(add_llama3_specials(tk, err));
    STI_TRY(sti_tokenizer_index(tk, err));
    STI_TRY(sti_split_add(&tk->split, sti_split_llama3, strlen(sti_split_llama3), err));
    tk->ignore_merges = true;
    uint32_t *rank = sti_alloc((size_t)tk->v.n, sizeof *rank);
    if (!rank) return sti_fail_memory(err, "tiktoken ranks", (size_t)tk->v.n * 4);
    for (int i = 0; i < tk->v.n; i++) rank[i] = (uint32_t)i;
    still_status st = sti_bpe_learn(&tk->bpe, &tk->v, rank, err);
    free(rank);
    return st;
}
