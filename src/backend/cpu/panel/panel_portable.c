/* panel_portable.c - the panel kernels for any processor; see panel_code.h. */
#include "backend/cpu/panel/panel_code.h"

const sti_panel_kernels sti_cpu_panel_portable = STI_PANEL_TABLE;
