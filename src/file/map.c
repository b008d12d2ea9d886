/* map.c - read-only mappings of whole files.
 *
 * Mapping gives no madvise: opening a model must not read it, and weights are later
 * streamed in an order that suits the system's read-ahead. A file truncated while it is
 * mapped raises SIGBUS on access, as in any program. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"
#include "file/parse.h"

static still_status map_fd(int fd, const char *path, sti_map *out, still_error *err)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return sti_fail(err, STILL_E_IO, "%s: %s", path, strerror(errno));
    if (S_ISDIR(st.st_mode))
        return sti_fail(err, STILL_E_IO, "%s: is a folder, expected a file", path);
    if (!S_ISREG(st.st_mode))
        return sti_fail(err, STILL_E_IO, "%s: is not a regular file", path);
    if (st.st_size == 0)
        return sti_fail(err, STILL_E_FORMAT, "%s: file is empty", path);
    if ((uintmax_t)st.st_size > SIZE_MAX / 2)
        return sti_fail(err, STILL_E_LIMIT, "%s: file too large to map", path);
    size_t size = (size_t)st.st_size;
    void *p = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (p == MAP_FAILED)
        return sti_fail(err, errno == ENOMEM ? STILL_E_MEMORY : STILL_E_IO,
                        "%s: cannot map %zu bytes: %s", path, size, strerror(errno));
    char *name = sti_strdup(path);
    if (!name) {
        munmap(p, size);
        return sti_fail_memory(err, path, strlen(path) + 1);
    }
    *out = (sti_map){name, p, size};
    return STILL_OK;
}

still_status sti_map_open(const char *path, sti_map *out, still_error *err)
{
    *out = (sti_map){0};
    /* O_NONBLOCK: a pipe is refused below instead of waited for. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        if (errno == ENOENT)
            return sti_fail(err, STILL_E_IO, "%s: no such file or folder", path);
        return sti_fail(err, STILL_E_IO, "%s: cannot open: %s", path, strerror(errno));
    }
    still_status status = map_fd(fd, path, out, err);
    close(fd);
    return status;
}

void sti_map_close(sti_map *m)
{
    if (m->data) {
        size_t lead = (uintptr_t)m->data % sti_page_size(); /* not 0 after a shift */
        munmap((void *)(uintptr_t)(m->data - lead), m->size + lead);
    }
    free(m->path);
    *m = (sti_map){0};
}

void sti_map_drop(const void *p, size_t n)
{
    uintptr_t page = sti_page_size(), begin = (uintptr_t)p, end = begin + n;
    begin = (begin + page - 1) & ~(page - 1);
    end &= ~(page - 1);
    if (begin < end) madvise((void *)begin, end - begin, MADV_DONTNEED);
}

/* The copy lives in a memory file, not in anonymous pages: sti_map_drop may then drop
 * its pages like those of any file, and they come back with their contents. */
still_status sti_map_shift(sti_map *m, size_t pad, still_error *err)
{
    size_t size = m->size + pad;
    int fd = memfd_create("still", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size) != 0) goto fail;
    for (size_t done = 0; done < m->size;) {
        ssize_t n = pwrite(fd, m->data + done, m->size - done, (off_t)(pad + done));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) goto fail;
        done += (size_t)n;
    }
    unsigned char *p = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (p == MAP_FAILED) goto fail;
    close(fd);
    munmap((void *)(uintptr_t)m->data, m->size);
    m->data = p + pad;
    return STILL_OK;
fail:
    if (fd >= 0) close(fd);
    return sti_fail_memory(err, m->path, size);
}
