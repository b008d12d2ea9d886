/* split.h - splits text into the pieces within which byte-level BPE merges.
 *
 * A rule is one or more regular expressions, applied one after the other: each
 * splits the pieces of the one before into its matches and the gaps between them. */
#ifndef STI_TOKEN_SPLIT_H
#define STI_TOKEN_SPLIT_H

#include "base/error.h"

enum { STI_SPLIT_STAGES = 6 };

typedef struct sti_split {
    struct pcre2_real_code_8 *stage[STI_SPLIT_STAGES];
    bool jit[STI_SPLIT_STAGES];
    int n;
} sti_split;

/* Adds a stage. Patterns are written for Oniguruma or Rust, as in tokenizer.json. */
still_status sti_split_add(sti_split *s, const char *pattern, size_t n,
                           still_error *err);
void sti_split_free(sti_split *s);

/* A rule by the name that GGUF files have for it, and what such vocabularies do
 * besides. */
typedef struct sti_rule {
    const char *name;
    bool ignores_merges; /* a piece that is a token stays whole, whatever the merges */
    bool nfc;            /* text is brought into Unicode's NFC first */
    const char *stage[4];
} sti_rule;

/* Adds the stages of a rule by its name ("gpt-2", "llama-bpe", "qwen2" ...). An unknown
 * one is an error that lists those that are known. */
still_status sti_split_add_named(sti_split *s, const char *name, size_t n,
                                 const sti_rule **out, still_error *err);
/* The rule that splits like s, found with a probe text on which all differ; of those
 * that share their expressions the one like `like` in its other fields, if there is one.
 * *out is NULL if none splits like it. */
still_status sti_split_rule_of(const sti_split *s, const sti_rule *like,
                               const sti_rule **out, still_error *err);

/* The regular expressions of GPT-2 and Llama 3, for files that imply them; `digits` is
 * GPT-2's for text whose digits were split off one by one. */
extern const char sti_split_gpt2[], sti_split_gpt2_digits[], sti_split_llama3[];

/* Calls fn for each piece of a well-formed text, in order. A status other than
 * STILL_OK from fn ends the walk and is returned. */
typedef still_status (*sti_piece_fn)(void *user, const char *p, size_t n,
                                     still_error *err);
still_status sti_split_walk(const sti_split *s, const char *text, size_t n,
                            sti_piece_fn fn, void *user, still_error *err);

#endif
