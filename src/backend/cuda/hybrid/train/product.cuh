/* product.cuh - products of a block's tiles of halves, 64 rows each, by its four warps.
 *
 * A tile of 64 columns lies in shared memory as Hopper's own matrix instructions want
 * it. Where those are (sm_90a) the four warps multiply together: a tile is read once
 * for all of them, and in the background. Elsewhere, and for wider tiles, each warp
 * multiplies its own 16 rows. Either way a lane has of C what lane_place says.
 *
 * In the names n stands for a tile as it is, t for one that is transposed, r for a
 * matrix in registers. */
#ifndef STI_BACKEND_CUDA_HYBRID_TRAIN_PRODUCT_CUH
#define STI_BACKEND_CUDA_HYBRID_TRAIN_PRODUCT_CUH

#include "backend/cuda/hybrid/train/tile.cuh"
#include "backend/cuda/ptx/wgmma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int W> static __host__ __device__ constexpr bool together(void)
{
    return W == 64;
}
#else
template <int W> static __host__ __device__ constexpr bool together(void)
{
    return false;
}
#endif

/* What this thread has written or begun to copy to shared memory, and after the barrier
 * what all have, can be multiplied. */
STI_DEVICE void tiles_arrive(void)
{
    cp_async_wait<0>();
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    fence_proxy_async();
#endif
    __syncthreads();
}

/* Products into c that were begun are there. */
template <int W, int N> STI_DEVICE void wait_products(float (&c)[N][4])
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (together<W>()) {
        wgmma_wait<0>();
        pin(c);
    }
#endif
}

/* Begins C = A B^T: tiles A [64][W], B [8 N][W]. */
template <int W, int N>
STI_DEVICE void begin_nt(float (&c)[N][4], uint32_t A, uint32_t B, const lane_place &at)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (together<W>()) {
        static_assert(N == 8, "a whole tile");
        undefined_sums(c);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) /* 16 columns are 32 bytes */
            wgmma_nt(c, wgmma_descriptor(A + 32 * k), wgmma_descriptor(B + 32 * k),
                     k > 0);
        wgmma_commit();
        return;
    }
#endif
    clear_tiles(c);
    half_nt<N, W>(c, lane_address<W>::by16(A + at.warp * 16 * W * 2, at.lane).opaque(),
                  lane_address<W>::by8(B, at.lane).opaque());
}

/* Begins C = A B^T, nearly in float32, of tiles split into high and low parts, each
 * pair one behind the other: high high + high low + low high. */
template <int W>
STI_DEVICE void begin_split_nt(float (&c)[8][4], uint32_t A, uint32_t B,
                               const lane_place &at)
{
    constexpr uint32_t LOW = ROWS * W * 2;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (together<W>()) {
        A = opaque(A), B = opaque(B);
        undefined_sums(c);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint64_t a = wgmma_descriptor(A + 32 * k),
                           b = wgmma_descriptor(B + 32 * k);
            wgmma_nt(c, a, wgmma_descriptor(B + LOW + 32 * k), k > 0);
            wgmma_nt(c, wgmma_descriptor(A + LOW + 32 * k), b, 1);
            wgmma_nt(c, a, b, 1);
        }
        wgmma_commit();
        return;
    }
#endif
    const lane_address<W> a =
        lane_address<W>::by16(A + at.warp * 16 * W * 2, at.lane).opaque();
    const lane_address<W> b = lane_address<W>::by8(B, at.lane).opaque();
    clear_tiles(c);
#pragma unroll 2 /* of 4 or 8 steps: more would only take registers */
    for (int k = 0; k < W / 16; k++) {
        uint32_t high[4], low[4], x[4];
        ldmatrix_x4(high, a.at(0, k));
        ldmatrix_x4(low, a.at(0, k) + LOW);
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            ldmatrix_x4(x, b.at(8 * n, k) + LOW);
            mma(c[n], high, x[0], x[1]);
            mma(c[n + 1], high, x[2], x[3]);
            ldmatrix_x4(x, b.at(8 * n, k));
            mma(c[n], low, x[0], x[1]);
            mma(c[n + 1], low, x[2], x[3]);
            mma(c[n], high, x[0], x[1]);
            mma(c[n + 1], high, x[2], x[3]);
        }
    }
}

/* Begins C += A B: tiles A [64][64], B [64][W]. */
template <int W>
STI_DEVICE void begin_nn(float (&c)[W / 8][4], uint32_t A, uint32_t B,
                         const lane_place &at)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (together<W>()) {
        pin(c);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) /* 16 rows are 2048 bytes */
            wgmma_nn(c, wgmma_descriptor(A + 32 * k), wgmma_descriptor(B + 2048 * k),
                     1);
        wgmma_commit();
        return;
    }
#endif
    const lane_address<64> a =
        lane_address<64>::by16(A + at.warp * 16 * 64 * 2, at.lane).opaque();
    const lane_address<W> b = lane_address<W>::by16(B, at.lane).opaque();
#pragma unroll 1 /* more steps at once would only take registers */
    for (int k = 0; k < 4; k++) {
        uint32_t x[4], y[4];
        ldmatrix_x4(x, a.at(0, k));
#pragma unroll
        for (int n = 0; n < W / 8; n += 2) {
            ldmatrix_x4_trans(y, b.at(16 * k, n / 2));
            mma(c[n], x, y[0], y[1]);
            mma(c[n + 1], x, y[2], y[3]);
        }
    }
}

/* C += A B: A in registers as K tiles of C, rounded here; rows of B [8 K][W]. Done when
 * it returns, and so is all that was begun before. */
template <int W, int K>
STI_DEVICE void multiply_rn(float (&c)[W / 8][4], const float (&A)[K][4], uint32_t B,
                            const lane_place &at)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if constexpr (together<W>()) {
        uint32_t a[K / 2][4];
#pragma unroll
        for (int k = 0; k < K; k++) {
            a[k / 2][k % 2 * 2] = pack_half2(A[k][0], A[k][1]);
            a[k / 2][k % 2 * 2 + 1] = pack_half2(A[k][2], A[k][3]);
        }
        pin(a);
        pin(c);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < K / 2; k++)
            wgmma_rn(c, a[k], wgmma_descriptor(B + 2048 * k));
        wgmma_commit();
        wgmma_wait<0>();
        pin(a); /* not given away before */
        pin(c);
        return;
    }
#endif
    half_rn<W / 8, K, W>(c, A, lane_address<W>::by16(B, at.lane).opaque());
}

/* ---- Keys of a list ------------------------------------------------------ */

/* Entries [first, first + 64) of a span's list of `keys` softmax keys and their values,
 * on their way into two tiles; past its end the last one comes again. base: the row of
 * the kv head's token 0. */
template <int DP>
STI_DEVICE void copy_list(const sti_hybrid_train &p, size_t base, size_t span,
                          int n_salient, int start, int keys, int first, uint32_t k,
                          uint32_t v)
{
    constexpr int UNITS = DP / 8, STRIDE = THREADS / UNITS, N = ROWS / STRIDE;
    const int row = (int)threadIdx.x / UNITS, u = (int)threadIdx.x % UNITS;
    int token[N]; /* all are read before the first is used */
#pragma unroll
    for (int i = 0; i < N; i++)
        token[i] = key_token(p, span, n_salient, start,
                             min(first + row + i * STRIDE, keys - 1));
#pragma unroll
    for (int i = 0; i < N; i++) {
        size_t from = (base + token[i]) * DP + u * 8;
        if (first + row + i * STRIDE < n_salient) from += p.half_stored;
        const uint32_t to = unit_at<DP>(row + i * STRIDE, u);
        cp_async16(k + to, p.half_k + from);
        cp_async16(v + to, p.half_v + from);
    }
}

/* Logits of queries (rows) and keys of a list that they do not see: row g sees the keys
 * before `limit`, row g + 8 eight more. */
template <int N> STI_DEVICE void mask(float (&s)[N][4], int limit, const lane_place &at)
{
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (8 * n + 2 * at.t + i % 2 >= limit + i / 2 * 8) s[n][i] = -INFINITY;
}

#endif
