/* bench_read.c - how fast the machine reads memory: what bounds decode.
 *
 *   bench_read [THREADS [SECONDS [MB]]]        (2, 10, 96)
 *
 * Every thread reads its part of one block again and again, all beginning together.
 * Prints GB/s by quarters of a second, then the median: on a shared machine they differ
 * by the hour and by the second. */
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include "bench.h"

enum { MAX_THREADS = 64, MAX_QUARTERS = 4096 };

typedef struct reader {
    pthread_t thread;
    const uint64_t *from;
    size_t n;
    struct reading *all;
    uint64_t sum; /* so that nothing is left out */
} reader;

typedef struct reading {
    pthread_barrier_t gate;
    atomic_bool stop;
    reader reader[MAX_THREADS];
} reading;

static void *read_part(void *arg)
{
    reader *r = arg;
    for (;;) {
        pthread_barrier_wait(&r->all->gate); /* begin */
        if (atomic_load(&r->all->stop)) return NULL;
        uint64_t s[8] = {0};
        for (size_t i = 0; i < r->n; i += 8)
            for (size_t j = 0; j < 8; j++) s[j] ^= r->from[i + j];
        for (size_t j = 0; j < 8; j++) r->sum += s[j];
        pthread_barrier_wait(&r->all->gate); /* end */
    }
}

int main(int argc, char **argv)
{
    static reading all;
    static double rate[MAX_QUARTERS];
    const int threads = number_at(1, argc, argv, 2);
    const double seconds = number_at(2, argc, argv, 10);
    const size_t bytes = (size_t)number_at(3, argc, argv, 96) << 20;
    if (threads < 1 || threads > MAX_THREADS || seconds < 1 || seconds > 1000 ||
        bytes == 0)
        die("usage: bench_read [THREADS [SECONDS [MB]]]");
    uint64_t *block =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) die("no memory");
    madvise(block, bytes, MADV_HUGEPAGE);
    memset(block, 1, bytes);
    pthread_barrier_init(&all.gate, NULL, (unsigned)threads + 1);
    const size_t part = bytes / sizeof *block / (size_t)threads / 8 * 8;
    for (int i = 0; i < threads; i++) {
        reader *r = &all.reader[i];
        *r = (reader){.from = block + (size_t)i * part, .n = part, .all = &all};
        if (pthread_create(&r->thread, NULL, read_part, r))
            die("cannot start a thread");
    }
    const double end = now() + seconds;
    int quarters = 0;
    while (now() < end && quarters < MAX_QUARTERS) {
        double spent = 0, read = 0;
        while (spent < 0.25) {
            const double start = now();
            pthread_barrier_wait(&all.gate);
            pthread_barrier_wait(&all.gate);
            spent += now() - start;
            read += (double)(part * (size_t)threads * sizeof *block);
        }
        rate[quarters] = read / spent / 1e9;
        printf("%s%.0f", quarters ? " " : "", rate[quarters]);
        fflush(stdout);
        quarters++;
    }
    atomic_store(&all.stop, true);
    pthread_barrier_wait(&all.gate);
    for (int i = 0; i < threads; i++) pthread_join(all.reader[i].thread, NULL);
    sort_times(rate, quarters);
    printf("\nGB/s, %d threads: median %.1f [%.1f, %.1f]\n", threads,
           rate[quarters / 2], rate[0], rate[quarters - 1]);
    munmap(block, bytes);
    return 0;
}
