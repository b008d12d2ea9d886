/* options.h - the one table of options and the one table of commands.
 *
 * Parsing, --help, the manual page and docs/cli.md are all made from these two, so they
 * cannot disagree. */
#ifndef CLI_OPTIONS_H
#define CLI_OPTIONS_H

#include "cli/cli.h"

enum { CLI_LIST_MAX = 16, CLI_ARGS_MAX = 16 };

typedef struct cli_list {
    const char *item[CLI_LIST_MAX];
    int n;
} cli_list;

/* What the user asked for. Strings are borrowed from argv or the table. */
typedef struct cli_options {
    const char *arg[CLI_ARGS_MAX];
    int n_args;
    bool json, quiet, help;
    bool to_stdout; /* a file that is written is -: no table goes there */

    /* running a model */
    const char *backend, *isa, *model, *cache, *gpu_memory;
    int64_t threads, ctx, batch;
    uint64_t seed;
    const char *named_model;   /* --model, which cli_parse makes an argument */
    const char *default_model; /* where no argument names one; NULL: smollm2 */

    /* attention method; a string or number that was not given is NULL or negative */
    const char *method, *cap, *score, *heads, *la_scale, *layers, *positions, *budget,
        *cache_type_k, *cache_type_v, *state, *gate;
    int64_t chunk, select, rollback, by_position, probes;
    bool plain_map, no_allocate, no_merge;

    /* saved sessions */
    const char *save_state, *load_state;

    /* input */
    const char *prompt, *prompt_file, *system, *system_file, *file, *ids, *tokenizer,
        *split, *chat, *chat_template;
    cli_list tokenizers, template_arg;
    bool special, bos, decode, tensors, lines;

    /* generation */
    int64_t n, top_k, repeat_last;
    double temp, top_p, min_p, repeat_penalty;
    cli_list stop;
    const char *lookup;
    bool echo, ignore_eos;
    const char *grammar, *json_schema;

    /* pull */
    const char *endpoint, *revision, *token_file;
    cli_list include;
    int64_t timeout;
    bool force, insecure_token, offline;

    /* pull-data; and out, force, timeout, offline */
    const char *mirror;
    bool all, list, keep;

    /* rm, list */
    bool yes, names;

    /* linearize */
    cli_list data, lr_scale;
    const char *out, *stage, *start, *loss, *lora_targets;
    int64_t tokens, seq, micro_batch, save_every, validate_every, lora_rank;
    double held_out, lr1, lr2, warmup, clip, decay, lora_alpha, lora_dropout, kd,
        cap_share;
    bool resume, dry_run, watch, mask_prompt, freeze_maps;

    /* export; and out */
    const char *to, *dtype, *base_name;

    /* serve; and log, chat_template, template_arg */
    const char *host, *api_key_file, *memory, *prefix_cache, *cache_dir;
    int64_t port, parallel, queue, most_tokens, connections, drain;
    cli_list cors;

    /* eval; and out, shots of which a negative number is the task's own */
    const char *tasks, *data_dir, *lengths, *against, *log;
    int64_t limit, samples, shots;
    const char *freeze;
    bool no_fork;

    /* bench; and lengths, against, batch, micro_batch */
    const char *shape, *csv, *svg;
    int64_t rounds, steps, batch_rows;

    /* saliency; and out */
    const char *figures;

    /* help */
    bool markdown, man;
} cli_options;

typedef enum cli_kind {
    CLI_FLAG,   /* bool */
    CLI_STRING, /* const char * */
    CLI_BYTES,  /* const char *, as cli_read_bytes takes it */
    CLI_CHOICE, /* const char *, one of a list */
    CLI_INT,    /* int64_t within [min, max] */
    CLI_SEED,   /* uint64_t */
    CLI_REAL,   /* double within [min, max] */
    CLI_STRINGS /* cli_list: may be given several times */
} cli_kind;

typedef enum cli_group {
    CLI_G_INPUT,
    CLI_G_LENGTH,
    CLI_G_SAMPLING,
    CLI_G_DOWNLOAD,
    CLI_G_TRAINING,
    CLI_G_EXPORT,
    CLI_G_EVAL,
    CLI_G_BENCH,
    CLI_G_SERVER,
    CLI_G_METHOD,
    CLI_G_COMPUTE,
    CLI_G_OUTPUT,
    CLI_G_COUNT
} cli_group;

/* What an option that names an output says. */
typedef enum cli_writes {
    CLI_WRITES_NOTHING,
    CLI_WRITES_TEXT, /* a file, or - for standard output */
    CLI_WRITES_FILE,
    CLI_WRITES_NEW,   /* a file or a folder, in a folder that exists */
    CLI_WRITES_FOLDER /* one for files, made where it is not there */
} cli_writes;

typedef struct cli_option {
    const char *name;
    char letter;     /* 0: no short form */
    const char *arg; /* "N", "FILE"; NULL for a flag */
    cli_kind kind;
    size_t at; /* offset in cli_options */
    unsigned commands;
    cli_group group;
    /* As the user would type it; NULL: zero. -1 where that is no value: not given. */
    const char *preset;
    double min, max;
    const char *choices; /* "cpu ref" */
    cli_writes writes;
    const char *help;
} cli_option;

enum { CLI_EXAMPLES = 5 };

typedef struct cli_command {
    const char *name;
    unsigned bit;
    const char *purpose; /* one line */
    const char *usage;   /* what follows "still NAME"; lines for several forms */
    const char *about;   /* a paragraph or two, wrapped when shown */
    const char *example[CLI_EXAMPLES][2]; /* command line, what it does */
    int min_args, max_args;
    const char *missing; /* what to say when fewer than min_args are given */
    int (*run)(const cli_options *o);
} cli_command;

/* Both end with an entry whose name is NULL. */
extern const cli_option cli_option_table[];
extern const cli_command cli_command_table[];
/* What other programs call an option, and its name; ends with NULL. */
extern const char *const cli_alias_table[][2];
extern const char *const cli_group_title[CLI_G_COUNT];

const cli_command *cli_command_find(const char *name); /* NULL: none */
/* The name nearest to a mistyped one, NULL if nothing is near. */
const char *cli_command_near(const char *name);

/* Fills o with the command's defaults. */
int cli_presets(const cli_command *command, cli_options *o);
/* Changes o by argv[0..argc-1] (what follows the command's name). Returns CLI_OK, or a
 * status whose line was printed. */
int cli_parse(const cli_command *command, int argc, char **argv, cli_options *o);
/* Sets one option of a command, as if it was given. `said` is what errors call it:
 * "--temp", or a place in a file. */
int cli_set_option(const cli_command *c, const cli_option *o, const char *value,
                   cli_options *options);
int cli_set_option_said(const cli_command *c, const cli_option *o, const char *said,
                        const char *value, cli_options *options);
/* The option of a command by its name, or another program's; NULL: it has none. */
const cli_option *cli_option_find(const cli_command *c, const char *name, size_t n);
/* The next of the words that a list ("a b c") is made of, in out; false: there is none. */
bool cli_next_word(const char **list, char *out, size_t room);
/* A number of bytes: 18MB, 12MiB, 4096; false: none. */
bool cli_read_bytes(const char *text, size_t *out);
/* A whole number at the start of a text, 512, 8K or 20M; *end is after it. false: there
 * is none. Saturates. */
bool cli_read_number(const char *text, const char **end, int64_t *out);

/* ---- help.c -------------------------------------------------------------- */

void cli_help_overview(void);
void cli_help_command(const cli_command *command);
void cli_help_markdown(void);

/* ---- The commands -------------------------------------------------------- */

int cli_cmd_pull(const cli_options *o);
int cli_cmd_run(const cli_options *o);
int cli_cmd_list(const cli_options *o);
int cli_cmd_rm(const cli_options *o);
int cli_cmd_inspect(const cli_options *o);
int cli_cmd_tokenize(const cli_options *o);
int cli_cmd_generate(const cli_options *o);
int cli_cmd_chat(const cli_options *o);
int cli_cmd_logprobs(const cli_options *o);
int cli_cmd_perplexity(const cli_options *o);
int cli_cmd_linearize(const cli_options *o);
int cli_cmd_export(const cli_options *o);
int cli_cmd_serve(const cli_options *o);
int cli_cmd_eval(const cli_options *o);
int cli_cmd_bench(const cli_options *o);
int cli_cmd_pull_data(const cli_options *o);
int cli_cmd_saliency(const cli_options *o);
int cli_cmd_allocate(const cli_options *o);
int cli_cmd_selftest(const cli_options *o);
int cli_cmd_completion(const cli_options *o);
int cli_cmd_help(const cli_options *o);
int cli_cmd_version(const cli_options *o);

#endif
