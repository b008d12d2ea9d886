/* received.cu - scores from the weights that later queries give a token: for every
 * token that queries of a piece see, the sum of these in the softmax over their window
 * (their chunk and the one before), mean over the query heads of its selection head.
 * The token itself is not among them. select divides by their number when the chunk
 * retires.
 *
 *   norms      of every query, log2 of the denominator of that softmax
 *   received   keys go through the queries behind them; with the denominators known a
 *              weight is one power of two, and a key's sum stays in registers
 *
 * So logits are computed twice, but no block adds to the sums of another, and sums have
 * the same order in every run. Tiles of 64 queries begin at positions that are
 * multiples of 64; how a prompt was cut still shows in the last digits, since a sum
 * continues that of the piece before. Blocks of four warps with 16 rows each. */
#include "backend/cuda/hybrid/chunk/logits.cuh"

enum { THREADS = 128, TILE = STI_LOGIT_COLUMNS };

/* Token rows count from c.base, which begins a chunk. The first key that query t sees,
 * and the first query behind those that see key j. */
static __device__ __forceinline__ int window_begin(int t, int C)
{
    return max((t / C - 1) * C, 0);
}
static __device__ __forceinline__ int last_query(int j, int C)
{
    return (j / C + 2) * C;
}

/* Token rows [first, first + 64) of the keys of selection head g, in the background;
 * beyond the last one stands the last. */
template <int D>
static __device__ __forceinline__ void load_keys(const sti_chunk_piece &c, int g,
                                                 int first, int end, uint32_t tile)
{
    const __half *keys = c.k + ((size_t)g * c.rows + c.capacity) * D;
    for (int i = (int)threadIdx.x; i < TILE * (D / 8); i += THREADS) {
        const int r = i / (D / 8), u = i % (D / 8);
        cp_async16(tile + unit_at<D>(r, u),
                   keys + (size_t)min(first + r, end - 1) * D + u * 8);
    }
    cp_async_commit();
}

/* The queries of token rows [first, first + 64); rows outside the piece have some
 * other's. */
template <int D>
static __device__ __forceinline__ void load_queries(const sti_chunk_piece &c, int head,
                                                    int first, unsigned char *tile)
{
    const int begin = c.pos - c.base;
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < TILE * (D / 8); i += THREADS) {
        const int r = i / (D / 8), u = i % (D / 8);
        const int row = min(max(first + r - begin, 0), c.T - 1);
        const float4 *q =
            (const float4 *)(c.s.q + ((size_t)row * c.h.H + head) * D + u * 8);
        *(uint4 *)(tile + unit_at<D>(r, u)) = pack_half8(q[0], q[1]);
    }
}

/* ---- Norms --------------------------------------------------------------- */

/* Logits s, still to be scaled, of row t (element i of C's two) and 64 keys join the
 * lane's maximum and sum. key: the first of this lane. */
static __device__ __forceinline__ void add_row(const float (&s)[8][4], int i, int t,
                                               int first, int key, float scale,
                                               float &top, float &sum)
{
    float l[16], most = top;
#pragma unroll
    for (int n = 0; n < 16; n++) {
        const int j = key + n / 2 * 8 + n % 2;
        l[n] = j <= t && j >= first ? s[n / 2][2 * i + n % 2] * scale : -INFINITY;
        most = fmaxf(most, l[n]);
    }
    const float shift = most == -INFINITY ? 0 : most;
    sum *= exp2_fast(top - shift);
#pragma unroll
    for (int n = 0; n < 16; n++) sum += exp2_fast(l[n] - shift);
    top = most;
}

/* Grid (query tiles, query heads). Shared memory: queries, two tiles of keys. */
template <int D, class Pieces>
static __global__ void __launch_bounds__(THREADS)
    norms_kernel(const __grid_constant__ Pieces pieces)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    int query_tile = (int)blockIdx.x, tiles;
    const sti_chunk_piece &c = pieces.find(query_tile, tiles);
    const int head = (int)blockIdx.y, g = head / c.h.group, C = c.h.C;
    const int tid = (int)threadIdx.x, lane = tid & 31;
    const int begin = c.pos - c.base, end = begin + c.T;
    const int first = (c.pos / TILE + query_tile) * TILE - c.base;
    const int query = first + (tid >> 5) * 16; /* of this warp */
    const int seen = min(first + TILE, end);   /* keys from here on nobody sees */
    const uint32_t q_tile = shared_address(shared), k_tiles = q_tile + TILE * D * 2;

    int key = window_begin(max(first, begin), C);
    load_keys<D>(c, g, key, end, k_tiles);
    load_queries<D>(c, head, first, shared);
    __syncthreads();
    uint32_t q[D / 16][4];
    load_rows<D>(
        q, lane_address<D>::by16(q_tile + (uint32_t)(tid >> 5) * 16 * D * 2, lane));
    const lane_address<D> k_at = lane_address<D>::by8(k_tiles, lane);
    const float scale = c.h.scale * log2_e;
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    for (int step = 0; key < seen; step++, key += TILE) {
        cp_async_wait<0>();
        __syncthreads(); /* this tile is here, and all are done with the one before */
        if (key + TILE < seen)
            load_keys<D>(c, g, key + TILE, end,
                         k_tiles + (uint32_t)(~step & 1) * TILE * D * 2);
        if (key > query + 15 || key + TILE <= window_begin(query, C)) continue;
        float s[8][4];
        multiply<D>(s, q, k_at, (step & 1) * TILE);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int t = query + i * 8 + (lane >> 2);
            add_row(s, i, t, window_begin(t, C), key + (lane & 3) * 2, scale, top[i],
                    sum[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int t = query + i * 8 + (lane >> 2);
        const float most = quad_max(top[i]); /* finite where the token is one */
        const float all = quad_sum(sum[i] * exp2_fast(top[i] - most));
        if ((lane & 3) == 0 && t >= begin && t < end)
            c.norm[(size_t)head * c.T + t - begin] = most + log2f(all);
    }
}

/* ---- Received ------------------------------------------------------------ */

/* Grid (key tiles, selection heads). Shared memory: keys, queries, their norms. A query
 * outside the piece has the norm infinity: it gives nothing. */
template <int D, class Pieces>
static __global__ void __launch_bounds__(THREADS)
    received_kernel(const __grid_constant__ Pieces pieces)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ float norm[TILE];
    int key_tile = (int)blockIdx.x, tiles;
    const sti_chunk_piece &c = pieces.find(key_tile, tiles);
    const int g = (int)blockIdx.y, C = c.h.C;
    const int tid = (int)threadIdx.x, lane = tid & 31;
    const int begin = c.pos - c.base, end = begin + c.T;
    const int first = key_tile * TILE;
    const int row = first + (tid >> 5) * 16 + (lane >> 2); /* and row + 8 */
    const uint32_t k_tile = shared_address(shared), q_tile = k_tile + TILE * D * 2;

    load_keys<D>(c, g, first, end, k_tile);
    cp_async_wait<0>();
    __syncthreads();
    uint32_t k[D / 16][4];
    load_rows<D>(
        k, lane_address<D>::by16(k_tile + (uint32_t)(tid >> 5) * 16 * D * 2, lane));
    const lane_address<D> q_at = lane_address<D>::by8(q_tile, lane);
    const float scale = c.h.scale * log2_e;
    const int until = min(end, last_query(first + TILE - 1, C));
    float sum[2] = {0, 0};
    for (int query = (c.base + max(begin, first + 1)) / TILE * TILE - c.base;
         query < until; query += TILE)
        for (int n = 0; n < c.h.group; n++) {
            const int head = g * c.h.group + n;
            __syncthreads(); /* all are done with the queries before */
            load_queries<D>(c, head, query, shared + TILE * D * 2);
            if (tid < TILE) {
                const int t = query + tid - begin;
                norm[tid] =
                    t >= 0 && t < c.T ? c.norm[(size_t)head * c.T + t] : INFINITY;
            }
            __syncthreads();
            float s[8][4];
            multiply<D>(s, k, q_at, 0);
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int column = i / 2 * 8 + (lane & 3) * 2 + i % 2;
                const int t = query + column;
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const int j = row + 8 * r;
                    const float w =
                        exp2_fast(s[i / 2][2 * r + i % 2] * scale - norm[column]);
                    sum[r] += t > j && t < last_query(j, C) ? w : 0;
                }
            }
        }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int j = row + 8 * r, position = c.base + j, window = 2 * C;
        const float more = quad_sum(sum[r]) / (float)c.h.group;
        if ((lane & 3) != 0 || j >= end) continue;
        float *score = c.score + (size_t)g * c.rows + c.capacity + j;
        const float all = j < begin ? *score + more : more;
        *score = all;
        if (position >= c.pos + c.T - window)
            c.s.win_received[(size_t)g * window + position % window] = all;
    }
}

/* ---- Entry --------------------------------------------------------------- */

static int query_tiles_of(const sti_chunk_piece &c)
{
    return (c.pos + c.T - 1) / TILE - c.pos / TILE + 1;
}

static int key_tiles_of(const sti_chunk_piece &c)
{
    return (c.pos + c.T - c.base + TILE - 1) / TILE;
}

template <int D>
static still_status received(const sti_chunk_group *g, still_error *err)
{
    enum { TILE_BYTES = TILE * D * 2 };
    const sti_cuda_hybrid_params *h = &g->c->h;
    STI_TRY(launch_units(g, query_tiles_of, [&](unsigned units, const auto &pieces) {
        const dim3 grid(units, (unsigned)h->H);
        norms_kernel<D><<<grid, THREADS, 3 * TILE_BYTES, g->stream>>>(pieces);
        STI_CUDA(cudaGetLastError(), "hybrid attention, norms of weights");
        return STILL_OK;
    }));
    return launch_units(g, key_tiles_of, [&](unsigned units, const auto &pieces) {
        const dim3 grid(units, (unsigned)h->S);
        received_kernel<D><<<grid, THREADS, 2 * TILE_BYTES, g->stream>>>(pieces);
        STI_CUDA(cudaGetLastError(), "hybrid attention, received weights");
        return STILL_OK;
    });
}

extern "C" still_status sti_chunk_received(const sti_chunk_group *g, still_error *err)
{
    return g->c->h.D == 128 ? received<128>(g, err) : received<64>(g, err);
}
