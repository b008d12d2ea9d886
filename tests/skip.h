/* skip.h - skips a test and says why, which tests/expect.sh insists on. Goes after
 * cmocka.h. A skip that is nobody's fault (an instruction set, a device) has its line in
 * tests/expected-skips; any other one fails `make test`. */
#ifndef TESTS_SKIP_H
#define TESTS_SKIP_H

/* skip_because("no %s here", name) */
#define skip_because(...)                                                              \
    do {                                                                               \
        print_message("skipped: ");                                                    \
        print_message(__VA_ARGS__);                                                    \
        print_message("\n");                                                           \
        skip();                                                                        \
    } while (0)

#endif
