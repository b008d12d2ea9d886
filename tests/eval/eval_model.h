/* eval_model.h - a small random model with a tokenizer, for tests that run it on items.
 */
#ifndef TEST_EVAL_EVAL_MODEL_H
#define TEST_EVAL_EVAL_MODEL_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../run.h"

#include "eval/eval.h"

static const char DATA[] = FIXTURES "/eval/choice";
static char dir[] = "/tmp/still-rank-XXXXXX", model_path[64], log_path[64];
static still_model *model;

static inline int open_model(void **state)
{
    (void)state;
    char command[512];
    still_error e;
    if (!mkdtemp(dir)) return -1;
    snprintf(model_path, sizeof model_path, "%s/tiny.gguf", dir);
    snprintf(log_path, sizeof log_path, "%s/log.jsonl", dir);
    snprintf(command, sizeof command,
             "%s/make-model tiny %s --type f32 >/dev/null 2>&1", STILL_TOOLS,
             model_path);
    if (system(command) != 0) return -1;
    return still_model_open(model_path, &STILL_PARAMS(still_model_params, .threads = 2),
                            &model, &e);
}

static inline int close_model(void **state)
{
    (void)state;
    still_model_free(model);
    unlink(model_path);
    unlink(log_path);
    return rmdir(dir);
}

#endif
