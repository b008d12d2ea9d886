/* mix.c - the order of a run: which file is drawn, and which of its sequences.
 *
 * Both are functions of the number of a draw alone. Nothing is stored or replayed, so a
 * run can resume at any step at once, and ranks find their own sequences without
 * communicating. */
#include "base/random.h"
#include "train/data/parts.h"

__extension__ typedef unsigned __int128 wide;

/* ---- Files by weight ----------------------------------------------------- */

/* Draw j of file f happens at the time (2j + 1) / (2 w_f): each file is drawn evenly,
 * w_f times in a unit of time. Draw i of the mix is the i-th of all these, earlier
 * files first where times are equal. */

/* How many draws of g come before draw j of f:
 *     k with (2k + 1) w_f < (2j + 1) w_g, or <= if g stands before f. */
static uint64_t draws_before(const uint64_t *weight, int g, int f, uint64_t j)
{
    wide end = (2 * (wide)j + 1) * weight[g], step = weight[f];
    /* The bound on 2k + 1, from above: ceil(end / step), or floor + 1 with equality. */
    wide bound = g < f ? end / step + 1 : (end + step - 1) / step;
    return (uint64_t)(bound / 2);
}

static uint64_t rank_of(const uint64_t *weight, int n, int f, uint64_t j)
{
    uint64_t rank = j;
    for (int g = 0; g < n; g++)
        if (g != f) rank += draws_before(weight, g, f, j);
    return rank;
}

int sti_mix_draw(const uint64_t *weight, int n, uint64_t i, uint64_t *nth)
{
    wide sum = 0;
    for (int f = 0; f < n; f++) sum += weight[f];
    for (int f = 0; f < n; f++) {
        /* Rounding moves a rank by at most a half for every other file, so the draw of
         * f that can be number i lies within n of its share. */
        uint64_t share = (uint64_t)((wide)i * weight[f] / sum), slack = (uint64_t)n;
        uint64_t lo = share > slack ? share - slack : 0, hi = share + slack;
        while (lo < hi) { /* the first draw of f whose rank is i or more */
            uint64_t mid = lo + (hi - lo) / 2;
            if (rank_of(weight, n, f, mid) < i)
                lo = mid + 1;
            else
                hi = mid;
        }
        if (rank_of(weight, n, f, lo) == i) {
            *nth = lo;
            return f;
        }
    }
    __builtin_unreachable(); /* ranks are a permutation of 0, 1, 2, ... */
}

/* ---- Sequences of a file ------------------------------------------------- */

/* A Feistel network over 2h bits, the fewest with 4^h >= n, permutes 0 .. 4^h - 1.
 * Applied again and again until the result is below n, it permutes 0 .. n-1: walking
 * along a cycle must come back below n, at the start if nowhere else. Fewer than four
 * rounds of it are needed on average. */

enum { ROUNDS = 8 };

static uint64_t feistel(uint64_t x, int half, uint64_t key)
{
    uint64_t mask = ((uint64_t)1 << half) - 1, left = x >> half, right = x & mask;
    for (uint64_t round = 0; round < ROUNDS; round++) {
        uint64_t next = left ^ (sti_mix64(sti_mix64(key + round) ^ right) & mask);
        left = right;
        right = next;
    }
    return left << half | right;
}

uint64_t sti_mix_shuffle(uint64_t n, uint64_t seed, uint64_t file, uint64_t pass,
                         uint64_t at)
{
    uint64_t key = sti_mix64(sti_mix64(sti_mix64(seed) ^ file) ^ pass);
    int half = 1;
    while (half < 31 && (uint64_t)1 << 2 * half < n) half++;
    do at = feistel(at, half, key);
    while (at >= n);
    return at;
}
