/* template.h - chat templates: the part of Jinja2 that models' templates are written in.
 *
 * A template is text with {{ expressions }}, {% statements %} and {# comments #}. It runs
 * as transformers runs it: trim_blocks and lstrip_blocks are on, one newline at the end is
 * dropped, nothing is escaped, an undefined variable prints nothing, and values cannot be
 * changed in place.
 *
 *   statements   set (also blocks, tuples and attributes of a namespace), if, for (else,
 *                if, recursive, loop.*), break, continue, macro, call, filter, with, raw,
 *                generation (its body alone)
 *   operators    + - * / // % ** ~ == != < <= > >= in, not in, and, or, not, is, is not,
 *                a if b else c, slices, calls with keywords, *list and **dict
 *   functions    namespace, range, dict, cycler, joiner, raise_exception, strftime_now
 *   filters, tests, methods of strings, lists and dicts: the tables in filters_*.c,
 *                tests.c, methods_string.c and functions.c. tojson is transformers',
 *                which is json.dumps with ensure_ascii off
 *   left out     import, include, extends, block, autoescape: a template is one text
 *                A name has the value that it was given last around here. (Jinja2 hides a
 *                variable of the conversation in inner blocks from the beginning if the
 *                block around them sets one of that name later, and never reads it before.)
 *
 * What is not known is an error with line and column, when it is reached.
 *
 * A template is untrusted input: steps, depth, memory and output are bounded, and so is
 * the time. Values live in an arena that is freed as a whole.
 *
 * Every byte of a string knows where it came from: the template (with bos_token,
 * eos_token, numbers and dates), or content, which is what the conversation brought.
 * Whatever a template does with strings, the marks go along, and the result has them: only
 * the template's own text may become special tokens. The role of a message counts as the
 * template's if it is one of a few known words, since templates write '<|' + role + '|>'. */
#ifndef STI_TEMPLATE_TEMPLATE_H
#define STI_TEMPLATE_TEMPLATE_H

#include <time.h>

#include "base/json.h"

typedef struct sti_template sti_template;

/* Reads a template of n bytes, which are copied. */
still_status sti_template_parse(const char *text, size_t n, sti_template **out,
                                still_error *err);
void sti_template_free(sti_template *t);

typedef struct sti_template_input {
    const json_t *variables; /* object: messages, tools, ... : content; not kept */
    const char *bos, *eos;   /* bos_token, eos_token; NULL: undefined */
    const struct tm *now;    /* for strftime_now; NULL: the clock, local time */
} sti_template_input;

/* Runs it. *out: still_rendering_free() it, also after failure. raise_exception is
 * STILL_E_ARG, a limit STILL_E_LIMIT, other errors of a template STILL_E_FORMAT. */
still_status sti_template_render(const sti_template *t, const sti_template_input *in,
                                 still_rendering *out, still_error *err);

#endif
