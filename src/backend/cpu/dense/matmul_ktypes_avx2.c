/* matmul_ktypes_avx2.c - the K types of matmul_ktypes_code.h, avx2. */
#include "backend/cpu/dense/matmul_ktypes_code.h"

STI_UNPACK_K(sti_unpack_k_avx2)
