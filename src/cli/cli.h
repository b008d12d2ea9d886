/* cli.h - what every file of the command line shares: exit statuses, error lines,
 * standard output, and the flag that Ctrl-C sets. */
#ifndef CLI_H
#define CLI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/json.h"
#include "still.h"

enum {
    CLI_OK = 0,
    CLI_FAILED = 1,
    CLI_USAGE = 2,
    CLI_INTERRUPTED = 130,
};

/* ---- Errors: one line "still: ..." on stderr; the return value is the status */

int cli_fail(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
int cli_usage(const char *command, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
/* Prints the error of a failed call; nothing for a cancelled one, as the user knows. */
int cli_fail_error(const still_error *err);
/* The same, with a status that compilers and analyzers can see. */
static inline int cli_status(int printed, int status)
{
    (void)printed;
    return status;
}
#define cli_fail(...) cli_status(cli_fail(__VA_ARGS__), CLI_FAILED)
#define cli_usage(...) cli_status(cli_usage(__VA_ARGS__), CLI_USAGE)

/* A remark that is not a failure: "still: warning: ...". */
void cli_warn(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* ---- Standard output ----------------------------------------------------- */

/* Text for people, on standard output and on standard error. What files say may be in
 * it: control characters other than newline and tab become '?'. */
void cli_print(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
void cli_note(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* A name from a file as part of a line: newlines become '?' too. Returns out. */
const char *cli_line(char *out, size_t room, const char *text);
/* Text of a model: as it is, but made harmless where a terminal shows it. */
void cli_put(const char *text, size_t n);
/* Writes out what was put. False: the reader has gone or the disk is full; the command
 * should stop, and cli_finish reports it. */
bool cli_flush(void);
/* Flushes; turns a failed write into status 1 with a message, and a closed pipe
 * (still generate | head) into a silent exit. */
int cli_finish(int status);

/* Prints one object on one line, flushes, and takes over the reference. */
int cli_print_json(json_t *object);
/* A JSON string of n bytes; invalid UTF-8 becomes U+FFFD. */
json_t *cli_json_text(const char *text, size_t n);

/* ---- Small things -------------------------------------------------------- */

/* "98.9 MiB"; returns buf. */
const char *cli_bytes(char buf[32], uint64_t bytes);
/* The last part of a path, or all of it if that is empty; borrowed. */
const char *cli_base(const char *path);
double cli_now(void); /* seconds of a monotonic clock */
uint64_t cli_peak_rss(void);
/* A whole file, or standard input for "-"; at most cap bytes. free() *out, which is
 * NUL-terminated. */
still_status cli_read(const char *path, size_t cap, char **out, size_t *n,
                      still_error *err);

/* ---- Ctrl-C -------------------------------------------------------------- */

typedef enum cli_signals {
    CLI_SIGNALS_TWICE, /* the first sets a flag, the second ends the process */
    CLI_SIGNALS_AT_ONCE, /* the first ends it: nobody looks at the flag, nothing is lost */
    CLI_SIGNALS_FLAG     /* none does: there is a conversation to lose */
} cli_signals;

/* SIGINT and SIGTERM set a flag that loops and callbacks look at; the second of them ends
 * the process with status 130 at once. SIGPIPE is ignored: a closed pipe is seen when
 * writing. */
void cli_signals_install(void);
cli_signals cli_signals_mode(cli_signals mode); /* returns the one before */
/* From now on signals, and those of a terminal (its size, Ctrl-Z), are bytes that come out
 * of a pipe, to be waited for together with keys; fd, which does not block, is where they
 * go in. -1: as before. */
void cli_signals_to(int fd);
bool cli_interrupted(void);
bool cli_terminated(void); /* by SIGTERM, which cli_interrupt_clear does not forget */
void cli_interrupt_clear(void);

#endif
