/* tile.cuh - what the kernels of linear.h share: launching, where a block is,
 * the numbers of one token, tiles of 16 tokens in shared memory and products of them.
 *
 * Rows of tiles are LD = DP + 4 floats apart. A block of the scans has 4 warps;
 * products with 16 rows are shared by columns, DP / 4 a warp. */
#ifndef STI_BACKEND_CUDA_LINEAR_TILE_CUH
#define STI_BACKEND_CUDA_LINEAR_TILE_CUH

#include <float.h>

#include "backend/cuda/linear/linear.h"
#include "backend/cuda/ptx/launch.cuh"
#include "backend/cuda/ptx/tf32.cuh"

enum {
    SPAN = STI_LINEAR_SPAN,
    TILE = STI_LINEAR_TILE,
    SPAN_THREADS = 128,
    WEIGHT_LD = TILE + 4 /* of [TILE][TILE] */
};

/* ---- Launching ----------------------------------------------------------- */

/* f(W) with the call's DP as a constant. */
template <class F> static still_status by_width(const sti_cuda_linear *p, const F &f)
{
    return with_constant<32, 64, 96, 128>(p->DP, f);
}

STI_DEVICE float *block_memory(void)
{
    extern __shared__ float4 sti_cuda_linear_memory[];
    return (float *)sti_cuda_linear_memory;
}

/* ---- Numbers of one token ------------------------------------------------ */

STI_DEVICE int64_t first_position(const sti_cuda_linear_seq &s)
{
    return s.pos ? *s.pos : 0;
}

/* a = log sigmoid(k) / 16, safe at both ends. */
STI_DEVICE float log_gate(float k)
{
    const float log_sigmoid = k > 0 ? -log1pf(expf(-k)) : k - log1pf(expf(k));
    return log_sigmoid * (1.0f / 16);
}
/* log gamma_h, gamma_h = 1 - 2^(-5 - h) */
STI_DEVICE float log_gamma(int h)
{
    return log1pf(-exp2f((float)(-5 - h)));
}

/* Element e of a vector of D that is rotated to position t: value cos + other sin,
 * where `other` is the value at `partner`, its sign included in sin. */
typedef struct rotation {
    int partner;
    float c, s;
} rotation;
STI_DEVICE rotation rotation_of(const sti_cuda_linear &p, int e, int64_t t)
{
    const int half = p.D / 2;
    const bool first = p.interleaved ? e % 2 == 0 : e < half;
    const int step = p.interleaved ? 1 : half, pair = p.interleaved ? e / 2 : e % half;
    rotation r;
    r.partner = first ? e + step : e - step;
    double turns = (double)t * (double)p.inv_freq[pair] * 0.15915494309189535;
    turns -= rint(turns); /* as in norm_rope.cu */
    sincospif((float)(2 * turns), &r.s, &r.c);
    if (first) r.s = -r.s;
    return r;
}

/* Element `at` of a window's ring. */
STI_DEVICE float ring_get(const void *ring, size_t at, bool is_half)
{
    return is_half ? __half2float(((const __half *)ring)[at])
                   : ((const float *)ring)[at];
}
STI_DEVICE void ring_put(void *ring, size_t at, float x, bool is_half)
{
    if (is_half)
        ((__half *)ring)[at] = __float2half_rn(fminf(fmaxf(x, -65504), 65504));
    else
        ((float *)ring)[at] = x;
}

/* SUPRA's features by a whole warp: f [width] = relu(raw + b) rotated, times `by`;
 * zeros from D on. */
STI_DEVICE void relu_row(const sti_cuda_linear &p, const float *raw, const float *b,
                         int64_t t, float by, float *f, int width)
{
    for (int e = (int)threadIdx.x % 32; e < width; e += 32) {
        float x = 0;
        if (e < p.D) {
            const rotation r = rotation_of(p, e, t);
            const float own = raw[e] + (b ? b[e] : 0);
            const float other = raw[r.partner] + (b ? b[r.partner] : 0);
            x = (fmaxf(own, 0) * r.c + fmaxf(other, 0) * r.s) * by;
        }
        f[e] = x;
    }
}

/* SUPRA's norm of o [D], by a whole warp: y = (o - mean) factor. */
STI_DEVICE void norm_of(const float *o, int D, float *mean, float *factor)
{
    float sum = 0, squares = 0;
    for (int e = (int)threadIdx.x % 32; e < D; e += 32) sum += o[e];
    *mean = warp_sum(sum) / (float)D;
    for (int e = (int)threadIdx.x % 32; e < D; e += 32)
        squares += (o[e] - *mean) * (o[e] - *mean);
    *factor = 1 / sqrtf(warp_sum(squares) / (float)D + 1e-5f);
}

/* ---- Tiles --------------------------------------------------------------- */

/* The lane's place in C: rows g and g + 8, columns 8 n + 2 t. */
typedef struct lane_place {
    int lane, warp, g, t;
} lane_place;
STI_DEVICE lane_place lane_place_of(void)
{
    const int lane = (int)threadIdx.x & 31;
    return lane_place{lane, (int)threadIdx.x >> 5, lane >> 2, lane & 3};
}

template <int N> STI_DEVICE void clear_tiles(float (&c)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) c[n][i] = 0;
}

/* to [N][LD] = rows r < have of DP floats, `stride` apart; zeros from there on. By all
 * threads of a block of SPAN_THREADS. */
template <int N, int DP, bool ROUND>
STI_DEVICE void load_rows(float *to, const float *from, size_t stride, int have)
{
    constexpr int UNITS = DP / 4;
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < N * UNITS; i += SPAN_THREADS) {
        const int r = i / UNITS, e = i % UNITS * 4;
        float4 x = make_float4(0, 0, 0, 0);
        if (r < have) x = *(const float4 *)(from + r * stride + e);
        if (ROUND) x = make_float4(tf32(x.x), tf32(x.y), tf32(x.z), tf32(x.w));
        *(float4 *)(to + r * (DP + 4) + e) = x;
    }
}

/* C += A B: A [m][k], rounded; B [k][n], rounded here. Pairs order (tf32.cuh). */
template <int N, int K>
STI_DEVICE void product_an(float (&c)[N][4], const float *A, int lda, const float *B,
                           int ldb, int lane)
{
    const int g = lane >> 2, t = lane & 3;
#pragma unroll 4
    for (int k = 0; k < K; k++) {
        const float2 low = *(const float2 *)(A + g * lda + 8 * k + 2 * t);
        const float2 high = *(const float2 *)(A + (g + 8) * lda + 8 * k + 2 * t);
        const float a[4] = {low.x, high.x, low.y, high.y};
        const float *b = B + (8 * k + 2 * t) * ldb + g;
#pragma unroll
        for (int n = 0; n < N; n++)
            mma_tf32(c[n], a, tf32(b[8 * n]), tf32(b[ldb + 8 * n]));
    }
}

/* C += A B^T: A [m][k], rounded; B [n][k], rounded here. */
template <int N, int K>
STI_DEVICE void product_at(float (&c)[N][4], const float *A, int lda, const float *B,
                           int ldb, int lane)
{
    const int g = lane >> 2, t = lane & 3;
#pragma unroll 4
    for (int k = 0; k < K; k++) {
        const float2 low = *(const float2 *)(A + g * lda + 8 * k + 2 * t);
        const float2 high = *(const float2 *)(A + (g + 8) * lda + 8 * k + 2 * t);
        const float a[4] = {low.x, high.x, low.y, high.y};
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float2 b = *(const float2 *)(B + (8 * n + g) * ldb + 8 * k + 2 * t);
            mma_tf32(c[n], a, tf32(b.x), tf32(b.y));
        }
    }
}

/* ---- Scans over spans ---------------------------------------------------- */

/* The span of a block: grid is spans of the longest sequence, states, sequences. */
typedef struct span_place {
    int c, state, g, h0; /* h0: the state's first query head */
    int first, n;        /* its tokens; n <= 0: the sequence is shorter */
    size_t at;           /* in arrays [spans, S, .] */
} span_place;
STI_DEVICE span_place span_place_of(const sti_cuda_linear &p,
                                    const sti_cuda_linear_seq &s)
{
    span_place r;
    r.c = (int)blockIdx.x;
    r.state = (int)blockIdx.y;
    r.h0 = r.state * p.per_state;
    r.g = r.h0 / p.per_kv;
    r.first = r.c * SPAN;
    r.n = min((int)SPAN, s.T - r.first);
    r.at = ((size_t)s.span0 + r.c) * p.S + r.state;
    return r;
}
static inline dim3 span_grid(const sti_cuda_linear *p)
{
    return dim3((unsigned)(p->longest + SPAN - 1) / SPAN, (unsigned)p->S,
                (unsigned)p->n);
}

/* A [TILE][LD]: sums of a over the tile's tokens up to and with each; the tile begins
 * at `row` and has `have` tokens. Ends with the block in step. */
template <int DP>
STI_DEVICE void load_decays(const sti_cuda_linear &p, const span_place &r, float *A,
                            size_t row, int have)
{
    constexpr int LD = DP + 4;
    if (p.window > 0)
        load_rows<TILE, DP, false>(A, p.decay + (row * p.G + r.g) * DP,
                                   (size_t)p.G * DP, have);
    else
        for (int i = (int)threadIdx.x; i < TILE * DP; i += SPAN_THREADS)
            A[i / DP * LD + i % DP] = i / DP < have ? log_gamma(r.state) : 0;
    __syncthreads();
    if (threadIdx.x < DP) {
        float sum = 0;
#pragma unroll
        for (int t = 0; t < TILE; t++)
            A[t * LD + threadIdx.x] = sum += A[t * LD + threadIdx.x];
    }
    __syncthreads();
}

/* to = x exp(A), or x exp(A_end - A): rounded. */
template <int DP, bool TO_END>
STI_DEVICE void decayed(float *to, const float *x, const float *A)
{
    constexpr int LD = DP + 4;
    for (int i = (int)threadIdx.x; i < TILE * DP; i += SPAN_THREADS) {
        const int at = i / DP * LD + i % DP;
        const float a = TO_END ? A[(TILE - 1) * LD + i % DP] - A[at] : A[at];
        to[at] = tf32(x[at] * expf(a));
    }
}

/* w[t][j] = sum over i of x_ti z_ji exp(A_ti - A_ji) for j <= t, else 0; without DECAY
 * sum of x_ti z_ji. A thread has one j and two t. */
template <int DP, bool DECAY>
STI_DEVICE void pair_products(float *w, const float *x, const float *z, const float *A)
{
    constexpr int LD = DP + 4;
    const int j = (int)threadIdx.x % TILE, t0 = (int)threadIdx.x / TILE;
    float sum[2] = {0, 0};
#pragma unroll 2
    for (int i = 0; i < DP; i += 4) {
        const float4 zj = *(const float4 *)(z + j * LD + i);
        const float4 aj = DECAY ? *(const float4 *)(A + j * LD + i) : zj;
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const int t = t0 + 8 * u;
            const float4 xt = *(const float4 *)(x + t * LD + i);
            if (DECAY) {
                const float4 at = *(const float4 *)(A + t * LD + i);
                sum[u] += xt.x * zj.x * __expf(fminf(at.x - aj.x, 0)) +
                          xt.y * zj.y * __expf(fminf(at.y - aj.y, 0)) +
                          xt.z * zj.z * __expf(fminf(at.z - aj.z, 0)) +
                          xt.w * zj.w * __expf(fminf(at.w - aj.w, 0));
            } else {
                sum[u] += xt.x * zj.x + xt.y * zj.y + xt.z * zj.z + xt.w * zj.w;
            }
        }
    }
#pragma unroll
    for (int u = 0; u < 2; u++)
        w[(t0 + 8 * u) * WEIGHT_LD + j] = j <= t0 + 8 * u ? tf32(sum[u]) : 0;
}

/* M [DP][LD] = diag(exp(A_end)) M (where `decay`) + x^T z, x and z [TILE][LD] rounded.
 * Every warp has rows of its own; what it reads must be there. */
template <int DP>
STI_DEVICE void advance(float *M, const float *x, const float *z, const float *A,
                        bool decay, const lane_place &at)
{
    constexpr int LD = DP + 4, N = DP / 8;
    for (int m = at.warp * 16; m < DP; m += 64) {
        float c[N][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = m + at.g + 8 * i;
            const float by = decay ? expf(A[(TILE - 1) * LD + row]) : 1;
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float2 old = *(const float2 *)(M + row * LD + 8 * n + 2 * at.t);
                c[n][2 * i] = by * old.x;
                c[n][2 * i + 1] = by * old.y;
            }
        }
        product_tn<N, TILE / 8>(c, x + m, LD, z, LD, at.lane);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int n = 0; n < N; n++)
                *(float2 *)(M + (m + at.g + 8 * i) * LD + 8 * n + 2 * at.t) =
                    make_float2(c[n][2 * i], c[n][2 * i + 1]);
    }
}

/* Rows of C, shared by columns, to rows t < have of DP floats, `stride` apart. */
template <int DP>
STI_DEVICE void store_shared(const float (&c)[DP / 32][4], float *to, size_t stride,
                             int have, const lane_place &at)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = at.g + 8 * i;
        if (row >= have) continue;
        float *out = to + row * stride + at.warp * (DP / 4) + 2 * at.t;
#pragma unroll
        for (int n = 0; n < DP / 32; n++)
            *(float2 *)(out + 8 * n) = make_float2(c[n][2 * i], c[n][2 * i + 1]);
    }
}

#endif
