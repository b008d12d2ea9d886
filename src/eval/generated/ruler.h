/* ruler.h - what the files ruler*.c share; nobody else includes it.
 *
 *     ruler.c       rows, sizes: how much of a task's filler fits a length
 *     ruler_niah.c  needles in noise, essays or other needles
 *     ruler_vt.c    chains of variables       ruler_cwe.c  common words
 *     ruler_fwe.c   coded words by Zipf's law ruler_qa.c   questions among documents
 *
 * Every task grows with a number n of its own: lines, words, documents. draw() writes
 * the sample for a given n and knows nothing of sizes; ruler.c finds n. */
#ifndef STI_EVAL_GENERATED_RULER_H
#define STI_EVAL_GENERATED_RULER_H

#include "base/named.h"
#include "eval/generated/generated.h"
#include "eval/generated/sources.h"

enum { /* rows of sti_task_ruler */
       SINGLE_1,
       SINGLE_2,
       SINGLE_3,
       MULTIKEY_1,
       MULTIKEY_2,
       MULTIKEY_3,
       MULTIVALUE,
       MULTIQUERY,
       VT,
       CWE,
       FWE,
       QA_HOTPOT,
       QA_SQUAD,
       TASKS
};

typedef struct sti_ruler_kind sti_ruler_kind;

typedef struct sti_ruler {
    const sti_ruler_kind *kind;
    const void *variant; /* of the kind: ruler_niah.c, ruler_qa.c */
    const char *name;
    sti_task_params p;
    int max_new;
    uint64_t unit, n; /* n shrinks by units where a sample is too long */
    void *own;        /* the kind's ingredients */
} sti_ruler;

struct sti_ruler_kind {
    int unit, unit_short; /* unit_short: below 4096 tokens */
    still_status (*load)(sti_ruler *r, still_error *err); /* fills own, also in part */
    void (*free)(void *own); /* not called if own is NULL */
    still_status (*draw)(const sti_ruler *r, uint64_t i, uint64_t n, sti_draws *d,
                         sti_sample *out, still_error *err);
    /* Optional. The n of the set, instead of the largest that fits. */
    still_status (*size)(sti_ruler *r, still_error *err);
    uint64_t (*least)(const sti_ruler *r, uint64_t i); /* smallest n of sample i; 1 */
    uint64_t (*most)(const sti_ruler *r);              /* largest n there is */
    uint64_t (*available)(const sti_ruler *r);         /* samples */
};

extern const sti_ruler_kind sti_ruler_niah, sti_ruler_vt, sti_ruler_cwe, sti_ruler_fwe,
    sti_ruler_qa;

typedef struct sti_niah_variant {
    enum { STI_HAYSTACK_NOISE, STI_HAYSTACK_ESSAY, STI_HAYSTACK_NEEDLE } haystack;
    bool uuid_keys, uuid_values;
    uint32_t keys, values, queries; /* values: per key */
} sti_niah_variant;

typedef struct sti_qa_variant {
    const char *file;
    bool hotpot;
} sti_qa_variant;

/* A sample for n from the set's own stream, always from its start: the same draws for
 * every n, so that sizes grow evenly with n. *tokens: of its prompt. */
still_status sti_ruler_probe(const sti_ruler *r, uint64_t n, sti_sample *s,
                             uint64_t *tokens, still_error *err);
/* The largest n in [unit, most] whose probe has at most `limit` tokens; *n is 0 if one
 * unit has more. */
still_status sti_ruler_search(const sti_ruler *r, uint64_t unit, uint64_t most,
                              uint64_t limit, uint64_t *n, still_error *err);

extern const char sti_ruler_noise[]; /* the line of noise */

#endif
