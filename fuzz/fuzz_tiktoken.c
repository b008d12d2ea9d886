/* tiktoken rank files: whatever loads must encode and decode. */
#include "try_tokenizer.h"

static still_status load(still_tokenizer *tk, const char *p, size_t n, still_error *err)
{
    return sti_tokenizer_load_tiktoken(tk, p, n, n % 2 ? "llama-bpe" : "qwen2", err);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    try_tokenizer(load, data, n);
    return 0;
}
