/* hybrid_output_hopper.cu - hybrid_output.cu on Hopper's own matrix instructions
 * (sm_90a), for heads of 128 dims and chunks of 64 or 128; the arithmetic and its order
 * are explained there.
 *
 * Bounded by tensor cores. A job is the 128 queries of a chunk and head, or, with
 * chunks of 64, of two heads that share keys. Everything it multiplies by is a tile of
 * 128 rows of 128 halves: maps W, means of features of u, of -u, then keys K and values
 * V in the order in which they are used, K0, K1 V0, K2 V1, ... Blocks stay for many
 * jobs: one warpgroup fetches, tiles of the next job follow those of this one through
 * the same ring, so that two warpgroups of 64 queries each always find something to
 * multiply:
 *   warps 0..3, 4..7   multiply
 *   warps 8, 9         copy tiles to the ring, gathering rows
 *   warps 10, 11       queries of the next job as halves, z, and what else is to know
 * They wait for each other at barriers in shared memory: one for "is there" and one for
 * "is done with", of each place in the ring and of each of two places for jobs. */
#include "backend/cuda/hybrid_tile.cuh"
#include "backend/cuda/wgmma.cuh"

namespace
{

enum { DIMS = 128, WORDS = DIMS / 8, TILE_ROWS = 128, FEATURES = 2 * DIMS };
enum { WARPS = 12, MULTIPLYING = 8, COPYING = 2, FETCHING = 2 };
enum { RING = 5, JOBS = 2 };
static_assert(FETCHING * 32 * 4 == FEATURES, "a thread fetches four numbers of z");

/* What a job's threads know of it; its queries lie elsewhere. */
struct job {
    tile_place place;
    head_terms terms[2]; /* of its heads */
    alignas(16) float z[FEATURES];
};

/* Shared memory, after the tiles of the ring and the queries. */
struct notes {
    job jobs[JOBS];
    float waiting[TILE_ROWS]; /* phi(q).z while the linear term waits in y */
    uint64_t tile_here[RING], tile_done[RING], job_here[JOBS], job_done[JOBS];
};
enum { SHARED = (RING + JOBS) * TILE + sizeof(notes) };

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

typedef uint32_t weights[TILE_ROWS / 16][4]; /* halves, ready to multiply */

/* Where in a ring of N places we are: the round is known by its last bit. */
template <int N> struct walk {
    int at;
    uint32_t round;
    __device__ __forceinline__ void next()
    {
        if (++at < N) return;
        at = 0;
        round ^= 1;
    }
};

/* A thread's view of the block. */
struct room {
    uint32_t tiles, queries; /* addresses in shared memory */
    unsigned char *bytes;
    notes *n;
    walk<RING> tile;
    walk<JOBS> job;
};

static __device__ __forceinline__ uint32_t tile_of(const room &r)
{
    return r.tiles + (uint32_t)r.tile.at * TILE;
}

static __device__ __forceinline__ int jobs_across(const sti_chunks &c)
{
    const int per = heads_of_block(c.h);
    return c.h.S * ((c.h.group + per - 1) / per);
}

/* ---- Fetching ---------------------------------------------------------------------
 */

/* Rows of a tile: row i is number first + i of those at `rows` (of the list, if there
 * is one), at most `last`. */
struct source {
    const __half *rows;
    const int32_t *list;
    int first, last;
};

/* Half of a tile, by one of two warps; two rows at once. */
static __device__ __forceinline__ void copy_tile(room &r, const source &s)
{
    const int lane = (int)threadIdx.x & 31, half = ((int)threadIdx.x >> 5) & 1;
    const int word = lane & 15;
    const uint32_t to = tile_of(r);
    wait_for(&r.n->tile_done[r.tile.at], r.tile.round ^ 1);
#pragma unroll
    for (int part = 0; part < 2; part++) {
        const int row0 = half * 64 + part * 32;
        int from = min(s.first + row0 + lane, s.last);
        if (s.list) from = s.list[from];
#pragma unroll 8
        for (int i = 0; i < 32; i += 2) {
            const int row = i + (lane >> 4);
            const int at = __shfl_sync(0xffffffffu, from, row);
            copy_async(to + (uint32_t)word_at(row0 + row, word),
                       s.rows + (size_t)at * DIMS + word * 8);
        }
    }
    arrive_after_copies(&r.n->tile_here[r.tile.at]);
    r.tile.next();
}

/* Tiles of a job that belong to its linear term: maps, means. */
static __device__ __forceinline__ int linear_tiles(const sti_chunks &c,
                                                   const tile_place &p, bool linear)
{
    return linear ? (c.h.map_q ? p.heads : 0) + 2 : 0;
}

/* Tile n of a job, `linear` of which belong to the linear term. */
static __device__ __forceinline__ source source_of(const sti_chunks &c,
                                                   const tile_place &p, int linear,
                                                   int n)
{
    if (n < linear - 2)
        return {c.map_q + (size_t)(p.head + n) * DIMS * DIMS, NULL, 0, DIMS - 1};
    if (n < linear)
        return {c.mean + ((size_t)p.chunk * c.h.S + p.g) * (FEATURES * DIMS), NULL,
                (n - linear + 2) * DIMS, FEATURES - 1};
    n -= linear; /* K0 K1 V0 K2 V1 ... V */
    const bool values = (n > 0 && n % 2 == 0) || n == 2 * p.tiles - 1;
    const int j = values ? (n - 1) / 2 : (n + 1) / 2;
    source s = {(values ? c.v : c.k) + (size_t)p.g * c.rows * DIMS, NULL, 0, 0};
    if (j < p.window_tiles) {
        s.first = c.room + p.window + j * TILE_ROWS;
        s.last = c.room + p.end - 1;
    } else {
        s.first = (j - p.window_tiles) * TILE_ROWS;
        s.last = p.salient - 1;
        if (p.leaves > 0)
            s.list = c.salient + ((size_t)(p.leaves - 1) * c.h.S + p.g) * c.room;
    }
    return s;
}

static __device__ __forceinline__ void copy_tiles(const sti_chunks &c, room &r,
                                                  int n_jobs)
{
    const int across = jobs_across(c);
    for (int i = (int)blockIdx.x; i < n_jobs; i += (int)gridDim.x) {
        const tile_place p = place_of(c, i % across, i / across, TILE_ROWS);
        const int linear = linear_tiles(
            c, p, c.h.has_linear && folded_after(c, p.g, p.leaves) > 0);
        for (int n = 0; n < linear + 2 * p.tiles; n++)
            copy_tile(r, source_of(c, p, linear, n));
    }
}

/* The queries of a job, rows of `heads` heads one after the other. */
struct queries_of {
    int two;      /* heads, but one */
    int from, to; /* rows of a head that are in this piece */
    int base;     /* where row 0 is in q and the gate, in units of 8 floats */
};

/* Where row `row` of the tile is, in units of 8 floats; -1: not in this piece. */
static __device__ __forceinline__ int query_at(const queries_of &q, int H, int row)
{
    const int head = q.two ? row >> 6 : 0, within = q.two ? row & 63 : row;
    if (within < q.from || within >= q.to) return -1;
    return q.base + (within * H + head) * WORDS;
}

/* The line at p will be needed soon. */
static __device__ __forceinline__ void expect(const float *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

static __device__ __forceinline__ void fetch_jobs(const sti_chunks &c, room &r, int n_jobs)
{
    enum { THREADS_HERE = FETCHING * 32, STEP = THREADS_HERE / WORDS, AHEAD = 4 };
    const int tid = (int)threadIdx.x - (WARPS - FETCHING) * 32;
    const int word = tid % WORDS, row0 = tid / WORDS;
    const int across = jobs_across(c);
    const bool gated = c.h.gate && c.s.gate && c.h.has_linear;
    for (int i = (int)blockIdx.x; i < n_jobs; i += (int)gridDim.x) {
        job &to = r.n->jobs[r.job.at];
        unsigned char *tile = r.bytes + (RING + r.job.at) * TILE;
        wait_for(&r.n->job_done[r.job.at], r.job.round ^ 1);
        queries_of of;
        {
            const tile_place p = place_of(c, i % across, i / across, TILE_ROWS);
            if (tid == 0) to.place = p;
            if (tid < p.heads) to.terms[tid] = terms_of(c, p.g, p.leaves, p.head + tid);
            if (c.h.has_linear)
                ((float4 *)to.z)[tid] =
                    ((const float4 *)(c.z + ((size_t)p.chunk * c.h.S + p.g) *
                                                FEATURES))[tid];
            of.two = p.heads - 1;
            of.from = p.begin - p.first;
            of.to = min(p.rows, p.end - p.first);
            of.base = ((p.first - p.begin) * c.h.H + p.head) * WORDS + word;
        }
#pragma unroll 1
        for (int row = row0; gated && row < TILE_ROWS; row += STEP) {
            const int at = query_at(of, c.h.H, row);
            if (at >= 0 && word % 4 == 0) expect(c.s.gate + (size_t)at * 8);
        }
#pragma unroll 1
        for (int row = row0; row < TILE_ROWS; row += AHEAD * STEP) {
            float4 x[AHEAD][2];
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                const int at = query_at(of, c.h.H, row + k * STEP);
                x[k][0] = x[k][1] = make_float4(0, 0, 0, 0);
                if (at < 0) continue;
                const float4 *q = (const float4 *)c.s.q + (size_t)at * 2;
                x[k][0] = q[0];
                x[k][1] = q[1];
            }
#pragma unroll
            for (int k = 0; k < AHEAD; k++)
                *(uint4 *)(tile + word_at(row + k * STEP, word)) =
                    pack_half8(x[k][0], x[k][1]);
        }
        publish();
        arrive(&r.n->job_here[r.job.at]);
        r.job.next();
    }
}

/* ---- Multiplying ------------------------------------------------------------------
 */

/* The tile at the ring's place is here; returns its address. */
static __device__ __forceinline__ uint32_t wait_tile(const room &r)
{
    wait_for(&r.n->tile_here[r.tile.at], r.tile.round);
    publish(); /* copies were ordinary writes */
    return tile_of(r);
}
/* This warp is done with it: its products are waited for. */
static __device__ __forceinline__ void leave_tile(room &r, int at)
{
    __syncwarp();
    if ((threadIdx.x & 31) == 0) arrive(&r.n->tile_done[at]);
}
static __device__ __forceinline__ void skip_tile(room &r)
{
    wait_for(&r.n->tile_here[r.tile.at], r.tile.round);
    leave_tile(r, r.tile.at);
    r.tile.next();
}

/* Queues s = Q K^T. A step is 16 dims, 32 bytes. */
static __device__ __forceinline__ void multiply_keys(fragment &s, uint32_t queries,
                                                     uint32_t keys)
{
#pragma unroll
    for (int k = 0; k < DIMS / 16; k++) {
        const uint32_t at = (uint32_t)(k / 4 * PANEL + k % 4 * 32);
        queue_keys(s, matrix_at(queries + at), matrix_at(keys + at), k > 0);
    }
    products_commit();
}

/* Queues u = Q W. A step is 16 rows of W, 2048 bytes. */
static __device__ __forceinline__ void multiply_map(fragment &u, uint32_t queries,
                                                    uint32_t w)
{
#pragma unroll
    for (int k = 0; k < DIMS / 16; k++) {
        const uint32_t at = (uint32_t)(k / 4 * PANEL + k % 4 * 32);
        queue_map(u, matrix_at(queries + at), matrix_at(w + (uint32_t)k * 2048), k > 0);
    }
    products_commit();
}

/* Queues o += P V. A step is 16 rows of V. */
static __device__ __forceinline__ void multiply_values(fragment &o, const weights &p,
                                                       uint32_t values)
{
#pragma unroll
    for (int k = 0; k < TILE_ROWS / 16; k++)
        queue_values(o, p[k], matrix_at(values + (uint32_t)k * 2048));
    products_commit();
}

/* A warpgroup's share of a job: 64 rows. Of a lane: rows h = 0, 1. */
struct share {
    int row;           /* of the tile: this lane's row 0, the other is 8 later */
    int first;         /* token row of the warp's first query */
    int head;          /* of the job's heads */
    bool idle;         /* no query is wanted */
    float top[2];      /* running maximum of logits, in powers of two */
    float den[2];      /* this lane's part of the denominator */
    uint32_t queries;  /* address of the warpgroup's rows */
    unsigned char *q;  /* the tile of queries */
};

static __device__ __forceinline__ share share_of(const tile_place &p)
{
    share s;
    const int warp = (int)threadIdx.x >> 5, group = warp >> 2;
    s.row = warp * 16 + (((int)threadIdx.x & 31) >> 2);
    s.head = p.heads > 1 || p.rows <= 64 ? group : 0;
    const int within = s.head == 0 ? warp * 16 : warp % 4 * 16;
    s.first = p.first + within;
    const int begin = p.first + (within & ~63), end = min(p.first + p.rows, p.end);
    s.idle = s.head >= p.heads || begin >= end || begin + 64 <= p.begin;
    return s;
}

/* Token row of row h of this lane. */
static __device__ __forceinline__ int token_of(const share &s, int h)
{
    return s.first + 8 * h + (((int)threadIdx.x & 31) >> 2);
}

/* ---- The linear term ----------------------------------------------------------------
 */

/* Exponentials are kept in half times 2^14. */
static const float feature_unit_log2 = 14;

/* Without a map u is q. */
static __device__ __forceinline__ void same_queries(fragment &u, const share &s)
{
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int n = 0; n < DIMS / 8; n++) {
            const float2 x = unpack_half2(*(
                const uint32_t *)(s.q + word_at(s.row + 8 * h, n) +
                                  ((int)threadIdx.x & 3) * 4));
            u[4 * n + 2 * h] = x.x;
            u[4 * n + 2 * h + 1] = x.y;
        }
}

/* |q|^2 of row h. */
static __device__ __forceinline__ float norm_of(const share &s, int h)
{
    float sum = 0;
#pragma unroll
    for (int i = 0; i < WORDS / 4; i++) {
        const int word = 4 * i + ((int)threadIdx.x & 3);
        const uint4 x = *(const uint4 *)(s.q + word_at(s.row + 8 * h, word));
        const float2 a = unpack_half2(x.x), b = unpack_half2(x.y);
        const float2 c = unpack_half2(x.z), d = unpack_half2(x.w);
        sum += (a.x * a.x + a.y * a.y) + (b.x * b.x + b.y * b.y) +
               (c.x * c.x + c.y * c.y) + (d.x * d.x + d.y * d.y);
    }
    return quad_sum(sum);
}

/* Row h of this lane: u becomes weights a = phi z, those of u in `up`, of -u in `down`;
 * see weigh in hybrid_linear.cuh. Returns the lane's part of sum a. */
static __device__ __forceinline__ float weigh_features(const sti_cuda_shape &shape,
                                                       fragment &u, weights &up,
                                                       weights &down, int h,
                                                       const share &s, const float *z)
{
    float uu = 0, top = -INFINITY, bottom = INFINITY;
#pragma unroll
    for (int n = 0; n < DIMS / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float x = u[4 * n + 2 * h + e];
            uu += x * x;
            top = fmaxf(top, x);
            bottom = fminf(bottom, x);
        }
    float scale = log2_e;
    if (shape.norm_preserved)
        scale *= sqrtf(norm_of(s, h)) / fmaxf(sqrtf(quad_sum(uu)), 1e-6f);
    top = quad_max(top) * scale - feature_unit_log2;
    bottom = -quad_max(-bottom) * scale + feature_unit_log2;
    float sum_up = 0, sum_down = 0;
#pragma unroll
    for (int n = 0; n < DIMS / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float &x = u[4 * n + 2 * h + e];
            const float l = x * scale;
            const float a = exp2_fast(l - top), b = exp2_fast(bottom - l);
            sum_up += a;
            sum_down += b;
            x = __uint_as_float(pack_half2(a, b));
        }
    const float part_up = 1.0f / quad_sum(sum_up);
    const float part_down = 1.0f / quad_sum(sum_down), floor = shape.feature_floor;
    const float *z_here = z + ((int)threadIdx.x & 3) * 2;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < DIMS / 8; n++) {
        const float2 x = unpack_half2(__float_as_uint(u[4 * n + 2 * h]));
        const float2 y = unpack_half2(__float_as_uint(u[4 * n + 2 * h + 1]));
        const float2 z_up = *(const float2 *)(z_here + n * 8);
        const float2 z_down = *(const float2 *)(z_here + DIMS + n * 8);
        const uint32_t a = pack_half2(fmaxf(x.x * part_up, floor) * z_up.x,
                                      fmaxf(y.x * part_up, floor) * z_up.y);
        const uint32_t b = pack_half2(fmaxf(x.y * part_down, floor) * z_down.x,
                                      fmaxf(y.y * part_down, floor) * z_down.y);
        const float2 a2 = unpack_half2(a), b2 = unpack_half2(b);
        sum += (a2.x + a2.y) + (b2.x + b2.y);
        up[n / 2][n % 2 * 2 + h] = a;
        down[n / 2][n % 2 * 2 + h] = b;
    }
    return sum;
}

/* Element offset of column 0 of row h of this lane in q, y and gate, or false. */
static __device__ __forceinline__ bool output_at(const sti_chunks &c,
                                                 const tile_place &p, const share &s,
                                                 int h, size_t *at)
{
    const int t = token_of(s, h);
    *at = ((size_t)(t - p.begin) * c.h.H + p.head + s.head) * DIMS +
          ((int)threadIdx.x & 3) * 2;
    return wanted(p, t);
}

/* Gates of this lane's outputs. */
static __device__ __forceinline__ void load_gates(fragment &gate, const sti_chunks &c,
                                                  const tile_place &p, const share &s)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        size_t at;
        const bool there = output_at(c, p, s, h, &at);
#pragma unroll
        for (int n = 0; n < DIMS / 8; n++) {
            float2 g = make_float2(0, 0);
            if (there) g = *(const float2 *)(c.s.gate + at + n * 8);
            gate[4 * n + 2 * h] = g.x;
            gate[4 * n + 2 * h + 1] = g.y;
        }
    }
}

/* o = phi(q) s, gated, s.den = parts of phi(q).z: where the softmax sums start. With
 * terms apart they are put away, in y and notes.waiting, and the sums start at nothing.
 */
static __device__ __forceinline__ void linear_sums(const sti_chunks &c, const job &b,
                                                   room &r, share &s, fragment &o,
                                                   fragment &u)
{
    weights up, down;
    const head_terms &terms = b.terms[s.head];
    if (c.h.map_q) {
        for (int n = 0; n < s.head; n++) skip_tile(r);
        const uint32_t w = wait_tile(r);
        pin(u);
        products_begin();
        multiply_map(u, s.queries, w);
        products_wait<0>();
        pin(u);
        leave_tile(r, r.tile.at);
        r.tile.next();
        for (int n = s.head + 1; n < b.place.heads; n++) skip_tile(r);
    } else {
        same_queries(u, s);
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
        s.den[h] = weigh_features(c.h, u, up, down, h, s, b.z);

#pragma unroll
    for (int i = 0; i < 64; i++) o[i] = 0;
    const int first = r.tile.at;
    uint32_t mean = wait_tile(r);
    pin(o);
    products_begin();
    multiply_values(o, up, mean);
    r.tile.next();
    const int second = r.tile.at;
    mean = wait_tile(r);
    products_begin();
    multiply_values(o, down, mean);
    r.tile.next();
    const bool gated = c.h.gate && c.s.gate;
    if (gated) load_gates(u, c, b.place, s);
    products_wait<0>();
    pin(o);
    leave_tile(r, first);
    leave_tile(r, second);

    const float weight = terms.apart ? exp2_fast(fminf(terms.alpha, 0)) : 1;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float den = s.den[h] * terms.unit, all = quad_sum(den) * weight;
        s.top[h] = terms.apart ? -INFINITY : terms.alpha;
        s.den[h] = terms.apart ? 0 : den;
        if (terms.apart && (threadIdx.x & 3) == 0) r.n->waiting[s.row + 8 * h] = all;
    }
    const float unit = terms.unit * weight;
#pragma unroll
    for (int i = 0; i < 64; i++)
        o[i] *= gated ? unit * __fdividef(2, 1 + __expf(-u[i])) : unit;
    if (!terms.apart) return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        size_t at;
        const bool there = output_at(c, b.place, s, h, &at);
#pragma unroll
        for (int n = 0; n < DIMS / 8; n++) {
            float &x = o[4 * n + 2 * h], &y = o[4 * n + 2 * h + 1];
            if (there) *(float2 *)(c.s.y + at + n * 8) = make_float2(x, y);
            x = y = 0;
        }
    }
}

/* ---- Window and list ----------------------------------------------------------------
 */

/* Hides keys of tile j that a row does not see. */
static __device__ __forceinline__ void mask(fragment &x, const tile_place &p,
                                            const share &s, int j)
{
    const bool listed = j >= p.window_tiles;
    const int key = p.window + j * TILE_ROWS; /* of a window's tile */
    const int left = p.salient - (j - p.window_tiles) * TILE_ROWS;
    if (listed ? left >= TILE_ROWS : key + TILE_ROWS - 1 <= s.first) return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int end =
            (listed ? left : token_of(s, h) - key + 1) - ((int)threadIdx.x & 3) * 2;
#pragma unroll
        for (int n = 0; n < TILE_ROWS / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (n * 8 + e >= end) x[4 * n + 2 * h + e] = -INFINITY;
    }
}

/* x becomes weights 2^(x scale - top + factor); sums so far are to be multiplied by
 * keep. */
static __device__ __forceinline__ void soften(fragment &x, share &s, float (&keep)[2],
                                              float scale, float factor)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = -INFINITY, sum = 0;
#pragma unroll
        for (int n = 0; n < TILE_ROWS / 8; n++)
            top = fmaxf(top, fmaxf(x[4 * n + 2 * h], x[4 * n + 2 * h + 1]));
        top = fmaxf(s.top[h], quad_max(top) * scale);
        keep[h] = exp2_fast(s.top[h] - top);
        s.top[h] = top;
        const float shift = factor - top;
#pragma unroll
        for (int n = 0; n < TILE_ROWS / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &y = x[4 * n + 2 * h + e];
                y = exp2_fast(fmaf(y, scale, shift));
                sum += y;
            }
        s.den[h] = s.den[h] * keep[h] + sum;
    }
}

static __device__ __forceinline__ void pack_weights(weights &p, const fragment &x)
{
#pragma unroll
    for (int k = 0; k < TILE_ROWS / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            p[k][i] = pack_half2(x[8 * k + 2 * i], x[8 * k + 2 * i + 1]);
}

static __device__ __forceinline__ void scale_sums(fragment &o, const float (&keep)[2])
{
    if (!__any_sync(0xffffffffu, keep[0] != 1 || keep[1] != 1)) return;
#pragma unroll
    for (int i = 0; i < 64; i++) o[i] *= keep[i / 2 % 2];
}

static __device__ __forceinline__ void softmax_sums(const sti_chunks &c, const job &b,
                                                    room &r, share &s, fragment &o,
                                                    fragment &x)
{
    const tile_place &p = b.place;
    const float scale = c.h.scale * log2_e, factor = b.terms[s.head].factor;
    const int tiles = p.tiles;
    weights w;
    float keep[2];
    uint32_t keys = wait_tile(r);
    pin(x);
    products_begin();
    multiply_keys(x, s.queries, keys);
    products_wait<0>();
    pin(x);
    leave_tile(r, r.tile.at);
    r.tile.next();
    mask(x, p, s, 0);
    soften(x, s, keep, scale, factor);
    scale_sums(o, keep);
    pack_weights(w, x);
    for (int j = 0; j + 1 < tiles; j++) {
        const int key_place = r.tile.at;
        keys = wait_tile(r);
        pin(x);
        pin(o);
        products_begin();
        multiply_keys(x, s.queries, keys);
        r.tile.next();
        const int value_place = r.tile.at;
        const uint32_t values = wait_tile(r);
        products_begin();
        multiply_values(o, w, values);
        r.tile.next();
        products_wait<1>();
        pin(x);
        leave_tile(r, key_place);
        mask(x, p, s, j + 1);
        soften(x, s, keep, scale, factor);
        products_wait<0>();
        pin(o);
        leave_tile(r, value_place);
        scale_sums(o, keep);
        pack_weights(w, x);
    }
    const uint32_t values = wait_tile(r);
    pin(o);
    products_begin();
    multiply_values(o, w, values);
    products_wait<0>();
    pin(o);
    leave_tile(r, r.tile.at);
    r.tile.next();
}

static __device__ __forceinline__ void store_output(const sti_chunks &c, const job &b,
                                                    const share &s, const fragment &o,
                                                    const float *waiting)
{
    const head_terms &terms = b.terms[s.head];
    const bool apart = terms.apart;
    const float keep = apart ? exp2_fast(-fmaxf(terms.alpha, 0)) : 1;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float den = quad_sum(s.den[h]) * keep + c.h.den_eps;
        if (apart) den += waiting[s.row + 8 * h];
        const float part = 1 / fmaxf(den, 1.17549435e-38f);
        size_t at;
        if (!output_at(c, b.place, s, h, &at)) continue;
#pragma unroll
        for (int n = 0; n < DIMS / 8; n++) {
            float2 *to = (float2 *)(c.s.y + at + n * 8);
            const float2 was = apart ? *to : make_float2(0, 0);
            *to = make_float2((o[4 * n + 2 * h] * keep + was.x) * part,
                              (o[4 * n + 2 * h + 1] * keep + was.y) * part);
        }
    }
}

static __device__ __forceinline__ void multiply_job(const sti_chunks &c, room &r)
{
    const job &b = r.n->jobs[r.job.at];
    wait_for(&r.n->job_here[r.job.at], r.job.round);
    const tile_place &p = b.place;
    share s = share_of(p);
    s.queries = r.queries + (uint32_t)r.job.at * TILE + (threadIdx.x >> 7) * 64 * 128;
    s.q = r.bytes + (RING + r.job.at) * TILE;
    const bool linear = c.h.has_linear && b.terms[0].linear;
    if (s.idle) {
        for (int n = linear_tiles(c, p, linear) + 2 * p.tiles; n > 0; n--) skip_tile(r);
    } else {
        fragment o, x;
#pragma unroll
        for (int i = 0; i < 64; i++) o[i] = x[i] = 0;
        s.top[0] = s.top[1] = -INFINITY;
        s.den[0] = s.den[1] = 0;
        if (linear) linear_sums(c, b, r, s, o, x);
        softmax_sums(c, b, r, s, o, x);
        store_output(c, b, s, o, r.n->waiting);
    }
    __syncwarp();
    if ((threadIdx.x & 31) == 0) arrive(&r.n->job_done[r.job.at]);
}

/* ---- Kernel -----------------------------------------------------------------------
 */

static __device__ __forceinline__ void begin_barriers(notes *n)
{
    for (int i = 0; i < RING; i++) {
        begin_barrier(&n->tile_here[i], COPYING * 32);
        begin_barrier(&n->tile_done[i], MULTIPLYING);
    }
    for (int i = 0; i < JOBS; i++) {
        begin_barrier(&n->job_here[i], FETCHING * 32);
        begin_barrier(&n->job_done[i], MULTIPLYING);
    }
}

static __device__ __forceinline__ void run_jobs(const sti_chunks &c,
                                                unsigned char *shared, int n_jobs)
{
    room r;
    r.tiles = shared_address(shared);
    r.queries = r.tiles + RING * TILE;
    r.bytes = shared;
    r.n = (notes *)(shared + (RING + JOBS) * TILE);
    r.tile = {0, 0};
    r.job = {0, 0};
    if (threadIdx.x == 0) begin_barriers(r.n);
    __syncthreads();
    if (threadIdx.x >= MULTIPLYING * 32) {
        give_registers<56>();
        if (threadIdx.x < (MULTIPLYING + COPYING) * 32)
            copy_tiles(c, r, n_jobs);
        else
            fetch_jobs(c, r, n_jobs);
    } else {
        take_registers<224>();
        for (int i = (int)blockIdx.x; i < n_jobs; i += (int)gridDim.x) {
            multiply_job(c, r);
            r.job.next();
        }
    }
}

#endif

__global__ void __launch_bounds__(WARPS * 32, 1)
    output_hopper(const __grid_constant__ sti_chunks c, int n_jobs)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    run_jobs(c, shared, n_jobs);
#else
    __trap(); /* not launched: sti_chunks_output_hopper_runs */
#endif
}

} // namespace

extern "C" bool sti_chunks_output_hopper_runs(const sti_chunks *c)
{
    struct cudaFuncAttributes f;
    return c->major == 9 && c->h.D == DIMS && (c->h.C == 64 || c->h.C == 128) &&
           cudaFuncGetAttributes(&f, output_hopper) == cudaSuccess &&
           f.ptxVersion >= 90;
}

extern "C" still_status sti_chunks_output_hopper(cudaStream_t stream,
                                                 const sti_chunks *c, still_error *err)
{
    const int per = heads_of_block(c->h);
    const int jobs = c->h.S * ((c->h.group + per - 1) / per) * c->n_chunks;
    const unsigned blocks = (unsigned)(jobs < c->sms ? jobs : c->sms);
    STI_CUDA(cudaFuncSetAttribute(output_hopper,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED),
             "hybrid attention, output");
    output_hopper<<<blocks, WARPS * 32, SHARED, stream>>>(*c, jobs);
    STI_CUDA(cudaGetLastError(), "hybrid attention, output");
    return STILL_OK;
}
