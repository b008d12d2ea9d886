/* training_page.c - see training.h. Drawings are SVG inside the page; curves of long runs
 * are means over equal numbers of steps, so that the page stays small. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "cli/report/chart.h"
#include "cli/report/svg.h"
#include "cli/report/training.h"

enum { MOST_POINTS = 600, WIDTH = 900, CELL = 26, LEFT = 72, TOP = 72 };

static void put_text(sti_buf *out, const char *text)
{
    cli_svg_escape(out, text, strlen(text));
}

/* ---- Curves -------------------------------------------------------------- */

/* The steps of a stage as [lines, n]: training and held out. `relative`: stage 1's error
 * over the teacher's output, else the loss. */
typedef struct curve {
    double x[MOST_POINTS], y[2][MOST_POINTS];
    int n;
} curve;

static void add_bucket(const cli_train_point *p, size_t n, bool relative, curve *c)
{
    double sum = 0, held = NAN;
    size_t there = 0;
    for (size_t i = 0; i < n; i++) {
        const double v = relative ? p[i].relative : p[i].loss,
                     h = relative ? p[i].valid_relative : p[i].valid_loss;
        if (isfinite(v)) sum += v, there++;
        if (isfinite(h)) held = h;
    }
    c->x[c->n] = p[n - 1].step;
    c->y[0][c->n] = there ? sum / (double)there : NAN;
    c->y[1][c->n] = held;
    c->n++;
}

static void make_curve(const cli_training *t, int stage, bool relative, curve *c)
{
    size_t from = 0, n = 0;
    while (from < t->n && t->point[from].stage != stage) from++;
    while (from + n < t->n && t->point[from + n].stage == stage) n++;
    const size_t each = (n + MOST_POINTS - 1) / MOST_POINTS;
    c->n = 0;
    for (size_t i = 0; i < n; i += each)
        add_bucket(t->point + from + i, n - i < each ? n - i : each, relative, c);
}

static const char error_title[] = "squared error over the teacher's output";

/* Two lines over n values of x. */
static void draw_chart(const char *title, const char *x_title, const double *x, int n,
                       const char *const line[2], const cli_panel *panel, sti_buf *out)
{
    cli_chart_draw(&(cli_chart){.title = title,
                                .x_title = x_title,
                                .x = x,
                                .n = n,
                                .linear = true,
                                .line = line,
                                .lines = 2,
                                .panel = panel,
                                .panels = 1,
                                .width = WIDTH},
                   out);
}

static void draw_stage(const cli_training *t, int stage, sti_buf *out)
{
    static const char *const line[] = {"training", "held out"};
    curve *c = sti_alloc(1, sizeof *c);
    double *y = sti_alloc(2 * MOST_POINTS, sizeof *y);
    if (c && y) make_curve(t, stage, stage == 1, c);
    if (c && y && c->n > 0) {
        for (int i = 0; i < 2; i++)
            memcpy(y + i * c->n, c->y[i], (size_t)c->n * sizeof *y);
        const cli_panel panel = {.title = stage == 1 ? error_title
                                                     : "loss of the next token",
                                 .log = stage == 1,
                                 .fitted = stage == 2,
                                 .y = y};
        draw_chart(stage == 1 ? "Stage 1: attention transfer"
                              : "Stage 2: low-rank training",
                   "step", c->x, c->n, line, &panel, out);
    }
    out->failed = out->failed || !c || !y;
    free(c);
    free(y);
}

static void draw_layers(const cli_training *t, sti_buf *out)
{
    static const char *const line[] = {"first step", "last step"};
    const size_t n = (size_t)t->layers;
    if (!t->first || !t->last) return;
    double *x = sti_alloc(3 * n, sizeof *x);
    if (!x) {
        out->failed = true;
        return;
    }
    for (size_t l = 0; l < n; l++) x[l] = (double)l;
    memcpy(x + n, t->first, n * sizeof *x);
    memcpy(x + 2 * n, t->last, n * sizeof *x);
    const cli_panel panel = {.title = error_title, .log = true, .y = x + n};
    draw_chart("Error by layer", "layer, of those converted", x, t->layers, line,
               &panel, out);
    free(x);
}

/* ---- Heads --------------------------------------------------------------- */

static void draw_heads(const cli_training *t, sti_buf *out)
{
    const int wide = LEFT + t->layers * CELL + 40, high = TOP + t->heads * CELL + 44;
    double most = 0;
    char text[128];
    if (!t->by_head) return;
    for (int i = 0; i < t->layers * t->heads; i++)
        if (isfinite(t->by_head[i])) most = fmax(most, t->by_head[i]);
    cli_svg_begin(out, wide > 480 ? wide : 480, high, LEFT, "Error by layer and head");
    snprintf(text, sizeof text,
             "held-out text, last validation; the strongest colour is %.4f", most);
    cli_svg_text(out, LEFT, 48, "start", "faint", text);
    for (int i = 0; i < t->layers * t->heads; i++) {
        const double v = t->by_head[i];
        sti_buf_printf(out,
                       "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" class=\"f0 "
                       "edge\" fill-opacity=\"%.3f\"><title>layer %d, head %d: "
                       "%.5f</title></rect>\n",
                       LEFT + i / t->heads * CELL, TOP + i % t->heads * CELL, CELL - 2,
                       CELL - 2, isfinite(v) && most > 0 ? v / most : 0, i / t->heads,
                       i % t->heads, v);
    }
    for (int l = 0; l < t->layers; l++) {
        snprintf(text, sizeof text, "%d", l);
        cli_svg_text(out, LEFT + l * CELL + CELL / 2.0 - 1, TOP + t->heads * CELL + 16,
                     "middle", "faint", text);
    }
    for (int h = 0; h < t->heads; h++) {
        snprintf(text, sizeof text, "%d", h);
        cli_svg_text(out, LEFT - 8, TOP + h * CELL + CELL / 2.0 + 4, "end", "faint",
                     text);
    }
    cli_svg_text(out, LEFT, high - 8, "start", "faint", "layers across, heads down");
    cli_svg_end(out);
}

/* ---- The page ------------------------------------------------------------ */

static void put_state(const cli_training *t, sti_buf *out)
{
    const still_train_progress *p = &t->now;
    char bytes[32];
    sti_buf_printf(out, "<p><b>%s</b>: stage %d, step %llu of %llu, %llu tokens",
                   t->state ? t->state : "training", p->stage,
                   (unsigned long long)p->step, (unsigned long long)p->steps,
                   (unsigned long long)p->tokens);
    if (isfinite(p->tokens_per_s))
        sti_buf_printf(out, ", %.0f tokens/s", p->tokens_per_s);
    if (!t->state && isfinite(p->seconds_left))
        sti_buf_printf(out, ", %.0f minutes left in this stage",
                       ceil(p->seconds_left / 60));
    sti_buf_printf(out, ", at most %s of memory.", cli_bytes(bytes, p->peak_rss));
    if (!t->state)
        sti_buf_puts(out, " This page is written anew while it trains, and reloads.");
    sti_buf_puts(out, "</p>\n");
}

void cli_training_page(const cli_training *t, sti_buf *out)
{
    sti_buf_puts(out,
                 "<!DOCTYPE html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n");
    if (!t->state) sti_buf_puts(out, "<meta http-equiv=\"refresh\" content=\"10\">\n");
    sti_buf_puts(
        out,
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
        "style-src 'unsafe-inline'\">\n"
        "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
        "<title>still linearize</title>\n<style>\n"
        ":root{color-scheme:light dark}\n"
        "body{margin:0 auto;max-width:60rem;padding:1rem;background:#fff;color:#1a1a1a;"
        "font:1rem/1.5 system-ui,sans-serif}\nsvg{max-width:100%;height:auto}\n"
        "@media (prefers-color-scheme:dark){body{background:#161616;color:#e6e6e6}}\n"
        "</style>\n<h1>");
    put_text(out, t->folder);
    sti_buf_puts(out, "</h1>\n<p>");
    put_text(out, t->model);
    sti_buf_puts(out, " learns ");
    put_text(out, t->method);
    sti_buf_puts(out, ".</p>\n");
    put_state(t, out);
    draw_stage(t, 1, out);
    draw_layers(t, out);
    draw_heads(t, out);
    draw_stage(t, 2, out);
    sti_buf_puts(out, "<p>The figures of every step are in train.jsonl beside this "
                      "page.</p>\n</html>\n");
}
