/* fuzz_csv.c - comma-separated values: rows of fields that are text in UTF-8. What was read
 * and is written again reads the same. */
#include <string.h>

#include "base/utf8.h"
#include "cli/data/csv.h"
#include "memory_file.h"

/* The row with every field in quotes. */
static void put_row(sti_buf *out, const cli_csv *c)
{
    for (int i = 0; i < c->fields; i++) {
        sti_buf_puts(out, i ? ",\"" : "\"");
        for (const char *p = cli_csv_field(c, i); *p; p++)
            sti_buf_put(out, *p == '"' ? "\"\"" : p, *p == '"' ? 2 : 1);
        sti_buf_puts(out, "\"");
    }
    sti_buf_puts(out, "\n");
}

/* All rows, up to the first error, as they are written again. */
static void rewrite(const char *p, size_t n, sti_buf *out)
{
    cli_csv c;
    still_error err = {0};
    cli_csv_open(&c, "fuzz", p, n);
    for (bool more;;) {
        if (cli_csv_next(&c, &more, &err) != STILL_OK) {
            if (!err.text[0]) abort();
            break;
        }
        if (!more) break;
        if (c.fields < 1 || c.fields > CLI_CSV_FIELDS || c.line < 1) abort();
        for (int i = 0; i < c.fields; i++) {
            const char *field = cli_csv_field(&c, i);
            if (sti_utf8_span(field, strlen(field)) != strlen(field)) abort();
        }
        put_row(out, &c);
    }
    cli_csv_close(&c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    sti_buf once = {0}, twice = {0};
    rewrite((const char *)data, n, &once);
    if (once.n) rewrite(once.p, once.n, &twice);
    if (once.n != twice.n || (once.n && memcmp(once.p, twice.p, once.n) != 0)) abort();
    sti_buf_free(&once);
    sti_buf_free(&twice);
    return 0;
}
