/* tokenizer.c - completes a tokenizer that a loader filled; queries; frees it. */
#include "token/tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"

still_tokenizer *sti_tokenizer_new(void)
{
    still_tokenizer *tk = sti_alloc(1, sizeof *tk);
    if (!tk) return NULL;
    sti_vocab_init(&tk->v);
    tk->pieces = sti_pieces_slot_new();
    if (!tk->pieces) {
        free(tk);
        return NULL;
    }
    tk->unknown = tk->bos = tk->eos = -1;
    return tk;
}

void still_tokenizer_free(still_tokenizer *tk)
{
    if (!tk) return;
    sti_vocab_free(&tk->v);
    sti_bpe_free(&tk->bpe);
    sti_split_free(&tk->split);
    sti_trie_free(&tk->special);
    sti_trie_free(&tk->user);
    sti_pieces_slot_free(tk->pieces);
    free(tk->strip);
    free(tk->end);
    free(tk->chat_template);
    free(tk);
}

size_t sti_tokenizer_bytes(const still_tokenizer *tk)
{
    return sizeof *tk + sti_vocab_bytes(&tk->v) + sti_bpe_bytes(&tk->bpe, tk->v.n) +
           sti_trie_bytes(&tk->special) + sti_trie_bytes(&tk->user) +
           (tk->strip ? (size_t)tk->n : 0) +
           (tk->chat_template ? strlen(tk->chat_template) + 1 : 0);
}

/* ---- Completing ---------------------------------------------------------- */

/* Gives characters that occur in tokens but are not tokens themselves an id past the
 * vocabulary, so that merges can start from them. */
static still_status add_characters(sti_vocab *v, still_error *err)
{
    int n = v->n;
    for (int32_t id = 0; id < n; id++) {
        size_t end = v->at[id + 1], len = end - v->at[id];
        if (!sti_kind_merges(v->kind[id])) continue;
        if (sti_utf8_span(v->text + v->at[id], len) != len) continue; /* not UTF-8 */
        for (size_t i = v->at[id]; i < end; i += len) {
            char c[4];
            sti_utf8_decode(v->text + i, &len);
            if (sti_vocab_find(v, v->text + i, len) >= 0) continue;
            memcpy(c, v->text + i, len); /* adding may move the text */
            STI_TRY(sti_vocab_add(v, c, len, STI_KIND_CHARACTER, err));
            STI_TRY(sti_vocab_index_last(v, err));
        }
    }
    return STILL_OK;
}

static bool words_apart(const sti_vocab *v)
{
    for (int32_t id = 0; id < v->n; id++) {
        if (!sti_kind_merges(v->kind[id])) continue;
        for (size_t i = (size_t)v->at[id] + 1; i < v->at[id + 1]; i++)
            if (v->text[i] == ' ' && v->text[i - 1] != ' ') return false;
    }
    return true;
}

bool sti_looks_like_control(const char *p, size_t n)
{
    return n >= 4 && !memcmp(p, "<|", 2) && !memcmp(p + n - 2, "|>", 2);
}

static still_status build_tries(still_tokenizer *tk, const sti_added *added,
                                still_error *err)
{
    for (int32_t id = 0; id < tk->n; id++) {
        size_t n;
        const char *p = sti_vocab_piece(&tk->v, id, &n);
        sti_kind kind = tk->v.kind[id];
        const bool closed = sti_looks_like_control(p, n);
        const bool inside = added ? added[id].inside : tk->user_inside;
        if (added && added[id].text && !inside) {
            p = added[id].text;
            n = strlen(p);
        }
        if (kind == STI_KIND_USER && inside && !closed)
            STI_TRY(sti_trie_add(&tk->user, p, n, id, STI_TRIE_OPEN, err));
        else if (kind == STI_KIND_USER || kind == STI_KIND_CONTROL ||
                 kind == STI_KIND_UNKNOWN)
            STI_TRY(sti_trie_add(&tk->special, p, n, id,
                                 kind != STI_KIND_USER ? STI_TRIE_CONTROL
                                 : closed              ? STI_TRIE_USER
                                                       : STI_TRIE_OPEN,
                                 err));
    }
    STI_TRY(sti_trie_finish(&tk->user, err));
    return sti_trie_finish(&tk->special, err);
}

still_status sti_tokenizer_index(still_tokenizer *tk, const sti_added *added,
                                 still_error *err)
{
    tk->n = tk->v.n;
    if (!tk->n) return sti_fail(err, STILL_E_FORMAT, "the vocabulary has no tokens");
    STI_TRY(sti_vocab_index(&tk->v, err));
    if (tk->spm) {
        tk->bpe.by_char = true;
        STI_TRY(add_characters(&tk->v, err));
        tk->words_apart = words_apart(&tk->v);
    }
    return build_tries(tk, added, err);
}

still_status sti_tokenizer_merges_by_id(still_tokenizer *tk, still_error *err)
{
    uint32_t *rank = sti_alloc((size_t)tk->v.n, sizeof *rank);
    if (!rank) return sti_fail_memory(err, "ranks", (size_t)tk->v.n * sizeof *rank);
    for (int i = 0; i < tk->v.n; i++) rank[i] = (uint32_t)i;
    still_status st = sti_bpe_learn(&tk->bpe, &tk->v, rank, err);
    free(rank);
    return st;
}

typedef struct scored {
    float score;
    int32_t id;
} scored;

static int by_score(const void *a, const void *b)
{
    const scored *x = a, *y = b;
    return x->score > y->score ? -1 : x->score < y->score;
}

still_status sti_tokenizer_merges_by_score(still_tokenizer *tk, const float *score,
                                           still_error *err)
{
    size_t n = (size_t)tk->v.n;
    scored *order = sti_alloc(n, sizeof *order);
    uint32_t *rank = sti_alloc(n, sizeof *rank);
    still_status st = STILL_OK;
    if (!order || !rank) st = sti_fail_memory(err, "merges", n * sizeof *order);
    for (size_t i = 0; i < n && st == STILL_OK; i++) {
        order[i] = (scored){i < (size_t)tk->n ? score[i] : 0, (int32_t)i};
        if (order[i].score != order[i].score)
            st = sti_fail(err, STILL_E_FORMAT,
                          "token %zu has a score that is no number", i);
    }
    if (st == STILL_OK) {
        qsort(order, n, sizeof *order, by_score);
        uint32_t r = 0; /* tokens of equal score share a rank: the leftmost merges */
        for (size_t i = 0; i < n; i++) {
            if (i && order[i].score != order[i - 1].score) r++;
            rank[order[i].id] = r;
        }
        st = sti_bpe_learn(&tk->bpe, &tk->v, rank, err);
    }
    free(order);
    free(rank);
    return st;
}

int32_t sti_tokenizer_special_id(const still_tokenizer *tk, const char *text, size_t n)
{
    size_t len = 0;
    const int32_t id = sti_trie_find(&tk->special, text, n);
    if (id >= 0) sti_vocab_piece(&tk->v, id, &len);
    return id >= 0 && len == n ? id : -1;
}

still_status sti_tokenizer_add_end(still_tokenizer *tk, int32_t id, still_error *err)
{
    enum { MOST = 1024 }; /* they are compared one by one; models have up to five */
    if (id < 0 || id >= tk->n || still_tokenizer_is_end(tk, id)) return STILL_OK;
    if (tk->n_end >= MOST)
        return sti_fail(err, STILL_E_LIMIT, "more than %d tokens end a text", MOST);
    int32_t *end = sti_grow(tk->end, tk->n_end + 1, sizeof *end);
    if (!end) return sti_fail_memory(err, "end tokens", sizeof *end);
    tk->end = end;
    end[tk->n_end++] = id;
    return STILL_OK;
}

static still_status check_id(const still_tokenizer *tk, const char *what, int32_t id,
                             still_error *err)
{
    if (id >= -1 && id < tk->n) return STILL_OK;
    return sti_fail(err, STILL_E_FORMAT, "%s token is %d, the vocabulary has %d", what,
                    id, tk->n);
}

still_status sti_tokenizer_finish(still_tokenizer *tk, still_error *err)
{
    /* Names of the tokens with which chat models end a turn or a text. */
    static const char *const ends[] = {
        "<|im_end|>", "<|eot_id|>",    "<|eom_id|>", "<|end_of_text|>",
        "</s>",       "<|endoftext|>", "<|end|>",    "<end_of_turn>"};
    STI_TRY(check_id(tk, "unknown", tk->unknown, err));
    STI_TRY(check_id(tk, "BOS", tk->bos, err));
    STI_TRY(check_id(tk, "EOS", tk->eos, err));
    STI_TRY(sti_tokenizer_add_end(tk, tk->eos, err));
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        int32_t id = sti_tokenizer_special_id(tk, ends[i], strlen(ends[i]));
        STI_TRY(sti_tokenizer_add_end(tk, id, err));
    }
    if (tk->eos < 0 && tk->n_end) tk->eos = tk->end[0];
    if (tk->bos < 0) tk->add_bos = false;
    return STILL_OK;
}

/* ---- Questions ----------------------------------------------------------- */

int still_tokenizer_vocab_size(const still_tokenizer *tk)
{
    return tk->n;
}

int32_t still_tokenizer_bos(const still_tokenizer *tk)
{
    return tk->bos;
}

int32_t still_tokenizer_eos(const still_tokenizer *tk)
{
    return tk->eos;
}

bool still_tokenizer_adds_bos(const still_tokenizer *tk)
{
    return tk->add_bos;
}

bool still_tokenizer_is_end(const still_tokenizer *tk, int32_t id)
{
    for (size_t i = 0; i < tk->n_end; i++)
        if (tk->end[i] == id) return true;
    return false;
}

const char *still_tokenizer_chat_template(const still_tokenizer *tk)
{
    return tk->chat_template;
}
