/* parse.h - what the parsers of this folder share; nobody else includes it.
 *
 * A store is filled step by step: a parser appends a map, then tensors that point into
 * it. Whatever was appended belongs to the store at once, so one sti_store_close frees
 * it all on any error path. */
#ifndef STI_FILE_PARSE_H
#define STI_FILE_PARSE_H

#include "file/store.h"

/* Both take over the map, even if they fail. A GGUF file is a store of its own;
 * safetensors are appended, and sorted when all shards are there. *metadata becomes a
 * new reference to __metadata__, or NULL if there is none; metadata may be NULL. */
still_status sti_parse_gguf(sti_store *s, sti_map map, still_error *err);
still_status sti_parse_safetensors(sti_store *s, sti_map map, json_t **metadata,
                                   still_error *err);
/* Where a GGUF file is one part of a model (file/parts.c), opens the others beside it. */
still_status sti_join_parts(sti_store *s, still_error *err);
/* config.json and the weights beside it. */
still_status sti_parse_folder(sti_store *s, const char *dir, still_error *err);

/* Sorts tensors and metadata by name, and refuses names that occur twice. */
still_status sti_store_sort(sti_store *s, still_error *err);
/* Moves map into s->map; closes it on failure. */
still_status sti_store_add_map(sti_store *s, sti_map *map, still_error *err);
/* Makes room for n more tensors, zeroed; s->n_tensors grows as the caller fills. */
still_status sti_store_reserve(sti_store *s, size_t n, still_error *err);

/* Replaces the mapping by a copy in memory that begins `pad` bytes later in its page,
 * for files whose numbers are unaligned. */
still_status sti_map_shift(sti_map *m, size_t pad, still_error *err);

/* Product of the dims and its size in bytes; false if either overflows, or the
 * innermost dim is not a multiple of the block. */
bool sti_tensor_size(sti_dtype t, int n_dims, const int64_t *dim, size_t *bytes);

#endif
