/* hybrid_step.cu - one token of each of n sessions: it enters, gets its score, and
 *   y = (sum_j w_j v_j + a (phi(q) s) * g) / (sum_j w_j + a phi(q).z)
 * over window and salient tokens j. One kernel, grid (selection heads, sessions,
 * units).
 *
 * A unit is a run of keys, for all query heads of the selection head, so that keys are
 * read once; or a run of rows of the state, for some of the heads: the map of a query
 * head is half as large as a state, so sharing the maps out saves more than reading a
 * state twice costs. The result of a unit goes to the room; the unit that arrives last
 * joins them in the order of the units, whoever it is: the same numbers every time.
 * How many units there are depends on the number of sessions alone, never on positions:
 * a recorded launch stays right, and a unit may well find that its run is empty.
 *
 * Bound by memory: at the 8B shape a selection head reads 256 KB of keys and values and
 * 128 KB of state from DRAM, and 256 KB of maps, which all sessions share, from L2. A
 * thread asks for 16 vectors of 16 bytes before it uses the first, 2 blocks of 256
 * threads a multiprocessor: 128 KB in flight, more than the memory's latency needs.
 * Half keys meet queries on tensor cores: without, instructions take longer than bytes.
 *
 * Logits are kept in units of log 2. */
#include "backend/cuda/hybrid_step_join.cuh"
#include "backend/cuda/hybrid_step_state.cuh"
#include "backend/cuda/hybrid_step_unit.cuh"
#include "backend/cuda/follow.cuh"

/* ---- Arrivals ------------------------------------------------------------------- */

/* Units that have arrived are counted in the top bits of folded[sel], whose count of
 * tokens is far from them: a counter that is zero before every launch and needs no
 * memory of its own. The last unit to arrive puts it back. */
#define ARRIVED ((unsigned long long)1 << 48)

STI_DEVICE int64_t folded_tokens(const int64_t *folded)
{
    const long long both = __ldcg(reinterpret_cast<const long long *>(folded));
    return (int64_t)((unsigned long long)both & (ARRIVED - 1));
}

/* What the block wrote before is visible to the unit that arrives last. */
template <typename KV, int HEADS>
STI_DEVICE bool arrives_last(const step_args &a, step_shared<KV, HEADS> &sh)
{
    int64_t *folded = sh.session.folded + selector();
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence(); /* for the block: what it has synchronized with comes first */
        const unsigned long long before =
            atomicAdd(reinterpret_cast<unsigned long long *>(folded), ARRIVED);
        sh.last = (int)(before / ARRIVED) == units_of(a.plan) - 1;
        if (sh.last) *folded = sh.folded;
        __threadfence();
    }
    __syncthreads();
    return sh.last;
}

/* ---- The kernel ----------------------------------------------------------------- */

/* What every unit needs to know; false: the session has no token t. */
template <typename KV, int HEADS, int ROW>
STI_DEVICE bool begin(const step_args &a, step_shared<KV, HEADS> &sh)
{
    const sti_cuda_shape &h = a.h;
    const int tid = (int)threadIdx.x, sel = selector();
    const sti_cuda_session *from = a.session + blockIdx.y;
    for (int i = tid; i < (int)(sizeof(sti_cuda_session) / 4); i += THREADS)
        reinterpret_cast<uint32_t *>(&sh.session)[i] =
            reinterpret_cast<const uint32_t *>(from)[i];
    __syncthreads();
    if (sh.session.T <= a.t) return false;
    if (tid == 0) sh.pos = *sh.session.pos + a.t;
    if (tid == 32) sh.salient = h.has_window ? sh.session.sal_count[sel] : 0;
    if (tid == 64) /* without a window the new token is one of them */
        sh.folded = folded_tokens(sh.session.folded + sel) + (h.has_window ? 0 : 1);
    const size_t kv = ((size_t)a.t * h.G + kv_head(a)) * h.D;
    for (int e = tid; e < h.D; e += THREADS) {
        narrow(sh.session.k[kv + e], &sh.k[e]);
        narrow(sh.session.v[kv + e], &sh.v[e]);
    }
    load_rows<HEADS, ROW>(sh.q,
                          sh.session.q + ((size_t)a.t * h.H + first_head(a)) * h.D,
                          min(HEADS, h.group), h.D);
    __syncthreads();
    return true;
}

template <typename Layout, bool WINDOW, typename KV, int HEADS>
STI_DEVICE void step(const step_args &a, step_shared<KV, HEADS> &sh)
{
    if (!begin<KV, HEADS, Layout::ROW>(a, sh)) return;
    const int unit = this_unit();
    if (unit < a.plan.state_units)
        state_unit<WINDOW>(a, sh, unit);
    else
        key_unit<Layout>(a, sh, unit - a.plan.state_units);
    if (!arrives_last(a, sh)) return;
    if (a.h.D % 4 == 0)
        write_output<4>(a, sh);
    else
        write_output<1>(a, sh);
    if (a.h.has_window && (a.h.select > 0 || a.h.score == STI_SCORE_RECEIVED))
        write_score(a, sh);
}

template <typename KV, int VEC, int LANES, int CHUNKS, int HEADS>
static __global__ void __launch_bounds__(THREADS)
    step_kernel(const __grid_constant__ step_args a)
{
    __shared__ step_shared<KV, HEADS> sh;
    step<key_layout<KV, VEC, LANES, CHUNKS, HEADS>, false>(a, sh);
}

template <int ROW>
static __global__ void __launch_bounds__(THREADS, TILE_BLOCKS)
    tile_step_kernel(const __grid_constant__ step_args a)
{
    __shared__ step_shared<__half, MAX_HEADS> sh;
    sti_lead();
    sti_follow();
    step<tile_layout<ROW>, true>(a, sh);
}

/* ---- Launch --------------------------------------------------------------------- */

static int at_most(int x, int limit)
{
    return x < limit ? x : limit;
}
static int at_least(int x, int limit)
{
    return x > limit ? x : limit;
}

/* Rows of keys that vectors of 16 bytes fill. */
static bool in_vectors(const sti_cuda_shape *h)
{
    return h->D % (h->half_kv ? 8 : 4) == 0;
}

/* Keys that tensor cores are for. */
static bool in_tiles(const sti_cuda_shape *h)
{
    return h->half_kv && h->has_window && in_vectors(h) && h->D <= HALF_D;
}

/* Units for what the device runs twice over, so that short ones fill what long ones
 * leave, but none smaller than what a block asks for before it first waits: joining one
 * more would cost more than it brings. */
static step_plan plan_of(const sti_dev *dev, const sti_cuda_shape *h, int n)
{
    const int no_cap = 1 << 12, pairs = at_least(n * h->S, 1);
    const int least_keys = 16 * WARPS;
    const int least_rows = at_least(THREADS * STATE_AHEAD * 4 / h->D, 1);
    /* A lane has more of a wide row of floats: fewer heads fit its registers. */
    const int most = h->half_kv || h->D <= 64 ? MAX_HEADS : MAX_HEADS / 2;
    const int passes = (h->group + most - 1) / most;
    const int at_once = (in_tiles(h) ? TILE_BLOCKS : 1) * dev->sms;
    const int units = at_least((2 * at_once + pairs - 1) / pairs, 2);
    const int keys = 2 * h->C + (h->select == 0 ? 0 : h->cap < 0 ? no_cap : h->cap);
    step_plan p = {in_vectors(h) ? (h->group + passes - 1) / passes : 1, 1, 0, 0, 0};
    if (h->has_linear) {
        const int state = h->has_window ? units / 2 : units;
        if (h->has_window)
            p.head_parts =
                at_most(state >= h->group ? h->group : (h->group + 1) / 2, state);
        p.row_parts = at_least(at_most(state / p.head_parts, h->P / least_rows), 1);
        p.state_units = p.head_parts * p.row_parts;
    }
    if (h->has_window) {
        const int most_units = at_least(units - p.state_units, 1);
        const int each = (keys + most_units - 1) / most_units;
        const int runs = (each + least_keys - 1) / least_keys; /* whole ones */
        p.key_units = (keys + runs * least_keys - 1) / (runs * least_keys);
    }
    return p;
}

static size_t part_floats(const sti_cuda_shape *h, const step_plan *p, int n)
{
    const size_t units = (size_t)(p->state_units + p->key_units);
    return (size_t)n * (size_t)h->S * units * (size_t)h->group * (size_t)part_row(h->D);
}

/* Fewer sessions may be cut into more units, and a room is used for any number. */
size_t sti_cuda_step_room(const sti_dev *dev, const sti_cuda_shape *h, int n)
{
    size_t most = 0;
    for (int i = 1; i <= n; i++) {
        const step_plan p = plan_of(dev, h, i);
        const size_t one = part_floats(h, &p, i);
        if (one > most) most = one;
    }
    const size_t logits =
        h->has_window ? (size_t)n * (size_t)h->H * (2 * (size_t)h->C + 2) : 0;
    const size_t step = (most + logits) * sizeof(float);
    const size_t leave = sti_cuda_leave_room(h, n);
    return step > leave ? step : leave;
}

still_status sti_cuda_step_check(const sti_cuda_shape *h, still_error *err)
{
    if (h->D <= STI_STEP_MAX_D) return STILL_OK;
    return sti_fail(err, STILL_E_UNSUPPORTED,
                    "cuda: hybrid attention with heads of %d numbers, expected at most "
                    "%d",
                    h->D, (int)STI_STEP_MAX_D);
}

template <typename KV, int VEC, int LANES, int CHUNKS, int HEADS>
static void launch_one(const step_args &a, dim3 grid, cudaStream_t stream)
{
    step_kernel<KV, VEC, LANES, CHUNKS, HEADS><<<grid, THREADS, 0, stream>>>(a);
}

template <typename KV, int VEC, int LANES, int CHUNKS, int MOST>
static void launch(const step_args &a, dim3 grid, cudaStream_t stream)
{
    switch (a.plan.heads) {
    case 1: launch_one<KV, VEC, LANES, CHUNKS, 1>(a, grid, stream); return;
    case 2:
        launch_one < KV, VEC, LANES, CHUNKS, MOST<2 ? MOST : 2>(a, grid, stream);
        return;
    case 3:
        launch_one < KV, VEC, LANES, CHUNKS, MOST<3 ? MOST : 3>(a, grid, stream);
        return;
    default: launch_one<KV, VEC, LANES, CHUNKS, MOST>(a, grid, stream); return;
    }
}

extern "C" still_status sti_cuda_hybrid_step(sti_dev *dev, const sti_cuda_shape *h,
                                             const sti_cuda_session *session, int n,
                                             int t, void *room, still_error *err)
{
    if (n <= 0) return STILL_OK;
    STI_TRY(sti_cuda_step_check(h, err));
    step_args a = {*h,  session, t, plan_of(dev, h, n), static_cast<float *>(room),
                   NULL};
    a.logit = a.part + part_floats(h, &a.plan, n);
    const dim3 grid((unsigned)h->S, (unsigned)n,
                    (unsigned)(a.plan.state_units + a.plan.key_units));
    cudaStream_t stream = dev->stream;
    if (!in_vectors(h)) {
        if (h->half_kv)
            launch<__half, 1, 32, 8, 1>(a, grid, stream);
        else
            launch<float, 1, 32, 8, 1>(a, grid, stream);
    } else if (in_tiles(h)) {
        if (h->D <= 64)
            (void)sti_launch(dev, tile_step_kernel<64>, grid, dim3(THREADS), 0, a);
        else
            (void)sti_launch(dev, tile_step_kernel<HALF_D>, grid, dim3(THREADS), 0, a);
    } else if (h->half_kv) {
        launch<__half, 8, 32, 1, MAX_HEADS>(a, grid, stream);
    } else if (h->D <= 64) {
        launch<float, 4, 16, 1, MAX_HEADS>(a, grid, stream);
    } else {
        launch<float, 4, 32, 2, MAX_HEADS / 2>(a, grid, stream);
    }
    STI_CUDA(cudaGetLastError(), "hybrid attention, a step");
    return STILL_OK;
}
