/* new_file.c - see new_file.h. */
#include "base/new_file.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/hash.h"
#include "base/mem.h"

enum { BUFFER = 1 << 16, TRIES = 100 };

struct sti_new_file {
    char *path, *temp; /* temp NULL: path is written directly */
    int fd;
    size_t n; /* bytes in buffer */
    unsigned char buffer[BUFFER];
};

/* ---- Errors -------------------------------------------------------------- */

still_status sti_fail_write(still_error *err, const char *path, int why)
{
    const char *advice = "";
    if (why == ENOSPC) advice = " (the disk is full: make room or name another folder)";
    if (why == EDQUOT) advice = " (your share of the disk is used up: make room)";
    if (why == EFBIG)
        advice =
            " (larger than files may be here: see `ulimit -f` and the file system)";
    if (why == ENOENT) advice = " (its folder is not there)";
    if (why == EROFS || why == EACCES) advice = " (name a folder you may write to)";
    return sti_fail(err, STILL_E_IO, "%s: cannot write: %s%s", path, strerror(why),
                    advice);
}

/* ---- Names --------------------------------------------------------------- */

/* "path.NUMBER.tmp", with a new random number each time. */
static void name_temp(const char *path, char *out, size_t capacity)
{
    const sti_hash_key random = sti_hash_key_new();
    snprintf(out, capacity, "%s.%llu.tmp", path, (unsigned long long)random.k[0]);
}

/* Calls `make` with a new name beside path; returns its result, or -1 with errno. */
static int make_temp(const char *path, int (*make)(const char *), char **out)
{
    const size_t capacity = strlen(path) + 32;
    char *temp = sti_alloc(capacity, 1);
    int made = -1;
    if (!temp) errno = ENOMEM;
    for (int i = 0; temp && made < 0 && i < TRIES; i++) {
        name_temp(path, temp, capacity);
        made = make(temp);
        if (made < 0 && errno != EEXIST) break;
    }
    const int why = errno;
    if (made < 0) free(temp);
    *out = made < 0 ? NULL : temp;
    errno = why;
    return made;
}

static int make_file(const char *path)
{
    return open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
}

static int make_folder(const char *path)
{
    return mkdir(path, 0777);
}

static still_status fail_make(still_error *err, const char *path, int why)
{
    if (why == ENOMEM) return sti_fail_memory(err, path, strlen(path));
    return sti_fail_write(err, path, why);
}

still_status sti_new_folder(const char *path, char **out, still_error *err)
{
    if (make_temp(path, make_folder, out) == 0) return STILL_OK;
    return fail_make(err, path, errno);
}

static bool is_under(const char *path, const char *folder)
{
    return strncmp(path, folder, strlen(folder)) == 0;
}

/* Whether path is something that must not be replaced by a file: a device, a pipe, or a
 * link to one, as /dev/stdout is even where it leads to a file. */
static bool is_special(const char *path)
{
    struct stat st;
    if (is_under(path, "/proc/") ||
        (is_under(path, "/dev/") && !is_under(path, "/dev/shm/")))
        return true;
    return stat(path, &st) == 0 && !S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode);
}

/* ---- Writing ------------------------------------------------------------- */

bool sti_write_all(int fd, const void *p, size_t n)
{
    const unsigned char *at = p;
    while (n > 0) {
        const ssize_t k = write(fd, at, n);
        if (k < 0 && errno == EINTR) continue;
        if (k == 0) errno = EIO;
        if (k <= 0) return false;
        at += k;
        n -= (size_t)k;
    }
    return true;
}

still_status sti_new_file_open(const char *path, sti_new_file **out, still_error *err)
{
    *out = NULL;
    sti_new_file *f = sti_alloc(1, sizeof *f);
    if (!f) return sti_fail_memory(err, path, sizeof *f);
    f->fd = -1;
    f->path = sti_strdup(path);
    if (!f->path) {
        free(f);
        return sti_fail_memory(err, path, strlen(path));
    }
    f->fd = is_special(path) ? open(path, O_WRONLY | O_CLOEXEC)
                             : make_temp(path, make_file, &f->temp);
    if (f->fd >= 0) {
        *out = f;
        return STILL_OK;
    }
    const int why = errno;
    sti_new_file_abort(f);
    return fail_make(err, path, why);
}

void sti_new_file_abort(sti_new_file *f)
{
    if (!f) return;
    if (f->fd >= 0) close(f->fd);
    if (f->temp) unlink(f->temp);
    free(f->temp);
    free(f->path);
    free(f);
}

static still_status flush(sti_new_file *f, still_error *err)
{
    const size_t n = f->n;
    f->n = 0;
    if (sti_write_all(f->fd, f->buffer, n)) return STILL_OK;
    return sti_fail_write(err, f->path, errno);
}

still_status sti_new_file_put(sti_new_file *f, const void *p, size_t n,
                              still_error *err)
{
    if (n > BUFFER - f->n) STI_TRY(flush(f, err));
    if (n > BUFFER - f->n) {
        if (sti_write_all(f->fd, p, n)) return STILL_OK;
        return sti_fail_write(err, f->path, errno);
    }
    if (n) memcpy(f->buffer + f->n, p, n);
    f->n += n;
    return STILL_OK;
}

still_status sti_new_file_put_at(sti_new_file *f, uint64_t at, const void *p, size_t n,
                                 still_error *err)
{
    STI_TRY(flush(f, err));
    const bool ok = lseek(f->fd, (off_t)at, SEEK_SET) >= 0 &&
                    sti_write_all(f->fd, p, n) && lseek(f->fd, 0, SEEK_END) >= 0;
    return ok ? STILL_OK : sti_fail_write(err, f->path, errno);
}

static still_status finish(sti_new_file *f, still_error *err)
{
    STI_TRY(flush(f, err));
    if (f->temp && fsync(f->fd) != 0) return sti_fail_write(err, f->path, errno);
    const int closed = close(f->fd);
    f->fd = -1;
    if (closed != 0 || (f->temp && rename(f->temp, f->path) != 0))
        return sti_fail_write(err, f->path, errno);
    if (!f->temp) return STILL_OK;
    free(f->temp); /* there is none any more */
    f->temp = NULL;
    sti_sync_folder_of(f->path);
    return STILL_OK;
}

still_status sti_new_file_finish(sti_new_file *f, still_error *err)
{
    const still_status st = finish(f, err);
    sti_new_file_abort(f); /* frees; removes what is left of a failure */
    return st;
}

still_status sti_write_file(const char *path, const void *p, size_t n, still_error *err)
{
    sti_new_file *f;
    still_status st = sti_new_file_open(path, &f, err);
    if (!f) return st;
    st = sti_new_file_put(f, p, n, err);
    if (st == STILL_OK) return sti_new_file_finish(f, err);
    sti_new_file_abort(f);
    return st;
}

/* ---- Parts --------------------------------------------------------------- */

static bool sync_path(const char *path, int flags)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC | flags);
    if (fd < 0) return false;
    const bool done = fsync(fd) == 0;
    return close(fd) == 0 && done;
}

void sti_sync_folder_of(const char *path)
{
    char *copy = sti_strdup(path);
    if (copy) sync_path(dirname(copy), O_DIRECTORY);
    free(copy);
}

still_status sti_publish(const char *temp, const char *path, still_error *err)
{
    if (!sync_path(temp, O_NOFOLLOW)) return sti_fail_write(err, temp, errno);
    if (rename(temp, path) != 0) return sti_fail_write(err, path, errno);
    sti_sync_folder_of(path);
    return STILL_OK;
}

still_status sti_open_own(const char *path, int flags, int *fd, still_error *err)
{
    struct stat st;
    *fd = open(path, flags | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
    if (*fd < 0 && errno == ELOOP)
        return sti_fail(err, STILL_E_IO, "%s: is a link; remove it", path);
    if (*fd < 0) return sti_fail_write(err, path, errno);
    if (fstat(*fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_nlink <= 1)
        return STILL_OK;
    close(*fd);
    *fd = -1;
    return sti_fail(err, STILL_E_IO,
                    "%s: is no file of its own (a device, or a file that other names "
                    "lead to); remove it",
                    path);
}
