/* linear.c - the entries of Liger and SUPRA on the GPU: which form runs what, where its
 * arrays lie, and the order of the kernels. See linear.h. */
#include "backend/cuda/linear/linear.h"

#include <math.h>

#include "backend/cuda/dense/kernels.h"

enum {
    FEW_TOKENS = 4,       /* so few are stepped */
    MOST_SEQUENCES = 512, /* of one launch, */
    MOST_ROWS = 1 << 15,  /* and their tokens: they all have features in scratch */
    SLOT_SEQUENCES = 11,
    SLOT_POSITIONS = 12,
    SLOT_FREQUENCIES = 13
};

/* Sequences that run together. */
typedef struct batch {
    sti_cuda_linear p;
    bool whole; /* they begin here and leave no state */
    const sti_linear_args *a[MOST_SEQUENCES];
    int pass_row[MOST_SEQUENCES]; /* of its first row in the running pass */
} batch;

/* ---- Checks -------------------------------------------------------------- */

static still_status check_state(sti_dev *dev, const sti_linear_args *a,
                                const sti_linear_args *first, still_error *err)
{
    const size_t kv = a->state->kv_size;
    if (a->window > 0 && ((kv != sizeof(float) && kv != sizeof(sti_half)) ||
                          kv != first->state->kv_size))
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "linear attention: window elements of %zu bytes, expected "
                        "2 or 4, and those of a call alike",
                        kv);
    if (a->state->pos < 0 || a->state->pos > INT32_MAX - a->T)
        return sti_fail(err, STILL_E_LIMIT,
                        "linear attention: %d tokens after %lld, at most %d", a->T,
                        (long long)a->state->pos, INT32_MAX);
    if (!sti_cuda_pass_positions(dev) && !sti_cuda_on_device(a->state->s))
        return sti_fail(err, STILL_E_ARG,
                        "linear attention: a state that is not on the GPU");
    return STILL_OK;
}

/* ---- Batches ------------------------------------------------------------- */

/* An empty batch of sequences like a. */
static void empty_batch(const sti_linear_args *a, batch *b)
{
    const sti_linear_shape *s = &a->shape;
    const int S = a->window > 0 ? s->G : s->H;
    b->p = (sti_cuda_linear){.H = s->H,
                             .G = s->G,
                             .D = s->D,
                             .DP = (s->D + 31) / 32 * 32,
                             .S = S,
                             .per_kv = s->H / s->G,
                             .per_state = s->H / S,
                             .window = a->window,
                             .interleaved = a->in.interleaved,
                             .half_kv = a->state && a->state->kv_size == 2,
                             .scale = 1 / sqrtf((float)s->D),
                             .bias_q = a->in.bias_q,
                             .bias_k = a->in.bias_k,
                             .map_q = a->in.map_q != NULL,
                             .map_k = a->in.map_k != NULL};
}

static bool fits(const batch *b, const sti_linear_args *a)
{
    return b->p.n == 0 || (b->p.n < MOST_SEQUENCES && b->p.rows <= MOST_ROWS - a->T);
}

static int spans_of(const sti_linear_args *a)
{
    return (a->T + STI_LINEAR_SPAN - 1) / STI_LINEAR_SPAN;
}

static void add(batch *b, const sti_linear_args *a, int pass_row)
{
    b->pass_row[b->p.n] = pass_row;
    b->a[b->p.n++] = a;
    b->p.rows += a->T;
    b->p.spans += spans_of(a);
    if (a->T > b->p.longest) b->p.longest = a->T;
}

/* The sequences as kernels see them, frequencies, positions: on the device. */
static still_status place(sti_dev *dev, batch *b, still_error *err)
{
    sti_cuda_linear_seq seq[MOST_SEQUENCES];
    int32_t first[MOST_SEQUENCES];
    const int32_t *pass = sti_cuda_pass_positions(dev);
    const void *positions = pass, *table;
    const int n = b->p.n;
    STI_TRY(sti_cuda_table(dev, SLOT_FREQUENCIES, b->a[0]->in.inv_freq,
                           (size_t)(b->p.D / 2) * sizeof(float), &table, err));
    b->p.inv_freq = table;
    if (!pass) {
        for (int i = 0; i < n; i++)
            first[i] = b->whole ? 0 : (int32_t)b->a[i]->state->pos;
        STI_TRY(sti_cuda_table(dev, SLOT_POSITIONS, first, (size_t)n * sizeof *first,
                               &positions, err));
    }
    for (int i = 0, row = 0, span = 0; i < n; i++) {
        const sti_linear_args *a = b->a[i];
        seq[i] = (sti_cuda_linear_seq){.q = a->in.q,
                                       .k = a->in.k,
                                       .v = a->in.v,
                                       .y = a->y,
                                       .pos = (const int32_t *)positions +
                                              (pass ? b->pass_row[i] : i),
                                       .T = a->T,
                                       .spans = spans_of(a),
                                       .row0 = row,
                                       .span0 = span,
                                       .dy = a->dy,
                                       .dq = a->grad.q,
                                       .dk = a->grad.k,
                                       .dv = a->grad.v};
        if (!b->whole) {
            seq[i].win_k = a->state->win_k;
            seq[i].win_v = a->state->win_v;
            seq[i].s = a->state->s;
        }
        row += a->T;
        span += seq[i].spans;
    }
    STI_TRY(
        sti_cuda_table(dev, SLOT_SEQUENCES, seq, (size_t)n * sizeof *seq, &table, err));
    b->p.seq = table;
    return STILL_OK;
}

/* ---- Scratch ------------------------------------------------------------- */

typedef enum form { STEPS, SPANS, BACKWARD } form;

static float *floats(sti_carve *c, size_t n)
{
    return sti_carve_take(c, n, sizeof(float));
}

static void carve_backward(sti_carve *c, sti_cuda_linear *p, float **part)
{
    const size_t rows = (size_t)p->rows, H = (size_t)p->H, G = (size_t)p->G;
    const size_t S = (size_t)p->S, D = (size_t)p->D, DP = (size_t)p->DP;
    p->d_o = floats(c, rows * H * DP);
    p->dfq = floats(c, rows * H * DP);
    p->dfk = floats(c, rows * S * DP);
    p->dv = floats(c, rows * S * DP);
    p->dstates = floats(c, (size_t)p->spans * S * DP * DP);
    if (p->window > 0) {
        p->lse = floats(c, rows * H);
        p->delta = floats(c, rows * H);
        p->dqr = floats(c, rows * H * DP);
        p->dkr = floats(c, rows * G * DP);
        p->dvr = floats(c, rows * G * DP);
        p->da = floats(c, rows * G * DP);
    } else {
        p->draw_q = floats(c, rows * H * D);
        p->draw_k = floats(c, rows * G * D);
        *part = floats(c, STI_LINEAR_PARTS * H * D);
    }
}

static void carve_arrays(sti_carve *c, sti_cuda_linear *p, form f, float **part)
{
    const size_t rows = (size_t)p->rows, H = (size_t)p->H, G = (size_t)p->G;
    const size_t S = (size_t)p->S, D = (size_t)p->D, DP = (size_t)p->DP;
    if (p->map_q) p->raw_q = floats(c, rows * H * D);
    if (p->map_k) p->raw_k = floats(c, rows * G * D);
    if (f == STEPS) return;
    p->fq = floats(c, rows * H * DP);
    p->fk = floats(c, rows * G * DP);
    p->v = floats(c, rows * G * DP);
    p->o = floats(c, rows * H * DP);
    p->states = floats(c, (size_t)p->spans * S * DP * DP);
    p->sums = floats(c, (size_t)p->spans * S * DP);
    if (p->window > 0) {
        p->decay = floats(c, rows * G * DP);
        p->qr = floats(c, rows * H * DP);
        p->kr = floats(c, rows * G * DP);
        p->win = floats(c, rows * H * DP);
    }
    if (f == BACKWARD) carve_backward(c, p, part);
}

static still_status take_scratch(sti_dev *dev, batch *b, form f, float **part,
                                 still_error *err)
{
    sti_carve c = {0};
    void *scratch;
    carve_arrays(&c, &b->p, f, part);
    STI_TRY(sti_cuda_scratch(dev, c.used, &scratch, err));
    c = (sti_carve){.base = scratch};
    carve_arrays(&c, &b->p, f, part);
    return STILL_OK;
}

/* ---- SUPRA's maps -------------------------------------------------------- */

/* Sequences i, i + 1, .. that lie behind each other: their number, and of rows. */
static int stretch(const batch *b, int i, int *rows)
{
    const size_t q = (size_t)(b->p.H * b->p.D), k = (size_t)(b->p.G * b->p.D);
    const sti_linear_args *a = b->a[i];
    int n = 0;
    *rows = 0;
    for (; i + n < b->p.n; n++) {
        const sti_linear_args *next = b->a[i + n];
        const size_t at = (size_t)*rows;
        if (next->in.q != a->in.q + at * q || next->in.k != a->in.k + at * k ||
            (a->grad.q && next->grad.q != a->grad.q + at * q) ||
            (a->grad.k && next->grad.k != a->grad.k + at * k))
            break;
        *rows += next->T;
    }
    return n;
}

/* out[rows, n] = x[rows, n] W, W [in, out]. In float: the sign of the result decides.
 */
static still_status map_rows(sti_dev *dev, const float *x, const float *W, float *out,
                             int rows, int n, still_error *err)
{
    return sti_cuda_multiply(dev,
                             &(sti_cuda_multiply_args){.type = STI_CUDA_ALL_FLOAT,
                                                       .a = W,
                                                       .b = x,
                                                       .d = out,
                                                       .m = n,
                                                       .n = rows,
                                                       .k = n,
                                                       .lda = n,
                                                       .ldb = n,
                                                       .ldd = n,
                                                       .scale = 1},
                             err);
}

static still_status map_all(sti_dev *dev, const batch *b, still_error *err)
{
    const sti_cuda_linear *p = &b->p;
    const int nq = p->H * p->D, nk = p->G * p->D;
    for (int i = 0, at = 0, rows; i < p->n; at += rows) {
        const sti_linear_in *in = &b->a[i]->in;
        i += stretch(b, i, &rows);
        if (rows < 1) continue;
        if (in->map_q)
            STI_TRY(map_rows(dev, in->q, in->map_q, p->raw_q + (size_t)at * (size_t)nq,
                             rows, nq, err));
        if (in->map_k)
            STI_TRY(map_rows(dev, in->k, in->map_k, p->raw_k + (size_t)at * (size_t)nk,
                             rows, nk, err));
    }
    return STILL_OK;
}

/* dx = draw W^T and dW += x^T draw, over `rows` rows of n numbers. */
static still_status map_back(sti_dev *dev, const float *x, const float *W,
                             const float *draw, int rows, int n, float *dx, float *dW,
                             still_error *err)
{
    if (dW) /* D is dW as cuBLASLt sees it: draw^T x */
        STI_TRY(sti_cuda_multiply(dev,
                                  &(sti_cuda_multiply_args){.type = STI_CUDA_TF32,
                                                            .a = draw,
                                                            .b = x,
                                                            .d = dW,
                                                            .m = n,
                                                            .n = n,
                                                            .k = rows,
                                                            .lda = n,
                                                            .ldb = n,
                                                            .ldd = n,
                                                            .trans_b = true,
                                                            .scale = 1,
                                                            .accumulate = true},
                                  err));
    if (!dx || !W) return STILL_OK;
    return sti_cuda_gemm(dev,
                         &(sti_cuda_gemm_args){.type = STI_CUDA_TF32,
                                               .x = draw,
                                               .w = W,
                                               .y = dx,
                                               .M = rows,
                                               .N = n,
                                               .K = n,
                                               .ld = n},
                         err);
}

static still_status maps_back(sti_dev *dev, const batch *b, float *part,
                              still_error *err)
{
    const sti_cuda_linear *p = &b->p;
    const sti_linear_grad *g = &b->a[0]->grad;
    const int nq = p->H * p->D, nk = p->G * p->D;
    for (int i = 0, at = 0, rows; i < p->n; at += rows) {
        const sti_linear_args *a = b->a[i];
        i += stretch(b, i, &rows);
        if (rows < 1) continue;
        STI_TRY(map_back(dev, a->in.q, a->in.map_q, p->draw_q + (size_t)at * (size_t)nq,
                         rows, nq, a->grad.q, g->map_q, err));
        STI_TRY(map_back(dev, a->in.k, a->in.map_k, p->draw_k + (size_t)at * (size_t)nk,
                         rows, nk, a->grad.k, g->map_k, err));
    }
    if (g->bias_q)
        STI_TRY(
            sti_cuda_linear_bias(dev, p->draw_q, p->rows, nq, part, g->bias_q, err));
    if (g->bias_k)
        STI_TRY(
            sti_cuda_linear_bias(dev, p->draw_k, p->rows, nk, part, g->bias_k, err));
    return STILL_OK;
}

/* ---- Forward ------------------------------------------------------------- */

/* Features, the window, o: what forward and backward begin with. */
static still_status attend(sti_dev *dev, const batch *b, still_error *err)
{
    const sti_cuda_linear *p = &b->p;
    STI_TRY(map_all(dev, b, err));
    STI_TRY(sti_cuda_linear_features(dev, p, err));
    if (p->window > 0) STI_TRY(sti_cuda_linear_window(dev, p, err));
    return sti_cuda_linear_states(dev, p, err);
}

static still_status run_forward(sti_dev *dev, batch *b, form f, still_error *err)
{
    if (b->p.n == 0) return STILL_OK;
    STI_TRY(place(dev, b, err));
    STI_TRY(take_scratch(dev, b, f, NULL, err));
    if (f == STEPS) {
        STI_TRY(map_all(dev, b, err));
        STI_TRY(sti_cuda_linear_step(dev, &b->p, err));
    } else {
        STI_TRY(attend(dev, b, err));
        STI_TRY(sti_cuda_linear_outputs(dev, &b->p, err));
        STI_TRY(sti_cuda_linear_write(dev, &b->p, err));
        if (b->p.window > 0) STI_TRY(sti_cuda_linear_store(dev, &b->p, err));
    }
    empty_batch(b->a[0], b);
    return STILL_OK;
}

static form form_of(const sti_linear_args *a)
{
    return a->T <= FEW_TOKENS || a->shape.D > STI_LINEAR_MAX_D ? STEPS : SPANS;
}

still_status sti_cuda_linear_forward(sti_dev *dev, const sti_linear_args *a, int n,
                                     still_error *err)
{
    batch b = {.whole = false};
    if (n < 1) return STILL_OK;
    STI_TRY(sti_linear_check_all(a, n, err));
    for (int i = 0; i < n; i++) STI_TRY(check_state(dev, &a[i], a, err));
    for (form f = STEPS; f <= SPANS; f++) {
        empty_batch(a, &b);
        for (int i = 0, at = 0; i < n; at += a[i++].T) {
            if (a[i].T == 0 || form_of(&a[i]) != f) continue;
            if (!fits(&b, &a[i])) STI_TRY(run_forward(dev, &b, f, err));
            add(&b, &a[i], at);
        }
        STI_TRY(run_forward(dev, &b, f, err));
    }
    for (int i = 0; i < n; i++) a[i].state->pos += a[i].T;
    return STILL_OK;
}

/* A batch as large as `rows` of one session. */
static void fill_batch(const sti_linear_args *a, batch *b)
{
    *b = (batch){.whole = false};
    empty_batch(a, b);
    b->p.map_q = b->p.map_k = a->window == 0;
    add(b, a, 0);
}

still_status sti_cuda_linear_reserve(sti_dev *dev, const sti_linear_shape *shape,
                                     int window, int rows, still_error *err)
{
    batch b;
    const sti_linear_args a = {.shape = *shape, .window = window, .T = rows};
    STI_TRY(sti_linear_check(&a.shape, a.T, a.window, err));
    fill_batch(&a, &b);
    return take_scratch(dev, &b, form_of(&a), NULL, err);
}

size_t sti_cuda_linear_bytes(const sti_dev *dev, const sti_linear_shape *shape,
                             int window, int rows)
{
    batch b;
    sti_carve c = {0};
    still_error unused;
    const sti_linear_args a = {.shape = *shape, .window = window, .T = rows};
    if (sti_linear_check(&a.shape, a.T, a.window, &unused) == STILL_OK) {
        fill_batch(&a, &b);
        carve_arrays(&c, &b.p, form_of(&a), NULL);
    }
    return sti_cuda_bytes_with(dev, c.used);
}

/* ---- Backward ------------------------------------------------------------ */

static still_status run_backward(sti_dev *dev, batch *b, still_error *err)
{
    const sti_cuda_linear *p = &b->p;
    float *part = NULL;
    if (p->n == 0) return STILL_OK;
    STI_TRY(place(dev, b, err));
    STI_TRY(take_scratch(dev, b, BACKWARD, &part, err));
    STI_TRY(attend(dev, b, err));
    if (p->window == 0) STI_TRY(sti_cuda_linear_outputs(dev, p, err));
    STI_TRY(sti_cuda_linear_begin_back(dev, p, err));
    STI_TRY(sti_cuda_linear_queries(dev, p, err));
    STI_TRY(sti_cuda_linear_dstates(dev, p, err));
    STI_TRY(sti_cuda_linear_keys(dev, p, err));
    if (p->window > 0) {
        STI_TRY(sti_cuda_linear_decays(dev, p, err));
        STI_TRY(sti_cuda_linear_window_queries(dev, p, err));
        STI_TRY(sti_cuda_linear_window_keys(dev, p, err));
    }
    STI_TRY(sti_cuda_linear_inputs_back(dev, p, err));
    if (p->window == 0) STI_TRY(maps_back(dev, b, part, err));
    empty_batch(b->a[0], b);
    return STILL_OK;
}

/* Gradients of parameters are the first sequence's: all share them. */
still_status sti_cuda_linear_backward(sti_dev *dev, const sti_linear_args *a, int n,
                                      still_error *err)
{
    batch b = {.whole = true};
    if (n < 1) return STILL_OK;
    STI_TRY(sti_linear_check_all(a, n, err));
    if (a->shape.D > STI_LINEAR_MAX_D)
        return sti_fail(
            err, STILL_E_UNSUPPORTED,
            "linear attention: head size %d, the GPU trains at most %d; use "
            "--backend cpu",
            a->shape.D, STI_LINEAR_MAX_D);
    empty_batch(a, &b);
    for (int i = 0; i < n; i++) {
        if (a[i].T == 0) continue;
        if (!fits(&b, &a[i])) STI_TRY(run_backward(dev, &b, err));
        add(&b, &a[i], 0);
    }
    return run_backward(dev, &b, err);
}
