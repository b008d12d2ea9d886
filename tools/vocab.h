/* vocab.h - a small synthetic byte-level BPE vocabulary, so that a random model can be
 * run on text: 256 byte tokens, a few merges, the special tokens of its family, and
 * made-up words up to the size wanted. */
#ifndef TOOLS_VOCAB_H
#define TOOLS_VOCAB_H

#include "base/buf.h"
#include "file/store.h"

enum { TOKEN_NORMAL = 1, TOKEN_CONTROL = 3, N_MERGES = 6, N_SPECIAL = 3 };
enum { MIN_VOCAB = 256 + N_MERGES + N_SPECIAL };

/* "\xc4\xa0" is the letter that stands for a space. */
static const char *const MERGES[N_MERGES] = {"\xc4\xa0 t",   "h e",        "i n",
                                             "\xc4\xa0t he", "\xc4\xa0 a", "e r"};

/* UTF-8 of the letter GPT-2 gives to a byte: itself if printable Latin-1, otherwise the
 * next one from U+0100. */
static inline void put_byte_letter(sti_buf *b, int byte)
{
    int code = 0x100;
    for (int i = 0; i <= byte; i++) {
        bool plain = (i >= '!' && i <= '~') || (i >= 0xa1 && i != 0xad);
        if (i == byte && plain) code = byte;
        if (i < byte && !plain) code++;
    }
    char utf8[2] = {(char)(0xc0 | code >> 6), (char)(0x80 | (code & 63))};
    if (code < 0x80)
        sti_buf_put(b, &(char){(char)code}, 1);
    else
        sti_buf_put(b, utf8, 2);
}

/* Writes tokenizer.* for `size` tokens; llama3 chooses splitting and specials. */
static inline still_status put_vocab(sti_writer *w, int size, bool llama3,
                                     still_error *err)
{
    static const char *const LLAMA3[N_SPECIAL] = {"<|begin_of_text|>",
                                                  "<|end_of_text|>", "<|eot_id|>"};
    static const char *const CHATML[N_SPECIAL] = {"<|endoftext|>", "<|im_start|>",
                                                  "<|im_end|>"};
    const uint32_t special = 256 + N_MERGES;
    sti_buf text = {0};
    sti_str merge[N_MERGES], *token = sti_alloc((size_t)size, sizeof *token);
    int32_t *type = sti_alloc((size_t)size, sizeof *type);
    size_t *begin = sti_alloc((size_t)size + 1, sizeof *begin);
    still_status status = STILL_E_MEMORY;
    if (!token || !type || !begin) goto done;
    for (int i = 0; i < size; i++) {
        int k = i - 256, s = k - N_MERGES, word = s - N_SPECIAL;
        begin[i] = text.n;
        type[i] = k >= N_MERGES && word < 0 ? TOKEN_CONTROL : TOKEN_NORMAL;
        if (k < 0) {
            put_byte_letter(&text, i);
        } else if (s < 0) { /* the two halves of a merge, joined */
            size_t left = (size_t)(strchr(MERGES[k], ' ') - MERGES[k]);
            sti_buf_put(&text, MERGES[k], left);
            sti_buf_puts(&text, MERGES[k] + left + 1);
        } else if (word < 0) {
            sti_buf_puts(&text, llama3 ? LLAMA3[s] : CHATML[s]);
        } else { /* a space and five letters: never one of the merges */
            sti_buf_puts(&text, "\xc4\xa0");
            for (int n = word, j = 0; j < 5; j++, n /= 26)
                sti_buf_put(&text, &(char){(char)('a' + n % 26)}, 1);
        }
    }
    begin[size] = text.n;
    if (text.failed) goto done;
    for (int i = 0; i < size; i++)
        token[i] = (sti_str){text.p + begin[i], begin[i + 1] - begin[i]};
    for (int i = 0; i < N_MERGES; i++)
        merge[i] = (sti_str){MERGES[i], strlen(MERGES[i])};

#define PUT(kind, key, ...)                                                            \
    if ((status = sti_writer_meta_##kind(w, "tokenizer.ggml." key, __VA_ARGS__, err))) \
    goto done
    PUT(str, "model", "gpt2");
    PUT(str, "pre", llama3 ? "llama-bpe" : "smollm");
    PUT(strs, "tokens", token, (size_t)size);
    PUT(i32s, "token_type", type, (size_t)size);
    PUT(strs, "merges", merge, N_MERGES);
    PUT(u32, "bos_token_id", special);
    PUT(u32, "eos_token_id", llama3 ? special + 1 : special + 2);
    PUT(bool, "add_bos_token", llama3);
#undef PUT
done:
    free(token);
    free(type);
    free(begin);
    sti_buf_free(&text);
    return status == STILL_E_MEMORY ? sti_fail_memory(err, "vocabulary", (size_t)size)
                                    : status;
}

#endif
