/* test_linear_cpu.c - Liger and SUPRA on the cpu backend, every instruction set here:
 * against the reference in double, cut anywhere, from any number of threads. */
#include "../../../run.h"
#include "../../linear_problem.h"
#include "../cpu_device.h"

static problem make(linear_case c, double key_size, uint64_t seed)
{
    problem p = make_problem(c, key_size, 0, seed);
    for (int f = 0; f < FIELDS; f++) {
        p.in_f[f] = narrow(p.in[f], p.n[f]);
        p.grad_f[f] = narrow(NULL, p.n[f]);
    }
    p.dy_f = narrow(p.dy, p.n[Q]);
    p.y_f = narrow(NULL, p.n[Q]);
    p.block = new_state(&p.st, &c.shape, c.window, sizeof(float), sizeof(float));
    return p;
}

static void drop(problem *p)
{
    for (int f = 0; f < FIELDS; f++) {
        free(p->in_f[f]);
        free(p->grad_f[f]);
    }
    free(p->y_f);
    free(p->dy_f);
    sti_block_free(&p->block);
    drop_problem(p);
}

static void run_cpu(sti_dev *dev, problem *p)
{
    const sti_linear_args a = args(p, 0, p->T);
    still_error err;
    for (int f = 0; f < FIELDS; f++) memset(p->grad_f[f], 0, p->n[f] * sizeof(float));
    memset(p->block.p, 0, p->block.bytes);
    p->st.pos = 0;
    assert_int_equal(cpu()->linear(dev, &a, 1, &err), STILL_OK);
    assert_int_equal(cpu()->linear_backward(dev, &a, 1, &err), STILL_OK);
}

static void expect(const char *what, const problem *p, const float *got,
                   const double *want, size_t n, double bound)
{
    expect_error(what, p, relative_error(got, want, n, 0.1), bound);
}

static void test_against_reference(void **state)
{
    (void)state;
    for (int i = 0; i < N_CASES; i++) {
        problem p = make(linear_cases[i], 1.5, (uint64_t)i + 1);
        run_ref(&p);
        for (int isa = 0; isa < N_ISA; isa++) {
            sti_dev *dev = new_dev(isa_name[isa], 2);
            if (!dev) continue;
            run_cpu(dev, &p);
            expect("y", &p, p.y_f, p.y, p.n[Q], 2e-5);
            expect_state(&p, 2e-5);
            expect_gradients(&p, 2e-5);
            free_dev(dev);
        }
        drop(&p);
    }
}

/* Two sessions in one call, fed in pieces of any size. */
static void test_any_cut(void **state)
{
    (void)state;
    for (int i = 0; i < N_CASES; i++) {
        problem p = make(linear_cases[i], 1.5, 7), o = make(linear_cases[i], 1.5, 7);
        sti_dev *dev = new_dev(NULL, 2);
        run_ref(&p);
        for (int at = 0, step = 1; at < p.T;
             at += step, step = 1 + (step * 7 + 3) % 29) {
            const int n = p.T - at < step ? p.T - at : step;
            const sti_linear_args two[] = {args(&p, at, n), args(&o, at, n)};
            still_error err;
            assert_int_equal(cpu()->linear(dev, two, 2, &err), STILL_OK);
        }
        expect_state(&p, 2e-5);
        expect("y", &p, p.y_f, p.y, p.n[Q], 2e-5);
        assert_memory_equal(p.y_f, o.y_f, p.n[Q] * sizeof(float));
        free_dev(dev);
        drop(&p);
        drop(&o);
    }
}

static void test_threads(void **state)
{
    (void)state;
    for (int i = 0; i < N_CASES; i++) {
        problem p = make(linear_cases[i], 1.5, 5), o = make(linear_cases[i], 1.5, 5);
        sti_dev *one = new_dev(NULL, 1), *five = new_dev(NULL, 5);
        run_cpu(one, &p);
        run_cpu(five, &o);
        assert_memory_equal(p.y_f, o.y_f, p.n[Q] * sizeof(float));
        for (int f = 0; f < FIELDS; f++)
            assert_memory_equal(p.grad_f[f], o.grad_f[f], p.n[f] * sizeof(float));
        free_dev(one);
        free_dev(five);
        drop(&p);
        drop(&o);
    }
}

/* Gates at both ends of the sigmoid: a state that vanishes within a token. */
static void test_far_gates(void **state)
{
    (void)state;
    problem p = make((linear_case){{2, 1, 16}, 4, 60}, 384, 3);
    sti_dev *dev = new_dev(NULL, 1);
    run_ref(&p);
    run_cpu(dev, &p);
    /* Logits of the window are as large, so their rounding is felt there. */
    expect("state", &p, p.st.s, p.want.s, 16 * 16, 2e-5);
    for (size_t i = 0; i < p.n[Q]; i++) assert_true(isfinite(p.y_f[i]));
    for (int f = 0; f < 3; f++)
        for (size_t i = 0; i < p.n[f]; i++) assert_true(isfinite(p.grad_f[f][i]));
    free_dev(dev);
    drop(&p);
}

/* A window kept in 16 bits: what its rounding costs, no more. */
static void test_half_window(void **state)
{
    (void)state;
    problem p = make((linear_case){{6, 2, 64}, 32, 90}, 1.5, 3);
    sti_block_free(&p.block);
    p.block = new_state(&p.st, &p.shape, 32, sizeof(uint16_t), sizeof(float));
    sti_dev *dev = new_dev(NULL, 2);
    run_ref(&p);
    run_cpu(dev, &p);
    expect("y", &p, p.y_f, p.y, p.n[Q], 2e-3);
    free_dev(dev);
    drop(&p);
}

/* A call needs no more than was reserved, which the bill knows. */
static void test_reserved(void **state)
{
    (void)state;
    int more[2] = {0}; /* cases that need more than a matrix product: SUPRA, Liger */
    for (int i = 0; i < N_CASES; i++) {
        problem p = make(linear_cases[i], 1.5, 5);
        sti_dev *dev = new_dev(NULL, 1);
        const sti_linear_args a = args(&p, 0, p.T);
        still_error err;
        const size_t before = cpu()->dev_bytes(dev, p.T);
        assert_int_equal(cpu()->linear_reserve(dev, &p.shape, p.window, p.T, &err),
                         STILL_OK);
        const size_t reserved = cpu()->dev_bytes(dev, p.T);
        more[p.window > 0] += reserved > before;
        assert_int_equal(cpu()->linear(dev, &a, 1, &err), STILL_OK);
        assert_int_equal(cpu()->dev_bytes(dev, p.T), reserved);
        free_dev(dev);
        drop(&p);
    }
    assert_true(more[0] > 0 && more[1] > 0);
}

static void test_bad_arguments(void **state)
{
    (void)state;
    problem p = make((linear_case){{2, 1, 16}, 4, 9}, 1.5, 3);
    sti_dev *dev = new_dev(NULL, 1);
    expect_refusals(cpu(), dev, &p);
    free_dev(dev);
    drop(&p);
}

RUN_TESTS(cmocka_unit_test(test_against_reference), cmocka_unit_test(test_any_cut),
          cmocka_unit_test(test_threads), cmocka_unit_test(test_far_gates),
          cmocka_unit_test(test_half_window), cmocka_unit_test(test_reserved),
          cmocka_unit_test(test_bad_arguments))
