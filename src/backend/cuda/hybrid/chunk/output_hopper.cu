/* output_hopper.cu - output.cu (STILL eq. 7, 10, 11) on Hopper's own matrix
 * instructions (sm_90a), for heads of 128 dims and chunks of 64 or 128, with positions
 * as they are; the arithmetic and its order are explained there.
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
 *   warps 10, 11       fetch the next job: its queries as halves, z, where it is
 * Barriers in shared memory synchronize them: one for "is there" and one for "is done
 * with", of each place in the ring and of each of two places for jobs. */
#include <type_traits>

#include "backend/cuda/hybrid/chunk/hopper_linear.cuh"

namespace
{

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* ---- Window and list ----------------------------------------------------- */

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

/* STILL eq. 11, SA. */
static __device__ __forceinline__ void softmax_sums(const sti_chunk_piece &c,
                                                    const job &b, block_view &r,
                                                    share &s, fragment &o, fragment &x)
{
    const tile_place &p = b.place;
    const float scale = c.h.scale * log2_e, factor = b.terms[s.head].factor;
    const int tiles = p.tiles;
    weights w;
    float keep[2];
    uint32_t keys = wait_tile(r);
    pin(x);
    wgmma_fence();
    multiply_keys(x, s.queries, keys);
    wgmma_wait<0>();
    pin(x);
    release_tile(r, r.tile.at);
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
        wgmma_fence();
        multiply_keys(x, s.queries, keys);
        r.tile.next();
        const int value_place = r.tile.at;
        const uint32_t values = wait_tile(r);
        wgmma_fence();
        multiply_values(o, w, values);
        r.tile.next();
        wgmma_wait<1>();
        pin(x);
        release_tile(r, key_place);
        mask(x, p, s, j + 1);
        soften(x, s, keep, scale, factor);
        wgmma_wait<0>();
        pin(o);
        release_tile(r, value_place);
        scale_sums(o, keep);
        pack_weights(w, x);
    }
    const uint32_t values = wait_tile(r);
    pin(o);
    wgmma_fence();
    multiply_values(o, w, values);
    wgmma_wait<0>();
    pin(o);
    release_tile(r, r.tile.at);
    r.tile.next();
}

/* STILL eq. 10, the sum of eq. 1. */
static __device__ __forceinline__ void store_output(const sti_chunk_piece &c,
                                                    const job &b, const share &s,
                                                    const fragment &o,
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
        if (apart) {
#pragma unroll
            for (int n = 0; n < DIMS / 8; n++) {
                float2 *to = (float2 *)(c.s.y + at + n * 8);
                const float2 was = *to;
                *to = make_float2((o[4 * n + 2 * h] * keep + was.x) * part,
                                  (o[4 * n + 2 * h + 1] * keep + was.y) * part);
            }
        } else {
#pragma unroll
            for (int n = 0; n < DIMS / 8; n++)
                *(float2 *)(c.s.y + at + n * 8) =
                    make_float2(o[4 * n + 2 * h] * part, o[4 * n + 2 * h + 1] * part);
        }
    }
}

static __device__ __forceinline__ void multiply_job(const sti_chunk_piece &c,
                                                    block_view &r)
{
    const job &b = r.n->jobs[r.job.at];
    mbarrier_wait(&r.n->job_here[r.job.at], r.job.round);
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
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(&r.n->job_done[r.job.at]);
}

/* ---- Kernel -------------------------------------------------------------- */

static __device__ __forceinline__ void begin_barriers(notes *n)
{
    for (int i = 0; i < RING; i++) {
        mbarrier_init(&n->tile_here[i], COPYING * 32);
        mbarrier_init(&n->tile_done[i], MULTIPLYING);
    }
    for (int i = 0; i < JOBS; i++) {
        mbarrier_init(&n->job_here[i], FETCHING * 32);
        mbarrier_init(&n->job_done[i], MULTIPLYING);
    }
}

template <bool ONE>
static __device__ __forceinline__ void
run_jobs(const sti_chunk_piece &c, unsigned char *shared, const job_list<ONE> &jobs)
{
    block_view r;
    r.tiles = shared_address(shared);
    r.queries = r.tiles + RING * TILE;
    r.bytes = shared;
    r.n = (notes *)(shared + (RING + JOBS) * TILE);
    r.tile = {0, 0};
    r.job = {0, 0};
    if (threadIdx.x == 0) begin_barriers(r.n);
    __syncthreads();
    if (threadIdx.x >= MULTIPLYING * 32) {
        setmaxnreg_dec<72>();
        if (threadIdx.x < (MULTIPLYING + COPYING) * 32)
            copy_tiles(c, r, jobs);
        else
            fetch_jobs(c, r, jobs);
    } else {
        setmaxnreg_inc<216>();
        for (int i = jobs.first(); i < jobs.n; i += jobs.step()) {
            multiply_job(c, r);
            r.job.next();
        }
    }
}

#endif

/* n_jobs: of the piece if it is one; of others they are counted here. */
template <class Pieces>
__global__ void __launch_bounds__(WARPS * 32, 1)
    output_hopper(const __grid_constant__ Pieces pieces, int n_jobs)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char shared[];
    int block = (int)blockIdx.x, blocks = (int)gridDim.x;
    const sti_chunk_piece &c = pieces.find(block, blocks);
    constexpr bool one = std::is_same_v<Pieces, one_piece>;
    const job_list<one> jobs = {block, blocks,
                                one ? n_jobs : jobs_across(c) * c.n_chunks};
    run_jobs(c, shared, jobs);
#else
    __trap(); /* not launched: sti_chunk_output_hopper_runs */
#endif
}

} // namespace

extern "C" bool sti_chunk_output_hopper_runs(const sti_chunk_piece *c)
{
    struct cudaFuncAttributes f;
    return c->major == 9 && !c->raw && c->h.D == DIMS &&
           (c->h.C == 64 || c->h.C == 128) &&
           cudaFuncGetAttributes(&f, output_hopper<one_piece>) == cudaSuccess &&
           f.ptxVersion >= 90;
}

extern "C" still_status sti_chunk_output_hopper(const sti_chunk_group *g,
                                                still_error *err)
{
    int jobs = 0;
    for (int i = 0; i < g->n; i++) jobs += jobs_across(g->c[i]) * g->c[i].n_chunks;
    /* A block has jobs of one piece only. One piece: as many blocks as processors.
     * Several: four times as many, since they do not have the same to do. */
    const int most = g->c->sms, each = (jobs + 4 * most - 1) / (4 * most);
    const auto blocks_of = [&](const sti_chunk_piece &c) {
        const int own = jobs_across(c) * c.n_chunks;
        return g->n > 1 ? (own + each - 1) / each : own < most ? own : most;
    };
    return launch_units(g, blocks_of, [&](unsigned blocks, const auto &pieces) {
        const auto kernel = output_hopper<std::decay_t<decltype(pieces)>>;
        STI_CUDA(cudaFuncSetAttribute(
                     kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED),
                 "hybrid attention, output");
        kernel<<<blocks, WARPS * 32, SHARED, g->stream>>>(pieces, jobs);
        STI_CUDA(cudaGetLastError(), "hybrid attention, output");
        return STILL_OK;
    });
}
