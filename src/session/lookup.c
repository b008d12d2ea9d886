/* lookup.c - guesses of the next tokens: what followed the last time (prompt lookup).
 *
 * Summaries, edits and code repeat their prompt, and small models repeat themselves. The
 * longest end of the conversation that occurs earlier in it says what may come next. How
 * good that guess is depends on how long it is, and on the text; so every guess is
 * compared with the token that came, whether it was used or not, and a share of right ones
 * is kept for each class of length. From these shares, and from the time that passes of one
 * and of several rows take on this machine, follows how many guesses are worth their rows
 * in a pass, which for most texts is none.
 *
 * The last SPAN tokens lie in a ring. Pairs of tokens are hashed; positions with the same
 * hash form a chain, newest first, of which a bounded number is looked at. Positions count
 * modulo 2^32: only their distance from the newest matters. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "still.h"

enum {
    SPAN = 1 << 16,     /* tokens that are looked back at */
    TABLE = 1 << 14,    /* hashes of pairs */
    CHAIN = 24,         /* positions with one hash that are tried */
    LONGEST = 64,       /* of a match, counted */
    USUAL_GUESSES = 15, /* at a time */
    MOST_GUESSES = 31,
    CLASSES = 7,
    MOST_CHANGED = 2, /* tokens of a match that may differ */
};

/* What a guess adds to a pass of one row, as a share of it, until passes have been timed:
 * 0.25 with AVX-512, 0.3 to 0.5 with AVX2 (bench_ahead, docs/perf.md). */
static const float USUAL_ROW = 0.4f;
static const float PAYS = 1.1f; /* gain for which guesses are made: where it is a tenth
                                   too high, nothing is lost yet */
static const float RATE =
    1 / 12.0f; /* at which shares follow the text, times the machine */
static const float FORGET =
    1 / 100.0f; /* at which a row's time becomes the usual one again
                                           while none is timed */

/* Matches of at least so many tokens, and how often they are right in the beginning. */
static const struct {
    int from;
    float share;
} usual[CLASSES] = {{2, 0.25f},  {3, 0.4f},   {4, 0.6f},  {6, 0.8f},
                    {10, 0.88f}, {16, 0.94f}, {32, 0.98f}};

struct still_lookup {
    int32_t tok[SPAN];     /* position p at p % SPAN */
    uint32_t before[SPAN]; /* the position before p whose pair has the same hash */
    uint32_t last[TABLE];  /* the newest position of a hash */
    uint32_t n;            /* tokens so far: the next has position n */
    uint32_t held;         /* of them in the ring */
    uint32_t at;           /* if match > 0: the position that says what comes next */
    int match;             /* tokens before `at` that are the last ones, too */
    int most;
    float share[CLASSES]; /* of guesses that were right */
    float one;            /* seconds of a pass of one row; 0: not timed yet */
    float row;            /* what one more adds, as a share of that */
};

still_status still_lookup_new(int most, still_lookup **out, still_error *err)
{
    *out = NULL;
    if (most < 0 || most > MOST_GUESSES)
        return sti_fail(err, STILL_E_ARG,
                        "%d guesses at a time are not between 1 and %d (0: %d)", most,
                        MOST_GUESSES, USUAL_GUESSES);
    still_lookup *l = sti_alloc(1, sizeof *l);
    if (!l) return sti_fail_memory(err, "tokens to look back at", sizeof *l);
    l->most = most ? most : USUAL_GUESSES;
    l->row = USUAL_ROW;
    still_lookup_reset(l);
    *out = l;
    return STILL_OK;
}

void still_lookup_free(still_lookup *l)
{
    free(l);
}

void still_lookup_reset(still_lookup *l)
{
    memset(l->last, 0, sizeof l->last);
    /* Empty entries name position 0, which is then too far away to be in the ring. */
    l->n = 2 * SPAN;
    l->held = 0;
    l->match = 0;
    for (int i = 0; i < CLASSES; i++) l->share[i] = usual[i].share;
}

void still_lookup_timed(still_lookup *l, int rows, double seconds)
{
    const float t = (float)seconds;
    if (rows < 1 || !(t > 0)) return;
    if (rows == 1) {
        l->one += (t - l->one) * (l->one > 0 ? RATE : 1);
        l->row += (USUAL_ROW - l->row) * FORGET;
    } else if (l->one > 0) {
        float row = (t / l->one - 1) / (float)(rows - 1);
        if (row < 0) row = 0;
        if (row > 1) row = 1; /* a pass that something interrupted */
        l->row += (row - l->row) * RATE;
    }
}

static int32_t token_at(const still_lookup *l, uint32_t position)
{
    return l->tok[position % SPAN];
}

static int class_of(int match)
{
    int c = CLASSES - 1;
    while (c > 0 && match < usual[c].from) c--;
    return c;
}

/* Tokens before `position` that are equal to the last ones, of those up to the one that
 * is the third to differ: a copy with a word changed is still a copy. The last two must be
 * equal. */
static int match_before(const still_lookup *l, uint32_t position)
{
    const uint32_t reach = l->held - (l->n - position);
    int n = 0, others = 0;
    for (uint32_t i = 0; i < LONGEST && i < reach; i++) {
        if (token_at(l, position - 1 - i) == token_at(l, l->n - 1 - i))
            n++;
        else if (i < 2 || ++others > MOST_CHANGED)
            break;
    }
    return n;
}

/* The longest match for the last tokens; of equals the newest. The last pair itself is
 * then put into its chain. */
static void search(still_lookup *l)
{
    l->match = 0;
    if (l->held < 2) return;
    const uint32_t newest = l->n - 1;
    const uint32_t pair = (uint32_t)token_at(l, newest - 1) * 2654435761u ^
                          (uint32_t)token_at(l, newest) * 2246822519u;
    uint32_t *last = &l->last[pair >> 7 & (TABLE - 1)];
    uint32_t at = *last;
    for (int i = 0; i < CHAIN && newest - at < l->held; i++) {
        const int n = match_before(l, at + 1);
        if (n >= usual[0].from && n > l->match) {
            l->match = n;
            l->at = at + 1;
        }
        const uint32_t next = l->before[at % SPAN];
        if (newest - next <= newest - at) break; /* overwritten by a newer position */
        at = next;
    }
    l->before[newest % SPAN] = *last;
    *last = newest;
}

void still_lookup_accept(still_lookup *l, int32_t id)
{
    const int match = l->match;
    const uint32_t at = l->at;
    const bool right = match > 0 && token_at(l, at) == id;
    if (match > 0) {
        float *share = &l->share[class_of(match)];
        *share += ((right ? 1.0f : 0.0f) - *share) * RATE;
    }
    l->tok[l->n % SPAN] = id;
    l->n++;
    if (l->held < SPAN) l->held++;
    search(l);
    /* A match that goes on is at least as long as those that were found. */
    if (right && match + 1 >= l->match && l->n - (at + 1) < l->held) {
        l->match = match < LONGEST ? match + 1 : LONGEST;
        l->at = at + 1;
    }
}

/* As many as make the most tokens of the time: k guesses give one token, the first if it
 * is right, the second if both are, ... */
int still_lookup_guess(const still_lookup *l, int32_t *guess)
{
    float reached = 1, tokens = 1, cost = 1, best = PAYS;
    int n = 0;
    for (int i = 0; l->match > 0 && i < l->most; i++) {
        const uint32_t from = l->at + (uint32_t)i, ahead = from - l->n;
        /* A match that reaches its own end goes on with what was guessed. */
        guess[i] = (int32_t)ahead >= 0 ? guess[ahead] : token_at(l, from);
        reached *= l->share[class_of(l->match + i)];
        tokens += reached;
        cost += l->row;
        if (tokens / cost > best) {
            best = tokens / cost;
            n = i + 1;
        }
    }
    return n;
}
