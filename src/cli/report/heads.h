/* heads.h - the picture of `still allocate`: layers across, kv heads down, the share of
 * attention on facts as the darkness of a cell, the large caps written into theirs. */
#ifndef CLI_REPORT_HEADS_H
#define CLI_REPORT_HEADS_H

#include "base/buf.h"
#include "still.h"

/* Appends an SVG drawing. */
void cli_heads_draw(const still_allocation *a, sti_buf *out);

#endif
