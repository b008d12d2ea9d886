/* pieces.h - a vocabulary as a tree of bytes, for asking which tokens may come next.
 *
 * Nodes lie in the order in which a walk from the root meets them, children by byte: the
 * first child of a node follows it, the next sibling is `end`. A walk that leaves out a
 * subtree jumps; one that takes everything reads memory from front to back.
 *
 * Only tokens that stand for text are in it: no control token, nothing that looks like one,
 * no end of generation. Tokens longer than STI_PIECE_LONGEST are left out, too: what they
 * say can be said with shorter ones, and what a grammar allows then depends on few bytes. */
#ifndef STI_TOKEN_PIECES_H
#define STI_TOKEN_PIECES_H

#include "base/error.h"

enum { STI_PIECE_LONGEST = 32 };

typedef struct sti_pieces {
    uint32_t n;      /* nodes; 0 is the root */
    uint32_t *end;   /* [n] the first node behind the subtree */
    uint32_t *token; /* [n+1] the node's tokens are id[token[i]] .. id[token[i+1]-1] */
    int32_t *id;     /* [token[n]] */
    unsigned char *byte;  /* [n] that leads to the node */
    unsigned char *depth; /* [n] bytes from the root */
} sti_pieces;

/* The tree of a tokenizer, made when it is first asked for; any thread. Borrowed. */
still_status sti_tokenizer_pieces(const still_tokenizer *tk, const sti_pieces **out,
                                  still_error *err);

/* Where a tokenizer keeps it. */
typedef struct sti_pieces_slot sti_pieces_slot;
sti_pieces_slot *sti_pieces_slot_new(void); /* NULL: no memory */
void sti_pieces_slot_free(sti_pieces_slot *s);

#endif
