/* state.cu - the linear state along a piece (STILL eq. 9, s and z).
 *
 * fold   what retirement k adds, ds = sum of phi(k)^T v and dz = sum of phi(k) over the
 *        rows folded there. A block makes one half of the features, [softmax(u)] or
 *        [softmax(-u)], u = k W, and the D rows of the state that belong to it: twice
 *        the product k W (a third of the work), but no block needs more than 96 KB of
 *        shared memory and 128 registers, so that two share a processor and hide each
 *        other's gathers. Features are held in half times 2^12, which moves the
 *        smallest normal number to 1.5e-8.
 * sum    the state before every chunk, by adding up retirement after retirement with
 *        Kahan's compensation, as the recurrent form does; every number of the state
 *        on its own, a row by a warp. Queries get it as rows of means s / z,
 *        weighted averages of values, which half holds as well as it holds values,
 *        and z times a power of two (state_scale). Bounded by bandwidth: 4 bytes in,
 *        2 out, for each number and chunk. */
#include "backend/cuda/hybrid/chunk/chunk.h"
#include "backend/cuda/hybrid/map.cuh"
#include "backend/cuda/ptx/mma.cuh"

enum { THREADS = 256, TOKENS = 128 };

static const float feature_unit = 4096;

/* ---- Fold ---------------------------------------------------------------- */

/* u = x W of 16 rows, and |x|^2 of this lane's two rows, in parts of a quad. */
template <int D>
static __device__ __forceinline__ void map_rows(float (&u)[D / 8][4], float (&xx)[2],
                                                lane_address<D> x, lane_address<D> w)
{
#pragma unroll
    for (int nt = 0; nt < D / 8; nt++)
#pragma unroll
        for (int e = 0; e < 4; e++) u[nt][e] = 0;
#pragma unroll
    for (int ks = 0; ks < D / 16; ks++) {
        uint32_t a[4];
        ldmatrix_x4(a, x.at(0, ks));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 y = unpack_half2(a[i]);
            xx[i & 1] += y.x * y.x + y.y * y.y;
        }
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, w.at(ks * 16, n));
            mma(u[2 * n], a, b[0], b[1]);
            mma(u[2 * n + 1], a, b[2], b[3]);
        }
    }
}

/* Without a map u is x. row: of this lane's first row, in the tile. */
template <int D>
static __device__ __forceinline__ void same_rows(float (&u)[D / 8][4], float (&xx)[2],
                                                 const unsigned char *tile, int row,
                                                 int lane)
{
#pragma unroll
    for (int nt = 0; nt < D / 8; nt++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint32_t at = unit_at<D>(row + 8 * j, nt) + (lane & 3) * 4;
            const float2 y = unpack_half2(*(const uint32_t *)(tile + at));
            u[nt][2 * j] = y.x;
            u[nt][2 * j + 1] = y.y;
            xx[j] += y.x * y.x + y.y * y.y;
        }
}

/* u -> features times 2^12 of row j (0, 1) of this lane; sign -1: softmax(-u). */
template <int D>
static __device__ __forceinline__ void soften(float (&u)[D / 8][4], int j, float xx,
                                              const sti_cuda_hybrid_params &h,
                                              float sign)
{
    float uu = 0, top = -INFINITY;
#pragma unroll
    for (int nt = 0; nt < D / 8; nt++)
#pragma unroll
        for (int e = 2 * j; e < 2 * j + 2; e++) {
            u[nt][e] *= sign;
            uu += u[nt][e] * u[nt][e];
            top = fmaxf(top, u[nt][e]);
        }
    float scale = log2_e;
    if (h.norm_preserved) scale *= norm_kept(sqrtf(quad_sum(xx)), sqrtf(quad_sum(uu)));
    top = quad_max(top) * scale;
    float sum = 0;
#pragma unroll
    for (int nt = 0; nt < D / 8; nt++)
#pragma unroll
        for (int e = 2 * j; e < 2 * j + 2; e++) {
            u[nt][e] = exp2_fast(u[nt][e] * scale - top);
            sum += u[nt][e];
        }
    const float part = 1.0f / quad_sum(sum);
#pragma unroll
    for (int nt = 0; nt < D / 8; nt++)
#pragma unroll
        for (int e = 2 * j; e < 2 * j + 2; e++)
            u[nt][e] = softmax_feature(u[nt][e], part, h.feature_floor) * feature_unit;
}

/* STILL eq. 6: the features of a warp's 16 rows take the place of its keys; rows from
 * `rows` on are nobody's and get 0. */
template <int D>
static __device__ __forceinline__ void features(const sti_chunk_piece &c,
                                                unsigned char *x, uint32_t w_tile,
                                                int rows, float sign)
{
    const int lane = (int)threadIdx.x & 31, first = ((int)threadIdx.x >> 5) * 16;
    const int row = first + (lane >> 2);
    float u[D / 8][4], xx[2] = {0, 0};
    if (c.h.map_k)
        map_rows<D>(
            u, xx,
            lane_address<D>::by16(shared_address(x) + (uint32_t)first * D * 2, lane),
            lane_address<D>::by16(w_tile, lane));
    else
        same_rows<D>(u, xx, x, row, lane);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 2; j++) {
        soften<D>(u, j, xx[j], c.h, sign);
        const bool real = row + 8 * j < rows;
#pragma unroll
        for (int nt = 0; nt < D / 8; nt++) {
            const uint32_t at = unit_at<D>(row + 8 * j, nt) + (lane & 3) * 4;
            *(uint32_t *)(x + at) =
                real ? pack_half2(u[nt][2 * j], u[nt][2 * j + 1]) : 0u;
        }
    }
}

/* A warp's part of the state: rows [p, p + D/4) and columns [d, d + D/2). */
template <int D> struct part_sums {
    float s[D / 64][D / 16][4];
    float z[D / 64][4]; /* every column is the sum of the features */
};

/* sums += phi^T v over the 128 rows of both tiles. */
template <int D>
static __device__ __forceinline__ void
add_products(part_sums<D> &sums, lane_address<D> phi, lane_address<D> value, int p16,
             int d16)
{
    const uint32_t ones = 0x3c003c00u;
#pragma unroll 1
    for (int ks = 0; ks < TOKENS / 16; ks++) {
        uint32_t a[D / 64][4];
#pragma unroll
        for (int mt = 0; mt < D / 64; mt++) {
            ldmatrix_x4_trans(a[mt], phi.at(ks * 16, p16 + mt));
            mma(sums.z[mt], a[mt], ones, ones);
        }
#pragma unroll
        for (int n = 0; n < D / 32; n++) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, value.at(ks * 16, d16 + n));
#pragma unroll
            for (int mt = 0; mt < D / 64; mt++) {
                mma(sums.s[mt][2 * n], a[mt], b[0], b[1]);
                mma(sums.s[mt][2 * n + 1], a[mt], b[2], b[3]);
            }
        }
    }
}

/* ds [D, D], dz [D]: the block's half. Later tiles of a retirement add to what the same
 * thread stored, so that no sums have to be held while features are made. */
template <int D>
static __device__ __forceinline__ void store_sums(const part_sums<D> &sums, bool add,
                                                  float *ds, float *dz, int p, int d)
{
    const int lane = (int)threadIdx.x & 31, row = lane >> 2, column = (lane & 3) * 2;
    const float unit = 1.0f / feature_unit;
#pragma unroll
    for (int mt = 0; mt < D / 64; mt++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int r = p + mt * 16 + j * 8 + row;
#pragma unroll
            for (int nt = 0; nt < D / 16; nt++) {
                float2 *to = (float2 *)(ds + (size_t)r * D + d + nt * 8 + column);
                const float2 was = add ? *to : make_float2(0, 0);
                *to = make_float2(was.x + sums.s[mt][nt][2 * j] * unit,
                                  was.y + sums.s[mt][nt][2 * j + 1] * unit);
            }
            if (d == 0 && column == 0)
                dz[r] = (add ? dz[r] : 0) + sums.z[mt][2 * j] * unit;
        }
}

/* What a thread copies of 128 rows: words `unit` of every STEP-th row. The rows are
 * looked up before the first copy: after it the compiler would have each look-up wait
 * for the copy before. */
template <int D> struct gathered {
    enum { UNITS = D / 8, STEP = THREADS / UNITS, EACH = TOKENS / STEP };
    int first, unit;
    int row[EACH];
};

/* By a list of n rows; the last is repeated. */
template <int D>
static __device__ __forceinline__ gathered<D> look_up(const int32_t *list, int n)
{
    typedef gathered<D> rows;
    rows y;
    y.first = (int)threadIdx.x / rows::UNITS;
    y.unit = (int)threadIdx.x % rows::UNITS;
#pragma unroll
    for (int i = 0; i < rows::EACH; i++)
        y.row[i] = list[min(y.first + i * rows::STEP, n - 1)];
    return y;
}

template <int D>
static __device__ __forceinline__ void gather(uint32_t to, const __half *x,
                                              const gathered<D> &rows)
{
#pragma unroll
    for (int i = 0; i < gathered<D>::EACH; i++)
        cp_async16(to + unit_at<D>(rows.first + i * gathered<D>::STEP, rows.unit),
                   x + (size_t)rows.row[i] * D + rows.unit * 8);
    cp_async_commit();
}

/* The same of keys that are folded at retirement k. */
template <int D>
static __device__ __forceinline__ void gather_keys(uint32_t to,
                                                   const sti_chunk_piece &c, int g,
                                                   int k, const gathered<D> &rows)
{
    const size_t head = (size_t)g * c.rows;
    if (!c.turned) {
        gather<D>(to, c.fold_k + head * D, rows);
        return;
    }
#pragma unroll
    for (int i = 0; i < gathered<D>::EACH; i++) {
        const int row = rows.row[i];
        const bool far =
            is_salient_row(c, row) && is_far(c, k, position_of_row(c, g, row));
        cp_async16(to + unit_at<D>(rows.first + i * gathered<D>::STEP, rows.unit),
                   (far ? c.k_far : c.fold_k) + (head + row) * D + rows.unit * 8);
    }
    cp_async_commit();
}

/* STILL eq. 9, what one retirement adds to s and z. Shared memory: W [D, D], keys then
 * features [128, D], values [128, D]. Grid (2 retirements, selection heads): block
 * 2 k + half. Warp 2 a + b has part (a, b) of the sums. */
template <int D, class Pieces>
static __global__ void __launch_bounds__(THREADS, 2)
    fold_kernel(const __grid_constant__ Pieces pieces)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    int block = (int)blockIdx.x, blocks;
    const sti_chunk_piece &c = pieces.find(block, blocks);
    const int k = block >> 1, half = block & 1, g = (int)blockIdx.y;
    const int tid = (int)threadIdx.x, lane = tid & 31, units = D / 8;
    const int p16 = (tid >> 6) * (D / 64), d16 = ((tid >> 5) & 1) * (D / 32);
    unsigned char *x = shared + D * D * 2;
    const uint32_t w_tile = shared_address(shared), x_tile = shared_address(x);
    const uint32_t v_tile = x_tile + TOKENS * D * 2;
    const size_t retire = (size_t)k * c.h.S + g;
    const int32_t *fold = c.fold + retire * c.h.C;
    for (int i = tid; c.h.map_k && i < D * units; i += THREADS)
        cp_async16(w_tile + unit_at<D>(i / units, i % units),
                   c.map_k + (size_t)g * D * D + (size_t)i * 8);
    const int rows = fold_count(c, g, k); /* 0: all became salient */
    for (int from = 0; from < rows; from += TOKENS) {
        const gathered<D> list = look_up<D>(fold + from, rows - from);
        gather_keys<D>(x_tile, c, g, k, list);
        gather<D>(v_tile, c.v + (size_t)g * c.rows * D, list);
        cp_async_wait<1>();
        __syncthreads();
        features<D>(c, x, w_tile, rows - from, half ? -1.0f : 1.0f);
        cp_async_wait<0>();
        __syncthreads();
        part_sums<D> sums = {};
        add_products<D>(sums, lane_address<D>::by8(x_tile, lane),
                        lane_address<D>::by16(v_tile, lane), p16, d16);
        store_sums<D>(sums, from > 0, c.ds + (retire * 2 + half) * D * D,
                      c.dz + (retire * 2 + half) * D, p16 * 16, d16 * 16);
        __syncthreads(); /* the tiles are read: the next may come */
    }
    cp_async_wait<0>();
}

/* ---- Sum ----------------------------------------------------------------- */

/* N numbers that follow each other, read and written as one. */
template <int N> struct numbers {
    float x[N];
};
template <int N>
static __device__ __forceinline__ numbers<N> load_numbers(const float *from)
{
    numbers<N> y;
    if constexpr (N == 4) {
        const float4 a = *(const float4 *)from;
        y.x[0] = a.x, y.x[1] = a.y, y.x[2] = a.z, y.x[3] = a.w;
    } else {
        const float2 a = *(const float2 *)from;
        y.x[0] = a.x, y.x[1] = a.y;
    }
    return y;
}
template <int N>
static __device__ __forceinline__ void store_numbers(float *to, const numbers<N> &y)
{
    if constexpr (N == 4)
        *(float4 *)to = make_float4(y.x[0], y.x[1], y.x[2], y.x[3]);
    else
        *(float2 *)to = make_float2(y.x[0], y.x[1]);
}

/* s / z, or 0 if nothing is folded, as halves. */
template <int N>
static __device__ __forceinline__ void store_means(__half *to, const numbers<N> &s,
                                                   float part)
{
    uint32_t y[N / 2];
#pragma unroll
    for (int i = 0; i < N; i += 2)
        y[i / 2] = pack_half2(half_range(s.x[i] * part), half_range(s.x[i + 1] * part));
    if constexpr (N == 4)
        *(uint2 *)to = make_uint2(y[0], y[1]);
    else
        *(uint32_t *)to = y[0];
}

/* STILL eq. 9, s and z before every chunk.
 *
 * A warp has a row p of the state of head g, D / 32 numbers a lane, and all lanes z of
 * the row. What is the same for all rows, or is read for one number alone, is done for
 * 32 chunks at once, by a lane each. Where nothing is folded yet means are not read.
 * Grid (rows / 4, selection heads). */
template <int D, class Pieces>
static __global__ void __launch_bounds__(128)
    sum_kernel(const __grid_constant__ Pieces pieces)
{
    enum { N = D / 32, AHEAD = 8 };
    int block = (int)blockIdx.x, blocks;
    const sti_chunk_piece &c = pieces.find(block, blocks);
    const int lane = (int)threadIdx.x & 31, g = (int)blockIdx.y;
    const int p = block * 4 + ((int)threadIdx.x >> 5);
    if (folded_after(c, g, c.n_retired) == 0) return;
    const size_t row = (size_t)g * (2 * D) + p, at = row * D + lane * N;
    const size_t rows = (size_t)c.h.S * (2 * D), all = rows * D; /* of a retirement */
    const int before = c.first_retire - c.first_chunk; /* chunks before the first */
    numbers<N> s = load_numbers<N>(c.s.lin_s + at);
    float z = c.s.lin_z[row];
    for (int j32 = 0; j32 < c.n_chunks; j32 += 32) {
        const int own = j32 + lane, own_retire = own - before;
        const bool folds = own_retire >= 0 && own_retire < c.n_retired &&
                           fold_count(c, g, own_retire) > 0;
        const uint32_t folding = __ballot_sync(0xffffffffu, folds);
        const float own_dz = folds ? c.dz[own_retire * rows + row] : 0;
        const int64_t n = folded_after(c, g, retired_until(c, c.first_chunk + own));
        const float own_scale = n > 0 ? state_scale(c, n) : 0;
        float own_z = 0;
        for (int j0 = j32; j0 < min(j32 + 32, c.n_chunks); j0 += AHEAD) {
            numbers<N> ds[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                ds[i] = {};
                if (folding >> (j0 + i - j32) & 1)
                    ds[i] = load_numbers<N>(c.ds + (j0 + i - before) * all + at);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                const int j = j0 + i;
                if (j >= c.n_chunks) break;
                z += __shfl_sync(0xffffffffu, own_dz, j - j32);
                if (own == j) own_z = z;
#pragma unroll
                for (int x = 0; x < N; x++) s.x[x] += ds[i].x[x];
                store_means<N>(c.mean + j * all + at, s, z > 0 ? 1 / z : 0);
            }
        }
        if (own < c.n_chunks) c.z[own * rows + row] = own_z * own_scale;
    }
    if (c.n_retired == 0) return;
    store_numbers<N>(c.s.lin_s + at, s);
    if (lane == 0) c.s.lin_z[row] = z;
}

/* ---- Entry --------------------------------------------------------------- */

static int fold_blocks(const sti_chunk_piece &c)
{
    return 2 * c.n_retired;
}

static int sum_blocks(const sti_chunk_piece &c)
{
    return 2 * c.h.D / 4;
}

template <int D, class Pieces>
static still_status launch_fold(const sti_chunk_group *g, unsigned units,
                                const Pieces &pieces, still_error *err)
{
    const int bytes = (D + 2 * TOKENS) * D * 2;
    const dim3 grid(units, (unsigned)g->c->h.S);
    STI_CUDA(cudaFuncSetAttribute(fold_kernel<D, Pieces>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "hybrid attention, folding");
    fold_kernel<D><<<grid, THREADS, bytes, g->stream>>>(pieces);
    STI_CUDA(cudaGetLastError(), "hybrid attention, folding");
    return STILL_OK;
}

template <int D> static still_status launch(const sti_chunk_group *g, still_error *err)
{
    STI_TRY(launch_units(g, fold_blocks, [&](unsigned units, const auto &pieces) {
        return launch_fold<D>(g, units, pieces, err);
    }));
    return launch_units(g, sum_blocks, [&](unsigned units, const auto &pieces) {
        const dim3 grid(units, (unsigned)g->c->h.S);
        sum_kernel<D><<<grid, 128, 0, g->stream>>>(pieces);
        STI_CUDA(cudaGetLastError(), "hybrid attention, state");
        return STILL_OK;
    });
}

extern "C" still_status sti_chunk_state(const sti_chunk_group *g, still_error *err)
{
    if (!g->c->h.has_linear) return STILL_OK;
    return g->c->h.D == 128 ? launch<128>(g, err) : launch<64>(g, err);
}
