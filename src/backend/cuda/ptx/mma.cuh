/* mma.cuh - products of half matrices in shared memory on tensor cores, from sm_80 on.
 *
 * A tile is rows of W halves (W a multiple of 64, rows of 128 bytes or more) at a place
 * aligned to 256 bytes. Its 16-byte units are swizzled: unit u of row r lies at
 * u ^ (r & 7), so that ldmatrix, which reads one unit of 8 consecutive rows, meets 32
 * different banks.
 *
 * Fragments of mma.m16n8k16, lane = 4 g + t:
 *   A [16,16]  a0 (g, 2t..)  a1 (g+8, 2t..)  a2 (g, 2t+8..)  a3 (g+8, 2t+8..)
 *   B [16,8]   b0 (2t.., g)  b1 (2t+8.., g)
 *   C [16,8]   c0, c1 (g, 2t..)  c2, c3 (g+8, 2t..)
 * so two C tiles side by side, rounded to half, are an A: {c01, c23 of the first, c01,
 * c23 of the second}.
 *
 * ldmatrix_x4 reads four 8 x 8 matrices, lane i giving the address of row i % 8 of
 * matrix i / 8. Two ways to lay the four out are enough:
 *   by16   row i % 16,               unit i / 16      A of [m][k]; B of [k][n], trans
 *   by8    row i % 8 + 8 (i / 16),   unit i / 8 % 2   B of [n][k]; A of [k][m], trans
 * For B the four registers are b0, b1 of the first 8 columns, then of the next 8. */
#ifndef STI_BACKEND_CUDA_PTX_MMA_CUH
#define STI_BACKEND_CUDA_PTX_MMA_CUH

#include "backend/cuda/ptx/half.cuh"
#include "backend/cuda/ptx/memory.cuh"
#include "backend/cuda/ptx/reduce.cuh"

/* c += a b */
STI_DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

STI_DEVICE void ldmatrix_x4(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

STI_DEVICE void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* The transpose of an 8 x 8 matrix of which lane 4 g + t has (g, 2t) and (g, 2t +
 * 1). */
STI_DEVICE uint32_t movmatrix_trans(uint32_t x)
{
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(y) : "r"(x));
    return y;
}

/* ---- Places in a tile ---------------------------------------------------- */

/* Bytes from the tile's start to 16-byte unit u of row r. */
template <int W> STI_DEVICE uint32_t unit_at(int r, int u)
{
    return (uint32_t)(r * W * 2 + ((u ^ (r & 7)) << 4));
}

/* A lane's address for ldmatrix at row 0, unit 0; `at` moves it: rows in steps of 8,
 * columns in steps of 16. The exclusive or may run over the whole address since rows
 * begin at multiples of their size. */
template <int W> struct lane_address {
    uint32_t p;
    static __device__ __forceinline__ lane_address by16(uint32_t tile, int lane)
    {
        return {tile + (uint32_t)(lane & 15) * W * 2 +
                (uint32_t)(((lane >> 4) ^ (lane & 7)) << 4)};
    }
    static __device__ __forceinline__ lane_address by8(uint32_t tile, int lane)
    {
        return {tile + (uint32_t)((lane & 7) + ((lane >> 4) << 3)) * W * 2 +
                (uint32_t)((((lane >> 3) & 1) ^ (lane & 7)) << 4)};
    }
    __device__ __forceinline__ lane_address opaque() const
    {
        return {::opaque(p)};
    }
    __device__ __forceinline__ uint32_t at(int row, int step16) const
    {
        return (p ^ (uint32_t)(step16 << 5)) + (uint32_t)(row * W * 2);
    }
};

#endif
