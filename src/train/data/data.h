/* data.h - training text as sequences of token ids.
 *
 * Files of records are tokenized once into a cache file that is memory-mapped from then
 * on. Documents end with EOS and are packed one after the other into sequences of `seq`
 * ids, so no id is padding; the rest at the end of a file is dropped. Which sequence is
 * number i of a run depends on the seed alone, so an interrupted run continues with
 * exactly the sequences it would have seen.
 *
 * A file is JSON lines, a JSON array, or a JSON object with an array "data", gzipped or
 * not. A record has strings "instruction" and "output" and perhaps "input", which make
 * an Alpaca prompt and its answer, or else a string "text". Text that spells a special
 * token stays text. Each document begins with BOS if the tokenizer adds it. */
#ifndef STI_TRAIN_DATA_DATA_H
#define STI_TRAIN_DATA_DATA_H

#include "token/token.h"

typedef struct sti_data_source {
    const char *path;
    double weight; /* how often it is drawn next to the others; <= 0: by its size.
                      All files have one, or none has */
} sti_data_source;

typedef struct sti_data_params {
    const sti_data_source *source;
    int n_sources;
    int seq;          /* ids of a sequence, 2 to 2^20 */
    bool mask_prompt; /* only outputs and their EOS count in the loss; a token that
                         begins in the prompt and ends in the output does not */
    double held_out;  /* share of each file's sequences kept for validation, < 1: its
                         last ones, at least 1 if it is > 0 and there are 2 */
    uint64_t seed;
    const char *cache_dir;      /* where token caches live; made if missing */
    still_progress_fn progress; /* may be NULL; counts bytes read of all sources */
    void *user;
} sti_data_params;

/* What was found, summed over the files. */
typedef struct sti_data_report {
    uint64_t records, broken; /* broken, including empty, ones were skipped */
    uint64_t tokens;
    uint64_t train, valid; /* sequences */
    char
        first_broken[256]; /* "FILE: line 12: no field 'output'"; "record 12" of JSON */
    bool cached;           /* nothing had to be tokenized */
} sti_data_report;

typedef struct sti_data sti_data;

/* Errors: no file, no JSON, no usable record, fewer tokens than a sequence, a tokenizer
 * without EOS. A cache that no longer matches its file or tokenizer, or is damaged, is
 * rebuilt; it is written to a temporary name, synced and renamed. */
still_status sti_data_open(const still_tokenizer *tk, const sti_data_params *p,
                           sti_data **out, still_error *err);
/* Random ids below vocab instead of text, all of which count; for measuring. */
still_status sti_data_random(int vocab, int seq, uint64_t seed, sti_data **out,
                             still_error *err);
void sti_data_free(sti_data *d);
const sti_data_report *sti_data_get_report(const sti_data *d);

/* SHA-256 over the sources' contents, weights and everything else that determines the
 * order of sequences: a resumed run must find the same. */
enum { STI_DATA_DIGEST = 32 };
void sti_data_digest(const sti_data *d, unsigned char out[STI_DATA_DIGEST]);

/* Sequence i of the run, i = 0, 1, 2, ... without end (below 2^62): every pass over a
 * file shuffles it anew; files are mixed evenly by weight. Any i costs the same. ids
 * [seq]; counts [seq]: 1 where the id is to be predicted (0 in a masked prompt, and
 * always for the first). counts may be NULL. */
void sti_data_train(const sti_data *d, uint64_t i, int32_t *ids, uint8_t *counts);
/* Validation sequence i < report.valid, in file order. */
void sti_data_valid(const sti_data *d, uint64_t i, int32_t *ids, uint8_t *counts);

#endif
