/* wgmma.cuh - Hopper's own matrix instructions (sm_90a) on tiles of 128 rows of 128
 * halves in shared memory.
 *
 * A tile is two panels of 64 columns; 16-byte words of a panel's 128-byte rows change
 * places by the row's low bits: the 128-byte swizzle that wgmma's descriptors name. A
 * warpgroup of 4 warps multiplies 64 rows of one. Products are queued, committed in
 * groups and waited for. */
#ifndef STI_BACKEND_CUDA_PTX_WGMMA_CUH
#define STI_BACKEND_CUDA_PTX_WGMMA_CUH

#include "backend/cuda/ptx/scalar.cuh"

enum { PANEL = 128 * 128, TILE = 2 * PANEL }; /* bytes */

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* Of a thread, in its warpgroup lane = 4 r + q of warp w: rows 16 w + 8 h + r (h = 0,
 * 1). Column 8 n + 2 q + e of row h is element 4 n + 2 h + e. */
typedef float fragment[64];

/* Byte offset of a word in a tile. */
static __device__ __forceinline__ int word_at(int row, int word)
{
    return word / 8 * PANEL + row * 128 + ((word % 8 ^ (row & 7)) << 4);
}

/* Descriptor of a matrix of halves in shared memory, swizzled by 128 bytes. 8 rows of
 * 128 bytes are 1024 bytes, and the next 8 follow. Keys and queries: rows are rows,
 * dims are summed over. Values: rows are summed over, and the second half of the dims
 * is a panel away. */
static __device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t at)
{
    return (uint64_t)(at >> 4) | (uint64_t)(PANEL >> 4) << 16 |
           (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

#define FRAGMENT_NAMES                                                                 \
    "%0, %1, %2, %3, %4, %5, %6, %7, "                                                 \
    "%8, %9, %10, %11, %12, %13, %14, %15, "                                           \
    "%16, %17, %18, %19, %20, %21, %22, %23, "                                         \
    "%24, %25, %26, %27, %28, %29, %30, %31, "                                         \
    "%32, %33, %34, %35, %36, %37, %38, %39, "                                         \
    "%40, %41, %42, %43, %44, %45, %46, %47, "                                         \
    "%48, %49, %50, %51, %52, %53, %54, %55, "                                         \
    "%56, %57, %58, %59, %60, %61, %62, %63"
#define FRAGMENT(d)                                                                    \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),            \
        "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),      \
        "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]),  \
        "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),  \
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),  \
        "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),  \
        "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),  \
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),  \
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]),  \
        "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]),  \
        "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

/* d = [d +] a b^T, a [64, 16] and b [128, 16] in shared memory. */
static __device__ __forceinline__ void wgmma_nt(fragment &d, uint64_t a, uint64_t b,
                                                int add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
                 "{" FRAGMENT_NAMES "}, %64, %65, p, 1, 1, 0, 0;\n}\n"
                 : FRAGMENT(d)
                 : "l"(a), "l"(b), "r"(add));
}

/* d = [d +] a b, a [64, 16] and b [16, 128] in shared memory. */
static __device__ __forceinline__ void wgmma_nn(fragment &d, uint64_t a, uint64_t b,
                                                int add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
                 "{" FRAGMENT_NAMES "}, %64, %65, p, 1, 1, 0, 1;\n}\n"
                 : FRAGMENT(d)
                 : "l"(a), "l"(b), "r"(add));
}

/* d += a b, a [64, 16] in registers, b [16, 128] in shared memory. */
static __device__ __forceinline__ void wgmma_rn(fragment &d, const uint32_t (&a)[4],
                                                uint64_t b)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
                 "{" FRAGMENT_NAMES "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"
                 : FRAGMENT(d)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}

/* ---- Products of 64 columns ---------------------------------------------- */

/* The same lanes have the same places; column 8 n + 2 q + e of row h is [n][2 h + e],
 * as in the fragments of mma.sync. Rows of 64 halves: a tile is one panel of its own
 * number of rows. */
typedef float slim[8][4];

#define SLIM_NAMES                                                                     \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SLIM_ROW(c) "+f"((c)[0]), "+f"((c)[1]), "+f"((c)[2]), "+f"((c)[3])
#define SLIM(c)                                                                        \
    SLIM_ROW((c)[0]), SLIM_ROW((c)[1]), SLIM_ROW((c)[2]), SLIM_ROW((c)[3]),            \
        SLIM_ROW((c)[4]), SLIM_ROW((c)[5]), SLIM_ROW((c)[6]), SLIM_ROW((c)[7])

/* The first two tiles of 8 columns, and the first four. */
static __device__ __forceinline__ void wgmma_nt(float (&c)[2][4], uint64_t a,
                                                uint64_t b, int add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, 0, 0;\n}\n"
                 : SLIM_ROW(c[0]), SLIM_ROW(c[1])
                 : "l"(a), "l"(b), "r"(add));
}
static __device__ __forceinline__ void wgmma_nt(float (&c)[4][4], uint64_t a,
                                                uint64_t b, int add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, "
                 "%8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, 0, 0;\n}\n"
                 : SLIM_ROW(c[0]), SLIM_ROW(c[1]), SLIM_ROW(c[2]), SLIM_ROW(c[3])
                 : "l"(a), "l"(b), "r"(add));
}
/* c = [c +] a b^T, a and b [64, 16] of tiles. */
static __device__ __forceinline__ void wgmma_nt(slim &c, uint64_t a, uint64_t b,
                                                int add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                 "{" SLIM_NAMES "}, %32, %33, p, 1, 1, 0, 0;\n}\n"
                 : SLIM(c)
                 : "l"(a), "l"(b), "r"(add));
}
/* c = [c +] a b, a [64, 16] and b [16, 64] of tiles. */
static __device__ __forceinline__ void wgmma_nn(slim &c, uint64_t a, uint64_t b,
                                                int add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                 "{" SLIM_NAMES "}, %32, %33, p, 1, 1, 0, 1;\n}\n"
                 : SLIM(c)
                 : "l"(a), "l"(b), "r"(add));
}
/* c += a b with a, 16 rows of which are this warp's, in registers. */
static __device__ __forceinline__ void wgmma_rn(slim &c, const uint32_t (&a)[4],
                                                uint64_t b)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                 "{" SLIM_NAMES "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}\n"
                 : SLIM(c)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}

/* Orders writes to registers before the products that are queued next. */
static __device__ __forceinline__ void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Waits until at most N groups of products are under way. */
template <int N> static __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/* Keeps the compiler from moving uses of d across this place. */
static __device__ __forceinline__ void pin(fragment &d)
{
#pragma unroll
    for (int i = 0; i < 64; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N> static __device__ __forceinline__ void pin(float (&c)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++)
        asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3]));
}
template <int N> static __device__ __forceinline__ void pin(uint32_t (&a)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++)
        asm volatile("" : "+r"(a[n][0]), "+r"(a[n][1]), "+r"(a[n][2]), "+r"(a[n][3]));
}
/* Registers that the first product overwrites: they need no initial value. */
template <int N> static __device__ __forceinline__ void undefined_sums(float (&c)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++)
        asm volatile("" : "=f"(c[n][0]), "=f"(c[n][1]), "=f"(c[n][2]), "=f"(c[n][3]));
}
/* After the next barrier wgmma sees this thread's writes to shared memory. */
static __device__ __forceinline__ void fence_proxy_async()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Registers of the threads of a warpgroup, from here on. */
template <int N> static __device__ __forceinline__ void setmaxnreg_inc()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> static __device__ __forceinline__ void setmaxnreg_dec()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

#endif

#endif
