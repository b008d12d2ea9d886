/* saliency.h - the report of `still saliency`: one HTML file that needs nothing else.
 *
 *     saliency_page.c    the page: style, controls, and the program that draws it
 *     saliency_report.c  the figures it shows, put into the page as JSON */
#ifndef CLI_REPORT_SALIENCY_H
#define CLI_REPORT_SALIENCY_H

#include "base/buf.h"
#include "cli/cli.h"

typedef struct cli_saliency {
    const char *model, *file; /* as the user called them */
    const still_tokenizer *tk;
    const int32_t *ids; /* [s->tokens] */
    const still_saliency *s;
} cli_saliency;

/* The share of tokens that are exact to the end, over all layers and heads. */
double cli_saliency_exact(const still_saliency *s);
/* Writes the page, complete or not at all. Has printed its error. */
int cli_saliency_write(const cli_saliency *r, const char *path);

/* Lines of the page up to the figures, and after them; NULL ends. */
extern const char *const cli_saliency_page[], *const cli_saliency_page_end[];

#endif
