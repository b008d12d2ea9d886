/* read.h - what the two readers of configurations share. */
#ifndef STI_MODEL_CONFIG_READ_H
#define STI_MODEL_CONFIG_READ_H

#include "model/config.h"

/* ---- Architectures (arch.c) ---------------------------------------------- */

/* An architecture: its names, and what its files need not say. */
typedef struct sti_arch {
    const char *gguf, *hf; /* general.architecture, model_type */
    const char *hf_class;  /* of transformers */
    const char *gguf_as;   /* what GGUF files are written as; NULL: gguf */
    bool gguf_pairs;       /* its GGUF files have rows of q and k in an order in which a
                           rotated pair lies side by side */
    bool window_switch;    /* config.json has a window that another key switches on */
    int local_period;      /* every so many layers one is global, the others have the
                           window and frequencies of their own; 0: all are alike */
    int plain_period;      /* every so many layers one has no RoPE; 0: all have it */
    double theta, theta_local; /* unless a file says otherwise; 0: 10000 */
    int wide_layers; /* models of so many layers scale q . k by hidden / heads instead
                        of the head size, which no GGUF file says; 0: none */
    double hf_norm_offset;   /* form.norm_offset of Hugging Face's files */
    const char *hf_windowed; /* model_type of those with a window; NULL: hf */
    bool
        scales; /* its files state all four scales of the form, even those that are 1 */
    bool hf_query_scalar; /* config.json has 1 / attn_scale^2 */
    sti_form form;        /* embed_scale 0: sqrt(hidden) */
} sti_arch;
/* By its name in one kind of file; an error lists those there are. */
still_status sti_arch_find(const char *path, bool gguf, const char *name,
                           const sti_arch **out, still_error *err);

/* ---- Rotary frequencies (rope.c) ----------------------------------------- */

typedef struct sti_rope_scaling {
    enum { ROPE_PLAIN, ROPE_LINEAR, ROPE_LLAMA3, ROPE_LONG } kind;
    double factor, low, high, ctx; /* ctx: the length trained before scaling */
    double attn_factor;            /* of ROPE_LONG; 0: by the lengths */
    float *divisor[2]; /* [rotary/2] or NULL: of each frequency, in short and in long
                          sessions */
} sti_rope_scaling;
void sti_rope_scaling_free(sti_rope_scaling *r);
/* Fills all tables of a configuration whose sizes were checked. */
still_status sti_rope_tables(const char *path, sti_config *c, const sti_rope_scaling *r,
                             still_error *err);

/* ---- The readers --------------------------------------------------------- */

/* What a reader finds out beside the configuration. The lists are made by
 * sti_config_new_layers, once the number of layers is known, as the architecture has
 * them; readers change what a file says of single layers. */
typedef struct sti_config_draft {
    const sti_arch *arch;
    int window;          /* of layers that have one; 0: none has */
    bool *local, *plain; /* [layers]: those with the window, those without RoPE */
    sti_rope_scaling scale;
} sti_config_draft;
still_status sti_config_new_layers(const char *path, const sti_config *c,
                                   sti_config_draft *d, still_error *err);
/* Head size and the numbers of a head that are rotated are possible. */
still_status sti_config_check_heads(const char *path, const sti_config *c,
                                    still_error *err);
still_status sti_config_read_gguf(const sti_store *s, sti_config *c,
                                  sti_config_draft *d, still_error *err);
still_status sti_config_read_json(const sti_store *s, sti_config *c,
                                  sti_config_draft *d, still_error *err);

#endif
