/* hybrid_train_forward.cu - outputs of whole sequences, and, for the backward, what
 * belongs to single queries; see hybrid_train.h.
 *
 *   y = (f sum w_j v_j + a lin g) / den,  lin = phi(q) S,  w_j = exp(l_j - M)
 *   den = f sum w_j + a phi(q).z + eps
 *
 * 64 queries of one head to a block. Softmax keys come in tiles of 64 with a running
 * maximum; then features in steps of 32. Without a window the queries of a span see its
 * tokens pair by pair, phi(q).phi(k). Bounded by shared memory: a warp reads 2 KB of
 * keys for 16 rows a step. */
#include "backend/cuda/hybrid_train_tile.cuh"

template <int DP>
static __host__ __device__ constexpr size_t attend_room(void) /* floats, beside q */
{
    constexpr size_t soft = 2 * ROWS * (DP + 4);
    constexpr size_t linear = 2 * ROWS * STEP_LD + STEP * (DP + 8) + STEP;
    return soft > linear ? soft : linear;
}
template <int DP> static constexpr size_t attend_shared(void)
{
    return (ROWS * (DP + 4) + attend_room<DP>() + ROWS) * sizeof(float);
}

/* Rows g and g + 8 of a warp. */
template <int DP> struct sums {
    float soft[DP / 8][4], lin[DP / 8][4];
    float top[2], sum[2]; /* of softmax weights */
    float dot[2];         /* phi(q).z */
};

/* Keys [k0, k0 + 64) of the list and their values into shared memory. */
template <int DP>
STI_DEVICE void load_keys(const sti_cuda_train &p, const query_tile &r, int k0,
                          float *k, float *v, int *token)
{
    __syncthreads();
    if (threadIdx.x < ROWS)
        token[threadIdx.x] =
            key_token(p, r.span, r.n_salient, r.start, r.keys, k0 + (int)threadIdx.x);
    __syncthreads();
    const size_t base = (size_t)r.b * p.T * p.G + r.g;
    load_tile<ROWS, DP>(k, DP + 4, p.D, p.vec, rounded(), [&](int i) {
        return token[i] == NO_TOKEN ? (const float *)NULL
                                    : p.k + (base + (size_t)token[i] * p.G) * p.D;
    });
    load_tile<ROWS, DP>(v, DP + 4, p.D, p.vec, rounded(), [&](int i) {
        return token[i] == NO_TOKEN ? (const float *)NULL
                                    : p.v + (base + (size_t)token[i] * p.G) * p.D;
    });
    __syncthreads();
}

/* Weights of a tile of logits s, relative to the new maximum; all sums move with it. */
template <int DP>
STI_DEVICE void soften(const sti_cuda_train &p, const int *token, int t0,
                       const lane_place &at, float (&s)[8][4], sums<DP> *x)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = x->top[r];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float *l = &s[i / 2][2 * r + i % 2];
            const int j = token[i / 2 * 8 + 2 * at.t + i % 2];
            *l = j <= t0 + 8 * r ? *l * p.scale : -INFINITY;
            top = fmaxf(top, *l);
        }
        top = quad_max_tf32(top); /* finite: the list's first key is seen by all */
        const float keep = __expf(x->top[r] - top);
        x->top[r] = top;
        x->sum[r] *= keep;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float *w = &s[i / 2][2 * r + i % 2];
            *w = tf32(__expf(*w - top));
            x->sum[r] += *w;
        }
#pragma unroll
        for (int n = 0; n < DP / 8; n++) {
            x->soft[n][2 * r] *= keep;
            x->soft[n][2 * r + 1] *= keep;
        }
    }
}

template <int DP>
STI_DEVICE void attend_softmax(const sti_cuda_train &p, const query_tile &r, float *q,
                               float *room, int *token, const lane_place &at,
                               sums<DP> *x)
{
    constexpr int LD = DP + 4;
    float *k = room, *v = room + ROWS * LD;
    load_tile<ROWS, DP>(q, LD, p.D, p.vec, rounded(), [&](int i) {
        return i < r.n ? p.q + token_at(p, p.H, r.b, r.h, r.first + i) * p.D
                       : (const float *)NULL;
    });
    for (int k0 = 0; k0 < r.keys; k0 += ROWS) {
        load_keys<DP>(p, r, k0, k, v, token);
        float s[8][4];
        clear_tiles(s);
        product_nt<8, DP / 8>(s, q + at.warp * 16 * LD, LD, k, LD, at.lane);
        soften<DP>(p, token, r.first + at.warp * 16 + at.g, at, s, x);
        product_rn<DP / 8, 8>(x->soft, s, v, LD, at.lane);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) x->sum[i] = quad_sum_tf32(x->sum[i]);
}

/* A step of features: 64 rows of phi, [64][STEP_LD]. */
STI_DEVICE void load_features(const sti_cuda_train &p, float *to, const float *phi,
                              int heads, int head, const query_tile &r, int p0)
{
    load_tile<ROWS, STEP>(to, STEP_LD, STEP, true, as_it_is(), [&](int i) {
        return i < r.n ? phi + row_at(p, heads, r.b, head, r.first + i) * p.PP + p0
                       : (const float *)NULL;
    });
}

/* lin = phi(q) S, dot = phi(q).z; without a window also the span's own pairs. */
template <int DP, bool WINDOW>
STI_DEVICE void attend_linear(const sti_cuda_train &p, const query_tile &r, float *room,
                              const lane_place &at, sums<DP> *x)
{
    float *phi = room, *phi_k = phi + ROWS * STEP_LD, *S = phi_k + ROWS * STEP_LD;
    float *z = S + STEP * (DP + 8);
    float f[8][4];
    clear_tiles(f);
    for (int p0 = 0; p0 < p.PP; p0 += STEP) {
        __syncthreads();
        load_features(p, phi, p.phi_q, p.H, r.h, r, p0);
        if (!WINDOW) load_features(p, phi_k, p.phi_k, p.S, r.sel, r, p0);
        load_tile<STEP, DP>(S, DP + 8, DP, true, rounded(), [&](int i) {
            return (const float *)p.state + (r.span * p.PP + p0 + i) * DP;
        });
        if (threadIdx.x < STEP)
            z[threadIdx.x] = p.state_z[r.span * p.PP + p0 + threadIdx.x];
        __syncthreads();
        const float *mine = phi + at.warp * 16 * STEP_LD;
        product_nn<DP / 8, STEP / 8>(x->lin, mine, STEP_LD, S, DP + 8, at.lane);
        if (!WINDOW) product_nt<8, STEP / 8>(f, mine, STEP_LD, phi_k, STEP_LD, at.lane);
#pragma unroll
        for (int i = 0; i < STEP; i += 4) {
            x->dot[0] += mine[at.g * STEP_LD + i + at.t] * z[i + at.t];
            x->dot[1] += mine[(at.g + 8) * STEP_LD + i + at.t] * z[i + at.t];
        }
    }
    if (!WINDOW) {
        const int row = at.warp * 16 + at.g;
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const bool seen = 8 * n + 2 * at.t + i % 2 <= row + i / 2 * 8;
                f[n][i] = seen ? tf32(f[n][i]) : 0;
                x->dot[i / 2] += f[n][i];
            }
        float *v = room;
        __syncthreads();
        load_tile<ROWS, DP>(v, DP + 4, p.D, p.vec, rounded(), [&](int i) {
            return i < r.n ? p.v + token_at(p, p.G, r.b, r.g, r.first + i) * p.D
                           : (const float *)NULL;
        });
        __syncthreads();
        product_rn<DP / 8, 8>(x->lin, f, v, DP + 4, at.lane);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) x->dot[i] = quad_sum_tf32(x->dot[i]);
}

/* How a query's two terms are weighed: softmax weights with `soft`, linear ones with
 * `a`. In window scaling exp(l - M) and exp(alpha), both divided by exp(alpha) where
 * that is above 1. */
typedef struct row_scales {
    float shift, soft, a, den;
} row_scales;

STI_DEVICE row_scales scales_of(const sti_cuda_train &p, const query_tile &r, float top,
                                float sum, float dot)
{
    row_scales s = {top, factor_of(p, r.h), 0, 0};
    if (r.linear) {
        const float alpha = alpha_of(p, r.h);
        s.a = expf(p.exact ? alpha - top : fminf(alpha, 0));
        if (!p.exact) {
            s.shift += fmaxf(alpha, 0);
            s.soft *= expf(-fmaxf(alpha, 0));
        }
    }
    s.den = fmaxf(p.den_eps + s.soft * sum + s.a * dot, FLT_MIN);
    return s;
}

/* The gate of columns e, e + 1: 2 sigmoid(logit). */
STI_DEVICE float2 gate_of(const sti_cuda_train &p, size_t row, int e)
{
    if (!p.gate_logit) return make_float2(1, 1);
    const float2 x = read2(p.gate_logit + row, e, p.D, p.vec);
    return make_float2(2 / (1 + __expf(-x.x)), 2 / (1 + __expf(-x.y)));
}

template <int DP>
STI_DEVICE void write_outputs(const sti_cuda_train &p, const query_tile &r,
                              const lane_place &at, const sums<DP> &x)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = at.warp * 16 + at.g + 8 * i;
        if (row >= r.n) continue;
        const row_scales s = scales_of(p, r, x.top[i], x.sum[i], x.dot[i]);
        const size_t to = token_at(p, p.H, r.b, r.h, r.first + row) * p.D;
        const float part = s.soft / s.den, lin = s.a / s.den;
#pragma unroll
        for (int n = 0; n < DP / 8; n++) {
            const int e = 8 * n + 2 * at.t;
            const float2 g = r.linear ? gate_of(p, to, e) : make_float2(0, 0);
            write2(p.y + to, e, p.D, p.vec,
                   part * x.soft[n][2 * i] + lin * x.lin[n][2 * i] * g.x,
                   part * x.soft[n][2 * i + 1] + lin * x.lin[n][2 * i + 1] * g.y);
        }
    }
}

/* Of query row i of this lane (is: it exists): dn, a g dn, the gate's gradient and,
 * summed over columns, dn.(num_soft) and dn.(num_lin g). */
template <int DP>
STI_DEVICE float2 write_row(const sti_cuda_train &p, const query_tile &r,
                            const lane_place &at, const sums<DP> &x, int i, int t,
                            bool is, const row_scales &s)
{
    const size_t from = token_at(p, p.H, r.b, r.h, t) * p.D;
    const size_t to = row_at(p, p.H, r.b, r.h, t) * DP;
    const float over = 1 / s.den;
    float2 dot = make_float2(0, 0);
#pragma unroll
    for (int n = 0; n < DP / 8; n++) {
        const int e = 8 * n + 2 * at.t;
        if (!is) continue;
        const float2 dy = read2(p.dy + from, e, p.D, p.vec);
        const float2 g = r.linear ? gate_of(p, from, e) : make_float2(0, 0);
        const float dn[2] = {dy.x * over, dy.y * over};
        const float adng[2] = {s.a * g.x * dn[0], s.a * g.y * dn[1]};
        const float lin[2] = {x.lin[n][2 * i], x.lin[n][2 * i + 1]};
        dot.x += s.soft * (dn[0] * x.soft[n][2 * i] + dn[1] * x.soft[n][2 * i + 1]);
        dot.y += adng[0] * lin[0] + adng[1] * lin[1];
        if (p.dn) *(float2 *)(p.dn + to + e) = make_float2(tf32(dn[0]), tf32(dn[1]));
        if (p.adng)
            *(float2 *)(p.adng + to + e) = make_float2(tf32(adng[0]), tf32(adng[1]));
        if (p.grad.gate_logit)
            write2(p.grad.gate_logit + from, e, p.D, p.vec,
                   adng[0] * lin[0] * (1 - g.x / 2), adng[1] * lin[1] * (1 - g.y / 2));
    }
    return make_float2(quad_sum_tf32(dot.x), quad_sum_tf32(dot.y));
}

/* What a tile's queries leave for the rest of the backward, and its share of the
 * gradients of alpha and of the window factor's logit. */
template <int DP>
STI_DEVICE void write_rows(const sti_cuda_train &p, const query_tile &r,
                           const lane_place &at, const sums<DP> &x, float *room)
{
    float dalpha = 0, dwindow = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = at.warp * 16 + at.g + 8 * i, t = r.first + row;
        const bool is = row < r.n;
        const row_scales s = scales_of(p, r, x.top[i], x.sum[i], x.dot[i]);
        const float2 dot = write_row<DP>(p, r, at, x, i, t, is, s);
        const float dden = -(dot.x + dot.y) / s.den;
        if (!is || at.t != 0) continue;
        dwindow += dot.x + dden * s.soft * x.sum[i];
        dalpha += dot.y + dden * s.a * x.dot[i];
        const size_t to = row_at(p, p.H, r.b, r.h, t);
        p.shift[to] = s.shift;
        p.dden[to] = dden;
        p.adden[to] = s.a * dden;
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        dalpha += __shfl_xor_sync(0xffffffffu, dalpha, d);
        dwindow += __shfl_xor_sync(0xffffffffu, dwindow, d);
    }
    __syncthreads();
    if (at.lane == 0) {
        room[at.warp] = dalpha;
        room[4 + at.warp] = dwindow;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    const size_t part = ((size_t)r.b * gridDim.x + blockIdx.x) * p.H + r.h;
    p.part_alpha[part] = (room[0] + room[1]) + (room[2] + room[3]);
    p.part_window[part] =
        ((room[4] + room[5]) + (room[6] + room[7])) * (1 - factor_of(p, r.h));
}

template <int DP, bool BACKWARD, bool WINDOW>
static __global__ void __launch_bounds__(THREADS, DP > 64  ? 2
                                                  : WINDOW ? 4
                                                           : 3)
    attend_kernel(const sti_cuda_train p)
{
    const lane_place at = lane_place_of();
    const query_tile r = query_tile_of(p);
    if (r.n <= 0) { /* the last span's tiles past the end */
        if (!BACKWARD || threadIdx.x != 0) return;
        const size_t part = ((size_t)r.b * gridDim.x + blockIdx.x) * p.H + r.h;
        p.part_alpha[part] = p.part_window[part] = 0;
        return;
    }
    float *q = block_memory(), *room = q + ROWS * (DP + 4);
    int *token = (int *)(room + attend_room<DP>());
    sums<DP> x;
    clear_tiles(x.soft);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        x.top[i] = p.exact && r.linear ? alpha_of(p, r.h) : -INFINITY;
        x.sum[i] = x.dot[i] = 0;
    }
    if (WINDOW) attend_softmax<DP>(p, r, q, room, token, at, &x);
    clear_tiles(x.lin); /* not before: the keys' walk needs the registers */
    if (r.linear) attend_linear<DP, WINDOW>(p, r, room, at, &x);
    if (BACKWARD)
        write_rows<DP>(p, r, at, x, room);
    else
        write_outputs<DP>(p, r, at, x);
}

template <bool BACKWARD, bool WINDOW>
static still_status attend(sti_dev *dev, const sti_cuda_train *p, const char *what,
                           still_error *err)
{
    const dim3 grid(p->spans * p->tiles, p->H, p->B);
#define ATTEND(W)                                                                      \
    launch(dev, what, err, attend_kernel<W, BACKWARD, WINDOW>, grid, THREADS,          \
           attend_shared<W>(), *p)
    return STI_TRAIN_BY_WIDTH(p->DP, ATTEND);
}

still_status sti_train_attend(sti_dev *dev, const sti_cuda_train *p, still_error *err)
{
    const char *what = "hybrid training: outputs";
    return p->has_window ? attend<false, true>(dev, p, what, err)
                         : attend<false, false>(dev, p, what, err);
}

still_status sti_train_rows(sti_dev *dev, const sti_cuda_train *p, still_error *err)
{
    const char *what = "hybrid training: gradients of the queries' sums";
    return p->has_window ? attend<true, true>(dev, p, what, err)
                         : attend<true, false>(dev, p, what, err);
}
