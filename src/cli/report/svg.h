/* svg.h - what all drawings share: one style, text, marks, axes.
 *
 * Colours are classes, f0 to f7 to fill and s0 to s7 to stroke, whose values a style
 * sheet in the drawing gives for light and for dark surroundings. They begin from
 * those of Okabe and Ito, darker on light and lighter on dark for contrast; what they
 * say, a shape, a dash or a word says too, for people who do not see all colours. Drawings load nothing and run nothing. */
#ifndef CLI_REPORT_SVG_H
#define CLI_REPORT_SVG_H

#include <stdbool.h>
#include <stddef.h>

#include "base/buf.h"

enum { CLI_SVG_COLOURS = 8, CLI_SVG_TICKS = 9 };

/* Opens a drawing, with a ground and a heading at (left, 26); `title` is also what
 * readers of the screen say. */
void cli_svg_begin(sti_buf *out, int width, int height, int left, const char *title);
void cli_svg_end(sti_buf *out);

/* Text from anywhere, as part of the drawing: markup is escaped, control characters are
 * left out, bytes that are no UTF-8 become U+FFFD. */
void cli_svg_escape(sti_buf *out, const char *text, size_t n);
/* `anchor` is start, middle or end; `look` a list of classes: f0 to f7, faint, bold,
 * under, slant. */
void cli_svg_text(sti_buf *out, double x, double y, const char *anchor,
                  const char *look, const char *text);
/* About how wide n bytes of text are at this size in a sans-serif font. */
double cli_svg_width(const char *text, size_t n, double size);
/* A small mark around a point: circle, square, triangle, diamond and so on by i. */
void cli_svg_mark(sti_buf *out, double x, double y, int i, int colour);
const char *cli_svg_dash(int i); /* of the i-th line; the first is solid */

/* ---- Axes ---------------------------------------------------------------- */

typedef struct cli_axis {
    double low, high; /* values at its ends; logarithms to base 2, if log */
    double from, to;  /* their places */
    bool log;
} cli_axis;

double cli_axis_place(const cli_axis *a, double v);
/* Moves the ends out to round numbers, and returns how many there are in between, in
 * tick: linear axes in steps of 1, 2 or 5, logarithmic ones in powers of ten. */
int cli_axis_round(cli_axis *a, double tick[CLI_SVG_TICKS]);
/* The same round numbers, but only those between the ends, which stay. */
int cli_axis_ticks(const cli_axis *a, double tick[CLI_SVG_TICKS]);
/* The frame of a plot of these axes, with the ticks of y and lines at them. Ticks of x
 * are the caller's, but for linear axes: cli_svg_ticks_x. These count something, from 0:
 * only whole numbers are written. */
void cli_svg_frame(sti_buf *out, const cli_axis *x, const cli_axis *y,
                   const double *tick, int n, const char *x_title, const char *y_title);
void cli_svg_ticks_x(sti_buf *out, const cli_axis *x, const cli_axis *y,
                     const double *tick, int n);

#endif
