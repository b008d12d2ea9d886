/* The worked example of docs/methods.md: eight tokens, C = 2, lambda = 1, cap 1. Its
 * tables are computed here, by both forms of the reference, and compared cell by cell
 * with those of the page. */
#include <stdio.h>

#include "../../hybrid_problem.h"

enum { T = 8, COLUMNS = 8 };
static const double key[T] = {2, 1, 3, 0.5, 1, 3, 2, 1};

typedef struct row {
    char cell[COLUMNS][64];
} row;

/* ---- The page ------------------------------------------------------------ */

static char *read_page(void)
{
    FILE *f = fopen(FIXTURES "/../../docs/methods.md", "rb");
    assert_non_null(f);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    const long n = ftell(f);
    rewind(f);
    char *text = calloc((size_t)n + 1, 1);
    assert_non_null(text);
    assert_int_equal(fread(text, 1, (size_t)n, f), n);
    fclose(f);
    return text;
}

/* "| a | b |": its cells; returns how many. */
static int split_row(const char *line, row *r)
{
    int n = 0;
    memset(r, 0, sizeof *r);
    while (*line == '|' && line[1] == ' ' && n < COLUMNS) {
        const char *end = strstr(line + 1, " |");
        assert_non_null(end);
        const size_t length = (size_t)(end - line - 2);
        assert_true(length < sizeof r->cell[n]);
        memcpy(r->cell[n++], line + 2, length);
        line = end + 1;
    }
    return n;
}

/* The T rows of the table that follows `heading`. */
static void read_table(const char *page, const char *heading, row *out)
{
    const char *at = strstr(page, heading);
    assert_non_null(at);
    at = strstr(at, "\n| 0 |");
    for (int t = 0; t < T; t++) {
        assert_non_null(at);
        assert_int_equal(split_row(at + 1, &out[t]), COLUMNS);
        at = strchr(at + 1, '\n');
    }
}

/* ---- The operator -------------------------------------------------------- */

/* One query and kv head of size 1: every query is 1, so that logits are keys. */
static problem eight_tokens(sti_score_kind score)
{
    sti_hybrid_settings set = preset("still", 2);
    set.select = 1;
    set.cap = 1;
    set.score = score;
    problem p = make(set, (sti_hybrid_shape){1, 1, 1, 1}, T, 1);
    for (int t = 0; t < T; t++) {
        p.q[t] = 1;
        p.k[t] = key[t];
    }
    return p;
}

static void add(char *cell, int token)
{
    const size_t n = strlen(cell);
    snprintf(cell + n, 64 - n, "%s%d", n ? " " : "", token);
}

/* Row t, after the recurrent form has taken token t. before: the salient token that
 * query t - 1 saw, or -1. */
static void describe_row(const problem *p, int t, int before, row *r)
{
    const int C = p->set.chunk, now = t / C;
    enum { STEP, KEY, SCORE, SELECTED, EVICTED, WINDOW, SALIENT, FOLDED };
    memset(r, 0, sizeof *r);
    snprintf(r->cell[STEP], 64, "%d", t);
    snprintf(r->cell[KEY], 64, "%g", key[t]);
    snprintf(r->cell[SCORE], 64, "%.2f", p->score[t]);

    const bool retires = t % C == 0 && now >= 2;
    int selected = -1;
    if (retires) {
        const int first = (now - 2) * C;
        sti_ref_candidate chunk[2] = {{p->score[first], first, false},
                                      {p->score[first + 1], first + 1, false}};
        sti_ref_select_top(chunk, C, p->set.select);
        assert_int_equal(chunk[0].stays + chunk[1].stays, 1);
        selected = chunk[0].stays ? first : first + 1;
        add(r->cell[SELECTED], selected);
    }
    for (int j = 0; j <= t; j++) {
        const bool salient = p->st.sal_count[0] == 1 && p->st.sal_pos[0] == j;
        const bool folded = p->fold[j] >= 0;
        assert_false(salient && folded);
        add(r->cell[folded ? FOLDED : salient ? SALIENT : WINDOW], j);
        if (retires && p->fold[j] == now && (j == selected || j == before))
            add(r->cell[EVICTED], j);
        /* The parallel form's number says the same of every query. */
        const sti_place place = sti_hybrid_place(&p->set, t, j, p->fold_parallel[j]);
        assert_int_equal(place, folded    ? STI_PLACE_LINEAR
                                : salient ? STI_PLACE_SALIENT
                                          : STI_PLACE_WINDOW);
    }
    for (int i = 0; i < COLUMNS; i++)
        if (!r->cell[i][0]) strcpy(r->cell[i], "–");
}

static void check_table(sti_score_kind score, const char *heading)
{
    row page[T], got;
    char *text = read_page();
    read_table(text, heading, page);
    problem p = eight_tokens(score);
    run_parallel(&p);
    for (int t = 0; t < T; t++) {
        const int before = p.st.sal_count[0] ? p.st.sal_pos[0] : -1;
        feed(&p, t, 1);
        describe_row(&p, t, before, &got);
        for (int i = 0; i < COLUMNS; i++)
            if (strcmp(got.cell[i], page[t].cell[i]) != 0)
                fail_msg("%s, row %d, column %d: '%s' on the page, computed '%s'",
                         heading, t, i, page[t].cell[i], got.cell[i]);
    }
    drop(&p);
    free(text);
}

static void test_tables(void **state)
{
    (void)state;
    check_table(STI_SCORE_S3, "With the score `s3`");
    check_table(STI_SCORE_KEYNORM, "With the score `keynorm`");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_tables)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
