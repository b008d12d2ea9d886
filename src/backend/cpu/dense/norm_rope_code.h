/* norm_rope_code.h - the kernels of norm_rope.h over the vectors of simd.h. */
#ifndef STI_BACKEND_CPU_DENSE_NORM_ROPE_CODE_H
#define STI_BACKEND_CPU_DENSE_NORM_ROPE_CODE_H

#include <float.h>
#include <math.h>

#include "backend/cpu/dense/norm_rope.h"
#include "backend/cpu/simd.h"

/* The sum of squares where it leaves the range of float, though the numbers do not. */
static double row_sum_squares_large(const float *x, int K)
{
    double sum = 0;
    for (int i = 0; i < K; i++) sum += (double)x[i] * x[i];
    return sum;
}

/* Squares are added in 4 VL columns, so the longest chain of float sums is K / (4 VL):
 * short enough that double would change nothing a float result can show. */
STI_INLINE float row_norm_factor(const float *x, int K, float eps)
{
    vf sum[4] = {vf_set(0), vf_set(0), vf_set(0), vf_set(0)};
    int i = 0;
    for (; i + 4 * VL <= K; i += 4 * VL)
        for (int u = 0; u < 4; u++) {
            vf a = vf_load(x + i + u * VL);
            sum[u] = vf_fma(a, a, sum[u]);
        }
    for (; i < K; i += VL) {
        vf a = K - i < VL ? vf_load_part(x + i, K - i) : vf_load(x + i);
        sum[0] = vf_fma(a, a, sum[0]);
    }
    float ss = vf_hsum(vf_add(vf_add(sum[0], sum[1]), vf_add(sum[2], sum[3])));
    float r = 1.0f / sqrtf(ss / (float)K + eps);
    if (!(ss <= FLT_MAX)) r = (float)(1 / sqrt(row_sum_squares_large(x, K) / K + eps));
    return r;
}

static void row_rmsnorm(const float *x, const float *g, float *y, int K, float eps)
{
    const float r = row_norm_factor(x, K, eps);
    int i = 0;
    for (; i + VL <= K; i += VL)
        vf_store(y + i, vf_mul(vf_mul(vf_load(x + i), vf_set(r)), vf_load(g + i)));
    for (; i < K; i++) y[i] = x[i] * r * g[i];
}

static void row_rmsnorm_add(const float *x, const float *g, float *y, int K, float eps)
{
    const float r = row_norm_factor(x, K, eps);
    int i = 0;
    for (; i + VL <= K; i += VL) {
        const vf v = vf_mul(vf_mul(vf_load(x + i), vf_set(r)), vf_load(g + i));
        vf_store(y + i, vf_add(vf_load(y + i), v));
    }
    for (; i < K; i++) y[i] += x[i] * r * g[i];
}

STI_INLINE vf row_silu(vf x)
{
    return vf_div(x, vf_add(vf_set(1.0f), vf_exp(vf_sub(vf_set(0), x))));
}

static void row_swiglu(const float *x, const float *up, float *y, int64_t n)
{
    int64_t i = 0;
    for (; i + VL <= n; i += VL)
        vf_store(y + i, vf_mul(row_silu(vf_load(x + i)), vf_load(up + i)));
    if (i < n) {
        int c = (int)(n - i);
        vf v = vf_mul(row_silu(vf_load_part(x + i, c)), vf_load_part(up + i, c));
        vf_store_part(y + i, v, c);
    }
}

/* GELU is x / (1 + e^-z) with z = STI_GELU_SLOPE (x + STI_GELU_CUBE x^3). */
STI_INLINE vf row_gelu(vf x)
{
    const vf cube = vf_mul(vf_mul(vf_set((float)STI_GELU_CUBE), x), x);
    const vf z = vf_mul(vf_set((float)-STI_GELU_SLOPE), vf_fma(cube, x, x));
    return vf_div(x, vf_add(vf_set(1.0f), vf_exp(z)));
}

static void row_geglu(const float *x, const float *up, float *y, int64_t n)
{
    for (int64_t i = 0; i < n; i += VL) {
        const vf g = row_gelu(vf_load_or(x + i, n - i, 0));
        vf_store_some(y + i, vf_mul(g, vf_load_or(up + i, n - i, 0)), n - i);
    }
}

/* Cosine and sine of n angles, within an ulp of the rounded true value for angles up
 * to ten million: all in double. The angle is reduced by
 * the nearest multiple of pi/2, whose first part has 33 bits so that the product is
 * exact; the rest are Taylor sums, far below float at |r| <= pi/4. Plain C that
 * compilers turn into vectors. */
STI_INLINE void row_cos_sin(const double *angle, int n, float *c, float *s)
{
    const double magic = 0x1.8p52; /* adding it rounds to whole numbers */
    for (int i = 0; i < n; i++) {
        double a = angle[i], turns = a * 0x1.45f306dc9c883p-1 + magic;
        int64_t quarter;
        memcpy(&quarter, &turns, sizeof quarter);
        turns -= magic;
        double r = a - turns * 0x1.921fb544p0 - turns * 0x1.0b4611a626331p-34;
        double z = r * r;
        double sine = 1.0 / 362880 - z / 39916800;
        sine = 1.0 / 120 - z * (1.0 / 5040 - z * sine);
        sine = r - r * z * (1.0 / 6 - z * sine);
        double cosine = 1.0 / 40320 - z * (1.0 / 3628800 - z / 479001600);
        cosine = 1.0 / 24 - z * (1.0 / 720 - z * cosine);
        cosine = 1.0 - z * (0.5 - z * cosine);
        double u = quarter & 1 ? sine : cosine, v = quarter & 1 ? cosine : sine;
        c[i] = (float)((quarter + 1) & 2 ? -u : u);
        s[i] = (float)(quarter & 2 ? -v : v);
    }
}

enum { ROPE_PAIRS = 64 }; /* cosines and sines kept while all heads of a row pass */

/* Rotates the pairs (x[i], y[i]), i < n. */
STI_INLINE void rope_halves(float *x, float *y, const float *c, const float *s, int n)
{
    int i = 0;
    for (; i + VL <= n; i += VL) {
        vf a = vf_load(x + i), b = vf_load(y + i), C = vf_load(c + i),
           S = vf_load(s + i);
        vf_store(x + i, vf_sub(vf_mul(a, C), vf_mul(b, S)));
        vf_store(y + i, vf_add(vf_mul(b, C), vf_mul(a, S)));
    }
    for (; i < n; i++) {
        float a = x[i], b = y[i];
        x[i] = a * c[i] - b * s[i];
        y[i] = b * c[i] + a * s[i];
    }
}

/* Rotates the pairs (x[2i], x[2i+1]), i < n. */
STI_INLINE void rope_neighbours(float *x, const float *c, const float *s, int n)
{
    for (int i = 0; i < n; i++) {
        float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * c[i] - b * s[i];
        x[2 * i + 1] = b * c[i] + a * s[i];
    }
}

static void row_rope(float *x, int pos, const float *inv_freq, int heads, int D,
                     bool interleaved)
{
    int half = D / 2;
    for (int from = 0; from < half; from += ROPE_PAIRS) {
        int n = half - from < ROPE_PAIRS ? half - from : ROPE_PAIRS;
        double angle[ROPE_PAIRS];
        float c[ROPE_PAIRS], s[ROPE_PAIRS];
        for (int i = 0; i < n; i++) angle[i] = (double)pos * (double)inv_freq[from + i];
        row_cos_sin(angle, n, c, s);
        for (int h = 0; h < heads; h++) {
            float *p = x + (size_t)h * (size_t)D;
            if (interleaved)
                rope_neighbours(p + 2 * from, c, s, n);
            else
                rope_halves(p + from, p + half + from, c, s, n);
        }
    }
}

/* Vocabularies have 10^5 entries: float sums are moved into a double every SPAN
 * vectors, so that the result is as good as a sum in double. */
static double row_sum_exp(const float *x, int n, float *max)
{
    enum { SPAN = 64 };
    int whole = n - n % VL;
    float most = x[0];
    if (whole) {
        vf m = vf_load(x);
        for (int i = VL; i < whole; i += VL) m = vf_max(m, vf_load(x + i));
        most = vf_hmax(m);
    }
    for (int i = whole; i < n; i++) most = x[i] > most ? x[i] : most;
    *max = most;
    double sum = 0;
    vf shift = vf_set(most);
    for (int i = 0; i < whole;) {
        vf part = vf_set(0);
        for (int end = i + SPAN * VL < whole ? i + SPAN * VL : whole; i < end; i += VL)
            part = vf_add(part, vf_exp(vf_sub(vf_load(x + i), shift)));
        sum += vf_hsum(part);
    }
    for (int i = whole; i < n; i++) sum += expf(x[i] - most);
    return sum;
}

#endif
