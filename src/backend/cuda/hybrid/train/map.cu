/* map.cu - features (STILL eq. 6) of whole sequences, and inputs in half.
 *
 * Bounded by bandwidth: a token and head reads D floats and writes P halves, and D more
 * where q and k are wanted in half. See map.cuh. */
#include "backend/cuda/hybrid/stored.cuh"
#include "backend/cuda/hybrid/train/map.cuh"

/* ---- Features ------------------------------------------------------------ */

/* softmax(SIGN u) as stored, to rows g and g + 8 (NULL: there is none). */
template <int SIGN, int DP, bool FULL>
STI_DEVICE void write_softmax(const sti_hybrid_train &p, const row_map<DP> &m,
                              uint16_t *const to[2], const lane_place &at)
{
    float e[DP / 8][4], part[2];
    exponentials<SIGN, DP, FULL>(p, m, at, e, part);
    const float floor = p.h.feature_floor * p.phi_unit;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float unit = part[r] * p.phi_unit;
        const auto stored = [&](int n) {
            const float x = softmax_feature(e[n][2 * r], unit, floor);
            const float y = softmax_feature(e[n][2 * r + 1], unit, floor);
            return pack_half2(is_feature<DP, FULL>(p, at, n, 0) ? x : 0,
                              is_feature<DP, FULL>(p, at, n, 1) ? y : 0);
        };
#pragma unroll
        for (int n = 0; to[r] && n < DP / 8; n += 4)
            *(uint4 *)(to[r] + column_of(at, n, 0)) =
                make_uint4(stored(n), stored(n + 1), stored(n + 2), stored(n + 3));
    }
}

/* Features of a relu map, floats. */
template <int DP, bool FULL>
STI_DEVICE void write_relu(const sti_hybrid_train &p, const row_map<DP> &m,
                           float *const to[2], const lane_place &at)
{
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int n = 0; to[r] && n < DP / 8; n++) {
            float phi[2];
#pragma unroll
            for (int i = 0; i < 2; i++)
                phi[i] = is_feature<DP, FULL>(p, at, n, i)
                             ? relu_feature(m.u(n, 2 * r + i), p.h.feature_floor)
                             : 0;
            *(float2 *)(to[r] + column_of(at, n, 0)) = make_float2(phi[0], phi[1]);
        }
}

template <int DP, bool FULL>
static __global__ void __launch_bounds__(THREADS, DP > 64 ? 2
                                                  : FULL  ? 4
                                                          : 3)
    features_kernel(const sti_hybrid_train p, const map_sides sides)
{
    const lane_place at = lane_place_of();
    const bool keys = (int)blockIdx.y >= sides.q.heads;
    const map_side &side = keys ? sides.k : sides.q;
    const int head = (int)blockIdx.y - (keys ? sides.q.heads : 0), b = (int)blockIdx.z;
    const int first = (int)blockIdx.x * STI_HYBRID_TRAIN_MAP_TOKENS;
    const int end = min(first + STI_HYBRID_TRAIN_MAP_TOKENS, p.T);
    const bool halves = side.half && head % side.x_per == 0;
    map_rows<DP> rows;
    rows.load(p, side, b, head, first + at.warp * 16, at);
    load_map<DP>(p, side, head);
    __syncthreads();
    for (int t0 = first + at.warp * 16; t0 < end; t0 += ROWS) {
        const int t[2] = {t0 + at.g, t0 + at.g + 8};
        row_map<DP> m;
        apply_map<DP>(
            p, side, head, rows, at,
            [&](int k, const uint32_t(&high)[4]) {
#pragma unroll
                for (int r = 0; r < 2; r++)
                    if (halves && t[r] < p.T)
                        *(uint2 *)(side.half +
                                   row_at(p, side.x_heads, b, head / side.x_per, t[r]) *
                                       DP +
                                   16 * k + 4 * at.t) =
                            make_uint2(high[r], high[r + 2]);
            },
            &m);
        /* The next rows are on their way during the exponentials. */
        if (t0 + ROWS < end) rows.load(p, side, b, head, t0 + ROWS, at);
        uint16_t *to[2];
#pragma unroll
        for (int r = 0; r < 2; r++)
            to[r] = t[r] < p.T ? side.phi + row_at(p, side.heads, b, head, t[r]) *
                                                p.PP * (p.relu ? 2 : 1)
                               : (uint16_t *)NULL;
        if (p.relu) {
            float *const floats[2] = {(float *)to[0], (float *)to[1]};
            write_relu<DP, FULL>(p, m, floats, at);
            continue;
        }
        write_softmax<1, DP, FULL>(p, m, to, at);
        uint16_t *const second[2] = {to[0] ? to[0] + DP : NULL,
                                     to[1] ? to[1] + DP : NULL};
        write_softmax<-1, DP, FULL>(p, m, second, at);
    }
}

still_status sti_hybrid_train_features(sti_dev *dev, const sti_hybrid_train *p,
                                       still_error *err)
{
    const map_sides sides = map_sides_of(p);
    return by_map(p, [&](auto W, auto FULL) {
        return launch(dev, "hybrid training: features", err, features_kernel<W, FULL>,
                      map_grid(p, &sides), THREADS, 2 * W * W * sizeof(uint16_t), *p,
                      sides);
    });
}

/* ---- Inputs in half ------------------------------------------------------ */

/* x [B,T,heads,D] and where it goes, [B,heads,T,DP]. */
typedef struct half_job {
    const float *x;
    uint16_t *to;
    int heads;
} half_job;

/* Eight columns a thread. Grid: units of a head, heads of all jobs, sequences. */
static __global__ void __launch_bounds__(THREADS)
    halves_kernel(const sti_hybrid_train p, const half_job q, const half_job k,
                  const half_job v)
{
    const int i = (int)(blockIdx.x * THREADS + threadIdx.x), units = p.DP / 8;
    const int t = i / units, e = i % units * 8, b = (int)blockIdx.z;
    const int y = (int)blockIdx.y;
    if (t >= p.T) return;
    const auto convert = [&](const half_job &job, int head) {
        const float *from = job.x + token_at(p, job.heads, b, head, t) * p.h.D;
        *(uint4 *)(job.to + row_at(p, job.heads, b, head, t) * p.DP + e) =
            pack_half8(load4(from, e, p.h.D, p.vec), load4(from, e + 4, p.h.D, p.vec));
    };
    if (y < q.heads)
        convert(q, y);
    else if (y < q.heads + k.heads)
        convert(k, y - q.heads);
    else
        convert(v, y - q.heads - k.heads);
}

/* Eight columns of a key and of a value a thread. Grid: units of a head, kv heads,
 * sequences. */
static __global__ void __launch_bounds__(THREADS) store_kernel(const sti_hybrid_train p)
{
    const int i = (int)(blockIdx.x * THREADS + threadIdx.x), units = p.DP / 8;
    const int t = i / units, e = i % units * 8, g = (int)blockIdx.y,
              b = (int)blockIdx.z;
    if (t >= p.T) return;
    const size_t at = token_at(p, p.h.G, b, g, t) * p.h.D + e;
    const size_t half = row_at(p, p.h.G, b, g, t) * p.DP + e + p.half_stored;
    const auto store = [&](int bits, const float *from, float *to, uint16_t *to_half) {
        float x[8] = {};
        for (int n = 0; n < 8 && e < p.h.D; n++) x[n] = from[at + n];
        if (bits > 0 && e < p.h.D) {
            const rounded_unit r = round_unit(bits, x);
            for (int n = 0; n < 8; n++) x[n] = r.at(n);
        }
        for (int n = 0; n < 8 && e < p.h.D; n++) to[at + n] = x[n];
        *(uint4 *)(to_half + half) = pack_half8(make_float4(x[0], x[1], x[2], x[3]),
                                                make_float4(x[4], x[5], x[6], x[7]));
    };
    store(p.h.key_bits, p.k, p.stored_k, p.half_k);
    store(p.h.value_bits, p.v, p.stored_v, p.half_v);
}

still_status sti_hybrid_train_store(sti_dev *dev, const sti_hybrid_train *p,
                                    still_error *err)
{
    const int blocks = (int)(((int64_t)p->T * (p->DP / 8) - 1) / THREADS + 1);
    return launch(dev, "hybrid training: quantized tokens", err, store_kernel,
                  dim3(blocks, p->h.G, p->B), THREADS, 0, *p);
}

still_status sti_hybrid_train_halves(sti_dev *dev, const sti_hybrid_train *p,
                                     still_error *err)
{
    const bool all = !p->h.has_linear;
    const half_job q = {p->q, p->half_q, all ? p->h.H : 0};
    const half_job k = {p->k, p->half_k, all || p->stored_k ? p->h.G : 0};
    const half_job v = {p->v, p->half_v, p->h.G};
    const int blocks = (int)(((int64_t)p->T * (p->DP / 8) - 1) / THREADS + 1);
    return launch(dev, "hybrid training: inputs in half", err, halves_kernel,
                  dim3(blocks, q.heads + k.heads + v.heads, p->B), THREADS, 0, *p, q, k,
                  v);
}
