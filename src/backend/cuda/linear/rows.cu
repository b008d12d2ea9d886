/* rows.cu - what comes before and after the recurrence, token by token:
 * features, rotated queries and keys, outputs, the ring of the window. See linear.h.
 *
 * A warp takes one head of one token. Bounded by memory. */
#include "backend/cuda/linear/rows.cuh"

/* f = softmax(x) `part`, and x rotated. */
STI_DEVICE void liger_row(const sti_cuda_linear &p, const float *x, int64_t t,
                          float part, float *f, float *rotated)
{
    const int lane = (int)threadIdx.x % 32;
    float value[EACH], top = -FLT_MAX, sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int e = lane + 32 * i;
        value[i] = e < p.D ? x[e] : -FLT_MAX;
        top = fmaxf(top, value[i]);
    }
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int e = lane + 32 * i;
        if (e < p.D) {
            const rotation r = rotation_of(p, e, t);
            rotated[e] = value[i] * r.c + x[r.partner] * r.s;
        } else if (e < p.DP) {
            rotated[e] = 0;
        }
        value[i] = e < p.D ? expf(value[i] - top) : 0;
        sum += value[i];
    }
    sum = part / warp_sum(sum);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int e = lane + 32 * i;
        if (e < p.DP) f[e] = value[i] * sum;
    }
}

static __global__ void __launch_bounds__(32 * WARPS)
    feature_kernel(const sti_cuda_linear p)
{
    const sti_cuda_linear_seq s = p.seq[blockIdx.z];
    const row_place r = row_place_of(p, s);
    if (!r.is) return;
    const int64_t t = first_position(s) + r.t;
    const float *x = (r.query ? s.q : s.k) + r.from * p.D;
    float *f = (r.query ? p.fq : p.fk) + r.at * p.DP;
    if (p.window > 0) {
        liger_row(p, x, t, r.query ? 0.5f : 1, f,
                  (r.query ? p.qr : p.kr) + r.at * p.DP);
    } else {
        const float *raw = r.query ? p.raw_q : p.raw_k;
        const float *b = r.query ? p.bias_q : p.bias_k;
        relu_row(p, raw ? raw + r.at * p.D : x, b ? b + r.head * p.D : NULL, t,
                 r.query ? 1 : p.scale, f, p.DP);
    }
    if (r.query) return;
    for (int e = (int)threadIdx.x % 32; e < p.DP; e += 32) {
        p.v[r.at * p.DP + e] = e < p.D ? s.v[r.from * p.D + e] : 0;
        if (p.window > 0) p.decay[r.at * p.DP + e] = e < p.D ? log_gate(x[e]) : 0;
    }
}

/* y = o + 1/2 window, or o normed. */
static __global__ void __launch_bounds__(32 * WARPS)
    write_kernel(const sti_cuda_linear p)
{
    const sti_cuda_linear_seq s = p.seq[blockIdx.z];
    const row_place r = row_place_of(p, s);
    if (!r.is) return;
    const float *o = p.o + r.at * p.DP;
    float *y = s.y + r.from * p.D, mean = 0, factor = 1;
    const int lane = (int)threadIdx.x % 32;
    if (p.window == 0) norm_of(o, p.D, &mean, &factor);
    for (int e = lane; e < p.D; e += 32)
        y[e] = p.window > 0 ? o[e] + 0.5f * p.win[r.at * p.DP + e]
                            : (o[e] - mean) * factor;
}

/* The last `window` tokens go to their places in the ring; grid.y is kv heads. */
static __global__ void __launch_bounds__(32 * WARPS)
    store_kernel(const sti_cuda_linear p)
{
    const sti_cuda_linear_seq s = p.seq[blockIdx.z];
    const int t = (int)blockIdx.x * WARPS + (int)threadIdx.x / 32, g = (int)blockIdx.y;
    if (t >= s.T || t < s.T - p.window || !s.win_k) return;
    const int slot = (int)((first_position(s) + t) % p.window);
    const size_t from = (((size_t)s.row0 + t) * p.G + g) * p.DP;
    const size_t to = ((size_t)g * p.window + slot) * p.D;
    for (int e = (int)threadIdx.x % 32; e < p.D; e += 32) {
        ring_put(s.win_k, to + e, p.kr[from + e], p.half_kv);
        ring_put(s.win_v, to + e, p.v[from + e], p.half_kv);
    }
}

still_status sti_cuda_linear_features(sti_dev *dev, const sti_cuda_linear *p,
                                      still_error *err)
{
    return launch(dev, "linear attention: features", err, feature_kernel,
                  row_grid(p, p->H + p->G), 32 * WARPS, 0, *p);
}

still_status sti_cuda_linear_write(sti_dev *dev, const sti_cuda_linear *p,
                                   still_error *err)
{
    return launch(dev, "linear attention: outputs", err, write_kernel,
                  row_grid(p, p->H), 32 * WARPS, 0, *p);
}

still_status sti_cuda_linear_store(sti_dev *dev, const sti_cuda_linear *p,
                                   still_error *err)
{
    return launch(dev, "linear attention: window", err, store_kernel, row_grid(p, p->G),
                  32 * WARPS, 0, *p);
}
