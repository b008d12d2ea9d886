/* constraint.h - --grammar and --json-schema: what a reply may look like. */
#ifndef CLI_CONSTRAINT_H
#define CLI_CONSTRAINT_H

#include "cli/options.h"

/* Both NULL: anything. */
typedef struct cli_constraint {
    still_grammar *grammar;
    still_matcher *matcher;
} cli_constraint;

/* Whether the options go together; before a model is opened. */
int cli_constraint_check(const char *command, const cli_options *o);
int cli_constraint_open(const cli_options *o, const still_model *m,
                        cli_constraint *out);
void cli_constraint_close(cli_constraint *c);

#endif
