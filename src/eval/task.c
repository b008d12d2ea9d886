/* task.c - the table of tasks. */
#include "eval/task.h"

#include <stdlib.h>
#include <string.h>

const sti_eval_task *sti_task_at(int i)
{
    const sti_eval_task *const tables[] = {sti_task_choice, sti_task_ruler,
                                           sti_task_babilong};
    for (size_t t = 0; t < sizeof tables / sizeof *tables; t++)
        for (const sti_eval_task *row = tables[t]; row->name; row++)
            if (i-- == 0) return row;
    return NULL;
}

const sti_eval_task *sti_task_find(const char *name)
{
    const sti_eval_task *t;
    for (int i = 0; (t = sti_task_at(i)); i++)
        if (strcmp(t->name, name) == 0) return t;
    return NULL;
}

void sti_item_free(sti_item *it)
{
    free(it->memory);
    *it = (sti_item){0};
}
