/* open.c - finds the tokenizer at a path, by content rather than by name, and the
 * settings beside it in a Hugging Face folder. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/buf.h"
#include "token/tokenizer.h"

/* A file of a folder; *out is empty, with STILL_OK, if there is none. */
static still_status open_in(const char *folder, const char *name, sti_map *out,
                            still_error *err)
{
    sti_buf path = {0};
    struct stat st;
    *out = (sti_map){0};
    sti_buf_printf(&path, "%s/%s", folder, name);
    if (path.failed || !path.p) {
        sti_buf_free(&path);
        return sti_fail_memory(err, "path", strlen(folder) + strlen(name));
    }
    still_status status = STILL_OK;
    if (stat(path.p, &st) == 0) status = sti_map_open(path.p, out, err);
    sti_buf_free(&path);
    return status;
}

/* ---- Settings beside a tokenizer ----------------------------------------- */

/* A token in tokenizer_config.json: "text", or {"content": "text"}. */
static int32_t token_setting(const still_tokenizer *tk, const json_t *o,
                             const char *key, int32_t otherwise)
{
    const json_t *v = json_object_get(o, key);
    if (json_is_object(v)) v = json_object_get(v, "content");
    const char *text = json_string_value(v);
    int32_t id = text ? sti_tokenizer_special_id(tk, text, strlen(text)) : -1;
    return id >= 0 ? id : otherwise;
}

static still_status keep_template(still_tokenizer *tk, const char *p, size_t n,
                                  still_error *err)
{
    char *copy = sti_strndup(p, n);
    if (!copy) return sti_fail_memory(err, "chat template", n);
    free(tk->chat_template);
    tk->chat_template = copy;
    return STILL_OK;
}

/* A string, or a list of {"name", "template"} of which "default" is taken. */
static still_status read_chat(still_tokenizer *tk, const json_t *chat, still_error *err)
{
    size_t i;
    json_t *v;
    if (json_is_string(chat))
        return keep_template(tk, json_string_value(chat), json_string_length(chat),
                             err);
    json_array_foreach(chat, i, v)
    {
        const char *name = json_string_value(json_object_get(v, "name"));
        const json_t *text = json_object_get(v, "template");
        if (name && !strcmp(name, "default") && json_is_string(text))
            return keep_template(tk, json_string_value(text), json_string_length(text),
                                 err);
    }
    return STILL_OK;
}

static still_status read_tokenizer_config(still_tokenizer *tk, const json_t *o,
                                          still_error *err)
{
    const json_t *add = json_object_get(o, "add_bos_token");
    tk->bos = token_setting(tk, o, "bos_token", tk->bos);
    tk->eos = token_setting(tk, o, "eos_token", tk->eos);
    if (json_is_boolean(add)) tk->add_bos = json_is_true(add);
    return read_chat(tk, json_object_get(o, "chat_template"), err);
}

static still_status read_generation_config(still_tokenizer *tk, const json_t *o,
                                           still_error *err)
{
    const json_t *eos = json_object_get(o, "eos_token_id");
    size_t n = json_is_array(eos) ? json_array_size(eos) : 1;
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_is_array(eos) ? json_array_get(eos, i) : eos;
        json_int_t id = json_is_integer(v) ? json_integer_value(v) : -1;
        if (id < 0 || id >= tk->n) continue; /* ids of padded vocabularies */
        if (tk->eos < 0) tk->eos = (int32_t)id;
        STI_TRY(sti_tokenizer_add_end(tk, (int32_t)id, err));
    }
    return STILL_OK;
}

typedef still_status (*settings_fn)(still_tokenizer *, const json_t *, still_error *);

static still_status read_settings(still_tokenizer *tk, const char *folder,
                                  const char *name, settings_fn fn, still_error *err)
{
    sti_map m;
    json_t *o;
    STI_TRY(open_in(folder, name, &m, err));
    if (!m.data) return STILL_OK;
    still_status st = sti_json_read(name, (const char *)m.data, m.size, 0, &o, err);
    if (st != STILL_OK) sti_fail_prefix(err, st, "%s", folder);
    if (st == STILL_OK) st = fn(tk, o, err);
    json_decref(o);
    sti_map_close(&m);
    return st;
}

still_status sti_tokenizer_load_settings(still_tokenizer *tk, const char *folder,
                                         still_error *err)
{
    sti_map m;
    STI_TRY(
        read_settings(tk, folder, "tokenizer_config.json", read_tokenizer_config, err));
    STI_TRY(read_settings(tk, folder, "generation_config.json", read_generation_config,
                          err));
    STI_TRY(open_in(folder, "chat_template.jinja", &m, err));
    if (!m.data) return STILL_OK;
    still_status st = keep_template(tk, (const char *)m.data, m.size, err);
    sti_map_close(&m);
    return st;
}

/* ---- Opening ------------------------------------------------------------- */

static bool looks_like_tiktoken(const char *p, size_t n)
{
    const char *line = memchr(p, '\n', n < 4096 ? n : 4096);
    size_t end = line ? (size_t)(line - p) : n;
    const char *space = memchr(p, ' ', end);
    return space && space > p && (size_t)(space - p) % 4 == 0;
}

static size_t skip_blanks(const char *p, size_t i, size_t n)
{
    while (i < n && (p[i] == ' ' || (p[i] >= '\t' && p[i] <= '\r'))) i++;
    return i;
}

/* Tekken's JSON has "token_bytes": "..." for each token. */
static bool looks_like_tekken(const char *p, size_t n)
{
    static const char key[] = "\"token_bytes\"";
    const char *at = memmem(p, n, key, sizeof key - 1);
    if (!at) return false;
    size_t i = skip_blanks(p, (size_t)(at - p) + sizeof key - 1, n);
    if (i >= n || p[i] != ':') return false;
    i = skip_blanks(p, i + 1, n);
    return i < n && p[i] == '"';
}

typedef enum file_kind { NOT_KNOWN, SPM, JSON, TEKKEN, TIKTOKEN } file_kind;

static file_kind kind_of(const char *p, size_t n)
{
    if (n >= 2 && p[0] == '\n' && p[1] != '{')
        return SPM; /* field 1, bytes: the first piece */
    const size_t i = skip_blanks(p, 0, n);
    if (i < n && p[i] == '{') return looks_like_tekken(p, n) ? TEKKEN : JSON;
    return looks_like_tiktoken(p, n) ? TIKTOKEN : NOT_KNOWN;
}

static still_status split_not_wanted(const char *what, still_error *err)
{
    return sti_fail(
        err, STILL_E_ARG,
        "%s says itself how text is split; a rule can be named for tiktoken "
        "ranks only",
        what);
}

static still_status load_bytes(still_tokenizer *tk, const char *p, size_t n,
                               const char *rule, still_error *err)
{
    const file_kind kind = kind_of(p, n);
    if (kind == TIKTOKEN) return sti_tokenizer_load_tiktoken(tk, p, n, rule, err);
    if (kind == NOT_KNOWN)
        return sti_fail(
            err, STILL_E_FORMAT,
            "not a tokenizer (expected GGUF, tokenizer.json, tekken.json, a "
            "SentencePiece model or tiktoken ranks)");
    if (rule) return split_not_wanted("the file", err);
    return kind == SPM    ? sti_tokenizer_load_spm(tk, p, n, err)
           : kind == JSON ? sti_tokenizer_load_json(tk, p, n, err)
                          : sti_tokenizer_load_tekken(tk, p, n, err);
}

still_status sti_tokenizer_from_bytes(const char *p, size_t n,
                                      const sti_tokenizer_hints *hints,
                                      still_tokenizer **out, still_error *err)
{
    *out = NULL;
    still_tokenizer *tk = sti_tokenizer_new();
    if (!tk) return sti_fail_memory(err, "tokenizer", sizeof *tk);
    still_status st = load_bytes(tk, p, n, hints ? hints->split : NULL, err);
    if (st == STILL_OK && hints && hints->settings)
        st = sti_tokenizer_load_settings(tk, hints->settings, err);
    if (st == STILL_OK) st = sti_tokenizer_finish(tk, err);
    if (st != STILL_OK) {
        still_tokenizer_free(tk);
        return st;
    }
    *out = tk;
    return STILL_OK;
}

static still_status from_map(const sti_map *m, const sti_tokenizer_hints *hints,
                             still_tokenizer **out, still_error *err)
{
    still_status st =
        sti_tokenizer_from_bytes((const char *)m->data, m->size, hints, out, err);
    return st == STILL_OK ? st : sti_fail_prefix(err, st, "%s", m->path);
}

/* *out stays NULL if the folder has no tokenizer. */
static still_status from_folder(const char *folder, const char *rule,
                                still_tokenizer **out, still_error *err)
{
    static const char *const names[] = {"tokenizer.json", "tekken.json",
                                        "tokenizer.model", "original/tokenizer.model"};
    const sti_tokenizer_hints hints = {folder, rule};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        sti_map m;
        STI_TRY(open_in(folder, names[i], &m, err));
        if (!m.data) continue;
        still_status st = from_map(&m, &hints, out, err);
        sti_map_close(&m);
        return st;
    }
    return STILL_OK;
}

still_status sti_tokenizer_from_store(const sti_store *s, still_tokenizer **out,
                                      still_error *err)
{
    struct stat st;
    *out = NULL;
    if (!s->is_gguf)
        return stat(s->path, &st) == 0 && S_ISDIR(st.st_mode)
                   ? from_folder(s->path, NULL, out, err)
                   : STILL_OK;
    const sti_meta *kind = sti_meta_find(s, "tokenizer.ggml.model");
    if (!kind) return STILL_OK;
    if (kind->type == STI_META_STRING && kind->str[0].n == 4 &&
        memcmp(kind->str[0].p, "none", 4) == 0)
        return STILL_OK; /* a model without vocabulary */
    still_tokenizer *tk = sti_tokenizer_new();
    if (!tk) return sti_fail_memory(err, "tokenizer", sizeof *tk);
    still_status status = sti_tokenizer_load_gguf(tk, s, err);
    if (status == STILL_OK) status = sti_tokenizer_finish(tk, err);
    if (status != STILL_OK) {
        still_tokenizer_free(tk);
        return sti_fail_prefix(err, status, "%s", s->path);
    }
    *out = tk;
    return STILL_OK;
}

static still_status open_gguf(const char *path, still_tokenizer **out, still_error *err)
{
    sti_store s;
    STI_TRY(sti_store_open(path, &s, err));
    still_status st = sti_tokenizer_from_store(&s, out, err);
    sti_store_close(&s);
    if (st == STILL_OK && !*out)
        st = sti_fail(err, STILL_E_FORMAT, "%s: brings no tokenizer", path);
    return st;
}

still_status still_tokenizer_open(const char *path, still_tokenizer **out,
                                  still_error *err)
{
    return still_tokenizer_open_split(path, NULL, out, err);
}

still_status still_tokenizer_open_split(const char *path, const char *split,
                                        still_tokenizer **out, still_error *err)
{
    struct stat info;
    sti_map m;
    *out = NULL;
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode)) {
        STI_TRY(from_folder(path, split, out, err));
        return *out ? STILL_OK
                    : sti_fail(err, STILL_E_IO,
                               "%s: holds neither tokenizer.json nor tekken.json nor "
                               "tokenizer.model",
                               path);
    }
    STI_TRY(sti_map_open(path, &m, err));
    still_status st;
    if (m.size >= 4 && !memcmp(m.data, "GGUF", 4)) {
        st = split ? split_not_wanted(path, err) : open_gguf(path, out, err);
    } else {
        const char *slash = strrchr(path, '/');
        char *folder =
            slash ? sti_strndup(path, (size_t)(slash - path) + 1) : sti_strdup(".");
        const sti_tokenizer_hints hints = {folder, split};
        st = folder ? from_map(&m, &hints, out, err)
                    : sti_fail_memory(err, "path", strlen(path));
        free(folder);
    }
    sti_map_close(&m);
    return st;
}
