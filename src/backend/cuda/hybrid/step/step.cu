/* step.cu - one token of each of n sessions: it enters the window, gets its score
 * (STILL eq. 2 to 5), and its output (eq. 7, 10, 11) is
 *   y = (sum_j w_j v_j + a (phi(q) s) * g) / (sum_j w_j + a phi(q).z)
 * over window and salient tokens j. One kernel, grid (sessions, selection
 * heads, units) or, where lists differ, (sessions, 1, units of all selection heads). Rows
 * of q and k that come before RoPE are rotated on their way to shared memory.
 *
 * A unit is some of the keys, for all query heads of the selection head, so that keys
 * are read once; or a run of rows of the state, for some of the heads: the map of a
 * query head is half as large as a state, so sharing the maps out saves more than
 * reading a state twice costs. A unit's result goes to scratch; the unit that arrives
 * last joins all of them in the order of the units, whichever it is: the same numbers
 * every time. Long lists have more units than short ones, so that no block works long
 * after the others. The number of units depends on the number of sessions alone, never
 * on positions: a captured launch stays right, and a unit may find that it has nothing
 * to do; then nobody waits for it.
 *
 * Bound by memory: at the 8B shape a selection head reads 256 KB of keys and values and
 * 128 KB of state from DRAM, and 256 KB of maps, which all sessions share, from L2. A
 * block has 32 KB of copies to shared memory under way before it uses the first, and a
 * multiprocessor has 5 blocks (6 of small heads in half): 160 KB in flight, more than the
 * memory's latency needs.
 *
 * For few sessions the time is that of a chain of waits, kept short. While the kernel
 * in front still runs, the table of sessions is read and the state is prefetched,
 * unless that kernel writes to it; keys are fetched before it is known which of them
 * count, the state before the features that weigh it. Instructions are read from memory
 * too, 16 bytes each, and between two runs of the kernel a layer's weights have passed
 * through the caches: code that runs once is written as short loops, not unrolled, and
 * the host does the divisions it can. Half keys are multiplied on tensor cores: without
 * them instructions take longer than bytes.
 *
 * Logits are in units of log 2. */
#include "backend/cuda/hybrid/step/join.cuh"
#include "backend/cuda/hybrid/step/state.cuh"
#include "backend/cuda/hybrid/step/unit.cuh"

/* ---- Arrivals ------------------------------------------------------------ */

/* Whether all others have arrived: what they wrote is visible. */
template <typename Layout, typename KV, int HEADS, int WIDE>
STI_DEVICE bool arrives_last(const step_args &a, step_shared<KV, HEADS, WIDE> &sh)
{
    int64_t *folded = sh.session.folded + sh.at.sel;
    pdl_wait(); /* a unit that had nothing to do has not waited yet */
    __syncthreads();
    if (threadIdx.x == 0) {
        const int units = units_at_work<Layout>(a, sh);
        sh.last = units == 1;
        if (!sh.last)
            sh.last = (int)(atomic_add_acq_rel(folded, ARRIVED) / ARRIVED) == units - 1;
        if (sh.last) *folded = sh.now.folded;
    }
    __syncthreads();
    return sh.last;
}

/* ---- The kernel ---------------------------------------------------------- */

/* What every unit needs to know. Until pdl_wait the kernels in front may be writing:
 * only tables are read, which no kernel writes, and the rest is prefetched. Units read
 * settled states before they wait. */
template <typename Layout, typename KV, int HEADS, int WIDE>
STI_DEVICE foreseen begin(const step_args &a, step_shared<KV, HEADS, WIDE> &sh)
{
    const int tid = (int)threadIdx.x;
    const block_place at = block_place_of(a);
    const sti_cuda_hybrid_session *from = a.session + this_session();
    for (int i = tid; i < (int)(sizeof(sti_cuda_hybrid_session) / 4); i += THREADS)
        reinterpret_cast<uint32_t *>(&sh.session)[i] =
            reinterpret_cast<const uint32_t *>(from)[i];
    const float freq = a.h.unrotated ? token_row<1, Layout::ROW>::frequency(a.h) : 0;
    if (tid == 0) sh.at = at;
    __syncthreads();
    const int pos = __ldcg(sh.session.pos) + a.t;
    if (at.unit < a.plan.state_units) {
        if (a.plan.early) prefetch_state(a, sh, at.unit);
    } else {
        /* a thread of a warp of its own for each part: they take as long as one */
        const salient_list list = salient_list_of(a.h, sh.session.capacity, at.sel);
        if (tid == 0) {
            sh.list = list;
            sh.keys_at =
                rows_of<Layout>(a, sh, list, sh.session.win_k, sh.session.sal_k);
            sh.values_at =
                rows_of<Layout>(a, sh, list, sh.session.win_v, sh.session.sal_v);
            sh.logits = logits_at(a, sh, 0);
        } else if (tid == 32) {
            sh.keys_stored = stored_keys(a.h, sh.session).from(list.first);
            if constexpr (Layout::STORED)
                sh.key_runs = Layout::batch::stored_k::runs_of(sh.keys_stored);
        } else if (tid == 64) {
            sh.values_stored = stored_values(a.h, sh.session).from(list.first);
            if constexpr (Layout::STORED)
                sh.value_runs = Layout::batch::stored_v::runs_of(sh.values_stored);
        }
        __syncthreads();
        if (a.plan.early) prefetch_keys<Layout>(a, sh, at.unit - a.plan.state_units);
    }
    if (!a.settled) pdl_wait();
    return foreseen{pos, freq};
}

template <typename Layout, bool WINDOW, typename KV, int HEADS, int WIDE>
STI_DEVICE void step(const step_args &a, step_shared<KV, HEADS, WIDE> &sh)
{
    pdl_trigger();
    const foreseen token = begin<Layout>(a, sh);
    const int unit = sh.at.unit;
    if (sh.session.T <= a.t) { /* it has no token t */
        pdl_wait(); /* or the next kernel would not wait for those in front */
        return;
    }
    if (unit < a.plan.state_units)
        state_unit<WINDOW, Layout::ROW>(a, sh, token, unit);
    else if (!key_unit<Layout>(a, sh, token, unit - a.plan.state_units))
        return;
    if (!arrives_last<Layout>(a, sh)) return;
    write_output<Layout::OUTPUT>(a, sh, units_at_work<Layout>(a, sh));
    if (a.h.has_window &&
        (a.h.select > 0 || sti_score_from(a.h.score, STI_FROM_QUERIES)))
        write_score(a, sh, key_units_of<Layout>(sh.at, 2 * a.h.C));
}

template <typename KV, int VEC, int LANES, int CHUNKS, int HEADS>
static __global__ void __launch_bounds__(THREADS)
    step_kernel(const __grid_constant__ step_args a)
{
    __shared__ step_shared<KV, HEADS, MAX_D> sh;
    step<key_layout<KV, VEC, LANES, CHUNKS, HEADS>, false>(a, sh);
}

template <int ROW, bool STORED>
static __global__ void __launch_bounds__(THREADS, blocks_of(ROW, STORED))
    tile_step_kernel(const __grid_constant__ step_args a)
{
    __shared__ tile_shared<ROW> sh;
    step<tile_layout<ROW, STORED>, true>(a, sh);
}

/* ---- Launch -------------------------------------------------------------- */

static int at_most(int x, int limit)
{
    return x < limit ? x : limit;
}
static int at_least(int x, int limit)
{
    return x > limit ? x : limit;
}

/* Rows of keys that vectors of 16 bytes fill. */
static bool in_vectors(const sti_cuda_hybrid_params *h)
{
    return h->D % (h->half_kv ? 8 : 4) == 0;
}

/* Keys that tensor cores are for. */
static bool in_tiles(const sti_cuda_hybrid_params *h)
{
    return h->half_kv && h->has_window && in_vectors(h) && h->D <= HALF_D;
}

/* Places of the window and of a list of `cap` tokens. */
static int places_of(const sti_cuda_hybrid_params *h, int cap)
{
    const int no_cap = 1 << 12;
    return 2 * h->C + (h->select == 0 ? 0 : cap < 0 ? no_cap : cap);
}

/* Key units where lists differ: all have about as many places. As few as a unit may
 * have, or more where not all units would run at once; but where they do not anyway, no
 * more than half of what a head has on average, or the last ones would work on while
 * most multiprocessors have nothing to do. Sixteen batches are worth a block. */
static void cut_uneven(step_plan *p, const sti_cuda_hybrid_params *h, int n,
                       int at_once, int least)
{
    long long sum = 0;
    for (int i = 0; i < h->S; i++) sum += places_of(h, h->head_cap[i]);
    p->uneven = true;
    const int room = at_once / n - h->S * p->state_units; /* of key units */
    const int most = at_least((int)(sum / h->S / 2), 16 * least);
    int places = room > 0 ? at_most((int)(sum / room), most) : most;
    places = at_least((places + least - 1) / least * least, least);
    for (;; places += least) {
        p->units = p->key_units = 0;
        for (int i = 0; i < h->S; i++) {
            const int units = (places_of(h, h->head_cap[i]) + places - 1) / places;
            p->first[i] = (uint16_t)p->units;
            p->units += p->state_units + units;
            p->key_units = at_least(p->key_units, units);
        }
        p->first[h->S] = (uint16_t)p->units;
        if (n * p->units <= at_once || places >= most) return;
    }
}

/* As many units as run at once, so that none waits for others to end, but none smaller
 * than what a block fetches before it first waits: joining one more costs more than it
 * saves. */
static step_plan plan_of(const sti_dev *dev, const sti_cuda_hybrid_params *h, int n)
{
    const int pairs = at_least(n * h->S, 1);
    const int least_keys = (h->D <= 64 ? 32 : 16) * WARPS;
    const int least_rows = at_least(THREADS * 4 * GROUP / 2 * 4 / h->D, 1);
    /* A lane has more of a wide row of floats: fewer heads fit its registers. */
    const int most = h->half_kv || h->D <= 64 ? MAX_HEADS : MAX_HEADS / 2;
    const int passes = (h->group + most - 1) / most;
    const bool stored = sti_cuda_hybrid_quantized(h);
    const int at_once = (in_tiles(h) ? blocks_of(h->D, stored) : 2) * dev->sms;
    const int units = at_least(at_once / pairs, 2);
    step_plan p = {};
    p.heads = in_vectors(h) ? (h->group + passes - 1) / passes : 1;
    p.head_parts = 1;
    p.part_heads = at_least(h->group, 1);
    if (h->has_linear) {
        const int state = h->has_window ? units / 2 : units;
        if (h->has_window)
            p.head_parts =
                at_most(state >= h->group ? h->group : (h->group + 1) / 2, state);
        p.row_parts = at_least(at_most(state / p.head_parts, h->P / least_rows), 1);
        p.state_units = p.head_parts * p.row_parts;
        p.part_heads = (h->group + p.head_parts - 1) / p.head_parts;
        p.part_rows = (h->P + p.row_parts - 1) / p.row_parts;
        p.map_deep = at_least(THREADS * 4 / at_least(h->F, 4), 1);
        p.state_deep = at_least(THREADS * 4 / at_least(h->D, 4), 1);
    }
    if (h->lists && h->has_window) {
        cut_uneven(&p, h, n, at_once, least_keys);
    } else {
        if (h->has_window)
            p.key_units = at_most(at_least(units - p.state_units, 1),
                                  (places_of(h, h->cap) + least_keys - 1) / least_keys);
        p.units = h->S * (p.state_units + p.key_units);
    }
    p.early = n * p.units <= at_once;
    return p;
}

static size_t part_floats(const sti_cuda_hybrid_params *h, const step_plan *p, int n)
{
    return (size_t)n * (size_t)p->units * (size_t)h->group * (size_t)part_row(h->D);
}

/* Fewer sessions may be cut into more units, and scratch serves any number. */
size_t sti_cuda_hybrid_step_scratch(const sti_dev *dev, const sti_cuda_hybrid_params *h,
                                    int n)
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
    const size_t retire = sti_cuda_hybrid_retire_scratch(h, n);
    return step > retire ? step : retire;
}

/* Without a window, and for scores of keys as they are kept, keys must come rotated. */
bool sti_cuda_hybrid_step_ropes(const sti_cuda_hybrid_params *h)
{
    return h->has_window && !sti_score_from(h->score, STI_FROM_KEY) && h->D % 2 == 0;
}

still_status sti_cuda_hybrid_step_check(const sti_cuda_hybrid_params *h,
                                        still_error *err)
{
    if (sti_cuda_hybrid_quantized(h) && (!in_tiles(h) || h->D % 32 != 0))
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "cuda: a quantized salient cache (--cache-type-k, "
                        "--cache-type-v) with heads of %d numbers, expected 32, 64, 96 "
                        "or 128: use f16 for both, or another --backend",
                        h->D);
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

extern "C" still_status sti_cuda_hybrid_step(sti_dev *dev,
                                             const sti_cuda_hybrid_params *h,
                                             const sti_cuda_hybrid_session *session,
                                             int n, int t, bool settled, void *scratch,
                                             still_error *err)
{
    if (n <= 0) return STILL_OK;
    STI_TRY(sti_cuda_hybrid_step_check(h, err));
    step_args a = {
        *h,  session, t, settled, plan_of(dev, h, n), static_cast<float *>(scratch),
        NULL};
    a.logit = a.part + part_floats(h, &a.plan, n);
    const unsigned heads = a.plan.uneven ? 1u : (unsigned)h->S;
    const dim3 grid((unsigned)n, heads, (unsigned)a.plan.units / heads);
    cudaStream_t stream = dev->stream;
    if (!in_vectors(h)) {
        if (h->half_kv)
            launch<__half, 1, 32, 8, 1>(a, grid, stream);
        else
            launch<float, 1, 32, 8, 1>(a, grid, stream);
    } else if (in_tiles(h)) {
        const bool stored = sti_cuda_hybrid_quantized(h);
        const auto kernel = h->D <= 64 ? stored ? tile_step_kernel<64, true>
                                                : tile_step_kernel<64, false>
                            : stored ? tile_step_kernel<HALF_D, true>
                                       : tile_step_kernel<HALF_D, false>;
        (void)pdl_launch(dev, kernel, grid, dim3(THREADS), 0, a);
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
