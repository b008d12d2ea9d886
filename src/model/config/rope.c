/* rope.c - the frequencies that layers rotate by. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "model/config/read.h"

void sti_rope_scaling_free(sti_rope_scaling *r)
{
    free(r->divisor[0]);
    free(r->divisor[1]);
    r->divisor[0] = r->divisor[1] = NULL;
}

static still_status check(const char *path, const sti_rope_scaling *r, still_error *err)
{
    bool ok = true;
    if (r->kind == ROPE_LINEAR || r->kind == ROPE_LLAMA3)
        ok = isfinite(r->factor) && r->factor > 0;
    if (r->kind == ROPE_LLAMA3)
        ok = ok && r->low > 0 && r->high > r->low && r->ctx > 0 && isfinite(r->high) &&
             isfinite(r->ctx);
    if (r->kind == ROPE_LONG)
        ok = r->divisor[0] && r->divisor[1] && r->ctx >= 1 && r->ctx <= INT32_MAX &&
             isfinite(r->attn_factor) && r->attn_factor >= 0;
    if (ok) return STILL_OK;
    return sti_fail(err, STILL_E_FORMAT,
                    "%s: RoPE scaling makes no sense (factor %g, low %g, high %g, "
                    "original length %g)",
                    path, r->factor, r->low, r->high, r->ctx);
}

/* Frequency f after scaling. Llama 3.1 keeps the fast frequencies, divides the slow ones
 * by `factor`, and blends between (wavelengths ctx/high and ctx/low mark the borders). */
static double scaled(const sti_rope_scaling *r, double f)
{
    if (r->kind == ROPE_LINEAR) return f / r->factor;
    if (r->kind != ROPE_LLAMA3) return f;
    const double wave = 2 * M_PI / f;
    double smooth;
    if (wave > r->ctx / r->low)
        smooth = 0;
    else if (wave < r->ctx / r->high)
        smooth = 1;
    else
        smooth = (r->ctx / wave - r->low) / (r->high - r->low);
    return (1 - smooth) * f / r->factor + smooth * f;
}

/* What LongRoPE multiplies rotated queries and keys by, for the range it adds. */
static double long_factor(const sti_config *c, const sti_rope_scaling *r)
{
    if (r->attn_factor > 0) return r->attn_factor;
    const double times = c->ctx_train / r->ctx;
    return times > 1 && r->ctx > 1 ? sqrt(1 + log(times) / log(r->ctx)) : 1;
}

/* theta^(-2i/rotary), then scaled; pairs past rotary/2 stay 0, and so does the table of
 * layers without RoPE. Scaling is of the global frequencies alone. */
still_status sti_rope_tables(const char *path, sti_config *c, const sti_rope_scaling *r,
                             still_error *err)
{
    const size_t half = (size_t)c->head_dim / 2;
    STI_TRY(check(path, r, err));
    float *all = sti_alloc(STI_TABLES * half, sizeof *all);
    if (!all) return sti_fail_memory(err, "RoPE table", STI_TABLES * half * 4);
    for (int t = 0; t < STI_TABLES; t++) c->inv_freq[t] = all + (size_t)t * half;
    for (int i = 0; i < c->rotary / 2; i++) {
        const double at = -2.0 * i / c->rotary, f = scaled(r, pow(c->rope_theta, at));
        c->inv_freq[STI_TABLE_GLOBAL][i] =
            (float)(r->divisor[0] ? f / (double)r->divisor[0][i] : f);
        c->inv_freq[STI_TABLE_LONG][i] =
            (float)(r->divisor[1] ? f / (double)r->divisor[1][i] : f);
        c->inv_freq[STI_TABLE_LOCAL][i] = (float)pow(c->rope_theta_local, at);
    }
    c->rope_factor = 1;
    c->rope_linear = r->kind == ROPE_LINEAR ? r->factor : 1;
    if (r->kind == ROPE_LONG) {
        c->long_from = (int)r->ctx;
        c->rope_factor = long_factor(c, r);
    }
    return STILL_OK;
}

double sti_config_divisor(const sti_config *c, sti_rope_table t, int i)
{
    if (c->divisor[0]) return (double)c->divisor[t == STI_TABLE_LONG][i];
    return pow(c->rope_theta, -2.0 * i / c->rotary) / (double)c->inv_freq[t][i] /
           c->rope_linear;
}

bool sti_config_divided(const sti_config *c)
{
    for (int i = 0; i < c->rotary / 2; i++) /* tables are floats */
        if (fabs(sti_config_divisor(c, STI_TABLE_GLOBAL, i) - 1) > 1e-4) return true;
    return false;
}

const float *sti_config_inv_freq(const sti_config *c, int layer, int ctx)
{
    sti_rope_table t = (sti_rope_table)c->table[layer];
    if (t == STI_TABLE_GLOBAL && c->long_from > 0 && ctx > c->long_from)
        t = STI_TABLE_LONG;
    return c->inv_freq[t];
}
