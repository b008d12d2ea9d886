/* plain.cu - softmax attention of any shape and cache type, and the kernel
 * that stores new rows.
 *
 * The plain kernel is what runs where the fast ones do not: float caches, head sizes
 * that are no multiple of 8 or wider than prefill takes. All of it is float arithmetic.
 * A warp walks over keys, its lanes share the dims of one; four keys at a time, so that
 * their loads and their sums over lanes overlap. Bounded by latency and the cache in
 * L2. */
#include "backend/cuda/softmax/parts.cuh"

using namespace sti_attn;

namespace
{

enum { WARPS = 4, KEYS = 4, DIMS = STI_CUDA_ATTN_MAX_D / 32 };

static __device__ __forceinline__ float read(half x)
{
    return __half2float(x);
}
static __device__ __forceinline__ float read(float x)
{
    return x;
}
static __device__ __forceinline__ void write(half *to, float x)
{
    *to = to_half(x);
}
static __device__ __forceinline__ void write(float *to, float x)
{
    *to = x;
}

/* Which segment, and which of its rows, row `i` of all segments' rows is. */
static __device__ __forceinline__ int find_row(const sti_cuda_attn &a, int *i)
{
    int s = 0;
    while (*i >= a.seg[s].n) *i -= a.seg[s++].n;
    return s;
}

static unsigned count_rows(const sti_cuda_attn *a)
{
    unsigned rows = 0;
    for (int s = 0; s < a->n_seg; s++) rows += (unsigned)a->seg[s].n;
    return rows;
}

/* Blocks of 256 threads for rows of so many words, whole rows to a block. */
static unsigned blocks_of(unsigned rows, unsigned words)
{
    const unsigned at_once = words < 256 ? 256 / words : 1;
    return (rows + at_once - 1) / at_once;
}

/* ---- Store --------------------------------------------------------------- */

/* A block stores the keys and values of one row. */
template <class T>
__global__ void __launch_bounds__(256) store(const __grid_constant__ sti_cuda_attn a)
{
    int i = blockIdx.x, s = find_row(a, &i);
    int capacity = a.seg[s].capacity, at = (past_of(a, s) + i) % capacity;
    size_t from = (size_t)(a.seg[s].row0 + i) * a.G * a.D;
    T *K = static_cast<T *>(a.seg[s].K), *V = static_cast<T *>(a.seg[s].V);
    for (int e = threadIdx.x; e < a.G * a.D; e += blockDim.x) {
        int g = e / a.D, d = e % a.D;
        size_t to = ((size_t)g * capacity + at) * a.D + d;
        write(K + to, a.k[from + e]);
        write(V + to, a.v[from + e]);
    }
}

/* The same for halves eight at a time, as many rows as a block has threads for; D is a
 * multiple of 8. */
__global__ void __launch_bounds__(256)
    store8(const __grid_constant__ sti_cuda_attn a, int rows)
{
    const int words = a.D / 8, row_words = a.G * words;
    const int at_once = max(1, (int)blockDim.x / row_words);
    const int mine = threadIdx.x / row_words;
    int i = (int)blockIdx.x * at_once + mine;
    if (mine >= at_once || i >= rows) return;
    const int s = find_row(a, &i);
    const int capacity = a.seg[s].capacity, at = (past_of(a, s) + i) % capacity;
    const size_t from = (size_t)(a.seg[s].row0 + i) * row_words;
    const float4 *k = reinterpret_cast<const float4 *>(a.k) + 2 * from;
    const float4 *v = reinterpret_cast<const float4 *>(a.v) + 2 * from;
    uint4 *K = static_cast<uint4 *>(a.seg[s].K), *V = static_cast<uint4 *>(a.seg[s].V);
    const int first = threadIdx.x - mine * row_words;
    for (int e = first; e < row_words; e += blockDim.x) {
        const int g = e / words, d = e % words;
        const size_t to = ((size_t)g * capacity + at) * words + d;
        K[to] = pack_saturated8(k[2 * e], k[2 * e + 1]);
        V[to] = pack_saturated8(v[2 * e], v[2 * e + 1]);
    }
}

/* ---- Attention ----------------------------------------------------------- */

/* Sums of one query over the keys seen so far; lane has dims lane + 32 e. */
struct sums {
    float m, l, sum[DIMS];
};

/* Keys j0 .. j0 + n - 1 (n <= KEYS), the first of which is in cache row `row`. */
template <class T>
static __device__ __forceinline__ void add_keys(sums &x, const float (&q)[DIMS],
                                                const T *K, const T *V, int row,
                                                int capacity, int n, int D)
{
    int lane = threadIdx.x % 32;
    float l[KEYS], v[KEYS][DIMS];
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        size_t at = (size_t)ring_row(row, j < n ? j : 0, capacity) * D;
        float dot = 0;
#pragma unroll
        for (int e = 0; e < DIMS; e++) {
            int d = lane + 32 * e;
            dot += d < D ? q[e] * read(K[at + d]) : 0;
            v[j][e] = d < D ? read(V[at + d]) : 0;
        }
        l[j] = warp_sum(dot);
    }
    float top = x.m;
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        if (j >= n) l[j] = -INFINITY;
        top = fmaxf(top, l[j]);
    }
    float shrink = exp2f(x.m - top);
    x.m = top;
    x.l *= shrink;
#pragma unroll
    for (int e = 0; e < DIMS; e++) x.sum[e] *= shrink;
#pragma unroll
    for (int j = 0; j < KEYS; j++) {
        float w = exp2f(l[j] - top);
        x.l += w;
#pragma unroll
        for (int e = 0; e < DIMS; e++) x.sum[e] += j < n ? w * v[j][e] : 0;
    }
}

/* One head of one row, or of one piece of a row: block (row [, piece], head). Warps
 * take KEYS keys in turn and are joined in order. */
template <class T>
__global__ void __launch_bounds__(WARPS * 32)
    plain(const __grid_constant__ sti_cuda_attn a, sti_cuda_attn_parts parts)
{
    __shared__ float sum[WARPS][STI_CUDA_ATTN_MAX_D], m[WARPS], l[WARPS];
    int i = blockIdx.x / parts.pieces, index = blockIdx.x % parts.pieces;
    int h = blockIdx.y, g = h / (a.H / a.G), D = a.D;
    int s = find_row(a, &i), capacity = a.seg[s].capacity, t = past_of(a, s) + i;
    cut c = cut_keys(a, t);
    if (parts.stat == NULL) c.piece = c.count, c.pieces = 1;
    if (index >= c.pieces) return;

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    size_t out = ((size_t)(a.seg[s].row0 + i) * a.H + h) * D;
    float q[DIMS];
    sums x = {-INFINITY, 0, {}};
#pragma unroll
    for (int e = 0; e < DIMS; e++)
        q[e] = lane + 32 * e < D ? a.q[out + lane + 32 * e] * a.scale : 0;

    const T *K = static_cast<const T *>(a.seg[s].K) + (size_t)g * capacity * D;
    const T *V = static_cast<const T *>(a.seg[s].V) + (size_t)g * capacity * D;
    int begin = c.first + index * c.piece, end = min(begin + c.piece, t + 1);
    for (int j = begin + warp * KEYS; j < end; j += WARPS * KEYS)
        add_keys(x, q, K, V, j % capacity, capacity, min((int)KEYS, end - j), D);

#pragma unroll
    for (int e = 0; e < DIMS; e++) sum[warp][lane + 32 * e] = x.sum[e];
    if (lane == 0) m[warp] = x.m, l[warp] = x.l;
    __syncthreads();
    float top = -INFINITY, total = 0, w[WARPS];
#pragma unroll
    for (int n = 0; n < WARPS; n++) top = fmaxf(top, m[n]);
#pragma unroll
    for (int n = 0; n < WARPS; n++) {
        w[n] = exp2f(m[n] - top);
        total += w[n] * l[n];
    }
    size_t part = ((size_t)s * a.H + h) * parts.pieces + index;
    bool whole = c.pieces == 1;
    float *to = whole ? a.o + out : parts.sum + part * D;
    for (int d = threadIdx.x; d < D; d += WARPS * 32) {
        float y = 0;
#pragma unroll
        for (int n = 0; n < WARPS; n++) y += w[n] * sum[n][d];
        to[d] = whole ? y / total : y;
    }
    if (!whole && threadIdx.x == 0) parts.stat[part] = make_float2(top, total);
}

} // namespace

extern "C" still_status sti_cuda_attn_store(sti_dev *dev, const sti_cuda_attn *a,
                                            still_error *err)
{
    unsigned rows = count_rows(a);
    if (!a->half)
        store<float><<<rows, 256, 0, dev->stream>>>(*a);
    else if (a->D % 8 == 0)
        store8<<<blocks_of(rows, (unsigned)(a->G * a->D / 8)), 256, 0, dev->stream>>>(
            *a, (int)rows);
    else
        store<half><<<rows, 256, 0, dev->stream>>>(*a);
    STI_CUDA(cudaGetLastError(), "attention: store");
    return STILL_OK;
}

extern "C" still_status sti_cuda_attn_plain(sti_dev *dev, const sti_cuda_attn *a,
                                            const sti_cuda_attn_parts *p,
                                            still_error *err)
{
    sti_cuda_attn_parts parts = {NULL, NULL, 1};
    if (p) parts = *p;
    dim3 grid(count_rows(a) * (unsigned)parts.pieces, (unsigned)a->H);
    if (a->half)
        plain<half><<<grid, WARPS * 32, 0, dev->stream>>>(*a, parts);
    else
        plain<float><<<grid, WARPS * 32, 0, dev->stream>>>(*a, parts);
    STI_CUDA(cudaGetLastError(), "attention: plain");
    return STILL_OK;
}
