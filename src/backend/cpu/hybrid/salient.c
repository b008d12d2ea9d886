/* salient.c - see salient.h. */
#include "backend/cpu/hybrid/salient.h"

#include <math.h>
#include <string.h>

sti_hyb_list sti_hyb_list_of(const sti_hyb *h, const sti_hybrid_state *st, int sel)
{
    const sti_hybrid_list l = sti_hybrid_list_of(h->set, st, sel);
    return (sti_hyb_list){h, st, sel, l.first, l.capacity, &st->sal_count[sel]};
}

/* ---- A slot as it is stored ---------------------------------------------- */

/* A key or a value; without bits of its own it is `low` alone, in the state's type. */
typedef struct stored {
    _Alignas(float) uint8_t low[STI_ATTN_MAX_D * sizeof(float)];
    uint8_t high[STI_ATTN_MAX_D / 8];
    uint16_t scale[2 * STI_ATTN_MAX_D / STI_SALIENT_GROUP];
} stored;

static sti_salient_row row_of(stored *s)
{
    return (sti_salient_row){s->low, s->high, s->scale};
}

/* The arrays that a slot has its parts in: n elements of `size` bytes in each. */
typedef struct part {
    unsigned char *base;
    size_t size, n, offset; /* offset in `stored` */
} part;

static int parts_of(const sti_hyb_list *l, bool keys, part out[3])
{
    const sti_hybrid_state *st = l->st;
    const int D = l->h->D, bits = keys ? l->h->set->key_bits : l->h->set->value_bits;
    void *low = keys ? st->sal_k : st->sal_v,
         *high = keys ? st->sal_k_high : st->sal_v_high,
         *scale = keys ? st->sal_k_scale : st->sal_v_scale;
    const size_t word = keys ? 4 : 1;
    out[0] = (part){low, word, sti_salient_low(bits, D) / word, offsetof(stored, low)};
    if (bits == 0) {
        out[0].size = st->kv_size;
        out[0].n = (size_t)D;
        return 1;
    }
    out[1] = (part){scale, sizeof(uint16_t), (keys ? 1 : 2) * sti_salient_groups(D),
                    offsetof(stored, scale)};
    out[2] =
        (part){high, word, sti_salient_high(bits, D) / word, offsetof(stored, high)};
    return high ? 3 : 2;
}

/* n elements of `size` bytes (2 or 4), strides in elements. */
static void copy_elements(void *to, size_t to_step, const void *from, size_t from_step,
                          size_t size, size_t n)
{
    char *t = to;
    const char *f = from;
    if (to_step == 1 && from_step == 1)
        memcpy(t, f, n * size);
    else if (size == 2)
        for (size_t i = 0; i < n; i++)
            memcpy(t + 2 * i * to_step, f + 2 * i * from_step, 2);
    else
        for (size_t i = 0; i < n; i++)
            memcpy(t + 4 * i * to_step, f + 4 * i * from_step, 4);
}

/* A key or value of a slot: out of the list, or into it. */
static void copy_slot(const sti_hyb_list *l, bool keys, int slot, stored *s, bool out)
{
    part p[3];
    const int parts = parts_of(l, keys, p);
    const int first = keys ? slot / STI_ATTN_PANEL * STI_ATTN_PANEL : slot;
    const int left = l->capacity - first;
    const size_t step = !keys                   ? 1
                        : left < STI_ATTN_PANEL ? (size_t)left
                                                : STI_ATTN_PANEL;
    for (int i = 0; i < parts; i++) {
        unsigned char *at =
            p[i].base +
            ((l->first + (size_t)first) * p[i].n + (size_t)(slot - first)) * p[i].size;
        unsigned char *own = (unsigned char *)s + p[i].offset;
        if (out)
            copy_elements(own, 1, at, step, p[i].size, p[i].n);
        else
            copy_elements(at, step, own, 1, p[i].size, p[i].n);
    }
}

static void set_number(const sti_hyb_list *l, int slot, float score, int32_t position,
                       bool far)
{
    const size_t at = l->first + (size_t)slot;
    ((float *)l->st->sal_score)[at] = score;
    l->st->sal_pos[at] = position;
    if (l->st->sal_far) l->st->sal_far[at] = far;
}

/* The high bits of a key of five: from the order of a row to that of a panel
 * (qk_logits_levels of attn_tile.h), or back. */
static void turn_high_bits(stored *s, int D, bool to_row)
{
    for (size_t g = 0; g < sti_salient_groups(D); g++) {
        uint8_t *b = s->high + 4 * g;
        const uint32_t x = (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 |
                           (uint32_t)b[3] << 24;
        uint32_t y = 0;
        for (int k = 0; k < 8;
             k++) /* four bits: side by side in rows, else a byte each */
            y |= to_row ? ((x >> k & 0x01010101u) * 0x01020408u >> 24 & 15) << 4 * k
                        : ((x >> 4 * k & 15) * 0x00204081u & 0x01010101u) << k;
        for (int i = 0; i < 4; i++) b[i] = (uint8_t)(y >> 8 * i);
    }
}

static void pack_key(int bits, const float *x, int D, stored *s)
{
    sti_salient_pack_key(bits, x, D, row_of(s));
    if (bits == 5) turn_high_bits(s, D, false);
}

static void unpack_key(int bits, const stored *s, int D, float *x)
{
    stored row = *s;
    if (bits == 5) turn_high_bits(&row, D, true);
    sti_salient_unpack_key(bits, row_of(&row), D, x);
}

/* ---- Joining and reading -------------------------------------------------- */

/* x [D] as the window stores it, to what the list stores. */
static void quantize(const sti_hyb_list *l, bool keys, const void *x, stored *s)
{
    const sti_hyb *h = l->h;
    const int bits = keys ? h->set->key_bits : h->set->value_bits;
    float wide[STI_ATTN_MAX_D];
    if (bits == 0) {
        memcpy(s->low, x, (size_t)h->D * l->st->kv_size);
        return;
    }
    h->k->widen(wide, x, l->st->kv_size == 2, h->D);
    if (keys)
        pack_key(bits, wide, h->D, s);
    else
        sti_salient_pack_value(bits, wide, h->D, row_of(s));
}

static void dequantize(const sti_hyb_list *l, bool keys, stored *s, float *x)
{
    const sti_hyb *h = l->h;
    const int bits = keys ? h->set->key_bits : h->set->value_bits;
    if (bits == 0)
        h->k->widen(x, s->low, l->st->kv_size == 2, h->D);
    else if (keys)
        unpack_key(bits, s, h->D, x);
    else
        sti_salient_unpack_value(bits, row_of(s), h->D, x);
}

void sti_hyb_set_slot(const sti_hyb_list *l, int slot, const void *key,
                      const void *value, float score, int32_t position)
{
    stored s;
    quantize(l, true, key, &s);
    copy_slot(l, true, slot, &s, false);
    quantize(l, false, value, &s);
    copy_slot(l, false, slot, &s, false);
    set_number(l, slot, score, position, false);
}

void sti_hyb_read_slot(const sti_hyb_list *l, int slot, float *key, float *value)
{
    stored s;
    copy_slot(l, true, slot, &s, true);
    dequantize(l, true, &s, key);
    copy_slot(l, false, slot, &s, true);
    dequantize(l, false, &s, value);
}

/* ---- Far keys -------------------------------------------------------------- */

static void move_slot(const sti_hyb_list *l, int to, int from)
{
    if (to == from) return;
    const size_t at = l->first + (size_t)from;
    stored s;
    for (int keys = 0; keys < 2; keys++) {
        copy_slot(l, keys, from, &s, true);
        copy_slot(l, keys, to, &s, false);
    }
    set_number(l, to, ((float *)l->st->sal_score)[at], l->st->sal_pos[at],
               sti_hyb_is_far(l, from));
}

int sti_hyb_far_keys(const sti_hyb_list *l)
{
    int n = 0, end = l->st->sal_far ? *l->count : 0;
    while (n < end) { /* all slots before n are far, none from `end` on */
        const int mid = n + (end - n) / 2;
        if (sti_hyb_is_far(l, mid))
            n = mid + 1;
        else
            end = mid;
    }
    return n;
}

void sti_hyb_fill_far_gaps(const sti_hyb_list *l, int32_t *evicted, int n)
{
    int far = sti_hyb_far_keys(l);
    while (n > 0 && evicted[n - 1] >= far) n--;
    while (n-- > 0) {
        move_slot(l, evicted[n], --far);
        evicted[n] = far;
    }
}

/* RoPE by -position, in double: levels of the result are then those of the reference. */
static void rotate_back(const sti_hybrid_in *in, float *x, int D, int32_t position)
{
    for (int i = 0; i < D / 2; i++) {
        const int a = in->interleaved ? 2 * i : i,
                  b = in->interleaved ? a + 1 : i + D / 2;
        const double angle = -(double)position * (double)in->inv_freq[i];
        const double xa = (double)x[a], xb = (double)x[b], c = cos(angle),
                     s = sin(angle);
        x[a] = (float)(xa * c - xb * s);
        x[b] = (float)(xb * c + xa * s);
    }
}

/* The key of a slot, without RoPE from now on. */
static void unrotate(const sti_hyb_list *l, const sti_hybrid_in *in, stored *key,
                     int32_t position)
{
    const sti_hyb *h = l->h;
    float x[STI_ATTN_MAX_D];
    dequantize(l, true, key, x);
    if (h->set->key_bits) {
        rotate_back(in, x, h->D, position);
        pack_key(h->set->key_bits, x, h->D, key);
        return;
    }
    h->rows->rope(x, -position, in->inv_freq, 1, h->D, in->interleaved);
    uint16_t half[STI_ATTN_MAX_D];
    memcpy(key->low, sti_hyb_narrow(h, l->st, x, half), (size_t)h->D * l->st->kv_size);
}

/* Slot i trades places with the first near slot. */
static void move_to_far(const sti_hyb_list *l, const sti_hybrid_in *in, int i, int near)
{
    const size_t at = l->first + (size_t)i;
    const float score = ((float *)l->st->sal_score)[at];
    const int32_t position = l->st->sal_pos[at];
    stored key, value;
    copy_slot(l, true, i, &key, true);
    copy_slot(l, false, i, &value, true);
    unrotate(l, in, &key, position);
    move_slot(l, i, near);
    copy_slot(l, true, near, &key, false);
    copy_slot(l, false, near, &value, false);
    set_number(l, near, score, position, true);
}

void sti_hyb_make_far(const sti_hyb_list *l, const sti_hybrid_args *a, int64_t c)
{
    const int64_t last = (c + 1) * l->h->C - 1;
    int far = sti_hyb_far_keys(l);
    for (int i = far; i < *l->count; i++)
        if (last - l->st->sal_pos[l->first + (size_t)i] >= a->set->position_cap)
            move_to_far(l, &a->in, i, far++);
}
