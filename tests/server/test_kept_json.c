/* What the server says a model kept is what its session says: places from masks, ranks in
 * the order of scores, shares of heads, bytes. */
#include <math.h>
#include <stdbool.h>

#include "../eval/eval_model.h"
#include "../run.h"

#include "base/json.h"
#include "server/kept.h"

enum { CHUNK = 8, MOST = 128, PROMPT = 50, MADE = 21 };

static still_session *session(const char *score)
{
    still_session *s;
    still_error e;
    still_method how;
    must(still_method_init(&how, "still", CHUNK, &e), &e);
    how.cap = 9;
    snprintf(how.score, sizeof how.score, "%s", score);
    must(still_session_new(
             model, &STILL_PARAMS(still_session_params, .ctx = MOST, .method = &how),
             &s, &e),
         &e);
    return s;
}

/* Feeds all ids but the last one, which was written and not read. */
static json_t *say(still_session *s, int32_t *id)
{
    still_error e;
    sti_buf b = {0};
    for (int i = 0; i < PROMPT + MADE; i++) id[i] = (37 * i + i * i) % 256;
    must(still_session_feed(s, id, PROMPT + MADE - 1, &e), &e);
    must(srv_kept_put(&b,
                      &(srv_kept){.model = model,
                                  .session = s,
                                  .prompt = id,
                                  .n_prompt = PROMPT,
                                  .made = id + PROMPT,
                                  .n_made = MADE},
                      &e),
         &e);
    json_t *o;
    must(sti_json_read("answer", b.p, b.n, STI_JSON_OBJECT | STI_JSON_NUL, &o, &e), &e);
    sti_buf_free(&b);
    return o;
}

static int number(const json_t *o, const char *key)
{
    const json_t *v = json_object_get(o, key);
    assert_true(json_is_integer(v));
    return (int)json_integer_value(v);
}

static int digit(char c)
{
    static const char all[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const char *at = c ? strchr(all, c) : NULL;
    return at ? (int)(at - all) : 0; /* '=', too */
}

/* The bytes of a base64 string; their number is returned. */
static int bytes_of(const json_t *o, const char *key, uint8_t *out)
{
    const char *p = json_string_value(json_object_get(o, key));
    assert_non_null(p);
    const size_t n = strlen(p);
    int made = 0;
    assert_int_equal(n % 4, 0);
    assert_true(n / 4 * 3 <= 3 * MOST);
    for (size_t i = 0; i < n; i += 4) {
        const int v = digit(p[i]) << 18 | digit(p[i + 1]) << 12 | digit(p[i + 2]) << 6 |
                      digit(p[i + 3]);
        out[made++] = (uint8_t)(v >> 16);
        if (p[i + 2] != '=') out[made++] = (uint8_t)(v >> 8);
        if (p[i + 3] != '=') out[made++] = (uint8_t)v;
    }
    return made;
}

static void check_head(const still_session *s, const json_t *o, int *exact)
{
    const int n = still_session_length(s);
    uint8_t place[MOST], mask[3 * MOST], rank[3 * MOST];
    float score[MOST];
    still_kept k;
    still_error e;
    must(still_session_kept(s, number(o, "layer"), number(o, "head"), place, score, &k,
                            &e),
         &e);
    assert_int_equal(number(o, "cap"), 9);
    assert_int_equal(number(o, "window"), k.count[STILL_PLACE_WINDOW]);
    assert_int_equal(number(o, "salient"), k.count[STILL_PLACE_SALIENT]);
    assert_int_equal(number(o, "folded"), k.count[STILL_PLACE_FOLDED]);
    assert_int_equal(number(o, "gone"), 0);
    assert_int_equal(bytes_of(o, "mask", mask), (n + 7) / 8);
    const int ranks = bytes_of(o, "rank", rank);
    int scored[MOST], n_scored = 0;
    for (int i = 0; i < n; i++) {
        assert_int_equal(mask[i / 8] >> i % 8 & 1, place[i] == STILL_PLACE_SALIENT);
        exact[i] += place[i] <= STILL_PLACE_SALIENT;
        if (!isnan(score[i])) scored[n_scored++] = i;
    }
    assert_int_equal(ranks, n_scored);
    int lowest = 0, highest = 0;
    for (int a = 0; a < ranks; a++) {
        for (int b = 0; b < ranks; b++)
            if (score[scored[a]] < score[scored[b]]) assert_true(rank[a] < rank[b]);
        lowest += rank[a] == 0;
        highest += rank[a] == 255;
    }
    assert_int_equal(lowest, 1);
    assert_int_equal(highest, 1);
}

static void test_as_session(void **state)
{
    (void)state;
    const char *const score[] = {"s3", "distinct"}; /* known in the window, and not */
    for (int i = 0; i < 2; i++) {
        still_session *s = session(score[i]);
        int32_t id[PROMPT + MADE];
        int exact[MOST] = {0};
        uint8_t share[3 * MOST];
        json_t *o = say(s, id), *head, *token;
        size_t at;
        const int held = number(o, "held");
        assert_int_equal(held, PROMPT + MADE - 1);
        assert_int_equal(number(o, "prompt"), PROMPT);
        const json_t *heads = json_object_get(o, "heads"),
                     *tokens = json_object_get(o, "tokens");
        const still_model_info *info = still_model_get_info(model);
        const int n = info->layers * info->kv_heads;
        assert_int_equal(json_array_size(heads), n);
        json_array_foreach(heads, at, head)
        {
            assert_int_equal(number(head, "layer"), (int)at / info->kv_heads);
            assert_int_equal(number(head, "head"), (int)at % info->kv_heads);
            check_head(s, head, exact);
        }
        assert_int_equal(bytes_of(o, "share", share), held);
        for (int t = 0; t < held; t++) assert_int_equal(share[t], exact[t] * 255 / n);
        assert_int_equal(json_array_size(tokens), PROMPT + MADE);
        json_array_foreach(tokens, at, token)
        {
            size_t bytes;
            const char *piece = still_tokenizer_piece(still_model_tokenizer(model),
                                                      id[at], true, &bytes);
            const char *said = json_string_value(token);
            assert_non_null(said);
            if (strncmp(said, "bytes:", 6) != 0) /* half a character */
                assert_memory_equal(said, piece, bytes);
        }
        still_held h;
        still_error e;
        must(still_session_held(s, &h, &e), &e);
        const json_t *memory = json_object_get(o, "memory");
        assert_int_equal(number(memory, "bytes"), (int)h.bytes);
        assert_int_equal(number(memory, "used"), (int)h.used);
        assert_int_equal(number(memory, "softmax"), (int)h.softmax);
        assert_int_equal(number(memory, "context"), MOST);
        json_decref(o);
        still_session_free(s);
    }
}

/* Nothing has been read: no bytes, and no division by nothing. */
static void test_empty(void **state)
{
    (void)state;
    still_session *s = session("s3");
    still_error e;
    sti_buf b = {0};
    must(srv_kept_put(&b, &(srv_kept){.model = model, .session = s}, &e), &e);
    json_t *o;
    must(sti_json_read("answer", b.p, b.n, STI_JSON_OBJECT | STI_JSON_NUL, &o, &e), &e);
    assert_int_equal(number(o, "held"), 0);
    assert_int_equal(json_array_size(json_object_get(o, "tokens")), 0);
    assert_string_equal(json_string_value(json_object_get(o, "share")), "");
    json_decref(o);
    sti_buf_free(&b);
    still_session_free(s);
}

RUN_TESTS_IN(open_model, close_model, cmocka_unit_test(test_as_session),
             cmocka_unit_test(test_empty))
