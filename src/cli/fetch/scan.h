/* scan.h - the model files of a folder, and which of them a name means. */
#ifndef CLI_FETCH_SCAN_H
#define CLI_FETCH_SCAN_H

#include "cli/fetch/quant.h"
#include "still.h"

typedef struct cli_scanned {
    char *name;     /* relative to the folder */
    uint64_t bytes; /* of what a link leads to, if it is one */
    bool part;      /* an unfinished download: NAME.part */
} cli_scanned;

/* GGUF and safetensors files, config.json and still.json; and all bytes below. */
typedef struct cli_scan {
    cli_scanned *file;
    size_t n;
    uint64_t bytes;
} cli_scan;

/* Reads a folder and, with `below`, those in it. Hidden names and links that lead nowhere
 * are left out; links to files are followed. A folder that is not there has no files. */
still_status cli_scan_folder(const char *folder, bool below, cli_scan *out,
                             still_error *err);
void cli_scan_free(cli_scan *s);
/* cli_name_fn over a cli_scan. */
const char *cli_scan_name(const void *scan, size_t i);
bool cli_scan_has(const cli_scan *s, const char *name);
/* Weights in the Hugging Face format lie here; *whole: every part of them does. */
bool cli_scan_weights(const cli_scan *s, bool *whole);

/* Whether all parts of the GGUF model that file i belongs to lie here. */
bool cli_scan_complete(const cli_scan *s, size_t i);

typedef enum cli_look {
    CLI_LOOK_FOUND,
    CLI_LOOK_NOTHING,    /* the folder holds no model */
    CLI_LOOK_OTHERS,     /* none with this suffix */
    CLI_LOOK_MANY,       /* several: say which */
    CLI_LOOK_UNFINISHED, /* its download is not complete */
} cli_look;

/* What `suffix` (NULL: none) means in a folder. *entry: the GGUF file's name in it, NULL
 * for the folder itself; borrowed. */
cli_look cli_scan_look(const cli_scan *s, const char *suffix, const char **entry);

#endif
