/* data.c - the training text of a run: opened, described, and handed out by number.
 *
 * Each file is cut on its own into sequences of `seq` ids. The last ones are held out
 * for validation; the rest are shuffled anew in every pass (mix.c). Handing out a
 * sequence reads the mapping and nothing else, so it cannot fail. */
#include "train/data/data.h"
#include "base/buf.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/random.h"
#include "base/sha256.h"
#include "train/data/parts.h"

enum { MAX_SEQ = 1 << 20, MAX_SOURCES = 1024 };

typedef struct source {
    sti_cache cache;
    uint64_t train, valid; /* sequences, in this order in the file */
} source;

struct sti_data {
    source *source;   /* [n] */
    uint64_t *weight; /* [n] */
    int n, seq;
    int vocab; /* of random ids; 0: there are sources */
    bool mask_prompt;
    uint64_t seed;
    unsigned char digest[STI_DATA_DIGEST];
    sti_data_report report;
};

/* ---- Opening ------------------------------------------------------------- */

static still_status check_params(const still_tokenizer *tk, const sti_data_params *p,
                                 still_error *err)
{
    if (p->n_sources < 1 || p->n_sources > MAX_SOURCES)
        return sti_fail(err, STILL_E_ARG, "data: %d files, expected 1 to %d",
                        p->n_sources, MAX_SOURCES);
    if (p->seq < 2 || p->seq > MAX_SEQ)
        return sti_fail(err, STILL_E_ARG, "data: sequences of %d ids, expected 2 to %d",
                        p->seq, MAX_SEQ);
    if (!(p->held_out >= 0 && p->held_out < 1))
        return sti_fail(err, STILL_E_ARG,
                        "data: the held-out share is %g, expected 0 or more and less "
                        "than 1",
                        p->held_out);
    int weighted = 0;
    for (int i = 0; i < p->n_sources; i++) {
        if (!isfinite(p->source[i].weight))
            return sti_fail(err, STILL_E_ARG, "%s: the weight is no number",
                            p->source[i].path);
        weighted += p->source[i].weight > 0;
    }
    if (weighted && weighted < p->n_sources)
        return sti_fail(err, STILL_E_ARG,
                        "data: %d of %d files have a weight, expected all or none",
                        weighted, p->n_sources);
    if (still_tokenizer_eos(tk) < 0)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "data: the tokenizer has no EOS, which must end documents");
    return STILL_OK;
}

/* SHA-256 of a file's bytes and of the tokenizer's digest. */
static still_status make_key(const char *path, const unsigned char *tokenizer,
                             unsigned char key[STI_DATA_DIGEST], still_error *err)
{
    static const uint32_t version = STI_CACHE_VERSION;
    sti_map map;
    STI_TRY(sti_map_open(path, &map, err));
    sti_sha256 sha;
    sti_sha256_start(&sha);
    sti_sha256_add(&sha, &version, sizeof version);
    sti_sha256_add(&sha, tokenizer, STI_DATA_DIGEST);
    sti_sha256_add(&sha, map.data, map.size);
    sti_sha256_end(&sha, key);
    sti_map_close(&map);
    return STILL_OK;
}

/* "dir/0123...ef.tokens" */
static char *cache_path(const char *dir, const unsigned char key[STI_DATA_DIGEST])
{
    sti_buf b = {0};
    char hex[STI_DATA_DIGEST + 1];
    sti_hex(key, STI_DATA_DIGEST / 2, hex);
    sti_buf_printf(&b, "%s/%s.tokens", dir, hex);
    if (b.failed) sti_buf_free(&b);
    return b.p;
}

/* Maps the cache of a file; builds it first if it is missing or invalid. */
static still_status open_cache(const still_tokenizer *tk, const char *path,
                               const char *dir, const unsigned char *tokenizer,
                               const sti_data_progress *progress, sti_cache *cache,
                               bool *cached, still_error *err)
{
    int vocab = still_tokenizer_vocab_size(tk);
    sti_cache_header head = {.vocab = (uint32_t)vocab};
    STI_TRY(make_key(path, tokenizer, head.key, err));
    char *file = cache_path(dir, head.key);
    if (!file) return sti_fail_memory(err, path, strlen(dir) + 64);
    still_status status = sti_cache_open(file, head.key, vocab, cache, err);
    *cached = status == STILL_OK;
    if (status == STILL_E_FORMAT || status == STILL_E_IO) {
        status = sti_tokens_build(tk, path, file, &head, progress, err);
        if (status == STILL_OK)
            status = sti_cache_open(file, head.key, vocab, cache, err);
    }
    free(file);
    return status;
}

/* "FILE: line 12: ...", with the front of a long path left out, and without control
 * characters: the text comes from a file. */
static void describe_broken(sti_data_report *r, const char *path, const char *what)
{
    size_t capacity = sizeof r->first_broken - strlen(what) - sizeof ": ",
           n = strlen(path);
    snprintf(r->first_broken, sizeof r->first_broken, "%s: %s",
             n > capacity ? path + n - capacity : path, what);
    for (char *c = r->first_broken; *c; c++)
        if ((unsigned char)*c < ' ' || *c == 0x7F) *c = '?';
}

/* Cuts a file into sequences and adds it to the report. */
static still_status count_source(sti_data *d, source *s, const sti_data_params *p,
                                 const char *path, still_error *err)
{
    const sti_cache_header *h = s->cache.head;
    uint64_t n = h->tokens / (uint64_t)d->seq;
    if (n == 0)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: %llu tokens, expected at least the %d of one sequence",
                        path, (unsigned long long)h->tokens, d->seq);
    if (p->held_out > 0 && n > 1) {
        s->valid = (uint64_t)(p->held_out * (double)n);
        if (s->valid == 0) s->valid = 1;
        if (s->valid >= n) s->valid = n - 1;
    }
    s->train = n - s->valid;
    d->report.records += h->records;
    d->report.tokens += h->tokens;
    d->report.train += s->train;
    d->report.valid += s->valid;
    if (h->broken && !d->report.broken)
        describe_broken(&d->report, path, h->first_broken);
    d->report.broken += h->broken;
    return STILL_OK;
}

/* By default a file's weight is its number of sequences, so that each is drawn once
 * before any is drawn again. Given weights are rounded to a millionth of the
 * largest. */
static void set_weights(sti_data *d, const sti_data_params *p)
{
    double largest = 0;
    for (int i = 0; i < d->n; i++) largest = fmax(largest, p->source[i].weight);
    for (int i = 0; i < d->n; i++) {
        double share = largest > 0 ? p->source[i].weight / largest : 0;
        d->weight[i] =
            largest > 0 ? (uint64_t)fmax(1, round(share * 1e6)) : d->source[i].train;
    }
}

/* Hashes a list of 64-bit numbers and the keys of the files. */
static still_status make_digest(sti_data *d, still_error *err)
{
    sti_buf b = {0};
    uint64_t head[] = {STI_ORDER_VERSION, (uint64_t)d->seq, d->mask_prompt, d->seed,
                       (uint64_t)d->n};
    sti_buf_put(&b, head, sizeof head);
    for (int i = 0; i < d->n; i++) {
        const source *s = &d->source[i];
        uint64_t counts[] = {d->weight[i], s->train, s->valid};
        sti_buf_put(&b, counts, sizeof counts);
        sti_buf_put(&b, s->cache.head->key, sizeof s->cache.head->key);
    }
    still_status status = STILL_OK;
    if (b.failed)
        status = sti_fail_memory(err, "data", b.n);
    else
        sti_sha256_of(b.p, b.n, d->digest);
    sti_buf_free(&b);
    return status;
}

static uint64_t file_bytes(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && st.st_size > 0 ? (uint64_t)st.st_size : 0;
}

static still_status open_sources(sti_data *d, const still_tokenizer *tk,
                                 const sti_data_params *p, still_error *err)
{
    unsigned char tokenizer[STI_DATA_DIGEST];
    sti_data_progress progress = {.fn = p->progress, .user = p->user};
    STI_TRY(sti_tokens_digest_tokenizer(tk, tokenizer, err));
    STI_TRY(sti_cache_folder(p->cache_dir, err));
    for (int i = 0; i < d->n; i++) progress.total += file_bytes(p->source[i].path);
    d->report.cached = true;
    for (int i = 0; i < d->n; i++) {
        const char *path = p->source[i].path;
        source *s = &d->source[i];
        bool cached;
        progress.size = file_bytes(path);
        STI_TRY(open_cache(tk, path, p->cache_dir, tokenizer, &progress, &s->cache,
                           &cached, err));
        STI_TRY(count_source(d, s, p, path, err));
        d->report.cached = d->report.cached && cached;
        progress.before += progress.size;
        if (p->progress && !p->progress(p->user, progress.before, progress.total))
            return sti_fail(err, STILL_E_CANCELLED, "reading the data was cancelled");
    }
    set_weights(d, p);
    return make_digest(d, err);
}

still_status sti_data_open(const still_tokenizer *tk, const sti_data_params *p,
                           sti_data **out, still_error *err)
{
    *out = NULL;
    STI_TRY(check_params(tk, p, err));
    sti_data *d = sti_alloc(1, sizeof *d);
    if (!d) return sti_fail_memory(err, "data", sizeof *d);
    d->n = p->n_sources;
    d->seq = p->seq;
    d->mask_prompt = p->mask_prompt;
    d->seed = p->seed;
    d->source = sti_alloc((size_t)d->n, sizeof *d->source);
    d->weight = sti_alloc((size_t)d->n, sizeof *d->weight);
    still_status status = d->source && d->weight
                              ? open_sources(d, tk, p, err)
                              : sti_fail_memory(err, "data", sizeof *d->source);
    if (status != STILL_OK)
        sti_data_free(d);
    else
        *out = d;
    return status;
}

still_status sti_data_random(int vocab, int seq, uint64_t seed, sti_data **out,
                             still_error *err)
{
    *out = sti_alloc(1, sizeof **out);
    if (!*out) return sti_fail_memory(err, "data", sizeof **out);
    **out = (sti_data){.vocab = vocab, .seq = seq, .seed = seed};
    return STILL_OK;
}

void sti_data_free(sti_data *d)
{
    if (!d) return;
    for (int i = 0; d->source && i < d->n; i++) sti_cache_close(&d->source[i].cache);
    free(d->source);
    free(d->weight);
    free(d);
}

/* ---- Handing out --------------------------------------------------------- */

const sti_data_report *sti_data_get_report(const sti_data *d)
{
    return &d->report;
}

void sti_data_digest(const sti_data *d, unsigned char out[STI_DATA_DIGEST])
{
    memcpy(out, d->digest, STI_DATA_DIGEST);
}

/* Sequence `at` of a file. The first id has no id before it that could predict it. */
static void copy_sequence(const sti_data *d, const source *s, uint64_t at, int32_t *ids,
                          uint8_t *counts)
{
    const uint32_t *entry = s->cache.entry + at * (uint64_t)d->seq;
    for (int t = 0; t < d->seq; t++) ids[t] = (int32_t)(entry[t] & ~STI_CACHE_OUTPUT);
    if (!counts) return;
    for (int t = 0; t < d->seq; t++)
        counts[t] = !d->mask_prompt || (entry[t] & STI_CACHE_OUTPUT);
    counts[0] = 0;
}

static void random_sequence(const sti_data *d, uint64_t i, int32_t *ids,
                            uint8_t *counts)
{
    const uint64_t key = sti_mix64(d->seed ^ sti_mix64(i));
    for (int t = 0; t < d->seq; t++)
        ids[t] = (int32_t)(sti_mix64(key + (uint64_t)t) % (uint64_t)d->vocab);
    for (int t = 0; counts && t < d->seq; t++) counts[t] = t > 0;
}

void sti_data_train(const sti_data *d, uint64_t i, int32_t *ids, uint8_t *counts)
{
    uint64_t nth;
    if (d->vocab) {
        random_sequence(d, i, ids, counts);
        return;
    }
    int f = sti_mix_draw(d->weight, d->n, i, &nth);
    const source *s = &d->source[f];
    uint64_t at =
        sti_mix_shuffle(s->train, d->seed, (uint64_t)f, nth / s->train, nth % s->train);
    copy_sequence(d, s, at, ids, counts);
}

void sti_data_valid(const sti_data *d, uint64_t i, int32_t *ids, uint8_t *counts)
{
    assert(i < d->report.valid);
    const source *s = d->source;
    for (; i >= s->valid; s++) i -= s->valid;
    copy_sequence(d, s, s->train + i, ids, counts);
}
