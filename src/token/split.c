/* split.c - see split.h. Regular expressions run in PCRE2 with its JIT compiler.
 *
 * The text is known to be well-formed, so matching starts without another check. Match
 * data belongs to the call, which keeps the rule itself read-only and shareable. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "token/split.h"

#include <pcre2.h>
#include <string.h>

#include "base/buf.h"

const char sti_split_gpt2[] =
    "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
/* GPT-2's rule for text from which every \p{N} was split off first: spaces before a
 * digit then end their piece and stay together. */
const char sti_split_gpt2_digits[] =
    "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+|"
    "\\s+(?![^\\s\\p{N}])|\\s+";
const char sti_split_llama3[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
static const char qwen2[] =
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

/* Words by case: capitals, then small letters; letters without case are both. */
#define WORD(tail)                                                                     \
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{"   \
    "Lo}"                                                                              \
    "\\p{M}]+" tail "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+["    \
    "\\p{Ll}\\p{Lm}\\p{Lo}"                                                            \
    "\\p{M}]*" tail
#define REST " ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
static const char tekken[] = WORD("") "|\\p{N}|" REST;
static const char gpt4o[] = WORD("(?i:'s|'t|'re|'ve|'m|'ll|'d)?") "|\\p{N}{1,3}|" REST;

static const sti_rule named[] = {
    {"gpt-2", false, false, {sti_split_gpt2}},
    {"gpt2", false, false, {sti_split_gpt2}},
    {"olmo", false, false, {sti_split_gpt2}},
    {"mpt", false, false, {sti_split_gpt2}},
    {"phi-2", false, false, {sti_split_gpt2}},
    {"smollm", false, false, {sti_split_gpt2_digits}},
    {"starcoder", false, false, {sti_split_gpt2_digits}},
    {"refact", false, false, {sti_split_gpt2_digits}},
    {"command-r", false, false, {sti_split_gpt2_digits}},
    {"codeshell", false, false, {sti_split_gpt2_digits}},
    {"llama-bpe", true, false, {sti_split_llama3}},
    {"llama3", true, false, {sti_split_llama3}},
    {"llama-v3", true, false, {sti_split_llama3}},
    /* Llama 3's expression, but merges decide. */
    {"smaug-bpe", false, false, {sti_split_llama3}},
    {"dbrx", false, false, {sti_split_llama3}},
    {"qwen2", false, true, {qwen2}},
    {"deepseek-r1-qwen", false, true, {qwen2}},
    {"tekken", true, false, {tekken}},
    {"gpt-4o", false, false, {gpt4o}},
    /* The rule that llama.cpp uses for files without one. */
    {"default",
     false,
     false,
     {"[\\p{P}\\$\\+<=>\\^~\\|]+", sti_split_gpt2, "\\p{N}+", "[0-9][0-9][0-9]"}},
};
enum { NAMED = sizeof named / sizeof *named, STAGES = 4 };

static still_status unknown_rule(const char *name, size_t n, still_error *err)
{
    sti_buf list = {0};
    for (size_t i = 0; i < NAMED; i++)
        sti_buf_printf(&list, "%s%s", i ? ", " : "", named[i].name);
    const still_status st = sti_fail(
        err, STILL_E_UNSUPPORTED, "splitting rule '%.*s' is not known (known: %s)",
        (int)(n < 64 ? n : 64), name, list.failed ? "none for want of memory" : list.p);
    sti_buf_free(&list);
    return st;
}

still_status sti_split_add_named(sti_split *s, const char *name, size_t n,
                                 const sti_rule **out, still_error *err)
{
    *out = NULL;
    for (size_t i = 0; i < NAMED; i++)
        if (strlen(named[i].name) == n && !memcmp(named[i].name, name, n))
            *out = &named[i];
    if (!*out) return unknown_rule(name, n, err);
    for (int i = 0; i < STAGES && (*out)->stage[i]; i++)
        STI_TRY(sti_split_add(s, (*out)->stage[i], strlen((*out)->stage[i]), err));
    return STILL_OK;
}

/* In Oniguruma and Rust \s is Unicode's White_Space; PCRE2's has U+180E besides. */
static void translate(const char *p, size_t n, sti_buf *out)
{
    for (size_t i = 0; i < n; i++) {
        if (p[i] != '\\' || i + 1 == n) {
            sti_buf_put(out, p + i, 1);
            continue;
        }
        i++;
        if (p[i] == 's')
            sti_buf_puts(out, "\\p{White_Space}");
        else if (p[i] == 'S')
            sti_buf_puts(out, "\\P{White_Space}");
        else
            sti_buf_put(out, p + i - 1, 2);
    }
}

still_status sti_split_add(sti_split *s, const char *pattern, size_t n,
                           still_error *err)
{
    if (s->n == STI_SPLIT_STAGES)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "splitting rule has more than %d stages", STI_SPLIT_STAGES);
    sti_buf b = {0};
    translate(pattern, n, &b);
    if (b.failed || !b.p) {
        sti_buf_free(&b);
        return n ? sti_fail_memory(err, "splitting rule", n)
                 : sti_fail(err, STILL_E_FORMAT, "splitting rule is empty");
    }
    int code;
    PCRE2_SIZE at;
    pcre2_code *re = pcre2_compile((PCRE2_SPTR)b.p, b.n,
                                   PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C,
                                   &code, &at, NULL);
    sti_buf_free(&b);
    if (!re) {
        PCRE2_UCHAR why[120] = "";
        pcre2_get_error_message(code, why, sizeof why);
        return sti_fail(err, STILL_E_FORMAT, "splitting rule '%.*s': %s",
                        (int)(n < 200 ? n : 200), pattern, (char *)why);
    }
    s->jit[s->n] = pcre2_jit_compile(re, PCRE2_JIT_COMPLETE) == 0;
    s->stage[s->n++] = re;
    return STILL_OK;
}

void sti_split_free(sti_split *s)
{
    for (int i = 0; i < s->n; i++) pcre2_code_free(s->stage[i]);
    *s = (sti_split){0};
}

typedef struct walk {
    const sti_split *rule;
    pcre2_match_data *match[STI_SPLIT_STAGES];
    sti_piece_fn fn;
    void *user;
} walk;

/* Depth is the number of stages, at most STI_SPLIT_STAGES. */
static still_status walk_stage(walk *w, int stage, const char *p, size_t n,
                               still_error *err)
{
    if (!n) return STILL_OK;
    if (stage == w->rule->n) return w->fn(w->user, p, n, err);
    const pcre2_code *re = w->rule->stage[stage];
    const PCRE2_SIZE *span = pcre2_get_ovector_pointer(w->match[stage]);
    size_t done = 0, from = 0;
    while (from < n) {
        int rc = w->rule->jit[stage]
                     ? pcre2_jit_match(re, (PCRE2_SPTR)p, n, from, PCRE2_NO_UTF_CHECK,
                                       w->match[stage], NULL)
                     : pcre2_match(re, (PCRE2_SPTR)p, n, from, PCRE2_NO_UTF_CHECK,
                                   w->match[stage], NULL);
        if (rc == PCRE2_ERROR_NOMATCH) break;
        if (rc < 0)
            return sti_fail(
                err, STILL_E_LIMIT,
                "splitting rule gave up at byte %zu of %zu (PCRE2 error %d)", from, n,
                rc);
        if (span[1] <= span[0] || span[0] < from) { /* empty match: step over a byte */
            do from++;
            while (from < n && ((unsigned char)p[from] & 0xC0) == 0x80);
            continue;
        }
        STI_TRY(walk_stage(w, stage + 1, p + done, span[0] - done, err));
        STI_TRY(walk_stage(w, stage + 1, p + span[0], span[1] - span[0], err));
        done = from = span[1];
    }
    return walk_stage(w, stage + 1, p + done, n - done, err);
}

still_status sti_split_walk(const sti_split *s, const char *text, size_t n,
                            sti_piece_fn fn, void *user, still_error *err)
{
    walk w = {.rule = s, .fn = fn, .user = user};
    still_status st = STILL_OK;
    for (int i = 0; i < s->n && st == STILL_OK; i++) {
        w.match[i] = pcre2_match_data_create(1, NULL);
        if (!w.match[i]) st = sti_fail_memory(err, "splitting", sizeof(void *));
    }
    if (st == STILL_OK) st = walk_stage(&w, 0, text, n, err);
    for (int i = 0; i < s->n; i++) pcre2_match_data_free(w.match[i]);
    return st;
}

/* ---- Names --------------------------------------------------------------- */

/* Contractions in both cases, digits in runs, spaces before words, digits and line
 * ends, punctuation before line ends and slashes, capitals inside words, marks, scripts
 * without spaces. */
static const char probe[] =
    "I'm I'M we'll WE'LL x1234567 12  3.5 a  b\n\n  \t c\r\n!!\n\n?? ($100=<x>|~^)"
    " __init__(self) #\xC3\xBC\xC3\x9F \xC2\xBD\xC2\xB2 \xD9\xA1\xD9\xA2\xD9\xA3"
    "\xD9\xA4 e\xCC\x81 \xE6\xBC\xA2\xE5\xAD\x97 \xF0\x9F\x99\x82 .  \n camelCase "
    "ABCdef"
    " a:/\n/b end  ";

typedef struct cuts {
    size_t length[sizeof probe];
    size_t n;
} cuts;

static still_status note_cut(void *user, const char *p, size_t n, still_error *err)
{
    (void)p;
    (void)err;
    cuts *c = user;
    c->length[c->n++] = n;
    return STILL_OK;
}

static still_status cut_by_name(const char *name, cuts *out, still_error *err)
{
    sti_split split = {0};
    const sti_rule *rule;
    still_status st = sti_split_add_named(&split, name, strlen(name), &rule, err);
    if (st == STILL_OK)
        st = sti_split_walk(&split, probe, sizeof probe - 1, note_cut, out, err);
    sti_split_free(&split);
    return st;
}

still_status sti_split_rule_of(const sti_split *s, const sti_rule *like,
                               const sti_rule **out, still_error *err)
{
    cuts ours = {0};
    int best = -1;
    *out = NULL;
    STI_TRY(sti_split_walk(s, probe, sizeof probe - 1, note_cut, &ours, err));
    for (size_t i = 0; i < NAMED; i++) {
        cuts theirs = {0};
        STI_TRY(cut_by_name(named[i].name, &theirs, err));
        if (theirs.n != ours.n ||
            memcmp(theirs.length, ours.length, ours.n * sizeof *ours.length) != 0)
            continue;
        const int alike = 2 * (named[i].nfc == like->nfc) +
                          (named[i].ignores_merges == like->ignores_merges);
        if (alike > best) *out = &named[i];
        if (alike > best) best = alike;
    }
    return STILL_OK;
}
