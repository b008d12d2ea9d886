/* GGUF files by llama.cpp's converter: each is put together from its head and the numbers
 * of the safetensors file beside it (fixtures/models/from_golden.py), its sum is that of
 * the converter's own file, and its logits are those of the model. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../run.h"

#include "base/sha256.h"
#include "model/model.h"

static const char *const models[] = {"gemma3", "granite", "olmo2",
                                     "phi3",   "qwen3",   "smollm3"};
enum { MODELS = sizeof models / sizeof *models, ALIGN = 32 };

static void write_all(FILE *f, const void *p, size_t n)
{
    assert_int_equal(fwrite(p, 1, n, f), n);
}

/* A tensor's numbers as the recipe says: as they are, one more, or the rows of each head
 * in the order of pairs. */
static void write_tensor(FILE *f, const sti_tensor *t, const char *how, int heads)
{
    const float *x = t->data;
    const size_t n = t->bytes / sizeof *x, cols = (size_t)t->dim[t->n_dims - 1];
    float *y = malloc(t->bytes);
    assert_non_null(y);
    memcpy(y, x, t->bytes);
    for (size_t i = 0; strcmp(how, "plus_1") == 0 && i < n; i++) y[i] = x[i] + 1;
    if (strcmp(how, "pairs") == 0) {
        const size_t D = n / cols / (size_t)heads;
        for (size_t r = 0; r < n / cols; r++) {
            const size_t i = r % D, from = r - i + i % 2 * (D / 2) + i / 2;
            memcpy(y + r * cols, x + from * cols, cols * sizeof *y);
        }
    }
    write_all(f, y, t->bytes);
    for (size_t i = t->bytes; i % ALIGN; i++) write_all(f, "", 1);
    free(y);
}

static void check_sum(const char *path, const char *want)
{
    sti_map m;
    still_error e;
    unsigned char sum[STI_SHA256];
    char hex[2 * STI_SHA256 + 1];
    must(sti_map_open(path, &m, &e), &e);
    sti_sha256_of(m.data, m.size, sum);
    for (int i = 0; i < STI_SHA256; i++) snprintf(hex + 2 * i, 3, "%02x", sum[i]);
    sti_map_close(&m);
    assert_string_equal(hex, want);
}

static void put_together(const char *folder, const char *gguf)
{
    char path[600], line[256], sum[80], how[16];
    still_error e;
    sti_store s;
    sti_map head;
    sti_config c;
    must(sti_store_open(folder, &s, &e), &e);
    must(sti_config_read(&s, &c, &e), &e);
    const int heads = c.heads, kv_heads = c.kv_heads;
    sti_config_free(&c);
    sti_store_close(&s);
    must(sti_store_open(folder, &s, &e), &e); /* as it is, fused */
    snprintf(path, sizeof path, "%s/gguf.head", folder);
    must(sti_map_open(path, &head, &e), &e);
    FILE *f = fopen(gguf, "w");
    snprintf(path, sizeof path, "%s/gguf.recipe", folder);
    FILE *recipe = fopen(path, "r");
    assert_true(f && recipe && fgets(sum, sizeof sum, recipe));
    write_all(f, head.data, head.size);
    while (fgets(line, sizeof line, recipe)) {
        char name[200];
        assert_int_equal(sscanf(line, "%199s %15s", name, how), 2);
        const sti_tensor *t = sti_store_find(&s, name);
        assert_non_null(t);
        write_tensor(f, t, how, strstr(name, "k_proj") ? kv_heads : heads);
    }
    fclose(recipe);
    assert_int_equal(fclose(f), 0);
    sti_map_close(&head);
    sti_store_close(&s);
    sum[strcspn(sum, "\n")] = 0;
    check_sum(gguf, sum);
}

typedef struct seen {
    const char *backend;
    int cases;
} seen;

static void count_case(void *user, const still_check_case *c)
{
    seen *s = user;
    s->cases++;
    if (!c->passed)
        fail_msg("%s on %s: off by %g", c->name, s->backend, c->check[0].value);
}

/* dir/m becomes a folder with the fixture's files and a place for a GGUF file. */
static void link_files(const char *model, const char *dir, char *gguf, size_t room)
{
    static const char *const linked[] = {"config.json", "model.safetensors",
                                         "expected.safetensors"};
    char from[512], to[128];
    snprintf(to, sizeof to, "%s/m", dir);
    assert_int_equal(mkdir(to, 0700), 0);
    snprintf(gguf, room, "%s/m/model.f32.gguf", dir);
    for (size_t i = 0; i < sizeof linked / sizeof *linked; i++) {
        snprintf(from, sizeof from, FIXTURES "/models/%s/%s", model, linked[i]);
        snprintf(to, sizeof to, "%s/m/%s", dir, linked[i]);
        assert_int_equal(symlink(from, to), 0);
    }
}

/* The folder and the file in it, on both backends; then they are removed. */
static void check_and_remove(char *dir)
{
    static const char *const names[] = {"m/config.json", "m/model.safetensors",
                                        "m/expected.safetensors", "m/model.f32.gguf"};
    char path[128];
    for (int b = 0; b < 2; b++) {
        seen s = {.backend = b ? "cpu" : "ref"};
        still_error e;
        int failed = 0;
        const still_selftest_params p = {
            .size = sizeof p,
            .model =
                &STILL_PARAMS(still_model_params, .backend = s.backend, .threads = 1)};
        must(still_selftest_run("models", dir, &p, count_case, &s, &failed, &e), &e);
        assert_int_equal(s.cases, 2);
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        assert_int_equal(unlink(path), 0);
    }
    snprintf(path, sizeof path, "%s/m", dir);
    rmdir(path);
    rmdir(dir);
}

/* Changes what dir/m/config.json says of the scale of q . k. */
static void set_query_scalar(const char *dir, int value)
{
    char path[64];
    json_t *j;
    still_error e;
    snprintf(path, sizeof path, "%s/m/config.json", dir);
    must(sti_json_load(path, &j, &e), &e);
    assert_int_equal(
        json_object_set_new(j, "query_pre_attn_scalar", json_integer(value)), 0);
    assert_int_equal(json_dump_file(j, path, 0), 0);
    json_decref(j);
}

static void converters_files(void **state)
{
    (void)state;
    for (size_t i = 0; i < MODELS; i++) {
        char dir[] = "/tmp/still-gguf-XXXXXX", gguf[64], from[512];
        assert_non_null(mkdtemp(dir));
        link_files(models[i], dir, gguf, sizeof gguf);
        snprintf(from, sizeof from, FIXTURES "/models/%s", models[i]);
        put_together(from, gguf);
        check_and_remove(dir);
    }
}

/* ---- Our own files ------------------------------------------------------- */

static void export_to(const char *from, const char *format, const char *to)
{
    still_error e;
    const still_export_params p = {
        .size = sizeof p, .format = format, .dtype = "f32", .path = to};
    must(still_export(from, &p, &e), &e);
}

/* The same logits from what we write. */
static void exported_files(void **state)
{
    (void)state;
    for (size_t i = 0; i < MODELS; i++) {
        char dir[] = "/tmp/still-gguf-XXXXXX", gguf[64], from[512];
        assert_non_null(mkdtemp(dir));
        link_files(models[i], dir, gguf, sizeof gguf);
        snprintf(from, sizeof from, FIXTURES "/models/%s", models[i]);
        export_to(from, "gguf", gguf);
        check_and_remove(dir);
    }
}

/* A folder of what the converter wrote, and a file of that folder: logits of both. */
static void back_and_there(void **state)
{
    (void)state;
    for (size_t i = 0; i < MODELS; i++) {
        char dir[] = "/tmp/still-gguf-XXXXXX", gguf[64], from[512], first[64];
        char to[64], other[600];
        assert_non_null(mkdtemp(dir));
        snprintf(first, sizeof first, "%s.gguf", dir);
        snprintf(from, sizeof from, FIXTURES "/models/%s", models[i]);
        put_together(from, first);
        snprintf(to, sizeof to, "%s/m", dir);
        snprintf(gguf, sizeof gguf, "%s/m/model.f32.gguf", dir);
        export_to(first, "safetensors", to);
        export_to(to, "gguf", gguf);
        assert_int_equal(unlink(first), 0);
        snprintf(other, sizeof other, "%s/expected.safetensors", from);
        snprintf(to, sizeof to, "%s/m/expected.safetensors", dir);
        assert_int_equal(symlink(other, to), 0);
        /* Which scale of q . k it was made with, no GGUF file says. */
        if (strcmp(models[i], "gemma3") == 0) set_query_scalar(dir, 24);
        check_and_remove(dir);
    }
}

static bool same_value(const sti_meta *a, const sti_meta *b)
{
    double x, y;
    if (a->type == STI_META_STRING)
        return b->type == STI_META_STRING && a->str->n == b->str->n &&
               memcmp(a->str->p, b->str->p, a->str->n) == 0;
    return sti_meta_float(a, &x) && sti_meta_float(b, &y) && x == y;
}

/* Every key and every tensor of the converter's file is in ours, with the same value and
 * the same bytes. Ours may say more. */
static void same_as_the_converters(void **state)
{
    (void)state;
    for (size_t i = 0; i < MODELS; i++) {
        char dir[] = "/tmp/still-gguf-XXXXXX", ours[64], theirs[64], from[512];
        sti_store a, b;
        still_error e;
        assert_non_null(mkdtemp(dir));
        snprintf(ours, sizeof ours, "%s/ours.gguf", dir);
        snprintf(theirs, sizeof theirs, "%s/theirs.gguf", dir);
        snprintf(from, sizeof from, FIXTURES "/models/%s", models[i]);
        export_to(from, "gguf", ours);
        put_together(from, theirs);
        must(sti_store_open(theirs, &a, &e), &e);
        must(sti_store_open(ours, &b, &e), &e);
        for (size_t k = 0; k < a.n_meta; k++) {
            const sti_meta *m = &a.meta[k], *n = sti_meta_find(&b, m->key);
            int64_t v;
            const bool about = strcmp(m->key, "general.name") == 0 ||
                               strcmp(m->key, "general.size_label") == 0;
            /* 0 is as if absent, and a length counts where scaling begins at it. */
            const bool none = sti_meta_int(m, &v) && v == 0;
            const bool idle =
                strcmp(m->key, "phi3.rope.scaling.original_context_length") == 0;
            if (about || (!n && (none || idle))) continue;
            if (!n || !same_value(m, n)) fail_msg("%s: key '%s'", models[i], m->key);
        }
        assert_int_equal(a.n_tensors, b.n_tensors);
        for (size_t k = 0; k < a.n_tensors; k++) {
            const sti_tensor *t = &a.tensor[k], *u = &b.tensor[k];
            /* Gemma's scale of q . k: see sti_config_gguf_q_norm. */
            const bool scaled =
                strcmp(models[i], "gemma3") == 0 && strstr(t->name, "attn_q_norm");
            assert_string_equal(t->name, u->name);
            assert_int_equal(t->type, u->type);
            assert_memory_equal(t->dim, u->dim, sizeof t->dim);
            if (!scaled) assert_memory_equal(t->data, u->data, t->bytes);
            for (int64_t d = 0; scaled && d < t->dim[0]; d++) {
                const double x = ((const float *)t->data)[d],
                             y = ((const float *)u->data)[d];
                assert_true(fabs(y - x * sqrt(32.0 / 24)) <= 1e-6);
            }
        }
        sti_store_close(&a);
        sti_store_close(&b);
        assert_int_equal(unlink(ours), 0);
        assert_int_equal(unlink(theirs), 0);
        rmdir(dir);
    }
}

/* ---- LongRoPE ------------------------------------------------------------ */

/* Sessions of more tokens than the model was first trained for take the long divisors
 * from their first token on, others the short ones. */
static void long_and_short_sessions(void **state)
{
    (void)state;
    enum { MOST = 64 };
    char dir[] = "/tmp/still-long-XXXXXX", path[64];
    still_error e;
    json_t *want;
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/config.json", dir);
    assert_int_equal(symlink(FIXTURES "/phi3-long/config.json", path), 0);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    assert_int_equal(symlink(FIXTURES "/models/phi3/model.safetensors", path), 0);
    must(sti_json_load(FIXTURES "/phi3-long/expected.json", &want, &e), &e);
    const json_t *list = json_object_get(want, "ids");
    const int n = (int)json_array_size(list);
    int32_t ids[MOST];
    float got[MOST];
    assert_in_range(n, 2, MOST);
    for (int i = 0; i < n; i++)
        ids[i] = (int32_t)json_integer_value(json_array_get(list, (size_t)i));
    for (int k = 0; k < 4; k++) {
        still_model *m;
        still_session *s;
        const json_t *expected = json_object_get(want, k % 2 ? "long" : "short");
        must(still_model_open(dir,
                              &STILL_PARAMS(still_model_params,
                                            .backend = k < 2 ? "ref" : "cpu",
                                            .threads = 1),
                              &m, &e),
             &e);
        must(
            still_session_new(m,
                              &STILL_PARAMS(still_session_params,
                                            .ctx = k % 2 ? 1025 : 1024, .cache = "f32"),
                              &s, &e),
            &e);
        must(still_session_logprobs(s, ids, n, got, NULL, &e), &e);
        for (int i = 0; i < n - 1; i++)
            if (!(fabs((double)got[i] -
                       json_real_value(json_array_get(expected, (size_t)i))) <= 2e-5))
                fail_msg("case %d, token %d: %g", k, i, (double)got[i]);
        still_session_free(s);
        still_model_free(m);
    }
    json_decref(want);
    unlink(path);
    snprintf(path, sizeof path, "%s/config.json", dir);
    unlink(path);
    rmdir(dir);
}

RUN_TESTS(cmocka_unit_test(converters_files), cmocka_unit_test(exported_files),
          cmocka_unit_test(back_and_there), cmocka_unit_test(same_as_the_converters),
          cmocka_unit_test(long_and_short_sessions))
