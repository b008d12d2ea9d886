/* gemm.cu - products of rows by the dozen, of all matrices that read one input at once.
 *
 * A decode step of many sessions has too many rows for gemv.cu and too few to keep a
 * library's product busy: each matrix alone is a launch that fills part of the GPU and
 * ends before its memory is up to speed. Here one launch takes tiles of all of them
 * (q, k, v and attention's gate; gate and up, with silu(gate) * up as the result).
 * Bounded by latency for small models, by the memory that weights come from for large
 * ones; weights are halves.
 *
 * A block of four warps makes BN rows of W times BM rows of x. mma.m16n8k16 takes W as
 * its A: a warp has 16 rows of W and all BM of x. Steps of 64 columns go through a ring
 * of STAGES tiles in shared memory, swizzled as mma.cuh wants them; weights of the
 * first ones are asked for before x is waited for (follow.cuh). With BN = 32, where
 * there would be fewer blocks than SMs, two warps share 16 rows of W, half of each step
 * each, and add their sums at the end. */
#include "backend/cuda/dequant.cuh"
#include "backend/cuda/follow.cuh"
#include "backend/cuda/mma.cuh"

namespace
{

enum { THREADS = 128, STEP = 64, ROW = STEP * 2 }; /* ROW: bytes of a row of a tile */
enum { FULL_BN = 64 };
enum {
    MOST_WAVES = 4,      /* tiles of 64 x 64 an SM, beyond which cuBLASLt is faster */
    READ_ONCE = 32,      /* rows of x for which weights are read once */
    MOST_BYTES = 8 << 20 /* of weights that may be read more than once */
};

/* A block takes 64 KB of shared memory at most: three or four of them share an SM
 * here, and one fits where that is all there is. Weights under way a block: 32 KB with
 * BM = 16, the size for which memory is the bound (36 KB with BN = 32). */
template <int BM, int BN> struct plan {
    static constexpr int STAGE = (BN + BM) * ROW;
    static constexpr int STAGES = BM == 64 ? 4 : BN == 64 ? 5 : BM == 32 ? 6 : 10;
    static constexpr int BLOCKS = BM == 16 && BN == 64 ? 4 : 3; /* of an SM */
    static constexpr size_t SHARED = (size_t)STAGES * STAGE;
};

/* 16 bytes, or zeros: then nothing is read. */
__device__ __forceinline__ void copy_or_zero(uint32_t to, const void *from, bool some)
{
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(from), "r"(some ? 16 : 0)
                 : "memory");
}

/* Rows that one tile of a matrix makes: GATED tiles hold as many of gate as of up. */
__host__ __device__ constexpr int rows_of(int BN, bool gated)
{
    return gated ? BN / 2 : BN;
}

/* What a thread copies: 16 bytes, unit tid % 8, of rows tid / 8, + 16, ... of a tile.
 * In a GATED tile rows 16 j .. + 7 are rows 8 j .. of gate, rows 16 j + 8 .. those of
 * up: in a warp's result c0, c1 are then gate's and c2, c3 up's of the same column. */
template <int BM, int BN, bool GATED> struct copier {
    const __half *w, *x;            /* of the first row, at the thread's unit */
    int ld, column, rows_w, rows_x; /* rows: from the thread's first on */
    uint32_t to;

    __device__ __forceinline__ copier(const sti_cuda_few &f, int i, int tile, int m0,
                                      uint32_t stages)
    {
        const int row = threadIdx.x / 8, unit = threadIdx.x % 8;
        const sti_cuda_matrix &m = f.w[GATED ? row / 8 : i];
        const int n = tile * rows_of(BN, GATED) + (GATED ? row % 8 : row);
        ld = m.ld;
        column = 8 * unit;
        rows_w = m.N - n;
        rows_x = f.M - m0 - row;
        w = (const __half *)m.half + (int64_t)n * ld + column;
        x = (const __half *)f.xh + (int64_t)(m0 + row) * ld + column;
        to = stages + unit_at<STEP>(row, unit);
    }
    __device__ __forceinline__ void weights(int slot, int k) const
    {
        constexpr int APART = GATED ? 8 : 16;
        const uint32_t at = to + slot * plan<BM, BN>::STAGE;
        const bool in = column + k < ld;
#pragma unroll
        for (int j = 0; j < BN / 16; j++)
            copy_or_zero(at + j * 16 * ROW, w + (int64_t)j * APART * ld + k,
                         in && j * APART < rows_w);
    }
    __device__ __forceinline__ void rows(int slot, int k) const
    {
        const uint32_t at = to + slot * plan<BM, BN>::STAGE + BN * ROW;
        const bool in = column + k < ld;
#pragma unroll
        for (int j = 0; j < BM / 16; j++)
            copy_or_zero(at + j * 16 * ROW, x + (int64_t)j * 16 * ld + k,
                         in && j * 16 < rows_x);
    }
};

/* A warp's 16 rows of W times BM rows of x; c[j]: rows 8 j .. + 7 of x. */
template <int BM> struct sums {
    float c[BM / 8][4];
};

/* One step: columns 16 first .. 16 (first + COUNT) of the stage. */
template <int BM, int COUNT>
__device__ __forceinline__ void add_step(sums<BM> &s, uint32_t w_tile, uint32_t x_tile,
                                         int first)
{
    const int lane = threadIdx.x % 32;
    const auto at_w = lane_address<STEP>::by16(w_tile, lane);
    const auto at_x = lane_address<STEP>::by8(x_tile, lane);
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        uint32_t a[4];
        load_squares(a, at_w.at(0, first + k));
#pragma unroll
        for (int j = 0; j < BM / 16; j++) {
            uint32_t b[4];
            load_squares(b, at_x.at(16 * j, first + k));
            mma(s.c[2 * j], a, b[0], b[1]);
            mma(s.c[2 * j + 1], a, b[2], b[3]);
        }
    }
}

/* Sums of warps 2 and 3 are added to those of warps 0 and 1. */
template <int BM> __device__ __forceinline__ void join_halves(sums<BM> &s, float *room)
{
    float *mine = room + threadIdx.x % 64;
    __syncthreads(); /* the stages are free */
    if (threadIdx.x >= 64)
#pragma unroll
        for (int j = 0; j < BM / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) mine[(4 * j + e) * 64] = s.c[j][e];
    __syncthreads();
    if (threadIdx.x < 64)
#pragma unroll
        for (int j = 0; j < BM / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) s.c[j][e] += mine[(4 * j + e) * 64];
}

/* Where a lane's results go: c[j][e] is row n + 8 (e / 2) of W and row m + 8 j + e % 2
 * of x; GATED: c[j][e] and c[j][e + 2] are gate and up of column n. */
template <int BM, bool GATED> struct results {
    const sti_cuda_few &f;
    int i, n, m, N;
    float before[BM / 8][4]; /* what is added: the bias, and y where it accumulates */

    __device__ __forceinline__ void load()
    {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int column = GATED ? n : n + e / 2 * 8;
            const float *bias = f.bias[GATED ? e / 2 : i];
            const float shift = bias && column < N ? bias[column] : 0;
#pragma unroll
            for (int j = 0; j < BM / 8; j++) {
                const int row = m + 8 * j + e % 2;
                const bool add = !GATED && f.accumulate && column < N && row < f.M;
                before[j][e] = shift + (add ? f.y[i][(int64_t)row * N + column] : 0);
            }
        }
    }
    __device__ __forceinline__ void store(const sums<BM> &s)
    {
#pragma unroll
        for (int j = 0; j < BM / 8; j++)
#pragma unroll
            for (int e = 0; e < (GATED ? 2 : 4); e++) {
                const int column = GATED ? n : n + e / 2 * 8, row = m + 8 * j + e % 2;
                if (column >= N || row >= f.M) continue;
                const int64_t at = (int64_t)row * N + column;
                const float v = s.c[j][e] + before[j][e];
                if (GATED) {
                    const float up = s.c[j][e + 2] + before[j][e + 2];
                    ((__half *)f.yh)[at] =
                        sti_to_half(__fdividef(v, 1 + __expf(-v)) * up);
                } else {
                    f.y[i][at] = v;
                }
            }
    }
};

/* Block (tile, rows of x): tiles of all matrices, one after another. */
template <int BM, int BN, bool GATED>
__global__ void __launch_bounds__(THREADS, (plan<BM, BN>::BLOCKS))
    some_rows(const __grid_constant__ sti_cuda_few f)
{
    constexpr int STAGES = plan<BM, BN>::STAGES, STAGE = plan<BM, BN>::STAGE;
    constexpr bool SHARE = BN < FULL_BN; /* two warps share rows of W */
    extern __shared__ __align__(1024) unsigned char stages[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int strip = SHARE ? warp % 2 : warp; /* 16 rows of the tile */
    const int m0 = blockIdx.y * BM, steps = (f.w[0].ld + STEP - 1) / STEP;
    int i = 0, tile = blockIdx.x;
    if (!GATED)
        for (int n; i + 1 < f.n && tile >= (n = (f.w[i].N + BN - 1) / BN); i++)
            tile -= n;
    const uint32_t base = shared_address(stages);
    const copier<BM, BN, GATED> copy(f, i, tile, m0, base);
    sti_lead();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++)
        if (s < steps) copy.weights(s, s * STEP); /* weights wait for nobody */
    sti_follow();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) copy.rows(s, s * STEP);
        copy_commit();
    }
    results<BM, GATED> out = {f,
                              i,
                              tile * rows_of(BN, GATED) + strip * rows_of(16, GATED) +
                                  lane / 4,
                              m0 + lane % 4 * 2,
                              f.w[GATED ? 0 : i].N,
                              {}};
    if (!SHARE || warp < 2) out.load();

    sums<BM> s = {};
    for (int step = 0, slot = 0, next = STAGES - 1; step < steps; step++) {
        copy_wait<STAGES - 2>();
        __syncthreads(); /* the step has come, and the one before it has been used */
        if (step + STAGES - 1 < steps) {
            copy.weights(next, (step + STAGES - 1) * STEP);
            copy.rows(next, (step + STAGES - 1) * STEP);
        }
        copy_commit();
        const uint32_t here = base + slot * STAGE;
        add_step<BM, SHARE ? 2 : 4>(s, here + strip * 16 * ROW, here + BN * ROW,
                                    SHARE ? warp / 2 * 2 : 0);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        next = next + 1 == STAGES ? 0 : next + 1;
    }
    copy_wait<0>();
    if (SHARE) join_halves<BM>(s, (float *)stages);
    if (!SHARE || warp < 2) out.store(s);
}

/* Tiles of BN rows of all matrices. */
int tiles_of(const sti_cuda_few *f, int BN)
{
    const int rows = rows_of(BN, f->yh != nullptr);
    int tiles = 0;
    for (int i = 0; i < (f->yh ? 1 : f->n); i++) tiles += (f->w[i].N + rows - 1) / rows;
    return tiles;
}

template <int BM, int BN, bool GATED>
still_status launch(sti_dev *dev, const sti_cuda_few *f, still_error *err)
{
    constexpr size_t room = plan<BM, BN>::SHARED;
    auto kernel = some_rows<BM, BN, GATED>;
    STI_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)room),
             "matmul of some rows");
    STI_CUDA(
        sti_launch(dev, kernel,
                   dim3((unsigned)tiles_of(f, BN), (unsigned)((f->M + BM - 1) / BM)),
                   dim3(THREADS), room, *f),
        "matmul of some rows");
    return STILL_OK;
}

} // namespace

bool sti_cuda_some_fit(const sti_dev *dev, const sti_cuda_few *f)
{
    int64_t bytes = 0;
    for (int i = 0; i < f->n; i++) {
        if (!f->w[i].half) return false;
        bytes += (int64_t)f->w[i].N * f->w[i].ld * (int64_t)sizeof(__half);
    }
    const int64_t tiles = (int64_t)tiles_of(f, FULL_BN) * ((f->M + 63) / 64);
    return tiles <= (int64_t)MOST_WAVES * dev->sms &&
           (f->M <= READ_ONCE || bytes <= MOST_BYTES);
}

/* Large tiles move fewer bytes; small ones, where large ones would leave SMs idle, end
 * sooner. */
still_status sti_cuda_some_rows(sti_dev *dev, const sti_cuda_few *f, still_error *err)
{
    const int tiles = tiles_of(f, FULL_BN);
    if (f->yh)
        return f->M <= 16   ? launch<16, 64, true>(dev, f, err)
               : f->M <= 32 ? launch<32, 64, true>(dev, f, err)
                            : launch<64, 64, true>(dev, f, err);
    if (f->M <= 16)
        return tiles < dev->sms ? launch<16, 32, false>(dev, f, err)
                                : launch<16, 64, false>(dev, f, err);
    if (f->M > 32 && tiles * ((f->M + 63) / 64) >= dev->sms)
        return launch<64, 64, false>(dev, f, err);
    return tiles * ((f->M + 31) / 32) < dev->sms ? launch<32, 32, false>(dev, f, err)
                                                 : launch<32, 64, false>(dev, f, err);
}
