/* Feature maps of an adapter are read when a session first folds a token: not before, and
 * then they are the file's. */
#include "../run.h"
#include "exports.h"

enum { CHUNK = 8 }; /* of make_adapter */

static still_model *open_with(const char *adapter)
{
    still_model *m;
    still_error e;
    must(still_model_open(FOLDER, &STILL_PARAMS(still_model_params, .adapter = adapter),
                          &m, &e),
         &e);
    return m;
}

/* Feeds tokens one by one; returns how many it took until the maps were there. */
static int tokens_until_read(still_model *m, int batch, int most)
{
    still_session *s;
    still_error e;
    int n = 0;
    must(still_session_new(
             m, &STILL_PARAMS(still_session_params, .ctx = T, .batch = batch), &s, &e),
         &e);
    while (n < most && !m->adapter->maps_read) {
        const int32_t tok = n % 7;
        must(still_session_feed(s, &tok, 1, &e), &e);
        n++;
    }
    still_session_free(s);
    return n;
}

static void same_maps(const still_model *m, const char *adapter)
{
    still_error e;
    sti_adapter *eager;
    const sti_adapter_home home = sti_model_home((still_model *)m);
    must(sti_adapter_read(&home, adapter, false, false, false, &eager, &e), &e);
    assert_null(eager->maps.p);
    const size_t D = (size_t)m->cfg.head_dim, square = D * D * sizeof(float);
    int compared = 0;
    for (int l = 0; l < m->cfg.layers; l++) {
        const sti_attn_params *a = &m->adapter->layer[l].attn,
                              *b = &eager->layer[l].attn;
        assert_int_equal(a->map_q != NULL, b->map_q != NULL);
        if (!a->map_q) continue;
        assert_memory_equal(a->map_q, b->map_q, (size_t)m->cfg.heads * square);
        assert_memory_equal(a->map_k, b->map_k, (size_t)m->cfg.kv_heads * square);
        compared++;
    }
    assert_true(compared > 0);
    sti_adapter_free(eager);
}

static void when_a_chunk_retires(void **state)
{
    (void)state;
    const char *const methods[] = {"still", "lolcats"};
    for (int i = 0; i < 2; i++) {
        const char *dir = in_scratch(methods[i]);
        make_adapter(FOLDER, methods[i], dir, i); /* of lolcats: not in layer 0 */
        still_model *m = open_with(dir);
        assert_non_null(m->adapter->maps.p);
        assert_int_equal(tokens_until_read(m, 1, 2 * CHUNK), 2 * CHUNK);
        assert_false(m->adapter->maps_read); /* the window was just filled */
        assert_int_equal(tokens_until_read(m, 1, T), 2 * CHUNK + 1);
        assert_true(m->adapter->maps_read);
        same_maps(m, dir);
        still_model_free(m);
    }
}

/* In one pass, in which several chunks retire, and token by token. */
static void a_prompt_reads_them_in_time(void **state)
{
    (void)state;
    const char *dir = in_scratch("prompt");
    still_error e;
    int32_t tok[T];
    make_adapter(FOLDER, "still", dir, 0);
    for (int i = 0; i < T; i++) tok[i] = i * 5 % 60;
    still_model *m[2] = {open_with(dir), open_with(dir)};
    still_session *s[2];
    for (int i = 0; i < 2; i++)
        must(still_session_new(
                 m[i], &STILL_PARAMS(still_session_params, .ctx = T, .batch = T), &s[i],
                 &e),
             &e);
    must(still_session_feed(s[0], tok, T, &e), &e);
    for (int i = 0; i < T; i++) must(still_session_feed(s[1], tok + i, 1, &e), &e);
    assert_true(m[0]->adapter->maps_read && m[1]->adapter->maps_read);
    assert_memory_equal(still_session_logits(s[0]), still_session_logits(s[1]),
                        (size_t)m[0]->cfg.vocab * sizeof(float));
    for (int i = 0; i < 2; i++) {
        still_session_free(s[i]);
        still_model_free(m[i]);
    }
}

static void at_once_where_tokens_are(void **state)
{
    (void)state;
    const char *dir = in_scratch("t2r");
    make_adapter(FOLDER, "t2r", dir, 0);
    still_model *m = open_with(dir);
    assert_int_equal(tokens_until_read(m, 1, T), 1);
    same_maps(m, dir);
    still_model_free(m);
}

/* Maps are part of what a saved session is bound to, read or not; the bill has them for
 * contexts that fold. */
static void they_count(void **state)
{
    (void)state;
    const char *dir = in_scratch("sum");
    unsigned char early[STI_FINGERPRINT], late[STI_FINGERPRINT];
    still_error e;
    still_bill within, beyond;
    make_adapter(FOLDER, "still", dir, 0);
    still_model *m = open_with(dir);
    must(still_model_bill(m, &STILL_PARAMS(still_session_params, .ctx = 2 * CHUNK),
                          &within, &e),
         &e);
    must(still_model_bill(m, &STILL_PARAMS(still_session_params, .ctx = 2 * CHUNK + 1),
                          &beyond, &e),
         &e);
    assert_int_equal(beyond.weights_resident - within.weights_resident,
                     m->adapter->maps.bytes);
    assert_int_equal(beyond.runtime, within.runtime);
    sti_model_fingerprint(m, true, early);
    tokens_until_read(m, 1, T);
    sti_model_fingerprint(m, true, late);
    assert_memory_equal(early, late, sizeof early);
    m->adapter->maps_sum[0] ^= 1;
    sti_model_fingerprint(m, true, late);
    assert_memory_not_equal(early, late, sizeof early);
    still_model_free(m);
}

RUN_TESTS_IN(begin, end, cmocka_unit_test(when_a_chunk_retires),
             cmocka_unit_test(a_prompt_reads_them_in_time),
             cmocka_unit_test(at_once_where_tokens_are), cmocka_unit_test(they_count))
