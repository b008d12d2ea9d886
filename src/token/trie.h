/* trie.h - finding the tokens that are matched in text before anything is split.
 *
 * The leftmost match wins, the longest of those; the search continues after it.
 * Trying every position would take the length of the text times that of the longest
 * token, which a file may choose. So tokens are stored reversed in an Aho-Corasick
 * automaton and the text is scanned once from its end: each step then knows the
 * longest token that starts there. Scanning is linear in the text for any set of
 * tokens, and building is linear in the tokens. Most texts contain none: a table of
 * last bytes skips them at about a byte per cycle. */
#ifndef STI_TOKEN_TRIE_H
#define STI_TOKEN_TRIE_H

#include "base/error.h"
#include "base/hash.h"
#include "base/mem.h"

typedef struct sti_trie_node {
    int32_t parent;
    int32_t fail; /* the node of the longest proper suffix of what was read; root: 0 */
    int32_t any;  /* the longest token that starts here, -1: none */
    int32_t user; /* the same among those to be matched always */
    int32_t open; /* the same among those to be matched in content */
    int32_t any_n, user_n, open_n; /* bytes of these */
    unsigned char byte;
} sti_trie_node;

typedef struct sti_trie {
    sti_trie_node *node; /* [n] node 0 is the root */
    int n, capacity;
    int32_t *slot; /* [mask+1] nodes by parent and byte, 0: empty */
    size_t mask;
    sti_hash_key key;
    bool ends[256]; /* last bytes of tokens */
    bool users;     /* some token is matched always */
} sti_trie;

typedef enum sti_trie_use {
    STI_TRIE_CONTROL, /* found where control tokens are asked for */
    STI_TRIE_USER, /* found always, but not in content: it looks like a control token */
    STI_TRIE_OPEN  /* found always */
} sti_trie_use;

/* Adds a token of n <= STI_MAX_PIECE bytes; of equal ones the first counts. */
still_status sti_trie_add(sti_trie *t, const char *p, size_t n, int32_t id,
                          sti_trie_use use, still_error *err);
/* After the last sti_trie_add, before the first scan. */
still_status sti_trie_finish(sti_trie *t, still_error *err);
void sti_trie_free(sti_trie *t);
size_t sti_trie_bytes(const sti_trie *t);

/* Positions of tokens, the last one first. */
typedef struct sti_trie_hit {
    size_t start;
    int32_t id, n; /* n: bytes of it */
} sti_trie_hit;

typedef struct sti_trie_hits {
    sti_trie_hit *hit;
    size_t n, capacity;
} sti_trie_hits;

/* All matches in p[0..n), in memory reused between calls. Control tokens count only if
 * `control`. With content, [n], only OPEN tokens may hold a byte whose mark is 1. */
still_status sti_trie_scan(const sti_trie *t, const char *p,
                           const unsigned char *content, size_t n, bool control,
                           sti_trie_hits *out, still_error *err);
/* Takes the first match at or after `from`, and drops those before. NULL: none. */
const sti_trie_hit *sti_trie_next(sti_trie_hits *h, size_t from);
void sti_trie_hits_free(sti_trie_hits *h);

/* The token p[0..n) if it is one; if it only ends tokens, one that it begins with or -1;
 * else -1. */
int32_t sti_trie_find(const sti_trie *t, const char *p, size_t n);

#endif
