/* retire_fold.cuh - tokens that leave the window for good: features of their keys
 * (STILL eq. 6), and the sums of these with their values into the state (eq. 9).
 * Included by retire.cu alone, which says how a chunk retires. */
#ifndef STI_BACKEND_CUDA_HYBRID_STEP_RETIRE_FOLD_CUH
#define STI_BACKEND_CUDA_HYBRID_STEP_RETIRE_FOLD_CUH

#include "backend/cuda/hybrid/device.cuh"
#include "backend/cuda/hybrid/step/step.h"
#include "backend/cuda/hybrid/stored.cuh"

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    PIECE = 512,              /* folded tokens whose features are kept at once */
    FEATURE_BYTES = 64 << 20, /* bytes for them, unless one session takes more */
    KEYS = 32,                /* of a features block */
    LDX = KEYS + 4,           /* row stride of transposed keys */
    TILE = 64,                /* rows and columns of the state, of a fold block */
    STEP = 32                 /* tokens that a fold block takes at once */
};

/* Of a session and selection head, in scratch; C folded tokens and C that stay follow.
 * Token i < C is that of the chunk, C + i is slot i of the list. */
typedef struct retired {
    int fold;    /* tokens folded: those of the chunk, then those of the list */
    int stay;    /* tokens of the chunk that join the list */
    int evicted; /* tokens of the list that are folded, at most `stay` */
    int unused;
} retired;

typedef struct retire_args {
    sti_cuda_hybrid_params h;
    const sti_cuda_hybrid_session *session;
    int t;
    int *lists;      /* [n, S]: retired, [C], [C] */
    int first;       /* of the sessions whose features are kept now */
    int from, piece; /* of their folded tokens: those kept now */
    float *phi;      /* [sessions, S, piece, P] */
} retire_args;

STI_DEVICE retired *retired_of(const retire_args &a, int session, int sel)
{
    const size_t each = sizeof(retired) / sizeof(int) + 2 * (size_t)a.h.C;
    return reinterpret_cast<retired *>(a.lists +
                                       ((size_t)session * a.h.S + sel) * each);
}
STI_DEVICE int *fold_list(retired *l)
{
    return reinterpret_cast<int *>(l + 1);
}
STI_DEVICE int *stay_list(retired *l, int C)
{
    return fold_list(l) + C;
}
STI_DEVICE float *features_at(const retire_args &a, int session, int sel)
{
    return a.phi + ((size_t)(session - a.first) * a.h.S + sel) * a.piece * a.h.P;
}

/* First position of the chunk that retires before token t of the session; < 0: none. */
STI_DEVICE int retiring_chunk(const retire_args &a, const sti_cuda_hybrid_session &s)
{
    if (s.T <= a.t) return -1;
    const int pos = *s.pos + a.t;
    return pos % a.h.C == 0 && pos / a.h.C >= 2 ? pos - 2 * a.h.C : -1;
}

/* ---- Folded tokens ------------------------------------------------------- */

/* Keys, or values, of tokens that retire and of those that are evicted, of a selection
 * head: the chunk in the window, and the list. */
template <typename KV> struct leaving_rows {
    const KV *window, *salient; /* [C, D], [capacity, D] */
    stored_rows stored;         /* the list, if it is quantized (bits > 0) */
    int C, D;

    /* Number e of token i: i < C of the chunk, C + i of the list. */
    __device__ __forceinline__ float at(int i, int e) const
    {
        if (i < C) return widen(window[(size_t)i * D + e]);
        if (stored.bits) return load_stored(stored, i - C, e);
        return widen(salient[(size_t)(i - C) * D + e]);
    }
};

template <typename KV>
STI_DEVICE leaving_rows<KV>
leaving_of(const retire_args &a, const sti_cuda_hybrid_session &s, int sel, int first,
           const void *window, const void *salient, const stored_rows &stored)
{
    const size_t C = a.h.C, D = a.h.D, g = sel * a.h.group / a.h.per_kv;
    const size_t list = (size_t)salient_list_of(a.h, s.capacity, sel).first;
    return {static_cast<const KV *>(window) + (g * 2 * C + first % (2 * a.h.C)) * D,
            static_cast<const KV *>(salient) + list * D,
            stored.bits ? stored.from(list) : stored, a.h.C, a.h.D};
}
template <typename KV>
STI_DEVICE leaving_rows<KV>
leaving_keys(const retire_args &a, const sti_cuda_hybrid_session &s, int sel, int first)
{
    return leaving_of<KV>(a, s, sel, first, s.win_k, s.sal_k, stored_keys(a.h, s));
}
template <typename KV>
STI_DEVICE leaving_rows<KV> leaving_values(const retire_args &a,
                                           const sti_cuda_hybrid_session &s, int sel,
                                           int first)
{
    return leaving_of<KV>(a, s, sel, first, s.win_v, s.sal_v, stored_values(a.h, s));
}

/* ---- Features ------------------------------------------------------------ */

typedef struct features_shared {
    float x[STI_STEP_MAX_D * LDX]; /* [D, LDX]: keys, transposed */
    int token[KEYS];
} features_shared;

/* Applies or undoes RoPE on keys that are not in the form that features are made of. */
STI_DEVICE void rope_keys(const retire_args &a, const sti_cuda_hybrid_session &s,
                          int sel, int first, features_shared &sh, int n)
{
    const sti_cuda_hybrid_params &h = a.h;
    const int list = salient_list_of(h, s.capacity, sel).first;
    for (int i = (int)threadIdx.x; i < h.D / 2 * n; i += THREADS) {
        const int pair = i / n, j = i % n, slot = sh.token[j] - h.C, at = list + slot;
        const bool raw = slot >= 0 && s.sal_far && s.sal_far[at];
        if (raw == h.raw_features) continue;
        const int position = slot >= 0 ? s.sal_pos[at] : first + sh.token[j];
        const int2 e = pair_at(h, pair);
        rope_pair(h, pair, raw ? position : -position, &sh.x[e.x * LDX + j],
                  &sh.x[e.y * LDX + j]);
    }
}

/* u [KEYS, F] = x W. A thread has 4 tokens and 4 columns, a quarter of F apart: the
 * lanes of a warp read a row of W side by side, whatever F is. */
STI_DEVICE void project_keys(const sti_cuda_hybrid_params &h, const float *x,
                             const float *W, float *u)
{
    const int F = h.F, apart = (F + 3) / 4;
    for (int item = (int)threadIdx.x; item < apart * (KEYS / 4); item += THREADS) {
        const int j = item / apart * 4, c = item % apart;
        float sum[4][4] = {};
#pragma unroll 8
        for (int k = 0; k < h.D; k++) {
            const float4 key = *reinterpret_cast<const float4 *>(&x[k * LDX + j]);
            const float *row = W + (size_t)k * F + c;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float w = c + i * apart < F ? row[i * apart] : 0;
                sum[0][i] = fmaf(key.x, w, sum[0][i]);
                sum[1][i] = fmaf(key.y, w, sum[1][i]);
                sum[2][i] = fmaf(key.z, w, sum[2][i]);
                sum[3][i] = fmaf(key.w, w, sum[3][i]);
            }
        }
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (c + i * apart < F) u[(j + n) * F + c + i * apart] = sum[n][i];
    }
}

/* STILL eq. 6 of the folded keys. Grid (runs of KEYS tokens, selection heads,
 * sessions); u [KEYS, F] in shared memory. */
template <typename KV>
static __global__ void __launch_bounds__(THREADS)
    features_kernel(const __grid_constant__ retire_args a)
{
    extern __shared__ float u[];
    __shared__ __align__(16) features_shared sh;
    const sti_cuda_hybrid_params &h = a.h;
    const int sel = (int)blockIdx.y, session = a.first + (int)blockIdx.z;
    const int tid = (int)threadIdx.x, warp = tid / 32, lane = tid % 32;
    const sti_cuda_hybrid_session &s = a.session[session];
    const int first = retiring_chunk(a, s);
    if (first < 0) return;
    retired *l = retired_of(a, session, sel);
    const int run = (int)blockIdx.x * KEYS; /* of the piece */
    const int n = min(KEYS, min(a.piece, l->fold - a.from) - run);
    if (n <= 0) return;

    if (tid < n) sh.token[tid] = fold_list(l)[a.from + run + tid];
    const leaving_rows<KV> keys = leaving_keys<KV>(a, s, sel, first);
    __syncthreads();
    for (int i = tid; i < h.D * KEYS; i += THREADS) {
        const int j = i / h.D, e = i % h.D;
        sh.x[e * LDX + j] = j < n ? keys.at(sh.token[j], e) : 0;
    }
    __syncthreads();
    if (h.raw_features || h.position_cap > 0) {
        rope_keys(a, s, sel, first, sh, n);
        __syncthreads();
    }
    if (h.map_k)
        project_keys(h, sh.x, h.map_k + (size_t)sel * h.D * h.F, u);
    else
        for (int i = tid; i < KEYS * h.F; i += THREADS)
            u[i] = sh.x[i % h.F * LDX + i / h.F];
    __syncthreads();
    const float bias = h.bias_k ? h.bias_k[sel] : 0;
    for (int j = warp; j < n; j += WARPS) {
        float square = 0;
        for (int e = lane; e < h.D; e += 32)
            square = fmaf(sh.x[e * LDX + j], sh.x[e * LDX + j], square);
        warp_features(h, u + (size_t)j * h.F, warp_sum(square), bias,
                      features_at(a, session, sel) + (size_t)(run + j) * h.P);
    }
}

/* ---- Fold ---------------------------------------------------------------- */

typedef struct fold_shared {
    float phi[STEP][TILE], v[STEP][TILE];
} fold_shared;

/* STILL eq. 9, s: adds a thread's 4 x 4 sums to the state. */
STI_DEVICE void add_to_state(const sti_cuda_hybrid_params &h,
                             const sti_cuda_hybrid_session &s, int sel, int row,
                             int column, const float (*sum)[4])
{
    for (int i = 0; i < 4; i++) {
        if (row + i >= h.P) return;
        const size_t at = ((size_t)sel * h.P + row + i) * h.D + column;
        if (h.D % 4 == 0) { /* then all four columns are there, or none */
            if (column >= h.D) return;
            float4 *to = reinterpret_cast<float4 *>(s.lin_s + at);
            const float4 x = *to;
            *to = make_float4(x.x + sum[i][0], x.y + sum[i][1], x.z + sum[i][2],
                              x.w + sum[i][3]);
        } else {
            for (int j = 0; j < 4; j++)
                if (column + j < h.D) s.lin_s[at + j] += sum[i][j];
        }
    }
}

/* STILL eq. 9, s and z. Grid (tiles of the state, selection heads, sessions). */
template <typename KV>
static __global__ void __launch_bounds__(THREADS)
    fold_kernel(const __grid_constant__ retire_args a)
{
    __shared__ __align__(16) fold_shared sh;
    const sti_cuda_hybrid_params &h = a.h;
    const int sel = (int)blockIdx.y, session = a.first + (int)blockIdx.z;
    const int tid = (int)threadIdx.x, across = (h.D + TILE - 1) / TILE;
    const int row = (int)blockIdx.x / across * TILE;
    const int column = (int)blockIdx.x % across * TILE;
    const sti_cuda_hybrid_session &s = a.session[session];
    const int first = retiring_chunk(a, s);
    if (first < 0) return;
    retired *l = retired_of(a, session, sel);
    const int tokens = min(a.piece, l->fold - a.from);
    const float *phi = features_at(a, session, sel);
    const int *list = fold_list(l) + a.from;
    const leaving_rows<KV> values = leaving_values<KV>(a, s, sel, first);
    const int own_row = tid / (TILE / 4) * 4, own_column = tid % (TILE / 4) * 4;
    float sum[4][4] = {}, z = 0;
    for (int base = 0; base < tokens; base += STEP) {
        const int n = min((int)STEP, tokens - base);
        for (int i = tid; i < STEP * TILE; i += THREADS) {
            const int j = i / TILE, e = i % TILE;
            float x = 0, y = 0;
            if (j < n && row + e < h.P) x = phi[(size_t)(base + j) * h.P + row + e];
            if (j < n && column + e < h.D) y = values.at(list[base + j], column + e);
            sh.phi[j][e] = x;
            sh.v[j][e] = y;
        }
        __syncthreads();
#pragma unroll 4
        for (int j = 0; j < STEP; j++) {
            const float4 x = *reinterpret_cast<const float4 *>(&sh.phi[j][own_row]);
            const float4 y = *reinterpret_cast<const float4 *>(&sh.v[j][own_column]);
            const float p[4] = {x.x, x.y, x.z, x.w}, v[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int k = 0; k < 4; k++) sum[i][k] = fmaf(p[i], v[k], sum[i][k]);
        }
        if (column == 0 && tid < TILE)
            for (int j = 0; j < STEP; j++) z += sh.phi[j][tid];
        __syncthreads();
    }
    if (tokens <= 0) return;
    add_to_state(h, s, sel, row + own_row, column + own_column, sum);
    const size_t at = (size_t)sel * h.P + row + tid;
    if (column == 0 && tid < TILE && row + tid < h.P) s.lin_z[at] += z;
}

#endif
