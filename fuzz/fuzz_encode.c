/* Any text through the small vocabularies: byte-level tokens put together must be the
 * text again, whatever bytes it has. The first byte chooses vocabulary and flags. */
#include <string.h>

#include "try_tokenizer.h"

/* The pieces of the ids, one after the other, are the text. */
static void check_bytes(const still_tokenizer *tk, const char *text, size_t n,
                        unsigned flags)
{
    still_error err;
    size_t count = 0, at = 0, len;
    int32_t *ids = malloc((n + 8) * sizeof *ids);
    check(ids && !still_tokenizer_encode(tk, text, n, flags, ids, n + 8, &count, &err));
    check(count <= n);
    for (size_t i = 0; i < count; i++) {
        const char *p = still_tokenizer_piece(tk, ids[i], true, &len);
        check(p && at + len <= n && !memcmp(text + at, p, len));
        at += len;
    }
    check(at == n);
    free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const char *const names[] = {
        "smollm.json", "tekken-hf.json", "spm.model",  "spm-nobytes.model",
        "qwen.json",   "tekken.gguf",    "gemma.json", "gemma.model"};
    static still_tokenizer *tk[8];
    for (int i = 0; i < 8 && !tk[i]; i++) {
        char path[4096];
        still_error err;
        snprintf(path, sizeof path, "%s/vocab/%s", FIXTURES, names[i]);
        check(still_tokenizer_open(path, &tk[i], &err) == STILL_OK);
    }
    if (!n) return 0;
    unsigned which = (data[0] & 3) | (data[0] >> 2 & 4), flags = data[0] >> 2 & 3;
    const char *text = (const char *)data + 1;
    use_tokenizer(tk[which], text, n - 1, flags);
    if ((which & 3) < 2 && which != 4) /* Qwen's brings text into NFC */
        check_bytes(tk[which], text, n - 1, flags & ~1u);
    return 0;
}
