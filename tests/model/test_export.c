/* Exports against what they were made from: a linearized model gives the same logits
 * from base and adapter, from a merged folder and from a pair of GGUF files; PEFT's
 * tensors are what the merge added; types are what was asked for, and nothing is left
 * behind by a failure. Bases have both layouts of q and k: the folder keeps halves of a
 * head apart, the GGUF file that is made of it has pairs side by side. */
#include "../run.h"
#include "exports.h"

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
                                  &STILL_PARAMS(still_export_params, .format = "gguf",
                                                .path = path, .progress = stop),
                                  &e),
                     STILL_E_CANCELLED);
    assert_false(exists(path));
    assert_false(exists(folder));
    char temp[300];
    snprintf(temp, sizeof temp, "%s.%ld.tmp", path, (long)getpid());
    assert_false(exists(temp));
}

RUN_TESTS_IN(begin, end, cmocka_unit_test(same_logits_from_folder),
             cmocka_unit_test(same_logits_from_gguf),
             cmocka_unit_test(same_logits_of_other_methods),
             cmocka_unit_test(families_there_and_back),
             cmocka_unit_test(peft_is_what_the_merge_adds), cmocka_unit_test(types),
             cmocka_unit_test(errors))
