/* load_json.c - Hugging Face tokenizer.json with a BPE model.
 *
 * Two families are read: byte-level (a ByteLevel pre-tokenizer, with splitting rules
 * before it) and SentencePiece-like (spaces become U+2581 by a normalizer or by
 * Metaspace, unknown characters become byte tokens). Anything else in a file is an
 * error that names it. */
#include <stdlib.h>
#include <string.h>

#include "token/tokenizer.h"

static const char *str(const json_t *o, const char *key)
{
    const char *s = json_string_value(json_object_get(o, key));
    return s ? s : "";
}

static bool is_type(const json_t *o, const char *type)
{
    return !strcmp(str(o, "type"), type);
}

static bool flag(const json_t *o, const char *key, bool otherwise)
{
    const json_t *v = json_object_get(o, key);
    return json_is_boolean(v) ? json_is_true(v) : otherwise;
}

static still_status unsupported(still_error *err, const char *what, const json_t *o)
{
    const char *type = str(o, "type");
    return sti_fail(err, STILL_E_UNSUPPORTED,
                    "tokenizer.json: %s '%.64s' cannot be read as it is set here", what,
                    *type ? type : "(no type)");
}

/* Steps of a Sequence, or the object itself as the only step. */
static size_t steps(const json_t *o, const char *list)
{
    if (!json_is_object(o)) return 0;
    return is_type(o, "Sequence") ? json_array_size(json_object_get(o, list)) : 1;
}

static const json_t *step(const json_t *o, const char *list, size_t i)
{
    return is_type(o, "Sequence") ? json_array_get(json_object_get(o, list), i) : o;
}

/* ---- Tokens -------------------------------------------------------------- */

typedef struct entry {
    const char *text; /* NULL: the id is not used */
    bool added, inside;
    sti_kind kind;
    unsigned char strip;
} entry;

typedef struct table {
    entry *e;
    size_t n;
} table;

static still_status read_index(const json_t *v, size_t limit, const char *token,
                               size_t *id, still_error *err)
{
    json_int_t i = json_is_integer(v) ? json_integer_value(v) : -1;
    if (i < 0 || (uint64_t)i >= limit)
        return sti_fail(err, STILL_E_FORMAT,
                        "tokenizer.json: id of token '%.64s' is not from 0 to %zu",
                        token, limit - 1);
    *id = (size_t)i;
    return STILL_OK;
}

/* limit: there cannot be more ids than the file has bytes. */
static still_status read_entries(const still_tokenizer *tk, json_t *vocab,
                                 json_t *added, const json_t *model, size_t limit,
                                 table *t, still_error *err)
{
    const char *key, *unknown = str(model, "unk_token");
    bool bytes = flag(model, "byte_fallback", false);
    json_t *v;
    size_t i, id;
    json_object_foreach(vocab, key, v)
    {
        STI_TRY(read_index(v, limit, key, &id, err));
        if (id >= t->n) t->n = id + 1;
    }
    json_array_foreach(added, i, v)
    {
        STI_TRY(
            read_index(json_object_get(v, "id"), limit, str(v, "content"), &id, err));
        if (id >= t->n) t->n = id + 1;
    }
    t->e = sti_alloc(t->n, sizeof *t->e);
    if (!t->e) return sti_fail_memory(err, "tokenizer.json", t->n * sizeof *t->e);
    json_object_foreach(vocab, key, v)
    {
        entry *e = &t->e[json_integer_value(v)];
        bool byte = bytes && sti_byte_of_name(key, strlen(key)) >= 0;
        *e = (entry){.text = key, .kind = byte ? STI_KIND_BYTE : STI_KIND_NORMAL};
        if (tk->spm && *unknown && !strcmp(key, unknown)) e->kind = STI_KIND_UNKNOWN;
    }
    json_array_foreach(added, i, v)
    {
        entry *e = &t->e[json_integer_value(json_object_get(v, "id"))];
        if (flag(v, "single_word", false)) return unsupported(err, "single_word in", v);
        e->text = str(v, "content");
        e->added = true;
        e->inside = tk->user_inside && flag(v, "normalized", false);
        e->kind = flag(v, "special", false) ? STI_KIND_CONTROL : STI_KIND_USER;
        e->strip = (unsigned char)((flag(v, "lstrip", false) ? STI_STRIP_LEFT : 0) |
                                   (flag(v, "rstrip", false) ? STI_STRIP_RIGHT : 0));
    }
    return STILL_OK;
}

static still_status add_tokens(still_tokenizer *tk, const table *t, still_error *err)
{
    bool strip = false;
    for (size_t i = 0; i < t->n; i++) {
        const entry *e = &t->e[i];
        const char *text = e->text ? e->text : "";
        sti_kind kind = e->text ? e->kind : STI_KIND_UNUSED;
        STI_TRY(tk->spm ? sti_tokenizer_add_spm(tk, text, strlen(text), kind, err)
                        : sti_tokenizer_add_gpt2(tk, text, strlen(text), kind, err));
        strip |= e->strip != 0;
    }
    if (!strip) return STILL_OK;
    tk->strip = sti_alloc(t->n, 1);
    if (!tk->strip) return sti_fail_memory(err, "tokenizer.json", t->n);
    for (size_t i = 0; i < t->n; i++) tk->strip[i] = t->e[i].strip;
    return STILL_OK;
}

/* Added tokens are searched for in the text as it comes, before spaces become U+2581; if
 * normalized, after that. */
static still_status index_tokens(still_tokenizer *tk, const table *t, still_error *err)
{
    sti_added *added = sti_alloc(t->n, sizeof *added);
    if (!added) return sti_fail_memory(err, "tokenizer.json", t->n * sizeof *added);
    for (size_t i = 0; i < t->n; i++)
        if (t->e[i].added) added[i] = (sti_added){t->e[i].text, t->e[i].inside};
    still_status st = sti_tokenizer_index(tk, added, err);
    free(added);
    return st;
}

static int32_t id_of(const still_tokenizer *tk, const json_t *vocab, const char *text)
{
    const json_t *v = json_object_get(vocab, text);
    return v ? (int32_t)json_integer_value(v)
             : sti_tokenizer_special_id(tk, text, strlen(text));
}

/* ---- Merges: "left right", or ["left", "right"] -------------------------- */

static still_status read_merges(still_tokenizer *tk, json_t *merges, still_error *err)
{
    size_t i;
    json_t *m;
    if (!json_is_array(merges))
        return sti_fail(err, STILL_E_FORMAT, "tokenizer.json: model has no merges");
    STI_TRY(sti_bpe_reserve(&tk->bpe, json_array_size(merges), err));
    json_array_foreach(merges, i, m)
    {
        sti_str left = {0}, right = {0};
        const char *line = json_string_value(m);
        const char *space = line && *line ? strchr(line + 1, ' ') : NULL;
        if (space) {
            left = (sti_str){line, (size_t)(space - line)};
            right = (sti_str){space + 1, strlen(space + 1)};
        } else if (json_array_size(m) == 2) {
            left.p = json_string_value(json_array_get(m, 0));
            right.p = json_string_value(json_array_get(m, 1));
            if (left.p) left.n = strlen(left.p);
            if (right.p) right.n = strlen(right.p);
        }
        if (!left.p || !right.p || i >= UINT32_MAX)
            return sti_fail(err, STILL_E_FORMAT,
                            "tokenizer.json: merge %zu is not a pair of tokens", i);
        STI_TRY(sti_tokenizer_add_merge(tk, left, right, (uint32_t)i, err));
    }
    return sti_bpe_mark_whole(&tk->bpe, &tk->v, err);
}

/* ---- Splitting ----------------------------------------------------------- */

static still_status read_split(still_tokenizer *tk, const json_t *o, still_error *err)
{
    const json_t *pattern = json_object_get(o, "pattern");
    const char *regex = str(pattern, "Regex"), *behavior = str(o, "behavior");
    /* Matches and gaps both stay pieces; "Removed" and inverted keeps the matches of
     * patterns that leave no gaps. */
    bool keeps = !strcmp(behavior, "Isolated") ||
                 (!strcmp(behavior, "Removed") && flag(o, "invert", false));
    if (!*regex || !keeps) return unsupported(err, "pre_tokenizer", o);
    return sti_split_add(&tk->split, regex, strlen(regex), err);
}

static still_status read_byte_level(still_tokenizer *tk, const json_t *pre,
                                    still_error *err)
{
    const char *list = "pretokenizers";
    size_t n = steps(pre, list);
    bool digits = false; /* digits are split off one by one; not yet added as a stage */
    for (size_t i = 0; i < n; i++) {
        const json_t *o = step(pre, list, i);
        if (is_type(o, "Digits") && flag(o, "individual_digits", false) && i == 0) {
            digits = true;
        } else if (is_type(o, "ByteLevel")) {
            tk->space_in_front = flag(o, "add_prefix_space", true);
            if (tk->space_in_front && (tk->split.n || digits))
                return unsupported(err, "add_prefix_space in", o);
            if (!flag(o, "use_regex", true)) continue;
            const char *rule = digits ? sti_split_gpt2_digits : sti_split_gpt2;
            digits = false;
            STI_TRY(sti_split_add(&tk->split, rule, strlen(rule), err));
        } else {
            if (digits) STI_TRY(sti_split_add(&tk->split, "\\p{N}", 5, err));
            digits = false;
            if (is_type(o, "Split"))
                STI_TRY(read_split(tk, o, err));
            else if (is_type(o, "Digits"))
                STI_TRY(flag(o, "individual_digits", false)
                            ? sti_split_add(&tk->split, "\\p{N}", 5, err)
                            : sti_split_add(&tk->split, "\\p{N}+", 6, err));
            else
                return unsupported(err, "pre_tokenizer", o);
        }
    }
    return digits ? sti_split_add(&tk->split, "\\p{N}", 5, err) : STILL_OK;
}

static bool has_byte_level(const json_t *pre)
{
    for (size_t i = 0; i < steps(pre, "pretokenizers"); i++)
        if (is_type(step(pre, "pretokenizers", i), "ByteLevel")) return true;
    return false;
}

/* ---- SentencePiece-like -------------------------------------------------- */

static still_status read_normalizer(still_tokenizer *tk, const json_t *normalizer,
                                    bool *escapes, still_error *err)
{
    for (size_t i = 0; i < steps(normalizer, "normalizers"); i++) {
        const json_t *o = step(normalizer, "normalizers", i);
        const char *from = str(json_object_get(o, "pattern"), "String");
        if (is_type(o, "NFC") && !tk->spm)
            tk->nfc = true;
        else if (is_type(o, "Prepend") && tk->spm &&
                 !strcmp(str(o, "prepend"), "\xE2\x96\x81"))
            tk->prefix = STI_PREFIX_ALL;
        else if (is_type(o, "Replace") && tk->spm && !strcmp(from, " ") &&
                 !strcmp(str(o, "content"), "\xE2\x96\x81"))
            *escapes = true;
        else
            return unsupported(err, "normalizer", o);
    }
    return STILL_OK;
}

/* Gemma's: it cuts behind spaces, of which the normalizer left none. */
static bool cuts_nothing(const json_t *pre, bool escapes)
{
    return escapes && is_type(pre, "Split") &&
           !strcmp(str(json_object_get(pre, "pattern"), "String"), " ");
}

static still_status read_metaspace(still_tokenizer *tk, const json_t *pre,
                                   bool *escapes, still_error *err)
{
    if (!json_is_object(pre) || cuts_nothing(pre, *escapes)) return STILL_OK;
    const char *scheme = str(pre, "prepend_scheme"), *mark = str(pre, "replacement");
    if (!is_type(pre, "Metaspace") || strcmp(mark, "\xE2\x96\x81") != 0)
        return unsupported(err, "pre_tokenizer", pre);
    if (!*scheme) scheme = flag(pre, "add_prefix_space", true) ? "always" : "never";
    tk->prefix = !strcmp(scheme, "always")  ? STI_PREFIX_ALL
                 : !strcmp(scheme, "first") ? STI_PREFIX_FIRST
                                            : STI_PREFIX_NONE;
    tk->prefix_once = true;
    tk->each_space = flag(pre, "split", true);
    *escapes = true;
    return STILL_OK;
}

static still_status read_spm(still_tokenizer *tk, const json_t *root, still_error *err)
{
    bool escapes = false;
    STI_TRY(read_normalizer(tk, json_object_get(root, "normalizer"), &escapes, err));
    tk->user_inside = escapes && tk->prefix == STI_PREFIX_NONE;
    STI_TRY(read_metaspace(tk, json_object_get(root, "pre_tokenizer"), &escapes, err));
    if (escapes) return STILL_OK;
    return sti_fail(err, STILL_E_UNSUPPORTED,
                    "tokenizer.json: neither byte-level nor SentencePiece-like (no "
                    "ByteLevel, no replacement of spaces)");
}

/* ---- The whole ----------------------------------------------------------- */

/* BOS, where the post-processor puts a token in front. */
static void read_template(still_tokenizer *tk, const json_t *post)
{
    for (size_t i = 0; i < steps(post, "processors"); i++) {
        const json_t *o = step(post, "processors", i);
        if (!is_type(o, "TemplateProcessing")) continue;
        const json_t *head = json_array_get(json_object_get(o, "single"), 0);
        const char *name = str(json_object_get(head, "SpecialToken"), "id");
        int32_t id = sti_tokenizer_special_id(tk, name, strlen(name));
        if (id < 0) continue;
        tk->bos = id;
        tk->add_bos = true;
    }
}

static still_status read_root(still_tokenizer *tk, const json_t *root, size_t limit,
                              table *t, still_error *err)
{
    const json_t *model = json_object_get(root, "model");
    const json_t *pre = json_object_get(root, "pre_tokenizer");
    json_t *vocab = json_object_get(model, "vocab");
    bool none = false;
    if (!json_is_object(vocab) || (*str(model, "type") && !is_type(model, "BPE")))
        return unsupported(err, "model", model);
    if (*str(model, "continuing_subword_prefix") || *str(model, "end_of_word_suffix"))
        return unsupported(err, "prefix or suffix in model", model);
    tk->spm = !has_byte_level(pre);
    if (tk->spm) {
        STI_TRY(read_spm(tk, root, err));
    } else {
        STI_TRY(read_normalizer(tk, json_object_get(root, "normalizer"), &none, err));
        STI_TRY(read_byte_level(tk, pre, err));
    }
    STI_TRY(read_entries(tk, vocab, json_object_get(root, "added_tokens"), model, limit,
                         t, err));
    STI_TRY(add_tokens(tk, t, err));
    STI_TRY(index_tokens(tk, t, err));
    STI_TRY(read_merges(tk, json_object_get(model, "merges"), err));
    tk->ignore_merges = flag(model, "ignore_merges", false);
    tk->fuse_unknown = flag(model, "fuse_unk", false);
    if (*str(model, "unk_token"))
        tk->unknown = id_of(tk, vocab, str(model, "unk_token"));
    read_template(tk, json_object_get(root, "post_processor"));
    return STILL_OK;
}

still_status sti_tokenizer_load_json(still_tokenizer *tk, const char *p, size_t n,
                                     still_error *err)
{
    json_t *root;
    STI_TRY(sti_json_read("tokenizer.json", p, n, 0, &root, err));
    table t = {0};
    size_t limit = n < STI_MAX_TOKENS ? n : STI_MAX_TOKENS;
    still_status st = read_root(tk, root, limit, &t, err);
    free(t.e);
    json_decref(root);
    return st;
}
