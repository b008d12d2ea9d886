/* train.c - the entries of the hybrid operator over whole sequences: what a call
 * needs, its scratch, and the order of its kernels. See train.h. */
#include "backend/cuda/hybrid/train/train.h"

#include <math.h>

#include "backend/cuda/hybrid/score.h"

enum {
    LONGEST_CHUNK = 4096,
    SOFTMAX_SPAN = 128,     /* where every token is kept any span will do */
    SOFTMAX_UNIT = 1 << 14, /* softmax features, at most 1, in half: times this */
    SHARED_MOST = 96 << 10, /* bytes for the lists of salient tokens, likewise */
    GRID_MOST = 65535       /* blocks in y and z */
};

static still_status check(const sti_hybrid_parallel_args *a, still_error *err)
{
    STI_TRY(sti_hybrid_check(a->set, &a->shape, err));
    STI_TRY(sti_cuda_score_check(a->set->score, err));
    const sti_hybrid_shape *s = &a->shape;
    if (a->B < 0 || a->T < 0 || (int64_t)a->B * a->T > INT32_MAX / 2 ||
        a->B > GRID_MOST || s->H > GRID_MOST)
        return sti_fail(err, STILL_E_ARG,
                        "cuda hybrid attention: %d sequences of %d tokens, %d heads",
                        a->B, a->T, s->H);
    if (sti_hybrid_needs_raw(a->set))
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "hybrid attention: capped positions and features before RoPE "
                        "exist in sessions only, not for whole sequences");
    if (a->max_in || a->max_out)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "cuda hybrid attention: the maximum of whole sequences is "
                        "neither taken nor given");
    if (s->D > STI_HYBRID_TRAIN_MAX_D)
        return sti_fail(
            err, STILL_E_UNSUPPORTED,
            "cuda hybrid attention: head size %d in training, at most %d is "
            "supported",
            s->D, STI_HYBRID_TRAIN_MAX_D);
    if ((a->set->key_bits || a->set->value_bits) && s->D % 32 != 0)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "cuda hybrid attention: a quantized salient cache with heads "
                        "of %d numbers in training, expected a multiple of 32",
                        s->D);
    if (a->set->chunk > LONGEST_CHUNK)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "cuda hybrid attention: chunks of %d tokens in training, at "
                        "most %d are supported",
                        a->set->chunk, LONGEST_CHUNK);
    return STILL_OK;
}

/* Rows of all arrays by token can be read 16 bytes at a time. */
static bool can_vectorize(const sti_hybrid_parallel_args *a)
{
    const sti_hybrid_in *in = &a->in;
    const sti_hybrid_grad *g = &a->grad;
    return a->shape.D % 4 == 0 && sti_cuda_aligned(in->q) && sti_cuda_aligned(in->k) &&
           sti_cuda_aligned(in->v) && sti_cuda_aligned(in->gate_logit) &&
           sti_cuda_aligned(a->y) && sti_cuda_aligned(a->dy) &&
           sti_cuda_aligned(g->q) && sti_cuda_aligned(g->k) && sti_cuda_aligned(g->v) &&
           sti_cuda_aligned(g->gate_logit);
}

/* Nothing is ever folded, whatever a chunk is: full softmax attention. */
static bool keeps_all(const sti_hybrid_settings *set)
{
    return set->has_window && !set->has_linear && set->select == set->chunk &&
           set->cap < 0;
}

static int salient_capacity(const sti_hybrid_train *p)
{
    int64_t most = p->spans > 2 ? (int64_t)p->h.select * (p->spans - 2) : 0;
    if (p->h.cap >= 0 && p->h.cap < most) most = p->h.cap;
    return most > 1 ? (int)most : 1;
}

static still_status fill_call(const sti_hybrid_parallel_args *a, sti_hybrid_train *p,
                              still_error *err)
{
    STI_TRY(check(a, err));
    const sti_hybrid_settings *set = a->set;
    const sti_hybrid_in *in = &a->in;
    const int DP = (a->shape.D + 63) / 64 * 64;
    const bool relu = set->map == STI_MAP_RELU;
    *p = (sti_hybrid_train){
        .h = sti_cuda_hybrid_params_of(set, &a->shape, in, 0),
        .B = a->B,
        .T = a->T,
        .DP = DP,
        .PP = relu ? DP : 2 * DP,
        .span = set->has_window ? set->chunk : STI_HYBRID_TRAIN_ROWS,
        .exact = set->la_scale == STI_SCALE_EXACT,
        .relu = relu,
        .vec = can_vectorize(a),
        .phi_unit = relu ? 1 : SOFTMAX_UNIT,
        .q = in->q,
        .k = in->k,
        .v = in->v,
        .gate_logit = set->gate ? in->gate_logit : NULL,
        .dy = a->dy,
        .fold = a->fold_chunk,
        .y = a->y,
        .map_parts =
            (a->T + STI_HYBRID_TRAIN_MAP_TOKENS - 1) / STI_HYBRID_TRAIN_MAP_TOKENS,
    };
    if (!relu) p->h.bias_q = p->h.bias_k = NULL; /* softmax maps have none */
    if (keeps_all(set)) p->span = p->h.select = SOFTMAX_SPAN;
    p->spans = (int)(((int64_t)a->T + p->span - 1) / p->span);
    p->tiles = (p->span + STI_HYBRID_TRAIN_ROWS - 1) / STI_HYBRID_TRAIN_ROWS;
    p->capacity = salient_capacity(p);
    p->slots = p->capacity + 2 * p->span;
    return STILL_OK;
}

/* ---- Scratch ------------------------------------------------------------- */

typedef void (*layout)(sti_carve *c, sti_hybrid_train *p);

static void *take(sti_carve *c, size_t n, size_t each)
{
    size_t all;
    if (!sti_mul(n, each, &all)) all = SIZE_MAX;
    return sti_carve_take(c, all, sizeof(float));
}

static uint16_t *take_halves(sti_carve *c, size_t n, size_t each)
{
    size_t all;
    if (!sti_mul(n, each, &all)) all = SIZE_MAX;
    return sti_carve_take(c, all, sizeof(uint16_t));
}

static void carve_route(sti_carve *c, sti_hybrid_train *p)
{
    const size_t rows = (size_t)p->B * (size_t)p->h.H * (size_t)p->T;
    const size_t heads = (size_t)p->B * (size_t)p->h.S, spans = (size_t)p->spans;
    p->score_head = take(c, rows, 1);
    if (sti_score_from(p->h.score, STI_FROM_QUERIES)) {
        p->row_max = take(c, rows, 1);
        p->row_sum = take(c, rows, 1);
    }
    p->best = sti_carve_take(c, heads * spans * (size_t)p->h.select, sizeof *p->best);
    if (sti_hybrid_train_evicts(p) && sti_hybrid_train_choose_shared(p) > SHARED_MOST)
        p->kept = sti_carve_take(c, heads * 2 * (size_t)p->capacity, sizeof *p->kept);
}

/* What both directions need: lists, features, states. */
static void carve_forward(sti_carve *c, sti_hybrid_train *p)
{
    const size_t heads = (size_t)p->B * (size_t)p->h.S;
    const size_t spans = heads * (size_t)p->spans, PP = (size_t)p->PP;
    p->salient = take(c, spans, (size_t)p->capacity);
    p->n_salient = take(c, spans, 1);
    p->folds = take(c, spans, (size_t)p->span);
    p->n_folds = take(c, spans, 1);
    p->n_folded = take(c, spans, 1);
    const size_t tokens = (size_t)p->B * (size_t)p->T, DP = (size_t)p->DP;
    size_t rows = tokens * (size_t)p->h.G;
    if (p->h.has_window && sti_cuda_hybrid_quantized(&p->h)) {
        p->half_stored = rows * DP;
        p->stored_k = take(c, rows, (size_t)p->h.D);
        p->stored_v = take(c, rows, (size_t)p->h.D);
        rows *= 2;
    }
    if (p->h.has_window) {
        p->half_q = take_halves(c, tokens * (size_t)p->h.H, DP);
        p->half_k = take_halves(c, rows, DP);
    }
    p->half_v = take_halves(c, rows, DP);
    if (!p->h.has_linear) return;
    const size_t stored = p->relu ? 2 * PP : PP; /* floats, or halves */
    p->phi_q = take_halves(c, tokens * (size_t)p->h.H, stored);
    p->phi_k = take_halves(c, heads * (size_t)p->T, stored);
    p->state = take(c, spans, PP * DP);
    p->state_z = take(c, spans, PP);
    if (!p->relu) p->mean = take_halves(c, spans, PP * DP);
}

/* Which gradients a backward computes. */
typedef struct wanted {
    bool softmax_q, softmax_kv; /* dq and dk, dv through softmax keys */
    bool map_q;                 /* dphi(q) */
    bool keys;                  /* dphi(k), dv through the state */
} wanted;

static wanted wanted_of(const sti_hybrid_train *p)
{
    const sti_hybrid_grad *g = &p->grad;
    return (wanted){
        .softmax_q = p->h.has_window && g->q,
        .softmax_kv = p->h.has_window && (g->k || g->v),
        .map_q = p->h.has_linear && (g->q || g->map_q || g->bias_q),
        .keys = p->h.has_linear && (g->k || g->v || g->map_k || g->bias_k),
    };
}

static void carve_backward(sti_carve *c, sti_hybrid_train *p)
{
    carve_forward(c, p);
    const wanted w = wanted_of(p);
    const sti_hybrid_grad *g = &p->grad;
    const size_t B = (size_t)p->B, T = (size_t)p->T, H = (size_t)p->h.H;
    const size_t S = (size_t)p->h.S, DP = (size_t)p->DP, PP = (size_t)p->PP;
    const size_t rows = B * H * T, keys = B * S * T, spans = B * S * (size_t)p->spans;
    const size_t tiles = B * (size_t)p->spans * (size_t)p->tiles;
    const size_t parts = B * (size_t)p->map_parts;
    p->shift = take(c, rows, 1);
    p->unit = take(c, rows, 1);
    p->delta = take(c, rows, 1);
    p->adden = take(c, rows, 1);
    p->part_alpha = take(c, tiles, H);
    p->part_window = take(c, tiles, H);
    if (w.softmax_q || w.softmax_kv) p->half_dy = take_halves(c, rows, DP);
    if (w.map_q || w.keys) p->adng = take(c, rows, DP);
    if (w.softmax_kv) {
        p->part_k = take(c, spans, (size_t)p->slots * DP);
        p->part_v = take(c, spans, (size_t)p->slots * DP);
    }
    if (w.map_q) p->dphi_q = take(c, rows, PP);
    if (w.map_q && g->bias_q) p->part_bias_q = take(c, parts, H);
    if (w.map_q && g->map_q) p->part_map_q = take(c, parts * H, DP * DP);
    if (!w.keys) return;
    p->dstate = take(c, spans, PP * DP);
    p->dstate_z = take(c, spans, PP);
    p->dphi_k = take(c, keys, PP);
    if (g->k) p->dk_fold = take(c, keys, DP);
    if (g->v) p->dv_fold = take(c, keys, DP);
    if (g->bias_k) p->part_bias_k = take(c, parts, S);
    if (g->map_k) p->part_map_k = take(c, parts * S, DP * DP);
}

static still_status take_scratch(sti_dev *dev, sti_hybrid_train *p, layout carve,
                                 still_error *err)
{
    sti_carve c = {0};
    /* Counting must not change p: later layouts look at its pointers. */
    sti_hybrid_train counted = *p;
    carve(&c, &counted);
    void *scratch;
    STI_TRY(sti_cuda_scratch(dev, c.used, &scratch, err));
    c = (sti_carve){.base = scratch};
    carve(&c, p);
    return STILL_OK;
}

/* ---- Entries ------------------------------------------------------------- */

still_status sti_cuda_hybrid_route(sti_dev *dev, const sti_hybrid_parallel_args *a,
                                   still_error *err)
{
    sti_hybrid_train p;
    STI_TRY(fill_call(a, &p, err));
    if (a->B == 0 || a->T == 0) return STILL_OK;
    const size_t tokens = (size_t)a->B * (size_t)a->T * (size_t)p.h.S;
    /* Without a window every token is linear at once; where all are kept none is. */
    if (!p.h.has_window || keeps_all(a->set)) {
        STI_CUDA(cudaMemsetAsync(a->fold_chunk, 0xff, tokens * sizeof *a->fold_chunk,
                                 dev->stream),
                 "hybrid training: routing");
        return STILL_OK;
    }
    STI_TRY(sti_cuda_hybrid_lists(dev, a->set, &p.h, err));
    STI_TRY(take_scratch(dev, &p, carve_route, err));
    /* No score can matter where none or all of a chunk's tokens are selected. */
    if (p.h.select > 0) STI_TRY(sti_hybrid_train_scores(dev, &p, err));
    return sti_hybrid_train_choose(dev, &p, err);
}

static still_status make_ready(sti_dev *dev, const sti_hybrid_train *p,
                               still_error *err)
{
    STI_TRY(sti_hybrid_train_lists(dev, p, err));
    STI_TRY(sti_hybrid_train_halves(dev, p, err));
    if (p->stored_k) STI_TRY(sti_hybrid_train_store(dev, p, err));
    if (!p->h.has_linear) return STILL_OK;
    STI_TRY(sti_hybrid_train_features(dev, p, err));
    return sti_hybrid_train_states(dev, p, err);
}

/* STILL Alg. 1, from the masks on. */
still_status sti_cuda_hybrid_parallel(sti_dev *dev, const sti_hybrid_parallel_args *a,
                                      still_error *err)
{
    sti_hybrid_train p;
    STI_TRY(fill_call(a, &p, err));
    if (a->B == 0 || a->T == 0) return STILL_OK;
    STI_TRY(take_scratch(dev, &p, carve_forward, err));
    STI_TRY(make_ready(dev, &p, err));
    return sti_hybrid_train_attend(dev, &p, err);
}

still_status sti_cuda_hybrid_backward(sti_dev *dev, const sti_hybrid_parallel_args *a,
                                      still_error *err)
{
    sti_hybrid_train p;
    STI_TRY(fill_call(a, &p, err));
    if (a->B == 0 || a->T == 0) return STILL_OK;
    p.grad = a->grad;
    const wanted w = wanted_of(&p);
    STI_TRY(take_scratch(dev, &p, carve_backward, err));
    STI_TRY(make_ready(dev, &p, err));
    STI_TRY(sti_hybrid_train_rows(dev, &p, err));
    if (w.softmax_q) STI_TRY(sti_hybrid_train_softmax_queries(dev, &p, err));
    if (w.softmax_kv) STI_TRY(sti_hybrid_train_softmax_keys(dev, &p, err));
    if (w.map_q) STI_TRY(sti_hybrid_train_linear_queries(dev, &p, err));
    if (w.keys) {
        STI_TRY(sti_hybrid_train_dstates(dev, &p, err));
        STI_TRY(sti_hybrid_train_linear_keys(dev, &p, err));
    }
    if (w.map_q || w.keys) STI_TRY(sti_hybrid_train_maps(dev, &p, err));
    if (p.grad.k || p.grad.v) STI_TRY(sti_hybrid_train_sum_keys(dev, &p, err));
    return sti_hybrid_train_sum_parameters(dev, &p, err);
}
