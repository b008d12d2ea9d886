/* Configurations that cannot be are refused with a line that names what is wrong. Each
 * case changes one thing in a copy of a tiny checkpoint's config.json. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../run.h"
#include <jansson.h>

#include "still.h"

typedef struct change {
    const char *key, *value; /* value: JSON, or NULL to remove the key */
    still_status want;
    const char *says;
} change;

static const change changes[] = {
    {"model_type", "\"gpt_neox\"", STILL_E_UNSUPPORTED, "'gpt_neox'"},
    {"model_type", NULL, STILL_E_FORMAT, "model_type"},
    {"hidden_act", "\"gelu\"", STILL_E_UNSUPPORTED, "'gelu'"},
    {"num_hidden_layers", "0", STILL_E_FORMAT, "num_hidden_layers"},
    {"num_hidden_layers", "4", STILL_E_FORMAT, "model.layers.3.input_layernorm.weight"},
    {"num_hidden_layers", "2000000000", STILL_E_FORMAT, "layers 2000000000"},
    {"num_attention_heads", "-1", STILL_E_FORMAT, "num_attention_heads"},
    {"num_attention_heads", "3", STILL_E_FORMAT, "3 query heads"},
    {"num_key_value_heads", "1", STILL_E_FORMAT, "k_proj"},
    {"hidden_size", "128", STILL_E_FORMAT, "expected 384 x 128"},
    {"intermediate_size", "99999999999", STILL_E_FORMAT, "intermediate_size"},
    {"intermediate_size", "161", STILL_E_FORMAT, "gate_proj"},
    {"head_dim", "15", STILL_E_FORMAT, "odd"},
    {"head_dim", "1000000", STILL_E_FORMAT, "absurd"},
    {"head_dim", "\"16\"", STILL_E_FORMAT, "head_dim"},
    {"rope_theta", "-1", STILL_E_FORMAT, "rope_theta"},
    {"rope_scaling", "{\"rope_type\":\"yarn\",\"factor\":4}", STILL_E_UNSUPPORTED,
     "'yarn'"},
    {"rope_scaling",
     "{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,"
     "\"high_freq_factor\":1}",
     STILL_E_FORMAT, "RoPE scaling"},
    {"rms_norm_eps", "\"x\"", STILL_E_FORMAT, "rms_norm_eps"},
    {"rope_scaling", "{\"rope_type\":\"longrope\"}", STILL_E_FORMAT, "short_factor"},
    {"rope_scaling",
     "{\"rope_type\":\"longrope\",\"short_factor\":[1,1,1,1,1,1,1,1],"
     "\"long_factor\":[1,2,3]}",
     STILL_E_FORMAT, "'long_factor' is not a list of 8"},
    {"rope_scaling",
     "{\"rope_type\":\"longrope\",\"short_factor\":[1,1,1,1,1,1,1,0],"
     "\"long_factor\":[1,1,1,1,1,1,1,1]}",
     STILL_E_FORMAT, "element 7"},
    {"partial_rotary_factor", "0.05", STILL_E_FORMAT, "cannot turn 0 of the 16"},
    {"partial_rotary_factor", "0.7", STILL_E_FORMAT, "cannot turn 11 of the 16"},
    {"partial_rotary_factor", "1.5", STILL_E_FORMAT, "it turns pairs"},
    {"partial_rotary_factor", "-1", STILL_E_FORMAT, "partial_rotary_factor"},
    {"sliding_window", "0", STILL_E_FORMAT, "sliding_window"},
    {"sliding_window", "-3", STILL_E_FORMAT, "sliding_window"},
    {"layer_types", "[\"full_attention\"]", STILL_E_FORMAT, "one for each layer"},
    {"layer_types", "[\"full_attention\",\"chunked\",\"full_attention\"]",
     STILL_E_UNSUPPORTED, "'chunked'"},
    {"no_rope_layers", "[1,1,1,0]", STILL_E_FORMAT, "no_rope_layers"},
    {"embedding_multiplier", "1e40", STILL_E_FORMAT, "embedding_multiplier"},
    {"residual_multiplier", "0", STILL_E_FORMAT, "residual_multiplier"},
    {"attention_multiplier", "-1", STILL_E_FORMAT, "attention_multiplier"},
    {"logits_scaling", "\"8\"", STILL_E_FORMAT, "logits_scaling"},
    {"query_pre_attn_scalar", "0", STILL_E_FORMAT, "query_pre_attn_scalar"},
    {"final_logit_softcapping", "30", STILL_E_UNSUPPORTED, "final_logit_softcapping"},
    {"model_type", "\"qwen3\"", STILL_E_FORMAT, "q_norm"},
    {"model_type", "\"olmo2\"", STILL_E_FORMAT, "post_feedforward_layernorm"},
    {"model_type", "\"gemma3_text\"", STILL_E_FORMAT, "layernorm"},
};

static void link_weights(const char *dir)
{
    char from[512], to[600];
    snprintf(from, sizeof from, FIXTURES "/models/llama3/model.safetensors");
    snprintf(to, sizeof to, "%s/model.safetensors", dir);
    assert_int_equal(symlink(from, to), 0);
}

static void one_change(const change *c, const char *dir)
{
    json_error_t je;
    json_t *config = json_load_file(FIXTURES "/models/llama3/config.json", 0, &je);
    assert_non_null(config);
    if (c->value) {
        json_t *v = json_loads(c->value, JSON_DECODE_ANY, &je);
        assert_non_null(v);
        json_object_del(config, "rope_parameters");
        json_object_set_new(config, c->key, v);
    } else {
        json_object_del(config, c->key);
    }
    char path[600];
    snprintf(path, sizeof path, "%s/config.json", dir);
    assert_int_equal(json_dump_file(config, path, 0), 0);
    json_decref(config);
    still_model *m;
    still_error e = {0};
    still_status st =
        still_model_open(dir, &STILL_PARAMS(still_model_params, .threads = 1), &m, &e);
    assert_null(m);
    if (st != c->want || !strstr(e.text, c->says))
        fail_msg("%s = %s: status %d, \"%s\", expected %d and \"%s\"", c->key,
                 c->value ? c->value : "(none)", (int)st, e.text, (int)c->want,
                 c->says);
}

static void impossible_configurations(void **state)
{
    (void)state;
    char dir[] = "/tmp/still-config-XXXXXX";
    assert_non_null(mkdtemp(dir));
    link_weights(dir);
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++)
        one_change(&changes[i], dir);
    char path[600];
    snprintf(path, sizeof path, "%s/config.json", dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    unlink(path);
    rmdir(dir);
}

static void wrong_requests(void **state)
{
    (void)state;
    still_model *m;
    still_error e;
    const char *ok = FIXTURES "/models/llama3";
    assert_int_equal(
        still_model_open(ok, &STILL_PARAMS(still_model_params, .backend = "tpu"), &m,
                         &e),
        STILL_E_ARG);
    assert_non_null(strstr(e.text, "there are cpu"));
    assert_int_equal(
        still_model_open(ok, &STILL_PARAMS(still_model_params, .isa = "mmx"), &m, &e),
        STILL_E_ARG);
    assert_int_equal(
        still_model_open(ok, &STILL_PARAMS(still_model_params, .threads = -3), &m, &e),
        STILL_E_ARG);
    assert_int_equal(still_model_open(FIXTURES "/models/nothing", NULL, &m, &e),
                     STILL_E_IO);
    assert_int_equal(
        still_model_open(FIXTURES "/models/llama3/expected.safetensors", NULL, &m, &e),
        STILL_E_FORMAT);
    assert_null(m);
}

RUN_TESTS(cmocka_unit_test(impossible_configurations), cmocka_unit_test(wrong_requests))
