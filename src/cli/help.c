/* help.c - option_table.c and command_table.c as help text, Markdown and a manual page. */
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "cli/options.h"

enum { WIDTH = 80, OPTION_COLUMN = 26 };

/* Words of text, wrapped to WIDTH with `indent` spaces before each line but the
 * first, which begins at column `at`. */
static void wrap(const char *text, int indent, int at)
{
    while (*text) {
        int n = (int)strcspn(text, " ");
        if (at > indent && at + n + 1 > WIDTH) {
            printf("\n%*s", indent, "");
            at = indent;
        } else if (at > indent) {
            putchar(' ');
            at++;
        }
        printf("%.*s", n, text);
        at += n;
        text += n;
        text += strspn(text, " ");
    }
    putchar('\n');
}

/* The next line of a usage text, *n bytes of this one; NULL after the last. */
static const char *next_line(const char *text, int *n)
{
    *n = (int)strcspn(text, "\n");
    return text[*n] ? text + *n + 1 : NULL;
}

static bool shown(const cli_command *c, const cli_option *o, int group)
{
    return (o->commands & c->bit) && (int)o->group == group;
}

static bool has_group(const cli_command *c, int group)
{
    for (const cli_option *o = cli_option_table; o->name; o++)
        if (shown(c, o, group)) return true;
    return false;
}

/* The default to show; NULL if there is none or the help text states it. */
static const char *preset(const cli_option *o)
{
    return o->preset && !strstr(o->help, "default:") ? o->preset : NULL;
}

/* " Also --temperature." in out: what other programs call an option. Returns out. */
static const char *other_names(const cli_option *o, char *out, size_t room)
{
    size_t n = 0;
    out[0] = 0;
    for (size_t i = 0; cli_alias_table[i][0] && n < room; i++)
        if (!strcmp(cli_alias_table[i][1], o->name))
            n += (size_t)snprintf(out + n, room - n, "%s--%s", n ? ", " : " Also ",
                                  cli_alias_table[i][0]);
    if (n && n < room) snprintf(out + n, room - n, ".");
    return out;
}

void cli_help_overview(void)
{
    puts("still - runs language models with constant memory and linear time\n\n"
         "Usage: still COMMAND [arguments] [options]\n\nCommands:");
    for (const cli_command *c = cli_command_table; c->name; c++)
        printf("  %-12s %s\n", c->name, c->purpose);
    puts("\nMODEL is a GGUF file, a Hugging Face folder, a folder that linearize\n"
         "wrote, a name from the cache (org/name, org/name:Q4_K_M), or smollm2-still,\n"
         "the linearized smollm2 that comes with still; the default is smollm2.\n"
         "\nStart here:\n"
         "  still run smollm2-still                     talk with it; the first time, "
         "94 MiB\n"
         "  still list                                  the models of this machine\n"
         "  still generate 'The capital of France is'   continue a text\n"
         "  still inspect smollm2-still --ctx 64K       where memory goes\n"
         "  still serve smollm2-still                   a page at "
         "http://127.0.0.1:8080/\n\n"
         "'still help COMMAND' explains a command with examples.\n"
         "~/.config/still/config and STILL_* variables set options once for all.\n"
         "Numbers may end in K (1024) or M (a million): --ctx 64K, --tokens 20M.\n"
         "Exit status: 0 success, 1 failure, 2 wrong usage, 130 interrupted.");
}

static void option_text(const cli_option *o)
{
    char head[64];
    int n = snprintf(head, sizeof head, "  %c%c%c --%s%s%s", o->letter ? '-' : ' ',
                     o->letter ? o->letter : ' ', o->letter ? ',' : ' ', o->name,
                     o->arg ? " " : "", o->arg ? o->arg : "");
    printf("%s", head);
    if (n >= OPTION_COLUMN - 1)
        printf("\n%*s", OPTION_COLUMN, "");
    else
        printf("%*s", OPTION_COLUMN - n, "");
    char help[640], also[120];
    const char *d = preset(o);
    snprintf(help, sizeof help, "%s%s%s%s%s", o->help,
             other_names(o, also, sizeof also), d ? " [" : "", d ? d : "",
             d ? "]" : "");
    wrap(help, OPTION_COLUMN, OPTION_COLUMN);
}

void cli_help_command(const cli_command *c)
{
    printf("still %s - %s\n\n", c->name, c->purpose);
    const char *line = c->usage;
    for (int n, first = 1; line; first = 0) {
        const char *next = next_line(line, &n);
        printf("%s still %s %.*s\n", first ? "Usage:" : "      ", c->name, n, line);
        line = next;
    }
    if (*c->about) {
        putchar('\n');
        wrap(c->about, 0, 0);
    }
    for (int g = 0; g < CLI_G_COUNT; g++) {
        if (!has_group(c, g)) continue;
        printf("\n%s:\n", cli_group_title[g]);
        for (const cli_option *o = cli_option_table; o->name; o++)
            if (shown(c, o, g)) option_text(o);
    }
    puts("\nExamples:");
    for (int i = 0; i < CLI_EXAMPLES && c->example[i][0]; i++)
        printf("  # %s\n  %s\n", c->example[i][1], c->example[i][0]);
}

/* ---- Markdown ------------------------------------------------------------ */

/* Text of a table cell: what Markdown would take for markup is escaped. */
static void markdown_cell(const char *text)
{
    for (; *text; text++) {
        if (strchr("|<>*_", *text)) putchar('\\');
        putchar(*text);
    }
}

static void markdown_options(const cli_command *c)
{
    for (int g = 0; g < CLI_G_COUNT; g++) {
        if (!has_group(c, g)) continue;
        printf("\n| %s | | default |\n|---|---|---|\n", cli_group_title[g]);
        for (const cli_option *o = cli_option_table; o->name; o++) {
            if (!shown(c, o, g)) continue;
            printf("| `");
            if (o->letter) printf("-%c`, `", o->letter);
            printf("--%s%s%s` | ", o->name, o->arg ? " " : "", o->arg ? o->arg : "");
            char also[120];
            markdown_cell(o->help);
            markdown_cell(other_names(o, also, sizeof also));
            printf(" | %s |\n", preset(o) ? preset(o) : "");
        }
    }
}

void cli_help_markdown(void)
{
    puts(
        "# The commands of still\n\n"
        "<!-- Written by `still help --markdown`; edit src/cli/*_table.c instead. "
        "-->\n\n"
        "Results go to standard output, progress and warnings to standard error.\n"
        "`MODEL` is a GGUF file, a Hugging Face folder, a folder that `linearize`\n"
        "wrote, a name from the cache, or `smollm2-still`, the linearized `smollm2`\n"
        "that comes with still; where it is optional, the default is `smollm2`. Of a\n"
        "repository or folder with several GGUF models `org/name:Q4_K_M` is one, in\n"
        "upper or lower case; without a suffix the name means the safetensors, else\n"
        "Q4_K_M, else the only GGUF model. Names are looked up in still's cache, then\n"
        "in Hugging Face's (`HF_HUB_CACHE`, `HF_HOME`).\n\n"
        "Options can be set once for all in `~/.config/still/config`\n"
        "(`$XDG_CONFIG_HOME/still/config`): a line `temp = 0.7` is for every command "
        "that\n"
        "has the option, below a line `[chat]` for that one; `model` is the default "
        "model.\n"
        "`STILL_TEMP=0.7` in the environment goes before the file, and the command "
        "line\n"
        "before both. Options that may be repeated are for the command line only.\n\n"
        "A lone `--` ends the options. Whole numbers may end in K (1024) or M (a\n"
        "million): `--ctx 64K`, `--tokens 20M`.\n\n"
        "Exit status: 0 success, 1 failure (one line says what, where and what to\n"
        "do), 2 wrong usage, 130 interrupted.\n\n"
        "| command | |\n|---|---|");
    for (const cli_command *c = cli_command_table; c->name; c++)
        printf("| [`%s`](#still-%s) | %s |\n", c->name, c->name, c->purpose);
    for (const cli_command *c = cli_command_table; c->name; c++) {
        printf("\n## still %s\n\n%c%s.\n\n", c->name, c->purpose[0] - 'a' + 'A',
               c->purpose + 1);
        for (const char *line = c->usage, *next; line; line = next) {
            int n;
            next = next_line(line, &n);
            printf("    still %s %.*s\n", c->name, n, line);
        }
        if (*c->about) {
            putchar('\n');
            wrap(c->about, 0, 0);
        }
        markdown_options(c);
        puts("\n```sh");
        for (int i = 0; i < CLI_EXAMPLES && c->example[i][0]; i++)
            printf("%s  # %s\n", c->example[i][0], c->example[i][1]);
        puts("```");
    }
}

/* ---- Manual page --------------------------------------------------------- */

/* Text with roff's own characters escaped. */
static void roff(const char *text)
{
    if (*text == '.' || *text == '\'') fputs("\\&", stdout);
    for (; *text; text++) {
        if (*text == '\\')
            fputs("\\e", stdout);
        else if (*text == '-')
            fputs("\\-", stdout);
        else if (*text == '\'')
            fputs("\\(aq", stdout);
        else
            putchar(*text);
    }
}

static void roff_options(const cli_command *c)
{
    for (int g = 0; g < CLI_G_COUNT; g++)
        for (const cli_option *o = cli_option_table; o->name; o++) {
            if (!shown(c, o, g)) continue;
            puts(".TP");
            printf("\\fB");
            if (o->letter) printf("\\-%c\\fR, \\fB", o->letter);
            printf("\\-\\-");
            roff(o->name);
            printf("\\fR");
            if (o->arg) printf(" \\fI%s\\fR", o->arg);
            putchar('\n');
            char also[120];
            roff(o->help);
            roff(other_names(o, also, sizeof also));
            if (preset(o)) printf(" [%s]", preset(o));
            putchar('\n');
        }
}

static void upper(const char *s)
{
    for (; *s; s++) putchar(toupper((unsigned char)*s));
}

static void man_usage(const cli_command *c)
{
    for (const char *line = c->usage, *next; line; line = next) {
        int n;
        char text[128];
        next = next_line(line, &n);
        snprintf(text, sizeof text, "still %s %.*s", c->name, n, line);
        puts(".PP\n.nf");
        roff(text);
        puts("\n.fi");
    }
}

static void man_examples(const cli_command *c)
{
    for (int i = 0; i < CLI_EXAMPLES && c->example[i][0]; i++) {
        roff(c->example[i][0]);
        putchar('\n');
    }
}

/* The page of one command, still-NAME(1). */
static void help_man_command(const cli_command *c)
{
    printf(".TH STILL-");
    upper(c->name);
    printf(" 1 \"\" \"still %s\" \"User Commands\"\n.SH NAME\nstill\\-",
           still_version());
    roff(c->name);
    printf(" \\- ");
    roff(c->purpose);
    putchar('\n');
    puts(".SH SYNOPSIS");
    man_usage(c);
    puts(".SH DESCRIPTION");
    roff(*c->about ? c->about : c->purpose);
    puts("\n.SH OPTIONS");
    roff_options(c);
    puts(".SH EXAMPLES\n.nf");
    man_examples(c);
    puts(".fi\n.SH SEE ALSO\n.BR still (1)");
}

/* The page of everything, still(1). */
static void help_man(void)
{
    printf(".TH STILL 1 \"\" \"still %s\" \"User Commands\"\n", still_version());
    puts(
        ".SH NAME\nstill \\- run language models with constant memory and linear time\n"
        ".SH SYNOPSIS\n.B still\n.I COMMAND\n[arguments] [options]\n"
        ".SH DESCRIPTION\nResults go to standard output, progress and warnings to "
        "standard error.\n.I MODEL\nis a GGUF file, a Hugging Face folder, a folder "
        "that linearize wrote, a name from the cache (org/name, or org/name:Q4_K_M for "
        "one of several GGUF models), or smollm2\\-still, the linearized "
        "smollm2 that comes with still; where it is optional, the default is smollm2.");
    for (const cli_command *c = cli_command_table; c->name; c++) {
        printf(".SH \"STILL ");
        upper(c->name);
        puts("\"");
        roff(c->purpose);
        puts(".");
        man_usage(c);
        puts(".PP");
        if (*c->about) {
            roff(c->about);
            putchar('\n');
        }
        roff_options(c);
        puts(".PP\nExamples:\n.PP\n.nf");
        man_examples(c);
        puts(".fi");
    }
    puts(
        ".SH EXIT STATUS\n0 done, 1 failed, 2 wrong usage, 130 interrupted.\n"
        ".SH FILES\n.TP\n\\fB~/.config/still/config\\fR\nOptions set once for all, as "
        "lines "
        "NAME = VALUE; those below a line [COMMAND] are for that command. model is the "
        "default model.\n"
        ".SH ENVIRONMENT\n.TP\n\\fBSTILL_\\fIOPTION\\fR\nSets an option: "
        "STILL_TOP_K=40 is "
        "\\-\\-top\\-k 40. It goes before the file, and the command line before "
        "it.\n.TP\n\\fBXDG_CACHE_HOME\\fR\nModels are kept in still/models "
        "below it (default: ~/.cache).\n.TP\n\\fBHF_HOME\\fR, \\fBHF_HUB_CACHE\\fR\n"
        "Where Hugging Face's tools keep models and their token; read, never written "
        "(default: ~/.cache/huggingface).\n.TP\n\\fBHF_ENDPOINT\\fR, "
        "\\fBHF_TOKEN\\fR, \\fBHF_HUB_OFFLINE\\fR\nHub, access token, and 1 for no "
        "network, for still pull and still run.");
}

int cli_cmd_help(const cli_options *o)
{
    const char *name = o->n_args ? o->arg[0] : NULL;
    const cli_command *c = name ? cli_command_find(name) : NULL;
    if (o->markdown) {
        cli_help_markdown();
    } else if (name && !c) {
        const char *near = cli_command_near(name);
        return near ? cli_usage(NULL, "no command '%s', did you mean %s?", name, near)
                    : cli_usage(NULL, "no command '%s'", name);
    } else if (o->man) {
        c ? help_man_command(c) : help_man();
    } else if (c) {
        cli_help_command(c);
    } else {
        cli_help_overview();
    }
    return CLI_OK;
}

int cli_cmd_version(const cli_options *o)
{
    if (o->json) return cli_print_json(json_pack("{s:s}", "version", still_version()));
    printf("still %s\n", still_version());
    return CLI_OK;
}
