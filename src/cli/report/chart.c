/* chart.c - see chart.h. Plain shapes and text in the reader's sans-serif font, white
 * background, one colour per line, the same colour for a method in every chart. */
#include "cli/report/chart.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum {
    PANEL = 440, /* width of a panel, axis labels included */
    TOP = 84,    /* title and legend */
    PLOT = 260,  /* height of the plot itself */
    BOTTOM = 52,
    LEFT = 64,
    RIGHT = 16,
    MOST_TICKS = 7,
    LABEL = 34 /* width of a label of the x axis */
};

typedef struct scale { /* of an axis: value -> pixel */
    double low, high;  /* logarithms, if log */
    double from, to;
    bool log;
} scale;

static double place(const scale *s, double v)
{
    const double x = s->log ? log2(v) : v;
    const double part = s->high > s->low ? (x - s->low) / (s->high - s->low) : 0.5;
    return s->from + part * (s->to - s->from);
}

static void put_text(sti_buf *out, const char *text)
{
    for (; *text; text++) switch (*text) {
        case '<': sti_buf_puts(out, "&lt;"); break;
        case '>': sti_buf_puts(out, "&gt;"); break;
        case '&': sti_buf_puts(out, "&amp;"); break;
        case '"': sti_buf_puts(out, "&quot;"); break;
        default:
            if ((unsigned char)*text >= ' ') sti_buf_put(out, text, 1);
        }
}

static void label(sti_buf *out, double x, double y, const char *anchor,
                  const char *more, const char *text)
{
    sti_buf_printf(out, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\"%s>", x, y,
                   anchor, more);
    put_text(out, text);
    sti_buf_puts(out, "</text>\n");
}

static const char *colour_of(const char *name, int i)
{
    static const char *const known[][2] = {
        {"softmax", "#b33"}, {"still", "#26a"}, {"lolcats", "#2a7"}, {"swa", "#c80"}};
    static const char *const others[] = {"#83a", "#077", "#a63", "#555"};
    for (size_t k = 0; k < sizeof known / sizeof *known; k++)
        if (strcmp(known[k][0], name) == 0) return known[k][1];
    return others[(size_t)i % (sizeof others / sizeof *others)];
}

/* ---- Axes ---------------------------------------------------------------- */

/* 1, 2 or 5 times a power of ten: the least that is not below x. */
static double nice(double x)
{
    const double ten = pow(10, floor(log10(x)));
    return x <= ten ? ten : x <= 2 * ten ? 2 * ten : x <= 5 * ten ? 5 * ten : 10 * ten;
}

/* The range of the values; false if there are none. */
static bool range(const cli_chart *c, const double *y, double *low, double *high)
{
    *low = INFINITY;
    *high = 0;
    for (int i = 0; i < c->lines * c->n; i++) {
        if (!isfinite(y[i]) || y[i] <= 0) continue;
        *low = fmin(*low, y[i]);
        *high = fmax(*high, y[i]);
    }
    return *high > 0;
}

/* Ticks of a y axis, and the scale that they span. */
static int ticks(const cli_chart *c, const cli_panel *p, scale *y,
                 double tick[MOST_TICKS + 1])
{
    double low, high;
    int n = 0;
    *y = (scale){.from = TOP + PLOT, .to = TOP, .log = p->log};
    if (!range(c, p->y, &low, &high)) low = high = 1;
    if (!p->log) {
        const double step = nice(high / 5);
        while (n <= MOST_TICKS && (n == 0 || tick[n - 1] < high)) {
            tick[n] = n * step;
            n++;
        }
        y->high = tick[n - 1];
        return n;
    }
    const double first = pow(10, floor(log10(low)));
    const double decades = fmax(1, ceil(log10(high / first)));
    const double factor = pow(10, ceil(decades / MOST_TICKS));
    while (n <= MOST_TICKS && (n < 2 || tick[n - 1] < high)) {
        tick[n] = n ? tick[n - 1] * factor : first;
        n++;
    }
    y->low = log2(tick[0]);
    y->high = log2(tick[n - 1]);
    return n;
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

static void draw_axes(const cli_chart *c, const cli_panel *p, const scale *x,
                      const scale *y, const double *tick, int n, sti_buf *out)
{
    char text[24];
    const double left = x->from - 12, right = x->to + 12;
    for (int i = 0; i < n; i++) {
        const double at = place(y, tick[i]);
        sti_buf_printf(out, "<path d=\"M%.1f %.1fH%.1f\" stroke=\"#ddd\"/>\n", left, at,
                       right);
        snprintf(text, sizeof text, "%g", tick[i]);
        label(out, left - 6, at + 4, "end", "", text);
    }
    sti_buf_printf(out,
                   "<path d=\"M%.1f %dV%dH%.1f\" fill=\"none\" stroke=\"#444\"/>\n",
                   left, TOP, TOP + PLOT, right);
    double last = -LABEL;
    for (int i = 0; i < c->n; i++) {
        const double at = place(x, c->x[i]);
        if (at - last < LABEL) continue;
        length_text(c->x[i], text);
        label(out, at, TOP + PLOT + 18, "middle", "", text);
        last = at;
    }
    label(out, (left + right) / 2, TOP + PLOT + 40, "middle", "", c->x_title);
    label(out, left, TOP - 12, "start", " font-weight=\"bold\"", p->title);
}

/* ---- Lines --------------------------------------------------------------- */

static void draw_line(const cli_chart *c, const double *y, const scale *sx,
                      const scale *sy, const char *colour, int slot, sti_buf *out)
{
    bool open = false;
    sti_buf_printf(out, "<path fill=\"none\" stroke=\"%s\" stroke-width=\"2\" d=\"",
                   colour);
    for (int i = 0; i < c->n; i++) {
        const bool there = isfinite(y[i]) && y[i] > 0;
        if (there)
            sti_buf_printf(out, "%c%.1f %.1f", open ? 'L' : 'M', place(sx, c->x[i]),
                           place(sy, y[i]));
        open = there;
    }
    sti_buf_puts(out, "\"/>\n");
    for (int i = 0; i < c->n; i++) {
        const double at = place(sx, c->x[i]);
        if (isfinite(y[i]) && y[i] > 0)
            sti_buf_printf(out,
                           "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n",
                           at, place(sy, y[i]), colour);
        else /* crosses of several lines are drawn side by side */
            sti_buf_printf(out,
                           "<path d=\"M%.1f %dl8 8m0 -8l-8 8\" stroke=\"%s\" "
                           "stroke-width=\"2\"/>\n",
                           at - 4 + 4.0 * slot, TOP + 4, colour);
    }
}

static void draw_panel(const cli_chart *c, int k, sti_buf *out)
{
    const cli_panel *p = &c->panel[k];
    scale x = {.from = k * PANEL + LEFT + 12,
               .to = (k + 1) * PANEL - RIGHT - 12,
               .log = true},
          y;
    double tick[MOST_TICKS + 1];
    x.low = log2(c->x[0]);
    x.high = log2(c->x[0]);
    for (int i = 1; i < c->n; i++) {
        x.low = fmin(x.low, log2(c->x[i]));
        x.high = fmax(x.high, log2(c->x[i]));
    }
    const int n = ticks(c, p, &y, tick);
    draw_axes(c, p, &x, &y, tick, n, out);
    for (int i = 0; i < c->lines; i++)
        draw_line(c, p->y + (size_t)i * (size_t)c->n, &x, &y, colour_of(c->line[i], i),
                  i, out);
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
        const char *colour = colour_of(c->line[i], i);
        sti_buf_printf(out,
                       "<path d=\"M%.1f 46h18\" stroke=\"%s\" stroke-width=\"2\"/>\n"
                       "<circle cx=\"%.1f\" cy=\"46\" r=\"3\" fill=\"%s\"/>\n",
                       at, colour, at + 9, colour);
        label(out, at + 24, 50, "start", "", c->line[i]);
        at += 44 + 7.5 * (double)strlen(c->line[i]);
    }
    if (!any_missing(c)) return;
    sti_buf_printf(out,
                   "<path d=\"M%.1f 42l8 8m0 -8l-8 8\" stroke=\"#444\" "
                   "stroke-width=\"2\"/>\n",
                   at);
    label(out, at + 14, 50, "start", "", c->missing);
}

void cli_chart_draw(const cli_chart *c, sti_buf *out)
{
    const int width = c->panels * PANEL, height = TOP + PLOT + BOTTOM;
    sti_buf_printf(out,
                   "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" "
                   "width=\"%d\" height=\"%d\" font-family=\"sans-serif\" "
                   "font-size=\"13\">\n<rect width=\"%d\" height=\"%d\" "
                   "fill=\"white\"/>\n",
                   width, height, width, height, width, height);
    label(out, LEFT, 26, "start", " font-size=\"16\"", c->title);
    draw_legend(c, out);
    for (int k = 0; k < c->panels; k++) draw_panel(c, k, out);
    sti_buf_puts(out, "</svg>\n");
}
