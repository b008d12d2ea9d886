/* matmul.c - products with weights, and the feed-forward half of a layer.
 *
 * Few rows: weights are read as they are kept, by kernels of our own (gemv.cu). More
 * rows: x becomes half, weights are half or are made so, and all matrices are
 * multiplied by one launch (gemm.cu), or, where each is work enough for the GPU, one by
 * one by cuBLASLt. Weights in float are multiplied in float either way, except those in
 * training by many rows: they change with every step and are made half each time, as
 * quants are. */
#include "backend/cuda/dense/kernels.h"
#include "backend/cuda/dense/lora_gemm.h"
#include "backend/host.h"

/* Rows up to which quants without a copy in half are read anew for every few rows. */
enum { SLICED_ROWS = 48 };

typedef struct matrices {
    sti_cuda_matrix m[STI_MATMUL_MAX];
    bool trained[STI_MATMUL_MAX]; /* floats, read where the optimizer changes them */
    bool some_float, some_other;
} matrices;

/* x as the products want it. */
typedef struct input {
    const float *x;     /* normed if it was to be */
    const sti_half *xh; /* the same as half [M, ld] */
    sti_half *half;     /* for a weight in half */
} input;

/* Rows up to which our own kernels read this matrix. */
static int gemv_rows(const sti_cuda_matrix *m)
{
    return m->kind == STI_CUDA_HALF ? STI_CUDA_GEMV_ROWS_HALF : STI_CUDA_GEMV_ROWS;
}

static still_status open_matrices(const sti_matmul_args *a, matrices *all,
                                  still_error *err)
{
    *all = (matrices){0};
    for (int i = 0; i < a->n; i++) {
        if (a->w[i]->K != a->w[0]->K)
            return sti_fail(err, STILL_E_ARG,
                            "matmul of a matrix of %lld columns with rows of %lld",
                            (long long)a->w[i]->K, (long long)a->w[0]->K);
        all->m[i] = sti_cuda_matrix_of(a->w[i]);
        if (all->m[i].kind == STI_CUDA_FLOAT)
            all->some_float = true;
        else
            all->some_other = true;
        all->trained[i] = all->m[i].kind == STI_CUDA_FLOAT && !a->w[i]->own.p;
    }
    return STILL_OK;
}

/* Norms x and rounds it to half, as far as that is wanted, into a->normed or scratch;
 * the latter has `more` bytes for in->half too. */
static still_status prepare_input(sti_dev *dev, const sti_matmul_args *a,
                                  bool want_float, bool want_half, size_t more,
                                  input *in, still_error *err)
{
    const size_t K = (size_t)a->w[0]->K, ld = sti_cuda_round_up(K, 8);
    float *normed = a->norm && (want_float || a->keep_normed) ? a->normed : NULL;
    const bool in_place =
        a->norm && !normed && ld <= 2 * K && sti_cuda_aligned(a->normed);
    const size_t half =
        want_half && !in_place
            ? sti_cuda_round_up((size_t)a->M * ld * sizeof(sti_half), 256)
            : 0;
    void *scratch = NULL;
    if (half + more > 0) STI_TRY(sti_cuda_scratch(dev, half + more, &scratch, err));
    sti_half *xh = !want_half ? NULL : in_place ? (sti_half *)a->normed : scratch;
    if (normed || xh)
        STI_TRY(
            sti_cuda_norm(dev, a->x, a->norm, a->eps, a->M, (int)K, normed, xh, err));
    *in = (input){.x = normed ? normed : a->x,
                  .xh = xh,
                  .half = more > 0 ? (sti_half *)((char *)scratch + half) : NULL};
    return STILL_OK;
}

/* ---- Few rows ------------------------------------------------------------ */

/* One launch for the matrices in float, one for all others. */
static still_status run_gemv(sti_dev *dev, const sti_matmul_args *a,
                             const matrices *all, still_error *err)
{
    const int K = all->m[0].K;
    const bool fits = sti_cuda_gemv_fits(a->M, K);
    /* A kernel of its own norms x where no block can, or where its result is wanted
     * and not every matrix is read by a kernel that would write it. */
    const bool apart = !fits || (a->norm && a->keep_normed && all->some_float);
    input in = {.x = a->x};
    if (apart)
        STI_TRY(prepare_input(dev, a, all->some_float, all->some_other, 0, &in, err));
    for (int in_float = 0; in_float < 2; in_float++) {
        sti_cuda_gemv_args f = {.x = in.x,
                                .xh = in.xh,
                                .norm = apart ? NULL : a->norm,
                                .eps = a->eps,
                                .keep = !apart && a->keep_normed && a->norm ? a->normed
                                                                            : NULL,
                                .M = a->M,
                                .K = K,
                                .accumulate = a->accumulate};
        for (int i = 0; i < a->n; i++) {
            if ((all->m[i].kind == STI_CUDA_FLOAT) != (in_float == 1)) continue;
            f.w[f.n] = all->m[i];
            f.bias[f.n] = a->bias[i];
            f.y[f.n++] = a->y[i];
        }
        if (f.n == 0) continue;
        STI_TRY(in_float ? sti_cuda_gemv_float(dev, &f, err)
                         : sti_cuda_gemv(dev, &f, err));
    }
    return STILL_OK;
}

/* ---- Many rows ----------------------------------------------------------- */

/* The same for a matrix of quants, which is made half in in->half, some rows at a time.
 */
static still_status multiply_quants(sti_dev *dev, const sti_cuda_matrix *m,
                                    sti_cuda_gemm_args g, const input *in,
                                    still_error *err)
{
    const int step = sti_cuda_half_rows(m);
    const size_t size =
        g.type == STI_CUDA_HALF_TO_HALF ? sizeof(sti_half) : sizeof(float);
    for (int row = 0; row < m->N; row += step) {
        const sti_cuda_matrix part =
            sti_cuda_matrix_rows(m, row, m->N - row < step ? m->N - row : step);
        sti_cuda_gemm_args p = g;
        p.w = in->half;
        p.y = (char *)g.y + (size_t)row * size;
        p.bias = g.bias ? g.bias + row : NULL;
        p.N = part.N;
        p.ldy = m->N;
        STI_TRY(sti_cuda_to_half(dev, &part, in->half, err));
        STI_TRY(sti_cuda_gemm(dev, &p, err));
    }
    return STILL_OK;
}

/* y[M, N] = [y +] x W^T + bias for one matrix. */
static still_status multiply(sti_dev *dev, const sti_cuda_matrix *m, const input *in,
                             int M, const float *bias, bool accumulate,
                             sti_cuda_product type, void *y, still_error *err)
{
    sti_cuda_gemm_args g = {.type = type,
                            .x = in->xh,
                            .w = m->half,
                            .y = y,
                            .bias = bias,
                            .M = M,
                            .N = m->N,
                            .K = m->ld,
                            .ld = m->ld,
                            .accumulate = accumulate};
    if (m->kind == STI_CUDA_FLOAT) {
        g.type = STI_CUDA_ALL_FLOAT;
        g.x = in->x;
        g.w = m->w;
        g.K = g.ld = m->K;
    } else if (!m->half) {
        return multiply_quants(dev, m, g, in, err);
    }
    return sti_cuda_gemm(dev, &g, err);
}

/* The call as one product down to low ranks, if it is one: all matrices in training. */
static bool is_lora_down(const sti_matmul_args *a, const matrices *all,
                         sti_cuda_lora_down_args *out)
{
    *out = (sti_cuda_lora_down_args){
        .x = a->x, .M = a->M, .K = all->m[0].K, .n = a->n, .scale = 1};
    bool plain = !a->norm && !a->accumulate;
    for (int i = 0; i < a->n; i++) {
        out->w[i] = all->m[i].w;
        out->y[i] = a->y[i];
        out->N[i] = all->m[i].N;
        plain = plain && all->trained[i] && !a->bias[i];
    }
    return plain && sti_cuda_lora_down_fits(out);
}

/* The same of one that leads up from a low rank. */
static bool is_lora_up(const sti_matmul_args *a, const matrices *all,
                       sti_cuda_lora_up_args *out)
{
    *out = (sti_cuda_lora_up_args){.x = a->x,
                                   .w = all->m[0].w,
                                   .M = a->M,
                                   .N = all->m[0].N,
                                   .R = all->m[0].K,
                                   .accumulate = a->accumulate,
                                   .y = a->y[0]};
    return a->n == 1 && all->trained[0] && !a->norm && !a->bias[0] &&
           sti_cuda_lora_up_fits(out);
}

/* The call as one launch of gemm.cu, if all its matrices are fit for that. */
static bool fits_gemm_small(const sti_dev *dev, const sti_matmul_args *a,
                            const matrices *all, const sti_half *xh,
                            sti_cuda_gemv_args *out)
{
    *out = (sti_cuda_gemv_args){
        .xh = xh, .M = a->M, .K = all->m[0].K, .n = a->n, .accumulate = a->accumulate};
    for (int i = 0; i < a->n; i++) {
        out->w[i] = all->m[i];
        out->bias[i] = a->bias[i];
        out->y[i] = a->y[i];
    }
    return !all->some_float && sti_cuda_gemm_small_fits(dev, out);
}

static still_status run_gemm(sti_dev *dev, const sti_matmul_args *a,
                             const matrices *all, still_error *err)
{
    sti_cuda_lora_down_args down;
    sti_cuda_lora_up_args up;
    if (is_lora_down(a, all, &down)) return sti_cuda_lora_down(dev, &down, err);
    if (is_lora_up(a, all, &up)) return sti_cuda_lora_up(dev, &up, err);
    size_t more = 0;
    bool want_float = false, want_half = false;
    for (int i = 0; i < a->n; i++) {
        const sti_cuda_matrix *m = &all->m[i];
        const size_t half = all->trained[i]
                                ? (size_t)m->N * (size_t)m->ld * sizeof(sti_half)
                                : sti_cuda_half_bytes(m);
        const bool as_float = m->kind == STI_CUDA_FLOAT && !all->trained[i];
        if (half > more) more = half;
        want_float = want_float || as_float;
        want_half = want_half || !as_float;
    }
    input in;
    STI_TRY(prepare_input(dev, a, want_float, want_half, more, &in, err));
    sti_cuda_gemv_args small;
    if (fits_gemm_small(dev, a, all, in.xh, &small))
        return sti_cuda_gemm_small(dev, &small, err);
    for (int i = 0; i < a->n; i++) {
        sti_cuda_matrix m = all->m[i];
        if (all->trained[i]) {
            STI_TRY(sti_cuda_norm(dev, m.w, NULL, 0, m.N, m.K, NULL, in.half, err));
            m.kind = STI_CUDA_HALF;
            m.half = in.half;
        }
        STI_TRY(multiply(dev, &m, &in, a->M, a->bias[i], a->accumulate,
                         STI_CUDA_HALF_TO_FLOAT, a->y[i], err));
    }
    return STILL_OK;
}

/* Whether all are quants without a copy in half, and the rows so few that reading the
 * quants several times takes less than making them half. */
static bool is_sliced(const sti_cuda_matrix *m, int n, int M)
{
    bool quants = M <= SLICED_ROWS;
    for (int i = 0; i < n; i++) quants = quants && sti_cuda_half_bytes(&m[i]) > 0;
    return quants;
}

/* Rows of a slice: as many as a block can stage. */
static int slice_rows(int K)
{
    return sti_cuda_gemv_fits(STI_CUDA_GEMV_ROWS, K) ? STI_CUDA_GEMV_ROWS
                                                     : STI_CUDA_GEMV_ROWS / 2;
}

static still_status run_slices(sti_dev *dev, const sti_matmul_args *a,
                               const matrices *all, still_error *err)
{
    const int K = all->m[0].K, step = slice_rows(K);
    for (int row = 0; row < a->M; row += step) {
        const size_t at = (size_t)row * (size_t)K;
        sti_matmul_args part = *a;
        part.M = a->M - row < step ? a->M - row : step;
        part.x += at;
        if (a->normed) part.normed += at;
        for (int i = 0; i < a->n; i++) part.y[i] += (size_t)row * (size_t)all->m[i].N;
        STI_TRY(run_gemv(dev, &part, all, err));
    }
    return STILL_OK;
}

still_status sti_cuda_matmul(sti_dev *dev, const sti_matmul_args *a, still_error *err)
{
    matrices all;
    STI_TRY(open_matrices(a, &all, err));
    if (a->M < 1 || a->n < 1) return STILL_OK;
    if (a->M <= (all.some_float ? STI_CUDA_GEMV_ROWS_FLOAT : gemv_rows(&all.m[0])))
        return run_gemv(dev, a, &all, err);
    return is_sliced(all.m, a->n, a->M) ? run_slices(dev, a, &all, err)
                                        : run_gemm(dev, a, &all, err);
}

/* ---- Feed-forward -------------------------------------------------------- */

typedef struct ffn_weights {
    sti_cuda_matrix gate, up, down;
} ffn_weights;

/* x += between W_down^T + bias */
static sti_cuda_gemv_args ffn_down(const sti_ffn_args *a, const ffn_weights *w,
                                   const sti_half *between)
{
    return (sti_cuda_gemv_args){.xh = between,
                                .M = a->M,
                                .K = w->down.K,
                                .n = 1,
                                .w = {w->down},
                                .bias = {a->w.down_bias},
                                .y = {a->x},
                                .accumulate = true};
}

/* Two launches; what lies between is half [M, ffn] in half. */
static still_status ffn_gemv(sti_dev *dev, const sti_ffn_args *a, const ffn_weights *w,
                             still_error *err)
{
    sti_half *between = (sti_half *)a->scratch;
    sti_cuda_gemv_args first = {.x = a->x,
                                .norm = a->w.norm,
                                .eps = a->w.eps,
                                .M = a->M,
                                .K = w->gate.K,
                                .n = 2,
                                .w = {w->gate, w->up},
                                .bias = {a->w.gate_bias, a->w.up_bias},
                                .yh = between};
    if (!sti_cuda_gemv_fits(a->M, w->gate.K)) {
        sti_half *h = (sti_half *)a->scratch_h;
        STI_TRY(sti_cuda_norm(dev, a->x, a->w.norm, a->w.eps, a->M, w->gate.K, NULL, h,
                              err));
        first.xh = h;
        first.norm = NULL;
    }
    const sti_cuda_gemv_args second = ffn_down(a, w, between);
    STI_TRY(sti_cuda_gemv(dev, &first, err));
    return sti_cuda_gemv(dev, &second, err);
}

static still_status ffn_slices(sti_dev *dev, const sti_ffn_args *a,
                               const ffn_weights *w, still_error *err)
{
    const int K = w->gate.K, step = slice_rows(K);
    for (int row = 0; row < a->M; row += step) {
        sti_ffn_args part = *a; /* scratch serves one slice after the other */
        part.M = a->M - row < step ? a->M - row : step;
        part.x += (size_t)row * (size_t)K;
        STI_TRY(ffn_gemv(dev, &part, w, err));
    }
    return STILL_OK;
}

/* silu(gate) * up as half in half: at once, or gate and up side by side first. */
static still_status ffn_gate(sti_dev *dev, const sti_ffn_args *a, const ffn_weights *w,
                             const input *in, still_error *err)
{
    const int M = a->M, ffn = w->down.K;
    sti_half *gate = (sti_half *)a->scratch, *up = gate + (size_t)M * (size_t)ffn;
    const sti_cuda_gemv_args both = {.xh = in->xh,
                                     .M = M,
                                     .K = w->gate.K,
                                     .n = 2,
                                     .w = {w->gate, w->up},
                                     .bias = {a->w.gate_bias, a->w.up_bias},
                                     .yh = gate};
    if (sti_cuda_gemm_small_fits(dev, &both))
        return sti_cuda_gemm_small(dev, &both, err);
    STI_TRY(
        multiply(dev, &w->gate, in, M, NULL, false, STI_CUDA_HALF_TO_HALF, gate, err));
    STI_TRY(multiply(dev, &w->up, in, M, NULL, false, STI_CUDA_HALF_TO_HALF, up, err));
    return sti_cuda_gated_half(dev, gate, up, a->w.gate_bias, a->w.up_bias, M, ffn,
                               gate, err);
}

static still_status ffn_gemm(sti_dev *dev, const sti_ffn_args *a, const ffn_weights *w,
                             still_error *err)
{
    const int M = a->M;
    sti_half *h = (sti_half *)a->scratch_h, *between = (sti_half *)a->scratch;
    size_t more = sti_cuda_half_bytes(&w->gate);
    if (sti_cuda_half_bytes(&w->up) > more) more = sti_cuda_half_bytes(&w->up);
    if (sti_cuda_half_bytes(&w->down) > more) more = sti_cuda_half_bytes(&w->down);
    void *scratch = NULL;
    if (more > 0) STI_TRY(sti_cuda_scratch(dev, more, &scratch, err));
    const input in = {.xh = h, .half = scratch},
                second = {.xh = between, .half = scratch};
    const sti_cuda_gemv_args down = ffn_down(a, w, between);
    STI_TRY(sti_cuda_norm(dev, a->x, a->w.norm, a->w.eps, M, w->gate.K, NULL, h, err));
    STI_TRY(ffn_gate(dev, a, w, &in, err));
    if (sti_cuda_gemm_small_fits(dev, &down))
        return sti_cuda_gemm_small(dev, &down, err);
    return multiply(dev, &w->down, &second, M, a->w.down_bias, true,
                    STI_CUDA_HALF_TO_FLOAT, a->x, err);
}

still_status sti_cuda_ffn(sti_dev *dev, const sti_ffn_args *a, still_error *err)
{
    if (a->M < 1) return STILL_OK;
    const ffn_weights w = {sti_cuda_matrix_of(a->w.gate), sti_cuda_matrix_of(a->w.up),
                           sti_cuda_matrix_of(a->w.down)};
    /* The fused kernels know the llama form. */
    const bool llama = a->w.norm && !a->w.norm_out && a->w.act == STI_SILU;
    const bool whole = llama && w.gate.K % 8 == 0 && w.down.K % 8 == 0 &&
                       sti_cuda_aligned(a->scratch) && sti_cuda_aligned(a->scratch_h);
    if (!whole || w.gate.kind == STI_CUDA_FLOAT || w.up.kind == STI_CUDA_FLOAT ||
        w.down.kind == STI_CUDA_FLOAT)
        return sti_host_ffn_forward(&sti_backend_cuda, dev, a, err);
    const bool alike = w.gate.kind == w.up.kind;
    if (a->M > gemv_rows(&w.gate))
        return alike && is_sliced((const sti_cuda_matrix[]){w.gate, w.up, w.down}, 3,
                                  a->M)
                   ? ffn_slices(dev, a, &w, err)
                   : ffn_gemm(dev, a, &w, err);
    return alike ? ffn_gemv(dev, a, &w, err)
                 : sti_host_ffn_forward(&sti_backend_cuda, dev, a, err);
}
