/* run.h - what the commands that run a model have in common: opening it, feeding it a
 * prompt, and writing a reply. Functions that return int have printed their error. */
#ifndef CLI_RUN_H
#define CLI_RUN_H

#include "base/buf.h"
#include "cli/options.h"

enum { CLI_LOOKUP_MAX = 31 }; /* guesses that --lookup takes */

/* The model where no argument names one. */
const char *cli_default_model(const cli_options *o);
/* o's backend, threads, instructions and GPU memory. */
int cli_model_params(const cli_options *o, still_model_params *out);
/* Resolves `name` (NULL: the default model) and opens it with these. */
int cli_open_model(const cli_options *o, const char *name, still_model **out);
/* o, where a lone argument of several words, or -, is the text for the default model: then
 * the model's place is empty and the text comes after it. */
cli_options cli_with_text(const cli_options *o);
/* For commands with the arguments [MODEL] FILE: reads FILE as text (still_text_read),
 * opens the model and runs `work` on both. */
int cli_run_on_text(const cli_options *o,
                    int (*work)(const cli_options *o, still_model *m, const char *text,
                                size_t n));
/* The attention method o describes, for m (NULL: any model). still on a model without an
 * adapter, and with --budget on one with an adapter, gets caps for its heads
 * (cli_allocate), unless o says otherwise. */
int cli_read_method(const cli_options *o, still_model *m, still_method *out);
/* The same before heads get caps. */
int cli_read_uncapped(const cli_options *o, const still_model *m, still_method *out);
/* --budget in bytes, 0 where it is not given. */
size_t cli_budget(const cli_options *o);
/* What the options change in a method, its caps included. */
int cli_change_method(const cli_options *o, still_method *out);
/* Whether o says anything of the attention method but its caps. */
bool cli_asks_method(const cli_options *o);
/* Bits of --cache-type-k or -v: "q8" is 8; "f16" or NULL 0, none of their own. */
int cli_cache_bits(const char *type);
/* --cap that means the caps of a method; NULL: no memory. free() it. */
char *cli_cap_option(const still_method *m);
/* Chooses the caps of a method for m within --budget (still_allocate), with progress.
 * What the probes say is kept in the cache. method NULL: as still_allocate says. On
 * failure *out is NULL. */
int cli_allocate(const cli_options *o, still_model *m, const still_method *method,
                 still_allocation **out);
/* What o says of a session of ctx tokens; the method is borrowed. */
still_session_params cli_session_params(const cli_options *o, const still_method *m,
                                        int64_t ctx);
/* A session of ctx tokens with o's method, cache type and batch. */
int cli_open_session(const cli_options *o, still_model *m, int64_t ctx,
                     still_session **out);
int cli_open_sampler(const cli_options *o, still_model *m, still_sampler **out);
/* What guesses the next tokens, by --lookup; NULL if that is off. */
int cli_open_lookup(const cli_options *o, still_lookup **out);
/* Settings of the sampler that o leaves open (-1): those of the model's authors, or, where
 * they say nothing, those of still. */
void cli_usual_sampling(cli_options *o, const still_model_info *info);
/* "still, chunk 128, ...": a method and what it keeps exact. Returns out. */
const char *cli_describe_method(const still_method *m, char *out, size_t room);
bool cli_is_method(const char *name);
/* A list of lengths, 512,1K,4K, of at most `most`; `command` is for the error line. */
int cli_read_lengths(const char *command, const char *text, int *out, int most, int *n);
/* The tokenizer of an opened model; an error if it has none. */
int cli_need_tokenizer(const still_model *m, const still_tokenizer **out);

/* All ids of a text. free() *ids. */
int cli_encode(const still_tokenizer *tk, const char *text, size_t n, unsigned flags,
               int32_t **ids, size_t *n_ids);

/* Feeds ids batch by batch, so that Ctrl-C and progress work. */
int cli_feed(const cli_options *o, still_session *s, const int32_t *ids, size_t n);

typedef struct cli_reply {
    sti_buf text;
    int32_t *token;
    size_t n_tokens;  /* without the end token */
    size_t n_fed;     /* how many of them the session holds */
    size_t n_guessed; /* of these: computed before they were chosen */
    const char *stop; /* "eos", "length", "stop", "interrupted", "grammar" */
    double seconds;   /* from the first choice to the last */
    bool cut;         /* by a stop string: the session holds more than the text */
} cli_reply;

/* What chooses the tokens of a reply. */
typedef struct cli_generator {
    still_sampler *sampler;
    still_matcher *matcher; /* starts anew with each reply; NULL: any text */
    still_lookup *lookup;   /* has accepted what the session holds; NULL: off */
    const still_tokenizer *tk;
} cli_generator;

/* Generates up to o->n tokens after what s holds, and writes them to standard output
 * as it goes unless o->json. Free the reply even after failure. */
int cli_generate(const cli_options *o, still_session *s, const cli_generator *by,
                 cli_reply *reply);
void cli_reply_free(cli_reply *reply);

#endif
