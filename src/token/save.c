/* save.c - see save.h. The inverse of spell.c. */
#include "token/save.h"

#include <stdlib.h>

/* GPT-2's character of a byte: printable Latin-1 is itself, the other 68 bytes are, in
 * order, U+0100 .. U+0143. */
static unsigned gpt2_of_byte(unsigned char b)
{
    if (b <= 0x20) return 0x100u + b;
    if (b >= 0x7F && b <= 0xA0) return 0x121u + b - 0x7Fu;
    return b == 0xAD ? 0x143u : b;
}

static void put_character(sti_buf *out, unsigned c) /* below U+0800 */
{
    const char two[2] = {(char)(0xC0 | c >> 6), (char)(0x80 | (c & 0x3F))};
    const char one = (char)c;
    if (c < 0x80)
        sti_buf_put(out, &one, 1);
    else
        sti_buf_put(out, two, 2);
}

void sti_spell_token(const still_tokenizer *tk, int32_t id, sti_buf *out)
{
    size_t n;
    const char *p = sti_vocab_piece(&tk->v, id, &n);
    const sti_kind kind = tk->v.kind[id];
    sti_buf_clear(out);
    if (n == 0)
        sti_buf_printf(out, "[UNUSED%d]", (int)id);
    else if (kind == STI_KIND_BYTE)
        sti_buf_printf(out, "<0x%02X>", (unsigned char)p[0]);
    else if (!tk->spm && kind == STI_KIND_NORMAL)
        for (size_t i = 0; i < n; i++)
            put_character(out, gpt2_of_byte((unsigned char)p[i]));
    else if (tk->spm && kind != STI_KIND_CONTROL && kind != STI_KIND_UNKNOWN)
        for (size_t i = 0; i < n; i++) {
            if (p[i] == ' ')
                sti_buf_puts(out, "\xE2\x96\x81");
            else
                sti_buf_put(out, p + i, 1);
        }
    else
        sti_buf_put(out, p, n);
}

static int by_rank(const void *a, const void *b)
{
    const sti_pair *x = a, *y = b;
    if (x->rank != y->rank) return x->rank < y->rank ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

still_status sti_merges_in_order(const still_tokenizer *tk, sti_pair **out, size_t *n,
                                 still_error *err)
{
    const sti_bpe *b = &tk->bpe;
    sti_pair *all = sti_alloc(b->n ? b->n : 1, sizeof *all);
    *out = all;
    *n = 0;
    if (!all) return sti_fail_memory(err, "merges", b->n * sizeof *all);
    for (size_t i = 0; b->slot && i <= b->mask && *n < b->n; i++) {
        const sti_pair *s = &b->slot[i];
        if (s->left < 0 || s->left >= tk->n || s->right >= tk->n || s->id >= tk->n)
            continue;
        all[(*n)++] = *s;
    }
    qsort(all, *n, sizeof *all, by_rank);
    return STILL_OK;
}
