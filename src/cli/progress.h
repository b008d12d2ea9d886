/* progress.h - a progress bar on stderr: rate and time left on a terminal, a plain
 * line now and then elsewhere. */
#ifndef CLI_PROGRESS_H
#define CLI_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct cli_progress {
    char what[120];    /* "model.safetensors" */
    const char *unit;  /* "tok"; NULL: bytes in human units */
    char note[48];     /* shown at the end of the line: "ppl 12.31" */
    const char *below; /* whole lines to show beneath it on a terminal; NULL: none */
    uint64_t first, total;
    double start, last; /* seconds: begun, last drawn */
    bool on, tty, drawn;
} cli_progress;

/* done: where the count begins, not part of the rate (a resumed download). total 0:
 * unknown. A quiet one draws nothing but is used the same way. */
void cli_progress_begin(cli_progress *p, bool quiet, const char *what, const char *unit,
                        uint64_t done, uint64_t total);
void cli_progress_update(cli_progress *p, uint64_t done);
/* Removes the bar, so that the next line of text starts clean. */
void cli_progress_end(cli_progress *p);

/* Columns of the terminal that stderr is, 0 where it is none. */
int cli_progress_columns(void);

/* A still_progress_fn; user is the cli_progress. False once Ctrl-C was pressed. */
bool cli_progress_tick(void *user, uint64_t done, uint64_t total);

#endif
