/* heads.c - see heads.h. Cells are squares; one colour alone carries the figure, and
 * caps are text besides, so that nobody needs to tell colours apart. */
#include "cli/report/heads.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cli/report/svg.h"

enum { CELL = 34, LEFT = 64, TOP = 64, RIGHT = 16, BOTTOM = 40 };

static void draw_cell(const still_allocation *a, int i, sti_buf *out)
{
    const int x = LEFT + i / a->heads * CELL, y = TOP + i % a->heads * CELL;
    const double gain = fmin(fmax(a->gain[i], 0), 1);
    const bool large = a->cap[i] > a->method.cap;
    char text[16];
    sti_buf_printf(
        out,
        "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" class=\"f0 %s\" "
        "fill-opacity=\"%.3f\"><title>layer %d, kv head %d: attention on the fact "
        "%.3f, cap %d</title></rect>\n",
        x, y, CELL - 2, CELL - 2, large ? "framed" : "edge", 0.85 * gain, i / a->heads,
        i % a->heads, a->gain[i], a->cap[i]);
    if (!large) return;
    snprintf(text, sizeof text, "%d", a->cap[i]);
    cli_svg_text(out, x + CELL / 2.0 - 1, y + CELL / 2.0 + 3, "middle", "small", text);
}

void cli_heads_draw(const still_allocation *a, sti_buf *out)
{
    const int high = TOP + a->heads * CELL + BOTTOM;
    char text[192];
    snprintf(
        text, sizeof text,
        "stronger: more attention on the fact; numbers: salient tokens, where a head "
        "keeps more than %d; %.2f MB a session",
        a->method.cap, (double)a->bytes / 1e6);
    const double wide =
        fmax(a->layers * CELL, 1.1 * cli_svg_width(text, strlen(text), 13));
    cli_svg_begin(out, LEFT + (int)wide + RIGHT, high, LEFT,
                  "Heads that look things up");
    cli_svg_text(out, LEFT, 46, "start", "faint", text);
    for (int i = 0; i < a->layers * a->heads; i++) draw_cell(a, i, out);
    for (int l = 0; l < a->layers; l++) {
        snprintf(text, sizeof text, "%d", l);
        cli_svg_text(out, LEFT + l * CELL + CELL / 2.0 - 1, high - BOTTOM + 14,
                     "middle", "faint", text);
    }
    for (int g = 0; g < a->heads; g++) {
        snprintf(text, sizeof text, "%d", g);
        cli_svg_text(out, LEFT - 8, TOP + g * CELL + CELL / 2.0 + 4, "end", "faint",
                     text);
    }
    cli_svg_text(out, LEFT + a->layers * CELL / 2.0, high - 8, "middle", "faint",
                 "layer");
    sti_buf_printf(out,
                   "<text x=\"16\" y=\"%d\" class=\"faint\" transform=\"rotate(-90 16 "
                   "%d)\" text-anchor=\"middle\">kv head</text>\n",
                   TOP + a->heads * CELL / 2, TOP + a->heads * CELL / 2);
    cli_svg_end(out);
}
