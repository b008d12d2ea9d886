/* places.c - places.svg: a row a chunk of time, from top to bottom, a column a token.
 * A salient token is a line that begins when its chunk leaves the window and ends where
 * it is evicted. Below, the words of one chunk and what became of each. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cli/report/figures.h"
#include "cli/report/svg.h"

enum {
    LEFT = 100,
    TOP = 96,
    PLOT = 856,
    WIDE = LEFT + PLOT + 24,
    HIGHEST = 380, /* all rows together */
    SIZE = 14,     /* of the words */
    LINE = 23,
    MOST_LINES = 14
};

typedef struct strip {
    const still_saliency *s;
    const int32_t *folded; /* [tokens] */
    int rows, chunk;
    double high; /* of a row */
} strip;

static double column(const strip *p, int t)
{
    return LEFT + (double)PLOT * t / p->s->tokens;
}

static double row_at(const strip *p, int row)
{
    return TOP + p->high * row;
}

static void draw_rect(const strip *p, int row, int from, int to, const char *look,
                      sti_buf *out)
{
    if (from >= to) return;
    sti_buf_printf(
        out,
        "<rect class=\"%s\" x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\"/>\n",
        look, column(p, from), row_at(p, row), column(p, to) - column(p, from),
        p->high - 1);
}

static void draw_rows(const strip *p, sti_buf *out)
{
    const int C = p->chunk, every = (int)fmax(1, ceil(15 / p->high));
    char text[32];
    for (int k = 0; k < p->rows; k++) {
        const int end = (k + 1) * C < p->s->tokens ? (k + 1) * C : p->s->tokens,
                  window = k ? (k - 1) * C : 0;
        draw_rect(p, k, 0, window, "f7 pale", out);
        draw_rect(p, k, window, end, "f5", out);
        if (k % every && k != p->rows - 1) continue;
        snprintf(text, sizeof text, "%d", end);
        cli_svg_text(out, LEFT - 8, row_at(p, k) + p->high / 2 + 4, "end", "faint",
                     text);
    }
}

/* The first row in which a token is in the linear state; p->rows: none. */
static int end_row(const strip *p, int t)
{
    return p->folded[t] < 0 ? p->rows : p->folded[t] / p->chunk;
}

static void draw_salient(const strip *p, sti_buf *out)
{
    sti_buf_printf(out, "<path class=\"s1\" fill=\"none\" stroke-width=\"%.2f\" d=\"",
                   fmin(2, fmax(0.6, 0.8 * PLOT / p->s->tokens)));
    for (int t = 0; t < p->s->left; t++) {
        const int first = t / p->chunk + 2, end = end_row(p, t);
        if (end > first)
            sti_buf_printf(out, "M%.2f %.1fV%.1f",
                           column(p, t) + 0.5 * PLOT / p->s->tokens, row_at(p, first),
                           row_at(p, end) - 1);
    }
    sti_buf_puts(out, "\"/>\n");
}

static void draw_legend(sti_buf *out)
{
    static const struct {
        const char *look, *text;
        double x;
    } row[] = {{"f5", "in the window", LEFT},
               {"f1", "salient: exact beyond it", LEFT + 130},
               {"f7 pale", "folded into the linear state", LEFT + 320}};
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        sti_buf_printf(
            out,
            "<rect class=\"%s\" x=\"%.1f\" y=\"44\" width=\"%d\" height=\"12\"/>\n",
            row[i].look, row[i].x, i == 1 ? 3 : 14);
        cli_svg_text(out, row[i].x + 20, 54, "start", "", row[i].text);
    }
}

/* ---- The words of a chunk ------------------------------------------------ */

static const char *fate(const strip *p, int t)
{
    const int end = end_row(p, t);
    if (end >= p->rows) return "f1 bold under";
    return end > t / p->chunk + 2 ? "f4 slant" : "faint";
}

static void put_word(const char *look, double x, double y, double w, const char *text,
                     size_t n, sti_buf *out)
{
    sti_buf_printf(out,
                   "<text class=\"%s\" x=\"%.1f\" y=\"%.1f\" style=\"font-size:%dpx\" "
                   "textLength=\"%.1f\" lengthAdjust=\"spacingAndGlyphs\">",
                   look, x, y, SIZE, w);
    cli_svg_escape(out, text, n);
    sti_buf_puts(out, "</text>\n");
}

/* Tokens of a chunk as lines of text from y on; returns the number of lines. out NULL:
 * only counts them. */
static int draw_words(const cli_saliency *r, const strip *p, int from, double y,
                      sti_buf *out)
{
    int line = 0;
    double x = LEFT;
    for (int t = from; t < from + p->chunk; t++) {
        size_t n;
        const char *text = still_tokenizer_piece(r->tk, r->ids[t], true, &n);
        for (; text && n && (*text == ' ' || *text == '\n'); text++, n--)
            x += *text == ' ' ? 0.3 * SIZE : 0;
        if (text && !n) text = "\xE2\x86\xB5", n = 3; /* a line break as an arrow */
        const double w = text ? cli_svg_width(text, n, SIZE) : 0;
        if (!text || w <= 0) continue;
        if (x + w > LEFT + PLOT) {
            x = LEFT;
            if (++line == MOST_LINES) break;
        }
        if (out) put_word(fate(p, t), x, y + line * LINE, w, text, n, out);
        x += w + 1;
    }
    return line < MOST_LINES ? line + 1 : line;
}

void cli_places_draw(const cli_saliency *r, int head, sti_buf *out)
{
    const still_saliency *s = r->s;
    const int C = s->method.chunk, rows = (s->tokens + C - 1) / C;
    const strip p = {.s = s,
                     .folded = s->folded + (size_t)head * (size_t)s->tokens,
                     .rows = rows,
                     .chunk = C,
                     .high = fmin(22, (double)HIGHEST / rows)};
    const double words = row_at(&p, rows) + 92;
    const int lines = draw_words(r, &p, C, words, NULL);
    char title[160], text[160];
    snprintf(title, sizeof title,
             "Where each token is over time, layer %d head %d of %.60s",
             s->first_layer + head / s->heads, head % s->heads, cli_base(r->model));
    cli_svg_begin(out, WIDE, (int)words + lines * LINE + 4, LEFT, title);
    draw_legend(out);
    cli_svg_text(out, LEFT - 8, TOP - 10, "end", "faint", "tokens read");
    draw_rows(&p, out);
    draw_salient(&p, out);
    cli_svg_text(out, LEFT, row_at(&p, rows) + 18, "start", "faint", "0");
    snprintf(text, sizeof text, "%d", s->tokens);
    cli_svg_text(out, LEFT + PLOT, row_at(&p, rows) + 18, "end", "faint", text);
    cli_svg_text(out, LEFT + PLOT / 2.0, row_at(&p, rows) + 18, "middle", "faint",
                 "position of the token");
    snprintf(text, sizeof text, "Tokens %d to %d at the end of the text", C, 2 * C - 1);
    cli_svg_text(out, LEFT, words - 48, "start", "bold", text);
    cli_svg_text(out, LEFT, words - 26, "start", "f1 bold under", "salient");
    cli_svg_text(out, LEFT + 70, words - 26, "start", "f4 slant",
                 "salient for a while, then evicted");
    cli_svg_text(out, LEFT + 310, words - 26, "start", "faint",
                 "folded when they left the window");
    draw_words(r, &p, C, words, out);
    cli_svg_end(out);
}
