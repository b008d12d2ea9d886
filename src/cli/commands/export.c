/* export.c - still export: a model for other programs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/fetch/cache.h"
#include "cli/fetch/resolve.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "cli/run.h"

typedef struct watch {
    cli_progress bar;
    bool quiet;
    uint64_t bytes;
} watch;

static bool on_bytes(void *user, uint64_t done, uint64_t total)
{
    watch *w = user;
    if (w->bytes == 0)
        cli_progress_begin(&w->bar, w->quiet, "exporting", NULL, 0, total);
    w->bytes = done;
    return cli_progress_tick(&w->bar, done, total);
}

/* PEFT asks a hub for the base, which does not know the cache's short name. */
static const char *base_name(const cli_options *o, const char *adapter)
{
    char name[1024];
    if (o->base_name || !adapter || strcmp(o->to, "peft") != 0) return o->base_name;
    if (still_adapter_base(adapter, name, sizeof name, NULL) == STILL_OK &&
        strcmp(name, CLI_DEFAULT_MODEL) == 0)
        return "HuggingFaceTB/SmolLM2-135M-Instruct";
    return NULL;
}

static int show(const cli_options *o, const watch *w, bool linearized)
{
    char bytes[32];
    if (o->json)
        return cli_print_json(json_pack("{s:s,s:s,s:I,s:b}", "done", o->out, "format",
                                        o->to, "bytes", (json_int_t)w->bytes,
                                        "linearized", linearized));
    if (linearized && strcmp(o->to, "gguf") == 0) {
        cli_print(
            "%s: %s of tensors, with %.*s.still.gguf, which keeps it linearized in "
            "still; softmax attention elsewhere\n",
            o->out, cli_bytes(bytes, w->bytes), (int)(strlen(o->out) - strlen(".gguf")),
            o->out);
        return CLI_OK;
    }
    cli_print("%s: %s of tensors%s\n", o->out, cli_bytes(bytes, w->bytes),
              strcmp(o->to, "peft") == 0      ? ", the low-rank additions alone"
              : strcmp(o->to, "adapter") == 0 ? ", the adapter alone"
              : linearized ? "; softmax attention elsewhere, linearized with still"
                           : "");
    return CLI_OK;
}

int cli_cmd_export(const cli_options *o)
{
    still_error err;
    char *path, *adapter;
    watch w = {.quiet = o->quiet};
    const char *name = o->arg[0] ? o->arg[0] : cli_default_model(o);
    if (!o->to)
        return cli_usage("export", "--to gguf|safetensors|peft|adapter is missing");
    if (!o->out) return cli_usage("export", "--out PATH is missing");
    if (cli_resolve_model(name, &path, &adapter, &err)) return cli_fail_error(&err);
    const still_export_params p = {.size = sizeof p,
                                   .format = o->to,
                                   .path = o->out,
                                   .adapter = adapter,
                                   .dtype = o->dtype,
                                   .base_name = base_name(o, adapter),
                                   .progress = on_bytes,
                                   .user = &w};
    const bool linearized = adapter != NULL;
    const still_status status = still_export(path, &p, &err);
    cli_progress_end(&w.bar);
    free(path);
    free(adapter);
    if (status == STILL_E_CANCELLED) return CLI_INTERRUPTED;
    return status == STILL_OK ? show(o, &w, linearized) : cli_fail_error(&err);
}
