/* score.cu - the score of every new token of a piece, mean over the query heads of its
 * selection head: the launchers by where a score comes from (score.h), and the kernels
 * of all but received (received.cu).
 *
 * score_kernel, STILL eq. 2 to 5: the softmax of each token over the last C tokens. A
 * block takes 128 queries and the C + 128 keys about them, which stay in shared memory
 * while it goes through the query heads; so the mean is a sum in registers, in a fixed
 * order. A warp has 16 queries and goes through groups of 16 keys, C / 16 + 1 of them,
 * on its own. Of these only the first and the last are partly seen, and what a query
 * sees of the last is what it does not see of the first: one takes the other's place,
 * so that C logits a query are left and no other needs a mask. Queries go straight from
 * memory to the registers of fragments, four numbers a lane; keys lie in shared memory
 * in the order of dims that follows from it. Tiles begin at positions that are multiples
 * of 128, so a token's score does not depend on how a prompt was cut. Bounded by the
 * read of q. */
#include "backend/cuda/hybrid/chunk/chunk.h"
#include "backend/cuda/hybrid/score.h"
#include "backend/cuda/ptx/mma.cuh"

enum {
    THREADS = 256,
    QUERIES = 128,
    GROUP = 16,  /* keys of a product; queries of a warp */
    TOGETHER = 3 /* groups whose logits are held at once */
};

/* Keys that 128 queries can see, and one more. */
static __host__ __device__ __forceinline__ int keys_of(int C)
{
    return C + QUERIES;
}

/* ---- Logits -------------------------------------------------------------- */

/* The 16 dims of a group of dims are taken in the order 0 1 4 5 8 9 12 13, 2 3 6 7 10 11
 * 14 15: a lane's two pairs of a fragment are then dims that follow each other. */

/* Keys of rows from `from` to `end`, as far as there are any; others are those nearest
 * by. */
template <int D>
static __device__ __forceinline__ void load_keys(unsigned char *to, const __half *keys,
                                                 int from, int n, int end)
{
    const int groups = D / 16;
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < n * groups; i += THREADS) {
        const int r = i / groups, u = i % groups * 2;
        const int row = min(max(from + r, 0), end - 1);
        const uint4 *x = (const uint4 *)(keys + (size_t)row * D) + u;
        const uint4 a = x[0], b = x[1];
        *(uint4 *)(to + unit_at<D>(r, u)) = make_uint4(a.x, a.z, b.x, b.z);
        *(uint4 *)(to + unit_at<D>(r, u + 1)) = make_uint4(a.y, a.w, b.y, b.w);
    }
}

/* The two rows of queries of this lane, x[0] and x[1], to fragments of 16 rows. */
template <int D>
static __device__ __forceinline__ void
load_queries(uint32_t (&q)[D / 16][4], const float *const (&x)[2], int lane)
{
#pragma unroll
    for (int ks = 0; ks < D / 16; ks++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float4 y = *(const float4 *)(x[i] + ks * 16 + (lane & 3) * 4);
            q[ks][i] = cvt_half2_sat(y.x, y.y);
            q[ks][i + 2] = cvt_half2_sat(y.z, y.w);
        }
}

/* Logits of a warp's queries with groups of keys; C fragments. */
typedef float group_logits[2][4];

/* s: with group `from`, the next, and group `last`; keys: of the first that the warp's
 * queries see (by8). */
template <int D>
static __device__ __forceinline__ void
multiply_groups(group_logits (&s)[TOGETHER], const uint32_t (&q)[D / 16][4],
                lane_address<D> keys, int from, int last)
{
    const lane_address<D> near = {keys.at(from * GROUP, 0)};
    const lane_address<D> far = {keys.at(last * GROUP, 0)};
#pragma unroll
    for (int n = 0; n < TOGETHER; n++)
#pragma unroll
        for (int e = 0; e < 8; e++) s[n][e / 4][e % 4] = 0;
#pragma unroll
    for (int ks = 0; ks < D / 16; ks++)
#pragma unroll
        for (int n = 0; n < TOGETHER; n++) {
            uint32_t two[4];
            ldmatrix_x4(two, n < TOGETHER - 1 ? near.at(n * GROUP, ks) : far.at(0, ks));
            mma(s[n][0], q[ks], two[0], two[1]);
            mma(s[n][1], q[ks], two[2], two[3]);
        }
}

static __device__ __forceinline__ void hide(group_logits &s)
{
#pragma unroll
    for (int e = 0; e < 8; e++) s[e / 4][e % 4] = -INFINITY;
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

/* STILL eq. 2: row t of the 16 sees keys 0 .. t of the last group, and of the first,
 * C tokens before, those behind t: they take the others' place there. Takes the logits
 * of the tokens themselves out. */
static __device__ __forceinline__ void join_ends(row_sums &r, group_logits &first,
                                                 const group_logits &last, float scale,
                                                 int lane)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int nt = 0; nt < 2; nt++)
#pragma unroll
            for (int x = 0; x < 2; x++) {
                const int t = i * 8 + (lane >> 2), j = nt * 8 + (lane & 3) * 2 + x;
                float &l = first[nt][2 * i + x];
                l = j <= t ? last[nt][2 * i + x] : l;
                if (j == t) {
                    r.self[i] = l * scale;
                    l = -INFINITY;
                }
            }
        r.top[i] = r.self[i];
    }
}

/* STILL eq. 3, its sum: the first N groups of s, still to be scaled. */
template <int N>
static __device__ __forceinline__ void
add_logits(row_sums &r, const group_logits (&s)[TOGETHER], float scale)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float top = -INFINITY;
#pragma unroll
        for (int n = 0; n < N * 2; n++)
            top = fmaxf(top, fmaxf(s[n / 2][n % 2][2 * i], s[n / 2][n % 2][2 * i + 1]));
        top = fmaxf(r.top[i], top * scale);
        const float shift = top == -INFINITY ? 0 : top;
        float sum = r.others[i] * exp2_fast(r.top[i] - shift);
#pragma unroll
        for (int n = 0; n < N * 2; n++)
            sum += exp2_fast(fmaf(s[n / 2][n % 2][2 * i], scale, -shift)) +
                   exp2_fast(fmaf(s[n / 2][n % 2][2 * i + 1], scale, -shift));
        r.top[i] = top;
        r.others[i] = sum;
    }
}

/* STILL eq. 2, 3 of a warp's queries, the first at token row `query`; keys: of the token
 * C before it (by8). Rows below 0 are no tokens; groups are below it or not. */
template <int D>
static __device__ __forceinline__ row_sums sums_of(const uint32_t (&q)[D / 16][4],
                                                   lane_address<D> keys, int query,
                                                   int C, float scale, int lane)
{
    const int last = C / GROUP, first = max(last - query / GROUP, 0); /* with tokens */
    row_sums r;
    group_logits s[TOGETHER];
    clear_sums(r);
    multiply_groups<D>(s, q, keys, 0, last);
    if (first > 0) hide(s[0]);
    if (first > 1 || last == 1) hide(s[1]);
    join_ends(r, s[0], s[2], scale, lane);
    add_logits<2>(r, s, scale);
#pragma unroll 1
    for (int n = 2; n < last; n += TOGETHER) {
        if (n + TOGETHER <= first) continue;
        multiply_groups<D>(s, q, keys, n, min(n + 2, last));
        if (n < first || n + TOGETHER > last) {
            if (n < first) hide(s[0]);
            if (n + 1 < first || n + 1 >= last) hide(s[1]);
            if (n + 2 < first || n + 2 >= last) hide(s[2]);
        }
        add_logits<TOGETHER>(r, s, scale);
    }
    return r;
}

/* STILL eq. 5: the score of row lane % 2 of this lane's two, whose sums its four lanes
 * have parts of. */
static __device__ __forceinline__ float score_of_row(int score, const row_sums &r,
                                                     int lane, float eps)
{
    float self[2], others[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float top = quad_max(r.top[i]); /* the token sees itself: finite */
        others[i] = quad_sum(r.others[i] * exp2_fast(r.top[i] - top));
        self[i] = exp2_fast(quad_max(r.self[i]) - top);
    }
    const bool second = lane % 2 != 0;
    return self_score(score, second ? self[1] : self[0], second ? others[1] : others[0],
                      eps);
}

/* Shared memory: keys [C + 128, D]. Grid (query tiles, kv heads). */
template <int D, class Pieces>
static __global__ void __launch_bounds__(THREADS, 2)
    score_kernel(const __grid_constant__ Pieces pieces)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    int query_tile = (int)blockIdx.x, query_tiles;
    const sti_chunk_piece &c = pieces.find(query_tile, query_tiles);
    const int g = (int)blockIdx.y, lane = (int)threadIdx.x & 31, C = c.h.C;
    const int begin = c.pos - c.base, end = begin + c.T; /* rows count from base */
    const int first = (c.pos / QUERIES + query_tile) * QUERIES - c.base;
    const int within = ((int)threadIdx.x >> 5) * GROUP, query = first + within;
    /* Queries of the warp's token t, or of the nearest that is in the piece. */
    const auto queries_of = [&](int t) {
        const int row = min(max(query + t, begin), end - 1) - begin;
        return c.s.q + ((size_t)row * c.h.H + (size_t)g * c.h.group) * D;
    };
    /* The warp's queries of head n of the group, a line of 32 floats a lane. */
    const auto prefetch = [&](int n) {
        const int lines = D / 32;
        for (int i = lane; i < GROUP * lines; i += 32)
            prefetch_l2(queries_of(i / lines) + n * D + i % lines * 32);
    };

    prefetch(0);
    load_keys<D>(shared, c.k + ((size_t)g * c.rows + c.capacity) * D, first - C,
                 keys_of(C), end);
    __syncthreads();
    const lane_address<D> keys =
        lane_address<D>::by8(shared_address(shared) + (uint32_t)within * D * 2, lane);
    const float scale = c.h.scale * log2_e;
    const float *x[2] = {queries_of(lane >> 2), queries_of(8 + (lane >> 2))};
    float mean = 0;
    for (int n = 0; n < c.h.group; n++) {
        uint32_t q[D / 16][4];
        load_queries<D>(q, x, lane);
        x[0] += D;
        x[1] += D;
        if (n + 1 < c.h.group) prefetch(n + 1);
        const row_sums sums = sums_of<D>(q, keys, query, C, scale, lane);
        mean += score_of_row(c.h.score, sums, lane, c.h.eps) / (float)c.h.group;
    }
    const int t = query + lane % 2 * 8 + (lane >> 2);
    if ((lane & 3) < 2 && t >= begin && t < end)
        c.score[(size_t)g * c.rows + c.capacity + t] = mean;
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
    const int bytes = keys_of(g->c->h.C) * D * 2;
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
