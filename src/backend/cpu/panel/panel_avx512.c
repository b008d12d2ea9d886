/* panel_avx512.c - the panel kernels with AVX-512; see panel_code.h. */
#include "backend/cpu/panel/panel.h"

#if STI_CPU_X86
#include "backend/cpu/panel/panel_code.h"

const sti_panel_kernels sti_cpu_panel_avx512 = STI_PANEL_TABLE;
#endif
