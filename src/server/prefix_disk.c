/* prefix_disk.c - see prefix_disk.h.
 *
 * NAME is the number of tokens and a hash of them. The list of files is short (a past takes
 * megabytes), so looking through it needs no index. */
#include "server/prefix_disk.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/hash.h"
#include "base/mem.h"
#include "server/prefix_ids.h"

enum { MOST_WAITING = 2, NAME = 48, MOST_FILES = 1 << 16 };

typedef struct entry {
    char name[NAME];
    srv_prefix_ids of;
    double used; /* seconds since 1970 */
} entry;

static size_t bytes_of(const entry *e)
{
    return (size_t)e->of.past_bytes + srv_prefix_ids_bytes(e->of.n);
}

typedef struct job {
    struct job *next;
    entry e;
    still_snapshot *past;
} job;

struct srv_prefix_disk {
    char *folder;
    size_t limit;
    uint64_t model;
    int most_tokens;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t change;
    bool running, ending;
    job *first, *last;
    int waiting;
    entry *list;
    int n, capacity;
    size_t bytes;
    uint64_t found, written, failed, removed;
};

/* ---- Names --------------------------------------------------------------- */

static double wall_clock(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void name_of(const srv_prefix_disk *d, const int32_t *id, int n, char *out)
{
    const sti_hash_key a = {{d->model, 1}}, b = {{d->model, 2}};
    const size_t bytes = (size_t)n * sizeof *id;
    snprintf(out, NAME, "%08x-%016llx%016llx", (unsigned)n,
             (unsigned long long)sti_hash_bytes(&a, id, bytes),
             (unsigned long long)sti_hash_bytes(&b, id, bytes));
}

static char *path_of(const srv_prefix_disk *d, const char *name, const char *ending)
{
    const size_t n = strlen(d->folder) + strlen(name) + strlen(ending) + 2;
    char *path = sti_alloc(n, 1);
    if (path) snprintf(path, n, "%s/%s%s", d->folder, name, ending);
    return path;
}

/* ---- The list ------------------------------------------------------------ */

/* Locked. The files go, those that say so first. */
static void remove_entry(srv_prefix_disk *d, int i, bool files)
{
    entry e = d->list[i];
    char *ids = path_of(d, e.name, ".ids"), *past = path_of(d, e.name, ".past");
    if (files && ids && past) {
        unlink(ids);
        unlink(past);
    }
    free(ids);
    free(past);
    free(e.of.id);
    d->bytes -= bytes_of(&e);
    d->n--;
    memmove(d->list + i, d->list + i + 1, (size_t)(d->n - i) * sizeof *d->list);
}

/* Locked. Takes its ids over, if there is memory. */
static bool add_entry(srv_prefix_disk *d, const entry *e)
{
    if (d->n == d->capacity) {
        const int more = d->capacity ? 2 * d->capacity : 64;
        entry *list = sti_grow(d->list, (size_t)more, sizeof *list);
        if (!list) return false;
        d->list = list;
        d->capacity = more;
    }
    d->list[d->n++] = *e;
    d->bytes += bytes_of(e);
    return true;
}

static int find_name(const srv_prefix_disk *d, const char *name)
{
    for (int i = 0; i < d->n; i++)
        if (strcmp(d->list[i].name, name) == 0) return i;
    return -1;
}

/* Locked. */
static void keep_limit(srv_prefix_disk *d)
{
    while (d->n > 0 && d->bytes > d->limit) {
        int oldest = 0;
        for (int i = 1; i < d->n; i++)
            if (d->list[i].used < d->list[oldest].used) oldest = i;
        remove_entry(d, oldest, true);
        d->removed++;
    }
}

/* ---- Reading the folder -------------------------------------------------- */

static bool read_ids(const srv_prefix_disk *d, const char *path, unsigned char *room,
                     size_t most, entry *e)
{
    struct stat st;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) return false;
    size_t n = 0;
    ssize_t got = 0;
    bool ok = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && (size_t)st.st_size <= most;
    while (ok && n < (size_t)st.st_size &&
           (got = read(fd, room + n, (size_t)st.st_size - n)) > 0)
        n += (size_t)got;
    close(fd);
    if (!ok || n != (size_t)st.st_size) return false;
    e->used = (double)st.st_mtim.tv_sec + 1e-9 * (double)st.st_mtim.tv_nsec;
    return srv_prefix_ids_parse(room, n, d->model, d->most_tokens, &e->of);
}

static void read_one(srv_prefix_disk *d, const char *file, unsigned char *room,
                     size_t most)
{
    entry e = {0};
    char again[NAME];
    struct stat st;
    const size_t n = strlen(file);
    if (n < 5 || n - 4 >= NAME || strcmp(file + n - 4, ".ids") != 0) return;
    memcpy(e.name, file, n - 4);
    char *ids = path_of(d, e.name, ".ids"), *past = path_of(d, e.name, ".past");
    bool ok = ids && past && read_ids(d, ids, room, most, &e);
    if (ok) {
        name_of(d, e.of.id, e.of.n, again);
        ok = strcmp(again, e.name) == 0 && lstat(past, &st) == 0 &&
             S_ISREG(st.st_mode) && (uint64_t)st.st_size == e.of.past_bytes &&
             add_entry(d, &e);
        if (!ok) free(e.of.id);
    }
    free(ids);
    free(past);
}

static still_status read_folder(srv_prefix_disk *d, still_error *err)
{
    const size_t most = srv_prefix_ids_bytes(d->most_tokens);
    if (mkdir(d->folder, 0700) != 0 && errno != EEXIST)
        return sti_fail(err, STILL_E_IO, "%s: cannot be made: %s", d->folder,
                        strerror(errno));
    DIR *dir = opendir(d->folder);
    if (!dir)
        return sti_fail(err, STILL_E_IO, "%s: cannot be read as a folder: %s",
                        d->folder, strerror(errno));
    unsigned char *room = sti_alloc(most, 1);
    const struct dirent *f;
    while (room && d->n < MOST_FILES && (f = readdir(dir)))
        read_one(d, f->d_name, room, most);
    closedir(dir);
    free(room);
    keep_limit(d);
    return room ? STILL_OK : sti_fail_memory(err, d->folder, most);
}

/* ---- Writing ------------------------------------------------------------- */

/* Without the lock. */
static bool write_job(srv_prefix_disk *d, job *j)
{
    struct stat st;
    still_error err;
    char *ids = path_of(d, j->e.name, ".ids"), *past = path_of(d, j->e.name, ".past");
    bool ok = ids && past && still_snapshot_save(j->past, past, &err) == STILL_OK &&
              stat(past, &st) == 0;
    if (ok) j->e.of.past_bytes = (uint64_t)st.st_size;
    ok = ok && srv_prefix_ids_write(&j->e.of, d->model, ids, &err) == STILL_OK;
    if (!ok && past) unlink(past);
    free(ids);
    free(past);
    return ok;
}

static void *run(void *arg)
{
    srv_prefix_disk *d = arg;
    pthread_mutex_lock(&d->lock);
    for (;;) {
        while (!d->first && !d->ending) pthread_cond_wait(&d->change, &d->lock);
        job *j = d->first;
        if (!j) break;
        pthread_mutex_unlock(&d->lock);
        const bool ok = write_job(d, j);
        still_snapshot_free(j->past);
        pthread_mutex_lock(&d->lock);
        d->first = j->next;
        if (!d->first) d->last = NULL;
        d->waiting--;
        d->failed += !ok;
        d->written += ok;
        j->e.used = wall_clock();
        if (!ok || !add_entry(d, &j->e)) free(j->e.of.id);
        keep_limit(d);
        free(j);
        pthread_cond_broadcast(&d->change);
    }
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

/* Whether a past of that name is there or is being written. Locked. */
static bool known(srv_prefix_disk *d, const char *name)
{
    const int i = find_name(d, name);
    if (i >= 0) d->list[i].used = wall_clock();
    for (const job *j = d->first; j; j = j->next)
        if (strcmp(j->e.name, name) == 0) return true;
    return i >= 0;
}

void srv_prefix_disk_put(srv_prefix_disk *d, const int32_t *id, int n, bool has_logits,
                         still_snapshot *past, bool wait)
{
    job *j = sti_alloc(1, sizeof *j);
    int32_t *copy = sti_alloc((size_t)n, sizeof *copy);
    bool taken = j && copy && still_snapshot_bytes(past) <= d->limit;
    if (taken) {
        memcpy(copy, id, (size_t)n * sizeof *copy);
        *j =
            (job){.e.of = {.id = copy, .n = n, .has_logits = has_logits}, .past = past};
        name_of(d, id, n, j->e.name);
        pthread_mutex_lock(&d->lock);
        while (wait && d->waiting >= MOST_WAITING)
            pthread_cond_wait(&d->change, &d->lock);
        taken = d->waiting < MOST_WAITING && !known(d, j->e.name);
        if (taken) {
            *(d->last ? &d->last->next : &d->first) = j;
            d->last = j;
            d->waiting++;
            pthread_cond_broadcast(&d->change);
        }
        pthread_mutex_unlock(&d->lock);
    }
    if (taken) return;
    still_snapshot_free(past);
    free(copy);
    free(j);
}

/* ---- Looking up ---------------------------------------------------------- */

static bool begins_with(const int32_t *id, int n, const entry *e)
{
    const srv_prefix_ids *of = &e->of;
    return (of->n < n || (of->n == n && of->has_logits)) &&
           memcmp(id, of->id, (size_t)of->n * sizeof *id) == 0;
}

still_snapshot *srv_prefix_disk_get(srv_prefix_disk *d, const still_session *s,
                                    const int32_t *id, int n, int more_than)
{
    still_error err;
    still_snapshot *past = NULL;
    int best = -1;
    pthread_mutex_lock(&d->lock);
    for (int i = 0; i < d->n; i++)
        if (d->list[i].of.n > more_than &&
            (best < 0 || d->list[i].of.n > d->list[best].of.n) &&
            begins_with(id, n, &d->list[i]))
            best = i;
    char name[NAME] = "";
    const int length = best >= 0 ? d->list[best].of.n : 0;
    if (best >= 0) {
        d->list[best].used = wall_clock();
        memcpy(name, d->list[best].name, NAME);
    }
    pthread_mutex_unlock(&d->lock);
    if (best < 0) return NULL;
    char *ids = path_of(d, name, ".ids"), *path = path_of(d, name, ".past");
    if (!ids || !path) {
        free(ids);
        free(path);
        return NULL;
    }
    still_status st = still_snapshot_load(s, path, &past, &err);
    if (st == STILL_OK && still_snapshot_length(past) != length) st = STILL_E_FORMAT;
    if (st == STILL_OK) {
        (void)utimensat(AT_FDCWD, ids, NULL, 0); /* used now, also for the next run */
        pthread_mutex_lock(&d->lock);
        d->found++;
        pthread_mutex_unlock(&d->lock);
    } else { /* damaged, or of another model or other settings */
        still_snapshot_free(past);
        past = NULL;
        pthread_mutex_lock(&d->lock);
        best = find_name(d, name);
        if (best >= 0) remove_entry(d, best, st == STILL_E_FORMAT);
        pthread_mutex_unlock(&d->lock);
    }
    free(ids);
    free(path);
    return past;
}

srv_prefix_disk_counts srv_prefix_disk_figures(srv_prefix_disk *d)
{
    pthread_mutex_lock(&d->lock);
    const srv_prefix_disk_counts c = {.pasts = d->n,
                                      .bytes = d->bytes,
                                      .found = d->found,
                                      .written = d->written,
                                      .failed = d->failed,
                                      .removed = d->removed};
    pthread_mutex_unlock(&d->lock);
    return c;
}

/* ---- Opening ------------------------------------------------------------- */

static still_status start(srv_prefix_disk *d, still_error *err)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int failed = pthread_create(&d->thread, NULL, run, d);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed)
        return sti_fail(err, STILL_E_IO, "cannot start a thread: %s", strerror(failed));
    d->running = true;
    return STILL_OK;
}

still_status srv_prefix_disk_open(const srv_prefix_disk_params *p,
                                  srv_prefix_disk **out, still_error *err)
{
    *out = NULL;
    srv_prefix_disk *d = sti_alloc(1, sizeof *d);
    if (!d) return sti_fail_memory(err, p->folder, sizeof *d);
    d->folder = sti_strdup(p->folder);
    d->limit = p->limit;
    d->model = p->model;
    d->most_tokens = p->most_tokens;
    pthread_mutex_init(&d->lock, NULL);
    pthread_cond_init(&d->change, NULL);
    still_status st =
        d->folder ? read_folder(d, err) : sti_fail_memory(err, p->folder, sizeof *d);
    if (st == STILL_OK) st = start(d, err);
    if (st == STILL_OK)
        *out = d;
    else
        srv_prefix_disk_close(d);
    return st;
}

void srv_prefix_disk_close(srv_prefix_disk *d)
{
    if (!d) return;
    pthread_mutex_lock(&d->lock);
    d->ending = true;
    pthread_cond_broadcast(&d->change);
    pthread_mutex_unlock(&d->lock);
    if (d->running) pthread_join(d->thread, NULL);
    while (d->n > 0) remove_entry(d, d->n - 1, false);
    free(d->list);
    free(d->folder);
    pthread_cond_destroy(&d->change);
    pthread_mutex_destroy(&d->lock);
    free(d);
}
