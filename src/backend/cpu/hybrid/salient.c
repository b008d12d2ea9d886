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
    out[0] = (part){low, 1, sti_salient_low(bits, D), offsetof(stored, low)};
    if (bits == 0) {
        out[0].size = st->kv_size;
        out[0].n = (size_t)D;
        return 1;
    }
    out[1] = (part){scale, sizeof(uint16_t), (keys ? 1 : 2) * sti_salient_groups(D),
                    offsetof(stored, scale)};
    out[2] = (part){high, 1, sti_salient_high(bits, D), offsetof(stored, high)};
    return high ? 3 : 2;
}

/* n elements of `size` bytes (1, 2 or 4), strides in elements. */
static void copy_elements(void *to, size_t to_step, const void *from, size_t from_step,
                          size_t size, size_t n)
{
    if (to_step == 1 && from_step == 1)
        memcpy(to, from, n * size);
    else if (size == 1)
        for (size_t i = 0; i < n; i++)
            ((uint8_t *)to)[i * to_step] = ((const uint8_t *)from)[i * from_step];
    else if (size == 2)
        for (size_t i = 0; i < n; i++)
            ((uint16_t *)to)[i * to_step] = ((const uint16_t *)from)[i * from_step];
    else
        for (size_t i = 0; i < n; i++)
            ((float *)to)[i * to_step] = ((const float *)from)[i * from_step];
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
        sti_salient_pack_key(bits, wide, h->D, row_of(s));
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
        sti_salient_unpack_key(bits, row_of(s), h->D, x);
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

static int far_keys(const sti_hyb_list *l)
{
    int n = 0;
    while (n < *l->count && sti_hyb_is_far(l, n)) n++;
    return n;
}

void sti_hyb_fill_far_gaps(const sti_hyb_list *l, int32_t *evicted, int n)
{
    int far = far_keys(l);
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
        sti_salient_pack_key(h->set->key_bits, x, h->D, row_of(key));
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
    int far = far_keys(l);
    for (int i = far; i < *l->count; i++)
        if (last - l->st->sal_pos[l->first + (size_t)i] >= a->set->position_cap)
            move_to_far(l, &a->in, i, far++);
}
