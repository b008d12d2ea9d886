/* score.cu - scores of all tokens of whole sequences, head by head.
 *
 * Those made of logits take 64 queries of heads that share keys against those keys.
 * Logits are products of split halves: scores that differ must not change places.
 *
 * Bounded by latency: the whole takes 6 C D operations a query. */
#include "backend/cuda/hybrid/score.cuh"
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
    while (p->per_kv % n != 0) n--;
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
    const float *from = x + token_at(p, heads, b, head, first) * p.D;
    const int rows = end - first, step = heads * p.D;
    for (int i0 = thread; i0 < ALL; i0 += BATCH * threads) {
        float4 part[BATCH];
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
            const int i = i0 + n * threads, r = i / UNITS;
            part[n] = load4(r < rows && i < ALL ? from + r * step : (const float *)NULL,
                            i % UNITS * 4, p.D, p.vec);
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
        load_rows<DP>(p, heads + (step & 1), p.k, p.G, b, h / p.per_kv, k0, end,
                      (int)opaque(threadIdx.x), (int)blockDim.x);
    };
    const uint32_t memory = shared_address(block_memory());
    const uint32_t queries = memory + (uint32_t)mine * pair_bytes<DP>();

    const int top_row = first + at.warp * 16; /* of the warp */
    const float scale = p.scale * log2_e;
    row_sums x[2] = {{-INFINITY, 0, 0}, {-INFINITY, 0, 0}};
    int k0 = back > 0 ? back : 0;
    load_keys(0, k0);
    load_rows<DP>(p, mine, p.q, p.H, b, h, first, end, (int)threadIdx.x % THREADS,
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
        const size_t to = row_at(p, p.H, b, h, t);
        if (RECEIVED) {
            p.row_max[to] = x[r].top;
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
    received_kernel(const sti_hybrid_train p)
{
    const lane_place at = lane_place_of();
    const int b = (int)blockIdx.z, h = (int)blockIdx.y;
    const int c = (int)blockIdx.x / p.tiles;
    const int first = c * p.span + (int)blockIdx.x % p.tiles * ROWS;
    const int end = min(first + ROWS, span_end(p, c));
    if (first >= end) return;
    const int last = span_end(p, min(c + 1, p.spans - 1)); /* of the queries */
    load_rows<DP>(p, 0, p.k, p.G, b, h / p.per_kv, first, end, (int)threadIdx.x,
                  THREADS);
    const uint32_t keys = shared_address(block_memory());

    const int row = first + at.warp * 16 + at.g;
    const float scale = p.scale * log2_e;
    float sum[2] = {0, 0};
    for (int q0 = first; q0 < last; q0 += ROWS) {
        __syncthreads();
        load_rows<DP>(p, 1, p.q, p.H, b, h, q0, last, (int)threadIdx.x, THREADS);
        tiles_arrive();
        float s[8][4];
        begin_split_nt<DP>(s, keys, keys + pair_bytes<DP>(), at);
        wait_products<DP>(s);
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

/* Scores that need no logits; as in ops/score.c. */
static __global__ void __launch_bounds__(THREADS) plain_kernel(const sti_hybrid_train p)
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
        score = random_score(p.seed, p.layer, h, t);
    }
    p.score_head[row_at(p, p.H, b, h, t)] = score;
}

/* A chunk of a kv head; all its query heads score alike. */
static __global__ void __launch_bounds__(THREADS)
    distinct_kernel(const sti_hybrid_train p)
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

still_status sti_hybrid_train_scores(sti_dev *dev, const sti_hybrid_train *p,
                                     still_error *err)
{
    const char *what = "hybrid training: scores";
    const dim3 tiles(p->spans * p->tiles, p->H, p->B);
    if (p->score == STI_SCORE_KEYNORM || p->score == STI_SCORE_RANDOM)
        return launch(dev, what, err, plain_kernel,
                      dim3((p->T - 1) / THREADS + 1, p->H, p->B), THREADS, 0, *p);
    if (p->score == STI_SCORE_DISTINCT)
        return launch(dev, what, err, distinct_kernel, dim3(p->spans, p->G, p->B),
                      THREADS, 0, *p);
#define SCORE_BY(W, RECEIVED)                                                          \
    launch(dev, what, err, score_kernel<W, RECEIVED>,                                  \
           dim3(tiles.x, p->H / score_heads<W>(p), p->B), THREADS *score_heads<W>(p),  \
           (score_heads<W>(p) + 2) * pair_bytes<W>(), *p)
#define SCORE(W) SCORE_BY(W, false)
#define STATS(W) SCORE_BY(W, true)
#define RECEIVE(W)                                                                     \
    launch(dev, what, err, received_kernel<W>, tiles, THREADS, 2 * pair_bytes<W>(), *p)
    if (p->score == STI_SCORE_S3) return STI_HYBRID_TRAIN_BY_WIDTH(p->DP, SCORE);
    STI_TRY(STI_HYBRID_TRAIN_BY_WIDTH(p->DP, STATS));
    return STI_HYBRID_TRAIN_BY_WIDTH(p->DP, RECEIVE);
}
