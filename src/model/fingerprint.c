/* fingerprint.c - telling models apart without reading gigabytes.
 *
 * Two fine-tunes of one base share every name and shape and differ in every tensor, so
 * the first and last bytes of each tensor are enough to tell them apart. */
#include <string.h>

#include "base/sha256.h"
#include "model/model.h"

enum { ENDS = 4096 };

void sti_model_fingerprint(const still_model *m, bool with_adapter,
                           unsigned char out[STI_FINGERPRINT])
{
    sti_sha256 sha;
    sti_sha256_start(&sha);
    for (size_t i = 0; i < m->store.n_tensors; i++) {
        const sti_tensor *t = &m->store.tensor[i];
        size_t n = t->bytes < ENDS ? t->bytes : ENDS;
        int32_t type = (int32_t)t->type;
        sti_sha256_add(&sha, t->name, strlen(t->name) + 1);
        sti_sha256_add(&sha, &type, sizeof type);
        sti_sha256_add(&sha, t->dim, (size_t)t->n_dims * sizeof *t->dim);
        sti_sha256_add(&sha, t->data, n);
        sti_sha256_add(&sha, (const char *)t->data + t->bytes - n, n);
    }
    /* A page that is touched brings its neighbours: tens of megabytes in all. */
    for (size_t i = 0; i < m->store.n_maps; i++)
        sti_map_drop(m->store.map[i].data, m->store.map[i].size);
    const sti_adapter *a = with_adapter ? m->adapter : NULL;
    if (a) sti_sha256_add(&sha, a->value, a->n_values * sizeof *a->value);
    if (a && a->maps.p) sti_sha256_add(&sha, a->maps_sum, sizeof a->maps_sum);
    if (a && a->merged) sti_sha256_add(&sha, a->merged_sum, sizeof a->merged_sum);
    sti_sha256_end(&sha, out);
}
