/* isa_avx512.c - the kernels of the cpu backend with AVX-512 F/BW/VL/DQ/VNNI, and with AMX for
 * the products of batches beside them; see kernels.h. */
#include "backend/cpu/cpu.h"

#if STI_CPU_X86
#include "backend/cpu/isa_code.h"

const sti_cpu_kernels sti_cpu_kernels_avx512 = STI_CPU_KERNELS(avx512);
const sti_cpu_kernels sti_cpu_kernels_amx = STI_CPU_KERNELS(amx);
#endif
