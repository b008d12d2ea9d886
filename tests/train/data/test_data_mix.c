/* test_data_mix.c - the order of a run: shuffles, weights, and what a digest covers. */
#include "../../run.h"
#include "data_files.h"

static void shuffles_are_permutations(void **state)
{
    (void)state;
    static const uint64_t sizes[] = {1, 2, 3, 4, 5, 16, 17, 100, 1000, 4097, 65536};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        uint64_t n = sizes[s];
        uint8_t *seen = calloc(n, 1);
        for (uint64_t i = 0; i < n; i++) {
            uint64_t at = sti_mix_shuffle(n, 7, 0, 3, i);
            assert_true(at < n);
            assert_int_equal(seen[at]++, 0);
        }
        free(seen);
    }
    uint64_t large = ((uint64_t)1 << 40) + 1;
    assert_true(sti_mix_shuffle(large, 1, 2, 3, large - 1) < large);
}

/* The share of places where two orders of n agree; 1/n if they have nothing to do with
 * one another. */
static double agreement(uint64_t n, const uint64_t a[3], const uint64_t b[3])
{
    uint64_t same = 0;
    for (uint64_t i = 0; i < n; i++)
        same += sti_mix_shuffle(n, a[0], a[1], a[2], i) ==
                sti_mix_shuffle(n, b[0], b[1], b[2], i);
    return (double)same / (double)n;
}

static void shuffles_differ_by_seed_file_and_pass(void **state)
{
    (void)state;
    enum { N = 2000 };
    static const uint64_t base[3] = {5, 1, 9};
    for (int k = 0; k < 3; k++) {
        uint64_t other[3] = {base[0], base[1], base[2]};
        other[k]++;
        assert_true(agreement(N, base, other) < 8.0 / N);
    }
    double moved = 0; /* far from where it was: a third of n on average */
    for (uint64_t i = 0; i < N; i++)
        moved += llabs((long long)sti_mix_shuffle(N, 1, 0, 0, i) - (long long)i);
    assert_true(moved / N > .3 * N && moved / N < .37 * N);
    /* A pair that was adjacent is adjacent again no more often than chance has it. */
    int adjacent = 0;
    for (uint64_t i = 0; i + 1 < N; i++)
        adjacent +=
            sti_mix_shuffle(N, 1, 0, 0, i) + 1 == sti_mix_shuffle(N, 1, 0, 0, i + 1);
    assert_true(adjacent < 8);
}

/* Draws come one by one for each file, in exact numbers, never far off their share. */
static void expect_even(const uint64_t *weight, int n, uint64_t from, uint64_t count)
{
    uint64_t sum = weight[0], drawn[8] = {0}, nth;
    for (int f = 1; f < n; f++) sum += weight[f];
    assert_int_equal(from % sum, 0);
    for (int f = 0; f < n; f++) drawn[f] = from / sum * weight[f];
    for (uint64_t i = from; i < from + count; i++) {
        int f = sti_mix_draw(weight, n, i, &nth);
        assert_in_range(f, 0, n - 1);
        assert_int_equal(nth, drawn[f]++);
        for (int g = 0; g < n; g++) {
            double share = (double)(i + 1 - from) * (double)weight[g] / (double)sum;
            double got = (double)(drawn[g] - from / sum * weight[g]);
            assert_true(share - got < n / 2.0 + 1 && got - share < n / 2.0 + 1);
        }
    }
    if (count == sum)
        for (int f = 0; f < n; f++)
            assert_int_equal(drawn[f], (from / sum + 1) * weight[f]);
}

static void mixes_are_exact(void **state)
{
    (void)state;
    static const uint64_t one[] = {5}, even[] = {1, 1, 1}, odd[] = {7, 1, 3, 12},
                          skewed[] = {1000000, 1, 30000},
                          many[] = {1, 2, 3, 4, 5, 6, 7, 8},
                          huge[] = {(uint64_t)1 << 39, (uint64_t)3 << 37};
    expect_even(one, 1, 0, 5);
    expect_even(even, 3, 0, 3);
    expect_even(odd, 4, 0, 23);
    expect_even(odd, 4, 23 * 1000000007ull, 23);
    expect_even(many, 8, 0, 36);
    expect_even(many, 8, 36ull << 50, 36);
    expect_even(skewed, 3, 0, 40000);
    expect_even(huge, 2, 0, 2000);
    expect_even(huge, 2, (huge[0] + huge[1]) * 12345, 2000);
}

/* ---- Through the object -------------------------------------------------- */

/* Files of the documents "100000", "100001", ... of which each is a sequence. */
static sti_data *open_two(const still_tokenizer *tk, double w0, double w1,
                          uint64_t seed, double held_out)
{
    enum { FIRST = 30, SECOND = 10 };
    static char path[2][64];
    sti_data_source s[2] = {{path[0], w0}, {path[1], w1}};
    for (int f = 0; f < 2; f++) {
        sti_buf b = {0};
        snprintf(path[f], sizeof path[f], "%s/%d", dir, f);
        for (int i = 0; i < (f ? SECOND : FIRST); i++)
            sti_buf_printf(&b, "{\"text\":\"%d\"}\n", 100000 * (f + 1) + i);
        put_bytes(path[f], b.p, b.n);
        sti_buf_free(&b);
    }
    sti_data *d = open_params(
        tk,
        (sti_data_params){
            .source = s, .n_sources = 2, .seq = 7, .seed = seed, .held_out = held_out});
    unlink(path[0]);
    unlink(path[1]);
    return d;
}

static int number(const still_tokenizer *tk, const int32_t ids[7])
{
    char text[64] = "";
    for (int t = 0; t < 6; t++) {
        size_t n;
        const char *p = still_tokenizer_piece(tk, ids[t], false, &n);
        strncat(text, p, n);
    }
    return atoi(text);
}

static void every_sequence_once_by_size(void **state)
{
    (void)state;
    still_tokenizer *tk = tokenizer(VOCAB("smollm.json"));
    sti_data *d = open_two(tk, 0, 0, 3, 0), *other = open_two(tk, 0, 0, 4, 0);
    int seen[2][30] = {{0}}, same = 0, order[80];
    assert_int_equal(sti_data_get_report(d)->train, 40);
    for (uint64_t i = 0; i < 80; i++) {
        int32_t ids[7];
        if (i == 40) /* a pass is complete */
            for (int k = 0; k < 40; k++) assert_int_equal(seen[k / 30][k % 30], 1);
        sti_data_train(d, i, ids, NULL);
        order[i] = number(tk, ids);
        seen[order[i] / 100000 - 1][order[i] % 100000]++;
        sti_data_train(other, i, ids, NULL);
        same += number(tk, ids) == order[i];
    }
    assert_true(same < 20); /* by chance: 80/30 to 80/10 */
    same = 0;
    for (int i = 0; i < 40; i++) same += order[i] == order[40 + i];
    assert_true(same < 12);
    for (int k = 0; k < 40; k++) assert_int_equal(seen[k / 30][k % 30], 2);
    for (uint64_t i = 80; i-- > 0;) { /* any draw, in any order of asking */
        int32_t ids[7];
        sti_data_train(d, i, ids, NULL);
        assert_int_equal(number(tk, ids), order[i]);
    }
    sti_data_free(d);
    sti_data_free(other);
    still_tokenizer_free(tk);
}

static void weights_are_respected(void **state)
{
    (void)state;
    still_tokenizer *tk = tokenizer(VOCAB("smollm.json"));
    sti_data *d = open_two(tk, .1, .3, 0, .1); /* 27 and 9 are left to train on */
    int drawn[2] = {0};
    for (uint64_t i = 0; i < 4000; i++) {
        int32_t ids[7];
        sti_data_train(d, i, ids, NULL);
        int n = number(tk, ids);
        assert_true(n % 100000 < (n < 200000 ? 27 : 9));
        drawn[n / 100000 - 1]++;
    }
    assert_in_range(drawn[0], 999, 1001);
    int32_t ids[7]; /* validation in file order */
    static const int held[] = {100027, 100028, 100029, 200009};
    assert_int_equal(sti_data_get_report(d)->valid, 4);
    for (uint64_t i = 0; i < 4; i++) {
        sti_data_valid(d, i, ids, NULL);
        assert_int_equal(number(tk, ids), held[i]);
    }
    sti_data_free(d);
    still_tokenizer_free(tk);
}

static void digest_covers_the_order(void **state)
{
    (void)state;
    still_tokenizer *tk = tokenizer(VOCAB("smollm.json"));
    static const struct {
        double w0, w1;
        uint64_t seed;
        double held_out;
    } cases[] = {{0, 0, 0, 0}, {1, 1, 0, 0}, {1, 2, 0, 0}, {0, 0, 1, 0}, {0, 0, 0, .2}};
    unsigned char digest[5][STI_DATA_DIGEST], again[STI_DATA_DIGEST];
    for (int i = 0; i < 5; i++) {
        for (int twice = 0; twice < 2; twice++) {
            sti_data *d = open_two(tk, cases[i].w0, cases[i].w1, cases[i].seed,
                                   cases[i].held_out);
            sti_data_digest(d, twice ? again : digest[i]);
            sti_data_free(d);
        }
        assert_memory_equal(again, digest[i], sizeof again);
        for (int k = 0; k < i; k++)
            assert_memory_not_equal(digest[k], digest[i], sizeof again);
    }
    still_tokenizer_free(tk);
}

RUN_TESTS_IN(make_dir, remove_dir, cmocka_unit_test(shuffles_are_permutations),
             cmocka_unit_test(shuffles_differ_by_seed_file_and_pass),
             cmocka_unit_test(mixes_are_exact),
             cmocka_unit_test(every_sequence_once_by_size),
             cmocka_unit_test(weights_are_respected),
             cmocka_unit_test(digest_covers_the_order))
