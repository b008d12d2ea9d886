/* generate.c - continues a text with a model, through still.h alone.
 *
 *     cc generate.c -o generate $(pkg-config --cflags --libs still)
 *     ./generate model.gguf "The capital of France is" 32
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <still.h>

enum { MAX_PROMPT = 1024 };

static still_status generate(const char *path, const char *prompt, int n,
                             still_error *err)
{
    still_model *model = NULL;
    still_session *session = NULL;
    still_sampler *sampler = NULL;
    still_decoder *decoder = NULL;
    int32_t ids[MAX_PROMPT];
    size_t n_ids = 0;

    still_status st = still_model_open(path, NULL, &model, err);
    if (st) goto out;
    const still_tokenizer *tk = still_model_tokenizer(model);
    if (!tk) {
        st = STILL_E_UNSUPPORTED;
        snprintf(err->text, sizeof err->text, "%s brings no tokenizer", path);
        goto out;
    }
    st = still_tokenizer_encode(tk, prompt, strlen(prompt), STILL_ENCODE_BOS, ids,
                                MAX_PROMPT, &n_ids, err);
    if (!st && (n_ids == 0 || n_ids > MAX_PROMPT)) {
        st = STILL_E_LIMIT;
        snprintf(err->text, sizeof err->text, "the prompt has %zu tokens, not 1 to %d",
                 n_ids, MAX_PROMPT);
    }
    if (st) goto out;

    still_session_params room = {.size = sizeof room, .ctx = (int)n_ids + n};
    still_sampler_params greedy = {.size = sizeof greedy, .temperature = 0};
    st = still_session_new(model, &room, &session, err);
    if (!st)
        st = still_sampler_new(&greedy, still_model_get_info(model)->vocab, &sampler,
                               err);
    if (!st) st = still_decoder_new(tk, false, &decoder, err);
    if (!st) st = still_session_feed(session, ids, (int)n_ids, err);

    const char *text;
    size_t bytes;
    for (int i = 0; i < n && !st; i++) {
        int32_t id;
        st = still_sampler_sample(sampler, still_session_logits(session), &id, err);
        if (st || still_tokenizer_is_end(tk, id)) break;
        st = still_decoder_push(decoder, id, &text, &bytes, err);
        if (!st) {
            fwrite(text, 1, bytes, stdout);
            fflush(stdout);
            st = still_session_feed(session, &id, 1, err);
        }
    }
    if (!st) {
        still_decoder_flush(decoder, &text, &bytes);
        fwrite(text, 1, bytes, stdout);
        putchar('\n');
    }
out:
    still_decoder_free(decoder);
    still_sampler_free(sampler);
    still_session_free(session);
    still_model_free(model);
    return st;
}

int main(int argc, char **argv)
{
    still_error err;
    if (argc < 3) {
        fprintf(stderr, "usage: %s MODEL PROMPT [TOKENS]\n", argv[0]);
        return 2;
    }
    long n = argc > 3 ? strtol(argv[3], NULL, 10) : 64;
    if (generate(argv[1], argv[2], n > 0 && n < 10000 ? (int)n : 64, &err)) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    return 0;
}
