/* trie.h - finding the tokens that are matched in text before anything is split.
 *
 * There are a few to a few thousand of them, and most texts hold none: a table of
 * first bytes lets the search run over text at a byte a cycle. */
#ifndef STI_TOKEN_TRIE_H
#define STI_TOKEN_TRIE_H

#include "token/vocab.h"

typedef struct sti_trie_node {
    int32_t child, sibling; /* -1: none */
    int32_t id;             /* token that ends here, -1: none */
    unsigned char byte;
} sti_trie_node;

typedef struct sti_trie {
    sti_trie_node *node; /* node 0 is the root */
    int n, room;
    bool starts[256];
} sti_trie;

still_status sti_trie_add(sti_trie *t, const char *p, size_t n, int32_t id,
                          still_error *err);
void sti_trie_free(sti_trie *t);

/* The first place at or after `from` where a token stands, the longest there. Tokens
 * other than those of kind USER count only if `control`. Returns its id, or -1. */
int32_t sti_trie_find(const sti_trie *t, const sti_vocab *v, const char *p, size_t n,
                      size_t from, bool control, size_t *start, size_t *end);

#endif
