/* heads.c - see heads.h. Cells are squares on white; blue alone carries the figure, and
 * caps are text besides, so that nobody needs to tell colours apart. */
#include "cli/report/heads.h"

#include <math.h>

enum { CELL = 34, LEFT = 64, TOP = 64, RIGHT = 16, BOTTOM = 40 };

static int largest_cap(const still_allocation *a)
{
    int most = 0;
    for (int i = 0; i < a->layers * a->heads; i++)
        most = a->cap[i] > most ? a->cap[i] : most;
    return most;
}

static void draw_cell(const still_allocation *a, int i, int most, sti_buf *out)
{
    const int x = LEFT + i / a->heads * CELL, y = TOP + i % a->heads * CELL;
    const double gain = fmin(fmax(a->gain[i], 0), 1);
    const bool large = a->cap[i] == most && most > a->method.cap;
    sti_buf_printf(
        out,
        "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"#26a\" "
        "fill-opacity=\"%.3f\" stroke=\"%s\" stroke-width=\"%s\"><title>layer "
        "%d, kv head %d: attention on the fact %.3f, cap %d</title></rect>\n",
        x, y, CELL - 2, CELL - 2, gain, large ? "#000" : "#ccc", large ? "2" : "1",
        i / a->heads, i % a->heads, a->gain[i], a->cap[i]);
    if (large)
        sti_buf_printf(
            out,
            "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\" font-size=\"10\" "
            "fill=\"%s\">%d</text>\n",
            x + CELL / 2 - 1, y + CELL / 2 + 3, gain > 0.5 ? "#fff" : "#000",
            a->cap[i]);
}

void cli_heads_draw(const still_allocation *a, sti_buf *out)
{
    const int wide = LEFT + a->layers * CELL + RIGHT,
              high = TOP + a->heads * CELL + BOTTOM, most = largest_cap(a);
    sti_buf_printf(out,
                   "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" "
                   "width=\"%d\" height=\"%d\" font-family=\"sans-serif\" "
                   "font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" "
                   "fill=\"#fff\"/>\n",
                   wide, high, wide, high);
    sti_buf_printf(
        out,
        "<text x=\"%d\" y=\"24\" font-size=\"15\" font-weight=\"bold\">Heads "
        "that look things up</text>\n<text x=\"%d\" y=\"44\" "
        "fill=\"#555\">darker: more attention on the fact; framed: %d salient "
        "tokens, others %d; %.2f MB a session</text>\n",
        LEFT, LEFT, most, a->method.cap, (double)a->bytes / 1e6);
    for (int i = 0; i < a->layers * a->heads; i++) draw_cell(a, i, most, out);
    for (int l = 0; l < a->layers; l++)
        sti_buf_printf(out,
                       "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%d</text>\n",
                       LEFT + l * CELL + CELL / 2 - 1, high - BOTTOM + 14, l);
    for (int g = 0; g < a->heads; g++)
        sti_buf_printf(out, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">%d</text>\n",
                       LEFT - 8, TOP + g * CELL + CELL / 2 + 4, g);
    sti_buf_printf(out,
                   "<text x=\"%d\" y=\"%d\" text-anchor=\"middle\" "
                   "fill=\"#555\">layer</text>\n<text x=\"16\" y=\"%d\" "
                   "fill=\"#555\" transform=\"rotate(-90 16 %d)\" "
                   "text-anchor=\"middle\">kv head</text>\n</svg>\n",
                   LEFT + a->layers * CELL / 2, high - 8, TOP + a->heads * CELL / 2,
                   TOP + a->heads * CELL / 2);
}
