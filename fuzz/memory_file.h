/* memory_file.h - the fuzzer's bytes as a file, so that the mapping that users go
 * through is the one that is tested. */
#ifndef FUZZ_MEMORY_FILE_H
#define FUZZ_MEMORY_FILE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

/* A file that holds the n bytes; *path names it until the descriptor is closed. */
static inline int memory_file(const uint8_t *data, size_t n, char path[32])
{
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    if (fd < 0) abort();
    for (size_t done = 0; done < n;) {
        ssize_t k = write(fd, data + done, n - done);
        if (k <= 0) abort();
        done += (size_t)k;
    }
    snprintf(path, 32, "/proc/self/fd/%d", fd);
    return fd;
}

#endif
