/* tekken.json files: whatever loads must encode and decode. */
#include "try_tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    try_tokenizer(sti_tokenizer_load_tekken, data, n);
    return 0;
}
