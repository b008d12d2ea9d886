/* chart.c - see chart.h. A method has the same colour and mark in every chart. Lines of
 * many points have dashes instead of marks. */
#include "cli/report/chart.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cli/report/svg.h"

enum {
    PANEL = 440, /* usual width of a panel, axis labels included */
    TOP = 92,    /* title and legend */
    PLOT = 260,  /* height of the plot itself */
    BOTTOM = 52,
    LEFT = 72,
    RIGHT = 16,
    LABEL = 34,     /* width of a label of the x axis */
    MOST_MARKS = 24 /* points of a line that has marks */
};

/* The mark and, but for the last, the colour that a method has; -1: no method. */
static int look_of(const char *name)
{
    static const char *const method[] = {"still", "softmax", "lolcats", "hedgehog",
                                         "swa",   "liger",   "t2r",     "supra"};
    for (size_t k = 0; k < sizeof method / sizeof *method; k++)
        if (strcmp(method[k], name) == 0) return (int)k;
    return -1;
}

/* Other lines take what no method of the chart has, in this order: the two blues far
 * apart. */
static int look(const cli_chart *c, int i)
{
    static const int order[] = {0, 1, 2, 3, 4, 6, 5, 7};
    const int n = sizeof order / sizeof *order;
    int left[sizeof order / sizeof *order], n_left = 0, others = 0;
    if (look_of(c->line[i]) >= 0) return look_of(c->line[i]);
    for (int k = 0; k < n; k++) {
        bool taken = false;
        for (int l = 0; l < c->lines; l++)
            taken = taken || look_of(c->line[l]) == order[k];
        if (!taken) left[n_left++] = order[k];
    }
    for (int l = 0; l < i; l++) others += look_of(c->line[l]) < 0;
    return n_left ? left[others % n_left] : order[i % n];
}

/* The last colour is too light for lines. */
static int colour_of(int look)
{
    return look < CLI_SVG_COLOURS - 1 ? look : 3;
}

static int width_of(const cli_chart *c)
{
    return c->width ? c->width : PANEL;
}

static bool marked(const cli_chart *c)
{
    return c->n <= MOST_MARKS;
}

/* ---- Axes ---------------------------------------------------------------- */

static bool there(const cli_panel *p, double v)
{
    return isfinite(v) && (!p->log || v > 0);
}

static void widen(const cli_panel *p, const double *v, int n, double *low, double *high)
{
    for (int i = 0; v && i < n; i++) {
        if (!there(p, v[i])) continue;
        *low = fmin(*low, v[i]);
        *high = fmax(*high, v[i]);
    }
}

/* The y axis of a panel, and its ticks. */
static int axis_y(const cli_chart *c, const cli_panel *p, cli_axis *y,
                  double tick[CLI_SVG_TICKS])
{
    double low = INFINITY, high = -INFINITY;
    widen(p, p->y, c->lines * c->n, &low, &high);
    widen(p, p->low, c->lines * c->n, &low, &high);
    widen(p, p->high, c->lines * c->n, &low, &high);
    if (high < low) low = high = 1;
    if (!p->log && !p->fitted) low = fmin(low, 0);
    *y = (cli_axis){.low = p->log ? log2(low) : low,
                    .high = p->log ? log2(high) : high,
                    .from = TOP + PLOT,
                    .to = TOP,
                    .log = p->log};
    return cli_axis_round(y, tick);
}

/* 1024 is 1K, 1000 is 1000. */
static void length_text(double x, char out[24])
{
    if (x >= 1048576 && fmod(x, 1048576) == 0)
        snprintf(out, 24, "%.0fM", x / 1048576);
    else if (x >= 1024 && fmod(x, 1024) == 0)
        snprintf(out, 24, "%.0fK", x / 1024);
    else
        snprintf(out, 24, "%.0f", x);
}

static void draw_lengths(const cli_chart *c, const cli_axis *x, sti_buf *out)
{
    char text[24];
    double last = -LABEL;
    for (int i = 0; i < c->n; i++) {
        const double at = cli_axis_place(x, c->x[i]);
        if (at - last < LABEL) continue;
        length_text(c->x[i], text);
        cli_svg_text(out, at, TOP + PLOT + 18, "middle", "faint", text);
        last = at;
    }
}

/* ---- Lines --------------------------------------------------------------- */

static void draw_bar(double x, double low, double high, int colour, sti_buf *out)
{
    sti_buf_printf(out,
                   "<path class=\"bar s%d\" d=\"M%.1f %.1fh8m-4 0V%.1fm-4 0h8\"/>\n",
                   colour, x - 4, low, high);
}

static bool has_bars(const cli_chart *c, const cli_panel *p)
{
    for (int i = 0; p->low && p->high && i < c->lines * c->n; i++)
        if (there(p, p->low[i]) && there(p, p->high[i]) && p->high[i] > p->low[i])
            return true;
    return false;
}

/* Where line i has its marks and bars, beside the x they are for: bars of several lines
 * would cover one another. */
static double beside(const cli_chart *c, const cli_panel *p, int i)
{
    if (c->lines < 2 || !has_bars(c, p)) return 0;
    return (i - 0.5 * (c->lines - 1)) * fmin(6, 20.0 / (c->lines - 1));
}

/* Whether it is the only value of its line, which draws nothing then. */
static bool alone(const cli_chart *c, const cli_panel *p, int line, int i)
{
    const double *y = p->y + (size_t)line * (size_t)c->n;
    for (int k = 0; k < c->n; k++)
        if (k != i && there(p, y[k])) return false;
    return true;
}

static void draw_points(const cli_chart *c, const cli_panel *p, int line,
                        const cli_axis *sx, const cli_axis *sy, sti_buf *out)
{
    const size_t from = (size_t)line * (size_t)c->n;
    const int mark = look(c, line), colour = colour_of(mark);
    for (int i = 0; i < c->n; i++) {
        const size_t k = from + (size_t)i;
        const double at = cli_axis_place(sx, c->x[i]) + beside(c, p, line);
        if (!there(p, p->y[k])) {
            if (c->missing) /* crosses of several lines are drawn side by side */
                sti_buf_printf(out,
                               "<path class=\"line s%d\" d=\"M%.1f %dl8 8m0 -8l-8 "
                               "8\"/>\n",
                               colour, cli_axis_place(sx, c->x[i]) - 4 + 4.0 * line,
                               TOP + 4);
            continue;
        }
        if (p->low && p->high && there(p, p->low[k]) && there(p, p->high[k]) &&
            p->high[k] > p->low[k])
            draw_bar(at, cli_axis_place(sy, p->low[k]), cli_axis_place(sy, p->high[k]),
                     colour, out);
        if (marked(c) || alone(c, p, line, i))
            cli_svg_mark(out, at, cli_axis_place(sy, p->y[k]), mark, colour);
    }
}

static void draw_line(const cli_chart *c, const cli_panel *p, int line,
                      const cli_axis *sx, const cli_axis *sy, sti_buf *out)
{
    const double *y = p->y + (size_t)line * (size_t)c->n;
    bool open = false;
    sti_buf_printf(out, "<path class=\"line s%d\" stroke-dasharray=\"%s\" d=\"",
                   colour_of(look(c, line)), marked(c) ? "none" : cli_svg_dash(line));
    for (int i = 0; i < c->n; i++) {
        const bool here = there(p, y[i]);
        if (here)
            sti_buf_printf(out, "%c%.1f %.1f", open ? 'L' : 'M',
                           cli_axis_place(sx, c->x[i]) + beside(c, p, line),
                           cli_axis_place(sy, y[i]));
        open = here || (open && !c->missing);
    }
    sti_buf_puts(out, "\"/>\n");
}

static void draw_here(const cli_chart *c, const cli_axis *x, sti_buf *out)
{
    const double at = cli_axis_place(x, c->here);
    const bool left = at > 0.7 * (x->from + x->to);
    sti_buf_printf(
        out, "<path class=\"grid\" stroke-dasharray=\"4 3\" d=\"M%.1f %dV%d\"/>\n", at,
        TOP, TOP + PLOT);
    cli_svg_text(out, at + (left ? -6 : 6), TOP + PLOT - 8, left ? "end" : "start",
                 "faint", c->here_title);
}

static void draw_panel(const cli_chart *c, int k, sti_buf *out)
{
    const cli_panel *p = &c->panel[k];
    cli_axis x = {.from = k * width_of(c) + LEFT + 12,
                  .to = (k + 1) * width_of(c) - RIGHT - 12,
                  .log = !c->linear},
             y;
    double tick[CLI_SVG_TICKS], tick_x[CLI_SVG_TICKS];
    int n_x = 0;
    x.low = x.log ? log2(c->x[0]) : c->x[0];
    x.high = x.log ? log2(c->x[c->n - 1]) : c->x[c->n - 1];
    if (c->linear) n_x = cli_axis_ticks(&x, tick_x);
    const int n = axis_y(c, p, &y, tick);
    cli_svg_frame(out, &x, &y, tick, n, c->x_title, p->title);
    if (c->linear)
        cli_svg_ticks_x(out, &x, &y, tick_x, n_x);
    else
        draw_lengths(c, &x, out);
    if (c->here_title) draw_here(c, &x, out);
    for (int i = c->lines - 1; i >= 0; i--) { /* the first lies on top */
        draw_line(c, p, i, &x, &y, out);
        draw_points(c, p, i, &x, &y, out);
    }
}

static bool any_missing(const cli_chart *c)
{
    for (int k = 0; k < c->panels; k++)
        for (int i = 0; i < c->lines * c->n; i++)
            if (!isfinite(c->panel[k].y[i])) return true;
    return false;
}

static void draw_legend(const cli_chart *c, sti_buf *out)
{
    double at = LEFT;
    for (int i = 0; i < c->lines; i++) {
        const int mark = look(c, i), colour = colour_of(mark);
        sti_buf_printf(
            out,
            "<path class=\"line s%d\" stroke-dasharray=\"%s\" d=\"M%.1f 50h24\"/>\n",
            colour, marked(c) ? "none" : cli_svg_dash(i), at);
        if (marked(c)) cli_svg_mark(out, at + 12, 50, mark, colour);
        cli_svg_text(out, at + 30, 54, "start", "", c->line[i]);
        at += 50 + cli_svg_width(c->line[i], strlen(c->line[i]), 13);
    }
    if (c->missing && any_missing(c)) {
        sti_buf_printf(out, "<path class=\"line s6\" d=\"M%.1f 46l8 8m0 -8l-8 8\"/>\n",
                       at);
        cli_svg_text(out, at + 14, 54, "start", "", c->missing);
        at += 34 + cli_svg_width(c->missing, strlen(c->missing), 13);
    }
    bool bars = false;
    for (int k = 0; k < c->panels; k++) bars = bars || has_bars(c, &c->panel[k]);
    if (c->bars && bars) cli_svg_text(out, at, 54, "start", "faint", c->bars);
}

void cli_chart_draw(const cli_chart *c, sti_buf *out)
{
    cli_svg_begin(out, c->panels * width_of(c), TOP + PLOT + BOTTOM, LEFT, c->title);
    draw_legend(c, out);
    for (int k = 0; k < c->panels; k++) draw_panel(c, k, out);
    cli_svg_end(out);
}
