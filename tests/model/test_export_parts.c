/* Exports of parts of a model: the adapter alone, smaller; the tokenizer, as the files
 * that other programs read. */
#include "../run.h"
#include "exports.h"

/* ---- The adapter alone --------------------------------------------------- */

static off_t size_of(const char *path)
{
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    return st.st_size;
}

static sti_dtype type_in(const char *adapter, const char *name)
{
    still_error e;
    sti_store s;
    must(sti_adapter_open(adapter, &s, &e), &e);
    const sti_tensor *t = sti_store_find(&s, name);
    if (!t) fail_msg("no tensor '%s'", name);
    const sti_dtype type = t->type;
    sti_store_close(&s);
    return type;
}

static bool same_tensors(const char *adapter, const char *other)
{
    still_error e;
    sti_store a, b;
    must(sti_adapter_open(adapter, &a, &e), &e);
    must(sti_adapter_open(other, &b, &e), &e);
    bool same = a.n_tensors == b.n_tensors;
    for (size_t i = 0; same && i < a.n_tensors; i++)
        same = strcmp(a.tensor[i].name, STI_CHECKSUM) == 0 || /* of all the file */
               (a.tensor[i].bytes == b.tensor[i].bytes &&
                memcmp(a.tensor[i].data, b.tensor[i].data, a.tensor[i].bytes) == 0);
    sti_store_close(&a);
    sti_store_close(&b);
    return same;
}

static void smaller_adapters(void **state)
{
    (void)state;
    still_error e;
    const char *from = in_scratch("s-adapter"), *q8 = in_scratch("s-q8");
    const char *f16 = in_scratch("s-f16"), *f32 = in_scratch("s-f32");
    make_adapter(FOLDER, "still", from, 0);
    must(export(FOLDER, from, "adapter", NULL, q8, &e), &e);
    must(export(FOLDER, from, "adapter", "f16", f16, &e), &e);
    must(export(FOLDER, from, "adapter", "f32", f32, &e), &e);
    assert_int_equal(type_in(q8, "layers.0.gate"), STI_Q8_0);
    assert_int_equal(type_in(q8, "layers.0.map_q"), STI_F16);
    assert_int_equal(type_in(q8, "layers.0.lora.q.b"), STI_F16);
    assert_int_equal(type_in(q8, "layers.0.alpha"), STI_F32);
    assert_int_equal(type_in(f16, "layers.0.gate"), STI_F16);
    assert_int_equal(type_in(f32, "layers.0.gate"), STI_F32);
    const off_t whole = size_of(in_scratch("s-adapter/" STI_ADAPTER_TENSORS));
    assert_true(size_of(in_scratch("s-f16/" STI_ADAPTER_SMALL)) < 2 * whole / 3);
    assert_true(size_of(in_scratch("s-q8/" STI_ADAPTER_SMALL)) <
                size_of(in_scratch("s-f16/" STI_ADAPTER_SMALL)));
    assert_true(same_tensors(from, f32));
    assert_true(distance(FOLDER, from, FOLDER, f32) == 0);
    assert_true(distance(FOLDER, from, FOLDER, f16) <= 1e-2);
    assert_true(distance(FOLDER, from, FOLDER, q8) <= 3e-2);
    assert_true(distance(FOLDER, q8, FOLDER, NULL) > 0.1); /* it does something */

    /* What came out goes in: again as it is, and merged. The one file is an adapter. */
    const char *again = in_scratch("s-again"), *merged = in_scratch("s-hf");
    must(export(FOLDER, q8, "adapter", NULL, again, &e), &e);
    assert_true(same_tensors(q8, again));
    must(export(FOLDER, q8, "safetensors", "f32", merged, &e), &e);
    assert_true(distance(FOLDER, q8, merged, merged) <= 1e-4);
    assert_true(distance(FOLDER, q8, FOLDER, in_scratch("s-q8/" STI_ADAPTER_SMALL)) ==
                0);

    /* An adapter that lay with its base names it by its path. */
    char name[512];
    must(export(merged, merged, "adapter", NULL, in_scratch("s-alone"), &e), &e);
    must(still_adapter_base(in_scratch("s-alone"), name, sizeof name, &e), &e);
    assert_string_equal(name, merged);
    must(still_adapter_base(q8, name, sizeof name, &e), &e);
    char small[] = "as it was";
    assert_int_equal(still_adapter_base(q8, small, 2, &e), STILL_E_LIMIT);
    assert_string_equal(small, "as it was");
    assert_string_equal(name, "the base");
}

/* Beside quantized weights gates are 8 bits however they were stored: rounded once. */
static void gates_are_rounded_once(void **state)
{
    (void)state;
    still_error e;
    const char *base = in_scratch("r.gguf"), *from = in_scratch("r-adapter");
    must(export(FOLDER, NULL, "gguf", "q8_0", base, &e), &e);
    make_adapter(base, "still", from, 0);
    must(export(base, from, "adapter", NULL, in_scratch("r-q8"), &e), &e);
    must(export(base, from, "adapter", "f16", in_scratch("r-f16"), &e), &e);
    still_model *m, *k;
    must(still_model_open(base, &STILL_PARAMS(still_model_params, .adapter = from), &m,
                          &e),
         &e);
    must(still_model_open(
             base, &STILL_PARAMS(still_model_params, .adapter = in_scratch("r-q8")), &k,
             &e),
         &e);
    for (int l = 0; l < m->adapter->n_layers; l++) {
        const sti_tensor *a = &m->adapter->layer[l].gate.src,
                         *b = &k->adapter->layer[l].gate.src;
        assert_int_equal(a->type, STI_Q8_0);
        assert_int_equal(b->type, STI_Q8_0);
        assert_int_equal(a->bytes, b->bytes);
        if (m->adapter->layer[l].gate.owned) /* else the backend has its own copy */
            assert_memory_equal(a->data, b->data, a->bytes);
    }
    still_model_free(m);
    still_model_free(k);
    assert_true(distance(base, in_scratch("r-q8"), base, in_scratch("r-f16")) <= 1e-2);
}

/* ---- Tokenizers ---------------------------------------------------------- */

static void same_ids(const char *from, const char *to)
{
    static const char *const text[] = {
        "The water moves, and the picture stays.", "It's 12,345.67 x  y   z\n\n\tend ",
        "caf\xC3\xA9 \xE4\xBD\xA0\xE5\xA5\xBD \xF0\x9F\x99\x82",
        "<|im_start|>user\nHi"};
    still_error e;
    still_tokenizer *a, *b;
    must(still_tokenizer_open(from, &a, &e), &e);
    must(still_tokenizer_open(to, &b, &e), &e);
    assert_int_equal(still_tokenizer_vocab_size(a), still_tokenizer_vocab_size(b));
    assert_int_equal(still_tokenizer_eos(a), still_tokenizer_eos(b));
    for (size_t i = 0; i < sizeof text / sizeof *text; i++) {
        int32_t x[256], y[256];
        size_t n, k;
        must(still_tokenizer_encode(a, text[i], strlen(text[i]), STILL_ENCODE_SPECIAL,
                                    x, 256, &n, &e),
             &e);
        must(still_tokenizer_encode(b, text[i], strlen(text[i]), STILL_ENCODE_SPECIAL,
                                    y, 256, &k, &e),
             &e);
        assert_int_equal(n, k);
        assert_memory_equal(x, y, n * sizeof *x);
    }
    still_tokenizer_free(a);
    still_tokenizer_free(b);
}

/* GGUF metadata of a vocabulary, as files that other programs read, and back. */
static void tokenizers_there_and_back(void **state)
{
    (void)state;
    static const char *const from[] = {"smollm.gguf", "smollm.json", "llama3.json",
                                       "spm.gguf", "spm-json.json"};
    for (size_t i = 0; i < sizeof from / sizeof *from; i++) {
        still_error e;
        still_tokenizer *tk;
        sti_writer *w;
        char source[512], name[64];
        snprintf(source, sizeof source, FIXTURES "/vocab/%s", from[i]);
        snprintf(name, sizeof name, "vocab%zu", i);
        const char *folder = in_scratch(name);
        snprintf(name, sizeof name, "vocab%zu.gguf", i);
        const char *file = in_scratch(name);
        must(still_tokenizer_open(source, &tk, &e), &e);
        assert_int_equal(mkdir(folder, 0777), 0);
        must(sti_tokenizer_save_json(tk, folder, &e), &e);
        must(sti_writer_gguf(file, &w, &e), &e);
        must(sti_tokenizer_save_gguf(tk, still_tokenizer_vocab_size(tk), w, &e), &e);
        must(sti_writer_finish(w, &e), &e);
        still_tokenizer_free(tk);
        same_ids(source, folder);
        same_ids(source, file);
    }
}

RUN_TESTS_IN(begin, end, cmocka_unit_test(smaller_adapters),
             cmocka_unit_test(gates_are_rounded_once),
             cmocka_unit_test(tokenizers_there_and_back))
