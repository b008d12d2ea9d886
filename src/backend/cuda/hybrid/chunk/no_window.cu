/* no_window.cu - pieces of methods without a window: every token is folded before its
 * own output (Hedgehog, T2R),
 *   y_t = (sum_{j <= t} (phi(q_t).phi(k_j)) v_j) g_t / sum_{j <= t} phi(q_t).phi(k_j).
 *
 * Tokens are taken 32 at a time, wherever a piece begins:
 *   features  phi of all queries and keys, in float
 *   fold      what each 32 tokens add to the state
 *   sum       the state before each, and after the piece, with the rounding kept
 *   output    phi(q) with that state, and with the keys of its own 32 tokens
 *
 * These are methods to compare with: the kernels take any map and float's range (relu
 * features have no bound) and leave tensor cores alone. Bounded by arithmetic. */
#include "backend/cuda/hybrid/chunk/chunk.h"
#include "backend/cuda/hybrid/device.cuh"

enum { THREADS = 128, TOKENS = STI_CHUNK_FOLDED, TILE = 16, ROWS = 64 };

/* ---- Features ------------------------------------------------------------ */

/* u = x W of 16 rows of one head, then phi. W [D, F]; NULL: the first F columns. Heads
 * H.. are those of keys. Grid (tiles, H + S). */
template <class Pieces>
static __global__ void __launch_bounds__(THREADS)
    features_kernel(const __grid_constant__ Pieces pieces)
{
    __shared__ float x[TILE][128], u[TILE][128];
    int tile = (int)blockIdx.x, tiles;
    const sti_chunk_piece &c = pieces.find(tile, tiles);
    const sti_cuda_hybrid_params &h = c.h;
    const int D = h.D, F = h.F, tid = (int)threadIdx.x, first = tile * TILE;
    const bool key = (int)blockIdx.y >= h.H;
    const int head = (int)blockIdx.y - (key ? h.H : 0), heads = key ? h.S : h.H;
    const float *map = key ? h.map_k : h.map_q, *bias = key ? h.bias_k : h.bias_q;
    const float *from =
        key ? c.s.k + (size_t)kv_head(c, head) * D : c.s.q + (size_t)head * D;
    const size_t row = (size_t)(key ? h.G : h.H) * D;
    for (int i = tid; i < TILE * D; i += THREADS) {
        const int t = first + i / D;
        x[i / D][i % D] = t < c.T ? from[t * row + i % D] : 0;
    }
    __syncthreads();
    if (tid < F) {
        float sum[TILE] = {0};
        for (int d = 0; map && d < D; d++) {
            const float w = map[((size_t)head * D + d) * F + tid];
#pragma unroll
            for (int t = 0; t < TILE; t++) sum[t] += x[t][d] * w;
        }
#pragma unroll
        for (int t = 0; t < TILE; t++) u[t][tid] = map ? sum[t] : x[t][tid];
    }
    __syncthreads();
    float *phi = key ? c.phi_k : c.phi_q;
    for (int t = tid >> 5; t < TILE && first + t < c.T; t += THREADS / 32) {
        float square = 0;
        for (int d = tid & 31; d < D; d += 32) square += x[t][d] * x[t][d];
        warp_features(h, u[t], warp_sum(square), bias ? bias[head] : 0,
                      phi + ((size_t)(first + t) * heads + head) * h.P);
    }
}

/* ---- Fold ---------------------------------------------------------------- */

/* ds, dz of 32 tokens and 64 rows of the state. Grid (chunks, S P / 64). */
template <class Pieces>
static __global__ void __launch_bounds__(THREADS)
    fold_kernel(const __grid_constant__ Pieces pieces)
{
    __shared__ float phi[TOKENS][ROWS], v[TOKENS][128];
    int chunk = (int)blockIdx.x, chunks;
    const sti_chunk_piece &c = pieces.find(chunk, chunks);
    const int D = c.h.D, P = c.h.P, S = c.h.S, tid = (int)threadIdx.x;
    const int g = (int)blockIdx.y / (P / ROWS),
              p0 = (int)blockIdx.y % (P / ROWS) * ROWS;
    for (int i = tid; i < TOKENS * ROWS; i += THREADS) {
        const int t = chunk * TOKENS + i / ROWS;
        phi[i / ROWS][i % ROWS] =
            t < c.T ? c.phi_k[((size_t)t * S + g) * P + p0 + i % ROWS] : 0;
    }
    for (int i = tid; i < TOKENS * D; i += THREADS) {
        const int t = chunk * TOKENS + i / D;
        v[i / D][i % D] =
            t < c.T ? c.s.v[((size_t)t * c.h.G + kv_head(c, g)) * D + i % D] : 0;
    }
    __syncthreads();
    const size_t row = ((size_t)chunk * S + g) * P + p0;
    for (int i = tid; i < ROWS * D; i += THREADS) {
        float sum = 0;
#pragma unroll
        for (int t = 0; t < TOKENS; t++) sum += phi[t][i / D] * v[t][i % D];
        c.ds[row * D + i] = sum;
    }
    if (tid >= ROWS) return;
    float sum = 0;
    for (int t = 0; t < TOKENS; t++) sum += phi[t][tid];
    c.dz[row + tid] = sum;
}

/* What the chunks add becomes what was there before each; a number of the state by
 * thread. */
static __device__ __forceinline__ void sum_number(float *sum, float *comp, float *added,
                                                  size_t step, int chunks)
{
    float now = *sum, rest = *comp;
    for (int j = 0; j < chunks; j++, added += step) {
        const float more = *added;
        *added = now;
        kahan_add(&now, &rest, 1, more);
    }
    *sum = now;
    *comp = rest;
}

template <class Pieces>
static __global__ void __launch_bounds__(THREADS)
    sum_kernel(const __grid_constant__ Pieces pieces)
{
    int block = (int)blockIdx.x, blocks;
    const sti_chunk_piece &c = pieces.find(block, blocks);
    const int z = c.h.S * c.h.P, s = z * c.h.D;
    int i = block * THREADS + (int)threadIdx.x;
    if (i < c.h.S) c.s.folded[i] += c.T;
    if (i < s) {
        sum_number(c.s.lin_s + i, c.s.comp_s + i, c.ds + i, (size_t)s, c.n_chunks);
    } else if ((i -= s) < z) {
        sum_number(c.s.lin_z + i, c.s.comp_z + i, c.dz + i, (size_t)z, c.n_chunks);
    }
}

/* ---- Output -------------------------------------------------------------- */

/* Shared memory: features of 32 queries and keys, P + 1 numbers apart, then weights
 * [32, 33] and denominators [32]. */
static __host__ __device__ __forceinline__ int output_bytes(int P)
{
    return (2 * TOKENS * (P + 1) + TOKENS * (TOKENS + 1) + TOKENS) * 4;
}

/* Grid (chunks, H). Thread tid has column tid % D of the rows from tid / D on. */
template <int D, class Pieces>
static __global__ void __launch_bounds__(THREADS)
    output_kernel(const __grid_constant__ Pieces pieces)
{
    enum { STEP = THREADS / D, EACH = TOKENS / STEP };
    extern __shared__ __align__(1024) unsigned char shared[];
    int chunk = (int)blockIdx.x, chunks;
    const sti_chunk_piece &c = pieces.find(chunk, chunks);
    const int H = c.h.H, P = c.h.P, S = c.h.S, W = P + 1, tid = (int)threadIdx.x;
    const int head = (int)blockIdx.y, g = head / c.h.group, first = chunk * TOKENS;
    const int tokens = min(TOKENS, c.T - first);
    float *q = (float *)shared, *k = q + TOKENS * W, *weight = k + TOKENS * W;
    float *den = weight + TOKENS * (TOKENS + 1);
    for (int i = tid; i < TOKENS * P; i += THREADS) {
        const int t = i / P, p = i % P;
        const size_t at = (size_t)(first + t);
        q[t * W + p] = t < tokens ? c.phi_q[(at * H + head) * P + p] : 0;
        k[t * W + p] = t < tokens ? c.phi_k[(at * S + g) * P + p] : 0;
    }
    __syncthreads();
    for (int i = tid; i < TOKENS * TOKENS; i += THREADS) {
        const int t = i / TOKENS, j = i % TOKENS;
        float sum = 0;
        for (int p = 0; j <= t && p < P; p++) sum += q[t * W + p] * k[j * W + p];
        weight[t * (TOKENS + 1) + j] = sum;
    }
    __syncthreads();
    const size_t state = ((size_t)chunk * S + g) * P;
    if (tid < TOKENS) {
        float sum = 0;
        for (int p = 0; p < P; p++) sum += q[tid * W + p] * c.dz[state + p];
        for (int j = 0; j <= tid; j++) sum += weight[tid * (TOKENS + 1) + j];
        den[tid] = fmaxf(sum + c.h.den_eps, FLT_MIN);
    }
    const int d = tid % D, t0 = tid / D;
    float y[EACH] = {0};
    for (int p = 0; p < P; p++) {
        const float s = c.ds[(state + p) * D + d];
#pragma unroll
        for (int i = 0; i < EACH; i++) y[i] += q[(t0 + i * STEP) * W + p] * s;
    }
    for (int j = 0; j < tokens; j++) {
        const float v = c.s.v[((size_t)(first + j) * c.h.G + kv_head(c, g)) * D + d];
#pragma unroll
        for (int i = 0; i < EACH; i++)
            y[i] += weight[(t0 + i * STEP) * (TOKENS + 1) + j] * v;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int t = t0 + i * STEP;
        if (t >= tokens) break;
        const size_t at = ((size_t)(first + t) * H + head) * D + d;
        const float gate = c.h.gate && c.s.gate ? 2 / (1 + expf(-c.s.gate[at])) : 1;
        c.s.y[at] = y[i] * gate / den[t];
    }
}

/* ---- Entry --------------------------------------------------------------- */

static int tiles_of(const sti_chunk_piece &c)
{
    return (c.T + TILE - 1) / TILE;
}

static int chunks_of(const sti_chunk_piece &c)
{
    return c.n_chunks;
}

static int number_blocks(const sti_chunk_piece &c)
{
    return (c.h.S * c.h.P * (c.h.D + 1) + THREADS - 1) / THREADS;
}

template <int D, class Pieces>
static still_status launch_output(const sti_chunk_group *g, unsigned units,
                                  const Pieces &pieces, still_error *err)
{
    const int bytes = output_bytes(g->c->h.P);
    const dim3 grid(units, (unsigned)g->c->h.H);
    STI_CUDA(cudaFuncSetAttribute(output_kernel<D, Pieces>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "hybrid attention without a window, output");
    output_kernel<D><<<grid, THREADS, bytes, g->stream>>>(pieces);
    STI_CUDA(cudaGetLastError(), "hybrid attention without a window, output");
    return STILL_OK;
}

extern "C" still_status sti_chunk_no_window(const sti_chunk_group *g, still_error *err)
{
    const sti_cuda_hybrid_params *h = &g->c->h;
    STI_TRY(launch_units(g, tiles_of, [&](unsigned units, const auto &pieces) {
        const dim3 grid(units, (unsigned)(h->H + h->S));
        features_kernel<<<grid, THREADS, 0, g->stream>>>(pieces);
        STI_CUDA(cudaGetLastError(), "hybrid attention without a window, features");
        return STILL_OK;
    }));
    STI_TRY(launch_units(g, chunks_of, [&](unsigned units, const auto &pieces) {
        const dim3 grid(units, (unsigned)(h->S * (h->P / ROWS)));
        fold_kernel<<<grid, THREADS, 0, g->stream>>>(pieces);
        STI_CUDA(cudaGetLastError(), "hybrid attention without a window, folding");
        return STILL_OK;
    }));
    STI_TRY(launch_units(g, number_blocks, [&](unsigned units, const auto &pieces) {
        sum_kernel<<<units, THREADS, 0, g->stream>>>(pieces);
        STI_CUDA(cudaGetLastError(), "hybrid attention without a window, state");
        return STILL_OK;
    }));
    return launch_units(g, chunks_of, [&](unsigned units, const auto &pieces) {
        return h->D == 128 ? launch_output<128>(g, units, pieces, err)
                           : launch_output<64>(g, units, pieces, err);
    });
}
