/* hybrid_pack.cu - a piece's way in and out: keys, values and scores of the session and
 * of the new tokens become rows of one buffer; afterwards the session's window and
 * salient list are written from it. Bounded by bandwidth. */
#include "backend/cuda/hybrid_chunks.h"
#include "backend/cuda/mma.cuh"

enum { THREADS = 256 };

static unsigned blocks_of(int64_t n)
{
    return (unsigned)((n + THREADS - 1) / THREADS);
}

/* ---- In ---------------------------------------------------------------------------
 */

static __device__ __forceinline__ uint4 eight_halves(const float *x)
{
    const float4 *p = (const float4 *)x;
    return pack_half8(p[0], p[1]);
}

/* Eight elements of a row of k and v, by thread; grid (rows, selection heads). */
static __global__ void __launch_bounds__(THREADS) pack_kernel(const sti_chunks c)
{
    const int g = (int)blockIdx.y, kv = kv_head(c, g), D = c.h.D, units = D / 8;
    const int i = (int)(blockIdx.x * THREADS + threadIdx.x);
    const int row = i / units, unit = i % units, window = 2 * c.h.C;
    if (i == 0) {
        c.count[g] = c.s.sal_count[g];
        c.folded[g] = c.s.folded[g];
    }
    const int position = c.base + row - c.room;
    if (position >= c.pos + c.T) return;

    uint4 k, v;
    if (position >= c.pos) {
        const size_t at = ((size_t)(position - c.pos) * c.h.G + kv) * D + unit * 8;
        k = eight_halves(c.s.k + at);
        v = eight_halves(c.s.v + at);
    } else {
        const bool listed = row < c.room;
        const size_t slot =
            listed ? (size_t)g * c.room + row : (size_t)kv * window + position % window;
        const size_t at = slot * units + unit;
        k = ((const uint4 *)(listed ? c.s.sal_k : c.s.win_k))[at];
        v = ((const uint4 *)(listed ? c.s.sal_v : c.s.win_v))[at];
        if (!listed && unit == 0)
            c.score[(size_t)g * c.rows + row] =
                c.s.win_score[(size_t)g * window + position % window];
    }
    const size_t to = ((size_t)g * c.rows + row) * units + unit;
    ((uint4 *)c.k)[to] = k;
    ((uint4 *)c.v)[to] = v;
}

/* n units of eight. */
static __global__ void __launch_bounds__(THREADS)
    narrow_kernel(const float *x, __half *y, int n)
{
    const int i = (int)(blockIdx.x * THREADS + threadIdx.x);
    if (i < n) ((uint4 *)y)[i] = eight_halves(x + (size_t)i * 8);
}

static still_status narrow_map(cudaStream_t stream, const float *x, __half *y,
                               int heads, int D, still_error *err)
{
    const int n = heads * D * D / 8;
    if (!x) return STILL_OK;
    narrow_kernel<<<blocks_of(n), THREADS, 0, stream>>>(x, y, n);
    STI_CUDA(cudaGetLastError(), "hybrid attention, maps");
    return STILL_OK;
}

extern "C" still_status sti_chunks_pack(cudaStream_t stream, const sti_chunks *c,
                                        still_error *err)
{
    const int rows = c->room + c->pos + c->T - c->base;
    const dim3 grid(blocks_of((int64_t)rows * (c->h.D / 8)), (unsigned)c->h.S);
    pack_kernel<<<grid, THREADS, 0, stream>>>(*c);
    STI_CUDA(cudaGetLastError(), "hybrid attention, rows");
    if (!c->h.has_linear || !c->first) return STILL_OK;
    STI_TRY(narrow_map(stream, c->h.map_q, c->map_q, c->h.H, c->h.D, err));
    return narrow_map(stream, c->h.map_k, c->map_k, c->h.S, c->h.D, err);
}

/* ---- Out --------------------------------------------------------------------------
 */

/* Rows of the session that change: the last tokens of the ring, then the list, whose
 * scores and positions the select kernel has written. Grid as in pack. */
static __global__ void __launch_bounds__(THREADS) tail_kernel(const sti_chunks c)
{
    const int g = (int)blockIdx.y, D = c.h.D, units = D / 8, window = 2 * c.h.C;
    const int i = (int)(blockIdx.x * THREADS + threadIdx.x);
    const int item = i / units, unit = i % units;
    const int tokens = min(c.T, window), salient = salient_after(c, g, c.n_leaves);
    if (i == 0) {
        c.s.sal_count[g] = salient;
        c.s.folded[g] = folded_after(c, g, c.n_leaves);
    }
    int row;
    size_t slot;
    void *k, *v;
    if (item < tokens) {
        const int position = c.pos + c.T - tokens + item;
        row = window_row(c, position);
        if (unit == 0 && c.select > 0)
            c.s.win_score[(size_t)g * window + position % window] =
                c.score[(size_t)g * c.rows + row];
        if (g % (c.h.S / c.h.G) != 0) return; /* one of those that share a window */
        slot = (size_t)kv_head(c, g) * window + position % window;
        k = c.s.win_k;
        v = c.s.win_v;
    } else {
        const int at = item - tokens;
        if (c.n_leaves == 0 || at >= salient) return;
        row = c.salient[((size_t)(c.n_leaves - 1) * c.h.S + g) * c.room + at];
        slot = (size_t)g * c.room + at;
        k = c.s.sal_k;
        v = c.s.sal_v;
    }
    const size_t from = ((size_t)g * c.rows + row) * units + unit;
    ((uint4 *)k)[slot * units + unit] = ((const uint4 *)c.k)[from];
    ((uint4 *)v)[slot * units + unit] = ((const uint4 *)c.v)[from];
}

extern "C" still_status sti_chunks_tail(cudaStream_t stream, const sti_chunks *c,
                                        still_error *err)
{
    const int window = 2 * c->h.C, tokens = c->T < window ? c->T : window;
    const int64_t items = tokens + c->room;
    const dim3 grid(blocks_of(items * (c->h.D / 8)), (unsigned)c->h.S);
    tail_kernel<<<grid, THREADS, 0, stream>>>(*c);
    STI_CUDA(cudaGetLastError(), "hybrid attention, window");
    return STILL_OK;
}
