/* hybrid_train_route.cu - which token is folded when, for whole sequences.
 *
 * Scores first, head by head, from logits of 64 queries against the keys they weigh;
 * then, for each chunk and selection head, the mean over query heads and the `select`
 * best in order; last, where the cap can be exceeded, one block per selection head
 * merges the chunks' lists in order of time and folds what does not fit. Logits are
 * products of split halves: scores that differ must not change places.
 *
 * Bounded by latency: the whole takes 6 C D operations a query. */
#include "backend/cuda/hybrid_distinct.cuh"
#include "backend/cuda/hybrid_train_tile.cuh"

/* ---- Scores ------------------------------------------------------------------------
 */

/* Tiles of [64][DP] halves: the block's rows, then those it walks over, split. */
template <int DP> static constexpr size_t score_shared(void)
{
    return 4 * ROWS * DP * sizeof(uint16_t);
}

/* Rows [first, first + 64) of q or k before `end`, split, into tiles `to`, `to` + 1. */
template <int DP>
STI_DEVICE void load_rows(const sti_cuda_train &p, int to, const float *x, int heads,
                          int b, int head, int first, int end)
{
    constexpr int TILE = ROWS * DP * 2;
    unsigned char *high = (unsigned char *)block_memory() + to * TILE;
    split_tile<ROWS, DP>(
        high, high + TILE, p.D, p.vec,
        [&](int r) {
            return first + r < end ? x + token_at(p, heads, b, head, first + r) * p.D
                                   : (const float *)NULL;
        },
        keep_none());
}

/* Products of the warp's 16 rows of the first tiles with all of the others. */
template <int DP> STI_DEVICE void multiply_rows(float (&s)[8][4], const lane_place &at)
{
    constexpr uint32_t TILE = ROWS * DP * 2;
    const uint32_t a = shared_address(block_memory()) + (uint32_t)at.warp * 16 * DP * 2;
    const uint32_t b = shared_address(block_memory()) + 2 * TILE;
    clear_tiles(s);
    split_product<8, DP, false>(s, lane_address<DP>::by16(a, at.lane),
                                lane_address<DP>::by16(a + TILE, at.lane),
                                lane_address<DP>::by8(b, at.lane),
                                lane_address<DP>::by8(b + TILE, at.lane));
}

STI_DEVICE float saliency(float self, float others, float eps)
{
    const float sum = self + others, p = self / sum, rest = others / sum;
    return (rest > 0 ? rest * logf(rest) : 0) + p * logf((p + eps) / eps);
}

/* Softmax of 64 queries over a window: the last C tokens, and the score of the weight a
 * token gives itself; or, if RECEIVED, the chunk before and the own one, and its
 * maximum and sum. */
template <int DP, bool RECEIVED>
static __global__ void __launch_bounds__(THREADS) score_kernel(const sti_cuda_train p)
{
    const lane_place at = lane_place_of();
    const int b = (int)blockIdx.z, h = (int)blockIdx.y;
    const int c = (int)blockIdx.x / p.tiles;
    const int first = c * p.span + (int)blockIdx.x % p.tiles * ROWS;
    const int end = min(first + ROWS, span_end(p, c));
    if (first >= end) return;
    const int back = RECEIVED ? (c > 0 ? c - 1 : 0) * p.span : first - p.span + 1;
    load_rows<DP>(p, 0, p.q, p.H, b, h, first, end);

    const int row = first + at.warp * 16 + at.g; /* and row + 8 */
    const float scale = p.scale * log2_e;
    float top[2] = {-INFINITY, -INFINITY}, others[2] = {0, 0}, self[2] = {0, 0};
    for (int k0 = back > 0 ? back : 0; k0 < end; k0 += ROWS) {
        __syncthreads();
        load_rows<DP>(p, 2, p.k, p.G, b, h / p.per_kv, k0, end);
        __syncthreads();
        float s[8][4];
        multiply_rows<DP>(s, at);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int t = row + 8 * r, from = RECEIVED ? back : t - p.span + 1;
            float most = top[r];
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int j = k0 + i / 2 * 8 + 2 * at.t + i % 2;
                float *x = &s[i / 2][2 * r + i % 2];
                *x = j >= from && j <= t ? *x * scale : -INFINITY;
                most = fmaxf(most, *x);
            }
            most = quad_max(most);
            if (most == -INFINITY) continue; /* a row past the end: all lanes agree */
            const float keep = exp2_fast(top[r] - most);
            float sum = 0, own = 0;
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int j = k0 + i / 2 * 8 + 2 * at.t + i % 2;
                const float w = exp2_fast(s[i / 2][2 * r + i % 2] - most);
                if (j == t)
                    own = w;
                else
                    sum += w;
            }
            others[r] = others[r] * keep + sum;
            self[r] = self[r] * keep + own;
            top[r] = most;
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int t = row + 8 * r;
        const float rest = quad_sum(others[r]), own = quad_sum(self[r]);
        if (t >= end || at.t != 0) continue;
        const size_t to = row_at(p, p.H, b, h, t);
        if (RECEIVED) {
            p.row_max[to] = top[r];
            p.row_sum[to] = rest + own;
        } else {
            p.score_head[to] = saliency(own, rest, p.score_eps);
        }
    }
}

/* Mean weight that 64 keys of chunk c receive from later queries of that chunk and the
 * next: keys are rows, queries columns. */
template <int DP>
static __global__ void __launch_bounds__(THREADS)
    received_kernel(const sti_cuda_train p)
{
    const lane_place at = lane_place_of();
    const int b = (int)blockIdx.z, h = (int)blockIdx.y;
    const int c = (int)blockIdx.x / p.tiles;
    const int first = c * p.span + (int)blockIdx.x % p.tiles * ROWS;
    const int end = min(first + ROWS, span_end(p, c));
    if (first >= end) return;
    const int last = span_end(p, min(c + 1, p.spans - 1)); /* of the queries */
    load_rows<DP>(p, 0, p.k, p.G, b, h / p.per_kv, first, end);

    const int row = first + at.warp * 16 + at.g;
    const float scale = p.scale * log2_e;
    float sum[2] = {0, 0};
    for (int q0 = first; q0 < last; q0 += ROWS) {
        __syncthreads();
        load_rows<DP>(p, 2, p.q, p.H, b, h, q0, last);
        __syncthreads();
        float s[8][4];
        multiply_rows<DP>(s, at);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int t = q0 + i / 2 * 8 + 2 * at.t + i % 2;
            if (t >= last) continue;
            const size_t stat = row_at(p, p.H, b, h, t);
            const float top = p.row_max[stat], share = 1 / p.row_sum[stat];
#pragma unroll
            for (int r = 0; r < 2; r++)
                if (t > row + 8 * r)
                    sum[r] += exp2_fast(s[i / 2][2 * r + i % 2] * scale - top) * share;
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int j = row + 8 * r;
        const float all = quad_sum(sum[r]);
        if (j < end && at.t == 0)
            p.score_head[row_at(p, p.H, b, h, j)] =
                all / fmaxf((float)(last - 1 - j), 1);
    }
}

STI_DEVICE uint64_t mix_bits(uint64_t x)
{
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* Scores that need no logits; as in ops/score.c. */
static __global__ void __launch_bounds__(THREADS) plain_kernel(const sti_cuda_train p)
{
    const int t = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    const int h = (int)blockIdx.y, b = (int)blockIdx.z;
    if (t >= p.T) return;
    float score = 0;
    if (p.score == STI_SCORE_KEYNORM) {
        const float *k = p.k + token_at(p, p.G, b, h / p.per_kv, t) * p.D;
        double square = 0;
        for (int e = 0; e < p.D; e++) square += (double)k[e] * k[e];
        score = (float)-sqrt(square);
    } else {
        uint64_t x = mix_bits(p.seed);
        x = mix_bits(x ^ (uint64_t)p.layer);
        x = mix_bits(x ^ (uint64_t)h);
        x = mix_bits(x ^ (uint64_t)t);
        score = (float)(x >> 40) / (float)(1 << 24);
    }
    p.score_head[row_at(p, p.H, b, h, t)] = score;
}

/* A chunk of a kv head; all its query heads score alike. */
static __global__ void __launch_bounds__(THREADS)
    distinct_kernel(const sti_cuda_train p)
{
    __shared__ float mean[STI_HEAD_DIM_MAX];
    const int c = (int)blockIdx.x, g = (int)blockIdx.y, b = (int)blockIdx.z;
    const int first = c * p.span;
    distinct::compare_keys<THREADS / 32>(
        span_end(p, c) - first, p.D, mean,
        [&](int i, int d) { return p.k[token_at(p, p.G, b, g, first + i) * p.D + d]; },
        [&](int i, float x) {
            for (int h = g * p.per_kv; h < (g + 1) * p.per_kv; h++)
                p.score_head[row_at(p, p.H, b, h, first + i)] =
                    distinct::score_of(x, first + i);
        });
}

still_status sti_train_scores(sti_dev *dev, const sti_cuda_train *p, still_error *err)
{
    const char *what = "hybrid training: scores";
    const dim3 tiles(p->spans * p->tiles, p->H, p->B);
    if (p->score == STI_SCORE_KEYNORM || p->score == STI_SCORE_RANDOM)
        return launch(dev, what, err, plain_kernel,
                      dim3((p->T - 1) / THREADS + 1, p->H, p->B), THREADS, 0, *p);
    if (p->score == STI_SCORE_DISTINCT)
        return launch(dev, what, err, distinct_kernel, dim3(p->spans, p->G, p->B),
                      THREADS, 0, *p);
#define SCORE(W)                                                                       \
    launch(dev, what, err, score_kernel<W, false>, tiles, THREADS, score_shared<W>(),  \
           *p)
#define STATS(W)                                                                       \
    launch(dev, what, err, score_kernel<W, true>, tiles, THREADS, score_shared<W>(), *p)
#define RECEIVE(W)                                                                     \
    launch(dev, what, err, received_kernel<W>, tiles, THREADS, score_shared<W>(), *p)
    if (p->score == STI_SCORE_S3) return STI_TRAIN_BY_WIDTH(p->DP, SCORE);
    STI_TRY(STI_TRAIN_BY_WIDTH(p->DP, STATS));
    return STI_TRAIN_BY_WIDTH(p->DP, RECEIVE);
}

/* ---- Choice ------------------------------------------------------------------------
 */

STI_DEVICE bool better(float a, int i, float b, int j)
{
    return a > b || (a == b && i < j);
}

/* Chunk c of one selection head: its `select` best, best first, into `best`; the others
 * are folded at c + 2, if there is such a chunk. */
static __global__ void __launch_bounds__(THREADS) rank_kernel(const sti_cuda_train p)
{
    float *score = block_memory(); /* [span] */
    const int c = (int)blockIdx.x, sel = (int)blockIdx.y, b = (int)blockIdx.z;
    const int first = c * p.span, n = span_end(p, c) - first;
    const bool leaves = c + 2 < p.spans;
    for (int i = (int)threadIdx.x; leaves && i < n; i += THREADS) {
        double sum = 0;
        for (int h = sel * p.per_sel; h < (sel + 1) * p.per_sel; h++)
            sum += (double)p.score_head[row_at(p, p.H, b, h, first + i)] / p.per_sel;
        score[i] = (float)sum;
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < n; i += THREADS) {
        int rank = 0;
        for (int j = 0; leaves && j < n; j++) rank += better(score[j], j, score[i], i);
        const bool stays = !leaves || rank < p.select;
        p.fold[token_at(p, p.S, b, sel, first + i)] = stays ? -1 : c + 2;
        if (leaves && stays)
            p.best[span_at(p, b, sel, c) * p.select + rank] =
                sti_train_entry{score[i], first + i};
    }
}

/* Entries of a list, best first, that go before x. */
STI_DEVICE int count_better(const sti_train_entry *list, int n, sti_train_entry x)
{
    int low = 0, high = n;
    while (low < high) {
        const int i = (low + high) / 2;
        if (better(list[i].score, list[i].token, x.score, x.token))
            low = i + 1;
        else
            high = i;
    }
    return low;
}

/* One selection head, chunk after chunk: the place of an entry in the merged list is
 * its place in its own plus the number of better ones in the other. */
static __global__ void __launch_bounds__(2 * THREADS)
    merge_kernel(const sti_cuda_train p, int in_shared)
{
    const int sel = (int)blockIdx.x, b = (int)blockIdx.y;
    sti_train_entry *fresh = (sti_train_entry *)block_memory(); /* [select] */
    sti_train_entry *now =
        in_shared ? fresh + p.select : p.kept + ((size_t)b * p.S + sel) * 2 * p.room;
    sti_train_entry *next = now + p.room;
    int kept = 0;
    for (int c = 0; c + 2 < p.spans; c++) {
        const sti_train_entry *best = p.best + span_at(p, b, sel, c) * p.select;
        for (int i = (int)threadIdx.x; i < p.select; i += (int)blockDim.x)
            fresh[i] = best[i];
        __syncthreads();
        for (int i = (int)threadIdx.x; i < kept + p.select; i += (int)blockDim.x) {
            const bool old = i < kept;
            const sti_train_entry x = old ? now[i] : fresh[i - kept];
            const int to = old ? i + count_better(fresh, p.select, x)
                               : i - kept + count_better(now, kept, x);
            if (to < p.cap)
                next[to] = x;
            else
                p.fold[token_at(p, p.S, b, sel, x.token)] = c + 2;
        }
        kept = min(kept + p.select, p.cap);
        __syncthreads();
        sti_train_entry *swap = now;
        now = next;
        next = swap;
    }
}

bool sti_train_evicts(const sti_cuda_train *p)
{
    return p->cap >= 0 && p->spans > 2 && (int64_t)p->select * (p->spans - 2) > p->cap;
}

size_t sti_train_choose_shared(const sti_cuda_train *p)
{
    return ((size_t)p->select + 2 * (size_t)p->room) * sizeof(sti_train_entry);
}

still_status sti_train_choose(sti_dev *dev, const sti_cuda_train *p, still_error *err)
{
    const char *what = "hybrid training: choice of salient tokens";
    STI_TRY(launch(dev, what, err, rank_kernel, dim3(p->spans, p->S, p->B), THREADS,
                   (size_t)p->span * sizeof(float), *p));
    if (!sti_train_evicts(p)) return STILL_OK;
    const bool in_shared = p->kept == NULL;
    return launch(dev, what, err, merge_kernel, dim3(p->S, p->B), 2 * THREADS,
                  in_shared ? sti_train_choose_shared(p)
                            : (size_t)p->select * sizeof(sti_train_entry),
                  *p, (int)in_shared);
}
