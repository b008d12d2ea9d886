/* sentences.h - where sentences end, well enough to choose places between them. */
#ifndef STI_EVAL_GENERATED_SENTENCES_H
#define STI_EVAL_GENERATED_SENTENCES_H

#include <stdbool.h>
#include <stddef.h>

/* Bytes of the white-space character at p, by Unicode; 0 if it is none. n >= 1. */
size_t sti_white(const char *p, size_t n);

/* Splits well-formed text. *at starts at 0; each call gives the next sentence, without
 * white space around it, as [*start, *end), and false when there is no more. Sentences
 * are never empty, and what lies between them is white space.
 *
 * abbreviations: whether common English ones are known ("Mr.", "e.g."), after which no
 * sentence ends. */
bool sti_sentence_next(const char *text, size_t n, bool abbreviations, size_t *at,
                       size_t *start, size_t *end);

#endif
