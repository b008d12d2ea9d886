/* error.c - one line of text per failure, safe to print. */
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"

const char *still_version(void)
{
#define STI_STR2(x) #x
#define STI_STR(x) STI_STR2(x)
    return STI_STR(STILL_VERSION_MAJOR) "." STI_STR(STILL_VERSION_MINOR) "." STI_STR(
        STILL_VERSION_PATCH);
}

const char *still_status_name(still_status s)
{
    switch (s) {
    case STILL_OK: return "ok";
    case STILL_E_ARG: return "wrong argument";
    case STILL_E_IO: return "input/output error";
    case STILL_E_FORMAT: return "format error";
    case STILL_E_UNSUPPORTED: return "not supported";
    case STILL_E_MEMORY: return "out of memory";
    case STILL_E_LIMIT: return "limit exceeded";
    case STILL_E_NUMERIC: return "numeric error";
    case STILL_E_CANCELLED: return "cancelled";
    }
    return "unknown status";
}

static void set_text(still_error *err, still_status code, const char *fmt, va_list ap)
{
    err->code = code;
    vsnprintf(err->text, sizeof err->text, fmt, ap);
    sti_utf8_harmless(err->text, strlen(err->text), false);
}

still_status(sti_fail)(still_error *err, still_status code, const char *fmt, ...)
{
    if (err) {
        va_list ap;
        va_start(ap, fmt);
        set_text(err, code, fmt, ap);
        va_end(ap);
    }
    return code;
}

still_status sti_fail_prefix(still_error *err, still_status code, const char *fmt, ...)
{
    if (err) {
        char old[sizeof err->text];
        memcpy(old, err->text, sizeof old);
        va_list ap;
        va_start(ap, fmt);
        set_text(err, code, fmt, ap);
        va_end(ap);
        size_t n = strlen(err->text);
        snprintf(err->text + n, sizeof err->text - n, ": %s", old);
        sti_utf8_harmless(err->text, strlen(err->text), false); /* cut in a character */
    }
    return code;
}

still_status(sti_fail_memory)(still_error *err, const char *what, size_t bytes)
{
    return sti_fail(err, STILL_E_MEMORY, "%s: out of memory (%zu bytes wanted)", what,
                    bytes);
}
