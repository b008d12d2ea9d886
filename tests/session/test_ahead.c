/* Guesses that are computed ahead: what is fed gets the logits that feeding one by one
 * gives, bit for bit, whatever was guessed, at every place of a chunk, for every method. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../run.h"

#include "session/session.h"
#include "still.h"

enum { N = 110, CHUNK = 8, VOCAB = 384, ROLLBACK = 3 };

static still_model *open_model(const char *name, const char *backend)
{
    char path[512];
    still_model *m;
    still_error e;
    snprintf(path, sizeof path, FIXTURES "/models/%s", name);
    must(still_model_open(
             path, &STILL_PARAMS(still_model_params, .backend = backend, .threads = 2),
             &m, &e),
         &e);
    return m;
}

static still_method method(const char *name, const char *score)
{
    still_method m;
    still_error e;
    must(still_method_init(&m, name, CHUNK, &e), &e);
    if (score) snprintf(m.score, sizeof m.score, "%s", score);
    return m;
}

/* A method, and whether guesses are computed for it. */
typedef struct setting {
    still_method how;
    bool ahead;
} setting;

static int settings(setting out[16])
{
    int n = 0;
    out[n++] = (setting){method("softmax", NULL), true};
    out[n++] = (setting){method("still", NULL), true};
    out[n++] = (setting){method("still", "distinct"), true};
    out[n++] = (setting){method("lolcats", NULL), true};
    out[n++] = (setting){method("swa", NULL), true};
    out[n] = (setting){method("still", NULL), true};
    out[n].how.per_head = true;
    out[n++].how.cap = 5;
    out[n] = (setting){method("still", "distinct"), true};
    out[n].how.positions = STILL_POSITIONS_CAPPED;
    out[n].how.key_bits = 5;
    out[n].how.value_bits = 3;
    snprintf(out[n++].how.caps, sizeof out->how.caps, "0/1:30,1:7");
    out[n] = (setting){method("still", NULL), true}; /* one layer stays softmax */
    out[n++].how.last_layer = 0;
    out[n++] = (setting){method("still", "received"), false};
    out[n++] = (setting){method("t2r", NULL), false};
    out[n++] = (setting){method("liger", NULL), false};
    out[n++] = (setting){method("supra", NULL), false};
    return n;
}

static still_session *session(still_model *m, const still_method *how, int rollback)
{
    still_session *s;
    still_error e;
    must(still_session_new(m,
                           &STILL_PARAMS(still_session_params, .ctx = N, .batch = 40,
                                         .method = how, .rollback = rollback),
                           &s, &e),
         &e);
    return s;
}

static void make_tokens(int32_t *tok, int n, unsigned seed)
{
    for (int i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        tok[i] = (int32_t)(seed >> 16) % VOCAB;
    }
}

static void same(const still_session *a, const still_session *b)
{
    assert_int_equal(still_session_length(a), still_session_length(b));
    assert_memory_equal(still_session_logits(a), still_session_logits(b),
                        VOCAB * sizeof(float));
}

/* Guesses after tok[at]: the first `right` of them are what comes. */
static int guesses(const int32_t *tok, int at, int right, int n, int32_t *guess)
{
    for (int i = 0; i < n; i++) {
        const int32_t next = at + 1 + i < N ? tok[at + 1 + i] : 0;
        guess[i] = i < right ? next : (next + 1 + i) % VOCAB;
    }
    return n;
}

/* How many guesses after position `at` can be computed: up to the end of its chunk. */
static int possible(const setting *x, int at, int n)
{
    const int left = CHUNK - 1 - at % CHUNK, room = N - 1 - at;
    if (!x->ahead) return 0;
    if (strcmp(x->how.name, "softmax") != 0 && n > left) n = left;
    return n < room ? n : room;
}

static void text_is_the_same(still_model *m, const setting *x, int rollback)
{
    static float logits[N][VOCAB]; /* of the plain session, which is fed before */
    int32_t tok[N], guess[STI_AHEAD_MAX];
    still_error e;
    still_session *plain = session(m, &x->how, rollback),
                  *ahead = session(m, &x->how, rollback);
    uint64_t taken = 0;
    make_tokens(tok, N, 11);
    for (int i = 0; i < N; i++) {
        must(still_session_feed(plain, tok + i, 1, &e), &e);
        memcpy(logits[i], still_session_logits(plain), sizeof logits[i]);
    }
    for (int i = 0, left = 0; i < N; i++) {
        /* 0 to 6 right ones of up to 7, so that they end everywhere in a chunk. */
        const int n = guesses(tok, i, i % 7, 1 + i % 7, guess);
        int rows;
        const uint64_t before = m->uses;
        must(still_session_feed_ahead(ahead, tok[i], guess, n, &rows, &e), &e);
        if (left > 0) { /* it was computed before */
            taken++;
            left--;
            assert_int_equal(m->uses, before);
            assert_int_equal(rows, 0);
            if (left == 0) sti_session_forget_ahead(ahead); /* the next one is wrong */
        } else {
            assert_true(m->uses > before);
            left = possible(x, i, n) < i % 7 ? possible(x, i, n) : i % 7;
            assert_int_equal(rows, 1 + possible(x, i, n));
        }
        assert_int_equal(still_session_length(ahead), i + 1);
        assert_memory_equal(still_session_logits(ahead), logits[i], sizeof logits[i]);
    }
    assert_int_equal(taken > 0, x->ahead);
    /* Boundaries are those of tokens that were fed. */
    int at_plain, at_ahead;
    for (int back = N - 1; back > N - 2 * CHUNK && rollback; back -= 5) {
        const still_status st = still_session_rollback(plain, back, &at_plain, &e);
        assert_int_equal(still_session_rollback(ahead, back, &at_ahead, &e), st);
        if (st != STILL_OK) break;
        assert_int_equal(at_plain, at_ahead);
        must(still_session_feed(plain, tok + 3, 1, &e), &e);
        must(still_session_feed(ahead, tok + 3, 1, &e), &e);
        same(plain, ahead);
    }
    still_session_free(plain);
    still_session_free(ahead);
}

static void every_method_at_every_place(void **state)
{
    (void)state;
    const char *const models[] = {"llama3", "mistral-window"};
    const char *const backends[] = {"cpu", "ref"};
    setting x[16];
    const int n = settings(x);
    for (int k = 0; k < 4; k++) {
        still_model *m = open_model(models[k / 2], backends[k % 2]);
        for (int i = 0; i < n; i++) {
            text_is_the_same(m, &x[i], 0);
            text_is_the_same(m, &x[i], ROLLBACK);
        }
        still_model_free(m);
    }
}

/* Guesses do not survive anything else that happens to the session or to the model. */
static void other_calls_drop_guesses(void **state)
{
    (void)state;
    enum { BEFORE = 21 };
    still_model *m = open_model("llama3", "cpu");
    const still_method how = method("still", NULL);
    still_error e;
    int32_t tok[N], other[N];
    make_tokens(tok, N, 3);
    make_tokens(other, N, 4);
    for (int what = 0; what < 8; what++) {
        still_session *a = session(m, &how, ROLLBACK), *b = session(m, &how, ROLLBACK),
                      *third = session(m, &how, 0), *fork = NULL, *wide = NULL;
        still_snapshot *elsewhere;
        must(still_session_feed(a, other, BEFORE + 1, &e), &e);
        must(still_session_snapshot(a, &elsewhere, &e), &e);
        still_session_reset(a);
        must(still_session_feed(a, tok, BEFORE, &e), &e);
        must(still_session_feed(b, tok, BEFORE, &e), &e);
        must(still_session_feed_ahead(a, tok[BEFORE], tok + BEFORE + 1, 2, NULL, &e),
             &e);
        must(still_session_feed(b, tok + BEFORE, 1, &e), &e);
        assert_int_equal(a->ahead.n, 2);
        int at = BEFORE + 1;
        switch (what) {
        case 0: /* another session computes */
            must(still_session_feed(third, other, 3, &e), &e);
            break;
        case 1: /* a snapshot of another past with the same length */
            must(still_session_restore(a, elsewhere, &e), &e);
            must(still_session_restore(b, elsewhere, &e), &e);
            break;
        case 2:
            must(still_session_rollback(a, BEFORE, &at, &e), &e);
            must(still_session_rollback(b, BEFORE, &at, &e), &e);
            break;
        case 3: /* several tokens at once, of which the first was guessed */
            must(still_session_feed(a, tok + at, 2, &e), &e);
            must(still_session_feed(b, tok + at, 2, &e), &e);
            at += 2;
            break;
        case 4: /* a copy has the past, not the guesses */
            must(still_session_fork(a, &fork, &e), &e);
            assert_int_equal(fork->ahead.n, 0);
            must(still_session_feed(fork, tok + at, 1, &e), &e);
            break;
        case 5: /* scratch that grows lies elsewhere */
            must(still_session_new(m,
                                   &STILL_PARAMS(still_session_params, .ctx = 4096,
                                                 .batch = 2000, .method = &how),
                                   &wide, &e),
                 &e);
            break;
        case 6: /* a step with others */
            must(still_session_step((still_session *[]){a, third},
                                    (int32_t[]){tok[at], 5}, 2, &e),
                 &e);
            must(still_session_feed(b, tok + at++, 1, &e), &e);
            break;
        default:
            still_session_reset(a);
            still_session_reset(b);
            at = 0;
        }
        must(still_session_feed(a, tok + at, 1, &e), &e);
        must(still_session_feed(b, tok + at, 1, &e), &e);
        same(a, b);
        if (fork) same(fork, b);
        still_session_free(a);
        still_session_free(b);
        still_session_free(third);
        still_session_free(fork);
        still_session_free(wide);
        still_snapshot_free(elsewhere);
    }
    still_model_free(m);
}

/* A guess that is not in the vocabulary, and a full session, are errors that change
 * nothing. */
static void refuses_what_feed_refuses(void **state)
{
    (void)state;
    still_model *m = open_model("llama3", "cpu");
    still_session *a = session(m, NULL, 0);
    still_error e;
    int32_t tok[N];
    make_tokens(tok, N, 5);
    must(still_session_feed(a, tok, 4, &e), &e);
    assert_int_equal(still_session_feed_ahead(a, 1, (int32_t[]){2, VOCAB}, 2, NULL, &e),
                     STILL_E_ARG);
    assert_int_equal(still_session_feed_ahead(a, -1, (int32_t[]){2, 3}, 2, NULL, &e),
                     STILL_E_ARG);
    assert_int_equal(still_session_length(a), 4);
    must(still_session_feed(a, tok, N - 4, &e), &e);
    assert_int_equal(still_session_feed_ahead(a, 1, (int32_t[]){2, 3}, 2, NULL, &e),
                     STILL_E_LIMIT);
    still_session_free(a);
    still_model_free(m);
}

/* What the command does: a text sampled with guesses is the one without, and a model that
 * repeats itself is guessed. */
static void samples_the_same_text(void **state)
{
    (void)state;
    enum { PROMPT = 20 };
    still_model *m = open_model("llama3", "cpu");
    setting x[16];
    const int n = settings(x);
    uint64_t passes[2] = {0, 0};
    for (int i = 0; i < n; i++)
        for (int hot = 0; hot < 2; hot++) {
            int32_t text[2][N];
            for (int with = 0; with < 2; with++) {
                still_session *s = session(m, &x[i].how, 0);
                still_sampler *sp;
                still_lookup *l;
                still_error e;
                int32_t guess[STI_AHEAD_MAX];
                must(still_sampler_new(
                         &STILL_PARAMS(
                             still_sampler_params, .temperature = hot ? 0.05f : 0,
                             .repeat_penalty = hot ? 0.9f : 0, /* it likes repeating */
                             .seed = 9),
                         VOCAB, &sp, &e),
                     &e);
                must(still_lookup_new(6, &l, &e), &e);
                for (int t = 0; t < PROMPT; t++) text[with][t] = 40 + t % 5;
                for (int t = 0; t < PROMPT; t++) still_lookup_accept(l, text[with][t]);
                must(still_session_feed(s, text[with], PROMPT, &e), &e);
                const uint64_t before = m->uses;
                for (int t = PROMPT; t < N; t++) {
                    int32_t id;
                    must(still_sampler_sample(sp, still_session_logits(s), &id, &e),
                         &e);
                    still_sampler_accept(sp, id);
                    still_lookup_accept(l, id);
                    text[with][t] = id;
                    const int k = with ? still_lookup_guess(l, guess) : 0;
                    must(still_session_feed_ahead(s, id, guess, k, NULL, &e), &e);
                }
                passes[with] += m->uses - before;
                still_lookup_free(l);
                still_sampler_free(sp);
                still_session_free(s);
            }
            assert_memory_equal(text[0], text[1], sizeof text[0]);
        }
    assert_true(passes[1] < passes[0]);
    still_model_free(m);
}

RUN_TESTS(cmocka_unit_test(every_method_at_every_place),
          cmocka_unit_test(other_calls_drop_guesses),
          cmocka_unit_test(refuses_what_feed_refuses),
          cmocka_unit_test(samples_the_same_text))
