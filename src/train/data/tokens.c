/* tokens.c - documents as ids, each marked as prompt or as output.
 *
 * Prompt and output are encoded as one text, as the model will see them. A token
 * belongs to the output if it begins at or after the end of the prompt: one that
 * straddles the two cannot be predicted from the prompt alone, and counts as prompt. */
#include <stdlib.h>
#include <string.h>

#include "base/sha256.h"
#include "train/data/parts.h"

typedef struct document {
    const still_tokenizer *tk;
    int32_t *ids;
    uint32_t *entry;    /* both [capacity] */
    size_t n, capacity; /* n counts ids */
} document;

/* Room for n ids, a BOS and an EOS. */
static still_status grow_document(document *d, size_t n, still_error *err)
{
    if (n < d->capacity && d->capacity - n >= 2) return STILL_OK;
    size_t capacity = n + n / 2 + 1024;
    int32_t *ids = sti_grow(d->ids, capacity, sizeof *ids);
    if (ids) d->ids = ids;
    uint32_t *entry = ids ? sti_grow(d->entry, capacity, sizeof *entry) : NULL;
    if (entry) d->entry = entry;
    if (!entry) return sti_fail_memory(err, "tokens", capacity * sizeof *ids);
    d->capacity = capacity;
    return STILL_OK;
}

static still_status encode(document *d, const char *text, size_t n, still_error *err)
{
    STI_TRY(grow_document(d, n / 3, err)); /* ids are four bytes long on average */
    for (;;) {
        size_t cap = d->capacity - 2;
        STI_TRY(still_tokenizer_encode(d->tk, text, n, 0, d->ids, cap, &d->n, err));
        if (d->n <= cap) return STILL_OK;
        STI_TRY(grow_document(d, d->n, err));
    }
}

static size_t piece_bytes(const document *d, size_t i)
{
    size_t n;
    still_tokenizer_piece(d->tk, d->ids[i], true, &n);
    return n;
}

static size_t pieces_bytes(const document *d)
{
    size_t sum = 0;
    for (size_t i = 0; i < d->n; i++) sum += piece_bytes(d, i);
    return sum;
}

/* Encodes a document and finds its first output id.
 *
 * The position is counted in bytes of pieces. For most tokenizers they add up to the
 * text, or to the text with a leading space; where they do not (characters the
 * vocabulary lacks, U+2581 read as a space), the prompt is encoded alone to count
 * its bytes. */
static still_status encode_document(document *d, const sti_record *rec, size_t *output,
                                    still_error *err)
{
    *output = 0;
    STI_TRY(encode(d, rec->text, rec->n, err));
    if (!rec->prompt) return STILL_OK;
    size_t sum = pieces_bytes(d), end = rec->prompt;
    if (sum != rec->n && sum != rec->n + 1) {
        STI_TRY(encode(d, rec->text, rec->prompt, err));
        end = pieces_bytes(d);
        STI_TRY(encode(d, rec->text, rec->n, err));
    } else {
        end += sum - rec->n;
    }
    for (size_t at = 0; *output < d->n && at < end; ++*output)
        at += piece_bytes(d, *output);
    return STILL_OK;
}

/* BOS if the tokenizer adds one, the ids, EOS. BOS is not output; EOS is, because a
 * model must learn to stop. */
static still_status put_document(document *d, const sti_record *rec,
                                 sti_cache_writer *w, still_error *err)
{
    size_t output, n = 0;
    STI_TRY(encode_document(d, rec, &output, err));
    if (still_tokenizer_adds_bos(d->tk))
        d->entry[n++] = (uint32_t)still_tokenizer_bos(d->tk);
    for (size_t i = 0; i < d->n; i++)
        d->entry[n++] = (uint32_t)d->ids[i] | (i >= output ? STI_CACHE_OUTPUT : 0);
    d->entry[n++] = (uint32_t)still_tokenizer_eos(d->tk) | STI_CACHE_OUTPUT;
    return sti_cache_put(w, d->entry, n, err);
}

static still_status report(const sti_data_progress *p, const sti_records *r,
                           still_error *err)
{
    if (!p->fn) return STILL_OK;
    uint64_t at = sti_records_offset(r, p->size);
    if (at > p->size) at = p->size; /* it grew since */
    if (p->fn(p->user, p->before + at, p->total)) return STILL_OK;
    return sti_fail(err, STILL_E_CANCELLED, "reading the data was cancelled");
}

static still_status put_documents(document *d, sti_records *r, const char *path,
                                  sti_cache_writer *w, sti_cache_header *h,
                                  const sti_data_progress *progress, still_error *err)
{
    enum { REPORT_EVERY = 1 << 20 }; /* bytes of text */
    sti_record rec;
    size_t unreported = 0;
    for (bool more;;) {
        STI_TRY(sti_records_next(r, &rec, &more, err));
        if (!more) break;
        h->records++;
        if (rec.broken) {
            if (h->broken++ == 0)
                strncpy(h->first_broken, rec.broken, sizeof h->first_broken - 1);
        } else {
            STI_TRY(put_document(d, &rec, w, err));
        }
        unreported += rec.n + 1;
        if (unreported >= REPORT_EVERY) {
            unreported = 0;
            STI_TRY(report(progress, r, err));
        }
    }
    if (h->records == 0)
        return sti_fail(err, STILL_E_FORMAT, "%s: holds no records", path);
    if (h->broken == h->records)
        return sti_fail(err, STILL_E_FORMAT,
                        "%s: none of %llu record%s has 'text' or 'instruction' and "
                        "'output'; the first: %s",
                        path, (unsigned long long)h->records, h->records > 1 ? "s" : "",
                        h->first_broken);
    return STILL_OK;
}

still_status sti_tokens_build(const still_tokenizer *tk, const char *path,
                              const char *to, sti_cache_header *h,
                              const sti_data_progress *progress, still_error *err)
{
    document d = {.tk = tk};
    sti_cache_writer *w = NULL;
    sti_records *r;
    STI_TRY(sti_records_open(path, &r, err));
    still_status status = sti_cache_create(to, &w, err);
    if (status == STILL_OK) status = put_documents(&d, r, path, w, h, progress, err);
    if (status == STILL_OK)
        status = sti_cache_finish(w, h, err);
    else
        sti_cache_abort(w);
    sti_records_close(r);
    free(d.ids);
    free(d.entry);
    return status;
}

still_status sti_tokens_digest_tokenizer(const still_tokenizer *tk,
                                         unsigned char out[STI_DATA_DIGEST],
                                         still_error *err)
{
    int32_t vocab = still_tokenizer_vocab_size(tk);
    int32_t settings[] = {vocab, still_tokenizer_bos(tk), still_tokenizer_eos(tk),
                          still_tokenizer_adds_bos(tk)};
    sti_buf joined = {0}, all = {0};
    document d = {.tk = tk};
    sti_buf_put(&all, settings, sizeof settings);
    for (int32_t id = 0; id < vocab; id++) {
        size_t n, shown;
        const char *p = still_tokenizer_piece(tk, id, true, &n);
        still_tokenizer_piece(tk, id, false, &shown); /* 0 for special tokens */
        sti_buf_put(&joined, p, n);
        sti_buf_put(&all, (uint64_t[]){n, shown}, 2 * sizeof(uint64_t));
    }
    still_status status = encode(&d, joined.p, joined.n, err);
    if (status == STILL_OK) {
        sti_buf_put(&all, joined.p, joined.n);
        sti_buf_put(&all, d.ids, d.n * sizeof *d.ids);
        if (joined.failed || all.failed)
            status = sti_fail_memory(err, "tokenizer digest", all.n);
        else
            sti_sha256_of(all.p, all.n, out);
    }
    sti_buf_free(&joined);
    sti_buf_free(&all);
    free(d.ids);
    free(d.entry);
    return status;
}
