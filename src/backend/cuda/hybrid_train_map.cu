/* hybrid_train_map.cu - feature maps of whole sequences and their gradients.
 *
 *   raw = x W;  norm preserved: u = raw |x| / max(|raw|, 1e-6);  u += b
 *   phi = max([softmax(u), softmax(-u)], floor), or max(relu(u), floor)
 *
 * A block takes 64 tokens of a head; raw stays in registers, a row in the four lanes of
 * a quad. x W is a product in three parts: a feature that is cut off by relu or the
 * floor must be cut off where the reference cuts it off. Bounded by bandwidth: a token
 * reads D and writes P numbers. */
#include "backend/cuda/hybrid_train_tile.cuh"

static __device__ const float smallest_norm = 1e-6f; /* of raw, before it divides */

template <int DP> static constexpr size_t map_shared(void)
{
    return (ROWS * (DP + 4) + DP * (DP + 8) + 4) * sizeof(float);
}

/* One side's share of the call. */
typedef struct map_side {
    const float *x, *W, *bias; /* W, bias: of all heads */
    int heads, x_heads;        /* of the map, of x */
    int x_per;                 /* heads of the map that read one head of x */
    float *phi;                /* [B,heads,T,PP] */
    float *dphi;               /* likewise; then draw in the first DP columns */
    float *dx;                 /* NULL: not wanted */
    bool dx_by_token;          /* dx is [B,T,heads,D], else [B,heads,T,DP] */
    bool dx_add;
    float *part_bias; /* or NULL */
} map_side;

/* Both sides go in one launch: heads of q, then heads of k. */
typedef struct map_sides {
    map_side q, k;
} map_sides;

/* Rows g and g + 8 of a warp, in the places of C. */
template <int DP> struct row_map {
    float raw[DP / 8][4];
    float norm_x[2], norm_raw[2], keep[2], bias;
    bool norm_kept[2];
    float top[2], bottom[2], plus[2], minus[2]; /* of softmax(u) and softmax(-u) */

    __device__ __forceinline__ float u(int n, int i) const
    {
        return raw[n][i] * keep[i / 2] + bias;
    }
    __device__ __forceinline__ float softmax(int n, int i) const
    {
        return __expf(u(n, i) - top[i / 2]) * plus[i / 2];
    }
    __device__ __forceinline__ float softmax_of_minus(int n, int i) const
    {
        return __expf(-u(n, i) - bottom[i / 2]) * minus[i / 2];
    }
};

/* Column of element i of tile n. */
STI_DEVICE int column_of(const lane_place &at, int n, int i)
{
    return 8 * n + 2 * at.t + (i & 1);
}

/* x [64][DP + 4] and W [DP][DP + 8] into shared memory. */
template <int DP>
STI_DEVICE void load_map(const sti_cuda_train &p, const map_side &side, float *x,
                         float *W, int b, int head, int first)
{
    load_tile<ROWS, DP>(x, DP + 4, p.D, p.vec, as_it_is(), [&](int r) {
        return first + r < p.T ? side.x + token_at(p, side.x_heads, b,
                                                   head / side.x_per, first + r) *
                                              p.D
                               : (const float *)NULL;
    });
    if (side.W) {
        const float *from = side.W + (size_t)head * p.D * p.F;
        const bool vec = p.F % 4 == 0 && ((uintptr_t)from & 15) == 0;
        load_tile<DP, DP>(W, DP + 8, p.F, vec, as_it_is(), [&](int r) {
            return r < p.D ? from + (size_t)r * p.F : (const float *)NULL;
        });
    }
    __syncthreads();
}

/* raw, norms and the softmaxes' sums. x: at the warp's first row. */
template <int DP>
STI_DEVICE void map_rows(const sti_cuda_train &p, const map_side &side, const float *x,
                         const float *W, int head, const lane_place &at, row_map<DP> *m)
{
    constexpr int N = DP / 8, LD = DP + 4;
    clear_tiles(m->raw);
    if (side.W)
        product_nn_float<N, N>(m->raw, x, LD, W, DP + 8, at.lane);
    else
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int e = column_of(at, n, i);
                m->raw[n][i] = e < p.F ? x[(at.g + i / 2 * 8) * LD + e] : 0;
            }
    m->bias = side.bias ? side.bias[head] : 0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float *row = x + (at.g + 8 * r) * LD;
        float square = 0, raw_square = 0;
#pragma unroll 8
        for (int e = at.t; e < DP; e += 4) square += row[e] * row[e];
#pragma unroll
        for (int n = 0; n < N; n++)
            raw_square += m->raw[n][2 * r] * m->raw[n][2 * r] +
                          m->raw[n][2 * r + 1] * m->raw[n][2 * r + 1];
        m->norm_x[r] = sqrtf(quad_sum_tf32(square));
        const float norm = sqrtf(quad_sum_tf32(raw_square));
        m->norm_kept[r] = norm > smallest_norm;
        m->norm_raw[r] = fmaxf(norm, smallest_norm);
        m->keep[r] = p.norm_preserved ? m->norm_x[r] / m->norm_raw[r] : 1;
    }
    if (p.relu) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = -INFINITY, bottom = -INFINITY, plus = 0, minus = 0;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; i++)
                if (column_of(at, n, i) < p.F) {
                    top = fmaxf(top, m->u(n, i));
                    bottom = fmaxf(bottom, -m->u(n, i));
                }
        m->top[r] = quad_max_tf32(top);
        m->bottom[r] = quad_max_tf32(bottom);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; i++)
                if (column_of(at, n, i) < p.F) {
                    plus += __expf(m->u(n, i) - m->top[r]);
                    minus += __expf(-m->u(n, i) - m->bottom[r]);
                }
        m->plus[r] = 1 / quad_sum_tf32(plus);
        m->minus[r] = 1 / quad_sum_tf32(minus);
    }
}

/* ---- Features ----------------------------------------------------------------------
 */

template <int DP>
static __global__ void __launch_bounds__(THREADS)
    features_kernel(const sti_cuda_train p, const map_sides sides)
{
    const lane_place at = lane_place_of();
    const int first = (int)blockIdx.x * ROWS, b = (int)blockIdx.z;
    const bool keys = (int)blockIdx.y >= sides.q.heads;
    const map_side &side = keys ? sides.k : sides.q;
    const int head = (int)blockIdx.y - (keys ? sides.q.heads : 0);
    float *x = block_memory(), *W = x + ROWS * (DP + 4);
    load_map<DP>(p, side, x, W, b, head, first);
    row_map<DP> m;
    map_rows<DP>(p, side, x + at.warp * 16 * (DP + 4), W, head, at, &m);
#pragma unroll
    for (int n = 0; n < DP / 8; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int t = first + at.warp * 16 + at.g + 8 * r;
            if (t >= p.T) continue;
            float *to = side.phi + row_at(p, side.heads, b, head, t) * p.PP +
                        column_of(at, n, 0);
            float a[2], c[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const bool is = column_of(at, n, i) < p.F;
                const float u = m.u(n, 2 * r + i);
                a[i] = p.relu ? fmaxf(u, 0) : m.softmax(n, 2 * r + i);
                c[i] = p.relu ? 0 : m.softmax_of_minus(n, 2 * r + i);
                a[i] = is ? tf32(fmaxf(a[i], p.feature_floor)) : 0;
                c[i] = is ? tf32(fmaxf(c[i], p.feature_floor)) : 0;
            }
            *(float2 *)to = make_float2(a[0], a[1]);
            if (!p.relu) *(float2 *)(to + DP) = make_float2(c[0], c[1]);
        }
}

/* ---- Gradient ----------------------------------------------------------------------
 */

/* du from dphi, whose rows g and g + 8 are row[0] and row[1] (NULL: zeros); below the
 * floor a feature is a constant. Each half: d softmax(x)_i = p_i (dphi_i - sum p dphi),
 * x = -u in the second. */
template <int DP>
STI_DEVICE void features_backward(const sti_cuda_train &p, const row_map<DP> &m,
                                  const float *const row[2], const lane_place &at,
                                  float (&du)[DP / 8][4])
{
    float mean[2] = {0, 0}, mean_minus[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < DP / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int e = column_of(at, n, i), r = i / 2;
            const bool is = row[r] && e < p.F;
            const float d = is ? row[r][e] : 0;
            if (p.relu) {
                const float u = m.u(n, i);
                du[n][i] = u > 0 && u >= p.feature_floor ? d : 0;
                continue;
            }
            const float plus = m.softmax(n, i), minus = m.softmax_of_minus(n, i);
            const float d_minus = is ? row[r][DP + e] : 0;
            if (plus >= p.feature_floor) mean[r] += plus * d;
            if (minus >= p.feature_floor) mean_minus[r] += minus * d_minus;
        }
    if (p.relu) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        mean[r] = quad_sum_tf32(mean[r]);
        mean_minus[r] = quad_sum_tf32(mean_minus[r]);
    }
#pragma unroll
    for (int n = 0; n < DP / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int e = column_of(at, n, i), r = i / 2;
            const bool is = row[r] && e < p.F;
            const float plus = m.softmax(n, i), minus = m.softmax_of_minus(n, i);
            const float d = is && plus >= p.feature_floor ? row[r][e] : 0;
            const float d_minus = is && minus >= p.feature_floor ? row[r][DP + e] : 0;
            du[n][i] =
                is ? plus * (d - mean[r]) - minus * (d_minus - mean_minus[r]) : 0;
        }
}

/* The block's sum of du, for the bias. warp_sum: 4 floats of shared memory. */
template <int DP>
STI_DEVICE void write_bias(const float (&du)[DP / 8][4], const lane_place &at,
                           float *warp_sum, float *to)
{
    float sum = 0;
#pragma unroll
    for (int n = 0; n < DP / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum += du[n][i];
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (at.lane == 0) warp_sum[at.warp] = sum;
    __syncthreads();
    if (threadIdx.x == 0)
        *to = (warp_sum[0] + warp_sum[1]) + (warp_sum[2] + warp_sum[3]);
}

/* u = raw |x| / |raw|: draw = |x|/|raw| (du - raw (raw.du)/|raw|^2), d|x| = raw.du /
 * |raw|; dx = draw W^T + x d|x| / |x|. At x = 0 the gradient of |x| is 0; under its
 * floor |raw| is a constant. */
template <int DP>
static __global__ void __launch_bounds__(THREADS, DP <= 64 ? 3 : 2)
    map_backward_kernel(const sti_cuda_train p, const map_sides sides)
{
    constexpr int N = DP / 8, LD = DP + 4;
    const lane_place at = lane_place_of();
    const int first = (int)blockIdx.x * ROWS, b = (int)blockIdx.z;
    const bool keys = (int)blockIdx.y >= sides.q.heads;
    const map_side &side = keys ? sides.k : sides.q;
    const int head = (int)blockIdx.y - (keys ? sides.q.heads : 0);
    float *x = block_memory(), *W = x + ROWS * LD, *warp_sum = W + DP * (DP + 8);
    load_map<DP>(p, side, x, W, b, head, first);
    x += at.warp * 16 * LD;
    row_map<DP> m;
    map_rows<DP>(p, side, x, W, head, at, &m);

    const int t0 = first + at.warp * 16 + at.g;
    float *row[2];
#pragma unroll
    for (int r = 0; r < 2; r++)
        row[r] = t0 + 8 * r < p.T
                     ? side.dphi + row_at(p, side.heads, b, head, t0 + 8 * r) * p.PP
                     : NULL;
    float du[N][4];
    const float *const from[2] = {row[0], row[1]};
    features_backward<DP>(p, m, from, at, du);
    if (side.part_bias)
        write_bias<DP>(du, at, warp_sum,
                       side.part_bias +
                           ((size_t)b * gridDim.x + blockIdx.x) * side.heads + head);

    float along[2] = {0, 0};
    if (p.norm_preserved) {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) along[i / 2] += m.raw[n][i] * du[n][i];
#pragma unroll
        for (int r = 0; r < 2; r++) along[r] = quad_sum_tf32(along[r]) / m.norm_raw[r];
    }
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = i / 2;
            const float back =
                m.norm_kept[r] ? m.raw[n][i] * (along[r] / m.norm_raw[r]) : 0;
            du[n][i] = tf32((du[n][i] - back) * m.keep[r]);
        }
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int n = 0; row[r] && n < N; n++)
            *(float2 *)(row[r] + column_of(at, n, 0)) =
                make_float2(du[n][2 * r], du[n][2 * r + 1]);
    if (!side.dx) return;

    float dx[N][4];
    clear_tiles(dx);
    if (side.W)
        product_rt<N, N>(dx, du, W, DP + 8, at.lane);
    else
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) dx[n][i] = du[n][i];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (!row[r]) continue;
        const float turn = m.norm_x[r] > 0 ? along[r] / m.norm_x[r] : 0;
        const int cols = side.dx_by_token ? p.D : DP;
        const bool vec = p.vec || !side.dx_by_token;
        float *to = side.dx_by_token
                        ? side.dx + token_at(p, side.heads, b, head, t0 + 8 * r) * p.D
                        : side.dx + row_at(p, side.heads, b, head, t0 + 8 * r) * DP;
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int e = column_of(at, n, 0);
            const float *own = x + (at.g + 8 * r) * LD + e;
            const float2 was =
                side.dx_add ? read2(to, e, cols, vec) : make_float2(0, 0);
            write2(to, e, cols, vec, was.x + dx[n][2 * r] + turn * own[0],
                   was.y + dx[n][2 * r + 1] + turn * own[1]);
        }
    }
}

/* ---- Launchers ---------------------------------------------------------------------
 */

static map_sides sides_of(const sti_cuda_train *p)
{
    return map_sides{{p->q, p->map_q, p->bias_q, p->H, p->H, 1, p->phi_q, p->dphi_q,
                      p->grad.q, true, p->has_window, p->part_bias_q},
                     {p->k, p->map_k, p->bias_k, p->S, p->G, p->S / p->G, p->phi_k,
                      p->dphi_k, p->dk_fold, false, false, p->part_bias_k}};
}

static dim3 map_grid(const sti_cuda_train *p, const map_sides *s)
{
    return dim3((p->T - 1) / ROWS + 1, s->q.heads + s->k.heads, p->B);
}

still_status sti_train_features(sti_dev *dev, const sti_cuda_train *p, still_error *err)
{
    const map_sides sides = sides_of(p);
#define FEATURES(W)                                                                    \
    launch(dev, "hybrid training: features", err, features_kernel<W>,                  \
           map_grid(p, &sides), THREADS, map_shared<W>(), *p, sides)
    return STI_TRAIN_BY_WIDTH(p->DP, FEATURES);
}

/* A side whose gradient is not wanted has no heads here. */
still_status sti_train_maps(sti_dev *dev, const sti_cuda_train *p, still_error *err)
{
    map_sides sides = sides_of(p);
    if (!p->dphi_q) sides.q.heads = 0;
    if (!p->dphi_k) sides.k.heads = 0;
#define MAP_BACKWARD(W)                                                                \
    launch(dev, "hybrid training: gradient of the maps", err, map_backward_kernel<W>,  \
           map_grid(p, &sides), THREADS, map_shared<W>(), *p, sides)
    return STI_TRAIN_BY_WIDTH(p->DP, MAP_BACKWARD);
}
