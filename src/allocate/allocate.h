/* allocate.h - what the files of this folder share; nobody else but their tests.
 *
 *     prose.c, probe.c   prompts that hide a fact and ask for it
 *     rank.c             how much each kv head looks back at the fact
 *     caps.c             salient tokens for every head, within a number of bytes
 *     keep.c             the file that makes the next time a short one
 *     allocate.c         still_allocate: these in a row */
#ifndef STI_ALLOCATE_ALLOCATE_H
#define STI_ALLOCATE_ALLOCATE_H

#include "allocate/probe.h"
#include "model/model.h"

/* Adds to gain [layers, G] what each kv head gives the value of a probe: for every token
 * of the answer the query that has to find it, its softmax weight on the value's tokens,
 * the mean over the answer and the largest of the query heads that share the kv head. */
still_status sti_rank_heads(still_model *m, const sti_probe *p, double *gain,
                            still_error *err);

/* method with caps for every head that fit a session into `budget` bytes; *chosen: heads
 * that keep more than the others. may_shrink: so may the chunk and the state. gain
 * [layers, G] > 0 somewhere. */
still_status sti_choose_caps(const still_model *m, const still_method *method,
                             const double *gain, size_t budget, bool may_shrink,
                             still_method *out, int *chosen, still_error *err);

/* Fails if these bytes are too few, whatever the gains; takes no time. */
still_status sti_check_budget(const still_model *m, const still_method *method,
                              size_t budget, bool may_shrink, still_error *err);

/* What files call the model, whatever adapter it has: its fingerprint in hex. */
enum { STI_KEPT_NAME = 2 * STI_FINGERPRINT + 1 };
void sti_kept_name(const still_model *m, char out[STI_KEPT_NAME]);
/* The file in p->folder that holds the gains of p->probes probes of p->seed on the model
 * of this name; free() *out. Reading fails if the file is missing or says anything else
 * than such a run could have written. */
still_status sti_kept_path(const char *name, const still_allocate_params *p, char **out,
                           still_error *err);
still_status sti_kept_read(const char *path, const char *name, const still_model *m,
                           const still_allocate_params *p, double *gain,
                           still_error *err);
still_status sti_kept_write(const char *path, const char *name, const still_model *m,
                            const still_allocate_params *p, const double *gain,
                            still_error *err);

#endif
