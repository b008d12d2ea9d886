/* sampling.h - how a model's authors sample from it, as far as its files say. A setting is
 * a hint: one that is no number, or out of its range, counts as left out. */
#ifndef STI_MODEL_SAMPLING_H
#define STI_MODEL_SAMPLING_H

#include "file/store.h"

/* Every setting left out (negative). */
still_sampler_params sti_sampling_none(void);
/* generation_config.json beside a folder's config.json, or general.sampling.* of a GGUF
 * file. */
still_status sti_sampling_read(const sti_store *s, still_sampler_params *out,
                               still_error *err);
/* "sampling" of an adapter's description (NULL: it has none), and back. */
void sti_sampling_of_json(const json_t *o, still_sampler_params *out);
json_t *sti_sampling_to_json(const still_sampler_params *p);
/* Takes from `more` what it does not leave out. */
void sti_sampling_override(still_sampler_params *p, const still_sampler_params *more);

#endif
