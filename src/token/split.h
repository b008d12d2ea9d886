/* split.h - cutting text into the pieces within which byte-level BPE merges.
 *
 * A rule is one regular expression or a few, applied one after the other: each cuts
 * the pieces of the one before into its matches and what lies between them. */
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
/* Whether the named rule takes a piece that is a token as it is, merges or not. */
bool sti_split_name_ignores_merges(const char *name, size_t n);
/* The i-th regular expression of a named rule; NULL past the last. */
const char *sti_split_named_stage(const char *name, int i);
/* The name of a rule that cuts text as this one does, told by a text on which all the
 * named ones differ; *name is NULL if there is none. */
still_status sti_split_name_of(const sti_split *s, const char **name, still_error *err);
void sti_split_free(sti_split *s);

/* The regular expressions of GPT-2 and Llama 3, for files that mean but do not bring
 * them; `digits` is GPT-2's after each digit was cut off alone. */
extern const char sti_split_gpt2[], sti_split_gpt2_digits[], sti_split_llama3[];

/* Calls fn for each piece of a well-formed text, in order. A status other than
 * STILL_OK from fn ends the walk and is returned. */
typedef still_status (*sti_piece_fn)(void *user, const char *p, size_t n,
                                     still_error *err);
still_status sti_split_walk(const sti_split *s, const char *text, size_t n,
                            sti_piece_fn fn, void *user, still_error *err);

#endif
