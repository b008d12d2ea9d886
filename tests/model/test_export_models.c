/* Exports of every architecture, there and back: a folder becomes a GGUF file and that a
 * folder again, with the same numbers in the same tensors, the same configuration, and a
 * config.json that says what the first one said. With an adapter, whose low-rank
 * additions go into fused and rotated matrices, the logits stay. */
#include "../run.h"
#include "exports.h"

static const char *const models[] = {
    "gemma3", "granite",  "olmo2",         "phi3",           "qwen3",     "smollm3",
    "llama3", "llama3.1", "llama3.2-tied", "mistral-window", "qwen2-bias"};
enum { MODELS = sizeof models / sizeof *models };

/* ---- Configurations ------------------------------------------------------ */

static bool close_to(double a, double b)
{
    return fabs(a - b) <= 1e-6 * fabs(b);
}

static void same_config(const sti_config *a, const sti_config *b)
{
    const size_t n = (size_t)a->layers;
    assert_int_equal(a->layers, b->layers);
    assert_int_equal(a->hidden, b->hidden);
    assert_int_equal(a->ffn, b->ffn);
    assert_int_equal(a->heads, b->heads);
    assert_int_equal(a->kv_heads, b->kv_heads);
    assert_int_equal(a->head_dim, b->head_dim);
    assert_int_equal(a->rotary, b->rotary);
    assert_int_equal(a->vocab, b->vocab);
    assert_int_equal(a->ctx_train, b->ctx_train);
    assert_int_equal(a->long_from, b->long_from);
    assert_int_equal(a->tied, b->tied);
    assert_ptr_equal(a->of, b->of);
    assert_memory_equal(a->window, b->window, n * sizeof *a->window);
    assert_memory_equal(a->table, b->table, n * sizeof *a->table);
    assert_true(a->rms_eps == b->rms_eps);
    assert_true(close_to(a->rope_factor, b->rope_factor));
    assert_true(close_to(a->form.embed_scale, b->form.embed_scale));
    assert_true(close_to(a->form.residual_scale, b->form.residual_scale));
    assert_true(close_to(a->form.logit_scale, b->form.logit_scale));
    for (int i = 0; i < STI_TABLES * a->head_dim / 2; i++)
        assert_true(close_to((double)a->inv_freq[0][i], (double)b->inv_freq[0][i]) ||
                    a->inv_freq[0][i] == b->inv_freq[0][i]);
}

static bool same_json(const json_t *a, const json_t *b)
{
    if (json_is_number(a) && json_is_number(b))
        return json_number_value(a) == json_number_value(b);
    return json_equal(a, b);
}

/* What both files say is the same. Newer files gather RoPE's settings elsewhere; scaling
 * may be said in more words. */
static void same_words(const char *model, const json_t *was, const json_t *is)
{
    const char *key;
    const json_t *v;
    int seen = 0;
    json_object_foreach((json_t *)(uintptr_t)was, key, v)
    {
        const json_t *w = json_object_get(is, key);
        if (!w || strcmp(key, "rope_scaling") == 0 || strstr(key, "dtype") ||
            strstr(key, "token_id"))
            continue;
        if (strcmp(key, "query_pre_attn_scalar") == 0) continue; /* is in q's norm */
        seen++;
        if (!same_json(v, w)) fail_msg("%s: '%s' is not the same", model, key);
    }
    assert_true(seen >= 12);
}

/* ---- There and back ------------------------------------------------------ */

/* A tensor's numbers, as they are used: 1 is added to Gemma's norms in one kind of file.
 * To be freed. */
static float *numbers(const sti_tensor *t, bool plus_1, size_t *n)
{
    *n = 1;
    for (int d = 0; d < t->n_dims; d++) *n *= (size_t)t->dim[d];
    float *x = malloc(*n * sizeof *x);
    assert_non_null(x);
    sti_dequant(t->type, t->data, x, (int64_t)*n);
    for (size_t i = 0; plus_1 && i < *n; i++) x[i] += 1;
    return x;
}

/* All but the norm that took a scale on the way. */
static void same_tensors(const char *model, const sti_store *a, const sti_store *b)
{
    assert_int_equal(a->n_tensors, b->n_tensors);
    for (size_t i = 0; i < a->n_tensors; i++) {
        const sti_tensor *t = &a->tensor[i], *u = sti_store_find(b, t->name);
        const bool norm = strcmp(model, "gemma3") == 0 && strstr(t->name, "norm");
        size_t n, k;
        if (!u) fail_msg("%s: no tensor '%s'", model, t->name);
        float *x = numbers(t, norm, &n), *y = numbers(u, norm, &k);
        assert_int_equal(n, k);
        if (!(norm && strstr(t->name, "q_norm")) && memcmp(x, y, n * sizeof *x) != 0)
            fail_msg("%s: tensor '%s' has other numbers", model, t->name);
        free(x);
        free(y);
    }
}

static void round_trip(const char *model, const char *from)
{
    still_error e;
    char name[64];
    sti_store a, b;
    sti_config c, d;
    snprintf(name, sizeof name, "%s.gguf", model);
    const char *file = in_scratch(name), *folder = in_scratch(model);
    must(export(from, NULL, "gguf", "f32", file, &e), &e);
    must(export(file, NULL, "safetensors", "f32", folder, &e), &e);
    must(sti_store_open(from, &a, &e), &e);
    must(sti_store_open(folder, &b, &e), &e);
    same_tensors(model, &a, &b);
    same_words(model, a.config, b.config);
    must(sti_config_read(&a, &c, &e), &e);
    must(sti_config_read(&b, &d, &e), &e);
    same_config(&c, &d);
    sti_config_free(&c);
    sti_config_free(&d);
    sti_store_close(&a);
    sti_store_close(&b);
    assert_true(distance(from, NULL, file, NULL) <= 2e-5);
    const double back = distance(from, NULL, folder, NULL);
    assert_true(strcmp(model, "gemma3") == 0 ? back <= 2e-5 : back <= 1e-6);
}

static void there_and_back(void **state)
{
    (void)state;
    for (size_t i = 0; i < MODELS; i++) {
        char from[512];
        snprintf(from, sizeof from, FIXTURES "/models/%s", models[i]);
        round_trip(models[i], from);
    }
}

/* A folder with another config.json beside the same tensors. */
static const char *folder_with(const char *name, const char *config, const char *model)
{
    char path[300], from[512];
    const char *folder = in_scratch(name);
    assert_int_equal(mkdir(folder, 0777), 0);
    snprintf(path, sizeof path, "%s/config.json", folder);
    assert_int_equal(symlink(config, path), 0);
    snprintf(from, sizeof from, FIXTURES "/models/%s/model.safetensors", model);
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    assert_int_equal(symlink(from, path), 0);
    return folder;
}

/* Both sets of divisors, the length that decides, and the factor of what is rotated. */
static void two_sets_of_frequencies(void **state)
{
    (void)state;
    still_error e;
    sti_store s;
    round_trip("phi3-long",
               folder_with("long", FIXTURES "/phi3-long/config.json", "phi3"));
    must(sti_store_open(in_scratch("phi3-long.gguf"), &s, &e), &e);
    const sti_tensor *t = sti_store_find(&s, "rope_factors_long.weight");
    assert_non_null(t);
    assert_true(((const float *)t->data)[0] == 1.5f);
    assert_non_null(sti_store_find(&s, "rope_factors_short.weight"));
    assert_null(sti_store_find(&s, "rope_freqs.weight"));
    assert_non_null(sti_meta_find(&s, "phi3.rope.scaling.original_context_length"));
    assert_non_null(sti_meta_find(&s, "phi3.rope.scaling.attn_factor"));
    sti_store_close(&s);
}

/* ---- Adapters ------------------------------------------------------------ */

/* Exports of base and adapter, against them. */
static void merged(const char *model)
{
    still_error e;
    char base[512], name[64];
    snprintf(base, sizeof base, FIXTURES "/models/%s", model);
    snprintf(name, sizeof name, "%s-adapter", model);
    const char *adapter = in_scratch(name);
    make_adapter(base, "still", adapter, 0);
    snprintf(name, sizeof name, "%s-merged", model);
    const char *folder = in_scratch(name);
    snprintf(name, sizeof name, "%s-merged.gguf", model);
    const char *file = in_scratch(name);
    snprintf(name, sizeof name, "%s-merged.still.gguf", model);
    const char *twin = in_scratch(name);
    must(export(base, adapter, "safetensors", "f32", folder, &e), &e);
    must(export(base, adapter, "gguf", "f32", file, &e), &e);
    assert_true(distance(base, adapter, base, NULL) > 1e-2); /* it does something */
    assert_true(distance(base, adapter, folder, folder) <= 2e-4);
    assert_true(distance(base, adapter, file, twin) <= 2e-4);
}

static void adapters(void **state)
{
    (void)state;
    static const char *const of[] = {"gemma3", "granite", "olmo2",
                                     "phi3",   "qwen3",   "smollm3"};
    for (size_t i = 0; i < sizeof of / sizeof *of; i++) merged(of[i]);
}

/* Additions to q of a model that keeps q, k and v together have no module in PEFT. */
static void no_peft_of_fused(void **state)
{
    (void)state;
    still_error e = {0};
    assert_int_equal(export(FIXTURES "/models/phi3", in_scratch("phi3-adapter"), "peft",
                            NULL, in_scratch("phi3-peft"), &e),
                     STILL_E_UNSUPPORTED);
    assert_non_null(strstr(e.text, "one matrix"));
}

RUN_TESTS_IN(begin, end, cmocka_unit_test(there_and_back),
             cmocka_unit_test(two_sets_of_frequencies), cmocka_unit_test(adapters),
             cmocka_unit_test(no_peft_of_fused))
