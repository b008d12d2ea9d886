/* fuzz_adapter.c - an adapter folder: any still.json and any tensors beside it give an
 * adapter whose numbers are finite and whose layers are the model's, or one error. The
 * input is still.json, a byte 0, and adapter.safetensors. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "model/adapter.h"

extern const sti_backend sti_backend_ref; /* the registry would bring all backends */

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static char dir[] = "/tmp/still-fuzz-XXXXXX";
static sti_store store;
static sti_config config;
static sti_adapter_home home = {.cfg = &config, .be = &sti_backend_ref};

static void check(bool holds)
{
    if (!holds) abort();
}

static void path_of(const char *name, char path[64])
{
    snprintf(path, 64, "%s/%s", dir, name);
}

static void clean(void)
{
    char path[64];
    path_of(STI_ADAPTER_CONFIG, path);
    unlink(path);
    path_of(STI_ADAPTER_TENSORS, path);
    unlink(path);
    rmdir(dir);
    home.be->dev_free(home.dev);
    sti_config_free(&config);
    sti_store_close(&store);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    still_error err;
    check(mkdtemp(dir) != NULL);
    check(sti_store_open(FIXTURES "/train/model", &store, &err) == STILL_OK);
    check(sti_config_read(&store, &config, &err) == STILL_OK);
    check(home.be->dev_new(&(sti_dev_params){.threads = 1, .max_k = config.ffn},
                           &home.dev, &err) == STILL_OK);
    return atexit(clean);
}

static void put(const char *name, const uint8_t *p, size_t n)
{
    char path[64];
    path_of(name, path);
    FILE *f = fopen(path, "wb");
    check(f && fwrite(p, 1, n, f) == n);
    fclose(f);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    const uint8_t *end = n ? memchr(data, 0, n) : NULL;
    const size_t text = end ? (size_t)(end - data) : n;
    put(STI_ADAPTER_CONFIG, data, text);
    put(STI_ADAPTER_TENSORS, end ? end + 1 : data, end ? n - text - 1 : 0);
    sti_adapter *a;
    still_error err = {0};
    for (int way = 0; way < 4; way++) {
        const bool quantized = way & 1, merge = way & 2;
        if (sti_adapter_read(&home, dir, quantized, merge, merge, &a, &err) !=
            STILL_OK) {
            check(!a && err.text[0]);
            continue;
        }
        for (size_t i = 0; i < a->n_values; i++) check(isfinite(a->value[i]));
        for (size_t i = 0; i < a->n_entries; i++)
            check(a->entry[i].layer >= 0 && a->entry[i].layer < config.layers);
        check(isfinite(a->spec.lora.alpha) && a->spec.lora.rank >= 0);
        sti_adapter_free(a);
    }
    return 0;
}
