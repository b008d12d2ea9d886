/* pieces.c - see pieces.h: a line through the pieces of late. */
#include "server/pieces.h"

static const double MEAN = 0.2, SLOPE = 0.05; /* what a piece counts for */
static const double ALIKE = 0.01; /* variance below which lengths tell nothing */
static const double WORTH = 1.5;  /* times `fixed` that a piece may always take */
static const double GROWTH = 2;   /* from the longest of late to the next, at most */
static const double AGE = 0.9;    /* of the longest, with each piece */

/* Where all pieces are of one length nothing tells the two parts apart. Then all of it
 * seems fixed, the next piece is longer, and that tells. */
void srv_pieces_note(srv_pieces *p, int n, double seconds)
{
    const double by = n - p->n, by_seconds = seconds - p->seconds;
    const bool first = !(p->n > 0);
    if (!first) {
        p->n_n += SLOPE * (by * by - p->n_n);
        p->n_seconds += SLOPE * (by * by_seconds - p->n_seconds);
    }
    p->longest *= AGE; /* the end of a prompt is short and says nothing against it */
    if (p->longest < n) p->longest = n;
    p->n += (first ? 1 : MEAN) * by;
    p->seconds += (first ? 1 : MEAN) * by_seconds;
    p->each = p->n_seconds / (p->n_n + ALIKE);
    if (p->each < 0) p->each = 0;
    if (p->each > p->seconds / p->n) p->each = p->seconds / p->n;
    p->fixed = p->seconds - p->n * p->each;
}

int srv_pieces_fit(const srv_pieces *p, double seconds)
{
    if (seconds < WORTH * p->fixed) seconds = WORTH * p->fixed;
    const double most = GROWTH * p->longest + SRV_LEAST_PIECE,
                 rest = seconds - p->fixed;
    const double n = rest < most * p->each ? rest / p->each : most;
    if (n >= SRV_WHOLE_PIECE) return SRV_WHOLE_PIECE;
    return n < SRV_LEAST_PIECE ? SRV_LEAST_PIECE
                               : (int)n / SRV_LEAST_PIECE * SRV_LEAST_PIECE;
}

bool srv_pieces_any(const srv_pieces *p, double seconds)
{
    return seconds >= p->fixed + SRV_LEAST_PIECE * p->each;
}
