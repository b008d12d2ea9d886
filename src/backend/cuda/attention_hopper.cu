/* attention_hopper.cu - prefill on Hopper's own matrix instructions (sm_90a), for heads
 * of 65 to 128 dims; attention_prefill.cu is the portable path (after FlashAttention-3:
 * Shah et al., 2024).
 *
 * Bounded by tensor cores. wgmma reads keys and values from shared memory itself, so
 * that the 62 % of the peak that is open to mma.sync and its fragments in registers is
 * not the limit. Two warpgroups of 4 warps have 64 rows each and share the keys, KEYS
 * at a time. Products are queued and waited for: while the values of one tile are
 * multiplied, the next tile's logits become weights, queue S' = Q K'^T; queue O += P V;
 * wait for S'; P' = 2^(S' - m); wait for O.
 *
 * Shared memory: tiles of 128 rows of 128 halves, for queries, two of keys, two of
 * values. A tile is two panels of 64 dims; 16-byte words of a panel's 128-byte rows
 * change places by the row's low bits: the 128-byte swizzle that wgmma's descriptors
 * name. */
#include "backend/cuda/attention_parts.cuh"

using namespace sti_attn;

namespace
{

enum { THREADS = 256, ROWS = 128, KEYS = 128, DIMS = 128, WORDS = DIMS / 8 };
enum { PANEL = 128 * 128, TILE = 2 * PANEL, SHARED = 5 * TILE }; /* bytes */
enum { STEP = THREADS / WORDS }; /* rows that a block copies at once */

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Of a thread, in its warpgroup lane = 4 r + q of warp w: rows 16 w + 8 h + r (h = 0,
 * 1). Column 8 n + 2 q + e of row h is element 4 n + 2 h + e. */
typedef float fragment[64];
typedef uint32_t weights[KEYS / 16][4]; /* logits as halves, ready to multiply */

/* Byte offset of a word in a tile. */
static __device__ __forceinline__ int place(int row, int word)
{
    return word / 8 * PANEL + row * 128 + ((word % 8 ^ (row & 7)) << 4);
}

/* ---- Instructions ---------------------------------------------------------------- */

/* Where a matrix of halves lies in shared memory, swizzled by 128 bytes, as wgmma wants
 * it. 8 rows of 128 bytes are 1024 bytes, and the next 8 follow. Keys and queries: rows
 * are rows, dims are summed over. Values: rows are summed over, and the second half of
 * the dims is a panel away. */
static __device__ __forceinline__ uint64_t matrix_at(uint32_t at)
{
    return (uint64_t)(at >> 4) | (uint64_t)(PANEL >> 4) << 16 |
           (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

#define FRAGMENT_NAMES                                                                 \
    "%0, %1, %2, %3, %4, %5, %6, %7, "                                                 \
    "%8, %9, %10, %11, %12, %13, %14, %15, "                                           \
    "%16, %17, %18, %19, %20, %21, %22, %23, "                                         \
    "%24, %25, %26, %27, %28, %29, %30, %31, "                                         \
    "%32, %33, %34, %35, %36, %37, %38, %39, "                                         \
    "%40, %41, %42, %43, %44, %45, %46, %47, "                                         \
    "%48, %49, %50, %51, %52, %53, %54, %55, "                                         \
    "%56, %57, %58, %59, %60, %61, %62, %63"
#define FRAGMENT(d)                                                                    \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),            \
        "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),      \
        "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),  \
        "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),  \
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),  \
        "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),  \
        "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),  \
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),  \
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),  \
        "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),  \
        "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

/* d = [d +] a b^T, a [64, 16] and b [128, 16] in shared memory. */
static __device__ __forceinline__ void queue_keys(fragment &d, uint64_t a, uint64_t b,
                                                  int add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
                 "{" FRAGMENT_NAMES "}, %64, %65, p, 1, 1, 0, 0;\n}\n"
                 : FRAGMENT(d)
                 : "l"(a), "l"(b), "r"(add));
}

/* d += a b, a [64, 16] in registers, b [16, 128] in shared memory. */
static __device__ __forceinline__ void queue_values(fragment &d, const uint32_t (&a)[4],
                                                    uint64_t b)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
                 "{" FRAGMENT_NAMES "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"
                 : FRAGMENT(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}

/* What registers hold is what products that are queued next see. */
static __device__ __forceinline__ void products_begin()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void products_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Waits until at most N groups of products are under way. */
template <int N> static __device__ __forceinline__ void products_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/* Keeps the compiler from moving uses of d across this place. */
static __device__ __forceinline__ void pin(fragment &d)
{
#pragma unroll
    for (int i = 0; i < 64; i++) asm volatile("" : "+f"(d[i])::"memory");
}
/* This thread's writes to shared memory are seen by wgmma after the next barrier. */
static __device__ __forceinline__ void publish()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- Copies ---------------------------------------------------------------------- */

/* Keys [KEYS n, KEYS n + KEYS) after `first`, of K or V, to a tile at `to`; those that
 * do not exist are zero. */
static __device__ __forceinline__ void fetch(const job &b, const half *from, int n,
                                             uint32_t to)
{
    int word = threadIdx.x % WORDS, row = threadIdx.x / WORDS, off = n * KEYS;
    int start = ring_row(b.first_row, off, b.room), left = b.end - b.first - off;
    bool inside = word * 8 < b.D;
    from += inside ? word * 8 : 0;
    to += place(row, word); /* STEP is a multiple of 8: words swap places alike */
    if (start + KEYS <= b.room && left >= KEYS) {
        from += (size_t)(start + row) * b.D;
#pragma unroll
        for (int i = 0; i < KEYS / STEP; i++)
            copy16(to + i * STEP * 128, from + i * STEP * b.D, inside);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < KEYS / STEP; i++) {
        bool there = row + i * STEP < left;
        int at = ring_row(start, there ? row + i * STEP : 0, b.room);
        copy16(to + i * STEP * 128, from + (size_t)at * b.D, there && inside);
    }
}

/* Queries as halves; rows and dims that do not exist are zero. ld: floats between rows.
 */
static __device__ __forceinline__ void fetch_queries(const job &b, const float *q,
                                                     size_t ld, char *to)
{
    int word = threadIdx.x % WORDS, row = threadIdx.x / WORDS;
    q += b.row * ld + word * 8;
#pragma unroll 4
    for (int i = row; i < ROWS; i += STEP) {
        uint4 x = make_uint4(0, 0, 0, 0);
        if (word * 8 < b.D && b.row + i < b.n) {
            const float4 *from = reinterpret_cast<const float4 *>(q + i * ld);
            x = pack8(from[0], from[1]);
        }
        *reinterpret_cast<uint4 *>(to + place(i, word)) = x;
    }
}

/* ---- Arithmetic of a warpgroup --------------------------------------------------- */

/* Queues s = Q K^T; `queries`: the warpgroup's rows. A step is 16 dims, 32 bytes. */
static __device__ __forceinline__ void multiply_keys(fragment &s, uint32_t queries,
                                                     uint32_t keys)
{
#pragma unroll
    for (int k = 0; k < DIMS / 16; k++) {
        int at = k / 4 * PANEL + k % 4 * 32;
        queue_keys(s, matrix_at(queries + at), matrix_at(keys + at), k > 0);
    }
    products_commit();
}

/* Queues o += P V. A step is 16 keys, 2048 bytes. */
static __device__ __forceinline__ void multiply_values(fragment &o, const weights &p,
                                                       uint32_t values)
{
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
        queue_values(o, p[k], matrix_at(values + k * 2048));
    products_commit();
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
        shrink[h] = grows ? power2(x.m[h] - m) : 1.f;
        x.m[h] = m;
        float zero = m == -INFINITY ? 0.f : m; /* no key seen yet: weights are 0 */
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int i = 4 * n + 2 * h + e;
                s[i] = power2(fmaf(s[i], scale, -zero));
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
            p[k][i] = pack(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
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

/* ---- Kernel ---------------------------------------------------------------------- */

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
    copies_commit();
    fetch_queries(b, a.q + b.out, ld, shared);
    if (tiles > 1) fetch(b, b.K, 1, keys + TILE);
    fetch(b, b.V, 0, values);
    copies_commit();

    queries += threadIdx.x / 128 * 64 * 128; /* the warpgroup's rows */
    int row0 = b.row + threadIdx.x / 32 * 16, t0 = b.past + row0;
    fragment s, o;
    weights p;
    stats x = {{-INFINITY, -INFINITY}, {0, 0}};
    float shrink[2];
#pragma unroll
    for (int i = 0; i < 64; i++) o[i] = s[i] = 0;

    copies_wait<1>();
    publish();
    __syncthreads();
    products_begin();
    multiply_keys(s, queries, keys);
    products_wait<0>();
    pin(s);
    if (b.first + KEYS - 1 > t0 || b.first < first_key(t0 + 15, b.window))
        mask(s, b, t0, b.first);
    weigh(s, x, shrink, a.scale);
    pack_weights(p, s);

    for (int n = 0; n + 1 < tiles; n++) {
        copies_wait<0>();
        publish();
        __syncthreads();
        pin(s);
        pin(o);
        products_begin();
        multiply_keys(s, queries, keys + (n + 1) % 2 * TILE);
        multiply_values(o, p, values + n % 2 * TILE);
        if (n + 2 < tiles) fetch(b, b.K, n + 2, keys + n % 2 * TILE);
        fetch(b, b.V, n + 1, values + (n + 1) % 2 * TILE);
        copies_commit();
        products_wait<1>();
        pin(s);
        int j0 = b.first + (n + 1) * KEYS;
        if (j0 + KEYS - 1 > t0 || j0 < first_key(t0 + 15, b.window)) mask(s, b, t0, j0);
        weigh(s, x, shrink, a.scale);
        products_wait<0>();
        pin(o);
        scale_sums(o, shrink);
        pack_weights(p, s);
    }
    copies_wait<0>();
    publish();
    __syncthreads();
    pin(o);
    products_begin();
    multiply_values(o, p, values + (tiles - 1) % 2 * TILE);
    products_wait<0>();
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
