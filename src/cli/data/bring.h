/* bring.h - a data set of the list: downloaded, checked, converted. */
#ifndef CLI_DATA_BRING_H
#define CLI_DATA_BRING_H

#include "cli/data/sources.h"
#include "cli/fetch/http.h"
#include "cli/options.h"

typedef struct cli_bring {
    const cli_options *o;
    const char *folder; /* where data is kept */
    const char
        *mirror;  /* address under which all published files lie; NULL: their own */
    json_t *kept; /* kept.h */
    cli_http http;
    char origin[256]; /* the server http is open to; "": none */
} cli_bring;

typedef struct cli_brought {
    uint64_t bytes; /* downloaded now */
    bool here;      /* it was here already */
    bool theirs;    /* some file was not made here, and was left as it is */
} cli_brought;

/* The folder is made if it is not there. */
still_status cli_bring_open(cli_bring *b, const cli_options *o, const char *folder,
                            const char *mirror, still_error *err);
void cli_bring_close(cli_bring *b);

/* Brings the files of a set, unless they are here and what was made, or --force. */
still_status cli_bring_set(cli_bring *b, const cli_set *set, cli_brought *out,
                           still_error *err);
/* Whether all of a set's files are here; does not read them. */
bool cli_bring_is_here(const char *folder, const cli_set *set);

#endif
