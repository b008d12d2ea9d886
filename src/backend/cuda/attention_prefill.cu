/* attention_prefill.cu - many rows of a session against its cache of halves, on any GPU
 * from sm_80 on (after FlashAttention-2: Dao, 2023).
 *
 * Bounded by tensor cores. A block takes ROWS queries of one head and walks over the
 * keys they see, KEYS at a time; logits and weights live in registers only. A warp has
 * 32 of the rows, two fragments high, so that what it reads of keys and values from
 * shared memory is used twice: with 16 rows shared memory would be the bound. Two
 * blocks share a multiprocessor: one's exponentials run beside the other's products.
 *
 * Shared memory: queries [ROWS, DP], then two stages of keys and values [KEYS, DP]
 * each. 16-byte words of a row change places by the row's low bits, so that the eight
 * rows of a matrix that ldmatrix reads lie in different banks. The next stage is copied
 * while this one is used: one barrier a stage. */
#include "backend/cuda/attention_parts.cuh"

using namespace sti_attn;

namespace
{

enum { WARPS = 4, THREADS = WARPS * 32, ROWS = WARPS * 32, KEYS = 64 };

/* Heads of up to DP dims. */
template <int DP> struct plan {
    static constexpr int ROW = DP * 2;           /* bytes of a row */
    static constexpr int WORDS = DP / 8;         /* of 16 bytes, of a row */
    static constexpr int STEP = THREADS / WORDS; /* rows that a block copies at once */
    static constexpr int QUERIES = ROWS * ROW, PART = KEYS * ROW, STAGE = 2 * PART;
    static constexpr int SHARED = QUERIES + 2 * STAGE;
    static_assert(STEP % 8 == 0, "a thread's words swap places alike in all its rows");
};

/* Byte offset of a word in a tile. */
template <int DP> static __device__ __forceinline__ int place(int row, int word)
{
    return row * plan<DP>::ROW + ((word ^ (row & 7)) << 4);
}

/* ---- Copies ---------------------------------------------------------------------- */

/* Keys [off, off + KEYS) after `first`, of K or V, to a tile at `to`. */
template <int DP>
static __device__ __forceinline__ void fetch(const job &b, const half *from, int off,
                                             uint32_t to)
{
    constexpr int STEP = plan<DP>::STEP;
    int word = threadIdx.x % plan<DP>::WORDS, row = threadIdx.x / plan<DP>::WORDS;
    int start = ring_row(b.first_row, off, b.room), left = b.end - b.first - off;
    bool inside = word * 8 < b.D;
    from += inside ? word * 8 : 0;
    to += place<DP>(row, word);
    if (start + KEYS <= b.room && left >= KEYS) {
        from += (size_t)(start + row) * b.D;
#pragma unroll
        for (int i = 0; i < KEYS / STEP; i++)
            copy16(to + i * STEP * plan<DP>::ROW, from + i * STEP * b.D, inside);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < KEYS / STEP; i++) {
        bool there = row + i * STEP < left;
        int at = ring_row(start, there ? row + i * STEP : 0, b.room);
        copy16(to + i * STEP * plan<DP>::ROW, from + (size_t)at * b.D, there && inside);
    }
}

template <int DP>
static __device__ __forceinline__ void fetch_stage(const job &b, int n, uint32_t stages)
{
    uint32_t to = stages + n % 2 * plan<DP>::STAGE;
    fetch<DP>(b, b.K, n * KEYS, to);
    fetch<DP>(b, b.V, n * KEYS, to + plan<DP>::PART);
    copies_commit();
}

/* Queries as halves; rows and dims that do not exist are zero. ld: floats between rows.
 */
template <int DP>
static __device__ __forceinline__ void fetch_queries(const job &b, const float *q,
                                                     size_t ld, char *to)
{
    constexpr int STEP = plan<DP>::STEP;
    int word = threadIdx.x % plan<DP>::WORDS, row = threadIdx.x / plan<DP>::WORDS;
    q += b.row * ld + word * 8;
#pragma unroll 4
    for (int i = row; i < ROWS; i += STEP) {
        uint4 x = make_uint4(0, 0, 0, 0);
        if (word * 8 < b.D && b.row + i < b.n) {
            const float4 *from = reinterpret_cast<const float4 *>(q + i * ld);
            x = pack8(from[0], from[1]);
        }
        *reinterpret_cast<uint4 *>(to + place<DP>(i, word)) = x;
    }
}

/* ---- Arithmetic of a warp -------------------------------------------------------- */

/* Of lane = 4 r + q: rows 16 i + 8 h + r (i, h = 0, 1), at m[i][h], l[i][h] (l: over
 * this lane's keys) and sum[i][n][2 h ..], dims 8 n + 2 q, + 1. */
template <int DP> struct rows {
    float sum[2][DP / 8][4], m[2][2], l[2][2];
};
typedef float logits[2][KEYS / 8][4];      /* as sum: keys for dims */
typedef uint32_t weights[2][KEYS / 16][4]; /* the same as halves, ready to multiply */

/* s = Q K^T. `queries`: the warp's rows; both addresses with this lane's part in them.
 */
template <int DP>
static __device__ __forceinline__ void multiply_keys(logits &s, uint32_t queries,
                                                     uint32_t keys)
{
#pragma unroll
    for (int k = 0; k < DP / 16; k++) {
        uint32_t a[2][4];
        load4(a[0], queries ^ (k << 5));
        load4(a[1], (queries ^ (k << 5)) + 16 * plan<DP>::ROW);
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            uint32_t b[4];
            load4(b, (keys ^ (k << 5)) + n * 16 * plan<DP>::ROW);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                mma(s[i][2 * n], a[i][0], a[i][1], a[i][2], a[i][3], b[0], b[1]);
                mma(s[i][2 * n + 1], a[i][0], a[i][1], a[i][2], a[i][3], b[2], b[3]);
            }
        }
    }
}

/* sum += P V. */
template <int DP>
static __device__ __forceinline__ void multiply_values(rows<DP> &x, const weights &p,
                                                       uint32_t values)
{
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
        for (int n = 0; n < DP / 16; n++) {
            uint32_t b[4];
            load4_transposed(b, (values ^ (n << 5)) + k * 16 * plan<DP>::ROW);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                mma(x.sum[i][2 * n], p[i][k][0], p[i][k][1], p[i][k][2], p[i][k][3],
                    b[0], b[1]);
                mma(x.sum[i][2 * n + 1], p[i][k][0], p[i][k][1], p[i][k][2], p[i][k][3],
                    b[2], b[3]);
            }
        }
}

/* Logits that row t does not see: j > t, or j <= t - window. */
static __device__ __forceinline__ void mask(logits &s, const job &b, int t0, int j0)
{
    int lane = threadIdx.x % 32, last = b.past + b.n - 1;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int t = min(t0 + 16 * i + 8 * h + lane / 4, last);
            int from = first_key(t, b.window);
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    int j = j0 + 8 * n + 2 * (lane % 4) + e;
                    if (j > t || j < from) s[i][n][2 * h + e] = -INFINITY;
                }
        }
}

/* p = 2^(scale s - m), with m, l and the sums so far brought up to date. */
template <int DP>
static __device__ __forceinline__ void weigh(rows<DP> &x, logits &s, weights &p,
                                             float scale)
{
    float shrink[2][2];
    bool grown = false;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float top = -INFINITY;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
                top = fmaxf(top, fmaxf(s[i][n][2 * h], s[i][n][2 * h + 1]));
            top = quad_max(top) * scale;
            bool grows = top > x.m[i][h] + SLACK;
            float m = grows ? top : x.m[i][h];
            shrink[i][h] = grows ? power2(x.m[i][h] - m) : 1.f;
            grown |= grows;
            x.m[i][h] = m;
            float zero = m == -INFINITY ? 0.f : m; /* no key seen yet: p = 0 */
            float total = 0;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
                float a = power2(fmaf(s[i][n][2 * h], scale, -zero));
                float c = power2(fmaf(s[i][n][2 * h + 1], scale, -zero));
                total += a + c;
                p[i][n / 2][n % 2 * 2 + h] = pack(a, c);
            }
            x.l[i][h] = x.l[i][h] * shrink[i][h] + total;
        }
    if (__any_sync(~0u, grown)) {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int n = 0; n < DP / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) x.sum[i][n][e] *= shrink[i][e / 2];
    }
}

template <int DP>
static __device__ __forceinline__ void write_rows(rows<DP> &x, const job &b, float *o,
                                                  size_t ld)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = b.row + warp * 32 + 16 * i + 8 * h + lane / 4;
            float scale = 1 / quad_sum(x.l[i][h]);
            float *to = o + row * ld + 2 * (lane % 4);
            if (row >= b.n) continue;
#pragma unroll
            for (int n = 0; n < DP / 8; n++)
                if (8 * n < b.D)
                    *reinterpret_cast<float2 *>(to + 8 * n) = make_float2(
                        x.sum[i][n][2 * h] * scale, x.sum[i][n][2 * h + 1] * scale);
        }
}

/* ---- Kernel ---------------------------------------------------------------------- */

template <int DP>
__global__ void __launch_bounds__(THREADS, 2)
    prefill(const __grid_constant__ sti_cuda_attn a)
{
    extern __shared__ __align__(1024) char shared[];
    __shared__ job b; /* registers are for the sums */
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) b = find_job(a, ROWS);
    __syncthreads();
    uint32_t queries = shared_address(shared), stages = queries + plan<DP>::QUERIES;
    fetch_stage<DP>(b, 0, stages);
    fetch_queries<DP>(b, a.q + b.out, (size_t)a.H * a.D, shared);

    rows<DP> x;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        x.m[i][0] = x.m[i][1] = -INFINITY;
        x.l[i][0] = x.l[i][1] = 0;
#pragma unroll
        for (int n = 0; n < DP / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) x.sum[i][n][e] = 0;
    }
    /* Of the four matrices that a load takes, a lane points into number lane / 8: they
     * lie two rows of matrices high and two wide, in the order the products want. */
    int down = lane / 8 % 2, right = lane / 16, row = lane % 8;
    queries += place<DP>(warp * 32 + down * 8 + row, right);
    uint32_t key_at = place<DP>(right * 8 + row, down);
    uint32_t value_at = place<DP>(down * 8 + row, right) + plan<DP>::PART;

    int t0 = b.past + b.row + warp * 32; /* the warp's first and last row */
    int t1 = b.row + warp * 32 < b.n ? min(t0 + 31, b.past + b.n - 1) : -1;
    int tiles = (b.end - b.first + KEYS - 1) / KEYS;
    for (int n = 0; n < tiles; n++) {
        copies_wait<0>();
        __syncthreads();
        if (n + 1 < tiles) fetch_stage<DP>(b, n + 1, stages);
        int j0 = b.first + n * KEYS, j1 = j0 + KEYS - 1;
        if (j0 > t1) continue;
        uint32_t stage = stages + n % 2 * plan<DP>::STAGE;
        weights p;
        {
            logits s = {};
            multiply_keys<DP>(s, queries, stage + key_at);
            if (j1 > t0 || j0 < first_key(t1, b.window)) mask(s, b, t0, j0);
            weigh<DP>(x, s, p, a.scale);
        }
        multiply_values<DP>(x, p, stage + value_at);
    }
    write_rows<DP>(x, b, a.o + b.out, (size_t)a.H * a.D);
}

template <int DP>
still_status launch(sti_dev *dev, const sti_cuda_attn *a, still_error *err)
{
    unsigned blocks = 0;
    for (int s = 0; s < a->n_seg; s++)
        blocks += (unsigned)((a->seg[s].n + ROWS - 1) / ROWS * a->H);
    STI_CUDA(cudaFuncSetAttribute(prefill<DP>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  plan<DP>::SHARED),
             "attention: shared memory of prefill");
    prefill<DP><<<blocks, THREADS, plan<DP>::SHARED, dev->stream>>>(*a);
    STI_CUDA(cudaGetLastError(), "attention: prefill");
    return STILL_OK;
}

} // namespace

extern "C" still_status sti_cuda_attn_prefill(sti_dev *dev, const sti_cuda_attn *a,
                                              still_error *err)
{
    return a->D <= 64 ? launch<64>(dev, a, err) : launch<128>(dev, a, err);
}
