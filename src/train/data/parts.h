/* parts.h - what the files of this folder share; nobody else includes it.
 *
 *     json.c    JSON text -> elements of the array in it
 *     read.c    file -> records -> text of a document and where its output begins
 *     tokens.c  documents -> ids, each marked prompt or output
 *     cache.c   the file that keeps them
 *     mix.c     which sequence of which file is number i
 *     data.c    the object that callers see */
#ifndef STI_TRAIN_DATA_PARTS_H
#define STI_TRAIN_DATA_PARTS_H

#include "base/buf.h"
#include "base/error.h"
#include "base/mem.h"
#include "train/data/data.h"

/* ---- Elements of a JSON array -------------------------------------------- */

typedef struct sti_elements {
    const char *path, *p; /* borrowed */
    size_t n, at;         /* bytes of text, and where the next element is */
    size_t taken;         /* elements so far */
    bool in_object, ended;
    bool is_json; /* opening failed, though the text is sound: it has no array */
} sti_elements;

/* Finds the array and checks all of the text. */
still_status sti_elements_open(sti_elements *e, const char *path, const char *p,
                               size_t n, still_error *err);
/* The next one, to be freed; *out NULL after the last. */
still_status sti_elements_next(sti_elements *e, json_t **out, still_error *err);

/* ---- Records ------------------------------------------------------------- */

typedef struct sti_records sti_records;

typedef struct sti_record { /* borrowed: valid until the next call */
    const char *text;       /* prompt and output in one; NULL if broken */
    size_t n, prompt;       /* bytes of it all, and of the prompt */
    const char *broken;     /* "line 12: no field ..."; NULL if it is good */
} sti_record;

/* Records of a JSONL file (one per line), or of a JSON file: an array, or an object
 * whose "data" is one. The contents tell which. */
still_status sti_records_open(const char *path, sti_records **out, still_error *err);
/* *more: false after the last one; rec is filled only where it is true. */
still_status sti_records_next(sti_records *r, sti_record *rec, bool *more,
                              still_error *err);
/* How many of the file's `size` bytes have been read. */
uint64_t sti_records_offset(const sti_records *r, uint64_t size);
void sti_records_close(sti_records *r);

/* ---- The cache of a file's tokens ---------------------------------------- */

enum { STI_CACHE_VERSION = 1 };
/* Set in an entry whose id belongs to an output; the other bits are the id. */
#define STI_CACHE_OUTPUT 0x80000000u

/* The file is this header, then `tokens` entries of 32 bits, and nothing else. */
typedef struct sti_cache_header {
    char magic[8]; /* "STILLTOK" */
    uint32_t version, vocab;
    uint64_t records, broken, tokens;
    unsigned char key[STI_DATA_DIGEST]; /* what the tokens were made from */
    char first_broken[240];             /* "line 12: ..."; NUL-terminated */
    uint32_t body_crc, head_crc;        /* of the entries; of all in front of it */
} sti_cache_header;

typedef struct sti_cache {
    sti_map map;
    const sti_cache_header *head; /* in the mapping, like the entries */
    const uint32_t *entry;        /* [head->tokens] */
} sti_cache;

/* Maps a cache after checking all of it: sizes, checksums, every id below vocab. */
still_status sti_cache_open(const char *path, const unsigned char *key, int vocab,
                            sti_cache *out, still_error *err);
void sti_cache_close(sti_cache *c);
uint32_t sti_cache_head_crc(const sti_cache_header *h);

typedef struct sti_cache_writer sti_cache_writer;
still_status sti_cache_create(const char *path, sti_cache_writer **out,
                              still_error *err);
still_status sti_cache_put(sti_cache_writer *w, const uint32_t *entry, size_t n,
                           still_error *err);
/* Fills in magic, version, count and checksums of *h, syncs, renames. Frees w either
 * way; on failure, and on sti_cache_abort, nothing is left of it. */
still_status sti_cache_finish(sti_cache_writer *w, sti_cache_header *h,
                              still_error *err);
void sti_cache_abort(sti_cache_writer *w);
/* Makes a folder and its parents. */
still_status sti_cache_folder(const char *path, still_error *err);

/* ---- Tokens -------------------------------------------------------------- */

typedef struct sti_data_progress {
    still_progress_fn fn; /* may be NULL */
    void *user;
    uint64_t before, size, total; /* bytes of earlier files, of this one, of all */
} sti_data_progress;

/* SHA-256 of a tokenizer's behaviour: its pieces, its settings, and the ids of the
 * text of all its pieces joined, which depends on its merges and rules. */
still_status sti_tokens_digest_tokenizer(const still_tokenizer *tk,
                                         unsigned char out[STI_DATA_DIGEST],
                                         still_error *err);
/* Tokenizes the file at `path` into a new cache at `to`; h->key and h->vocab are set.
 */
still_status sti_tokens_build(const still_tokenizer *tk, const char *path,
                              const char *to, sti_cache_header *h,
                              const sti_data_progress *progress, still_error *err);

/* ---- Order --------------------------------------------------------------- */

/* Part of sti_data_digest: a run must not be resumed under another order. */
enum { STI_ORDER_VERSION = 1 };

/* Draw i of a mix: the file, and how often it was drawn before. weight [n], > 0, below
 * 2^40; i below 2^62. Of the first W = sum of weights draws, each file has exactly its
 * weight; after any number of draws it is less than n/2 + 1 off its share. */
int sti_mix_draw(const uint64_t *weight, int n, uint64_t i, uint64_t *nth);
/* Where `at` goes in a permutation of 0 .. n-1 chosen by seed, file and pass. */
uint64_t sti_mix_shuffle(uint64_t n, uint64_t seed, uint64_t file, uint64_t pass,
                         uint64_t at);

#endif
