/* ranks_add.cu - the values of all ranks added in their order; see ranks.c. */
#include "backend/cuda/ranks.h"

namespace
{

__global__ void add_in_order(float *part, int parts, size_t n)
{
    const size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
        float sum = part[i];
        for (int r = 1; r < parts; r++) sum += part[(size_t)r * n + i];
        part[i] = sum;
    }
}

} // namespace

still_status sti_cuda_add_in_order(sti_dev *dev, float *part, int parts, size_t n,
                                   still_error *err)
{
    if (n == 0 || parts < 2) return STILL_OK;
    add_in_order<<<4 * dev->sms, 256, 0, dev->stream>>>(part, parts, n);
    STI_CUDA(cudaGetLastError(), "adding what ranks sent");
    return STILL_OK;
}
