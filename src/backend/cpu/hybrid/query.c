/* query.c - attention of the hybrid operator: queries against the window, the salient
 * keys and the linear state of their selection head (STILL eq. 1, 7, 10, 11), and the
 * scores of new tokens (eq. 2 to 5).
 *
 * Blocks come in one order: previous chunk, own chunk, far salient keys, near ones,
 * state. Several tokens (prefill) are split over (selection head, tile of tokens), and
 * a tile goes through the blocks. All query heads of a selection head go together, so
 * keys, values and state are read once for them. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "backend/cpu/hybrid/salient.h"

enum { BLOCK = STI_ATTN_BLOCK, TILES_PER_WORKER = 4 };

/* ---- Blocks -------------------------------------------------------------- */

static int far_keys(const sti_hyb *h, const sti_hybrid_state *st, int sel)
{
    const sti_hyb_list l = sti_hyb_list_of(h, st, sel);
    return sti_hyb_far_keys(&l);
}

/* The next block starts with the key in slot `first`; its panel is read from the
 * beginning. */
static void begin(sti_hyb_block *b, sti_hyb_part part, int first)
{
    b->part = part;
    b->lo = first % STI_ATTN_PANEL;
    b->slot = first - b->lo;
    b->offset = -b->lo;
}

/* Cuts the block that starts at b->slot, of keys up to slot `end`. False: none left. */
static bool cut(sti_hyb_block *b, int end)
{
    b->hi = end - b->slot < BLOCK ? end - b->slot : BLOCK;
    return b->hi > b->lo;
}

/* STILL eq. 12: a query sees at most two chunks, the salient list and the state. */
void sti_hyb_next_block(const sti_hyb *h, const sti_hybrid_args *a, int64_t chunk,
                        int sel, int end, sti_hyb_block *b)
{
    const sti_hybrid_state *st = a->state;
    const int own = (int)(chunk % 2) * h->C, previous = h->C - own;
    b->slot += BLOCK;
    b->offset += BLOCK;
    b->lo = 0;
    for (;;) switch (b->part) {
        case STI_HYB_START: begin(b, STI_HYB_PREVIOUS, previous); break;
        case STI_HYB_PREVIOUS:
            if (chunk > 0 && cut(b, previous + h->C)) return;
            begin(b, STI_HYB_OWN, own);
            break;
        case STI_HYB_OWN:
            if (cut(b, own + end)) return;
            begin(b, STI_HYB_FAR, 0);
            break;
        case STI_HYB_FAR:
            if (cut(b, far_keys(h, st, sel))) return;
            begin(b, STI_HYB_NEAR, far_keys(h, st, sel));
            break;
        case STI_HYB_NEAR:
            if (cut(b, st->sal_count[sel])) return;
            b->part = STI_HYB_LINEAR;
            if (st->lin_s && st->folded[sel] > 0) return;
            break;
        case STI_HYB_LINEAR:
        case STI_HYB_END: b->part = STI_HYB_END; return;
        }
}

/* Keys or values of the rows a block lies in. */
sti_attn_rows sti_hyb_rows(const sti_hyb *h, const sti_hybrid_state *st, int sel,
                           const sti_hyb_block *b, bool keys)
{
    const bool window = sti_hyb_in_window(b);
    const sti_hybrid_list l = window ? sti_hyb_ring(h, sti_hyb_kv_of(h, sel))
                                     : sti_hybrid_list_of(h->set, st, sel);
    void *base =
        window ? (keys ? st->win_k : st->win_v) : (keys ? st->sal_k : st->sal_v);
    sti_attn_rows r = {.data = sti_hyb_row(h, st, base, l.first),
                       .type = sti_hyb_type(st),
                       .capacity = l.capacity,
                       .D = h->D};
    r.bits = window ? 0 : keys ? h->set->key_bits : h->set->value_bits;
    if (r.bits == 0) return r;
    const sti_salient_row first =
        keys ? sti_hybrid_salient_key(h->set, st, h->D, l.first)
             : sti_hybrid_salient_value(h->set, st, h->D, l.first);
    r.data = first.low;
    r.high = first.high;
    r.scale = first.scale;
    return r;
}

/* ---- Queries ------------------------------------------------------------- */

/* q_far = R(position_cap) q_raw: the angle is the same for all. */
static void rope_query(const sti_hyb *h, const sti_hybrid_in *in, const float *raw,
                       float *to)
{
    const int half = h->D / 2, step = in->interleaved ? 2 : 1,
              other = in->interleaved ? 1 : half;
    const float *c = h->cap_rope, *s = h->cap_rope + half;
    for (int i = 0; i < half; i++) {
        const float x = raw[i * step] * h->scale, y = raw[i * step + other] * h->scale;
        to[i * step] = x * c[i] - y * s[i];
        to[i * step + other] = y * c[i] + x * s[i];
    }
}

/* Loads the queries of rows [row, row + n) of the call into the tile, token-major; those
 * for far keys if there are any. */
void sti_hyb_queries(const sti_hyb *h, const sti_hyb_worker *w,
                     const sti_hybrid_args *a, int sel, int row, int n)
{
    const bool far = far_keys(h, a->state, sel) > 0;
    for (int r = 0; r < n * h->group; r++) {
        const size_t at =
            sti_hyb_query_at(h, row + r / h->group, sel * h->group + r % h->group);
        const size_t to = (size_t)r * STI_ATTN_LDQ;
        h->f->scale(w->t.q + to, a->in.q + at, h->scale, h->D);
        if (far) rope_query(h, &a->in, a->in.q_raw + at, w->q_far + to);
    }
    if (!h->set->key_bits) return;
    h->f->round_queries(&w->t, h->D, n * h->group);
    if (!far) return;
    const sti_attn_tile t = sti_hyb_far_tile(w);
    h->f->round_queries(&t, h->D, n * h->group);
}

/* STILL eq. 7; eq. 11, LA: lin = phi(q) s, den = phi(q).z for n rows of the call; rows
 * [n group]. Gate and scale follow in sti_hyb_joint_output. */
void sti_hyb_linear(const sti_hyb *h, const sti_hyb_worker *w, const sti_hybrid_args *a,
                    int sel, int row, int n, float *lin, float *den)
{
    const sti_hybrid_state *st = a->state;
    const bool raw = a->set->feature_positions == STI_FEATURES_NONE;
    const float *q = raw ? a->in.q_raw : a->in.q;
    for (int i = 0; i < h->group; i++) {
        const int head = sel * h->group + i;
        const float *W = a->in.map_q ? a->in.map_q + (size_t)head * h->D * h->F : NULL;
        sti_hyb_map(h, a->set, W, a->in.bias_q ? a->in.bias_q[head] : 0,
                    q + sti_hyb_query_at(h, row, head), h->H * h->D, n, h->group,
                    w->u + (size_t)i * h->ldu, w->phi + (size_t)i * h->ldp);
    }
    const int rows = n * h->group;
    const size_t first = (size_t)sel * h->P;
    const float *s = (const float *)st->lin_s + first * h->D;
    const float *z = (const float *)st->lin_z + first;
    h->k->product(rows, h->P, h->D, w->phi, h->ldp, s, h->D, lin, h->ldo);
    for (int r = 0; r < rows; r++)
        den[r] = h->k->dot(w->phi + (size_t)r * h->ldp, z, h->P);
}

/* ---- Scores -------------------------------------------------------------- */

/* STILL eq. 2: of the previous chunk, the last C tokens of a query are those after its
 * own offset. tail_m, tail_l: log-sum-exp over them, of the logits of block b in t->s,
 * for rows [row, row + n) of the tile. The token of row 0 has `offset` in its chunk. */
void sti_hyb_tail_lse(const sti_hyb *h, const sti_hyb_worker *w, const sti_hyb_block *b,
                      int row, int n, int offset)
{
    for (int r = row; r < row + n; r++) {
        int lo = offset + r / h->group + 1 - b->offset;
        if (lo < b->lo) lo = b->lo;
        w->tail_l[r] = 0;
        if (lo < b->hi)
            h->k->lse(w->t.s + (size_t)r * STI_ATTN_LDS, lo, b->hi, &w->tail_m[r],
                      &w->tail_l[r]);
    }
}

/* STILL eq. 3: the weight of the query's own token, before it is divided by the sum.
 * After the softmax of a block of the own chunk: all its keys are among the last C
 * tokens, and the last key may be the token itself. */
void sti_hyb_self_weight(const sti_hyb *h, const sti_hyb_worker *w,
                         const sti_hyb_block *b, int row, int n, int keys, int offset)
{
    for (int r = row; r < row + n; r++) {
        const bool last = b->offset + keys - 1 == offset + r / h->group;
        w->tail_m[r] = w->t.m[r];
        w->tail_l[r] = w->t.l[r];
        w->self[r] = last ? w->t.s[(size_t)r * STI_ATTN_LDS + keys - 1] : -1;
    }
}

/* Adds a block to the log-sum-exp over the last C tokens; self < 0: not in this
 * block. */
void sti_hyb_lse_update(sti_hyb_score *s, float m, float l, float self)
{
    if (!(l > 0)) return;
    if ((double)m > s->m) {
        s->l = s->l * exp(s->m - (double)m) + (double)l;
        s->m = m;
    } else {
        s->l += l * exp((double)m - s->m);
    }
    if (self >= 0) {
        s->self_m = m;
        s->self = self;
    }
}

/* STILL eq. 5 for s3: the score of row `row` of the call, the mean over its query
 * heads. */
void sti_hyb_score_token(const sti_hyb *h, const sti_hybrid_args *a, int sel, int row,
                         int64_t position, const sti_hyb_score *s)
{
    const sti_hybrid_settings *set = a->set;
    const sti_score *score = sti_score_at(set->score);
    const size_t slot = (size_t)(position % (2 * h->C));
    /* The key as the window holds it, without reading its panel again. */
    const float *key = a->in.k + ((size_t)row * h->G + sti_hyb_kv_of(h, sel)) * h->D;
    uint16_t buffer[STI_ATTN_MAX_D];
    float k[STI_ATTN_MAX_D];
    h->k->widen(k, sti_hyb_narrow(h, a->state, key, buffer), a->state->kv_size == 2,
                h->D);
    sti_score_stats stats = {.key_norm = sqrt((double)h->k->dot(k, k, h->D)),
                             .eps = set->eps,
                             .seed = set->seed,
                             .position = position,
                             .layer = set->layer};
    double sum = 0;
    for (int i = 0; i < h->group; i++) {
        if (h->self) stats.self = s[i].self * exp(s[i].self_m - s[i].m) / s[i].l;
        stats.head = sel * h->group + i;
        const double one = score->arrive ? score->arrive(&stats) : 0;
        sum += one / h->group;
        if (a->trace.score_head)
            a->trace.score_head[(size_t)row * h->H + stats.head] = (float)one;
    }
    ((float *)a->state->win_score)[(size_t)sel * 2 * h->C + slot] = (float)sum;
    if (a->trace.score) a->trace.score[(size_t)row * h->S + sel] = (float)sum;
}

/* ---- Output -------------------------------------------------------------- */

/* alpha of a query head, and what keeps a state of many tokens from outweighing all. */
static float state_weight(const sti_hybrid_args *a, int sel, int head)
{
    const float own = a->set->alpha && a->in.alpha ? a->in.alpha[head] : 0;
    return own + (float)sti_hybrid_state_shift(a->set, sel, a->state->folded[sel]);
}

/* STILL eq. 1, eq. 10: y = (N_SA + N_LA) / (D_SA + D_LA) of query head i of selection
 * head sel, from the sums o, M, L of its softmax tokens and, unless lin is NULL, phi s
 * and phi.z. */
void sti_hyb_joint_output(const sti_hyb *h, const sti_hybrid_args *a, int row, int sel,
                          int i, const float *o, float M, float L, const float *lin,
                          float den_lin)
{
    const sti_hybrid_settings *set = a->set;
    const sti_hybrid_in *in = &a->in;
    const int head = sel * h->group + i;
    const size_t at = sti_hyb_query_at(h, row, head);
    const float alpha = lin ? state_weight(a, sel, head) : 0;
    float factor = 1, keep = 1, weight = 0;
    if (set->window_factor)
        factor = in->window_logit ? 1 / (1 + expf(-in->window_logit[head])) : 0.1f;
    if (lin && set->la_scale == STI_SCALE_EXACT) {
        const float shift = fmaxf(M, alpha);
        keep = expf(M - shift);
        weight = expf(alpha - shift);
    } else if (lin) { /* window: e^alpha, both divided by it where it is above 1 */
        keep = M > -INFINITY ? expf(-fmaxf(alpha, 0)) : 0;
        weight = expf(fminf(alpha, 0));
    }
    keep *= factor;
    const float den = (float)set->den_eps + keep * L + weight * den_lin;
    const float *gate = set->gate && in->gate_logit ? in->gate_logit + at : NULL;
    h->k->output(a->y + at, o, keep, lin, gate, weight, fmaxf(den, FLT_MIN), h->D);
}

/* ---- Prefill ------------------------------------------------------------- */

/* STILL eq. 11, SA: rows [row, row + n) of the tile against keys [lo, keys) of
 * block b, whose keys K of few bits or a float copy in the tile holds. Salient keys are
 * seen by all rows. */
static void attend_block(const sti_hyb *h, const sti_hyb_worker *w,
                         const sti_hyb_block *b, const sti_attn_rows *K, int row, int n,
                         int keys, int offset)
{
    const sti_attn_tile t = b->part == STI_HYB_FAR ? sti_hyb_far_tile(w) : w->t;
    if (K->bits)
        h->f->qk_logits_levels(&t, K, b->slot, n, b->lo, keys, NULL);
    else
        h->f->qk_logits(&t, h->D, row, n, b->lo, keys);
    const bool self = h->self && sti_hyb_in_window(b);
    if (self && b->part == STI_HYB_PREVIOUS) {
        sti_hyb_tail_lse(h, w, b, row, n, offset);
        for (int r = row; r < row + n; r++) w->self[r] = -1;
    }
    h->f->softmax(&t, row, n, b->lo, keys);
    if (self && b->part == STI_HYB_OWN)
        sti_hyb_self_weight(h, w, b, row, n, keys, offset);
    for (int r = row; self && r < row + n; r++)
        sti_hyb_lse_update(&w->score[r], w->tail_m[r], w->tail_l[r], w->self[r]);
    h->f->merge_lse(t.M + row, t.L + row, t.m + row, t.l + row, t.keep + row,
                    t.add + row, n);
    h->f->pv_product(&t, h->D, row, n, b->lo, keys, t.o + (size_t)row * h->ldo, h->ldo,
                     t.keep + row, t.add + row);
}

/* Tokens [i, i + n) of the step for selection head sel. A token that does not see the
 * whole of a block goes alone with exactly its keys, so that no later one can reach
 * it. */
static void run_tile(const sti_hyb *h, const sti_hyb_worker *w, int sel, int i, int n)
{
    const sti_hybrid_args *a = h->a;
    const sti_hybrid_state *st = a->state;
    const int64_t pos = st->pos + i, chunk = pos / h->C;
    const int offset = (int)(pos % h->C), row = h->row + i, group = h->group;
    sti_hyb_queries(h, w, a, sel, row, n);
    for (int r = 0; r < n * group; r++) {
        w->t.M[r] = -INFINITY;
        w->t.L[r] = 0;
        w->score[r] = sti_hyb_no_score();
    }
    memset(w->t.o, 0, (size_t)(n * group) * (size_t)h->ldo * sizeof(float));

    sti_hyb_block b = {0};
    for (;;) {
        sti_hyb_next_block(h, a, chunk, sel, offset + n, &b);
        if (b.part >= STI_HYB_LINEAR) break;
        const sti_attn_rows K = sti_hyb_rows(h, st, sel, &b, true);
        const sti_attn_rows V = sti_hyb_rows(h, st, sel, &b, false);
        if (!K.bits) h->f->load_panels(&K, b.slot, b.lo, b.hi, w->t.k);
        h->f->load_values(&V, b.slot, b.lo, b.hi, w->t.v);
        int alone = 0; /* tokens in front that see part of the block */
        if (b.part == STI_HYB_OWN) {
            alone = b.offset + BLOCK - 1 - offset;
            alone = alone < 0 ? 0 : alone < n ? alone : n;
        }
        for (int j = 0; j < alone; j++) {
            const int keys = offset + j + 1 - b.offset;
            if (keys > b.lo) attend_block(h, w, &b, &K, j * group, group, keys, offset);
        }
        if (alone < n)
            attend_block(h, w, &b, &K, alone * group, (n - alone) * group, b.hi,
                         offset);
        if (h->received && sti_hyb_in_window(&b))
            for (int r = 0; r < n * group; r++) {
                const size_t at = (size_t)(h->base + row + r / group) * h->H +
                                  sel * group + r % group;
                h->window_m[at] = w->t.M[r];
                h->window_l[at] = w->t.L[r];
            }
    }
    const bool linear = b.part == STI_HYB_LINEAR;
    if (linear) sti_hyb_linear(h, w, a, sel, row, n, w->lin, w->den);
    for (int j = 0, r = 0; j < n; j++)
        for (int g = 0; g < group; g++, r++)
            sti_hyb_joint_output(h, a, row + j, sel, g, w->t.o + (size_t)r * h->ldo,
                                 w->t.M[r], w->t.L[r],
                                 linear ? w->lin + (size_t)r * h->ldo : NULL,
                                 linear ? w->den[r] : 0);
    for (int j = 0; h->scored && j < n; j++)
        sti_hyb_score_token(h, a, sel, row + j, pos + j, w->score + j * group);
}

/* Tokens of a tile: as many as fit, fewer if that leaves workers without a tile. */
static int tile_tokens(const sti_hyb *h)
{
    const int most = STI_ATTN_ROWS / h->group, least = (12 + h->group - 1) / h->group;
    const int tiles = (TILES_PER_WORKER * h->workers + h->S - 1) / h->S;
    const int n = (h->tokens + tiles - 1) / tiles;
    return n < least ? (least < most ? least : most) : n < most ? n : most;
}

/* Later tiles see more of their own chunk: workers take them in order, then in
 * reverse. */
void sti_hyb_prefill_work(void *v, int w, int workers)
{
    const sti_hyb *h = v;
    const sti_hyb_worker own = sti_hyb_worker_of(h, w);
    const int step = tile_tokens(h);
    int index = 0;
    for (int i = 0; i < h->tokens; i += step)
        for (int sel = 0; sel < h->S; sel++, index++) {
            int owner = index % (2 * workers);
            if (owner >= workers) owner = 2 * workers - 1 - owner;
            if (owner != w) continue;
            run_tile(h, &own, sel, i, h->tokens - i < step ? h->tokens - i : step);
        }
}

/* ---- Weights received ---------------------------------------------------- */

/* Adds the weights that tokens [i, i + n) of the step give to the keys of block b:
 * computed once more, now that the sums over their window are known. */
static void receive(const sti_hyb *h, const sti_hyb_worker *w, int sel,
                    const sti_hyb_block *b, int i, int n)
{
    const int group = h->group, offset = (int)((h->a->state->pos + i) % h->C);
    float *sum =
        (float *)h->a->state->win_received + (size_t)sel * 2 * h->C + b->slot + b->lo;
    sti_hyb_queries(h, w, h->a, sel, h->row + i, n);
    h->f->qk_logits(&w->t, h->D, 0, n * group, b->lo, b->hi);
    for (int j = 0; j < n; j++) {
        int keys = b->hi; /* those before the token */
        if (b->part == STI_HYB_OWN && offset + j - b->offset < keys)
            keys = offset + j - b->offset;
        for (int g = 0; g < group && keys > b->lo; g++) {
            const size_t at =
                (size_t)(h->base + h->row + i + j) * h->H + sel * group + g;
            h->k->receive(sum, w->t.s + (size_t)(j * group + g) * STI_ATTN_LDS + b->lo,
                          h->window_m[at], h->window_l[at] * (float)group,
                          keys - b->lo);
        }
    }
}

/* Keys are independent of each other: the work is split over blocks of them. */
void sti_hyb_receive_work(void *v, int w, int workers)
{
    const sti_hyb *h = v;
    const sti_hyb_worker own = sti_hyb_worker_of(h, w);
    const sti_hybrid_state *st = h->a->state;
    const int offset = (int)(st->pos % h->C), step = STI_ATTN_ROWS / h->group;
    const int64_t chunk = st->pos / h->C;
    int index = 0;
    for (int sel = 0; sel < h->S; sel++) {
        sti_hyb_block b = {0};
        for (;;) {
            sti_hyb_next_block(h, h->a, chunk, sel, offset + h->tokens, &b);
            if (!sti_hyb_in_window(&b)) break;
            if (index++ % workers != w) continue;
            const sti_attn_rows K = sti_hyb_rows(h, st, sel, &b, true);
            h->f->load_panels(&K, b.slot, b.lo, b.hi, own.t.k);
            for (int i = 0; i < h->tokens; i += step)
                receive(h, &own, sel, &b, i,
                        h->tokens - i < step ? h->tokens - i : step);
        }
    }
}

/* ---- Without a window ---------------------------------------------------- */

/* Each token is folded before its own output: a chain along the sequence, split over
 * heads. */
void sti_hyb_stream_work(void *v, int w, int workers)
{
    const sti_hyb *h = v;
    const sti_hyb_worker own = sti_hyb_worker_of(h, w);
    memset(own.t.o, 0, (size_t)h->ldo * sizeof(float));
    int index = 0;
    for (const sti_hybrid_args *a = h->a; a < h->a + h->n; a++)
        for (int sel = 0; sel < h->S; sel++) {
            if (index++ % workers != w) continue;
            for (int row = 0; row < a->T; row++) {
                sti_hyb_fold_token(h, &own, a, sel, row, a->state->pos + row);
                sti_hyb_linear(h, &own, a, sel, row, 1, own.lin, own.den);
                for (int i = 0; i < h->group; i++)
                    sti_hyb_joint_output(h, a, row, sel, i, own.t.o, -INFINITY, 0,
                                         own.lin + (size_t)i * h->ldo, own.den[i]);
            }
        }
}
