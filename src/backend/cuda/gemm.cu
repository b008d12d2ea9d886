/* gemm.cu - products of rows by the dozen, of all matrices that read one input at once.
 *
 * A decode step of many sessions has too many rows for gemv.cu and too few to keep a
 * library's product busy: each matrix alone is a launch that fills part of the GPU and
 * ends before its memory is up to speed. Here one launch takes tiles of all of them
 * (q, k, v and attention's gate; gate and up, with silu(gate) * up as the result).
 * Bounded by latency for small models, by the memory that weights come from for large
 * ones; weights are halves.
 *
 * A block of four warps makes 64 rows of W times BM rows of x. Steps of 64 columns go
 * through a ring of STAGES tiles in shared memory; weights of the first ones are asked
 * for before x is waited for (follow.cuh). Where tiles are fewer than blocks the GPU
 * holds, a cluster of blocks shares one, each with part of the columns: their sums meet
 * in shared memory and are added in the order of the parts. So there are always enough
 * bytes under way to keep memory busy, and no block has many steps to go through. Where
 * parts are that short, x may come in floats, and is normed here: in a small model a
 * kernel that only norms takes as long as a product. */
#include "backend/cuda/follow.cuh"
#include "backend/cuda/gemm_input.cuh"

namespace
{

enum {
    MOST_WAVES = 4,       /* tiles of 64 x 64 an SM, beyond which cuBLASLt is faster */
    READ_ONCE = 32,       /* rows of x for which weights are read once */
    MOST_BYTES = 8 << 20, /* of weights that may be read more than once */
    MOST_PARTS = 8,       /* blocks of a cluster: what every GPU that has them allows */
    LEAST_STEPS = 3,      /* of a part: with fewer, meeting takes longer than adding */
    FLOAT_BLOCKS = 3,     /* an SM, at most, where x in floats takes more parts */
    FLOAT_BYTES = 8 << 20 /* that blocks may read in all because x is not half */
};

/* ---- Sums of a cluster --------------------------------------------------------------
 */

/* Floats from one row of x to the next where a block leaves its sums [BM, BN]: lanes of
 * a warp then write to different banks. */
enum { ACROSS = BN + 4 };

template <int BM>
__device__ __forceinline__ void leave_sums(const sums<BM> &s, float *room)
{
    const int lane = threadIdx.x % 32, n = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < BM / 8; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            room[(8 * j + lane % 4 * 2 + e % 2) * ACROSS + n + e / 2 * 8] = s.c[j][e];
}

__device__ __forceinline__ float4 add4(float4 a, float4 b)
{
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__device__ __forceinline__ float4 times4(float4 a, float by)
{
    return make_float4(a.x * by, a.y * by, a.z * by, a.w * by);
}

/* Four sums of all parts, where this one's are `mine`, each times the root that its row
 * was divided by, if root. */
__device__ __forceinline__ float4 total_of(const float *mine, const float *root,
                                           int parts)
{
    float4 v = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (int p = 0; p < parts; p++) {
        const uint4 s = sti_read_peer(mine, p);
        const float4 of_part = make_float4(__uint_as_float(s.x), __uint_as_float(s.y),
                                           __uint_as_float(s.z), __uint_as_float(s.w));
        v = add4(v, root ? times4(of_part, sti_read_peer_float(root, p)) : of_part);
    }
    return v;
}

__device__ __forceinline__ float gate_of(float gate, float up)
{
    return __fdividef(gate, 1 + __expf(-gate)) * up;
}

/* The results that a thread finishes: four columns of a row of x each, all results of
 * the tile in turn over all threads of the cluster. */
template <int BM, bool GATED> struct results {
    static constexpr int FOURS = rows_of(GATED) / 4; /* of a row */
    static constexpr int EACH = BM * FOURS / THREADS;
    const sti_cuda_few &f;
    int i, n0, m0, N; /* matrix, first column, first row, columns in all */
    int part, parts;
    const row_norms<BM> *norms; /* of this part; NULL: rows are as they are */
    float4 before[EACH]; /* what is added: the bias, and y where it accumulates */

    __device__ __forceinline__ int at(int u) const
    {
        return (u * parts + part) * THREADS + threadIdx.x;
    }
    __device__ __forceinline__ int row(int u) const
    {
        return at(u) / FOURS;
    }
    __device__ __forceinline__ int column(int u) const
    {
        return at(u) % FOURS * 4;
    }
    __device__ __forceinline__ bool mine(int u) const
    {
        return row(u) < BM && m0 + row(u) < f.M && n0 + column(u) < N;
    }
    __device__ __forceinline__ float4 shift(int which, int n) const
    {
        const float *bias = f.bias[which];
        return bias ? sti_load4(bias, n, N, N % 4 == 0 && sti_aligned16(bias))
                    : make_float4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void load()
    {
        if (GATED) return;
        const float *y = f.y[i];
        const bool vec = N % 4 == 0 && sti_aligned16(y);
#pragma unroll
        for (int u = 0; u < EACH; u++) {
            before[u] = make_float4(0, 0, 0, 0);
            if (!mine(u)) continue;
            before[u] = shift(i, n0 + column(u));
            if (f.accumulate)
                before[u] = add4(before[u], sti_load4(y + (int64_t)(m0 + row(u)) * N,
                                                      n0 + column(u), N, vec));
        }
    }
    /* Columns of row r of x, `at` of this part's sums, of all parts and normed. */
    __device__ __forceinline__ float4 total(const float *at, int r) const
    {
        if (!norms) return total_of(at, nullptr, parts);
        float s = 0;
        for (int p = 0; p < parts; p++) s += sti_read_peer_float(&norms->squares[r], p);
        return times4(total_of(at, &norms->root[r], parts),
                      1 / sqrtf(s / (float)f.K + f.eps));
    }
    __device__ __forceinline__ void store(const float *room) const
    {
#pragma unroll
        for (int u = 0; u < EACH; u++) {
            if (!mine(u)) continue;
            const int r = row(u), c = column(u), n = n0 + c;
            if (GATED) {
                store_gated(room + r * ACROSS + c / 8 * 16 + c % 8, r, n);
                continue;
            }
            const bool vec = N % 4 == 0 && sti_aligned16(f.y[i]);
            sti_store4(f.y[i] + (int64_t)(m0 + r) * N, n, N, vec,
                       add4(total(room + r * ACROSS + c, r), before[u]));
        }
    }
    /* gate: where its four sums are; those of up lie 8 after. N is a multiple of 4. */
    __device__ __forceinline__ void store_gated(const float *gate, int r, int n) const
    {
        const float4 g = add4(total(gate, r), shift(0, n)),
                     u = add4(total(gate + 8, r), shift(1, n));
        *(uint2 *)((__half *)f.yh + (int64_t)(m0 + r) * N + n) =
            make_uint2(sti_pack_half(gate_of(g.x, u.x), gate_of(g.y, u.y)),
                       sti_pack_half(gate_of(g.z, u.z), gate_of(g.w, u.w)));
    }
};

/* ---- The kernel ---------------------------------------------------------------------
 */

/* Block (part, tile, rows of x): tiles of all matrices, one after another. The parts of
 * a tile are a cluster. */
template <int BM, bool GATED, bool FLOATS>
__global__ void __launch_bounds__(THREADS, (plan<BM, FLOATS>::BLOCKS))
    some_rows(const __grid_constant__ sti_cuda_few f)
{
    typedef plan<BM, FLOATS> room;
    constexpr int STAGES = room::STAGES;
    extern __shared__ __align__(1024) unsigned char shared[];
    const int part = blockIdx.x, parts = gridDim.x, m0 = blockIdx.z * BM;
    const int all = (f.w[0].ld + STEP - 1) / STEP, first = all * part / parts,
              steps = all * (part + 1) / parts - first;
    int i = 0, tile = blockIdx.y;
    if (!GATED)
        for (int n; i + 1 < f.n && tile >= (n = (f.w[i].N + BN - 1) / BN); i++)
            tile -= n;
    const uint32_t base = shared_address(shared);
    const copier<BM, GATED, FLOATS> copy(f, i, tile, m0, base);
    row_norms<BM> *norms =
        FLOATS && f.norm ? (row_norms<BM> *)(shared + room::NORMS) : nullptr;
    eights gain;
    sti_lead();
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) copy.weights(s, (first + s) * STEP); /* they wait for nobody */
        if (FLOATS) copy_commit();
    }
    const int column = first * STEP + copy.column;
    if (FLOATS) gain.load(f.norm + column, steps, f.norm ? f.K - column : 0, 1);
    sti_follow();
#pragma unroll
    for (int s = 0; s < STAGES - 1 && !FLOATS; s++) {
        if (s < steps) copy.rows(s, (first + s) * STEP);
        copy_commit();
    }
    results<BM, GATED> out = {
        f, i, tile * rows_of(GATED), m0, f.w[GATED ? 0 : i].N, part, parts, norms, {}};
    if (FLOATS) take_floats<BM>(f, gain, m0, column, steps, shared, norms);
    out.load();

    sums<BM> s = {};
    for (int step = 0, slot = 0, next = STAGES - 1; step < steps; step++) {
        copy_wait<STAGES - 2>();
        copies_came();
        __syncthreads(); /* the step has come, and the one before it has been used */
        if (step + STAGES - 1 < steps) {
            copy.weights(next, (first + step + STAGES - 1) * STEP);
            if (!FLOATS) copy.rows(next, (first + step + STAGES - 1) * STEP);
        }
        copy_commit();
        const uint32_t w = base + room::RING + slot * room::STAGE;
        add_step(s, w, FLOATS ? base + step * room::X_TILE : w + BN * ROW);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        next = next + 1 == STAGES ? 0 : next + 1;
    }
    copy_wait<0>();
    __syncthreads(); /* tiles are no longer needed */
    leave_sums(s, (float *)shared);
    sti_meet();
    out.store((const float *)shared);
    if (parts > 1) sti_meet(); /* nobody leaves while its sums are read */
}

/* Tiles of all matrices. */
int tiles_of(const sti_cuda_few *f)
{
    const int rows = rows_of(f->yh != nullptr);
    int tiles = 0;
    for (int i = 0; i < (f->yh ? 1 : f->n); i++) tiles += (f->w[i].N + rows - 1) / rows;
    return tiles;
}

int steps_of(const sti_cuda_few *f)
{
    return (f->w[0].ld + STEP - 1) / STEP;
}

/* Parts that x in floats takes. */
int float_parts(const sti_cuda_few *f)
{
    return (steps_of(f) + FLOAT_STEPS - 1) / FLOAT_STEPS;
}

/* Parts of a tile: as many as SMs have room for, and of these the fewest that leave the
 * longest part as short. */
int parts_of(const sti_dev *dev, int tiles, int sharing, int steps)
{
    if (!dev->follows) return 1;
    int most = sharing * dev->sms / tiles;
    if (most > MOST_PARTS) most = MOST_PARTS;
    if (most > steps / LEAST_STEPS) most = steps / LEAST_STEPS;
    if (most < 2) return 1;
    const int longest = (steps + most - 1) / most;
    return (steps + longest - 1) / longest;
}

template <int BM, bool GATED, bool FLOATS>
still_status launch(sti_dev *dev, const sti_cuda_few *f, still_error *err)
{
    typedef plan<BM, FLOATS> room;
    auto kernel = some_rows<BM, GATED, FLOATS>;
    const int tiles = tiles_of(f), rows = (f->M + BM - 1) / BM;
    int parts = parts_of(dev, tiles * rows, room::SHARING, steps_of(f));
    if (FLOATS && parts < float_parts(f)) parts = float_parts(f);
    STI_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)room::SHARED),
             "matmul of some rows");
    STI_CUDA(sti_launch_clusters(dev, parts, kernel,
                                 dim3((unsigned)parts, (unsigned)tiles, (unsigned)rows),
                                 dim3(THREADS), room::SHARED, *f),
             "matmul of some rows");
    return STILL_OK;
}

template <int BM, bool FLOATS>
still_status launch_rows(sti_dev *dev, const sti_cuda_few *f, still_error *err)
{
    return f->yh ? launch<BM, true, FLOATS>(dev, f, err)
                 : launch<BM, false, FLOATS>(dev, f, err);
}

/* Rows of x of a block. Large tiles move fewer bytes; where they would leave SMs idle
 * and cannot be shared, small ones end sooner. */
int block_rows(const sti_dev *dev, const sti_cuda_few *f)
{
    const int blocks = tiles_of(f) * ((f->M + 63) / 64);
    if (f->M <= 16) return 16;
    if (f->M <= 32) return 32;
    if (!dev->follows) return blocks < dev->sms ? 32 : 64;
    return f->M <= 64 || blocks < dev->sms ? 64 : 128;
}

} // namespace

bool sti_cuda_some_fit(const sti_dev *dev, const sti_cuda_few *f)
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

bool sti_cuda_some_floats(const sti_dev *dev, const sti_cuda_few *f)
{
    const int BM = block_rows(dev, f), parts = float_parts(f), tiles = tiles_of(f);
    const int64_t blocks = (int64_t)tiles * ((f->M + BM - 1) / BM) * parts,
                  more = (int64_t)tiles * f->M * f->K * 2;
    return f->K % 8 == 0 && sti_cuda_aligned(f->x) && sti_cuda_aligned(f->norm) &&
           BM <= 64 && more <= FLOAT_BYTES &&
           (parts == 1 || (dev->follows && parts <= MOST_PARTS &&
                           blocks <= (int64_t)FLOAT_BLOCKS * dev->sms));
}

still_status sti_cuda_some_rows(sti_dev *dev, const sti_cuda_few *f, still_error *err)
{
    switch (block_rows(dev, f)) {
    case 16:
        return f->xh ? launch_rows<16, false>(dev, f, err)
                     : launch_rows<16, true>(dev, f, err);
    case 32:
        return f->xh ? launch_rows<32, false>(dev, f, err)
                     : launch_rows<32, true>(dev, f, err);
    case 64:
        return f->xh ? launch_rows<64, false>(dev, f, err)
                     : launch_rows<64, true>(dev, f, err);
    default: return launch_rows<128, false>(dev, f, err);
    }
}
