/* hybrid_train_softmax.cu - the gradient through the softmax keys: the window and the
 * salient tokens. See hybrid_train.h.
 *
 *   w = f exp(l - shift),  ds = w (dn.v + dden) / sqrt(D)
 *   dq = ds K                 a block of 64 queries walks over the keys of its list
 *   dK = ds^T Q, dV = w^T dn  a block of 64 keys of a span's list walks over the span's
 *                             queries, of all heads that share the list
 *
 * What a span adds to a key's gradient is left at the key's slot of the span's list.
 * Logits are computed again in both. Bounded by tensor cores and shared memory. */
#include "backend/cuda/hybrid_train_tile.cuh"

/* Keys of the tiles that queries walk over, and queries of those that keys walk over:
 * as many as leave room for several blocks in shared memory and registers. */
template <int DP> static __host__ __device__ constexpr int key_rows(void)
{
    return DP <= 64 ? 64 : 32;
}
template <int DP> static __host__ __device__ constexpr int query_rows(void)
{
    return DP <= 32 ? 64 : 32;
}
template <int DP> static constexpr size_t softmax_shared(int walked)
{
    return (size_t)(2 * (ROWS + walked) * (DP + 4) + 3 * ROWS) * sizeof(float);
}

/* ---- Queries -----------------------------------------------------------------------
 */

template <int DP>
static __global__ void __launch_bounds__(THREADS, DP <= 64 ? 3 : 2)
    query_kernel(const sti_cuda_train p)
{
    constexpr int N = DP / 8, LD = DP + 4, KEYS = key_rows<DP>(), M = KEYS / 8;
    const lane_place at = lane_place_of();
    const query_tile r = query_tile_of(p);
    if (r.n <= 0) return;
    float *q = block_memory(), *dn = q + ROWS * LD, *k = dn + ROWS * LD;
    float *v = k + KEYS * LD;
    int *token = (int *)(v + KEYS * LD);
    const size_t row0 = row_at(p, p.H, r.b, r.h, r.first);
    const size_t base = (size_t)r.b * p.T * p.G + r.g;
    const float factor = factor_of(p, r.h);
    load_tile<ROWS, DP>(q, LD, p.D, p.vec, rounded(), [&](int i) {
        return i < r.n ? p.q + token_at(p, p.H, r.b, r.h, r.first + i) * p.D
                       : (const float *)NULL;
    });
    load_tile<ROWS, DP>(dn, LD, DP, true, as_it_is(), [&](int i) {
        return i < r.n ? (const float *)p.dn + (row0 + i) * DP : (const float *)NULL;
    });
    float shift[2], dden[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = at.warp * 16 + at.g + 8 * i;
        shift[i] = row < r.n ? p.shift[row0 + row] : INFINITY; /* no weight */
        dden[i] = row < r.n ? p.dden[row0 + row] : 0;
    }

    float dq[N][4];
    clear_tiles(dq);
    for (int k0 = 0; k0 < r.keys; k0 += KEYS) {
        __syncthreads();
        if (threadIdx.x < KEYS)
            token[threadIdx.x] = key_token(p, r.span, r.n_salient, r.start, r.keys,
                                           k0 + (int)threadIdx.x);
        __syncthreads();
        load_tile<KEYS, DP>(k, LD, p.D, p.vec, rounded(), [&](int i) {
            return token[i] == NO_TOKEN ? (const float *)NULL
                                        : p.k + (base + (size_t)token[i] * p.G) * p.D;
        });
        load_tile<KEYS, DP>(v, LD, p.D, p.vec, rounded(), [&](int i) {
            return token[i] == NO_TOKEN ? (const float *)NULL
                                        : p.v + (base + (size_t)token[i] * p.G) * p.D;
        });
        __syncthreads();
        float s[M][4], ds[M][4];
        clear_tiles(s);
        clear_tiles(ds);
        product_nt<M, N>(s, q + at.warp * 16 * LD, LD, k, LD, at.lane);
        product_nt<M, N>(ds, dn + at.warp * 16 * LD, LD, v, LD, at.lane);
#pragma unroll
        for (int n = 0; n < M; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int t = r.first + at.warp * 16 + at.g + i / 2 * 8;
                const bool seen = token[8 * n + 2 * at.t + i % 2] <= t;
                const float w =
                    seen ? factor * __expf(s[n][i] * p.scale - shift[i / 2]) : 0;
                ds[n][i] = tf32(w * (ds[n][i] + dden[i / 2]) * p.scale);
            }
        product_rn<N, M>(dq, ds, k, LD, at.lane);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = at.warp * 16 + at.g + 8 * i;
        if (row >= r.n) continue;
        float *to = p.grad.q + token_at(p, p.H, r.b, r.h, r.first + row) * p.D;
#pragma unroll
        for (int n = 0; n < N; n++)
            write2(to, 8 * n + 2 * at.t, p.D, p.vec, dq[n][2 * i], dq[n][2 * i + 1]);
    }
}

/* ---- Keys --------------------------------------------------------------------------
 */

/* Queries [first, first + QUERIES) of head h before `end`: q, dn, shift, dden. */
template <int DP, int QUERIES>
STI_DEVICE void load_queries(const sti_cuda_train &p, int b, int h, int first, int end,
                             float *q, float *dn, float *shift, float *dden)
{
    const size_t row0 = row_at(p, p.H, b, h, first);
    if (threadIdx.x < QUERIES) {
        const bool is = first + (int)threadIdx.x < end;
        shift[threadIdx.x] = is ? p.shift[row0 + threadIdx.x] : INFINITY;
        dden[threadIdx.x] = is ? p.dden[row0 + threadIdx.x] : 0;
    }
    load_tile<QUERIES, DP>(q, DP + 4, p.D, p.vec, rounded(), [&](int i) {
        return first + i < end ? p.q + token_at(p, p.H, b, h, first + i) * p.D
                               : (const float *)NULL;
    });
    load_tile<QUERIES, DP>(dn, DP + 4, DP, true, as_it_is(), [&](int i) {
        return first + i < end ? (const float *)p.dn + (row0 + i) * DP
                               : (const float *)NULL;
    });
}

/* Grid: spans x tiles of the list, selection heads, sequences. */
template <int DP>
static __global__ void __launch_bounds__(THREADS, DP <= 64 ? 3 : 2)
    key_kernel(const sti_cuda_train p)
{
    constexpr int N = DP / 8, LD = DP + 4, QUERIES = query_rows<DP>(), M = QUERIES / 8;
    const lane_place at = lane_place_of();
    const int tiles = (p.slots + ROWS - 1) / ROWS;
    const int c = p.spans - 1 - (int)blockIdx.x / tiles;
    const int k0 = (int)blockIdx.x % tiles * ROWS;
    const int sel = (int)blockIdx.y, b = (int)blockIdx.z;
    const size_t span = span_at(p, b, sel, c);
    const int start = (c > 0 ? c - 1 : 0) * p.span, end = span_end(p, c);
    const int n_salient = p.n_salient[span], keys = n_salient + end - start;
    if (k0 >= keys) return;

    float *k = block_memory(), *v = k + ROWS * LD, *q = v + ROWS * LD;
    float *dn = q + QUERIES * LD, *shift = dn + QUERIES * LD, *dden = shift + ROWS;
    int *token = (int *)(dden + ROWS);
    if (threadIdx.x < ROWS)
        token[threadIdx.x] =
            key_token(p, span, n_salient, start, keys, k0 + (int)threadIdx.x);
    __syncthreads();
    const size_t base = (size_t)b * p.T * p.G + sel * p.per_sel / p.per_kv;
    load_tile<ROWS, DP>(k, LD, p.D, p.vec, rounded(), [&](int i) {
        return token[i] == NO_TOKEN ? (const float *)NULL
                                    : p.k + (base + (size_t)token[i] * p.G) * p.D;
    });
    load_tile<ROWS, DP>(v, LD, p.D, p.vec, rounded(), [&](int i) {
        return token[i] == NO_TOKEN ? (const float *)NULL
                                    : p.v + (base + (size_t)token[i] * p.G) * p.D;
    });
    const int row = at.warp * 16 + at.g; /* and row + 8 */
    const int own[2] = {token[row], token[row + 8]};
    const int oldest = token[0];

    float dk[N][4], dv[N][4];
    clear_tiles(dk);
    clear_tiles(dv);
    for (int h = sel * p.per_sel; h < (sel + 1) * p.per_sel; h++) {
        const float factor = factor_of(p, h);
        for (int q0 = c * p.span; q0 < end; q0 += QUERIES) {
            if (q0 + QUERIES <= oldest) continue; /* none of them sees a key */
            __syncthreads();
            load_queries<DP, QUERIES>(p, b, h, q0, end, q, dn, shift, dden);
            __syncthreads();
            float w[M][4], ds[M][4];
            clear_tiles(w);
            clear_tiles(ds);
            product_nt<M, N>(w, k + at.warp * 16 * LD, LD, q, LD, at.lane);
            product_nt<M, N>(ds, v + at.warp * 16 * LD, LD, dn, LD, at.lane);
#pragma unroll
            for (int n = 0; n < M; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int col = 8 * n + 2 * at.t + i % 2;
                    const bool seen = own[i / 2] <= q0 + col;
                    const float x =
                        seen ? factor * __expf(w[n][i] * p.scale - shift[col]) : 0;
                    w[n][i] = tf32(x);
                    ds[n][i] = tf32(x * (ds[n][i] + dden[col]) * p.scale);
                }
            product_rn<N, M>(dv, w, dn, LD, at.lane);
            product_rn<N, M>(dk, ds, q, LD, at.lane);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int slot = k0 + row + 8 * i;
        if (slot >= keys) continue;
        const size_t to = (span * p.slots + slot) * DP + 2 * at.t;
#pragma unroll
        for (int n = 0; n < N; n++) {
            *(float2 *)(p.part_k + to + 8 * n) =
                make_float2(dk[n][2 * i], dk[n][2 * i + 1]);
            *(float2 *)(p.part_v + to + 8 * n) =
                make_float2(dv[n][2 * i], dv[n][2 * i + 1]);
        }
    }
}

/* ---- Launchers ---------------------------------------------------------------------
 */

still_status sti_train_softmax_queries(sti_dev *dev, const sti_cuda_train *p,
                                       still_error *err)
{
    const dim3 grid(p->spans * p->tiles, p->H, p->B);
#define QUERIES_(W)                                                                    \
    launch(dev, "hybrid training: gradient of the queries", err, query_kernel<W>,      \
           grid, THREADS, softmax_shared<W>(key_rows<W>()), *p)
    return STI_TRAIN_BY_WIDTH(p->DP, QUERIES_);
}

still_status sti_train_softmax_keys(sti_dev *dev, const sti_cuda_train *p,
                                    still_error *err)
{
    const dim3 grid(p->spans * ((p->slots + ROWS - 1) / ROWS), p->S, p->B);
#define KEYS_(W)                                                                       \
    launch(dev, "hybrid training: gradient of the softmax keys", err, key_kernel<W>,   \
           grid, THREADS, softmax_shared<W>(query_rows<W>()), *p)
    return STI_TRAIN_BY_WIDTH(p->DP, KEYS_);
}
