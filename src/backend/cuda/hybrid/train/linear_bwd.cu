/* linear_bwd.cu - the gradient through the linear state, up to the features.
 *
 *   queries  dphi(q_t) = S_c (a g dn)_t + (a dden)_t z_c
 *   keys     dphi(k_j) = dS_f v_j + dz_f,  dv_j = dS_f^T phi(k_j);  span f folds j
 *
 * Without a window the queries of a span also see its tokens one by one, j <= t:
 *   df_tj = (a g dn)_t.v_j + (a dden)_t,  f_tj = phi(q_t).phi(k_j)
 *   dphi(q_t) += df_tj phi(k_j),  dphi(k_j) += df_tj phi(q_t),  dv_j += f_tj (a g dn)_t
 *
 * Features go in steps of 32. Bounded by reading states and writing dphi. */
#include "backend/cuda/hybrid/train/tile.cuh"

/* Zeros the places of C (rows are `row`, columns `col` of the span) that are not seen,
 * rounds the others. */
template <bool ROWS_ARE_KEYS>
STI_DEVICE void hide(float (&f)[8][4], const lane_place &at)
{
    const int row = at.warp * 16 + at.g;
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = row + i / 2 * 8, col = 8 * n + 2 * at.t + i % 2;
            f[n][i] = (ROWS_ARE_KEYS ? r <= col : col <= r) ? tf32(f[n][i]) : 0;
        }
}

/* 64 rows [first, first + n) of a g dn, and of a step of features. */
template <int DP>
STI_DEVICE void load_adng(const sti_hybrid_train &p, float *to, int b, int h, int first,
                          int n)
{
    load_tile<ROWS, DP>(to, DP + 4, DP, true, as_it_is(), [&](int i) {
        return i < n ? (const float *)p.adng + row_at(p, p.h.H, b, h, first + i) * DP
                     : (const float *)NULL;
    });
}
STI_DEVICE void load_phi(const sti_hybrid_train &p, float *to, const uint16_t *phi,
                         int heads, int b, int head, int first, int n, int p0)
{
    load_tile<ROWS, STEP>(
        to, STEP_LD, STEP, p.relu, rounded_part{1 / p.phi_unit}, [&](int i) {
            return i < n ? features_at(p, phi, row_at(p, heads, b, head, first + i), p0)
                         : (const uint16_t *)NULL;
        });
}

/* Values of `n` tokens of kv head g, which span c folds. */
template <int DP, typename Token>
STI_DEVICE void load_values(const sti_hybrid_train &p, float *to, int b, int g, int c,
                            int n, Token token)
{
    load_tile<ROWS, DP>(to, DP + 4, p.h.D, p.vec, rounded(), [&](int i) {
        if (i >= n) return (const float *)NULL;
        const bool stored = p.stored_v && was_salient(p, c, token(i));
        return (stored ? (const float *)p.stored_v : p.v) +
               token_at(p, p.h.G, b, g, token(i)) * p.h.D;
    });
}

/* ---- Queries ------------------------------------------------------------- */

/* a g dn, a step of S, of z; without a window also values and a step of phi(k). */
template <int DP> static size_t query_shared(bool window)
{
    const int always = (ROWS + STEP) * (DP + 4) + STEP;
    const int pairs = ROWS * (DP + 4) + ROWS * STEP_LD;
    return (always + (window ? 0 : pairs)) * sizeof(float);
}

template <int DP, bool WINDOW>
static __global__ void __launch_bounds__(THREADS, WINDOW     ? 6
                                                  : DP <= 64 ? 3
                                                             : 2)
    query_kernel(const sti_hybrid_train p)
{
    constexpr int LD = DP + 4;
    const lane_place at = lane_place_of();
    const query_tile r = query_tile_of(p);
    if (r.n <= 0) return;
    float *adng = block_memory(), *S = adng + ROWS * LD, *z = S + STEP * LD;
    float *v = z + STEP, *phi = v + ROWS * LD; /* without a window */
    const size_t row0 = row_at(p, p.h.H, r.b, r.h, r.first);
    const int row = at.warp * 16 + at.g;
    float adden[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
        adden[i] = row + 8 * i < r.n ? p.adden[row0 + row + 8 * i] : 0;
    load_adng<DP>(p, adng, r.b, r.h, r.first, r.n);

    float df[8][4];
    if (!WINDOW) {
        load_values<DP>(p, v, r.b, r.g, r.c, r.n, [&](int i) { return r.first + i; });
        __syncthreads();
        clear_tiles(df);
        product_nt<8, DP / 8>(df, adng + at.warp * 16 * LD, LD, v, LD, at.lane);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) df[n][i] += adden[i / 2];
        hide<false>(df, at);
    }
    for (int p0 = 0; p0 < p.PP; p0 += STEP) {
        float dphi[STEP / 8][4];
        clear_tiles(dphi);
        if (r.linear) {
            __syncthreads();
            load_tile<STEP, DP>(S, LD, DP, true, rounded(), [&](int i) {
                return (const float *)p.state + (r.span * p.PP + p0 + i) * DP;
            });
            if (threadIdx.x < STEP)
                z[threadIdx.x] = p.state_z[r.span * p.PP + p0 + threadIdx.x];
            if (!WINDOW) load_phi(p, phi, p.phi_k, p.h.S, r.b, r.sel, r.first, r.n, p0);
            __syncthreads();
            product_nt<STEP / 8, DP / 8>(dphi, adng + at.warp * 16 * LD, LD, S, LD,
                                         at.lane);
            if (!WINDOW) product_rn<STEP / 8, 8>(dphi, df, phi, STEP_LD, at.lane);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (row + 8 * i >= r.n) continue;
            float *to = p.dphi_q + (row0 + row + 8 * i) * p.PP + p0 + 2 * at.t;
#pragma unroll
            for (int n = 0; n < STEP / 8; n++) {
                const int e = 8 * n + 2 * at.t;
                const float zx = r.linear ? z[e] : 0, zy = r.linear ? z[e + 1] : 0;
                *(float2 *)(to + 8 * n) = make_float2(
                    dphi[n][2 * i] + adden[i] * zx, dphi[n][2 * i + 1] + adden[i] * zy);
            }
        }
    }
}

still_status sti_hybrid_train_linear_queries(sti_dev *dev, const sti_hybrid_train *p,
                                             still_error *err)
{
    const dim3 grid(p->spans * p->tiles, p->h.H, p->B);
    return by_width(p, [&](auto W) {
        return launch(dev, "hybrid training: gradient of the queries' features", err,
                      p->h.has_window ? query_kernel<W, true> : query_kernel<W, false>,
                      grid, THREADS, query_shared<W>(p->h.has_window), *p);
    });
}

/* ---- Keys ---------------------------------------------------------------- */

/* Values, a step of dS, of dz and of phi(k), tokens; without a window also the queries'
 * a g dn, a step of their phi(q), and a dden. */
template <int DP> static size_t key_shared(bool window)
{
    const int always = (ROWS + STEP) * (DP + 4) + STEP + ROWS * STEP_LD + ROWS;
    const int pairs = ROWS * (DP + 4) + ROWS * STEP_LD + ROWS;
    return (always + (window ? 0 : pairs)) * sizeof(float);
}

/* Keys of a block. */
typedef struct key_tile {
    int b, sel, c, n;
    size_t span;
    const int *token; /* [64] in shared memory */
} key_tile;

STI_DEVICE float *dphi_row(const sti_hybrid_train &p, const key_tile &r, int row)
{
    return p.dphi_k + row_at(p, p.h.S, r.b, r.sel, r.token[row]) * p.PP;
}

/* Through the state: dphi written, dv begun if it is wanted. v: the keys' values. */
template <int DP>
STI_DEVICE void keys_through_state(const sti_hybrid_train &p, const key_tile &r,
                                   const float *v, float *dS, float *phi, float *dz,
                                   const lane_place &at, float (&dv)[DP / 8][4])
{
    constexpr int LD = DP + 4;
    const int row = at.warp * 16 + at.g;
    for (int p0 = 0; p0 < p.PP; p0 += STEP) {
        __syncthreads();
        load_tile<STEP, DP>(dS, LD, DP, true, rounded(), [&](int i) {
            return (const float *)p.dstate + (r.span * p.PP + p0 + i) * DP;
        });
        if (p.dv_fold)
            load_tile<ROWS, STEP>(
                phi, STEP_LD, STEP, p.relu, rounded_part{1 / p.phi_unit}, [&](int i) {
                    return i < r.n
                               ? features_at(p, p.phi_k,
                                             row_at(p, p.h.S, r.b, r.sel, r.token[i]),
                                             p0)
                               : (const uint16_t *)NULL;
                });
        if (threadIdx.x < STEP)
            dz[threadIdx.x] = p.dstate_z[r.span * p.PP + p0 + threadIdx.x];
        __syncthreads();
        float dphi[STEP / 8][4];
        clear_tiles(dphi);
        product_nt<STEP / 8, DP / 8>(dphi, v + at.warp * 16 * LD, LD, dS, LD, at.lane);
        if (p.dv_fold)
            product_nn<DP / 8, STEP / 8>(dv, phi + at.warp * 16 * STEP_LD, STEP_LD, dS,
                                         LD, at.lane);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (row + 8 * i >= r.n) continue;
            float *to = dphi_row(p, r, row + 8 * i) + p0;
#pragma unroll
            for (int n = 0; n < STEP / 8; n++) {
                const int e = 8 * n + 2 * at.t;
                *(float2 *)(to + e) =
                    make_float2(dphi[n][2 * i] + dz[e], dphi[n][2 * i + 1] + dz[e + 1]);
            }
        }
    }
}

/* Without a window: the queries of head h in the keys' own span. */
template <int DP>
STI_DEVICE void keys_pair_by_pair(const sti_hybrid_train &p, const key_tile &r, int h,
                                  const float *v, float *adng, float *phi_k,
                                  float *phi_q, float *adden, const lane_place &at,
                                  float (&dv)[DP / 8][4])
{
    constexpr int LD = DP + 4;
    const int row = at.warp * 16 + at.g, first = r.c * p.span;
    __syncthreads();
    load_adng<DP>(p, adng, r.b, h, first, r.n);
    if (threadIdx.x < ROWS)
        adden[threadIdx.x] =
            (int)threadIdx.x < r.n
                ? p.adden[row_at(p, p.h.H, r.b, h, first) + threadIdx.x]
                : 0;
    __syncthreads();
    float f[8][4], df[8][4];
    clear_tiles(f);
    clear_tiles(df);
    product_nt<8, DP / 8>(df, v + at.warp * 16 * LD, LD, adng, LD, at.lane);
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) df[n][i] += adden[8 * n + 2 * at.t + i % 2];
    hide<true>(df, at);
    for (int p0 = 0; p0 < p.PP; p0 += STEP) {
        __syncthreads();
        load_phi(p, phi_k, p.phi_k, p.h.S, r.b, r.sel, first, r.n, p0);
        load_phi(p, phi_q, p.phi_q, p.h.H, r.b, h, first, r.n, p0);
        __syncthreads();
        float dphi[STEP / 8][4];
        clear_tiles(dphi);
        product_nt<8, STEP / 8>(f, phi_k + at.warp * 16 * STEP_LD, STEP_LD, phi_q,
                                STEP_LD, at.lane);
        product_rn<STEP / 8, 8>(dphi, df, phi_q, STEP_LD, at.lane);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (row + 8 * i >= r.n) continue;
            float *to = dphi_row(p, r, row + 8 * i) + p0 + 2 * at.t;
#pragma unroll
            for (int n = 0; n < STEP / 8; n++) { /* this lane wrote what it adds to */
                const float2 was = *(const float2 *)(to + 8 * n);
                *(float2 *)(to + 8 * n) =
                    make_float2(was.x + dphi[n][2 * i], was.y + dphi[n][2 * i + 1]);
            }
        }
    }
    hide<true>(f, at);
    product_rn<DP / 8, 8>(dv, f, adng, LD, at.lane);
}

/* Grid: spans x tiles of 64 folded tokens, selection heads, sequences. */
template <int DP, bool WINDOW>
static __global__ void __launch_bounds__(THREADS, WINDOW &&DP <= 64 ? 4 : 2)
    key_kernel(const sti_hybrid_train p)
{
    constexpr int LD = DP + 4;
    const lane_place at = lane_place_of();
    const int tiles = (p.span + ROWS - 1) / ROWS;
    const int k0 = (int)blockIdx.x % tiles * ROWS;
    float *v = block_memory(), *dS = v + ROWS * LD, *dz = dS + STEP * LD;
    float *phi_k = dz + STEP;
    int *token = (int *)(phi_k + ROWS * STEP_LD);
    float *adng = (float *)(token + ROWS), *phi_q = adng + ROWS * LD;
    float *adden = phi_q + ROWS * STEP_LD; /* adng on: without a window */
    key_tile r;
    r.b = (int)blockIdx.z;
    r.sel = (int)blockIdx.y;
    r.c = (int)blockIdx.x / tiles;
    r.span = span_at(p, r.b, r.sel, r.c);
    r.n = min(ROWS, p.n_folds[r.span] - k0);
    r.token = token;
    if (r.n <= 0) return;
    if ((int)threadIdx.x < r.n)
        token[threadIdx.x] = p.folds[r.span * p.span + k0 + threadIdx.x];
    __syncthreads();
    load_values<DP>(p, v, r.b, r.sel * p.h.group / p.h.per_kv, r.c, r.n,
                    [&](int i) { return token[i]; });

    float dv[DP / 8][4];
    clear_tiles(dv);
    keys_through_state<DP>(p, r, v, dS, phi_k, dz, at, dv);
    for (int i = 0; !WINDOW && i < p.h.group; i++)
        keys_pair_by_pair<DP>(p, r, r.sel * p.h.group + i, v, adng, phi_k, phi_q, adden,
                              at, dv);
    if (!p.dv_fold) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = at.warp * 16 + at.g + 8 * i;
        if (row >= r.n) continue;
        float *to =
            p.dv_fold + row_at(p, p.h.S, r.b, r.sel, token[row]) * DP + 2 * at.t;
#pragma unroll
        for (int n = 0; n < DP / 8; n++)
            *(float2 *)(to + 8 * n) = make_float2(dv[n][2 * i], dv[n][2 * i + 1]);
    }
}

/* Tokens that are never folded have no gradient here; of dphi(k) the maps know. */
still_status sti_hybrid_train_linear_keys(sti_dev *dev, const sti_hybrid_train *p,
                                          still_error *err)
{
    const char *what = "hybrid training: gradient of the folded keys";
    const size_t rows = (size_t)p->B * p->h.S * p->T * sizeof(float);
    if (p->dv_fold)
        STI_CUDA(cudaMemsetAsync(p->dv_fold, 0, rows * p->DP, dev->stream), what);
    const dim3 grid(p->spans * ((p->span + ROWS - 1) / ROWS), p->h.S, p->B);
    return by_width(p, [&](auto W) {
        return launch(dev, what, err,
                      p->h.has_window ? key_kernel<W, true> : key_kernel<W, false>,
                      grid, THREADS, key_shared<W>(p->h.has_window), *p);
    });
}
