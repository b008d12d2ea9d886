/* save.h - what the two writers of tokenizers share: spelling, and merges in order. */
#ifndef STI_TOKEN_SAVE_H
#define STI_TOKEN_SAVE_H

#include "base/buf.h"
#include "token/tokenizer.h"

/* Replaces out's content by the token as vocabulary files spell it: GPT-2's alphabet,
 * or U+2581 for a space and <0xE2> for a byte. Special tokens are spelled literally;
 * unused ones without text get a generated name. */
void sti_spell_token(const still_tokenizer *tk, int32_t id, sti_buf *out);

/* All merges between tokens of the public vocabulary, lowest rank first. free() *out.
 */
still_status sti_merges_in_order(const still_tokenizer *tk, sti_pair **out, size_t *n,
                                 still_error *err);

#endif
