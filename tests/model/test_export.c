/* Exports against what they were made from: a linearized model gives the same logits
 * from base and adapter, from a merged folder and from a pair of GGUF files; PEFT's
 * tensors are what the merge added; and nothing is left behind by a failure. Bases have
 * both layouts of q and k: the folder keeps halves of a head apart, the GGUF file that
 * is made of it has pairs side by side. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/random.h"
#include "model/model.h"

enum { T = 96, RANK = 4 };
#define FOLDER FIXTURES "/train/model"

static char scratch[] = "/tmp/still-export-XXXXXX";

static void must(still_status st, const still_error *e)
{
    if (st != STILL_OK) fail_msg("%s", e->text);
}

static char *in_scratch(const char *name)
{
    static char path[32][256];
    static int next;
    char *p = path[next++ % 32];
    snprintf(p, sizeof path[0], "%s/%s", scratch, name);
    return p;
}

static bool exists(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0;
}

static float noise(uint64_t i)
{
    return (float)(sti_mix64(i) >> 40) / (float)(1 << 23) - 1; /* [-1, 1) */
}

/* An adapter with random numbers in every entry. */
static void make_adapter(const char *base, const char *method, const char *dir,
                         int first_layer)
{
    still_error e;
    still_model *m;
    sti_adapter *a;
    sti_adapter_spec spec = {.lora = {RANK, 8, 31}, .base_name = "the base"};
    must(still_model_open(base, NULL, &m, &e), &e);
    must(still_method_init(&spec.method, method, 8, &e), &e);
    if (strcmp(method, "still") == 0) {
        spec.method.select = 2;
        spec.method.cap = 8;
    }
    spec.method.first_layer = first_layer;
    sti_model_fingerprint(m, false, spec.base);
    const sti_adapter_home home = sti_model_home(m);
    must(sti_adapter_new(&home, &spec, &a, &e), &e);
    for (size_t i = 0; i < a->n_entries; i++) {
        const sti_adapter_entry *t = &a->entry[i];
        for (size_t j = 0; j < t->n; j++)
            a->value[t->at + j] += 0.15f * noise(i * 1000003 + j);
    }
    assert_int_equal(mkdir(dir, 0777), 0);
    must(sti_adapter_write(a, dir, &e), &e);
    sti_adapter_free(a);
    still_model_free(m);
}

static still_status export(const char *model, const char *adapter, const char *format,
                           const char *dtype, const char *path, still_error *e)
{
    return still_export(
        model,
        &(still_export_params){
            .format = format, .path = path, .adapter = adapter, .dtype = dtype},
        e);
}

/* Logits after T tokens, in two pieces, so that chunks leave the window. */
static void logits_of(const char *model, const char *adapter, float *out, int *vocab)
{
    still_error e;
    still_model *m;
    still_session *s;
    int32_t tok[T];
    must(still_model_open(model, &(still_model_params){.adapter = adapter}, &m, &e),
         &e);
    *vocab = still_model_get_info(m)->vocab;
    must(
        still_session_new(m, &(still_session_params){.ctx = T, .cache = "f32"}, &s, &e),
        &e);
    for (int i = 0; i < T; i++)
        tok[i] = (int32_t)(sti_mix64((uint64_t)i) % (uint64_t)*vocab);
    must(still_session_feed(s, tok, T / 2, &e), &e);
    must(still_session_feed(s, tok + T / 2, T - T / 2, &e), &e);
    memcpy(out, still_session_logits(s), (size_t)*vocab * sizeof *out);
    still_session_free(s);
    still_model_free(m);
}

static double distance(const char *model, const char *adapter, const char *other,
                       const char *other_adapter)
{
    static float a[1024], b[1024];
    int n, k;
    double worst = 0, size = 0;
    logits_of(model, adapter, a, &n);
    logits_of(other, other_adapter, b, &k);
    assert_int_equal(n, k);
    for (int i = 0; i < n; i++) {
        worst = fmax(worst, fabs((double)a[i] - b[i]));
        size = fmax(size, fabs(a[i]));
    }
    assert_true(size > 0.1);
    return worst;
}

/* The three exports of one adapter, all against base + adapter. */
static void check_exports(const char *base, const char *method, const char *tag)
{
    still_error e;
    char name[64];
    snprintf(name, sizeof name, "%s-adapter", tag);
    const char *adapter = in_scratch(name);
    make_adapter(base, method, adapter, 0);
    snprintf(name, sizeof name, "%s-hf", tag);
    const char *folder = in_scratch(name);
    snprintf(name, sizeof name, "%s.gguf", tag);
    const char *file = in_scratch(name);
    snprintf(name, sizeof name, "%s.still.gguf", tag);
    const char *twin = in_scratch(name);
    must(export(base, adapter, "safetensors", "f32", folder, &e), &e);
    must(export(base, adapter, "gguf", "f32", file, &e), &e);
    assert_true(distance(base, adapter, base, NULL) > 1e-2); /* it does something */
    assert_true(distance(base, adapter, folder, folder) <= 1e-4);
    assert_true(distance(base, adapter, file, twin) <= 1e-4);
    assert_true(distance(folder, NULL, file, NULL) <= 1e-4); /* as softmax */
    /* An export is a model: its own export is that model again. */
    snprintf(name, sizeof name, "%s-again.gguf", tag);
    const char *again = in_scratch(name);
    snprintf(name, sizeof name, "%s-again.still.gguf", tag);
    must(export(folder, folder, "gguf", "f32", again, &e), &e);
    assert_true(distance(base, adapter, again, in_scratch(name)) <= 1e-4);
}

static void same_logits_from_folder(void **state)
{
    (void)state;
    check_exports(FOLDER, "still", "a");
}

static void same_logits_from_gguf(void **state)
{
    (void)state;
    still_error e;
    const char *base = in_scratch("pairs.gguf");
    must(export(FOLDER, NULL, "gguf", "f32", base, &e), &e);
    assert_false(exists(in_scratch("pairs.still.gguf"))); /* nothing to put there */
    assert_true(distance(FOLDER, NULL, base, NULL) <= 1e-4);
    check_exports(base, "still", "b");
}

static void same_logits_of_other_methods(void **state)
{
    (void)state;
    check_exports(FOLDER, "lolcats", "c");
    check_exports(FOLDER, "t2r", "d"); /* maps with a bias */
}

/* Scaled frequencies, biases, tied embeddings and windows survive the way to GGUF and
 * back. */
static void families_there_and_back(void **state)
{
    (void)state;
    static const char *const family[] = {"llama3", "llama3.1", "llama3.2-tied",
                                         "mistral-window", "qwen2-bias"};
    for (size_t i = 0; i < sizeof family / sizeof *family; i++) {
        still_error e;
        char model[512], name[64];
        snprintf(model, sizeof model, FIXTURES "/models/%s", family[i]);
        snprintf(name, sizeof name, "%s.gguf", family[i]);
        const char *file = in_scratch(name);
        const char *folder = in_scratch(family[i]);
        must(export(model, NULL, "gguf", "f32", file, &e), &e);
        must(export(file, NULL, "safetensors", "f32", folder, &e), &e);
        assert_true(distance(model, NULL, file, NULL) <= 1e-4);
        assert_true(distance(model, NULL, folder, NULL) <= 1e-4);
    }
}

/* ---- PEFT ---------------------------------------------------------------- */

static const float *tensor_of(const sti_store *s, const char *name, int64_t d0,
                              int64_t d1)
{
    const sti_tensor *t = sti_store_find(s, name);
    if (!t) fail_msg("no tensor '%s'", name);
    assert_int_equal(t->type, STI_F32);
    assert_int_equal(t->n_dims, 2);
    assert_int_equal(t->dim[0], d0);
    assert_int_equal(t->dim[1], d1);
    return t->data;
}

/* merged - base = alpha / r B A for one projection, in the folder's layout. */
static void check_sum(const sti_store *peft, const sti_store *merged,
                      const sti_store *base, const char *module, int64_t out,
                      int64_t in, double scale)
{
    char name[128];
    snprintf(name, sizeof name, "base_model.model.%s.lora_A.weight", module);
    const float *a = tensor_of(peft, name, RANK, in);
    snprintf(name, sizeof name, "base_model.model.%s.lora_B.weight", module);
    const float *b = tensor_of(peft, name, out, RANK);
    snprintf(name, sizeof name, "%s.weight", module);
    const float *w = tensor_of(merged, name, out, in),
                *w0 = tensor_of(base, name, out, in);
    double worst = 0;
    for (int64_t i = 0; i < out; i++)
        for (int64_t j = 0; j < in; j++) {
            double sum = w0[i * in + j];
            for (int r = 0; r < RANK; r++)
                sum += scale * b[i * RANK + r] * a[r * in + j];
            worst = fmax(worst, fabs(sum - w[i * in + j]));
        }
    assert_true(worst <= 1e-6);
}

/* The adapter was trained on pairs; PEFT's base is the folder, which has halves. */
static void peft_is_what_the_merge_adds(void **state)
{
    (void)state;
    still_error e;
    sti_store peft, merged, base;
    const char *pairs = in_scratch("p.gguf"), *adapter = in_scratch("p-adapter");
    must(export(FOLDER, NULL, "gguf", "f32", pairs, &e), &e);
    make_adapter(pairs, "still", adapter, 1);
    must(export(pairs, adapter, "peft", NULL, in_scratch("peft"), &e), &e);
    must(export(pairs, adapter, "safetensors", "f32", in_scratch("p-hf"), &e), &e);
    must(sti_store_open(in_scratch("peft/adapter_model.safetensors"), &peft, &e), &e);
    must(sti_store_open(in_scratch("p-hf"), &merged, &e), &e);
    must(sti_store_open(FOLDER, &base, &e), &e);
    json_t *j = json_load_file(in_scratch("peft/adapter_config.json"), 0, NULL);
    assert_string_equal(json_string_value(json_object_get(j, "peft_type")), "LORA");
    assert_int_equal(json_integer_value(json_object_get(j, "r")), RANK);
    const double scale = json_number_value(json_object_get(j, "lora_alpha")) / RANK;
    const json_t *layers = json_object_get(j, "layers_to_transform");
    assert_int_equal(json_array_size(layers), 2);
    assert_int_equal(json_integer_value(json_array_get(layers, 0)), 1);
    assert_int_equal(peft.n_tensors, 2 * 4 * 2); /* layers, modules, A and B */
    check_sum(&peft, &merged, &base, "model.layers.1.self_attn.q_proj", 64, 64, scale);
    check_sum(&peft, &merged, &base, "model.layers.1.self_attn.k_proj", 32, 64, scale);
    check_sum(&peft, &merged, &base, "model.layers.2.self_attn.v_proj", 32, 64, scale);
    check_sum(&peft, &merged, &base, "model.layers.2.self_attn.o_proj", 64, 64, scale);
    json_decref(j);
    sti_store_close(&peft);
    sti_store_close(&merged);
    sti_store_close(&base);
}

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
        same = a.tensor[i].bytes == b.tensor[i].bytes &&
               memcmp(a.tensor[i].data, b.tensor[i].data, a.tensor[i].bytes) == 0;
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
    must(still_model_open(base, &(still_model_params){.adapter = from}, &m, &e), &e);
    must(still_model_open(base, &(still_model_params){.adapter = in_scratch("r-q8")},
                          &k, &e),
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

/* ---- Types and errors ---------------------------------------------------- */

static void types(void **state)
{
    (void)state;
    still_error e;
    sti_store s;
    const char *q8 = in_scratch("q8.gguf"), *merged = in_scratch("m8.gguf");
    const char *adapter = in_scratch("q8-adapter");
    must(export(FOLDER, NULL, "gguf", "q8_0", q8, &e), &e);
    make_adapter(q8, "still", adapter, 2); /* layers 0 and 1 are not touched */
    must(export(q8, adapter, "gguf", NULL, merged, &e), &e);
    sti_store before;
    must(sti_store_open(q8, &before, &e), &e);
    must(sti_store_open(merged, &s, &e), &e);
    assert_int_equal(s.n_tensors, before.n_tensors);
    for (size_t i = 0; i < s.n_tensors; i++) {
        const sti_tensor *a = &before.tensor[i], *b = &s.tensor[i];
        const bool same = memcmp(a->data, b->data, a->bytes) == 0;
        const bool touched = strstr(a->name, "blk.2.attn_") && !strstr(a->name, "norm");
        assert_string_equal(a->name, b->name);
        assert_int_equal(a->type, b->type);
        assert_int_equal(same, !touched);
    }
    sti_store_close(&before);
    sti_store_close(&s);
    must(export(q8, NULL, "safetensors", NULL, in_scratch("q8-hf"), &e), &e);
    must(sti_store_open(in_scratch("q8-hf"), &s, &e), &e);
    assert_int_equal(s.tensor[0].type, STI_BF16);
    sti_store_close(&s);
}

static void refuses(const char *model, const char *adapter, const char *format,
                    const char *dtype, const char *path, const char *says)
{
    still_error e = {0};
    assert_int_not_equal(export(model, adapter, format, dtype, path, &e), STILL_OK);
    if (!strstr(e.text, says)) fail_msg("'%s' does not say '%s'", e.text, says);
}

static bool stop(void *user, uint64_t done, uint64_t total)
{
    (void)user;
    return done < total / 2;
}

static void errors(void **state)
{
    (void)state;
    still_error e;
    const char *path = in_scratch("none.gguf"), *folder = in_scratch("none");
    refuses("/no/such/model", NULL, "gguf", NULL, path, "/no/such/model");
    refuses(FOLDER, NULL, "onnx", NULL, path, "not known (gguf, safetensors, peft, ");
    refuses(FOLDER, NULL, "gguf", NULL, in_scratch("name"), "NAME.gguf");
    refuses(FOLDER, NULL, "gguf", NULL, in_scratch("x.still.gguf"), "NAME.gguf");
    refuses(FOLDER, NULL, "gguf", "q4_k", path, "'q4_k' is not one of");
    refuses(FOLDER, NULL, "safetensors", "q8_0", folder, "'q8_0' is not one of");
    refuses(FOLDER, NULL, "peft", NULL, folder, "no low-rank additions");
    refuses(FOLDER, NULL, "adapter", NULL, folder, "plain model has no adapter");
    refuses(FOLDER, in_scratch("a-adapter"), "adapter", "bf16", folder,
            "'bf16' is not one of q8_0, f16, f32");
    refuses(FOLDER, NULL, "safetensors", NULL, scratch, "exists already");
    refuses(FOLDER, NULL, "safetensors", NULL, in_scratch("no/such/place"),
            "its folder is not there");
    refuses(FIXTURES "/models/llama3", in_scratch("a-adapter"), "safetensors", NULL,
            folder, "another base model");
    refuses(in_scratch("a-hf"), in_scratch("a-hf"), "peft", NULL, folder,
            "trained by stage 2");
    assert_int_equal(still_export(FOLDER,
                                  &(still_export_params){
                                      .format = "gguf", .path = path, .progress = stop},
                                  &e),
                     STILL_E_CANCELLED);
    assert_false(exists(path));
    assert_false(exists(folder));
    char temp[300];
    snprintf(temp, sizeof temp, "%s.%ld.tmp", path, (long)getpid());
    assert_false(exists(temp));
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
    assert_int_equal(still_tokenizer_vocab(a), still_tokenizer_vocab(b));
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
        must(sti_tokenizer_save_gguf(tk, still_tokenizer_vocab(tk), w, &e), &e);
        must(sti_writer_finish(w, &e), &e);
        still_tokenizer_free(tk);
        same_ids(source, folder);
        same_ids(source, file);
    }
}

static int begin(void **state)
{
    (void)state;
    return mkdtemp(scratch) ? 0 : -1;
}

static int end(void **state)
{
    (void)state;
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", scratch);
    return system(command);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_logits_from_folder),
        cmocka_unit_test(same_logits_from_gguf),
        cmocka_unit_test(same_logits_of_other_methods),
        cmocka_unit_test(families_there_and_back),
        cmocka_unit_test(peft_is_what_the_merge_adds),
        cmocka_unit_test(smaller_adapters),
        cmocka_unit_test(gates_are_rounded_once),
        cmocka_unit_test(types),
        cmocka_unit_test(errors),
        cmocka_unit_test(tokenizers_there_and_back),
    };
    return cmocka_run_group_tests(tests, begin, end);
}
