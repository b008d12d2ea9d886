/* near.h - which of some names a mistyped one was meant to be. */
#ifndef CLI_NEAR_H
#define CLI_NEAR_H

#include <stdbool.h>
#include <stddef.h>

/* The nearest name seen so far. Names are borrowed. */
typedef struct cli_near {
    const char *name; /* NULL: none is near */
    size_t distance;
} cli_near;

/* Edits (insert, delete, replace, swap of neighbours) that turn a into b, whatever their
 * case. SIZE_MAX if one of them is longer than any name. */
size_t cli_distance(const char *a, const char *b);
/* A name that is further than a third of what was typed, and does not begin with it, is
 * no match. */
void cli_near_consider(cli_near *best, const char *typed, const char *name);

#endif
