/* metrics.h - how generated answers are scored, in 0..1. Case is ignored throughout. */
#ifndef STI_EVAL_METRICS_H
#define STI_EVAL_METRICS_H

#include "eval/task.h"

/* RULER: the share of it->expected that occurs in the output. */
double sti_match_all(const sti_item *it, const char *output);
/* RULER, questions: 1 if any of it->expected does. */
double sti_match_part(const sti_item *it, const char *output);

/* BABILong: 1 if, of all labels of the task, the output names just it->expected[0].
 * Labels in the question (the last "Question: " of the prompt) do not count, nor what
 * follows the first period, "<context>" or "<example>" of the output. */
double sti_babilong_places(const sti_item *it, const char *output); /* qa1 to qa4 */
double sti_babilong_gifts(const sti_item *it, const char *output);  /* qa5 */

#endif
