/* panel_avx2.c - the panel kernels with AVX2, FMA and F16C; see panel_code.h. */
#include "backend/cpu/panel/panel.h"

#if STI_CPU_X86
#include "backend/cpu/panel/panel_code.h"

const sti_panel_kernels sti_cpu_panel_avx2 = STI_PANEL_TABLE;
#endif
