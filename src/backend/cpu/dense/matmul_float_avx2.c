/* matmul_float_avx2.c - the float products of matmul_float_code.h, avx2. */
#include "backend/cpu/dense/matmul_float_code.h"

STI_PRODUCT_FLOAT(sti_product_float_avx2)
STI_STORE(sti_store_avx2)
