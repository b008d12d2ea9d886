/* hybrid_train_sums.cu - the last sums of the backward, each in a fixed order: a
 * token's shares of dk and dv over the spans that saw it and the heads that share it,
 * and the parts of the parameters' gradients. Bounded by bandwidth: every part is read
 * once. */
#include "backend/cuda/hybrid_train_tile.cuh"

/* ---- Keys and values ---------------------------------------------------------------
 */

enum { SUM_WARPS = 8, WIDEST = STI_TRAIN_MAX_D / 32 };

/* The slot of token j in the list of span c; -1: its queries do not see it. */
STI_DEVICE int slot_of(const sti_cuda_train &p, int b, int sel, int c, int j, int fold)
{
    if (c >= p.spans || c >= fold) return -1;
    const size_t span = span_at(p, b, sel, c);
    const int n = p.n_salient[span], own = j / p.span;
    if (c <= own + 1) return n + j - (c > 0 ? c - 1 : 0) * p.span;
    const int32_t *list = p.salient + span * p.room;
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

/* sum [lane + 32 i] += row [D] */
STI_DEVICE void add_row(float (&sum)[WIDEST], const float *row, int D, int lane)
{
#pragma unroll
    for (int i = 0; i < WIDEST; i++)
        if (lane + 32 * i < D) sum[i] += row[lane + 32 * i];
}

/* A warp to a token and kv head. Lanes find the slots of 32 spans at a time, then all
 * add their rows one after the other. */
static __global__ void __launch_bounds__(32 * SUM_WARPS)
    sum_keys_kernel(const sti_cuda_train p)
{
    const int lane = (int)threadIdx.x & 31;
    const int j = (int)(blockIdx.x * SUM_WARPS + (threadIdx.x >> 5));
    const int g = (int)blockIdx.y, b = (int)blockIdx.z;
    if (j >= p.T) return;
    float dk[WIDEST] = {0}, dv[WIDEST] = {0};
    const int per = p.S / p.G; /* selection heads of a kv head */
    for (int sel = g * per; sel < (g + 1) * per; sel++) {
        if (p.part_k) {
            const int first = j / p.span, fold = fold_of(p, b, sel, j);
            const int last = min(fold, p.spans);
            for (int c0 = first; c0 < last; c0 += 32) {
                const int slot = slot_of(p, b, sel, c0 + lane, j, fold);
                const int n = min(32, last - c0);
                for (int i = 0; i < n; i++) {
                    const int s = __shfl_sync(0xffffffffu, slot, i);
                    if (s < 0) continue;
                    const size_t at = (span_at(p, b, sel, c0 + i) * p.slots + s) * p.DP;
                    add_row(dk, p.part_k + at, p.D, lane);
                    add_row(dv, p.part_v + at, p.D, lane);
                }
            }
        }
        const size_t at = row_at(p, p.S, b, sel, j) * p.DP;
        if (p.dk_fold) add_row(dk, p.dk_fold + at, p.D, lane);
        if (p.dv_fold) add_row(dv, p.dv_fold + at, p.D, lane);
    }
    const size_t to = token_at(p, p.G, b, g, j) * p.D;
#pragma unroll
    for (int i = 0; i < WIDEST; i++) {
        const int e = lane + 32 * i;
        if (e >= p.D) continue;
        if (p.grad.k) p.grad.k[to + e] = dk[i];
        if (p.grad.v) p.grad.v[to + e] = dv[i];
    }
}

still_status sti_train_sum_keys(sti_dev *dev, const sti_cuda_train *p, still_error *err)
{
    return launch(dev, "hybrid training: sums of dk and dv", err, sum_keys_kernel,
                  dim3((p->T - 1) / SUM_WARPS + 1, p->G, p->B), 32 * SUM_WARPS, 0, *p);
}

/* ---- Parameters --------------------------------------------------------------------
 */

enum { NUMBER_THREADS = 128, MAP_THREADS = 256 };

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
    sum_maps_kernel(const sti_cuda_train p, const sum_jobs jobs)
{
    const sum_job j = jobs.job[blockIdx.z];
    const int i = (int)(blockIdx.x * MAP_THREADS + threadIdx.x);
    const int head = (int)blockIdx.y;
    if (head >= j.heads || i >= p.D * p.F) return;
    const size_t step = (size_t)j.heads * p.DP * p.DP;
    const float *from =
        j.part + ((size_t)head * p.DP + i / p.F) * p.DP + (size_t)(i % p.F);
    float sum = 0;
#pragma unroll 8
    for (int c = 0; c < j.parts; c++) sum += from[c * step];
    j.grad[(size_t)head * p.D * p.F + i] += sum;
}

still_status sti_train_sum_parameters(sti_dev *dev, const sti_cuda_train *p,
                                      still_error *err)
{
    const char *what = "hybrid training: sums of parameters";
    const int tiles = p->B * p->spans * p->tiles;
    const int blocks = p->B * ((p->T - 1) / ROWS + 1), parts = p->B * p->map_parts;
    const sti_hybrid_grad *grad = &p->grad;
    sum_jobs numbers = {}, maps = {};
    add_job(&numbers, grad->alpha, p->part_alpha, tiles, p->H);
    add_job(&numbers, grad->window_logit, p->part_window, tiles, p->H);
    add_job(&numbers, grad->bias_q, p->part_bias_q, blocks, p->H);
    add_job(&numbers, grad->bias_k, p->part_bias_k, blocks, p->S);
    add_job(&maps, grad->map_q, p->part_map_q, parts, p->H);
    add_job(&maps, grad->map_k, p->part_map_k, parts, p->S);
    if (numbers.n > 0)
        STI_TRY(launch(dev, what, err, sum_numbers_kernel, dim3(p->H, numbers.n),
                       NUMBER_THREADS, NUMBER_THREADS * sizeof(double), numbers));
    if (maps.n == 0) return STILL_OK;
    return launch(dev, what, err, sum_maps_kernel,
                  dim3((p->D * p->F - 1) / MAP_THREADS + 1, p->H, maps.n), MAP_THREADS,
                  0, *p, maps);
}
