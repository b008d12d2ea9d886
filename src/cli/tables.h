/* tables.h - a bit for each command, by which option_table.c says who takes an option. */
#ifndef STILL_CLI_TABLES_H
#define STILL_CLI_TABLES_H

#include "cli/options.h"

enum {
    PULL = 1 << 0,
    ONLY_INSPECT = 1 << 1,
    TOKENIZE = 1 << 2,
    GENERATE = 1 << 3,
    ONLY_CHAT = 1 << 4,
    LOGPROBS = 1 << 5,
    PERPLEXITY = 1 << 6,
    SELFTEST = 1 << 7,
    HELP = 1 << 8,
    VERSION = 1 << 9,
    LINEARIZE = 1 << 10,
    EXPORT = 1 << 11,
    SERVE = 1 << 12,
    EVAL = 1 << 13,
    PULL_DATA = 1 << 14,
    BENCH = 1 << 15,
    SALIENCY = 1 << 16,
    ALLOCATE = 1 << 17,
    LIST = 1 << 18,
    RM = 1 << 19,
    SHOW = 1 << 20,
    RUN_NAME = 1 << 21,
    COMPLETION = 1 << 22,
    /* Commands that take the options of another. */
    INSPECT = ONLY_INSPECT | SHOW,
    CHAT = ONLY_CHAT | RUN_NAME,
    SAMPLE = GENERATE | CHAT,
    RUN = SAMPLE | LOGPROBS | PERPLEXITY | SERVE | EVAL,
    METHOD =
        RUN | INSPECT | LINEARIZE | BENCH | SALIENCY | ALLOCATE, /* choose a method */
    ALL = (1 << 23) - 1,
};

#endif
