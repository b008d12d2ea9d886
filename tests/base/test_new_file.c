/* Files are there whole or not at all: the order of system calls, each of them failing,
 * links planted where files will be, devices. The linker sends fsync, rename, write and
 * getrandom to the functions below. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include "../run.h"
#include "../skip.h"
#include "base/new_file.h"

/* ---- System calls -------------------------------------------------------- */

int __real_fsync(int fd);
int __real_rename(const char *from, const char *to);
ssize_t __real_write(int fd, const void *p, size_t n);
ssize_t __real_getrandom(void *p, size_t n, unsigned flags);
int __wrap_fsync(int fd);
int __wrap_rename(const char *from, const char *to);
ssize_t __wrap_write(int fd, const void *p, size_t n);
ssize_t __wrap_getrandom(void *p, size_t n, unsigned flags);

static char events[256]; /* w: write, s: sync of a file, d: of a folder, r: rename */
static char failing;     /* the event that fails, with why */
static int why, fail_after;
static size_t most = SIZE_MAX; /* bytes a write takes */
static bool interrupted;       /* every second write is */
static uint64_t guessed;       /* what getrandom gives, then one more; 0: random */

static bool happens(char event)
{
    const size_t n = strlen(events);
    if (n && event == 'w' && events[n - 1] == 'w')
        return failing != event || fail_after-- > 0; /* one letter for many writes */
    if (n + 1 < sizeof events) events[n] = event;
    if (failing != event) return true;
    return fail_after-- > 0;
}

int __wrap_fsync(int fd)
{
    struct stat st;
    assert_int_equal(fstat(fd, &st), 0);
    if (happens(S_ISDIR(st.st_mode) ? 'd' : 's')) return __real_fsync(fd);
    errno = why;
    return -1;
}

int __wrap_rename(const char *from, const char *to)
{
    if (happens('r')) return __real_rename(from, to);
    errno = why;
    return -1;
}

ssize_t __wrap_write(int fd, const void *p, size_t n)
{
    static bool turn;
    if (fd <= STDERR_FILENO) return __real_write(fd, p, n);
    if (interrupted && (turn = !turn)) {
        errno = EINTR;
        return -1;
    }
    if (happens('w')) return __real_write(fd, p, n < most ? n : most);
    errno = why;
    return -1;
}

ssize_t __wrap_getrandom(void *p, size_t n, unsigned flags)
{
    if (!guessed) return __real_getrandom(p, n, flags);
    memset(p, 0, n);
    memcpy(p, &guessed, sizeof guessed);
    guessed++;
    return (ssize_t)n;
}

/* ---- A folder ------------------------------------------------------------ */

static char dir[] = "/tmp/still-new-file-XXXXXX";
static char path[96], other[96];

static int make_dir(void **state)
{
    (void)state;
    if (!mkdtemp(dir)) return 1;
    snprintf(path, sizeof path, "%s/out", dir);
    snprintf(other, sizeof other, "%s/other", dir);
    return 0;
}

static int begin(void **state)
{
    (void)state;
    memset(events, 0, sizeof events);
    failing = 0;
    fail_after = 0;
    most = SIZE_MAX;
    interrupted = false;
    guessed = 0;
    return 0;
}

/* No temporary file: the folder holds the two files of the tests and nothing else. */
static void check_nothing_left(void)
{
    DIR *d = opendir(dir);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..") &&
            strcmp(e->d_name, "out") && strcmp(e->d_name, "other"))
            fail_msg("%s was left", e->d_name);
    closedir(d);
}

static int remove_dir(void **state)
{
    (void)state;
    unlink(path);
    unlink(other);
    return rmdir(dir);
}

static void check_holds(const char *file, const char *want, size_t n)
{
    static char got[1 << 20];
    FILE *f = fopen(file, "rb");
    assert_non_null(f);
    assert_int_equal(fread(got, 1, sizeof got, f), n);
    assert_memory_equal(got, want, n);
    fclose(f);
}

static void put(const char *file, const char *text)
{
    FILE *f = fopen(file, "wb");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void ok(still_status st, const still_error *err)
{
    if (st != STILL_OK) fail_msg("%s", err->text);
}

/* ---- Tests --------------------------------------------------------------- */

static void test_order(void **state)
{
    (void)state;
    still_error err;
    put(path, "old");
    ok(sti_write_file(path, "new", 3, &err), &err);
    assert_string_equal(events, "wsrd");
    check_holds(path, "new", 3);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    const mode_t mask = umask(0);
    umask(mask);
    assert_int_equal(st.st_mode & 0777, 0666 & ~mask);
    begin(state);
    put(other, "part");
    ok(sti_publish(other, path, &err), &err);
    assert_string_equal(events, "srd");
    check_holds(path, "part", 4);
}

static void test_short_and_interrupted_writes(void **state)
{
    (void)state;
    enum { N = 200000 };
    still_error err;
    char *text = malloc(N);
    assert_non_null(text);
    for (size_t i = 0; i < N; i++) text[i] = (char)(i * 7 + i / 251);
    most = 4097;
    interrupted = true;
    sti_new_file *f;
    ok(sti_new_file_open(path, &f, &err), &err);
    for (size_t at = 0, n = 1; at < N; at += n, n = n * 3 + 1) {
        if (n > N - at) n = N - at;
        ok(sti_new_file_put(f, text + at, n, &err), &err);
    }
    text[0] = 'H';
    text[1] = 'E';
    ok(sti_new_file_put_at(f, 0, "HE", 2, &err), &err);
    ok(sti_new_file_put(f, "end", 3, &err), &err);
    ok(sti_new_file_finish(f, &err), &err);
    text = realloc(text, N + 3);
    assert_non_null(text);
    memcpy(text + N, "end", 3);
    check_holds(path, text, N + 3);
    free(text);
}

/* Whatever fails, the old file is there, nothing else is, and the line says why. */
static void test_failures(void **state)
{
    static const struct {
        char event;
        int why, after;
        const char *word;
    } cases[] = {
        {'w', ENOSPC, 0, "the disk is full"}, {'w', ENOSPC, 2, "is full"},
        {'w', EFBIG, 1, "ulimit -f"},         {'w', EDQUOT, 0, "used up"},
        {'s', EIO, 0, "Input/output error"},  {'r', EACCES, 0, "may write to"}};
    static const char big[300000];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        still_error err = {0};
        begin(state);
        put(path, "old");
        most = 100000;
        failing = cases[i].event;
        why = cases[i].why;
        fail_after = cases[i].after;
        assert_int_equal(sti_write_file(path, big, sizeof big, &err), STILL_E_IO);
        if (!strstr(err.text, cases[i].word) || strncmp(err.text, path, strlen(path)))
            fail_msg("'%s' lacks '%s'", err.text, cases[i].word);
        check_holds(path, "old", 3);
        check_nothing_left();
    }
    begin(state);
    failing = 'd'; /* some file systems cannot: not an error */
    why = EINVAL;
    still_error err;
    ok(sti_write_file(path, "new", 3, &err), &err);
}

static void test_abort(void **state)
{
    (void)state;
    still_error err;
    sti_new_file *f;
    put(path, "old");
    ok(sti_new_file_open(path, &f, &err), &err);
    ok(sti_new_file_put(f, "new", 3, &err), &err);
    sti_new_file_abort(f);
    check_holds(path, "old", 3);
    check_nothing_left();
    sti_new_file_abort(NULL);
}

/* Somebody guesses the name: what lies there is left alone, and another is taken. */
static void test_planted(void **state)
{
    (void)state;
    char planted[2][112];
    still_error err;
    put(other, "precious");
    for (int i = 0; i < 2; i++)
        snprintf(planted[i], sizeof planted[i], "%s.%d.tmp", path, 41 + i);
    assert_int_equal(symlink(other, planted[0]), 0);
    assert_int_equal(link(other, planted[1]), 0);
    guessed = 41;
    ok(sti_write_file(path, "mine", 4, &err), &err);
    assert_int_equal(guessed, 44);
    check_holds(path, "mine", 4);
    check_holds(other, "precious", 8);
    guessed = 41;
    char *folder;
    ok(sti_new_folder(path, &folder, &err), &err);
    assert_int_equal(guessed, 44);
    assert_int_equal(rmdir(folder), 0);
    free(folder);
    assert_int_equal(unlink(planted[0]) | unlink(planted[1]), 0);
    /* A link at the path itself is replaced, not followed. */
    unlink(path);
    assert_int_equal(symlink(other, path), 0);
    ok(sti_write_file(path, "mine", 4, &err), &err);
    check_holds(other, "precious", 8);
    struct stat st;
    assert_int_equal(lstat(path, &st), 0);
    assert_true(S_ISREG(st.st_mode));
}

static void test_no_place(void **state)
{
    (void)state;
    still_error err = {0};
    char inside[128];
    snprintf(inside, sizeof inside, "%s/no/such", dir);
    assert_int_equal(sti_write_file(inside, "x", 1, &err), STILL_E_IO);
    assert_non_null(strstr(err.text, "its folder is not there"));
    assert_int_equal(sti_write_file(dir, "x", 1, &err), STILL_E_IO);
    if (geteuid() == 0) return; /* who may write everywhere */
    assert_int_equal(chmod(dir, 0555), 0);
    const still_status st = sti_write_file(path, "x", 1, &err);
    assert_int_equal(chmod(dir, 0777), 0);
    assert_int_equal(st, STILL_E_IO);
    assert_non_null(strstr(err.text, "may write to"));
}

/* Devices are written to and stay what they are. */
static void test_devices(void **state)
{
    (void)state;
    still_error err;
    struct stat st;
    ok(sti_write_file("/dev/null", "x", 1, &err), &err);
    assert_int_equal(stat("/dev/null", &st), 0);
    assert_true(S_ISCHR(st.st_mode));
    assert_string_equal(events, "w");
    if (stat("/dev/full", &st) != 0) return;
    assert_int_equal(sti_write_file("/dev/full", "x", 1, &err), STILL_E_IO);
    assert_non_null(strstr(err.text, "/dev/full: cannot write"));
    assert_non_null(strstr(err.text, "the disk is full"));
}

/* Files in memory are files, wherever the system keeps them. */
static void test_shared_memory(void **state)
{
    (void)state;
    still_error err;
    char shared[64];
    snprintf(shared, sizeof shared, "/dev/shm/still-%ld", (long)getpid());
    if (access("/dev/shm", W_OK) != 0) skip_because("/dev/shm cannot be written to");
    ok(sti_write_file(shared, "longer", 6, &err), &err);
    ok(sti_write_file(shared, "new", 3, &err), &err);
    check_holds(shared, "new", 3);
    assert_int_equal(unlink(shared), 0);
}

static void test_file_too_large(void **state)
{
    (void)state;
    still_error err = {0};
    static const char big[200000];
    struct rlimit was;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &was), 0);
    const struct rlimit small = {.rlim_cur = 100000, .rlim_max = was.rlim_max};
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    put(path, "old");
    const still_status st = sti_write_file(path, big, sizeof big, &err);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &was), 0);
    signal(SIGXFSZ, SIG_DFL);
    assert_int_equal(st, STILL_E_IO);
    assert_non_null(strstr(err.text, "ulimit -f"));
    check_holds(path, "old", 3);
}

/* Files that are gone on with: ours only. */
static void test_open_own(void **state)
{
    (void)state;
    still_error err = {0};
    int fd;
    unlink(path);
    put(other, "precious");
    ok(sti_open_own(path, O_RDWR, &fd, &err), &err);
    assert_true(sti_write_all(fd, "1234", 4));
    close(fd);
    ok(sti_open_own(path, O_WRONLY | O_APPEND, &fd, &err), &err);
    assert_true(sti_write_all(fd, "56", 2));
    close(fd);
    check_holds(path, "123456", 6);
    for (int kind = 0; kind < 3; kind++) {
        unlink(path);
        if (kind == 0) assert_int_equal(symlink(other, path), 0);
        if (kind == 1) assert_int_equal(link(other, path), 0);
        if (kind == 2) assert_int_equal(mkfifo(path, 0666), 0);
        assert_int_equal(sti_open_own(path, O_RDWR, &fd, &err), STILL_E_IO);
        assert_int_equal(fd, -1);
        assert_non_null(strstr(err.text, "remove it"));
    }
    check_holds(other, "precious", 8);
}

RUN_TESTS_IN(make_dir, remove_dir, cmocka_unit_test_setup(test_order, begin),
             cmocka_unit_test_setup(test_short_and_interrupted_writes, begin),
             cmocka_unit_test_setup(test_failures, begin),
             cmocka_unit_test_setup(test_abort, begin),
             cmocka_unit_test_setup(test_planted, begin),
             cmocka_unit_test_setup(test_no_place, begin),
             cmocka_unit_test_setup(test_devices, begin),
             cmocka_unit_test_setup(test_shared_memory, begin),
             cmocka_unit_test_setup(test_file_too_large, begin),
             cmocka_unit_test_setup(test_open_own, begin))
