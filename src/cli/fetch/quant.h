/* quant.h - the GGUF models of a repository: which files make up one, and which of them
 * the suffix of org/name:Q4_K_M means.
 *
 * All of it works on names alone, of a hub's listing as of a folder, so that a name means
 * the same file before and after the download. Names may be hostile. */
#ifndef CLI_FETCH_QUANT_H
#define CLI_FETCH_QUANT_H

#include <stdbool.h>
#include <stddef.h>

#include "base/buf.h"

/* org/name:SUFFIX: bytes before the colon. Without a suffix the whole length. */
size_t cli_name_stem(const char *name);

/* "sub/tiny-Q4_K_M-00002-of-00003.gguf": what of its name all its parts share. */
typedef struct cli_part {
    size_t stem;           /* bytes before -00002-of-00003.gguf, or before .gguf */
    unsigned index, parts; /* 2 of 3; 1 of 1 for a file that stands alone */
} cli_part;

/* Whether a name ends with ext (".gguf"), and its parts. */
bool cli_part_of(const char *name, const char *ext, cli_part *out);
/* A GGUF file that is a model or part of one: no vision projector (mmproj*), no imatrix,
 * no adapter. */
bool cli_is_gguf(const char *name, cli_part *out);
/* Whether two GGUF files are parts of one model. */
bool cli_gguf_same(const char *a, const char *b);

enum { CLI_LABEL_MAX = 64 };
/* What tells a model from the others of its repository: "Q4_K_M"; the name without its
 * folder and ending where it says no type. Returns out. */
const char *cli_gguf_label(const char *name, char out[CLI_LABEL_MAX]);

typedef enum cli_pick {
    CLI_PICK_ONE,
    CLI_PICK_NONE,    /* there is no GGUF file at all */
    CLI_PICK_UNKNOWN, /* none has this suffix */
    CLI_PICK_MANY     /* several could be meant */
} cli_pick;

/* The n names are name(list, i). */
typedef const char *(*cli_name_fn)(const void *list, size_t i);
/* suffix NULL: Q4_K_M, else the only model. *first: the first of its files. */
cli_pick cli_gguf_pick(const void *list, size_t n, cli_name_fn name, const char *suffix,
                       size_t *first);
/* Appends the suffix that means the i-th name among all: its label, or its whole name. */
void cli_gguf_suffix(const void *list, size_t n, cli_name_fn name, size_t i,
                     sti_buf *out);
/* Appends "org/name:Q4_0, org/name:Q8_0", which are a dozen at most. */
void cli_gguf_choices(const void *list, size_t n, cli_name_fn name, const char *repo,
                      size_t n_repo, sti_buf *out);

#endif
