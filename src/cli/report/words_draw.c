/* words_draw.c - the drawing of words.h. Words are placed one after the other, the
 * largest first, each as near to the middle as it fits on a spiral. Boxes come from
 * estimated widths, and textLength makes whatever font is there fill its box. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cli/report/svg.h"
#include "cli/report/words.h"

enum {
    CLOUD_X = 24,
    CLOUD_Y = 76,
    CLOUD_W = 600,
    CLOUD_H = 372,
    BARS_X = 770,
    BARS_W = 150,
    ROW = 46,
    WIDE = 1000,
    HIGH = 480,
    MOST_WORDS = 90,
    LARGEST = 54,
    SMALLEST = 11
};

/* Colour, and what else tells a class. */
static const char *const looks[CLI_WORD_CLASSES] = {
    [CLI_NEGATION] = "f1 bold under",
    [CLI_MODALITY] = "f4 bold",
    [CLI_QUANTIFICATION] = "f2 bold slant",
    [CLI_NAME] = "f3 slant",
    [CLI_DIGITS] = "f0",
    [CLI_PUNCTUATION] = "f6",
    [CLI_SPACE] = "f6",
    [CLI_OTHER_WORD] = "f6",
};

typedef struct box {
    double x, y, w, h; /* middle, size */
} box;

static bool overlaps(const box *a, const box *b)
{
    return fabs(a->x - b->x) < (a->w + b->w) / 2 + 3 &&
           fabs(a->y - b->y) < (a->h + b->h) / 2 + 1;
}

static bool is_free(const box *b, const box *placed, int n)
{
    if (fabs(b->x) + b->w / 2 > CLOUD_W / 2.0 || fabs(b->y) + b->h / 2 > CLOUD_H / 2.0)
        return false;
    for (int i = 0; i < n; i++)
        if (overlaps(b, &placed[i])) return false;
    return true;
}

/* The first free place on a spiral that is as wide as the cloud. */
static bool place_word(box *b, const box *placed, int n)
{
    for (int i = 0; i < 3000; i++) {
        const double turn = 0.17 * i, away = 0.0126 * i * 8;
        b->x = away * cos(turn) * CLOUD_W / CLOUD_H;
        b->y = away * sin(turn);
        if (is_free(b, placed, n)) return true;
    }
    return false;
}

static void draw_word(const cli_word *w, const box *b, double size, sti_buf *out)
{
    sti_buf_printf(out,
                   "<text class=\"%s\" x=\"%.1f\" y=\"%.1f\" "
                   "style=\"font-size:%.1fpx\" text-anchor=\"middle\" "
                   "textLength=\"%.1f\" lengthAdjust=\"spacingAndGlyphs\">",
                   looks[w->class], CLOUD_X + CLOUD_W / 2.0 + b->x,
                   CLOUD_Y + CLOUD_H / 2.0 + b->y + 0.34 * size, size, b->w);
    cli_svg_escape(out, w->text, strlen(w->text));
    sti_buf_printf(out, "<title>%.1f of %d kept</title></text>\n", w->kept, w->times);
}

static void draw_cloud(const cli_words *w, sti_buf *out)
{
    box placed[MOST_WORDS];
    double most = 0;
    int n = 0, tried = 0;
    for (int i = 0; i < w->n && n < MOST_WORDS && tried < 2 * MOST_WORDS; i++) {
        const cli_word *word = &w->word[i];
        if (word->class == CLI_PUNCTUATION || word->class == CLI_SPACE) continue;
        if (most == 0) most = word->kept;
        if (word->kept <= 0) break;
        const double size = fmax(SMALLEST, LARGEST * sqrt(word->kept / most));
        box b = {.w = cli_svg_width(word->text, strlen(word->text), size), .h = size};
        tried++;
        if (!place_word(&b, placed, n)) continue;
        placed[n++] = b;
        draw_word(word, &b, size, out);
    }
}

static void draw_bar(double y, double share, double widest, const char *look,
                     sti_buf *out)
{
    char text[32];
    const double w = widest > 0 ? BARS_W * share / widest : 0;
    sti_buf_printf(
        out, "<rect class=\"%s\" x=\"%d\" y=\"%.1f\" width=\"%.1f\" height=\"12\"/>\n",
        look, BARS_X, y, fmax(w, 1));
    snprintf(text, sizeof text, "%.1f%%", 100 * share);
    cli_svg_text(out, BARS_X + w + 6, y + 10.5, "start", "", text);
}

static void draw_bars(const cli_words *w, sti_buf *out)
{
    double widest = 0;
    for (int i = 0; i < CLI_WORD_CLASSES; i++)
        widest = fmax(widest, fmax(w->in_text[i], w->in_kept[i]));
    cli_svg_text(out, BARS_X, 62, "start", "bold", "share of tokens");
    for (int i = 0; i < CLI_WORD_CLASSES; i++) {
        const char *name = cli_word_class_name((cli_word_class)i);
        const double y = CLOUD_Y + i * ROW;
        cli_svg_text(out, BARS_X - 12, y + 18, "end", looks[i], name);
        draw_bar(y, w->in_text[i], widest, "f7", out);
        draw_bar(y + 14, w->in_kept[i], widest, "f0", out);
    }
    sti_buf_printf(
        out,
        "<rect class=\"f7\" x=\"%d\" y=\"%d\" width=\"12\" height=\"12\"/>\n"
        "<rect class=\"f0\" x=\"%d\" y=\"%d\" width=\"12\" height=\"12\"/>\n",
        BARS_X - 110, HIGH - 26, BARS_X + 20, HIGH - 26);
    cli_svg_text(out, BARS_X - 92, HIGH - 15.5, "start", "", "of the text");
    cli_svg_text(out, BARS_X + 38, HIGH - 15.5, "start", "", "of those kept");
}

void cli_words_draw(const cli_saliency *r, const cli_words *w, sti_buf *out)
{
    char text[200];
    const still_method *m = &r->s->method;
    cli_svg_begin(out, WIDE, HIGH, CLOUD_X, "Tokens most often kept");
    snprintf(text, sizeof text,
             "%d of each %d by %s; size: how often, over all layers and heads. No "
             "punctuation; -ing continues a word",
             m->select, m->chunk, m->score);
    cli_svg_text(out, CLOUD_X, 48, "start", "faint", text);
    draw_cloud(w, out);
    draw_bars(w, out);
    cli_svg_end(out);
}
