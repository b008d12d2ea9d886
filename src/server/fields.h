/* fields.h - the fields of a request's body: one table that reads them and describes
 * them.
 *
 * Every field of OpenAI's API is in the table, with what is done with it: read, accepted
 * with its neutral value alone, or ignored because the answer does not depend on it. A
 * field that is not in the table, or has another value, is refused by name, so a client
 * never gets an answer to another question than it asked. /openapi.json is made from the
 * same rows. */
#ifndef SERVER_FIELDS_H
#define SERVER_FIELDS_H

#include "base/json.h"
#include "still.h"

enum { SRV_CHAT = 1, SRV_TEXTS = 2, SRV_BOTH = 3 }; /* whose body has the field */

enum {
    SRV_MOST_LOGPROBS = 20, /* alternatives per token */
    SRV_MOST_STOPS = 16,
    SRV_MOST_CHOICES = 128, /* n */
    SRV_MOST_BIAS = 1024
};

typedef struct srv_stop_text {
    const char *p; /* borrowed from the body; not empty */
    size_t n;
} srv_stop_text;

/* What an answer must look like. */
typedef enum srv_form {
    SRV_FREE,
    SRV_JSON,   /* any JSON object */
    SRV_SCHEMA, /* JSON by a schema */
    SRV_GBNF    /* what a grammar allows */
} srv_form;

/* What chat and completions have in common. */
typedef struct srv_options {
    int max_tokens; /* -1: as many as fit */
    int min_tokens;
    int n;        /* choices of each prompt */
    int logprobs; /* alternatives; -1: no log-probabilities are asked for */
    bool stream, usage, echo, ignore_eos, has_seed;
    bool parallel_calls; /* an answer may call several tools */
    bool kept;           /* say what the model kept (kept.h) */
    uint64_t seed;
    double temperature, top_p, min_p;
    double repeat_penalty, presence_penalty, frequency_penalty;
    int top_k;
    srv_stop_text stop[SRV_MOST_STOPS];
    int n_stops;
    srv_form form;
    const json_t *rules; /* the schema, or the grammar's text; borrowed from the body */
    still_logit_bias *bias; /* [n_bias], owned */
    int n_bias;
} srv_options;

typedef enum srv_kind {
    SRV_INT,    /* int at `at`, min..max */
    SRV_REAL,   /* double at `at`, min..max */
    SRV_BOOL,   /* bool at `at` */
    SRV_OWN,    /* read by code of its own */
    SRV_ONLY,   /* nothing but the values in `schema`, a JSON list, is implemented */
    SRV_IGNORED /* the answer does not depend on it */
} srv_kind;

typedef struct srv_field {
    const char *name;
    srv_kind kind;
    unsigned of; /* SRV_CHAT, SRV_TEXTS */
    double min, max;
    size_t at;          /* in srv_options */
    const char *schema; /* SRV_OWN: of its value, JSON; SRV_ONLY: the values */
    const char *help;
} srv_field;

extern const srv_field srv_fields[];
extern const size_t srv_n_fields;

/* A field that is present and not null; else NULL. */
json_t *srv_field_of(const json_t *body, const char *name);

/* Refuses members of an object other than `names`, NULL at the end. of: "object." */
still_status srv_names_check(const json_t *object, const char *of,
                             const char *const *names, still_error *err);

/* Checks that every field of the body is one that bodies of this kind have, and reads
 * those of the kinds INT, REAL and BOOL, and stop, seed, stream_options, response_format,
 * grammar and logit_bias;
 * ids are checked against the vocabulary. Fields that are absent or null stay as they
 * are in *out. */
still_status srv_fields_read(const json_t *body, unsigned of, int vocab,
                             srv_options *out, still_error *err);
void srv_options_free(srv_options *o);

/* The JSON schema of a body; NULL: no memory. */
json_t *srv_fields_schema(unsigned of);

#endif
