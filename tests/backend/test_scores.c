/* A score that a backend does not know is refused by name, whatever the form: a session,
 * a whole sequence, its gradient, the matching of weights. Nothing is read or written. */
#include "../run.h"
#include "cpu/cpu_device.h"

/* Every entry of the backend table that takes settings. */
static const char *const form_name[] = {"reserve",  "session",  "route",
                                        "parallel", "backward", "match"};
enum { N_FORMS = 6 };

static still_status run_form(const sti_backend *b, sti_dev *dev, int form,
                             const sti_hybrid_settings *set, still_error *err)
{
    const sti_hybrid_shape shape = {.H = 4, .G = 2, .D = 8, .F = 8};
    sti_hybrid_state state = {.kv_size = sizeof(float), .real_size = sizeof(float)};
    const sti_hybrid_args a = {.set = set, .shape = shape, .T = 1, .state = &state};
    const sti_hybrid_parallel_args p = {.set = set, .shape = shape, .B = 1, .T = 1};
    double loss;
    const sti_hybrid_match_args m = {.p = &p, .scale = 1, .loss = &loss};
    switch (form) {
    case 0: return b->hybrid_reserve(dev, set, &shape, 1, err);
    case 1: return b->hybrid(dev, &a, 1, err);
    case 2: return b->hybrid_route(dev, &p, err);
    case 3: return b->hybrid_parallel(dev, &p, err);
    case 4: return b->hybrid_backward(dev, &p, err);
    default: return b->hybrid_match(dev, &m, err);
    }
}

static void test_unknown_score(void **state)
{
    (void)state;
    static const char *const backends[] = {"ref", "cpu"};
    static const int unknown[] = {STI_SCORE_COUNT, 77, -1};
    sti_hybrid_settings set;
    assert_true(sti_hybrid_preset("still", 8, &set));
    for (size_t i = 0; i < sizeof backends / sizeof *backends; i++) {
        const sti_backend *b = sti_backend_find(backends[i]);
        sti_dev *dev = dev_of(b, (sti_dev_params){.threads = 1, .max_k = 64});
        for (size_t k = 0; k < sizeof unknown / sizeof *unknown; k++)
            for (int form = 0; form < N_FORMS; form++) {
                char want[64];
                snprintf(want, sizeof want, "no score number %d", unknown[k]);
                set.score = (sti_score_kind)unknown[k];
                still_error err = {0};
                const still_status st = run_form(b, dev, form, &set, &err);
                if (st != STILL_E_ARG || !strstr(err.text, want))
                    fail_msg("%s, %s, score %d: status %d, '%s'", backends[i],
                             form_name[form], unknown[k], (int)st, err.text);
            }
        b->dev_free(dev);
    }
}

/* What a backend with kernels of its own says of a row it has no kernel for. */
static void test_score_without_a_kernel(void **state)
{
    (void)state;
    const unsigned known = 1u << STI_SCORE_S3 | 1u << STI_SCORE_RANDOM;
    still_error err;
    for (int kind = 0; kind < STI_SCORE_COUNT; kind++) {
        const bool has = known >> kind & 1;
        const still_status st =
            sti_score_check((sti_score_kind)kind, known, "cuda", &err);
        assert_int_equal(st, has ? STILL_OK : STILL_E_UNSUPPORTED);
        if (has) continue;
        assert_non_null(strstr(err.text, sti_score_at((sti_score_kind)kind)->name));
        assert_non_null(strstr(err.text, "the cuda backend"));
        assert_non_null(strstr(err.text, "it has s3, random"));
    }
    assert_int_equal(sti_score_check(STI_SCORE_COUNT, ~0u, "cuda", &err), STILL_E_ARG);
}

RUN_TESTS(cmocka_unit_test(test_unknown_score),
          cmocka_unit_test(test_score_without_a_kernel))
