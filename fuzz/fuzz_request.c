/* fuzz_request.c - bodies of HTTP requests: any bytes give a request whose every field
 * is in range, or an error with a text. The first byte says which endpoint's. */
#include <stdlib.h>
#include <string.h>

#include "server/request.h"

enum { VOCAB = 1000 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void check(bool holds)
{
    if (!holds) abort();
}

static void check_ids(const int32_t *id, size_t n)
{
    for (size_t i = 0; i < n; i++) check(id[i] >= 0 && id[i] < VOCAB);
}

static void completion(const char *text, size_t n)
{
    srv_completion c;
    still_error err = {0};
    if (srv_completion_read(text, n, VOCAB, &c, &err) != STILL_OK) {
        check(err.text[0] && !c.body && !c.prompt);
        return;
    }
    check(c.n_prompts >= 1 && c.max_tokens >= 0 && c.logprobs >= -1 && c.top_k >= 0);
    check(c.logprobs <= SRV_MOST_LOGPROBS && c.n_stops <= SRV_MOST_STOPS);
    check(c.temperature >= 0 && c.temperature <= 100 && c.top_p >= 0 && c.top_p <= 1);
    for (size_t i = 0; i < c.n_prompts; i++) {
        check(!c.prompt[i].text == (c.prompt[i].n > 0));
        check_ids(c.prompt[i].id, c.prompt[i].n);
        check(!c.prompt[i].text || strlen(c.prompt[i].text) <= c.prompt[i].n_text);
    }
    for (int i = 0; i < c.n_stops; i++) check(c.stop[i].n > 0);
    srv_completion_free(&c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (n == 0) return 0;
    const char *text = (const char *)data + 1;
    still_error err = {0};
    if (data[0] == 't') {
        srv_tokenize t;
        check(srv_tokenize_read(text, n - 1, &t, &err) == STILL_OK ? t.text != NULL
                                                                   : err.text[0]);
        json_decref(t.body);
    } else if (data[0] == 'd') {
        int32_t *id;
        size_t n_ids = 0;
        if (srv_detokenize_read(text, n - 1, VOCAB, &id, &n_ids, &err) == STILL_OK)
            check_ids(id, n_ids);
        else
            check(!id && err.text[0]);
        free(id);
    } else {
        completion(text, n - 1);
    }
    return 0;
}
