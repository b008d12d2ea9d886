/* prefill_hopper.cu - prefill on Hopper's own matrix instructions (sm_90a), for heads
 * of 65 to 128 dims; prefill.cu is the portable path, and that of smaller
 * heads (after FlashAttention-3: Shah et al., 2024).
 *
 * Bounded by tensor cores. wgmma reads keys and values from shared memory itself, so
 * that the 62 % of the peak that is open to mma.sync and its fragments in registers is
 * not the limit. Two warpgroups of 4 warps have 64 rows each and share the keys, KEYS
 * at a time. Products are queued and waited for: while the values of one tile are
 * multiplied, the next tile's logits become weights,
 *   queue S' = Q K'^T; queue O += P V; wait for S'; P' = 2^(S' - m); wait for O.
 *
 * Shared memory: tiles of 128 rows of 128 halves, for queries, two of keys, two of
 * values, as wgmma.cuh lays them out. */
#include "backend/cuda/ptx/wgmma.cuh"
#include "backend/cuda/softmax/parts.cuh"

using namespace sti_attn;

namespace
{

enum { THREADS = 256, ROWS = 128, KEYS = 128, DIMS = 128, WORDS = DIMS / 8 };
enum { SHARED = 5 * TILE };      /* bytes */
enum { STEP = THREADS / WORDS }; /* rows that a block copies at once */

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

typedef uint32_t weights[KEYS / 16][4]; /* logits as halves, ready to multiply */

/* As wgmma.cuh has tiles; see fetch_keys. */
struct tile {
    static constexpr int KEYS = ::KEYS, ROWS = ::ROWS, WORDS = ::WORDS;
    static constexpr int STEP = ::STEP, ROW = 128;
    static __device__ __forceinline__ int place(int row, int word)
    {
        return word_at(row, word);
    }
};

/* Keys [KEYS n, KEYS n + KEYS) after `first`, of K or V. */
static __device__ __forceinline__ void fetch(const job &b, const half *from, int n,
                                             uint32_t to)
{
    fetch_keys<tile>(b, from, n * KEYS, to);
}

/* ---- Arithmetic of a warpgroup ------------------------------------------- */

/* Queues s = Q K^T; `queries`: the warpgroup's rows. A step is 16 dims, 32 bytes. */
static __device__ __forceinline__ void multiply_keys(fragment &s, uint32_t queries,
                                                     uint32_t keys)
{
#pragma unroll
    for (int k = 0; k < DIMS / 16; k++) {
        int at = k / 4 * PANEL + k % 4 * 32;
        wgmma_nt(s, wgmma_descriptor(queries + at), wgmma_descriptor(keys + at), k > 0);
    }
    wgmma_commit();
}

/* Queues o += P V. A step is 16 keys, 2048 bytes. */
static __device__ __forceinline__ void multiply_values(fragment &o, const weights &p,
                                                       uint32_t values)
{
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
        wgmma_rn(o, p[k], wgmma_descriptor(values + k * 2048));
    wgmma_commit();
}

/* Logits that row t does not see: j > t, or j < first_key(t). t0: row 0 of the warp. */
static __device__ __forceinline__ void mask(fragment &s, const job &b, int t0, int j0)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int t = min(t0 + 8 * h + lane / 4, b.past + b.n - 1);
        int from = first_key(t, b.window);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int j = j0 + 8 * n + 2 * (lane % 4) + e;
                if (j > t || j < from) s[4 * n + 2 * h + e] = -INFINITY;
            }
    }
}

/* A row's largest logit and sum of weights, the latter over this lane's keys. */
struct stats {
    float m[2], l[2];
};

/* s = 2^(scale s - m); the sums so far are to be multiplied by shrink. */
static __device__ __forceinline__ void weigh(fragment &s, stats &x, float (&shrink)[2],
                                             float scale)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = -INFINITY, total = 0;
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
            top = fmaxf(top, fmaxf(s[4 * n + 2 * h], s[4 * n + 2 * h + 1]));
        top = quad_max(top) * scale;
        bool grows = top > x.m[h] + SLACK;
        float m = grows ? top : x.m[h];
        shrink[h] = grows ? exp2_fast(x.m[h] - m) : 1.f;
        x.m[h] = m;
        float zero = m == -INFINITY ? 0.f : m; /* no key seen yet: weights are 0 */
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int i = 4 * n + 2 * h + e;
                s[i] = exp2_fast(fmaf(s[i], scale, -zero));
                total += s[i];
            }
        x.l[h] = x.l[h] * shrink[h] + total;
    }
}

static __device__ __forceinline__ void pack_weights(weights &p, const fragment &s)
{
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            p[k][i] = pack_half2(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
}

static __device__ __forceinline__ void scale_sums(fragment &o, const float (&shrink)[2])
{
    if (!__any_sync(~0u, shrink[0] != 1.f || shrink[1] != 1.f)) return;
#pragma unroll
    for (int i = 0; i < 64; i++) o[i] *= shrink[i / 2 % 2];
}

/* row0: the warp's first row in the segment. */
static __device__ __forceinline__ void write_rows(const fragment &o, const stats &x,
                                                  const job &b, int row0, float *to,
                                                  size_t ld)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = row0 + 8 * h + lane / 4;
        float scale = 1 / quad_sum(x.l[h]);
        float *at = to + row * ld + 2 * (lane % 4);
        if (row >= b.n) continue;
#pragma unroll
        for (int n = 0; n < DIMS / 8; n++)
            if (8 * n < b.D)
                *reinterpret_cast<float2 *>(at + 8 * n) =
                    make_float2(o[4 * n + 2 * h] * scale, o[4 * n + 2 * h + 1] * scale);
    }
}

/* ---- Kernel -------------------------------------------------------------- */

/* In step n of the loop the next tile's keys and this tile's values are used; meanwhile
 * the keys after those and the next values are copied to where the keys and values of
 * the step before were. */
static __device__ __forceinline__ void attend(const sti_cuda_attn &a, char *shared)
{
    __shared__ job b;
    if (threadIdx.x == 0) b = find_job(a, ROWS);
    __syncthreads();
    size_t ld = (size_t)a.H * a.D;
    uint32_t queries = shared_address(shared), keys = queries + TILE;
    uint32_t values = keys + 2 * TILE;
    int tiles = (b.end - b.first + KEYS - 1) / KEYS;
    fetch(b, b.K, 0, keys);
    cp_async_commit();
    fetch_queries<tile>(b, a.q + b.out, ld, shared);
    if (tiles > 1) fetch(b, b.K, 1, keys + TILE);
    fetch(b, b.V, 0, values);
    cp_async_commit();

    queries += threadIdx.x / 128 * 64 * 128; /* the warpgroup's rows */
    int row0 = b.row + threadIdx.x / 32 * 16, t0 = b.past + row0;
    fragment s, o;
    weights p;
    stats x = {{-INFINITY, -INFINITY}, {0, 0}};
    float shrink[2];
#pragma unroll
    for (int i = 0; i < 64; i++) o[i] = s[i] = 0;

    cp_async_wait<1>();
    fence_proxy_async();
    __syncthreads();
    wgmma_fence();
    multiply_keys(s, queries, keys);
    wgmma_wait<0>();
    pin(s);
    if (b.first + KEYS - 1 > t0 || b.first < first_key(t0 + 15, b.window))
        mask(s, b, t0, b.first);
    weigh(s, x, shrink, a.scale);
    pack_weights(p, s);

    for (int n = 0; n + 1 < tiles; n++) {
        cp_async_wait<0>();
        fence_proxy_async();
        __syncthreads();
        pin(s);
        pin(o);
        wgmma_fence();
        multiply_keys(s, queries, keys + (n + 1) % 2 * TILE);
        multiply_values(o, p, values + n % 2 * TILE);
        if (n + 2 < tiles) fetch(b, b.K, n + 2, keys + n % 2 * TILE);
        fetch(b, b.V, n + 1, values + (n + 1) % 2 * TILE);
        cp_async_commit();
        wgmma_wait<1>();
        pin(s);
        int j0 = b.first + (n + 1) * KEYS;
        if (j0 + KEYS - 1 > t0 || j0 < first_key(t0 + 15, b.window)) mask(s, b, t0, j0);
        weigh(s, x, shrink, a.scale);
        wgmma_wait<0>();
        pin(o);
        scale_sums(o, shrink);
        pack_weights(p, s);
    }
    cp_async_wait<0>();
    fence_proxy_async();
    __syncthreads();
    pin(o);
    wgmma_fence();
    multiply_values(o, p, values + (tiles - 1) % 2 * TILE);
    wgmma_wait<0>();
    pin(o);
    write_rows(o, x, b, row0, a.o + b.out, ld);
}

#endif

__global__ void __launch_bounds__(THREADS, 1)
    prefill_hopper(const __grid_constant__ sti_cuda_attn a)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char shared[];
    attend(a, shared);
#else
    __trap(); /* not launched: sti_cuda_attn_hopper_runs */
#endif
}

} // namespace

/* The kernel is there only where it was compiled for sm_90a: on other GPUs, and where
 * the driver made it from portable code, it is not. */
extern "C" bool sti_cuda_attn_hopper_runs(const sti_dev *dev, const sti_cuda_attn *a)
{
    struct cudaFuncAttributes f;
    return dev->major == 9 && a->D > 64 && a->D <= DIMS &&
           cudaFuncGetAttributes(&f, prefill_hopper) == cudaSuccess &&
           f.ptxVersion >= 90;
}

extern "C" still_status sti_cuda_attn_hopper(sti_dev *dev, const sti_cuda_attn *a,
                                             still_error *err)
{
    unsigned blocks = 0;
    for (int s = 0; s < a->n_seg; s++)
        blocks += (unsigned)((a->seg[s].n + ROWS - 1) / ROWS * a->H);
    STI_CUDA(cudaFuncSetAttribute(prefill_hopper,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED),
             "attention: shared memory of prefill");
    prefill_hopper<<<blocks, THREADS, SHARED, dev->stream>>>(*a);
    STI_CUDA(cudaGetLastError(), "attention: prefill");
    return STILL_OK;
}
