/* linear.h - the two methods that are no setting of the hybrid operator: Liger's gated
 * linear attention beside a window, and SUPRA's decayed one. Equations and what
 * differs from the authors' code: docs/methods.md.
 *
 * Both read q and k before RoPE and rotate inside: Liger's linear branch wants them
 * raw, SUPRA rotates after its map. Letters as in hybrid.h. */
#ifndef STI_OPS_LINEAR_H
#define STI_OPS_LINEAR_H

#include "base/error.h"
#include "base/mem.h"

typedef struct sti_linear_shape {
    int H, G, D;
} sti_linear_shape;

/* State of a session, one layer; element types as in sti_hybrid_state. Zeroed memory
 * is the empty state. */
typedef struct sti_linear_state {
    int64_t pos;
    size_t kv_size;
    void *win_k,
        *win_v; /* Liger: kv [G, window, D], keys rotated; token j at j % window */
    void *s;    /* real; Liger [G,D,D], SUPRA [H,D,D] (its decay is per head) */
} sti_linear_state;

/* window > 0: Liger; 0: SUPRA. With c->base NULL it only counts. */
void sti_linear_state_carve(sti_linear_state *st, sti_carve *c,
                            const sti_linear_shape *shape, int window, size_t kv_size,
                            size_t real_size);

/* Structs in float for backends, with a 64 behind the name in double.
 *
 * sti_linear_in: q [T,H,D], k, v [T,G,D] before RoPE; inv_freq [D/2], pairs as in
 * sti_rope_args. SUPRA: map_q [H*D,H*D], map_k [G*D,G*D] ([in, out]; NULL: identity),
 * bias_q [H*D], bias_k [G*D] (NULL: 0).
 *
 * sti_linear_args: the next T tokens of a session; the state is advanced. Backward
 * takes a whole sequence from its beginning and no state: it reads dy and writes the
 * gradients of q, k, v and adds to those of maps and biases (NULL: not wanted). */
#define STI_LINEAR_TYPES(real, suffix)                                                 \
    typedef struct sti_linear_in##suffix {                                             \
        const real *q, *k, *v, *inv_freq;                                              \
        bool interleaved;                                                              \
        const real *map_q, *map_k, *bias_q, *bias_k;                                   \
    } sti_linear_in##suffix;                                                           \
    typedef struct sti_linear_grad##suffix {                                           \
        real *q, *k, *v, *map_q, *map_k, *bias_q, *bias_k;                             \
    } sti_linear_grad##suffix;                                                         \
    typedef struct sti_linear_args##suffix {                                           \
        sti_linear_shape shape;                                                        \
        int T, window;                                                                 \
        sti_linear_in##suffix in;                                                      \
        sti_linear_state *state;                                                       \
        real *y; /* [T,H,D] */                                                         \
        const real *dy;                                                                \
        sti_linear_grad##suffix grad;                                                  \
    } sti_linear_args##suffix;

STI_LINEAR_TYPES(float, )
STI_LINEAR_TYPES(double, 64)

/* The reference, in double (backend/ref): for golden data and tests. A state's elements
 * are double. Backward keeps the state of every token: T * D * D numbers for a head. */
still_status sti_ref_liger_forward(const sti_linear_args64 *a, still_error *err);
still_status sti_ref_liger_backward(const sti_linear_args64 *a, still_error *err);
still_status sti_ref_supra_forward(const sti_linear_args64 *a, still_error *err);
still_status sti_ref_supra_backward(const sti_linear_args64 *a, still_error *err);

/* Whether it can be computed at all; _all: whether the n of a call can be together,
 * which share shape, method and parameters. */
still_status sti_linear_check(const sti_linear_shape *s, int T, int window,
                              still_error *err);
still_status sti_linear_check_all(const sti_linear_args *a, int n, still_error *err);

#endif
