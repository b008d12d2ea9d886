/* rows.cuh - what becomes of the sums of 64 queries: outputs, or what the
 * backward needs of single queries; see forward.cu. */
#ifndef STI_BACKEND_CUDA_HYBRID_TRAIN_ROWS_CUH
#define STI_BACKEND_CUDA_HYBRID_TRAIN_ROWS_CUH

#include "backend/cuda/hybrid/train/tile.cuh"

/* Rows g and g + 8 of a warp. */
template <int DP> struct sums {
    float soft[DP / 8][4], lin[DP / 8][4];
    float top[2], sum[2]; /* of softmax weights; top: times log2 e */
    float dot[2];         /* phi(q).z */
};

/* STILL eq. 11: how a query's two terms are weighed: softmax weights with `soft`,
 * linear ones with `a`. In window scaling exp(l - M) and exp(alpha), both divided by
 * exp(alpha) where that is above 1. A softmax weight over the denominator is 2^(l log2
 * e - shift). */
typedef struct row_scales {
    float shift, soft, a, den;
} row_scales;

STI_DEVICE row_scales scales_of(const sti_hybrid_train &p, const query_tile &r,
                                float top, float sum, float dot)
{
    const float factor = factor_of(p, r.h);
    row_scales s = {top, factor, 0, 0};
    if (r.linear) {
        const float alpha = alpha_of(p, r.h) * log2_e;
        s.a = exp2f(p.exact ? alpha - top : fminf(alpha, 0));
        if (!p.exact) {
            s.shift += fmaxf(alpha, 0);
            s.soft *= exp2f(-fmaxf(alpha, 0));
        }
    }
    s.den = fmaxf(p.h.den_eps + s.soft * sum + s.a * dot, FLT_MIN);
    s.shift += log2f(s.den / factor);
    return s;
}

/* The gates of columns 8 n + 2 t and the one after, n from `first` on: 2
 * sigmoid(logit); without a linear term none is needed. All are read before one is
 * used. */
template <int N>
STI_DEVICE void load_gates(const sti_hybrid_train &p, const query_tile &r, size_t row,
                           int first, const lane_place &at, float2 (&g)[N])
{
    const auto sigmoid2 = [](float x) { return __fdividef(2.0f, 1 + __expf(-x)); };
    const float one = r.linear ? 1.0f : 0.0f;
    if (!p.gate_logit || !r.linear) {
#pragma unroll
        for (int n = 0; n < N; n++) g[n] = make_float2(one, one);
        return;
    }
#pragma unroll
    for (int n = 0; n < N; n++)
        g[n] = read2(p.gate_logit + row, 8 * (first + n) + 2 * at.t, p.h.D, p.vec);
#pragma unroll
    for (int n = 0; n < N; n++) g[n] = make_float2(sigmoid2(g[n].x), sigmoid2(g[n].y));
}

/* STILL eq. 10, the sum of eq. 1: y = (N_SA + N_LA) / (D_SA + D_LA). */
template <int DP>
STI_DEVICE void write_outputs(const sti_hybrid_train &p, const query_tile &r,
                              const lane_place &at, const sums<DP> &x)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = at.warp * 16 + at.g + 8 * i;
        if (row >= r.n) continue;
        const row_scales s = scales_of(p, r, x.top[i], x.sum[i], x.dot[i]);
        const size_t to = token_at(p, p.h.H, r.b, r.h, r.first + row) * p.h.D;
        const float part = s.soft / s.den, lin = s.a / s.den;
#pragma unroll
        for (int first = 0; first < DP / 8; first += 8) {
            float2 g[8];
            load_gates(p, r, to, first, at, g);
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const float *soft = &x.soft[first + n][2 * i];
                const float *line = &x.lin[first + n][2 * i];
                write2(p.y + to, 8 * (first + n) + 2 * at.t, p.h.D, p.vec,
                       part * soft[0] + lin * line[0] * g[n].x,
                       part * soft[1] + lin * line[1] * g[n].y);
            }
        }
    }
}

/* Of query row i of this lane, token t: dy in half and its unit, a g dn, the gate's
 * gradient and, summed over this lane's columns, dn.(num_soft) and dn.(num_lin g). */
template <int DP>
STI_DEVICE float2 write_row(const sti_hybrid_train &p, const query_tile &r,
                            const lane_place &at, const sums<DP> &x, int i, int t,
                            const row_scales &s, float unit)
{
    constexpr int N = 4; /* more at once would not fit beside the sums */
    const size_t from = token_at(p, p.h.H, r.b, r.h, t) * p.h.D;
    const size_t to = row_at(p, p.h.H, r.b, r.h, t) * DP;
    const float part = unit_part(unit), over = 1 / s.den;
    float2 dot = make_float2(0, 0);
#pragma unroll
    for (int first = 0; first < DP / 8; first += N) {
        float2 dys[N], g[N];
#pragma unroll
        for (int n = 0; n < N; n++)
            dys[n] = read2(p.dy + from, 8 * (first + n) + 2 * at.t, p.h.D, p.vec);
        load_gates(p, r, from, first, at, g);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int e = 8 * (first + n) + 2 * at.t;
            const float2 dy = dys[n];
            const float *soft = &x.soft[first + n][2 * i];
            const float *lin = &x.lin[first + n][2 * i];
            const float dn[2] = {dy.x * over, dy.y * over};
            const float adng[2] = {s.a * g[n].x * dn[0], s.a * g[n].y * dn[1]};
            dot.x += s.soft * (dn[0] * soft[0] + dn[1] * soft[1]);
            dot.y += adng[0] * lin[0] + adng[1] * lin[1];
            if (p.half_dy)
                *(uint32_t *)(p.half_dy + to + e) =
                    pack_half2(dy.x * part, dy.y * part);
            if (p.adng)
                *(float2 *)(p.adng + to + e) =
                    make_float2(tf32(adng[0]), tf32(adng[1]));
            if (p.grad.gate_logit)
                write2(p.grad.gate_logit + from, e, p.h.D, p.vec,
                       adng[0] * lin[0] * (1 - g[n].x / 2),
                       adng[1] * lin[1] * (1 - g[n].y / 2));
        }
    }
    return dot;
}

/* The unit of row t of dy; of a row that does not exist, that of zeros. */
template <int DP>
STI_DEVICE float unit_of(const sti_hybrid_train &p, const query_tile &r,
                         const lane_place &at, int t, bool is)
{
    const float *dy = p.dy + token_at(p, p.h.H, r.b, r.h, t) * p.h.D;
    float largest = 0;
#pragma unroll
    for (int n = 0; is && n < DP / 8; n++) {
        const float2 x = read2(dy, 8 * n + 2 * at.t, p.h.D, p.vec);
        largest = fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
    }
    return unit_log2(quad_max(largest));
}

/* What a tile's queries leave for the rest of the backward, and its share of the
 * gradients of alpha and of the window factor's logit. */
template <int DP>
STI_DEVICE void write_rows(const sti_hybrid_train &p, const query_tile &r,
                           const lane_place &at, const sums<DP> &x, float *shared)
{
    float dalpha = 0, dwindow = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = at.warp * 16 + at.g + 8 * i, t = r.first + row;
        const bool is = row < r.n;
        const row_scales s = scales_of(p, r, x.top[i], x.sum[i], x.dot[i]);
        const float unit = unit_of<DP>(p, r, at, t, is);
        float2 dot = make_float2(0, 0);
        if (is) dot = write_row<DP>(p, r, at, x, i, t, s, unit);
        dot = make_float2(quad_sum(dot.x), quad_sum(dot.y));
        const float dden = -(dot.x + dot.y) / s.den;
        if (!is || at.t != 0) continue;
        dwindow += dot.x + dden * s.soft * x.sum[i];
        dalpha += dot.y + dden * s.a * x.dot[i];
        const size_t to = row_at(p, p.h.H, r.b, r.h, t);
        p.shift[to] = s.shift;
        p.delta[to] = -(dot.x + dot.y) * unit_part(unit);
        p.unit[to] = unit;
        p.adden[to] = s.a * dden;
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        dalpha += __shfl_xor_sync(0xffffffffu, dalpha, d);
        dwindow += __shfl_xor_sync(0xffffffffu, dwindow, d);
    }
    __syncthreads();
    if (at.lane == 0) {
        shared[at.warp] = dalpha;
        shared[4 + at.warp] = dwindow;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    const size_t part = ((size_t)r.b * gridDim.x + blockIdx.x) * p.h.H + r.h;
    p.part_alpha[part] = (shared[0] + shared[1]) + (shared[2] + shared[3]);
    p.part_window[part] =
        ((shared[4] + shared[5]) + (shared[6] + shared[7])) * (1 - factor_of(p, r.h));
}

#endif
