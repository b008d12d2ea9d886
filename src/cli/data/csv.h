/* csv.h - rows of comma-separated values, as Python's csv module reads them: a field may be
 * in quotes, in which a quote is doubled and commas and line ends are text. */
#ifndef CLI_DATA_CSV_H
#define CLI_DATA_CSV_H

#include "base/buf.h"
#include "base/error.h"

enum { CLI_CSV_FIELDS = 16, CLI_CSV_ROW = 4 << 20 };

typedef struct cli_csv {
    const char *what; /* in errors */
    const char *p;
    size_t n, at;
    size_t line; /* on which the row that was read began, from 1 */
    size_t next; /* on which the next one begins */
    sti_buf text;
    size_t start[CLI_CSV_FIELDS]; /* of each field in text; a NUL ends it */
    int fields;
} cli_csv;

/* p[0..n) is kept, not copied. */
void cli_csv_open(cli_csv *c, const char *what, const char *p, size_t n);
void cli_csv_close(cli_csv *c);
/* The next row that is not empty; *more false at the end. NUL bytes, text that is no UTF-8,
 * more than CLI_CSV_FIELDS fields, rows longer than CLI_CSV_ROW and an end inside of quotes
 * are errors with the line. */
still_status cli_csv_next(cli_csv *c, bool *more, still_error *err);
/* Field i of the row; valid until the next call. */
const char *cli_csv_field(const cli_csv *c, int i);

#endif
