/* fuzz_adapter.c - an adapter folder: any still.json and any tensors beside it give an
 * adapter whose numbers are finite and whose layers are the model's, or one error. The
 * input is still.json, a byte 0, and adapter.safetensors. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "model/model.h"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static char dir[] = "/tmp/still-fuzz-XXXXXX";
static still_model *model;

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
    still_model_free(model);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    still_error err;
    check(mkdtemp(dir) != NULL);
    check(still_model_open(FIXTURES "/train/model",
                           &(still_model_params){.backend = "ref", .threads = 1},
                           &model, &err) == STILL_OK);
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
    const sti_adapter_home home = sti_model_home(model);
    sti_adapter *a;
    still_error err = {0};
    for (int quantized = 0; quantized < 2; quantized++) {
        if (sti_adapter_read(&home, dir, quantized, &a, &err) != STILL_OK) {
            check(!a && err.text[0]);
            continue;
        }
        for (size_t i = 0; i < a->n_values; i++) check(isfinite(a->value[i]));
        for (size_t i = 0; i < a->n_entries; i++)
            check(a->entry[i].layer >= 0 && a->entry[i].layer < model->cfg.layers);
        check(isfinite(a->spec.lora.alpha) && a->spec.lora.rank >= 0);
        sti_adapter_free(a);
    }
    return 0;
}
