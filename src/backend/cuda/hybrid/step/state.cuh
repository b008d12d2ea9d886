/* state.cuh - a state unit: phi(q) s and phi(q).z (STILL eq. 7) over a run of the
 * state's rows, for some query heads. Without a window the new token is folded first.
 *
 * The maps of the unit's heads and its rows of the state are one stream of vectors of
 * 16 bytes through shared memory, none of which depends on anything that is computed: a
 * thread is always RING groups ahead, also while features are made. The code is kept
 * short on purpose: code that a layer runs once is fetched from memory every time, and
 * unrolled loops took longer to arrive than to run. */
#ifndef STI_BACKEND_CUDA_HYBRID_STEP_STATE_CUH
#define STI_BACKEND_CUDA_HYBRID_STEP_STATE_CUH

#include "backend/cuda/hybrid/step/step.cuh"

/* ---- The stream ---------------------------------------------------------- */

/* How the threads share a matrix with rows of `width` floats: a thread has four of
 * every deep-th row; those that are left over have none. */
typedef struct share {
    int width, deep, row, column;

    __device__ __forceinline__ share(int width_, int deep_)
    {
        const int wide = max(width_ / 4, 1), tid = (int)threadIdx.x;
        width = width_;
        deep = deep_; /* THREADS / wide */
        row = tid / wide;
        column = (tid - row * wide) * 4;
        if (row >= deep) row = 1 << 24;
    }
} share;

/* First `maps` matrices [D, F], then one [rows, D]. A thread copies to places of its
 * own, so it waits for its own copies alone. */
template <typename KV, int HEADS, int WIDE> struct stream {
    enum { RING = step_shared<KV, HEADS, WIDE>::RING };
    share in_map, in_state;
    const float *map, *state;
    int maps, rows, D;
    int matrices;      /* that have been begun */
    const float *next; /* of the matrix at hand: the next vector, */
    int row, end;      /* its row, how many there are, */
    int left;          /* how many have not been fetched, */
    int deep, apart;   /* rows and floats from one vector to the next */
    int stage;         /* of the ring: the oldest group */

    __device__ __forceinline__ void begin_matrix(const float *matrix, int rows_,
                                                 const share &s)
    {
        next = matrix + (int64_t)s.row * s.width + s.column;
        row = s.row;
        end = left = rows_;
        deep = s.deep;
        apart = s.deep * s.width;
    }
    /* Starts the copy of the next group, in the place of the oldest. */
    __device__ __forceinline__ void fetch(step_shared<KV, HEADS, WIDE> &sh)
    {
        if (left <= 0 && matrices <= maps) {
            if (matrices < maps)
                begin_matrix(map + (int64_t)matrices * D * in_map.width, D, in_map);
            else
                begin_matrix(state, rows, in_state);
            matrices++;
        }
        if (left > 0) {
            float4(*to)[THREADS] = sh.state.ring[stage];
#pragma unroll
            for (int k = 0; k < GROUP; k++) {
                cp_async16_or_zero(shared_address(&to[k][threadIdx.x]),
                                   row < end ? next : state, row < end);
                row += deep;
                next += apart;
            }
            left -= deep * GROUP;
        }
        cp_async_commit();
        stage = stage + 1 < RING ? stage + 1 : 0;
    }
    __device__ __forceinline__ void begin(step_shared<KV, HEADS, WIDE> &sh)
    {
        matrices = left = stage = 0;
#pragma unroll 1
        for (int i = 0; i < RING; i++) fetch(sh);
    }
    /* The oldest group has arrived. */
    __device__ __forceinline__ void take(const step_shared<KV, HEADS, WIDE> &sh,
                                         float4 (&x)[GROUP]) const
    {
        cp_async_wait<RING - 1>();
#pragma unroll
        for (int k = 0; k < GROUP; k++) x[k] = sh.state.ring[stage][k][threadIdx.x];
    }
};

STI_DEVICE void add_scaled(float4 &sum, float a, const float4 &x)
{
    sum.x = fmaf(a, x.x, sum.x);
    sum.y = fmaf(a, x.y, sum.y);
    sum.z = fmaf(a, x.z, sum.z);
    sum.w = fmaf(a, x.w, sum.w);
}

/* ---- Features ------------------------------------------------------------ */

/* Parts of u = x W of the vectors sh.state.x, [parts, F] each in sh.state.phi; how many
 * parts is returned. No map: the identity. */
template <typename KV, int HEADS, int WIDE>
STI_DEVICE int project_stream(step_shared<KV, HEADS, WIDE> &sh,
                              stream<KV, HEADS, WIDE> &in)
{
    const share &s = in.in_map;
#pragma unroll 1
    for (int n = 0; n < in.maps; n++) {
        float4 sum = make_float4(0, 0, 0, 0);
        int row = s.row;
#pragma unroll 1
        for (int done = 0; done < in.D; done += s.deep * GROUP) {
            float4 w[GROUP];
            in.take(sh, w);
#pragma unroll
            for (int k = 0; k < GROUP; k++) {
                add_scaled(sum, sh.state.x[n][row < in.D ? row : 0], w[k]);
                row += s.deep;
            }
            in.fetch(sh);
        }
        if (s.row < s.deep)
            reinterpret_cast<float4 *>(sh.state.phi[n])[threadIdx.x] = sum;
    }
    return s.deep;
}

/* The same for rows that are no vectors, in one part. */
template <typename KV, int HEADS, int WIDE>
STI_DEVICE int project_singly(step_shared<KV, HEADS, WIDE> &sh,
                              const sti_cuda_hybrid_params &h, const float *W,
                              int heads)
{
    for (int i = (int)threadIdx.x; i < heads * h.F; i += THREADS) {
        const int n = i / h.F, c = i - n * h.F;
        const float *w = W ? W + (size_t)n * h.D * h.F + c : NULL;
        float sum = W ? 0 : sh.state.x[n][c];
#pragma unroll 4
        for (int e = 0; W && e < h.D; e++)
            sum = fmaf(sh.state.x[n][e], w[(size_t)e * h.F], sum);
        sh.state.phi[n][c] = sum;
    }
    return 1;
}

/* STILL eq. 6: phi from the parts of u = x W, in place, by a warp; as warp_features. */
STI_DEVICE void make_features(const sti_cuda_hybrid_params &h, const float *x,
                              float bias, int parts, float *phi)
{
    const int F = h.F, lane = (int)threadIdx.x % 32;
    float norm = 0, keep = 1, top = -INFINITY, bottom = -INFINITY; /* of u and -u */
#pragma unroll 1
    for (int c = lane; c < F; c += 32) {
        float u = 0;
#pragma unroll 4
        for (int r = 0; r < parts; r++) u += phi[r * F + c];
        phi[c] = u; /* the part that only this lane reads */
        norm = fmaf(u, u, norm);
        top = fmaxf(top, u);
        bottom = fmaxf(bottom, -u);
    }
    if (h.norm_preserved) {
        float square = 0;
#pragma unroll 1
        for (int e = lane; e < h.D; e += 32) square = fmaf(x[e], x[e], square);
        keep = norm_kept(sqrtf(warp_sum(square)), sqrtf(warp_sum(norm)));
    }
    if (h.map == STI_MAP_RELU) {
#pragma unroll 1
        for (int c = lane; c < F; c += 32)
            phi[c] = relu_feature(phi[c] * keep + bias, h.feature_floor);
        return;
    }
    top = warp_max(top) * keep;
    bottom = warp_max(bottom) * keep;
    __syncwarp(); /* all parts have been read */
    float plus = 0, minus = 0;
#pragma unroll 1
    for (int c = lane; c < F; c += 32) {
        const float u = phi[c] * keep, up = expf(u - top), down = expf(-u - bottom);
        phi[c] = up;
        phi[F + c] = down;
        plus += up;
        minus += down;
    }
    plus = 1 / warp_sum(plus);
    minus = 1 / warp_sum(minus);
#pragma unroll 1
    for (int c = lane; c < F; c += 32) {
        phi[c] = softmax_feature(phi[c], plus, h.feature_floor);
        phi[F + c] = softmax_feature(phi[F + c], minus, h.feature_floor);
    }
}

/* ---- The state ----------------------------------------------------------- */

/* Which heads and rows state unit number `index` has. */
typedef struct state_part {
    int lo, hi, head_lo, head_hi;
} state_part;

STI_DEVICE state_part state_part_of(const step_args &a, int index)
{
    const step_plan &plan = a.plan;
    int head_lo = 0;
#pragma unroll 1
    for (; index >= plan.row_parts; index -= plan.row_parts) head_lo += plan.part_heads;
    const int lo = min(index * plan.part_rows, a.h.P);
    return state_part{lo, min(lo + plan.part_rows, a.h.P), head_lo,
                      min(head_lo + plan.part_heads, a.h.group)};
}

/* phi of `heads` heads from `first` on, and phi.z over the part's rows: a warp a head.
 */
template <typename KV, int HEADS, int WIDE>
STI_DEVICE void make_queries(const step_args &a, step_shared<KV, HEADS, WIDE> &sh,
                             const state_part &p, int first, int heads, int parts)
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    static_assert(HEADS <= WARPS, "a warp makes the features of one head");
    if (warp >= heads) return;
    const int head = first_head(a, sh) + first + warp;
    float *phi = sh.state.phi[warp], sum = 0;
    make_features(a.h, sh.state.x[warp], a.h.bias_q ? a.h.bias_q[head] : 0, parts, phi);
    __syncwarp();
#pragma unroll 1
    for (int i = p.lo + lane; i < p.hi; i += 32)
        sum = fmaf(phi[i], sh.state.z[i - p.lo], sum);
    sum = warp_sum(sum);
    if (lane == 0)
        *reinterpret_cast<float4 *>(part_at(a, sh, sh.at.unit, first + warp)) =
            make_float4(sum, 0, 0, 0);
}

/* STILL eq. 7, numerator: phi(q) s. */
template <typename KV, int HEADS, int WIDE>
STI_DEVICE void weigh_stream(const step_args &a, step_shared<KV, HEADS, WIDE> &sh,
                             stream<KV, HEADS, WIDE> &in, const state_part &p,
                             int first, int heads)
{
    static_assert(HEADS <= GROUP, "sums lie where a group has been");
    const share &s = in.in_state;
    const int rows = in.rows, wide = in.D / 4;
    float4 sum[HEADS];
    int row = s.row;
#pragma unroll
    for (int n = 0; n < HEADS; n++) sum[n] = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int done = 0; done < rows; done += s.deep * GROUP) {
        float4 x[GROUP];
        int at[GROUP];
        in.take(sh, x);
#pragma unroll
        for (int k = 0; k < GROUP; k++) {
            at[k] = p.lo + (row < rows ? row : 0);
            row += s.deep;
        }
#pragma unroll
        for (int n = 0; n < HEADS; n++)
            if (n < heads)
#pragma unroll
                for (int k = 0; k < GROUP; k++)
                    add_scaled(sum[n], sh.state.phi[n][at[k]], x[k]);
        in.fetch(sh);
    }
    /* places of its own: what others may still read lies elsewhere */
#pragma unroll
    for (int n = 0; n < HEADS; n++) sh.state.ring[0][n][threadIdx.x] = sum[n];
    __syncthreads();
#pragma unroll 1
    for (int n = s.row; n < heads; n += s.deep) {
        float4 all = make_float4(0, 0, 0, 0);
#pragma unroll 4
        for (int d = 0; d < s.deep; d++)
            add_scaled(all, 1, sh.state.ring[0][n][d * wide + s.column / 4]);
        float *to = part_at(a, sh, sh.at.unit, first + n) + PART_HEAD + s.column;
        *reinterpret_cast<float4 *>(to) = all;
    }
}

/* The same for rows that are no vectors. */
template <typename KV, int HEADS, int WIDE>
STI_DEVICE void weigh_singly(const step_args &a, step_shared<KV, HEADS, WIDE> &sh,
                             const float *state, const state_part &p, int first,
                             int heads)
{
    const int D = a.h.D;
    for (int i = (int)threadIdx.x; i < heads * D; i += THREADS) {
        const int n = i / D, e = i - n * D;
        float sum = 0;
#pragma unroll 4
        for (int r = 0; r < p.hi - p.lo; r++)
            sum = fmaf(sh.state.phi[n][p.lo + r], state[(size_t)r * D + e], sum);
        part_at(a, sh, sh.at.unit, first + n)[PART_HEAD + e] = sum;
    }
}

/* Whether the map and the state are rows of vectors. */
STI_DEVICE bool in_stream(const sti_cuda_hybrid_params &h, const float *W)
{
    return h.D % 4 == 0 && h.F % 4 == 0 && ((uintptr_t)W & 15) == 0;
}

/* Without a window the new token is folded before its own output (STILL eq. 9, s and
 * z). Rows [lo, hi). */
template <typename KV, int HEADS, int WIDE>
STI_DEVICE void fold_token(const step_args &a, step_shared<KV, HEADS, WIDE> &sh,
                           int pos, int lo, int hi)
{
    const sti_cuda_hybrid_params &h = a.h;
    const sti_cuda_hybrid_session &s = sh.session;
    const int D = h.D, tid = (int)threadIdx.x, sel = sh.at.sel;
    const size_t at = ((size_t)a.t * h.G + kv_head(a, sh)) * D, row = (size_t)sel * h.P;
    const float *W = h.map_k ? h.map_k + (size_t)sel * D * h.F : NULL;
    for (int e = tid; e < D; e += THREADS) sh.state.x[0][e] = s.k[at + e];
    __syncthreads();
    for (int i = tid; h.raw_features && i < D / 2; i += THREADS) {
        const int2 pair = pair_at(h, i);
        rope_pair(h, i, -pos, &sh.state.x[0][pair.x], &sh.state.x[0][pair.y]);
    }
    __syncthreads();
    int parts;
    if (W && in_stream(h, W)) {
        stream<KV, HEADS, WIDE> in = {share(h.F, a.plan.map_deep),
                                      share(D, a.plan.state_deep),
                                      W,
                                      s.lin_s,
                                      1,
                                      0,
                                      D};
        in.begin(sh);
        parts = project_stream(sh, in);
    } else {
        parts = project_singly(sh, h, W, 1);
    }
    __syncthreads();
    float *phi = sh.state.phi[0];
    if (tid < 32)
        make_features(h, sh.state.x[0], h.bias_k ? h.bias_k[sel] : 0, parts, phi);
    __syncthreads();
#pragma unroll 4
    for (int i = tid; i < (hi - lo) * D; i += THREADS) {
        const int p = lo + i / D, e = i % D;
        const size_t to = (row + p) * D + e;
        kahan_add(&s.lin_s[to], &s.comp_s[to], phi[p], s.v[at + e]);
    }
    for (int p = lo + tid; p < hi; p += THREADS)
        kahan_add(&s.lin_z[row + p], &s.comp_z[row + p], 1, phi[p]);
    __syncthreads();
}

/* ---- The unit ------------------------------------------------------------ */

/* Prefetches n floats, with one instruction where it can. */
STI_DEVICE void prefetch_range(const float *from, size_t n)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (((uintptr_t)from & 15) == 0 && n % 4 == 0) {
        if (threadIdx.x == 0 && n > 0) prefetch_bulk(from, (uint32_t)n * 4);
        return;
    }
#endif
#pragma unroll 1
    for (size_t i = (size_t)threadIdx.x * 16; i < n; i += THREADS * 16)
        prefetch_l2(from + i);
}

/* Prefetches the unit's rows of the state, and once the maps. */
template <typename KV, int HEADS, int WIDE>
STI_DEVICE void prefetch_state(const step_args &a,
                               const step_shared<KV, HEADS, WIDE> &sh, int index)
{
    const sti_cuda_hybrid_params &h = a.h;
    const state_part p = state_part_of(a, index);
    const size_t row = (size_t)sh.at.sel * h.P + p.lo, map = (size_t)h.D * h.F;
    if (h.map_q && p.head_hi > p.head_lo && this_session() == 0)
        prefetch_range(h.map_q + (first_head(a, sh) + p.head_lo) * map,
                       (p.head_hi - p.head_lo) * map);
    if (p.head_lo > 0) return; /* units that have the same rows: one of them */
    prefetch_range(sh.session.lin_s + row * h.D, (size_t)(p.hi - p.lo) * h.D);
    prefetch_range(sh.session.lin_z + row, p.hi - p.lo);
}

/* State unit number `index`: some heads, some rows; up to HEADS heads at once. WINDOW:
 * there is one, always. */
template <bool WINDOW, int ROW, typename KV, int HEADS, int WIDE>
STI_DEVICE void state_unit(const step_args &a, step_shared<KV, HEADS, WIDE> &sh,
                           const foreseen &token, int index)
{
    const sti_cuda_hybrid_params &h = a.h;
    const state_part p = state_part_of(a, index);
    const size_t row = (size_t)sh.at.sel * h.P + p.lo, map = (size_t)h.D * h.F;
    const float *state = sh.session.lin_s + row * h.D, *z = sh.session.lin_z + row;
    const float *q = h.raw_features ? sh.session.q_raw : sh.session.q;
    const bool streams = in_stream(h, h.map_q);
    const share in_state(h.D, a.plan.state_deep);
    share in_map = in_state;
    if (h.F != h.D) in_map = share(h.F, a.plan.map_deep);
    moment now;
    now.load(sh.session, sh.at.sel, token.pos, WINDOW || h.has_window);
    if (!WINDOW && !h.has_window) {
        pdl_wait();
        fold_token(a, sh, token.pos, p.lo, p.hi);
    }
    if (threadIdx.x == 0) sh.now = now.of_token(WINDOW || h.has_window);
#pragma unroll 1
    for (int first = p.head_lo; first < p.head_hi; first += HEADS) {
        const int heads = min((int)HEADS, p.head_hi - first);
        const float *W = h.map_q ? h.map_q + (first_head(a, sh) + first) * map : NULL;
        stream<KV, HEADS, WIDE> in = {in_map,        in_state,    W,  state,
                                      W ? heads : 0, p.hi - p.lo, h.D};
        int parts;
        if (streams) in.begin(sh);
        float own[2 * WIDE / THREADS];
#pragma unroll
        for (int i = 0; i < 2 * WIDE / THREADS; i++) {
            const int r = i * THREADS + (int)threadIdx.x;
            own[i] = r < p.hi - p.lo ? __ldcg(z + r) : 0;
        }
        const float2 rope = rope_at(h.raw_features ? 0 : token.freq, token.pos);
        pdl_wait();
        token_row<HEADS, ROW> rows;
        rows.load(h, q + query_at(a, sh, first), heads);
        rows.store(h, sh.state.x, rope);
#pragma unroll
        for (int i = 0; i < 2 * WIDE / THREADS; i++)
            sh.state.z[i * THREADS + (int)threadIdx.x] = own[i];
        __syncthreads();
        if (streams && W)
            parts = project_stream(sh, in);
        else
            parts = project_singly(sh, h, W, heads);
        __syncthreads();
        make_queries(a, sh, p, first, heads, parts);
        __syncthreads();
        if (streams)
            weigh_stream(a, sh, in, p, first, heads);
        else
            weigh_singly(a, sh, state, p, first, heads);
        __syncthreads();
    }
}

#endif
