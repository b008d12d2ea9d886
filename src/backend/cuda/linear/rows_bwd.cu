/* rows_bwd.cu - the gradient before and after the recurrence's, token by token:
 * from dy to do, and from features to inputs. See linear.h and rows.cu. */
#include "backend/cuda/linear/rows.cuh"

/* Liger: do = dy and delta = 1/2 dy . window. SUPRA: y = (o - mean) f, so
 * do = f (dy - mean(dy) - y mean(dy y)). */
static __global__ void __launch_bounds__(32 * WARPS)
    begin_kernel(const sti_cuda_linear p)
{
    const sti_cuda_linear_seq s = p.seq[blockIdx.z];
    const row_place r = row_place_of(p, s);
    if (!r.is) return;
    const float *dy = s.dy + r.from * p.D;
    const int lane = (int)threadIdx.x % 32;
    float *to = p.d_o + r.at * p.DP;
    if (p.window > 0) {
        const float *win = p.win + r.at * p.DP;
        float sum = 0;
        for (int e = lane; e < p.DP; e += 32) {
            const float x = e < p.D ? dy[e] : 0;
            to[e] = x;
            sum += x * win[e];
        }
        sum = warp_sum(sum);
        if (lane == 0) p.delta[r.at] = 0.5f * sum;
        return;
    }
    const float *o = p.o + r.at * p.DP;
    float mean, factor, sum = 0, sum_y = 0;
    norm_of(o, p.D, &mean, &factor);
    for (int e = lane; e < p.D; e += 32) {
        sum += dy[e];
        sum_y += dy[e] * (o[e] - mean) * factor;
    }
    sum = warp_sum(sum) / (float)p.D;
    sum_y = warp_sum(sum_y) / (float)p.D;
    for (int e = lane; e < p.DP; e += 32)
        to[e] = e < p.D ? factor * (dy[e] - sum - (o[e] - mean) * factor * sum_y) : 0;
}

/* Element e of d rotated back from position t. */
STI_DEVICE float rotated_back(const sti_cuda_linear &p, const float *d, int e, int t)
{
    const rotation r = rotation_of(p, e, t);
    return d[e] * r.c - d[r.partner] * r.s;
}

/* f = part softmax(x): dx = f df - f (f.df) / part, plus what the window gives. */
STI_DEVICE void liger_inputs(const sti_cuda_linear &p, const sti_cuda_linear_seq &s,
                             const row_place &r)
{
    const int lane = (int)threadIdx.x % 32;
    const float *f = (r.query ? p.fq : p.fk) + r.at * p.DP;
    const float *df = (r.query ? p.dfq : p.dfk) + r.at * p.DP;
    const float *rotated = (r.query ? p.dqr : p.dkr) + r.at * p.DP;
    float *to = r.query ? s.dq : s.dk, mean = 0;
    for (int e = lane; e < p.D; e += 32) mean += f[e] * df[e];
    mean = warp_sum(mean) * (r.query ? 2.0f : 1.0f);
    for (int e = lane; e < p.D; e += 32) {
        float dx = f[e] * (df[e] - mean) + rotated_back(p, rotated, e, r.t);
        if (!r.query) /* a = log sigmoid(k) / 16 */
            dx +=
                p.da[r.at * p.DP + e] * (1.0f / 16) / (1 + expf(s.k[r.from * p.D + e]));
        if (to) to[r.from * p.D + e] = dx;
        if (!r.query && s.dv)
            s.dv[r.from * p.D + e] = p.dv[r.at * p.DP + e] + p.dvr[r.at * p.DP + e];
    }
}

/* Sum over a kv head's states of row t of x [rows,S,DP], element e. */
STI_DEVICE float over_states(const sti_cuda_linear &p, const float *x, size_t row,
                             int g, int e)
{
    float sum = 0;
    for (int h = g * p.per_kv; h < (g + 1) * p.per_kv; h++)
        sum += x[(row * p.S + h) * p.DP + e];
    return sum;
}

/* draw = the features' gradient rotated back, where raw is above 0. */
STI_DEVICE void supra_inputs(const sti_cuda_linear &p, const sti_cuda_linear_seq &s,
                             const row_place &r)
{
    const size_t row = (size_t)s.row0 + r.t;
    const float *made = r.query ? p.raw_q : p.raw_k;
    const float *raw = made ? made + r.at * p.D : (r.query ? s.q : s.k) + r.from * p.D;
    const float *b = r.query ? p.bias_q : p.bias_k;
    float *draw = (r.query ? p.draw_q : p.draw_k) + r.at * p.D;
    float *to = r.query ? s.dq : s.dk;
    const bool map = r.query ? p.map_q : p.map_k;
    for (int e = (int)threadIdx.x % 32; e < p.D; e += 32) {
        float d;
        if (r.query) {
            d = rotated_back(p, p.dfq + r.at * p.DP, e, r.t);
        } else {
            const rotation back = rotation_of(p, e, r.t);
            d = over_states(p, p.dfk, row, r.head, e) * back.c -
                over_states(p, p.dfk, row, r.head, back.partner) * back.s;
            d *= p.scale;
            if (s.dv) s.dv[r.from * p.D + e] = over_states(p, p.dv, row, r.head, e);
        }
        if (!(raw[e] + (b ? b[r.head * p.D + e] : 0) > 0)) d = 0;
        draw[e] = d;
        if (to && !map) to[r.from * p.D + e] = d;
    }
}

static __global__ void __launch_bounds__(32 * WARPS)
    inputs_kernel(const sti_cuda_linear p)
{
    const sti_cuda_linear_seq s = p.seq[blockIdx.z];
    const row_place r = row_place_of(p, s);
    if (!r.is) return;
    if (p.window > 0)
        liger_inputs(p, s, r);
    else
        supra_inputs(p, s, r);
}

/* ---- Biases -------------------------------------------------------------- */

enum { COLUMNS = 128 };

/* part[i, c] = sum of column c over the i-th share of the rows. */
static __global__ void __launch_bounds__(COLUMNS)
    bias_parts_kernel(const float *draw, int rows, int n, float *part)
{
    const int c = (int)(blockIdx.x * COLUMNS + threadIdx.x), i = (int)blockIdx.y;
    const int share = (rows + STI_LINEAR_PARTS - 1) / STI_LINEAR_PARTS;
    const int end = min(rows, (i + 1) * share);
    if (c >= n) return;
    float sum = 0;
    for (int r = i * share; r < end; r++) sum += draw[(size_t)r * n + c];
    part[(size_t)i * n + c] = sum;
}

static __global__ void __launch_bounds__(COLUMNS)
    bias_kernel(const float *part, int n, float *db)
{
    const int c = (int)(blockIdx.x * COLUMNS + threadIdx.x);
    if (c >= n) return;
    float sum = 0;
    for (int i = 0; i < STI_LINEAR_PARTS; i++) sum += part[(size_t)i * n + c];
    db[c] += sum;
}

/* ---- Launchers ----------------------------------------------------------- */

still_status sti_cuda_linear_begin_back(sti_dev *dev, const sti_cuda_linear *p,
                                        still_error *err)
{
    return launch(dev, "linear attention: gradient of the outputs", err, begin_kernel,
                  row_grid(p, p->H), 32 * WARPS, 0, *p);
}

still_status sti_cuda_linear_inputs_back(sti_dev *dev, const sti_cuda_linear *p,
                                         still_error *err)
{
    return launch(dev, "linear attention: gradient of the inputs", err, inputs_kernel,
                  row_grid(p, p->H + p->G), 32 * WARPS, 0, *p);
}

still_status sti_cuda_linear_bias(sti_dev *dev, const float *draw, int rows, int n,
                                  float *part, float *db, still_error *err)
{
    const unsigned columns = (unsigned)(n + COLUMNS - 1) / COLUMNS;
    STI_TRY(launch(dev, "linear attention: sums of the biases", err, bias_parts_kernel,
                   dim3(columns, STI_LINEAR_PARTS), COLUMNS, 0, draw, rows, n, part));
    return launch(dev, "linear attention: gradient of the biases", err, bias_kernel,
                  dim3(columns), COLUMNS, 0, (const float *)part, n, db);
}
