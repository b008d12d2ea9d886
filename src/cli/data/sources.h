/* sources.h - where data sets are published: the list that `still pull-data` works by.
 *
 * The list is JSON, sources.json beside this file, which the build makes part of the
 * program; a mirror may have one of its own. It says what to fetch, how large it is, its
 * checksum where its publisher's is known, and which converter makes files of it. It never
 * says what files are written: converters know that. A list from elsewhere is not trusted:
 * names are plain file names, addresses http or https. */
#ifndef CLI_DATA_SOURCES_H
#define CLI_DATA_SOURCES_H

#include "base/error.h"
#include "cli/data/convert.h"

/* A part of a published archive that is all that is needed of it. */
typedef struct cli_part_of_zip {
    char *name; /* the last of its path in the archive */
    char sum[65];
} cli_part_of_zip;

/* A file as it is published. */
typedef struct cli_published {
    char *name; /* under which a mirror has it, and it is kept here */
    char **url; /* in the order they are tried */
    size_t n_urls;
    int64_t bytes; /* -1: not known */
    int64_t most;  /* bytes that it may have */
    char sum[65];  /* SHA-256; "": not known */
    cli_part_of_zip *part;
    size_t n_parts; /* 0: all of it is needed */
} cli_published;

typedef struct cli_set {
    char *name, *title, *home, *licence;
    const cli_converter *convert;
    cli_published *file;
    size_t n;
} cli_set;

typedef struct cli_sources {
    cli_set *set;
    size_t n;
} cli_sources;

/* The list in `path`; NULL: the program's own. */
still_status cli_sources_read(const char *path, cli_sources *out, still_error *err);
void cli_sources_free(cli_sources *s);
/* NULL: there is none. */
const cli_set *cli_sources_find(const cli_sources *s, const char *name);

/* What a user names as data: a file, or a set of the program's list, which then means the
 * first file made of it in the cache, whether it is there or not. free() *out. */
still_status cli_data_path(const char *name, char **out, still_error *err);
/* Adds to the error of data that is not there what to do about it; name and path as above. */
void cli_data_advise(const char *name, const char *path, still_error *err);

/* The program's own list; made by the build. */
extern const unsigned char cli_sources_json[];
extern const size_t cli_sources_json_size;

#endif
