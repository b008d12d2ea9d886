/* figures.c - see figures.h. */
#include "cli/report/figures.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/new_file.h"
#include "cli/report/chart.h"
#include "cli/report/svg.h"

/* ---- What a score chooses ------------------------------------------------ */

typedef struct ranked {
    float score;
    int token;
} ranked;

static int by_score(const void *a, const void *b)
{
    const ranked *x = a, *y = b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    return x->token < y->token ? -1 : 1;
}

/* The tokens of a chunk, best first; of equals the earlier one, as methods choose. */
static void rank_chunk(const float *score, int n, ranked *order)
{
    for (int i = 0; i < n; i++) order[i] = (ranked){score[i], i};
    qsort(order, (size_t)n, sizeof *order, by_score);
}

static void choose(const still_saliency *s, const float *score, ranked *order,
                   bool *chosen)
{
    const int C = s->method.chunk;
    for (int from = 0; from < s->left; from += C) {
        rank_chunk(score + from, C, order);
        for (int i = 0; i < C; i++)
            chosen[from + order[i].token] = i < s->method.select;
    }
}

/* The share of layers and heads that choose each token. */
static still_status share_chosen(const still_saliency *s, double *share,
                                 still_error *err)
{
    const int rows = s->layers * s->heads;
    ranked *order = sti_alloc((size_t)s->method.chunk, sizeof *order);
    bool *chosen = sti_alloc((size_t)s->left, sizeof *chosen);
    if (order && chosen)
        for (int row = 0; row < rows; row++) {
            choose(s, s->local + (size_t)row * (size_t)s->tokens, order, chosen);
            for (int t = 0; t < s->left; t++) share[t] += (double)chosen[t] / rows;
        }
    const bool there = order && chosen;
    free(order);
    free(chosen);
    return there ? STILL_OK : sti_fail_memory(err, "chosen tokens", (size_t)s->left);
}

/* ---- Attention captured -------------------------------------------------- */

static int kept_at(const still_saliency *s, int point)
{
    return (int)lround((double)point * s->method.chunk / (CLI_CURVE_POINTS - 1));
}

/* Adds a chunk's shares, in the order of a score, divided by n, to a curve. */
static void add_chunk(const still_saliency *s, const float *score,
                      const float *received, ranked *order, double *sum, double n,
                      double *curve, double *here)
{
    const int C = s->method.chunk;
    rank_chunk(score, C, order);
    sum[0] = 0;
    for (int i = 0; i < C; i++) sum[i + 1] = sum[i] + (double)received[order[i].token];
    for (int p = 0; p <= CLI_CURVE_POINTS; p++) {
        const bool own = p == CLI_CURVE_POINTS;
        const int kept = own ? s->method.select : kept_at(s, p);
        const double share = sum[C] > 0 ? sum[kept] / sum[C] : (double)kept / C;
        *(own ? here : &curve[p]) += share / n;
    }
}

/* Over all chunks that left the window but the first, as the table is. */
static void add_curve(const still_saliency *s, const float *score, ranked *order,
                      double *sum, double *curve, double *here)
{
    const int C = s->method.chunk, rows = s->layers * s->heads;
    const int chunks = s->left / C - 1;
    const double n = (double)rows * chunks;
    for (int row = 0; row < rows; row++) {
        const size_t at = (size_t)row * (size_t)s->tokens;
        for (int from = C; from < s->left; from += C)
            add_chunk(s, score + at + from, s->received + at + from, order, sum, n,
                      curve, here);
    }
}

static still_status compute_curves(const still_saliency *s, cli_figures *f,
                                   still_error *err)
{
    const size_t C = (size_t)s->method.chunk,
                 cells = (size_t)s->layers * (size_t)s->heads * (size_t)s->tokens;
    ranked *order = sti_alloc(C, sizeof *order);
    double *sum = sti_alloc(C + 1, sizeof *sum);
    const bool there = order && sum;
    for (int i = 0; there && i < s->scores + 2; i++) {
        const float *score = i < s->scores    ? s->by_score + (size_t)i * cells
                             : i == s->scores ? s->whole
                                              : s->received;
        f->curve_name[i] = i < s->scores    ? s->score_name[i]
                           : i == s->scores ? "s3 over the whole past"
                                            : "best possible";
        add_curve(s, score, order, sum, f->curve[i], &f->here[i]);
        f->curves = i + 1;
    }
    free(order);
    free(sum);
    return there ? STILL_OK : sti_fail_memory(err, "attention captured", C);
}

static void draw_captured(const cli_saliency *r, const cli_figures *f, sti_buf *out)
{
    double x[CLI_CURVE_POINTS], y[CLI_CURVES_MAX * CLI_CURVE_POINTS];
    char title[160], axis[96], here[48];
    const still_method *m = &r->s->method;
    for (int p = 0; p < CLI_CURVE_POINTS; p++) {
        x[p] = 100.0 * p / (CLI_CURVE_POINTS - 1);
        for (int i = 0; i < f->curves; i++)
            y[i * CLI_CURVE_POINTS + p] = 100 * f->curve[i][p];
    }
    snprintf(title, sizeof title, "Attention that the tokens kept receive later, %.60s",
             cli_base(r->model));
    snprintf(axis, sizeof axis, "tokens of a chunk that are kept, %%");
    snprintf(here, sizeof here, "this method: %d of %d", m->select, m->chunk);
    const cli_panel panel = {.title = "attention captured, %; mean of layers and heads",
                             .y = y};
    cli_chart_draw(&(cli_chart){.title = title,
                                .x_title = axis,
                                .x = x,
                                .n = CLI_CURVE_POINTS,
                                .linear = true,
                                .line = f->curve_name,
                                .lines = f->curves,
                                .panel = &panel,
                                .panels = 1,
                                .width = 900,
                                .here = 100.0 * m->select / m->chunk,
                                .here_title = here},
                   out);
}

/* ---- Local against global ------------------------------------------------ */

enum { PANEL = 440, TOP = 92, PLOT = 260, LEFT = 72, BOTTOM = 52 };

typedef struct median {
    double overlap;
    int head;
} median;

static int by_overlap(const void *a, const void *b)
{
    const median *x = a, *y = b;
    if (x->overlap != y->overlap) return x->overlap < y->overlap ? -1 : 1;
    return x->head - y->head;
}

static still_status median_head(const still_saliency *s, int *head, still_error *err)
{
    const int n = s->layers * s->heads;
    median *all = sti_alloc((size_t)n, sizeof *all);
    if (!all) return sti_fail_memory(err, "heads", (size_t)n);
    for (int i = 0; i < n; i++) all[i] = (median){s->with_whole[i].overlap, i};
    qsort(all, (size_t)n, sizeof *all, by_overlap);
    *head = all[n / 2].head;
    free(all);
    return STILL_OK;
}

/* Points of the tokens in [from, to) whose mark is `chosen`; NULL: all. */
static void draw_dots(const float *score, const bool *chosen, bool want, int from,
                      int to, const cli_axis *x, const cli_axis *y, const char *look,
                      sti_buf *out)
{
    sti_buf_printf(out, "<path class=\"dots %s\" d=\"", look);
    for (int t = from; t < to; t++)
        if (!chosen || chosen[t] == want)
            sti_buf_printf(out, "M%.1f %.1fh0", cli_axis_place(x, t),
                           cli_axis_place(y, (double)score[t]));
    sti_buf_puts(out, "\"/>\n");
}

static void draw_scores_panel(const still_saliency *s, int k, const float *score,
                              const bool *chosen, const char *title, sti_buf *out)
{
    double low = INFINITY, high = -INFINITY, tick[CLI_SVG_TICKS], tick_x[CLI_SVG_TICKS];
    for (int t = 1; t < s->tokens; t++) { /* the first sees nothing but itself */
        low = fmin(low, (double)score[t]);
        high = fmax(high, (double)score[t]);
    }
    cli_axis y = {
        .low = low > 0 ? 0 : low, .high = high, .from = TOP + PLOT, .to = TOP};
    cli_axis x = {.low = 0,
                  .high = s->tokens,
                  .from = k * PANEL + LEFT + 12,
                  .to = (k + 1) * PANEL - 28};
    const int n_x = cli_axis_ticks(&x, tick_x), n = cli_axis_round(&y, tick);
    cli_svg_frame(out, &x, &y, tick, n, "position of the token", title);
    cli_svg_ticks_x(out, &x, &y, tick_x, n_x);
    draw_dots(score, chosen, false, 1, s->left, &x, &y, "s6 fine", out);
    draw_dots(score, NULL, false, s->left, s->tokens, &x, &y, "s7 fine", out);
    draw_dots(score, chosen, true, 1, s->left, &x, &y, "s1 thick", out);
}

static void draw_legend(sti_buf *out)
{
    static const struct {
        const char *look, *text;
        double x;
    } row[] = {{"s1 thick", "chosen by the local score", LEFT},
               {"s6 fine", "not chosen", LEFT + 200},
               {"s7 fine", "still in the window", LEFT + 310}};
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        sti_buf_printf(out, "<path class=\"dots %s\" d=\"M%.1f 50h0\"/>\n", row[i].look,
                       row[i].x);
        cli_svg_text(out, row[i].x + 10, 54, "start", "", row[i].text);
    }
}

static still_status draw_scores(const cli_saliency *r, int head, sti_buf *out,
                                still_error *err)
{
    const still_saliency *s = r->s;
    const size_t at = (size_t)head * (size_t)s->tokens;
    ranked *order = sti_alloc((size_t)s->method.chunk, sizeof *order);
    bool *chosen = sti_alloc((size_t)s->left, sizeof *chosen);
    char title[200], local[80];
    const bool there = order && chosen;
    if (there) {
        choose(s, s->local + at, order, chosen);
        snprintf(title, sizeof title,
                 "Scores of tokens, layer %d head %d of %.60s: %.0f%% of those chosen "
                 "are the same",
                 s->first_layer + head / s->heads, head % s->heads, cli_base(r->model),
                 100 * s->with_whole[head].overlap);
        snprintf(local, sizeof local, "local: %s over the last %d tokens",
                 s->method.score, s->method.chunk);
        cli_svg_begin(out, 2 * PANEL, TOP + PLOT + BOTTOM, LEFT, title);
        draw_legend(out);
        draw_scores_panel(s, 0, s->local + at, chosen, local, out);
        draw_scores_panel(s, 1, s->whole + at, chosen, "global: s3 over the whole past",
                          out);
        cli_svg_end(out);
    }
    free(order);
    free(chosen);
    return there ? STILL_OK : sti_fail_memory(err, "scores.svg", (size_t)s->left);
}

/* ---- Files --------------------------------------------------------------- */

still_status cli_figures_compute(const cli_saliency *r, cli_figures *f,
                                 still_error *err)
{
    double *chosen = sti_alloc((size_t)r->s->left, sizeof *chosen);
    *f = (cli_figures){0};
    if (!chosen) return sti_fail_memory(err, "chosen tokens", (size_t)r->s->left);
    still_status st = share_chosen(r->s, chosen, err);
    if (st == STILL_OK) st = cli_words_count(r, chosen, &f->words, err);
    if (st == STILL_OK) st = compute_curves(r->s, f, err);
    if (st == STILL_OK) st = median_head(r->s, &f->head, err);
    free(chosen);
    return st;
}

void cli_figures_free(cli_figures *f)
{
    cli_words_free(&f->words);
}

static still_status save(const char *folder, const char *name, sti_buf *text,
                         still_error *err)
{
    sti_buf path = {0};
    sti_buf_printf(&path, "%s/%s", folder, name);
    still_status st = path.failed || text->failed
                          ? sti_fail_memory(err, name, text->n)
                          : sti_write_file(path.p, text->p, text->n, err);
    sti_buf_free(&path);
    sti_buf_clear(text);
    return st;
}

static void put_table(const cli_words *w, sti_buf *out)
{
    sti_buf_puts(out, "token\tclass\ttimes\tkept\tshare\n");
    for (int i = 0; i < w->n; i++) {
        const cli_word *word = &w->word[i];
        for (const char *at = word->text; *at; at++)
            if ((unsigned char)*at >= ' ') sti_buf_put(out, at, 1);
        sti_buf_printf(out, "\t%s\t%d\t%.3f\t%.3f\n", cli_word_class_name(word->class),
                       word->times, word->kept, word->kept / word->times);
    }
}

int cli_figures_write(const cli_saliency *r, const cli_figures *f, const char *folder)
{
    still_error err;
    sti_buf out = {0};
    still_status st = draw_scores(r, f->head, &out, &err);
    if (st == STILL_OK) st = save(folder, "scores.svg", &out, &err);
    cli_words_draw(r, &f->words, &out);
    if (st == STILL_OK) st = save(folder, "words.svg", &out, &err);
    put_table(&f->words, &out);
    if (st == STILL_OK) st = save(folder, "words.tsv", &out, &err);
    draw_captured(r, f, &out);
    if (st == STILL_OK) st = save(folder, "captured.svg", &out, &err);
    cli_places_draw(r, f->head, &out);
    if (st == STILL_OK) st = save(folder, "places.svg", &out, &err);
    sti_buf_free(&out);
    return st == STILL_OK ? CLI_OK : cli_fail_error(&err);
}
