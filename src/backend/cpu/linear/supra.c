/* supra.c - SUPRA on the cpu backend, forward and backward; see linear.h.
 *
 *   fq_t = rope(relu(q_t W_q + b_q)), fk_t = rope(relu(k_t W_k + b_k)) / sqrt(D)
 *   S_t  = gamma_h S_{t-1} + fk_t v_t^T,   o_t = fq_t^T S_t,   y_t = norm(o_t)
 *
 * A session goes token by token. Backward goes in tiles of n tokens, whose decays
 * gamma^(t-j) are powers between 1 and gamma^TILE, never inverted: with S0 the state
 * before the tile, kept from a first walk, and dS the gradient of the state after it,
 *   o_t   = sum_{j<=t} gamma^(t-j) (fq_t.fk_j) v_j + gamma^(i+1) fq_t S0
 *   dfq_t = sum_{j<=t} gamma^(t-j) (do_t.v_j) fk_j + gamma^(i+1) S0 do_t
 *   dfk_j = sum_{t>=j} gamma^(t-j) (do_t.v_j) fq_t + gamma^(n-1-j) dS v_j
 *   dv_j  = sum_{t>=j} gamma^(t-j) (fq_t.fk_j) do_t + gamma^(n-1-j) dS^T fk_j
 *   dS0   = gamma^n dS + sum_t gamma^(i+1) fq_t do_t^T,   t = i-th token of the tile */
#include <math.h>

#include "backend/cpu/linear/linear.h"

enum { TILE = 64, W_ROWS = 24 }; /* tokens of a tile; rows of dW at a time */
static const float norm_eps = 1e-5f;

static float decay_of(int h)
{
    return 1 - ldexpf(1, -5 - h);
}

/* One of the two maps: rows of n = heads * D numbers, padded to np. */
typedef struct mixer {
    const float *x, *W, *bias; /* [T,n], [n,n] or NULL, [n] or NULL */
    float *padded;             /* [n,np]: W, if its rows need padding; or NULL */
    float *Wt;                 /* [n,np], backward */
    float *raw;                /* [T,np]: x W + b; then, backward, its gradient */
    float *f;                  /* [T,np]: features */
    int n, np, heads;
    float scale; /* of the features */
} mixer;

typedef struct job {
    const sti_lin *l;
    const sti_linear_args *a; /* the session */
    int64_t pos;              /* of its first token */
    mixer q, k;
    /* Backward */
    float *dfq;      /* [T, q.np] */
    float *dfk, *dv; /* [H,T,Dp] */
    float *states;   /* [H, tiles, D, Dp]: S before each tile */
    unsigned char *memory;
    size_t bytes; /* of a worker */
} job;

static mixer mixer_of(const float *x, const float *W, const float *bias, int heads,
                      int D, float scale)
{
    const int n = heads * D;
    return (mixer){.x = x,
                   .W = W,
                   .bias = bias,
                   .n = n,
                   .np = sti_panel_padded(n),
                   .heads = heads,
                   .scale = scale};
}

static void carve_mixer(sti_carve *c, mixer *m, size_t T, bool backward)
{
    const size_t n = (size_t)m->n, np = (size_t)m->np, size = sizeof(float);
    m->raw = sti_carve_take(c, T * np, size);
    m->f = sti_carve_take(c, T * np, size);
    /* Whether or not there is a W, so that the size follows from the shape. */
    if (m->np != m->n) m->padded = sti_carve_take(c, n * np, size);
    if (m->W && backward) m->Wt = sti_carve_take(c, n * np, size);
}

static void pad_weights(const sti_lin *l, const mixer *m)
{
    const size_t n = (size_t)m->n, np = (size_t)m->np;
    for (size_t i = 0; m->W && m->padded && i < n; i++)
        sti_panel_row(m->padded + i * np, m->W + i * n, m->n, m->np);
    if (m->Wt) l->f->transpose(m->W, n, m->n, m->n, 1, m->Wt, np);
}

/* Features of tokens [lo, hi). */
static void map_rows(const job *j, const mixer *m, int lo, int hi)
{
    const sti_lin *l = j->l;
    const size_t n = (size_t)m->n, np = (size_t)m->np;
    if (m->W)
        l->f->multiply(hi - lo, m->np, m->n, m->x + (size_t)lo * n, n, 1,
                       m->padded ? m->padded : m->W, np, m->raw + (size_t)lo * np, np,
                       false);
    for (int t = lo; t < hi; t++) {
        float *raw = m->raw + (size_t)t * np, *f = m->f + (size_t)t * np;
        if (!m->W) sti_panel_row(raw, m->x + (size_t)t * n, m->n, m->np);
        for (int i = 0; m->bias && i < m->n; i++) raw[i] += m->bias[i];
        for (int i = 0; i < m->np; i++) f[i] = fmaxf(raw[i], 0) * m->scale;
        for (int h = 0; h < m->heads; h++) sti_lin_rotate(l, f + h * l->D, j->pos + t);
    }
}

static void map_work(void *v, int me, int workers)
{
    const job *j = v;
    int64_t lo, hi;
    sti_split(j->a->T, 1, me, workers, &lo, &hi);
    map_rows(j, &j->q, (int)lo, (int)hi);
    map_rows(j, &j->k, (int)lo, (int)hi);
}

/* ---- Forward ------------------------------------------------------------- */

/* y = (o - mean) r, r = 1 / sqrt(var + eps); returns r. */
static float norm_row(const float *o, float *y, int D)
{
    float mean = 0, var = 0;
    for (int e = 0; e < D; e++) mean += o[e];
    mean /= (float)D;
    for (int e = 0; e < D; e++) var += (o[e] - mean) * (o[e] - mean);
    const float r = 1 / sqrtf(var / (float)D + norm_eps);
    for (int e = 0; e < D; e++) y[e] = (o[e] - mean) * r;
    return r;
}

static void head_work(void *arg, int me, int workers)
{
    const job *j = arg;
    const sti_lin *l = j->l;
    const size_t D = (size_t)l->D, Dp = (size_t)l->Dp;
    float *S = (float *)(void *)(j->memory + (size_t)me * j->bytes);
    float keep[STI_HEAD_DIM_MAX], v[STI_HEAD_DIM_MAX], o[STI_HEAD_DIM_MAX];
    for (int h = me; h < l->H; h += workers) {
        const int g = h / l->group;
        float *state = (float *)j->a->state->s + (size_t)h * D * D;
        for (size_t i = 0; i < D; i++) {
            sti_panel_row(S + i * Dp, state + i * D, l->D, l->Dp);
            keep[i] = decay_of(h);
        }
        for (int t = 0; t < j->a->T; t++) {
            const float *fq = j->q.f + (size_t)t * (size_t)j->q.np + h * l->D;
            const float *fk = j->k.f + (size_t)t * (size_t)j->k.np + g * l->D;
            sti_panel_row(v, j->a->in.v + ((size_t)t * (size_t)l->G + (size_t)g) * D,
                          l->D, l->Dp);
            l->f->decay(S, Dp, l->D, l->Dp, keep, fk, v);
            l->f->multiply(1, l->Dp, l->D, fq, 0, 1, S, Dp, o, Dp, false);
            norm_row(o, j->a->y + ((size_t)t * (size_t)l->H + (size_t)h) * D, l->D);
        }
        for (size_t i = 0; i < D; i++)
            memcpy(state + i * D, S + i * Dp, D * sizeof *state);
    }
}

/* The forward pass of one session, laid out in c; counts if c has no base. */
static job forward_job(sti_carve *c, const sti_lin *l, const sti_linear_args *a,
                       size_t T)
{
    const sti_linear_in *in = &a->in;
    const size_t panel = (size_t)l->D * (size_t)l->Dp * sizeof(float);
    job j = {.l = l, .a = a, .bytes = (panel + 63) / 64 * 64};
    j.q = mixer_of(in->q, in->map_q, in->bias_q, l->H, l->D, 1);
    j.k = mixer_of(in->k, in->map_k, in->bias_k, l->G, l->D, 1 / sqrtf((float)l->D));
    j.memory = sti_carve_take(c, (size_t)l->workers, j.bytes);
    carve_mixer(c, &j.q, T, false);
    carve_mixer(c, &j.k, T, false);
    return j;
}

size_t sti_cpu_supra_scratch(const sti_lin *l, int rows)
{
    sti_carve c = {0};
    forward_job(&c, l, l->a, (size_t)rows);
    return c.used;
}

void sti_cpu_supra(sti_dev *dev, const sti_lin *l)
{
    for (int i = 0; i < l->n; i++) {
        const sti_linear_args *a = &l->a[i];
        sti_carve c = {.base = dev->scratch.p};
        job j = forward_job(&c, l, a, (size_t)a->T);
        j.pos = a->state->pos;
        pad_weights(l, &j.q);
        pad_weights(l, &j.k);
        sti_pool_run(dev->pool, map_work, &j);
        sti_pool_run(dev->pool, head_work, &j);
    }
}

/* ---- Backward ------------------------------------------------------------ */

/* Memory of a worker: one tile of one head. */
typedef struct tile {
    float *fq, *fk, *v, *d_o, *o; /* [TILE,Dp] */
    float *dfq, *dfk, *dv;        /* [TILE,Dp] */
    float *trans, *w;             /* [Dp,TILE], [TILE,TILE] */
    float *S0t, *dS, *dSt;        /* [D,Dp] */
    float *power;                 /* [TILE + 1]: gamma^i */
} tile;

static void carve_tile(sti_carve *c, tile *x, const sti_lin *l)
{
    const size_t D = (size_t)l->Dp, size = sizeof(float);
    float **rows[] = {&x->fq,  &x->fk,  &x->v,  &x->d_o,  &x->o,
                      &x->dfq, &x->dfk, &x->dv, &x->trans};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        *rows[i] = sti_carve_take(c, TILE * D, size);
    x->w = sti_carve_take(c, TILE * TILE, size);
    x->S0t = sti_carve_take(c, D * D, size);
    x->dS = sti_carve_take(c, D * D, size);
    x->dSt = sti_carve_take(c, D * D, size);
    x->power = sti_carve_take(c, TILE + 1, size);
}

static void load_tile(const job *j, const tile *x, int h, int first, int n)
{
    const sti_lin *l = j->l;
    const int g = h / l->group;
    for (int i = 0; i < n; i++) {
        const size_t t = (size_t)(first + i), to = (size_t)i * (size_t)l->Dp;
        sti_panel_row(x->fq + to, j->q.f + t * (size_t)j->q.np + h * l->D, l->D, l->Dp);
        sti_panel_row(x->fk + to, j->k.f + t * (size_t)j->k.np + g * l->D, l->D, l->Dp);
        sti_panel_row(x->v + to,
                      j->a->in.v + (t * (size_t)l->G + (size_t)g) * (size_t)l->D, l->D,
                      l->Dp);
    }
}

/* Row i of x [n,Dp] times gamma^(step i + from). */
static void scale_rows(const tile *x, const sti_lin *l, float *rows, int n, int from,
                       int step)
{
    for (int i = 0; i < n; i++)
        for (int e = 0; e < l->Dp; e++)
            rows[(size_t)i * (size_t)l->Dp + (size_t)e] *= x->power[from + step * i];
}

/* w [n,lanes] = decayed products of rows a_j and b_t, t >= j; queries are lanes. */
static void decayed(const tile *x, const sti_lin *l, const float *a, const float *b,
                    int n)
{
    const size_t D = (size_t)l->Dp;
    const int lanes = sti_panel_padded(n);
    l->f->transpose(b, D, n, l->D, 1, x->trans, TILE);
    l->f->multiply(n, lanes, l->D, a, D, 1, x->trans, TILE, x->w, TILE, false);
    for (int j = 0; j < n; j++)
        for (int t = 0; t < n; t++) x->w[j * TILE + t] *= t < j ? 0 : x->power[t - j];
}

/* S = gamma^n S + sum_j gamma^(n-1-j) fk_j v_j^T; fk is scaled in place. */
static void advance(const tile *x, const sti_lin *l, float *S, int n)
{
    const size_t D = (size_t)l->Dp;
    for (size_t i = 0; i < (size_t)l->D * D; i++) S[i] *= x->power[n];
    scale_rows(x, l, x->fk, n, n - 1, -1);
    l->f->multiply(l->D, l->Dp, n, x->fk, 1, D, x->v, D, S, D, true);
}

/* do from dy through the norm, rows of the tile. */
static void norm_backward(const job *j, const tile *x, int h, int first, int n)
{
    const sti_lin *l = j->l;
    const int D = l->D;
    float y[STI_HEAD_DIM_MAX];
    for (int i = 0; i < n; i++) {
        const float *dy =
            j->a->dy + ((size_t)(first + i) * (size_t)l->H + (size_t)h) * (size_t)D;
        float *d_o = x->d_o + (size_t)i * (size_t)l->Dp, mean = 0, mean_y = 0;
        const float r = norm_row(x->o + (size_t)i * (size_t)l->Dp, y, D);
        for (int e = 0; e < D; e++) {
            mean += dy[e];
            mean_y += dy[e] * y[e];
        }
        mean /= (float)D;
        mean_y /= (float)D;
        for (int e = 0; e < D; e++) d_o[e] = r * (dy[e] - mean - y[e] * mean_y);
        for (int e = D; e < l->Dp; e++) d_o[e] = 0;
    }
}

static void tile_backward(const job *j, const tile *x, const float *S0, int h,
                          int first, int n)
{
    const sti_lin *l = j->l;
    const sti_panel_kernels *f = l->f;
    const size_t D = (size_t)l->Dp;
    const int rows = l->D, cols = l->Dp;
    load_tile(j, x, h, first, n);
    f->multiply(n, cols, rows, x->fq, D, 1, S0, D, x->o, D, false);
    scale_rows(x, l, x->o, n, 1, 1);
    decayed(x, l, x->fk, x->fq, n);
    f->multiply(n, cols, n, x->w, 1, TILE, x->v, D, x->o, D, true);
    norm_backward(j, x, h, first, n);

    /* Through the state on both sides of the tile, */
    f->transpose(S0, D, rows, rows, 1, x->S0t, D);
    f->multiply(n, cols, rows, x->d_o, D, 1, x->S0t, D, x->dfq, D, false);
    scale_rows(x, l, x->dfq, n, 1, 1);
    f->transpose(x->dS, D, rows, rows, 1, x->dSt, D);
    f->multiply(n, cols, rows, x->v, D, 1, x->dSt, D, x->dfk, D, false);
    scale_rows(x, l, x->dfk, n, n - 1, -1);
    f->multiply(n, cols, rows, x->fk, D, 1, x->dS, D, x->dv, D, false);
    scale_rows(x, l, x->dv, n, n - 1, -1);
    /* and pair by pair inside it; w still holds the weights of the values. */
    f->multiply(n, cols, n, x->w, TILE, 1, x->d_o, D, x->dv, D, true);
    decayed(x, l, x->v, x->d_o, n);
    f->multiply(n, cols, n, x->w, 1, TILE, x->fk, D, x->dfq, D, true);
    f->multiply(n, cols, n, x->w, TILE, 1, x->fq, D, x->dfk, D, true);

    for (size_t i = 0; i < (size_t)rows * D; i++) x->dS[i] *= x->power[n];
    scale_rows(x, l, x->fq, n, 1, 1);
    f->multiply(rows, cols, n, x->fq, 1, D, x->d_o, D, x->dS, D, true);

    const size_t head = ((size_t)h * (size_t)j->a->T + (size_t)first) * D;
    memcpy(j->dfk + head, x->dfk, (size_t)n * D * sizeof(float));
    memcpy(j->dv + head, x->dv, (size_t)n * D * sizeof(float));
    for (int i = 0; i < n; i++)
        memcpy(j->dfq + (size_t)(first + i) * (size_t)j->q.np + h * l->D,
               x->dfq + (size_t)i * D, (size_t)l->D * sizeof(float));
}

static void head_backward_work(void *v, int me, int workers)
{
    const job *j = v;
    const sti_lin *l = j->l;
    const size_t panel = (size_t)l->D * (size_t)l->Dp;
    const int T = j->a->T, tiles = (T + TILE - 1) / TILE;
    tile x;
    sti_carve c = {.base = j->memory + (size_t)me * j->bytes};
    carve_tile(&c, &x, l);
    for (int h = me; h < l->H; h += workers) {
        float *states = j->states + (size_t)h * (size_t)tiles * panel;
        x.power[0] = 1;
        for (int i = 1; i <= TILE; i++) x.power[i] = x.power[i - 1] * decay_of(h);
        memset(states, 0, panel * sizeof *states);
        for (int i = 0; i + 1 < tiles; i++) {
            float *next = states + (size_t)(i + 1) * panel;
            memcpy(next, next - panel, panel * sizeof *next);
            load_tile(j, &x, h, i * TILE, TILE);
            advance(&x, l, next, TILE);
        }
        memset(x.dS, 0, panel * sizeof *x.dS);
        for (int i = tiles - 1; i >= 0; i--)
            tile_backward(j, &x, states + (size_t)i * panel, h, i * TILE,
                          T - i * TILE < TILE ? T - i * TILE : TILE);
    }
}

/* Gradient d [np] of one token's features to that of raw, in place of raw. */
static void unmap_row(const job *j, const mixer *m, int t, const float *d)
{
    float *raw = m->raw + (size_t)t * (size_t)m->np;
    float back[STI_HEAD_DIM_MAX];
    const int D = j->l->D;
    for (int h = 0; h < m->heads; h++) {
        memcpy(back, d + h * D, (size_t)D * sizeof *back);
        sti_lin_rotate(j->l, back, -(int64_t)t);
        for (int e = 0; e < D; e++)
            raw[h * D + e] = raw[h * D + e] > 0 ? back[e] * m->scale : 0;
    }
}

/* dx [T,n] of tokens [lo, hi): raw's gradient times W^T. f is free for the product. */
static void input_rows(const job *j, const mixer *m, int lo, int hi, float *dx)
{
    const size_t n = (size_t)m->n, np = (size_t)m->np;
    if (!dx) return;
    const float *from = m->W ? m->f : m->raw;
    if (m->W)
        j->l->f->multiply(hi - lo, m->np, m->n, m->raw + (size_t)lo * np, np, 1, m->Wt,
                          np, m->f + (size_t)lo * np, np, false);
    for (int t = lo; t < hi; t++)
        memcpy(dx + (size_t)t * n, from + (size_t)t * np, n * sizeof *dx);
}

static void unmap_work(void *v, int me, int workers)
{
    const job *j = v;
    const sti_lin *l = j->l;
    const size_t T = (size_t)j->a->T, D = (size_t)l->D, Dp = (size_t)l->Dp;
    int64_t lo, hi;
    sti_split(j->a->T, 1, me, workers, &lo, &hi);
    for (int64_t t = lo; t < hi; t++) {
        unmap_row(j, &j->q, (int)t, j->dfq + (size_t)t * (size_t)j->q.np);
        /* Heads of a group, in order; their sum takes the place of the features of
         * k. */
        for (int g = 0; g < l->G; g++) {
            float *dfk = j->k.f + (size_t)t * (size_t)j->k.np + (size_t)g * D;
            float *dv = j->a->grad.v;
            if (dv) dv += ((size_t)t * (size_t)l->G + (size_t)g) * D;
            for (size_t e = 0; e < D; e++) {
                float sum_k = 0, sum_v = 0;
                for (int h = g * l->group; h < (g + 1) * l->group; h++) {
                    const size_t at = ((size_t)h * T + (size_t)t) * Dp + e;
                    sum_k += j->dfk[at];
                    sum_v += j->dv[at];
                }
                dfk[e] = sum_k;
                if (dv) dv[e] = sum_v;
            }
        }
        unmap_row(j, &j->k, (int)t, j->k.f + (size_t)t * (size_t)j->k.np);
    }
    input_rows(j, &j->q, (int)lo, (int)hi, j->a->grad.q);
    input_rows(j, &j->k, (int)lo, (int)hi, j->a->grad.k);
}

/* dW += x^T draw, db += sum of draw; worker's share of the rows of W. */
static void weights_of(const job *j, const mixer *m, float *dW, float *db, int me,
                       int workers, float *block)
{
    const size_t n = (size_t)m->n, np = (size_t)m->np;
    int64_t lo, hi;
    sti_split(m->n, 1, me, workers, &lo, &hi);
    for (int64_t i = lo; dW && i < hi; i += W_ROWS) {
        const int rows = hi - i < W_ROWS ? (int)(hi - i) : W_ROWS;
        j->l->f->multiply(rows, m->np, j->a->T, m->x + i, 1, n, m->raw, np, block, np,
                          false);
        for (int r = 0; r < rows; r++)
            for (size_t e = 0; e < n; e++)
                dW[((size_t)i + (size_t)r) * n + e] += block[(size_t)r * np + e];
    }
    for (int64_t i = lo; db && i < hi; i++) {
        double sum = 0;
        for (int t = 0; t < j->a->T; t++)
            sum += (double)m->raw[(size_t)t * np + (size_t)i];
        db[i] += (float)sum;
    }
}

static void weights_work(void *v, int me, int workers)
{
    const job *j = v;
    const sti_linear_grad *grad = &j->a->grad;
    float *block = (float *)(void *)(j->memory + (size_t)me * j->bytes);
    weights_of(j, &j->q, grad->map_q, grad->bias_q, me, workers, block);
    weights_of(j, &j->k, grad->map_k, grad->bias_k, me, workers, block);
}

still_status sti_cpu_supra_backward(sti_dev *dev, const sti_lin *l, still_error *err)
{
    const sti_linear_args *a = l->a;
    const sti_linear_in *in = &a->in;
    const size_t T = (size_t)a->T, H = (size_t)l->H, Dp = (size_t)l->Dp;
    const size_t tiles = (T + TILE - 1) / TILE, size = sizeof(float);
    if (a->T == 0) return STILL_OK;
    job j = {.l = l, .a = a};
    j.q = mixer_of(in->q, in->map_q, in->bias_q, l->H, l->D, 1);
    j.k = mixer_of(in->k, in->map_k, in->bias_k, l->G, l->D, 1 / sqrtf((float)l->D));
    tile x;
    sti_carve one = {0};
    carve_tile(&one, &x, l);
    const size_t block = W_ROWS * (size_t)j.q.np * size;
    j.bytes = ((one.used > block ? one.used : block) + 63) / 64 * 64;
    for (int pass = 0; pass < 2; pass++) {
        sti_carve c = {.base = pass ? dev->scratch.p : NULL};
        j.memory = sti_carve_take(&c, (size_t)l->workers, j.bytes);
        carve_mixer(&c, &j.q, T, true);
        carve_mixer(&c, &j.k, T, true);
        j.dfq = sti_carve_take(&c, T * (size_t)j.q.np, size);
        j.dfk = sti_carve_take(&c, H * T * Dp, size);
        j.dv = sti_carve_take(&c, H * T * Dp, size);
        j.states = sti_carve_take(&c, H * tiles * (size_t)l->D * Dp, size);
        if (pass == 0) STI_TRY(sti_cpu_need_bytes(dev, c.used, err));
    }
    pad_weights(l, &j.q);
    pad_weights(l, &j.k);
    sti_pool_run(dev->pool, map_work, &j);
    sti_pool_run(dev->pool, head_backward_work, &j);
    sti_pool_run(dev->pool, unmap_work, &j);
    sti_pool_run(dev->pool, weights_work, &j);
    return STILL_OK;
}
