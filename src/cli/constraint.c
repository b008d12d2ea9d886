/* constraint.c - see constraint.h. */
#include "cli/constraint.h"

#include <stdlib.h>

#include "cli/run.h"

enum { MOST_TEXT = 1 << 21 }; /* the library says what is too long */

int cli_constraint_check(const char *command, const cli_options *o)
{
    if (o->grammar && o->json_schema)
        return cli_usage(command, "--grammar and --json-schema exclude one another");
    if ((o->grammar || o->json_schema) && o->ignore_eos)
        return cli_usage(command,
                         "--ignore-eos has no meaning with --%s: the text ends "
                         "where it is complete",
                         o->grammar ? "grammar" : "json-schema");
    return CLI_OK;
}

int cli_constraint_open(const cli_options *o, const still_model *m, cli_constraint *out)
{
    const char *path = o->grammar ? o->grammar : o->json_schema;
    const still_tokenizer *tk;
    char *text;
    size_t n;
    still_error err;
    if (!path) return CLI_OK;
    int status = cli_need_tokenizer(m, &tk);
    if (status != CLI_OK) return status;
    if (cli_read(path, MOST_TEXT, &text, &n, &err)) return cli_fail_error(&err);
    const still_status made =
        o->grammar ? still_grammar_open_gbnf(tk, text, n, &out->grammar, &err)
                   : still_grammar_open_schema(tk, text, n, &out->grammar, &err);
    free(text);
    if (made != STILL_OK) return cli_fail("%s: %s", path, err.text);
    if (still_matcher_new(out->grammar, still_model_get_info(m)->vocab, &out->matcher,
                          &err))
        return cli_fail_error(&err);
    return CLI_OK;
}

void cli_constraint_close(cli_constraint *c)
{
    still_matcher_free(c->matcher);
    still_grammar_free(c->grammar);
    *c = (cli_constraint){0};
}
