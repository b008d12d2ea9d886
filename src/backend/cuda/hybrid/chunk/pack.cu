/* pack.cu - a piece's way in and out: keys, values and scores of the session and of the
 * new tokens become rows of one buffer; afterwards the session's window and salient
 * list are written from it (STILL eq. 9, h). Bounded by bandwidth. */
#include "backend/cuda/hybrid/chunk/chunk.h"
#include "backend/cuda/hybrid/score.h"
#include "backend/cuda/hybrid/stored.cuh"
#include "backend/cuda/ptx/mma.cuh"

enum { THREADS = 256 };

static unsigned blocks_of(int64_t n)
{
    return (unsigned)((n + THREADS - 1) / THREADS);
}

/* ---- In ------------------------------------------------------------------ */

static __device__ __forceinline__ uint4 eight_halves(const float *x)
{
    const float4 *p = (const float4 *)x;
    return pack_half8(p[0], p[1]);
}

static __device__ __forceinline__ uint4 eight_halves(const rounded_unit &r)
{
    alignas(16) float x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = r.at(i);
    return eight_halves(x);
}
static __device__ __forceinline__ void eight_floats(uint4 halves, float *x)
{
    const uint32_t word[4] = {halves.x, halves.y, halves.z, halves.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 two = unpack_half2(word[i]);
        x[2 * i] = two.x;
        x[2 * i + 1] = two.y;
    }
}

/* The list as it came, in scratch: its slots are written anew at the end. */
static __device__ __forceinline__ stored_rows list_keys_before(const sti_chunk_piece &c)
{
    return {c.h.key_bits, c.h.D / 32, c.list_k.low, c.list_k.high, c.list_k.scale};
}
static __device__ __forceinline__ stored_rows
list_values_before(const sti_chunk_piece &c)
{
    return {c.h.value_bits, c.h.D / 32, c.list_v.low, c.list_v.high, c.list_v.scale};
}

/* Unit `unit` of a slot of the session's list as halves, and a copy of it to `keep`. */
static __device__ __forceinline__ uint4 take_listed(const stored_rows &from,
                                                    const void *halves, size_t slot,
                                                    const stored_rows &keep,
                                                    size_t keep_slot, int unit, int D)
{
    if (!from.bits) return ((const uint4 *)halves)[slot * (D / 8) + unit];
    alignas(16) float x[8];
    copy_unit(keep, keep_slot, from, slot, unit);
    load_unit(from, slot, unit, x);
    return eight_halves(x);
}

/* What comes out of the cache of eight elements that join it. */
static __device__ __forceinline__ uint4 as_stored(int bits, uint4 halves)
{
    float x[8];
    if (bits == 0) return halves;
    eight_floats(halves, x);
    return eight_halves(round_unit(bits, x));
}

/* Eight elements of a row of k and v, by thread; grid (rows, selection heads). */
template <class Pieces>
static __global__ void __launch_bounds__(THREADS)
    pack_kernel(const __grid_constant__ Pieces pieces)
{
    int block = (int)blockIdx.x, blocks;
    const sti_chunk_piece &c = pieces.find(block, blocks);
    const int g = (int)blockIdx.y, kv = kv_head(c, g), D = c.h.D, units = D / 8;
    const int i = block * THREADS + (int)threadIdx.x;
    const int row = i / units, unit = i % units, window = 2 * c.h.C;
    if (i == 0) {
        c.count[g] = c.s.sal_count[g];
        c.folded[g] = c.s.folded[g];
    }
    const int position = c.base + row - c.capacity;
    if (position >= c.pos + c.T) return;

    uint4 k, v;
    if (position >= c.pos) {
        const size_t at = ((size_t)(position - c.pos) * c.h.G + kv) * D + unit * 8;
        k = eight_halves(c.s.k + at);
        v = eight_halves(c.s.v + at);
    } else {
        const bool listed = row < c.capacity;
        if (listed && row >= c.s.sal_count[g]) return;
        const size_t slot =
            listed ? list_slot(c, g) + row : (size_t)kv * window + position % window;
        const size_t at = slot * units + unit;
        if (listed) {
            const size_t keep = (size_t)g * c.capacity + row;
            k = take_listed(stored_keys(c.h, c.s), c.s.sal_k, slot, list_keys_before(c),
                            keep, unit, D);
            v = take_listed(stored_values(c.h, c.s), c.s.sal_v, slot,
                            list_values_before(c), keep, unit, D);
        } else {
            k = ((const uint4 *)c.s.win_k)[at];
            v = ((const uint4 *)c.s.win_v)[at];
        }
        const float *score = sti_score_from(c.h.score, STI_FROM_QUERIES)
                                 ? c.s.win_received
                                 : c.s.win_score;
        if (!listed && unit == 0)
            c.score[(size_t)g * c.rows + row] =
                score[(size_t)g * window + position % window];
    }
    const size_t to = ((size_t)g * c.rows + row) * units + unit;
    ((uint4 *)c.k)[to] = k;
    ((uint4 *)c.v)[to] = v;
    if (c.stored == 0 || row < c.capacity) return;
    const size_t apart = (size_t)c.stored * units;
    ((uint4 *)c.k)[to + apart] = as_stored(c.h.key_bits, k);
    ((uint4 *)c.v)[to + apart] = as_stored(c.h.value_bits, v);
}

/* Cosine and sine, in float, of an angle in units of pi, which is computed in double as
 * in the recurrent form: that of a token a million places away has no digits to
 * spare. */
static __device__ __forceinline__ float2 rope_at(double angle)
{
    double s, co;
    sincospi(angle, &s, &co);
    return make_float2((float)co, (float)s);
}
static __device__ __forceinline__ double angle_over_pi(const sti_cuda_hybrid_params &h,
                                                       int i, int position)
{
    return (double)position * (double)h.inv_freq[i] * 0.31830988618379067154;
}

static __device__ __forceinline__ void rope_pair(const __half *from, __half *to, int a,
                                                 int b, float2 rope)
{
    const float x = __half2float(from[a]), y = __half2float(from[b]);
    to[a] = __float2half_rn(half_range(x * rope.x - y * rope.y));
    to[b] = __float2half_rn(half_range(y * rope.x + x * rope.y));
}

/* Rows as they were before RoPE, and far tokens of the list, which are kept so, as they
 * were after it; a thread has a pair of dims of a row of all selection heads. Also
 * computes the rotation by the position cap. */
template <class Pieces>
static __global__ void __launch_bounds__(THREADS)
    unrotate_kernel(const __grid_constant__ Pieces pieces)
{
    int block = (int)blockIdx.x, blocks;
    const sti_chunk_piece &c = pieces.find(block, blocks);
    const int D = c.h.D, pairs = D / 2, i = block * THREADS + (int)threadIdx.x;
    const int row = i / pairs, pair = i % pairs;
    const int a = c.h.interleaved ? 2 * pair : pair;
    const int b = c.h.interleaved ? a + 1 : pair + pairs;
    const bool capped = c.h.position_cap > 0, listed = row < c.capacity;
    int position = c.base + row - c.capacity;
    if (position >= c.pos + c.T) return;
    if (capped && row == 0)
        ((float2 *)c.cap_rope)[pair] =
            rope_at(angle_over_pi(c.h, pair, c.h.position_cap));
    float2 back; /* from after RoPE to before it */
    for (int g = 0; g < c.h.S; g++) {
        if (listed && row >= c.s.sal_count[g]) continue;
        const size_t slot = list_slot(c, g) + row;
        if (listed) position = c.s.sal_pos[slot];
        if (listed || g == 0) back = rope_at(angle_over_pi(c.h, pair, -position));
        const size_t at = ((size_t)g * c.rows + row) * D;
        if (listed && capped && c.s.sal_far[slot]) {
            c.k_raw[at + a] = c.k[at + a];
            c.k_raw[at + b] = c.k[at + b];
            rope_pair(c.k + at, c.k + at, a, b, make_float2(back.x, -back.y));
        } else {
            rope_pair(c.k + at, c.k_raw + at, a, b, back);
            const size_t stored = at + (size_t)c.stored * D;
            if (c.stored > 0 && !listed)
                rope_pair(c.k + stored, c.k_raw + stored, a, b, back);
        }
        if (listed && capped && pair == 0)
            c.position[(size_t)g * c.capacity + row] = position;
    }
}

/* x [8]: what comes out of the cache of eight elements that join it. */
static __device__ __forceinline__ void stored_floats(int bits, uint4 halves, float *x)
{
    eight_floats(halves, x);
    const rounded_unit r = round_unit(bits, x);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = r.at(i);
}

/* x [8], unit `unit` of the stored key of a token at `position`, as it is stored once it
 * is far. The lanes of a row, which lie side by side, call it together. */
static __device__ __forceinline__ rounded_unit
stored_far(const sti_cuda_hybrid_params &h, int unit, int position, const float *x)
{
    const int units = h.D / 8, half = units / 2, first = (int)threadIdx.x % 32 - unit;
    const unsigned row = ((1u << units) - 1) << first;
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float up = __shfl_xor_sync(row, x[i], half);
        const float other = h.interleaved ? x[i ^ 1] : up;
        const int pair = h.interleaved ? unit * 4 + i / 2 : unit % half * 8 + i;
        const bool second = h.interleaved ? i % 2 != 0 : unit >= half;
        const float2 rope = rope_at(angle_over_pi(h, pair, -position));
        y[i] = x[i] * rope.x + other * (second ? rope.y : -rope.y);
    }
    return round_unit(h.key_bits, y);
}

/* Where quantized keys become far: rows of the list as they are stored then, also of
 * tokens that may join it. Grid as in pack, whose rows of k it reads. */
template <class Pieces>
static __global__ void __launch_bounds__(THREADS)
    far_kernel(const __grid_constant__ Pieces pieces)
{
    int block = (int)blockIdx.x, blocks;
    const sti_chunk_piece &c = pieces.find(block, blocks);
    const int g = (int)blockIdx.y, units = c.h.D / 8;
    const int i = block * THREADS + (int)threadIdx.x, row = i / units, unit = i % units;
    const int position = c.base + row - c.capacity;
    const size_t at = ((size_t)g * c.rows + row) * units + unit;
    uint4 *to = (uint4 *)c.k_far + at;
    alignas(16) float x[8];
    if (position >= c.pos + c.T) return;
    if (row >= c.capacity) {
        stored_floats(c.h.key_bits, ((const uint4 *)c.k)[at], x);
        to[(size_t)c.stored * units] = eight_halves(stored_far(c.h, unit, position, x));
        return;
    }
    if (row >= c.s.sal_count[g]) return;
    const size_t slot = list_slot(c, g) + row;
    load_unit(stored_keys(c.h, c.s), slot, unit, x);
    *to = c.s.sal_far[slot] ? eight_halves(x)
                            : eight_halves(stored_far(c.h, unit, c.s.sal_pos[slot], x));
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

static int pack_blocks(const sti_chunk_piece &c)
{
    const int rows = c.capacity + c.pos + c.T - c.base;
    return (int)blocks_of((int64_t)rows * (c.h.D / 8));
}

static int unrotate_blocks(const sti_chunk_piece &c)
{
    const int rows = c.capacity + c.pos + c.T - c.base;
    return (int)blocks_of((int64_t)rows * (c.h.D / 2));
}

static still_status unrotate_rows(const sti_chunk_group *g, still_error *err)
{
    return launch_units(g, unrotate_blocks, [&](unsigned units, const auto &pieces) {
        unrotate_kernel<<<units, THREADS, 0, g->stream>>>(pieces);
        STI_CUDA(cudaGetLastError(), "hybrid attention, rows before RoPE");
        return STILL_OK;
    });
}

static still_status turn_rows(const sti_chunk_group *g, still_error *err)
{
    return launch_units(g, pack_blocks, [&](unsigned units, const auto &pieces) {
        const dim3 grid(units, (unsigned)g->c->h.S);
        far_kernel<<<grid, THREADS, 0, g->stream>>>(pieces);
        STI_CUDA(cudaGetLastError(), "hybrid attention, rows that become far");
        return STILL_OK;
    });
}

extern "C" still_status sti_chunk_pack(const sti_chunk_group *g, still_error *err)
{
    const sti_chunk_piece *c = g->c;
    STI_TRY(launch_units(g, pack_blocks, [&](unsigned units, const auto &pieces) {
        const dim3 grid(units, (unsigned)c->h.S);
        pack_kernel<<<grid, THREADS, 0, g->stream>>>(pieces);
        STI_CUDA(cudaGetLastError(), "hybrid attention, rows");
        return STILL_OK;
    }));
    if (c->turned) STI_TRY(turn_rows(g, err));
    if (c->raw) STI_TRY(unrotate_rows(g, err));
    if (!c->h.has_linear || !c->first) return STILL_OK;
    STI_TRY(narrow_map(g->stream, c->h.map_q, c->map_q, c->h.H, c->h.D, err));
    return narrow_map(g->stream, c->h.map_k, c->map_k, c->h.S, c->h.D, err);
}

/* ---- Out ----------------------------------------------------------------- */

/* Whether a token has its score when it comes; others are 0 until its chunk retires. */
static __device__ __forceinline__ bool known_at_once(int score)
{
    return !sti_score_from(score, STI_FROM_CHUNK) &&
           !sti_score_from(score, STI_FROM_QUERIES);
}

/* Unit `unit` of a token of the list to its slot: one that was there before (row <
 * capacity), or a newcomer. */
static __device__ __forceinline__ void put_listed(const sti_chunk_piece &c, int g,
                                                  int row, const stored_rows &to,
                                                  void *halves, size_t slot,
                                                  const stored_rows &before,
                                                  const __half *rows, int unit)
{
    const int units = c.h.D / 8;
    const size_t at = (size_t)g * c.rows;
    if (!to.bits) {
        ((uint4 *)halves)[slot * units + unit] =
            ((const uint4 *)rows)[(at + row) * units + unit];
    } else if (row < c.capacity) {
        copy_unit(to, slot, before, (size_t)g * c.capacity + row, unit);
    } else {
        float x[8];
        eight_floats(((const uint4 *)rows)[(at + row - c.stored) * units + unit], x);
        store_unit(to, slot, unit, round_unit(to.bits, x));
    }
}

/* The same of a key that is far and quantized, the token's position being `position`. */
static __device__ __forceinline__ void put_far(const sti_chunk_piece &c, int g, int row,
                                               size_t slot, int position, int unit)
{
    const int units = c.h.D / 8;
    const size_t at = (size_t)g * c.rows, before = (size_t)g * c.capacity + row;
    const stored_rows to = stored_keys(c.h, c.s), list = list_keys_before(c);
    alignas(16) float x[8];
    if (row < c.capacity && is_far(c, 0, position)) {
        copy_unit(to, slot, list, before, unit);
        return;
    }
    if (row < c.capacity)
        load_unit(list, before, unit, x);
    else
        stored_floats(to.bits,
                      ((const uint4 *)c.k)[(at + row - c.stored) * units + unit], x);
    store_unit(to, slot, unit, stored_far(c.h, unit, position, x));
}

/* Rows of the session that change: the last tokens of the ring, then the list, whose
 * scores and positions the select kernel has written. Grid as in pack. */
template <class Pieces>
static __global__ void __launch_bounds__(THREADS)
    tail_kernel(const __grid_constant__ Pieces pieces)
{
    int block = (int)blockIdx.x, blocks;
    const sti_chunk_piece &c = pieces.find(block, blocks);
    const int g = (int)blockIdx.y, D = c.h.D, units = D / 8, window = 2 * c.h.C;
    const int i = block * THREADS + (int)threadIdx.x;
    const int item = i / units, unit = i % units;
    const int tokens = min(c.T, window), salient = salient_after(c, g, c.n_retired);
    if (i == 0) {
        c.s.sal_count[g] = salient;
        c.s.folded[g] = folded_after(c, g, c.n_retired);
    }
    if (item < tokens) {
        const int position = c.pos + c.T - tokens + item, row = window_row(c, position);
        if (unit == 0 && c.select > 0)
            c.s.win_score[(size_t)g * window + position % window] =
                known_at_once(c.h.score) ? c.score[(size_t)g * c.rows + row] : 0;
        if (g % (c.h.S / c.h.G) != 0) return; /* one of those that share a window */
        const size_t slot = (size_t)kv_head(c, g) * window + position % window;
        const size_t from = ((size_t)g * c.rows + row) * units + unit;
        ((uint4 *)c.s.win_k)[slot * units + unit] = ((const uint4 *)c.k)[from];
        ((uint4 *)c.s.win_v)[slot * units + unit] = ((const uint4 *)c.v)[from];
        return;
    }
    const int at = item - tokens;
    if (c.n_retired == 0 || at >= salient) return;
    const int row =
        c.salient[((size_t)(c.n_retired - 1) * c.h.S + g) * c.capacity + at];
    const size_t slot = list_slot(c, g) + at;
    const int position = c.h.position_cap > 0 ? position_of_row(c, g, row) : 0;
    const bool far = c.h.position_cap > 0 && is_far(c, c.n_retired, position);
    if (c.h.position_cap > 0 && unit == 0) c.s.sal_far[slot] = far;
    if (far && c.turned)
        put_far(c, g, row, slot, position, unit);
    else
        put_listed(c, g, row, stored_keys(c.h, c.s), c.s.sal_k, slot,
                   list_keys_before(c), far ? c.k_raw : c.k, unit);
    put_listed(c, g, row, stored_values(c.h, c.s), c.s.sal_v, slot,
               list_values_before(c), c.v, unit);
}

static int tail_blocks(const sti_chunk_piece &c)
{
    const int window = 2 * c.h.C, tokens = c.T < window ? c.T : window;
    const int64_t items = tokens + (c.n_retired > 0 ? c.capacity : 0);
    return (int)blocks_of(items * (c.h.D / 8));
}

extern "C" still_status sti_chunk_tail(const sti_chunk_group *g, still_error *err)
{
    return launch_units(g, tail_blocks, [&](unsigned units, const auto &pieces) {
        const dim3 grid(units, (unsigned)g->c->h.S);
        tail_kernel<<<grid, THREADS, 0, g->stream>>>(pieces);
        STI_CUDA(cudaGetLastError(), "hybrid attention, window");
        return STILL_OK;
    });
}
