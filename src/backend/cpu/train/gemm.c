/* gemm.c - gradients of matrix products: matmul_back and matmul_grad of the cpu
 * backend, both C = [C +] scale sum_i A_i B_i over the kernels of gemm.h.
 *
 *     matmul_back   dx [M,K] = sum_i dy_i [M,N_i] W_i [N_i,K]
 *     matmul_grad   dw [N,K] += scale dy^T [N,M] x [M,K]
 *
 * Bounded by arithmetic. Workers take rectangles of C and synchronize only at the end:
 * each copies the part of A and B it needs for itself, so that the shape of the
 * rectangles (see choose_grid) decides how much is copied twice. No sum is ever split,
 * so the number of threads changes no bit. Quantized weights are read from their
 * repacked copy, which is in memory, not from the file, which may not be. */
#include <assert.h>

#include "backend/cpu/kernels.h"
#include "backend/cpu/train/gemm.h"

enum {
    COPY_COST = 8, /* copying a number takes as long as this many of its products */
};

typedef struct product { /* A [M,Q] or its transpose, B [Q,P] */
    const float *A;
    const sti_weight *B;
} product;

typedef struct gemm_job {
    const sti_gemm_kernels *f;
    const sti_quant_kernels *quant;
    int64_t M, P;
    product part[STI_BACK_MAX];
    int n;
    bool across; /* A is stored as [Q,M] */
    float *C;
    float scale;
    bool add;
    int row_parts, column_parts;
    uint8_t *areas;
    size_t area_bytes;
} gemm_job;

typedef struct work_area { /* one worker's */
    float *a, *b;          /* copies of A and B, see gemm.h */
} work_area;

static work_area carve_area(sti_carve *c)
{
    work_area w;
    w.b = sti_carve_take(c, STI_GEMM_DEPTH * STI_GEMM_WINDOW, sizeof(float));
    w.a = sti_carve_take(c, STI_GEMM_DEPTH * STI_GEMM_ROWS_MAX, sizeof(float));
    sti_carve_take(c, 64, 1); /* the next worker's area on lines of its own */
    return w;
}

static int64_t min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* a / b rounded up, b > 0. */
static int64_t ceil_div(int64_t a, int64_t b)
{
    return b > 0 ? (a + b - 1) / b : 0;
}

/* Rows [q0, q0 + depth) of B, columns [c0, c0 + cols). q0 is a multiple of DEPTH, c0 of
 * GRAIN. */
static void copy_b(const gemm_job *j, const sti_weight *w, int64_t q0, int depth,
                   int64_t c0, int cols, const work_area *area)
{
    if (sti_is_packed(w)) {
        for (int q = 0; q < depth; q += STI_GROUP)
            j->f->copy_group(j->quant, w->type, sti_group_at(w, (q0 + q) / STI_GROUP),
                             (int)(c0 / STI_BLOCK_K), cols / STI_BLOCK_K,
                             (int)min_i64(STI_GROUP, depth - q), area->b, q);
        return;
    }
    const size_t size = (size_t)sti_dtype_find((int)w->type)->bytes;
    const uint8_t *rows = (const uint8_t *)w->data + (size_t)(q0 * w->K + c0) * size;
    for (int q = 0; q < depth; q++, rows += (size_t)w->K * size)
        j->f->copy_row(w->type, rows, cols, area->b, q);
}

/* Rows [m0, m0 + rows) of A over [q0, q0 + depth); rows that a tile has more are 0. */
static void copy_a(const gemm_job *j, const product *p, int64_t m0, int rows,
                   int64_t q0, int depth, float *a)
{
    const int tile = j->f->rows;
    if (j->across) {
        const float *from = p->A + q0 * j->M + m0;
        for (int q = 0; q < depth; q++, from += j->M, a += tile)
            for (int i = 0; i < tile; i++) a[i] = i < rows ? from[i] : 0;
        return;
    }
    for (int i = 0; i < tile; i++, a += STI_GEMM_DEPTH) {
        const size_t bytes = (size_t)depth * sizeof *a;
        if (i < rows)
            memcpy(a, p->A + (m0 + i) * p->B->N + q0, bytes);
        else
            memset(a, 0, bytes);
    }
}

/* Rows [lo, hi) of a window of C. */
static void multiply_window(const gemm_job *j, int64_t lo, int64_t hi, int64_t c0,
                            int cols, const work_area *area)
{
    bool add = j->add;
    for (int i = 0; i < j->n; i++) {
        const product *p = &j->part[i];
        for (int64_t q0 = 0; q0 < p->B->N; q0 += STI_GEMM_DEPTH, add = true) {
            const int depth = (int)min_i64(STI_GEMM_DEPTH, p->B->N - q0);
            copy_b(j, p->B, q0, depth, c0, cols, area);
            for (int64_t m = lo; m < hi; m += j->f->rows) {
                const int rows = (int)min_i64(j->f->rows, hi - m);
                copy_a(j, p, m, rows, q0, depth, area->a);
                j->f->sweep(area->a, j->across, depth, area->b, j->C + m * j->P + c0,
                            j->P, rows, cols, j->scale, add);
            }
        }
    }
}

/* One rectangle of C. */
static void multiply_part(const gemm_job *j, int part, const work_area *area)
{
    int64_t lo, hi, from, to;
    sti_split(j->M, j->f->rows, part / j->column_parts, j->row_parts, &lo, &hi);
    sti_split(j->P, STI_GEMM_GRAIN, part % j->column_parts, j->column_parts, &from,
              &to);
    if (lo >= hi || from >= to) return;
    const int64_t windows = 1 + (to - from - 1) / STI_GEMM_WINDOW;
    const int64_t width =
        ceil_div(ceil_div(to - from, windows), STI_GEMM_GRAIN) * STI_GEMM_GRAIN;
    for (int64_t c = from; c < to; c += width)
        multiply_window(j, lo, hi, c, (int)min_i64(width, to - c), area);
}

static void gemm_work(void *arg, int worker, int workers)
{
    const gemm_job *j = arg;
    assert(j->areas);
    sti_carve at = {.base = j->areas + (size_t)worker * j->area_bytes};
    const work_area area = carve_area(&at);
    for (int part = worker; part < j->row_parts * j->column_parts; part += workers)
        multiply_part(j, part, &area);
}

/* Cuts C into rows x columns of rectangles, one for each thread. With r x c elements to
 * a rectangle a step of Q takes r c products, r copies of A and c of B: about as long
 * as (r + COPY_COST) (c + COPY_COST) products. */
static void choose_grid(gemm_job *j, int workers)
{
    int64_t best = INT64_MAX;
    for (int columns = 1; columns <= workers; columns++) {
        if (workers % columns != 0) continue;
        const int rows = workers / columns;
        const int64_t r = ceil_div(ceil_div(j->M, j->f->rows), rows) * j->f->rows;
        const int64_t c = min_i64(
            ceil_div(ceil_div(j->P, STI_GEMM_GRAIN), columns) * STI_GEMM_GRAIN, j->P);
        const int64_t cost = (r + COPY_COST) * (c + COPY_COST);
        if (cost >= best) continue;
        best = cost;
        j->row_parts = rows;
        j->column_parts = columns;
    }
}

static still_status multiply(sti_dev *dev, gemm_job *j, still_error *err)
{
    const int workers = sti_pool_threads(dev->pool);
    j->f = dev->k->gemm;
    j->quant = dev->k->quant;
    choose_grid(j, workers);
    sti_carve count = {0};
    carve_area(&count);
    j->area_bytes = (count.used + 63) & ~(size_t)63;
    STI_TRY(sti_cpu_need_bytes(dev, (size_t)workers * j->area_bytes, err));
    j->areas = dev->scratch.p;
    sti_pool_run(dev->pool, gemm_work, j);
    return STILL_OK;
}

still_status sti_cpu_matmul_back(sti_dev *dev, const sti_matmul_back_args *a,
                                 still_error *err)
{
    if (a->M <= 0) return STILL_OK;
    if (a->n < 1 || a->n > STI_BACK_MAX)
        return sti_fail(err, STILL_E_ARG, "matmul_back: %d matrices, expected 1 to %d",
                        a->n, STI_BACK_MAX);
    gemm_job job = {.M = a->M,
                    .P = a->w[0]->K,
                    .n = a->n,
                    .C = a->dx,
                    .scale = a->scale != 0 ? a->scale : 1,
                    .add = a->accumulate};
    for (int i = 0; i < a->n; i++) {
        if (a->w[i]->K != job.P)
            return sti_fail(err, STILL_E_ARG,
                            "matmul_back: matrix %d has K = %lld, expected %lld", i,
                            (long long)a->w[i]->K, (long long)job.P);
        job.part[i] = (product){a->dy[i], a->w[i]};
    }
    return multiply(dev, &job, err);
}

static still_status matmul_grad(sti_dev *dev, const sti_matmul_grad_args *a,
                                still_error *err)
{
    if (a->M <= 0 || a->N <= 0 || a->K <= 0) return STILL_OK;
    const sti_weight x = {.N = a->M, .K = a->K, .type = STI_F32, .data = a->x};
    gemm_job job = {.M = a->N,
                    .P = a->K,
                    .part = {{a->dy, &x}},
                    .n = 1,
                    .across = true,
                    .C = a->dw,
                    .scale = a->scale,
                    .add = true};
    return multiply(dev, &job, err);
}

still_status sti_cpu_matmul_grad(sti_dev *dev, const sti_matmul_grad_args *all, int n,
                                 still_error *err)
{
    for (int i = 0; i < n; i++) STI_TRY(matmul_grad(dev, &all[i], err));
    return STILL_OK;
}
