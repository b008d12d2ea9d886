/* rows.cuh - kernels that give every head of every token a warp (rows.cu,
 * rows_bwd.cu): where a warp is. */
#ifndef STI_BACKEND_CUDA_LINEAR_ROWS_CUH
#define STI_BACKEND_CUDA_LINEAR_ROWS_CUH

#include "backend/cuda/linear/tile.cuh"

enum { WARPS = 8, EACH = STI_LINEAR_MAX_D / 32 }; /* numbers of a lane */

/* The vector of a warp: heads of queries first, then those of keys where there are
 * such; grid is tokens of the longest sequence, heads, sequences. */
typedef struct row_place {
    bool is, query;
    int t, head, heads; /* head of `heads` */
    size_t at;          /* in arrays [rows, heads, .] */
    size_t from;        /* of the sequence's own [T, heads, .] */
} row_place;
STI_DEVICE row_place row_place_of(const sti_cuda_linear &p,
                                  const sti_cuda_linear_seq &s)
{
    row_place r;
    const int y = (int)blockIdx.y;
    r.t = (int)blockIdx.x * WARPS + (int)threadIdx.x / 32;
    r.is = r.t < s.T;
    r.query = y < p.H;
    r.heads = r.query ? p.H : p.G;
    r.head = r.query ? y : y - p.H;
    r.from = (size_t)r.t * r.heads + r.head;
    r.at = (size_t)s.row0 * r.heads + r.from;
    return r;
}
static inline dim3 row_grid(const sti_cuda_linear *p, int heads)
{
    return dim3((unsigned)(p->longest + WARPS - 1) / WARPS, (unsigned)heads,
                (unsigned)p->n);
}

#endif
