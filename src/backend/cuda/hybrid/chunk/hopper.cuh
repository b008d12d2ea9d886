/* hopper.cuh - blocks of the output kernel on Hopper (output_hopper.cu): how jobs,
 * tiles and queries get to the warps that multiply. */
#ifndef STI_BACKEND_CUDA_HYBRID_CHUNK_HOPPER_CUH
#define STI_BACKEND_CUDA_HYBRID_CHUNK_HOPPER_CUH

#include "backend/cuda/hybrid/chunk/tile.cuh"
#include "backend/cuda/ptx/mbarrier.cuh"
#include "backend/cuda/ptx/wgmma.cuh"

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
static_assert(SHARED <= 232448, "what a block can have");

/* Jobs of a piece: jobs_across for each chunk. */
static __host__ __device__ __forceinline__ int jobs_across(const sti_chunk_piece &c)
{
    const int per = heads_of_block(c.h);
    return c.h.S * ((c.h.group + per - 1) / per);
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Those of a block: first, first + step, ... below n. With one piece they are what the
 * launch says, and cost no registers. */
template <bool ONE> struct job_list {
    int block, blocks, n;
    __device__ __forceinline__ int first() const
    {
        return ONE ? (int)blockIdx.x : block;
    }
    __device__ __forceinline__ int step() const
    {
        return ONE ? (int)gridDim.x : blocks;
    }
};

typedef uint32_t weights[TILE_ROWS / 16][4]; /* halves, ready to multiply */

/* Where in a ring of N places we are: the round is known by its last bit. */
template <int N> struct ring_place {
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
struct block_view {
    uint32_t tiles, queries; /* addresses in shared memory */
    unsigned char *bytes;
    notes *n;
    ring_place<RING> tile;
    ring_place<JOBS> job;
};

static __device__ __forceinline__ uint32_t tile_of(const block_view &r)
{
    return r.tiles + (uint32_t)r.tile.at * TILE;
}

/* ---- Fetching ------------------------------------------------------------ */

/* Rows of a tile: row i is number first + i of those at `rows` (of the list, if there
 * is one), at most `last`. */
struct source {
    const __half *rows;
    const int32_t *list;
    int first, last;
};

/* The same for one of the two warps that copy, which takes half of a tile. */
struct half_source {
    const __half *rows; /* this lane's words of row 0 */
    bool apart;         /* rows do not simply follow each other */
    uint32_t at[2];     /* byte offset of row 32 i + lane, or [0]: of the first row */
};

static __device__ __forceinline__ half_source look_up(const source &s)
{
    const int lane = (int)threadIdx.x & 31, half = ((int)threadIdx.x >> 5) & 1;
    half_source y;
    y.rows = s.rows + (lane & 15) * 8;
    y.apart = s.list || s.first + TILE_ROWS - 1 > s.last;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = s.first + half * 64 + (y.apart ? i * 32 + lane : lane >> 4);
        if (y.apart) row = min(row, s.last);
        if (s.list) row = __ldg(s.list + row);
        y.at[i] = (uint32_t)row * (DIMS * 2); /* a piece has fewer than 2^16 rows */
    }
    return y;
}

/* Where a lane's words go in a tile, the halves of the warp taking rows by turns: those
 * of row 2 i + lane / 16, i < 4. The pattern repeats every 8 rows. */
struct word_places {
    uint32_t at[4];
};

static __device__ __forceinline__ word_places places_of_words()
{
    const int lane = (int)threadIdx.x & 31, half = ((int)threadIdx.x >> 5) & 1;
    word_places y;
#pragma unroll
    for (int i = 0; i < 4; i++)
        y.at[i] = (uint32_t)word_at(half * 64 + 2 * i + (lane >> 4), lane & 15);
    return y;
}

static __device__ __forceinline__ void copy_half(block_view &r, const half_source &s,
                                                 const word_places &places)
{
    const int odd = ((int)threadIdx.x >> 4) & 1;
    const uint32_t tile = tile_of(r);
    const char *rows = (const char *)s.rows;
    uint32_t to[4];
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = tile + places.at[i];
    mbarrier_wait(&r.n->tile_done[r.tile.at], r.tile.round ^ 1);
    if (s.apart) {
#pragma unroll
        for (int row = 0; row < 64; row += 16) {
            uint32_t from[8]; /* looked up together: one takes as long as all */
#pragma unroll
            for (int i = 0; i < 8; i++)
                from[i] =
                    __shfl_sync(0xffffffffu, s.at[row / 32], row % 32 + 2 * i + odd);
#pragma unroll
            for (int i = 0; i < 8; i++)
                cp_async16(to[i % 4] + (uint32_t)((row + i / 4 * 8) * 128),
                           rows + from[i]);
        }
    } else {
        rows += s.at[0];
#pragma unroll
        for (int row = 0; row < 64; row += 2)
            cp_async16(to[row / 2 % 4] + (uint32_t)(row / 8 * 8 * 128),
                       rows + row * DIMS * 2);
    }
    mbarrier_arrive_cp_async(&r.n->tile_here[r.tile.at]);
    r.tile.next();
}

/* Tiles of a job that belong to its linear term: maps, means. */
static __device__ __forceinline__ int linear_tiles(const sti_chunk_piece &c,
                                                   const tile_place &p, bool linear)
{
    return linear ? (c.h.map_q ? p.heads : 0) + 2 : 0;
}

/* Tile n of a job, `linear` of which belong to the linear term. */
static __device__ __forceinline__ source source_of(const sti_chunk_piece &c,
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
        s.first = c.capacity + p.window + j * TILE_ROWS;
        s.last = c.capacity + p.end - 1;
    } else {
        s.first = (j - p.window_tiles) * TILE_ROWS;
        s.last = p.salient - 1;
        if (p.retired > 0)
            s.list = c.salient + ((size_t)(p.retired - 1) * c.h.S + p.g) * c.capacity;
    }
    return s;
}

template <bool ONE>
static __device__ __forceinline__ void
copy_tiles(const sti_chunk_piece &c, block_view &r, const job_list<ONE> &jobs)
{
    const int across = jobs_across(c);
    const word_places places = places_of_words();
    for (int i = jobs.first(); i < jobs.n; i += jobs.step()) {
        const tile_place p = place_of(c, i % across, i / across, TILE_ROWS);
        const int linear =
            linear_tiles(c, p, c.h.has_linear && folded_after(c, p.g, p.retired) > 0);
        const int tiles = linear + 2 * p.tiles;
        half_source next = look_up(source_of(c, p, linear, 0));
#pragma unroll 1
        for (int n = 0; n < tiles; n++) {
            const half_source s = next; /* the list is read one tile ahead */
            if (n + 1 < tiles) next = look_up(source_of(c, p, linear, n + 1));
            copy_half(r, s, places);
        }
    }
}

/* The queries of a job, rows of `heads` heads one after the other. */
struct queries_of {
    int two;      /* heads, but one */
    int from, to; /* rows of a head that are in this piece */
    int base;     /* where row 0 is in q and the gate, in units of 8 floats */
};

static __device__ __forceinline__ queries_of queries_at(const sti_chunk_piece &c,
                                                        const tile_place &p)
{
    return {p.heads - 1, p.begin - p.first, min(p.rows, p.end - p.first),
            ((p.first - p.begin) * c.h.H + p.head) * WORDS};
}

/* Where row `row` of the tile is, in units of 8 floats; -1: not in this piece. */
static __device__ __forceinline__ int query_at(const queries_of &q, int H, int row)
{
    const int head = q.two ? row >> 6 : 0, within = q.two ? row & 63 : row;
    if (within < q.from || within >= q.to) return -1;
    return q.base + (within * H + head) * WORDS;
}

/* Rows of queries or gates to the second-level cache, by the warps that fetch: a lane
 * takes lines of 32 floats. */
static __device__ __forceinline__ void
prefetch_rows(const float *from, const queries_of &q, int H, int tid)
{
    enum { LINES = DIMS / 32 };
#pragma unroll 1
    for (int row = tid / LINES; row < TILE_ROWS; row += FETCHING * 32 / LINES) {
        const int at = query_at(q, H, row);
        if (at >= 0) prefetch_l2(from + (size_t)at * 8 + tid % LINES * 32);
    }
}

template <bool ONE>
static __device__ __forceinline__ void
fetch_jobs(const sti_chunk_piece &c, block_view &r, const job_list<ONE> &jobs)
{
    enum { THREADS_HERE = FETCHING * 32, STEP = THREADS_HERE / WORDS, AHEAD = 4 };
    const int tid = (int)threadIdx.x - (WARPS - FETCHING) * 32;
    const int word = tid % WORDS, row0 = tid / WORDS;
    const int across = jobs_across(c);
    const bool gated = c.h.gate && c.s.gate && c.h.has_linear;
    for (int i = jobs.first(); i < jobs.n; i += jobs.step()) {
        job &to = r.n->jobs[r.job.at];
        unsigned char *tile = r.bytes + (RING + r.job.at) * TILE;
        if (i + jobs.step() < jobs.n) { /* they come from there when it is their turn */
            const int next = i + jobs.step();
            const tile_place p = place_of(c, next % across, next / across, TILE_ROWS);
            prefetch_rows(c.s.q, queries_at(c, p), c.h.H, tid);
        }
        mbarrier_wait(&r.n->job_done[r.job.at], r.job.round ^ 1);
        queries_of of;
        {
            const tile_place p = place_of(c, i % across, i / across, TILE_ROWS);
            if (tid == 0) to.place = p;
            if (tid < p.heads)
                to.terms[tid] = terms_of(c, p.g, p.retired, p.head + tid);
            if (c.h.has_linear)
                ((float4 *)to.z)[tid] =
                    ((const float4 *)(c.z +
                                      ((size_t)p.chunk * c.h.S + p.g) * FEATURES))[tid];
            of = queries_at(c, p);
        }
        if (gated) prefetch_rows(c.s.gate, of, c.h.H, tid);
        of.base += word;
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
        fence_proxy_async();
        mbarrier_arrive(&r.n->job_here[r.job.at]);
        r.job.next();
    }
}

/* ---- Taking tiles -------------------------------------------------------- */

/* The tile at the ring's place is here; returns its address. */
static __device__ __forceinline__ uint32_t wait_tile(const block_view &r)
{
    mbarrier_wait(&r.n->tile_here[r.tile.at], r.tile.round);
    fence_proxy_async(); /* copies were ordinary writes */
    return tile_of(r);
}
/* This warp is done with it: its products are waited for. */
static __device__ __forceinline__ void release_tile(block_view &r, int at)
{
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(&r.n->tile_done[at]);
}
static __device__ __forceinline__ void skip_tile(block_view &r)
{
    mbarrier_wait(&r.n->tile_here[r.tile.at], r.tile.round);
    release_tile(r, r.tile.at);
    r.tile.next();
}

#endif

} // namespace

#endif
