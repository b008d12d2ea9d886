/* tiny.h - the shape "tiny" as a model, for tests that run one. */
#ifndef TEST_EVAL_TINY_H
#define TEST_EVAL_TINY_H

#include "../run.h"

#include "model/model.h"

enum { VOCAB = 512 };

static inline still_model *open_tiny(const char *backend)
{
    still_model *m;
    still_error e;
    must(still_model_open_shape(
             "tiny",
             &STILL_PARAMS(still_model_params, .backend = backend, .threads = 2), &m,
             &e),
         &e);
    return m;
}

static inline still_method method_of(const char *name, int chunk)
{
    still_method m;
    still_error e;
    must(still_method_init(&m, name, chunk, &e), &e);
    return m;
}

#endif
