/* gemm_input.cuh - how rows of W and of x get into the shared memory of a block of
 * gemm.cu, as tiles of 64 columns: by copies in the background, through a ring, or, x
 * in floats, through registers, where they are normed and rounded to half. */
#ifndef STI_BACKEND_CUDA_GEMM_INPUT_CUH
#define STI_BACKEND_CUDA_GEMM_INPUT_CUH

#include "backend/cuda/dequant.cuh"
#include "backend/cuda/gemm_products.cuh"
#include "backend/cuda/rows.cuh"

namespace
{

enum { THREADS = 128, BN = 64 }; /* BN: rows of a tile of W */
enum { FLOAT_STEPS = 5 };        /* of a part, at most, where x comes in floats */

/* Shared memory of a block: x first if it comes in FLOATS, which is then there as a
 * whole; the ring; what the norms of rows need. One block fits where 99 KB are all
 * there is; here two to four share an SM. Weights under way a block: 32 KB with BM =
 * 16, the size for which memory is the bound. */
template <int BM, bool FLOATS> struct plan {
    static constexpr int X_TILE = BM * ROW;
    static constexpr int RING = FLOATS ? FLOAT_STEPS * X_TILE : 0; /* where it begins */
    static constexpr int STAGE = BN * ROW + (FLOATS ? 0 : X_TILE);
    static constexpr int STAGES = FLOATS || BM >= 64 ? 4 : 5;
    static constexpr int NORMS = RING + STAGES * STAGE;
    static constexpr size_t SHARED = NORMS + (FLOATS ? 2 * BM * sizeof(float) : 0);
    /* Of an SM: those that fit, and those wanted where tiles are shared. */
    static constexpr int BLOCKS = BM == 16 ? 4 : BM == 128 ? 2 : 3;
    static constexpr int SHARING = BM == 128 ? 1 : BM == 64 ? 2 : 3;
};

/* 16 bytes, or zeros: then nothing is read. */
__device__ __forceinline__ void copy_or_zero(uint32_t to, const void *from, bool some)
{
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(from), "r"(some ? 16 : 0)
                 : "memory");
}

/* Rows that one tile of a matrix makes: GATED tiles hold as many of gate as of up. */
__host__ __device__ constexpr int rows_of(bool gated)
{
    return gated ? BN / 2 : BN;
}

/* What a thread copies: 16 bytes, unit tid % 8, of rows tid / 8, + 16, ... of a tile.
 * In a GATED tile rows 16 j .. + 7 are rows 8 j .. of gate, rows 16 j + 8 .. those of
 * up. */
template <int BM, bool GATED, bool FLOATS> struct copier {
    typedef plan<BM, FLOATS> room;
    const __half *w, *x;            /* of the first row, at the thread's unit */
    int ld, column, rows_w, rows_x; /* rows: from the thread's first on */
    uint32_t to;

    __device__ __forceinline__ copier(const sti_cuda_few &f, int i, int tile, int m0,
                                      uint32_t stages)
    {
        const int row = threadIdx.x / 8, unit = threadIdx.x % 8;
        const sti_cuda_matrix &m = f.w[GATED ? row / 8 : i];
        const int n = tile * rows_of(GATED) + (GATED ? row % 8 : row);
        ld = m.ld;
        column = 8 * unit;
        rows_w = m.N - n;
        rows_x = f.M - m0 - row;
        w = (const __half *)m.half + (int64_t)n * ld + column;
        x = (const __half *)f.xh + (int64_t)(m0 + row) * ld + column;
        to = stages + room::RING + unit_at<STEP>(row, unit);
    }
    __device__ __forceinline__ void weights(int slot, int k) const
    {
        constexpr int APART = GATED ? 8 : 16;
        const uint32_t at = to + slot * room::STAGE;
        const bool in = column + k < ld;
#pragma unroll
        for (int j = 0; j < BN / 16; j++)
            copy_or_zero(at + j * 16 * ROW, w + (int64_t)j * APART * ld + k,
                         in && j * APART < rows_w);
    }
    __device__ __forceinline__ void rows(int slot, int k) const
    {
        const uint32_t at = to + slot * room::STAGE + BN * ROW;
        const bool in = column + k < ld;
#pragma unroll
        for (int j = 0; j < BM / 16; j++)
            copy_or_zero(at + j * 16 * ROW, x + (int64_t)j * 16 * ld + k,
                         in && j * 16 < rows_x);
    }
};

/* ---- x in floats --------------------------------------------------------------------
 *
 * A block has some columns of a row only, so it cannot norm it: it brings what it has
 * to a mean square of 1, which halves can hold whatever x is, and leaves the root it
 * divided by and the sum of squares. Sums are put right when those of all parts meet:
 *   y = f sum_p root_p (x_p / root_p * g_p) W_p^T,  f = 1 / sqrt(sum_p squares_p / K +
 * eps). */

template <int BM> struct row_norms {
    float squares[BM], root[BM];
};

/* Fours of a row that a thread brings: eight columns of each step. */
struct eights {
    float4 v[FLOAT_STEPS][2];
    /* row: at the thread's first column; left: columns from there on, `beyond` what is
     * after them */
    __device__ __forceinline__ void load(const float *row, int steps, int left,
                                         float beyond)
    {
#pragma unroll
        for (int s = 0; s < FLOAT_STEPS; s++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                v[s][h] = s < steps && s * STEP < left
                              ? *(const float4 *)(row + s * STEP + 4 * h)
                              : make_float4(beyond, beyond, beyond, beyond);
    }
};

__device__ __forceinline__ uint32_t pack_times(float x, float y, float by, float gx,
                                               float gy)
{
    return sti_pack_half(x * by * gx, y * by * gy);
}

/* A row of x as halves in a tile for each step. gain: of the norm, or ones. */
template <int BM>
__device__ __forceinline__ void put_row(const sti_cuda_few &f, const eights &x,
                                        const eights &gain, int row, int steps,
                                        unsigned char *tiles, row_norms<BM> *norms)
{
    const int unit = threadIdx.x % 8;
    float scale = 1;
    if (f.norm) {
        float s = 0;
#pragma unroll
        for (int i = 0; i < FLOAT_STEPS; i++)
            s += sti_square4(x.v[i][0]) + sti_square4(x.v[i][1]);
#pragma unroll
        for (int d = 1; d < 8; d *= 2) s += __shfl_xor_sync(0xffffffffu, s, d);
        const float root = sqrtf(s / (float)(steps * STEP) + 1e-30f);
        scale = 1 / root;
        if (unit == 0) {
            norms->squares[row] = s;
            norms->root[row] = root;
        }
    }
#pragma unroll
    for (int i = 0; i < FLOAT_STEPS; i++) {
        if (i >= steps) break;
        const float4 a = x.v[i][0], b = x.v[i][1], g = gain.v[i][0], h = gain.v[i][1];
        *(uint4 *)(tiles + i * plan<BM, true>::X_TILE + unit_at<STEP>(row, unit)) =
            make_uint4(pack_times(a.x, a.y, scale, g.x, g.y),
                       pack_times(a.z, a.w, scale, g.z, g.w),
                       pack_times(b.x, b.y, scale, h.x, h.y),
                       pack_times(b.z, b.w, scale, h.z, h.w));
    }
}

/* Rows m0 .. of x; k: the thread's first column. Two rows are asked for at once. */
template <int BM>
__device__ __forceinline__ void take_floats(const sti_cuda_few &f, const eights &gain,
                                            int m0, int k, int steps,
                                            unsigned char *tiles, row_norms<BM> *norms)
{
    constexpr int AT_ONCE = BM == 16 ? 1 : 2;
#pragma unroll
    for (int j = 0; j < BM / 16; j += AT_ONCE) {
        eights x[AT_ONCE];
        const int row = threadIdx.x / 8 + 16 * j;
#pragma unroll
        for (int h = 0; h < AT_ONCE; h++) {
            const int m = m0 + row + 16 * h;
            x[h].load(f.x + (int64_t)m * f.K + k, steps, m < f.M ? f.K - k : 0, 0);
        }
#pragma unroll
        for (int h = 0; h < AT_ONCE; h++)
            put_row<BM>(f, x[h], gain, row + 16 * h, steps, tiles, norms);
    }
}

} // namespace

#endif
