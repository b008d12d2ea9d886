/* tile.cuh - what the kernels of train.h share: where a block is,
 * rows of global memory as tiles in shared memory, and accumulators back to rows. */
#ifndef STI_BACKEND_CUDA_HYBRID_TRAIN_TILE_CUH
#define STI_BACKEND_CUDA_HYBRID_TRAIN_TILE_CUH

#include <float.h>

#include "backend/cuda/hybrid/train/train.h"
#include "backend/cuda/ptx/launch.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/ptx/tf32.cuh"

enum {
    ROWS = STI_HYBRID_TRAIN_ROWS,
    THREADS = STI_HYBRID_TRAIN_THREADS,
    STEP = STI_HYBRID_TRAIN_FEATURES,
    STEP_LD = STEP + 4, /* of a tile of STEP columns */
    NO_TOKEN = INT32_MAX
};

/* ---- Launching ----------------------------------------------------------- */

/* f(W) with the call's DP as a constant. */
template <class F> static still_status by_width(const sti_hybrid_train *p, const F &f)
{
    return with_constant<64, 128>(p->DP, f);
}

STI_DEVICE float *block_memory(void)
{
    extern __shared__ __align__(1024) float sti_hybrid_train_memory[];
    return sti_hybrid_train_memory;
}

/* ---- Places -------------------------------------------------------------- */

STI_DEVICE int span_end(const sti_hybrid_train &p, int c)
{
    const int end = (c + 1) * p.span;
    return end < p.T ? end : p.T;
}

/* Row (b, head, t) of arrays [B,heads,T,.]; of the caller's [B,T,heads,.] */
STI_DEVICE size_t row_at(const sti_hybrid_train &p, int heads, int b, int head, int t)
{
    return ((size_t)b * heads + head) * p.T + t;
}
STI_DEVICE size_t token_at(const sti_hybrid_train &p, int heads, int b, int head, int t)
{
    return ((size_t)b * p.T + t) * heads + head;
}
/* Span c of selection head `sel`, in arrays [B,S,spans,.] */
STI_DEVICE size_t span_at(const sti_hybrid_train &p, int b, int sel, int c)
{
    return ((size_t)b * p.h.S + sel) * p.spans + c;
}

/* The chunk at whose start token j is folded, never before c(j) + 2. */
STI_DEVICE int fold_of(const sti_hybrid_train &p, int b, int sel, int j)
{
    const int fold = p.fold[token_at(p, p.h.S, b, sel, j)], earliest = j / p.span + 2;
    return fold < 0 ? NO_TOKEN : fold > earliest ? fold : earliest;
}

/* Whether token j was salient before span `fold` folds it: what is folded is then what
 * was stored. */
STI_DEVICE bool was_salient(const sti_hybrid_train &p, int fold, int j)
{
    return p.h.has_window && fold > j / p.span + 2;
}

/* A tile of queries, [first, first + n) of span c, and the keys it sees. Later spans,
 * which see more, come first. */
typedef struct query_tile {
    int b, h, g, sel, c, first, n;
    size_t span;          /* span_at */
    int n_salient, start; /* salient keys; first token of the window */
    int keys;             /* of the list */
    bool linear;          /* there is a linear term */
} query_tile;

STI_DEVICE query_tile query_tile_of(const sti_hybrid_train &p)
{
    query_tile r;
    r.b = (int)blockIdx.z;
    r.h = (int)blockIdx.y;
    r.g = r.h / p.h.per_kv;
    r.sel = r.h / p.h.group;
    r.c = p.spans - 1 - (int)blockIdx.x / p.tiles;
    r.first = r.c * p.span + (int)blockIdx.x % p.tiles * ROWS;
    r.n = min(ROWS, span_end(p, r.c) - r.first);
    r.span = span_at(p, r.b, r.sel, r.c);
    r.n_salient = p.h.has_window ? p.n_salient[r.span] : 0;
    r.start = (r.c > 0 ? r.c - 1 : 0) * p.span;
    r.keys = p.h.has_window ? r.n_salient + r.first + r.n - r.start : 0;
    r.linear = p.h.has_linear && (!p.h.has_window || p.n_folded[r.span] > 0);
    return r;
}

/* Entry i of a span's list of softmax keys: salient ones, then the window. */
STI_DEVICE int key_token(const sti_hybrid_train &p, size_t span, int n_salient,
                         int start, int i)
{
    return i < n_salient ? p.salient[span * p.capacity + i] : start + i - n_salient;
}

/* ---- Learned numbers of a head ------------------------------------------- */

STI_DEVICE float alpha_of(const sti_hybrid_train &p, int h)
{
    return p.h.alpha ? p.h.alpha[h] : 0;
}
STI_DEVICE float factor_of(const sti_hybrid_train &p, int h)
{
    if (!p.h.window_factor) return 1;
    return p.h.window_logit ? 1 / (1 + expf(-p.h.window_logit[h])) : 0.1f;
}

/* ---- Tiles of floats ----------------------------------------------------- */

struct rounded {
    __device__ __forceinline__ float operator()(float x) const
    {
        return tf32(x);
    }
};
struct as_it_is {
    __device__ __forceinline__ float operator()(float x) const
    {
        return x;
    }
};
struct rounded_part {
    float part; /* a power of 2 */
    __device__ __forceinline__ float operator()(float x) const
    {
        return tf32(x * part);
    }
};

/* Columns e .. e + 3 of a row of `cols`; zeros past its end. */
STI_DEVICE float4 load4(const float *row, int e, int cols, bool vec)
{
    if (!row) return make_float4(0, 0, 0, 0);
    if (vec) return e < cols ? *(const float4 *)(row + e) : make_float4(0, 0, 0, 0);
    return make_float4(e < cols ? row[e] : 0, e + 1 < cols ? row[e + 1] : 0,
                       e + 2 < cols ? row[e + 2] : 0, e + 3 < cols ? row[e + 3] : 0);
}

/* Columns e .. e + 3 of a row of features as they are stored. */
STI_DEVICE float4 load4(const uint16_t *row, int e, int, bool floats)
{
    if (!row) return make_float4(0, 0, 0, 0);
    if (floats) return *(const float4 *)((const float *)row + e);
    const uint2 x = *(const uint2 *)(row + e);
    const float2 a = unpack_half2(x.x), b = unpack_half2(x.y);
    return make_float4(a.x, a.y, b.x, b.y);
}
/* Feature f of row `row` of features as they are stored. */
STI_DEVICE const uint16_t *features_at(const sti_hybrid_train &p, const uint16_t *phi,
                                       size_t row, int f)
{
    return phi + (row * p.PP + f) * (p.relu ? 2 : 1);
}

/* to [N][ld] = rows of W columns, of which `cols` exist; row(r) points at row r, NULL:
 * zeros; vec: floats are aligned, features are floats. By all threads of the block; W
 * is a multiple of 4. */
template <int N, int W, typename Convert, typename Row>
STI_DEVICE void load_tile(float *to, int ld, int cols, bool vec, Convert convert,
                          Row row)
{
    constexpr int UNITS = W / 4;
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < N * UNITS; i += THREADS) {
        const int r = i / UNITS, e = i % UNITS * 4;
        const float4 x = load4(row(r), e, cols, vec);
        *(float4 *)(to + r * ld + e) =
            make_float4(convert(x.x), convert(x.y), convert(x.z), convert(x.w));
    }
}

/* Prefetches N rows of `cols` floats; row(r) as for load_tile. By all threads of the
 * block. */
template <int N, typename Row> STI_DEVICE void prefetch_rows(int cols, Row row)
{
    const int lines = (cols + 31) / 32;
    for (int i = (int)threadIdx.x; i < N * lines; i += THREADS) {
        const float *x = row(i / lines);
        if (x) prefetch_l2(x + i % lines * 32);
    }
}

template <int N> STI_DEVICE void clear_tiles(float (&c)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) c[n][i] = 0;
}

/* Columns e, e + 1 of a row of `cols`. */
STI_DEVICE float2 read2(const float *row, int e, int cols, bool vec)
{
    if (vec) return e < cols ? *(const float2 *)(row + e) : make_float2(0, 0);
    return make_float2(e < cols ? row[e] : 0, e + 1 < cols ? row[e + 1] : 0);
}
STI_DEVICE void write2(float *row, int e, int cols, bool vec, float x, float y)
{
    if (vec) {
        if (e < cols) *(float2 *)(row + e) = make_float2(x, y);
        return;
    }
    if (e < cols) row[e] = x;
    if (e + 1 < cols) row[e + 1] = y;
}

/* The lane's place in C: rows g and g + 8 of its warp's 16, columns 8 n + 2 t. */
typedef struct lane_place {
    int lane, warp, g, t;
} lane_place;
STI_DEVICE lane_place lane_place_of(void)
{
    const int lane = (int)threadIdx.x & 31;
    return lane_place{lane, (int)threadIdx.x >> 5, lane >> 2, lane & 3};
}

/* ---- Tiles of halves ----------------------------------------------------- */

/* As mma.cuh has them: rows of W halves, swizzled. */

/* N rows of W halves on their way into a tile; row(r) points at row r. */
template <int N, int W, typename Row> STI_DEVICE void copy_tile(uint32_t to, Row row)
{
    constexpr int UNITS = W / 8;
#pragma unroll
    for (int i = 0; i < N * UNITS / THREADS; i++) {
        const int at = (int)threadIdx.x + i * THREADS, r = at / UNITS, u = at % UNITS;
        cp_async16(to + unit_at<W>(r, u), row(r) + u * 8);
    }
}

/* Products of one warp: C has 16 rows, N tiles of 8 columns. In the names t stands for
 * a matrix that is transposed, r for one in registers. */

/* C += A B^T: A [16][W] by16, B [8 N][W] by8. */
template <int N, int W>
STI_DEVICE void half_nt(float (&c)[N][4], lane_address<W> A, lane_address<W> B)
{
#pragma unroll 2
    for (int k = 0; k < W / 16; k++) {
        uint32_t a[4], b[4];
        ldmatrix_x4(a, A.at(0, k));
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            ldmatrix_x4(b, B.at(8 * n, k));
            mma(c[n], a, b[0], b[1]);
            mma(c[n + 1], a, b[2], b[3]);
        }
    }
}

/* C += A B: A in registers as K tiles of C, rounded here; B [8 K][8 N] by16. */
template <int N, int K, int W>
STI_DEVICE void half_rn(float (&c)[N][4], const float (&A)[K][4], lane_address<W> B)
{
#pragma unroll
    for (int k = 0; k < K; k += 2) {
        const uint32_t a[4] = {
            pack_half2(A[k][0], A[k][1]), pack_half2(A[k][2], A[k][3]),
            pack_half2(A[k + 1][0], A[k + 1][1]), pack_half2(A[k + 1][2], A[k + 1][3])};
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, B.at(8 * k, n / 2));
            mma(c[n], a, b[0], b[1]);
            mma(c[n + 1], a, b[2], b[3]);
        }
    }
}

/* ---- Gradients in half --------------------------------------------------- */

/* Numbers of any size, divided by a power of two that brings the largest of a row just
 * below 1. */

static __device__ const float nothing_log2 = -1000; /* unit of a row of zeros */

STI_DEVICE float unit_log2(float largest)
{
    if (!(largest > 0)) return nothing_log2;
    return (float)min(max((int)(__float_as_uint(largest) >> 23) - 126, -100), 120);
}
/* 2^unit, 2^-unit; of a row of zeros both are 0. */
STI_DEVICE float unit_whole(float log2)
{
    return log2 == nothing_log2 ? 0
                                : __uint_as_float((uint32_t)((int)log2 + 127) << 23);
}
STI_DEVICE float unit_part(float log2)
{
    return log2 == nothing_log2 ? 0
                                : __uint_as_float((uint32_t)(127 - (int)log2) << 23);
}

/* Pairs of halves, number by number. */
STI_DEVICE uint32_t times_half2(uint32_t x, uint32_t y)
{
    return half2_bits(__hmul2(bits_half2(x), bits_half2(y)));
}

#endif
