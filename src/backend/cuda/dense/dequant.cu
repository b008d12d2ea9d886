/* dequant.cu - weights on their way to, and from, the layouts of dequant.cuh.
 *
 * pack runs once per weight, from blocks as files store them (file/blocks.h has their
 * formulas); it reads bytes one by one, which at load time is nothing next to the copy
 * over the bus. to_half and gather are bounded by memory. */
#include <cuda_bf16.h>

#include "backend/cuda/dense/dequant.cuh"
#include "backend/cuda/dense/unpack.h"
#include "backend/cuda/ptx/pdl.cuh"

namespace
{

__device__ uint32_t pack_nibbles(const int *q) /* eight columns to a word */
{
    uint32_t v = 0;
    for (int j = 0; j < 8; j++) v |= (uint32_t)q[j] << 4 * (j / 2 + j % 2 * 4);
    return v;
}

__device__ uint32_t pack_bytes(const int *q)
{
    uint32_t v = 0;
    for (int j = 0; j < 4; j++) v |= (uint32_t)(q[j] + 128) << 8 * j;
    return v;
}

/* What lane 4 g + t keeps of row g (h = 0) or g + 8 (h = 1) of a tile and chunk. */
__device__ void store(const sti_cuda_matrix &m, int64_t at, int lane, int h,
                      const sti_group16 &v)
{
    const int g = lane / 4, t = lane % 4;
    const int64_t group = (at * 8 + g) * m.groups + (t * m.groups >> 2);
    if (m.kind == STI_CUDA_U4) {
        uint2 *to = (uint2 *)m.w + (at * 32 + lane) * 2 + h;
        *to = make_uint2(pack_nibbles(v.q), pack_nibbles(v.q + 8));
    } else {
        uint4 *to = (uint4 *)m.w + (at * 2 + h) * 32 + lane;
        *to = make_uint4(pack_bytes(v.q), pack_bytes(v.q + 4), pack_bytes(v.q + 8),
                         pack_bytes(v.q + 12));
    }
    if (t * m.groups % 4 != 0) return; /* a neighbour of the same group writes it */
    if (m.kind == STI_CUDA_S8)
        ((__half *)m.scale)[group * 2 + h] = to_half(v.scale);
    else
        ((__half2 *)m.scale)[group * 2 + h] =
            __halves2half2(to_half(v.scale), to_half(v.min));
}

/* A thread per (tile, chunk, lane) of the rows that have come. */
__global__ void pack_quants(sti_cuda_matrix m, sti_dtype type, const uint8_t *raw,
                            int64_t row_bytes, int row0, int n)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int lane = (int)(i % 32);
    const int64_t piece = i / 32;
    const int tile = (int)(piece / m.chunks), chunk = (int)(piece % m.chunks);
    if (tile * STI_CUDA_TILE >= n) return;
    const int64_t at = (int64_t)(row0 / STI_CUDA_TILE + tile) * m.chunks + chunk;
    const int column = chunk * STI_CUDA_CHUNK + lane % 4 * 16;
    for (int h = 0; h < 2; h++) {
        int row = tile * STI_CUDA_TILE + lane / 4 + 8 * h; /* of those at raw */
        sti_group16 v = {};
        if (row < n && column < m.K)
            sti_unpack(type, raw + row * row_bytes, column / 16, &v);
        store(m, at, lane, h, v);
    }
}

/* f16 and bf16 to half; a thread per element of [n, ld]. */
__global__ void pack_half(sti_cuda_matrix m, sti_dtype type, const uint16_t *raw,
                          int row0, int n)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int row = (int)(i / m.ld), k = (int)(i % m.ld);
    if (row >= n) return;
    float v = 0;
    if (k < m.K) {
        uint16_t bits = raw[(int64_t)row * m.K + k];
        v = type == STI_F16 ? __half2float(__ushort_as_half(bits))
                            : __uint_as_float((uint32_t)bits << 16);
    }
    ((__half *)m.w)[(int64_t)(row0 + row) * m.ld + k] = to_half(v);
}

/* A thread per (tile, chunk, lane): two rows of sixteen columns. */
template <class chunk_t>
__global__ void to_half(sti_cuda_matrix m, __half *__restrict__ out)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int lane = (int)(i % 32);
    const int64_t piece = i / 32;
    const int tile = (int)(piece / m.chunks), chunk = (int)(piece % m.chunks);
    const int row = tile * STI_CUDA_TILE + lane / 4;
    const int column = chunk * STI_CUDA_CHUNK + lane % 4 * 16;
    if (row >= m.N || column >= m.K) return; /* K is a multiple of 32 */
    chunk_t c;
    uint32_t f[2][8];
    c.load(chunk_t::find(m, tile, chunk, lane), 0);
    c.fragment(f[0], f[1]);
    for (int h = 0; h < 2 && row + 8 * h < m.N; h++) {
        uint4 *to = (uint4 *)(out + (int64_t)(row + 8 * h) * m.ld + column);
        to[0] = make_uint4(f[h][0], f[h][1], f[h][2], f[h][3]);
        to[1] = make_uint4(f[h][4], f[h][5], f[h][6], f[h][7]);
    }
}

/* Waits for no kernel, since ids come by a copy, but lets the next one prepare. */
__global__ void gather(sti_cuda_matrix m, const int32_t *__restrict__ id,
                       float *__restrict__ y)
{
    pdl_trigger();
    int row = min(max(id[blockIdx.x], 0), m.N - 1);
    float *out = y + (int64_t)blockIdx.x * m.K;
    for (int k = threadIdx.x; k < m.K; k += blockDim.x) out[k] = sti_element(m, row, k);
}

enum { THREADS = 256 };

unsigned blocks_of(int64_t threads)
{
    return (unsigned)((threads + THREADS - 1) / THREADS);
}

int64_t tiles_of(int rows)
{
    return (rows + STI_CUDA_TILE - 1) / STI_CUDA_TILE;
}

} // namespace

still_status sti_cuda_pack(sti_dev *dev, const sti_cuda_matrix *m, sti_dtype type,
                           const void *raw, size_t row_bytes, int row0, int n,
                           still_error *err)
{
    if (m->kind == STI_CUDA_HALF) {
        pack_half<<<blocks_of((int64_t)n * m->ld), THREADS, 0, dev->stream>>>(
            *m, type, (const uint16_t *)raw, row0, n);
    } else {
        pack_quants<<<blocks_of(tiles_of(n) * m->chunks * 32), THREADS, 0,
                      dev->stream>>>(*m, type, (const uint8_t *)raw, (int64_t)row_bytes,
                                     row0, n);
    }
    STI_CUDA(cudaGetLastError(), "packing a weight");
    return STILL_OK;
}

still_status sti_cuda_to_half(sti_dev *dev, const sti_cuda_matrix *m, sti_half *out,
                              still_error *err)
{
    unsigned blocks = blocks_of(tiles_of(m->N) * m->chunks * 32);
    __half *to = (__half *)out;
    if (m->kind == STI_CUDA_U4)
        to_half<sti_chunk_u4><<<blocks, THREADS, 0, dev->stream>>>(*m, to);
    else if (m->kind == STI_CUDA_S8)
        to_half<sti_chunk_s8<false>><<<blocks, THREADS, 0, dev->stream>>>(*m, to);
    else
        to_half<sti_chunk_s8<true>><<<blocks, THREADS, 0, dev->stream>>>(*m, to);
    STI_CUDA(cudaGetLastError(), "a weight to half");
    return STILL_OK;
}

still_status sti_cuda_gather(sti_dev *dev, const sti_cuda_matrix *m, const int32_t *id,
                             int M, float *y, still_error *err)
{
    const unsigned threads = m->K < 1024 ? (unsigned)(m->K + 31) / 32 * 32 : 1024;
    gather<<<(unsigned)M, threads, 0, dev->stream>>>(*m, id, y);
    STI_CUDA(cudaGetLastError(), "embed");
    return STILL_OK;
}
