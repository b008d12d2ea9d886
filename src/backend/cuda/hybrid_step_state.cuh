/* hybrid_step_state.cuh - a state unit: phi(q) s and phi(q).z over a run of the state's
 * rows, for some query heads. Without a window the new token is folded first. */
#ifndef STI_BACKEND_CUDA_HYBRID_STEP_STATE_CUH
#define STI_BACKEND_CUDA_HYBRID_STEP_STATE_CUH

#include "backend/cuda/hybrid_step.cuh"
#include "backend/cuda/mma.cuh"

/* ---- Features ------------------------------------------------------------------- */

STI_DEVICE void put_vector(float *to, const float (&x)[4])
{
    *reinterpret_cast<float4 *>(to) = make_float4(x[0], x[1], x[2], x[3]);
}
STI_DEVICE void put_vector(float *to, const float (&x)[1])
{
    *to = x[0];
}

/* u = x W of up to ROWS vectors, W [rows, D, F]. A thread sums over every `deep`-th row
 * of W for VEC columns. */
template <int VEC, int ROWS>
STI_DEVICE void project(const sti_cuda_shape &h, const float (*x)[MAX_D], int rows,
                        const float *W, float (*part)[PARTS], float (*u)[MAX_P])
{
    enum { AHEAD = MAP_AHEAD / ROWS };
    const int D = h.D, F = h.F, wide = F / VEC, deep = max(1, THREADS / wide);
    for (int item = (int)threadIdx.x; item < wide * deep; item += THREADS) {
        const int r = item / wide, c = (item - r * wide) * VEC;
        float sum[ROWS][VEC] = {};
        const float *next = W + (size_t)r * F + c;
#pragma unroll 1
        for (int i = r; i < D; i += deep * AHEAD) {
            packed<float, VEC> w[AHEAD][ROWS];
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
#pragma unroll
                for (int n = 0; n < ROWS; n++)
                    if (i + j * deep < D && n < rows)
                        w[j][n].load(next + (size_t)n * D * F);
                    else
                        w[j][n].zero();
                next += (size_t)deep * F;
            }
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
#pragma unroll
                for (int n = 0; n < ROWS; n++) {
                    const float a =
                        n < rows && i + j * deep < D ? x[n][i + j * deep] : 0;
                    float y[VEC];
                    w[j][n].widen(y);
#pragma unroll
                    for (int k = 0; k < VEC; k++) sum[n][k] = fmaf(a, y[k], sum[n][k]);
                }
        }
#pragma unroll
        for (int n = 0; n < ROWS; n++) put_vector(&part[n][r * F + c], sum[n]);
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < rows * F; i += THREADS) {
        const int n = i / F, c = i - n * F;
        float sum = 0;
        for (int r = 0; r < deep; r++) sum += part[n][r * F + c];
        u[n][c] = sum;
    }
}

/* u = x W of up to ROWS vectors x in shared memory; W of the first, NULL: identity. */
template <int ROWS>
STI_DEVICE void project_rows(const sti_cuda_shape &h, const float (*x)[MAX_D], int rows,
                             const float *W, float (*part)[PARTS], float (*u)[MAX_P])
{
    if (!W) {
        for (int i = (int)threadIdx.x; i < rows * h.F; i += THREADS)
            u[i / h.F][i % h.F] = x[i / h.F][i % h.F];
    } else if (h.F % 4 == 0 && ((uintptr_t)W & 15) == 0) {
        project<4, ROWS>(h, x, rows, W, part, u);
    } else {
        project<1, ROWS>(h, x, rows, W, part, u);
    }
    __syncthreads();
}

/* phi from u, in place, by a warp. */
STI_DEVICE void map_row(const sti_cuda_shape &h, const float *x, float bias, float *u)
{
    float square = 0;
    for (int e = (int)threadIdx.x % 32; e < h.D; e += 32) square += x[e] * x[e];
    warp_features(h, u, warp_sum(square), bias, u);
}

/* ---- The state ------------------------------------------------------------------ */

/* A run of rows of s [P, D]: a thread has VEC columns of every `deep`-th row, AHEAD of
 * which it asks for at once. */
template <int VEC, int AHEAD> struct state_rows {
    packed<float, VEC> x[AHEAD];

    __device__ __forceinline__ void load(const float *s, int p, int hi, int deep, int D)
    {
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            if (p + j * deep < hi)
                x[j].load(s + (size_t)(p + j * deep) * D);
            else
                x[j].zero();
    }
};

/* phi s and phi.z over rows [lo, hi), of `heads` heads from `first` on. sh.state.phi
 * has their u; what does not depend on phi is asked for before phi is made of it. */
template <int VEC, int ROWS, typename KV, int HEADS>
STI_DEVICE void weigh_state(const step_args &a, step_shared<KV, HEADS> &sh,
                            const float (*query)[MAX_D], int lo, int hi, int first,
                            int heads)
{
    enum { AHEAD = ROWS > 2 ? STATE_AHEAD / 2 : STATE_AHEAD, EACH = MAX_P / 32 };
    const int D = a.h.D, wide = D / VEC, deep = max(1, THREADS / wide);
    const int tid = (int)threadIdx.x, warp = tid / 32, lane = tid % 32;
    const size_t row = (size_t)selector() * a.h.P;
    const float *s = sh.session.lin_s + row * D, *z = sh.session.lin_z + row;
    const int r = tid / wide, e = (tid - r * wide) * VEC;
    state_rows<VEC, AHEAD> some;
    some.load(s + e, lo + r, r < deep ? hi : 0, deep, D);
    if (warp < heads) {
        const int head = first_head(a) + first + warp;
        float *phi = sh.state.phi[warp], own[EACH], sum = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++)
            own[i] = lo + lane + 32 * i < hi ? z[lo + lane + 32 * i] : 0;
        map_row(a.h, query[warp], a.h.bias_q ? a.h.bias_q[head] : 0, phi);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (lo + lane + 32 * i < hi)
                sum = fmaf(phi[lo + lane + 32 * i], own[i], sum);
        sum = warp_sum(sum);
        if (lane == 0) part_at(a, this_unit(), first + warp)[D] = sum;
    }
    __syncthreads();
    for (int item = tid; item < wide * deep; item += THREADS) {
        const int ri = item / wide, ei = (item - ri * wide) * VEC;
        float sum[ROWS][VEC] = {};
#pragma unroll 1
        for (int p = lo + ri; p < hi; p += deep * AHEAD) {
            if (item != tid || p != lo + ri) some.load(s + ei, p, hi, deep, D);
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                float y[VEC];
                some.x[j].widen(y);
#pragma unroll
                for (int n = 0; n < ROWS; n++) {
                    if (n >= heads) break;
                    const float phi =
                        p + j * deep < hi ? sh.state.phi[n][p + j * deep] : 0;
#pragma unroll
                    for (int k = 0; k < VEC; k++)
                        sum[n][k] = fmaf(phi, y[k], sum[n][k]);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < ROWS; n++)
            put_vector(&sh.state.part[n][ri * D + ei], sum[n]);
    }
    __syncthreads();
    for (int i = tid; i < heads * D; i += THREADS) {
        const int n = i / D, c = i - n * D;
        float sum = 0;
        for (int d = 0; d < deep; d++) sum += sh.state.part[n][d * D + c];
        part_at(a, this_unit(), first + n)[c] = sum;
    }
}

/* Without a window: the new token is folded before it asks. Rows [lo, hi). */
template <typename KV, int HEADS>
STI_DEVICE void fold_token(const step_args &a, step_shared<KV, HEADS> &sh, int pos,
                           int lo, int hi)
{
    const sti_cuda_shape &h = a.h;
    const sti_cuda_session &s = sh.session;
    const int D = h.D, tid = (int)threadIdx.x, sel = selector();
    const size_t at = ((size_t)a.t * h.G + kv_head(a)) * D, row = (size_t)sel * h.P;
    for (int e = tid; e < D; e += THREADS) sh.x[0][e] = s.k[at + e];
    __syncthreads();
    for (int i = tid; h.raw_features && i < D / 2; i += THREADS) {
        const int2 pair = pair_at(h, i);
        turn_pair(h, i, -pos, &sh.x[0][pair.x], &sh.x[0][pair.y]);
    }
    __syncthreads();
    project_rows<1>(h, sh.x, 1, h.map_k ? h.map_k + (size_t)sel * D * h.F : NULL,
                    sh.state.part, sh.state.phi_k);
    float *phi = sh.state.phi_k[0];
    if (tid < 32) map_row(h, sh.x[0], h.bias_k ? h.bias_k[sel] : 0, phi);
    __syncthreads();
#pragma unroll 4
    for (int i = tid; i < (hi - lo) * D; i += THREADS) {
        const int p = lo + i / D, e = i % D;
        const size_t to = (row + p) * D + e;
        add_exactly(&s.lin_s[to], &s.low_s[to], phi[p], s.v[at + e]);
    }
    for (int p = lo + tid; p < hi; p += THREADS)
        add_exactly(&s.lin_z[row + p], &s.low_z[row + p], 1, phi[p]);
    __syncthreads();
}

/* Which heads and rows state unit number `index` has. */
typedef struct state_part {
    int lo, hi, head_lo, head_hi;
} state_part;

STI_DEVICE state_part state_part_of(const step_args &a, int index)
{
    const int each = (a.h.P + a.plan.row_parts - 1) / a.plan.row_parts;
    const int lo = min(index % a.plan.row_parts * each, a.h.P);
    const int head_lo = index / a.plan.row_parts * part_heads(a);
    return state_part{lo, min(lo + each, a.h.P), head_lo,
                      min(head_lo + part_heads(a), a.h.group)};
}

STI_DEVICE void ask_ahead(const float *from, size_t n)
{
    for (size_t i = (size_t)threadIdx.x * 16; i < n; i += THREADS * 16)
        expect(from + i);
}

/* Memory is told of the unit's rows of the state, and once of the maps. */
template <typename KV, int HEADS>
STI_DEVICE void expect_state(const step_args &a, const step_shared<KV, HEADS> &sh,
                             int index)
{
    const sti_cuda_shape &h = a.h;
    const state_part p = state_part_of(a, index);
    const size_t row = (size_t)selector() * h.P + p.lo, map = (size_t)h.D * h.F;
    if (h.map_q && p.head_hi > p.head_lo && this_session() == 0)
        ask_ahead(h.map_q + (first_head(a) + p.head_lo) * map,
                  (p.head_hi - p.head_lo) * map);
    ask_ahead(sh.session.lin_s + row * h.D, (size_t)(p.hi - p.lo) * h.D);
    ask_ahead(sh.session.lin_z + row, p.hi - p.lo);
}

/* Queries of the maps. */
template <int ROWS, typename KV, int HEADS>
STI_DEVICE void load_queries(const step_args &a, step_shared<KV, HEADS> &sh, int first,
                             int heads)
{
    const float *q = a.h.raw_features ? sh.session.q_raw : sh.session.q;
    load_rows<ROWS, MAX_D>(sh.x, q + query_at(a, first), heads, a.h.D);
}

/* phi s and phi.z of the part, ROWS heads at once; the first queries are there. */
template <int ROWS, typename KV, int HEADS>
STI_DEVICE void ask_state(const step_args &a, step_shared<KV, HEADS> &sh,
                          const state_part &p)
{
    const sti_cuda_shape &h = a.h;
#pragma unroll 1
    for (int first = p.head_lo; first < p.head_hi; first += ROWS) {
        const int heads = min((int)ROWS, p.head_hi - first);
        const size_t head = first_head(a) + first;
        if (first > p.head_lo) load_queries<ROWS>(a, sh, first, heads);
        __syncthreads();
        project_rows<ROWS>(h, sh.x, heads, h.map_q ? h.map_q + head * h.D * h.F : NULL,
                           sh.state.part, sh.state.phi);
        if (h.D % 4 == 0)
            weigh_state<4, ROWS>(a, sh, sh.x, p.lo, p.hi, first, heads);
        else
            weigh_state<1, ROWS>(a, sh, sh.x, p.lo, p.hi, first, heads);
        __syncthreads();
    }
}

/* State unit number `index`: some heads, some rows. WINDOW: there is one, always. */
template <bool WINDOW, typename KV, int HEADS>
STI_DEVICE void state_unit(const step_args &a, step_shared<KV, HEADS> &sh, int index)
{
    enum { FEW = HEADS < 2 ? HEADS : 2 };
    const state_part p = state_part_of(a, index);
    moment now;
    now.load(sh.session, selector());
    if (!WINDOW && !a.h.has_window) fold_token(a, sh, now.pos + a.t, p.lo, p.hi);
    load_queries<HEADS>(a, sh, p.head_lo, min((int)HEADS, p.head_hi - p.head_lo));
    if (threadIdx.x == 0) sh.now = now.of_token(a.t, WINDOW || a.h.has_window);
    if (HEADS > FEW && p.head_hi - p.head_lo > FEW)
        ask_state<HEADS>(a, sh, p);
    else
        ask_state<FEW>(a, sh, p);
}

#endif
