/* skip.h - skips a test and says why, which tests/expect.sh insists on. A
 * skip that is nobody's fault (an instruction set, a device) has its line in
 * tests/expected-skips; any other one fails `make test`. */
#ifndef TESTS_SKIP_H
#define TESTS_SKIP_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

/* skip_because("no %s here", name) */
#define skip_because(...)                                                              \
    do {                                                                               \
        print_message("skipped: ");                                                    \
        print_message(__VA_ARGS__);                                                    \
        print_message("\n");                                                           \
        skip();                                                                        \
    } while (0)

/* Says that this processor lacks an instruction set, for tests that go through all of
 * them: what they leave out is shown as a skip, and the others are tested. */
static inline void skip_isa(const char *isa)
{
    static const char *told[8];
    for (int i = 0; i < 8; i++) {
        if (told[i] && strcmp(told[i], isa) == 0) return;
        if (told[i]) continue;
        told[i] = isa;
        print_message("skipped: this processor has no %s\n", isa);
        return;
    }
}

#endif
