/* fuzz_config.c - config.json of a Hugging Face folder: any JSON object beside an
 * embedding tensor gives a configuration that passed every check, or an error. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "model/config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    json_t *config;
    sti_json_read("fuzz", (const char *)data, size, STI_JSON_OBJECT, &config, NULL);
    char name[] = "model.embed_tokens.weight";
    sti_tensor embed = {.name = name, .n_dims = 2, .dim = {384, 64}, .path = "fuzz"};
    char path[] = "fuzz";
    sti_store store = {
        .path = path, .config = config, .tensor = &embed, .n_tensors = 1};
    sti_config c;
    still_error err;
    if (config && sti_config_read(&store, &c, &err) == STILL_OK) {
        for (int i = 0; i < c.head_dim / 2; i++)
            if (!(c.inv_freq[i] >= 0)) abort(); /* NaN would reach every logit */
        for (int i = 0; i < c.layers; i++)
            if (c.window[i] < 0) abort();
        sti_config_free(&c);
    }
    json_decref(config);
    return 0;
}
