/* ids.h - token ids as people and programs write them. */
#ifndef CLI_IDS_H
#define CLI_IDS_H

#include "still.h"

/* Reads a JSON list, a JSON object with a list "ids", or plain numbers separated by
 * spaces, commas or lines. Every id must be within [0, vocab). free() *ids. */
still_status cli_parse_ids(const char *text, int vocab, int32_t **ids, size_t *n,
                           still_error *err);

#endif
