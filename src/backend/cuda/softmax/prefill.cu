/* prefill.cu - many rows of a session against its cache of halves, on any GPU
 * from sm_80 on (after FlashAttention-2: Dao, 2023).
 *
 * Bounded by tensor cores and exponentials. A block takes ROWS queries of one head and
 * walks over the keys they see, KEYS at a time; logits and weights live in registers
 * only. A warp has 32 of the rows, two fragments high, so that what it reads of keys
 * and values from shared memory is used twice: with 16 rows shared memory would be the
 * bound. Blocks share a multiprocessor: one's exponentials overlap with another's
 * products.
 *
 * Heads of up to 64 dims on Hopper (sm_90a): the four warps multiply together, in the
 * background, 64 rows at a time. While one fragment's logits become weights the other's
 * products run.
 *
 * Shared memory: queries [ROWS, DP], then stages of keys and values [KEYS, DP] each,
 * two or, for small heads, three. 16-byte words of a row change places by the row's low
 * bits, so that the eight rows of a matrix that ldmatrix reads lie in different banks.
 * The next stage is copied while this one is used: one barrier a stage. */
#include "backend/cuda/ptx/wgmma.cuh"
#include "backend/cuda/softmax/prefill.cuh"

namespace
{

/* First row, counted from the session's beginning, of fragment i of this warp. */
template <int DP>
static __device__ __forceinline__ int fragment_row(const job &b, int i)
{
    return b.past + b.row + (int)threadIdx.x / 32 * plan<DP>::DOWN +
           i * plan<DP>::ACROSS;
}

template <int DP>
static __device__ __forceinline__ void mask_if_needed(logits &s, const job &b, int i,
                                                      int j0)
{
    int t = fragment_row<DP>(b, i);
    if (j0 + KEYS - 1 > t || j0 < first_key(t + 15, b.window)) mask(s, b, t, j0);
}

/* ---- Each warp by itself ------------------------------------------------- */

/* s = Q K^T. `queries`: the warp's rows; both addresses with this lane's part in them.
 */
template <int DP>
static __device__ __forceinline__ void multiply_keys(logits (&s)[2], uint32_t queries,
                                                     uint32_t keys)
{
#pragma unroll
    for (int k = 0; k < DP / 16; k++) {
        uint32_t a[2][4];
        ldmatrix_x4(a[0], queries ^ (k << 5));
        ldmatrix_x4(a[1], (queries ^ (k << 5)) + 16 * plan<DP>::ROW);
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            uint32_t b[4];
            ldmatrix_x4(b, (keys ^ (k << 5)) + n * 16 * plan<DP>::ROW);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                mma(s[i][2 * n], a[i], b[0], b[1]);
                mma(s[i][2 * n + 1], a[i], b[2], b[3]);
            }
        }
    }
}

/* sum += P V. */
template <int DP>
static __device__ __forceinline__ void
multiply_values(rows<DP> &x, const weights (&p)[2], uint32_t values)
{
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
        for (int n = 0; n < DP / 16; n++) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, (values ^ (n << 5)) + k * 16 * plan<DP>::ROW);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                mma(x.sum[i][2 * n], p[i][k], b[0], b[1]);
                mma(x.sum[i][2 * n + 1], p[i][k], b[2], b[3]);
            }
        }
}

template <int DP>
static __device__ __forceinline__ void
walk_alone(rows<DP> &x, const job &b, uint32_t queries, uint32_t stages, float scale)
{
    /* Of the four matrices that a load takes, a lane points into number lane / 8: they
     * lie two rows of matrices high and two wide, in the order the products want. */
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int down = lane / 8 % 2, right = lane / 16, row = lane % 8;
    queries += plan<DP>::place(warp * 32 + down * 8 + row, right);
    uint32_t key_at = plan<DP>::place(right * 8 + row, down);
    uint32_t value_at = plan<DP>::place(down * 8 + row, right) + plan<DP>::PART;
    int last = b.row + warp * 32 < b.n ? fragment_row<DP>(b, 1) + 15 : -1;
    int tiles = (b.end - b.first + KEYS - 1) / KEYS;
    for (int n = 0; n < tiles; n++) {
        cp_async_wait<0>();
        __syncthreads();
        if (n + 1 < tiles) fetch_stage<DP>(b, n + 1, stages);
        int j0 = b.first + n * KEYS;
        if (j0 > last) continue;
        uint32_t stage = stages + n % plan<DP>::STAGES * plan<DP>::STAGE;
        weights p[2];
        {
            logits s[2] = {};
            multiply_keys<DP>(s, queries, stage + key_at);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float shrink[2];
                mask_if_needed<DP>(s[i], b, i, j0);
                weigh<DP>(x, i, s[i], shrink, scale);
                scale_sums<DP>(x, i, shrink);
                pack_weights(p[i], s[i]);
            }
        }
        multiply_values<DP>(x, p, stage + value_at);
    }
}

/* ---- All warps together -------------------------------------------------- */

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Queues s = Q K^T of 64 queries; a step is 16 dims, 32 bytes. */
static __device__ __forceinline__ void queue_logits(logits &s, uint32_t queries,
                                                    uint32_t keys)
{
    undefined_sums(s);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma_nt(s, wgmma_descriptor(queries + 32 * k), wgmma_descriptor(keys + 32 * k),
                 k > 0);
    wgmma_commit();
}

/* Queues sum += P V; a step is 16 keys, 2048 bytes. */
static __device__ __forceinline__ void queue_sums(float (&sum)[8][4], weights &p,
                                                  uint32_t values)
{
    pin(p);
    pin(sum);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
        wgmma_rn(sum, p[k], wgmma_descriptor(values + 2048 * k));
    wgmma_commit();
}

/* The sums are there; until then p must stay as it is. */
static __device__ __forceinline__ void await_sums(float (&sum)[8][4], weights &p)
{
    wgmma_wait<0>();
    pin(p);
    pin(sum);
}

/* Multiplies the weights p of fragment I with the values of their tile; meanwhile the
 * logits of the other fragment, against keys from j0 on, become the next weights. */
template <int I>
static __device__ __forceinline__ void step(rows<64> &x, weights &p, const job &b,
                                            uint32_t queries, uint32_t keys,
                                            uint32_t values, int j0, float scale)
{
    constexpr int OTHER = 1 - I;
    logits s;
    float shrink[2];
    queue_logits(s, queries + OTHER * 64 * plan<64>::ROW, keys);
    queue_sums(x.sum[I], p, values);
    wgmma_wait<1>();
    pin(s);
    mask_if_needed<64>(s, b, OTHER, j0);
    weigh<64>(x, OTHER, s, shrink, scale);
    await_sums(x.sum[I], p);
    scale_sums<64>(x, OTHER, shrink);
    pack_weights(p, s);
}

/* Of three stages one is used, one comes, and of one the values may still be used. */
static __device__ __forceinline__ void
walk_together(rows<64> &x, const job &b, uint32_t queries, uint32_t stages, float scale)
{
    constexpr int PART = plan<64>::PART;
    int tiles = (b.end - b.first + KEYS - 1) / KEYS;
    const auto stage_of = [&](int n) { return stages + n % 3 * plan<64>::STAGE; };
    /* Tile n is here, and the next on its way. */
    const auto await_tile = [&](int n) {
        cp_async_wait<0>();
        fence_proxy_async();
        __syncthreads();
        if (n + 1 < tiles) fetch_stage<64>(b, n + 1, stages);
    };
    weights p;
    await_tile(0);
    {
        logits s;
        float shrink[2];
        queue_logits(s, queries, stage_of(0));
        wgmma_wait<0>();
        pin(s);
        mask_if_needed<64>(s, b, 0, b.first);
        weigh<64>(x, 0, s, shrink, scale); /* nothing has been summed yet */
        pack_weights(p, s);
    }
    for (int n = 0; n < tiles; n++) {
        uint32_t values = stage_of(n) + PART;
        int j0 = b.first + n * KEYS;
        step<0>(x, p, b, queries, stage_of(n), values, j0, scale);
        if (n + 1 == tiles) {
            queue_sums(x.sum[1], p, values);
            await_sums(x.sum[1], p);
            break;
        }
        await_tile(n + 1);
        step<1>(x, p, b, queries, stage_of(n + 1), values, j0 + KEYS, scale);
    }
}
#endif

/* ---- Kernel -------------------------------------------------------------- */

template <int DP>
__global__ void __launch_bounds__(THREADS, DP == 64 ? 3 : 2)
    prefill(const __grid_constant__ sti_cuda_attn a)
{
    extern __shared__ __align__(1024) char shared[];
    __shared__ job b; /* registers are for the sums */
    if (threadIdx.x == 0) b = find_job(a, ROWS);
    __syncthreads();
    uint32_t queries = shared_address(shared), stages = queries + plan<DP>::QUERIES;
    fetch_stage<DP>(b, 0, stages);
    fetch_queries<plan<DP>>(b, a.q + b.out, (size_t)a.H * a.D, shared);

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
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (DP == 64)
        walk_together(x, b, queries, stages, a.scale);
    else
#endif
        walk_alone<DP>(x, b, queries, stages, a.scale);
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
