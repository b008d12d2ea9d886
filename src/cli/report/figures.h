/* figures.h - the drawings of `still saliency --figures`: four SVG files and a table.
 *
 *     scores.svg    scores from a window and from the whole past, the same tokens marked
 *     words.svg     the tokens most often kept, and what kind of words they are
 *     words.tsv     the same as a table
 *     captured.svg  attention on the tokens kept, by how many are, for every score
 *     places.svg    where each token is over time: window, salient, linear state
 *
 * The first and the last show one head: the median of all by the overlap of its choice
 * with that of the whole past. */
#ifndef CLI_REPORT_FIGURES_H
#define CLI_REPORT_FIGURES_H

#include "cli/report/words.h"

enum { CLI_CURVES_MAX = STILL_SCORES_MAX + 2, CLI_CURVE_POINTS = 21 };

typedef struct cli_figures {
    cli_words words;
    int head; /* the median one: layer * heads + head */
    /* Of every score, the score over the whole past and the best there is: the share of
     * attention received later on tokens kept, where point i keeps i/20 of a chunk. */
    int curves;
    const char *curve_name[CLI_CURVES_MAX];
    double curve[CLI_CURVES_MAX][CLI_CURVE_POINTS];
    double here[CLI_CURVES_MAX]; /* with as many as the method keeps */
} cli_figures;

/* Fills f from r; r->s has by_score. */
still_status cli_figures_compute(const cli_saliency *r, cli_figures *f,
                                 still_error *err);
void cli_figures_free(cli_figures *f);
/* Writes the files into a folder that exists. Has printed its error. */
int cli_figures_write(const cli_saliency *r, const cli_figures *f, const char *folder);

/* The drawing of places.svg (places.c). */
void cli_places_draw(const cli_saliency *r, int head, sti_buf *out);

#endif
