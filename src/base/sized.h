/* sized.h - structs of the caller that carry their size: see "Structs grow" in still.h.
 *
 * The caller's struct may be shorter than ours (built for an earlier library) or longer (for
 * a later one). It is copied into ours once, where it comes in; behind that everything uses
 * the copy, and zeros stand for what the caller does not have.
 *
 *     still_session_params p;
 *     STI_TRY(STI_TAKE(&p, given, still_session_params, err));
 *
 * A new member goes to the end, means the old behaviour when it is zero, and must not fill
 * what was padding, which a caller need not have zeroed. */
#ifndef STI_BASE_SIZED_H
#define STI_BASE_SIZED_H

#include "base/error.h"

/* to: a struct of `room` bytes that begins with its size_t size. from NULL: all zeros. */
still_status sti_take(void *to, size_t room, const void *from, const char *name,
                      still_error *err);

#define STI_TAKE(to, from, type, err)                                                  \
    sti_take(1 ? (to) : (type *)NULL, sizeof(type), 1 ? (from) : (const type *)NULL,   \
             #type, err)

#endif
