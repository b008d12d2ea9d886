/* spell.c - tokens and merges as vocabulary files spell them, turned into bytes.
 *
 * Byte-level files write every byte as a printable character (GPT-2's alphabet), or tokens
 * in base64;
 * SentencePiece files write a space as U+2581 and lone bytes as <0xE2>. */
#include <stdlib.h>
#include <string.h>

#include "token/tokenizer.h"

/* U+2581 becomes a space; out has room for n. */
static size_t bytes_of_spm(const char *p, size_t n, char *out)
{
    size_t k = 0;
    for (size_t i = 0; i < n;) {
        if (n - i >= 3 && !memcmp(p + i, "\xE2\x96\x81", 3)) {
            out[k++] = ' ';
            i += 3;
        } else {
            out[k++] = p[i++];
        }
    }
    return k;
}

still_status sti_tokenizer_add_spm(still_tokenizer *tk, const char *p, size_t n,
                                   sti_kind kind, still_error *err)
{
    sti_vocab *v = &tk->v;
    if (kind == STI_KIND_BYTE) {
        int b = sti_byte_of_name(p, n);
        if (b < 0)
            return sti_fail(err, STILL_E_FORMAT,
                            "token %d is a byte but is spelled '%.*s', not <0x..>",
                            v->n, (int)(n < 40 ? n : 40), p);
        char c = (char)b;
        if (v->byte_id[b] < 0) v->byte_id[b] = v->n;
        return sti_vocab_add(v, &c, 1, kind, err);
    }
    if (kind == STI_KIND_CONTROL || kind == STI_KIND_UNKNOWN || n > STI_MAX_PIECE)
        return sti_vocab_add(v, p, n, kind, err);
    char *plain = sti_alloc(n, 1);
    if (!plain) return sti_fail_memory(err, "token", n);
    still_status st = sti_vocab_add(v, plain, bytes_of_spm(p, n, plain), kind, err);
    free(plain);
    return st;
}

static int sextet(char c)
{
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

bool sti_bytes_of_base64(const char *p, size_t n, char *out, size_t *n_out)
{
    size_t k = 0, pad = 0;
    if (!n || n % 4) return false;
    while (pad < 2 && p[n - 1 - pad] == '=') pad++;
    for (size_t i = 0; i < n; i += 4) {
        uint32_t bits = 0;
        for (size_t j = i; j < i + 4; j++) {
            int v = j < n - pad ? sextet(p[j]) : 0;
            if (v < 0) return false;
            bits = bits << 6 | (uint32_t)v;
        }
        for (int shift = 16; shift >= 0; shift -= 8) out[k++] = (char)(bits >> shift);
    }
    *n_out = k - pad;
    return true;
}

still_status sti_tokenizer_add_bytes(still_tokenizer *tk, const char *p, size_t n,
                                     still_error *err)
{
    sti_vocab *v = &tk->v;
    if (n == 1 && v->byte_id[(unsigned char)p[0]] < 0)
        v->byte_id[(unsigned char)p[0]] = v->n;
    return sti_vocab_add(v, p, n, STI_KIND_NORMAL, err);
}

still_status sti_tokenizer_check_bytes(const still_tokenizer *tk, const char *what,
                                       still_error *err)
{
    for (int b = 0; b < 256; b++)
        if (tk->v.byte_id[b] < 0)
            return sti_fail(err, STILL_E_FORMAT,
                            "%s: byte 0x%02X has no token among the %d", what, b,
                            tk->v.n);
    return STILL_OK;
}

still_status sti_tokenizer_add_gpt2(still_tokenizer *tk, const char *p, size_t n,
                                    sti_kind kind, still_error *err)
{
    sti_vocab *v = &tk->v;
    if (kind != STI_KIND_NORMAL || n > STI_MAX_PIECE)
        return sti_vocab_add(v, p, n, kind, err);
    char *bytes = sti_alloc(n, 1);
    if (!bytes) return sti_fail_memory(err, "token", n);
    size_t k = 0;
    still_status st;
    if (sti_bytes_of_gpt2(p, n, bytes, &k))
        st = sti_tokenizer_add_bytes(tk, bytes, k, err);
    else /* never encoded, but decoding knows it */
        st = sti_vocab_add(v, p, n, STI_KIND_CONTROL, err);
    free(bytes);
    return st;
}

/* The bytes of one side of a merge; false if no token is spelled this way. */
static bool side_bytes(const still_tokenizer *tk, const char *p, size_t n, char *out,
                       size_t *n_out)
{
    if (!tk->spm) return sti_bytes_of_gpt2(p, n, out, n_out);
    *n_out = bytes_of_spm(p, n, out);
    return true;
}

still_status sti_tokenizer_add_merge(still_tokenizer *tk, sti_str left, sti_str right,
                                     uint32_t rank, still_error *err)
{
    char small[256], *bytes = small;
    if (left.n > STI_MAX_PIECE || right.n > STI_MAX_PIECE)
        return sti_fail(err, STILL_E_LIMIT, "merge %u is longer than %d bytes", rank,
                        STI_MAX_PIECE);
    if (left.n + right.n > sizeof small) bytes = sti_alloc(left.n + right.n, 1);
    if (!bytes) return sti_fail_memory(err, "merge", left.n + right.n);
    size_t l = 0, r = 0;
    int32_t a = -1, b = -1, ab = -1;
    if (side_bytes(tk, left.p, left.n, bytes, &l) &&
        side_bytes(tk, right.p, right.n, bytes + l, &r)) {
        a = sti_vocab_find(&tk->v, bytes, l);
        b = sti_vocab_find(&tk->v, bytes + l, r);
        ab = sti_vocab_find(&tk->v, bytes, l + r);
    }
    if (bytes != small) free(bytes);
    if (a < 0 || b < 0 || ab < 0)
        return sti_fail(err, STILL_E_FORMAT,
                        "merge %u, '%.*s' and '%.*s': %s is not in the vocabulary",
                        rank, (int)(left.n < 40 ? left.n : 40), left.p,
                        (int)(right.n < 40 ? right.n : 40), right.p,
                        a < 0   ? "the first"
                        : b < 0 ? "the second"
                                : "the result");
    sti_bpe_put(&tk->bpe, a, b, rank, ab);
    return STILL_OK;
}
