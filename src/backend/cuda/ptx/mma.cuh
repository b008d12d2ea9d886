/* mma.cuh - products of half matrices in shared memory on tensor cores, from sm_80 on.
 *
 * A tile is rows of W halves (W a multiple of 64, rows of 128 bytes or more) at a place
 * aligned to 256 bytes. Its 16-byte units are swizzled: unit u of row r lies at u ^ (r
 * & 7), so that ldmatrix, which reads one unit of 8 consecutive rows, meets 32
 * different banks.
 *
 * Fragments of mma.m16n8k16, lane = 4 g + t:
 *   A [16,16] a0 (g, 2t..)  a1 (g+8, 2t..)  a2 (g, 2t+8..)  a3 (g+8, 2t+8..)
 *   B [16,8]  b0 (2t.., g)  b1 (2t+8.., g)
 *   C [16,8]  c0, c1 (g, 2t..)  c2, c3 (g+8, 2t..)
 * so two C tiles side by side, rounded to half, are an A: {c01, c23 of the first, c01,
 * c23 of the second}.
 *
 * ldmatrix.x4 reads four 8 x 8 squares, lane i giving the address of row i % 8 of
 * square i / 8. Two ways to lay the squares out are enough: by16  row i % 16, unit i /
 * 16:             A of [m][k];    B of [k][n], transposed by8   row i % 8 + 8 (i / 16),
 * unit i / 8 % 2: B of [n][k]; A of [k][m], transposed For B the four registers are b0,
 * b1 of the first 8 columns, then of the next 8. */
#ifndef STI_BACKEND_CUDA_PTX_MMA_CUH
#define STI_BACKEND_CUDA_PTX_MMA_CUH

#include <cuda_fp16.h>
#include <stdint.h>

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* c += a b */
static __device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4],
                                           uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ void load_squares(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

static __device__ __forceinline__ void load_squares_turned(uint32_t (&r)[4],
                                                           uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* 16 bytes from global to shared memory, in the background. */
static __device__ __forceinline__ void copy_async(uint32_t to, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from)
                 : "memory");
}
static __device__ __forceinline__ void copy_commit(void)
{
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}
/* All but the last N groups of this thread have arrived. */
template <int N> static __device__ __forceinline__ void copy_wait(void)
{
    asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

/* The line at p will be needed soon. */
static __device__ __forceinline__ void expect(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

/* 2^x; what is below 2^-126 is 0, and 2^-infinity is too. */
static __device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

/* ---- Places in a tile ---------------------------------------------------- */

/* Bytes from the tile's start to 16-byte unit u of row r. */
template <int W> static __device__ __forceinline__ uint32_t unit_at(int r, int u)
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
    /* The same, as far as the compiler can tell another: what is derived from it is
     * then worked out where it is used, not kept in registers around a loop. */
    __device__ __forceinline__ lane_address again() const
    {
        uint32_t same = p;
        asm volatile("" : "+r"(same));
        return {same};
    }
    __device__ __forceinline__ uint32_t at(int row, int step16) const
    {
        return (p ^ (uint32_t)(step16 << 5)) + (uint32_t)(row * W * 2);
    }
};

/* ---- Conversions and sums over the four lanes of a row ------------------- */

static __device__ __forceinline__ uint32_t pack_half2(float x, float y)
{
    const __half2 h = __floats2half2_rn(x, y);
    uint32_t r;
    memcpy(&r, &h, sizeof r);
    return r;
}
static __device__ __forceinline__ float2 unpack_half2(uint32_t x)
{
    __half2 h;
    memcpy(&h, &x, sizeof h);
    return __half22float2(h);
}
/* Half's range instead of infinity. */
static __device__ __forceinline__ float half_range(float x)
{
    return fminf(fmaxf(x, -65504.0f), 65504.0f);
}
/* Eight floats as halves. */
static __device__ __forceinline__ uint4 pack_half8(float4 x, float4 y)
{
    return make_uint4(pack_half2(half_range(x.x), half_range(x.y)),
                      pack_half2(half_range(x.z), half_range(x.w)),
                      pack_half2(half_range(y.x), half_range(y.y)),
                      pack_half2(half_range(y.z), half_range(y.w)));
}

static __device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
static __device__ __forceinline__ float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

#endif
