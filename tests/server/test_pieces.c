/* Pieces of prompts on machines whose passes cost this and that. */
#include "../run.h"

#include "server/pieces.h"

typedef struct machine {
    double fixed, each; /* seconds of a pass, of each of its tokens */
    uint64_t noise;     /* a tenth up or down; 0: none */
} machine;

static double take(machine *m, int n)
{
    double by = 1;
    if (m->noise) {
        m->noise = m->noise * 6364136223846793005u + 1442695040888963407u;
        by += 0.2 * (double)(m->noise >> 40) / (1 << 24) - 0.1;
    }
    return by * (m->fixed + n * m->each);
}

/* Reads `pieces` of them, `left` seconds each; returns tokens a piece, and those pieces
 * that took more than a fifth too long. */
static double read_some(srv_pieces *p, machine *m, double left, int pieces, int *late)
{
    int64_t all = 0;
    *late = 0;
    for (int i = 0; i < pieces; i++) {
        const int n = srv_pieces_fit(p, left);
        const double seconds = take(m, n);
        assert_true(n >= SRV_LEAST_PIECE && n <= SRV_WHOLE_PIECE &&
                    n % SRV_LEAST_PIECE == 0);
        srv_pieces_note(p, n, seconds);
        all += n;
        *late += seconds > 1.2 * left;
    }
    return (double)all / pieces;
}

/* A step of two sessions takes 0.76 ms, any piece more than that: it is worth its time
 * all the same, whatever the first ones took. */
static void passes_cost_more_than_tokens(void **state)
{
    (void)state;
    static const double first[] = {0, 0.3};
    for (int noisy = 0; noisy < 2; noisy++)
        for (int i = 0; i < 2; i++) {
            machine m = {.fixed = 0.0022, .each = 0.000004, .noise = (uint64_t)noisy};
            srv_pieces p = {0};
            int late;
            if (first[i] > 0) {
                srv_pieces_note(&p, 8, take(&m, 8));
                srv_pieces_note(&p, 16, first[i]);
            }
            (void)read_some(&p, &m, 1.25 * 0.00076, 300, &late);
            const double n = read_some(&p, &m, 1.25 * 0.00076, 300, &late);
            if (n < 128) fail_msg("%g tokens a piece, %d %d", n, noisy, i);
        }
}

/* Where tokens cost the time, pieces keep to what there is. */
static void tokens_cost_more_than_passes(void **state)
{
    (void)state;
    for (int noisy = 0; noisy < 2; noisy++) {
        machine m = {.fixed = 0.003, .each = 0.0009, .noise = (uint64_t)noisy};
        srv_pieces p = {0};
        int late;
        (void)read_some(&p, &m, 0.08, 50, &late);
        const double n = read_some(&p, &m, 0.08, 1000, &late);
        if (n < 64 || n > 96 || late > 5) fail_msg("%g tokens, %d late", n, late);
        assert_true(srv_pieces_any(&p, 0.08));
        assert_false(srv_pieces_any(&p, 0.005));
        /* and where not even the least fits, few are longer than that */
        const double least = read_some(&p, &m, 0.005, 1000, &late);
        if (least > 9) fail_msg("%g tokens", least);
    }
}

/* A machine that becomes another. */
static void times_change(void **state)
{
    (void)state;
    machine slow = {.fixed = 0.003, .each = 0.0009},
            fast = {.fixed = 0.0022, .each = 0.000004};
    srv_pieces p = {0};
    int late;
    (void)read_some(&p, &slow, 0.005, 500, &late);
    (void)read_some(&p, &fast, 0.001, 300, &late);
    assert_true(read_some(&p, &fast, 0.001, 100, &late) >= 128);
    (void)read_some(&p, &slow, 0.05, 100, &late);
    (void)read_some(&p, &slow, 0.05, 100, &late);
    assert_true(late <= 2);
}

/* What is left of a prompt is a short piece, and the next prompt is read at once all the
 * same. */
static void prompts_end(void **state)
{
    (void)state;
    machine m = {.fixed = 0.0022, .each = 0.000002, .noise = 1};
    srv_pieces p = {0};
    int passes = 0;
    for (int i = 0; i < 400; i++)
        for (int left = SRV_WHOLE_PIECE; left > 0; passes += i >= 200) {
            const int fit = srv_pieces_fit(&p, 0.015), n = fit < left ? fit : left;
            srv_pieces_note(&p, n, take(&m, n));
            left -= n;
        }
    if (passes > 220) fail_msg("%d passes for 200 prompts", passes);
}

RUN_TESTS(cmocka_unit_test(passes_cost_more_than_tokens),
          cmocka_unit_test(tokens_cost_more_than_passes),
          cmocka_unit_test(times_change), cmocka_unit_test(prompts_end))
