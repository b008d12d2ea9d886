/* adapter.h - what training adds to a model: feature maps, alpha, window factors and
 * gates of attention, and low-rank additions to its projections.
 *
 * All trained numbers of an adapter lie in one array of floats, `value`, in the order
 * of its entries; gradients and moments are arrays of the same shape. The layers' views
 * (`layer`) point into it, so an optimizer's step is seen by the next forward pass.
 *
 * In a folder it is two files: still.json, which names the base model by its
 * fingerprint, the method and its settings, and the tensors, one an entry:
 * adapter.safetensors as training writes it, in floats, or adapter.gguf, smaller, as
 * `still export --to adapter` does. That file repeats the description and ends with a
 * checksum, so damage to either is found. */
#ifndef STI_MODEL_ADAPTER_H
#define STI_MODEL_ADAPTER_H

#include "attn/attn.h"
#include "model/config.h"
#include "model/merge.h"

enum { STI_FINGERPRINT = 32 };
#define STI_ADAPTER_CONFIG "still.json"
#define STI_ADAPTER_TENSORS "adapter.safetensors"
#define STI_ADAPTER_SMALL "adapter.gguf" /* read where there is no other */

/* Projections that can have a low-rank addition. */
typedef enum sti_target {
    STI_TARGET_Q,
    STI_TARGET_K,
    STI_TARGET_V,
    STI_TARGET_O,
    STI_TARGET_GATE,
    STI_TARGETS
} sti_target;
const char *sti_target_name(sti_target t);          /* "q", ... */
bool sti_target_of(sti_part part, sti_target *out); /* false: it has none */

/* y += alpha / rank (x A^T) B^T for the targets in the set (bit 1 << target). */
typedef struct sti_lora_spec {
    int rank; /* 0: none */
    float alpha;
    unsigned targets;
} sti_lora_spec;

typedef enum sti_trained {
    STI_TRAINED_MAP_Q,
    STI_TRAINED_MAP_K,
    STI_TRAINED_BIAS_Q,
    STI_TRAINED_BIAS_K,
    STI_TRAINED_ALPHA,
    STI_TRAINED_WINDOW,
    STI_TRAINED_GATE,
    STI_TRAINED_LORA_A,
    STI_TRAINED_LORA_B
} sti_trained;

typedef struct sti_adapter_entry {
    char name[48]; /* layers.3.map_q, layers.3.lora.q.a */
    sti_trained kind;
    sti_target target; /* of LoRA */
    int layer, n_dims;
    int64_t dim[3];
    size_t n, at; /* numbers; the first one's place in value (SIZE_MAX: elsewhere) */
} sti_adapter_entry;

typedef struct sti_adapter_matrix { /* a trained matrix as the backend multiplies it */
    sti_tensor src;
    sti_weight w; /* N 0: there is none */
    void *owned;  /* data that belongs to it alone, or NULL */
} sti_adapter_matrix;

typedef struct sti_lora {
    sti_adapter_matrix a, b; /* [rank, in], [out, rank] */
} sti_lora;

typedef struct sti_adapter_layer {
    sti_attn_params attn;
    sti_adapter_matrix gate; /* [H D, hidden] */
    sti_lora lora[STI_TARGETS];
} sti_adapter_layer;

/* What an adapter is, apart from its numbers. */
typedef struct sti_adapter_spec {
    still_method method;
    sti_lora_spec lora;
    char base_name[256]; /* how the user called the base model; a hint */
    unsigned char base[STI_FINGERPRINT];
    int version; /* of the format it was read in */
    /* How to sample; a hint, no part of what was trained. */
    bool has_sampling;
    still_sampler_params sampling;
} sti_adapter_spec;

typedef struct sti_adapter {
    sti_adapter_spec spec;
    sti_adapter_entry *entry; /* [n_entries] */
    size_t n_entries;
    sti_block block;
    float *value;     /* [n_values], in the program's memory */
    float *seen;      /* the same where operators read it; value itself if they can */
    sti_block mirror; /* where `seen` lies otherwise */
    size_t n_values;
    sti_adapter_layer *layer; /* [n_layers] */
    int n_layers;
    const sti_backend *be; /* whose device holds the matrices */
    sti_dev *dev;
    size_t resident; /* bytes of memory beside value */
    /* With `merge` of sti_adapter_read the low-rank additions are no part of value but
     * lie here, in the order of their entries, until they are merged. */
    sti_block low_rank;
    bool merged;
    unsigned char merged_sum[STI_FINGERPRINT]; /* SHA-256 of them, once dropped */
    /* With `late_maps` the feature maps are no part of value either. Nothing reads them
     * before a token is folded, which few conversations come to: they are read from the
     * file when a pass first needs them, and take no memory until then. */
    sti_block maps;
    sti_store file; /* open until they are read */
    bool maps_read;
    unsigned char maps_sum[STI_FINGERPRINT]; /* SHA-256 of them */
} sti_adapter;

typedef struct sti_adapter_home { /* the model it belongs to */
    const sti_config *cfg;
    const sti_backend *be;
    sti_dev *dev;
} sti_adapter_home;

/* An adapter at the start of training: maps the identity, window factors 0.1, all else
 * 0, low-rank matrices included. */
still_status sti_adapter_new(const sti_adapter_home *home, const sti_adapter_spec *spec,
                             sti_adapter **out, still_error *err);
void sti_adapter_free(sti_adapter *a);
/* Sets the entries that the store has under `prefix` + name; *found counts them. */
still_status sti_adapter_fill(sti_adapter *a, const sti_store *s, const char *prefix,
                              size_t *found, still_error *err);

/* ---- Files (adapter_file.c) ---------------------------------------------- */

bool sti_adapter_is(const char *dir); /* whether the folder holds an adapter */
still_status sti_adapter_read_spec(const char *dir, sti_adapter_spec *out,
                                   still_error *err);
/* Its tensors: of a folder, or of one GGUF file that holds all. Nothing in them is
 * checked yet. */
still_status sti_adapter_open(const char *path, sti_store *out, still_error *err);
/* The same with its description, once its checksum was verified. Close the store, after a
 * failure too. */
still_status sti_adapter_open_checked(const char *path, sti_store *s,
                                      sti_adapter_spec *spec, still_error *err);
/* STILL_E_NUMERIC if one of n numbers of the file `path` is not finite. */
still_status sti_adapter_check_finite(const float *x, size_t n, const char *path,
                                      still_error *err);
/* For running: `quantized` keeps gates in 8 bits, as beside 4-bit weights. merge: gates
 * have their low-rank additions; the others are for the caller to merge and drop.
 * late_maps: feature maps wait for sti_adapter_need_maps, if the method can do without. */
still_status sti_adapter_read(const sti_adapter_home *home, const char *dir,
                              bool quantized, bool merge, bool late_maps,
                              sti_adapter **out, still_error *err);
/* A session comes to `length` tokens: reads the maps if it folds one of them. */
void sti_adapter_need_maps(sti_adapter *a, const sti_attn_config *cfg, int64_t length);
/* The addition to a layer's target that waits to be merged; false: there is none. */
bool sti_adapter_low_rank(const sti_adapter *a, int layer, sti_target target,
                          sti_lora_values *out);
/* Merging goes layer by layer. Before the first; after each, which gives memory back as the
 * layers' weights take it. */
void sti_adapter_begin_merge(sti_adapter *a);
void sti_adapter_end_merge(sti_adapter *a, int layer);
/* Rank of the additions that are still to be made at run time. */
static inline int sti_adapter_rank(const sti_adapter *a)
{
    return a && !a->merged ? a->spec.lora.rank : 0;
}
/* A file for its tensors that has its description and will have a checksum. */
still_status sti_adapter_writer(const sti_adapter_spec *spec, const char *path,
                                bool gguf, sti_writer **out, still_error *err);
still_status sti_adapter_write_spec(const sti_adapter_spec *spec, const char *dir,
                                    still_error *err);
/* Writes both files, each complete or not at all. */
still_status sti_adapter_write(const sti_adapter *a, const char *dir, still_error *err);
/* Its description as still.json has it. */
json_t *sti_adapter_to_json(const sti_adapter_spec *spec);
#define STI_ADAPTER_META "still.adapter" /* where the tensors' file has it */

/* ---- Steps of making one ------------------------------------------------- */

/* Entries alone, no values: what an adapter of this description consists of. */
still_status sti_adapter_outline(const sti_adapter_home *home,
                                 const sti_adapter_spec *spec, sti_adapter **out,
                                 still_error *err);
/* Entries and values at their start, views unbound. gates: whether the gates' numbers
 * are in value, too; merge: low-rank additions are not; late_maps: nor are maps. */
still_status sti_adapter_make(const sti_adapter_home *home,
                              const sti_adapter_spec *spec, bool gates, bool merge,
                              bool late_maps, sti_adapter **out, still_error *err);
/* Numbers that an entry takes: it lies on lines of its own. */
static inline size_t sti_adapter_room(const sti_adapter_entry *e)
{
    return (e->n + 15) / 16 * 16;
}
static inline bool sti_adapter_is_map(const sti_adapter_entry *e)
{
    return e->kind == STI_TRAINED_MAP_Q || e->kind == STI_TRAINED_MAP_K;
}
/* Points the views at the values. to_train: matrices, too, are seen as training leaves
 * them; otherwise a backend takes copies in the form it multiplies fastest. */
still_status sti_adapter_bind(sti_adapter *a, bool to_train, still_error *err);
/* value -> seen, and back, where they are two. */
still_status sti_adapter_push(sti_adapter *a, still_error *err);
still_status sti_adapter_pull(sti_adapter *a, still_error *err);
/* Hands one matrix to the backend. */
still_status sti_adapter_matrix_bind(sti_adapter *a, const sti_adapter_entry *e,
                                     sti_dtype type, const void *data, size_t bytes,
                                     sti_adapter_matrix *out, still_error *err);
/* Whether a tensor has the entry's shape. */
still_status sti_adapter_check(const sti_adapter_entry *e, const sti_tensor *t,
                               still_error *err);

#endif
