/* bench.h - the figures of `still bench`: lengths as rows, methods as columns, and the
 * forms in which they are shown (bench_report.c). */
#ifndef CLI_REPORT_BENCH_H
#define CLI_REPORT_BENCH_H

#include "cli/options.h"

enum { CLI_BENCH_LENGTHS = 16, CLI_BENCH_COLUMNS = 16, CLI_BENCH_ROUNDS = 64 };

typedef enum cli_bench_kind {
    CLI_BENCH_PREFILL,
    CLI_BENCH_DECODE,
    CLI_BENCH_TRAIN
} cli_bench_kind;

typedef struct cli_bench_column {
    still_method method;
    int stage;      /* of train */
    char title[40]; /* "still", "still stage 1" */
} cli_bench_column;

typedef struct cli_bench_point {
    bool measured;        /* r is valid */
    char reason[256];     /* if not: the library's message; "": not tried */
    bool does_not_fit;    /* for lack of memory */
    still_bench_result r; /* medians over the rounds; extremes; most memory */
    double low, high;     /* r.seconds of the fastest and the slowest round */
} cli_bench_point;

typedef struct cli_bench {
    const char *what, *model; /* "prefill"; as the user called it */
    cli_bench_kind kind;
    const still_model_info *info;
    int batch, rows, rounds; /* rows of a pass; 0: the backend's own */
    int length[CLI_BENCH_LENGTHS], lengths;
    cli_bench_column column[CLI_BENCH_COLUMNS];
    int columns;
    cli_bench_point point[CLI_BENCH_LENGTHS][CLI_BENCH_COLUMNS];
    bool interrupted;
} cli_bench;

/* Standard output: what is measured and the head of the table, then its rows. */
void cli_bench_print_head(const cli_bench *b);
void cli_bench_print_row(const cli_bench *b, int row);
int cli_bench_print_json(const cli_bench *b);
/* Files; a path of NULL is none. They have printed their error. */
int cli_bench_write_csv(const cli_bench *b, const char *path);
int cli_bench_write_svg(const cli_bench *b, const char *path);

#endif
