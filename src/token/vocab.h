/* vocab.h - the tokens of a vocabulary: their bytes, their kinds, and a look-up.
 *
 * Bytes are held as decoding emits them: the byte-level alphabet of GPT-2 is undone
 * and SentencePiece's U+2581 is a plain space. So encoding compares text with tokens
 * directly, and decoding copies. */
#ifndef STI_TOKEN_VOCAB_H
#define STI_TOKEN_VOCAB_H

#include "base/error.h"
#include "base/hash.h"
#include "base/mem.h"

/* SentencePiece's piece types; GGUF uses the same numbers. */
typedef enum sti_kind {
    STI_KIND_NORMAL = 1,
    STI_KIND_UNKNOWN = 2,
    STI_KIND_CONTROL = 3, /* matched in text only when asked for */
    STI_KIND_USER = 4,    /* always matched in text, before anything else */
    STI_KIND_UNUSED = 5,  /* merges go through it, but it is never emitted */
    STI_KIND_BYTE = 6,    /* stands for one byte that no other token covers */
    /* Ours: a character that occurs in tokens but is not a token itself. Its id is past
     * the public vocabulary; merges go through it; if emitted, it is unknown. */
    STI_KIND_CHARACTER = 7
} sti_kind;

enum {
    STI_MAX_TOKENS = 1 << 22, /* far above any vocabulary; keeps ids in 32 bits */
    STI_MAX_PIECE = 1 << 16   /* bytes of one token */
};

typedef struct sti_vocab_slot {
    uint32_t tag; /* upper half of the hash */
    int32_t id;   /* -1: empty */
} sti_vocab_slot;

typedef struct sti_vocab {
    int n, capacity;
    char *text; /* all tokens, one after the other */
    size_t bytes, text_capacity;
    uint32_t *at;         /* [n+1] token i is text[at[i] .. at[i+1]) */
    unsigned char *kind;  /* [n] sti_kind */
    sti_vocab_slot *slot; /* [mask+1] tokens that can be encoded */
    size_t mask;
    sti_hash_key key;
    int32_t byte_id[256]; /* token of a single byte, -1: none */
} sti_vocab;

void sti_vocab_init(sti_vocab *v);
void sti_vocab_free(sti_vocab *v);
size_t sti_vocab_bytes(const sti_vocab *v);

/* Appends a token; its id is the old v->n. */
still_status sti_vocab_add(sti_vocab *v, const char *p, size_t n, sti_kind kind,
                           still_error *err);
/* Whether text can become such a token by splitting and merging. */
static inline bool sti_kind_merges(int kind)
{
    return kind == STI_KIND_NORMAL || kind == STI_KIND_USER ||
           kind == STI_KIND_UNUSED || kind == STI_KIND_CHARACTER;
}
/* Builds the look-up over such tokens. Of equal ones the first id is found. */
still_status sti_vocab_index(sti_vocab *v, still_error *err);
/* Adds the last token to it. */
still_status sti_vocab_index_last(sti_vocab *v, still_error *err);
int32_t sti_vocab_find(const sti_vocab *v, const char *p, size_t n); /* -1: none */

static inline const char *sti_vocab_piece(const sti_vocab *v, int32_t id, size_t *n)
{
    *n = v->at[id + 1] - v->at[id];
    return v->text + v->at[id];
}

/* Undoes GPT-2's byte alphabet, in which each byte is written as a printable
 * character. out has room for n bytes. False: a character is not of the alphabet. */
bool sti_bytes_of_gpt2(const char *p, size_t n, char *out, size_t *n_out);
/* "<0xE2>" and the like: the byte, or -1. */
int sti_byte_of_name(const char *p, size_t n);

#endif
