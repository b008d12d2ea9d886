/* svg.c - see svg.h. */
#include "cli/report/svg.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"

/* Rules begin with .still, so that drawings inside a page leave it alone. */
static const char *const style =
    "<style>\n"
    ".still{font-family:system-ui,sans-serif;font-size:13px}\n"
    ".still text{fill:#1a1a1a}.still .faint{fill:#666}.still .bold{font-weight:600}\n"
    ".still .under{text-decoration:underline}.still .slant{font-style:italic}\n"
    ".still .pale{fill-opacity:.45}.still .fine{stroke-width:2.6}"
    ".still .thick{stroke-width:4.6}\n"
    ".still .head{font-size:16px}.still .ground{fill:#fff}\n"
    ".still .small{font-size:10px}.still .edge{stroke:#ccc}"
    ".still .framed{stroke:#1a1a1a;stroke-width:2}\n"
    ".still .grid{stroke:#ddd;fill:none}.still .axis{stroke:#555;fill:none}\n"
    ".still .dots{fill:none;stroke-linecap:round}.still .line{fill:none;"
    "stroke-width:2}.still .bar{fill:none;stroke-width:1.5}\n"
    ".still .f0{fill:#0072b2}.still .f1{fill:#d55e00}.still .f2{fill:#007d5c}\n"
    ".still .f3{fill:#b0508a}.still .f4{fill:#b87d00}.still .f5{fill:#2a8fc7}\n"
    ".still .f6{fill:#555}.still .f7{fill:#bbb}\n"
    ".still .s0{stroke:#0072b2}.still .s1{stroke:#d55e00}.still .s2{stroke:#007d5c}\n"
    ".still .s3{stroke:#b0508a}.still .s4{stroke:#b87d00}.still .s5{stroke:#2a8fc7}\n"
    ".still .s6{stroke:#555}.still .s7{stroke:#bbb}\n"
    "@media (prefers-color-scheme:dark){\n"
    ".still text{fill:#e6e6e6}.still .faint{fill:#a0a0a0}.still .ground{fill:#161616}\n"
    ".still .edge{stroke:#444}.still .framed{stroke:#e6e6e6}\n"
    ".still .grid{stroke:#383838}.still .axis{stroke:#999}\n"
    ".still .f0{fill:#4aa8e8}.still .f1{fill:#ff8b4a}.still .f2{fill:#2cc79a}\n"
    ".still .f3{fill:#e49ac6}.still .f4{fill:#f0b93a}.still .f5{fill:#96d3f7}\n"
    ".still .f6{fill:#aaa}.still .f7{fill:#555}\n"
    ".still .s0{stroke:#4aa8e8}.still .s1{stroke:#ff8b4a}.still .s2{stroke:#2cc79a}\n"
    ".still .s3{stroke:#e49ac6}.still .s4{stroke:#f0b93a}.still .s5{stroke:#96d3f7}\n"
    ".still .s6{stroke:#aaa}.still .s7{stroke:#555}\n"
    "}\n</style>\n";

void cli_svg_escape(sti_buf *out, const char *text, size_t n)
{
    for (size_t i = 0; i < n;) {
        size_t bad, length;
        bool cut;
        switch (text[i]) {
        case '<': sti_buf_puts(out, "&lt;"); break;
        case '>': sti_buf_puts(out, "&gt;"); break;
        case '&': sti_buf_puts(out, "&amp;"); break;
        case '"': sti_buf_puts(out, "&quot;"); break;
        default:
            length = sti_utf8_char(text + i, n - i, &bad, &cut);
            if (!length) {
                sti_buf_puts(out, STI_UTF8_REPLACEMENT);
                i += bad;
                continue;
            }
            const uint32_t c = sti_utf8_decode(text + i, &length);
            /* XML has neither control characters nor these two. */
            if (c >= ' ' && (c < 0x7F || c > 0x9F) && c != 0xFFFE && c != 0xFFFF)
                sti_buf_put(out, text + i, length);
            i += length;
            continue;
        }
        i++;
    }
}

void cli_svg_begin(sti_buf *out, int width, int height, int left, const char *title)
{
    sti_buf_printf(out,
                   "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"still\" "
                   "role=\"img\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\">\n"
                   "<title>",
                   width, height, width, height);
    cli_svg_escape(out, title, strlen(title));
    sti_buf_puts(out, "</title>\n");
    sti_buf_puts(out, style);
    sti_buf_printf(out, "<rect class=\"ground\" width=\"%d\" height=\"%d\"/>\n", width,
                   height);
    cli_svg_text(out, left, 26, "start", "head", title);
}

void cli_svg_end(sti_buf *out)
{
    sti_buf_puts(out, "</svg>\n");
}

void cli_svg_text(sti_buf *out, double x, double y, const char *anchor,
                  const char *look, const char *text)
{
    sti_buf_printf(out, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\"", x, y, anchor);
    if (*look) sti_buf_printf(out, " class=\"%s\"", look);
    sti_buf_puts(out, ">");
    cli_svg_escape(out, text, strlen(text));
    sti_buf_puts(out, "</text>\n");
}

/* Parts of an em: narrow and wide letters, others of the alphabet, and everything that
 * is written without one. */
static double letter_width(uint32_t c)
{
    if (c >= 0x1100) return c >= 0x2000 && c < 0x2600 ? 0.7 : 1;
    if (c < 0x80 && strchr("iljI.,:;'|!", (int)c)) return 0.29;
    if (c < 0x80 && strchr("ftr()[]-/\" ", (int)c)) return 0.38;
    if (c < 0x80 && strchr("mwMW@%", (int)c)) return 0.87;
    return c >= 'A' && c <= 'Z' ? 0.68 : 0.56;
}

double cli_svg_width(const char *text, size_t n, double size)
{
    double sum = 0;
    for (size_t i = 0; i < n;) {
        size_t bad = 1, length;
        bool cut;
        length = sti_utf8_char(text + i, n - i, &bad, &cut);
        sum += length ? letter_width(sti_utf8_decode(text + i, &length)) : 1;
        i += length ? length : bad;
    }
    return sum * size;
}

void cli_svg_mark(sti_buf *out, double x, double y, int i, int colour)
{
    static const char *const shape[] = {
        "m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0", /* circle */
        "m-3 -3h6v6h-6z",                               /* square */
        "m0 -4l4 7h-8z",                                /* triangle */
        "m0 -4.5l4.5 4.5l-4.5 4.5l-4.5 -4.5z",          /* diamond */
        "m0 4l4 -7h-8z",                                /* triangle, upside down */
        "m-4 -1.2h2.8v-2.8h2.4v2.8h2.8v2.4h-2.8v2.8h-2.4v-2.8h-2.8z", /* plus */
        "m-3.6 -2l1.6-1.6 2 2 2-2 1.6 1.6-2 2 2 2-1.6 1.6-2-2-2 2-1.6-1.6 2-2z", /* x */
        "m-1.5 -4h3v8h-3z", /* upright bar */
    };
    const size_t n = sizeof shape / sizeof *shape;
    sti_buf_printf(out, "<path class=\"mark f%d\" d=\"M%.1f %.1f%s\"/>\n",
                   colour % CLI_SVG_COLOURS, x, y, shape[(size_t)i % n]);
}

const char *cli_svg_dash(int i)
{
    static const char *const dash[] = {"none", "7 3", "2 3", "9 3 2 3", "4 2", "12 4"};
    return dash[(size_t)i % (sizeof dash / sizeof *dash)];
}

/* ---- Axes ---------------------------------------------------------------- */

double cli_axis_place(const cli_axis *a, double v)
{
    const double x = a->log ? log2(v) : v;
    const double part = a->high > a->low ? (x - a->low) / (a->high - a->low) : 0.5;
    return a->from + part * (a->to - a->from);
}

/* 1, 2 or 5 times a power of ten: the least that is not below x. */
static double nice(double x)
{
    const double ten = pow(10, floor(log10(x)));
    return x <= ten ? ten : x <= 2 * ten ? 2 * ten : x <= 5 * ten ? 5 * ten : 10 * ten;
}

static int round_linear(cli_axis *a, double tick[CLI_SVG_TICKS])
{
    if (!(a->high > a->low)) a->high = a->low + (a->low != 0 ? fabs(a->low) : 1);
    const double step = nice((a->high - a->low) / (CLI_SVG_TICKS - 3)),
                 first = floor(a->low / step + 1e-9);
    int n = 0;
    do {
        tick[n] = (first + n) * step;
        n++;
    } while (n < CLI_SVG_TICKS && tick[n - 1] < a->high - 1e-9 * step);
    a->low = tick[0];
    a->high = tick[n - 1];
    return n;
}

/* Powers of ten; within a single one of them, its 1, 2, 5 and 10. */
static int round_log(cli_axis *a, double tick[CLI_SVG_TICKS])
{
    const double low = exp2(a->low), high = exp2(fmax(a->high, a->low));
    const double first = pow(10, floor(log10(low) + 1e-9));
    const double decades = fmax(1, ceil(log10(high / first) - 1e-9));
    int n = 0;
    if (decades <= 2) {
        for (int d = 0; d <= decades; d++)
            for (int k = 0; k < 3 && n < CLI_SVG_TICKS; k++) {
                const double v = first * pow(10, d) * (k == 0 ? 1 : k == 1 ? 2 : 5);
                if (n && tick[n - 1] >= high) break;
                if (n == 1 && v <= low) n = 0; /* the one before is not needed */
                tick[n++] = v;
            }
    } else {
        const double factor = pow(10, ceil(decades / (CLI_SVG_TICKS - 2)));
        while (n < CLI_SVG_TICKS && (n < 2 || tick[n - 1] < high)) {
            tick[n] = n ? tick[n - 1] * factor : first;
            n++;
        }
    }
    a->low = log2(tick[0]);
    a->high = log2(tick[n - 1]);
    return n;
}

int cli_axis_round(cli_axis *a, double tick[CLI_SVG_TICKS])
{
    return a->log ? round_log(a, tick) : round_linear(a, tick);
}

int cli_axis_ticks(const cli_axis *a, double tick[CLI_SVG_TICKS])
{
    cli_axis wide = *a;
    const int n = cli_axis_round(&wide, tick);
    int inside = 0;
    for (int i = 0; i < n; i++) {
        const double v = a->log ? log2(tick[i]) : tick[i];
        if (v >= a->low && v <= a->high) tick[inside++] = tick[i];
    }
    return inside;
}

void cli_svg_frame(sti_buf *out, const cli_axis *x, const cli_axis *y,
                   const double *tick, int n, const char *x_title, const char *y_title)
{
    char text[32];
    const double left = x->from - 12, right = x->to + 12;
    for (int i = 0; i < n; i++) {
        const double at = cli_axis_place(y, tick[i]);
        sti_buf_printf(out, "<path class=\"grid\" d=\"M%.1f %.1fH%.1f\"/>\n", left, at,
                       right);
        snprintf(text, sizeof text, "%.6g", fabs(tick[i]) < 1e-12 ? 0 : tick[i]);
        cli_svg_text(out, left - 6, at + 4, "end", "faint", text);
    }
    sti_buf_printf(out, "<path class=\"axis\" d=\"M%.1f %.1fV%.1fH%.1f\"/>\n", left,
                   y->to, y->from, right);
    cli_svg_text(out, (left + right) / 2, y->from + 40, "middle", "faint", x_title);
    cli_svg_text(out, left, y->to - 12, "start", "bold", y_title);
}

void cli_svg_ticks_x(sti_buf *out, const cli_axis *x, const cli_axis *y,
                     const double *tick, int n)
{
    char text[32];
    for (int i = 0; i < n; i++) {
        if (fabs(tick[i] - round(tick[i])) > 1e-9) continue;
        snprintf(text, sizeof text, "%.0f", fabs(round(tick[i])));
        cli_svg_text(out, cli_axis_place(x, tick[i]), y->from + 18, "middle", "faint",
                     text);
    }
}
