/* gemm_tile.cuh - products of tiles of 64 columns in shared memory, as gemm.cu
 * wants them: four warps multiply 64 rows of W with BM rows of x.
 *
 * sm_90a has an instruction for all of it, which reads both tiles by itself; elsewhere
 * each warp takes 16 rows of W by mma.m16n8k16. Both leave the same sums in the same
 * lanes, and the swizzle of mma.cuh is the one of 128 bytes that wgmma knows. */
#ifndef STI_BACKEND_CUDA_DENSE_GEMM_TILE_CUH
#define STI_BACKEND_CUDA_DENSE_GEMM_TILE_CUH

#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/ptx/wgmma.cuh"

enum { STEP = 64, ROW = STEP * 2 }; /* columns of a tile; bytes of a row of one */

/* Lane 4 g + t of warp w: c[j][e] is row 16 w + g + 8 (e / 2) of W and row 8 j + 2 t +
 * e % 2 of x. */
template <int BM> struct sums {
    float c[BM / 8][4];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* s += w x^T over 16 columns. */
template <int BM>
static __device__ __forceinline__ void queue_step(sums<BM> &s, uint64_t w, uint64_t x)
{
    if constexpr (BM == 128)
        wgmma_nt(reinterpret_cast<fragment &>(s.c), w, x, 1);
    else
        wgmma_nt(s.c, w, x, 1);
}

/* The copies this thread has waited for can be multiplied after the next barrier. */
static __device__ __forceinline__ void copies_came()
{
    fence_proxy_async();
}

/* s += w x^T over a step, once end_step has been called: what lies between the two
 * overlaps with it. */
template <int BM>
static __device__ __forceinline__ void begin_step(sums<BM> &s, uint32_t w, uint32_t x)
{
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < STEP / 16; k++)
        queue_step(s, wgmma_descriptor(w + 32 * k), wgmma_descriptor(x + 32 * k));
    wgmma_commit();
}

template <int BM> static __device__ __forceinline__ void end_step(sums<BM> &s)
{
    wgmma_wait<0>();
    pin(s.c); /* sums are not read before this place */
}

#else

static __device__ __forceinline__ void copies_came()
{
}

template <int BM>
static __device__ __forceinline__ void begin_step(sums<BM> &s, uint32_t w, uint32_t x)
{
    const int lane = threadIdx.x % 32, strip = threadIdx.x / 32;
    const auto at_w = lane_address<STEP>::by16(w + strip * 16 * ROW, lane);
    const auto at_x = lane_address<STEP>::by8(x, lane);
#pragma unroll
    for (int k = 0; k < STEP / 16; k++) {
        uint32_t a[4];
        ldmatrix_x4(a, at_w.at(0, k));
#pragma unroll
        for (int j = 0; j < BM / 16; j++) {
            uint32_t b[4];
            ldmatrix_x4(b, at_x.at(16 * j, k));
            mma(s.c[2 * j], a, b[0], b[1]);
            mma(s.c[2 * j + 1], a, b[2], b[3]);
        }
    }
}

template <int BM> static __device__ __forceinline__ void end_step(sums<BM> &)
{
}

#endif

#endif
