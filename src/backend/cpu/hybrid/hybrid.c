/* hybrid.c - the hybrid operator for sessions: a call is cut into steps, and each step
 * into tasks for the pool.
 *
 * Sessions that get one token are decoded together (decode.c). A session that gets
 * several goes chunk by chunk (STILL Alg. 1): a task in which the oldest chunk retires
 * and the new keys are stored, and a task for scores and outputs. */
#include <math.h>
#include <string.h>

#include "backend/cpu/hybrid/hybrid.h"
#include "backend/cpu/kernels.h"

/* ---- Scratch ------------------------------------------------------------- */

static size_t padded(int n)
{
    return ((size_t)n + STI_ATTN_PAD - 1) / STI_ATTN_PAD * STI_ATTN_PAD;
}

static sti_hyb_worker carve_worker(sti_carve *c, const sti_hyb *h)
{
    const size_t rows = STI_ATTN_ROWS, keys = STI_HYB_KEYS, D = (size_t)h->D;
    const size_t ldo = (size_t)h->ldo, one = sizeof(float);
    const size_t digits = sti_attn_digit_bytes(h->D);
    return (sti_hyb_worker){
        .t = {.q = sti_carve_take(c, rows * STI_ATTN_LDQ, one),
              .s = sti_carve_take(c, rows * STI_ATTN_LDS, one),
              .digits = h->set->key_bits ? sti_carve_take(c, rows * digits, 1) : NULL,
              .k = sti_carve_take(c, STI_ATTN_BLOCK * D, one),
              .v = sti_carve_take(c, STI_ATTN_BLOCK * ldo, one),
              .o = sti_carve_take(c, rows * ldo, one),
              .M = sti_carve_take(c, rows, one),
              .L = sti_carve_take(c, rows, one),
              .m = sti_carve_take(c, rows, one),
              .l = sti_carve_take(c, rows, one),
              .keep = sti_carve_take(c, rows, one),
              .add = sti_carve_take(c, rows, one)},
        .q_far = h->rotates ? sti_carve_take(c, rows * STI_ATTN_LDQ, one) : NULL,
        .digits_far =
            h->set->key_bits && h->rotates ? sti_carve_take(c, rows * digits, 1) : NULL,
        .tail_m = sti_carve_take(c, rows, one),
        .tail_l = sti_carve_take(c, rows, one),
        .self = sti_carve_take(c, rows, one),
        .score = sti_carve_take(c, rows, sizeof(sti_hyb_score)),
        .lin = sti_carve_take(c, rows * ldo, one),
        .den = sti_carve_take(c, rows, one),
        .x = sti_carve_take(c, keys * D, one),
        .u = sti_carve_take(c, keys * (size_t)h->ldu, one),
        .phi = sti_carve_take(c, keys * (size_t)h->ldp, one),
        .sum = sti_carve_take(c, (size_t)h->P * D, one),
        .unit = sti_carve_take(c, STI_HYB_SLOTS, sizeof(sti_hyb_unit)),
    };
}

sti_hyb_worker sti_hyb_worker_of(const sti_hyb *h, int w)
{
    sti_carve c = {.base = h->areas + (size_t)w * h->area_bytes};
    return carve_worker(&c, h);
}

static sti_hyb_retiring carve_retiring(sti_carve *c, const sti_hyb *h, int cap)
{
    const size_t chunk = (size_t)h->C, list = cap > 0 ? (size_t)cap : 0;
    const size_t keys = STI_HYB_KEYS, one = sizeof(float);
    return (sti_hyb_retiring){
        .entry = sti_carve_take(c, chunk + list, sizeof(sti_hyb_entry)),
        .stays = sti_carve_take(c, chunk, 1),
        .evicted = sti_carve_take(c, list, 1),
        .likeness = sti_carve_take(c, chunk, one),
        .fold = sti_carve_take(c, chunk, sizeof(int32_t)),
        .phi = sti_carve_take(c, keys * (size_t)h->ldp, one),
        .value = sti_carve_take(c, keys * (size_t)h->D, one),
    };
}

/* Lays the scratch out for `rows` rows of a call; counts if c has no base. */
static void carve_scratch(sti_carve *c, sti_hyb *h, int cap, int rows)
{
    const size_t states = (size_t)rows * (size_t)h->H, group = (size_t)h->group;
    sti_carve area = {0};
    carve_worker(&area, h);
    h->area_bytes = (area.used + 63) & ~(size_t)63;
    h->areas = sti_carve_take(c, (size_t)h->workers, h->area_bytes);
    h->retiring = sti_carve_take(c, (size_t)h->S, sizeof *h->retiring);
    for (int s = 0; s < h->S; s++) {
        const sti_hyb_retiring x = carve_retiring(c, h, cap);
        if (h->retiring && h->may_retire) h->retiring[s] = x;
    }
    h->round = sti_carve_take(c, 1, sizeof *h->round);
    h->slots = sti_carve_take(c, STI_HYB_SLOTS * group * (size_t)(h->ldo + 5),
                              sizeof *h->slots);
    h->M = sti_carve_take(c, states, sizeof *h->M);
    h->L = sti_carve_take(c, states, sizeof *h->L);
    h->window_m = sti_carve_take(c, states, sizeof *h->M);
    h->window_l = sti_carve_take(c, states, sizeof *h->L);
    h->score = sti_carve_take(c, states, sizeof *h->score);
}

/* [2, D/2]: cosines and sines of RoPE at `position`, from the device if it has them. */
static const float *cap_rope(sti_dev *dev, int position, const float *inv_freq,
                             int pairs)
{
    _Static_assert(2 * STI_ROPE_PAIRS_MAX >= STI_ATTN_MAX_D, "every head size fits");
    sti_cpu_rope_angle *t = &dev->cap_rope;
    const size_t bytes = (size_t)pairs * sizeof *inv_freq;
    if (t->position == position && t->pairs == pairs &&
        memcmp(t->inv_freq, inv_freq, bytes) == 0)
        return t->cos_sin;
    t->position = position;
    t->pairs = pairs;
    memcpy(t->inv_freq, inv_freq, bytes);
    for (int i = 0; i < pairs; i++) {
        const double angle = (double)position * (double)inv_freq[i];
        t->cos_sin[i] = (float)cos(angle);
        t->cos_sin[pairs + i] = (float)sin(angle);
    }
    return t->cos_sin;
}

static sti_hyb params_of(const sti_dev *dev, const sti_hybrid_settings *set,
                         const sti_hybrid_shape *shape)
{
    const int S = sti_hybrid_selection_heads(set, shape),
              P = sti_hybrid_features(set, shape);
    return (sti_hyb){.set = set,
                     .f = dev->k->attn,
                     .k = dev->k->hybrid,
                     .rows = dev->k->row,
                     .H = shape->H,
                     .G = shape->G,
                     .D = shape->D,
                     .F = shape->F,
                     .S = S,
                     .P = P,
                     .C = set->chunk,
                     .group = shape->H / S,
                     .per_kv = shape->H / shape->G,
                     .ldo = (int)padded(shape->D),
                     .ldu = (int)padded(shape->F),
                     .ldp = (int)padded(P),
                     .scale = 1.0f / sqrtf((float)shape->D),
                     .received = set->has_window && sti_score_at(set->score)->received,
                     .rotates = sti_hybrid_needs_raw(set),
                     .pool = dev->pool,
                     .workers = sti_pool_threads(dev->pool)};
}

static size_t scratch_bytes(const sti_hyb *of, int cap, int rows)
{
    sti_carve c = {0};
    sti_hyb h = *of;
    carve_scratch(&c, &h, cap, rows);
    return c.used;
}

size_t sti_cpu_hybrid_scratch(const sti_dev *dev, int rows)
{
    return dev->hybrid_fixed + dev->hybrid_row * (size_t)rows;
}

/* Scratch of any call, and what each row adds. */
static void measure(const sti_hyb *h, int cap, size_t *base, size_t *row)
{
    /* Each array is rounded up by itself: 5 * 64 is the most that can add. */
    *base = scratch_bytes(h, cap, 0) + 5 * 64;
    *row = (size_t)h->H * (4 * sizeof(float) + sizeof(sti_hyb_score));
}

size_t sti_cpu_hybrid_bytes(const sti_dev *dev, const sti_hybrid_settings *set,
                            const sti_hybrid_shape *shape, int rows)
{
    const sti_hyb h = params_of(dev, set, shape);
    size_t base, row;
    measure(&h, set->cap, &base, &row);
    return base + row * (size_t)rows;
}

static still_status reserve(sti_dev *dev, const sti_hyb *h, int cap, int rows,
                            still_error *err)
{
    size_t base, row;
    if (h->D > STI_ATTN_MAX_D || h->group > STI_ATTN_ROWS)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "cpu hybrid attention: head size %d and %d query heads per "
                        "selection, at most %d and %d are supported",
                        h->D, h->group, STI_ATTN_MAX_D, STI_ATTN_ROWS);
    measure(h, cap, &base, &row);
    if (base > dev->hybrid_fixed) dev->hybrid_fixed = base;
    if (row > dev->hybrid_row) dev->hybrid_row = row;
    if (rows < dev->rows) rows = dev->rows;
    return sti_cpu_need_bytes(dev, sti_cpu_hybrid_scratch(dev, rows), err);
}

still_status sti_cpu_hybrid_reserve(sti_dev *dev, const sti_hybrid_settings *set,
                                    const sti_hybrid_shape *shape, int rows,
                                    still_error *err)
{
    STI_TRY(sti_hybrid_check(set, shape, err));
    const sti_hyb h = params_of(dev, set, shape);
    return reserve(dev, &h, set->cap, rows, err);
}

/* ---- New keys ------------------------------------------------------------ */

void sti_hyb_take_key(const sti_hyb *h, const sti_hybrid_state *st, sti_hyb_key from,
                      void *x)
{
    if (st->kv_size == 2)
        for (int d = 0; d < h->D; d++)
            ((uint16_t *)x)[d] = ((const uint16_t *)from.p)[d * from.step];
    else
        for (int d = 0; d < h->D; d++)
            ((float *)x)[d] = ((const float *)from.p)[d * from.step];
}

void sti_hyb_put_key(const sti_hyb *h, const sti_hybrid_state *st, sti_hyb_key to,
                     const void *x)
{
    if (st->kv_size == 2)
        for (int d = 0; d < h->D; d++)
            ((uint16_t *)to.p)[d * to.step] = ((const uint16_t *)x)[d];
    else
        for (int d = 0; d < h->D; d++)
            ((float *)to.p)[d * to.step] = ((const float *)x)[d];
}

const void *sti_hyb_narrow(const sti_hyb *h, const sti_hybrid_state *st, const float *x,
                           uint16_t *buffer)
{
    if (st->kv_size != 2) return x;
    h->f->to_f16(buffer, x, h->D);
    return buffer;
}

void sti_hyb_store_kv(const sti_hyb *h, const sti_hybrid_args *a, int g, int row, int i,
                      int n)
{
    const sti_hybrid_state *st = a->state;
    const int window = 2 * h->C, per_kv = h->per_kv / h->group;
    const int heads = per_kv > 0 ? per_kv : 1, first = g * per_kv;
    uint16_t buffer[STI_ATTN_MAX_D];
    for (const int end = i + n; i < end; i++) {
        const int slot = (int)((st->pos + i) % window);
        const size_t from = ((size_t)(row + i) * h->G + g) * (size_t)h->D;
        const size_t value = (size_t)g * (size_t)window + (size_t)slot;
        sti_hyb_put_key(h, st, sti_hyb_window_key(h, st, g, slot),
                        sti_hyb_narrow(h, st, a->in.k + from, buffer));
        memcpy(sti_hyb_row(h, st, st->win_v, value),
               sti_hyb_narrow(h, st, a->in.v + from, buffer),
               (size_t)h->D * st->kv_size);
        for (int s = first; h->received && s < first + heads; s++)
            ((float *)st->win_received)[(size_t)s * window + slot] = 0;
    }
}

/* Whether a chunk retires before the next token of a session. */
static bool retires(const sti_hyb *h, const sti_hybrid_args *a)
{
    const int64_t pos = a->state->pos;
    return pos % h->C == 0 && pos >= 2 * (int64_t)h->C;
}

/* Split over tokens of kv heads: three heads would keep two workers busy unequally. */
static void store_step_work(void *v, int w, int workers)
{
    const sti_hyb *h = v;
    int g, lo, hi;
    for (sti_hyb_share s = sti_hyb_share_of(h->G, h->tokens, w, workers);
         sti_hyb_share_next(&s, &g, &lo, &hi);)
        sti_hyb_store_kv(h, h->a, g, h->row, lo, hi - lo);
}

static void store_decode_work(void *v, int w, int workers)
{
    const sti_hyb *h = v;
    int index = 0;
    for (int i = 0; i < h->n; i++)
        for (int g = 0; h->a[i].T == 1 && g < h->G; g++)
            if (index++ % workers == w) sti_hyb_store_kv(h, &h->a[i], g, 0, 0, 1);
}

/* ---- Steps --------------------------------------------------------------- */

static void trace_salient(const sti_hyb *h, const sti_hybrid_args *a, int row, int n)
{
    for (int i = row; a->trace.salient && i < row + n; i++)
        memcpy(a->trace.salient + (size_t)i * h->S, a->state->sal_count,
               (size_t)h->S * sizeof(int32_t));
}

/* STILL Alg. 1: chunk by chunk. */
static void prefill(sti_dev *dev, sti_hyb *h, const sti_hybrid_args *a)
{
    h->a = a;
    h->base = 0;
    for (h->row = 0; h->row < a->T; h->row += h->tokens) {
        const int left = h->C - (int)(a->state->pos % h->C);
        h->tokens = a->T - h->row < left ? a->T - h->row : left;
        if (retires(h, a)) sti_hyb_retire(h, a);
        sti_pool_run(dev->pool, store_step_work, h);
        sti_pool_run(dev->pool, sti_hyb_prefill_work, h);
        if (h->received) sti_pool_run(dev->pool, sti_hyb_receive_work, h);
        trace_salient(h, a, h->row, h->tokens);
        a->state->pos += h->tokens;
    }
}

static void decode(sti_dev *dev, sti_hyb *h, const sti_hybrid_args *a, int n)
{
    /* A unit can store the new key before it reads it if no other unit reads that
     * panel: one selection head per kv head, and chunks that share no strip. */
    h->units_store = h->S == h->G && h->C % STI_ATTN_STRIP == 0;
    h->a = a;
    h->n = n;
    for (int i = 0; i < n; i++)
        h->units_store = h->units_store && (a[i].T != 1 || a[i].state->pos % h->C != 0);
    for (int i = 0; i < n; i++)
        if (a[i].T == 1 && retires(h, &a[i])) sti_hyb_retire(h, &a[i]);
    if (!h->units_store) sti_pool_run(dev->pool, store_decode_work, h);
    sti_hyb_decode(dev, h);
    h->tokens = 1;
    h->row = h->base = 0;
    for (int i = 0; i < n; h->base += a[i++].T) {
        if (a[i].T != 1) continue;
        if (h->received) {
            h->a = &a[i];
            sti_pool_run(dev->pool, sti_hyb_receive_work, h);
        }
        trace_salient(h, &a[i], 0, 1);
        a[i].state->pos++;
    }
}

static void stream(sti_dev *dev, sti_hyb *h, const sti_hybrid_args *a, int n)
{
    h->a = a;
    h->n = n;
    sti_pool_run(dev->pool, sti_hyb_stream_work, h);
    for (int i = 0; i < n; i++) {
        trace_salient(h, &a[i], 0, a[i].T);
        a[i].state->pos += a[i].T;
    }
}

/* ---- Entry --------------------------------------------------------------- */

static bool same_settings(const sti_hybrid_args *a, const sti_hybrid_args *b)
{
    const sti_hybrid_settings *x = a->set, *y = b->set;
    return a->shape.H == b->shape.H && a->shape.G == b->shape.G &&
           a->shape.D == b->shape.D && a->shape.F == b->shape.F &&
           (x == y ||
            (x->chunk == y->chunk && x->per_head == y->per_head && x->map == y->map &&
             x->has_window == y->has_window && x->score == y->score &&
             x->key_bits == y->key_bits && x->value_bits == y->value_bits &&
             sti_hybrid_same_caps(x, y, sti_hybrid_selection_heads(x, &a->shape)) &&
             x->position_cap == y->position_cap &&
             x->feature_positions == y->feature_positions &&
             x->state_cap == y->state_cap));
}

static still_status check(const sti_hybrid_args *a, int n, still_error *err)
{
    for (int i = 0; i < n; i++) {
        const sti_hybrid_state *st = a[i].state;
        const int64_t end = st->pos + a[i].T;
        if (!same_settings(&a[0], &a[i]))
            return sti_fail(err, STILL_E_ARG,
                            "cpu hybrid attention: session %d of a call has other "
                            "settings than the first",
                            i);
        if ((st->kv_size != 2 && st->kv_size != 4) || st->real_size != sizeof(float))
            return sti_fail(err, STILL_E_ARG,
                            "cpu hybrid attention: a state of %zu and %zu bytes per "
                            "element, expected 2 or 4, and 4",
                            st->kv_size, st->real_size);
        if (a[i].T < 0 || end > INT32_MAX ||
            (a[i].set->cap == STI_CAP_NONE && end > st->max_tokens))
            return sti_fail(err, STILL_E_LIMIT,
                            "cpu hybrid attention: %lld tokens, the state was made for "
                            "%lld",
                            (long long)end, (long long)st->max_tokens);
        if (sti_hybrid_needs_raw(a[i].set) && (!a[i].in.q_raw || !a[i].in.inv_freq))
            return sti_fail(err, STILL_E_ARG,
                            "cpu hybrid attention: capped positions without queries "
                            "before RoPE");
    }
    return STILL_OK;
}

still_status sti_cpu_hybrid(sti_dev *dev, const sti_hybrid_args *a, int n,
                            still_error *err)
{
    if (n < 1) return STILL_OK;
    STI_TRY(check(a, n, err));
    const sti_hybrid_settings *set = a->set;
    STI_TRY(sti_hybrid_check(set, &a->shape, err));
    sti_hyb h = params_of(dev, set, &a->shape);
    int rows = 0;
    bool one = false;
    for (int i = 0; i < n; i++) {
        rows += a[i].T;
        one = one || a[i].T == 1;
        h.may_retire = h.may_retire || a[i].T > 1 || retires(&h, &a[i]);
    }
    STI_TRY(reserve(dev, &h, set->cap, rows, err));
    sti_carve c = {.base = dev->scratch.p};
    carve_scratch(&c, &h, set->cap, rows);
    const sti_score *score = sti_score_at(set->score);
    const bool traced = a->trace.score || a->trace.score_head;
    h.scored = set->has_window && (traced || (set->select > 0 && score->arrive));
    h.self = h.scored && score->self;
    if (set->position_cap > 0)
        h.cap_rope = cap_rope(dev, set->position_cap, a->in.inv_freq, h.D / 2);
    if (!set->has_window) {
        stream(dev, &h, a, n);
        return STILL_OK;
    }
    if (one) decode(dev, &h, a, n);
    for (int i = 0; i < n; i++)
        if (a[i].T > 1) prefill(dev, &h, &a[i]);
    return STILL_OK;
}
