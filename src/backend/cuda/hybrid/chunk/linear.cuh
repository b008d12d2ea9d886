/* linear.cuh - the linear term (STILL eq. 7; LA of eq. 11) of a block of the output
 * kernel (output.cu).
 *
 * With means s / z (state.cu) it is softmax-like, weights a_p = phi_p(q) z_p and values
 * mean_p:
 *   phi(q) s = sum_p a_p mean_p,   phi(q).z = sum_p a_p.
 * u = q W stays in registers; weights of u become A fragments there, weights of -u take
 * the place of W in shared memory. */
#ifndef STI_BACKEND_CUDA_HYBRID_CHUNK_LINEAR_CUH
#define STI_BACKEND_CUDA_HYBRID_CHUNK_LINEAR_CUH

#include "backend/cuda/hybrid/chunk/tile.cuh"
#include "backend/cuda/hybrid/chunk/weigh.cuh"

/* u = q W of 32 rows, and |q|^2 of this lane's rows, in parts of a quad. */
template <int D>
static __device__ __forceinline__ void map_queries(float (&u)[2][D / 8][4],
                                                   float (&qq)[4], lane_address<D> q,
                                                   lane_address<D> w)
{
#pragma unroll
    for (int mt = 0; mt < 2; mt++)
#pragma unroll
        for (int nt = 0; nt < D / 8; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) u[mt][nt][e] = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) qq[i] = 0;
#pragma unroll 1
    for (int ks = 0; ks < D / 16; ks++) {
        uint32_t a[2][4];
#pragma unroll
        for (int mt = 0; mt < 2; mt++) {
            ldmatrix_x4(a[mt], q.at(mt * 16, ks));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 x = unpack_half2(a[mt][i]);
                qq[2 * mt + (i & 1)] += x.x * x.x + x.y * x.y;
            }
        }
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, w.at(ks * 16, n));
#pragma unroll
            for (int mt = 0; mt < 2; mt++) {
                mma(u[mt][2 * n], a[mt], b[0], b[1]);
                mma(u[mt][2 * n + 1], a[mt], b[2], b[3]);
            }
        }
    }
}

/* Without a map u is q. */
template <int D>
static __device__ __forceinline__ void
same_queries(float (&u)[2][D / 8][4], float (&qq)[4], const unsigned char *tile,
             int row, int lane)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        qq[i] = 0;
#pragma unroll
        for (int nt = 0; nt < D / 8; nt++) {
            const uint32_t at =
                unit_at<D>(row + lane_row(i, lane), nt) + (lane & 3) * 4;
            const float2 x = unpack_half2(*(const uint32_t *)(tile + at));
            u[i >> 1][nt][(i & 1) * 2] = x.x;
            u[i >> 1][nt][(i & 1) * 2 + 1] = x.y;
            qq[i] += x.x * x.x + x.y * x.y;
        }
    }
}

/* Row i of this lane: u becomes weights a = phi z (weigh_row), those of u in C
 * fragments `up`, packed; those of -u in row `row` of the tile `down`. */
template <int D>
static __device__ __forceinline__ float
weigh(const sti_cuda_hybrid_params &h, float (&u)[2][D / 8][4],
      uint32_t (&up)[2][D / 8][2], int i, float qq, const float *z, unsigned char *down,
      int row, int lane)
{
    const int mt = i >> 1, e = (i & 1) * 2, t = lane & 3;
    return weigh_row<D>(
        h, z + t * 2, [&](int n, int x) -> float & { return u[mt][n][e + x]; },
        [&]() { return quad_sum(qq); },
        [&](int n, uint32_t a, uint32_t b) {
            up[mt][n][i & 1] = a;
            *(uint32_t *)(down + unit_at<D>(row, n) + t * 4) = b;
        });
}

/* o += weights of 64 features times their means, a tile [64, D]; K-step ks of the
 * weights is a(ks). */
template <int D>
static __device__ __forceinline__ void add_means(float (&o)[2][D / 8][4],
                                                 const uint32_t (&a)[2][4],
                                                 lane_address<D> mean, int ks)
{
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, mean.at(ks * 16, n));
#pragma unroll
        for (int mt = 0; mt < 2; mt++) {
            mma(o[mt][2 * n], a[mt], b[0], b[1]);
            mma(o[mt][2 * n + 1], a[mt], b[2], b[3]);
        }
    }
}

/* STILL eq. 7; eq. 11, LA: w.o = phi(q) s, w.den = parts of phi(q).z, both times
 * state_scale. All threads of the block come here. buffers: four of [64, D]. */
template <int D>
static __device__ __forceinline__ void
linear_sums(const sti_chunk_piece &c, const tile_place &p, const warp_place &place,
            unsigned char *queries, unsigned char *buffers, const float *z,
            warp_sums<D> &w)
{
    enum { BUFFER = KEYS * D * 2, TILES = 2 * D / KEYS };
    const int warp = (int)threadIdx.x >> 5, lane = (int)threadIdx.x & 31;
    const uint32_t low = shared_address(buffers), high = low + 2 * BUFFER;
    const lane_address<D> q = lane_address<D>::by16(
        shared_address(queries) + (uint32_t)warp * 32 * D * 2, lane);
    const lane_address<D> down =
        lane_address<D>::by16(low + (uint32_t)warp * 32 * D * 2, lane);
    const __half *means = c.mean + ((size_t)p.chunk * c.h.S + p.g) * (2 * D * D);

    load_rows<D>(high, means, 2 * KEYS);
    float u[2][D / 8][4], qq[4];
    if (c.h.map_q) {
        for (int n = 0; n < p.heads; n++) {
            load_rows<D>(low, c.map_q + (size_t)(p.head + n) * D * D, D);
            cp_async_commit();
            cp_async_wait<0>();
            __syncthreads();
            if (n == place.head && !place.idle)
                map_queries<D>(u, qq, q, lane_address<D>::by16(low, lane));
            __syncthreads();
        }
    } else {
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        if (!place.idle) same_queries<D>(u, qq, queries, warp * 32, lane);
    }
    uint32_t up[2][D / 8][2];
    if (!place.idle) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            w.den[i] = weigh<D>(c.h, u, up, i, qq[i], z, buffers,
                                warp * 32 + lane_row(i, lane), lane);
    }
#pragma unroll
    for (int mt = 0; mt < 2; mt++)
#pragma unroll
        for (int nt = 0; nt < D / 8; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) w.o[mt][nt][e] = 0;
    __syncwarp();
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        if (tile >= 2) { /* at most one more is on its way */
            if (tile + 1 < TILES)
                cp_async_wait<1>();
            else
                cp_async_wait<0>();
            __syncthreads();
        }
        const lane_address<D> mean =
            lane_address<D>::by16(high + (uint32_t)(tile & 1) * BUFFER, lane);
        if (!place.idle) {
#pragma unroll
            for (int ks = 0; ks < KEYS / 16; ks++) {
                const int k = tile * (KEYS / 16) + ks; /* 16 features from 16 k on */
                uint32_t a[2][4];
#pragma unroll
                for (int mt = 0; mt < 2; mt++) {
                    if (k < D / 16) {
                        a[mt][0] = up[mt][2 * (k % (D / 16))][0];
                        a[mt][1] = up[mt][2 * (k % (D / 16))][1];
                        a[mt][2] = up[mt][2 * (k % (D / 16)) + 1][0];
                        a[mt][3] = up[mt][2 * (k % (D / 16)) + 1][1];
                    } else {
                        ldmatrix_x4(a[mt], down.at(mt * 16, k - D / 16));
                    }
                }
                add_means<D>(w.o, a, mean, ks);
            }
        }
        __syncthreads(); /* the buffer is read: the next may come */
        if (tile + 2 < TILES) {
            load_rows<D>(high + (uint32_t)(tile & 1) * BUFFER,
                         means + (size_t)(tile + 2) * KEYS * D, KEYS);
            cp_async_commit();
        }
    }
}

#endif
