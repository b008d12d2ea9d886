/* load_spm.c - SentencePiece .model files.
 *
 * The file is a protobuf message; the few fields that matter are read by a bounded
 * reader, everything else is skipped:
 *   ModelProto      1 pieces (repeated)   2 trainer_spec   3 normalizer_spec
 *   SentencePiece   1 piece   2 score (float)   3 type
 *   TrainerSpec     3 model_type   24 treat_whitespace_as_suffix
 *                   40 unk_id   41 bos_id   42 eos_id
 *   NormalizerSpec  1 name   2 precompiled_charsmap   3 add_dummy_prefix
 *                   4 remove_extra_whitespaces   5 escape_whitespaces
 * Only what Llama 2 and Mistral use is supported: BPE without normalization. */
#include <stdlib.h>
#include <string.h>

#include "token/tokenizer.h"

typedef struct reader {
    const unsigned char *p;
    size_t n;
} reader;

typedef struct field {
    uint64_t number;
    int wire;       /* 0 varint, 1 eight bytes, 2 bytes, 5 four bytes */
    uint64_t value; /* of 0, 1 and 5 */
    reader bytes;   /* of 2 */
} field;

static bool read_varint(reader *r, uint64_t *out)
{
    uint64_t v = 0;
    for (int shift = 0; shift < 64 && r->n; shift += 7) {
        unsigned char b = *r->p++;
        r->n--;
        v |= (uint64_t)(b & 0x7F) << shift;
        if (!(b & 0x80)) {
            *out = v;
            return true;
        }
    }
    return false;
}

static bool read_fixed(reader *r, size_t size, uint64_t *out)
{
    if (r->n < size) return false;
    *out = 0;
    for (size_t i = 0; i < size; i++) *out |= (uint64_t)r->p[i] << 8 * i;
    r->p += size;
    r->n -= size;
    return true;
}

static bool read_field(reader *r, field *f)
{
    uint64_t key;
    *f = (field){0};
    if (!read_varint(r, &key)) return false;
    f->number = key >> 3;
    f->wire = (int)(key & 7);
    switch (f->wire) {
    case 0: return read_varint(r, &f->value);
    case 1: return read_fixed(r, 8, &f->value);
    case 5: return read_fixed(r, 4, &f->value);
    case 2:
        if (!read_varint(r, &f->value) || f->value > r->n) return false;
        f->bytes = (reader){r->p, (size_t)f->value};
        r->p += f->value;
        r->n -= (size_t)f->value;
        return true;
    default: return false;
    }
}

static still_status broken(still_error *err, const char *what)
{
    return sti_fail(
        err, STILL_E_FORMAT,
        "SentencePiece model: %s is cut off or no protobuf (truncated file?)", what);
}

typedef struct scores {
    float *p;
    size_t capacity;
} scores;

static still_status read_piece(still_tokenizer *tk, reader r, scores *s,
                               still_error *err)
{
    reader text = {(const unsigned char *)"", 0};
    uint32_t score_bits = 0;
    uint64_t type = STI_KIND_NORMAL;
    size_t id = (size_t)tk->v.n;
    for (field f; r.n;) {
        if (!read_field(&r, &f)) return broken(err, "a piece");
        if (f.number == 1 && f.wire == 2) text = f.bytes;
        if (f.number == 2 && f.wire == 5) score_bits = (uint32_t)f.value;
        if (f.number == 3 && f.wire == 0) type = f.value;
    }
    if (type < STI_KIND_NORMAL || type > STI_KIND_BYTE)
        return sti_fail(err, STILL_E_FORMAT,
                        "SentencePiece model: piece %zu has type %llu, expected 1 to 6",
                        id, (unsigned long long)type);
    if (!s->p || id >= s->capacity) {
        size_t capacity = s->capacity ? 2 * s->capacity : 1024;
        float *p = sti_grow(s->p, capacity, sizeof *p);
        if (!p)
            return sti_fail_memory(err, "SentencePiece scores", capacity * sizeof *p);
        s->p = p;
        s->capacity = capacity;
    }
    memcpy(&s->p[id], &score_bits, sizeof score_bits);
    return sti_tokenizer_add_spm(tk, (const char *)text.p, text.n, (sti_kind)type, err);
}

static still_status read_trainer(still_tokenizer *tk, reader r, still_error *err)
{
    static const char *const names[] = {"?", "unigram", "bpe", "word", "char"};
    uint64_t type = 1, suffix = 0;
    for (field f; r.n;) {
        if (!read_field(&r, &f)) return broken(err, "the trainer's settings");
        if (f.wire != 0) continue;
        if (f.number == 3) type = f.value;
        if (f.number == 24) suffix = f.value;
        if (f.number == 40) tk->unknown = (int32_t)f.value;
        if (f.number == 41) tk->bos = (int32_t)f.value;
        if (f.number == 42) tk->eos = (int32_t)f.value;
    }
    if (type != 2)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "SentencePiece model: its kind is '%s', only 'bpe' can be read",
                        names[type < 5 ? type : 0]);
    if (suffix)
        return sti_fail(err, STILL_E_UNSUPPORTED,
                        "SentencePiece model: spaces as suffix cannot be read");
    return STILL_OK;
}

static still_status read_normalizer(still_tokenizer *tk, reader r, still_error *err)
{
    uint64_t dummy_prefix = 1, squeeze = 1, escape = 1;
    bool charsmap = false;
    for (field f; r.n;) {
        if (!read_field(&r, &f)) return broken(err, "the normalizer's settings");
        if (f.number == 2 && f.wire == 2) charsmap = f.bytes.n > 0;
        if (f.number == 3 && f.wire == 0) dummy_prefix = f.value;
        if (f.number == 4 && f.wire == 0) squeeze = f.value;
        if (f.number == 5 && f.wire == 0) escape = f.value;
    }
    if (charsmap || squeeze || !escape)
        return sti_fail(
            err, STILL_E_UNSUPPORTED,
            "SentencePiece model: it %s; only text taken as it is can be read",
            charsmap  ? "rewrites characters"
            : squeeze ? "removes extra spaces"
                      : "leaves spaces unescaped");
    tk->prefix = dummy_prefix ? STI_PREFIX_FIRST : STI_PREFIX_NONE;
    return STILL_OK;
}

static still_status read_model(still_tokenizer *tk, reader r, scores *s,
                               still_error *err)
{
    bool trainer = false, normalizer = false;
    tk->spm = tk->user_inside = tk->fuse_unknown = tk->add_bos = true;
    tk->unknown = 0;
    tk->bos = 1;
    tk->eos = 2;
    for (field f; r.n;) {
        if (!read_field(&r, &f)) return broken(err, "a part of it");
        if (f.wire != 2) continue;
        if (f.number == 1) STI_TRY(read_piece(tk, f.bytes, s, err));
        if (f.number == 2) STI_TRY(read_trainer(tk, f.bytes, err));
        if (f.number == 3) STI_TRY(read_normalizer(tk, f.bytes, err));
        trainer |= f.number == 2;
        normalizer |= f.number == 3;
    }
    if (!tk->v.n || !trainer || !normalizer)
        return sti_fail(err, STILL_E_FORMAT,
                        "SentencePiece model: %s missing (truncated file?)",
                        !tk->v.n   ? "pieces are"
                        : !trainer ? "the trainer's settings are"
                                   : "the normalizer's settings are");
    STI_TRY(sti_tokenizer_index(tk, NULL, err));
    return sti_tokenizer_merges_by_score(tk, s->p, err);
}

still_status sti_tokenizer_load_spm(still_tokenizer *tk, const char *p, size_t n,
                                    still_error *err)
{
    scores s = {0};
    still_status st = read_model(tk, (reader){(const unsigned char *)p, n}, &s, err);
    free(s.p);
    return st;
}
