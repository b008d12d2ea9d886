/* told_tools.h - tools for a chat template that has no place for them: as text, in the form
 * that Hermes models are trained on, and tool_calls.h reads back. */
#ifndef SERVER_TOLD_TOOLS_H
#define SERVER_TOLD_TOOLS_H

#include "base/json.h"

#define SRV_TOLD_OPENING "<tool_call>\n" /* what a call begins with */

/* *messages, as templates read them, become new ones: the first one tells of the tools (NULL:
 * of none), calls become contents, and their results messages of the user. On error they are
 * NULL. */
still_status srv_told_tools(const json_t *tools, json_t **messages, still_error *err);

#endif
