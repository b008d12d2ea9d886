/* softmax_bwd.cu - the gradient through the softmax keys: the window and the salient
 * tokens. See train.h.
 *
 *   P = f exp(l - M) / den,  ds = P (dy.v - dy.y) / sqrt(D)
 *   dq = ds K                 a block of 64 queries walks over the keys of its list
 *   dK = ds^T Q, dV = P^T dy  a block of 64 keys of a span's list walks over the span's
 *                             queries, of all heads that share the list
 *
 * What a span adds to a key's gradient is left at the key's slot of the span's list.
 * Logits are computed again in both. Products run in half; dy comes in units of its
 * rows, and what keys sum is in the largest unit of the rows they are multiplied with,
 * so that P times a row's unit is at most 1. 64 x 64 tiles come through two stages of
 * shared memory. Bounded by exponentials and by latency. */
#include "backend/cuda/hybrid/train/product.cuh"

/* Columns of C that are worked on at once: where each warp multiplies by itself, half a
 * tile, for registers. */
template <int DP> static __host__ __device__ constexpr int columns(void)
{
    return together<DP>() ? ROWS : ROWS / 2;
}

/* Six tiles of [64][DP] halves: two of the block, two stages of two that it walks over;
 * then, for keys, three numbers of each query of a stage. */
template <int DP> static constexpr size_t softmax_shared(void)
{
    return 6 * ROWS * DP * sizeof(uint16_t) + 6 * ROWS * sizeof(float);
}

/* ---- Queries ------------------------------------------------------------- */

template <int DP>
static __global__ void __launch_bounds__(THREADS, DP <= 64 ? 4 : 2)
    query_kernel(const sti_hybrid_train p)
{
    constexpr int N = DP / 8, COLS = columns<DP>(), M = COLS / 8;
    constexpr uint32_t TILE = ROWS * DP * 2;
    const lane_place at = lane_place_of();
    const query_tile r = query_tile_of(p);
    if (r.n <= 0) return;
    const uint32_t q = shared_address(block_memory()), dy = q + TILE;
    const uint32_t stages = dy + TILE;
    const size_t row0 = row_at(p, p.h.H, r.b, r.h, r.first);
    const size_t base = row_at(p, p.h.G, r.b, r.g, 0);
    const int steps = (r.keys + ROWS - 1) / ROWS;
    const auto copy = [&](int step) {
        const uint32_t to = stages + (uint32_t)(step & 1) * 2 * TILE;
        if (step < steps)
            copy_list<DP>(p, base, r.span, r.n_salient, r.start, r.keys, step * ROWS,
                          to, to + TILE);
        cp_async_commit();
    };
    copy_tile<ROWS, DP>(
        q, [&](int i) { return p.half_q + (row0 + min(i, r.n - 1)) * DP; });
    copy_tile<ROWS, DP>(
        dy, [&](int i) { return p.half_dy + (row0 + min(i, r.n - 1)) * DP; });
    copy(0);
    const int row = at.warp * 16 + at.g; /* and row + 8 */
    float shift[2], delta[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const size_t from = row0 + min(row + 8 * i, r.n - 1);
        shift[i] = p.shift[from];
        delta[i] = p.delta[from];
    }
    const float scale = p.h.scale * log2_e;
    /* The warp's first row sees the keys before this one, the next one more. */
    const int limit = r.keys - r.n + at.warp * 16 + 1;

    float dq[N][4];
    clear_tiles(dq);
    for (int step = 0; step < steps; step++) {
        const uint32_t k = stages + (uint32_t)(step & 1) * 2 * TILE, v = k + TILE;
        tiles_arrive(); /* this step is here, and all are done with the one before */
#pragma unroll 1
        for (int col = 0; col < ROWS; col += COLS) {
            const int k0 = step * ROWS + col;
            const uint32_t skip = (uint32_t)col * DP * 2;
            if (!together<DP>() && col > 0 && limit + 15 <= k0) break; /* sees none */
            float s[M][4], ds[M][4];
            begin_nt<DP>(s, q, k + skip, at);
            begin_nt<DP>(ds, dy, v + skip, at);
            if (col == 0) copy(step + 1);
            wait_products<DP>(s);
            wait_products<DP>(ds);
            if (limit < k0 + COLS) mask(s, limit + at.g - k0, at);
#pragma unroll
            for (int n = 0; n < M; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float P = exp2_fast(fmaf(s[n][i], scale, -shift[i / 2]));
                    ds[n][i] = P * (ds[n][i] + delta[i / 2]);
                }
            multiply_rn<DP>(dq, ds, k + skip, at);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (row + 8 * i >= r.n) continue;
        float *to =
            p.grad.q + token_at(p, p.h.H, r.b, r.h, r.first + row + 8 * i) * p.h.D;
        const float whole = p.h.scale * unit_whole(p.unit[row0 + row + 8 * i]);
#pragma unroll
        for (int n = 0; n < N; n++)
            write2(to, 8 * n + 2 * at.t, p.h.D, p.vec, dq[n][2 * i] * whole,
                   dq[n][2 * i + 1] * whole);
    }
}

/* ---- Keys ---------------------------------------------------------------- */

/* 64 keys [k0, k0 + 64) of the list of span c, and the tiles of queries that may see
 * them: `tiles` of each head, from token `first` to `end`. */
typedef struct list_tile {
    int b, sel, c, k0;
    size_t span;
    int start, n_salient, keys;
    int first, end, tiles;
} list_tile;

STI_DEVICE list_tile list_tile_of(const sti_hybrid_train &p)
{
    list_tile r;
    const int blocks = (p.slots + ROWS - 1) / ROWS;
    r.b = (int)blockIdx.z;
    r.sel = (int)blockIdx.y;
    r.c = p.spans - 1 - (int)blockIdx.x / blocks;
    r.k0 = (int)blockIdx.x % blocks * ROWS;
    r.span = span_at(p, r.b, r.sel, r.c);
    r.start = (r.c > 0 ? r.c - 1 : 0) * p.span;
    r.end = span_end(p, r.c);
    r.n_salient = p.n_salient[r.span];
    r.keys = r.n_salient + r.end - r.start;
    r.first = r.c * p.span;
    const int oldest = r.start + r.k0 - r.n_salient; /* if of the window */
    if (oldest > r.first) r.first += (oldest - r.first) / ROWS * ROWS;
    r.tiles = (r.end - r.first + ROWS - 1) / ROWS;
    return r;
}

/* The largest unit of the rows of dy that a tile of keys is multiplied with. shared: 4
 * floats. */
STI_DEVICE float largest_unit(const sti_hybrid_train &p, const list_tile &r,
                              float *shared)
{
    float most = nothing_log2;
    for (int i = 0; i < p.h.group; i++) {
        const float *unit = p.unit + row_at(p, p.h.H, r.b, r.sel * p.h.group + i, 0);
        for (int t = r.first + (int)threadIdx.x; t < r.end; t += THREADS)
            most = fmaxf(most, unit[t]);
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = most;
    __syncthreads();
    most = fmaxf(fmaxf(shared[0], shared[1]), fmaxf(shared[2], shared[3]));
    __syncthreads();
    return most;
}

/* Queries of a step, on their way: q, dy and, [64] each, shift, delta, unit. */
template <int DP>
STI_DEVICE void copy_queries(const sti_hybrid_train &p, const list_tile &r, int step,
                             uint32_t tiles, uint32_t numbers)
{
    const int h = r.sel * p.h.group + step / r.tiles;
    const int q0 = r.first + step % r.tiles * ROWS, last = r.end - 1 - q0;
    const size_t row0 = row_at(p, p.h.H, r.b, h, q0);
    copy_tile<ROWS, DP>(tiles,
                        [&](int i) { return p.half_q + (row0 + min(i, last)) * DP; });
    copy_tile<ROWS, DP>(tiles + ROWS * DP * 2,
                        [&](int i) { return p.half_dy + (row0 + min(i, last)) * DP; });
    const int i = (int)threadIdx.x % ROWS;
    const size_t from = row0 + min(i, last);
    if (threadIdx.x < ROWS) {
        cp_async4(numbers + (uint32_t)i * 4, p.shift + from);
        cp_async4(numbers + (uint32_t)(2 * ROWS + i) * 4, p.unit + from);
    } else {
        cp_async4(numbers + (uint32_t)(ROWS + i) * 4, p.delta + from);
    }
}

/* Logits of keys (rows) and queries from t0 on that do not see them: those before the
 * key's token `own` and those that are not there. */
template <int M>
STI_DEVICE void hide_queries(float (&w)[M][4], const int (&own)[2], int t0, int end,
                             const lane_place &at)
{
#pragma unroll
    for (int n = 0; n < M; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int t = t0 + 8 * n + 2 * at.t + i % 2;
            if (own[i / 2] > t || t >= end) w[n][i] = -INFINITY;
        }
}

/* Grid: spans x tiles of the list, selection heads, sequences. */
template <int DP>
static __global__ void __launch_bounds__(THREADS, DP <= 64 ? 3 : 2)
    key_kernel(const sti_hybrid_train p)
{
    constexpr int N = DP / 8, COLS = columns<DP>(), M = COLS / 8;
    constexpr uint32_t TILE = ROWS * DP * 2;
    const lane_place at = lane_place_of();
    const list_tile r = list_tile_of(p);
    if (r.k0 >= r.keys) return;
    float *numbers = block_memory() + 6 * TILE / 4;
    const uint32_t k = shared_address(block_memory()), v = k + TILE;
    const uint32_t stages = v + TILE;
    const size_t base = row_at(p, p.h.G, r.b, r.sel * p.h.group / p.h.per_kv, 0);
    const int steps = p.h.group * r.tiles;
    const auto copy = [&](int step) {
        const uint32_t stage = (uint32_t)(step & 1);
        if (step < steps)
            copy_queries<DP>(p, r, step, stages + stage * 2 * TILE,
                             shared_address(numbers) + stage * 3 * ROWS * 4);
        cp_async_commit();
    };
    const float most = largest_unit(p, r, numbers);
    copy_list<DP>(p, base, r.span, r.n_salient, r.start, r.keys, r.k0, k, v);
    copy(0);
    const auto token = [&](int i) {
        return key_token(p, r.span, r.n_salient, r.start, min(r.k0 + i, r.keys - 1));
    };
    const int row = at.warp * 16 + at.g; /* and row + 8 */
    const int own[2] = {token(row), token(row + 8)};
    const int newest = token(at.warp * 16 + 15);
    const float scale = p.h.scale * log2_e;

    float dk[N][4], dv[N][4];
    clear_tiles(dk);
    clear_tiles(dv);
    for (int step = 0; step < steps; step++) {
        const uint32_t q = stages + (uint32_t)(step & 1) * 2 * TILE, dy = q + TILE;
        const float *shift = numbers + (step & 1) * 3 * ROWS, *delta = shift + ROWS;
        const float *unit = delta + ROWS;
        const int q0 = r.first + step % r.tiles * ROWS;
        tiles_arrive(); /* this step is here, and all are done with the one before */
#pragma unroll 1
        for (int col = 0; col < ROWS; col += COLS) {
            const uint32_t skip = (uint32_t)col * DP * 2;
            float w[M][4], ds[M][4];
            begin_nt<DP>(w, k, q + skip, at);
            begin_nt<DP>(ds, v, dy + skip, at);
            if (col == 0) copy(step + 1);
            wait_products<DP>(w);
            wait_products<DP>(ds);
            if (newest > q0 + col || q0 + col + COLS > r.end)
                hide_queries(w, own, q0 + col, r.end, at);
#pragma unroll
            for (int n = 0; n < M; n++) {
                const int c = col + 8 * n + 2 * at.t;
                const float2 less = *(const float2 *)(shift + c);
                const float2 plus = *(const float2 *)(delta + c);
                const float2 part = *(const float2 *)(unit + c);
                const float down[2] = {part.x - most - less.x, part.y - most - less.y};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    w[n][i] = exp2_fast(fmaf(w[n][i], scale, down[i % 2]));
                    ds[n][i] = w[n][i] * (ds[n][i] + (i % 2 ? plus.y : plus.x));
                }
            }
            multiply_rn<DP>(dv, w, dy + skip, at);
            multiply_rn<DP>(dk, ds, q + skip, at);
        }
    }
    const float whole = unit_whole(most);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int slot = r.k0 + row + 8 * i;
        if (slot >= r.keys) continue;
        const size_t to = (r.span * p.slots + slot) * DP + 2 * at.t;
        const float factor = whole * p.h.scale;
#pragma unroll
        for (int n = 0; n < N; n++) {
            *(float2 *)(p.part_k + to + 8 * n) =
                make_float2(dk[n][2 * i] * factor, dk[n][2 * i + 1] * factor);
            *(float2 *)(p.part_v + to + 8 * n) =
                make_float2(dv[n][2 * i] * whole, dv[n][2 * i + 1] * whole);
        }
    }
}

/* ---- Launchers ----------------------------------------------------------- */

still_status sti_hybrid_train_softmax_queries(sti_dev *dev, const sti_hybrid_train *p,
                                              still_error *err)
{
    const dim3 grid(p->spans * p->tiles, p->h.H, p->B);
    return by_width(p, [&](auto W) {
        return launch(dev, "hybrid training: gradient of the queries", err,
                      query_kernel<W>, grid, THREADS, softmax_shared<W>(), *p);
    });
}

still_status sti_hybrid_train_softmax_keys(sti_dev *dev, const sti_hybrid_train *p,
                                           still_error *err)
{
    const dim3 grid(p->spans * ((p->slots + ROWS - 1) / ROWS), p->h.S, p->B);
    return by_width(p, [&](auto W) {
        return launch(dev, "hybrid training: gradient of the softmax keys", err,
                      key_kernel<W>, grid, THREADS, softmax_shared<W>(), *p);
    });
}
