/* probe.h - prompts that ask a model for something it has read: facts hidden in pages of
 * prose, one of them asked for, its answer given. Which heads look back at the fact
 * while the model reads the answer says which of them look things up. */
#ifndef STI_ALLOCATE_PROBE_H
#define STI_ALLOCATE_PROBE_H

#include "base/error.h"
#include "still.h"

extern const char *const sti_probe_prose[]; /* passages, in order */
extern const int sti_probe_passages;

/* Tokens [first, first + n) of a probe. */
typedef struct sti_probe_span {
    int first, n;
} sti_probe_span;

/* value: the fact's, that is asked for; answer: the same again, behind the question.
 * Their tokens are the same, one by one. */
typedef struct sti_probe {
    int32_t *tok;
    int n;
    sti_probe_span value, answer;
} sti_probe;

/* The index-th probe of a seed, `passages` of prose long: numbers, words and hex
 * groups in turn, with one fact or three. Free tok. */
still_status sti_probe_make(const still_tokenizer *tk, uint64_t seed, int index,
                            int passages, sti_probe *out, still_error *err);

#endif
