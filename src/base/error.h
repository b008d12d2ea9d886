/* error.h - how failures travel: a status code and one line of text. */
#ifndef STI_BASE_ERROR_H
#define STI_BASE_ERROR_H

#include "still.h"

#ifdef __cplusplus /* CUDA C calls it too */
extern "C" {
#endif

/* Fills err (may be NULL) and returns code, so that a caller can
 *     return sti_fail(err, STILL_E_FORMAT, "%s: ...", path);
 * Control characters in the finished text become '?': names from files are
 * untrusted and must not reach a terminal raw. */
still_status sti_fail(still_error *err, still_status code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Puts "prefix: " before the text err already holds. Returns err->code. */
still_status sti_fail_prefix(still_error *err, still_status code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* The usual line for a failed allocation. */
still_status sti_fail_memory(still_error *err, const char *what, size_t bytes);

/* The same calls with a result that the compiler and the analyzer can see. Without it
 * they assume that a failing function may return STILL_OK, and warn about outputs that
 * it would not have set. code is evaluated twice. */
static inline still_status sti_code(still_status same, still_status code)
{
    (void)same;
    return code;
}
#define sti_fail(err, code, ...) sti_code(sti_fail(err, code, __VA_ARGS__), code)
#define sti_fail_memory(err, what, bytes)                                              \
    sti_code(sti_fail_memory(err, what, bytes), STILL_E_MEMORY)

/* Evaluates a call that can fail, and returns its status if it does. */
#define STI_TRY(call)                                                                  \
    do {                                                                               \
        still_status sti_try_status_ = (call);                                         \
        if (sti_try_status_ != STILL_OK) return sti_try_status_;                       \
    } while (0)

#ifdef __cplusplus
}
#endif

#endif
