/* hybrid_train_map.cu - feature maps of whole sequences and their gradients.
 *
 *   raw = x W;  norm preserved: u = raw |x| / max(|raw|, 1e-6);  u += b
 *   phi = max([softmax(u), softmax(-u)], floor), or max(relu(u), floor)
 *
 * A block takes 64 tokens of a head; raw stays in registers, a row in the four lanes of
 * a quad. x W is a product of split halves: a feature that is cut off by relu or the
 * floor must be cut off where the reference cuts it off. Bounded by bandwidth, closely
 * followed by exponentials: a token reads D and writes P numbers. */
#include "backend/cuda/hybrid_train_tile.cuh"

static __device__ const float smallest_norm = 1e-6f; /* of raw, before it divides */

/* x [64][DP] and W [DP][DP] as tiles, split; sums of warps. */
template <int DP> static constexpr size_t map_shared(void)
{
    return (2 * ROWS * DP + 2 * DP * DP) * sizeof(uint16_t) + 4 * sizeof(float);
}

/* One side's share of the call. */
typedef struct map_side {
    const float *x, *W, *bias; /* W, bias: of all heads */
    int heads, x_heads;        /* of the map, of x */
    int x_per;                 /* heads of the map that read one head of x */
    uint16_t *half;            /* [B,x_heads,T,DP]: x in half; NULL: not wanted */
    uint16_t *phi;             /* [B,heads,T,PP], as stored */
    float *dphi;               /* [B,heads,T,PP]; then draw in the first DP columns */
    float *dx;                 /* NULL: not wanted */
    bool dx_by_token;          /* dx is [B,T,heads,D], else [B,heads,T,DP] */
    bool dx_add;
    float *part_bias; /* or NULL */
} map_side;

/* Both sides go in one launch: heads of q, then heads of k. */
typedef struct map_sides {
    map_side q, k;
} map_sides;

/* Rows g and g + 8 of a warp, in the places of C. */
template <int DP> struct row_map {
    float raw[DP / 8][4];
    float norm_x[2], norm_raw[2], keep[2], bias;
    bool norm_kept[2];

    __device__ __forceinline__ float u(int n, int i) const
    {
        return raw[n][i] * keep[i / 2] + bias;
    }
};

/* Column of element i of tile n. */
STI_DEVICE int column_of(const lane_place &at, int n, int i)
{
    return 8 * n + 2 * at.t + (i & 1);
}

/* Split tiles in shared memory. */
template <int DP> struct map_tiles {
    unsigned char *x, *x_low, *W, *W_low;
    __device__ __forceinline__ float *end(void) const
    {
        return (float *)(W_low + DP * DP * 2);
    }
    /* Columns 8 n + 2 t, and the next, of x. */
    __device__ __forceinline__ float2 at(int row, int n, int t) const
    {
        const uint32_t place = unit_at<DP>(row, n) + (uint32_t)t * 4;
        const float2 a = unpack_half2(*(const uint32_t *)(x + place));
        const float2 b = unpack_half2(*(const uint32_t *)(x_low + place));
        return make_float2(a.x + b.x, a.y + b.y);
    }
};

/* x, also in half where that is wanted, and W into shared memory. */
template <int DP>
STI_DEVICE map_tiles<DP> load_map(const sti_cuda_train &p, const map_side &side, int b,
                                  int head, int first, bool keep)
{
    constexpr int X = ROWS * DP * 2;
    unsigned char *room = (unsigned char *)block_memory();
    const map_tiles<DP> to = {room, room + X, room + 2 * X, room + 2 * X + DP * DP * 2};
    const int x_head = head / side.x_per;
    keep = keep && side.half && head % side.x_per == 0;
    split_tile<ROWS, DP>(
        to.x, to.x_low, p.D, p.vec,
        [&](int r) {
            return first + r < p.T
                       ? side.x + token_at(p, side.x_heads, b, x_head, first + r) * p.D
                       : (const float *)NULL;
        },
        [&](int r) {
            return keep && first + r < p.T
                       ? side.half + row_at(p, side.x_heads, b, x_head, first + r) * DP
                       : (uint16_t *)NULL;
        });
    if (side.W) {
        const float *from = side.W + (size_t)head * p.D * p.F;
        const bool vec = p.F % 4 == 0 && ((uintptr_t)from & 15) == 0;
        split_tile<DP, DP>(
            to.W, to.W_low, p.F, vec,
            [&](int r) {
                return r < p.D ? from + (size_t)r * p.F : (const float *)NULL;
            },
            keep_none());
    }
    __syncthreads();
    return to;
}

/* raw and norms. */
template <int DP>
STI_DEVICE void map_rows(const sti_cuda_train &p, const map_side &side,
                         const map_tiles<DP> &tiles, int head, const lane_place &at,
                         row_map<DP> *m)
{
    constexpr int N = DP / 8;
    const int row = at.warp * 16 + at.g; /* and row + 8 */
    float square[2] = {0, 0}, raw_square[2] = {0, 0};
    clear_tiles(m->raw);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float2 x = tiles.at(row + 8 * r, n, at.t);
            square[r] += x.x * x.x + x.y * x.y;
            if (side.W) continue;
            m->raw[n][2 * r] = column_of(at, n, 0) < p.F ? x.x : 0;
            m->raw[n][2 * r + 1] = column_of(at, n, 1) < p.F ? x.y : 0;
        }
    if (side.W) {
        const uint32_t mine = (uint32_t)at.warp * 16 * DP * 2;
        const auto place = [&](const unsigned char *tile, uint32_t skip) {
            return lane_address<DP>::by16(shared_address(tile) + skip, at.lane);
        };
        split_product<N, DP, true>(m->raw, place(tiles.x, mine),
                                   place(tiles.x_low, mine), place(tiles.W, 0),
                                   place(tiles.W_low, 0));
    }
    m->bias = side.bias ? side.bias[head] : 0;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) raw_square[i / 2] += m->raw[n][i] * m->raw[n][i];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        m->norm_x[r] = sqrtf(quad_sum(square[r]));
        const float norm = sqrtf(quad_sum(raw_square[r]));
        m->norm_kept[r] = norm > smallest_norm;
        m->norm_raw[r] = fmaxf(norm, smallest_norm);
        m->keep[r] = p.norm_preserved ? m->norm_x[r] / m->norm_raw[r] : 1;
    }
}

/* softmax(u) = 2^(u log2 e - up), softmax(-u) = 2^(down - u log2 e), by rows. */
typedef struct row_softmax {
    float up[2], down[2];
} row_softmax;

template <int DP>
STI_DEVICE row_softmax soften_rows(const sti_cuda_train &p, const row_map<DP> &m,
                                   const lane_place &at)
{
    row_softmax x;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = -INFINITY, bottom = INFINITY, sum = 0, sum_minus = 0;
#pragma unroll
        for (int n = 0; n < DP / 8; n++)
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; i++)
                if (column_of(at, n, i) < p.F) {
                    top = fmaxf(top, m.u(n, i));
                    bottom = fminf(bottom, m.u(n, i));
                }
        top = quad_max(top) * log2_e;
        bottom = -quad_max(-bottom) * log2_e;
#pragma unroll
        for (int n = 0; n < DP / 8; n++)
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; i++)
                if (column_of(at, n, i) < p.F) {
                    sum += exp2_fast(m.u(n, i) * log2_e - top);
                    sum_minus += exp2_fast(bottom - m.u(n, i) * log2_e);
                }
        x.up[r] = top + log2f(quad_sum(sum));
        x.down[r] = bottom - log2f(quad_sum(sum_minus));
    }
    return x;
}

/* ---- Features ----------------------------------------------------------------------
 */

/* Features of columns 8 n + 2 t, and the next, of a row of softmaxes, as stored. */
STI_DEVICE uint32_t stored_features(const sti_cuda_train &p, const lane_place &at,
                                    int n, float x, float y)
{
    x = fmaxf(x, p.feature_floor) * p.phi_unit;
    y = fmaxf(y, p.feature_floor) * p.phi_unit;
    return pack_half2(column_of(at, n, 0) < p.F ? x : 0,
                      column_of(at, n, 1) < p.F ? y : 0);
}

/* Softmaxes of the warp's rows into its rows of x, which it alone has read. */
template <int DP>
STI_DEVICE void put_features(const sti_cuda_train &p, const row_map<DP> &m,
                             const map_tiles<DP> &tiles, const lane_place &at)
{
    const row_softmax x = soften_rows<DP>(p, m, at);
#pragma unroll
    for (int n = 0; n < DP / 8; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint32_t place =
                unit_at<DP>(at.warp * 16 + at.g + 8 * r, n) + (uint32_t)at.t * 4;
            const float a = m.u(n, 2 * r) * log2_e, b = m.u(n, 2 * r + 1) * log2_e;
            *(uint32_t *)(tiles.x + place) = stored_features(
                p, at, n, exp2_fast(a - x.up[r]), exp2_fast(b - x.up[r]));
            *(uint32_t *)(tiles.x_low + place) = stored_features(
                p, at, n, exp2_fast(x.down[r] - a), exp2_fast(x.down[r] - b));
        }
}

/* Features of a relu map, floats; to: those of the block's first row. */
template <int DP>
STI_DEVICE void write_relu(const sti_cuda_train &p, const row_map<DP> &m, float *to,
                           int rows, const lane_place &at)
{
#pragma unroll
    for (int n = 0; n < DP / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = at.warp * 16 + at.g + i / 2 * 8, e = column_of(at, n, i);
            const float phi = fmaxf(fmaxf(m.u(n, i), 0), p.feature_floor);
            if (row < rows) to[(size_t)row * p.PP + e] = e < p.F ? phi : 0;
        }
}

template <int DP>
static __global__ void __launch_bounds__(THREADS, DP <= 64 ? 4 : 2)
    features_kernel(const sti_cuda_train p, const map_sides sides)
{
    constexpr int UNITS = DP / 8;
    const lane_place at = lane_place_of();
    const int first = (int)blockIdx.x * ROWS, b = (int)blockIdx.z;
    const bool keys = (int)blockIdx.y >= sides.q.heads;
    const map_side &side = keys ? sides.k : sides.q;
    const int head = (int)blockIdx.y - (keys ? sides.q.heads : 0);
    const map_tiles<DP> tiles = load_map<DP>(p, side, b, head, first, true);
    row_map<DP> m;
    map_rows<DP>(p, side, tiles, head, at, &m);
    const size_t row0 = row_at(p, side.heads, b, head, first);
    if (p.relu) {
        write_relu<DP>(p, m, (float *)side.phi + row0 * p.PP, p.T - first, at);
        return;
    }
    __syncwarp();
    put_features<DP>(p, m, tiles, at);
    __syncwarp();
    uint16_t *to = side.phi + row0 * p.PP;
#pragma unroll 4
    for (int i = at.lane; i < 16 * UNITS; i += 32) {
        const int row = at.warp * 16 + i / UNITS, u = i % UNITS;
        if (first + row >= p.T) continue;
        uint16_t *unit = to + (size_t)row * p.PP + u * 8;
        *(uint4 *)unit = *(const uint4 *)(tiles.x + unit_at<DP>(row, u));
        *(uint4 *)(unit + DP) = *(const uint4 *)(tiles.x_low + unit_at<DP>(row, u));
    }
}

/* ---- Inputs in half ----------------------------------------------------------------
 */

/* x [B,T,heads,D] and where it goes, [B,heads,T,DP]. */
typedef struct half_job {
    const float *x;
    uint16_t *to;
    int heads;
} half_job;

/* Eight columns a thread. Grid: units of a head, heads of all jobs, sequences. */
static __global__ void __launch_bounds__(THREADS)
    halves_kernel(const sti_cuda_train p, const half_job q, const half_job k,
                  const half_job v)
{
    const int i = (int)(blockIdx.x * THREADS + threadIdx.x), units = p.DP / 8;
    const int t = i / units, e = i % units * 8, b = (int)blockIdx.z;
    const int y = (int)blockIdx.y;
    if (t >= p.T) return;
    const auto convert = [&](const half_job &job, int head) {
        const float *from = job.x + token_at(p, job.heads, b, head, t) * p.D;
        *(uint4 *)(job.to + row_at(p, job.heads, b, head, t) * p.DP + e) =
            pack_half8(load4(from, e, p.D, p.vec), load4(from, e + 4, p.D, p.vec));
    };
    if (y < q.heads)
        convert(q, y);
    else if (y < q.heads + k.heads)
        convert(k, y - q.heads);
    else
        convert(v, y - q.heads - k.heads);
}

/* ---- Gradient ----------------------------------------------------------------------
 */

/* du from dphi, whose rows g and g + 8 are row[0] and row[1] (NULL: zeros); below the
 * floor a feature is a constant. Each half: d softmax(x)_i = p_i (dphi_i - sum p dphi),
 * x = -u in the second. */
template <int DP>
STI_DEVICE void features_backward(const sti_cuda_train &p, const row_map<DP> &m,
                                  const float *const row[2], const lane_place &at,
                                  float (&du)[DP / 8][4])
{
    constexpr int N = DP / 8;
    const auto read =
        [&](int r, int n) { /* padded: aligned, zeros past the end */
                            return row[r] ? *(const float2 *)(row[r] + 8 * n + 2 * at.t)
                                          : make_float2(0, 0);
        };
    if (p.relu) {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float2 d = read(r, n);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float u = m.u(n, 2 * r + i);
                    const bool passes =
                        u > 0 && u >= p.feature_floor && column_of(at, n, i) < p.F;
                    du[n][2 * r + i] = passes ? (i ? d.y : d.x) : 0;
                }
            }
        return;
    }
    const row_softmax x = soften_rows<DP>(p, m, at);
    uint32_t both[N][4]; /* softmax(u), softmax(-u): in half they suffice for a mean */
    float mean[2] = {0, 0}, mean_minus[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float2 d = read(r, n), d_minus = read(r, n + N);
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; i++) {
                const bool is = column_of(at, n, i) < p.F;
                const float u = m.u(n, i) * log2_e;
                const float plus = is ? exp2_fast(u - x.up[r]) : 0;
                const float minus = is ? exp2_fast(x.down[r] - u) : 0;
                const float a =
                    plus >= p.feature_floor ? plus * (i % 2 ? d.y : d.x) : 0;
                const float b = minus >= p.feature_floor
                                    ? minus * (i % 2 ? d_minus.y : d_minus.x)
                                    : 0;
                mean[r] += a;
                mean_minus[r] += b;
                du[n][i] = a - b;
                both[n][i] = pack_half2(plus, minus);
            }
        }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        mean[r] = quad_sum(mean[r]);
        mean_minus[r] = quad_sum(mean_minus[r]);
    }
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 w = unpack_half2(both[n][i]);
            du[n][i] += w.y * mean_minus[i / 2] - w.x * mean[i / 2];
        }
}

/* The block's sum of du, for the bias. warp_sum: 4 floats of shared memory. */
template <int DP>
STI_DEVICE void write_bias(const float (&du)[DP / 8][4], const lane_place &at,
                           float *warp_sum, float *to)
{
    float sum = 0;
#pragma unroll
    for (int n = 0; n < DP / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum += du[n][i];
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (at.lane == 0) warp_sum[at.warp] = sum;
    __syncthreads();
    if (threadIdx.x == 0)
        *to = (warp_sum[0] + warp_sum[1]) + (warp_sum[2] + warp_sum[3]);
}

/* dx = draw W^T; rows of draw in units of their largest. */
template <int DP>
STI_DEVICE void turn_back(const float (&draw)[DP / 8][4], const map_tiles<DP> &tiles,
                          const lane_place &at, float (&dx)[DP / 8][4])
{
    constexpr int N = DP / 8;
    const lane_address<DP> W = lane_address<DP>::by8(shared_address(tiles.W), at.lane);
    float largest[2] = {0, 0}, part[2], whole[2];
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            largest[i / 2] = fmaxf(largest[i / 2], fabsf(draw[n][i]));
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float unit = unit_log2(quad_max(largest[r]));
        part[r] = unit_part(unit);
        whole[r] = unit_whole(unit);
    }
    clear_tiles(dx);
#pragma unroll
    for (int k = 0; k < N; k += 2) {
        uint32_t a[4], b[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *x = &draw[k + i / 2][i % 2 * 2];
            a[i] = pack_half2(x[0] * part[i % 2], x[1] * part[i % 2]);
        }
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            load_squares(b, W.at(8 * n, k / 2));
            mma(dx[n], a, b[0], b[1]);
            mma(dx[n + 1], a, b[2], b[3]);
        }
    }
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) dx[n][i] *= whole[i / 2];
}

/* u = raw |x| / |raw|: draw = |x|/|raw| (du - raw (raw.du)/|raw|^2), d|x| = raw.du /
 * |raw|; dx = draw W^T + x d|x| / |x|. At x = 0 the gradient of |x| is 0; under its
 * floor |raw| is a constant. */
template <int DP>
static __global__ void __launch_bounds__(THREADS, DP <= 64 ? 3 : 2)
    map_backward_kernel(const sti_cuda_train p, const map_sides sides)
{
    constexpr int N = DP / 8;
    const lane_place at = lane_place_of();
    const int first = (int)blockIdx.x * ROWS, b = (int)blockIdx.z;
    const bool keys = (int)blockIdx.y >= sides.q.heads;
    const map_side &side = keys ? sides.k : sides.q;
    const int head = (int)blockIdx.y - (keys ? sides.q.heads : 0);
    const size_t row0 = row_at(p, side.heads, b, head, first);
    expect_rows<ROWS>(p.PP, [&](int r) {
        return first + r < p.T ? (const float *)side.dphi + (row0 + r) * p.PP
                               : (const float *)NULL;
    });
    if (side.dx && side.dx_add) /* by token */
        expect_rows<ROWS>(p.D, [&](int r) {
            return first + r < p.T
                       ? (const float *)side.dx +
                             token_at(p, side.heads, b, head, first + r) * p.D
                       : (const float *)NULL;
        });
    const map_tiles<DP> tiles = load_map<DP>(p, side, b, head, first, false);
    row_map<DP> m;
    map_rows<DP>(p, side, tiles, head, at, &m);

    const int t0 = first + at.warp * 16 + at.g;
    float *row[2];
#pragma unroll
    for (int r = 0; r < 2; r++)
        row[r] = t0 + 8 * r < p.T
                     ? side.dphi + (row0 + at.warp * 16 + at.g + 8 * r) * p.PP
                     : NULL;
    float du[N][4];
    const float *const from[2] = {row[0], row[1]};
    features_backward<DP>(p, m, from, at, du);
    if (side.part_bias)
        write_bias<DP>(du, at, tiles.end(),
                       side.part_bias +
                           ((size_t)b * gridDim.x + blockIdx.x) * side.heads + head);

    float along[2] = {0, 0};
    if (p.norm_preserved) {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) along[i / 2] += m.raw[n][i] * du[n][i];
#pragma unroll
        for (int r = 0; r < 2; r++) along[r] = quad_sum(along[r]) / m.norm_raw[r];
    }
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = i / 2;
            const float back =
                m.norm_kept[r] ? m.raw[n][i] * (along[r] / m.norm_raw[r]) : 0;
            du[n][i] = tf32((du[n][i] - back) * m.keep[r]);
        }
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int n = 0; row[r] && n < N; n++)
            *(float2 *)(row[r] + column_of(at, n, 0)) =
                make_float2(du[n][2 * r], du[n][2 * r + 1]);
    if (!side.dx) return;

    float dx[N][4];
    if (side.W)
        turn_back<DP>(du, tiles, at, dx);
    else
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) dx[n][i] = du[n][i];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (!row[r]) continue;
        const float turn = m.norm_x[r] > 0 ? along[r] / m.norm_x[r] : 0;
        const int cols = side.dx_by_token ? p.D : DP;
        const bool vec = p.vec || !side.dx_by_token;
        float *to = side.dx_by_token
                        ? side.dx + token_at(p, side.heads, b, head, t0 + 8 * r) * p.D
                        : side.dx + row_at(p, side.heads, b, head, t0 + 8 * r) * DP;
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int e = column_of(at, n, 0);
            const float2 own = tiles.at(at.warp * 16 + at.g + 8 * r, n, at.t);
            const float2 was =
                side.dx_add ? read2(to, e, cols, vec) : make_float2(0, 0);
            write2(to, e, cols, vec, was.x + dx[n][2 * r] + turn * own.x,
                   was.y + dx[n][2 * r + 1] + turn * own.y);
        }
    }
}

/* ---- Launchers ---------------------------------------------------------------------
 */

static map_sides sides_of(const sti_cuda_train *p)
{
    return map_sides{{p->q, p->map_q, p->bias_q, p->H, p->H, 1, p->half_q, p->phi_q,
                      p->dphi_q, p->grad.q, true, p->has_window, p->part_bias_q},
                     {p->k, p->map_k, p->bias_k, p->S, p->G, p->S / p->G, p->half_k,
                      p->phi_k, p->dphi_k, p->dk_fold, false, false, p->part_bias_k}};
}

static dim3 map_grid(const sti_cuda_train *p, const map_sides *s)
{
    return dim3((p->T - 1) / ROWS + 1, s->q.heads + s->k.heads, p->B);
}

still_status sti_train_halves(sti_dev *dev, const sti_cuda_train *p, still_error *err)
{
    const bool all = !p->has_linear;
    const half_job q = {p->q, p->half_q, all ? p->H : 0};
    const half_job k = {p->k, p->half_k, all ? p->G : 0};
    const half_job v = {p->v, p->half_v, p->G};
    const int blocks = (int)(((int64_t)p->T * (p->DP / 8) - 1) / THREADS + 1);
    return launch(dev, "hybrid training: inputs in half", err, halves_kernel,
                  dim3(blocks, q.heads + k.heads + v.heads, p->B), THREADS, 0, *p, q, k,
                  v);
}

still_status sti_train_features(sti_dev *dev, const sti_cuda_train *p, still_error *err)
{
    const map_sides sides = sides_of(p);
#define FEATURES(W)                                                                    \
    launch(dev, "hybrid training: features", err, features_kernel<W>,                  \
           map_grid(p, &sides), THREADS, map_shared<W>(), *p, sides)
    return STI_TRAIN_BY_WIDTH(p->DP, FEATURES);
}

/* A side whose gradient is not wanted has no heads here. */
still_status sti_train_maps(sti_dev *dev, const sti_cuda_train *p, still_error *err)
{
    map_sides sides = sides_of(p);
    if (!p->dphi_q) sides.q.heads = 0;
    if (!p->dphi_k) sides.k.heads = 0;
#define MAP_BACKWARD(W)                                                                \
    launch(dev, "hybrid training: gradient of the maps", err, map_backward_kernel<W>,  \
           map_grid(p, &sides), THREADS, map_shared<W>(), *p, sides)
    return STI_TRAIN_BY_WIDTH(p->DP, MAP_BACKWARD);
}
