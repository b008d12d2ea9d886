/* inventory.h - the models of this machine that have names: those of our cache, of Hugging
 * Face's, and the adapters that ship with still. */
#ifndef CLI_FETCH_INVENTORY_H
#define CLI_FETCH_INVENTORY_H

#include "still.h"

enum { CLI_NAME_ROOM = 512 };

typedef struct cli_entry {
    char *name;        /* what to type */
    char *path;        /* what it resolves to, before an adapter's base */
    char *base;        /* of an adapter: the name in its still.json; else NULL */
    char *quant;       /* of a GGUF model: "Q4_K_M" */
    const char *type;  /* "gguf", "safetensors", "adapter", "unfinished" */
    const char *where; /* "still", "huggingface", "shipped" */
    uint64_t bytes;
} cli_entry;

typedef struct cli_inventory {
    cli_entry *entry; /* by name */
    size_t n;
} cli_inventory;

/* Folders that hold no model that still could run are left out. */
still_status cli_inventory_read(cli_inventory *out, still_error *err);
void cli_inventory_free(cli_inventory *v);

/* The name that a mistyped one is nearest to; false: none is near. */
bool cli_inventory_near(const char *typed, char out[CLI_NAME_ROOM]);

#endif
