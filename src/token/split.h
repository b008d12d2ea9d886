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
/* Adds the stages of a rule by its GGUF name ("gpt-2", "llama-bpe", "qwen2" ...). */
still_status sti_split_add_named(sti_split *s, const char *name, size_t n,
                                 still_error *err);
/* Whether the named rule keeps a piece that is a token whole, whatever the merges. */
bool sti_split_name_ignores_merges(const char *name, size_t n);
/* The i-th regular expression of a named rule; NULL past the last. */
const char *sti_split_named_stage(const char *name, int i);
/* The name of the rule that splits like this one, found with a probe text on which all
 * named rules differ; *name is NULL if there is none. */
still_status sti_split_name_of(const sti_split *s, const char **name, still_error *err);
void sti_split_free(sti_split *s);

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
