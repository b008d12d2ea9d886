/* ffn.c - the feed-forward half of a layer for a tile of rows, as two tasks.
 *
 * A decode step waits for memory and for the slower worker, so what lies between the
 * two products must not be a task of its own, nor the caller's alone. Each worker norms
 * and quantizes the rows for itself, multiplies the same rows of gate and of up, and
 * takes what comes of them through SwiGLU and quantization; then each multiplies its
 * rows of down by what all have left in `act`.
 *
 * Every number is what matmul, swiglu and matmul would give: a block of activations is
 * quantized from its own 32 values, whoever does it. More rows, and weights that are
 * not repacked, go through those entries. */
#include "backend/cpu/dense/matmul.h"
#include "backend/cpu/dense/norm_rope.h"
#include "backend/cpu/kernels.h"
#include "backend/host.h"

enum { GROUPS = STI_BLOCK_K / STI_GROUP }; /* of rows in a block of activations */

typedef struct own_area { /* one worker's */
    float *normed;        /* [STI_TILE_MAX, K] */
    uint8_t *act;         /* likewise, quantized */
} own_area;

typedef struct ff_job {
    const sti_quant_kernels *quant;
    const sti_dense_kernels *dense;
    const sti_row_kernels *rows;
    sti_ffn_args a; /* here, not elsewhere: see mm_job in matmul.c */
    int K, ffn;
    uint8_t *act; /* [M, ffn]: what down multiplies, quantized */
    uint8_t *areas;
    size_t area_bytes;
} ff_job;

static own_area carve_area(sti_carve *c, int max_k)
{
    own_area o;
    o.normed = sti_carve_take(c, STI_TILE_MAX * (size_t)max_k, sizeof(float));
    o.act = sti_carve_take(c, sti_act_bytes(STI_TILE_MAX, max_k), 1);
    sti_carve_take(c, 64, 1); /* the next worker's area on lines of its own */
    return o;
}

static void carve(sti_carve *c, const sti_dev *dev, ff_job *j)
{
    sti_carve count = {0};
    carve_area(&count, dev->max_k);
    j->area_bytes = (count.used + 63) & ~(size_t)63;
    j->act = sti_carve_take(c, sti_act_bytes(STI_TILE_MAX, dev->max_k) + 64, 1);
    j->areas = sti_carve_take(c, (size_t)sti_pool_threads(dev->pool), j->area_bytes);
}

size_t sti_cpu_ffn_scratch(const sti_dev *dev)
{
    sti_carve count = {0};
    ff_job unused;
    carve(&count, dev, &unused);
    return count.used;
}

/* All M rows, as gate and up multiply them. */
static void prepare(const ff_job *j, const own_area *o)
{
    const sti_ffn_args *a = &j->a;
    for (int64_t r = 0; a->w.norm && r < a->M; r++)
        j->rows->rmsnorm(a->x + r * j->K, a->w.norm, o->normed + r * j->K, j->K,
                         a->w.eps);
    j->quant->quantize(a->w.norm ? o->normed : a->x, (size_t)j->K, a->M,
                       j->K / STI_BLOCK_K, o->act);
}

/* y[M, N] = groups [lo, hi) of a matrix by act. */
static void multiply(const ff_job *j, const sti_weight *w, const float *bias,
                     const uint8_t *act, float *y, int64_t lo, int64_t hi,
                     bool accumulate)
{
    const int M = j->a.M, nb = (int)(w->K / STI_BLOCK_K);
    float c[STI_TILE_MAX * STI_GROUP];
    for (int64_t g = lo; g < hi; g++) {
        const int64_t row = g * STI_GROUP, left = w->N - row;
        j->quant->gemv(w->type, sti_group_at(w, g), act, M, nb, c);
        j->dense->store(y + row, w->N, c, STI_GROUP, M,
                        left < STI_GROUP ? (int)left : STI_GROUP,
                        bias ? bias + row : NULL, accumulate);
    }
}

/* Blocks [lo, hi) of the hidden layer, quantized. */
static void hidden(const ff_job *j, const uint8_t *act, int64_t lo, int64_t hi)
{
    const sti_ffn_args *a = &j->a;
    float *gate = a->scratch, *up = a->scratch + (size_t)a->M * (size_t)j->ffn;
    multiply(j, a->w.gate, a->w.gate_bias, act, gate, lo * GROUPS, hi * GROUPS, false);
    multiply(j, a->w.up, a->w.up_bias, act, up, lo * GROUPS, hi * GROUPS, false);
    gate += lo * STI_BLOCK_K;
    up += lo * STI_BLOCK_K;
    for (int64_t r = 0; r < a->M; r++)
        sti_gate_of(j->rows, a->w.act)(gate + r * j->ffn, up + r * j->ffn,
                                       gate + r * j->ffn, (hi - lo) * STI_BLOCK_K);
    j->quant->quantize(gate, (size_t)j->ffn, a->M, (int)(hi - lo),
                       j->act + (size_t)lo * (size_t)a->M * STI_ACT_BYTES);
}

static void hidden_task(void *arg, int worker, int workers)
{
    const ff_job *j = arg;
    sti_carve at = {.base = j->areas + (size_t)worker * j->area_bytes};
    const own_area own = carve_area(&at, j->K);
    int64_t lo, hi;
    sti_split(j->ffn / STI_BLOCK_K, 1, worker, workers, &lo, &hi);
    prepare(j, &own);
    hidden(j, own.act, lo, hi);
}

static void down_task(void *arg, int worker, int workers)
{
    const ff_job *j = arg;
    const sti_ffn_args *a = &j->a;
    int64_t lo, hi;
    sti_split((a->w.down->N + STI_GROUP - 1) / STI_GROUP, 1, worker, workers, &lo, &hi);
    multiply(j, a->w.down, a->w.down_bias, j->act, a->w.norm_out ? a->scratch_h : a->x,
             lo, hi, !a->w.norm_out);
}

still_status sti_cpu_ffn_forward(sti_dev *dev, const sti_ffn_args *a, still_error *err)
{
    const sti_weight *down = a->w.down;
    if (a->M < 1 || a->M > dev->k->quant->tile || !sti_is_packed(a->w.gate) ||
        !sti_is_packed(a->w.up) || !sti_is_packed(down) || a->w.gate->N != down->K ||
        a->w.up->N != down->K || a->w.up->K != a->w.gate->K ||
        a->w.gate->K > dev->max_k || down->K > dev->max_k)
        return sti_host_ffn_forward(&sti_backend_cpu, dev, a, err);
    STI_TRY(sti_cpu_need(dev, a->M, err));
    ff_job job = {.quant = dev->k->quant,
                  .dense = dev->k->dense,
                  .rows = dev->k->row,
                  .a = *a,
                  .K = (int)a->w.gate->K,
                  .ffn = (int)down->K};
    sti_carve at = {.base = dev->scratch.p};
    carve(&at, dev, &job);
    sti_pool_run(dev->pool, hidden_task, &job);
    sti_pool_run(dev->pool, down_task, &job);
    if (!a->w.norm_out) return STILL_OK;
    return sti_host_add_normed(&sti_backend_cpu, dev, &a->w, a->scratch_h, a->M, a->x,
                               err);
}

/* ---- In training: by the other entries ----------------------------------- */

still_status sti_cpu_matmul_lora(sti_dev *dev, const sti_matmul_lora_args *a,
                                 still_error *err)
{
    return sti_host_matmul_lora(&sti_backend_cpu, dev, a, err);
}

still_status sti_cpu_ffn_train(sti_dev *dev, const sti_ffn_train_args *a,
                               still_error *err)
{
    return sti_host_ffn_train(&sti_backend_cpu, dev, a, err);
}

still_status sti_cpu_ffn_back(sti_dev *dev, const sti_ffn_train_args *a,
                              still_error *err)
{
    return sti_host_ffn_back(&sti_backend_cpu, dev, a, err);
}
