/* forward.c - outputs of the hybrid operator over whole sequences; see train.h. */
#include "backend/cpu/hybrid/train/train.h"

enum { TILE = STI_TRAIN_TILE };

typedef struct worker {
    sti_train_walk walk;
    sti_train_tile tile;
    float *soft; /* [TILE,Dp]: sum of w_j v_j */
} worker;

typedef struct job {
    sti_train t;
    unsigned char *memory;
    size_t bytes; /* of a worker */
} job;

static void carve(sti_carve *c, worker *w, const sti_train *t)
{
    sti_train_walk_carve(c, &w->walk, t, false);
    sti_train_tile_carve(c, &w->tile, t);
    w->soft = sti_carve_take(c, TILE * (size_t)t->Dp, sizeof(float));
}

/* STILL eq. 10, 1: y = (N_SA + N_LA) / (D_SA + D_LA), that is (soft + a lin g) /
 * den. */
static void write_tile(const worker *w, const sti_train *t)
{
    const sti_train_tile *r = &w->tile;
    for (int i = 0; i < r->n; i++) {
        const size_t row = sti_train_row(t, w->walk.b, r->first + i, t->H, w->walk.h);
        const size_t at = (size_t)i * (size_t)t->Dp;
        float *y = t->a->y + row * (size_t)t->D;
        if (t->set->has_window)
            for (int e = 0; e < t->D; e++) y[e] = w->soft[at + (size_t)e] / r->den[i];
        else
            memset(y, 0, (size_t)t->D * sizeof *y);
        const float a = r->linear ? r->a[i] / r->den[i] : 0;
        for (int e = 0; r->linear && e < t->D; e++)
            y[e] += a * r->lin[at + (size_t)e] * r->gate[at + (size_t)e];
        if (t->a->max_out) t->a->max_out[row] = r->M[i];
    }
}

/* STILL Alg. 1, for one head of one sequence. */
static void run_head(worker *w, const sti_train *t, int b, int h)
{
    const size_t D = (size_t)t->Dp;
    const bool first_of_sel = h % t->per_sel == 0;
    sti_train_walk_begin(&w->walk, t, b, h);
    for (int c = 0; c < t->n_spans; c++) {
        const int end = sti_train_span_end(t, c);
        sti_train_walk_to(&w->walk, c);
        for (int first = c * t->span; first < end; first += TILE) {
            const sti_train_tile *r = &w->tile;
            sti_train_weights(&w->walk, &w->tile, first,
                              end - first < TILE ? end - first : TILE);
            if (t->set->has_window)
                t->f->multiply(r->n, t->Dp, r->keys, r->w, 1, TILE, w->walk.V, D,
                               w->soft, D, false);
            write_tile(w, t);
        }
        for (int j = c * t->span; t->a->trace.salient && first_of_sel && j < end; j++)
            t->a->trace.salient[sti_train_row(t, b, j, t->S, w->walk.sel)] =
                w->walk.n_salient;
    }
}

static void work(void *v, int me, int workers)
{
    const job *j = v;
    worker w;
    sti_carve c = {.base = j->memory + (size_t)me * j->bytes};
    carve(&c, &w, &j->t);
    for (int u = me; u < j->t.a->B * j->t.H; u += workers)
        run_head(&w, &j->t, u / j->t.H, u % j->t.H);
}

still_status sti_cpu_hybrid_parallel(sti_dev *dev, const sti_hybrid_parallel_args *a,
                                     still_error *err)
{
    job j;
    STI_TRY(sti_train_new(&j.t, dev, a, err));
    STI_TRY(sti_train_count_keys(&j.t, dev, err));
    const size_t workers = (size_t)sti_pool_threads(dev->pool);
    worker w;
    sti_carve c = {0};
    carve(&c, &w, &j.t);
    j.bytes = (c.used + 63) / 64 * 64;
    c = (sti_carve){0};
    sti_carve_take(&c, workers, j.bytes);
    sti_train_store_carve(&c, &j.t);
    STI_TRY(sti_cpu_need_bytes(dev, c.used, err));
    c = (sti_carve){.base = dev->scratch.p};
    j.memory = sti_carve_take(&c, workers, j.bytes);
    sti_train_store_carve(&c, &j.t);
    sti_train_store(&j.t, dev);
    sti_pool_run(dev->pool, work, &j);
    return STILL_OK;
}
