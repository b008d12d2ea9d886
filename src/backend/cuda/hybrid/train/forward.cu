/* forward.cu - outputs of whole sequences (STILL eq. 7, 10, 11), and, for the backward,
 * what belongs to single queries; see train.h.
 *
 *   y = (f sum w_j v_j + a lin g) / den,  lin = phi(q) S,  w_j = exp(l_j - M)
 *   den = f sum w_j + a phi(q).z + eps
 *
 * 64 queries of one head to a block. Softmax keys come in tiles of 64 with a running
 * maximum, then features in tiles of 64, all through two stages of shared memory, in
 * half: the state as means over the folded tokens, softmax features times a unit.
 * Without a window the queries of a span see its tokens pair by pair, phi(q).phi(k).
 * Bounded by exponentials, and by what blocks read of keys that others read as well. */
#include "backend/cuda/hybrid/train/product.cuh"
#include "backend/cuda/hybrid/train/rows.cuh"

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

/* Features [64 f, 64 f + 64): phi(q), the state's means, without a window phi(k). */
template <int DP, bool WINDOW>
STI_DEVICE void copy_features(const sti_hybrid_train &p, const query_tile &r,
                              const attend_tiles<DP> &tiles, int step, int f)
{
    const auto features = [&](const uint16_t *phi, int heads, int head, int i) {
        return phi + row_at(p, heads, r.b, head, r.first + min(i, r.n - 1)) * p.PP +
               64 * f;
    };
    copy_tile<ROWS, 64>(tiles.first(step),
                        [&](int i) { return features(p.phi_q, p.h.H, r.h, i); });
    copy_tile<ROWS, DP>(tiles.second(step), [&](int i) {
        return p.mean + (r.span * p.PP + 64 * f + i) * DP;
    });
    if (!WINDOW)
        copy_tile<ROWS, 64>(tiles.phi_k(step),
                            [&](int i) { return features(p.phi_k, p.h.S, r.sel, i); });
}

/* Weights of a tile of logits s, relative to the new maximum; all sums move with it. */
template <int DP> STI_DEVICE void soften(float scale, float (&s)[8][4], sums<DP> *x)
{
    bool moved = false;
    float keep[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < 8; n++)
            top = fmaxf(top, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        /* Finite: the list's first key is seen by all. */
        top = fmaxf(x->top[r], quad_max(top) * scale);
        keep[r] = exp2_fast(x->top[r] - top);
        moved = moved || top > x->top[r];
        x->top[r] = top;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float *w = &s[i / 2][2 * r + i % 2];
            *w = exp2_fast(fmaf(*w, scale, -top));
            sum += *w;
        }
        x->sum[r] = x->sum[r] * keep[r] + sum;
    }
    if (!__any_sync(0xffffffffu, moved)) return;
#pragma unroll
    for (int n = 0; n < DP / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) x->soft[n][i] *= keep[i / 2];
}

/* A tile of keys; meanwhile `copy` fetches the next. */
template <int DP, typename Copy>
STI_DEVICE void attend_keys(const sti_hybrid_train &p, const query_tile &r,
                            const attend_tiles<DP> &tiles, int step,
                            const lane_place &at, sums<DP> *x, Copy copy)
{
    float s[8][4];
    begin_nt<DP>(s, tiles.q, tiles.first(step), at);
    copy(step + 1);
    wait_products<DP>(s);
    const int limit = r.keys - r.n + at.warp * 16 + 1 - step * ROWS; /* of g = 0 */
    if (limit < ROWS) mask(s, limit + at.g, at);
    soften<DP>(p.h.scale * log2_e, s, x);
    multiply_rn<DP>(x->soft, s, tiles.second(step), at);
}

/* lin += phi(q) mean, dot += phi(q).z of 64 features whose z is given; without a window
 * also f += phi(q) phi(k)^T. */
template <int DP, bool WINDOW>
STI_DEVICE void attend_features(const attend_tiles<DP> &tiles, int step, const float *z,
                                const lane_place &at, sums<DP> *x, float (&f)[8][4])
{
    begin_nn<DP>(x->lin, tiles.first(step), tiles.second(step), at);
    const lane_address<64> phi =
        lane_address<64>::by16(tiles.first(step) + (uint32_t)at.warp * 16 * 64 * 2,
                               at.lane)
            .opaque();
#pragma unroll 1 /* more steps at once would only take registers */
    for (int k = 0; k < 4; k++) {
        uint32_t a[4];
        ldmatrix_x4(a, phi.at(0, k));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 u = unpack_half2(a[i]);
            const float2 v = *(const float2 *)(z + 16 * k + i / 2 * 8 + 2 * at.t);
            x->dot[i % 2] += u.x * v.x + u.y * v.y;
        }
    }
    wait_products<DP>(x->lin);
    if (!WINDOW)
        half_nt<8, 64>(f, phi, lane_address<64>::by8(tiles.phi_k(step), at.lane));
}

/* Without a window: lin += f v of the pairs of the span, in the unit of phi(q) mean. */
template <int DP>
STI_DEVICE void attend_pairs(const sti_hybrid_train &p, const query_tile &r,
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
        return p.half_v + row_at(p, p.h.G, r.b, r.g, r.first + min(i, r.n - 1)) * DP;
    });
    cp_async_commit();
    tiles_arrive();
    multiply_rn<DP>(x->lin, f, tiles.stages, at);
}

/* A step of features: 64 rows of phi, [64][STEP_LD]. */
STI_DEVICE void load_features(const sti_hybrid_train &p, float *to, const uint16_t *phi,
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
STI_DEVICE void attend_relu(const sti_hybrid_train &p, const query_tile &r,
                            float *shared, const lane_place &at, sums<DP> *x)
{
    float *phi = shared, *phi_k = phi + ROWS * STEP_LD, *S = phi_k + ROWS * STEP_LD;
    float *z = S + STEP * (DP + 8);
    float f[8][4];
    clear_tiles(f);
    for (int p0 = 0; p0 < p.PP; p0 += STEP) {
        __syncthreads();
        load_features(p, phi, p.phi_q, p.h.H, r.h, r, p0);
        if (!WINDOW) load_features(p, phi_k, p.phi_k, p.h.S, r.sel, r, p0);
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
        float *v = shared;
        __syncthreads();
        load_tile<ROWS, DP>(v, DP + 4, p.h.D, p.vec, rounded(), [&](int i) {
            return i < r.n ? p.v + token_at(p, p.h.G, r.b, r.g, r.first + i) * p.h.D
                           : (const float *)NULL;
        });
        __syncthreads();
        product_rn<DP / 8, 8>(x->lin, f, v, DP + 4, at.lane);
    }
}

/* Keys, then features: steps of one pipeline of two stages. */
template <int DP, bool WINDOW>
STI_DEVICE void attend_all(const sti_hybrid_train &p, const query_tile &r,
                           const attend_tiles<DP> &tiles, const lane_place &at,
                           sums<DP> *x)
{
    const int keys = (r.keys + ROWS - 1) / ROWS;
    const int steps = keys + (r.linear && !p.relu ? p.PP / 64 : 0);
    const size_t base = row_at(p, p.h.G, r.b, r.g, 0);
    const auto copy = [&](int step) {
        if (step < keys)
            copy_list<DP>(p, base, r.span, r.n_salient, r.start, r.keys, step * ROWS,
                          tiles.first(step), tiles.second(step));
        else if (step < steps)
            copy_features<DP, WINDOW>(p, r, tiles, step, step - keys);
        cp_async_commit();
    };
    if (WINDOW)
        copy_tile<ROWS, DP>(tiles.q, [&](int i) {
            return p.half_q +
                   row_at(p, p.h.H, r.b, r.h, r.first + min(i, r.n - 1)) * DP;
        });
    copy(0);
    clear_tiles(x->soft);
#pragma unroll 1
    for (int step = 0; WINDOW && step < keys; step++) {
        tiles_arrive(); /* this step is here, and all are done with the one before */
        attend_keys<DP>(p, r, tiles, step, at, x, copy);
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
            tiles_arrive();
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

template <int DP, bool BACKWARD, bool WINDOW>
static __global__ void __launch_bounds__(THREADS, DP > 64  ? 2
                                                  : WINDOW ? 4
                                                           : 3)
    attend_kernel(const sti_hybrid_train p)
{
    const lane_place at = lane_place_of();
    query_tile *shared_tile =
        (query_tile *)(block_memory() + attend_tiles_bytes<DP, WINDOW>() / 4);
    if (threadIdx.x == 0) *shared_tile = query_tile_of(p);
    __syncthreads();
    const query_tile &r = *shared_tile;
    if (r.n <= 0) { /* the last span's tiles past the end */
        if (!BACKWARD || threadIdx.x != 0) return;
        const size_t part = ((size_t)r.b * gridDim.x + blockIdx.x) * p.h.H + r.h;
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
    const auto prefetch_input = [&](const float *y) {
        prefetch_rows<ROWS>(p.h.D, [&](int i) {
            return i < r.n ? y + token_at(p, p.h.H, r.b, r.h, r.first + i) * p.h.D
                           : (const float *)NULL;
        });
    };
    if (p.gate_logit && r.linear) prefetch_input(p.gate_logit);
    if (BACKWARD) prefetch_input(p.dy);
    attend_all<DP, WINDOW>(p, r, tiles, at, &x);
    if (BACKWARD)
        write_rows<DP>(p, r, at, x, block_memory());
    else
        write_outputs<DP>(p, r, at, x);
}

template <bool BACKWARD, bool WINDOW>
static still_status attend(sti_dev *dev, const sti_hybrid_train *p, const char *what,
                           still_error *err)
{
    const dim3 grid(p->spans * p->tiles, p->h.H, p->B);
    return by_width(p, [&](auto W) {
        return launch(dev, what, err, attend_kernel<W, BACKWARD, WINDOW>, grid, THREADS,
                      attend_shared<W, WINDOW>(), *p);
    });
}

still_status sti_hybrid_train_attend(sti_dev *dev, const sti_hybrid_train *p,
                                     still_error *err)
{
    const char *what = "hybrid training: outputs";
    return p->h.has_window ? attend<false, true>(dev, p, what, err)
                           : attend<false, false>(dev, p, what, err);
}

still_status sti_hybrid_train_rows(sti_dev *dev, const sti_hybrid_train *p,
                                   still_error *err)
{
    const char *what = "hybrid training: gradients of the queries' sums";
    return p->h.has_window ? attend<true, true>(dev, p, what, err)
                           : attend<true, false>(dev, p, what, err);
}
