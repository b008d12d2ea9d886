/* prefill.cuh - the parts of prefill.cu: copies of queries, keys and values to shared
 * memory, and the softmax of a warp's rows. */
#ifndef STI_BACKEND_CUDA_SOFTMAX_PREFILL_CUH
#define STI_BACKEND_CUDA_SOFTMAX_PREFILL_CUH

#include "backend/cuda/softmax/parts.cuh"

using namespace sti_attn;

namespace
{

enum { WARPS = 4, THREADS = WARPS * 32, ROWS = WARPS * 32, KEYS = 64 };

/* Heads of up to DP dims; what fetch_keys and fetch_queries need comes first. */
template <int DP> struct plan {
    static constexpr int KEYS = ::KEYS, ROWS = ::ROWS;
    static constexpr int ROW = DP * 2;           /* bytes from a row to the next */
    static constexpr int WORDS = DP / 8;         /* of 16 bytes, of a row */
    static constexpr int STEP = THREADS / WORDS; /* rows that a block copies at once */
    static __device__ __forceinline__ int place(int row, int word)
    {
        return row * ROW + ((word ^ (row & 7)) << 4);
    }
    static constexpr int QUERIES = ROWS * ROW, PART = KEYS * ROW, STAGE = 2 * PART;
    static constexpr int STAGES = DP == 64 ? 3 : 2, SHARED = QUERIES + STAGES * STAGE;
    static_assert(STEP % 8 == 0, "a thread's words swap places alike in all its rows");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    static constexpr bool TOGETHER = DP == 64;
#else
    static constexpr bool TOGETHER = false;
#endif
    /* Rows from a warp's first to the next warp's, and to its second fragment's. */
    static constexpr int DOWN = TOGETHER ? 16 : 32, ACROSS = TOGETHER ? 64 : 16;
};

/* ---- Copies -------------------------------------------------------------- */

template <int DP>
static __device__ __forceinline__ void fetch_stage(const job &b, int n, uint32_t stages)
{
    uint32_t to = stages + n % plan<DP>::STAGES * plan<DP>::STAGE;
    fetch_keys<plan<DP>>(b, b.K, n * KEYS, to);
    fetch_keys<plan<DP>>(b, b.V, n * KEYS, to + plan<DP>::PART);
    cp_async_commit();
}

/* ---- Arithmetic of a warp ------------------------------------------------ */

/* Of lane = 4 r + q: rows ACROSS i + 8 h + r (i, h = 0, 1), at m[i][h], l[i][h] (l:
 * over this lane's keys) and sum[i][n][2 h ..], dims 8 n + 2 q, + 1. */
template <int DP> struct rows {
    float sum[2][DP / 8][4], m[2][2], l[2][2];
};
typedef float logits[KEYS / 8][4];      /* as sum[i]: keys for dims */
typedef uint32_t weights[KEYS / 16][4]; /* the same as halves, ready to multiply */

/* Logits that row t does not see: j > t, or j <= t - window. t0: the fragment's first
 * row. */
static __device__ __forceinline__ void mask(logits &s, const job &b, int t0, int j0)
{
    int lane = threadIdx.x % 32, last = b.past + b.n - 1;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int t = min(t0 + 8 * h + lane / 4, last);
        int from = first_key(t, b.window);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int j = j0 + 8 * n + 2 * (lane % 4) + e;
                if (j > t || j < from) s[n][2 * h + e] = -INFINITY;
            }
    }
}

/* s = 2^(scale s - m) of fragment i, with m and l brought up to date; the sums so far
 * are to be multiplied by shrink. */
template <int DP>
static __device__ __forceinline__ void weigh(rows<DP> &x, int i, logits &s,
                                             float (&shrink)[2], float scale)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = -INFINITY, total = 0;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
            top = fmaxf(top, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
        top = quad_max(top) * scale;
        bool grows = top > x.m[i][h] + SLACK;
        float m = grows ? top : x.m[i][h];
        shrink[h] = grows ? exp2_fast(x.m[i][h] - m) : 1.f;
        x.m[i][h] = m;
        float zero = m == -INFINITY ? 0.f : m; /* no key seen yet: weights are 0 */
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 2 * h; e < 2 * h + 2; e++) {
                s[n][e] = exp2_fast(fmaf(s[n][e], scale, -zero));
                total += s[n][e];
            }
        x.l[i][h] = x.l[i][h] * shrink[h] + total;
    }
}

static __device__ __forceinline__ void pack_weights(weights &p, const logits &s)
{
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            p[n / 2][n % 2 * 2 + h] = pack_half2(s[n][2 * h], s[n][2 * h + 1]);
}

template <int DP>
static __device__ __forceinline__ void scale_sums(rows<DP> &x, int i,
                                                  const float (&shrink)[2])
{
    if (!__any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f)) return;
#pragma unroll
    for (int n = 0; n < DP / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) x.sum[i][n][e] *= shrink[e / 2];
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
            int row =
                b.row + warp * plan<DP>::DOWN + plan<DP>::ACROSS * i + 8 * h + lane / 4;
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

} // namespace

#endif
