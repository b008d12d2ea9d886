/* bpe.h - byte-pair encoding: a table of merges, and the loop that applies them.
 *
 * One engine serves every vocabulary. Symbols are token ids; a merge joins two
 * neighbours into a token and has a rank; the lowest rank goes first, the leftmost of
 * equals. Byte-level vocabularies bring merges as a list; tiktoken and SentencePiece
 * bring only ranks or scores of whole tokens, from which sti_bpe_learn finds the merge
 * of each token. */
#ifndef STI_TOKEN_BPE_H
#define STI_TOKEN_BPE_H

#include "token/vocab.h"

typedef struct sti_pair {
    int32_t left, right; /* left -1: empty slot */
    uint32_t rank;
    int32_t id;
} sti_pair;

typedef struct sti_bpe {
    sti_pair *slot; /* [mask+1] open hash table */
    size_t mask, n;
    sti_hash_key key;
    unsigned char *whole; /* [vocab] text equal to the token becomes just the token */
    int32_t (*parts)[2];  /* [vocab] the merge that makes it, {-1,-1}: none */
    bool by_char;         /* first symbols are characters (SentencePiece), not bytes */
} sti_bpe;

/* Memory of the loop for long inputs, kept from one call to the next. */
typedef struct sti_bpe_work {
    int32_t *sym; /* symbols of a piece, also used by callers */
    size_t sym_capacity;
    int32_t *prev, *next;
    size_t link_capacity;
    uint64_t *heap;
    size_t heap_capacity;
} sti_bpe_work;

void sti_bpe_free(sti_bpe *b);
size_t sti_bpe_bytes(const sti_bpe *b, int vocab);
void sti_bpe_work_free(sti_bpe_work *w);
still_status sti_bpe_work_symbols(sti_bpe_work *w, size_t n, still_error *err);

/* A table with room for n merges. */
still_status sti_bpe_reserve(sti_bpe *b, size_t n, still_error *err);
/* A pair that is there already keeps the lower rank. */
void sti_bpe_put(sti_bpe *b, int32_t left, int32_t right, uint32_t rank, int32_t id);

/* The first symbols of a text: a token for each byte or character; -1 where there is
 * none. sym has room for n. Returns their number. Text is well-formed if by_char. */
size_t sti_bpe_symbols(const sti_bpe *b, const sti_vocab *v, const char *p, size_t n,
                       int32_t *sym);
/* Merges sym[0..n) in place; *n becomes what is left. */
still_status sti_bpe_run(const sti_bpe *b, int32_t *sym, size_t *n, sti_bpe_work *w,
                         still_error *err);

/* Fills `whole` from the merges in the table. */
still_status sti_bpe_mark_whole(sti_bpe *b, const sti_vocab *v, still_error *err);
/* Finds the merge of every token from rank[v->n], and fills `whole` and `parts`. */
still_status sti_bpe_learn(sti_bpe *b, const sti_vocab *v, const uint32_t *rank,
                           still_error *err);

#endif
