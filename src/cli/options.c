/* options.c - the parser: argv against option_table.c and command_table.c.
 *
 * Numbers must be complete (no trailing text but K or M) and within the range of their
 * row. A mistyped name gets the nearest one as a suggestion. Every error is one line
 * and status 2; a name that is documented but not in this version is status 1, because
 * the usage was right. */
#include "cli/options.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>
#include <time.h>

#include "cli/near.h"

enum { NAME_MAX_LENGTH = 32 };

const cli_command *cli_command_find(const char *name)
{
    for (const cli_command *c = cli_command_table; c->name; c++)
        if (!strcmp(c->name, name)) return c;
    return NULL;
}

const char *cli_command_near(const char *name)
{
    /* What other programs call it. */
    static const char *const same[][2] = {
        {"ls", "list"},           {"models", "list"},          {"remove", "rm"},
        {"delete", "rm"},         {"download", "pull"},        {"get", "pull"},
        {"complete", "generate"}, {"completions", "generate"}, {"server", "serve"},
        {"train", "linearize"},   {"convert", "export"},       {"info", "show"},
        {"ppl", "perplexity"},    {"benchmark", "bench"},      {"evaluate", "eval"}};
    cli_near best = {0};
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        if (!strcasecmp(name, same[i][0])) return same[i][1];
    for (const cli_command *c = cli_command_table; c->name; c++)
        cli_near_consider(&best, name, c->name);
    return best.name;
}

bool cli_next_word(const char **list, char *out, size_t room)
{
    if (!*list) return false;
    *list += strspn(*list, " ");
    const size_t n = strcspn(*list, " ");
    snprintf(out, room, "%.*s", (int)n, *list);
    *list += n;
    return n > 0;
}

static const cli_option *find_name(const cli_command *c, const char *name, size_t n)
{
    for (const cli_option *o = cli_option_table; o->name; o++)
        if ((o->commands & c->bit) && strlen(o->name) == n && !memcmp(o->name, name, n))
            return o;
    return NULL;
}

const cli_option *cli_option_find(const cli_command *c, const char *name, size_t n)
{
    const cli_option *o = find_name(c, name, n);
    for (size_t i = 0; !o && cli_alias_table[i][0]; i++)
        if (strlen(cli_alias_table[i][0]) == n &&
            !memcmp(cli_alias_table[i][0], name, n))
            o = find_name(c, cli_alias_table[i][1], strlen(cli_alias_table[i][1]));
    return o;
}

static const cli_option *find_letter(const cli_command *c, char letter)
{
    for (const cli_option *o = cli_option_table; o->name; o++)
        if ((o->commands & c->bit) && o->letter == letter) return o;
    return NULL;
}

/* The first command that takes an option. */
static const char *owner_of(const cli_option *o)
{
    for (const cli_command *c = cli_command_table; c->name; c++)
        if (o->commands & c->bit) return c->name;
    return "help";
}

static int unknown_option(const cli_command *c, const char *typed)
{
    cli_near best = {0};
    const char *elsewhere = NULL, *owner = NULL;
    char name[NAME_MAX_LENGTH + 2];
    snprintf(name, sizeof name, "%s", typed + strspn(typed, "-"));
    name[strcspn(name, "=")] = 0;
    for (const cli_option *o = cli_option_table; o->name; o++) {
        if (o->commands & c->bit)
            cli_near_consider(&best, name, o->name);
        else if (!strcmp(o->name, name))
            elsewhere = o->name, owner = owner_of(o);
    }
    for (size_t i = 0; cli_alias_table[i][0]; i++)
        if (cli_option_find(c, cli_alias_table[i][0], strlen(cli_alias_table[i][0])))
            cli_near_consider(&best, name, cli_alias_table[i][0]);
    if (best.name)
        return cli_usage(c->name, "unknown option '%s', did you mean --%s?", typed,
                         best.name);
    if (elsewhere)
        return cli_usage(c->name, "option --%s is not one of '%s', but of '%s'",
                         elsewhere, c->name, owner);
    return cli_usage(c->name, "unknown option '%s'", typed);
}

/* Whether value is one of the words of a space-separated list. */
static bool listed(const char *list, const char *value, cli_near *best)
{
    char word[NAME_MAX_LENGTH + 1];
    const size_t n = strlen(value), limit = n < 2 ? 0 : n < 6 ? 1 : 2;
    for (const char *at = list; cli_next_word(&at, word, sizeof word);) {
        if (!strcmp(word, value)) return true;
        const size_t d = cli_distance(value, word);
        if (best && d <= limit && (!best->name || d < best->distance))
            *best = (cli_near){at - strlen(word), d};
    }
    return false;
}

static int set_choice(const cli_command *c, const cli_option *o, const char *said,
                      const char *value, const char **out)
{
    cli_near best = {0};
    if (listed(o->choices, value, &best)) {
        *out = value;
        return CLI_OK;
    }
    if (best.name)
        return cli_usage(c->name, "%s: '%s' is unknown, did you mean %.*s?", said,
                         value, (int)strcspn(best.name, " "), best.name);
    return cli_usage(c->name, "%s: '%s' is none of: %s", said, value, o->choices);
}

/* 8K is a length, 8192; 20M an amount of text, 20 million. */
static long long unit_of(char letter)
{
    switch (letter) {
    case 'K':
    case 'k': return 1024;
    case 'M':
    case 'm': return 1000000;
    default: return 1;
    }
}

bool cli_read_bytes(const char *text, size_t *out)
{
    static const struct {
        const char *name;
        double bytes;
    } unit[] = {{"", 1},     {"B", 1},      {"KB", 1e3},      {"MB", 1e6},
                {"GB", 1e9}, {"KiB", 1024}, {"MiB", 1048576}, {"GiB", 1073741824}};
    char *end;
    if (*text < '0' || *text > '9') return false;
    const double v = strtod(text, &end);
    for (size_t i = 0; i < sizeof unit / sizeof *unit; i++)
        if (strcasecmp(end, unit[i].name) == 0 && v * unit[i].bytes < 9e15) {
            *out = (size_t)(v * unit[i].bytes);
            return true;
        }
    return false;
}

bool cli_read_number(const char *text, const char **end, int64_t *out)
{
    char *stop;
    const char first = text[text[0] == '-'];
    const long long v = strtoll(text, &stop, 10), unit = unit_of(*stop);
    *end = stop + (unit > 1);
    if (first < '0' || first > '9') return false;
    *out = v > INT64_MAX / unit   ? INT64_MAX
           : v < INT64_MIN / unit ? INT64_MIN
                                  : v * unit;
    return true;
}

static int set_int(const cli_command *c, const cli_option *o, const char *said,
                   const char *value, int64_t *out)
{
    const char *end;
    int64_t v;
    if (!cli_read_number(value, &end, &v) || *end)
        return cli_usage(c->name, "%s: '%s' is not a whole number", said, value);
    if ((double)v < o->min || (double)v > o->max) /* which are far below 2^53 */
        return cli_usage(c->name, "%s: %s is outside %.0f..%.0f", said, value, o->min,
                         o->max);
    *out = v;
    return CLI_OK;
}

static int set_seed(const cli_command *c, const char *said, const char *value,
                    uint64_t *out)
{
    char *end;
    errno = 0;
    unsigned long long v = strtoull(value, &end, 10);
    if (!strcmp(value, "-1")) { /* any; short enough to be typed again */
        uint32_t drawn;
        if (getrandom(&drawn, sizeof drawn, 0) != sizeof drawn)
            drawn = (uint32_t)time(NULL);
        cli_note("[seed %lu]\n", (unsigned long)drawn);
        *out = drawn;
        return CLI_OK;
    }
    if (value[0] < '0' || value[0] > '9' || *end || errno == ERANGE)
        return cli_usage(c->name,
                         "%s: '%s' is not a whole number from 0 to 2^64-1, nor -1 "
                         "for any",
                         said, value);
    *out = v;
    return CLI_OK;
}

static int set_real(const cli_command *c, const cli_option *o, const char *said,
                    const char *value, double *out)
{
    char *end;
    bool plain = strspn(value, "+-.0123456789eE") == strlen(value); /* no hex, no nan */
    double v = strtod(value, &end);
    if (!plain || end == value || *end || !isfinite(v))
        return cli_usage(c->name, "%s: '%s' is not a number", said, value);
    if (v < o->min || v > o->max)
        return cli_usage(c->name, "%s: %s is outside %g..%g", said, value, o->min,
                         o->max);
    *out = v;
    return CLI_OK;
}

static int set_bytes(const cli_command *c, const char *said, const char *value,
                     const char **out)
{
    size_t n;
    if (!cli_read_bytes(value, &n) || n == 0)
        return cli_usage(c->name,
                         "%s: '%s' is not a number of bytes such as 18MB or 12MiB",
                         said, value);
    *out = value;
    return CLI_OK;
}

int cli_set_option_said(const cli_command *c, const cli_option *o, const char *said,
                        const char *value, cli_options *options)
{
    void *field = (char *)options + o->at;
    switch (o->kind) {
    case CLI_FLAG: *(bool *)field = true; return CLI_OK;
    case CLI_STRING: *(const char **)field = value; return CLI_OK;
    case CLI_BYTES: return set_bytes(c, said, value, field);
    case CLI_CHOICE: return set_choice(c, o, said, value, field);
    case CLI_INT: return set_int(c, o, said, value, field);
    case CLI_SEED: return set_seed(c, said, value, field);
    case CLI_REAL: return set_real(c, o, said, value, field);
    case CLI_STRINGS: {
        cli_list *list = field;
        if (!*value) return cli_usage(c->name, "%s: the text is empty", said);
        if (list->n == CLI_LIST_MAX)
            return cli_usage(c->name, "%s given more than %d times", said,
                             CLI_LIST_MAX);
        list->item[list->n++] = value;
        return CLI_OK;
    }
    }
    return CLI_OK;
}

int cli_set_option(const cli_command *c, const cli_option *o, const char *value,
                   cli_options *options)
{
    char said[NAME_MAX_LENGTH + 3];
    snprintf(said, sizeof said, "--%s", o->name);
    return cli_set_option_said(c, o, said, value, options);
}

/* One option at argv[*i]; moves *i past its value. */
static int parse_option(const cli_command *c, int argc, char **argv, int *i,
                        cli_options *options)
{
    const char *typed = argv[*i], *value = NULL;
    const cli_option *o;
    if (typed[1] == '-') {
        size_t n = strcspn(typed + 2, "=");
        o = cli_option_find(c, typed + 2, n);
        if (typed[2 + n] == '=') value = typed + 3 + n;
    } else {
        o = find_letter(c, typed[1]);
        if (typed[2]) value = typed + 2; /* -n32 */
    }
    if (!o || (o->kind == CLI_FLAG && value && typed[1] != '-'))
        return unknown_option(c, typed);
    if (o->kind == CLI_FLAG) {
        if (value) return cli_usage(c->name, "--%s takes no value", o->name);
        value = "";
    } else if (!value) {
        if (*i + 1 >= argc)
            return cli_usage(c->name, "--%s needs a value: %s", o->name, o->arg);
        value = argv[++*i];
    }
    return cli_set_option(c, o, value, options);
}

/* Which argument MODEL is, by the command's usage: "prefill|decode|train [MODEL]". */
static int model_place(const cli_command *c)
{
    char word[NAME_MAX_LENGTH + 1];
    int at = 0;
    for (const char *usage = c->usage; cli_next_word(&usage, word, sizeof word); at++)
        if (strstr(word, "MODEL") || strstr(word, "NAME")) return at;
    return 0;
}

/* --model NAME is the argument MODEL. */
static int put_model(const cli_command *c, cli_options *o)
{
    const int at = model_place(c);
    if (!o->named_model || o->n_args < at) return CLI_OK;
    if (o->n_args == c->max_args || o->n_args == CLI_ARGS_MAX)
        return cli_usage(c->name, "--model and '%s' are one model too many",
                         o->arg[at]);
    for (int i = o->n_args; i > at; i--) o->arg[i] = o->arg[i - 1];
    o->arg[at] = o->named_model;
    o->n_args++;
    return CLI_OK;
}

int cli_presets(const cli_command *command, cli_options *o)
{
    *o = (cli_options){0};
    for (const cli_option *row = cli_option_table; row->name; row++)
        if ((row->commands & command->bit) && row->preset) {
            cli_option usual = *row;
            if (!strcmp(row->preset, "-1")) usual.min = -1;
            int status = cli_set_option(command, &usual, row->preset, o);
            if (status != CLI_OK) return status;
        }
    return CLI_OK;
}

int cli_parse(const cli_command *command, int argc, char **argv, cli_options *o)
{
    bool options_end = false;
    /* What was said once for all is the model that no argument names. */
    o->default_model = o->named_model;
    o->named_model = NULL;
    for (int i = 0; i < argc; i++) {
        if (!options_end && !strcmp(argv[i], "--")) {
            options_end = true;
        } else if (!options_end && argv[i][0] == '-' && argv[i][1]) {
            int status = parse_option(command, argc, argv, &i, o);
            if (status != CLI_OK) return status;
            if (o->help) return CLI_OK;
        } else if (o->n_args == command->max_args) {
            return cli_usage(command->name, "'%s' is one argument too many", argv[i]);
        } else {
            o->arg[o->n_args++] = argv[i];
        }
    }
    int status = put_model(command, o);
    if (status == CLI_OK && o->n_args < command->min_args)
        status =
            cli_usage(command->name, "'%s' needs %s", command->name, command->missing);
    return status;
}
