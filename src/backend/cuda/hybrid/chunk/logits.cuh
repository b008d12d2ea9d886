/* logits.cuh - products of queries and keys that scores are made of: 16 rows of
 * a warp, in registers, by 64 rows of a tile in shared memory, both of D halves. */
#ifndef STI_BACKEND_CUDA_HYBRID_CHUNK_LOGITS_CUH
#define STI_BACKEND_CUDA_HYBRID_CHUNK_LOGITS_CUH

#include "backend/cuda/hybrid/chunk/chunk.h"
#include "backend/cuda/ptx/mma.cuh"

enum { STI_LOGIT_COLUMNS = 64 };

/* The 16 rows at `rows` (by16). */
template <int D>
static __device__ __forceinline__ void load_rows(uint32_t (&a)[D / 16][4],
                                                 lane_address<D> rows)
{
#pragma unroll
    for (int ks = 0; ks < D / 16; ks++) ldmatrix_x4(a[ks], rows.at(0, ks));
}

/* s = a b^T with the 64 rows of b from row `first` on (by8); C fragments. */
template <int D>
static __device__ __forceinline__ void
multiply(float (&s)[8][4], const uint32_t (&a)[D / 16][4], lane_address<D> b, int first)
{
#pragma unroll
    for (int nt = 0; nt < 8; nt++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[nt][e] = 0;
#pragma unroll
    for (int ks = 0; ks < D / 16; ks++)
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t two[4];
            ldmatrix_x4(two, b.at(first + n * 16, ks));
            mma(s[2 * n], a[ks], two[0], two[1]);
            mma(s[2 * n + 1], a[ks], two[2], two[3]);
        }
}

#endif
