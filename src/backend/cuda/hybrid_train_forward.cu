/* hybrid_train_forward.cu - outputs of whole sequences, and, for the backward, what
 * belongs to single queries; see hybrid_train.h.
 *
 *   y = (f sum w_j v_j + a lin g) / den,  lin = phi(q) S,  w_j = exp(l_j - M)
 *   den = f sum w_j + a phi(q).z + eps
 *
 * 64 queries of one head to a block. Softmax keys come in tiles of 64 with a running
 * maximum, then features in tiles of 64, all through two stages of shared memory, in
 * half: the state as means over the folded tokens, softmax features times a unit.
 * Without a window the queries of a span see its tokens pair by pair, phi(q).phi(k).
 * Bounded by shared memory: a warp reads 8 KB of keys for 16 rows a step. */
#include "backend/cuda/hybrid_train_tile.cuh"

/* Tiles of [64][DP] halves: queries (without a window phi(k), for which there is one
 * more), then keys and values, or phi(q) and means, of two stages. Behind them what all
 * threads know: in registers it would push sums out of them. */
template <int DP, bool WINDOW>
static __host__ __device__ constexpr size_t attend_tiles_bytes(void)
{
    return (WINDOW ? 5 : 6) * ROWS * DP * sizeof(uint16_t);
}
template <int DP, bool WINDOW> static constexpr size_t attend_shared(void)
{
    return attend_tiles_bytes<DP, WINDOW>() + sizeof(query_tile);
}

/* Rows g and g + 8 of a warp. */
template <int DP> struct sums {
    float soft[DP / 8][4], lin[DP / 8][4];
    float top[2], sum[2]; /* of softmax weights; top: times log2 e */
    float dot[2];         /* phi(q).z */
};

/* Where a block's tiles are, in shared memory. */
template <int DP> struct attend_tiles {
    uint32_t q, stages;
    static const uint32_t TILE = ROWS * DP * sizeof(uint16_t);
    __device__ __forceinline__ uint32_t first(int step) const /* keys or phi(q) */
    {
        return stages + (uint32_t)(step & 1) * 2 * TILE;
    }
    __device__ __forceinline__ uint32_t second(int step) const /* values or means */
    {
        return first(step) + TILE;
    }
    __device__ __forceinline__ uint32_t phi_k(int step) const
    {
        return step & 1 ? stages + 4 * TILE : q;
    }
};

/* Keys [64 step, 64 step + 64) of the list and their values. Past its end the last key
 * comes again: it is not seen. */
template <int DP>
STI_DEVICE void copy_keys(const sti_cuda_train &p, const query_tile &r,
                          const attend_tiles<DP> &tiles, int step)
{
    const size_t base = row_at(p, p.G, r.b, r.g, 0);
    const auto token = [&](int i) {
        return key_token(p, r.span, r.n_salient, r.start,
                         min(step * ROWS + i, r.keys - 1));
    };
    copy_tile<ROWS, DP>(tiles.first(step),
                        [&](int i) { return p.half_k + (base + token(i)) * DP; });
    copy_tile<ROWS, DP>(tiles.second(step),
                        [&](int i) { return p.half_v + (base + token(i)) * DP; });
}

/* Features [64 f, 64 f + 64): phi(q), the state's means, without a window phi(k). */
template <int DP, bool WINDOW>
STI_DEVICE void copy_features(const sti_cuda_train &p, const query_tile &r,
                              const attend_tiles<DP> &tiles, int step, int f)
{
    const auto features = [&](const uint16_t *phi, int heads, int head, int i) {
        return phi + row_at(p, heads, r.b, head, r.first + min(i, r.n - 1)) * p.PP +
               64 * f;
    };
    copy_tile<ROWS, 64>(tiles.first(step),
                        [&](int i) { return features(p.phi_q, p.H, r.h, i); });
    copy_tile<ROWS, DP>(tiles.second(step), [&](int i) {
        return p.mean + (r.span * p.PP + 64 * f + i) * DP;
    });
    if (!WINDOW)
        copy_tile<ROWS, 64>(tiles.phi_k(step),
                            [&](int i) { return features(p.phi_k, p.S, r.sel, i); });
}

/* Weights of a tile of logits s, relative to the new maximum; all sums move with it.
 * Row g sees the keys before `limit`, row g + 8 eight more. */
template <int DP>
STI_DEVICE void soften(float scale, int limit, const lane_place &at, float (&s)[8][4],
                       sums<DP> *x)
{
    const bool all = limit >= ROWS; /* of row g: then of row g + 8 */
    bool moved = false;
    float keep[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = x->top[r];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float *l = &s[i / 2][2 * r + i % 2];
            const bool seen = all || i / 2 * 8 + 2 * at.t + i % 2 < limit + 8 * r;
            *l = seen ? *l * scale : -INFINITY;
            top = fmaxf(top, *l);
        }
        top = quad_max(top); /* finite: the list's first key is seen by all */
        keep[r] = exp2_fast(x->top[r] - top);
        moved = moved || top > x->top[r];
        x->top[r] = top;
        x->sum[r] *= keep[r];
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float *w = &s[i / 2][2 * r + i % 2];
            *w = exp2_fast(*w - top);
            x->sum[r] += *w;
        }
    }
    if (!__any_sync(0xffffffffu, moved)) return;
#pragma unroll
    for (int n = 0; n < DP / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) x->soft[n][i] *= keep[i / 2];
}

template <int DP>
STI_DEVICE void attend_keys(const sti_cuda_train &p, const query_tile &r,
                            const attend_tiles<DP> &tiles, int step,
                            const lane_place &at, sums<DP> *x)
{
    const uint32_t mine = (uint32_t)at.warp * 16 * DP * 2;
    float s[8][4];
    clear_tiles(s);
    half_nt<8, DP>(s, lane_address<DP>::by16(tiles.q + mine, at.lane).again(),
                   lane_address<DP>::by8(tiles.first(step), at.lane).again());
    const int limit = r.keys - r.n + at.warp * 16 + at.g + 1;
    soften<DP>(p.scale * log2_e, limit - step * ROWS, at, s, x);
    half_rn<DP / 8, 8, DP>(x->soft, s,
                           lane_address<DP>::by16(tiles.second(step), at.lane).again());
}

/* lin += phi(q) mean, dot += phi(q).z of 64 features whose z is given; without a window
 * also f += phi(q) phi(k)^T. */
template <int DP, bool WINDOW>
STI_DEVICE void attend_features(const attend_tiles<DP> &tiles, int step, const float *z,
                                const lane_place &at, sums<DP> *x, float (&f)[8][4])
{
    const lane_address<64> phi =
        lane_address<64>::by16(tiles.first(step) + (uint32_t)at.warp * 16 * 64 * 2,
                               at.lane)
            .again();
    const lane_address<DP> mean =
        lane_address<DP>::by16(tiles.second(step), at.lane).again();
#pragma unroll 1 /* more steps at once would only take registers */
    for (int k = 0; k < 4; k++) {
        uint32_t a[4], b[4];
        load_squares(a, phi.at(0, k));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 u = unpack_half2(a[i]);
            const float2 v = *(const float2 *)(z + 16 * k + i / 2 * 8 + 2 * at.t);
            x->dot[i % 2] += u.x * v.x + u.y * v.y;
        }
#pragma unroll
        for (int n = 0; n < DP / 8; n += 2) {
            load_squares_turned(b, mean.at(16 * k, n / 2));
            mma(x->lin[n], a, b[0], b[1]);
            mma(x->lin[n + 1], a, b[2], b[3]);
        }
    }
    if (!WINDOW)
        half_nt<8, 64>(f, phi, lane_address<64>::by8(tiles.phi_k(step), at.lane));
}

/* Without a window: lin += f v of the pairs of the span, in the unit of phi(q) mean. */
template <int DP>
STI_DEVICE void attend_pairs(const sti_cuda_train &p, const query_tile &r,
                             const attend_tiles<DP> &tiles, float count,
                             const lane_place &at, sums<DP> *x, float (&f)[8][4])
{
    const int row = at.warp * 16 + at.g;
    const float part = 1 / p.phi_unit, over = 1 / count;
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool seen = 8 * n + 2 * at.t + i % 2 <= row + i / 2 * 8;
            f[n][i] = seen ? f[n][i] * part : 0;
            x->dot[i / 2] += f[n][i];
            f[n][i] *= over;
        }
    __syncthreads();
    copy_tile<ROWS, DP>(tiles.stages, [&](int i) {
        return p.half_v + row_at(p, p.G, r.b, r.g, r.first + min(i, r.n - 1)) * DP;
    });
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    half_rn<DP / 8, 8, DP>(x->lin, f, lane_address<DP>::by16(tiles.stages, at.lane));
}

/* A step of features: 64 rows of phi, [64][STEP_LD]. */
STI_DEVICE void load_features(const sti_cuda_train &p, float *to, const uint16_t *phi,
                              int heads, int head, const query_tile &r, int p0)
{
    load_tile<ROWS, STEP>(to, STEP_LD, STEP, true, rounded(), [&](int i) {
        return i < r.n
                   ? features_at(p, phi, row_at(p, heads, r.b, head, r.first + i), p0)
                   : (const uint16_t *)NULL;
    });
}

/* All features of a relu map, which may be of any size, in TF32: lin = phi(q) S, dot =
 * phi(q).z; without a window also the span's own pairs. */
template <int DP, bool WINDOW>
STI_DEVICE void attend_relu(const sti_cuda_train &p, const query_tile &r, float *room,
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
}

/* Keys, then features: steps of one pipeline of two stages. */
template <int DP, bool WINDOW>
STI_DEVICE void attend_all(const sti_cuda_train &p, const query_tile &r,
                           const attend_tiles<DP> &tiles, const lane_place &at,
                           sums<DP> *x)
{
    const int keys = (r.keys + ROWS - 1) / ROWS;
    const int steps = keys + (r.linear && !p.relu ? p.PP / 64 : 0);
    const auto copy = [&](int step) {
        if (step < keys)
            copy_keys<DP>(p, r, tiles, step);
        else if (step < steps)
            copy_features<DP, WINDOW>(p, r, tiles, step, step - keys);
        copy_commit();
    };
    if (WINDOW)
        copy_tile<ROWS, DP>(tiles.q, [&](int i) {
            return p.half_q + row_at(p, p.H, r.b, r.h, r.first + min(i, r.n - 1)) * DP;
        });
    copy(0);
    clear_tiles(x->soft);
#pragma unroll 1
    for (int step = 0; WINDOW && step < keys; step++) {
        copy_wait<0>();
        __syncthreads(); /* this step is here, and all are done with the one before */
        copy(step + 1);
        attend_keys<DP>(p, r, tiles, step, at, x);
    }
    clear_tiles(x->lin); /* not before: the keys' walk needs the registers */
    if (r.linear && p.relu) {
        attend_relu<DP, WINDOW>(p, r, block_memory() + attend_tiles<DP>::TILE / 4, at,
                                x);
    } else if (r.linear) {
        const float count = (float)max(p.n_folded[r.span], 1);
        const float *z = p.state_z + r.span * p.PP;
        float f[8][4];
        clear_tiles(f);
#pragma unroll 1
        for (int step = keys; step < steps; step++) {
            copy_wait<0>();
            __syncthreads();
            copy(step + 1);
            attend_features<DP, WINDOW>(tiles, step, z + 64 * (step - keys), at, x, f);
        }
        if (!WINDOW) attend_pairs<DP>(p, r, tiles, count, at, x, f);
        const float unit = 1 / p.phi_unit, back = count * unit;
#pragma unroll
        for (int n = 0; n < DP / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) x->lin[n][i] *= back;
#pragma unroll
        for (int i = 0; i < 2; i++) x->dot[i] *= unit;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        x->sum[i] = quad_sum(x->sum[i]);
        x->dot[i] = quad_sum(x->dot[i]);
    }
}

/* How a query's two terms are weighed: softmax weights with `soft`, linear ones with
 * `a`. In window scaling exp(l - M) and exp(alpha), both divided by exp(alpha) where
 * that is above 1. A softmax weight over the denominator is 2^(l log2 e - shift). */
typedef struct row_scales {
    float shift, soft, a, den;
} row_scales;

STI_DEVICE row_scales scales_of(const sti_cuda_train &p, const query_tile &r, float top,
                                float sum, float dot)
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
    s.den = fmaxf(p.den_eps + s.soft * sum + s.a * dot, FLT_MIN);
    s.shift += log2f(s.den / factor);
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

/* Of query row i of this lane (is: it exists): dy in half and its unit, a g dn, the
 * gate's gradient and, summed over columns, dn.(num_soft) and dn.(num_lin g). */
template <int DP>
STI_DEVICE float2 write_row(const sti_cuda_train &p, const query_tile &r,
                            const lane_place &at, const sums<DP> &x, int i, int t,
                            bool is, const row_scales &s, float *unit)
{
    const size_t from = token_at(p, p.H, r.b, r.h, t) * p.D;
    const size_t to = row_at(p, p.H, r.b, r.h, t) * DP;
    float largest = 0;
#pragma unroll
    for (int n = 0; is && n < DP / 8; n++) {
        const float2 dy = read2(p.dy + from, 8 * n + 2 * at.t, p.D, p.vec);
        largest = fmaxf(largest, fmaxf(fabsf(dy.x), fabsf(dy.y)));
    }
    *unit = unit_log2(quad_max(largest));
    const float part = unit_part(*unit), over = 1 / s.den;
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
        if (p.half_dy)
            *(uint32_t *)(p.half_dy + to + e) = pack_half2(dy.x * part, dy.y * part);
        if (p.adng)
            *(float2 *)(p.adng + to + e) = make_float2(tf32(adng[0]), tf32(adng[1]));
        if (p.grad.gate_logit)
            write2(p.grad.gate_logit + from, e, p.D, p.vec,
                   adng[0] * lin[0] * (1 - g.x / 2), adng[1] * lin[1] * (1 - g.y / 2));
    }
    return make_float2(quad_sum(dot.x), quad_sum(dot.y));
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
        float unit;
        const float2 dot = write_row<DP>(p, r, at, x, i, t, is, s, &unit);
        const float dden = -(dot.x + dot.y) / s.den;
        if (!is || at.t != 0) continue;
        dwindow += dot.x + dden * s.soft * x.sum[i];
        dalpha += dot.y + dden * s.a * x.dot[i];
        const size_t to = row_at(p, p.H, r.b, r.h, t);
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
    query_tile *shared_tile =
        (query_tile *)(block_memory() + attend_tiles_bytes<DP, WINDOW>() / 4);
    if (threadIdx.x == 0) *shared_tile = query_tile_of(p);
    __syncthreads();
    const query_tile &r = *shared_tile;
    if (r.n <= 0) { /* the last span's tiles past the end */
        if (!BACKWARD || threadIdx.x != 0) return;
        const size_t part = ((size_t)r.b * gridDim.x + blockIdx.x) * p.H + r.h;
        p.part_alpha[part] = p.part_window[part] = 0;
        return;
    }
    const uint32_t memory = shared_address(block_memory());
    const attend_tiles<DP> tiles = {memory, memory + attend_tiles<DP>::TILE};
    sums<DP> x;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        x.top[i] = p.exact && r.linear ? alpha_of(p, r.h) * log2_e : -INFINITY;
        x.sum[i] = x.dot[i] = 0;
    }
    const auto expect_input = [&](const float *y) {
        expect_rows<ROWS>(p.D, [&](int i) {
            return i < r.n ? y + token_at(p, p.H, r.b, r.h, r.first + i) * p.D
                           : (const float *)NULL;
        });
    };
    if (p.gate_logit && r.linear) expect_input(p.gate_logit);
    if (BACKWARD) expect_input(p.dy);
    attend_all<DP, WINDOW>(p, r, tiles, at, &x);
    if (BACKWARD)
        write_rows<DP>(p, r, at, x, block_memory());
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
           attend_shared<W, WINDOW>(), *p)
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
