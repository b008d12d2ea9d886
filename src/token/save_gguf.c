/* save_gguf.c - a tokenizer as GGUF metadata, for models that came as a folder. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "token/save.h"

/* Strings of an array, consecutive. Offsets rather than pointers, as the text may
 * move. */
typedef struct strings {
    sti_buf text;
    sti_str *s;
    size_t n;
} strings;

static still_status strings_new(strings *l, size_t capacity, still_error *err)
{
    *l = (strings){.s = sti_alloc(capacity ? capacity : 1, sizeof *l->s)};
    return l->s ? STILL_OK : sti_fail_memory(err, "tokenizer", capacity * sizeof *l->s);
}

static void strings_add(strings *l, const char *p, size_t n)
{
    l->s[l->n++].n = n;
    sti_buf_put(&l->text, p, n);
}

/* Writes the array and frees it. */
static still_status strings_write(strings *l, const char *key, sti_writer *w,
                                  still_error *err)
{
    const char *at = l->text.p;
    for (size_t i = 0; i < l->n; at += l->s[i++].n) l->s[i].p = at;
    still_status st = l->text.failed ? sti_fail_memory(err, "tokenizer", l->text.n)
                                     : sti_writer_meta_strs(w, key, l->s, l->n, err);
    sti_buf_free(&l->text);
    free(l->s);
    return st;
}

static still_status write_tokens(const still_tokenizer *tk, int vocab, sti_writer *w,
                                 still_error *err)
{
    strings list;
    sti_buf b = {0};
    int32_t *kind = sti_alloc((size_t)vocab, sizeof *kind);
    if (!kind) return sti_fail_memory(err, "tokenizer", (size_t)vocab * sizeof *kind);
    still_status st = strings_new(&list, (size_t)vocab, err);
    if (st == STILL_OK) {
        for (int32_t id = 0; id < vocab; id++) {
            kind[id] = id < tk->n ? tk->v.kind[id] : STI_KIND_UNUSED;
            sti_buf_clear(&b);
            if (id < tk->n)
                sti_spell_token(tk, id, &b);
            else
                sti_buf_printf(&b, "[PAD%d]", (int)id);
            strings_add(&list, b.p ? b.p : "", b.n);
        }
        list.text.failed |= b.failed;
        st = strings_write(&list, "tokenizer.ggml.tokens", w, err);
    }
    sti_buf_free(&b);
    if (st == STILL_OK)
        st = sti_writer_meta_i32s(w, "tokenizer.ggml.token_type", kind, (size_t)vocab,
                                  err);
    free(kind);
    return st;
}

static still_status write_merges(const still_tokenizer *tk, const sti_pair *merge,
                                 size_t n, sti_writer *w, still_error *err)
{
    strings list;
    sti_buf left = {0}, right = {0};
    STI_TRY(strings_new(&list, n, err));
    for (size_t i = 0; i < n; i++) {
        sti_spell_token(tk, merge[i].left, &left);
        sti_spell_token(tk, merge[i].right, &right);
        sti_buf_put(&left, " ", 1);
        sti_buf_put(&left, right.p, right.n);
        list.text.failed |= left.failed || right.failed;
        strings_add(&list, left.p ? left.p : "", left.n);
    }
    sti_buf_free(&left);
    sti_buf_free(&right);
    return strings_write(&list, "tokenizer.ggml.merges", w, err);
}

/* SentencePiece merges by the score of the result, so minus the rank of the merge that
 * makes a token is a score that keeps their order. */
static still_status write_scores(const still_tokenizer *tk, int vocab,
                                 const sti_pair *merge, size_t n, sti_writer *w,
                                 still_error *err)
{
    float *score = sti_alloc((size_t)vocab, sizeof *score);
    if (!score) return sti_fail_memory(err, "scores", (size_t)vocab * sizeof *score);
    for (int32_t id = 0; id < vocab; id++)
        score[id] = id < tk->n && tk->v.kind[id] != STI_KIND_NORMAL ? 0 : -1e6f;
    for (size_t i = n; i-- > 0;) score[merge[i].id] = -(float)merge[i].rank;
    const sti_meta m = {.key = (char *)"tokenizer.ggml.scores",
                        .type = STI_META_ARRAY,
                        .elem = STI_META_F32,
                        .count = (uint64_t)vocab,
                        .data = score};
    still_status st = sti_writer_meta_copy(w, &m, err);
    free(score);
    return st;
}

static still_status write_rule(const still_tokenizer *tk, sti_writer *w,
                               still_error *err)
{
    const sti_rule *rule, like = {.ignores_merges = tk->ignore_merges, .nfc = tk->nfc};
    STI_TRY(sti_split_rule_of(&tk->split, &like, &rule, err));
    if (!rule || rule->nfc != tk->nfc || tk->space_in_front)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "the tokenizer cuts text by a rule that GGUF has no name for");
    return sti_writer_meta_str(w, "tokenizer.ggml.pre", rule->name, err);
}

static still_status write_id(sti_writer *w, const char *key, int32_t id,
                             still_error *err)
{
    return id < 0 ? STILL_OK : sti_writer_meta_u32(w, key, (uint32_t)id, err);
}

still_status sti_tokenizer_save_gguf(const still_tokenizer *tk, int vocab,
                                     sti_writer *w, still_error *err)
{
    if (tk->n > vocab)
        return sti_fail(err, STILL_E_FORMAT,
                        "the tokenizer has %d tokens, the model's embedding %d rows",
                        tk->n, vocab);
    STI_TRY(sti_writer_meta_str(w, "tokenizer.ggml.model", tk->spm ? "llama" : "gpt2",
                                err));
    if (!tk->spm) STI_TRY(write_rule(tk, w, err));
    STI_TRY(write_tokens(tk, vocab, w, err));
    sti_pair *merge;
    size_t n;
    still_status st = sti_merges_in_order(tk, &merge, &n, err);
    if (st == STILL_OK)
        st = tk->spm ? write_scores(tk, vocab, merge, n, w, err)
                     : write_merges(tk, merge, n, w, err);
    free(merge);
    STI_TRY(st);
    STI_TRY(write_id(w, "tokenizer.ggml.bos_token_id", tk->bos, err));
    STI_TRY(write_id(w, "tokenizer.ggml.eos_token_id", tk->eos, err));
    STI_TRY(write_id(w, "tokenizer.ggml.unknown_token_id", tk->unknown, err));
    STI_TRY(sti_writer_meta_bool(w, "tokenizer.ggml.add_bos_token", tk->add_bos, err));
    STI_TRY(sti_writer_meta_bool(w, "tokenizer.ggml.add_space_prefix",
                                 tk->spm && tk->prefix != STI_PREFIX_NONE, err));
    if (!tk->chat_template) return STILL_OK;
    return sti_writer_meta_str(w, "tokenizer.chat_template", tk->chat_template, err);
}
