/* isa_portable.c - the kernels of the cpu backend for any processor; see kernels.h. */
#include "backend/cpu/isa_code.h"

const sti_cpu_kernels sti_cpu_kernels_portable = STI_CPU_KERNELS(portable);
