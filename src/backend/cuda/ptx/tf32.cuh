/* tf32.cuh - products of float matrices in shared memory on tensor cores, operands
 * rounded to TF32 (10 bits of mantissa, float's range), float32 sums; from sm_80 on.
 *
 * Fragments of mma.m16n8k8, lane = 4 g + t:
 *   A [16,8]  a0 (g, t)  a1 (g+8, t)  a2 (g, t+4)  a3 (g+8, t+4)
 *   B [8,8]   b0 (t, g)  b1 (t+4, g)
 *   C [16,8]  c0, c1 (g, 2t..)  c2, c3 (g+8, 2t..)
 * ldmatrix moves rows of 16 bytes whatever they hold: lane 4 g + t of a matrix gets
 * word t of row g, which is a0 of [m][k] and b0 of [n][k].
 *
 * The order of k within a step of 8 is free as long as A and B agree. In "pairs" order
 * k = t stands for 2t and k = t + 4 for 2t + 1; a C tile is then an A tile as it is:
 * {c0, c2, c1, c3}. Products below that take registers or transposed matrices use it.
 *
 * Rows of tiles are W + 4 floats apart (W a multiple of 32): ldmatrix and pairs of rows
 * then meet 32 different banks. Only a B of [k][n] against an A of [m][k] wants W + 8.
 */
#ifndef STI_BACKEND_CUDA_PTX_TF32_CUH
#define STI_BACKEND_CUDA_PTX_TF32_CUH

#include "backend/cuda/ptx/memory.cuh"
#include "backend/cuda/ptx/reduce.cuh"

/* ---- Instructions -------------------------------------------------------- */

/* Rounded to nearest, ties away from zero. */
STI_DEVICE float tf32(float x)
{
    uint32_t r;
    asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(r) : "f"(x));
    return __uint_as_float(r);
}

/* c += a b */
STI_DEVICE void mma_tf32(float (&c)[4], const float (&a)[4], float b0, float b1)
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])),
                   "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
                   "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

/* Four matrices of 8 rows of 4 floats; lane i names row i % 8 of matrix i / 8. */
STI_DEVICE void ldmatrix_x4_tf32(float (&r)[4], const float *row)
{
    uint32_t x[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(row))
                 : "memory");
#pragma unroll
    for (int i = 0; i < 4; i++) r[i] = __uint_as_float(x[i]);
}

/* ---- Products of one warp: C has 16 rows, N tiles of 8 columns; K steps of 8 */

/* A of [m][k] at the warp's first row. */
STI_DEVICE void load_a_tf32(float (&a)[4], const float *A, int lda, int lane)
{
    ldmatrix_x4_tf32(a, A + (lane & 15) * lda + (lane >> 4) * 4);
}
/* Two tiles of B, of [n][k]: {b0, b1} of the first 8 columns, then of the next 8. */
STI_DEVICE void load_b_tf32(float (&b)[4], const float *B, int ldb, int lane)
{
    ldmatrix_x4_tf32(b, B + ((lane & 7) + ((lane >> 4) << 3)) * ldb +
                            ((lane >> 3) & 1) * 4);
}

/* C += A B^T: A [m][k], B [n][k], both rounded. */
template <int N, int K>
STI_DEVICE void product_nt(float (&c)[N][4], const float *A, int lda, const float *B,
                           int ldb, int lane)
{
#pragma unroll 4 /* of 4 to 16 steps: more would only take registers */
    for (int k = 0; k < K; k++) {
        float a[4], b[4];
        load_a_tf32(a, A + 8 * k, lda, lane);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            load_b_tf32(b, B + 8 * n * ldb + 8 * k, ldb, lane);
            mma_tf32(c[n], a, b[0], b[1]);
            mma_tf32(c[n + 1], a, b[2], b[3]);
        }
    }
}

/* C += A B: A [m][k], B [k][n], both rounded. */
template <int N, int K>
STI_DEVICE void product_nn(float (&c)[N][4], const float *A, int lda, const float *B,
                           int ldb, int lane)
{
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int k = 0; k < K; k++) {
        float a[4];
        load_a_tf32(a, A + 8 * k, lda, lane);
        const float *b = B + (8 * k + t) * ldb + g;
#pragma unroll
        for (int n = 0; n < N; n++) mma_tf32(c[n], a, b[8 * n], b[4 * ldb + 8 * n]);
    }
}

/* C += A^T B: A [k][m] at the warp's first column, B [k][n], both rounded. */
template <int N, int K>
STI_DEVICE void product_tn(float (&c)[N][4], const float *A, int lda, const float *B,
                           int ldb, int lane)
{
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int k = 0; k < K; k++) {
        const float *x = A + (8 * k + 2 * t) * lda + g;
        const float *b = B + (8 * k + 2 * t) * ldb + g;
        const float a[4] = {x[0], x[8], x[lda], x[lda + 8]};
#pragma unroll
        for (int n = 0; n < N; n++) mma_tf32(c[n], a, b[8 * n], b[ldb + 8 * n]);
    }
}

/* C += A B: A in registers as K tiles of C, rounded; B [k][n], rounded. */
template <int N, int K>
STI_DEVICE void product_rn(float (&c)[N][4], const float (&A)[K][4], const float *B,
                           int ldb, int lane)
{
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int k = 0; k < K; k++) {
        const float a[4] = {A[k][0], A[k][2], A[k][1], A[k][3]};
        const float *b = B + (8 * k + 2 * t) * ldb + g;
#pragma unroll
        for (int n = 0; n < N; n++) mma_tf32(c[n], a, b[8 * n], b[ldb + 8 * n]);
    }
}

#endif
