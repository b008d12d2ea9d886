/* matmul_float_portable.c - the float products of matmul_float_code.h, portable. */
#include "backend/cpu/dense/matmul_float_code.h"

STI_PRODUCT_FLOAT(sti_product_float_portable)
STI_STORE(sti_store_portable)
