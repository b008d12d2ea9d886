/* babilong_prompts.h - the prompts of BABILong, for babilong.c. */
#ifndef STI_EVAL_GENERATED_BABILONG_PROMPTS_H
#define STI_EVAL_GENERATED_BABILONG_PROMPTS_H

#include "base/buf.h"

enum { STI_BABILONG_TASKS = 5 };

typedef struct sti_babilong_task {
    const char *name; /* in the file of facts */
    const char *head; /* everything in front of "<context>" */
} sti_babilong_task;

extern const sti_babilong_task sti_babilong_tasks[STI_BABILONG_TASKS]; /* QA1 to QA5 */

void sti_babilong_prompt(sti_buf *out, const sti_babilong_task *t,
                         const sti_buf *context, const char *question);

#endif
