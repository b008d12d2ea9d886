/* ranks.h - GPUs of several processes that add together; see sti_backend.ranks_sum. */
#ifndef STI_BACKEND_CUDA_RANKS_H
#define STI_BACKEND_CUDA_RANKS_H

#include "backend/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

still_status sti_cuda_ranks_name(sti_dev *, uint8_t name[STI_DEVICE_NAME],
                                 still_error *);
still_status sti_cuda_ranks_new_id(uint8_t place[STI_RANKS_ID], still_error *);
still_status sti_cuda_ranks_join(sti_dev *, const uint8_t place[STI_RANKS_ID], int rank,
                                 int size, still_error *);
still_status sti_cuda_ranks_sum(sti_dev *, float *x, size_t n, still_error *);
void sti_cuda_ranks_leave(sti_dev *);

/* part [parts, n]: its rows are added up in order, into the first (ranks_add.cu). */
still_status sti_cuda_add_in_order(sti_dev *, float *part, int parts, size_t n,
                                   still_error *);

#ifdef __cplusplus
}
#endif

#endif
