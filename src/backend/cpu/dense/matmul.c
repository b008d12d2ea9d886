/* matmul.c - the matrix product: who computes what, and in which order.
 *
 * One call multiplies up to four matrices by the same rows of x. Their row groups are
 * numbered through and split once over the workers, so a call is one task (two when a
 * batch of x is normed and quantized by all workers first). Each worker goes through
 * its groups:
 *
 *   few rows   repacked weights are unpacked in registers for each tile of rows; they
 *              come from memory once, and from cache for the tiles after the first
 *   a batch    a panel of groups is unpacked over up to PANEL_K k, then swept by all
 *              tiles of a chunk of rows, while the next panel is fetched; sums wait in c
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
    FEW_GROUPS = 4,   /* groups that one tile of few rows is multiplied by before the
                        next: they stay in L2 meanwhile, and the tile in L1 */
    PANEL_COLS = STI_PANEL_GROUPS * STI_GROUP,
    SUB_BLOCKS = PANEL_K / 16,
};

typedef struct work_area { /* one worker's */
    uint8_t *panel_q;
    float *panel_d, *panel_m;
    int32_t *panel_off;
    float *c;      /* [SET_PANELS][CHUNK_ROWS][PANEL_COLS] */
    float *normed; /* [STI_TILE_MAX] rows */
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
    bool own;       /* or each worker prepares all rows for itself: a tile of them */
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
    w.normed = sti_carve_take(c, STI_TILE_MAX * (size_t)max_k, sizeof(float));
    w.act = sti_carve_take(c, sti_act_bytes(STI_TILE_MAX, max_k), 1);
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

/* Panels pay for more rows than a few. */
static bool is_batch(const mm_job *j)
{
    return j->a.M > j->quant->few;
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

/* Blocks a panel takes of the nb of K: equal parts, of whole super-blocks. */
static int panel_blocks(int nb, int unit)
{
    const int all = nb / unit, most = PANEL_K / STI_BLOCK_K / unit;
    const int parts = (all + most - 1) / most;
    return (all + parts - 1) / parts * unit;
}

/* A panel's place: groups [g, g + ng) of the set [first, end), blocks [b, b + nb). */
typedef struct panel_place {
    int64_t first, end, g;
    int ng, b, nb;
} panel_place;

/* The panel after p. Those of a set take the same `part` blocks of x, then the next ones;
 * sets end at hi, and so does g after the last panel. */
static panel_place next_panel(const mm_job *j, int part, int64_t hi, panel_place p)
{
    p.g += p.ng;
    if (p.g == p.end) {
        p.g = p.first;
        p.b += part;
    }
    if (p.b >= j->nb) {
        const int64_t set = SET_PANELS * j->quant->groups;
        p.g = p.first = p.end;
        p.end = hi - p.first < set ? hi : p.first + set;
        p.b = 0;
    }
    p.ng = p.end - p.g < j->quant->groups ? (int)(p.end - p.g) : j->quant->groups;
    p.nb = min_int(part, j->nb - p.b);
    return p;
}

static panel_place first_panel(const mm_job *j, int part, int64_t lo, int64_t hi)
{
    return next_panel(j, part, hi,
                      (panel_place){.first = lo, .end = lo, .g = lo, .b = j->nb});
}

/* Unpacks a panel and asks for the weights of the next one: of each group they are too few
 * in a row for the hardware to see where they go. (In a function of its own, which has no
 * other effect, gcc leaves the prefetches out.) */
static void fill_panel(const mm_job *j, const sti_weight *w, sti_panel *p,
                       panel_place at, panel_place next)
{
    p->ng = at.ng;
    for (int i = 0; i < at.ng; i++)
        j->quant->fill(sti_group_at(w, at.g + i), at.b, at.nb, p, i);
    const sti_packing f = sti_packing_of(w->type);
    const size_t bytes = sti_packed_bytes(f, (size_t)next.nb);
    for (int i = 0; i < next.ng; i++) {
        const uint8_t *from = sti_group_at(w, next.g + i) + sti_super_at(f, next.b);
        for (size_t k = 0; k < bytes; k += 64) __builtin_prefetch(from + k, 0, 2);
    }
}

/* Sums of a set's panel with group `g` of the set in front, [rows][its columns]. */
static float *sums_of(const work_area *area, int rows, int64_t g)
{
    return area->c + (size_t)rows * (size_t)g * STI_GROUP;
}

/* c += products of rows [r0, r0 + rows) with the panel at `at`. */
static void sweep_panel(const mm_job *j, const sti_panel *p, panel_place at, int r0,
                        int rows, const uint8_t *act, float *c)
{
    const int tile = j->quant->batch_tile;
    for (int r = 0, begun = 0; r < rows; r += tile) {
        const int R = min_int(tile, rows - r);
        if (j->quant->begin && R != begun) j->quant->begin(p->type, R);
        begun = R;
        const uint8_t *x =
            act + tile_at(j, r0 + r) + batch_bytes(j->quant, R, at.b * STI_BLOCK_K);
        j->quant->product(p, x, R, at.nb, c + (size_t)r * (size_t)(p->ng * STI_GROUP));
    }
}

static void store_set(const mm_job *j, int which, int r0, int rows, int64_t first,
                      int64_t end, const work_area *area)
{
    const int panel = j->quant->groups;
    for (int64_t g = first; g < end; g += panel) {
        const int cols = STI_GROUP * (end - g < panel ? (int)(end - g) : panel);
        store(j, which, r0, rows, g * STI_GROUP, sums_of(area, rows, g - first), cols,
              cols);
    }
}

/* Rows [r0, r0 + rows) of x, groups [lo, hi) of a matrix. */
static void multiply_chunk(const mm_job *j, int which, int64_t lo, int64_t hi, int r0,
                           int rows, const uint8_t *act, const work_area *area)
{
    const sti_weight *w = j->a.w[which];
    const int part = panel_blocks(j->nb, sti_packing_of(w->type).unit);
    sti_panel p = {.type = w->type,
                   .pairs = j->pairs,
                   .q = area->panel_q,
                   .d = area->panel_d,
                   .m = area->panel_m,
                   .off = area->panel_off};
    panel_place at = first_panel(j, part, lo, hi);
    while (at.g < hi) {
        const panel_place next = next_panel(j, part, hi, at);
        if (at.b == 0 && at.g == at.first)
            memset(area->c, 0,
                   (size_t)rows * (size_t)(at.end - at.first) * STI_GROUP *
                       sizeof(float));
        fill_panel(j, w, &p, at, next);
        sweep_panel(j, &p, at, r0, rows, act, sums_of(area, rows, at.g - at.first));
        if (next.first != at.first)
            store_set(j, which, r0, rows, at.first, at.end, area);
        at = next;
    }
}

static void multiply_panels(const mm_job *j, int which, int64_t lo, int64_t hi,
                            const uint8_t *act, const work_area *area)
{
    const int chunk = CHUNK_ROWS / j->quant->batch_tile * j->quant->batch_tile;
    for (int r0 = 0; r0 < j->a.M; r0 += chunk)
        multiply_chunk(j, which, lo, hi, r0, min_int(chunk, j->a.M - r0), act, area);
    if (j->quant->end) j->quant->end();
}

/* Few rows: straight from the repacked weights. */
static void multiply_few(const mm_job *j, int which, int64_t lo, int64_t hi,
                         const uint8_t *act)
{
    const sti_weight *w = j->a.w[which];
    const int tile = j->quant->tile;
    float c[STI_TILE_MAX * STI_GROUP];
    for (int64_t first = lo; first < hi; first += FEW_GROUPS) {
        const int64_t end = hi - first < FEW_GROUPS ? hi : first + FEW_GROUPS;
        for (int r = 0; r < j->a.M; r += tile) {
            const int R = min_int(tile, j->a.M - r);
            const uint8_t *x = act + sti_act_bytes(r, w->K);
            for (int64_t g = first; g < end; g++) {
                j->quant->gemv(w->type, sti_group_at(w, g), x, R, j->nb, c);
                store(j, which, r, R, g * STI_GROUP, c, STI_GROUP, STI_GROUP);
            }
        }
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
                multiply_few(j, i, from, to, act);
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
                  .own = a->M <= dev->k->quant->tile,
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
