/* fuzz_config.c - config.json of a Hugging Face folder: any JSON object beside an
 * embedding tensor gives a configuration that passed every check, or an error. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "file/parse.h"
#include "model/config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    json_t *config;
    sti_json_read("fuzz", (const char *)data, size, STI_JSON_OBJECT, &config, NULL);
    char name[] = "model.embed_tokens.weight", path[] = "fuzz";
    sti_store store = {.path = path, .config = config};
    still_error ignored;
    if (sti_store_reserve(&store, 1, &ignored) != STILL_OK) abort();
    store.tensor[store.n_tensors++] =
        (sti_tensor){.name = name, .n_dims = 2, .dim = {384, 64}, .path = "fuzz"};
    sti_config c;
    still_error err;
    if (config && sti_config_read(&store, &c, &err) == STILL_OK) {
        for (int i = 0; i < STI_TABLES * (c.head_dim / 2); i++)
            if (!(c.inv_freq[0][i] >= 0)) abort(); /* NaN would reach every logit */
        for (int i = 0; i < c.layers; i++)
            if (c.window[i] < 0 || c.table[i] >= STI_TABLES) abort();
        for (int i = 0; i < c.head_dim; i++)
            if (sti_rotary_row(&c, i) < 0 || sti_rotary_row(&c, i) >= c.head_dim)
                abort();
        if (!(c.form.embed_scale > 0 && c.form.attn_scale > 0)) abort();
        sti_config_free(&c);
    }
    free(store.tensor);
    json_decref(config);
    return 0;
}
