/* test_state_forged.c - saved states with a right checksum and counts or positions that
 * cannot be. Each breaks one rule and no other, so a rule that is no longer checked lets
 * one of them in. The heads' caps differ: a count that fits one list does not fit another. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>

#include "../eval/tiny.h"
#include "../run.h"
#include "session/session.h"

enum { CHUNK = 8, N = 64, LENGTH = 48, LARGE = 12, SMALL = 4 };

static char path[] = "/tmp/still-forged-XXXXXX";
static unsigned char *bytes; /* the file as it was saved */
static size_t n_bytes;
static still_model *model;
static still_session *saved;

static still_session *session(void)
{
    still_session *s;
    still_error e;
    still_method how = method_of("still", CHUNK);
    how.select = CHUNK;
    how.cap = LARGE;
    snprintf(how.caps, sizeof how.caps, "0-1/0:%d", SMALL);
    must(still_session_new(
             model,
             &STILL_PARAMS(still_session_params, .ctx = N, .batch = 16, .method = &how),
             &s, &e),
         &e);
    return s;
}

static int begin(void **state)
{
    (void)state;
    still_error e;
    int32_t tok[LENGTH];
    for (int i = 0; i < LENGTH; i++) tok[i] = (7 + i * 5) % VOCAB;
    assert_true(close(mkstemp(path)) == 0);
    model = open_tiny("cpu");
    saved = session();
    must(still_session_feed(saved, tok, LENGTH, &e), &e);
    must(still_session_save(saved, path, &e), &e);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    n_bytes = (size_t)ftell(f);
    rewind(f);
    bytes = malloc(n_bytes);
    assert_non_null(bytes);
    assert_int_equal(fread(bytes, 1, n_bytes, f), n_bytes);
    fclose(f);
    return 0;
}

static int end(void **state)
{
    (void)state;
    unlink(path);
    free(bytes);
    still_session_free(saved);
    still_model_free(model);
    return 0;
}

/* Loads the file with size bytes at `at` replaced, under a right checksum. */
static still_status load_with(size_t at, const void *value, size_t size, still_error *e)
{
    unsigned char *forged = malloc(n_bytes);
    assert_non_null(forged);
    memcpy(forged, bytes, n_bytes);
    assert_true(at + size <= n_bytes - 4);
    memcpy(forged + at, value, size);
    const uint32_t crc = (uint32_t)crc32_z(crc32(0, NULL, 0), forged, n_bytes - 4);
    memcpy(forged + n_bytes - 4, &crc, 4);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(forged, 1, n_bytes, f), n_bytes);
    fclose(f);
    free(forged);
    still_session *s = session();
    const still_status st = still_session_load(s, path, e);
    assert_int_equal(still_session_length(s), st == STILL_OK ? LENGTH : 0);
    still_session_free(s);
    return st;
}

/* Where a number of the session's state lies in the file. */
static size_t place(const void *p)
{
    const size_t state = n_bytes - 4 - saved->state_bytes;
    const size_t at = (size_t)((const char *)p - (const char *)saved->state);
    assert_true(at < saved->state_bytes);
    return state + at;
}

static void expect_refusal(const char *what, const void *p, const void *value,
                           size_t size)
{
    still_error e = {0};
    const still_status st = load_with(place(p), value, size, &e);
    if (st != STILL_E_FORMAT || !strstr(e.text, "its counts of tokens cannot be"))
        fail_msg("%s: status %d, \"%s\"", what, st, e.text);
}

static void what_was_saved_loads(void **state)
{
    (void)state;
    still_error e;
    const int32_t *count = saved->layer[1].hybrid.sal_count;
    assert_int_equal(count[0], SMALL); /* both lists are full */
    assert_int_equal(count[1], LARGE);
    must(load_with(place(count), count, sizeof *count, &e), &e);
    const int32_t one = 1; /* and a shorter list is a list, too */
    must(load_with(place(count), &one, sizeof one, &e), &e);
    const int32_t last = LENGTH - 1, first = 0;
    must(load_with(place(saved->layer[1].hybrid.sal_pos), &last, 4, &e), &e);
    must(load_with(place(saved->layer[1].hybrid.sal_pos), &first, 4, &e), &e);
    const int64_t none = 0, all = LENGTH;
    must(load_with(place(saved->layer[1].hybrid.folded), &none, 8, &e), &e);
    must(load_with(place(saved->layer[1].hybrid.folded), &all, 8, &e), &e);
}

static void counts(void **state)
{
    (void)state;
    const int layers = model->cfg.layers;
    for (int l = 0; l < layers; l++) {
        const int32_t *count = saved->layer[l].hybrid.sal_count;
        const int32_t less = -1, more = SMALL + 1, least = INT32_MIN;
        expect_refusal("a negative count", &count[0], &less, 4);
        expect_refusal("a negative count", &count[1], &least, 4);
        /* The slot behind the small list is the large one's first and has a position. */
        expect_refusal("a count above the head's cap", &count[0], &more, 4);
    }
}

static void positions(void **state)
{
    (void)state;
    const int32_t *pos = saved->layer[1].hybrid.sal_pos;
    const int32_t before = -1, behind = LENGTH;
    for (int i = 0; i < SMALL + LARGE; i += SMALL + LARGE - 1) {
        expect_refusal("a position before the text", &pos[i], &before, 4);
        expect_refusal("a position behind the text", &pos[i], &behind, 4);
    }
}

static void folded(void **state)
{
    (void)state;
    const int64_t *folded = saved->layer[1].hybrid.folded;
    const int64_t less = -1, more = LENGTH + 1;
    for (int s = 0; s < 2; s++) {
        expect_refusal("a negative number of folded tokens", &folded[s], &less, 8);
        expect_refusal("more folded tokens than there were", &folded[s], &more, 8);
    }
}

/* The header's own numbers. */
static void header(void **state)
{
    (void)state;
    static const struct {
        size_t at, size;
        uint64_t value;
        still_status code;
        const char *says;
    } wrong[] = {
        {8, 4, 1, STILL_E_UNSUPPORTED, "version 1 of the format"},
        {12, 4, STI_SETTINGS_LINE, STILL_E_FORMAT, "settings end outside"},
        {12, 4, 1, STILL_E_ARG, "saved with '"},
        {16, 1, 0xA5, STILL_E_ARG, "another model"},
        {48, 8, N + 1, STILL_E_LIMIT, "holds 65 tokens"},
        {48, 8, UINT64_MAX, STILL_E_LIMIT, "the session's context is 64"},
        {56, 8, 64, STILL_E_ARG, "holds 64 bytes of state"},
        {64, 8, 1, STILL_E_ARG, "bytes of state"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        still_error e = {0};
        const still_status st =
            load_with(wrong[i].at, &wrong[i].value, wrong[i].size, &e);
        if (st != wrong[i].code || !strstr(e.text, wrong[i].says))
            fail_msg("byte %zu: status %d, \"%s\"", wrong[i].at, st, e.text);
    }
}

RUN_TESTS_IN(begin, end, cmocka_unit_test(what_was_saved_loads),
             cmocka_unit_test(counts), cmocka_unit_test(positions),
             cmocka_unit_test(folded), cmocka_unit_test(header))
