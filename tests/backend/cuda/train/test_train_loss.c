/* test_train_loss.c - loss and optimizer on the GPU against `ref`. */
#include "../../../run.h"
#include "train_arrays.h"

enum { LOSS_MOST = 6, HEAD = 64 };

typedef struct loss_case {
    int M, V;
    float gain, kd;
    bool teacher;
} loss_case;

static void check_loss(devices *d, const loss_case *c, bool head)
{
    still_error err;
    const int M = c->M, V = c->V;
    const size_t n = (size_t)M * (size_t)V, bytes = 2 * LOSS_MOST * sizeof(double);
    arrays a = {.d = d};
    matrix m;
    const int x = add(&a, n, c->gain, 1, 0), t = add(&a, n, 4, 2, 0),
              dx = add(&a, (size_t)M * HEAD, 1, 3, 0);
    int32_t target[LOSS_MOST];
    float weight[LOSS_MOST];
    double want[2][LOSS_MOST] = {{0}}, got[2][LOSS_MOST];
    sti_block sums;
    OK(cuda()->mem_new(d->gpu, bytes, &sums, &err));
    open_matrix(d, STI_Q8_0, false, V, HEAD, 9, &m);
    for (int i = 0; i < M; i++) {
        target[i] = (int32_t)((int64_t)i * (V - 1) / (M - 1));
        weight[i] = i == 1 ? 0 : 0.25f * (float)(i + 1);
    }
    sti_loss_args l = {.logits = a.here[x],
                       .teacher = c->teacher ? a.here[t] : NULL,
                       .target = target,
                       .weight = weight,
                       .kd = c->kd,
                       .M = M,
                       .V = V,
                       .loss = want[0],
                       .kl = c->teacher ? want[1] : NULL,
                       .head = head ? &m.here : NULL,
                       .dx = a.here[dx]};
    OK(ref()->loss(d->here, &l, &err));
    l.logits = on_gpu(&a, x, 0);
    l.teacher = c->teacher ? on_gpu(&a, t, 0) : NULL;
    l.loss = sums.p;
    l.kl = c->teacher ? l.loss + LOSS_MOST : NULL;
    l.head = head ? &m.there : NULL;
    l.dx = on_gpu(&a, dx, 0);
    OK(cuda()->loss(d->gpu, &l, &err));
    OK(cuda()->mem_move(d->gpu, got, sums.p, bytes, &err));
    if (!head) hold(error_of(&a, x, 0), 1e-4, "gradient of the loss", M, 1, V);
    hold(error_of(&a, dx, 0), head ? BF16 : 0, "loss: dx", M, HEAD, V);
    for (int i = 0; i < M; i++) {
        hold(fabs(got[0][i] - want[0][i]), 1e-5 * (1 + fabs(want[0][i])), "loss", M, i,
             V);
        hold(fabs(got[1][i] - want[1][i]), 1e-4 * (1 + fabs(want[1][i])), "kl", M, i,
             V);
    }
    close_matrix(d, &m);
    cuda()->mem_free(d->gpu, &sums);
    end(&a);
}

static void test_loss(void **state)
{
    static const loss_case cases[] = {
        {6, 384, 5, 0, false}, {3, 50257, 8, 0.5f, true}, {2, 49152, 20, 0, false},
        {5, 7, 3, 2, true},    {4, 4100, 300, 0, false},  {2, 4099, 2, 0, true}};
    devices *d = begin(state);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check_loss(d, &cases[i], false);
        check_loss(d, &cases[i], true);
    }
}

/* Arrays of several sizes and rates at once, twice. */
static void test_adam(void **state)
{
    enum { LISTS = 4, PARTS = 4 };
    static const size_t size[LISTS] = {1, 577, 70000, 33};
    devices *d = begin(state);
    still_error err;
    arrays a = {.d = d};
    sti_adam_args want[LISTS], got[LISTS];
    for (int i = 0; i < LISTS; i++) {
        const int x = add(&a, size[i], 1, 1, 1), g = add(&a, size[i], 1e-3f, 2, 1),
                  m = add(&a, size[i], 1e-3f, 3, 1), v = add(&a, size[i], 0, 4, 1);
        want[i] = (sti_adam_args){.x = a.here[x],
                                  .m = a.here[m],
                                  .v = a.here[v],
                                  .grad = a.here[g],
                                  .n = size[i],
                                  .scale = 0.5f,
                                  .lr = 0.01f * (float)(i + 1),
                                  .beta1 = 0.9f,
                                  .beta2 = 0.95f,
                                  .eps = 1e-8f,
                                  .decay = 0.1f,
                                  .c1 = 0.1,
                                  .c2 = 0.05};
        got[i] = want[i];
        got[i].x = on_gpu(&a, x, 1);
        got[i].m = on_gpu(&a, m, 1);
        got[i].v = on_gpu(&a, v, 1);
        got[i].grad = on_gpu(&a, g, 1);
    }
    for (int times = 0; times < 2; times++) {
        OK(ref()->adam(d->here, want, LISTS, &err));
        OK(cuda()->adam(d->gpu, got, LISTS, &err));
    }
    for (int i = 0; i < LISTS * PARTS; i++)
        hold(error_of(&a, i, 1), FLOATS, "adam", i / PARTS, i % PARTS, 0);
    end(&a);
}

RUN_TESTS_IN(setup, teardown, cmocka_unit_test(test_loss), cmocka_unit_test(test_adam))
