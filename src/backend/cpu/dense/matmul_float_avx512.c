/* matmul_float_avx512.c - the float products of matmul_float_code.h, avx512. */
#include "backend/cpu/dense/matmul_float_code.h"

STI_PRODUCT_FLOAT(sti_product_float_avx512)
STI_STORE(sti_store_avx512)
