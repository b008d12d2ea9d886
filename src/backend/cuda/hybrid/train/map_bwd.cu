/* map_bwd.cu - gradients of the feature maps, from dphi to x, W and the
 * bias.
 *
 *   u = raw |x| / |raw|:  draw = |x|/|raw| (du - raw (raw.du)/|raw|^2),
 *   d|x| = raw.du / |raw|,  dx = draw W^T + x d|x| / |x|,  dW = sum of x^T draw
 *
 * At x = 0 the gradient of |x| is 0; under its floor |raw| is a constant. Rows of draw
 * are halves in units of their largest. They and x are in shared memory for dW, which
 * is summed after every round: the sum's registers are then not in the way of the
 * rows', and the largest unit of the round is known. Bounded by reading dphi and x. */
#include "backend/cuda/hybrid/train/map.cuh"

/* W; x and draw of a round [rows][DP], tiles; their units; sums of warps. */
template <int DP> static constexpr size_t back_shared(void)
{
    return (2 * DP * DP + 2 * ROWS * DP) * sizeof(uint16_t) +
           (ROWS + 4) * sizeof(float);
}
template <int DP> struct back_tiles {
    unsigned char *W, *x, *draw; /* W: its high parts */
    float *unit, *warp_part;
};
template <int DP> STI_DEVICE back_tiles<DP> back_tiles_of(void)
{
    unsigned char *W = (unsigned char *)block_memory(), *x = W + 2 * DP * DP * 2;
    unsigned char *draw = x + ROWS * DP * 2;
    float *unit = (float *)(draw + ROWS * DP * 2);
    return {W, x, draw, unit, unit + ROWS};
}

/* ---- Rows ---------------------------------------------------------------- */

/* Eight numbers side by side; NULL: zeros. */
STI_DEVICE void read8(float (&to)[8], const float *row)
{
    const float4 a = row ? *(const float4 *)row : make_float4(0, 0, 0, 0);
    const float4 b = row ? *(const float4 *)(row + 4) : make_float4(0, 0, 0, 0);
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
    to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

/* du from a half of the features: d softmax(x)_i = s_i (dphi_i - sum s dphi), x = SIGN
 * u. Below the floor a feature is a constant. The first half sets du, the second adds.
 */
template <int SIGN, int DP, bool FULL>
STI_DEVICE void softmax_backward(const sti_hybrid_train &p, const row_map<DP> &m,
                                 const float *const row[2], const lane_place &at,
                                 float (&du)[DP / 8][4])
{
    float e[DP / 8][4], part[2], mean[2] = {0, 0};
    exponentials<SIGN, DP, FULL>(p, m, at, e, part);
#pragma unroll
    for (int n = 0; n < DP / 8; n += 4)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float d[8];
            read8(d,
                  row[r] ? row[r] + (SIGN < 0 ? DP : 0) + column_of(at, n, 0) : NULL);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float *x = &du[n + j / 2][2 * r + j % 2];
                float *soft = &e[n + j / 2][2 * r + j % 2];
                *soft *= part[r];
                const float share = *soft >= p.h.feature_floor ? *soft * d[j] : 0;
                mean[r] += share;
                *x = SIGN < 0 ? *x - share : share;
            }
        }
#pragma unroll
    for (int r = 0; r < 2; r++) mean[r] = SIGN * quad_sum(mean[r]);
#pragma unroll
    for (int n = 0; n < DP / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) du[n][i] -= e[n][i] * mean[i / 2];
}

/* du from dphi, whose rows g and g + 8 are row[0] and row[1] (NULL: zeros). */
template <int DP, bool FULL>
STI_DEVICE void features_backward(const sti_hybrid_train &p, const row_map<DP> &m,
                                  const float *const row[2], const lane_place &at,
                                  float (&du)[DP / 8][4])
{
    if (!p.relu) {
        softmax_backward<1, DP, FULL>(p, m, row, at, du);
        softmax_backward<-1, DP, FULL>(p, m, row, at, du);
        return;
    }
#pragma unroll
    for (int n = 0; n < DP / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float u = m.u(n, i);
            const bool passes =
                u > 0 && u >= p.h.feature_floor && is_feature<DP, FULL>(p, at, n, i);
            du[n][i] = passes && row[i / 2] ? row[i / 2][column_of(at, n, i)] : 0;
        }
}

/* draw, in place of du; along: raw.du / |raw| of both rows. */
template <int DP>
STI_DEVICE void norm_backward(const sti_hybrid_train &p, const row_map<DP> &m,
                              float (&du)[DP / 8][4], float (&along)[2])
{
    along[0] = along[1] = 0;
    if (!p.h.norm_preserved) return; /* then draw = du */
#pragma unroll
    for (int n = 0; n < DP / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) along[i / 2] += m.raw[n][i] * du[n][i];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        along[r] = quad_sum(along[r]) / m.norm_raw[r];
        const float back = m.norm_kept[r] ? along[r] / m.norm_raw[r] : 0;
#pragma unroll
        for (int n = 0; n < DP / 8; n++)
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; i++)
                du[n][i] = (du[n][i] - m.raw[n][i] * back) * m.keep[r];
    }
}

/* draw in half, as A, and in units of the rows, whose logarithms are `unit`. */
template <int DP>
STI_DEVICE void draw_in_half(const float (&draw)[DP / 8][4],
                             uint32_t (&half)[DP / 16][4], float (&unit)[2])
{
    float largest[2] = {0, 0}, part[2];
#pragma unroll
    for (int n = 0; n < DP / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            largest[i / 2] = fmaxf(largest[i / 2], fabsf(draw[n][i]));
#pragma unroll
    for (int r = 0; r < 2; r++) {
        unit[r] = unit_log2(quad_max(largest[r]));
        part[r] = unit_part(unit[r]);
    }
#pragma unroll
    for (int n = 0; n < DP / 8; n++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            half[n / 2][n % 2 * 2 + r] =
                pack_half2(draw[n][2 * r] * part[r], draw[n][2 * r + 1] * part[r]);
}

/* ---- dx ------------------------------------------------------------------ */

/* Where step k of row `row` of x has its four halves of this lane. */
template <int DP>
STI_DEVICE uint2 *x_at(const back_tiles<DP> &tiles, int row, int k,
                       const lane_place &at)
{
    return (uint2 *)(tiles.x + unit_at<DP>(row, 2 * k + at.t / 2) + at.t % 2 * 8);
}

/* Row t of x and what is added to it. */
template <int DP>
STI_DEVICE void write_dx(const sti_hybrid_train &p, const map_side &side,
                         const back_tiles<DP> &tiles, int b, int head, int t, int row,
                         int r, const float (&dx)[DP / 8][4], float whole, float factor,
                         const lane_place &at)
{
    const int cols = side.dx_by_token ? p.h.D : DP;
    const bool vec = p.vec || !side.dx_by_token;
    float *to = side.dx_by_token ? side.dx + token_at(p, side.heads, b, head, t) * p.h.D
                                 : side.dx + row_at(p, side.heads, b, head, t) * DP;
    float4 was[DP / 16];
#pragma unroll
    for (int k = 0; k < DP / 16; k++)
        was[k] = load4(side.dx_add ? to : NULL, 16 * k + 4 * at.t, cols, vec);
#pragma unroll
    for (int k = 0; k < DP / 16; k++) {
        const uint2 x = *x_at(tiles, row, k, at);
        const float2 a = unpack_half2(x.x), c = unpack_half2(x.y);
        const float *first = &dx[2 * k][2 * r], *second = &dx[2 * k + 1][2 * r];
        store4(to, 16 * k + 4 * at.t, cols, vec,
               make_float4(was[k].x + first[0] * whole + factor * a.x,
                           was[k].y + first[1] * whole + factor * a.y,
                           was[k].z + second[0] * whole + factor * c.x,
                           was[k].w + second[1] * whole + factor * c.y));
    }
}

/* dx = draw W^T + x d|x| / |x| of rows t0 + g and t0 + g + 8. */
template <int DP>
STI_DEVICE void rows_back(const sti_hybrid_train &p, const map_side &side,
                          const back_tiles<DP> &tiles, int b, int head, int t0,
                          const row_map<DP> &m, const uint32_t (&draw)[DP / 16][4],
                          const float (&unit)[2], const float (&along)[2],
                          const lane_place &at)
{
    const lane_address<DP> W = lane_address<DP>::by8(shared_address(tiles.W), at.lane);
    float dx[DP / 8][4];
    clear_tiles(dx);
#pragma unroll
    for (int k = 0; k < DP / 16; k++)
#pragma unroll
        for (int n = 0; n < DP / 8; n += 2) {
            uint32_t w[4];
            ldmatrix_x4(w, W.at(8 * n, k));
            mma(dx[n], draw[k], w[0], w[1]);
            mma(dx[n + 1], draw[k], w[2], w[3]);
        }
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (t0 + at.g + 8 * r < p.T)
            write_dx<DP>(p, side, tiles, b, head, t0 + at.g + 8 * r,
                         at.warp * 16 + at.g + 8 * r, r, dx, unit_whole(unit[r]),
                         m.norm_x[r] > 0 ? along[r] / m.norm_x[r] : 0, at);
}

/* ---- dW ------------------------------------------------------------------ */

/* dW [DP][DP] = x^T draw over the rows of a round, added to `to` but in the first. With
 * the largest unit U, dW = 2^U sum of (x_t 2^(unit_t - U))^T draw_t. A warp makes 16
 * rows of 32 columns at a time. */
template <int DP>
STI_DEVICE void sum_map(const back_tiles<DP> &tiles, float *to, bool add,
                        const lane_place &at)
{
    constexpr int ACROSS = DP / 32, JOBS = DP / 16 * ACROSS, K = ROWS;
    float largest = nothing_log2;
    for (int i = at.lane; i < K; i += 32) largest = fmaxf(largest, tiles.unit[i]);
#pragma unroll
    for (int d = 16; d > 0; d /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, d));
    const float whole = unit_whole(largest);
    const lane_address<DP> X = lane_address<DP>::by8(shared_address(tiles.x), at.lane);
    const lane_address<DP> B =
        lane_address<DP>::by16(shared_address(tiles.draw), at.lane);
    for (int job = at.warp; job < JOBS; job += 4) {
        const int m = job / ACROSS, q = job % ACROSS;
        float dW[4][4];
        clear_tiles(dW);
#pragma unroll 2
        for (int k = 0; k < K; k += 16) {
            uint32_t a[4], w[4];
            ldmatrix_x4_trans(a, X.at(k, m));
#pragma unroll
            for (int i = 0; i < 4; i++) { /* tokens k + 2t, and k + 2t + 8 */
                const float *unit = tiles.unit + k + i / 2 * 8 + 2 * at.t;
                a[i] = times_half2(a[i], pack_half2(exp2_fast(unit[0] - largest),
                                                    exp2_fast(unit[1] - largest)));
            }
#pragma unroll
            for (int n = 0; n < 4; n += 2) {
                ldmatrix_x4_trans(w, B.at(k, 2 * q + n / 2));
                mma(dW[n], a, w[0], w[1]);
                mma(dW[n + 1], a, w[2], w[3]);
            }
        }
        float4 *x[2][2], was[2][2];
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int n = 0; n < 2; n++) {
                x[r][n] = (float4 *)(to + (size_t)(16 * m + at.g + 8 * r) * DP +
                                     column_of(at, 4 * q + 2 * n, 0));
                was[r][n] = add ? *x[r][n] : make_float4(0, 0, 0, 0);
            }
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int n = 0; n < 2; n++)
                *x[r][n] = make_float4(was[r][n].x + dW[2 * n][2 * r] * whole,
                                       was[r][n].y + dW[2 * n][2 * r + 1] * whole,
                                       was[r][n].z + dW[2 * n + 1][2 * r] * whole,
                                       was[r][n].w + dW[2 * n + 1][2 * r + 1] * whole);
    }
}

/* The block's sum of a number of each thread. */
template <int WARPS>
STI_DEVICE void write_sum(float sum, float *warp_part, float *to, const lane_place &at)
{
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (at.lane == 0) warp_part[at.warp] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < WARPS; i++) sum += warp_part[i];
    *to = sum;
}

/* ---- Kernel -------------------------------------------------------------- */

/* dphi of token t; NULL: zeros. */
STI_DEVICE const float *dphi_row(const sti_hybrid_train &p, const map_side &side, int b,
                                 int head, int t)
{
    if (t >= p.T || (side.folded && fold_of(p, b, head, t) >= p.spans)) return NULL;
    return side.dphi + row_at(p, side.heads, b, head, t) * p.PP;
}

/* What the round that begins at token `start` will read. */
template <int DP>
STI_DEVICE void prefetch_round(const sti_hybrid_train &p, const map_side &side, int b,
                               int head, int start)
{
    prefetch_rows<ROWS>(p.PP, [&](int r) {
        return start + r < p.T
                   ? side.dphi + row_at(p, side.heads, b, head, start + r) * p.PP
                   : (const float *)NULL;
    });
    prefetch_rows<ROWS>(p.h.D,
                        [&](int r) { return x_row(p, side, b, head, start + r); });
    if (side.dx && side.dx_add) /* by token */
        prefetch_rows<ROWS>(p.h.D, [&](int r) {
            return start + r < p.T
                       ? (const float *)side.dx +
                             token_at(p, side.heads, b, head, start + r) * p.h.D
                       : (const float *)NULL;
        });
}

template <int DP, bool FULL>
static __global__ void __launch_bounds__(THREADS, DP <= 64 && FULL ? 3 : 2)
    map_backward_kernel(const sti_hybrid_train p, const map_sides sides)
{
    const lane_place at = lane_place_of();
    const bool keys = (int)blockIdx.y >= sides.q.heads;
    const map_side &side = keys ? sides.k : sides.q;
    const int head = (int)blockIdx.y - (keys ? sides.q.heads : 0), b = (int)blockIdx.z;
    const int first = (int)blockIdx.x * STI_HYBRID_TRAIN_MAP_TOKENS;
    const int end = min(first + STI_HYBRID_TRAIN_MAP_TOKENS, p.T);
    const size_t part = ((size_t)b * p.map_parts + blockIdx.x) * side.heads + head;
    const back_tiles<DP> tiles = back_tiles_of<DP>();
    const int row = at.warp * 16 + at.g; /* and row + 8 */
    float bias = 0;
    prefetch_round<DP>(p, side, b, head, first);
    load_map<DP>(p, side, head);
    for (int start = first; start < end; start += ROWS) {
        const int t0 = start + at.warp * 16;
        if (start + ROWS < end) prefetch_round<DP>(p, side, b, head, start + ROWS);
        const float *const dphi[2] = {dphi_row(p, side, b, head, t0 + at.g),
                                      dphi_row(p, side, b, head, t0 + at.g + 8)};
        map_rows<DP> x;
        x.load(p, side, b, head, t0, at);
        __syncthreads(); /* W is there; the last round's rows have been read */
        row_map<DP> m;
        apply_map<DP>(
            p, side, head, x, at,
            [&](int k, const uint32_t(&high)[4]) {
                *x_at(tiles, row, k, at) = make_uint2(high[0], high[2]);
                *x_at(tiles, row + 8, k, at) = make_uint2(high[1], high[3]);
            },
            &m);
        float du[DP / 8][4];
        features_backward<DP, FULL>(p, m, dphi, at, du);
        if (side.part_bias)
#pragma unroll
            for (int n = 0; n < DP / 8; n++)
                bias += (du[n][0] + du[n][1]) + (du[n][2] + du[n][3]);
        float along[2], unit[2];
        uint32_t draw[DP / 16][4];
        norm_backward<DP>(p, m, du, along);
        draw_in_half<DP>(du, draw, unit);
        if (side.dx)
            rows_back<DP>(p, side, tiles, b, head, t0, m, draw, unit, along, at);
        if (!side.part_map) continue;
#pragma unroll
        for (int n = 0; n < DP / 8; n++)
#pragma unroll
            for (int r = 0; r < 2; r++)
                *(uint32_t *)(tiles.draw + unit_at<DP>(row + 8 * r, n) + at.t * 4) =
                    draw[n / 2][n % 2 * 2 + r];
        if (at.t == 0) {
            tiles.unit[row] = unit[0];
            tiles.unit[row + 8] = unit[1];
        }
        __syncthreads();
        sum_map<DP>(tiles, side.part_map + part * DP * DP, start > first, at);
    }
    if (side.part_bias) write_sum<4>(bias, tiles.warp_part, side.part_bias + part, at);
}

/* A side whose gradient is not wanted has no heads here. */
still_status sti_hybrid_train_maps(sti_dev *dev, const sti_hybrid_train *p,
                                   still_error *err)
{
    map_sides sides = map_sides_of(p);
    if (!p->dphi_q) sides.q.heads = 0;
    if (!p->dphi_k) sides.k.heads = 0;
    return by_map(p, [&](auto W, auto FULL) {
        return launch(dev, "hybrid training: gradient of the maps", err,
                      map_backward_kernel<W, FULL>, map_grid(p, &sides), THREADS,
                      back_shared<W>(), *p, sides);
    });
}
