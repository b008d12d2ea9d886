/* order.cuh - the order in which tokens are kept (top-lambda of STILL eq. 8), for every
 * form: by score, and of equal scores the earlier token first. */
#ifndef STI_BACKEND_CUDA_HYBRID_ORDER_CUH
#define STI_BACKEND_CUDA_HYBRID_ORDER_CUH

#include "backend/cuda/ptx/scalar.cuh"

/* A token as one number; larger is better. Score bits that rise with the score, then
 * the position inverted. Any score has its place, NaN too, and no two positions are
 * equal. */
typedef uint64_t token_order;

STI_DEVICE token_order order_of(float score, int position)
{
    const uint32_t bits = __float_as_uint(score + 0.0f); /* -0 is 0 */
    const uint32_t rising = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (token_order)rising << 32 | ~(uint32_t)position;
}
STI_DEVICE float score_in(token_order x)
{
    const uint32_t rising = (uint32_t)(x >> 32);
    return __uint_as_float(rising & 0x80000000u ? rising & 0x7fffffffu : ~rising);
}
STI_DEVICE int position_in(token_order x)
{
    return (int)~(uint32_t)x;
}

/* Elements of a list, best first, that are better than x. */
STI_DEVICE int count_better(const token_order *list, int n, token_order x)
{
    int lo = 0;
    while (n > 0) {
        const int half = n >> 1;
        if (list[lo + half] > x) {
            lo += half + 1;
            n -= half + 1;
        } else {
            n = half;
        }
    }
    return lo;
}

#endif
