/* save_json.c - a tokenizer as the files of a Hugging Face folder, for models that came
 * as GGUF.
 *
 * Splitting rules are written as regular expressions. A value that could not be built is
 * NULL, and so is what it would be part of: memory is checked once, at the end. */
#include <stdlib.h>
#include <string.h>

#include "token/save.h"

static still_status write_file(const char *folder, const char *name, json_t *o,
                               still_error *err)
{
    sti_buf path = {0};
    sti_buf_printf(&path, "%s/%s", folder, name);
    char *text = sti_json_text(o, JSON_INDENT(2));
    still_status st = text && !path.failed ? sti_write_text(path.p, text, err)
                                           : sti_fail_memory(err, name, path.n);
    json_decref(o);
    free(text);
    sti_buf_free(&path);
    return st;
}

/* A token as a JSON string; NULL if memory ran out or it is no UTF-8. */
static json_t *token_json(const still_tokenizer *tk, int32_t id, sti_buf *b)
{
    sti_spell_token(tk, id, b);
    return b->failed ? NULL : json_stringn(b->p, b->n);
}

/* ---- The model: vocabulary and merges ------------------------------------ */

static json_t *vocabulary(const still_tokenizer *tk)
{
    json_t *o = json_object();
    sti_buf b = {0};
    for (int32_t id = 0; id < tk->n && o; id++) {
        sti_spell_token(tk, id, &b);
        if (!b.failed && (!b.p || strlen(b.p) != b.n)) continue; /* contains NUL */
        if (b.failed || !json_object_get(o, b.p)) /* of equal ones, the first */
            sti_json_set(&o, b.p, b.failed ? NULL : json_integer(id));
    }
    sti_buf_free(&b);
    return o;
}

static json_t *merge_list(const still_tokenizer *tk)
{
    sti_pair *merge;
    size_t n;
    if (sti_merges_in_order(tk, &merge, &n, NULL) != STILL_OK) return NULL;
    json_t *list = json_array();
    sti_buf b = {0};
    for (size_t i = 0; i < n && list; i++) {
        json_t *left = token_json(tk, merge[i].left, &b);
        json_t *right = token_json(tk, merge[i].right, &b);
        sti_json_append(&list, json_pack("[o,o]", left, right));
    }
    free(merge);
    sti_buf_free(&b);
    return list;
}

static json_t *bpe_model(const still_tokenizer *tk)
{
    sti_buf b = {0};
    json_t *unknown = tk->unknown < 0 ? json_null() : token_json(tk, tk->unknown, &b);
    json_t *o = json_pack("{s:s,s:n,s:o,s:n,s:n,s:b,s:b,s:b,s:o,s:o}", "type", "BPE",
                          "dropout", "unk_token", unknown, "continuing_subword_prefix",
                          "end_of_word_suffix", "fuse_unk", tk->fuse_unknown,
                          "byte_fallback", tk->spm, "ignore_merges", tk->ignore_merges,
                          "vocab", vocabulary(tk), "merges", merge_list(tk));
    sti_buf_free(&b);
    return o;
}

static json_t *added_tokens(const still_tokenizer *tk)
{
    json_t *list = json_array();
    sti_buf b = {0};
    for (int32_t id = 0; id < tk->n; id++) {
        const sti_kind kind = tk->v.kind[id];
        const unsigned char strip = tk->strip ? tk->strip[id] : 0;
        if (kind != STI_KIND_CONTROL && kind != STI_KIND_USER &&
            kind != STI_KIND_UNKNOWN)
            continue;
        sti_json_append(&list,
                        json_pack("{s:i,s:o,s:b,s:b,s:b,s:b,s:b}", "id", (int)id,
                                  "content", token_json(tk, id, &b), "single_word", 0,
                                  "lstrip", strip & STI_STRIP_LEFT, "rstrip",
                                  strip & STI_STRIP_RIGHT, "normalized",
                                  kind == STI_KIND_USER && tk->spm && tk->user_inside &&
                                      tk->prefix == STI_PREFIX_NONE,
                                  "special", kind != STI_KIND_USER));
    }
    sti_buf_free(&b);
    return list;
}

/* ---- What happens before and after it ------------------------------------ */

static json_t *byte_level(bool prefix, bool regex)
{
    return json_pack("{s:s,s:b,s:b,s:b}", "type", "ByteLevel", "add_prefix_space",
                     prefix, "trim_offsets", 1, "use_regex", regex);
}

static json_t *splits(const still_tokenizer *tk, const sti_rule *rule)
{
    json_t *list = json_array();
    for (size_t i = 0; i < sizeof rule->stage / sizeof *rule->stage; i++)
        if (rule->stage[i])
            sti_json_append(&list, json_pack("{s:s,s:{s:s},s:s,s:b}", "type", "Split",
                                             "pattern", "Regex", rule->stage[i],
                                             "behavior", "Isolated", "invert", 0));
    sti_json_append(&list, byte_level(tk->space_in_front, false));
    return json_pack("{s:s,s:o}", "type", "Sequence", "pretokenizers", list);
}

static json_t *spm_normalizer(const still_tokenizer *tk)
{
    json_t *list = json_array();
    if (tk->prefix != STI_PREFIX_NONE)
        sti_json_append(&list, json_pack("{s:s,s:s}", "type", "Prepend", "prepend",
                                         "\xE2\x96\x81"));
    sti_json_append(&list, json_pack("{s:s,s:{s:s},s:s}", "type", "Replace", "pattern",
                                     "String", " ", "content", "\xE2\x96\x81"));
    return json_pack("{s:s,s:o}", "type", "Sequence", "normalizers", list);
}

static json_t *spm_decoder(const still_tokenizer *tk)
{
    json_t *list = json_pack("[{s:s,s:{s:s},s:s},{s:s},{s:s}]", "type", "Replace",
                             "pattern", "String", "\xE2\x96\x81", "content", " ",
                             "type", "ByteFallback", "type", "Fuse");
    if (tk->prefix != STI_PREFIX_NONE)
        sti_json_append(&list, json_pack("{s:s,s:s,s:i,s:i}", "type", "Strip",
                                         "content", " ", "start", 1, "stop", 0));
    return json_pack("{s:s,s:o}", "type", "Sequence", "decoders", list);
}

/* BOS in front, where the tokenizer adds it. */
static json_t *bos_template(const still_tokenizer *tk)
{
    sti_buf b = {0};
    json_t *name = token_json(tk, tk->bos, &b);
    const char *text = name ? json_string_value(name) : "";
    json_t *o = json_pack(
        "{s:s,s:[{s:{s:s,s:i}},{s:{s:s,s:i}}],"
        "s:[{s:{s:s,s:i}},{s:{s:s,s:i}},{s:{s:s,s:i}}],s:{s:{s:s,s:[i],s:[s]}}}",
        "type", "TemplateProcessing", "single", "SpecialToken", "id", text, "type_id",
        0, "Sequence", "id", "A", "type_id", 0, "pair", "SpecialToken", "id", text,
        "type_id", 0, "Sequence", "id", "A", "type_id", 0, "Sequence", "id", "B",
        "type_id", 1, "special_tokens", text, "id", text, "ids", (int)tk->bos, "tokens",
        text);
    json_decref(name);
    sti_buf_free(&b);
    return o;
}

static json_t *post_processor(const still_tokenizer *tk)
{
    if (tk->add_bos) return bos_template(tk);
    return tk->spm ? json_null() : byte_level(true, true);
}

/* ---- The files ----------------------------------------------------------- */

static still_status save_tokenizer(const still_tokenizer *tk, const char *folder,
                                   still_error *err)
{
    const sti_rule *rule = NULL, like = {.nfc = tk->nfc};
    if (!tk->spm) {
        STI_TRY(sti_split_rule_of(&tk->split, &like, &rule, err));
        if (!rule)
            return sti_fail(err, STILL_E_UNSUPPORTED,
                            "the tokenizer cuts text by a rule that has no name");
    }
    json_t *decoder = tk->spm ? spm_decoder(tk) : byte_level(true, true);
    json_t *normal = tk->spm   ? spm_normalizer(tk)
                     : tk->nfc ? json_pack("{s:s}", "type", "NFC")
                               : json_null();
    json_t *o = json_pack(
        "{s:s,s:n,s:n,s:o,s:o,s:o,s:o,s:o,s:o}", "version", "1.0", "truncation",
        "padding", "added_tokens", added_tokens(tk), "normalizer", normal,
        "pre_tokenizer", tk->spm ? json_null() : splits(tk, rule), "post_processor",
        post_processor(tk), "decoder", decoder, "model", bpe_model(tk));
    return write_file(folder, "tokenizer.json", o, err);
}

static still_status save_settings(const still_tokenizer *tk, const char *folder,
                                  still_error *err)
{
    json_t *o =
        json_pack("{s:s,s:b,s:b}", "tokenizer_class", "PreTrainedTokenizerFast",
                  "add_bos_token", tk->add_bos, "clean_up_tokenization_spaces", 0);
    const struct {
        const char *key;
        int32_t id;
    } token[] = {
        {"bos_token", tk->bos}, {"eos_token", tk->eos}, {"unk_token", tk->unknown}};
    sti_buf b = {0};
    for (size_t i = 0; i < sizeof token / sizeof *token; i++)
        if (token[i].id >= 0)
            sti_json_set(&o, token[i].key, token_json(tk, token[i].id, &b));
    if (tk->chat_template)
        sti_json_set(&o, "chat_template", json_string(tk->chat_template));
    sti_buf_free(&b);
    return write_file(folder, "tokenizer_config.json", o, err);
}

static still_status save_generation(const still_tokenizer *tk, const char *folder,
                                    still_error *err)
{
    json_t *ends = json_array();
    for (size_t i = 0; i < tk->n_end; i++)
        sti_json_append(&ends, json_integer(tk->end[i]));
    json_t *o = tk->bos < 0 ? json_pack("{s:o}", "eos_token_id", ends)
                            : json_pack("{s:i,s:o}", "bos_token_id", (int)tk->bos,
                                        "eos_token_id", ends);
    return write_file(folder, "generation_config.json", o, err);
}

still_status sti_tokenizer_save_json(const still_tokenizer *tk, const char *folder,
                                     still_error *err)
{
    STI_TRY(save_tokenizer(tk, folder, err));
    STI_TRY(save_settings(tk, folder, err));
    return save_generation(tk, folder, err);
}
