/* sums.cu - the last sums of the backward, each in a fixed order: a token's shares of dk
 * and dv over the spans that saw it and the heads that share it, and the parts of the
 * parameters' gradients. Bounded by bandwidth: every part is read once. */
#include "backend/cuda/hybrid/train/tile.cuh"

/* ---- Keys and values ----------------------------------------------------- */

enum { SUM_WARPS = 8 };

/* The slot of token j in the list of span c; -1: its queries do not see it. */
STI_DEVICE int slot_of(const sti_hybrid_train &p, int b, int sel, int c, int j,
                       int fold)
{
    if (c >= p.spans || c >= fold) return -1;
    const size_t span = span_at(p, b, sel, c);
    const int n = p.n_salient[span], own = j / p.span;
    if (c <= own + 1) return n + j - (c > 0 ? c - 1 : 0) * p.span;
    const int32_t *list = p.salient + span * p.capacity;
    int low = 0, high = n;
    while (low < high) {
        const int i = (low + high) / 2;
        if (list[i] < j)
            low = i + 1;
        else
            high = i;
    }
    return low < n && list[low] == j ? low : -1;
}

STI_DEVICE void add4(float4 *sum, float4 x)
{
    *sum = make_float4(sum->x + x.x, sum->y + x.y, sum->z + x.z, sum->w + x.w);
}

/* Columns e .. e + 3 of what token j has at its slots in the lists of a selection head,
 * span after span: part [B,S,spans,slots,DP], NULL: nothing. By all lanes of a warp: a
 * lane finds the slot in one of 32 spans, and rows are read four at a time. */
STI_DEVICE void add_slots(const sti_hybrid_train &p, const float *part, int b, int sel,
                          int j, int e, float4 *sum)
{
    const int lane = (int)threadIdx.x & 31, fold = fold_of(p, b, sel, j);
    const int last = min(fold, p.spans);
    for (int c0 = j / p.span; c0 < last; c0 += 32) {
        const int slot = slot_of(p, b, sel, c0 + lane, j, fold);
        const float *spans = part + span_at(p, b, sel, c0) * p.slots * p.DP + e;
        const int some = min(32, last - c0);
#pragma unroll 1
        for (int i = 0; i < some; i += 4) {
            float4 x[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int s = __shfl_sync(0xffffffffu, slot, i + n);
                x[n] = make_float4(0, 0, 0, 0);
                if (part && s >= 0)
                    x[n] = *(const float4 *)(spans +
                                             ((size_t)(i + n) * p.slots + s) * p.DP);
            }
#pragma unroll
            for (int n = 0; n < 4; n++) add4(sum, x[n]);
        }
    }
}

/* A warp to a token and kv head, four columns to a lane: dk and dv side by side, or,
 * where a row takes all lanes, one after the other. */
template <int DP>
static __global__ void __launch_bounds__(32 * SUM_WARPS)
    sum_keys_kernel(const sti_hybrid_train p)
{
    constexpr int LANES = DP / 4; /* of a row */
    const int lane = (int)threadIdx.x & 31, e = lane % LANES * 4;
    const int j = (int)(blockIdx.x * SUM_WARPS + (threadIdx.x >> 5));
    const int g = (int)blockIdx.y, b = (int)blockIdx.z;
    if (j >= p.T) return;
    const int per = p.h.S / p.h.G; /* selection heads of a kv head */
    for (int of_v = lane / LANES; of_v < 2; of_v += 32 / LANES) {
        float *grad = of_v ? p.grad.v : p.grad.k;
        const float *part = of_v ? p.part_v : p.part_k;
        const float *folded = of_v ? p.dv_fold : p.dk_fold;
        float4 sum = make_float4(0, 0, 0, 0);
        for (int sel = g * per; sel < (g + 1) * per; sel++) {
            if (p.part_k) add_slots(p, grad ? part : NULL, b, sel, j, e, &sum);
            if (folded)
                add4(&sum,
                     *(const float4 *)(folded + row_at(p, p.h.S, b, sel, j) * DP + e));
        }
        if (!grad) continue;
        float *to = grad + token_at(p, p.h.G, b, g, j) * p.h.D;
        write2(to, e, p.h.D, p.vec, sum.x, sum.y);
        write2(to, e + 2, p.h.D, p.vec, sum.z, sum.w);
    }
}

still_status sti_hybrid_train_sum_keys(sti_dev *dev, const sti_hybrid_train *p,
                                       still_error *err)
{
    return by_width(p, [&](auto W) {
        return launch(
            dev, "hybrid training: sums of dk and dv", err, sum_keys_kernel<W>,
            dim3((p->T - 1) / SUM_WARPS + 1, p->h.G, p->B), 32 * SUM_WARPS, 0, *p);
    });
}

/* ---- Parameters ---------------------------------------------------------- */

enum {
    NUMBER_THREADS = 128,
    MAP_NUMBERS = 64, /* of a map, in a block */
    MAP_SHARES = 4,   /* of the parts, summed side by side */
    MAP_THREADS = MAP_NUMBERS * MAP_SHARES
};

/* grad [heads] or [heads,D,F] += sum of parts [parts, heads] or [parts,heads,DP,DP]. */
typedef struct sum_job {
    float *grad;
    const float *part;
    int parts, heads;
} sum_job;
enum { MOST_JOBS = 4 };
typedef struct sum_jobs {
    sum_job job[MOST_JOBS];
    int n;
} sum_jobs;

static void add_job(sum_jobs *jobs, float *grad, const float *part, int parts,
                    int heads)
{
    if (grad && part) jobs->job[jobs->n++] = sum_job{grad, part, parts, heads};
}

/* In double: such sums nearly cancel. A block to a head. */
static __global__ void __launch_bounds__(NUMBER_THREADS)
    sum_numbers_kernel(const sum_jobs jobs)
{
    const sum_job j = jobs.job[blockIdx.y];
    double *sum = (double *)block_memory(), mine = 0;
    const int h = (int)blockIdx.x;
    if (h >= j.heads) return;
    for (int i = (int)threadIdx.x; i < j.parts; i += NUMBER_THREADS)
        mine += j.part[(size_t)i * j.heads + h];
    sum[threadIdx.x] = mine;
    __syncthreads();
    for (int n = NUMBER_THREADS / 2; n > 0; n /= 2) {
        if ((int)threadIdx.x < n) sum[threadIdx.x] += sum[threadIdx.x + n];
        __syncthreads();
    }
    if (threadIdx.x == 0) j.grad[h] += (float)sum[0];
}

static __global__ void __launch_bounds__(MAP_THREADS)
    sum_maps_kernel(const sti_hybrid_train p, const sum_jobs jobs)
{
    const sum_job j = jobs.job[blockIdx.z];
    const int number = (int)threadIdx.x % MAP_NUMBERS;
    const int share = (int)threadIdx.x / MAP_NUMBERS;
    const int i = (int)blockIdx.x * MAP_NUMBERS + number, head = (int)blockIdx.y;
    if (head >= j.heads) return;
    const bool is = i < p.h.D * p.h.F;
    const size_t step = (size_t)j.heads * p.DP * p.DP;
    const float *from =
        j.part + ((size_t)head * p.DP + i / p.h.F) * p.DP + (size_t)(i % p.h.F);
    float *shares = block_memory(), sum = 0;
#pragma unroll 8
    for (int c = share; is && c < j.parts; c += MAP_SHARES) sum += from[c * step];
    shares[threadIdx.x] = sum;
    __syncthreads();
    if (share > 0 || !is) return;
    for (int n = 1; n < MAP_SHARES; n++) sum += shares[n * MAP_NUMBERS + number];
    j.grad[(size_t)head * p.h.D * p.h.F + i] += sum;
}

still_status sti_hybrid_train_sum_parameters(sti_dev *dev, const sti_hybrid_train *p,
                                             still_error *err)
{
    const char *what = "hybrid training: sums of parameters";
    const int tiles = p->B * p->spans * p->tiles;
    const int parts = p->B * p->map_parts;
    const sti_hybrid_grad *grad = &p->grad;
    sum_jobs numbers = {}, maps = {};
    add_job(&numbers, grad->alpha, p->part_alpha, tiles, p->h.H);
    add_job(&numbers, grad->window_logit, p->part_window, tiles, p->h.H);
    add_job(&numbers, grad->bias_q, p->part_bias_q, parts, p->h.H);
    add_job(&numbers, grad->bias_k, p->part_bias_k, parts, p->h.S);
    add_job(&maps, grad->map_q, p->part_map_q, parts, p->h.H);
    add_job(&maps, grad->map_k, p->part_map_k, parts, p->h.S);
    if (numbers.n > 0)
        STI_TRY(launch(dev, what, err, sum_numbers_kernel, dim3(p->h.H, numbers.n),
                       NUMBER_THREADS, NUMBER_THREADS * sizeof(double), numbers));
    if (maps.n == 0) return STILL_OK;
    return launch(dev, what, err, sum_maps_kernel,
                  dim3((p->h.D * p->h.F - 1) / MAP_NUMBERS + 1, p->h.H, maps.n),
                  MAP_THREADS, MAP_THREADS * sizeof(float), *p, maps);
}
