/* output.cu - the queries of a chunk against the window, the salient list and the
 * state: STILL eq. 7, 10 and 11 for all tokens of a piece.
 *
 * A block has up to 128 queries that see the same keys: those of one chunk (or 128 of
 * it) and one head, or, where chunks are short, of several heads of a kv head. Four
 * warps of 32 queries, two blocks a processor; sums stay in registers (128 of them for
 * outputs of D = 128), keys and values come in tiles of 64 through two stages of shared
 * memory. Bounded by tensor cores.
 *
 * The state comes first (linear.cuh). In exact scaling it is where the running maximum
 * starts: M = alpha, o = (phi(q) s) g, l = phi(q).z, and window and list continue from
 * there (FlashAttention's recurrence):
 *   M' = max(M, logits),  o' = e^(M - M') o + sum e^(logit - M') v,  l likewise.
 * In window scaling M is of the softmax tokens alone; the linear term then waits in y,
 * written and read back by the same thread.
 *
 * With keys before RoPE (RAW; see chunk.h) the tile of queries is filled up to three
 * times: as features want them, as they are for window and near tokens, and at the
 * capped distance for far ones, which come last.
 *
 * Shared memory: queries [128, D]; four buffers [64, D]: keys and values of two stages.
 * For the state, W (then phi of -u) takes the first two buffers, tiles of means the
 * others. Then z [2 D] and the places of the keys. */
#include "backend/cuda/hybrid/chunk/linear.cuh"

/* ---- A block ------------------------------------------------------------- */

/* What all threads of a block know lies in shared memory: in registers it would push
 * sums out of them. */
typedef struct block_notes {
    tile_place place;
    head_terms terms[ROWS / 32]; /* of the block's heads */
    int near;                    /* tokens of the list that are not far */
    int far;                     /* first tile of keys that are; RAW */
} block_notes;

/* Near and far tokens of a block's list are tiles of their own. */
static __device__ __forceinline__ void part_list(const sti_chunk_piece &c,
                                                 block_notes *n)
{
    tile_place &p = n->place;
    n->near = p.salient;
    if (c.h.position_cap > 0 && c.capacity > 0)
        n->near = c.near[(size_t)p.retired * c.h.S + p.g];
    n->far = p.window_tiles + (n->near + KEYS - 1) / KEYS;
    p.tiles = n->far + (p.salient - n->near + KEYS - 1) / KEYS;
}

/* ---- Window and list ----------------------------------------------------- */

/* Logits of the warp's queries and a tile of keys. */
template <int D>
static __device__ __forceinline__ void logits(float (&s)[2][8][4], lane_address<D> q,
                                              lane_address<D> k)
{
#pragma unroll
    for (int mt = 0; mt < 2; mt++)
#pragma unroll
        for (int nt = 0; nt < 8; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[mt][nt][e] = 0;
#pragma unroll
    for (int ks = 0; ks < D / 16; ks++) {
        uint32_t a[2][4];
        ldmatrix_x4(a[0], q.at(0, ks));
        ldmatrix_x4(a[1], q.at(16, ks));
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t b[4];
            ldmatrix_x4(b, k.at(n * 16, ks));
#pragma unroll
            for (int mt = 0; mt < 2; mt++) {
                mma(s[mt][2 * n], a[mt], b[0], b[1]);
                mma(s[mt][2 * n + 1], a[mt], b[2], b[3]);
            }
        }
    }
}

/* Row i sees the keys before the limit of its row, or one for all. */
static __device__ __forceinline__ void mask(float (&s)[2][8][4], int limit, int per_row,
                                            int lane)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int end = limit + per_row * lane_row(i, lane) - (lane & 3) * 2;
#pragma unroll
        for (int nt = 0; nt < 8; nt++)
#pragma unroll
            for (int x = 0; x < 2; x++)
                if (nt * 8 + x >= end) s[i >> 1][nt][(i & 1) * 2 + x] = -INFINITY;
    }
}

/* s becomes weights 2^(s scale - top + factor); the running sums move to the new top.
 */
template <int D>
static __device__ __forceinline__ void soften(float (&s)[2][8][4], warp_sums<D> &w,
                                              float scale, float factor)
{
    float keep[4];
    bool moved = false;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int mt = i >> 1, e = (i & 1) * 2;
        float top = fmaxf(s[mt][0][e], s[mt][0][e + 1]);
#pragma unroll
        for (int nt = 1; nt < 8; nt++)
            top = fmaxf(top, fmaxf(s[mt][nt][e], s[mt][nt][e + 1]));
        top = fmaxf(w.top[i], quad_max(top) * scale);
        keep[i] = exp2_fast(w.top[i] - top);
        moved = moved || top > w.top[i];
        w.top[i] = top;
        const float shift = factor - top;
        float sum = 0;
#pragma unroll
        for (int nt = 0; nt < 8; nt++)
#pragma unroll
            for (int x = e; x < e + 2; x++) {
                s[mt][nt][x] = exp2_fast(fmaf(s[mt][nt][x], scale, shift));
                sum += s[mt][nt][x];
            }
        w.den[i] = w.den[i] * keep[i] + sum;
    }
    if (!__any_sync(0xffffffffu, moved)) return;
#pragma unroll
    for (int mt = 0; mt < 2; mt++)
#pragma unroll
        for (int nt = 0; nt < D / 8; nt++)
#pragma unroll
            for (int e = 0; e < 4; e++) w.o[mt][nt][e] *= keep[2 * mt + (e >> 1)];
}

/* o += weights times values. */
template <int D>
static __device__ __forceinline__ void
add_values(warp_sums<D> &w, const float (&s)[2][8][4], lane_address<D> v)
{
#pragma unroll
    for (int ks = 0; ks < KEYS / 16; ks++) {
        uint32_t a[2][4];
#pragma unroll
        for (int mt = 0; mt < 2; mt++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[mt][i] = pack_half2(s[mt][2 * ks + (i >> 1)][(i & 1) * 2],
                                      s[mt][2 * ks + (i >> 1)][(i & 1) * 2 + 1]);
        add_means<D>(w.o, a, v, ks);
    }
}

/* Tokens that the list (RAW: its near or its far part) has from tile j of the keys on.
 */
template <bool RAW>
static __device__ __forceinline__ int tokens_left(const block_notes &n, int j)
{
    const tile_place &p = n.place;
    if (!RAW) return p.salient - (j - p.window_tiles) * KEYS;
    return j < n.far ? n.near - (j - p.window_tiles) * KEYS
                     : p.salient - n.near - (j - n.far) * KEYS;
}

/* STILL eq. 11, SA: all tiles of keys; the first is on its way. */
template <int D, bool RAW>
static __device__ __forceinline__ void
softmax_sums(const sti_chunk_piece &c, const block_notes &n, const warp_place &place,
             unsigned char *query_tile, uint32_t buffers, const uint16_t *list,
             float factor, warp_sums<D> &w)
{
    enum { STAGE = 2 * KEYS * D * 2 };
    const tile_place &p = n.place;
    const uint32_t queries = shared_address(query_tile);
    const int warp = (int)threadIdx.x >> 5, lane = (int)threadIdx.x & 31;
    const lane_address<D> q =
        lane_address<D>::by16(queries + (uint32_t)warp * 32 * D * 2, lane);
    const float scale = c.h.scale * log2_e;
    for (int j = 0; j < p.tiles; j++) {
        const uint32_t stage = buffers + (uint32_t)(j & 1) * STAGE;
        cp_async_wait<0>();
        __syncthreads(); /* tile j is here, and everybody is done with tile j - 1 */
        if (j + 1 < p.tiles)
            load_keys<D>(c, RAW && j + 1 >= n.far ? c.k_far : c.k, p.g,
                         list + (j + 1) * KEYS,
                         buffers + (uint32_t)((j + 1) & 1) * STAGE);
        if (RAW && j == n.far) {
            load_far_queries<D>(c, p, query_tile);
            __syncthreads();
        }
        const bool listed = j >= p.window_tiles;
        const int key = p.window + j * KEYS; /* of a window's tile */
        if (place.idle || (!listed && key > place.first + 31)) continue;
        float s[2][8][4];
        logits<D>(s, q.opaque(), lane_address<D>::by8(stage, lane).opaque());
        if (listed) {
            const int left = tokens_left<RAW>(n, j);
            if (left < KEYS) mask(s, left, 0, lane);
        } else if (key + KEYS - 1 > place.first) {
            mask(s, place.first - key + 1, 1, lane);
        }
        soften<D>(s, w, scale, factor);
        add_values<D>(w, s, lane_address<D>::by16(stage + KEYS * D * 2, lane).opaque());
    }
}

/* ---- Output -------------------------------------------------------------- */

/* Element offset of column 0 of row i of this lane in q, y and gate, or false. */
static __device__ __forceinline__ bool output_at(const sti_chunk_piece &c,
                                                 const tile_place &p,
                                                 const warp_place &place, int i,
                                                 int lane, size_t *at)
{
    const int t = place.first + lane_row(i, lane);
    if (place.idle || !wanted(p, t)) return false;
    *at =
        ((size_t)(t - p.begin) * c.h.H + p.head + place.head) * c.h.D + (lane & 3) * 2;
    return true;
}

/* The linear sums, gated, become where the softmax sums start; with terms apart they
 * are put into y, and phi(q).z into `waiting` [128], and the softmax sums start at
 * nothing. */
template <int D>
static __device__ __forceinline__ void
start_sums(const sti_chunk_piece &c, const tile_place &p, const warp_place &place,
           const head_terms &terms, warp_sums<D> &w, float *waiting)
{
    const int lane = (int)threadIdx.x & 31;
    const float weight = terms.apart ? exp2_fast(fminf(terms.alpha, 0)) : 1;
    const bool gated = c.h.gate && c.s.gate;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int mt = i >> 1, e = (i & 1) * 2;
        const float den = w.den[i] * terms.unit;
        w.top[i] = terms.apart ? -INFINITY : terms.alpha;
        w.den[i] = terms.apart ? 0 : den;
        if (terms.apart) {
            const float all = quad_sum(den) * weight;
            if ((lane & 3) == 0) waiting[lane_row(i, lane)] = all;
        }
        size_t at;
        if (!output_at(c, p, place, i, lane, &at)) continue;
#pragma unroll
        for (int nt = 0; nt < D / 8; nt++) {
            float2 g = make_float2(1, 1);
            if (gated) {
                g = *(const float2 *)(c.s.gate + at + nt * 8);
                g.x = __fdividef(2, 1 + __expf(-g.x));
                g.y = __fdividef(2, 1 + __expf(-g.y));
            }
            float &x = w.o[mt][nt][e], &y = w.o[mt][nt][e + 1];
            x *= terms.unit * weight * g.x;
            y *= terms.unit * weight * g.y;
            if (terms.apart) {
                *(float2 *)(c.s.y + at + nt * 8) = make_float2(x, y);
                x = y = 0;
            }
        }
    }
}

/* STILL eq. 10, the sum of eq. 1: y = (N_SA + N_LA) / (D_SA + D_LA). */
template <int D>
static __device__ __forceinline__ void
store_output(const sti_chunk_piece &c, const tile_place &p, const warp_place &place,
             const head_terms &terms, const warp_sums<D> &w, const float *waiting)
{
    const int lane = (int)threadIdx.x & 31;
    const float keep = terms.apart ? exp2_fast(-fmaxf(terms.alpha, 0)) : 1;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int mt = i >> 1, e = (i & 1) * 2;
        float den = quad_sum(w.den[i]) * keep + c.h.den_eps;
        if (terms.apart) den += waiting[lane_row(i, lane)];
        den = fmaxf(den, 1.17549435e-38f);
        size_t at;
        if (!output_at(c, p, place, i, lane, &at)) continue;
        const float part = 1 / den;
#pragma unroll
        for (int nt = 0; nt < D / 8; nt++) {
            float2 *to = (float2 *)(c.s.y + at + nt * 8);
            const float2 was = terms.apart ? *to : make_float2(0, 0);
            *to = make_float2((w.o[mt][nt][e] * keep + was.x) * part,
                              (w.o[mt][nt][e + 1] * keep + was.y) * part);
        }
    }
}

/* Grid (blocks of heads, tiles of chunks). */
template <int D, bool RAW, class Pieces>
static __global__ void __launch_bounds__(THREADS, 2)
    output_kernel(const __grid_constant__ Pieces pieces)
{
    extern __shared__ __align__(1024) unsigned char shared[];
    int tile = (int)blockIdx.y, tiles;
    const sti_chunk_piece &c = pieces.find(tile, tiles);
    unsigned char *buffers = shared + ROWS * D * 2;
    float *z = (float *)(buffers + 4 * KEYS * D * 2);
    block_notes *notes = (block_notes *)(z + 2 * D);
    uint16_t *list = (uint16_t *)(notes + 1);
    const int warp = (int)threadIdx.x >> 5;
    if (threadIdx.x == 0) {
        notes->place = place_of(c, (int)blockIdx.x, tile, KEYS);
        if (RAW) part_list(c, notes);
    }
    __syncthreads();
    const tile_place &p = notes->place;
    if (p.first >= p.end || p.first + p.rows <= p.begin) return;
    if ((int)threadIdx.x < p.heads)
        notes->terms[threadIdx.x] =
            terms_of(c, p.g, p.retired, p.head + (int)threadIdx.x);
    const warp_place place = warp_of(p, warp);
    const head_terms &terms = notes->terms[min(place.head, p.heads - 1)];
    const bool linear = c.h.has_linear && folded_after(c, p.g, p.retired) > 0;

    if (RAW && notes->near < p.salient)
        list_near_first(c, p, notes->near, list);
    else
        list_keys(c, p, list);
    for (int i = (int)threadIdx.x; linear && i < 2 * D; i += THREADS)
        z[i] = c.z[((size_t)p.chunk * c.h.S + p.g) * (2 * D) + i];
    load_queries<D>(c, p, RAW && linear && c.h.raw_features ? c.s.q_raw : c.s.q,
                    shared);

    warp_sums<D> w;
    float *waiting = z + ((int)threadIdx.x & ~31); /* z is read by then */
    if (linear) {
        linear_sums<D>(c, p, place, shared, buffers, z, w);
        load_keys<D>(c, c.k, p.g, list, shared_address(buffers));
        if (RAW && c.h.raw_features) load_queries<D>(c, p, c.s.q, shared);
        start_sums<D>(c, p, place, terms, w, waiting);
    } else {
        __syncthreads();
        load_keys<D>(c, c.k, p.g, list, shared_address(buffers));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w.top[i] = -INFINITY;
            w.den[i] = 0;
        }
#pragma unroll
        for (int mt = 0; mt < 2; mt++)
#pragma unroll
            for (int nt = 0; nt < D / 8; nt++)
#pragma unroll
                for (int e = 0; e < 4; e++) w.o[mt][nt][e] = 0;
    }
    softmax_sums<D, RAW>(c, *notes, place, shared, shared_address(buffers), list,
                         terms.factor, w);
    store_output<D>(c, p, place, terms, w, waiting);
}

/* ---- Entry --------------------------------------------------------------- */

static int tiles_of_piece(const sti_chunk_piece &c)
{
    return c.n_chunks * tiles_of_chunk(c.h);
}

template <int D, bool RAW, class Pieces>
static still_status launch(const sti_chunk_group *g, unsigned units,
                           const Pieces &pieces, still_error *err)
{
    const sti_chunk_piece *c = g->c;
    const int keys = 2 * c->h.C + c->capacity + 3 * KEYS; /* whole tiles of all kinds */
    const int bytes =
        (ROWS + 4 * KEYS) * D * 2 + 2 * D * 4 + (int)sizeof(block_notes) + keys * 2;
    const int per = heads_of_block(c->h);
    const int blocks = (c->h.group + per - 1) / per;
    const dim3 grid((unsigned)(c->h.S * blocks), units);
    STI_CUDA(cudaFuncSetAttribute(output_kernel<D, RAW, Pieces>,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "hybrid attention, output");
    output_kernel<D, RAW><<<grid, THREADS, bytes, g->stream>>>(pieces);
    STI_CUDA(cudaGetLastError(), "hybrid attention, output");
    return STILL_OK;
}

extern "C" still_status sti_chunk_output(const sti_chunk_group *g, still_error *err)
{
    if (sti_chunk_output_hopper_runs(g->c)) return sti_chunk_output_hopper(g, err);
    return launch_units(g, tiles_of_piece, [&](unsigned units, const auto &pieces) {
        if (g->c->h.D == 128)
            return g->c->raw ? launch<128, true>(g, units, pieces, err)
                             : launch<128, false>(g, units, pieces, err);
        return g->c->raw ? launch<64, true>(g, units, pieces, err)
                         : launch<64, false>(g, units, pieces, err);
    });
}
