/* training_lines.c - see training.h. A curve is a row of blocks of eight heights, or of
 * characters where the locale is not UTF-8; what it begins and ends with stands beside it. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "cli/report/training.h"

enum { LEVELS = 8, LABEL = 10, FIGURES = 26, MOST_COLUMNS = 100 };

static const char *const BLOCKS[LEVELS] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
static const char *const SIGNS[LEVELS] = {"_", ".", ":", "-", "=", "+", "*", "#"};

/* What the terminal shows, by the variable that decides. */
static bool is_utf8(void)
{
    static const char *const variable[] = {"LC_ALL", "LC_CTYPE", "LANG"};
    for (size_t i = 0; i < sizeof variable / sizeof *variable; i++) {
        const char *value = getenv(variable[i]);
        if (value && *value)
            return strcasestr(value, "utf-8") || strcasestr(value, "utf8");
    }
    return false;
}

/* Heights are logarithms: of n values > 0, the least and the greatest are the ends. */
static void put_row(sti_buf *out, const double *v, int n)
{
    const char *const *sign = is_utf8() ? BLOCKS : SIGNS;
    double low = INFINITY, high = -INFINITY;
    for (int i = 0; i < n; i++) {
        if (!(v[i] > 0) || isinf(v[i])) continue;
        low = fmin(low, log(v[i]));
        high = fmax(high, log(v[i]));
    }
    for (int i = 0; i < n; i++) {
        const double at = high > low ? (log(v[i]) - low) / (high - low) : 0;
        const bool shown = v[i] > 0 && isfinite(at);
        sti_buf_puts(out, shown ? sign[(int)lround(at * (LEVELS - 1))] : " ");
    }
}

static double value_of(const cli_train_point *p, int stage, bool held)
{
    if (stage == 1) return held ? p->valid_relative : p->relative;
    return held ? p->valid_loss : p->loss;
}

/* A stage's values as at most `most`, each the mean of as many; returns how many. */
static int gather(const cli_training *t, int stage, bool held, double *out, int most)
{
    size_t there = 0, k = 0;
    for (size_t i = 0; i < t->n; i++)
        there +=
            t->point[i].stage == stage && isfinite(value_of(&t->point[i], stage, held));
    const size_t each = (there + (size_t)most - 1) / (size_t)most;
    for (size_t i = 0; i < t->n && each; i++) {
        const double v = value_of(&t->point[i], stage, held);
        if (t->point[i].stage != stage || !isfinite(v)) continue;
        const size_t at = k / each, left = there - at * each;
        out[at] = (k % each ? out[at] : 0) + v / (double)(left < each ? left : each);
        k++;
    }
    return each ? (int)((there + each - 1) / each) : 0;
}

static void put_curve(const cli_training *t, bool held, int columns, sti_buf *out)
{
    double v[MOST_COLUMNS] = {0};
    const int n = gather(t, t->now.stage, held, v, columns - LABEL - FIGURES);
    if (n == 0) return;
    sti_buf_printf(out, "%-*s%7.4f ", LABEL,
                   held                ? "held out"
                   : t->now.stage == 1 ? "error"
                                       : "loss",
                   v[0]);
    put_row(out, v, n);
    sti_buf_printf(out, " %.4f\n", v[n - 1]);
}

static void put_layers(const cli_training *t, int columns, sti_buf *out)
{
    if (!t->last || t->layers > columns - LABEL - FIGURES || t->layers > MOST_COLUMNS)
        return;
    double most = 0;
    for (int l = 0; l < t->layers; l++) most = fmax(most, t->last[l]);
    sti_buf_printf(out, "%-*s        ", LABEL, "by layer");
    put_row(out, t->last, t->layers);
    sti_buf_printf(out, " at most %.4f\n", most);
}

void cli_training_lines(const cli_training *t, int columns, sti_buf *out)
{
    if (columns > MOST_COLUMNS) columns = MOST_COLUMNS;
    if (columns < LABEL + FIGURES + LEVELS) return;
    put_curve(t, false, columns, out);
    put_curve(t, true, columns, out);
    if (t->now.stage == 1) put_layers(t, columns, out);
}
