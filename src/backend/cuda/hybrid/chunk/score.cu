/* score.cu - the score of every new token of a piece, mean over the query heads of its
 * selection head: the launchers by where a score comes from (score.h), and the kernels
 * of all but received (received.cu).
 *
 * score_kernel, STILL eq. 2 to 5: the softmax of each token over the last C tokens. A
 * block takes 128 queries and the C + 127 keys they can see, which stay in shared
 * memory while it goes through the query heads; so the mean is a sum in registers, in a
 * fixed order. Eight warps of 16 queries (two blocks a processor, which hide each
 * other's reads); products with key tiles that none of a warp's queries sees are left
 * out. Tiles begin at positions that are multiples of 128 wherever the piece does, so a
 * token's score does not depend on how a prompt was cut. Bounded by tensor cores and
 * the read of q. */
#include "backend/cuda/hybrid/chunk/chunk.h"
#include "backend/cuda/hybrid/chunk/logits.cuh"
#include "backend/cuda/hybrid/score.h"

enum { THREADS = 256, QUERIES = 128, KEYS = STI_LOGIT_COLUMNS };

/* Tiles of 64 keys that 128 queries can see. */
static __host__ __device__ __forceinline__ int key_tiles(int C)
{
    return (C + QUERIES - 1 + KEYS - 1) / KEYS;
}

/* What a lane knows of its two rows, 8 i + lane / 4. Logits are in powers of two. */
typedef struct row_sums {
    float top[2];    /* of the logits this lane has seen */
    float others[2]; /* sum of 2^(logit - top), the token itself left out */
    float self[2];   /* its own logit; -infinity in lanes that did not see it */
} row_sums;

static __device__ __forceinline__ void clear_sums(row_sums &r)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        r.top[i] = r.self[i] = -INFINITY;
        r.others[i] = 0;
    }
}

/* STILL eq. 2: row i, token row t, sees the last C tokens. Hides the other keys, and
 * takes its own logit out. key: token row of this lane's first. Returns the largest. */
static __device__ __forceinline__ float mask_row(row_sums &r, float (&s)[8][4], int i,
                                                 int t, int first, int key, float scale)
{
    float top = -INFINITY;
#pragma unroll
    for (int nt = 0; nt < 8; nt++)
#pragma unroll
        for (int x = 0; x < 2; x++) {
            const int j = key + nt * 8 + x;
            float &l = s[nt][2 * i + x];
            l = j <= t && j >= first ? l : -INFINITY;
            top = fmaxf(top, l);
            if (j == t) {
                r.self[i] = l * scale;
                l = -INFINITY;
            }
        }
    return top;
}

/* STILL eq. 3, its sum: logits s, still to be scaled, of a warp's queries, the first
 * at token row `query`, and 64 keys from token row `key` on; rows below 0 are no
 * tokens. */
static __device__ __forceinline__ void add_logits(row_sums &r, float (&s)[8][4],
                                                  int query, int key, int C,
                                                  float scale, int lane)
{
    const bool all_see = key + KEYS <= query && key >= 0 && key >= query + 16 - C;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int t = query + i * 8 + (lane >> 2);
        float top = -INFINITY;
        if (all_see) {
#pragma unroll
            for (int nt = 0; nt < 8; nt++)
                top = fmaxf(top, fmaxf(s[nt][2 * i], s[nt][2 * i + 1]));
        } else {
            top = mask_row(r, s, i, t, max(t - C + 1, 0), key + (lane & 3) * 2, scale);
        }
        top = fmaxf(r.top[i], top * scale);
        const float shift = top == -INFINITY ? 0 : top;
        float sum = r.others[i] * exp2_fast(r.top[i] - shift);
#pragma unroll
        for (int nt = 0; nt < 8; nt++)
            sum += exp2_fast(fmaf(s[nt][2 * i], scale, -shift)) +
                   exp2_fast(fmaf(s[nt][2 * i + 1], scale, -shift));
        r.top[i] = top;
        r.others[i] = sum;
    }
}

/* STILL eq. 5: the score of row i, known to the four lanes of the row alike. */
static __device__ __forceinline__ float score_of_row(int score, const row_sums &r,
                                                     int i, float eps)
{
    const float top = quad_max(r.top[i]); /* the token sees itself: finite */
    const float others = quad_sum(r.others[i] * exp2_fast(r.top[i] - top));
    return self_score(score, exp2_fast(quad_max(r.self[i]) - top), others, eps);
}

/* Shared memory: queries [128, D], keys [64 key_tiles, D]. Grid (query tiles, kv
 * heads). */
template <int D, class Pieces>
static __global__ void __launch_bounds__(THREADS, 2)
    score_kernel(const __grid_constant__ Pieces pieces)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    int query_tile = (int)blockIdx.x, query_tiles;
    const sti_chunk_piece &c = pieces.find(query_tile, query_tiles);
    const int g = (int)blockIdx.y, tid = (int)threadIdx.x, lane = tid & 31;
    const int C = c.h.C, tiles = key_tiles(C), units = D / 8;
    const int begin = c.pos - c.base, end = begin + c.T; /* rows count from base */
    const int first = (c.pos / QUERIES + query_tile) * QUERIES - c.base;
    const int first_key = first - C + 1;
    const int query = first + (tid >> 5) * 16; /* of this warp */
    const uint32_t q_tile = shared_address(shared), k_tile = q_tile + QUERIES * D * 2;

    const __half *keys = c.k + ((size_t)g * c.rows + c.capacity) * D;
    for (int i = tid; i < tiles * KEYS * units; i += THREADS) {
        const int r = i / units, u = i % units;
        cp_async16(k_tile + unit_at<D>(r, u),
                   keys + (size_t)min(max(first_key + r, 0), end - 1) * D + u * 8);
    }
    cp_async_commit();

    const lane_address<D> q_at =
        lane_address<D>::by16(q_tile + (uint32_t)(tid >> 5) * 16 * D * 2, lane);
    const lane_address<D> k_at = lane_address<D>::by8(k_tile, lane);
    const float scale = c.h.scale * log2_e;
    float mean[2] = {0, 0};
    for (int n = 0; n < c.h.group; n++) {
        const int head = g * c.h.group + n;
#pragma unroll 4
        for (int i = tid; i < QUERIES * units; i += THREADS) {
            const int r = i / units, u = i % units;
            const int row = min(max(first + r, begin), end - 1) - begin;
            const float4 *q =
                (const float4 *)(c.s.q + ((size_t)row * c.h.H + head) * D + u * 8);
            *(uint4 *)(shared + unit_at<D>(r, u)) = pack_half8(q[0], q[1]);
            if (u % 4 == 0 && n + 1 < c.h.group) prefetch_l2(q + D / 4);
        }
        cp_async_wait<0>();
        __syncthreads();
        uint32_t q[D / 16][4];
        load_rows<D>(q, q_at);
        __syncthreads(); /* the queries are in registers: the next may come */

        row_sums sums;
        clear_sums(sums);
        for (int tile = 0; tile < tiles; tile++) {
            const int key = first_key + tile * KEYS;
            if (key > query + 15 || key + KEYS - 1 <= query - C) continue;
            float s[8][4];
            multiply<D>(s, q, k_at, tile * KEYS);
            add_logits(sums, s, query, key, C, scale, lane);
        }
#pragma unroll
        for (int i = 0; i < 2; i++)
            mean[i] += score_of_row(c.h.score, sums, i, c.h.eps) / (float)c.h.group;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int t = query + i * 8 + (lane >> 2);
        if ((lane & 3) == 0 && t >= begin && t < end)
            c.score[(size_t)g * c.rows + c.capacity + t] = mean[i];
    }
}

/* ---- Scores without logits ----------------------------------------------- */

/* Mean over the heads of a selection head. */
static __device__ float mean_random(const sti_chunk_piece &c, int g, int position)
{
    double sum = 0;
    for (int n = 0; n < c.h.group; n++)
        sum += (double)position_score(c.h.score, c.h.seed, c.h.layer, g * c.h.group + n,
                                      position) /
               c.h.group;
    return (float)sum;
}

static __device__ float keynorm_score(const sti_chunk_piece &c, int g, int row)
{
    const __half *k = c.k + ((size_t)g * c.rows + row) * c.h.D;
    float sum = 0;
    for (int d = 0; d < c.h.D; d++) {
        const float x = __half2float(k[d]);
        sum += x * x;
    }
    return key_score(c.h.score, sum);
}

/* Grid (tokens, selection heads). */
template <class Pieces>
static __global__ void __launch_bounds__(THREADS)
    plain_score_kernel(const __grid_constant__ Pieces pieces)
{
    int block = (int)blockIdx.x, blocks;
    const sti_chunk_piece &c = pieces.find(block, blocks);
    const int g = (int)blockIdx.y, i = block * THREADS + (int)threadIdx.x;
    if (i >= c.T) return;
    const int position = c.pos + i, row = window_row(c, position);
    c.score[(size_t)g * c.rows + row] = sti_score_from(c.h.score, STI_FROM_KEY)
                                            ? keynorm_score(c, g, row)
                                            : mean_random(c, g, position);
}

/* ---- Scores that a chunk must be complete for ---------------------------- */

/* Grid (chunks, selection heads). Tokens of a chunk that is not complete score 0: it is
 * not going to retire. */
template <class Pieces>
static __global__ void __launch_bounds__(THREADS)
    distinct_kernel(const __grid_constant__ Pieces pieces)
{
    __shared__ float mean[STI_HEAD_DIM_MAX];
    int chunk = (int)blockIdx.x, chunks;
    const sti_chunk_piece &c = pieces.find(chunk, chunks);
    const int g = (int)blockIdx.y, D = c.h.D, first = c.base + chunk * c.h.C;
    const int n = min(c.h.C, c.pos + c.T - first);
    const size_t row = (size_t)g * c.rows + window_row(c, first);
    float *score = c.score + row;
    const __half *k = c.k + row * D;
    if (n < c.h.C) {
        for (int i = (int)threadIdx.x; i < n; i += THREADS) score[i] = 0;
        return;
    }
    chunk_scores<THREADS / 32>(
        c.h.score, n, D, first, mean,
        [&](int i, int d) { return __half2float(k[(size_t)i * D + d]); },
        [&](int i, float x) { score[i] = x; });
}

/* ---- Entry --------------------------------------------------------------- */

static int query_tiles_of(const sti_chunk_piece &c)
{
    return (c.pos + c.T - 1) / QUERIES - c.pos / QUERIES + 1;
}

static int chunks_of(const sti_chunk_piece &c)
{
    return (c.pos + c.T - c.base + c.h.C - 1) / c.h.C;
}

static int token_blocks(const sti_chunk_piece &c)
{
    return (c.T + THREADS - 1) / THREADS;
}

template <int D, class Pieces>
static still_status launch(const sti_chunk_group *g, unsigned units,
                           const Pieces &pieces, still_error *err)
{
    const int bytes = (QUERIES + key_tiles(g->c->h.C) * KEYS) * D * 2;
    const dim3 grid(units, (unsigned)g->c->h.S);
    STI_CUDA(cudaFuncSetAttribute(score_kernel<D, Pieces>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "hybrid attention, scores");
    score_kernel<D><<<grid, THREADS, bytes, g->stream>>>(pieces);
    STI_CUDA(cudaGetLastError(), "hybrid attention, scores");
    return STILL_OK;
}

extern "C" still_status sti_chunk_score(const sti_chunk_group *g, still_error *err)
{
    const sti_chunk_piece *c = g->c;
    if (c->select == 0) return STILL_OK; /* nothing is selected */
    switch (sti_score_source_of(c->h.score)) {
    case STI_FROM_SELF:
        return launch_units(g, query_tiles_of, [&](unsigned units, const auto &pieces) {
            return c->h.D == 128 ? launch<128>(g, units, pieces, err)
                                 : launch<64>(g, units, pieces, err);
        });
    case STI_FROM_QUERIES: return sti_chunk_received(g, err);
    case STI_FROM_KEY:
    case STI_FROM_POSITION:
        return launch_units(g, token_blocks, [&](unsigned units, const auto &pieces) {
            const dim3 grid(units, (unsigned)c->h.S);
            plain_score_kernel<<<grid, THREADS, 0, g->stream>>>(pieces);
            STI_CUDA(cudaGetLastError(), "hybrid attention, scores");
            return STILL_OK;
        });
    case STI_FROM_CHUNK:
        return launch_units(g, chunks_of, [&](unsigned units, const auto &pieces) {
            const dim3 grid(units, (unsigned)c->h.S);
            distinct_kernel<<<grid, THREADS, 0, g->stream>>>(pieces);
            STI_CUDA(cudaGetLastError(), "hybrid attention, scores");
            return STILL_OK;
        });
    default: return sti_cuda_score_check((sti_score_kind)c->h.score, err);
    }
}
