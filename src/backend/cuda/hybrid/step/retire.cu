/* retire.cu - a chunk leaves the window (STILL eq. 8, 9): its best tokens join the
 * salient list; all others, and those that the list cannot keep, are folded into the
 * linear state.
 *
 * Four kernels, in each of which the blocks of a session that begins no chunk return at
 * once:
 *   select     who stays, who goes; lists of both in scratch   a block per head
 *   features   phi of the folded keys                          KEYS tokens a block
 *   fold       s += phi^T v, z += sum of phi                   TILE x TILE of s a block
 *   settle     newcomers take the places of the evicted        a block per head
 *
 * This happens once in C tokens, so it is built to be simple. Bounded by arithmetic in
 * float32: 6 million multiplications a head at the 8B shape, two thirds of them in
 * fold.
 *
 * The sums of a piece are complete before they are added to the state, once: a long
 * stream adds a few thousand numbers to each, not millions, and float keeps them.
 * Where a chunk is larger than PIECE, or there are many sessions, features and fold
 * take parts of them one after the other, so that scratch for features stays small. */
#include "backend/cuda/hybrid/order.cuh"
#include "backend/cuda/hybrid/score.h"
#include "backend/cuda/hybrid/step/retire_fold.cuh"

/* ---- Select -------------------------------------------------------------- */

STI_DEVICE int salient_tokens(const sti_cuda_hybrid_session &s, salient_list list,
                              int sel)
{
    return max(0, min(s.sal_count[sel], list.capacity));
}

/* The score with which token i of the chunk in ring slots `slot`.. leaves the
 * window. */
STI_DEVICE float final_score(const sti_cuda_hybrid_params &h,
                             const sti_cuda_hybrid_session &s, int sel, int slot, int i)
{
    const size_t at = (size_t)sel * 2 * h.C + slot + i;
    if (!sti_score_from(h.score, STI_FROM_QUERIES)) return s.win_score[at];
    return queries_score(h.score, s.win_received[at], h.C, i);
}

/* The final score where it depends on the whole chunk: replaces the 0 that the tokens
 * arrived with, until they have settled. */
STI_DEVICE void score_chunk(const sti_cuda_hybrid_params &h,
                            const sti_cuda_hybrid_session &s, int sel, int first,
                            float *mean)
{
    const int slot = first % (2 * h.C), D = h.D;
    float *score = s.win_score + (size_t)sel * 2 * h.C + slot;
    const size_t at = ((size_t)(sel * h.group / h.per_kv) * 2 * h.C + slot) * D;
    const __half *half_keys = static_cast<const __half *>(s.win_k) + at;
    const float *keys = static_cast<const float *>(s.win_k) + at;
    chunk_scores<WARPS>(
        h.score, h.C, D, first, mean,
        [&](int i, int d) {
            const size_t n = (size_t)i * D + d;
            return h.half_kv ? __half2float(half_keys[n]) : keys[n];
        },
        [&](int i, float x) { score[i] = x; });
}

/* Tokens that may stay: i < C those of the chunk, then those of the list. */
typedef struct candidates {
    const sti_cuda_hybrid_params *h;
    const sti_cuda_hybrid_session *s;
    int sel, first, slot;
    salient_list list;
    int count; /* tokens in it */

    __device__ __forceinline__ token_order at(int i) const
    {
        if (i < h->C) return order_of(final_score(*h, *s, sel, slot, i), first + i);
        const int place = list.first + (i - h->C);
        return order_of(s->sal_score[place], s->sal_pos[place]);
    }
} candidates;

typedef struct select_shared {
    int bin[256];
    int wanted, there; /* among those that begin with `prefix` */
    token_order prefix;
    int warp[WARPS + 1];
} select_shared;

/* The bin that the wanted-th best falls into; by the first warp, 8 bins a lane, lane 0
 * the best. */
STI_DEVICE void choose_bin(select_shared &sh, int shift)
{
    const int lane = (int)threadIdx.x;
    int own = 0;
    for (int i = 0; i < 8; i++) own += sh.bin[255 - 8 * lane - i];
    int until = own; /* in this lane's bins and the better ones */
    for (int i = 1; i < 32; i <<= 1) {
        const int other = __shfl_up_sync(~0u, until, i);
        if (lane >= i) until += other;
    }
    const int wanted = sh.wanted;
    __syncwarp();
    int before = until - own;
    if (wanted <= before || wanted > until) return;
    for (int i = 0; i < 8; i++) {
        const int b = 255 - 8 * lane - i;
        if (wanted <= before + sh.bin[b]) {
            sh.wanted = wanted - before;
            sh.there = sh.bin[b];
            sh.prefix |= (token_order)b << shift;
            return;
        }
        before += sh.bin[b];
    }
}

/* The k-th best (1 <= k) of the first n candidates, `there` of which count: those of
 * the chunk if they are at least `least`, those of the list always. A digit of 8 bits
 * at a time, from the top, until all that is left is wanted. */
STI_DEVICE token_order kth_best(const candidates &c, select_shared &sh, int n,
                                int there, token_order least, int k)
{
    const int tid = (int)threadIdx.x;
    __syncthreads();
    if (tid == 0) {
        sh.wanted = k;
        sh.there = there;
        sh.prefix = 0;
    }
    __syncthreads();
    for (int shift = 56; shift >= 0 && sh.wanted < sh.there; shift -= 8) {
        const token_order mask = shift == 56 ? 0 : ~(token_order)0 << (shift + 8),
                          prefix = sh.prefix;
        for (int i = tid; i < 256; i += THREADS) sh.bin[i] = 0;
        __syncthreads();
        for (int i = tid; i < n; i += THREADS) {
            const token_order r = c.at(i);
            if ((i >= c.h->C || r >= least) && (r & mask) == prefix)
                atomicAdd(&sh.bin[(int)(r >> shift) & 255], 1);
        }
        __syncthreads();
        if (tid < 32) choose_bin(sh, shift);
        __syncthreads();
    }
    return sh.prefix;
}

/* Number of threads before this one whose flag is set; *all: of the whole block. */
STI_DEVICE int flags_before(select_shared &sh, bool flag, int *all)
{
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const unsigned votes = __ballot_sync(~0u, flag);
    if (lane == 0) sh.warp[warp] = __popc(votes);
    __syncthreads();
    int before = 0, sum = 0;
    for (int w = 0; w < WARPS; w++) {
        if (w == warp) before = sum;
        sum += sh.warp[w];
    }
    __syncthreads();
    *all = sum;
    return before + __popc(votes & ((1u << lane) - 1));
}

/* Adds tokens of the list to those folded, of which there are n: the ones below `least`
 * or, equal, the ones at it; at most `most`. Returns how many. */
STI_DEVICE int evict(const candidates &c, select_shared &sh, int *fold, int n,
                     token_order least, bool equal, int most)
{
    int evicted = 0;
    for (int base = 0; base < c.count && evicted < most; base += THREADS) {
        const int i = base + (int)threadIdx.x;
        const token_order r = i < c.count ? c.at(c.h->C + i) : 0;
        const bool goes = i < c.count && (equal ? r == least : r < least);
        int all;
        const int at = evicted + flags_before(sh, goes, &all);
        if (goes && at < most) fold[n + at] = c.h->C + i;
        evicted = min(evicted + all, most);
    }
    return evicted;
}

/* STILL eq. 8. Whatever the scores are, at most `capacity` tokens are salient
 * afterwards, and no more are evicted than stay: lists never overflow. */
static __global__ void __launch_bounds__(THREADS)
    select_kernel(const __grid_constant__ retire_args a)
{
    __shared__ select_shared sh;
    __shared__ float mean[STI_HEAD_DIM_MAX];
    const sti_cuda_hybrid_params &h = a.h;
    const int sel = (int)blockIdx.x, session = (int)blockIdx.y, tid = (int)threadIdx.x;
    const sti_cuda_hybrid_session &s = a.session[session];
    const int first = retiring_chunk(a, s), C = h.C;
    if (first < 0) return;
    if (sti_score_from(h.score, STI_FROM_CHUNK)) score_chunk(h, s, sel, first, mean);
    const salient_list list = salient_list_of(h, s.capacity, sel);
    const int count = salient_tokens(s, list, sel);
    const int select = list.capacity > 0 ? h.select : 0;
    const candidates c = {&h, &s, sel, first, first % (2 * C), list, count};
    /* Tokens of the chunk stay if they are among its best and, together with the list,
     * among the best `capacity`. */
    const bool full = select > 0 && count + select > list.capacity;
    token_order least = ~(token_order)0, least_of_all = 0;
    if (select > 0) least = kth_best(c, sh, C, C, 0, select);
    if (full)
        least_of_all = kth_best(c, sh, C + count, count + select, least, list.capacity);
    const token_order least_new = least > least_of_all ? least : least_of_all;

    retired *l = retired_of(a, session, sel);
    int folded = 0;
    for (int base = 0; base < C; base += THREADS) {
        const int i = base + tid;
        const bool folds = i < C && (select == 0 || c.at(i) < least_new);
        int all;
        const int at = folded + flags_before(sh, folds, &all);
        if (folds)
            fold_list(l)[at] = i;
        else if (i < C)
            stay_list(l, C)[i - at] = i;
        folded += all;
    }
    const int most = full ? max(0, count + C - folded - list.capacity) : 0;
    int evicted = evict(c, sh, fold_list(l), folded, least_of_all, false, most);
    if (evicted < most)
        evicted += evict(c, sh, fold_list(l), folded + evicted, least_of_all, true,
                         most - evicted);
    if (tid == 0) *l = retired{folded + evicted, C - folded, evicted, 0};
}

/* ---- Settle -------------------------------------------------------------- */

/* Salient keys at distance position_cap or more from the last token of the chunk that
 * begins are kept as they were before RoPE; a pair of a key a thread. */
template <typename KV>
STI_DEVICE void make_far(const retire_args &a, const sti_cuda_hybrid_session &s,
                         salient_list list, int last, int count)
{
    const sti_cuda_hybrid_params &h = a.h;
    KV *keys = static_cast<KV *>(s.sal_k);
    const int half = h.D / 2;
    for (int i = (int)threadIdx.x; i < count * half; i += THREADS) {
        const size_t at = (size_t)(list.first + i / half);
        if (s.sal_far[at] || last - s.sal_pos[at] < h.position_cap) continue;
        const int2 e = pair_at(h, i % half);
        float x = widen(keys[at * h.D + e.x]), y = widen(keys[at * h.D + e.y]);
        rope_pair(h, i % half, -s.sal_pos[at], &x, &y);
        narrow(x, &keys[at * h.D + e.x]);
        narrow(y, &keys[at * h.D + e.y]);
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < count; i += THREADS) {
        const size_t at = (size_t)(list.first + i);
        if (last - s.sal_pos[at] >= h.position_cap) s.sal_far[at] = 1;
    }
}

/* The same of quantized keys, by warps: unrotated from what was stored, and rounded
 * once more. */
STI_DEVICE void make_stored_far(const retire_args &a, const sti_cuda_hybrid_session &s,
                                salient_list list, int last, int count)
{
    __shared__ float row[WARPS][STI_STEP_MAX_D];
    const sti_cuda_hybrid_params &h = a.h;
    const stored_rows keys = stored_keys(h, s);
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    for (int i = warp; i < count; i += WARPS) {
        const size_t at = (size_t)(list.first + i);
        if (s.sal_far[at] || last - s.sal_pos[at] < h.position_cap) continue;
        for (int e = lane; e < h.D; e += 32) row[warp][e] = load_stored(keys, at, e);
        __syncwarp();
        for (int pair = lane; pair < h.D / 2; pair += 32) {
            const int2 e = pair_at(h, pair);
            rope_pair(h, pair, -s.sal_pos[at], &row[warp][e.x], &row[warp][e.y]);
        }
        __syncwarp();
        if (lane < h.D / 8)
            store_unit(keys, at, lane, round_unit(h.key_bits, &row[warp][8 * lane]));
        __syncwarp();
        if (lane == 0) s.sal_far[at] = 1;
    }
}

/* A newcomer's key or value, `token` of the chunk, to its slot, by a warp. */
template <typename KV>
STI_DEVICE void settle_row(const leaving_rows<KV> &from, int token, void *list,
                           const stored_rows &stored, size_t slot)
{
    const int lane = (int)threadIdx.x % 32;
    if (!stored.bits) {
        for (int e = lane; e < from.D; e += 32)
            static_cast<KV *>(list)[slot * from.D + e] =
                from.window[(size_t)token * from.D + e];
        return;
    }
    if (lane >= from.D / 8) return;
    float x[8];
    for (int i = 0; i < 8; i++) x[i] = from.at(token, 8 * lane + i);
    store_unit(stored, slot, lane, round_unit(stored.bits, x));
}

/* STILL eq. 9, h: the tokens that stay join the list. A block per head. */
template <typename KV>
static __global__ void __launch_bounds__(THREADS)
    settle_kernel(const __grid_constant__ retire_args a)
{
    const sti_cuda_hybrid_params &h = a.h;
    const int sel = (int)blockIdx.x, session = (int)blockIdx.y;
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const sti_cuda_hybrid_session &s = a.session[session];
    const int first = retiring_chunk(a, s);
    if (first < 0) return;
    retired *l = retired_of(a, session, sel);
    const retired n = *l;
    const salient_list list = salient_list_of(h, s.capacity, sel);
    const int count = salient_tokens(s, list, sel);
    const int *gone = fold_list(l) + n.fold - n.evicted;
    const leaving_rows<KV> keys = leaving_keys<KV>(a, s, sel, first);
    const leaving_rows<KV> values = leaving_values<KV>(a, s, sel, first);
    for (int i = warp; i < n.stay; i += WARPS) {
        const int token = stay_list(l, h.C)[i];
        const int slot = i < n.evicted ? gone[i] - h.C : count + i - n.evicted;
        const size_t at = (size_t)(list.first + slot);
        settle_row(keys, token, s.sal_k, stored_keys(h, s), at);
        settle_row(values, token, s.sal_v, stored_values(h, s), at);
        if (lane == 0) {
            s.sal_score[at] = final_score(h, s, sel, first % (2 * h.C), token);
            s.sal_pos[at] = first + token;
            if (s.sal_far) s.sal_far[at] = 0;
        }
    }
    __syncthreads();
    const int now = count + n.stay - n.evicted;
    if (threadIdx.x == 0) {
        s.sal_count[sel] = now;
        s.folded[sel] += n.fold;
    }
    for (int i = (int)threadIdx.x; sti_score_from(h.score, STI_FROM_CHUNK) && i < h.C;
         i += THREADS)
        s.win_score[(size_t)sel * 2 * h.C + first % (2 * h.C) + i] = 0;
    if (s.sal_far && h.key_bits)
        make_stored_far(a, s, list, first + 3 * h.C - 1, now);
    else if (s.sal_far)
        make_far<KV>(a, s, list, first + 3 * h.C - 1, now);
}

/* ---- Launch -------------------------------------------------------------- */

static size_t list_bytes(const sti_cuda_hybrid_params *h, int n)
{
    const size_t each = sizeof(retired) + 2 * (size_t)h->C * sizeof(int);
    return ((size_t)n * (size_t)h->S * each + 255) / 256 * 256;
}
static int piece_of(const sti_cuda_hybrid_params *h)
{
    return h->C < PIECE ? h->C : PIECE;
}
static size_t session_floats(const sti_cuda_hybrid_params *h)
{
    return (size_t)h->S * (size_t)piece_of(h) * (size_t)h->P;
}
/* Sessions whose features are kept at once. */
static int sessions_of(const sti_cuda_hybrid_params *h, int n)
{
    const size_t fit = (size_t)FEATURE_BYTES / (session_floats(h) * sizeof(float));
    return fit < 1 ? 1 : fit < (size_t)n ? (int)fit : n;
}

size_t sti_cuda_hybrid_retire_scratch(const sti_cuda_hybrid_params *h, int n)
{
    if (!h->has_window || n <= 0) return 0;
    const size_t features = h->has_linear ? session_floats(h) * sizeof(float) : 0;
    return list_bytes(h, n) + features * (size_t)sessions_of(h, n);
}

/* Features of a piece, and their sums into the state. */
template <typename KV>
static still_status fold_piece(const retire_args &a, int sessions, cudaStream_t stream,
                               still_error *err)
{
    const unsigned S = (unsigned)a.h.S, n = (unsigned)sessions;
    const dim3 runs((unsigned)(a.piece + KEYS - 1) / KEYS, S, n);
    const dim3 tiles((unsigned)((a.h.P + TILE - 1) / TILE) *
                         (unsigned)((a.h.D + TILE - 1) / TILE),
                     S, n);
    const size_t bytes = (size_t)KEYS * (size_t)a.h.F * sizeof(float);
    STI_CUDA(cudaFuncSetAttribute(features_kernel<KV>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  (int)bytes),
             "hybrid attention, shared memory of features");
    features_kernel<KV><<<runs, THREADS, bytes, stream>>>(a);
    STI_CUDA(cudaGetLastError(), "hybrid attention, features of folded keys");
    fold_kernel<KV><<<tiles, THREADS, 0, stream>>>(a);
    STI_CUDA(cudaGetLastError(), "hybrid attention, folding");
    return STILL_OK;
}

template <typename KV>
static still_status retire(sti_dev *dev, retire_args a, int n, still_error *err)
{
    const dim3 heads((unsigned)a.h.S, (unsigned)n);
    select_kernel<<<heads, THREADS, 0, dev->stream>>>(a);
    STI_CUDA(cudaGetLastError(), "hybrid attention, selection");
    const int at_once = sessions_of(&a.h, n);
    for (int first = 0; a.h.has_linear && first < n; first += at_once)
        for (int from = 0; from < a.h.C; from += a.piece) {
            a.first = first;
            a.from = from;
            STI_TRY(fold_piece<KV>(a, n - first < at_once ? n - first : at_once,
                                   dev->stream, err));
        }
    settle_kernel<KV><<<heads, THREADS, 0, dev->stream>>>(a);
    STI_CUDA(cudaGetLastError(), "hybrid attention, salient lists");
    return STILL_OK;
}

extern "C" still_status sti_cuda_hybrid_retire(sti_dev *dev,
                                               const sti_cuda_hybrid_params *h,
                                               const sti_cuda_hybrid_session *session,
                                               int n, int t, void *scratch,
                                               still_error *err)
{
    if (n <= 0 || !h->has_window) return STILL_OK;
    STI_TRY(sti_cuda_hybrid_step_check(h, err));
    retire_args a = {*h, session, t,           static_cast<int *>(scratch),
                     0,  0,       piece_of(h), NULL};
    a.phi = reinterpret_cast<float *>(static_cast<char *>(scratch) + list_bytes(h, n));
    return h->half_kv ? retire<__half>(dev, a, n, err) : retire<float>(dev, a, n, err);
}
