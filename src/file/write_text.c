/* write_text.c - small text files that are there whole or not at all. */
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "file/store.h"

static bool put_all(int fd, const char *p, size_t n)
{
    while (n > 0) {
        ssize_t k = write(fd, p, n);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return false;
        p += k;
        n -= (size_t)k;
    }
    return fsync(fd) == 0;
}

still_status sti_path_join(char out[STI_PATH_ROOM], const char *dir, const char *name,
                           still_error *err)
{
    if (snprintf(out, STI_PATH_ROOM, "%s/%s", dir, name) >= STI_PATH_ROOM)
        return sti_fail(err, STILL_E_ARG, "%s: the path is too long", dir);
    return STILL_OK;
}

void sti_sync_folder_of(const char *path)
{
    char *copy = sti_strdup(path);
    int fd = copy ? open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
    free(copy);
}

still_status sti_write_text(const char *path, const char *text, still_error *err)
{
    size_t room = strlen(path) + 32;
    char *temp = sti_alloc(room, 1);
    if (!temp) return sti_fail_memory(err, path, room);
    snprintf(temp, room, "%s.%ld.tmp", path, (long)getpid());
    int fd = open(temp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    bool ok = fd >= 0 && put_all(fd, text, strlen(text));
    int why = errno;
    if (fd >= 0 && close(fd) != 0 && ok) {
        ok = false;
        why = errno;
    }
    if (ok && rename(temp, path) != 0) {
        ok = false;
        why = errno;
    }
    if (!ok && fd >= 0) unlink(temp);
    free(temp);
    if (!ok)
        return sti_fail(err, STILL_E_IO, "%s: cannot write: %s", path, strerror(why));
    sti_sync_folder_of(path);
    return STILL_OK;
}
