/* NFC of any text: what comes out is its own NFC, and as long as the text says it may be. */
#include <stdlib.h>
#include <string.h>

#include "base/nfc.h"
#include "base/utf8.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check(bool holds)
{
    if (!holds) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    const char *text = (const char *)data;
    sti_buf once = {0}, twice = {0};
    n = sti_utf8_span(text, n);
    const size_t span = sti_nfc_span(text, n);
    check(span <= n);
    sti_nfc_put(text, n, &once);
    check(!once.failed && once.n >= span && (!span || !memcmp(once.p, text, span)));
    check(once.n <= 3 * n && sti_utf8_span(once.p, once.n) == once.n);
    sti_nfc_put(once.p, once.n, &twice);
    check(once.n == twice.n && (!once.n || !memcmp(once.p, twice.p, once.n)));
    sti_buf_free(&once);
    sti_buf_free(&twice);
    return 0;
}
