/* hybrid_step_state.cuh - a state unit: phi(q) s and phi(q).z over a run of the state's
 * rows, for some query heads. Without a window the new token is folded first. */
#ifndef STI_BACKEND_CUDA_HYBRID_STEP_STATE_CUH
#define STI_BACKEND_CUDA_HYBRID_STEP_STATE_CUH

#include "backend/cuda/hybrid_step.cuh"

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

/* phi of up to ROWS <= WARPS vectors x in shared memory. W, bias: of the first. */
template <int ROWS>
STI_DEVICE void map_rows(const sti_cuda_shape &h, const float (*x)[MAX_D], int rows,
                         const float *W, const float *bias, float (*part)[PARTS],
                         float (*phi)[MAX_P])
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    if (!W) {
        for (int i = (int)threadIdx.x; i < rows * h.F; i += THREADS)
            phi[i / h.F][i % h.F] = x[i / h.F][i % h.F];
    } else if (h.F % 4 == 0 && ((uintptr_t)W & 15) == 0) {
        project<4, ROWS>(h, x, rows, W, part, phi);
    } else {
        project<1, ROWS>(h, x, rows, W, part, phi);
    }
    __syncthreads();
    if (warp < rows) {
        float square = 0;
        for (int e = lane; e < h.D; e += 32) square += x[warp][e] * x[warp][e];
        warp_features(h, phi[warp], warp_sum(square), bias ? bias[warp] : 0, phi[warp]);
    }
    __syncthreads();
}

/* phi s over rows [lo, hi) of s [P, D], to the unit's result. */
template <int VEC, int ROWS, typename KV, int HEADS>
STI_DEVICE void weigh_state(const step_args &a, step_shared<KV, HEADS> &sh,
                            const float *s, int lo, int hi, int first, int heads)
{
    enum { AHEAD = ROWS > 2 ? STATE_AHEAD / 2 : STATE_AHEAD };
    const int D = a.h.D, wide = D / VEC, deep = max(1, THREADS / wide);
    for (int item = (int)threadIdx.x; item < wide * deep; item += THREADS) {
        const int r = item / wide, e = (item - r * wide) * VEC;
        float sum[ROWS][VEC] = {};
        const float *next = s + (size_t)(lo + r) * D + e;
#pragma unroll 1
        for (int p = lo + r; p < hi; p += deep * AHEAD) {
            packed<float, VEC> x[AHEAD];
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                if (p + j * deep < hi)
                    x[j].load(next);
                else
                    x[j].zero();
                next += (size_t)deep * D;
            }
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                float y[VEC];
                x[j].widen(y);
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
        for (int n = 0; n < ROWS; n++) put_vector(&sh.state.part[n][r * D + e], sum[n]);
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < heads * D; i += THREADS) {
        const int n = i / D, e = i - n * D;
        float sum = 0;
        for (int r = 0; r < deep; r++) sum += sh.state.part[n][r * D + e];
        part_at(a, this_unit(), first + n)[e] = sum;
    }
}

/* Without a window: the new token is folded before it asks. Rows [lo, hi). */
template <typename KV, int HEADS>
STI_DEVICE void fold_token(const step_args &a, step_shared<KV, HEADS> &sh, int lo,
                           int hi)
{
    const sti_cuda_shape &h = a.h;
    const sti_cuda_session &s = sh.session;
    const int D = h.D, tid = (int)threadIdx.x, sel = selector();
    const size_t at = ((size_t)a.t * h.G + kv_head(a)) * D, row = (size_t)sel * h.P;
    for (int e = tid; e < D; e += THREADS) sh.x[0][e] = s.k[at + e];
    __syncthreads();
    for (int i = tid; h.raw_features && i < D / 2; i += THREADS) {
        const int2 pair = pair_at(h, i);
        turn_pair(h, i, -sh.pos, &sh.x[0][pair.x], &sh.x[0][pair.y]);
    }
    __syncthreads();
    map_rows<1>(h, sh.x, 1, h.map_k ? h.map_k + (size_t)sel * D * h.F : NULL,
                h.bias_k ? h.bias_k + sel : NULL, sh.state.part, sh.state.phi_k);
    const float *phi = sh.state.phi_k[0];
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

/* Asks for rows [lo, hi) of the state, which are not needed before the maps are done.
 */
STI_DEVICE void ask_ahead(const float *s, int lo, int hi, int D)
{
    const char *from = reinterpret_cast<const char *>(s + (size_t)lo * D);
    const size_t bytes = (size_t)(hi - lo) * D * sizeof(float);
    for (size_t i = (size_t)threadIdx.x * 32; i < bytes; i += THREADS * 32)
        asm volatile(
            "prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from + i)));
}

/* The queries of `heads` heads from `first` on as the maps want them; they may be here
 * already. */
template <int ROWS, typename KV, int HEADS>
STI_DEVICE const float (*state_queries(const step_args &a, step_shared<KV, HEADS> &sh,
                                       int first, int heads))[MAX_D]
{
    const sti_cuda_shape &h = a.h;
    if (!h.raw_features && first + heads <= HEADS) return sh.q + first;
    const float *q = h.raw_features ? sh.session.q_raw : sh.session.q;
    q += ((size_t)a.t * h.H + first_head(a) + first) * h.D;
    load_rows<ROWS, MAX_D>(sh.x, q, heads, h.D);
    __syncthreads();
    return sh.x;
}

/* phi s and phi.z of heads [head_lo, head_hi), rows [lo, hi), ROWS heads at once. */
template <int ROWS, typename KV, int HEADS>
STI_DEVICE void ask_state(const step_args &a, step_shared<KV, HEADS> &sh, int lo,
                          int hi, int head_lo, int head_hi)
{
    const sti_cuda_shape &h = a.h;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const size_t row = (size_t)selector() * h.P;
    const float *s = sh.session.lin_s + row * h.D, *z = sh.session.lin_z + row;
#pragma unroll 1
    for (int first = head_lo; first < head_hi; first += ROWS) {
        const int head = first_head(a) + first, heads = min((int)ROWS, head_hi - first);
        map_rows<ROWS>(h, state_queries<ROWS>(a, sh, first, heads), heads,
                       h.map_q ? h.map_q + (size_t)head * h.D * h.F : NULL,
                       h.bias_q ? h.bias_q + head : NULL, sh.state.part, sh.state.phi);
        if (h.D % 4 == 0)
            weigh_state<4, ROWS>(a, sh, s, lo, hi, first, heads);
        else
            weigh_state<1, ROWS>(a, sh, s, lo, hi, first, heads);
        if (warp < heads) {
            float sum = 0;
#pragma unroll 4
            for (int p = lo + lane; p < hi; p += 32)
                sum = fmaf(sh.state.phi[warp][p], z[p], sum);
            sum = warp_sum(sum);
            if (lane == 0) part_at(a, this_unit(), first + warp)[h.D] = sum;
        }
        __syncthreads();
    }
}

/* State unit number `index`: some heads, some rows. WINDOW: there is one, always. */
template <bool WINDOW, typename KV, int HEADS>
STI_DEVICE void state_unit(const step_args &a, step_shared<KV, HEADS> &sh, int index)
{
    enum { FEW = HEADS < 2 ? HEADS : 2 };
    const sti_cuda_shape &h = a.h;
    const int each = (h.P + a.plan.row_parts - 1) / a.plan.row_parts;
    const int lo = min(index % a.plan.row_parts * each, h.P), hi = min(lo + each, h.P);
    const int head_lo = index / a.plan.row_parts * part_heads(a);
    const int head_hi = min(head_lo + part_heads(a), h.group);
    if (sh.folded == 0) return; /* nobody reads the result */
    if (WINDOW || h.has_window)
        ask_ahead(sh.session.lin_s + (size_t)selector() * h.P * h.D, lo, hi, h.D);
    else
        fold_token(a, sh, lo, hi);
    if (HEADS > FEW && head_hi - head_lo > FEW)
        ask_state<HEADS>(a, sh, lo, hi, head_lo, head_hi);
    else
        ask_state<FEW>(a, sh, lo, hi, head_lo, head_hi);
}

#endif
