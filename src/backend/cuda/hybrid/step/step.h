/* step.h - the recurrent form of the hybrid operator: token t of each of n sessions,
 * which are an array on the device. All settings, any shape. */
#ifndef STI_BACKEND_CUDA_HYBRID_STEP_STEP_H
#define STI_BACKEND_CUDA_HYBRID_STEP_STEP_H

#include "backend/cuda/hybrid/params.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of scratch that both below need; retire alone (retire.cu). */
size_t sti_cuda_hybrid_step_scratch(const sti_dev *dev, const sti_cuda_hybrid_params *h,
                                    int n);
size_t sti_cuda_hybrid_retire_scratch(const sti_cuda_hybrid_params *h, int n);

/* Whether the step applies RoPE itself: rows may come unrotated. */
bool sti_cuda_hybrid_step_ropes(const sti_cuda_hybrid_params *h);

/* Refuses heads of more than STI_STEP_MAX_D numbers. */
still_status sti_cuda_hybrid_step_check(const sti_cuda_hybrid_params *h,
                                        still_error *err);

/* For sessions whose token begins a chunk: the oldest chunk of the window is selected
 * from, tokens are evicted and folded. Nothing happens to the others. */
still_status sti_cuda_hybrid_retire(sti_dev *, const sti_cuda_hybrid_params *h,
                                    const sti_cuda_hybrid_session *session, int n,
                                    int t, void *scratch, still_error *err);

/* The token enters the window and its output is written. settled: no kernel queued
 * since the last copy writes to the states, so that they can be read while the kernels
 * in front still run (pdl.cuh). */
still_status sti_cuda_hybrid_step(sti_dev *, const sti_cuda_hybrid_params *h,
                                  const sti_cuda_hybrid_session *session, int n, int t,
                                  bool settled, void *scratch, still_error *err);

#ifdef __cplusplus
}
#endif

#endif
