/* bf16.c - a model as frameworks run it in bfloat16: weights, and the result of every
 * operation, rounded to 8 bits of mantissa; sums inside an operation in float.
 *
 * Published scores are made in that arithmetic, and it moves them: of a thousand
 * questions a few are decided by less than it rounds. This backend repeats it, so that
 * a score can be compared question by question. It is not fast, and runs softmax
 * attention alone.
 *
 * The cpu backend computes; here stand the places where Hugging Face's Llama rounds:
 *   norm       r(g r(x / rms))
 *   rope       r(r(u cos) - r(v sin)), cos and sin rounded
 *   swiglu     r(r(silu(gate)) up)
 *   linear     r(W x), then r(y + that) if it is added; logits are a linear
 *   attention  and embedding: the result */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/host.h"
#include "base/named.h"

extern const sti_backend sti_backend_cpu, sti_backend_bf16;

struct sti_dev {
    sti_dev *cpu; /* the device of the cpu backend, which has its own sti_dev */
    int max_k, rows;
    sti_block sum; /* [rows, max_k]: a product, before it is added */
};

/* ---- Rounding ------------------------------------------------------------ */

/* To the nearest bfloat16, of two equally near ones to the even; NaN and infinity
 * stay. */
static inline float rounded(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    if ((u & 0x7f800000u) == 0x7f800000u) return x;
    u = (u + 0x7fffu + (u >> 16 & 1u)) & 0xffff0000u;
    memcpy(&x, &u, sizeof x);
    return x;
}

static void round_all(float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) x[i] = rounded(x[i]);
}

/* ---- Device -------------------------------------------------------------- */

static void dev_free(sti_dev *d)
{
    if (!d) return;
    sti_block_free(&d->sum);
    sti_backend_cpu.dev_free(d->cpu);
    free(d);
}

static still_status dev_new(const sti_dev_params *p, sti_dev **out, still_error *err)
{
    *out = NULL;
    sti_dev *d = sti_alloc(1, sizeof *d);
    if (!d) return sti_fail_memory(err, "device", sizeof *d);
    d->max_k = p->max_k;
    still_status st = sti_backend_cpu.dev_new(p, &d->cpu, err);
    if (st)
        free(d);
    else
        *out = d;
    return st;
}

static const char *dev_isa(const sti_dev *d)
{
    return sti_backend_cpu.dev_isa(d->cpu);
}

static int dev_threads(const sti_dev *d)
{
    return sti_backend_cpu.dev_threads(d->cpu);
}

static size_t sum_bytes(const sti_dev *d, int rows)
{
    return (size_t)rows * (size_t)d->max_k * sizeof(float);
}

static size_t dev_bytes(const sti_dev *d, int rows)
{
    return sti_backend_cpu.dev_bytes(d->cpu, rows) + sum_bytes(d, rows);
}

static still_status dev_reserve(sti_dev *d, int rows, still_error *err)
{
    STI_TRY(sti_backend_cpu.dev_reserve(d->cpu, rows, err));
    if (rows <= d->rows) return STILL_OK;
    sti_block more;
    if (!sti_block_new(&more, sum_bytes(d, rows)))
        return sti_fail_memory(err, "sums of the bf16 backend", sum_bytes(d, rows));
    sti_block_free(&d->sum);
    d->sum = more;
    d->rows = rows;
    return STILL_OK;
}

static size_t mem_peak(sti_dev *d, bool restart)
{
    if (restart) {
        sti_block_free(&d->sum);
        d->rows = 0;
    }
    return sti_backend_cpu.mem_peak(d->cpu, restart);
}

/* ---- Weights ------------------------------------------------------------- */

/* A copy [N, K] in bfloat16, behind the tensor that describes it. */

typedef struct copy {
    _Alignas(64) sti_tensor tensor;
} copy;

static bool copy_bytes(const sti_tensor *t, size_t *rows, size_t *all)
{
    return t->n_dims == 2 && t->dim[0] > 0 && t->dim[1] > 0 &&
           sti_mul((size_t)t->dim[0], (size_t)t->dim[1], rows) &&
           sti_mul(*rows, sizeof(uint16_t), rows) && sti_add(*rows, sizeof(copy), all);
}

static size_t weight_bytes(const sti_dev *d, const sti_tensor *t)
{
    (void)d;
    size_t rows, all;
    return t->type != STI_BF16 && copy_bytes(t, &rows, &all) ? all : 0;
}

static void weight_free(sti_dev *d, sti_weight *w)
{
    (void)d;
    if (!w) return;
    sti_block_free(&w->own);
    *w = (sti_weight){0};
}

/* Row by row: `wide` [K] is room for one. */
static void narrow(const sti_tensor *t, size_t row_bytes, float *wide, uint16_t *to)
{
    for (int64_t n = 0; n < t->dim[0]; n++, to += t->dim[1]) {
        sti_dequant(t->type, (const char *)t->data + (size_t)n * row_bytes, wide,
                    t->dim[1]);
        for (int64_t k = 0; k < t->dim[1]; k++) to[k] = sti_f32_to_bf16(wide[k]);
    }
}

/* A matrix to copy. Of others the cpu backend says what is wrong: no matrix, no whole
 * rows, or a type that only golden data has. */
static bool to_narrow(const sti_tensor *t, size_t *rows, size_t *all, size_t *row)
{
    return t->type != STI_BF16 && t->type != STI_F64 && t->type != STI_I32 &&
           t->type != STI_I64 && copy_bytes(t, rows, all) &&
           sti_dtype_bytes(t->type, (uint64_t)t->dim[1], row);
}

static still_status weight_new(sti_dev *d, const sti_tensor *t, sti_weight *w,
                               still_error *err)
{
    size_t rows, all, row;
    if (!to_narrow(t, &rows, &all, &row))
        return sti_backend_cpu.weight_new(d->cpu, t, w, err);
    sti_block own = {0};
    float *wide = sti_alloc((size_t)t->dim[1], sizeof *wide);
    if (!wide || !sti_block_new(&own, all)) {
        free(wide);
        return sti_fail_memory(err, t->name, all);
    }
    copy *c = own.p;
    c->tensor = *t;
    c->tensor.type = STI_BF16;
    c->tensor.data = c + 1;
    c->tensor.bytes = rows;
    narrow(t, row, wide, (uint16_t *)(c + 1));
    free(wide);
    still_status st = sti_backend_cpu.weight_new(d->cpu, &c->tensor, w, err);
    if (st)
        sti_block_free(&own);
    else
        w->own = own;
    return st;
}

/* ---- Operators ----------------------------------------------------------- */

static still_status rmsnorm(sti_dev *d, const sti_rmsnorm_args *a, still_error *err)
{
    (void)d;
    (void)err;
    for (int m = 0; m < a->M; m++) {
        const float *x = a->x + (size_t)m * (size_t)a->K;
        float *y = a->y + (size_t)m * (size_t)a->K;
        double squares = 0;
        for (int k = 0; k < a->K; k++) squares += (double)x[k] * (double)x[k];
        const float by = (float)(1 / sqrt(squares / a->K + (double)a->eps));
        for (int k = 0; k < a->K; k++) {
            const float v = rounded(rounded(a->g[k]) * rounded(x[k] * by));
            y[k] = a->add ? rounded(y[k] + v) : v;
        }
    }
    return STILL_OK;
}

/* y_i = r(W_i x + bias_i). */
static still_status multiply(sti_dev *d, const sti_matmul_args *a, still_error *err)
{
    STI_TRY(sti_backend_cpu.matmul(d->cpu, a, err));
    for (int i = 0; i < a->n; i++)
        round_all(a->y[i], (size_t)a->M * (size_t)a->w[i]->N);
    return STILL_OK;
}

static still_status matmul(sti_dev *d, const sti_matmul_args *args, still_error *err)
{
    sti_matmul_args a = *args;
    if (a.M <= 0) return STILL_OK;
    if (a.norm) {
        STI_TRY(rmsnorm(d,
                        &(sti_rmsnorm_args){.x = a.x,
                                            .g = a.norm,
                                            .y = a.normed,
                                            .M = a.M,
                                            .K = (int)a.w[0]->K,
                                            .eps = a.eps},
                        err));
        a.x = a.normed;
        a.norm = NULL;
    }
    if (!a.accumulate) return multiply(d, &a, err);
    STI_TRY(dev_reserve(d, a.M, err));
    for (int i = 0; i < args->n; i++) {
        const sti_weight *w = args->w[i];
        const size_t n = (size_t)a.M * (size_t)w->N;
        if (w->N > d->max_k)
            return sti_fail(err, STILL_E_ARG, "matmul: %lld sums, at most %d",
                            (long long)w->N, d->max_k);
        float *sum = d->sum.p, *y = args->y[i];
        STI_TRY(multiply(d,
                         &(sti_matmul_args){.x = a.x,
                                            .M = a.M,
                                            .n = 1,
                                            .w = {w},
                                            .bias = {args->bias[i]},
                                            .y = {sum}},
                         err));
        for (size_t j = 0; j < n; j++) y[j] = rounded(y[j] + sum[j]);
    }
    return STILL_OK;
}

static still_status embed(sti_dev *d, const sti_embed_args *a, still_error *err)
{
    return sti_backend_cpu.embed(d->cpu, a, err); /* rows of a matrix that is rounded */
}

static void turn(const sti_rope_args *a, float *x, int heads, int m)
{
    const int half = a->D / 2, step = a->interleaved ? 2 : 1,
              other = a->interleaved ? 1 : half;
    for (int i = 0; i < half; i++) {
        const double angle = (double)((float)a->pos[m] * a->inv_freq[i]);
        const float c = rounded((float)cos(angle));
        const float s = rounded((float)sin(a->back ? -angle : angle));
        for (int h = 0; h < heads; h++) {
            float *p = x + ((size_t)m * (size_t)heads + (size_t)h) * (size_t)a->D +
                       (size_t)(i * step);
            const float u = p[0], v = p[other];
            p[0] = rounded(rounded(u * c) - rounded(v * s));
            p[other] = rounded(rounded(v * c) + rounded(u * s));
        }
    }
}

static still_status rope(sti_dev *d, const sti_rope_args *a, still_error *err)
{
    (void)d;
    (void)err;
    for (int m = 0; m < a->M; m++) {
        turn(a, a->x, a->heads, m);
        if (a->also) turn(a, a->also, a->also_heads, m);
    }
    return STILL_OK;
}

static still_status swiglu(sti_dev *d, const sti_swiglu_args *a, still_error *err)
{
    (void)d;
    (void)err;
    const size_t n = (size_t)a->M * (size_t)a->K;
    for (size_t i = 0; i < n; i++) {
        const float gate = a->gate[i];
        const float z = a->act == STI_SILU
                            ? gate
                            : (float)STI_GELU_SLOPE *
                                  (gate + (float)STI_GELU_CUBE * gate * gate * gate);
        a->y[i] = rounded(rounded(gate / (1 + expf(-z))) * a->up[i]);
    }
    return STILL_OK;
}

static still_status scale_columns(sti_dev *d, const sti_scale_columns_args *a,
                                  still_error *err)
{
    STI_TRY(sti_host_scale_columns(d, a, err));
    round_all(a->x, (size_t)a->M * (size_t)a->K);
    return STILL_OK;
}

static still_status scale(sti_dev *d, float *x, size_t n, float by, still_error *err)
{
    STI_TRY(sti_host_scale(d, x, n, rounded(by), err));
    round_all(x, n);
    return STILL_OK;
}

static still_status ffn_forward(sti_dev *d, const sti_ffn_args *a, still_error *err)
{
    return sti_host_ffn_forward(&sti_backend_bf16, d, a, err);
}

static still_status softmax_attn(sti_dev *d, const sti_attn_args *a, still_error *err)
{
    STI_TRY(sti_backend_cpu.softmax_attn(d->cpu, a, err));
    const size_t row = (size_t)a->H * (size_t)a->D;
    for (int s = 0; s < a->n_seg; s++)
        round_all(a->o + (size_t)a->seg[s].row0 * row, (size_t)a->seg[s].n * row);
    return STILL_OK;
}

static still_status logprob(sti_dev *d, const sti_logprob_args *a, still_error *err)
{
    return sti_backend_cpu.logprob(d->cpu, a, err);
}

const sti_backend sti_backend_bf16 = {
    .name = "bf16",
    .cache = STI_F32, /* holds bfloat16 as it is */
    STI_HOST_MEMORY,
    .mem_peak = mem_peak,
    STI_NAMED_4(, dev_new, dev_free, dev_isa, dev_threads),
    STI_NAMED_2(, dev_reserve, dev_bytes),
    STI_NAMED_3(, weight_new, weight_free, weight_bytes),
    STI_NAMED_4(, matmul, embed, rmsnorm, rope),
    STI_NAMED_2(, swiglu, ffn_forward),
    STI_NAMED_2(, scale_columns, scale),
    STI_NAMED_2(, softmax_attn, logprob),
};
