/* linearize_runs.h - what the tests of whole training runs share: a small random model
 * with a tokenizer, text, and runs that keep what they were told. */
#ifndef TESTS_LINEARIZE_RUNS_H
#define TESTS_LINEARIZE_RUNS_H

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../run.h"

#include "base/random.h"
#include "train/train.h"

enum { SEQ = 32, BATCH = 4, MOST = 64, LAYERS = 3, STEPS = 5 };

static char dir[] = "/tmp/still-linearize-XXXXXX";
static still_model *model;
static still_train_data data[2];

/* ---- Files --------------------------------------------------------------- */

enum { PLACES = 8 };
/* A path in the test's folder, good for the next PLACES calls. */
static inline char *in_dir(const char *name)
{
    static char path[PLACES][256];
    static int next;
    char *p = path[next++ % PLACES];
    snprintf(p, sizeof path[0], "%s/%s", dir, name);
    return p;
}

static inline void remove_all(const char *folder)
{
    char path[512];
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (e->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "%.200s/%s", folder, e->d_name);
        if (unlink(path) != 0) remove_all(path);
    }
    if (d) closedir(d);
    rmdir(folder);
}

static inline char *read_all(const char *folder, const char *name, size_t *n)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "rb");
    if (!f) fail_msg("%s is missing", path);
    fseek(f, 0, SEEK_END);
    *n = (size_t)ftell(f);
    rewind(f);
    char *p = malloc(*n + 1);
    assert_int_equal(fread(p, 1, *n, f), *n);
    p[*n] = 0;
    fclose(f);
    return p;
}

static inline bool same_file(const char *a, const char *b, const char *name)
{
    size_t n, k;
    char *p = read_all(a, name, &n), *q = read_all(b, name, &k);
    const bool same = n == k && memcmp(p, q, n) == 0;
    free(p);
    free(q);
    return same;
}

static inline int count_files(const char *folder, const char *part)
{
    int n = 0;
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d));)
        n += e->d_name[0] != '.' && strstr(e->d_name, part) != NULL;
    if (d) closedir(d);
    return n;
}

static inline const char *random_word(uint64_t *seed)
{
    static const char *const word[] = {"the", "sun", "in", "hot", "river", "a", "then"};
    return word[sti_mix64((*seed)++) % 7];
}

/* A text of exactly so many sequences (a letter and its space are two tokens, and EOS
 * ends it), so that every step sees all of it and losses can be compared. */
static inline void write_text(const char *path, uint64_t sequences)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs("{\"text\": \"", f);
    for (uint64_t i = 0; i < SEQ * sequences / 2; i++)
        fprintf(f, "%c ", (int)('k' + sti_mix64(i) % 8));
    fputs("\"}\n", f);
    fclose(f);
}

static inline void write_records(const char *path, uint64_t seed, int records)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    for (int i = 0; i < records; i++) {
        for (int part = 0; part < 2; part++) {
            fputs(part ? "\", \"output\": \"" : "{\"instruction\": \"", f);
            for (int k = 0; k < 6; k++) fprintf(f, "%s ", random_word(&seed));
        }
        fputs("\"}\n", f);
    }
    fclose(f);
}

/* ---- Runs ---------------------------------------------------------------- */

typedef struct run {
    still_train_params p;
    still_train_progress step[MOST];
    int n;
    int stop_after; /* steps from now; 0: never */
    still_error err;
} run;

static inline bool each(void *user, const still_train_progress *p)
{
    run *r = user;
    assert_true(r->n < MOST);
    r->step[r->n++] = *p;
    return r->stop_after == 0 || r->n < r->stop_after;
}

static inline void setup(run *r, const char *method, int stage, int steps)
{
    still_error e;
    *r = (run){.p.size = sizeof r->p};
    must(still_method_init(&r->p.method, method, 6, &e), &e);
    r->p.data = data;
    r->p.n_data = 1;
    r->p.cache_dir = in_dir("cache");
    r->p.base_name = "model.gguf";
    r->p.stage = stage;
    r->p.seq = SEQ;
    r->p.batch = BATCH;
    r->p.tokens = (uint64_t)(steps * SEQ * BATCH);
    r->p.held_out = -1;
    r->p.lora_rank = 2;
    r->p.lr[2] = 2e-3;
    r->p.each = each;
}

static inline still_status go(run *r, const char *out)
{
    r->p.out = in_dir(out);
    r->p.user = r;
    r->n = 0;
    return still_linearize(model, &r->p, &r->err);
}

static inline void train(run *r, const char *out)
{
    remove_all(in_dir(out));
    must(go(r, out), &r->err);
}

static inline int set_up(void **state)
{
    (void)state;
    char command[512];
    still_error e;
    if (!mkdtemp(dir)) return 1;
    snprintf(command, sizeof command,
             STILL_TOOLS "/make-model tiny %s/model.gguf --layers %d --type f32 "
                         ">/dev/null 2>&1",
             dir, LAYERS);
    if (system(command) != 0) return 1;
    write_text(in_dir("one.jsonl"), BATCH);
    write_records(in_dir("two.jsonl"), 1000, 12);
    data[0].path = strdup(in_dir("one.jsonl"));
    data[1].path = strdup(in_dir("two.jsonl"));
    must(still_model_open(in_dir("model.gguf"),
                          &STILL_PARAMS(still_model_params, .threads = 1), &model, &e),
         &e);
    return 0;
}

static inline int tear_down(void **state)
{
    (void)state;
    still_model_free(model);
    remove_all(dir);
    free((void *)data[0].path);
    free((void *)data[1].path);
    return 0;
}

#endif
