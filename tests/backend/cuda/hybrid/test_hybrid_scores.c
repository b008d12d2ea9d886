/* A score that the GPU does not know is refused by number in every form, before
 * anything is read or queued: a session, its reservation, a whole sequence and its
 * gradient. */
#include <stdio.h>
#include <string.h>

#include "../gpu.h"

enum { RESERVE, SESSION, ROUTE, PARALLEL, BACKWARD, FORMS };
static const char *const form_name[] = {"reserve", "session", "route", "parallel",
                                        "backward"};

static still_status run_form(const gpu *g, int form, const sti_hybrid_settings *set,
                             still_error *err)
{
    const sti_hybrid_shape shape = {.H = 4, .G = 2, .D = 64, .F = 64};
    sti_hybrid_state state = {.kv_size = 2, .real_size = sizeof(float)};
    const sti_hybrid_args a = {.set = set, .shape = shape, .T = 1, .state = &state};
    const sti_hybrid_parallel_args p = {.set = set, .shape = shape, .B = 1, .T = 1};
    switch (form) {
    case RESERVE: return g->be->hybrid_reserve(g->dev, set, &shape, 1, err);
    case SESSION: return g->be->hybrid(g->dev, &a, 1, err);
    case ROUTE: return g->be->hybrid_route(g->dev, &p, err);
    case PARALLEL: return g->be->hybrid_parallel(g->dev, &p, err);
    default: return g->be->hybrid_backward(g->dev, &p, err);
    }
}

static void test_unknown_score(void **state)
{
    (void)state;
    static const int unknown[] = {STI_SCORE_COUNT, 77, -1};
    const gpu *g = need_gpu();
    sti_hybrid_settings set;
    assert_true(sti_hybrid_preset("still", 16, &set));
    for (size_t k = 0; k < COUNT(unknown); k++)
        for (int form = 0; form < FORMS; form++) {
            char want[64];
            snprintf(want, sizeof want, "no score number %d", unknown[k]);
            set.score = (sti_score_kind)unknown[k];
            still_error err = {0};
            const still_status st = run_form(g, form, &set, &err);
            if (st != STILL_E_ARG || !strstr(err.text, want))
                fail_msg("%s, score %d: status %d, '%s'", form_name[form], unknown[k],
                         (int)st, err.text);
        }
}

static int setup(void **state)
{
    (void)state;
    return open_gpu(&(sti_dev_params){
        .threads = 1, .max_k = 64, .heads = 4, .kv_heads = 2, .head_dim = 64});
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_unknown_score)};
    return cmocka_run_group_tests(tests, setup, close_gpu);
}
