/* new_file.h - atomic writes: a file appears whole or not at all.
 *
 * The bytes go to a new file beside the target, under a name nobody can guess and
 * created exclusively, so that no link planted there is followed. When all of them are
 * on disk the file is renamed and the folder synced, so at any time there is either the
 * old file or the new one. A failure removes the unfinished file.
 *
 * Devices and pipes (/dev/stdout, /dev/null, a FIFO) cannot be replaced and are written
 * to directly. Logs, which grow line by line, do not go through here. */
#ifndef STI_BASE_NEW_FILE_H
#define STI_BASE_NEW_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

typedef struct sti_new_file sti_new_file;

still_status sti_new_file_open(const char *path, sti_new_file **out, still_error *err);
/* Appends n bytes. */
still_status sti_new_file_put(sti_new_file *f, const void *p, size_t n,
                              still_error *err);
/* Overwrites n of the bytes written so far, from byte `at` on. */
still_status sti_new_file_put_at(sti_new_file *f, uint64_t at, const void *p, size_t n,
                                 still_error *err);
/* Syncs and renames. Frees f either way; on failure, and on sti_new_file_abort, the
 * file that was at path is untouched. */
still_status sti_new_file_finish(sti_new_file *f, still_error *err);
void sti_new_file_abort(sti_new_file *f); /* NULL is fine */

/* A whole file at once. */
still_status sti_write_file(const char *path, const void *p, size_t n,
                            still_error *err);

/* ---- Parts, for what has to go other ways -------------------------------- */

/* A new folder beside path, for files that are published together; *out is
 * allocated. */
still_status sti_new_folder(const char *path, char **out, still_error *err);
/* Syncs the file `temp`, gives it the name `path` and syncs the folder. */
still_status sti_publish(const char *temp, const char *path, still_error *err);
/* Makes a file's new name itself durable; best effort, as some file systems refuse. */
void sti_sync_folder_of(const char *path);

/* Opens an existing file of ours to continue writing, or a new one. flags: of
 * open(2), without those of creation. Refuses symbolic links, and files with other
 * hard links. */
still_status sti_open_own(const char *path, int flags, int *fd, still_error *err);
/* write(2) until all is written; false and errno otherwise. */
bool sti_write_all(int fd, const void *p, size_t n);
/* The error of a failed write: what the system says, and what can be done. */
still_status sti_fail_write(still_error *err, const char *path, int why);

#endif
