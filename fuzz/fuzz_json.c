/* fuzz_json.c - JSON texts: what is accepted has the value that jansson gives it, and is
 * the same after it was written and read again; what is refused, jansson refuses too. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const unsigned mine[] = {0, STI_JSON_ANY | STI_JSON_NUL, STI_JSON_ONCE};
    static const size_t theirs[] = {0, JSON_DECODE_ANY | JSON_ALLOW_NUL,
                                    JSON_REJECT_DUPLICATES};
    const char *text = (const char *)data;
    for (int i = 0; i < 3; i++) {
        json_t *v, *again;
        still_error err;
        json_error_t where;
        const still_status st = sti_json_read("fuzz", text, size, mine[i], &v, &err);
        json_t *other = json_loadb(text, size, theirs[i], &where);
        if ((st == STILL_OK) != (v != NULL) || (st != STILL_OK && !*err.text)) abort();
        /* Limits of our own: the depth of nesting, and digits of a number; and jansson
         * takes a byte 0 for the end. */
        if (!v && other && !strstr(err.text, "nested") && !strstr(err.text, "digits") &&
            !memchr(text, 0, size))
            abort();
        if (v && (!other || !json_equal(v, other))) abort();
        char *out = v ? json_dumps(v, JSON_ENCODE_ANY | JSON_REAL_PRECISION(17)) : NULL;
        if (out) {
            if (sti_json_read("fuzz", out, strlen(out), mine[1], &again, &err) ||
                !json_equal(v, again))
                abort();
            json_decref(again);
        }
        free(out);
        json_decref(v);
        json_decref(other);
    }
    return 0;
}
