/* test_comm.c - ranks: run alone, and as several processes by mpirun and by launch.py.
 *
 *   test_comm            everything that can be tested by one process
 *   test_comm ranks      sums, flags and errors shared by all ranks
 *   test_comm killed     rank 1 dies in a job of two: rank 0 must notice
 *   test_comm gives-up   rank 1 leaves with an error: likewise
 *   test_comm strays     rank 1 calls something else than rank 0: both must say so */
#include <arpa/inet.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "train/comm.h"

/* What rank r brings to element i: sums of these depend on their order. */
static double brought(int r, size_t i)
{
    uint64_t x = ((uint64_t)r + 1) * 0x9E3779B97F4A7C15u + i * 0xBF58476D1CE4E5B9u;
    x ^= x >> 29;
    x *= 0x94D049BB133111EBu;
    x ^= x >> 32;
    return ((double)(x >> 11) / (double)(1ull << 53) - 0.5) * pow(10, (double)(x % 7));
}

static int join(void **state)
{
    still_error err;
    if (sti_comm_new((sti_comm **)state, &err) == STILL_OK) return 0;
    fprintf(stderr, "%s\n", err.text);
    return 1;
}

static int leave(void **state)
{
    sti_comm_free(*state);
    return 0;
}

static void test_sum(void **state)
{
    sti_comm *c = *state;
    const int ranks = sti_comm_size(c), me = sti_comm_rank(c);
    /* None, fewer than ranks, one block to the byte and around it, several blocks. */
    const size_t block = (4u << 20) / sizeof(float) - (size_t)ranks;
    const size_t n[] = {0, 1, 2, 5, 1000, block - 1, block, block + 1, 2 * block + 77};
    for (size_t k = 0; k < sizeof n / sizeof *n; k++) {
        float *x = malloc((n[k] + 1) * sizeof *x);
        assert_non_null(x);
        for (size_t i = 0; i < n[k]; i++) x[i] = (float)brought(me, i);
        x[n[k]] = 3; /* is not ours to change */
        still_error err;
        assert_int_equal(sti_comm_sum(c, x, n[k], &err), STILL_OK);
        for (size_t i = 0; i < n[k]; i++) {
            float want = (float)brought(0, i);
            for (int r = 1; r < ranks; r++) want += (float)brought(r, i);
            if (memcmp(&x[i], &want, sizeof want) != 0)
                fail_msg("element %zu of %zu: %.9g, expected %.9g", i, n[k],
                         (double)x[i], (double)want);
        }
        assert_true(x[n[k]] == 3);
        free(x);
    }
}

static void test_sum_doubles(void **state)
{
    sti_comm *c = *state;
    double x[31];
    for (size_t i = 0; i < 31; i++) x[i] = brought(sti_comm_rank(c), i);
    still_error err;
    assert_int_equal(sti_comm_sum_doubles(c, x, 31, &err), STILL_OK);
    for (size_t i = 0; i < 31; i++) {
        double want = brought(0, i);
        for (int r = 1; r < sti_comm_size(c); r++) want += brought(r, i);
        assert_memory_equal(&x[i], &want, sizeof want);
    }
}

static void test_any(void **state)
{
    sti_comm *c = *state;
    still_error err;
    bool x = false;
    assert_int_equal(sti_comm_any(c, &x, &err), STILL_OK);
    assert_false(x);
    for (int r = 0; r < sti_comm_size(c); r++) {
        x = sti_comm_rank(c) == r;
        assert_int_equal(sti_comm_any(c, &x, &err), STILL_OK);
        assert_true(x);
    }
}

static void test_agree(void **state)
{
    sti_comm *c = *state;
    for (int root = 0; root < sti_comm_size(c); root++) {
        still_error err = {0};
        char want[64];
        snprintf(want, sizeof want, "disk of rank %d is full", root);
        const still_status mine = sti_comm_rank(c) == root
                                      ? sti_fail(&err, STILL_E_IO, "%s", want)
                                      : STILL_OK;
        assert_int_equal(sti_comm_agree(c, root, mine, &err), STILL_E_IO);
        assert_string_equal(err.text, want);
        assert_int_equal(sti_comm_agree(c, root, STILL_OK, &err), STILL_OK);
    }
}

/* The first rank that failed is the one that all hear of. */
static void test_settle(void **state)
{
    sti_comm *c = *state;
    still_error err = {0};
    const int last = sti_comm_size(c) - 1;
    const bool fails = sti_comm_rank(c) >= last - 1; /* the last two */
    still_status mine = STILL_OK;
    assert_int_equal(sti_comm_settle(c, STILL_OK, &err), STILL_OK);
    if (fails) mine = sti_fail(&err, STILL_E_MEMORY, "rank %d", sti_comm_rank(c));
    assert_int_equal(sti_comm_settle(c, mine, &err), STILL_E_MEMORY);
    char want[32];
    snprintf(want, sizeof want, "rank %d", last > 0 ? last - 1 : 0);
    assert_string_equal(err.text, want);
    assert_int_equal(sti_comm_failed_rank(c), last > 0 ? last - 1 : -1);
}

/* A second one in the same process, beside the first. */
static void test_again(void **state)
{
    sti_comm *c = *state, *again;
    still_error err;
    assert_int_equal(sti_comm_new(&again, &err), STILL_OK);
    assert_int_equal(sti_comm_rank(again), sti_comm_rank(c));
    double x = 1;
    assert_int_equal(sti_comm_sum_doubles(again, &x, 1, &err), STILL_OK);
    assert_true(x == sti_comm_size(c));
    sti_comm_free(again);
    sti_comm_free(NULL);
}

/* A launcher this process cannot follow: refused, because each of the tasks would take
 * itself for the only one. */
static void test_lost_tasks(void **state)
{
    (void)state;
    sti_comm *c;
    still_error err;
    setenv("SLURM_STEP_NUM_TASKS", "4", 1);
    assert_int_equal(sti_comm_new(&c, &err), STILL_E_UNSUPPORTED);
    assert_non_null(strstr(err.text, "one of 4 tasks"));
    assert_non_null(strstr(err.text, "set MASTER_ADDR"));
    setenv("SLURM_STEP_NUM_TASKS", "1", 1);
    assert_int_equal(sti_comm_new(&c, &err), STILL_OK);
    sti_comm_free(c);
    setenv("SLURM_STEP_NUM_TASKS", "4", 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    setenv("MASTER_PORT", "1024", 1);
    assert_int_equal(sti_comm_new(&c, &err), STILL_E_ARG);
    assert_non_null(strstr(err.text, "SLURM_PROCID is not set"));
    unsetenv("SLURM_STEP_NUM_TASKS");
    unsetenv("MASTER_ADDR");
    unsetenv("MASTER_PORT");
}

/* A port that nobody listens on. */
static void set_free_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof at;
    char text[16];
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&at, &n), 0);
    close(fd);
    snprintf(text, sizeof text, "%d", ntohs(at.sin_port));
    setenv("MASTER_PORT", text, 1);
}

/* What torchrun would set, with one thing wrong. */
static void test_meeting(void **state)
{
    (void)state;
    sti_comm *c;
    still_error err;
    static const struct {
        const char *name, *value, *said;
        still_status status;
    } bad[] = {
        {"MASTER_ADDR", "", "MASTER_ADDR, the machine of rank 0", STILL_E_ARG},
        {"MASTER_ADDR", "no host", "MASTER_ADDR 'no host'", STILL_E_ARG},
        {"MASTER_ADDR", "192.0.2.1", "must be an address of the machine", STILL_E_IO},
        {"MASTER_PORT", NULL, "MASTER_PORT is not set", STILL_E_ARG},
        {"MASTER_PORT", "70000", "MASTER_PORT is '70000', expected 1 to", STILL_E_ARG},
        {"STILL_RANKS_PORT", "x", "STILL_RANKS_PORT is 'x'", STILL_E_ARG},
        {"STILL_RANKS_TIMEOUT", "0", "STILL_RANKS_TIMEOUT is '0'", STILL_E_ARG},
        {"RANK", "3", "RANK is '3', expected 0 to 2", STILL_E_ARG},
        {"RANK", "0", "1 of 3 ranks are there", STILL_E_IO},
        {"RANK", "1", "rank 1 of 3 did not reach rank 0 at 127.0.0.1", STILL_E_IO},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        setenv("RANK", "0", 1);
        setenv("WORLD_SIZE", "3", 1);
        setenv("MASTER_ADDR", "127.0.0.1", 1);
        setenv("STILL_RANKS_TIMEOUT", "1", 1);
        unsetenv("STILL_RANKS_PORT");
        set_free_port();
        if (bad[i].value)
            setenv(bad[i].name, bad[i].value, 1);
        else
            unsetenv(bad[i].name);
        assert_int_equal(sti_comm_new(&c, &err), bad[i].status);
        if (!strstr(err.text, bad[i].said)) fail_msg("%s", err.text);
    }
    setenv("WORLD_SIZE", "1", 1);
    assert_int_equal(sti_comm_new(&c, &err), STILL_OK);
    sti_comm_free(c);
    setenv("WORLD_SIZE", "3", 1);
    unsetenv("MASTER_ADDR");
    assert_int_equal(sti_comm_new(&c, &err), STILL_OK); /* of some other program */
    assert_int_equal(sti_comm_size(c), 1);
    sti_comm_free(c);
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
    unsetenv("MASTER_PORT");
    unsetenv("STILL_RANKS_TIMEOUT");
}

/* A module that is named and does not load; a process that is alone needs none. */
static void test_module(void **state)
{
    (void)state;
    static const struct {
        const char *module, *said;
        still_status status;
    } bad[] = {
        {"libstill-mpi.so", "not an absolute path", STILL_E_ARG},
        {"/nowhere/libstill-mpi.so", "/nowhere/libstill-mpi.so", STILL_E_UNSUPPORTED},
        {FIXTURES "/chat", FIXTURES, STILL_E_UNSUPPORTED},
    };
    sti_comm *c;
    still_error err;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        setenv("STILL_MPI_MODULE", bad[i].module, 1);
        setenv("PMI_SIZE", "2", 1);
        assert_int_equal(sti_comm_new(&c, &err), bad[i].status);
        assert_non_null(strstr(err.text, bad[i].said));
        setenv("PMI_SIZE", "1", 1);
        assert_int_equal(sti_comm_new(&c, &err), STILL_OK);
        assert_int_equal(sti_comm_size(c), 1);
        sti_comm_free(c);
    }
    unsetenv("PMI_SIZE");
    unsetenv("STILL_MPI_MODULE");
}

/* A job of two that rank 1 leaves early; both return what a failed command does. */
static int lose_rank(bool killed)
{
    sti_comm *c;
    still_error err;
    bool x = true;
    signal(SIGTERM, SIG_IGN); /* the launcher's, so that rank 0 can speak */
    if (sti_comm_new(&c, &err) != STILL_OK || sti_comm_size(c) != 2) return 2;
    if (sti_comm_any(c, &x, &err) != STILL_OK) return 2;
    if (sti_comm_rank(c) == 1) {
        if (killed) raise(SIGKILL);
        fprintf(stderr, "rank 1: out of luck\n");
    } else {
        float sum[100] = {0};
        if (sti_comm_sum(c, sum, 100, &err) != STILL_E_IO) return 2;
        fprintf(stderr, "%s: job failed as it should\n", err.text);
    }
    sti_comm_fail(c);
    sti_comm_free(c);
    return 1;
}

/* Ranks that do not agree on what to do: an error, and no sum of other numbers. */
static int go_astray(void)
{
    sti_comm *c;
    still_error err;
    float x[64] = {0};
    if (sti_comm_new(&c, &err) != STILL_OK || sti_comm_size(c) != 2) return 2;
    const size_t n = sti_comm_rank(c) ? 32 : 64;
    if (sti_comm_sum(c, x, n, &err) != STILL_E_IO) return 2;
    fprintf(stderr, "%s: job failed as it should\n", err.text);
    sti_comm_fail(c);
    sti_comm_free(c);
    return 1;
}

int main(int argc, char **argv)
{
    const char *job = argc > 1 ? argv[1] : "";
    const struct CMUnitTest ranks[] = {
        cmocka_unit_test(test_sum),    cmocka_unit_test(test_sum_doubles),
        cmocka_unit_test(test_any),    cmocka_unit_test(test_agree),
        cmocka_unit_test(test_settle), cmocka_unit_test(test_again),
    };
    const struct CMUnitTest alone[] = {
        cmocka_unit_test(test_lost_tasks),
        cmocka_unit_test(test_meeting),
        cmocka_unit_test(test_module),
    };
    if (strcmp(job, "killed") == 0 || strcmp(job, "gives-up") == 0)
        return lose_rank(strcmp(job, "killed") == 0);
    if (strcmp(job, "strays") == 0) return go_astray();
    const int failed = cmocka_run_group_tests(ranks, join, leave);
    if (strcmp(job, "ranks") == 0) return failed;
    return failed + cmocka_run_group_tests(alone, NULL, NULL);
}
