/* damage.h - a model file cut off and with flipped bits: whatever is left of it either
 * opens with sound promises or is refused. */
#ifndef TESTS_FILE_DAMAGE_H
#define TESTS_FILE_DAMAGE_H

#include "helpers.h"

/* A prefix either lacks bytes of a tensor and is refused, or is a whole file. */
static inline void refuse_every_prefix(const sti_buf *b)
{
    for (size_t n = 0; n < b->n; n++) {
        sti_store s;
        still_error err;
        if (open_bytes(b->p, n, &s, &err) == STILL_OK)
            fail_msg("a prefix of %zu of %zu bytes was opened", n, b->n);
    }
}

/* Every bit of every byte, and some whole values: opens with sound promises or is
 * refused. The sanitizers are the judges. */
static inline void survive_every_flip(sti_buf *b)
{
    int opened = 0, refused = 0;
    for (size_t i = 0; i < b->n; i++)
        for (int k = 0; k < 10; k++) {
            sti_store s;
            still_error err;
            char kept = b->p[i];
            b->p[i] = (char)(k < 8 ? kept ^ 1 << k : k == 8 ? 0 : 0xff);
            if (open_bytes(b->p, b->n, &s, &err) == STILL_OK) {
                touch(&s);
                sti_store_close(&s);
                opened++;
            } else {
                refused++;
            }
            b->p[i] = kept;
        }
    assert_true(opened > 100 && refused > 100);
}

#endif
