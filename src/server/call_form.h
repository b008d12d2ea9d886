/* call_form.h - calls that a request demands: `tool_choice` "required", or a function's
 * name.
 *
 * What the model's template writes before the JSON of a call becomes the end of the
 * prompt, special tokens and all; what the model then writes is held to a JSON schema that
 * has the tool's name and its parameters. So the model reads what it was trained on, and
 * its answer is a call that tool_calls.h reads back, by construction.
 *
 * How a template writes calls is found by letting it write one, with the name below. */
#ifndef SERVER_CALL_FORM_H
#define SERVER_CALL_FORM_H

#include "base/buf.h"
#include "base/json.h"

#define SRV_PROBE "still_probe_call"

typedef enum srv_call_kind {
    SRV_CALL_OBJECT, /* {"name": ..., KEY: {...}} */
    SRV_CALL_LIST,   /* the same in a list */
    SRV_CALL_NAMED   /* name BEHIND {...}: the name is no part of the JSON */
} srv_call_kind;

typedef struct srv_call_form {
    srv_call_kind kind;
    char before[64]; /* the mark, and the line break behind it, if there is one */
    char behind[64]; /* SRV_CALL_NAMED: between the name and its arguments */
    const char *key; /* "arguments" or "parameters" */
} srv_call_form;

/* From text[0..n), a conversation that ends with a call of SRV_PROBE as a template writes
 * it. opening: its first bytes that are the template's up to where an answer begins; 0: it
 * does not begin with them. False: it is in no form that tool_calls.h reads back. */
bool srv_call_form_read(const char *text, size_t n, size_t opening, srv_call_form *out);

/* What the prompt must have of a call; the name only where that is no part of the JSON. */
void srv_call_form_open(const srv_call_form *f, const char *name, sti_buf *out);

/* The schema of what follows: a call of the tool of that name, or of any tool if it is
 * NULL. json_decref *out. STILL_E_ARG and STILL_E_UNSUPPORTED name the field. */
still_status srv_call_form_schema(const srv_call_form *f, const json_t *tools,
                                  const char *name, json_t **out, still_error *err);
/* The schema of the arguments of tools[i] alone. */
still_status srv_call_arguments(const json_t *tools, size_t i, json_t **out,
                                still_error *err);

#endif
