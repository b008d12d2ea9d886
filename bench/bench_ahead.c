/* bench_ahead.c - what a row costs: passes of one token and 0 to 15 guesses.
 *
 *     bench_ahead MODEL [ADAPTER|METHOD|- [LENGTH [THREADS [ROUNDS]]]]   (-, 512, 1, 40)
 *
 * The session holds LENGTH random tokens, then takes one more a pass, with guesses that
 * are never right; passes of different rows take turns. Prints the median time of each and
 * its ratio to a pass of one row, which still_lookup measures as it goes. One thread is
 * timed in CPU time. */
#include "bench.h"

enum { MOST = 15, MOST_ROUNDS = 1000 };
static const int guesses[] = {0, 1, 2, 3, 4, 6, 8, 11, 15};
enum { KINDS = sizeof guesses / sizeof *guesses };

static int by_kind(int kind, int length, int chunk)
{
    const int left = chunk > 0 ? chunk - 1 - length % chunk : MOST;
    return guesses[kind] <= left;
}

int main(int argc, char **argv)
{
    static double seconds[KINDS][MOST_ROUNDS];
    const char *how = argc > 2 ? argv[2] : "-";
    const int length = number_at(3, argc, argv, 512),
              threads = number_at(4, argc, argv, 1),
              rounds = number_at(5, argc, argv, 40);
    if (argc < 2 || length < 1 || threads < 1 || rounds < 1 || rounds > MOST_ROUNDS)
        die("usage: bench_ahead MODEL [ADAPTER|METHOD|- [LENGTH [THREADS [ROUNDS]]]]");
    still_error e;
    still_model *m;
    still_session *s;
    still_method method;
    const bool named =
        strcmp(how, "-") != 0 && still_method_init(&method, how, 0, &e) == STILL_OK;
    const bool adapted = strcmp(how, "-") != 0 && !named;
    must(still_model_open(argv[1],
                          &STILL_PARAMS(still_model_params, .threads = threads,
                                        .adapter = adapted ? how : NULL),
                          &m, &e),
         &e);
    const still_model_info *info = still_model_get_info(m);
    const int chunk = named ? method.chunk : adapted ? info->method->chunk : 0;
    must(still_session_new(m,
                           &STILL_PARAMS(still_session_params,
                                         .ctx = length + KINDS * (rounds + 40) + MOST,
                                         .method = named ? &method : NULL),
                           &s, &e),
         &e);
    for (int i = 0; i < length; i += 256) {
        int32_t tok[256];
        const int n = length - i < 256 ? length - i : 256;
        for (int k = 0; k < n; k++) tok[k] = (i + k) * 7919 % info->vocab;
        must(still_session_feed(s, tok, n, &e), &e);
    }
    int done[KINDS] = {0}, turn = 0;
    while (done[KINDS - 1] < rounds) {
        int32_t guess[MOST];
        const int kind = turn++ % KINDS, n = still_session_length(s);
        /* A pass that ends outside its chunk, or begins one, is another matter. */
        const bool counts = by_kind(kind, n, chunk) && (chunk == 0 || n % chunk != 0);
        for (int k = 0; k < guesses[kind]; k++) guess[k] = -k + info->vocab - 1;
        int rows;
        const double start = now_of(threads);
        must(still_session_feed_ahead(s, n * 31 % (info->vocab - 100), guess,
                                      counts ? guesses[kind] : 0, &rows, &e),
             &e);
        const double end = now_of(threads);
        if (counts && rows == guesses[kind] + 1 && done[kind] < rounds)
            seconds[kind][done[kind]++] = end - start;
        if (still_session_length(s) == still_session_limit(s)) break;
    }
    printf("%s %s, %d tokens, %d thread%s\n", info->name, how, length, threads,
           threads > 1 ? "s" : "");
    for (int k = 0; k < KINDS; k++) {
        if (!done[k] || !done[0]) continue;
        sort_times(seconds[k], done[k]);
        const double t = seconds[k][done[k] / 2], one = seconds[0][done[0] / 2];
        printf("%2d guesses: %7.2f ms, %.2f of none, %.2f a guess\n", guesses[k],
               1e3 * t, t / one, k ? (t / one - 1) / guesses[k] : 0);
    }
    still_session_free(s);
    still_model_free(m);
    return 0;
}
