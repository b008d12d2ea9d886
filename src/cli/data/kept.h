/* kept.h - checksums.json of a data folder: what was downloaded, and what was made of it.
 *
 * Few publishers say what their files' checksums are. The first download's is kept here, so
 * that a later one that differs is noticed. The same file tells which files of the folder
 * were made here, and whether they still are what was made.
 *
 *   {"published": {"alpaca_data.json": {"sha256": "...", "bytes": N, "url": "..."}},
 *    "made": {"alpaca_original.jsonl": {"sha256": "...", "bytes": N, "records": N}}} */
#ifndef CLI_DATA_KEPT_H
#define CLI_DATA_KEPT_H

#include "base/error.h"
#include "base/json.h"

#define CLI_KEPT "checksums.json"

/* A missing file is an empty record; one that cannot be read is an error: what it knew must
 * not be lost. json_decref *out. */
still_status cli_kept_read(const char *folder, json_t **out, still_error *err);
still_status cli_kept_write(const char *folder, const json_t *kept, still_error *err);

/* What is known of a file; NULL: nothing. kind: "published", "made". */
const json_t *cli_kept_file(const json_t *kept, const char *kind, const char *name);
const char *cli_kept_sum(const json_t *kept, const char *kind, const char *name);
/* Takes v. */
void cli_kept_set(json_t **kept, const char *kind, const char *name, json_t *v);

#endif
