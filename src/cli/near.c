/* near.c - see near.h. */
#include "cli/near.h"

#include <ctype.h>
#include <stdint.h>
#include <string.h>
#include <strings.h>

enum { LONGEST = 128 }; /* names longer than this are far from everything */

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static int lower(char c)
{
    return tolower((unsigned char)c);
}

size_t cli_distance(const char *a, const char *b)
{
    size_t n = strlen(a), m = strlen(b);
    if (n > LONGEST || m > LONGEST) return SIZE_MAX;
    size_t row[3][LONGEST + 1]; /* rows i-2, i-1, i of the usual table */
    for (size_t j = 0; j <= m; j++) row[1][j] = j;
    for (size_t i = 1; i <= n; i++) {
        row[2][0] = i;
        for (size_t j = 1; j <= m; j++) {
            size_t d = row[1][j - 1] + (lower(a[i - 1]) != lower(b[j - 1]));
            d = least(d, least(row[1][j], row[2][j - 1]) + 1);
            if (i > 1 && j > 1 && lower(a[i - 1]) == lower(b[j - 2]) &&
                lower(a[i - 2]) == lower(b[j - 1]))
                d = least(d, row[0][j - 2] + 1);
            row[2][j] = d;
        }
        memcpy(row[0], row[1], sizeof row[0]);
        memcpy(row[1], row[2], sizeof row[1]);
    }
    return row[1][m];
}

void cli_near_consider(cli_near *best, const char *typed, const char *name)
{
    const size_t n = strlen(typed), limit = n / 3 > 1 ? n / 3 : 1;
    const bool prefix = n >= 3 && !strncasecmp(typed, name, n);
    const size_t d = prefix ? 0 : cli_distance(typed, name);
    if (d <= limit && (!best->name || d < best->distance)) *best = (cli_near){name, d};
}
