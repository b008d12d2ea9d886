/* kept.c - see kept.h.
 *
 * A model has a hundred heads and a conversation thousands of tokens, so a head is not a
 * list of numbers. Its window is one number, the others are bits and bytes in base64:
 *
 *   mask   bit i % 8 of byte i / 8: token i is salient
 *   rank   a byte for each token with a score, in order of position: 0 the lowest score of
 *          this head, 255 the highest. Scores of heads do not compare with each other, and
 *          only their order counts in choosing
 *
 * smollm2-still, 90 heads: 80 KB and 5 ms at 1K tokens, 360 KB and 21 ms at 8K. */
#include "server/kept.h"

#include <math.h>
#include <stdlib.h>

#include "base/error.h"
#include "base/mem.h"
#include "server/reply.h"

typedef struct scored {
    float score;
    int at; /* in the order of positions */
} scored;

/* What one head is read into; arrays of `length` tokens, one behind the other. */
typedef struct reader {
    int length;
    uint8_t *place;
    float *score;
    scored *order;
    uint8_t *bytes; /* mask, ranks, shares */
    int *exact;     /* heads that hold the token */
    int heads;      /* all layers' */
} reader;

static void free_reader(reader *r)
{
    free(r->place);
    free(r->score);
    free(r->order);
    free(r->bytes);
    free(r->exact);
}

static still_status make_reader(int length, reader *r, still_error *err)
{
    const size_t n = (size_t)length + 8; /* a mask of no tokens is a byte, too */
    *r = (reader){.length = length,
                  .place = sti_alloc(n, sizeof *r->place),
                  .score = sti_alloc(n, sizeof *r->score),
                  .order = sti_alloc(n, sizeof *r->order),
                  .bytes = sti_alloc(n, sizeof *r->bytes),
                  .exact = sti_alloc(n, sizeof *r->exact)};
    if (r->place && r->score && r->order && r->bytes && r->exact) return STILL_OK;
    free_reader(r);
    return sti_fail_memory(err, "what the model kept", n * sizeof *r->order);
}

/* ---- Pieces -------------------------------------------------------------- */

static void put_base64(sti_buf *b, const uint8_t *p, size_t n)
{
    static const char digit[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    sti_buf_puts(b, "\"");
    for (size_t i = 0; i < n; i += 3) {
        const size_t left = n - i;
        const unsigned v = (unsigned)p[i] << 16 |
                           (left > 1 ? (unsigned)p[i + 1] << 8 : 0) |
                           (left > 2 ? (unsigned)p[i + 2] : 0);
        const char four[4] = {digit[v >> 18], digit[v >> 12 & 63],
                              left > 1 ? digit[v >> 6 & 63] : '=',
                              left > 2 ? digit[v & 63] : '='};
        sti_buf_put(b, four, sizeof four);
    }
    sti_buf_puts(b, "\"");
}

static void put_tokens(sti_buf *b, const still_tokenizer *tk, const int32_t *id, int n,
                       bool first)
{
    for (int i = 0; i < n; i++) {
        size_t bytes = 0;
        const char *piece = still_tokenizer_piece(tk, id[i], true, &bytes);
        if (i > 0 || !first) sti_buf_puts(b, ",");
        srv_put_string(b, piece ? piece : "", piece ? bytes : 0);
    }
}

/* ---- A head -------------------------------------------------------------- */

static int by_score(const void *a, const void *b)
{
    const scored *x = a, *y = b;
    if (x->score != y->score) return x->score < y->score ? -1 : 1;
    return (x->at > y->at) - (x->at < y->at);
}

static void put_mask(sti_buf *b, reader *r)
{
    const size_t n = ((size_t)r->length + 7) / 8;
    for (size_t i = 0; i < n; i++) r->bytes[i] = 0;
    for (int i = 0; i < r->length; i++)
        if (r->place[i] == STILL_PLACE_SALIENT)
            r->bytes[i / 8] |= (uint8_t)(1u << i % 8);
    sti_buf_puts(b, ",\"mask\":");
    put_base64(b, r->bytes, n);
}

static void put_ranks(sti_buf *b, reader *r)
{
    int n = 0;
    for (int i = 0; i < r->length; i++)
        if (!isnan(r->score[i])) {
            r->order[n] = (scored){r->score[i], n};
            n++;
        }
    qsort(r->order, (size_t)n, sizeof *r->order, by_score);
    for (int i = 0; i < n; i++)
        r->bytes[r->order[i].at] = (uint8_t)(n > 1 ? (int64_t)i * 255 / (n - 1) : 255);
    sti_buf_puts(b, ",\"rank\":");
    put_base64(b, r->bytes, (size_t)n);
}

static void put_head(sti_buf *b, reader *r, int layer, int head, const still_kept *k)
{
    sti_buf_printf(b,
                   "%s{\"layer\":%d,\"head\":%d,\"cap\":%d,\"window\":%d,"
                   "\"salient\":%d,\"folded\":%d,\"gone\":%d",
                   r->heads ? "," : "", layer, head, k->cap,
                   k->count[STILL_PLACE_WINDOW], k->count[STILL_PLACE_SALIENT],
                   k->count[STILL_PLACE_FOLDED], k->count[STILL_PLACE_GONE]);
    put_mask(b, r);
    put_ranks(b, r);
    sti_buf_puts(b, "}");
    for (int i = 0; i < r->length; i++)
        r->exact[i] +=
            r->place[i] == STILL_PLACE_WINDOW || r->place[i] == STILL_PLACE_SALIENT;
    r->heads++;
}

/* ---- Together ------------------------------------------------------------ */

static still_status put_heads(sti_buf *b, reader *r, const srv_kept *k,
                              still_error *err)
{
    const int layers = still_model_get_info(k->model)->layers;
    for (int l = 0; l < layers; l++) {
        still_kept kept = {.heads = 1};
        for (int h = 0; h < kept.heads; h++) {
            STI_TRY(
                still_session_kept(k->session, l, h, r->place, r->score, &kept, err));
            put_head(b, r, l, h, &kept);
        }
    }
    return STILL_OK;
}

static void put_shares(sti_buf *b, reader *r)
{
    for (int i = 0; i < r->length; i++)
        r->bytes[i] = (uint8_t)(r->exact[i] * 255 / (r->heads ? r->heads : 1));
    sti_buf_puts(b, "],\"share\":");
    put_base64(b, r->bytes, (size_t)r->length);
}

static still_status put_all(sti_buf *b, reader *r, const srv_kept *k, still_error *err)
{
    const still_tokenizer *tk = still_model_tokenizer(k->model);
    still_held held;
    STI_TRY(still_session_held(k->session, &held, err));
    sti_buf_printf(b, "{\"held\":%d,\"prompt\":%d,\"tokens\":[", r->length,
                   k->n_prompt);
    put_tokens(b, tk, k->prompt, k->n_prompt, true);
    put_tokens(b, tk, k->made, k->n_made, k->n_prompt == 0);
    sti_buf_puts(b, "],\"heads\":[");
    STI_TRY(put_heads(b, r, k, err));
    put_shares(b, r);
    sti_buf_printf(b,
                   ",\"memory\":{\"bytes\":%zu,\"used\":%zu,\"softmax\":%zu,"
                   "\"context\":%d},\"seconds\":{\"queued\":%.6f,\"prompt\":%.6f,"
                   "\"decode\":%.6f}}",
                   held.bytes, held.used, held.softmax, still_session_limit(k->session),
                   k->queued_s, k->prompt_s, k->decode_s);
    return b->failed ? sti_fail_memory(err, "what the model kept", b->n) : STILL_OK;
}

still_status srv_kept_put(sti_buf *b, const srv_kept *k, still_error *err)
{
    reader r;
    sti_buf text = {0};
    STI_TRY(make_reader(still_session_length(k->session), &r, err));
    const still_status st = put_all(&text, &r, k, err);
    if (st == STILL_OK) sti_buf_put(b, text.p, text.n);
    sti_buf_free(&text);
    free_reader(&r);
    return st;
}
