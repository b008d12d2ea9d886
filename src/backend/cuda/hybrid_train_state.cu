/* hybrid_train_state.cu - sums over tokens of outer products, and sums over spans.
 *
 *   state   S_c = sum of phi(k_j)^T v_j, z_c = sum of phi(k_j), j folded at c or before
 *   dstate  dS_c = sum of phi(q_t)^T (a g dn)_t, dz_c = sum of (a dden)_t phi(q_t), the
 *           queries t of span c and later
 *   map     dW = sum of x_t^T draw_t, in parts of some tokens
 *
 * Without a window a span folds its own tokens, but its queries see those one by one:
 * there, c itself is left out. A block makes 64 rows of a product; bounded by reading
 * the tokens, once for every 64 rows. */
#include "backend/cuda/hybrid_train_tile.cuh"

typedef enum outer_kind { OUTER_STATE, OUTER_DSTATE, OUTER_MAP } outer_kind;

/* What a map's gradient is made of; both sides go in one launch. */
typedef struct map_sum {
    const float *x, *draw; /* [B,T,x_heads,D]; [B,heads,T,PP] */
    int heads, x_heads, x_per;
    float *part; /* [B map_parts, heads, DP, DP] */
} map_sum;
typedef struct map_sums {
    map_sum q, k;
} map_sums;

template <int DP> static constexpr size_t outer_shared(void)
{
    return (ROWS * (64 + 4) + ROWS * (DP + 4) + 2 * ROWS) * sizeof(float);
}

/* out [64 of M][DP] = sum over tokens of A^T B. Grid: (c or part) x rows / 64, head, b.
 */
template <int DP, int KIND>
static __global__ void __launch_bounds__(THREADS)
    outer_kernel(const sti_cuda_train p, const map_sums maps)
{
    constexpr int N = DP / 8, LDA = 64 + 4, LDB = DP + 4;
    const lane_place at = lane_place_of();
    const int M = KIND == OUTER_MAP ? DP : p.PP, blocks = (M + 63) / 64;
    const int c = (int)blockIdx.x / blocks, m0 = (int)blockIdx.x % blocks * 64;
    const bool keys = KIND == OUTER_MAP && (int)blockIdx.y >= maps.q.heads;
    const map_sum map = keys ? maps.k : maps.q;
    const int head = (int)blockIdx.y - (keys ? maps.q.heads : 0), b = (int)blockIdx.z;
    float *A = block_memory(), *B = A + ROWS * LDA, *weight = B + ROWS * LDB;
    int *token = (int *)(weight + ROWS);

    const size_t span = span_at(p, b, head, c); /* not of a map */
    int first = 0, n = 0, repeat = 1;
    if (KIND == OUTER_STATE) {
        n = p.n_folds[span];
    } else if (KIND == OUTER_DSTATE) {
        first = c * p.span;
        n = span_end(p, c) - first;
        repeat = p.per_sel;
    } else {
        first = c * STI_TRAIN_MAP_TOKENS;
        n = min(STI_TRAIN_MAP_TOKENS, p.T - first);
    }

    float out[N][4], z = 0;
    clear_tiles(out);
    for (int i = 0; i < repeat; i++) {
        const int h = head * p.per_sel + i; /* of OUTER_DSTATE */
        for (int j0 = 0; j0 < n; j0 += ROWS) {
            __syncthreads();
            if (threadIdx.x < ROWS) {
                const int j = j0 + (int)threadIdx.x;
                const int t = j >= n                ? NO_TOKEN
                              : KIND == OUTER_STATE ? p.folds[span * p.span + j]
                                                    : first + j;
                token[threadIdx.x] = t;
                weight[threadIdx.x] = KIND != OUTER_DSTATE ? 1
                                      : t == NO_TOKEN
                                          ? 0
                                          : p.adden[row_at(p, p.H, b, h, t)];
            }
            __syncthreads();
            if constexpr (KIND == OUTER_MAP)
                load_tile<ROWS, 64>(A, LDA, p.D - m0, p.vec, rounded(), [&](int r) {
                    const size_t row =
                        token_at(p, map.x_heads, b, head / map.x_per, token[r]);
                    return token[r] == NO_TOKEN ? (const float *)NULL
                                                : map.x + row * p.D + m0;
                });
            else
                load_tile<ROWS, 64>(
                    A, LDA, 64, p.relu, rounded_part{1 / p.phi_unit}, [&](int r) {
                        const uint16_t *phi = KIND == OUTER_STATE ? p.phi_k : p.phi_q;
                        const int heads = KIND == OUTER_STATE ? p.S : p.H;
                        const int own = KIND == OUTER_STATE ? head : h;
                        return token[r] == NO_TOKEN
                                   ? (const uint16_t *)NULL
                                   : features_at(p, phi,
                                                 row_at(p, heads, b, own, token[r]),
                                                 m0);
                    });
            load_tile<ROWS, DP>(
                B, LDB, KIND == OUTER_STATE ? p.D : DP,
                KIND == OUTER_STATE ? p.vec : true, rounded(), [&](int r) {
                    const int t = token[r];
                    if (t == NO_TOKEN) return (const float *)NULL;
                    if (KIND == OUTER_STATE)
                        return p.v +
                               token_at(p, p.G, b, head * p.per_sel / p.per_kv, t) *
                                   p.D;
                    if (KIND == OUTER_DSTATE)
                        return (const float *)p.adng + row_at(p, p.H, b, h, t) * DP;
                    return map.draw + row_at(p, map.heads, b, head, t) * p.PP;
                });
            __syncthreads();
            product_tn<N, ROWS / 8>(out, A + at.warp * 16, LDA, B, LDB, at.lane);
            if (KIND != OUTER_MAP && threadIdx.x < 64)
                for (int r = 0; r < ROWS; r++)
                    z += A[r * LDA + (int)threadIdx.x] * weight[r];
        }
    }

    float *to =
        KIND == OUTER_STATE ? p.state + span * p.PP * DP
        : KIND == OUTER_DSTATE
            ? p.dstate + span * p.PP * DP
            : map.part + (((size_t)b * p.map_parts + c) * map.heads + head) * DP * DP;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int m = m0 + at.warp * 16 + at.g + 8 * r;
        if (m >= M) continue;
#pragma unroll
        for (int i = 0; i < N; i++)
            *(float2 *)(to + (size_t)m * DP + 8 * i + 2 * at.t) =
                make_float2(out[i][2 * r], out[i][2 * r + 1]);
    }
    if (KIND != OUTER_MAP && threadIdx.x < 64 && m0 + (int)threadIdx.x < M)
        (KIND == OUTER_STATE ? p.state_z : p.dstate_z)[span * p.PP + m0 + threadIdx.x] =
            z;
}

template <int KIND>
static still_status outer(sti_dev *dev, const sti_cuda_train *p, const map_sums *maps,
                          still_error *err)
{
    const int M = KIND == OUTER_MAP ? p->DP : p->PP;
    const dim3 grid((KIND == OUTER_MAP ? p->map_parts : p->spans) * ((M + 63) / 64),
                    KIND == OUTER_MAP ? maps->q.heads + maps->k.heads : p->S, p->B);
#define OUTER(W)                                                                       \
    launch(dev, "hybrid training: sums of outer products", err, outer_kernel<W, KIND>, \
           grid, THREADS, outer_shared<W>(), *p, *maps)
    return STI_TRAIN_BY_WIDTH(p->DP, OUTER);
}

/* ---- Sums over spans ---------------------------------------------------------------
 */

enum { SCAN_THREADS = 256, SCAN_BATCH = 8 };

/* S [heads,spans,n] and z [heads,spans,n_z]: span c becomes the sum of spans 0 .. c
 * (back: c .. spans - 1); without `own`, c itself is left out. Forward, mean [heads,
 * spans,n] is S over the number of tokens folded by then: at most as large as a value
 * times a feature, so half holds it. NULL of a relu map. One thread a number; batches
 * keep several reads in flight. */
static __global__ void __launch_bounds__(SCAN_THREADS)
    scan_kernel(float *S, float *z, uint16_t *mean, const int32_t *n_folded, int spans,
                int n, int n_z, int back, int own)
{
    int i = (int)(blockIdx.x * SCAN_THREADS + threadIdx.x);
    if (i >= n + n_z) return;
    const int step = i < n ? n : n_z;
    const size_t head = (size_t)blockIdx.z * gridDim.y + blockIdx.y;
    float *x = (i < n ? S + i : z + i - n) + head * spans * step;
    mean = mean && !back && i < n ? mean + head * spans * n + i : NULL;
    n_folded += head * spans;
    float sum = 0;
    for (int c0 = 0; c0 < spans; c0 += SCAN_BATCH) {
        float y[SCAN_BATCH];
#pragma unroll
        for (i = 0; i < SCAN_BATCH; i++) {
            const int c = back ? spans - 1 - c0 - i : c0 + i;
            y[i] = c0 + i < spans ? x[(size_t)c * step] : 0;
        }
#pragma unroll
        for (i = 0; i < SCAN_BATCH; i++) {
            const int c = back ? spans - 1 - c0 - i : c0 + i;
            if (c0 + i >= spans) continue;
            const float here = own ? sum + y[i] : sum;
            x[(size_t)c * step] = here;
            if (mean)
                mean[(size_t)c * n] = (uint16_t)pack_half2(
                    half_range(here / (float)max(n_folded[c], 1)), 0);
            sum += y[i];
        }
    }
}

static still_status scan(sti_dev *dev, const sti_cuda_train *p, float *S, float *z,
                         bool back, still_error *err)
{
    const int n = p->PP * p->DP, all = n + p->PP;
    return launch(dev, "hybrid training: sums over spans", err, scan_kernel,
                  dim3((all - 1) / SCAN_THREADS + 1, p->S, p->B), SCAN_THREADS, 0, S, z,
                  p->mean, (const int32_t *)p->n_folded, p->spans, n, p->PP, (int)back,
                  (int)p->has_window);
}

/* ---- Launchers ---------------------------------------------------------------------
 */

still_status sti_train_states(sti_dev *dev, const sti_cuda_train *p, still_error *err)
{
    const map_sums none = {};
    STI_TRY(outer<OUTER_STATE>(dev, p, &none, err));
    return scan(dev, p, p->state, p->state_z, false, err);
}

still_status sti_train_dstates(sti_dev *dev, const sti_cuda_train *p, still_error *err)
{
    const map_sums none = {};
    STI_TRY(outer<OUTER_DSTATE>(dev, p, &none, err));
    return scan(dev, p, p->dstate, p->dstate_z, true, err);
}

still_status sti_train_map_sums(sti_dev *dev, const sti_cuda_train *p, still_error *err)
{
    map_sums maps = {{p->q, p->dphi_q, p->H, p->H, 1, p->part_map_q},
                     {p->k, p->dphi_k, p->S, p->G, p->S / p->G, p->part_map_k}};
    if (!p->part_map_q) maps.q.heads = 0;
    if (!p->part_map_k) maps.k.heads = 0;
    if (maps.q.heads + maps.k.heads == 0) return STILL_OK;
    return outer<OUTER_MAP>(dev, p, &maps, err);
}
