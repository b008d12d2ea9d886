/* bench_report.c - figures of `still bench` as a table, as JSON, as CSV, as a chart. A
 * point that does not fit in memory is shown as such in all of them. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/mem.h"
#include "cli/outputs.h"
#include "cli/report/bench.h"
#include "cli/report/chart.h"

static const char *const NO_ROOM = "does not fit";

static double rate(const cli_bench_point *p)
{
    return (double)p->r.tokens / p->r.seconds;
}

static bool on_gpu(const cli_bench *b)
{
    return strcmp(b->info->backend, "cuda") == 0;
}

/* "NVIDIA H200 (sm_90)"; "cpu avx512, 2 threads" */
static void device_text(const cli_bench *b, char out[128])
{
    const still_model_info *i = b->info;
    if (on_gpu(b))
        snprintf(out, 128, "%s", i->isa);
    else
        snprintf(out, 128, "%s%s%s, %d thread%s", i->backend, i->isa ? " " : "",
                 i->isa ? i->isa : "", i->threads, i->threads == 1 ? "" : "s");
}

/* "prefill of llama3.1-8b, 1 sequence, NVIDIA H200 (sm_90)" */
static void title_text(const cli_bench *b, char out[256])
{
    char device[128];
    device_text(b, device);
    snprintf(out, 256, "%s of %.60s, %d sequence%s, %s", b->what, cli_base(b->model),
             b->batch, b->batch == 1 ? "" : "s", device);
}

/* ---- The table ----------------------------------------------------------- */

static const char *unit(const cli_bench *b)
{
    return b->kind == CLI_BENCH_DECODE ? "ms" : "s";
}

void cli_bench_print_head(const cli_bench *b)
{
    static const char *const meaning[] = {
        [CLI_BENCH_PREFILL] = "s: seconds until the prompt is read",
        [CLI_BENCH_DECODE] = "ms: a token for every sequence, mean over a chunk",
        [CLI_BENCH_TRAIN] = "s: one optimizer step",
    };
    char title[256];
    title_text(b, title);
    cli_print("%s, median of %d. %s; memory: the most %s held.\n\n", title, b->rounds,
              meaning[b->kind], on_gpu(b) ? "the GPU" : "the process");
    cli_print("| tokens |");
    for (int i = 0; i < b->columns; i++)
        cli_print(" %s %s |", b->column[i].title, unit(b));
    for (int i = 0; i < b->columns; i++)
        cli_print(" %s tokens/s |", b->column[i].title);
    for (int i = 0; i < b->columns; i++) cli_print(" %s memory |", b->column[i].title);
    cli_print("\n|---:|");
    for (int i = 0; i < 3 * b->columns; i++) cli_print("---:|");
    cli_print("\n");
    cli_flush();
}

static void print_time(const cli_bench *b, const cli_bench_point *p)
{
    const double x = p->r.seconds * (b->kind == CLI_BENCH_DECODE ? 1000 : 1);
    if (p->measured)
        cli_print(" %.*f |", x < 10 ? 3 : x < 100 ? 2 : 1, x);
    else
        cli_print(" %s |", p->does_not_fit ? NO_ROOM : "not run");
}

void cli_bench_print_row(const cli_bench *b, int row)
{
    char bytes[32];
    cli_print("| %d |", b->length[row]);
    for (int i = 0; i < b->columns; i++) print_time(b, &b->point[row][i]);
    for (int i = 0; i < b->columns; i++) {
        const cli_bench_point *p = &b->point[row][i];
        if (p->measured)
            cli_print(" %.*f |", rate(p) < 100 ? 1 : 0, rate(p));
        else
            cli_print(" |");
    }
    for (int i = 0; i < b->columns; i++) {
        const cli_bench_point *p = &b->point[row][i];
        cli_print(" %s |", p->measured ? cli_bytes(bytes, p->r.peak) : "");
    }
    cli_print("\n");
    cli_flush();
}

/* ---- JSON ---------------------------------------------------------------- */

static json_t *point_json(const cli_bench *b, int row, int column)
{
    const cli_bench_column *c = &b->column[column];
    const cli_bench_point *p = &b->point[row][column];
    json_t *o = json_pack("{s:i,s:s,s:b}", "length", b->length[row], "method",
                          c->method.name, "fits", !p->does_not_fit);
    if (c->stage) sti_json_set(&o, "stage", json_integer(c->stage));
    if (!p->measured) {
        sti_json_set(&o, "reason", cli_json_text(p->reason, strlen(p->reason)));
        return o;
    }
    json_t *figures = json_pack(
        "{s:f,s:[ff],s:f,s:f,s:f,s:f,s:I,s:I}", "seconds", p->r.seconds, "rounds",
        p->low, p->high, "median", p->r.median, "fastest", p->r.fastest, "slowest",
        p->r.slowest, "tokens_per_s", rate(p), "peak_bytes", (json_int_t)p->r.peak,
        "state_bytes", (json_int_t)p->r.state);
    sti_json_merge(&o, figures);
    if (p->r.boundary > 0) sti_json_set(&o, "boundary", json_real(p->r.boundary));
    return o;
}

int cli_bench_print_json(const cli_bench *b)
{
    char device[128];
    device_text(b, device);
    json_t *points = json_array();
    for (int row = 0; row < b->lengths; row++)
        for (int i = 0; i < b->columns; i++)
            if (b->point[row][i].measured || *b->point[row][i].reason)
                sti_json_append(&points, point_json(b, row, i));
    json_t *o =
        json_pack("{s:s,s:o,s:s,s:o,s:i,s:I,s:i,s:i,s:o}", "what", b->what, "model",
                  cli_json_text(b->model, strlen(b->model)), "backend",
                  b->info->backend, "device", cli_json_text(device, strlen(device)),
                  "threads", b->info->threads, "params", (json_int_t)b->info->params,
                  "batch", b->batch, "rounds", b->rounds, "points", points);
    if (b->rows) sti_json_set(&o, "batch_rows", json_integer(b->rows));
    if (b->interrupted) sti_json_set(&o, "interrupted", json_true());
    return cli_print_json(o);
}

/* ---- Files --------------------------------------------------------------- */

/* A field in quotes. */
static void put_field(sti_buf *out, const char *text)
{
    sti_buf_puts(out, "\"");
    for (; *text; text++) {
        if (*text == '"') sti_buf_puts(out, "\"");
        if ((unsigned char)*text >= ' ') sti_buf_put(out, text, 1);
    }
    sti_buf_puts(out, "\"");
}

static void put_row(const cli_bench *b, int row, int column, const char *device,
                    sti_buf *out)
{
    const cli_bench_column *c = &b->column[column];
    const cli_bench_point *p = &b->point[row][column];
    if (!p->measured && !*p->reason) return;
    sti_buf_printf(out, "%s,", b->what);
    put_field(out, b->model);
    sti_buf_puts(out, ",");
    put_field(out, device);
    sti_buf_printf(out, ",%s,", c->method.name);
    if (c->stage) sti_buf_printf(out, "%d", c->stage);
    sti_buf_printf(out, ",%d,%d,", b->length[row], b->batch);
    if (p->measured)
        sti_buf_printf(out, "%.9g,%.9g,%.9g,%.9g,%.9g,%.9g,%zu,%zu,", p->r.seconds,
                       p->r.median, p->r.fastest, p->r.slowest, p->r.boundary, rate(p),
                       p->r.peak, p->r.state);
    else
        sti_buf_puts(out, ",,,,,,,,");
    put_field(out, p->does_not_fit ? NO_ROOM : p->reason);
    sti_buf_puts(out, "\n");
}

int cli_bench_write_csv(const cli_bench *b, const char *path)
{
    char device[128];
    sti_buf text = {0};
    if (!path) return CLI_OK;
    device_text(b, device);
    sti_buf_puts(&text, "what,model,device,method,stage,length,batch,seconds,median,"
                        "fastest,slowest,boundary,tokens_per_s,peak_bytes,state_bytes,"
                        "note\n");
    for (int row = 0; row < b->lengths; row++)
        for (int i = 0; i < b->columns; i++) put_row(b, row, i, device, &text);
    const int status = cli_write(path, &text);
    sti_buf_free(&text);
    return status;
}

static const char *time_title(const cli_bench *b)
{
    switch (b->kind) {
    case CLI_BENCH_PREFILL: return "time to read the prompt, s";
    case CLI_BENCH_DECODE: return "time of a step, ms";
    default: return "time of a training step, s";
    }
}

/* Lengths with any result; an interrupted run has fewer. */
static int rows_there(const cli_bench *b)
{
    int rows = 0;
    for (int row = 0; row < b->lengths; row++)
        for (int i = 0; i < b->columns; i++)
            if (b->point[row][i].measured || *b->point[row][i].reason) rows = row + 1;
    return rows;
}

/* What a chart draws, [columns, n] each. */
typedef struct figures {
    double *time, *low, *high, *memory;
} figures;

/* Of the memory axis: GiB, or MiB where no column held one. */
static double memory_unit(const cli_bench *b, int n)
{
    size_t most = 0;
    for (int i = 0; i < b->columns; i++)
        for (int row = 0; row < n; row++)
            if (b->point[row][i].measured && b->point[row][i].r.peak > most)
                most = b->point[row][i].r.peak;
    return most < (size_t)1 << 30 ? 0x1p20 : 0x1p30;
}

static void fill(const cli_bench *b, int n, const figures *f)
{
    const double unit = memory_unit(b, n);
    const double scale = b->kind == CLI_BENCH_DECODE ? 1000 : 1;
    for (int i = 0; i < b->columns; i++)
        for (int row = 0; row < n; row++) {
            const cli_bench_point *p = &b->point[row][i];
            const int at = i * n + row;
            f->time[at] = p->measured ? p->r.seconds * scale : NAN;
            f->low[at] = p->measured ? p->low * scale : NAN;
            f->high[at] = p->measured ? p->high * scale : NAN;
            f->memory[at] = p->measured ? (double)p->r.peak / unit : NAN;
        }
}

int cli_bench_write_svg(const cli_bench *b, const char *path)
{
    char title[256], memory[64], bars[64];
    const char *line[CLI_BENCH_COLUMNS];
    double x[CLI_BENCH_LENGTHS];
    sti_buf text = {0};
    const int n = rows_there(b), cells = b->columns * n;
    if (!path || n == 0) return CLI_OK;
    double *y = sti_alloc(4 * (size_t)cells, sizeof *y);
    if (!y) return cli_fail("out of memory");
    const figures f = {y, y + cells, y + 2 * cells, y + 3 * cells};
    for (int i = 0; i < b->columns; i++) line[i] = b->column[i].title;
    for (int row = 0; row < n; row++) x[row] = b->length[row];
    fill(b, n, &f);
    title_text(b, title);
    snprintf(memory, sizeof memory, "most memory %s held, %s",
             on_gpu(b) ? "the GPU" : "the process",
             memory_unit(b, n) < 0x1p30 ? "MiB" : "GiB");
    const cli_panel panel[] = {{.title = time_title(b),
                                .log = b->kind != CLI_BENCH_DECODE,
                                .y = f.time,
                                .low = f.low,
                                .high = f.high},
                               {.title = memory, .y = f.memory}};
    const char *x_title[] = {"tokens of the prompt", "tokens in the context",
                             "tokens of a sequence"};
    snprintf(bars, sizeof bars, "bars: fastest to slowest of %d rounds", b->rounds);
    cli_chart_draw(&(cli_chart){.title = title,
                                .bars = bars,
                                .x_title = x_title[b->kind],
                                .missing = NO_ROOM,
                                .x = x,
                                .n = n,
                                .line = line,
                                .lines = b->columns,
                                .panel = panel,
                                .panels = 2},
                   &text);
    const int status = cli_write(path, &text);
    sti_buf_free(&text);
    free(y);
    return status;
}
