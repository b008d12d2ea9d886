/* token.h - what the rest of the library needs of tokenizers beyond still.h. */
#ifndef STI_TOKEN_TOKEN_H
#define STI_TOKEN_TOKEN_H

#include "file/store.h"

/* From an open model: GGUF metadata, or tokenizer.json / tokenizer.model in a Hugging
 * Face folder (with tokenizer_config.json and generation_config.json where they are).
 * *out is NULL and the status STILL_OK when the model brings no tokenizer. */
still_status sti_tokenizer_from_store(const sti_store *s, still_tokenizer **out,
                                      still_error *err);
size_t sti_tokenizer_bytes(const still_tokenizer *tk); /* memory it holds */

/* ---- Writing, for other programs (save_json.c, save_gguf.c) -------------- */

/* Both write the tokenizer, whatever kind of file it came from. */

/* tokenizer.json, tokenizer_config.json and generation_config.json in a folder. */
still_status sti_tokenizer_save_json(const still_tokenizer *tk, const char *folder,
                                     still_error *err);
/* GGUF metadata. vocab: rows of the embedding, which may be more than the tokens. */
still_status sti_tokenizer_save_gguf(const still_tokenizer *tk, int vocab,
                                     sti_writer *w, still_error *err);

#endif
