/* bench_hybrid_train.c - the hybrid operator over whole sequences on the cpu backend:
 * compares a short sequence with the reference, then times routing, forward and
 * backward at several lengths. Time per token must not grow with the length.
 *
 *     bench_hybrid_train [ISA|best [THREADS [H G D]]]
 *
 * GFLOP/s count what the equations ask for, each product once: per query head and
 * visible softmax key 4 D forward, 2 D + 8 D backward (logits again, dn.v, dq, dk, dv),
 * or 2 D + 2 D if only maps, alpha and gate are trained; maps, folding and reading the
 * state likewise. Work that heads of a group do twice is not counted. */
#include <math.h>

#include "bench.h"
#include "ops/ops.h"

enum { REPEAT = 5, CHUNK = 128, SELECT = 32, CAP = 256, MOST = 16384 };

typedef struct bench {
    const sti_backend *b;
    sti_dev *dev;
    sti_hybrid_settings set;
    sti_hybrid_parallel_args a;
} bench;

/* As floats(), on pages of its own. */
static float *numbers(size_t n, float gain, uint32_t seed)
{
    sti_block block;
    if (!sti_block_new(&block, n * sizeof(float))) die("no memory");
    fill(block.p, n, gain, seed);
    return block.p;
}

enum { ROUTE, FORWARD, BACKWARD, BACKWARD_MAPS };
static const char *const what_name[] = {"route", "forward", "backward", "  maps only"};

static void call(const bench *t, int what)
{
    still_error err;
    sti_hybrid_parallel_args a = t->a;
    if (what == BACKWARD_MAPS) a.grad.q = a.grad.k = a.grad.v = NULL;
    must(what == ROUTE     ? t->b->hybrid_route(t->dev, &a, &err)
         : what == FORWARD ? t->b->hybrid_parallel(t->dev, &a, &err)
                           : t->b->hybrid_backward(t->dev, &a, &err),
         &err);
}

/* Operations of a call, from the routing that was found. */
static double operations(const bench *t, int what)
{
    const sti_hybrid_shape *s = &t->a.shape;
    const int T = t->a.T, group = s->H / s->G;
    double keys = 0, folded = 0, queries = 0; /* over selection heads */
    for (int i = 0; i < T; i++) {
        keys += (i < CHUNK ? i + 1 : i % CHUNK + CHUNK + 1) * s->G;
        for (int g = 0; g < s->G; g++) {
            keys += t->a.trace.salient[i * s->G + g];
            folded += t->a.fold_chunk[i * s->G + g] >= 0;
        }
        if (i >= 2 * CHUNK) queries += s->G;
    }
    const double D = s->D, P = 2.0 * s->D;
    const double map = 2 * D * D, state = 2 * P * D;
    switch (what) {
    case ROUTE: return 2 * D * group * (double)s->G * T * 1.5 * CHUNK;
    case FORWARD:
        return group * (keys * 4 * D + queries * (map + state)) +
               folded * (map + state);
    case BACKWARD:
        return group * (keys * 10 * D + queries * (3 * map + 4 * state)) +
               folded * (3 * map + 3 * state);
    default:
        return group * (keys * 4 * D + queries * (2 * map + 4 * state)) +
               folded * (2 * map + 3 * state);
    }
}

static double report(const bench *t, int what)
{
    double s[REPEAT];
    call(t, what);
    for (int r = 0; r < REPEAT; r++) {
        double from = now();
        call(t, what);
        s[r] = now() - from;
    }
    sort_times(s, REPEAT);
    const double mid = s[REPEAT / 2];
    printf("%-12s T %6d  %9.2f ms  %7.2f us/token  %7.1f GFLOP/s  (fastest %.2f us, "
           "spread %.0f%%)\n",
           what_name[what], t->a.T, mid * 1e3, mid / t->a.T * 1e6,
           operations(t, what) / mid * 1e-9, s[0] / t->a.T * 1e6,
           100 * (s[REPEAT - 1] - s[0]) / mid);
    return mid / t->a.T;
}

static double error_of(const float *got, const float *want, size_t n)
{
    double worst = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        worst = fmax(worst, fabs((double)got[i] - (double)want[i]));
        size = fmax(size, fabs((double)want[i]));
    }
    return size > 0 ? worst / size : worst;
}

/* y, dq and dk of T tokens against the reference with the same routing. */
static double check(const bench *t)
{
    const sti_backend *ref = sti_backend_find("ref");
    const size_t nq = (size_t)t->a.T * (size_t)(t->a.shape.H * t->a.shape.D);
    const size_t nk = (size_t)t->a.T * (size_t)(t->a.shape.G * t->a.shape.D);
    float *y = numbers(nq, 0, 0), *dq = numbers(nq, 0, 0), *dk = numbers(nk, 0, 0);
    sti_hybrid_parallel_args a = t->a;
    a.y = y;
    a.grad = (sti_hybrid_grad){.q = dq, .k = dk};
    a.trace = (sti_hybrid_trace){0};
    still_error err;
    sti_dev *dev;
    must(ref->dev_new(&(sti_dev_params){.threads = 1}, &dev, &err), &err);
    call(t, ROUTE);
    call(t, FORWARD);
    call(t, BACKWARD);
    must(ref->hybrid_parallel(dev, &a, &err), &err);
    must(ref->hybrid_backward(dev, &a, &err), &err);
    ref->dev_free(dev);
    return fmax(error_of(t->a.y, y, nq),
                fmax(error_of(t->a.grad.q, dq, nq), error_of(t->a.grad.k, dk, nk)));
}

int main(int argc, char **argv)
{
    const int threads = number_at(2, argc, argv, 2);
    sti_hybrid_shape s = {9, 3, 64, 64};
    if (argc > 5)
        s = (sti_hybrid_shape){atoi(argv[3]), atoi(argv[4]), atoi(argv[5]),
                               atoi(argv[5])};
    bench t = {.b = sti_backend_find("cpu")};
    sti_hybrid_preset("still", CHUNK, &t.set);
    t.set.select = SELECT;
    t.set.cap = CAP;
    still_error err;
    must(sti_hybrid_check(&t.set, &s, &err), &err);
    const sti_dev_params p = {
        .threads = threads, .isa = isa_of(argc, argv), .max_k = 64};
    must(t.b->dev_new(&p, &t.dev, &err), &err);

    const size_t nq = (size_t)MOST * (size_t)(s.H * s.D), H = (size_t)s.H;
    const size_t nk = (size_t)MOST * (size_t)(s.G * s.D), G = (size_t)s.G;
    const size_t map = (size_t)(s.D * s.D);
    sti_block fold, salient;
    if (!sti_block_new(&fold, MOST * G * sizeof(int32_t)) ||
        !sti_block_new(&salient, MOST * G * sizeof(int32_t)))
        return 1;
    t.a = (sti_hybrid_parallel_args){
        .set = &t.set,
        .shape = s,
        .B = 1,
        .in = {.q = numbers(nq, 2, 1),
               .k = numbers(nk, 2, 2),
               .v = numbers(nk, 1, 3),
               .gate_logit = numbers(nq, 1, 4),
               .alpha = numbers(H, 1, 5),
               .map_q = numbers(H * map, 0.2f, 6),
               .map_k = numbers(G * map, 0.2f, 7)},
        .fold_chunk = fold.p,
        .y = numbers(nq, 0, 0),
        .trace = {.salient = salient.p},
        .dy = numbers(nq, 1, 8),
        .grad = {.q = numbers(nq, 0, 0),
                 .k = numbers(nk, 0, 0),
                 .v = numbers(nk, 0, 0),
                 .gate_logit = numbers(nq, 0, 0),
                 .alpha = numbers(H, 0, 0),
                 .map_q = numbers(H * map, 0, 0),
                 .map_k = numbers(G * map, 0, 0)},
    };
    printf("%s, %d threads, H %d G %d D %d, chunk %d, select %d, cap %d\n",
           t.b->dev_isa(t.dev), threads, s.H, s.G, s.D, CHUNK, SELECT, CAP);
    t.a.T = 450;
    const double e = check(&t);
    printf("largest error %.2g\n", e);
    if (!(e < 2e-5)) return 1;

    static const int length[] = {1024, 4096, MOST};
    double first[4] = {0};
    for (size_t i = 0; i < sizeof length / sizeof *length; i++) {
        t.a.T = length[i];
        for (int what = ROUTE; what <= BACKWARD_MAPS; what++) {
            const double each = report(&t, what);
            if (i == 1) first[what] = each;
            if (i == 2)
                printf("%-12s time per token, %d over %d: %.2f\n", what_name[what],
                       length[2], length[1], each / first[what]);
        }
    }
    return 0; /* the system takes the memory back */
}
