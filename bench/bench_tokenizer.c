/* bench_tokenizer.c - times encoding of a text on one thread.
 *
 *     bench_tokenizer TOKENIZER TEXT ROUNDS [IDS]
 *
 * Prints one JSON object: milliseconds of every round, bytes, tokens, and how long
 * opening took. IDS gets the ids, one a line, for comparison with other encoders. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "still.h"

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static int fail(const char *what)
{
    fprintf(stderr, "bench_tokenizer: %s\n", what);
    return 1;
}

static int write_ids(const char *path, const int32_t *ids, size_t n)
{
    FILE *f = fopen(path, "w");
    if (!f) return fail("cannot write ids");
    for (size_t i = 0; i < n; i++) fprintf(f, "%d\n", ids[i]);
    return fclose(f) ? fail("cannot write ids") : 0;
}

static int run(const still_tokenizer *tk, const char *text, size_t n, int rounds,
               double opened, const char *out)
{
    still_error err;
    size_t count = 0,
           capacity = n + 8; /* a token covers a byte at least, plus a prefix */
    int32_t *ids = malloc(capacity * sizeof *ids);
    if (!ids) return fail("out of memory");
    printf("{\"bytes\": %zu, \"open_ms\": %.3f, \"ms\": [", n, opened);
    for (int i = 0; i < rounds; i++) {
        double t = now_ms();
        if (still_tokenizer_encode(tk, text, n, 0, ids, capacity, &count, &err)) {
            free(ids);
            return fail(err.text);
        }
        printf("%s%.3f", i ? ", " : "", now_ms() - t);
    }
    printf("], \"tokens\": %zu}\n", count);
    int rc = out ? write_ids(out, ids, count) : 0;
    free(ids);
    return rc;
}

int main(int argc, char **argv)
{
    still_tokenizer *tk;
    still_error err;
    char *text;
    size_t n;
    if (argc < 4) return fail("usage: bench_tokenizer TOKENIZER TEXT ROUNDS [IDS]");
    double t = now_ms();
    if (still_tokenizer_open(argv[1], &tk, &err)) return fail(err.text);
    double opened = now_ms() - t;
    if (still_text_read(argv[2], &text, &n, &err)) {
        still_tokenizer_free(tk);
        return fail(err.text);
    }
    int rc = run(tk, text, n, atoi(argv[3]), opened, argc > 4 ? argv[4] : NULL);
    free(text);
    still_tokenizer_free(tk);
    return rc;
}
