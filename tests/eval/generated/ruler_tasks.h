/* ruler_tasks.h - what the tests of RULER share: its rows by name, and their sizes. */
#ifndef TEST_EVAL_RULER_TASKS_H
#define TEST_EVAL_RULER_TASKS_H

#include "eval/generated/ruler.h"
#include "generated.h"

static const char QA_HEAD[] =
    "Answer the question based on the given documents. Only give me the answer and do "
    "not "
    "output any other words.\n\nThe following are given documents.\n\nDocument 1:\n";

static const char *const NAME[TASKS] = {"niah_single_1",
                                        "niah_single_2",
                                        "niah_single_3",
                                        "niah_multikey_1",
                                        "niah_multikey_2",
                                        "niah_multikey_3",
                                        "niah_multivalue",
                                        "niah_multiquery",
                                        "vt",
                                        "cwe",
                                        "fwe",
                                        "qa_hotpot",
                                        "qa_squad"};

/* A length that each task's smallest samples fit with the tests' small vocabulary, and
 * a bound for the tokens of one unit there. */
static const struct {
    int length, max_new, unit;
} SIZE[TASKS] = {
    [SINGLE_1] = {1024, 128, 250},    [SINGLE_2] = {3000, 128, 1900},
    [SINGLE_3] = {3000, 128, 1900},   [MULTIKEY_1] = {3000, 128, 1900},
    [MULTIKEY_2] = {1024, 128, 300},  [MULTIKEY_3] = {1024, 128, 550},
    [MULTIVALUE] = {3000, 128, 1900}, [MULTIQUERY] = {3000, 128, 1900},
    [VT] = {2048, 30, 300},           [CWE] = {1800, 120, 250},
    [FWE] = {1024, 50, 250},          [QA_HOTPOT] = {3000, 32, 2000},
    [QA_SQUAD] = {4096, 32, 4000},
};

static inline items some(int t, int n)
{
    return read_ok(&sti_task_ruler[t], SIZE[t].length, n);
}

#endif
