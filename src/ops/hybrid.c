/* hybrid.c - settings and state of the hybrid operator; see hybrid.h.
 *
 * The state is laid out by one function for all backends, so that the bill of a
 * session, its snapshots and its kernels speak of the same memory. */
#include "ops/hybrid.h"

#include <string.h>

bool sti_hybrid_preset(const char *method, int chunk, sti_hybrid_settings *out)
{
    sti_hybrid_settings still = {
        .chunk = chunk,
        .select = chunk / 4,
        .cap = 2 * chunk,
        .score = STI_SCORE_S3,
        .has_window = true,
        .has_linear = true,
        .la_scale = STI_SCALE_EXACT,
        .map = STI_MAP_SOFTMAX,
        .norm_preserved = true,
        .gate = true,
        .alpha = true,
        .eps = 1e-6,
    };
    /* The plain Hedgehog map per query head, as its authors run it: no selection. */
    sti_hybrid_settings plain = still;
    plain.select = plain.cap = 0;
    plain.per_head = true;
    plain.norm_preserved = plain.gate = plain.alpha = false;
    plain.feature_floor = 1e-12;

    *out = plain;
    if (strcmp(method, "still") == 0) {
        *out = still;
    } else if (strcmp(method, "lolcats") == 0) {
        out->la_scale = STI_SCALE_WINDOW;
        out->window_factor = true;
    } else if (strcmp(method, "hedgehog") == 0 || strcmp(method, "t2r") == 0) {
        out->has_window = false;
        out->den_eps = 1e-12;
        if (method[0] == 't') out->map = STI_MAP_RELU;
    } else if (strcmp(method, "swa") == 0) {
        out->has_linear = out->per_head = false;
    } else if (strcmp(method, "softmax") == 0) {
        out->has_linear = out->per_head = false;
        out->select = chunk;
        out->cap = STI_CAP_NONE;
    } else {
        return false;
    }
    return true;
}

static still_status check_shape(const sti_hybrid_settings *set,
                                const sti_hybrid_shape *shape, still_error *err)
{
    const int H = shape->H, G = shape->G, D = shape->D, F = shape->F;
    if (H < 1 || G < 1 || H % G != 0)
        return sti_fail(err, STILL_E_ARG,
                        "hybrid attention: %d query heads over %d kv heads, expected a "
                        "multiple",
                        H, G);
    if (D < 1 || D > STI_HEAD_DIM_MAX || F < 1 || F > D)
        return sti_fail(err, STILL_E_ARG,
                        "hybrid attention: head size %d with maps of %d columns, "
                        "expected 1 <= columns <= size <= %d",
                        D, F, STI_HEAD_DIM_MAX);
    if (sti_hybrid_needs_raw(set) && D % 2 != 0)
        return sti_fail(err, STILL_E_ARG,
                        "hybrid attention: head size %d is odd and cannot be rotated",
                        D);
    return STILL_OK;
}

/* Chunk, how many of its tokens stay exact, and the caps of the lists they join. */
static still_status check_selection(const sti_hybrid_settings *set,
                                    const sti_hybrid_shape *shape, still_error *err)
{
    if (set->chunk < 1 || set->chunk > 1 << 20)
        return sti_fail(err, STILL_E_ARG,
                        "hybrid attention: chunk of %d tokens, expected 1 to %d",
                        set->chunk, 1 << 20);
    if (set->select < 0 || set->select > set->chunk)
        return sti_fail(err, STILL_E_ARG,
                        "hybrid attention: select %d, expected 0 to the chunk's %d",
                        set->select, set->chunk);
    if (set->cap < STI_CAP_NONE || set->cap > 1 << 24)
        return sti_fail(err, STILL_E_ARG,
                        "hybrid attention: cap %d, expected 0 to %d, or none", set->cap,
                        1 << 24);
    const int S = sti_hybrid_selection_heads(set, shape);
    if (set->uneven && S > STI_UNEVEN_HEADS_MAX)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "hybrid attention: caps of %d heads in a layer, at most %d can "
                        "differ",
                        S, STI_UNEVEN_HEADS_MAX);
    for (int s = 0; set->uneven && s < S; s++)
        if (set->head_cap[s] < 0 || set->head_cap[s] > set->cap)
            return sti_fail(err, STILL_E_ARG,
                            "hybrid attention: cap %d of head %d, expected 0 to the "
                            "largest, %d",
                            set->head_cap[s], s, set->cap);
    if (!set->has_window && (set->select != 0 || !set->has_linear))
        return sti_fail(err, STILL_E_ARG,
                        "hybrid attention: without a window there is nothing to select "
                        "from and the linear term must stay");
    return STILL_OK;
}

static still_status check_bits(const sti_hybrid_settings *set, still_error *err)
{
    if (set->key_bits != 0 && set->key_bits != 8 && set->key_bits != 5)
        return sti_fail(
            err, STILL_E_ARG,
            "hybrid attention: salient keys in %d bits, expected 8 or 5, or "
            "0 (as in the window)",
            set->key_bits);
    if (set->value_bits != 0 && set->value_bits != 4 && set->value_bits != 3)
        return sti_fail(
            err, STILL_E_ARG,
            "hybrid attention: salient values in %d bits, expected 4 or 3, or "
            "0 (as in the window)",
            set->value_bits);
    return STILL_OK;
}

still_status sti_hybrid_check(const sti_hybrid_settings *set,
                              const sti_hybrid_shape *shape, still_error *err)
{
    STI_TRY(check_shape(set, shape, err));
    STI_TRY(check_selection(set, shape, err));
    STI_TRY(check_bits(set, err));
    STI_TRY(sti_score_check(set->score, ~0u, "ref", err)); /* any of the table */
    if (!(set->eps > 0) || !(set->feature_floor >= 0) || !(set->den_eps >= 0))
        return sti_fail(err, STILL_E_ARG,
                        "hybrid attention: eps %g, floor %g, denominator eps %g, "
                        "expected > 0, >= 0, >= 0",
                        set->eps, set->feature_floor, set->den_eps);
    if (set->position_cap != 0 &&
        (set->position_cap < 2 * set->chunk || set->position_cap > 1 << 30))
        return sti_fail(err, STILL_E_ARG,
                        "hybrid attention: positions capped at %d, expected 0 (not "
                        "capped) or the window's %d to %d",
                        set->position_cap, 2 * set->chunk, 1 << 30);
    return STILL_OK;
}

bool sti_hybrid_same_caps(const sti_hybrid_settings *a, const sti_hybrid_settings *b,
                          int S)
{
    if (a->cap != b->cap || a->uneven != b->uneven) return false;
    return !a->uneven ||
           memcmp(a->head_cap, b->head_cap, (size_t)S * sizeof *a->head_cap) == 0;
}

still_status sti_hybrid_match_check(const sti_hybrid_settings *set, still_error *err)
{
    if (set->has_linear) return STILL_OK;
    return sti_fail(
        err, STILL_E_UNSUPPORTED,
        "hybrid attention: attention weights cannot be matched by a method "
        "that gives forgotten tokens none, expected one with a linear state");
}

/* Salient tokens a list may come to hold. Without a cap every chunk that has left by
 * token max_tokens - 1 has put `select` tokens there. */
static int64_t salient_capacity(const sti_hybrid_settings *set, int64_t max_tokens)
{
    if (!set->has_window || set->select == 0) return 0;
    if (set->cap >= 0) return set->cap;
    int64_t left = max_tokens > 0 ? (max_tokens - 1) / set->chunk - 1 : 0;
    return left > 0 ? left * set->select : 0;
}

/* Keys and values of all salient slots. */
static void carve_salient(sti_hybrid_state *st, sti_carve *c,
                          const sti_hybrid_settings *set, int D, size_t slots)
{
    const struct {
        int bits;
        void **row;
        uint8_t **high;
        uint16_t **scale;
    } part[] = {{set->key_bits, &st->sal_k, &st->sal_k_high, &st->sal_k_scale},
                {set->value_bits, &st->sal_v, &st->sal_v_high, &st->sal_v_scale}};
    for (int i = 0; i < 2; i++) {
        if (part[i].bits == 0) {
            *part[i].row = sti_carve_take(c, slots * (size_t)D, st->kv_size);
            continue;
        }
        const sti_salient_row rows = sti_salient_carve(c, part[i].bits, slots, D);
        *part[i].row = rows.low;
        *part[i].high = rows.high;
        *part[i].scale = rows.scale;
    }
}

void sti_hybrid_state_carve(sti_hybrid_state *st, sti_carve *c,
                            const sti_hybrid_settings *set,
                            const sti_hybrid_shape *shape, int64_t max_tokens,
                            size_t kv_size, size_t real_size)
{
    const size_t S = (size_t)sti_hybrid_selection_heads(set, shape);
    const size_t P = (size_t)sti_hybrid_features(set, shape);
    const size_t G = (size_t)shape->G, D = (size_t)shape->D;
    const size_t window = set->has_window ? 2 * (size_t)set->chunk : 0;
    const int64_t wanted = salient_capacity(set, max_tokens);
    const size_t capacity = wanted < INT32_MAX ? (size_t)wanted : INT32_MAX;

    *st = (sti_hybrid_state){.max_tokens = max_tokens,
                             .sal_capacity = (int)capacity,
                             .kv_size = kv_size,
                             .real_size = real_size};
    if (window) {
        st->win_k = sti_carve_take(c, G * window * D, kv_size);
        st->win_v = sti_carve_take(c, G * window * D, kv_size);
        st->win_score = sti_carve_take(c, S * window, real_size);
        if (sti_score_at(set->score)->received)
            st->win_received = sti_carve_take(c, S * window, real_size);
    }
    if (capacity) {
        const size_t slots = sti_hybrid_list_of(set, st, (int)S).first;
        carve_salient(st, c, set, shape->D, slots);
        st->sal_score = sti_carve_take(c, slots, real_size);
        st->sal_pos = sti_carve_take(c, slots, sizeof *st->sal_pos);
        if (set->position_cap > 0)
            st->sal_far = sti_carve_take(c, slots, sizeof *st->sal_far);
    }
    st->sal_count = sti_carve_take(c, S, sizeof *st->sal_count);
    if (set->has_linear) {
        st->lin_s = sti_carve_take(c, S * P * D, real_size);
        st->lin_z = sti_carve_take(c, S * P, real_size);
    }
    if (set->has_linear && !set->has_window && real_size == sizeof(float)) {
        st->comp_s = sti_carve_take(c, S * P * D, real_size);
        st->comp_z = sti_carve_take(c, S * P, real_size);
    }
    st->folded = sti_carve_take(c, S, sizeof *st->folded);
}

/* Window and salient slots are read only after they were written, so the counts and
 * the sums are all that must go back to zero. */
void sti_hybrid_state_clear(sti_hybrid_state *st, const sti_hybrid_settings *set,
                            const sti_hybrid_shape *shape)
{
    const size_t S = (size_t)sti_hybrid_selection_heads(set, shape);
    const size_t P = (size_t)sti_hybrid_features(set, shape);
    st->pos = 0;
    memset(st->sal_count, 0, S * sizeof *st->sal_count);
    memset(st->folded, 0, S * sizeof *st->folded);
    const size_t s_bytes = S * P * (size_t)shape->D * st->real_size;
    const size_t z_bytes = S * P * st->real_size;
    if (st->lin_s) memset(st->lin_s, 0, s_bytes);
    if (st->lin_z) memset(st->lin_z, 0, z_bytes);
    if (st->comp_s) memset(st->comp_s, 0, s_bytes);
    if (st->comp_z) memset(st->comp_z, 0, z_bytes);
}

/* ---- Arguments ----------------------------------------------------------- */

sti_hybrid_sizes sti_hybrid_sizes_of(const sti_hybrid_settings *set,
                                     const sti_hybrid_shape *shape, size_t tokens)
{
    const size_t H = (size_t)shape->H, D = (size_t)shape->D, F = (size_t)shape->F;
    const size_t S = (size_t)sti_hybrid_selection_heads(set, shape);
    const size_t q = tokens * H * D, k = tokens * (size_t)shape->G * D;
    return (sti_hybrid_sizes){.q = q,
                              .k = k,
                              .v = k,
                              .gate_logit = q,
                              .alpha = H,
                              .window_logit = H,
                              .map_q = H * D * F,
                              .map_k = S * D * F,
                              .bias_q = H,
                              .bias_k = S};
}
