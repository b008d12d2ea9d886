/* test_tools.c - make-model and quantize as a user runs them; their output reopened. */
#include <math.h>
#include <sys/wait.h>

#include "../run.h"
#include "helpers.h"

static char dir[] = "/tmp/still-tools-XXXXXX";

static int make_dir(void **state)
{
    (void)state;
    return mkdtemp(dir) == NULL || chdir(dir) != 0;
}

static int remove_dir(void **state)
{
    (void)state;
    return rmdir(dir);
}

/* Exit status of `command`, its stderr in `text`. */
static int run(char *text, size_t capacity, const char *command)
{
    char line[512];
    snprintf(line, sizeof line, "PATH=%s:$PATH; %s 2>&1 >/dev/null", STILL_TOOLS,
             command);
    FILE *p = popen(line, "r");
    assert_non_null(p);
    text[fread(text, 1, capacity - 1, p)] = 0;
    int status = pclose(p);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void expect(int status, const char *word, const char *command)
{
    char text[4096];
    int got = run(text, sizeof text, command);
    if (got != status || !strstr(text, word))
        fail_msg("%s: exit %d, \"%s\"; expected %d and \"%s\"", command, got, text,
                 status, word);
}

/* Mean and deviation of a matrix, in units of 1/sqrt(K). */
static void measure(const sti_tensor *t, double *mean, double *deviation)
{
    int64_t n = t->dim[0] * t->dim[1];
    float *x = malloc((size_t)n * sizeof *x);
    double sum = 0, squares = 0;
    sti_dequant(t->type, t->data, x, n);
    for (int64_t i = 0; i < n; i++) {
        sum += x[i];
        squares += (double)x[i] * x[i];
    }
    free(x);
    double unit = sqrt((double)t->dim[1]);
    *mean = sum / (double)n * unit;
    *deviation = sqrt(squares / (double)n) * unit;
}

/* Q4_K_M: six bits for the output, and for values and down in the first and the last of
 * 8 layers and in a third of those between. */
static void makes_a_mix(void **state)
{
    (void)state;
    expect(0, "", "make-model tiny m.gguf --force --layers 8 --type q4_k_m");
    sti_store s;
    still_error err;
    if (sti_store_open("m.gguf", &s, &err) != STILL_OK) fail_msg("%s", err.text);
    int six = 0;
    for (size_t k = 0; k < s.n_tensors; k++) {
        const sti_tensor *t = &s.tensor[k];
        int layer = -1;
        char name[64] = "";
        sscanf(t->name, "blk.%d.%63s", &layer, name);
        const bool wide =
            (strcmp(name, "attn_v.weight") == 0 || strcmp(name, "ffn_down.weight") == 0)
                ? layer == 0 || layer == 3 || layer == 6 || layer == 7
                : strcmp(t->name, "output.weight") == 0;
        if (t->n_dims == 2) assert_int_equal(t->type, wide ? STI_Q6_K : STI_Q4_K);
        six += wide;
    }
    assert_int_equal(six, 9);
    sti_store_close(&s);
    remove("m.gguf");
}

static void makes_every_type(void **state)
{
    (void)state;
    for (int i = 0; sti_dtype_at(i)->type != STI_F64; i++) {
        const sti_dtype_info *info = sti_dtype_at(i);
        char command[128];
        sti_store s;
        still_error err;
        snprintf(command, sizeof command, "make-model tiny m.gguf --force --type %s",
                 info->name);
        expect(0, "", command);
        if (sti_store_open("m.gguf", &s, &err) != STILL_OK) fail_msg("%s", err.text);
        assert_int_equal(s.n_tensors, 2 * 9 + 3);
        assert_int_equal(sti_meta_find(&s, "tokenizer.ggml.tokens")->count, 512);
        for (size_t k = 0; k < s.n_tensors; k++) {
            const sti_tensor *t = &s.tensor[k];
            double mean, deviation;
            assert_int_equal(t->type, t->n_dims == 2 ? info->type : STI_F32);
            if (t->n_dims != 2) continue;
            measure(t, &mean, &deviation);
            /* MXFP4's scales are powers of two: within half of one. */
            const double off = info->type == STI_MXFP4 ? 0.42 : 0.1;
            if (fabs(mean) > 0.05 || fabs(deviation - 1) > off)
                fail_msg("%s %s: mean %g, deviation %g", info->name, t->name, mean,
                         deviation);
        }
        sti_store_close(&s);
    }
    unlink("m.gguf");
}

static bool has(const sti_store *s, const char *name, int64_t rows, int64_t cols)
{
    const sti_tensor *t = sti_store_find(s, name);
    return t && t->dim[0] == rows && t->dim[1] == cols;
}

static void makes_families(void **state)
{
    (void)state;
    sti_store s;
    still_error err;
    int64_t window;
    expect(0, "", "make-model qwen2-0.5b m.gguf --layers 1 --vocab 300 --type q8_0");
    assert_int_equal(sti_store_open("m.gguf", &s, &err), STILL_OK);
    assert_true(has(&s, "blk.0.attn_k.bias", 128, 1));
    assert_true(has(&s, "blk.0.ffn_down.weight", 896, 4864));
    assert_null(sti_store_find(&s, "output.weight")); /* tied */
    sti_store_close(&s);
    expect(0, "", "make-model llama3.2-1b m.gguf --layers 1 --vocab 300 --force");
    assert_int_equal(sti_store_open("m.gguf", &s, &err), STILL_OK);
    const sti_tensor *rope = sti_store_find(&s, "rope_freqs.weight");
    assert_int_equal(rope->dim[0], 32);
    const float *factor = rope->data;
    assert_true(factor[0] == 1 && factor[31] == 32);
    assert_true(factor[16] > 1 && factor[16] < 32); /* between: smooth */
    sti_store_close(&s);
    expect(0, "", "make-model mistral-7b m.gguf --layers 1 --vocab 300 --force");
    assert_int_equal(sti_store_open("m.gguf", &s, &err), STILL_OK);
    assert_true(
        sti_meta_int(sti_meta_find(&s, "llama.attention.sliding_window"), &window) &&
        window == 4096);
    sti_store_close(&s);
    unlink("m.gguf");
}

static void makes_folders(void **state)
{
    (void)state;
    sti_store s;
    still_error err;
    expect(0, "",
           "make-model llama3.2-1b hf --layers 1 --vocab 300 --format safetensors");
    assert_int_equal(sti_store_open("hf", &s, &err), STILL_OK);
    assert_true(has(&s, "model.layers.0.self_attn.k_proj.weight", 512, 2048));
    assert_int_equal(sti_store_find(&s, "model.norm.weight")->type, STI_BF16);
    const json_t *scaling = json_object_get(s.config, "rope_scaling");
    assert_true(json_number_value(json_object_get(scaling, "factor")) == 32);
    sti_store_close(&s);
    expect(1, "exists", "make-model tiny hf --format safetensors");
    unlink("hf/model.safetensors");
    unlink("hf/config.json");
    assert_int_equal(rmdir("hf"), 0);
}

static void same_seed_same_file(void **state)
{
    (void)state;
    expect(0, "", "make-model tiny a.gguf --seed 7");
    expect(0, "", "make-model tiny b.gguf --seed 7");
    expect(0, "", "make-model tiny c.gguf --seed 8");
    assert_int_equal(system("cmp -s a.gguf b.gguf"), 0);
    assert_int_not_equal(system("cmp -s a.gguf c.gguf"), 0);
    unlink("a.gguf"), unlink("b.gguf"), unlink("c.gguf");
}

static void make_model_complains(void **state)
{
    (void)state;
    expect(2, "usage", "make-model");
    expect(2, "unknown shape 'gpt5'", "make-model gpt5 m.gguf");
    expect(2, "unknown type 'q9'", "make-model tiny m.gguf --type q9");
    expect(2, "unknown format", "make-model tiny m.gguf --format onnx");
    expect(2, "not q4_0", "make-model tiny m --format safetensors --type q4_0");
    expect(2, "'-3' is not", "make-model tiny m.gguf --layers -3");
    expect(2, "'10' is not", "make-model tiny m.gguf --vocab 10");
    expect(1, "'token_embd.weight' has rows of 576 elements",
           "make-model smollm2-135m m.gguf --type q4_k");
    expect(1, "needs", "make-model llama3.1-70b m.gguf --type f32 --layers 1000");
    expect(1, "/nowhere", "make-model tiny /nowhere/m.gguf");
}

static void quantizes(void **state)
{
    (void)state;
    sti_store in, out;
    still_error err;
    int64_t type;
    expect(0, "", "make-model tiny in.gguf --type f32");
    expect(0, "", "quantize in.gguf out.gguf q4_1 --keep-embedding");
    assert_int_equal(sti_store_open("in.gguf", &in, &err), STILL_OK);
    assert_int_equal(sti_store_open("out.gguf", &out, &err), STILL_OK);
    assert_int_equal(in.n_tensors, out.n_tensors);
    assert_int_equal(in.n_meta, out.n_meta);
    assert_true(sti_meta_int(sti_meta_find(&out, "general.file_type"), &type) &&
                type == 3);
    assert_int_equal(sti_store_find(&out, "token_embd.weight")->type, STI_F32);
    const sti_tensor *a = sti_store_find(&in, "blk.1.ffn_up.weight");
    const sti_tensor *b = sti_store_find(&out, "blk.1.ffn_up.weight");
    assert_int_equal(b->type, STI_Q4_1);
    size_t bytes;
    assert_true(sti_dtype_bytes(STI_Q4_1, (uint64_t)(a->dim[0] * a->dim[1]), &bytes));
    unsigned char *want = malloc(bytes);
    sti_quant(STI_Q4_1, a->data, want, a->dim[0] * a->dim[1]);
    assert_int_equal(b->bytes, bytes);
    assert_memory_equal(b->data, want, bytes);
    free(want);
    const sti_tensor *norm = sti_store_find(&out, "output_norm.weight");
    assert_int_equal(norm->type, STI_F32);
    assert_memory_equal(norm->data, sti_store_find(&in, "output_norm.weight")->data,
                        norm->bytes);
    sti_store_close(&in);
    sti_store_close(&out);
    expect(1, "exists", "quantize in.gguf out.gguf q8_0");
    expect(0, "", "quantize in.gguf out.gguf q8_0 --force");
    expect(2, "cannot write type 'q4_k'", "quantize in.gguf out.gguf q4_k --force");
    expect(2, "usage", "quantize in.gguf");
    expect(1, "no such file", "quantize absent.gguf new.gguf q8_0");
    unlink("in.gguf"), unlink("out.gguf");
}

RUN_TESTS_IN(make_dir, remove_dir, cmocka_unit_test(makes_every_type),
             cmocka_unit_test(makes_a_mix), cmocka_unit_test(makes_families),
             cmocka_unit_test(makes_folders), cmocka_unit_test(same_seed_same_file),
             cmocka_unit_test(make_model_complains), cmocka_unit_test(quantizes))
