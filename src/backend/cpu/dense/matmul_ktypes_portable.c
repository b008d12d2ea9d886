/* matmul_ktypes_portable.c - the K types of matmul_ktypes_code.h, portable. */
#include "backend/cpu/dense/matmul_ktypes_code.h"

STI_UNPACK_K(sti_unpack_k_portable)
