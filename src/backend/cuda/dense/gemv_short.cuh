/* gemv_short.cuh - products of few rows that are short: those of a small model, of
 * which a step is a chain of kernels that each take longer to begin and to end than to
 * multiply. What counts is how much lies, one after the other, between x and y.
 *
 * A block takes a tile of 16 rows of W, a warp one or two of its chunks of 64 columns.
 * Before x is waited for weights are fragments in registers already. Then a warp reads
 * of x what it multiplies, straight into registers, and the sums of warps are joined
 * once, at the end. x need not be normed before that: a warp brings its columns to a
 * mean square of 1, which halves can hold whatever x is, and leaves the root it divided
 * by and their sum of squares:
 *
 *   y = f sum_w root_w (x_w / root_w * g_w) W_w^T
 *   f = 1 / sqrt(sum_w squares_w / K + eps)
 *
 * The way from x to y is rehearsed, without x and y, before they are waited for. The SM
 * then has its instructions and the call's arguments at hand: code that runs once takes
 * longer to come than to run. */
#ifndef STI_BACKEND_CUDA_DENSE_GEMV_SHORT_CUH
#define STI_BACKEND_CUDA_DENSE_GEMV_SHORT_CUH

#include "backend/cuda/dense/dequant.cuh"
#include "backend/cuda/dense/norm_rope.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/ptx/pdl.cuh"

namespace
{

enum {
    SHORT_WARPS = 16, /* of a block, at most */
    SHORT_LEAST = 8,  /* so that each sum of a tile has a thread */
    SHORT_PITCH = 20, /* floats: those of all warps, and what puts those of eight rows
                         on different banks */
    SHORT_TILES = 4   /* an SM, at most: what is larger is bound by memory */
};

/* Chunks of a warp: two of rows in halves, which are wide and need no registers to be
 * normed in. */
__host__ __device__ constexpr int chunks_of(bool halves)
{
    return halves ? 2 : 1;
}

__host__ __device__ int tiles_of(const sti_cuda_matrix &m)
{
    return (m.N + STI_CUDA_TILE - 1) / STI_CUDA_TILE;
}

/* Matrix and tile in it of the whole call's tile number. */
__device__ __forceinline__ int locate(const sti_cuda_gemv_args &f, int *tile)
{
    int i = 0;
    while (i + 1 < f.n && *tile >= tiles_of(f.w[i])) *tile -= tiles_of(f.w[i++]);
    return i;
}

/* silu(gate) * up, for a result in half. */
__device__ __forceinline__ float gated_product(float gate, float up)
{
    return __fdividef(gate, 1 + __expf(-gate)) * up;
}

/* What a lane multiplies of a tile of W: PER chunks of the warp, those from `first` on
 * that are `by` apart. Chunks there are not are zero. */
template <class chunk_t, int PER> struct short_weights {
    uint32_t top[PER][8], low[PER][8];
    chunk_t chunk[PER];
    __device__ __forceinline__ void load(const sti_cuda_matrix &m, int tile, int first,
                                         int by)
    {
        const typename chunk_t::place at =
            chunk_t::find(m, tile, first, threadIdx.x % 32);
#pragma unroll
        for (int p = 0; p < PER; p++) {
            chunk[p] = {};
            if (first + p * by < m.chunks) chunk[p].load(at, p * by);
        }
    }
    __device__ __forceinline__ void decode()
    {
#pragma unroll
        for (int p = 0; p < PER; p++) chunk[p].fragment(top[p], low[p]);
    }
    /* c[0] + c[1] += W x^T */
    template <int NB>
    __device__ __forceinline__ void add(const uint32_t (&b)[NB][PER][8],
                                        float (&c)[2][NB][4]) const
    {
#pragma unroll
        for (int p = 0; p < PER; p++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t a[4] = {top[p][2 * i], low[p][2 * i], top[p][2 * i + 1],
                                       low[p][2 * i + 1]};
#pragma unroll
                for (int j = 0; j < NB; j++)
                    mma(c[i % 2][j], a, b[j][p][2 * i], b[j][p][2 * i + 1]);
            }
    }
};

/* The lane's columns of a row of floats: eight, and eight that are SECOND after them;
 * zero where there are none. */
struct short_row {
    float4 v[4];
    template <int SECOND>
    __device__ __forceinline__ void load(const float *row, int k, int K)
    {
#pragma unroll
        for (int j = 0; j < 4; j++)
            v[j] = sti_load4(row, k + j / 2 * SECOND + j % 2 * 4, K, true);
    }
    __device__ __forceinline__ float squares() const
    {
        return (sti_square4(v[0]) + sti_square4(v[1])) +
               (sti_square4(v[2]) + sti_square4(v[3]));
    }
    __device__ __forceinline__ void scale(float by, const short_row &gain)
    {
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = sti_normed4(v[j], by, gain.v[j]);
    }
    __device__ __forceinline__ void round(uint32_t (&b)[8]) const
    {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            b[2 * j] = cvt_half2_sat(v[j].x, v[j].y);
            b[2 * j + 1] = cvt_half2_sat(v[j].z, v[j].w);
        }
    }
};

/* Row `row` of x, of which there are K columns, as the lane multiplies it. Lanes of a
 * row, 4 g to 4 g + 3, return the root it was divided by and its squares, as far as the
 * warp has it. */
template <int SECOND>
__device__ __forceinline__ float2 take_floats(const sti_cuda_gemv_args &f,
                                              const short_row &gain, int row, int K,
                                              int k, uint32_t (&b)[8])
{
    short_row x;
    float s = 0, root = 1;
    x.load<SECOND>(f.x + (int64_t)row * f.K, k, K);
    if (f.norm) {
        s = x.squares();
        s += __shfl_xor_sync(0xffffffffu, s, 1);
        s += __shfl_xor_sync(0xffffffffu, s, 2);
        const float mean = s / STI_CUDA_CHUNK + 1e-30f, scale = rsqrtf(mean);
        root = mean * scale;
        x.scale(scale, gain);
    }
    x.round(b);
    return make_float2(root, s);
}

/* The same of what is half already. */
template <int SECOND, int PER>
__device__ __forceinline__ void take_halves(const sti_cuda_gemv_args &f, int row, int K,
                                            int k, int by, uint32_t (&b)[PER][8])
{
    const sti_half *x = f.xh + (int64_t)row * ((f.K + 7) / 8 * 8);
#pragma unroll
    for (int p = 0; p < PER; p++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int at = k + p * by * STI_CUDA_CHUNK + h * SECOND;
            const uint4 u = at < K ? *(const uint4 *)(x + at) : make_uint4(0, 0, 0, 0);
            b[p][4 * h] = u.x, b[p][4 * h + 1] = u.y;
            b[p][4 * h + 2] = u.z, b[p][4 * h + 3] = u.w;
        }
}

__device__ __forceinline__ float dot4(float4 a, float4 b)
{
    return (a.x * b.x + a.y * b.y) + (a.z * b.z + a.w * b.w);
}

/* What the warps of a block leave for each other, side by side, so that four are read
 * at once: sums [W][M][16 rows of a tile][SHORT_PITCH], and of rows of x the roots and
 * squares [M][SHORT_WARPS]. Warps there are not leave zeros. */
template <int W> struct short_sums {
    float *v, *root, *squares;
    int M;
    static __host__ __device__ constexpr int floats()
    {
        return W * STI_CUDA_TILE * SHORT_PITCH + 2 * SHORT_WARPS; /* times M */
    }
    __device__ __forceinline__ short_sums(float *shared, int rows)
        : v(shared), root(shared + W * rows * STI_CUDA_TILE * SHORT_PITCH),
          squares(root + rows * SHORT_WARPS), M(rows)
    {
        for (int i = threadIdx.x; i < floats() * rows; i += blockDim.x) shared[i] = 0;
        __syncthreads();
    }
    __device__ __forceinline__ float *of(int w, int m, int row) const
    {
        return v + ((w * M + m) * STI_CUDA_TILE + row) * SHORT_PITCH;
    }
    template <int NB>
    __device__ __forceinline__ void put(int w, const float (&c)[2][NB][4]) const
    {
        const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4,
                  t = threadIdx.x % 4;
#pragma unroll
        for (int j = 0; j < NB; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int m = 8 * j + 2 * t + e % 2;
                if (m < M) of(w, m, g + e / 2 * 8)[warp] = c[0][j][e] + c[1][j][e];
            }
    }
    /* The sum of row m of x with a row of tile w. */
    __device__ __forceinline__ float total(int w, int m, int row) const
    {
        const float4 *a = (const float4 *)of(w, m, row),
                     *b = (const float4 *)(root + m * SHORT_WARPS);
        float s = 0;
#pragma unroll
        for (int k = 0; k < SHORT_WARPS / 4; k++) s += dot4(a[k], b[k]);
        return s;
    }
    __device__ __forceinline__ float squares_of(int m) const
    {
        const float4 *a = (const float4 *)(squares + m * SHORT_WARPS);
        float s = 0;
#pragma unroll
        for (int k = 0; k < SHORT_WARPS / 4; k++)
            s += (a[k].x + a[k].y) + (a[k].z + a[k].w);
        return s;
    }
};

/* A tile of the call; GATED: of gate and of up. last: how often the way from x to y is
 * rehearsed. */
template <class chunk_t, int NB, bool GATED, bool HALVES>
__device__ __forceinline__ void short_tile(const sti_cuda_gemv_args &f, int last,
                                           float *shared)
{
    constexpr int W = GATED ? 2 : 1, PER = chunks_of(HALVES);
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32,
              g = lane / 4;
    const int k = warp * STI_CUDA_CHUNK + chunk_t::COLUMNS * (lane % 4);
    int tile = blockIdx.x;
    const int i = GATED ? 0 : locate(f, &tile);
    short_weights<chunk_t, PER> weights[W];
    short_row gain;
#pragma unroll
    for (int w = 0; w < W; w++) weights[w].load(f.w[i + w], tile, warp, warps);
    if (!HALVES && f.norm) gain.load<chunk_t::SECOND>(f.norm, k, f.K);
    /* Thread = (row of the tile, row of x). */
    const int row = threadIdx.x % STI_CUDA_TILE, m = threadIdx.x / STI_CUDA_TILE;
    const int N = f.w[i].N, n = tile * STI_CUDA_TILE + row;
    const bool mine = m < f.M && n < N;
    const int64_t at = (int64_t)m * N + n;
    const bool adds = !GATED && mine && f.accumulate;
    float *out = GATED ? nullptr : f.y[i] + at;
    __half *gated = GATED ? (__half *)f.yh + at : nullptr;
    const float inverse = 1 / (float)f.K;
    float shift[W];
#pragma unroll
    for (int w = 0; w < W; w++) shift[w] = mine && f.bias[i + w] ? f.bias[i + w][n] : 0;
    const short_sums<W> sums(shared, f.M);
#pragma unroll
    for (int w = 0; w < W; w++) weights[w].decode();
#pragma unroll 1
    for (int run = 0; run <= last; run++) {
        const bool real = run == last;
        uint32_t b[NB][PER][8];
        float c[W][2][NB][4] = {}, y[W];
        if (real) pdl_wait();
        const float before = real && adds ? *out : 0;
#pragma unroll
        for (int j = 0; j < NB; j++) {
            const int of = g + 8 * j, K = real && of < f.M ? f.K : 0;
            float2 norm = make_float2(1, 0);
            if constexpr (HALVES)
                take_halves<chunk_t::SECOND>(f, of, K, k, warps, b[j]);
            else
                norm = take_floats<chunk_t::SECOND>(f, gain, of, K, k, b[j][0]);
            if (of < f.M && lane % 4 == 0) {
                sums.root[of * SHORT_WARPS + warp] = norm.x;
                sums.squares[of * SHORT_WARPS + warp] = norm.y;
            }
        }
#pragma unroll
        for (int w = 0; w < W; w++) {
            weights[w].add(b, c[w]);
            sums.put(w, c[w]);
        }
        __syncthreads();
        if (mine) {
            const float factor =
                !HALVES && f.norm ? rsqrtf(sums.squares_of(m) * inverse + f.eps) : 1;
#pragma unroll
            for (int w = 0; w < W; w++)
                y[w] = sums.total(w, m, row) * factor + shift[w];
            if (real && GATED) *gated = to_half(gated_product(y[0], y[W - 1]));
            if (real && !GATED) *out = before + y[0];
        }
        if (!real) __syncthreads(); /* what was rehearsed has been read */
    }
}

template <int NB, bool GATED, bool HALVES>
__global__ void __launch_bounds__(32 * SHORT_WARPS)
    gemv_short(const __grid_constant__ sti_cuda_gemv_args f, int last)
{
    extern __shared__ uint4 shared[];
    float *sums = (float *)shared;
    int tile = blockIdx.x;
    pdl_trigger();
    switch (f.w[GATED ? 0 : locate(f, &tile)].kind) {
    case STI_CUDA_U4: short_tile<sti_chunk_u4, NB, GATED, HALVES>(f, last, sums); break;
    case STI_CUDA_S8:
        short_tile<sti_chunk_s8<false>, NB, GATED, HALVES>(f, last, sums);
        break;
    case STI_CUDA_S8_MIN:
        short_tile<sti_chunk_s8<true>, NB, GATED, HALVES>(f, last, sums);
        break;
    default: short_tile<sti_chunk_half, NB, GATED, HALVES>(f, last, sums); break;
    }
}

template <int NB, bool GATED, bool HALVES>
still_status launch_short(sti_dev *dev, const sti_cuda_gemv_args *f, int tiles,
                          still_error *err)
{
    constexpr int W = GATED ? 2 : 1, PER = chunks_of(HALVES);
    const int needed = (f->w[0].chunks + PER - 1) / PER,
              warps = needed < SHORT_LEAST ? SHORT_LEAST : needed;
    const size_t bytes = sizeof(float) * short_sums<W>::floats() * (size_t)f->M;
    STI_CUDA(pdl_launch(dev, gemv_short<NB, GATED, HALVES>, dim3((unsigned)tiles),
                        dim3((unsigned)(32 * warps)), bytes, *f, dev->pdl ? 1 : 0),
             "matmul of few short rows");
    return STILL_OK;
}

/* Whether the call is one for this file. That must not depend on M: a row gives the
 * same whatever is beside it. */
bool are_short(const sti_dev *dev, const sti_cuda_gemv_args *f, int tiles)
{
    const bool fours =
        f->K % 4 == 0 && sti_cuda_aligned(f->x) && sti_cuda_aligned(f->norm);
    return !f->keep && (f->xh ? !f->yh : fours) &&
           f->w[0].chunks <= chunks_of(f->xh) * SHORT_WARPS &&
           tiles <= SHORT_TILES * dev->sms;
}

template <int NB>
still_status launch_short_rows(sti_dev *dev, const sti_cuda_gemv_args *f, int tiles,
                               still_error *err)
{
    return f->yh   ? launch_short<NB, true, false>(dev, f, tiles, err)
           : f->xh ? launch_short<NB, false, true>(dev, f, tiles, err)
                   : launch_short<NB, false, false>(dev, f, tiles, err);
}

} // namespace

#endif
