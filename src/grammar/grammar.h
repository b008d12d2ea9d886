/* grammar.h - a compiled grammar, the masks that were found for it, and matchers. */
#ifndef STI_GRAMMAR_GRAMMAR_H
#define STI_GRAMMAR_GRAMMAR_H

#include "grammar/machine.h"
#include "token/pieces.h"

/* Room of a matcher. */
enum {
    STI_MATCHER_ITEMS = 1 << 10,
    STI_MATCHER_FRAMES = 1 << 12,
    STI_MATCHER_LINKS = 1 << 13
};

/* What a kind of state reads, found when it is first asked for. */
typedef struct sti_mask {
    bool known;
    bool list;          /* ids, not bits */
    uint32_t at;        /* where they begin in `store` */
    uint32_t n, n_ends; /* ids, or 64-bit words; then the nodes behind which it ended */
} sti_mask;

struct still_grammar {
    const still_tokenizer *tk;
    const sti_pieces *pieces;
    sti_automaton a;
    sti_machine m;  /* of whichever matcher is asked */
    int vocab;      /* of the tokenizer */
    size_t words;   /* 64 bits each, of a mask of the tokenizer's vocabulary */
    sti_mask *mask; /* [a.n_kinds] */
    uint32_t
        *store; /* [store_room] ids, bits and nodes of all masks; emptied when full */
    size_t n_store, store_room;
    uint64_t *bits; /* [words] of the mask that is being found */
    uint32_t *ends; /* [pieces->n] */
    uint64_t *text; /* [words] tokens that stand for text */
    /* A matcher after a token, until it is known to fit; frames by their old numbers. */
    struct {
        sti_item *item;
        sti_frame *frame;
        sti_link *link;
        int32_t *number, *old;
    } next;
};

/* How far a text has come: items of frames that were there before the last byte (the others
 * follow from them), and those frames. */
struct still_matcher {
    still_grammar *g;
    int vocab;
    bool ended;   /* an end token was accepted */
    bool can_end; /* the text may end here */
    sti_item *item;
    sti_frame *frame;
    sti_link *link;
    int32_t n_items, n_frames, n_links;
    uint64_t *bits; /* [(vocab+63)/64] for sampling */
};

/* Puts a matcher's items, which are then closed if `close`, into the grammar's machine. */
void sti_matcher_load(const still_matcher *m, bool close);
/* Whether a token may come next; false also if that takes too much. */
bool sti_matcher_allows(const still_matcher *m, int32_t id);

/* k is read, not kept. */
still_status sti_grammar_new(const still_tokenizer *tk, const sti_sketch *k,
                             int32_t root, still_grammar **out, still_error *err);

/* ---- Parsers ------------------------------------------------------------- */

/* What a text describes, drawn, and the rule to start from. */
still_status sti_gbnf_read(const char *text, size_t n, sti_sketch *k, int32_t *root,
                           still_error *err);
still_status sti_schema_read(const char *text, size_t n, sti_sketch *k, int32_t *root,
                             still_error *err);

#endif
