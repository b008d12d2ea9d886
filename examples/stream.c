/* stream.c - reads a text of any length in constant memory, through still.h alone.
 *
 *     cc stream.c -o stream $(pkg-config --cflags --libs still) -lm
 *     ./stream model.gguf adapter-folder book.txt
 *     cat *.txt | ./stream model.gguf adapter-folder -
 *
 * The adapter is what `still linearize` wrote. Text is read, tokenized and fed piece by
 * piece, and each piece is scored as it goes by; nothing grows: neither the text, of
 * which one piece is in memory, nor the session, whose past has the size that
 * still_model_bill says before the first token. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include <still.h>

enum {
    PIECE = 16 << 10, /* bytes read at once; tokens are never more than that */
    REPORT = 16384,   /* tokens between lines */
    MOST_TOKENS =
        1 << 30 /* room of the session: for this method a number, not memory */
};

typedef struct stream {
    const still_tokenizer *tk;
    still_session *session;
    char text[PIECE];
    size_t n; /* bytes of text that wait */
    int32_t ids[PIECE + 1];
    float logprob[PIECE + 1];
    long long tokens, scored, reported;
    double sum; /* of log p */
} stream;

static void report(stream *s)
{
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    printf("%10lld tokens   perplexity %8.3f   peak memory %ld MiB\n", s->tokens,
           s->scored ? exp(-s->sum / (double)s->scored) : NAN, use.ru_maxrss / 1024);
    fflush(stdout);
    s->reported = s->tokens;
}

/* Feeds the first n bytes that wait. The first piece begins with the start token. */
static still_status feed(stream *s, size_t n, still_error *err)
{
    size_t n_ids = 0;
    const unsigned flags = s->tokens == 0 ? STILL_ENCODE_BOS : 0;
    still_status st = still_tokenizer_encode(
        s->tk, s->text, n, flags, s->ids, sizeof s->ids / sizeof *s->ids, &n_ids, err);
    if (st) return st;
    if (n_ids > sizeof s->ids / sizeof *s->ids) {
        snprintf(err->text, sizeof err->text, "%zu tokens in %zu bytes", n_ids, n);
        return STILL_E_LIMIT;
    }
    if (n_ids > 1)
        st = still_session_logprobs(s->session, s->ids, (int)n_ids, s->logprob, NULL,
                                    err);
    else if (n_ids == 1)
        st = still_session_feed(s->session, s->ids, 1, err);
    if (st) return st;
    for (size_t i = 0; i + 1 < n_ids; i++) s->sum += (double)s->logprob[i];
    s->scored += n_ids > 0 ? (long long)n_ids - 1 : 0;
    s->tokens += (long long)n_ids;
    memmove(s->text, s->text + n, s->n - n);
    s->n -= n;
    if (s->tokens - s->reported >= REPORT) report(s);
    return STILL_OK;
}

/* A piece ends before its last space, so that words stay whole; without one, at its end. */
static size_t cut(const stream *s)
{
    for (size_t i = s->n; i > s->n / 2; i--)
        if (s->text[i - 1] == ' ' || s->text[i - 1] == '\n') return i - 1;
    return s->n;
}

static still_status read_all(stream *s, FILE *in, still_error *err)
{
    for (;;) {
        const size_t got = fread(s->text + s->n, 1, sizeof s->text - s->n, in);
        s->n += got;
        if (ferror(in)) {
            snprintf(err->text, sizeof err->text, "reading: %s", strerror(errno));
            return STILL_E_IO;
        }
        const bool end = got == 0;
        if (s->n == 0) break;
        if (!end && s->n < sizeof s->text) continue;
        still_status st = feed(s, end ? s->n : cut(s), err);
        if (st || end) return st;
    }
    return STILL_OK;
}

static still_status run(const char *path, const char *adapter, FILE *in,
                        still_error *err)
{
    still_model *model = NULL;
    still_bill bill;
    still_session_params room = {.size = sizeof room, .ctx = MOST_TOKENS};
    still_model_params params = {.size = sizeof params, .adapter = adapter};
    stream *s = calloc(1, sizeof *s);
    if (!s) {
        snprintf(err->text, sizeof err->text, "out of memory");
        return STILL_E_MEMORY;
    }
    still_status st = still_model_open(path, &params, &model, err);
    if (st) goto out;
    s->tk = still_model_tokenizer(model);
    if (!s->tk) {
        snprintf(err->text, sizeof err->text, "%s brings no tokenizer", path);
        st = STILL_E_UNSUPPORTED;
        goto out;
    }
    st = still_model_bill(model, &room, &bill, err);
    if (!st) {
        printf("the past will take %.1f MB, however long the text\n",
               (double)bill.cache / 1e6);
        st = still_session_new(model, &room, &s->session, err);
    }
    if (!st) st = read_all(s, in, err);
    if (!st) report(s);
out:
    still_session_free(s->session);
    still_model_free(model);
    free(s);
    return st;
}

int main(int argc, char **argv)
{
    still_error err;
    if (argc != 4) {
        fprintf(stderr, "usage: %s MODEL ADAPTER FILE|-\n", argv[0]);
        return 2;
    }
    FILE *in = strcmp(argv[3], "-") == 0 ? stdin : fopen(argv[3], "rb");
    if (!in) {
        fprintf(stderr, "%s: %s\n", argv[3], strerror(errno));
        return 1;
    }
    const still_status st = run(argv[1], argv[2], in, &err);
    if (st) fprintf(stderr, "%s\n", err.text);
    if (in != stdin) fclose(in);
    return st ? 1 : 0;
}
