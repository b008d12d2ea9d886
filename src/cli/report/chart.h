/* chart.h - a line chart as SVG: one or more panels side by side over the same x axis,
 * which is a logarithm to base 2 (context lengths). */
#ifndef CLI_REPORT_CHART_H
#define CLI_REPORT_CHART_H

#include <stdbool.h>

#include "base/buf.h"

typedef struct cli_panel {
    const char *title; /* what y is, with its unit */
    bool log;          /* y is logarithmic; otherwise it is linear and begins at 0 */
    const double *y;   /* [lines, n]; NaN: no value, shown as a cross at the top */
} cli_panel;

typedef struct cli_chart {
    const char *title, *x_title;
    const char *missing; /* what a cross means: "does not fit" */
    const double *x;     /* [n], > 0 */
    int n;
    const char *const *line; /* [lines]: their names */
    int lines;
    const cli_panel *panel;
    int panels;
} cli_chart;

/* Appends the drawing. Text may be anything: it is escaped. */
void cli_chart_draw(const cli_chart *c, sti_buf *out);

#endif
