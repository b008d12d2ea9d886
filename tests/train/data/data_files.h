/* data_files.h - what the tests of training data share: a folder, files, opening. */
#ifndef DATA_FILES_H
#define DATA_FILES_H

#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "train/data/parts.h"

#define VOCAB(name) FIXTURES "/vocab/" name
#define DATA(name) FIXTURES "/data/" name

static char dir[] = "/tmp/still-data-XXXXXX", cache[64], data_file[64];

static inline int make_dir(void **state)
{
    (void)state;
    if (!mkdtemp(dir)) return 1;
    snprintf(cache, sizeof cache, "%s/deep/cache", dir);
    snprintf(data_file, sizeof data_file, "%s/data", dir);
    return 0;
}

/* How many files the cache folder has; removes them if asked to. *path: one of them. */
static inline int cache_files(char path[512], bool clear)
{
    int n = 0;
    DIR *d = opendir(cache);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (e->d_name[0] == '.') continue;
        snprintf(path, 512, "%s/%s", cache, e->d_name);
        if (clear) assert_int_equal(unlink(path), 0);
        n++;
    }
    if (d) closedir(d);
    return n;
}

static inline int remove_dir(void **state)
{
    (void)state;
    char path[512];
    cache_files(path, true);
    unlink(data_file);
    rmdir(cache);
    snprintf(path, sizeof path, "%s/deep", dir);
    rmdir(path);
    return rmdir(dir);
}

static inline void put_bytes(const char *path, const void *p, size_t n)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(p, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static inline const char *put_data(const char *text)
{
    put_bytes(data_file, text, strlen(text));
    return data_file;
}

static inline still_tokenizer *tokenizer(const char *path)
{
    still_tokenizer *tk;
    still_error err;
    const char *split = strstr(path, ".tiktoken") ? "llama-bpe" : NULL;
    if (still_tokenizer_open_split(path, split, &tk, &err)) fail_msg("%s", err.text);
    return tk;
}

static inline sti_data *open_params(const still_tokenizer *tk, sti_data_params p)
{
    sti_data *d;
    still_error err;
    p.cache_dir = cache;
    if (sti_data_open(tk, &p, &d, &err) != STILL_OK) fail_msg("%s", err.text);
    return d;
}

static inline sti_data *open_one(const still_tokenizer *tk, const char *path, int seq,
                                 bool mask_prompt)
{
    sti_data_source s = {path, 0};
    return open_params(
        tk, (sti_data_params){
                .source = &s, .n_sources = 1, .seq = seq, .mask_prompt = mask_prompt});
}

#endif
