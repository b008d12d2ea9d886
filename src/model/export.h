/* export.h - what the writers of exports share.
 *
 * An export is a list of tensors, each made row by row from tensors that lie in mapped
 * files: dequantized, the low-rank addition added, rows put into the order of the other
 * format, and stored in its type. So memory is that of a few rows, whatever the size of
 * the model. The order matters because GGUF files of the llama family keep the two
 * numbers that RoPE rotates together side by side (2i, 2i+1), Hugging Face files half a
 * head apart (i, i + D/2): rows of q and k differ, and with them what reads q and k. */
#ifndef STI_MODEL_EXPORT_H
#define STI_MODEL_EXPORT_H

#include "model/model.h"

typedef enum sti_row_order { /* within each head */
                             STI_ROWS_KEPT,
                             STI_ROWS_TO_HALVES, /* they are pairs */
                             STI_ROWS_TO_PAIRS   /* they are halves */
} sti_row_order;

typedef struct sti_export_tensor {
    char name[128];
    const sti_tensor *src;
    const sti_tensor *a, *b; /* src + alpha / rank b a; NULL: there is no addition */
    sti_row_order order;
    bool columns; /* are put into that order, too */
    bool rotary;  /* rows of b are in the order of sti_rotary_row */
    bool joined;  /* its rows follow those of the entry before, in the same tensor */
    double offset, factor; /* (src + offset) factor; factor 0: src as it is */
    sti_dtype type;
} sti_export_tensor;

typedef struct sti_export_list {
    sti_export_tensor *tensor;
    size_t n, capacity;
} sti_export_list;

typedef struct sti_export {
    const still_export_params *p;
    char *path; /* p->path without slashes behind it */
    sti_store store;
    sti_config cfg;
    still_tokenizer *tokenizer; /* or NULL */
    bool linearized;            /* there is an adapter, and this is it: */
    sti_adapter_spec spec;
    sti_store adapter;
    sti_adapter *trained; /* its entries; values stay in the store */
    sti_tensor rope[2];   /* divisors of frequencies as tensors; data NULL: none */
    uint64_t done, total; /* bytes */
} sti_export;

/* ---- Lists (export_list.c) ----------------------------------------------- */

/* What a tensor should be stored as; changed: a low-rank addition was merged. */
typedef still_status (*sti_export_type_fn)(const sti_export *x, const sti_tensor *src,
                                           bool changed, sti_dtype *out,
                                           still_error *err);

still_status sti_export_add(sti_export_list *l, const sti_export_tensor *t,
                            still_error *err);
/* All tensors of the merged model under the names of one kind of file. */
still_status sti_export_add_model(const sti_export *x, bool gguf,
                                  sti_export_type_fn type, sti_export_list *l,
                                  still_error *err);
/* All tensors of the adapter without LoRA, as floats: the gate's is merged into it. */
still_status sti_export_add_own(const sti_export *x, bool gguf, sti_export_list *l,
                                still_error *err);
void sti_export_list_free(sti_export_list *l);
/* How rows of q and k go from the model at hand to one kind of file. */
sti_row_order sti_export_order(const sti_export *x, bool gguf);
/* A tensor of the adapter, its shape checked. */
still_status sti_export_trained(const sti_export *x, const sti_adapter_entry *e,
                                const sti_tensor **out, still_error *err);
/* The same for a layer's target; NULL: it has none. */
still_status sti_export_low_rank(const sti_export *x, int layer, sti_target target,
                                 const sti_tensor **a, const sti_tensor **b,
                                 still_error *err);

/* ---- Rows (export_rows.c) ------------------------------------------------ */

/* Writes headers and data of a list; calls the progress callback. Does not finish w. */
still_status sti_export_write(sti_export *x, const sti_export_list *l, sti_writer *w,
                              still_error *err);
/* The same as one safetensors file. */
still_status sti_export_tensors(sti_export *x, const sti_export_list *l,
                                const char *path, still_error *err);
/* What is not merged, as the tensors of an adapter with that description. */
still_status sti_export_own_tensors(sti_export *x, const sti_export_list *l,
                                    const sti_adapter_spec *spec, const char *path,
                                    bool gguf, still_error *err);
/* Bytes it will write. */
uint64_t sti_export_bytes(const sti_export_list *l);

/* ---- Settings (export_config.c) ------------------------------------------ */

/* config.json of the merged model. */
still_status sti_export_config(const sti_export *x, sti_dtype type, const char *folder,
                               still_error *err);

/* ---- Formats: each writes into an empty folder, which export.c moves into place */

still_status sti_export_peft(sti_export *x, const char *folder, still_error *err);
still_status sti_export_safetensors(sti_export *x, const char *folder,
                                    still_error *err);
still_status sti_export_gguf(sti_export *x, const char *folder, still_error *err);
still_status sti_export_adapter(sti_export *x, const char *folder, still_error *err);
#define STI_EXPORT_GGUF "model.gguf" /* its files there */
#define STI_EXPORT_GGUF_OWN "model.still.gguf"

/* Copies a file into the new folder, if it is there and its new name is free. */
still_status sti_export_copy(const char *from_folder, const char *from,
                             const char *folder, const char *to, still_error *err);

/* What an adapter of the exported model says of itself. */
still_status sti_export_own_spec(const sti_export *x, const char *merged,
                                 const char *name, sti_adapter_spec *out,
                                 still_error *err);

#endif
