/* What items become before a model sees them, and after: tokens by the rules, the choice
 * between sums, and figures. */
#include "../run.h"
#include "eval_model.h"

#include <math.h>

/* ---- Tokens -------------------------------------------------------------- */

static sti_ids encode(const still_tokenizer *tk, const char *context,
                      const char *continuation, int limit)
{
    still_error e;
    sti_ids ids;
    const sti_option o = {context, continuation, 0};
    must(sti_encode_options(tk, &o, 1, limit, &ids, &e), &e);
    return ids;
}

static int count(const still_tokenizer *tk, const char *text, unsigned flags)
{
    size_t n;
    still_error e;
    must(still_tokenizer_encode(tk, text, strlen(text), flags, NULL, 0, &n, &e), &e);
    return (int)n;
}

static void same_ids(const sti_ids *a, const sti_ids *b)
{
    assert_int_equal(a->n, b->n);
    assert_memory_equal(a->id, b->id, (size_t)a->n * sizeof *a->id);
}

/* Rules 2 and 3: one text, and a border that lies where the context alone ends. */
static void borders(void **state)
{
    (void)state;
    still_error e;
    still_tokenizer *tk;
    must(still_tokenizer_open(FIXTURES "/vocab/smollm.json", &tk, &e), &e);
    sti_ids a = encode(tk, "The answer:", " the cat", 100),
            b = encode(tk, "The answer: ", "the cat", 100),
            c = encode(tk, "The answer:  \n", " the", 100);
    same_ids(&a, &b); /* white space moves over, the text is the same */
    assert_int_equal(a.n_context, count(tk, "The answer:", 0));
    assert_int_equal(b.n_context, a.n_context);
    assert_int_equal(c.n_context, a.n_context);
    assert_int_equal(c.n, count(tk, "The answer:  \n the", 0));
    /* A merge across the border: "th" + "e" is one token of the whole text, so that
     * fewer tokens are the continuation's than it has alone. */
    sti_ids d = encode(tk, "in th", "e end", 100);
    assert_int_equal(d.n, count(tk, "in the end", 0));
    assert_int_equal(d.n_context, count(tk, "in th", 0));
    assert_true(count(tk, "in th", 0) + count(tk, "e end", 0) > d.n);
    free(a.id), free(b.id), free(c.id), free(d.id);
    still_tokenizer_free(tk);
}

/* Rules 4 and 6: BOS where the tokenizer adds it; nothing before a text is BOS or EOS.
 */
static void beginnings(void **state)
{
    (void)state;
    still_error e;
    still_tokenizer *tk;
    must(still_tokenizer_open(FIXTURES "/vocab/spm.model", &tk, &e), &e);
    assert_true(still_tokenizer_adds_bos(tk));
    sti_ids a = encode(tk, "Hello", " there", 100), b = encode(tk, "", " there", 100),
            c = encode(tk, " \n", "there", 100);
    assert_int_equal(a.id[0], still_tokenizer_bos(tk));
    assert_int_equal(a.n_context, count(tk, "Hello", STILL_ENCODE_BOS));
    assert_int_equal(b.id[0], still_tokenizer_bos(tk));
    assert_int_equal(b.n, 1 + count(tk, " there", 0));
    assert_int_equal(b.n_context, 1);
    assert_int_equal(c.n_context, 1);
    assert_int_equal(c.n, 1 + count(tk, " \nthere", 0));
    free(a.id), free(b.id), free(c.id);
    still_tokenizer_free(tk);
    must(still_tokenizer_open(FIXTURES "/vocab/smollm.json", &tk, &e), &e);
    assert_false(still_tokenizer_adds_bos(tk));
    a = encode(tk, "Hello", " there", 100);
    assert_int_equal(a.n, count(tk, "Hello there", 0));
    free(a.id);
    still_tokenizer_free(tk);
}

/* Rule 5: the last limit + 1 tokens, of which the last is target only. */
static void too_long(void **state)
{
    (void)state;
    const still_tokenizer *tk = still_model_tokenizer(model);
    const char *context = "a b c d e f g h i j k l m n o p";
    sti_ids whole = encode(tk, context, " q r", 1000),
            cut = encode(tk, context, " q r", 8);
    const int over = whole.n - 9;
    assert_true(over > 0 && !whole.cut && cut.cut);
    assert_int_equal(cut.n, 9);
    assert_memory_equal(cut.id, whole.id + over, 9 * sizeof *cut.id);
    assert_int_equal(cut.n_context, whole.n_context - over);
    free(cut.id);
    cut = encode(tk, context, " q r s t u v w x y z", 4); /* no room for the context */
    assert_int_equal(cut.n, 5);
    assert_int_equal(cut.n_context, 1);
    free(cut.id);
    free(whole.id);
}

/* ---- Choosing ------------------------------------------------------------ */

static void picking(void **state)
{
    (void)state;
    const double sum[] = {-4, -3, -3, -9};
    const int length[] = {8, 2, 2, 27};
    assert_int_equal(sti_record_pick(sum, NULL, 4), 1);   /* a tie: the lowest index */
    assert_int_equal(sti_record_pick(sum, length, 4), 3); /* -0.5 -1.5 -1.5 -0.33 */
    assert_int_equal(sti_record_pick((double[]){-1, -2}, (int[]){2, 4}, 2), 0);
    assert_int_equal(sti_record_pick((double[]){-5, -1}, (int[]){0, 1}, 2), 1);
}

static void figures(void **state)
{
    (void)state;
    sti_tally t = {0};
    still_eval_result r;
    static const char *const lines[] = {"{\"correct\":true,\"correct_norm\":false}",
                                        "{\"correct\":true,\"correct_norm\":true}",
                                        "{\"correct\":false,\"correct_norm\":false,"
                                        "\"cut\":true}",
                                        "{\"correct\":true,\"correct_norm\":false}"};
    for (int i = 0; i < 4; i++) {
        json_t *o = json_loads(lines[i], 0, NULL);
        sti_tally_add(&t, o);
        json_decref(o);
    }
    sti_tally_result(&t, &r);
    assert_int_equal(r.n, 4);
    assert_int_equal(r.cut, 1);
    assert_float_equal(r.acc, 0.75, 1e-12);
    assert_float_equal(r.acc_stderr, 0.25, 1e-12); /* sd 0.5, n 4 */
    assert_float_equal(r.acc_norm, 0.25, 1e-12);
    assert_true(isnan(r.perplexity));
    t = (sti_tally){0};
    for (int i = 0; i < 2; i++) {
        json_t *o = json_pack("{s:f,s:f}", "score", 0.25 + 0.5 * i, "nll", 1.0 + 2 * i);
        sti_tally_add(&t, o);
        json_decref(o);
    }
    sti_tally_result(&t, &r);
    assert_float_equal(r.acc, 0.5, 1e-12);
    assert_float_equal(r.acc_stderr, 0.25, 1e-12);
    assert_float_equal(r.perplexity, exp(2), 1e-9);
    assert_true(isnan(r.acc_norm));
}

RUN_TESTS_IN(open_model, close_model, cmocka_unit_test(borders),
             cmocka_unit_test(beginnings), cmocka_unit_test(too_long),
             cmocka_unit_test(picking), cmocka_unit_test(figures))
