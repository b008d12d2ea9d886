/* score.c - tries a score of your own: would it keep the tokens that matter?
 *
 *     cc score.c -o score $(pkg-config --cflags --libs still)
 *     ./score model.gguf book.txt 2048
 *
 * When a chunk leaves the window, a score chooses the tokens of it that stay exact. The
 * function score_of below is such a score; change it. The program runs a text through the
 * model and says which share of the attention that the chunk will still receive lies on the
 * tokens that each score chooses: the method's, yours, and chance.
 *
 * The method cannot look ahead, nor can score_of: it sees a token and what came before it.
 * A score that does well here becomes one of the library's in src/ops/score.c, which also
 * has a token's key and attention to go by; `--score NAME` then runs models with it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <still.h>

enum { MOST_TOKENS = 16384 };

/* Higher: keep it. text is the token's n bytes, seen how often it has come before. This one
 * holds that what ends a line, a sentence or a clause stands for what came before it, and
 * that of the others those matter that are new. */
static float score_of(const char *text, size_t n, int seen)
{
    bool ends = false;
    for (size_t i = 0; i < n; i++)
        ends = ends || (text[i] && strchr("\n.,:;!?", text[i]));
    return (ends ? 1.0F : 0.0F) + 1.0F / (float)(2 + seen);
}

/* Of the attention that tokens [first, first + chunk) receive later, the share that lies on
 * the `select` tokens of highest score; of equals the earlier one is chosen. */
static double captured(const float *score, const float *received, int first, int chunk,
                       int select)
{
    double all = 0, chosen = 0;
    for (int i = first; i < first + chunk; i++) {
        int better = 0;
        for (int j = first; j < first + chunk; j++)
            better += j < i ? score[j] >= score[i] : score[j] > score[i];
        all += (double)received[i];
        if (better < select) chosen += (double)received[i];
    }
    return all > 0 ? chosen / all : (double)select / chunk;
}

/* The mean over layers, heads and chunks. In the first chunk the window is the whole past,
 * and in the last ones there is no later. A score of the text alone is the same for every
 * head: own has [tokens], the method's has [layers, heads, tokens]. */
static double mean_captured(const still_saliency *s, const float *score, bool per_head)
{
    const int chunk = s->method.chunk;
    double sum = 0;
    int n = 0;
    for (int h = 0; h < s->layers * s->heads; h++) {
        const float *received = s->received + (size_t)h * (size_t)s->tokens;
        const float *of_head = per_head ? score + (size_t)h * (size_t)s->tokens : score;
        for (int first = chunk; first + chunk <= s->left; first += chunk, n++)
            sum += captured(of_head, received, first, chunk, s->method.select);
    }
    return n > 0 ? sum / n : 0;
}

static void score_all(const still_tokenizer *tk, const int32_t *ids, int n, int *seen,
                      float *own)
{
    for (int i = 0; i < n; i++) {
        size_t bytes = 0;
        const char *text = still_tokenizer_piece(tk, ids[i], true, &bytes);
        own[i] = score_of(text ? text : "", bytes, seen[ids[i]]++);
    }
}

static void report(const still_saliency *s, const float *own)
{
    printf("attention that %d of %d tokens keep, mean over %d layers of %d heads:\n",
           s->method.select, s->method.chunk, s->layers, s->heads);
    printf("%-8s %6.4f\n", s->method.score, mean_captured(s, s->local, true));
    printf("%-8s %6.4f\n", "yours", mean_captured(s, own, false));
    printf("%-8s %6.4f\n", "chance",
           (double)s->method.select / (double)s->method.chunk);
}

static still_status run(const char *path, const char *file, int most, int chunk,
                        still_error *err)
{
    still_model *model = NULL;
    still_saliency *s = NULL;
    still_method method;
    char *text = NULL;
    size_t bytes = 0, n = 0;
    int32_t *ids = malloc(MOST_TOKENS * sizeof *ids);
    float *own = malloc(MOST_TOKENS * sizeof *own);
    int *seen = NULL;

    still_status st = still_model_open(path, NULL, &model, err);
    const still_tokenizer *tk = st ? NULL : still_model_tokenizer(model);
    if (!st && !tk) {
        st = STILL_E_UNSUPPORTED;
        snprintf(err->text, sizeof err->text, "%s brings no tokenizer", path);
    }
    if (!st) seen = calloc((size_t)still_model_get_info(model)->vocab, sizeof *seen);
    if (!st && (!ids || !own || !seen)) {
        st = STILL_E_MEMORY;
        snprintf(err->text, sizeof err->text, "out of memory");
    }
    if (!st) st = still_text_read(file, &text, &bytes, err);
    if (!st)
        st = still_tokenizer_encode(tk, text, bytes, STILL_ENCODE_BOS, ids, MOST_TOKENS,
                                    &n, err);
    if (!st) st = still_method_init(&method, "still", chunk, err);
    if (!st) {
        const int tokens = n < (size_t)most ? (int)n : most;
        still_saliency_params params = {.size = sizeof params, .method = &method};
        st = still_saliency_run(model, ids, tokens, &params, &s, err);
        if (!st) {
            score_all(tk, ids, tokens, seen, own);
            report(s, own);
        }
    }
    still_saliency_free(s);
    still_model_free(model);
    free(seen);
    free(own);
    free(ids);
    free(text);
    return st;
}

int main(int argc, char **argv)
{
    still_error err;
    if (argc < 3) {
        fprintf(stderr, "usage: %s MODEL FILE [TOKENS [CHUNK]]\n", argv[0]);
        return 2;
    }
    const long most = argc > 3 ? strtol(argv[3], NULL, 10) : 2048;
    const long chunk = argc > 4 ? strtol(argv[4], NULL, 10) : 0; /* 0: the usual size */
    if (most < 1 || most > MOST_TOKENS || chunk < 0 || chunk > MOST_TOKENS) {
        fprintf(stderr, "TOKENS is 1 to %d, and more than 3 CHUNKs\n", MOST_TOKENS);
        return 2;
    }
    if (run(argv[1], argv[2], (int)most, (int)chunk, &err)) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    return 0;
}
