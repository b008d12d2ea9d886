/* list.c - still list: the models that have names here. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/fetch/inventory.h"
#include "cli/fetch/resolve.h"
#include "cli/options.h"

static const char *place(const cli_entry *e)
{
    return !strcmp(e->where, "still")         ? "cache"
           : !strcmp(e->where, "huggingface") ? "Hugging Face"
                                              : "comes with still";
}

static json_t *object_of(const cli_entry *e)
{
    json_t *object = json_pack("{s:o, s:s, s:s, s:I, s:o}", "name",
                               cli_json_text(e->name, strlen(e->name)), "type", e->type,
                               "where", e->where, "bytes", (json_int_t)e->bytes, "path",
                               cli_json_text(e->path, strlen(e->path)));
    if (e->quant)
        sti_json_set(&object, "quant", cli_json_text(e->quant, strlen(e->quant)));
    if (e->base) sti_json_set(&object, "base", cli_json_text(e->base, strlen(e->base)));
    return object;
}

/* "gguf Q4_K_M", "adapter of smollm2". Returns out. */
static const char *describe(const cli_entry *e, char *out, size_t room)
{
    char name[256];
    const char *more = e->base ? e->base : e->quant ? e->quant : "";
    snprintf(out, room, "%s%s%s", e->type,
             e->base    ? " of "
             : e->quant ? " "
                        : "",
             cli_line(name, sizeof name, more));
    return out;
}

static void print_table(const cli_inventory *v)
{
    size_t wide = 4;
    char name[512], what[320], size[32];
    for (size_t i = 0; i < v->n; i++) {
        const size_t n = strlen(v->entry[i].name);
        if (n > wide && n <= 60) wide = n;
    }
    cli_print("%-*s  %10s  %-16s  %s\n", (int)wide, "NAME", "SIZE", "WHERE", "TYPE");
    for (size_t i = 0; i < v->n; i++) {
        const cli_entry *e = &v->entry[i];
        cli_print("%-*s  %10s  %-16s  %s\n", (int)wide,
                  cli_line(name, sizeof name, e->name), cli_bytes(size, e->bytes),
                  place(e), describe(e, what, sizeof what));
    }
}

/* What a listed adapter lacks to run, and how to get it. */
static void note_missing(const cli_inventory *v)
{
    for (size_t i = 0; i < v->n; i++) {
        char *model = NULL, *adapter = NULL, *missing = NULL, name[512], base[512];
        still_error err;
        if (v->entry[i].base && strcmp(v->entry[i].type, "unfinished") != 0 &&
            cli_resolve_or_missing(v->entry[i].name, &model, &adapter, &missing,
                                   &err) &&
            missing) {
            const char *lacks = cli_line(base, sizeof base, missing);
            cli_note("%s needs %s, which is not here: still pull %s\n",
                     cli_line(name, sizeof name, v->entry[i].name), lacks, lacks);
        }
        free(model);
        free(adapter);
        free(missing);
    }
}

int cli_cmd_list(const cli_options *o)
{
    cli_inventory v;
    still_error err;
    int status = CLI_OK;
    if (cli_inventory_read(&v, &err)) return cli_fail_error(&err);
    if (o->json) {
        json_t *models = json_array();
        for (size_t i = 0; i < v.n; i++)
            sti_json_append(&models, object_of(&v.entry[i]));
        status = cli_print_json(json_pack("{s:o}", "models", models));
    } else if (o->names) {
        for (size_t i = 0; i < v.n; i++)
            if (strcmp(v.entry[i].type, "unfinished") != 0)
                cli_print("%s\n", v.entry[i].name);
    } else if (v.n) {
        print_table(&v);
        note_missing(&v);
    } else {
        cli_note("no models here: `still pull smollm2` or `still pull org/name` brings "
                 "one\n");
    }
    cli_inventory_free(&v);
    return status;
}
