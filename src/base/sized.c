/* sized.c - see sized.h. The size is the only thing that the caller can have forgotten, and
 * then it is zero or anything: what no version can have is refused before a byte is read. */
#include "base/sized.h"

#include <string.h>

/* No struct of the interface grows by more. */
enum { MOST_GROWTH = 1 << 12 };

still_status sti_take(void *to, size_t room, const void *from, const char *name,
                      still_error *err)
{
    size_t size = room;
    memset(to, 0, room);
    if (from) memcpy(&size, from, sizeof size);
    if (size < 2 * sizeof size || size % sizeof size != 0 || size > room + MOST_GROWTH)
        return sti_fail(err, STILL_E_ARG,
                        "%s: its size is %zu bytes, expected sizeof(%s), %zu in this "
                        "library: set .size, or make it with STILL_PARAMS",
                        name, size, name, room);
    for (size_t i = room; i < size; i++)
        if (((const unsigned char *)from)[i])
            return sti_fail(
                err, STILL_E_UNSUPPORTED,
                "%s: sets something at byte %zu that still %s does not know "
                "(it has %zu bytes): the program needs a later libstill",
                name, i, still_version(), room);
    if (from) memcpy(to, from, size < room ? size : room);
    memcpy(to, &room, sizeof room);
    return STILL_OK;
}
