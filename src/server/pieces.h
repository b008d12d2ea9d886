/* pieces.h - how many tokens of a prompt are read in a given time.
 *
 * A piece takes some time however short it is, and more for each token. On a GPU hundreds of
 * tokens take little longer than eight: the host launches as many kernels. Were its time
 * taken to be so much a token, a piece that does not fit would be made shorter, seem slower
 * still, and end at the least one, which takes as long and reads next to nothing. */
#ifndef SERVER_PIECES_H
#define SERVER_PIECES_H

#include <stdbool.h>

enum {
    SRV_WHOLE_PIECE = 512, /* the most tokens */
    SRV_LEAST_PIECE = 8    /* that are worth a piece; others are multiples of it */
};

typedef struct srv_pieces {
    double n, seconds;     /* running means; n 0: none was read yet */
    double n_n, n_seconds; /* variance of n, covariance */
    double longest;        /* of late */
    double fixed, each;    /* seconds of a piece: fixed + n each */
} srv_pieces;

/* A piece of n > 0 tokens took so long. */
void srv_pieces_note(srv_pieces *p, int n, double seconds);
/* Tokens to read in so many seconds; those of a least piece do not always fit. */
int srv_pieces_fit(const srv_pieces *p, double seconds);
/* Whether a piece fits at all. */
bool srv_pieces_any(const srv_pieces *p, double seconds);

#endif
