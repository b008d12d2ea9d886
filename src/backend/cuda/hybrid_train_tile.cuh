/* hybrid_train_tile.cuh - what the kernels of hybrid_train.h share: where a block is,
 * rows of global memory as tiles in shared memory, and accumulators back to rows. */
#ifndef STI_BACKEND_CUDA_HYBRID_TRAIN_TILE_CUH
#define STI_BACKEND_CUDA_HYBRID_TRAIN_TILE_CUH

#include <float.h>

#include "backend/cuda/hybrid_train.h"
#include "backend/cuda/tf32.cuh"

enum {
    ROWS = STI_TRAIN_ROWS,
    THREADS = STI_TRAIN_THREADS,
    STEP = STI_TRAIN_FEATURES,
    STEP_LD = STEP + 4, /* of a tile of STEP columns */
    NO_TOKEN = INT32_MAX
};

/* ---- Launching ---------------------------------------------------------------------
 */

template <typename... A>
static still_status launch(sti_dev *dev, const char *what, still_error *err,
                           void (*kernel)(A...), dim3 grid, int threads, size_t shared,
                           A... args)
{
    if (shared > 48 * 1024)
        STI_CUDA(cudaFuncSetAttribute((const void *)kernel,
                                      cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      (int)shared),
                 what);
    kernel<<<grid, threads, shared, dev->stream>>>(args...);
    STI_CUDA(cudaGetLastError(), what);
    return STILL_OK;
}

/* Runs LAUNCH with DP as a constant. */
#define STI_TRAIN_BY_WIDTH(width, LAUNCH)                                              \
    ((width) == 32   ? LAUNCH(32)                                                      \
     : (width) == 64 ? LAUNCH(64)                                                      \
     : (width) == 96 ? LAUNCH(96)                                                      \
                     : LAUNCH(128))

STI_DEVICE float *block_memory(void)
{
    extern __shared__ float4 sti_train_memory[];
    return (float *)sti_train_memory;
}

/* ---- Places ------------------------------------------------------------------------
 */

STI_DEVICE int span_end(const sti_cuda_train &p, int c)
{
    const int end = (c + 1) * p.span;
    return end < p.T ? end : p.T;
}

/* Row (b, head, t) of arrays [B,heads,T,.]; of the caller's [B,T,heads,.] */
STI_DEVICE size_t row_at(const sti_cuda_train &p, int heads, int b, int head, int t)
{
    return ((size_t)b * heads + head) * p.T + t;
}
STI_DEVICE size_t token_at(const sti_cuda_train &p, int heads, int b, int head, int t)
{
    return ((size_t)b * p.T + t) * heads + head;
}
/* Span c of selection head `sel`, in arrays [B,S,spans,.] */
STI_DEVICE size_t span_at(const sti_cuda_train &p, int b, int sel, int c)
{
    return ((size_t)b * p.S + sel) * p.spans + c;
}

/* The chunk at whose first token j leaves for the state, never before c(j) + 2. */
STI_DEVICE int fold_of(const sti_cuda_train &p, int b, int sel, int j)
{
    const int fold = p.fold[token_at(p, p.S, b, sel, j)], leaves = j / p.span + 2;
    return fold < 0 ? NO_TOKEN : fold > leaves ? fold : leaves;
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

STI_DEVICE query_tile query_tile_of(const sti_cuda_train &p)
{
    query_tile r;
    r.b = (int)blockIdx.z;
    r.h = (int)blockIdx.y;
    r.g = r.h / p.per_kv;
    r.sel = r.h / p.per_sel;
    r.c = p.spans - 1 - (int)blockIdx.x / p.tiles;
    r.first = r.c * p.span + (int)blockIdx.x % p.tiles * ROWS;
    r.n = min(ROWS, span_end(p, r.c) - r.first);
    r.span = span_at(p, r.b, r.sel, r.c);
    r.n_salient = p.has_window ? p.n_salient[r.span] : 0;
    r.start = (r.c > 0 ? r.c - 1 : 0) * p.span;
    r.keys = p.has_window ? r.n_salient + r.first + r.n - r.start : 0;
    r.linear = p.has_linear && (!p.has_window || p.n_folded[r.span] > 0);
    return r;
}

/* Entry i of a span's list of softmax keys: salient ones, then the window. */
STI_DEVICE int key_token(const sti_cuda_train &p, size_t span, int n_salient, int start,
                         int keys, int i)
{
    if (i >= keys) return NO_TOKEN;
    return i < n_salient ? p.salient[span * p.room + i] : start + i - n_salient;
}

/* ---- Learned numbers of a head -----------------------------------------------------
 */

STI_DEVICE float alpha_of(const sti_cuda_train &p, int h)
{
    return p.alpha ? p.alpha[h] : 0;
}
STI_DEVICE float factor_of(const sti_cuda_train &p, int h)
{
    if (!p.window_factor) return 1;
    return p.window_logit ? 1 / (1 + expf(-p.window_logit[h])) : 0.1f;
}

/* ---- Tiles -------------------------------------------------------------------------
 */

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

/* Columns e .. e + 3 of a row of `cols`; zeros past its end. */
STI_DEVICE float4 load4(const float *row, int e, int cols, bool vec)
{
    if (!row) return make_float4(0, 0, 0, 0);
    if (vec) return e < cols ? *(const float4 *)(row + e) : make_float4(0, 0, 0, 0);
    return make_float4(e < cols ? row[e] : 0, e + 1 < cols ? row[e + 1] : 0,
                       e + 2 < cols ? row[e + 2] : 0, e + 3 < cols ? row[e + 3] : 0);
}

/* to [N][ld] = rows of W columns, of which `cols` exist; row(r) points at row r, NULL:
 * zeros. By all threads of the block; W is a multiple of 4. */
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

#endif
