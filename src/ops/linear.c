/* linear.c - the state of Liger and SUPRA; see linear.h. */
#include "ops/linear.h"

void sti_linear_state_carve(sti_linear_state *st, sti_carve *c,
                            const sti_linear_shape *shape, int window, size_t kv_size,
                            size_t real_size)
{
    const size_t D = (size_t)shape->D, W = window > 0 ? (size_t)window : 0;
    const size_t heads = (size_t)(W ? shape->G : shape->H);
    *st = (sti_linear_state){.kv_size = kv_size};
    if (W) {
        st->win_k = sti_carve_take(c, (size_t)shape->G * W * D, kv_size);
        st->win_v = sti_carve_take(c, (size_t)shape->G * W * D, kv_size);
    }
    st->s = sti_carve_take(c, heads * D * D, real_size);
}
