/* linear.c - the entries of Liger and SUPRA on the cpu backend; see linear.h. */
#include "backend/cpu/linear/linear.h"
#include "backend/cpu/kernels.h"

static sti_lin call_of(const sti_dev *dev, const sti_linear_args *a, int n)
{
    return (sti_lin){.a = a,
                     .n = n,
                     .f = dev->k->panel,
                     .rows = dev->k->row,
                     .H = a->shape.H,
                     .G = a->shape.G,
                     .D = a->shape.D,
                     .Dp = sti_panel_padded(a->shape.D),
                     .group = a->shape.H / a->shape.G,
                     .workers = sti_pool_threads(dev->pool)};
}

size_t sti_cpu_linear_scratch(const sti_dev *dev, int rows)
{
    return dev->linear_fixed + dev->linear_row * (size_t)rows;
}

/* Scratch of any call, and what each row adds. */
static void measure(const sti_lin *l, size_t *fixed, size_t *row)
{
    *row = 0;
    if (l->a->window > 0) {
        *fixed = sti_cpu_liger_scratch(l);
        return;
    }
    *fixed = sti_cpu_supra_scratch(l, 0);
    *row = sti_cpu_supra_scratch(l, 1) - *fixed; /* whole lines: rows are padded */
}

size_t sti_cpu_linear_bytes(const sti_dev *dev, const sti_linear_shape *shape,
                            int window, int rows)
{
    const sti_linear_args a = {.shape = *shape, .window = window, .T = rows};
    const sti_lin l = call_of(dev, &a, 1);
    size_t fixed, row;
    measure(&l, &fixed, &row);
    return fixed + row * (size_t)rows;
}

still_status sti_cpu_linear_reserve(sti_dev *dev, const sti_linear_shape *shape,
                                    int window, int rows, still_error *err)
{
    const sti_linear_args a = {.shape = *shape, .window = window, .T = rows};
    STI_TRY(sti_linear_check(&a.shape, a.T, a.window, err));
    const sti_lin l = call_of(dev, &a, 1);
    size_t fixed, row;
    measure(&l, &fixed, &row);
    if (fixed > dev->linear_fixed) dev->linear_fixed = fixed;
    if (row > dev->linear_row) dev->linear_row = row;
    if (rows < dev->rows) rows = dev->rows;
    return sti_cpu_need_bytes(dev, sti_cpu_linear_scratch(dev, rows), err);
}

still_status sti_cpu_linear(sti_dev *dev, const sti_linear_args *a, int n,
                            still_error *err)
{
    int rows = 0;
    STI_TRY(sti_linear_check_all(a, n, err));
    for (int i = 0; i < n; i++) {
        const size_t kv = a[i].state->kv_size;
        if (a->window > 0 && kv != sizeof(float) && kv != sizeof(uint16_t))
            return sti_fail(err, STILL_E_UNSUPPORTED,
                            "linear attention: window elements of %zu bytes, expected "
                            "2 or 4",
                            kv);
        if (a[i].state->pos < 0 || a[i].state->pos > INT32_MAX - a[i].T)
            return sti_fail(err, STILL_E_LIMIT,
                            "linear attention: %d tokens after %lld, at most %d",
                            a[i].T, (long long)a[i].state->pos, INT32_MAX);
        if (a[i].T > rows) rows = a[i].T;
    }
    if (n < 1) return STILL_OK;
    STI_TRY(sti_cpu_linear_reserve(dev, &a->shape, a->window, rows, err));
    const sti_lin l = call_of(dev, a, n);
    if (a->window > 0)
        sti_cpu_liger(dev, &l);
    else
        sti_cpu_supra(dev, &l);
    for (int i = 0; i < n; i++) a[i].state->pos += a[i].T;
    return STILL_OK;
}

still_status sti_cpu_linear_backward(sti_dev *dev, const sti_linear_args *a, int n,
                                     still_error *err)
{
    STI_TRY(sti_linear_check_all(a, n, err));
    for (int i = 0; i < n; i++) {
        const sti_lin l = call_of(dev, &a[i], 1);
        STI_TRY(a->window > 0 ? sti_cpu_liger_backward(dev, &l, err)
                              : sti_cpu_supra_backward(dev, &l, err));
    }
    return STILL_OK;
}
