/* matmul.c - the matrix product: who computes what, and in which order.
 *
 * One call multiplies up to four matrices by the same rows of x. Their row groups are
 * numbered through and split once over the workers, so a call is one task (two when a
 * batch of x is normed and quantized by all workers first). Each worker goes through
 * its groups:
 *
 *   few rows (<= tile)  repacked weights are unpacked in registers, read once
 *   more rows           a panel of groups is unpacked over up to STI_PANEL_K k, then
 *                       swept by all tiles of a chunk of rows; sums wait in c
 *
 * Either way an element sees the same operations in the same order. */
#include "backend/cpu/dense/matmul.h"

#include "backend/cpu/dense/norm_rope.h"
#include "backend/cpu/kernels.h"

enum {
    CHUNK_ROWS = 264, /* rows of x swept by one unpacked panel, at most */
    PANEL_K = 288,    /* k of a panel, which is swept from L1 beside a tile of x */
    SET_PANELS = 4,   /* panels side by side that sweep the same k of a chunk of x: it
                        stays in L2 for them, as do their sums */
    PANEL_COLS = STI_PANEL_GROUPS * STI_GROUP,
    SUB_BLOCKS = PANEL_K / 16,
};

typedef struct work_area { /* one worker's */
    uint8_t *panel_q;
    float *panel_d, *panel_m;
    int32_t *panel_off;
    float *c;      /* [SET_PANELS][CHUNK_ROWS][PANEL_COLS] */
    float *normed; /* [STI_OWN_ROWS] rows */
    uint8_t *act;  /* likewise, quantized */
} work_area;

/* What a task needs lies side by side: another core then waits for it once, not once
 * for each pointer on the way. */
typedef struct mm_job {
    const sti_quant_kernels *quant;
    const sti_dense_kernels *dense;
    const sti_row_kernels *rows;
    sti_matmul_args a;
    int nb;         /* blocks of K */
    uint8_t *act;   /* [M] rows quantized, by all workers */
    bool own;       /* or each worker prepares all rows for itself */
    bool quantized; /* some matrix is */
    bool pairs;     /* products two at a time */
    uint8_t *areas;
    size_t area_bytes;
} mm_job;

static work_area carve_area(sti_carve *c, int max_k)
{
    work_area w;
    w.panel_q = sti_carve_take(c, PANEL_K, PANEL_COLS * STI_QUANT_MAX);
    w.panel_d = sti_carve_take(c, SUB_BLOCKS * PANEL_COLS, sizeof(float));
    w.panel_m = sti_carve_take(c, SUB_BLOCKS * PANEL_COLS, sizeof(float));
    w.panel_off = sti_carve_take(c, SUB_BLOCKS * PANEL_COLS, sizeof(int32_t));
    w.c = sti_carve_take(c, SET_PANELS * CHUNK_ROWS * PANEL_COLS, sizeof(float));
    w.normed = sti_carve_take(c, STI_OWN_ROWS * (size_t)max_k, sizeof(float));
    w.act = sti_carve_take(c, sti_act_bytes(STI_OWN_ROWS, max_k), 1);
    sti_carve_take(c, 64, 1); /* the next worker's area on lines of its own */
    return w;
}

static size_t area_size(const sti_dev *dev)
{
    sti_carve count = {0};
    carve_area(&count, dev->max_k);
    return (count.used + 63) & ~(size_t)63;
}

/* Of the quantized rows of a batch. */
static size_t batch_bytes(const sti_quant_kernels *quant, int64_t rows, int64_t K)
{
    return (size_t)rows * (size_t)(K / STI_BLOCK_K) * (size_t)quant->batch_bytes;
}

/* Of quantized rows, whichever way they are multiplied. */
static size_t most_act_bytes(const sti_quant_kernels *quant, int64_t rows, int64_t K)
{
    const size_t batch = batch_bytes(quant, rows, K), few = sti_act_bytes(rows, K);
    return batch > few ? batch : few;
}

size_t sti_cpu_matmul_scratch(const sti_dev *dev, int rows)
{
    sti_carve count = {0};
    sti_carve_take(&count, most_act_bytes(dev->k->quant, rows, dev->max_k), 1);
    sti_carve_take(&count, (size_t)sti_pool_threads(dev->pool), area_size(dev));
    return count.used;
}

static int min_int(int a, int b)
{
    return a < b ? a : b;
}

/* y[row0 .. +n of x][col0 .. +cols] from c[n][ldc]. */
static void store(const mm_job *j, int which, int row0, int n, int64_t col0,
                  const float *c, int ldc, int cols)
{
    const int64_t N = j->a.w[which]->N;
    const float *bias = j->a.bias[which];
    if (cols > N - col0) cols = (int)(N - col0);
    j->dense->store(j->a.y[which] + row0 * N + col0, N, c, ldc, n, cols,
                    bias ? bias + col0 : NULL, j->a.accumulate);
}

/* Panels are for more rows than gemv takes. */
static bool is_batch(const mm_job *j)
{
    return j->a.M > j->quant->tile;
}

/* Rows of x that are quantized together. */
static int tile_of(const mm_job *j)
{
    return is_batch(j) ? j->quant->batch_tile : j->quant->tile;
}

/* Where row `row` begins in a batch of quantized rows: tiles are laid one after the other;
 * the last may have fewer rows. */
static size_t tile_at(const mm_job *j, int row)
{
    return batch_bytes(j->quant, row, j->a.w[0]->K);
}

/* Rows [lo, hi) of x as they are multiplied: normed to `normed` [M, K] if they are to
 * be, and quantized to act. */
static void prepare_rows(const mm_job *j, float *normed, uint8_t *act, int lo, int hi)
{
    const sti_matmul_args *a = &j->a;
    const int64_t K = a->w[0]->K;
    const float *x = a->norm ? normed : a->x;
    for (int64_t r = lo; a->norm && r < hi; r++)
        j->rows->rmsnorm(a->x + r * K, a->norm, normed + r * K, (int)K, a->eps);
    const int tile = tile_of(j);
    for (int r = lo; j->quantized && r < hi; r += tile) {
        const int R = min_int(tile, hi - r);
        if (is_batch(j))
            j->quant->quantize_batch(x + (int64_t)r * K, (size_t)K, R, j->nb,
                                     act + tile_at(j, r));
        else
            j->quant->quantize(x + (int64_t)r * K, (size_t)K, R, j->nb,
                               act + sti_act_bytes(r, K));
    }
}

static void prepare_task(void *arg, int worker, int workers)
{
    const mm_job *j = arg;
    int64_t lo, hi;
    sti_split(j->a.M, tile_of(j), worker, workers, &lo, &hi);
    prepare_rows(j, j->a.normed, j->act, (int)lo, (int)hi);
}

/* Blocks a panel takes of K: equal parts, of whole super-blocks. */
static int panel_blocks(int nb, int unit)
{
    const int most = PANEL_K / STI_BLOCK_K;
    if (nb <= most) return nb;
    const int parts = (nb + most - 1) / most;
    return ((nb + parts - 1) / parts + unit - 1) / unit * unit;
}

/* Groups of the next panel, of `n` that are left. */
static int groups_left(const mm_job *j, int64_t n)
{
    return n < j->quant->groups ? (int)n : j->quant->groups;
}

/* Sums of a set's panel with group `g` of the set in front, [rows][its columns]. */
static float *sums_of(const work_area *area, int rows, int64_t g)
{
    return area->c + (size_t)rows * (size_t)g * STI_GROUP;
}

/* c += products of rows [r0, r0 + rows) with p->ng groups from g on, blocks [b, b + nb). */
static void sweep_panel(const mm_job *j, const sti_weight *w, const sti_panel *p,
                        int64_t g, int b, int nb, int r0, int rows, const uint8_t *act,
                        float *c)
{
    const int tile = j->quant->batch_tile;
    for (int i = 0; i < p->ng; i++) j->quant->fill(sti_group_at(w, g + i), b, nb, p, i);
    for (int r = 0, begun = 0; r < rows; r += tile) {
        const int R = min_int(tile, rows - r);
        if (j->quant->begin && R != begun) j->quant->begin(w->type, R);
        begun = R;
        const uint8_t *x =
            act + tile_at(j, r0 + r) + batch_bytes(j->quant, R, b * STI_BLOCK_K);
        j->quant->product(p, x, R, nb, c + (size_t)r * (size_t)(p->ng * STI_GROUP));
    }
}

static void multiply_panels(const mm_job *j, int which, int64_t lo, int64_t hi,
                            const uint8_t *act, const work_area *area)
{
    const sti_weight *w = j->a.w[which];
    const int part = panel_blocks(j->nb, sti_packing_of(w->type).unit);
    sti_panel p = {.type = w->type,
                   .pairs = j->pairs,
                   .q = area->panel_q,
                   .d = area->panel_d,
                   .m = area->panel_m,
                   .off = area->panel_off};
    const int64_t set = SET_PANELS * j->quant->groups;
    const int chunk = CHUNK_ROWS / j->quant->batch_tile * j->quant->batch_tile;
    for (int r0 = 0; r0 < j->a.M; r0 += chunk) {
        const int rows = min_int(chunk, j->a.M - r0);
        for (int64_t first = lo; first < hi; first += set) {
            const int64_t end = hi - first < set ? hi : first + set;
            memset(area->c, 0,
                   (size_t)rows * (size_t)(end - first) * STI_GROUP * sizeof(float));
            for (int b = 0; b < j->nb; b += part)
                for (int64_t g = first; g < end; g += p.ng) {
                    p.ng = groups_left(j, end - g);
                    sweep_panel(j, w, &p, g, b, min_int(part, j->nb - b), r0, rows, act,
                                sums_of(area, rows, g - first));
                }
            for (int64_t g = first; g < end; g += p.ng) {
                p.ng = groups_left(j, end - g);
                const int cols = p.ng * STI_GROUP;
                store(j, which, r0, rows, g * STI_GROUP, sums_of(area, rows, g - first),
                      cols, cols);
            }
        }
    }
    if (j->quant->end) j->quant->end();
}

/* Few rows: straight from the repacked weights. */
static void multiply_direct(const mm_job *j, int which, int64_t lo, int64_t hi,
                            const uint8_t *act)
{
    const sti_weight *w = j->a.w[which];
    float c[STI_TILE_MAX * STI_GROUP];
    for (int64_t g = lo; g < hi; g++) {
        j->quant->gemv(w->type, sti_group_at(w, g), act, j->a.M, j->nb, c);
        store(j, which, 0, j->a.M, g * STI_GROUP, c, STI_GROUP, STI_GROUP);
    }
}

static void multiply_float(const mm_job *j, int which, int64_t lo, int64_t hi,
                           const float *x)
{
    const sti_weight *w = j->a.w[which];
    const size_t stride = (size_t)w->K * (w->type == STI_F32 ? 4 : 2);
    const int tile = j->quant->tile;
    float c[STI_TILE_MAX * STI_GROUP];
    for (int64_t g = lo; g < hi; g++) {
        int64_t row = g * STI_GROUP;
        int n = w->N - row < STI_GROUP ? (int)(w->N - row) : STI_GROUP;
        for (int r = 0; r < j->a.M; r += tile) {
            int R = min_int(tile, j->a.M - r);
            j->dense->product_float(
                w->type, (const uint8_t *)w->data + (size_t)row * stride, stride, n,
                x + (int64_t)r * w->K, (size_t)w->K, R, w->K, c);
            store(j, which, r, R, row, c, STI_GROUP, n);
        }
    }
}

static int64_t groups_of(const sti_weight *w)
{
    return (w->N + STI_GROUP - 1) / STI_GROUP;
}

static void multiply_task(void *arg, int worker, int workers)
{
    const mm_job *j = arg;
    const sti_matmul_args *a = &j->a;
    int64_t total = 0, lo, hi;
    for (int i = 0; i < a->n; i++) total += groups_of(a->w[i]);
    sti_split(total, 1, worker, workers, &lo, &hi);
    if (lo == hi && worker > 0) return; /* worker 0 may have to leave normed rows */

    sti_carve at = {.base = j->areas + (size_t)worker * j->area_bytes};
    work_area area = carve_area(&at, (int)a->w[0]->K);
    const uint8_t *act = j->own ? area.act : j->act;
    float *normed = j->own && worker > 0 ? area.normed : a->normed;
    if (j->own) prepare_rows(j, normed, area.act, 0, a->M);
    for (int i = 0; i < a->n; i++) {
        const int64_t count = groups_of(a->w[i]);
        const int64_t from = lo > 0 ? lo : 0, to = hi < count ? hi : count;
        if (from < to) {
            if (!sti_is_packed(a->w[i]))
                multiply_float(j, i, from, to, a->norm ? normed : a->x);
            else if (is_batch(j))
                multiply_panels(j, i, from, to, act, &area);
            else
                multiply_direct(j, i, from, to, act);
        }
        lo -= count;
        hi -= count;
    }
}

still_status sti_cpu_matmul(sti_dev *dev, const sti_matmul_args *a, still_error *err)
{
    if (a->M <= 0) return STILL_OK;
    if (a->n < 1 || a->n > STI_MATMUL_MAX)
        return sti_fail(err, STILL_E_ARG, "matmul: %d matrices, expected 1 to %d", a->n,
                        STI_MATMUL_MAX);
    mm_job job = {.quant = dev->k->quant,
                  .dense = dev->k->dense,
                  .rows = dev->k->row,
                  .a = *a,
                  .own = a->M <= STI_OWN_ROWS,
                  .pairs = dev->pairs};
    for (int i = 0; i < a->n; i++) {
        if (a->w[i]->K != a->w[0]->K || a->w[i]->K > dev->max_k)
            return sti_fail(
                err, STILL_E_ARG,
                "matmul: matrix %d has K = %lld, expected %lld and at most %d", i,
                (long long)a->w[i]->K, (long long)a->w[0]->K, dev->max_k);
        if (sti_is_packed(a->w[i])) job.quantized = true;
    }
    STI_TRY(sti_cpu_need(dev, a->M, err));
    sti_carve at = {.base = dev->scratch.p};
    job.nb = (int)(a->w[0]->K / STI_BLOCK_K);
    job.act = sti_carve_take(&at, most_act_bytes(job.quant, a->M, a->w[0]->K), 1);
    job.area_bytes = area_size(dev);
    job.areas =
        sti_carve_take(&at, (size_t)sti_pool_threads(dev->pool), job.area_bytes);
    if (!job.own && (job.quantized || a->norm))
        sti_pool_run(dev->pool, prepare_task, &job);
    sti_pool_run(dev->pool, multiply_task, &job);
    return STILL_OK;
}
