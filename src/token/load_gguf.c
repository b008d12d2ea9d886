/* load_gguf.c - tokenizers in GGUF metadata, keys "tokenizer.ggml.*".
 *
 * model "gpt2" is byte-level BPE with a list of merges and a splitting rule by name
 * (pre); model "llama" is SentencePiece BPE with scores. */
#include <stdlib.h>
#include <string.h>

#include "token/tokenizer.h"

static bool is_string(const sti_meta *m, const char *value)
{
    return m && m->type == STI_META_STRING && m->str[0].n == strlen(value) &&
           !memcmp(m->str[0].p, value, m->str[0].n);
}

static bool read_flag(const sti_store *s, const char *key, bool otherwise)
{
    int64_t v;
    return sti_meta_int(sti_meta_find(s, key), &v) ? v != 0 : otherwise;
}

/* An id, -1 where the key is missing. */
static still_status read_id(const sti_store *s, const char *key, int n, int32_t *out,
                            still_error *err)
{
    int64_t v = -1;
    const sti_meta *m = sti_meta_find(s, key);
    if (m && (!sti_meta_int(m, &v) || v < -1 || v >= n) && v != UINT32_MAX)
        return sti_fail(err, STILL_E_FORMAT, "%s is not an id of the %d tokens", key,
                        n);
    *out = v == UINT32_MAX ? -1 : (int32_t)v;
    return STILL_OK;
}

/* An array of `count` elements (0: any number); NULL where the key is missing. */
static still_status read_array(const sti_store *s, const char *key, bool strings,
                               uint64_t count, const sti_meta **out, still_error *err)
{
    const sti_meta *m = *out = sti_meta_find(s, key);
    if (!m) return STILL_OK;
    if (m->type != STI_META_ARRAY || (m->elem == STI_META_STRING) != strings)
        return sti_fail(err, STILL_E_FORMAT, "%s is not an array of %s", key,
                        strings ? "strings" : "numbers");
    if (count && m->count != count)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s has %llu elements, the vocabulary has %llu", key,
                        (unsigned long long)m->count, (unsigned long long)count);
    return STILL_OK;
}

static still_status read_tokens(still_tokenizer *tk, const sti_store *s,
                                still_error *err)
{
    const sti_meta *tokens, *types;
    STI_TRY(read_array(s, "tokenizer.ggml.tokens", true, 0, &tokens, err));
    if (!tokens || !tokens->count)
        return sti_fail(err, STILL_E_FORMAT,
                        "tokenizer.ggml.tokens is missing or empty");
    STI_TRY(
        read_array(s, "tokenizer.ggml.token_type", false, tokens->count, &types, err));
    for (uint64_t i = 0; i < tokens->count; i++) {
        int64_t kind = STI_KIND_NORMAL;
        sti_str t = tokens->str[i];
        if (types && (!sti_meta_elem_int(types, i, &kind) || kind < STI_KIND_NORMAL ||
                      kind > STI_KIND_BYTE))
            return sti_fail(err, STILL_E_FORMAT,
                            "tokenizer.ggml.token_type[%llu] is not 1 to 6",
                            (unsigned long long)i);
        STI_TRY(tk->spm ? sti_tokenizer_add_spm(tk, t.p, t.n, (sti_kind)kind, err)
                        : sti_tokenizer_add_gpt2(tk, t.p, t.n, (sti_kind)kind, err));
    }
    return STILL_OK;
}

static still_status read_gpt2(still_tokenizer *tk, const sti_store *s, still_error *err)
{
    const sti_meta *merges, *pre = sti_meta_find(s, "tokenizer.ggml.pre");
    sti_str rule = {"default", 7};
    if (pre && pre->type == STI_META_STRING) rule = pre->str[0];
    const sti_rule *found;
    STI_TRY(sti_split_add_named(&tk->split, rule.p, rule.n, &found, err));
    tk->nfc = found->nfc;
    tk->ignore_merges = found->ignores_merges;
    tk->add_bos = tk->ignore_merges; /* Llama 3, Tekken; the file may say otherwise */
    STI_TRY(sti_tokenizer_index(tk, NULL, err));
    STI_TRY(read_array(s, "tokenizer.ggml.merges", true, 0, &merges, err));
    if (!merges)
        return sti_fail(err, STILL_E_FORMAT, "tokenizer.ggml.merges is missing");
    if (merges->count >= UINT32_MAX)
        return sti_fail(err, STILL_E_LIMIT, "tokenizer.ggml.merges is too long");
    STI_TRY(sti_bpe_reserve(&tk->bpe, (size_t)merges->count, err));
    for (uint64_t i = 0; i < merges->count; i++) {
        sti_str m = merges->str[i];
        const char *space = m.n > 1 ? memchr(m.p + 1, ' ', m.n - 1) : NULL;
        if (!space)
            return sti_fail(
                err, STILL_E_FORMAT,
                "tokenizer.ggml.merges[%llu] has no space between two tokens",
                (unsigned long long)i);
        sti_str left = {m.p, (size_t)(space - m.p)};
        sti_str right = {space + 1, m.n - left.n - 1};
        STI_TRY(sti_tokenizer_add_merge(tk, left, right, (uint32_t)i, err));
    }
    return sti_bpe_mark_whole(&tk->bpe, &tk->v, err);
}

static still_status read_llama(still_tokenizer *tk, const sti_store *s,
                               still_error *err)
{
    const sti_meta *scores;
    const sti_meta *charsmap = sti_meta_find(s, "tokenizer.ggml.precompiled_charsmap");
    if ((charsmap && charsmap->count) ||
        read_flag(s, "tokenizer.ggml.remove_extra_whitespaces", false))
        return sti_fail(
            err, STILL_E_UNSUPPORTED,
            "the tokenizer rewrites characters or removes spaces; only text "
            "taken as it is can be read");
    tk->user_inside = tk->fuse_unknown = tk->add_bos = true;
    tk->prefix = read_flag(s, "tokenizer.ggml.add_space_prefix", true)
                     ? STI_PREFIX_FIRST
                     : STI_PREFIX_NONE;
    STI_TRY(sti_tokenizer_index(tk, NULL, err));
    size_t n = (size_t)tk->n;
    STI_TRY(read_array(s, "tokenizer.ggml.scores", false, n, &scores, err));
    if (!scores)
        return sti_fail(err, STILL_E_FORMAT, "tokenizer.ggml.scores is missing");
    float *score = sti_alloc(n, sizeof *score);
    if (!score) return sti_fail_memory(err, "scores", n * sizeof *score);
    for (size_t i = 0; i < n; i++) {
        double v = 0;
        sti_meta_elem_float(scores, i, &v);
        score[i] = (float)v;
    }
    still_status st = sti_tokenizer_merges_by_score(tk, score, err);
    free(score);
    return st;
}

still_status sti_tokenizer_load_gguf(still_tokenizer *tk, const sti_store *s,
                                     still_error *err)
{
    const sti_meta *model = sti_meta_find(s, "tokenizer.ggml.model");
    const sti_meta *chat = sti_meta_find(s, "tokenizer.chat_template");
    int32_t eot;
    tk->spm = is_string(model, "llama");
    if (!tk->spm && !is_string(model, "gpt2")) {
        bool named = model && model->type == STI_META_STRING;
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "tokenizer.ggml.model is '%.*s', expected 'gpt2' or 'llama'",
                        named && model->str[0].n < 64 ? (int)model->str[0].n : 1,
                        named ? model->str[0].p : "?");
    }
    STI_TRY(read_tokens(tk, s, err));
    STI_TRY(tk->spm ? read_llama(tk, s, err) : read_gpt2(tk, s, err));
    STI_TRY(read_id(s, "tokenizer.ggml.bos_token_id", tk->n, &tk->bos, err));
    STI_TRY(read_id(s, "tokenizer.ggml.eos_token_id", tk->n, &tk->eos, err));
    STI_TRY(read_id(s, "tokenizer.ggml.eot_token_id", tk->n, &eot, err));
    STI_TRY(sti_tokenizer_add_end(tk, eot, err));
    /* Byte-level text is never unknown: there the key means something else. */
    if (tk->spm)
        STI_TRY(
            read_id(s, "tokenizer.ggml.unknown_token_id", tk->n, &tk->unknown, err));
    tk->add_bos = read_flag(s, "tokenizer.ggml.add_bos_token", tk->add_bos);
    if (chat && chat->type == STI_META_STRING) {
        tk->chat_template = sti_strndup(chat->str[0].p, chat->str[0].n);
        if (!tk->chat_template)
            return sti_fail_memory(err, "chat template", chat->str[0].n);
    }
    return STILL_OK;
}
