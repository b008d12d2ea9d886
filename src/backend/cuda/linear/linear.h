/* linear.h - Liger and SUPRA on the GPU: what their kernels share.
 *
 * Both are one recurrence, with features fq, fk and a decay exp(a) per channel:
 *
 *   S_t = diag(exp(a_t)) S_{t-1} + fk_t v_t^T,   o_t = fq_t^T S_t
 *   Liger   fq = softmax(q) / 2, fk = softmax(k), a = log sigmoid(k) / 16; a state per
 *           kv head; y = o + 1/2 window
 *   SUPRA   fq = rope(relu(q W + b)), fk likewise / sqrt(D), a = log gamma_h; a state
 *           per query head; y = o normed over the head
 *
 * Few tokens take one step after the other (step.cu), in float. More go this
 * way: features first (rows.cu), then, in spans of 64 tokens, what each span
 * adds to the state, a scan over spans, and the outputs of each span from the state it
 * begins with (scan_fwd.cu). Inside a span tiles of 16 tokens follow each other, the
 * state in shared memory: what lies before the tile is read from the state, decayed by
 * exp(A_t), A the sum of a from the tile's beginning; pairs of tokens inside the tile
 * are taken one by one with exp(A_t - A_j), j <= t. Decays are only multiplied, never
 * divided by, so channels that forget at once cost no precision. The window is softmax
 * attention of its own (window.cu).
 *
 * Backward, with R the gradient of the state after a tile, which walks from the end:
 *   dfq_t = S_t do_t;   dfk_j = R_j v_j,  dv_j = R_j^T fk_j,
 *   R_j   = exp(A_end - A_j) R + sum over t >= j of exp(A_t - A_j) fq_t do_t^T
 *   da_t  = sum over u >= t of (fq_u dfq_u - fk_u dfk_u), to the end of the span, plus
 *           the row sums of R times S there
 *
 * Products run in TF32 (tf32.cuh), states are float32. Columns are padded to DP, a
 * multiple of 32, with zeros. */
#ifndef STI_BACKEND_CUDA_LINEAR_LINEAR_H
#define STI_BACKEND_CUDA_LINEAR_LINEAR_H

#include "backend/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    STI_LINEAR_SPAN = 64,  /* tokens between states that are kept */
    STI_LINEAR_TILE = 16,  /* tokens whose pairs are taken one by one */
    STI_LINEAR_MAX_D = 128 /* what the tiles are made for; steps take any */
};

/* One sequence of a call, all pointers on the device. */
typedef struct sti_cuda_linear_seq {
    const float *q, *k, *v; /* its T rows, before RoPE */
    float *y;
    const int32_t *pos; /* -> position of its first row; NULL: 0 */
    int T, spans;
    int row0;            /* of its rows in the arrays [rows, ...] below */
    int span0;           /* of its spans in those of spans; no gap may follow: tables
                            are compared byte by byte */
    void *win_k, *win_v; /* [G, window, D], Liger */
    float *s;            /* [S, D, D]; NULL: it begins empty and is not kept */
    const float *dy;
    float *dq, *dk, *dv; /* or NULL */
} sti_cuda_linear_seq;

/* A call. */
typedef struct sti_cuda_linear {
    int n, rows, longest, spans; /* sequences; tokens of all and of the longest; spans
                                    of all */
    int H, G, D, DP;
    int S, per_kv, per_state; /* states; query heads of a kv head, of a state */
    int window;               /* 0: SUPRA */
    bool interleaved, half_kv;
    float scale; /* 1 / sqrt(D) */
    const float *inv_freq;
    const sti_cuda_linear_seq *seq; /* [n] */
    const float *bias_q, *bias_k;   /* SUPRA; NULL: 0 */
    float *raw_q, *raw_k;           /* [rows, H D], [rows, G D]: x W; NULL: x */

    float *fq, *fk, *v;     /* [rows,H,DP], [rows,G,DP], likewise */
    float *decay;           /* [rows,G,DP]: a of Liger */
    float *qr, *kr;         /* rotated, as fq and fk: Liger's window */
    float *o, *win;         /* [rows,H,DP] */
    float *lse;             /* [rows,H]: log-sum-exp of a window's logits */
    float *states, *sums;   /* [spans,S,DP,DP] before a span; [spans,S,DP]: its A */
    float *d_o, *delta;     /* [rows,H,DP]; [rows,H]: 1/2 dy . window */
    float *dstates;         /* as states: gradient of the state after a span */
    float *dfq, *dqr;       /* [rows,H,DP] */
    float *dfk, *dv;        /* [rows,S,DP] */
    float *da, *dkr, *dvr;  /* [rows,G,DP]: Liger */
    float *draw_q, *draw_k; /* as raw_q, raw_k: their gradients */
    bool map_q, map_k;      /* there are maps: draw is not yet the inputs' gradient */
} sti_cuda_linear;

/* Launchers; each queues its kernels on the device's stream. */

/* Tokens of all sequences one after the other, any D: features, states, outputs.
 * Reads raw_q and raw_k, nothing else of the arrays. */
still_status sti_cuda_linear_step(sti_dev *, const sti_cuda_linear *, still_error *);

/* rows.cu: fq, fk, v, decay, qr, kr; y from o and win; the last tokens into the
 * ring of the window. */
still_status sti_cuda_linear_features(sti_dev *, const sti_cuda_linear *,
                                      still_error *);
still_status sti_cuda_linear_write(sti_dev *, const sti_cuda_linear *, still_error *);
still_status sti_cuda_linear_store(sti_dev *, const sti_cuda_linear *, still_error *);

/* scan_fwd.cu: states at the beginning of spans; o, and the states after the last
 * tokens; dfq. */
still_status sti_cuda_linear_states(sti_dev *, const sti_cuda_linear *, still_error *);
still_status sti_cuda_linear_outputs(sti_dev *, const sti_cuda_linear *, still_error *);
still_status sti_cuda_linear_queries(sti_dev *, const sti_cuda_linear *, still_error *);
/* scan_bwd.cu: dstates; dfk and dv; da. */
still_status sti_cuda_linear_dstates(sti_dev *, const sti_cuda_linear *, still_error *);
still_status sti_cuda_linear_keys(sti_dev *, const sti_cuda_linear *, still_error *);
still_status sti_cuda_linear_decays(sti_dev *, const sti_cuda_linear *, still_error *);

/* window.cu: win and lse; dqr; dkr and dvr. */
still_status sti_cuda_linear_window(sti_dev *, const sti_cuda_linear *, still_error *);
still_status sti_cuda_linear_window_queries(sti_dev *, const sti_cuda_linear *,
                                            still_error *);
still_status sti_cuda_linear_window_keys(sti_dev *, const sti_cuda_linear *,
                                         still_error *);

/* rows_bwd.cu: d_o and delta from dy; gradients of the inputs (Liger) or draw
 * (SUPRA); db[n] += column sums of draw [rows, n], in `part` [STI_LINEAR_PARTS, n]. */
enum { STI_LINEAR_PARTS = 64 };
still_status sti_cuda_linear_begin_back(sti_dev *, const sti_cuda_linear *,
                                        still_error *);
still_status sti_cuda_linear_inputs_back(sti_dev *, const sti_cuda_linear *,
                                         still_error *);
still_status sti_cuda_linear_bias(sti_dev *, const float *draw, int rows, int n,
                                  float *part, float *db, still_error *);

#ifdef __cplusplus
}
#endif

#endif
