/* training.h - report.html of a training run: a page in its folder that is written anew
 * while it trains, and reloads itself until the run has ended. It needs nothing else and
 * runs nothing.
 *
 *     training.c       train.jsonl as it grows, line by line
 *     training_page.c  the page
 *     training_lines.c its curves as lines of text, for a terminal */
#ifndef CLI_REPORT_TRAINING_H
#define CLI_REPORT_TRAINING_H

#include "base/buf.h"
#include "cli/cli.h"

/* What train.jsonl says of a step; NaN where it says nothing. */
typedef struct cli_train_point {
    int stage;
    double step, loss, relative, valid_loss, valid_relative;
} cli_train_point;

typedef struct cli_training {
    const char *folder, *model, *method; /* borrowed */
    const char *state;                   /* "done", "interrupted"; NULL: it goes on */
    still_train_progress now;
    cli_train_point *point;
    size_t n, room;
    /* Stage 1, errors over the teacher's output: [layers] of the first step and of the
     * last, [layers, heads] of the last validation. NULL: none yet. */
    double *first, *last, *by_head;
    int layers, heads;
    long at;        /* bytes of train.jsonl that were read */
    double written; /* when the page was; 0: never */
    int columns;    /* of a terminal that shows `lines`; 0: none does */
    sti_buf lines;  /* curves as text, of the last step */
    bool failed;    /* which was said; the run goes on without it */
} cli_training;

/* After each step. {folder, model, method, columns} and zeros to begin with. */
void cli_training_step(cli_training *t, const still_train_progress *p);
/* The last page, if there was a step at all; frees what t holds. */
void cli_training_end(cli_training *t, const char *state);
/* Appends the page. */
void cli_training_page(const cli_training *t, sti_buf *out);
/* Appends a line for each curve of this stage, none wider than the terminal. */
void cli_training_lines(const cli_training *t, int columns, sti_buf *out);

#endif
