/* score.cu - scores of all tokens of whole sequences, head by head (STILL eq. 2 to 5;
 * other scores: score.h).
 *
 * Those made of logits take 64 queries of heads that share keys against those keys.
 * Logits are products of split halves: scores that differ must not change places.
 *
 * Bounded by latency: the whole takes 6 C D operations a query. */
#include "backend/cuda/hybrid/score.h"
#include "backend/cuda/hybrid/train/product.cuh"

/* Tiles come in pairs of [64][DP] halves, high and low parts of what is split. */
template <int DP> static __host__ __device__ constexpr int pair_bytes(void)
{
    return 2 * ROWS * DP * (int)sizeof(uint16_t);
}

/* Query heads of a block of the scores: 4 warps each, and they share keys. Their pairs
 * of tiles and two of keys are at most 96 KB. */
enum { SCORE_HEADS = 3 };
template <int DP> static int score_heads(const sti_hybrid_train *p)
{
    int n = DP == 64 ? SCORE_HEADS : 1;
    while (p->h.per_kv % n != 0) n--;
    return n;
}

/* Columns e .. e + 3 of row r, x = high + low, into a pair of tiles. */
template <int DP>
STI_DEVICE void write_split(unsigned char *pair, int r, int e, float4 x)
{
    const uint2 h = make_uint2(pack_half2(half_range(x.x), half_range(x.y)),
                               pack_half2(half_range(x.z), half_range(x.w)));
    const float2 a = unpack_half2(h.x), b = unpack_half2(h.y);
    unsigned char *to = pair + unit_at<DP>(r, e / 8) + e % 8 * 2;
    *(uint2 *)to = h;
    *(uint2 *)(to + pair_bytes<DP>() / 2) =
        make_uint2(pack_half2(x.x - a.x, x.y - a.y), pack_half2(x.z - b.x, x.w - b.y));
}

/* Rows [first, first + 64) of q or k before `end`, split, into pair `to`, by `threads`
 * threads of which this is number `thread`. */
template <int DP>
STI_DEVICE void load_rows(const sti_hybrid_train &p, int to, const float *x, int heads,
                          int b, int head, int first, int end, int thread, int threads)
{
    constexpr int UNITS = DP / 4, ALL = ROWS * UNITS;
    constexpr int BATCH = 2; /* are read before one is written */
    unsigned char *pair = (unsigned char *)block_memory() + to * pair_bytes<DP>();
    const float *from = x + token_at(p, heads, b, head, first) * p.h.D;
    const int rows = end - first, step = heads * p.h.D;
    for (int i0 = thread; i0 < ALL; i0 += BATCH * threads) {
        float4 part[BATCH];
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
            const int i = i0 + n * threads, r = i / UNITS;
            part[n] = load4(r < rows && i < ALL ? from + r * step : (const float *)NULL,
                            i % UNITS * 4, p.h.D, p.vec);
        }
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
            const int i = i0 + n * threads;
            if (i < ALL) write_split<DP>(pair, i / UNITS, i % UNITS * 4, part[n]);
        }
    }
}

/* A row's largest logit, times log2 e, and its sums of weights relative to that, over
 * this lane's keys. */
typedef struct row_sums {
    float top, others, self;
} row_sums;

/* Logits s of 64 keys from k0 on join the sums of row t, elements 2 r and 2 r + 1 of
 * C's tiles. Those before `from` and after t are not seen. */
STI_DEVICE void join_some(float (&s)[8][4], int r, int k0, int from, int t, float scale,
                          const lane_place &at, row_sums *x)
{
    float most = x->top;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int j = k0 + i / 2 * 8 + 2 * at.t + i % 2;
        float *l = &s[i / 2][2 * r + i % 2];
        *l = j >= from && j <= t ? *l * scale : -INFINITY;
        most = fmaxf(most, *l);
    }
    most = quad_max(most);
    if (most == -INFINITY) return; /* a row past the end: all lanes agree */
    const float keep = exp2_fast(x->top - most);
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
    x->others = x->others * keep + sum;
    x->self = x->self * keep + own;
    x->top = most;
}

/* The same where all keys are seen and none is the row's own. */
STI_DEVICE void join_all(const float (&s)[8][4], int r, float scale, row_sums *x)
{
    float most = -INFINITY, sum = 0;
#pragma unroll
    for (int n = 0; n < 8; n++) most = fmaxf(most, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
    most = fmaxf(x->top, quad_max(most) * scale);
    const float keep = exp2_fast(x->top - most);
#pragma unroll
    for (int i = 0; i < 16; i++)
        sum += exp2_fast(fmaf(s[i / 2][2 * r + i % 2], scale, -most));
    x->others = x->others * keep + sum;
    x->self *= keep;
    x->top = most;
}

/* Softmax of 64 queries over a window: the last C tokens, and the score of the weight a
 * token gives itself; or, if RECEIVED, the chunk before and the own one, and its
 * maximum and sum. Four warps to a head; all split the keys, a tile ahead. */
template <int DP, bool RECEIVED>
static __global__ void __launch_bounds__(DP == 64 ? SCORE_HEADS * THREADS : THREADS, 2)
    score_kernel(const sti_hybrid_train p)
{
    const int heads = (int)blockDim.x / THREADS, mine = (int)threadIdx.x / THREADS;
    lane_place at = lane_place_of();
    at.warp %= 4;
    const int b = (int)blockIdx.z, h = (int)blockIdx.y * heads + mine;
    const int c = (int)blockIdx.x / p.tiles;
    const int first = c * p.span + (int)blockIdx.x % p.tiles * ROWS;
    const int end = min(first + ROWS, span_end(p, c));
    if (first >= end) return;
    const int back = RECEIVED ? (c > 0 ? c - 1 : 0) * p.span : first - p.span + 1;
    const auto load_keys = [&](int step, int k0) {
        load_rows<DP>(p, heads + (step & 1), p.k, p.h.G, b, h / p.h.per_kv, k0, end,
                      (int)opaque(threadIdx.x), (int)blockDim.x);
    };
    const uint32_t memory = shared_address(block_memory());
    const uint32_t queries = memory + (uint32_t)mine * pair_bytes<DP>();

    const int top_row = first + at.warp * 16; /* of the warp */
    const float scale = p.h.scale * log2_e;
    row_sums x[2] = {{-INFINITY, 0, 0}, {-INFINITY, 0, 0}};
    int k0 = back > 0 ? back : 0;
    load_keys(0, k0);
    load_rows<DP>(p, mine, p.q, p.h.H, b, h, first, end, (int)threadIdx.x % THREADS,
                  THREADS);
    for (int step = 0; k0 < end; step++, k0 += ROWS) {
        tiles_arrive(); /* this step is here, and all are done with the one before */
        if (k0 + ROWS < end) load_keys(step + 1, k0 + ROWS);
        float s[8][4];
        begin_split_nt<DP>(
            s, queries, memory + (uint32_t)(heads + (step & 1)) * pair_bytes<DP>(), at);
        wait_products<DP>(s);
        const bool all =
            k0 + ROWS <= top_row && (RECEIVED || k0 >= top_row + 16 - p.span);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int t = top_row + at.g + 8 * r;
            const int from = RECEIVED ? 0 : t - p.span + 1;
            if (all)
                join_all(s, r, scale, &x[r]);
            else
                join_some(s, r, k0, from, t, scale, at, &x[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int t = top_row + at.g + 8 * r;
        const float rest = quad_sum(x[r].others), own = quad_sum(x[r].self);
        if (t >= end || at.t != 0) continue;
        const size_t to = row_at(p, p.h.H, b, h, t);
        if (RECEIVED) {
            p.row_max[to] = x[r].top;
            p.row_sum[to] = rest + own;
        } else {
            p.score_head[to] = self_score(p.h.score, own, rest, p.h.eps);
        }
    }
}

/* Mean weight that 64 keys of chunk c receive from later queries of that chunk and the
 * next: keys are rows, queries columns. */
template <int DP>
static __global__ void __launch_bounds__(THREADS)
    received_kernel(const sti_hybrid_train p)
{
    const lane_place at = lane_place_of();
    const int b = (int)blockIdx.z, h = (int)blockIdx.y;
    const int c = (int)blockIdx.x / p.tiles;
    const int first = c * p.span + (int)blockIdx.x % p.tiles * ROWS;
    const int end = min(first + ROWS, span_end(p, c));
    if (first >= end) return;
    const int last = span_end(p, min(c + 1, p.spans - 1)); /* of the queries */
    load_rows<DP>(p, 0, p.k, p.h.G, b, h / p.h.per_kv, first, end, (int)threadIdx.x,
                  THREADS);
    const uint32_t keys = shared_address(block_memory());

    const int row = first + at.warp * 16 + at.g;
    const float scale = p.h.scale * log2_e;
    float sum[2] = {0, 0};
    for (int q0 = first; q0 < last; q0 += ROWS) {
        __syncthreads();
        load_rows<DP>(p, 1, p.q, p.h.H, b, h, q0, last, (int)threadIdx.x, THREADS);
        tiles_arrive();
        float s[8][4];
        begin_split_nt<DP>(s, keys, keys + pair_bytes<DP>(), at);
        wait_products<DP>(s);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int t = q0 + i / 2 * 8 + 2 * at.t + i % 2;
            if (t >= last) continue;
            const size_t stat = row_at(p, p.h.H, b, h, t);
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
            p.score_head[row_at(p, p.h.H, b, h, j)] =
                all / fmaxf((float)(last - 1 - j), 1);
    }
}

/* Scores that need no logits; as in ops/score.c. */
static __global__ void __launch_bounds__(THREADS) plain_kernel(const sti_hybrid_train p)
{
    const int t = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    const int h = (int)blockIdx.y, b = (int)blockIdx.z;
    if (t >= p.T) return;
    float score = 0;
    if (sti_score_from(p.h.score, STI_FROM_KEY)) {
        const float *k = p.k + token_at(p, p.h.G, b, h / p.h.per_kv, t) * p.h.D;
        double square = 0;
        for (int e = 0; e < p.h.D; e++) square += (double)k[e] * k[e];
        score = key_score(p.h.score, square);
    } else {
        score = position_score(p.h.score, p.h.seed, p.h.layer, h, t);
    }
    p.score_head[row_at(p, p.h.H, b, h, t)] = score;
}

/* A chunk of a kv head; all its query heads score alike. */
static __global__ void __launch_bounds__(THREADS)
    distinct_kernel(const sti_hybrid_train p)
{
    __shared__ float mean[STI_HEAD_DIM_MAX];
    const int c = (int)blockIdx.x, g = (int)blockIdx.y, b = (int)blockIdx.z;
    const int first = c * p.span;
    chunk_scores<THREADS / 32>(
        p.h.score, span_end(p, c) - first, p.h.D, first, mean,
        [&](int i, int d) {
            return p.k[token_at(p, p.h.G, b, g, first + i) * p.h.D + d];
        },
        [&](int i, float x) {
            for (int h = g * p.h.per_kv; h < (g + 1) * p.h.per_kv; h++)
                p.score_head[row_at(p, p.h.H, b, h, first + i)] = x;
        });
}

still_status sti_hybrid_train_scores(sti_dev *dev, const sti_hybrid_train *p,
                                     still_error *err)
{
    const char *what = "hybrid training: scores";
    const dim3 tiles(p->spans * p->tiles, p->h.H, p->B);
    const auto of_logits = [&](auto W, auto RECEIVED) {
        const int heads = score_heads<W>(p);
        return launch(dev, what, err, score_kernel<W, RECEIVED>,
                      dim3(tiles.x, p->h.H / heads, p->B), THREADS * heads,
                      (heads + 2) * pair_bytes<W>(), *p);
    };
    switch (sti_score_source_of(p->h.score)) {
    case STI_FROM_SELF:
        return by_width(p, [&](auto W) { return of_logits(W, std::false_type()); });
    case STI_FROM_QUERIES:
        STI_TRY(by_width(p, [&](auto W) { return of_logits(W, std::true_type()); }));
        return by_width(p, [&](auto W) {
            return launch(dev, what, err, received_kernel<W>, tiles, THREADS,
                          2 * pair_bytes<W>(), *p);
        });
    case STI_FROM_KEY:
    case STI_FROM_POSITION:
        return launch(dev, what, err, plain_kernel,
                      dim3((p->T - 1) / THREADS + 1, p->h.H, p->B), THREADS, 0, *p);
    case STI_FROM_CHUNK:
        return launch(dev, what, err, distinct_kernel, dim3(p->spans, p->h.G, p->B),
                      THREADS, 0, *p);
    default: return sti_cuda_score_check((sti_score_kind)p->h.score, err);
    }
}
