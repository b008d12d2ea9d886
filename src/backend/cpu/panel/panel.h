/* panel.h - small float products and what goes between them, for operators that work on
 * panels: a few dozen rows of one head, copied out of the caller's arrays and padded.
 *
 * Rows of a panel are padded with zeros to multiples of STI_PANEL_PAD floats, which
 * every vector length divides, so that no kernel has a tail. Two kinds of panel occur:
 * rows are tokens and lanes are dimensions, or, for the weights of attention, rows are
 * keys and lanes are queries. In the second a softmax over keys runs down the rows, one
 * query to a lane, and nothing is ever added across lanes.
 *
 * Each number is made by the same steps in the same order whatever else the panel
 * holds; results therefore depend neither on threads nor on the other rows. */
#ifndef STI_BACKEND_CPU_PANEL_PANEL_H
#define STI_BACKEND_CPU_PANEL_PANEL_H

#include <string.h>

#include "backend/cpu/cpu.h"

enum { STI_PANEL_PAD = 16 };

static inline int sti_panel_padded(int n)
{
    return (n + STI_PANEL_PAD - 1) / STI_PANEL_PAD * STI_PANEL_PAD;
}

/* A feature map of one head; equations in docs/methods.md. Features lie in halves of
 * Fp: [softmax(u), 0.., softmax(-u), 0..], or relu(u) alone. */
typedef struct sti_panel_map {
    sti_map_kind kind;
    bool norm_preserved;
    int D, F, Dp, Fp, Pp;
    float bias;
    const float *W;        /* [D,Fp]; NULL: identity */
    const float *Wt;       /* [F,Dp], for the backward */
    const float *edge;     /* [Fp]: 0 for a column, -infinity for padding */
    const float *floor_at; /* [Fp]: the floor for a column, 0 for padding */
} sti_panel_map;

typedef struct sti_panel_kernels {
    /* C [M,N] = A B, or += . Element (m,k) of A is A[m * row + k * col], so A may be
     * transposed; B and C have rows of ldb and ldc. N is a multiple of the padding. */
    void (*multiply)(int M, int N, int K, const float *A, size_t row, size_t col,
                     const float *B, size_t ldb, float *C, size_t ldc, bool add);
    /* y [cols,ldy] = scale x^T of x [rows,ldx]; columns rows..ldy-1 of y are zeroed. */
    void (*transpose)(const float *x, size_t ldx, int rows, int cols, float scale,
                      float *y, size_t ldy);

    /* Lanes: x, d [n,ld], of which the first `lanes` columns count.
     * lane_max: top = max(top, x_j).
     * exp_shifted: x_j = factor exp(x_j - shift), sum += x_j.
     * lane_sum: sum += x_j.  dot: sum += x_j d_j.
     * softmax_backward: d_j = x_j (d_j + bias), sum += d_j.
     * exp_moments: e_j = exp(x_j - shift), sum += e_j, mean += e_j (x_j - shift).
     * match: sum += x_j log max(d_j, floor), then x_j = share - weight x_j / d_j, or
     * share where d_j <= floor. */
    void (*lane_max)(const float *x, int n, size_t ld, int lanes, float *top);
    void (*exp_shifted)(float *x, int n, size_t ld, int lanes, const float *shift,
                        float factor, float *sum);
    void (*lane_sum)(const float *x, int n, size_t ld, int lanes, float *sum);
    void (*dot)(const float *x, const float *d, int n, size_t ld, int lanes,
                float *sum);
    void (*softmax_backward)(const float *x, float *d, int n, size_t ld, int lanes,
                             const float *bias, float *sum);
    void (*exp_moments)(const float *x, int n, size_t ld, int lanes, const float *shift,
                        float *sum, float *mean);
    void (*match)(float *x, const float *d, int n, size_t ld, int lanes, float floor,
                  const float *share, const float *weight, float *sum);

    /* Rows: out[r] = x_r . y_r, with y_r = y + r * ldy (ldy 0: one y). n padded. */
    void (*row_dots)(const float *x, size_t ldx, const float *y, size_t ldy, int rows,
                     int n, float *out);
    /* y += a x; y = 2 sigmoid(x). n padded. */
    void (*add_scaled)(float *y, const float *x, float a, int n);
    void (*gate)(float *y, const float *x, int n);
    /* y = softmax(x) of n numbers, then zeros up to n padded. */
    void (*softmax)(float *y, const float *x, int n);
    /* S [rows,ld]: S_i = keep_i S_i + add_i v, rows of n numbers, n padded. */
    void (*decay)(float *S, size_t ld, int rows, int n, const float *keep,
                  const float *add, const float *v);

    /* Features phi [rows,Pp] of x [rows,Dp], with raw [rows,Fp] = x W. */
    void (*features)(const sti_panel_map *m, const float *x, const float *raw, int rows,
                     float *phi);
    /* raw becomes its own gradient, given dphi [rows,Pp]; the path through |x| is
     * added to dx [rows,Dp] (NULL: not wanted). Returns the gradient of the bias. */
    float (*features_backward)(const sti_panel_map *m, const float *x, float *raw,
                               int rows, const float *dphi, float *dx);
} sti_panel_kernels;

/* ---- Panels of callers' arrays (panel.c) --------------------------------- */

/* Copies n floats and pads with zeros up to `padded`. */
static inline void sti_panel_row(float *to, const float *from, int n, int padded)
{
    memcpy(to, from, (size_t)n * sizeof *to);
    memset(to + n, 0, (size_t)(padded - n) * sizeof *to);
}

/* Memory of a map: padded W, its transpose, masks. */
typedef struct sti_panel_map_scratch {
    float *W, *Wt, *edge, *floor_at;
} sti_panel_map_scratch;

sti_panel_map_scratch sti_panel_map_carve(sti_carve *c, const sti_hybrid_shape *shape,
                                          bool backward);
/* W: the head's [D,F], NULL: identity. scratch.Wt is filled if it was carved. */
sti_panel_map sti_panel_map_of(const sti_panel_kernels *f,
                               const sti_hybrid_settings *set,
                               const sti_hybrid_shape *shape, const float *W,
                               float bias, const sti_panel_map_scratch *scratch);
/* raw [rows,Fp] = x W, then features. */
void sti_panel_map_rows(const sti_panel_kernels *f, const sti_panel_map *m,
                        const float *x, int rows, float *raw, float *phi);
/* dx [rows,Dp] += draw W^T */
void sti_panel_map_back(const sti_panel_kernels *f, const sti_panel_map *m,
                        const float *draw, int rows, float *dx);

#endif
