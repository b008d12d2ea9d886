/* talk.h - a conversation and the session that follows it.
 *
 * Each turn renders the whole conversation as text, but only what the session has not yet
 * seen is tokenized and fed: the session already holds the previous text and the reply's
 * own tokens. If the text does not continue what was seen (a stop string cut a reply, old
 * turns were dropped, a template leaves out what a reply thought), the session goes back to
 * where both agree, as far as its method can. How things were before the last message is
 * kept, so that taking it back costs nothing. */
#ifndef CLI_CHAT_TALK_H
#define CLI_CHAT_TALK_H

#include "cli/chat_template.h"
#include "cli/constraint.h"
#include "cli/run.h"

/* What a session holds, as text and ids. */
typedef struct cli_seen {
    char *text;      /* rendered, without the last reply; NULL: unknown */
    cli_reply reply; /* the last one; its text follows `text` */
    size_t n_ids;
} cli_seen;

typedef struct cli_talk {
    cli_options o; /* its own: /set changes them */
    still_model *model;
    const still_tokenizer *tk;
    cli_chat_template form;
    still_method method;
    still_session *session;
    still_sampler *sampler;
    cli_constraint rule;  /* of every reply */
    still_lookup *lookup; /* has accepted what the session holds; NULL: off */
    uint64_t samplers;    /* made so far */
    bool constant;        /* the session's memory does not grow with its text */
    size_t bytes;         /* of the session's past */
    still_message *msg;   /* contents are owned; a system message comes first */
    size_t n, room;
    int32_t *held; /* ids that the session holds, seen.n_ids of them */
    size_t held_room;
    cli_seen seen;
    /* Before the last message: n messages, and the session's state unless it can go back
     * without. */
    struct {
        bool set;
        size_t n;
        cli_seen seen;
        still_snapshot *state;
    } before;
    struct {
        size_t prompt, reply, turns; /* tokens; of turns all together */
        double prompt_s, reply_s;
    } last, total;
} cli_talk;

/* Opens o's model and a session; talk is zeroed. Close it also after failure. */
int cli_talk_open(cli_talk *c, const cli_options *o);
void cli_talk_close(cli_talk *c);

/* One message and its reply, which is written to standard output. The conversation
 * survives every failure, without that message; so it does Ctrl-C before the reply has
 * begun (CLI_INTERRUPTED). */
int cli_talk_turn(cli_talk *c, const char *message);
/* The last question; NULL: there is none. */
const char *cli_talk_last(const cli_talk *c);
bool cli_talk_undo(
    cli_talk *c); /* takes it and its answer back; false: there is none */
void cli_talk_reset(cli_talk *c);                   /* all but the system message */
int cli_talk_system(cli_talk *c, const char *text); /* and starts over; "": none */
/* The sampler that c->o asks for now. */
int cli_talk_sampler(cli_talk *c);

/* Appends a message to an empty conversation, or to one that is being loaded. */
int cli_talk_add(cli_talk *c, const char *role, const char *text, size_t n);

/* ---- talk_file.c --------------------------------------------------------- */

/* As {"messages": [...]}, which `tokenize --chat` reads, too. A file that holds something
 * else is not overwritten. */
int cli_talk_save(const cli_talk *c, const char *path);
/* Replaces the conversation, which is then read with the next message; after failure it
 * is as it was. */
int cli_talk_load(cli_talk *c, const char *path);

#endif
