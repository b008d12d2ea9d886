/* command_server.c - runs one command of still again and again, each time in a process of
 * its own, for scripts/mutated-files.
 *
 *   command-server LOG MEGABYTES SECONDS still COMMAND ARGUMENT ...
 *
 * Starting a program under the sanitizers takes far longer than reading a small file, so
 * the program is started once and forks. A byte on standard input runs the command with
 * its output in LOG; a line on standard output then says how it ended: exit STATUS or
 * signal NUMBER, the largest resident size in KiB, and milliseconds of processor time.
 * A command that takes more address space or processor time than it may is stopped. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

int still_main(int argc, char **argv); /* main() of src/cli/main.c under this name */

/* Pages that this process has mapped, with what the sanitizers reserved for themselves. */
static unsigned long long pages_mapped(void)
{
    unsigned long long pages = 0;
    FILE *f = fopen("/proc/self/statm", "re");
    if (!f || fscanf(f, "%llu", &pages) != 1) abort();
    fclose(f);
    return pages;
}

static void limit(int what, rlim_t most)
{
    if (setrlimit(what, &(struct rlimit){most, most}) != 0) abort();
}

/* Waiting costs no processor time, so a command that hangs is ended by a clock. */
static void run_command(const char *log, unsigned long long megabytes, unsigned seconds,
                        int argc, char **argv)
{
    const unsigned long long page = (unsigned long long)sysconf(_SC_PAGESIZE);
    const int in = open("/dev/null", O_RDONLY),
              out = open(log, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (in < 0 || out < 0 || dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(out, 2) < 0)
        abort();
    limit(RLIMIT_AS, pages_mapped() * page + (megabytes << 20));
    limit(RLIMIT_CPU, seconds);
    limit(RLIMIT_CORE, 0);
    alarm(30 * seconds);
    exit(still_main(argc, argv));
}

int main(int argc, char **argv)
{
    if (argc < 6) {
        fprintf(stderr, "usage: command-server LOG MEGABYTES SECONDS still COMMAND "
                        "ARGUMENT ...\n");
        return 2;
    }
    char go;
    while (read(0, &go, 1) == 1) {
        struct rusage use;
        int status;
        const pid_t child = fork();
        if (child == 0)
            run_command(argv[1], strtoull(argv[2], NULL, 10),
                        (unsigned)strtoul(argv[3], NULL, 10), argc - 4, argv + 4);
        if (child < 0 || wait4(child, &status, 0, &use) != child) return 1;
        printf("%s %d %ld %ld\n", WIFSIGNALED(status) ? "signal" : "exit",
               WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status),
               use.ru_maxrss,
               (use.ru_utime.tv_sec + use.ru_stime.tv_sec) * 1000L +
                   (use.ru_utime.tv_usec + use.ru_stime.tv_usec) / 1000L);
        fflush(stdout);
    }
    return 0;
}
