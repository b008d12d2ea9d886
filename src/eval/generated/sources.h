/* sources.h - the files that generated tasks are made from.
 *
 * A file may be gzipped, under its name with .gz added. Errors say where a missing file
 * comes from, and name line and field of a malformed record. */
#ifndef STI_EVAL_GENERATED_SOURCES_H
#define STI_EVAL_GENERATED_SOURCES_H

#include "base/buf.h"
#include "base/error.h"
#include "file/store.h"

/* Calls fn with each record of a JSONL file; a status other than STILL_OK ends the
 * reading, with file and line put before its message. rec is borrowed. */
typedef still_status (*sti_record_fn)(void *user, json_t *rec, still_error *err);
still_status sti_source_read(const char *dir, const char *name, sti_record_fn fn,
                             void *user, still_error *err);

/* A field of a record, or an error that names it: a string, an array. */
still_status sti_field_string(const json_t *rec, const char *key, const char **out,
                              still_error *err);
still_status sti_field_array(const json_t *rec, const char *key, json_t **out,
                             still_error *err);
/* Whether all elements are strings. */
bool sti_all_strings(const json_t *array);

/* Words, one a line; blank lines are skipped. */
typedef struct sti_words {
    sti_buf text;
    char **word; /* [n], into text */
    size_t n;
} sti_words;
still_status sti_words_load(const char *dir, const char *name, sti_words *w,
                            still_error *err);
/* The union of n files, sorted by bytes, each word once. */
still_status sti_words_load_union(const char *dir, const char *const *name, int n,
                                  sti_words *w, still_error *err);
void sti_words_free(sti_words *w);

#endif
