/* host.h - what backends share: the feed-forward half of a layer and products with
 * additions, made of a backend's other entries; where operators run in the program's
 * memory, that memory and small loops of training. */
#ifndef STI_BACKEND_HOST_H
#define STI_BACKEND_HOST_H

#include "base/named.h"
#include "ops/ops.h"

still_status sti_host_mem_new(sti_dev *, size_t bytes, sti_block *out, still_error *);
void sti_host_mem_free(sti_dev *, sti_block *);
still_status sti_host_mem_move(sti_dev *, void *to, const void *from, size_t bytes,
                               still_error *);
still_status sti_host_mem_clear(sti_dev *, void *p, size_t bytes, still_error *);
size_t sti_host_mem_peak(sti_dev *, bool restart);
/* Entries of every backend whose operators run in the program's memory. */
#define STI_HOST_MEMORY                                                                \
    .host_memory = true, .head_rows = 32, .batch = 512,                                \
    STI_NAMED_4(sti_host_, mem_new, mem_free, mem_move, mem_clear)
/* x += norm_out(out), [M, K]: the end of a feed-forward half with a norm behind it. */
still_status sti_host_add_normed(const sti_backend *be, sti_dev *,
                                 const sti_ffn_weights *, const float *out, int M,
                                 float *x, still_error *);
/* x += norm_out(W_down swiglu(W_gate h, W_up h)), h = norm(x), by the entries of `be`. */
still_status sti_host_ffn_forward(const sti_backend *be, sti_dev *,
                                  const sti_ffn_args *, still_error *);
/* The same in training, forwards and backwards; gate and up are what is kept. */
still_status sti_host_ffn_train(const sti_backend *be, sti_dev *,
                                const sti_ffn_train_args *, still_error *);
still_status sti_host_ffn_back(const sti_backend *be, sti_dev *,
                               const sti_ffn_train_args *, still_error *);
still_status sti_host_matmul_lora(const sti_backend *be, sti_dev *,
                                  const sti_matmul_lora_args *, still_error *);
/* Element by element, in order. */
still_status sti_host_compare(sti_dev *, const sti_compare_args *, still_error *);
still_status sti_host_dropout(sti_dev *, const sti_dropout_args *, still_error *);
still_status sti_host_scale(sti_dev *, float *x, size_t n, float by, still_error *);
still_status sti_host_scale_columns(sti_dev *, const sti_scale_columns_args *,
                                    still_error *);
#define STI_HOST_TRAINING STI_NAMED_3(sti_host_, compare, dropout, scale)

#endif
