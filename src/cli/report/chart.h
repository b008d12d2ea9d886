/* chart.h - a line chart as SVG: one or more panels side by side over the same x axis. */
#ifndef CLI_REPORT_CHART_H
#define CLI_REPORT_CHART_H

#include <stdbool.h>

#include "base/buf.h"

typedef struct cli_panel {
    const char *title; /* what y is, with its unit */
    bool log;          /* y is logarithmic */
    bool fitted;       /* linear, but as low as its values; otherwise it begins at 0 */
    const double *y;   /* [lines, n]; NaN: no value */
    /* [lines, n]: ends of error bars, NaN: none; NULL: none at all */
    const double *low, *high;
} cli_panel;

typedef struct cli_chart {
    const char *title, *x_title;
    /* What a missing value means ("does not fit"): it is a cross at the top. NULL: lines
     * pass over it. */
    const char *missing;
    const double *x; /* [n], increasing */
    int n;
    bool linear; /* x is; otherwise it is a logarithm to base 2, of lengths */
    const char *const *line; /* [lines]: their names */
    int lines;
    const cli_panel *panel;
    int panels, width; /* width of a panel; 0: the usual one */
    /* Beside the legend: what error bars are. NULL: it does not say. */
    const char *bars;
    /* A dashed line across at this x, with a label; NULL: none. */
    double here;
    const char *here_title;
} cli_chart;

/* Appends the drawing. Text may be anything: it is escaped. */
void cli_chart_draw(const cli_chart *c, sti_buf *out);

#endif
