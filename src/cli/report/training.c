/* training.c - see training.h. The page tells what train.jsonl tells, which also has the
 * steps before --resume. Lines are read once; one that is no JSON is passed over, as a
 * run does that goes on after a crash. A page that cannot be written is said once and
 * then left alone: training is what matters. */
#include "cli/report/training.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/new_file.h"

enum { MOST_CELLS = 1 << 20 };   /* layers, heads: of a file that somebody else wrote */
static const double BETWEEN = 5; /* seconds between pages */

static double real_of(const json_t *o, const char *key)
{
    const json_t *v = json_object_get(o, key);
    return json_is_number(v) ? json_number_value(v) : NAN;
}

/* A list of numbers, or of lists of as many numbers each, into one array; replaces *out
 * if it is whole. */
static void read_cells(const json_t *list, double **out, int *rows, int *columns)
{
    const size_t n = json_array_size(list),
                 each = n ? json_array_size(json_array_get(list, 0)) : 0,
                 wide = each ? each : 1;
    double *cells =
        n && n <= MOST_CELLS / wide ? sti_alloc(n * wide, sizeof *cells) : NULL;
    if (!cells) return;
    for (size_t i = 0; i < n; i++) {
        const json_t *row = json_array_get(list, i);
        if (json_array_size(row) != each) {
            free(cells);
            return;
        }
        for (size_t k = 0; k < wide; k++) {
            const json_t *v = each ? json_array_get(row, k) : row;
            cells[i * wide + k] = json_is_number(v) ? json_number_value(v) : NAN;
        }
    }
    free(*out);
    *out = cells;
    *rows = (int)n;
    *columns = (int)wide;
}

/* Lists by layer must have as many layers as the first had. */
static void read_layers(cli_training *t, const json_t *o)
{
    int layers = 0, heads = 0;
    double *cells = NULL;
    read_cells(json_object_get(o, "relative_by_layer"), &cells, &layers, &heads);
    if (cells && (t->layers == 0 || layers == t->layers)) {
        free(t->last);
        t->last = cells;
        t->layers = layers;
        if (!t->first && (t->first = sti_alloc((size_t)layers, sizeof *cells)))
            memcpy(t->first, cells, (size_t)layers * sizeof *cells);
    } else {
        free(cells);
    }
    cells = NULL;
    read_cells(json_object_get(o, "valid_relative_by_head"), &cells, &layers, &heads);
    if (cells && layers == t->layers && (t->heads == 0 || heads == t->heads)) {
        free(t->by_head);
        t->by_head = cells;
        t->heads = heads;
    } else {
        free(cells);
    }
}

static bool make_room(cli_training *t)
{
    if (t->point && t->n < t->room) return true;
    const size_t room = t->room ? 2 * t->room : 256;
    cli_train_point *more = sti_grow(t->point, room, sizeof *more);
    if (!more) return false;
    t->point = more;
    t->room = room;
    return true;
}

static void read_line(cli_training *t, const char *line, size_t n)
{
    still_error err;
    json_t *o;
    if (sti_json_read_line(line, n, STI_JSON_OBJECT, &o, &err)) return;
    const json_int_t stage = json_integer_value(json_object_get(o, "stage"));
    const double step = real_of(o, "step");
    const cli_train_point *last = t->n ? &t->point[t->n - 1] : NULL;
    /* In order: the drawings rely on it. */
    const bool next =
        (stage == 1 || stage == 2) && step > 0 &&
        (!last || stage > last->stage || (stage == last->stage && step > last->step));
    if (next && make_room(t)) {
        t->point[t->n++] =
            (cli_train_point){.stage = (int)stage,
                              .step = step,
                              .loss = real_of(o, "loss"),
                              .relative = real_of(o, "relative"),
                              .valid_loss = real_of(o, "valid_loss"),
                              .valid_relative = real_of(o, "valid_relative")};
        read_layers(t, o);
    }
    json_decref(o);
}

/* The lines that have come since. One that does not end yet is for the next time. */
static void read_on(cli_training *t)
{
    sti_buf path = {0};
    char *line = NULL;
    size_t room = 0;
    ssize_t n;
    sti_buf_printf(&path, "%s/train.jsonl", t->folder);
    FILE *f = path.failed ? NULL : fopen(path.p, "re");
    sti_buf_free(&path);
    if (!f) return;
    if (fseek(f, t->at, SEEK_SET) == 0)
        while ((n = getline(&line, &room, f)) > 0 && line[n - 1] == '\n') {
            read_line(t, line, (size_t)n);
            t->at += (long)n;
        }
    free(line);
    fclose(f);
}

static void write_page(cli_training *t)
{
    still_error err;
    sti_buf path = {0}, page = {0};
    read_on(t);
    sti_buf_printf(&path, "%s/report.html", t->folder);
    cli_training_page(t, &page);
    const still_status st = path.failed || page.failed
                                ? sti_fail_memory(&err, "report.html", page.n)
                                : sti_write_file(path.p, page.p, page.n, &err);
    if (st != STILL_OK) {
        cli_warn("%s; training goes on without the report", err.text);
        t->failed = true;
    }
    t->written = cli_now();
    sti_buf_free(&path);
    sti_buf_free(&page);
}

static void draw_lines(cli_training *t)
{
    read_on(t);
    sti_buf_clear(&t->lines);
    cli_training_lines(t, t->columns, &t->lines);
}

void cli_training_step(cli_training *t, const still_train_progress *p)
{
    t->now = *p;
    if (t->columns) draw_lines(t);
    if (!t->failed && (t->written == 0 || cli_now() - t->written >= BETWEEN))
        write_page(t);
}

void cli_training_end(cli_training *t, const char *state)
{
    t->state = state;
    if (t->written > 0 && !t->failed) write_page(t);
    free(t->point);
    free(t->first);
    free(t->last);
    free(t->by_head);
    sti_buf_free(&t->lines);
    *t = (cli_training){0};
}
