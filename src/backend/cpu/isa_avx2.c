/* isa_avx2.c - the kernels of the cpu backend with AVX2, FMA and F16C; see kernels.h. */
#include "backend/cpu/cpu.h"

#if STI_CPU_X86
#include "backend/cpu/isa_code.h"

const sti_cpu_kernels sti_cpu_kernels_avx2 = STI_CPU_KERNELS(avx2);
#endif
