/* linear.c - the state of Liger and SUPRA; see linear.h. */
#include "ops/linear.h"

#include "ops/hybrid.h" /* STI_HEAD_DIM_MAX */

still_status sti_linear_check(const sti_linear_shape *s, int T, int window,
                              still_error *err)
{
    if (s->H < 1 || s->G < 1 || s->H % s->G != 0 || s->D < 2 || s->D % 2 != 0 ||
        s->D > STI_HEAD_DIM_MAX || T < 0 || window < 0)
        return sti_fail(err, STILL_E_ARG,
                        "linear attention: %d query heads, %d kv heads, head size %d, "
                        "%d tokens, window %d cannot be",
                        s->H, s->G, s->D, T, window);
    return STILL_OK;
}

still_status sti_linear_check_all(const sti_linear_args *a, int n, still_error *err)
{
    for (int i = 0; i < n; i++) {
        const sti_linear_shape *s = &a[i].shape, *first = &a->shape;
        STI_TRY(sti_linear_check(s, a[i].T, a[i].window, err));
        if (s->H != first->H || s->G != first->G || s->D != first->D ||
            a[i].window != a->window)
            return sti_fail(err, STILL_E_ARG,
                            "linear attention: sessions of different shapes in one "
                            "call");
    }
    return STILL_OK;
}

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
