/* hopper_linear.cuh - products of a warpgroup on Hopper, and the linear term of
 * its queries: linear.cuh on wgmma. */
#ifndef STI_BACKEND_CUDA_HYBRID_CHUNK_HOPPER_LINEAR_CUH
#define STI_BACKEND_CUDA_HYBRID_CHUNK_HOPPER_LINEAR_CUH

#include "backend/cuda/hybrid/chunk/hopper.cuh"
#include "backend/cuda/hybrid/chunk/weigh.cuh"
#include "backend/cuda/ptx/reciprocal.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

namespace
{

/* ---- Products ------------------------------------------------------------ */

/* The descriptor of a matrix that all lanes of a warp name. Known to be the same, it and
 * those of the next steps stay in the registers that a warp shares: of a warp's own
 * registers each would be copied there, between the products. */
static __device__ __forceinline__ uint64_t uniform_descriptor(uint32_t at)
{
    return wgmma_descriptor(__shfl_sync(0xffffffffu, at, 0));
}
/* Of what lies `bytes` behind, a multiple of 16: addresses end below the other fields. */
static __device__ __forceinline__ uint64_t descriptor_after(uint64_t d, int bytes)
{
    return d + (uint64_t)(bytes >> 4);
}

/* Queues s = Q K^T. A step is 16 dims, 32 bytes. */
static __device__ __forceinline__ void multiply_keys(fragment &s, uint32_t queries,
                                                     uint32_t keys)
{
    const uint64_t q = uniform_descriptor(queries), t = uniform_descriptor(keys);
#pragma unroll
    for (int k = 0; k < DIMS / 16; k++) {
        const int at = k / 4 * PANEL + k % 4 * 32;
        wgmma_nt(s, descriptor_after(q, at), descriptor_after(t, at), k > 0);
    }
    wgmma_commit();
}

/* Queues u = Q W. A step is 16 rows of W, 2048 bytes. */
static __device__ __forceinline__ void multiply_map(fragment &u, uint32_t queries,
                                                    uint32_t w)
{
    const uint64_t q = uniform_descriptor(queries), t = uniform_descriptor(w);
#pragma unroll
    for (int k = 0; k < DIMS / 16; k++)
        wgmma_nn(u, descriptor_after(q, k / 4 * PANEL + k % 4 * 32),
                 descriptor_after(t, k * 2048), k > 0);
    wgmma_commit();
}

/* Queues o += P V. A step is 16 rows of V. */
static __device__ __forceinline__ void multiply_values(fragment &o, const weights &p,
                                                       uint32_t values)
{
    const uint64_t t = uniform_descriptor(values);
#pragma unroll
    for (int k = 0; k < TILE_ROWS / 16; k++)
        wgmma_rn(o, p[k], descriptor_after(t, k * 2048));
    wgmma_commit();
}

/* A warpgroup's share of a job: 64 rows. Of a lane: rows h = 0, 1. */
struct share {
    int row;          /* of the tile: this lane's row 0, the other is 8 later */
    int first;        /* token row of the warp's first query */
    int head;         /* of the job's heads */
    bool idle;        /* no query is wanted */
    float top[2];     /* running maximum of logits, in powers of two */
    float den[2];     /* this lane's part of the denominator */
    uint32_t queries; /* address of the warpgroup's rows */
    unsigned char *q; /* the tile of queries */
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

/* ---- The linear term ----------------------------------------------------- */

/* Without a map u is q. */
static __device__ __forceinline__ void same_queries(fragment &u, const share &s)
{
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
        for (int n = 0; n < DIMS / 8; n++) {
            const float2 x =
                unpack_half2(*(const uint32_t *)(s.q + word_at(s.row + 8 * h, n) +
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

/* Row h of this lane: u becomes weights a = phi z (weigh_row), those of u in `up`, of
 * -u in `down`. */
static __device__ __forceinline__ float
weigh_features(const sti_cuda_hybrid_params &params, fragment &u, weights &up,
               weights &down, int h, const share &s, const float *z)
{
    return weigh_row<DIMS>(
        params, z + ((int)threadIdx.x & 3) * 2,
        [&](int n, int e) -> float & { return u[4 * n + 2 * h + e]; },
        [&]() { return norm_of(s, h); },
        [&](int n, uint32_t a, uint32_t b) {
            up[n / 2][n % 2 * 2 + h] = a;
            down[n / 2][n % 2 * 2 + h] = b;
        });
}

/* Element offset of column 0 of row h of this lane in q, y and gate, or false. */
static __device__ __forceinline__ bool output_at(const sti_chunk_piece &c,
                                                 const tile_place &p, const share &s,
                                                 int h, size_t *at)
{
    const int t = token_of(s, h);
    *at = ((size_t)(t - p.begin) * c.h.H + p.head + s.head) * DIMS +
          ((int)threadIdx.x & 3) * 2;
    return wanted(p, t);
}

/* Gates of this lane's outputs. */
static __device__ __forceinline__ void load_gates(fragment &gate,
                                                  const sti_chunk_piece &c,
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

/* STILL eq. 7; eq. 11, LA: o = phi(q) s, gated, s.den = parts of phi(q).z: where the
 * softmax sums start. With terms apart they are put away, in y and notes.waiting, and
 * the sums start at nothing. */
static __device__ __forceinline__ void linear_sums(const sti_chunk_piece &c,
                                                   const job &b, block_view &r,
                                                   share &s, fragment &o, fragment &u)
{
    weights up, down;
    const head_terms &terms = b.terms[s.head];
    if (c.h.map_q) {
        for (int n = 0; n < s.head; n++) skip_tile(r);
        const uint32_t w = wait_tile(r);
        pin(u);
        wgmma_fence();
        multiply_map(u, s.queries, w);
        wgmma_wait<0>();
        pin(u);
        release_tile(r, r.tile.at);
        r.tile.next();
        for (int n = s.head + 1; n < b.place.heads; n++) skip_tile(r);
    } else {
        same_queries(u, s);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) s.den[h] = weigh_features(c.h, u, up, down, h, s, b.z);

#pragma unroll
    for (int i = 0; i < 64; i++) o[i] = 0;
    const int first = r.tile.at;
    uint32_t mean = wait_tile(r);
    pin(o);
    wgmma_fence();
    multiply_values(o, up, mean);
    r.tile.next();
    const int second = r.tile.at;
    mean = wait_tile(r);
    wgmma_fence();
    multiply_values(o, down, mean);
    r.tile.next();
    const bool gated = c.h.gate && c.s.gate;
    if (gated) load_gates(u, c, b.place, s);
    wgmma_wait<0>();
    pin(o);
    release_tile(r, first);
    release_tile(r, second);

    const float weight = terms.apart ? exp2_fast(fminf(terms.alpha, 0)) : 1;
    const float unit = terms.unit * weight;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float den = s.den[h] * terms.unit, all = quad_sum(den) * weight;
        s.top[h] = terms.apart ? -INFINITY : terms.alpha;
        s.den[h] = terms.apart ? 0 : den;
        if (terms.apart && (threadIdx.x & 3) == 0) r.n->waiting[s.row + 8 * h] = all;
    }
    /* A branch around each loop: around each number of one they would wait for each
     * other's exponentials. */
    if (gated) {
#pragma unroll
        for (int i = 0; i < 64; i++)
            o[i] *= 2 * unit * reciprocal_fast(1 + exp2_fast(-log2_e * u[i]));
    } else {
#pragma unroll
        for (int i = 0; i < 64; i++) o[i] *= unit;
    }
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

} // namespace

#endif

#endif
