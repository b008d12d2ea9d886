/* hybrid_case.c - see hybrid_case.h. */
#include "eval/selftest/hybrid_case.h"

#include <string.h>

/* Larger than any golden case, small enough that a state made for them can be. */
enum { MAX_HEADS = 256, MAX_TOKENS = 1 << 16, MAX_CHUNK = 1 << 12 };

static void read_shape(sti_golden *g, sti_hybrid_case *c)
{
    c->shape.H = sti_golden_int(g, "q_heads", 1, MAX_HEADS);
    c->shape.G = sti_golden_int(g, "kv_heads", 1, MAX_HEADS);
    c->shape.D = c->shape.F = sti_golden_int(g, "head_dim", 1, STI_HEAD_DIM_MAX);
    c->T = sti_golden_int(g, "tokens", 1, MAX_TOKENS);
}

/* The golden files give everything per query head. Of the heads that share a selection
 * head the first is taken: [T,H] -> [T,S], in place. */
static void first_of_group(void *rows, const sti_hybrid_case *c, size_t bytes)
{
    unsigned char *p = rows;
    const size_t H = (size_t)c->shape.H, S = (size_t)c->S, group = H / S;
    for (size_t t = 0; p && t < (size_t)c->T; t++)
        for (size_t s = 0; s < S; s++)
            memmove(p + (t * S + s) * bytes, p + (t * H + s * group) * bytes, bytes);
}

/* [H, n] -> [S, n], the first of each group. */
static double *state_of(sti_golden *g, const sti_hybrid_case *c, const char *name,
                        size_t n)
{
    const size_t group = (size_t)(c->shape.H / c->S);
    double *all = sti_golden_flat(g, name, (size_t)c->shape.H * n);
    for (size_t s = 0; all && s < (size_t)c->S; s++)
        memmove(all + s * n, all + s * group * n, n * sizeof *all);
    return all;
}

/* Inputs, gradients, output and state: what all files have. */
static void read_tensors(sti_golden *g, sti_hybrid_case *c)
{
    const int H = c->shape.H, G = c->shape.G, D = c->shape.D, T = c->T;
    c->S = sti_hybrid_selection_heads(&c->set, &c->shape);
    c->P = sti_hybrid_features(&c->set, &c->shape);
    const size_t map = (size_t)D * (size_t)c->shape.F;
    const size_t nh = (size_t)H, ns = (size_t)c->S, P = (size_t)c->P;
#define READ(prefix)                                                                   \
    .q = sti_golden_rows(g, prefix "q", H, T, D),                                      \
    .k = sti_golden_rows(g, prefix "k", G, T, D),                                      \
    .v = sti_golden_rows(g, prefix "v", G, T, D),                                      \
    .gate_logit = sti_golden_rows_opt(g, prefix "gate_logit", H, T, D),                \
    .alpha = sti_golden_flat_opt(g, prefix "alpha", nh),                               \
    .window_logit = sti_golden_flat_opt(g, prefix "window_logit", nh),                 \
    .map_q = sti_golden_flat(g, prefix "map_q", nh * map),                             \
    .map_k = sti_golden_flat(g, prefix "map_k", ns * map),                             \
    .bias_q = sti_golden_flat_opt(g, prefix "bias_q", nh),                             \
    .bias_k = sti_golden_flat_opt(g, prefix "bias_k", ns)
    c->in = (sti_hybrid_in64){READ("")};
    c->grad = (sti_hybrid_grad64){READ("grad.")};
#undef READ
    c->dy = sti_golden_rows(g, "in.dy", H, T, D);
    c->y = sti_golden_rows(g, "out.y", H, T, D);
    c->state_s = state_of(g, c, "out.state_s", P * (size_t)D);
    c->state_z = state_of(g, c, "out.state_z", P);
}

still_status sti_hybrid_case_read_operator(sti_golden *g, sti_hybrid_case *c,
                                           still_error *err)
{
    *c = (sti_hybrid_case){0};
    read_shape(g, c);
    c->set = (sti_hybrid_settings){
        .chunk = sti_golden_int(g, "chunk", 1, MAX_CHUNK),
        .select = sti_golden_int(g, "lam", 0, MAX_CHUNK),
        .cap = sti_golden_int(g, "cap", STI_CAP_NONE, MAX_TOKENS),
        .score = STI_SCORE_S3,
        .per_head = !sti_golden_flag(g, "shared_kv_select_and_map"),
        .has_window = true,
        .has_linear = true,
        .la_scale =
            sti_golden_is(g, "la_scale", "window") ? STI_SCALE_WINDOW : STI_SCALE_EXACT,
        .map = STI_MAP_SOFTMAX,
        .norm_preserved = sti_golden_flag(g, "norm_preserved"),
        .gate = sti_golden_flag(g, "gate"),
        .alpha = sti_golden_flag(g, "alpha"),
        .window_factor = sti_golden_flag(g, "window_factor"),
        .eps = sti_golden_real(g, "eps"),
    };
    STI_TRY(g->status);
    STI_TRY(sti_hybrid_check(&c->set, &c->shape, err));
    read_tensors(g, c);
    double *score = sti_golden_rows(g, "out.score_select", c->shape.H, c->T, 1);
    int32_t *salient = sti_golden_rows_int(g, "out.salient_count", c->shape.H, c->T);
    c->score_head = sti_golden_rows(g, "out.score_head", c->shape.H, c->T, 1);
    c->fold = sti_golden_rows_int(g, "out.fold_chunk", c->shape.H, c->T);
    first_of_group(score, c, sizeof *score);
    first_of_group(salient, c, sizeof *salient);
    first_of_group(c->fold, c, sizeof *c->fold);
    c->score = score;
    c->salient = salient;
    return g->status;
}

still_status sti_hybrid_case_read_linear(sti_golden *g, const char *method,
                                         sti_hybrid_case *c, still_error *err)
{
    *c = (sti_hybrid_case){0};
    read_shape(g, c);
    STI_TRY(g->status);
    if (!sti_hybrid_preset(method, 1, &c->set))
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: method '%s' is no setting of the "
                        "hybrid operator",
                        g->store.path, method);
    STI_TRY(sti_hybrid_check(&c->set, &c->shape, err));
    read_tensors(g, c);
    const size_t n = (size_t)c->T * (size_t)c->S;
    c->fold = sti_golden_take_int(g, n);
    for (size_t i = 0; c->fold && i < n; i++) c->fold[i] = -1;
    return g->status;
}

/* ---- Gradients ----------------------------------------------------------- */

typedef struct grad_field {
    const char *name;
    double *const *want;
    double **got;
    size_t n;
} grad_field;

enum { GRADS = 10 };

static void grad_fields(const sti_hybrid_case *c, sti_hybrid_grad64 *got,
                        grad_field f[GRADS])
{
    const size_t T = (size_t)c->T, H = (size_t)c->shape.H, G = (size_t)c->shape.G;
    const size_t D = (size_t)c->shape.D, S = (size_t)c->S, map = D * (size_t)c->shape.F;
    const sti_hybrid_grad64 *want = &c->grad;
    const grad_field all[GRADS] = {
        {"grad q", &want->q, &got->q, T * H * D},
        {"grad k", &want->k, &got->k, T * G * D},
        {"grad v", &want->v, &got->v, T * G * D},
        {"grad gate", &want->gate_logit, &got->gate_logit, T * H * D},
        {"grad alpha", &want->alpha, &got->alpha, H},
        {"grad window", &want->window_logit, &got->window_logit, H},
        {"grad map q", &want->map_q, &got->map_q, H * map},
        {"grad map k", &want->map_k, &got->map_k, S * map},
        {"grad bias q", &want->bias_q, &got->bias_q, H},
        {"grad bias k", &want->bias_k, &got->bias_k, S},
    };
    memcpy(f, all, sizeof all);
}

void sti_hybrid_case_take_grad(sti_golden *g, const sti_hybrid_case *c,
                               sti_hybrid_grad64 *grad)
{
    grad_field f[GRADS];
    *grad = (sti_hybrid_grad64){0};
    grad_fields(c, grad, f);
    for (int i = 0; i < GRADS; i++)
        if (*f[i].want) *f[i].got = sti_golden_take(g, f[i].n);
}

int sti_hybrid_case_check_grad(const sti_hybrid_case *c, const sti_hybrid_grad64 *got,
                               double limit, still_check *check)
{
    sti_hybrid_grad64 g = *got;
    grad_field f[GRADS];
    int n = 0;
    grad_fields(c, &g, f);
    for (int i = 0; i < GRADS; i++)
        if (*f[i].want)
            check[n++] = (still_check){f[i].name,
                                       sti_golden_error(*f[i].got, *f[i].want, f[i].n),
                                       limit, false};
    return n;
}
