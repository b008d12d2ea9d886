/* Pasts in a folder: what was put is there the next time, whole; what is damaged, foreign
 * or too much is not. */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../run.h"

#include "server/prefix_disk.h"
#include "server/prefix_ids.h"

enum { CTX = 64, VOCAB = 512 };

static char folder[] = "/tmp/still-pasts-XXXXXX";
static still_model *model;
static still_session *session, *fresh;
static int32_t text[CTX];

static int begin(void **state)
{
    (void)state;
    still_error e;
    still_method how;
    assert_non_null(mkdtemp(folder));
    must(still_method_init(&how, "still", 8, &e), &e);
    must(still_model_open_shape("tiny", &STILL_PARAMS(still_model_params, .threads = 1),
                                &model, &e),
         &e);
    const still_session_params p = {
        .size = sizeof p, .ctx = CTX, .batch = 16, .method = &how};
    must(still_session_new(model, &p, &session, &e), &e);
    must(still_session_new(model, &p, &fresh, &e), &e);
    for (int i = 0; i < CTX; i++) text[i] = (i * 37 + 11) % VOCAB;
    return 0;
}

/* Calls each with the path of every file; returns how many there are. */
static int files(void (*each)(const char *path))
{
    char path[400];
    int n = 0;
    DIR *d = opendir(folder);
    assert_non_null(d);
    for (const struct dirent *f; (f = readdir(d));) {
        if (f->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%s/%s", folder, f->d_name);
        n++;
        if (each) each(path);
    }
    closedir(d);
    return n;
}

static void remove_path(const char *path)
{
    if (remove(path) != 0) fail_msg("%s stays", path);
}

static int end(void **state)
{
    (void)state;
    files(remove_path);
    rmdir(folder);
    still_session_free(session);
    still_session_free(fresh);
    still_model_free(model);
    return 0;
}

static srv_prefix_disk *open_disk(uint64_t number, size_t limit)
{
    srv_prefix_disk *d;
    still_error e;
    must(srv_prefix_disk_open(
             &(srv_prefix_disk_params){
                 .folder = folder, .limit = limit, .model = number, .most_tokens = CTX},
             &d, &e),
         &e);
    return d;
}

static void put(srv_prefix_disk *d, int n, int first)
{
    still_error e;
    still_snapshot *past;
    int32_t id[CTX];
    memcpy(id, text, sizeof id);
    id[0] = first;
    still_session_reset(session);
    must(still_session_feed(session, id, n, &e), &e);
    must(still_session_snapshot(session, &past, &e), &e);
    srv_prefix_disk_put(d, id, n, true, past, true);
}

static void check_gives(srv_prefix_disk *d, int n, int want)
{
    still_error e;
    still_snapshot *past = srv_prefix_disk_get(d, session, text, n, 0);
    assert_int_equal(past ? still_snapshot_length(past) : 0, want);
    if (!past) return;
    must(still_session_restore(session, past, &e), &e);
    still_snapshot_free(past);
    still_session_reset(fresh);
    must(still_session_feed(fresh, text, want, &e), &e);
    assert_memory_equal(still_session_logits(session), still_session_logits(fresh),
                        VOCAB * sizeof(float));
}

static int pasts(srv_prefix_disk *d)
{
    const srv_prefix_disk_counts c = srv_prefix_disk_figures(d);
    assert_int_equal(c.failed, 0);
    return c.pasts;
}

static void found_again(void **state)
{
    (void)state;
    files(remove_path);
    srv_prefix_disk *d = open_disk(7, SIZE_MAX / 4);
    put(d, 20, text[0]);
    put(d, 41, text[0]);
    put(d, 41, text[0]); /* is there already */
    put(d, 50, 3);       /* another text */
    srv_prefix_disk_close(d);
    assert_int_equal(files(NULL), 6);
    d = open_disk(7, SIZE_MAX / 4);
    assert_int_equal(pasts(d), 3);
    check_gives(d, 19, 0);
    check_gives(d, 20, 20);
    check_gives(d, 40, 20);
    check_gives(d, 41, 41);
    check_gives(d, CTX, 41);
    assert_null(srv_prefix_disk_get(d, session, text, CTX, 41)); /* no more than that */
    srv_prefix_disk_close(d);
    d = open_disk(8, SIZE_MAX / 4); /* another model: not its own, and left alone */
    assert_int_equal(pasts(d), 0);
    srv_prefix_disk_close(d);
    assert_int_equal(files(NULL), 6);
}

static void flip_middle(const char *path)
{
    struct stat st;
    const int fd = open(path, O_RDWR);
    unsigned char c;
    if (!strstr(path, ".past")) {
        close(fd);
        return;
    }
    assert_int_equal(fstat(fd, &st), 0);
    assert_int_equal(pread(fd, &c, 1, st.st_size / 2), 1);
    c ^= 1;
    assert_int_equal(pwrite(fd, &c, 1, st.st_size / 2), 1);
    close(fd);
}

static void cut_ids(const char *path)
{
    if (strstr(path, ".ids")) assert_int_equal(truncate(path, 60), 0);
}

static void damage_is_noticed(void **state)
{
    (void)state;
    files(remove_path);
    srv_prefix_disk *d = open_disk(7, SIZE_MAX / 4);
    put(d, 20, text[0]);
    srv_prefix_disk_close(d);
    files(flip_middle);
    d = open_disk(7, SIZE_MAX / 4);
    assert_int_equal(pasts(d), 1);
    check_gives(d, CTX, 0);
    assert_int_equal(pasts(d), 0);
    assert_int_equal(files(NULL), 0); /* nobody will need it */
    put(d, 20, text[0]);
    srv_prefix_disk_close(d);
    files(cut_ids);
    d = open_disk(7, SIZE_MAX / 4);
    assert_int_equal(pasts(d), 0);
    put(d, 20, text[0]); /* in place of it */
    srv_prefix_disk_close(d);
    d = open_disk(7, SIZE_MAX / 4);
    check_gives(d, CTX, 20);
    srv_prefix_disk_close(d);
}

static void oldest_go(void **state)
{
    (void)state;
    files(remove_path);
    still_session_reset(session);
    srv_prefix_disk *d = open_disk(7, SIZE_MAX / 4);
    put(d, 30, text[0]);
    put(d, 30, 5);
    put(d, 30, 6);
    srv_prefix_disk_close(d);
    d = open_disk(7, SIZE_MAX / 4);
    check_gives(d, CTX, 30); /* used: now the newest */
    srv_prefix_disk_counts c = srv_prefix_disk_figures(d);
    assert_int_equal(c.pasts, 3);
    assert_true(c.found == 1 && c.written == 0 && c.removed == 0);
    srv_prefix_disk_close(d);
    d = open_disk(7, c.bytes / 3 * 2);
    assert_int_equal(pasts(d), 2);
    assert_int_equal(srv_prefix_disk_figures(d).removed, 1);
    assert_int_equal(files(NULL), 4);
    put(d, 31, 7);
    put(d, 32, 7);
    srv_prefix_disk_close(d);
    d = open_disk(7, c.bytes / 3 - 1); /* less than one */
    assert_int_equal(pasts(d), 0);
    put(d, 30, 8);
    srv_prefix_disk_close(d);
    assert_int_equal(files(NULL), 0);
}

static void no_folder(void **state)
{
    (void)state;
    srv_prefix_disk *d;
    still_error e;
    assert_int_equal(srv_prefix_disk_open(
                         &(srv_prefix_disk_params){
                             .folder = "/dev/null/x", .limit = 1, .most_tokens = 1},
                         &d, &e),
                     STILL_E_IO);
    assert_null(d);
    assert_non_null(strstr(e.text, "/dev/null/x"));
}

/* A file of tokens is whole, or it is none. */
static void ids_of_any_length(void **state)
{
    (void)state;
    still_error e;
    char path[300];
    unsigned char bytes[400];
    srv_prefix_ids ids = {.id = text, .n = 9, .has_logits = true, .past_bytes = 1234},
                   got;
    snprintf(path, sizeof path, "%s/x.ids", folder);
    must(srv_prefix_ids_write(&ids, 5, path, &e), &e);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    const size_t n = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    assert_int_equal(n, srv_prefix_ids_bytes(9));
    assert_true(srv_prefix_ids_parse(bytes, n, 5, 9, &got));
    assert_int_equal(got.n, 9);
    assert_true(got.has_logits);
    assert_int_equal(got.past_bytes, 1234);
    assert_memory_equal(got.id, text, 9 * sizeof *text);
    free(got.id);
    assert_false(srv_prefix_ids_parse(bytes, n, 6, 9, &got));
    assert_false(srv_prefix_ids_parse(bytes, n, 5, 8, &got));
    for (size_t i = 0; i < n; i++) {
        assert_false(srv_prefix_ids_parse(bytes, i, 5, 9, &got));
        bytes[i] ^= 0x10;
        assert_false(srv_prefix_ids_parse(bytes, n, 5, 9, &got));
        bytes[i] ^= 0x10;
    }
}

RUN_TESTS_IN(begin, end, cmocka_unit_test(found_again),
             cmocka_unit_test(damage_is_noticed), cmocka_unit_test(oldest_go),
             cmocka_unit_test(no_folder), cmocka_unit_test(ids_of_any_length))
