/* bench_read.c - memory bandwidth and core-to-core latency, which bound decode.
 *
 *     bench_read [THREADS [SECONDS [MB]]]        (2, 10, 96)
 *
 * Each worker of a pool reads its part of one block again and again, as it reads
 * weights; every quarter of a second a cache line goes to another core and back some
 * thousand times. Prints GB/s by quarters, then the median, and the median time of such a
 * trip in ns. On a shared machine they vary by the hour and by the second; cores that
 * share a cache have faster trips but read slower. */
#include <pthread.h>
#include <stdatomic.h>

#include "base/mem.h"
#include "base/pool.h"
#include "bench.h"

enum { MAX_SECONDS = 1000, MAX_MB = 16384, LINE = 8, TRIPS = 10000 };

typedef struct reading {
    const uint64_t *from;
    int64_t n;
    atomic_ullong sum; /* so that the compiler keeps the reads */
} reading;

static void read_part(void *arg, int worker, int workers)
{
    reading *r = arg;
    int64_t lo, hi;
    sti_split(r->n, LINE, worker, workers, &lo, &hi);
    uint64_t s[LINE] = {0}, sum = 0;
    for (int64_t i = lo; i < hi; i += LINE)
        for (int j = 0; j < LINE; j++) s[j] ^= r->from[i + j];
    for (int j = 0; j < LINE; j++) sum += s[j];
    atomic_fetch_add(&r->sum, sum);
}

/* Answers each odd number with the next even one. */
static void *answer(void *arg)
{
    atomic_int *ball = arg;
    for (int i = 1; i < 2 * TRIPS; i += 2) {
        while (atomic_load_explicit(ball, memory_order_acquire) != i) continue;
        atomic_store_explicit(ball, i + 1, memory_order_release);
    }
    return NULL;
}

/* Seconds in which a cache line goes to another core and comes back. */
static double round_trip(void)
{
    static _Alignas(64) atomic_int ball;
    pthread_t other;
    atomic_store(&ball, 0);
    if (pthread_create(&other, NULL, answer, &ball) != 0) die("no thread");
    double start = 0;
    for (int i = 1; i < 2 * TRIPS; i += 2) {
        if (i == 201) start = now(); /* both run by now */
        atomic_store_explicit(&ball, i, memory_order_release);
        while (atomic_load_explicit(&ball, memory_order_acquire) != i + 1) continue;
    }
    const double end = now();
    pthread_join(other, NULL);
    return (end - start) / (TRIPS - 100);
}

int main(int argc, char **argv)
{
    static double rate[4 * MAX_SECONDS], trip[4 * MAX_SECONDS];
    const int threads = number_at(1, argc, argv, 2);
    const int seconds = number_at(2, argc, argv, 10), mb = number_at(3, argc, argv, 96);
    if (threads < 1 || seconds < 1 || seconds > MAX_SECONDS || mb < 1 || mb > MAX_MB)
        die("usage: bench_read [THREADS [SECONDS [MB]]]");
    const size_t bytes = (size_t)mb << 20;
    sti_pool *pool;
    sti_block block;
    still_error err;
    must(sti_pool_new(threads, &pool, &err), &err);
    if (!sti_block_new(&block, bytes)) die("no memory");
    memset(block.p, 1, bytes);
    reading all = {.from = block.p, .n = (int64_t)(bytes / sizeof *all.from)};
    const int quarters = 4 * seconds;
    for (int q = 0; q < quarters; q++) {
        const double start = now();
        double spent = 0;
        int times = 0;
        while (spent < 0.25) {
            sti_pool_run(pool, read_part, &all);
            spent = now() - start;
            times++;
        }
        rate[q] = (double)times * (double)bytes / spent / 1e9;
        printf("%s%.0f", q ? " " : "", rate[q]);
        fflush(stdout);
        trip[q] = round_trip() * 1e9;
    }
    sort_times(rate, quarters);
    sort_times(trip, quarters);
    printf("\nGB/s, %d threads: median %.1f [%.1f, %.1f]; a round trip: %.0f ns [%.0f, "
           "%.0f]\n",
           threads, rate[quarters / 2], rate[0], rate[quarters - 1], trip[quarters / 2],
           trip[0], trip[quarters - 1]);
    sti_block_free(&block);
    sti_pool_free(pool);
    return 0;
}
