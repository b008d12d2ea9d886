/* gemm.cu - gemm_small: products of rows by the dozen, of all matrices that read one
 * input at once.
 *
 * A decode step of many sessions has too many rows for gemv.cu and too few to keep a
 * library's product busy: each matrix alone is a launch that fills part of the GPU and
 * ends before its memory is up to speed. Here one launch takes tiles of all of them (q,
 * k, v and attention's gate; gate and up, with silu(gate) * up as the result). Bounded
 * by latency for small models, by the memory that weights come from for large ones;
 * weights and x are halves.
 *
 * A block of four warps makes 64 rows of W times BM rows of x. Steps of 64 columns go
 * through a ring of STAGES tiles in shared memory; the first weights are fetched before
 * the wait for x (pdl.cuh). Where tiles are fewer than blocks the GPU holds, a cluster
 * of blocks shares one, each with part of the columns: their sums are added from shared
 * memory in the order of the parts. So there are always enough bytes under way to keep
 * memory busy, and no block has many steps to go through.
 *
 * A block that runs for two microseconds reads most of its code for the first time,
 * from afar: a loop that is unrolled where nothing is won by it takes longer. */
#include "backend/cuda/dense/dequant.cuh"
#include "backend/cuda/dense/gemm_tile.cuh"
#include "backend/cuda/dense/norm_rope.cuh"
#include "backend/cuda/ptx/pdl.cuh"

namespace
{

enum { THREADS = 128, BN = 64 }; /* BN: rows of a tile of W */
enum {
    MOST_WAVES = 4,       /* tiles of 64 x 64 an SM, beyond which cuBLASLt is faster */
    READ_ONCE = 32,       /* rows of x for which weights are read once */
    MOST_BYTES = 8 << 20, /* of weights that may be read more than once */
    MOST_PARTS = 8,       /* blocks of a cluster: what every GPU that has them allows */
    LEAST_STEPS = 3 /* of a part: with fewer, the barrier takes longer than adding */
};

/* The ring of a block. One fits where 99 KB of shared memory are all there is; here two
 * to four blocks share an SM. Weights under way a block: 32 KB with BM = 16, the size
 * for which memory is the bound. */
template <int BM> struct plan {
    static constexpr int STAGE = (BN + BM) * ROW;
    static constexpr int STAGES = BM == 128 ? 4 : 5;
    static constexpr size_t SHARED = (size_t)STAGES * STAGE;
    /* Of an SM: those that fit, and those wanted where tiles are shared. */
    static constexpr int BLOCKS = BM == 16 ? 4 : BM == 32 ? 3 : 2;
    static constexpr int SHARING = BM == 128 ? 1 : BM == 64 ? 2 : 3;
};

/* Rows that one tile of a matrix makes: GATED tiles hold as many of gate as of up. */
__host__ __device__ constexpr int rows_of(bool gated)
{
    return gated ? BN / 2 : BN;
}

/* What a thread copies: 16 bytes, unit tid % 8, of rows tid / 8, + 16, ... of a tile.
 * In a GATED tile rows 16 j .. + 7 are rows 8 j .. of gate, rows 16 j + 8 .. those of
 * up. */
template <int BM, bool GATED> struct copier {
    static constexpr int APART = GATED ? 8 : 16; /* rows of W, from one j to the next */
    const __half *w, *x;            /* of the first row, at the thread's unit */
    int ld, column, rows_w, rows_x; /* rows: from the thread's first on */
    uint32_t to;

    __device__ __forceinline__ copier(const sti_cuda_gemv_args &f, int i, int tile,
                                      int m0, uint32_t stages)
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
        to = stages + unit_at<STEP>(row, unit);
    }
    /* Columns k .. of the tile. */
    __device__ __forceinline__ void weights(int slot, int k) const
    {
        const uint32_t at = to + slot * plan<BM>::STAGE;
        const bool in = column + k < ld;
#pragma unroll
        for (int j = 0; j < BN / 16; j++)
            cp_async16_or_zero<256>(at + j * 16 * ROW, w + (int64_t)j * APART * ld + k,
                                    in && j * APART < rows_w);
    }
    /* Prefetches eight steps from columns k on, one for each unit. */
    __device__ __forceinline__ void prefetch_weights(int k, int end) const
    {
        k += column / 8 * STEP;
        if (k >= end) return;
#pragma unroll
        for (int j = 0; j < BN / 16; j++)
            if (j * APART < rows_w)
                prefetch_l2(w - column + (int64_t)j * APART * ld + k);
    }
    __device__ __forceinline__ void rows(int slot, int k) const
    {
        const uint32_t at = to + slot * plan<BM>::STAGE + BN * ROW;
        const bool in = column + k < ld;
#pragma unroll
        for (int j = 0; j < BM / 16; j++)
            cp_async16_or_zero<256>(at + j * 16 * ROW, x + (int64_t)j * 16 * ld + k,
                                    in && j * 16 < rows_x);
    }
};

/* ---- Sums of a cluster --------------------------------------------------- */

/* Floats from one row of x to the next where a block leaves its sums [BM, BN]: lanes of
 * a warp then write to different banks. */
enum { ACROSS = BN + 4 };

template <int BM>
__device__ __forceinline__ void store_sums(const sums<BM> &s, float *shared)
{
    const int lane = threadIdx.x % 32, n = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < BM / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            shared[(8 * j + lane % 4 * 2 + e % 2) * ACROSS + n + e / 2 * 8] = s.c[j][e];
}

__device__ __forceinline__ float4 add4(float4 a, float4 b)
{
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

/* Four sums of all parts, where this one's are `mine`; four parts are read at once. */
__device__ __forceinline__ float4 total_of(const float *mine, int parts)
{
    float4 v = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int first = 0; first < parts; first += 4) {
        uint4 s[4] = {};
#pragma unroll
        for (int p = 0; p < 4; p++)
            if (first + p < parts) s[p] = cluster_read16(mine, first + p);
#pragma unroll
        for (int p = 0; p < 4; p++)
            v = add4(v, make_float4(__uint_as_float(s[p].x), __uint_as_float(s[p].y),
                                    __uint_as_float(s[p].z), __uint_as_float(s[p].w)));
    }
    return v;
}

__device__ __forceinline__ float gate_of(float gate, float up)
{
    return __fdividef(gate, 1 + __expf(-gate)) * up;
}

/* The results that a thread finishes: four columns of rows of x that all threads of the
 * cluster take in turn. */
template <int BM, bool GATED> struct results {
    static constexpr int FOURS = rows_of(GATED) / 4; /* of a row */
    const sti_cuda_gemv_args &f;
    int i, n, m0, N; /* matrix, the thread's first column, first row, columns in all */
    float4 shift[2]; /* biases; of gate and up */

    __device__ __forceinline__ results(const sti_cuda_gemv_args &few, int matrix,
                                       int tile, int row)
        : f(few), i(matrix), n(tile * rows_of(GATED) + threadIdx.x % FOURS * 4),
          m0(row), N(few.w[matrix].N)
    {
        shift[0] = bias(f.bias[i]);
        if (GATED) shift[1] = bias(f.bias[1]);
    }
    __device__ __forceinline__ float4 bias(const float *b) const
    {
        return b ? sti_load4(b, n, N, N % 4 == 0 && sti_aligned16(b))
                 : make_float4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void store(const float *shared, int part,
                                          int parts) const
    {
        constexpr int AT_ONCE = THREADS / FOURS;
        const int c = threadIdx.x % FOURS * 4, rows = min(BM, f.M - m0);
        const float *at = shared + (GATED ? c / 8 * 16 + c % 8 : c);
        if (n >= N) return;
#pragma unroll 1
        for (int r = part * AT_ONCE + threadIdx.x / FOURS; r < rows;
             r += parts * AT_ONCE) {
            const float4 v = add4(total_of(at + r * ACROSS, parts), shift[0]);
            if (GATED)
                put_gated(m0 + r, v,
                          add4(total_of(at + r * ACROSS + 8, parts), shift[1]));
            else
                put(m0 + r, v);
        }
    }
    __device__ __forceinline__ void put(int row, float4 v) const
    {
        float *y = f.y[i] + (int64_t)row * N + n;
        if (N % 4 == 0 && sti_aligned16(y)) {
            if (f.accumulate)
                red_add4(y, v);
            else
                *(float4 *)y = v;
            return;
        }
        const float each[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (n + e < N) y[e] = f.accumulate ? y[e] + each[e] : each[e];
    }
    /* N is a multiple of 4. */
    __device__ __forceinline__ void put_gated(int row, float4 g, float4 u) const
    {
        *(uint2 *)((__half *)f.yh + (int64_t)row * N + n) =
            make_uint2(pack_saturated(gate_of(g.x, u.x), gate_of(g.y, u.y)),
                       pack_saturated(gate_of(g.z, u.z), gate_of(g.w, u.w)));
    }
};

/* ---- The kernel ---------------------------------------------------------- */

/* Block (part, tile, rows of x): tiles of all matrices, one after another. The parts of
 * a tile are a cluster. */
template <int BM, bool GATED>
__global__ void __launch_bounds__(THREADS, (plan<BM>::BLOCKS))
    gemm_small(const __grid_constant__ sti_cuda_gemv_args f)
{
    constexpr int STAGES = plan<BM>::STAGES;
    extern __shared__ __align__(1024) unsigned char shared[];
    const int part = blockIdx.x, parts = gridDim.x, m0 = blockIdx.z * BM;
    const int all = (f.w[0].ld + STEP - 1) / STEP, first = all * part / parts,
              end = all * (part + 1) / parts;
    int i = 0, tile = blockIdx.y;
    if (!GATED)
        for (int n; i + 1 < f.n && tile >= (n = (f.w[i].N + BN - 1) / BN); i++)
            tile -= n;
    const uint32_t base = shared_address(shared);
    const copier<BM, GATED> copy(f, i, tile, m0, base);
    pdl_trigger();
    int ahead = first + STAGES - 1; /* the step that is fetched next */
#pragma unroll 1
    for (int step = first; step < min(ahead, end); step++)
        copy.weights(step - first, step * STEP); /* no kernel in front writes them */
    /* Where rows are more, weights are few enough to lie in the L2 cache. */
    if (BM > READ_ONCE) copy.prefetch_weights(ahead * STEP, end * STEP);
    pdl_wait();
#pragma unroll 1
    for (int step = first; step < ahead; step++) {
        if (step < end) copy.rows(step - first, step * STEP);
        cp_async_commit();
    }
    const results<BM, GATED> out(f, i, tile, m0);

    sums<BM> s = {};
#pragma unroll 1
    for (int step = first, slot = 0, next = STAGES - 1; step < end; step++, ahead++) {
        cp_async_wait<STAGES - 2>();
        copies_came();
        __syncthreads(); /* the step has come, and the one before it has been used */
        const uint32_t w = base + slot * plan<BM>::STAGE;
        begin_step(s, w, w + BN * ROW);
        if (ahead < end) {
            copy.weights(next, ahead * STEP);
            copy.rows(next, ahead * STEP);
        }
        cp_async_commit();
        end_step(s);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        next = next + 1 == STAGES ? 0 : next + 1;
    }
    __syncthreads(); /* tiles are no longer needed */
    store_sums(s, (float *)shared);
    cluster_sync();
    out.store((const float *)shared, part, parts);
    if (parts > 1) cluster_sync(); /* no block ends while its sums are read */
}

/* Tiles of all matrices. */
int tiles_of(const sti_cuda_gemv_args *f)
{
    const int rows = rows_of(f->yh != nullptr);
    int tiles = 0;
    for (int i = 0; i < (f->yh ? 1 : f->n); i++) tiles += (f->w[i].N + rows - 1) / rows;
    return tiles;
}

/* Parts of a tile: as many as SMs hold, and of these the fewest that keep the longest
 * part as short. */
template <int BM> int parts_of(const sti_dev *dev, const sti_cuda_gemv_args *f)
{
    if (!dev->pdl) return 1;
    const int tiles = tiles_of(f) * ((f->M + BM - 1) / BM),
              steps = (f->w[0].ld + STEP - 1) / STEP;
    int most = plan<BM>::SHARING * dev->sms / tiles;
    if (most > MOST_PARTS) most = MOST_PARTS;
    if (most > steps / LEAST_STEPS) most = steps / LEAST_STEPS;
    if (most < 2) return 1;
    const int longest = (steps + most - 1) / most;
    return (steps + longest - 1) / longest;
}

template <int BM, bool GATED>
still_status launch(sti_dev *dev, const sti_cuda_gemv_args *f, still_error *err)
{
    auto kernel = gemm_small<BM, GATED>;
    const int parts = parts_of<BM>(dev, f);
    STI_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)plan<BM>::SHARED),
             "matmul of some rows");
    STI_CUDA(pdl_launch_clusters(dev, parts, kernel,
                                 dim3((unsigned)parts, (unsigned)tiles_of(f),
                                      (unsigned)((f->M + BM - 1) / BM)),
                                 dim3(THREADS), plan<BM>::SHARED, *f),
             "matmul of some rows");
    return STILL_OK;
}

template <int BM>
still_status launch_rows(sti_dev *dev, const sti_cuda_gemv_args *f, still_error *err)
{
    return f->yh ? launch<BM, true>(dev, f, err) : launch<BM, false>(dev, f, err);
}

/* Rows of x of a block. Large tiles move fewer bytes; where they would leave SMs idle,
 * shared or not, small ones end sooner. */
int block_rows(const sti_dev *dev, const sti_cuda_gemv_args *f)
{
    const int tiles = tiles_of(f);
    if (f->M <= 16) return 16;
    if (f->M <= 32) return 32;
    if (!dev->pdl) return tiles * ((f->M + 63) / 64) < dev->sms ? 32 : 64;
    const int blocks = tiles * ((f->M + 127) / 128) * parts_of<128>(dev, f);
    return f->M <= 64 || blocks < dev->sms * 2 / 3 ? 64 : 128;
}

} // namespace

bool sti_cuda_gemm_small_fits(const sti_dev *dev, const sti_cuda_gemv_args *f)
{
    int64_t bytes = 0;
    for (int i = 0; i < f->n; i++) {
        if (!f->w[i].half) return false;
        bytes += (int64_t)f->w[i].N * f->w[i].ld * (int64_t)sizeof(__half);
    }
    const int64_t tiles = (int64_t)tiles_of(f) * ((f->M + 63) / 64);
    return tiles <= (int64_t)MOST_WAVES * dev->sms &&
           (f->M <= READ_ONCE || bytes <= MOST_BYTES);
}

still_status sti_cuda_gemm_small(sti_dev *dev, const sti_cuda_gemv_args *f,
                                 still_error *err)
{
    switch (block_rows(dev, f)) {
    case 16: return launch_rows<16>(dev, f, err);
    case 32: return launch_rows<32>(dev, f, err);
    case 64: return launch_rows<64>(dev, f, err);
    default: return launch_rows<128>(dev, f, err);
    }
}
