/* completion.c - option_table.c and command_table.c as completion scripts for bash, zsh and
 * fish. A script knows commands, options, their choices, and where files belong; the names
 * of models it asks `still list --names` for, when it needs them. */
#include <stdio.h>
#include <string.h>

#include "cli/options.h"

/* What the value of an option, or an argument, is. */
typedef enum value { FREE, CHOICE, PATH, MODEL } value;

static value value_of(const cli_option *o)
{
    static const char *const paths[] = {"FILE", "DIR", "PATH", "ADAPTER"};
    if (o->choices) return CHOICE;
    if (strstr(o->arg, "MODEL")) return MODEL;
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
        if (strstr(o->arg, paths[i])) return PATH;
    return FREE;
}

/* The words that a command's first argument is one of, "prefill decode train", in out;
 * false: it is any. */
static bool first_words(const cli_command *c, char *out, size_t room)
{
    size_t n = strcspn(c->usage, " \n");
    out[0] = 0;
    if (!strncmp(c->usage, "[COMMAND]", 9)) {
        for (const cli_command *each = cli_command_table; each->name; each++)
            snprintf(out + strlen(out), room - strlen(out), "%s%s", *out ? " " : "",
                     each->name);
        return true;
    }
    if (!memchr(c->usage, '|', n) || (c->usage[0] >= 'A' && c->usage[0] <= 'Z'))
        return false;
    snprintf(out, room, "%.*s", (int)n, c->usage);
    for (char *bar; (bar = strchr(out, '|'));) *bar = ' ';
    return true;
}

static bool takes_model(const cli_command *c)
{
    return strstr(c->usage, "MODEL") || strstr(c->usage, "NAME");
}

static bool takes_argument(const cli_command *c)
{
    return c->max_args > 0;
}

static bool is_other_name(size_t i, const cli_option *o)
{
    return !strcmp(cli_alias_table[i][1], o->name);
}

/* The first sentence of a help text, without what quotes and brackets mean to a shell;
 * colons with `colon` before them. */
static void summary(const char *text, const char *colon)
{
    size_t end = 0;
    while (text[end] && strncmp(text + end, " (default", 9) != 0 &&
           !(strchr(".;", text[end]) && strchr(" ", text[end + 1])))
        end++;
    for (size_t i = 0; i < end; i++) {
        if (strchr("'`\"[]\\$<>{}", text[i])) continue;
        if (text[i] == ':') fputs(colon, stdout);
        putchar(text[i]);
    }
}

/* What the help text says of one choice ("cpu: fast on any machine; cuda: ..."); NULL:
 * nothing. */
static const char *choice_text(const cli_option *o, const char *choice)
{
    const size_t n = strlen(choice);
    for (const char *at = o->help; (at = strstr(at, choice)); at += n)
        if ((at == o->help || at[-1] == ' ') && at[n] == ':') return at + n + 2;
    return NULL;
}

/* What an option is for; the choices themselves where its help begins with one of them. */
static void option_summary(const cli_option *o, const char *colon)
{
    char word[32];
    const char *list = o->choices;
    const bool named = list && cli_next_word(&list, word, sizeof word) &&
                       choice_text(o, word) == o->help + strlen(word) + 2;
    if (!named) {
        summary(o->help, colon);
        return;
    }
    fputs(word, stdout);
    while (cli_next_word(&list, word, sizeof word)) printf(", %s", word);
}

/* ---- bash ---------------------------------------------------------------- */

static void bash_names(const cli_option *o)
{
    if (o->letter) printf("-%c|", o->letter);
    printf("--%s", o->name);
    for (size_t i = 0; cli_alias_table[i][0]; i++)
        if (is_other_name(i, o)) printf("|--%s", cli_alias_table[i][0]);
}

static void bash_command(const cli_command *c)
{
    char words[512];
    printf("    %s)\n        case $previous in\n", c->name);
    for (const cli_option *o = cli_option_table; o->name; o++) {
        if (!(o->commands & c->bit) || o->kind == CLI_FLAG) continue;
        printf("        ");
        bash_names(o);
        switch (value_of(o)) {
        case CHOICE: printf(") _still_words '%s'; return ;;\n", o->choices); break;
        case PATH: puts(") _still_files; return ;;"); break;
        case MODEL: puts(") _still_models; return ;;"); break;
        case FREE: puts(") return ;;"); break;
        }
    }
    printf("        esac\n        options='");
    for (const cli_option *o = cli_option_table; o->name; o++)
        if (o->commands & c->bit) printf("--%s ", o->name);
    puts("'");
    if (first_words(c, words, sizeof words)) printf("        first='%s'\n", words);
    if (takes_model(c)) puts("        models=1");
    if (!takes_argument(c)) puts("        none=1");
    puts("        ;;");
}

static void bash_script(void)
{
    puts(
        "# bash completion for still. To use it now:  source <(still completion bash)\n"
        "# For ever: still completion bash > "
        "~/.local/share/bash-completion/completions/still\n"
        "\n"
        "# Candidates for $word; bash takes what follows a colon for a word of its "
        "own.\n"
        "_still_take() {\n"
        "    local candidate\n"
        "    while IFS= read -r candidate; do\n"
        "        [[ -n $candidate ]] || continue\n"
        "        [[ $word != *:* ]] || candidate=${candidate#\"${word%:*}:\"}\n"
        "        COMPREPLY+=(\"$candidate\")\n"
        "    done\n"
        "}\n"
        "_still_words() { _still_take < <(compgen -W \"$1\" -- \"$word\"); }\n"
        "_still_files() { compopt -o filenames 2>/dev/null; _still_take < <(compgen -f "
        "-- \"$word\"); }\n"
        "_still_models() {\n"
        "    _still_words \"$(\"${COMP_WORDS[0]}\" list --names 2>/dev/null)\"\n"
        "    _still_files\n"
        "}\n"
        "_still() {\n"
        "    local line=${COMP_LINE:0:COMP_POINT} options='' first='' models='' "
        "none=''\n"
        "    local word=${line##*[[:space:]]} previous=${COMP_WORDS[COMP_CWORD-1]}\n"
        "    COMPREPLY=()\n"
        "    if [[ $word == --*=* ]]; then # --backend=cpu\n"
        "        previous=${word%%=*} word=${word#*=}\n"
        "    fi\n"
        "    if [[ $COMP_CWORD == 1 ]]; then");
    printf("        _still_words '");
    for (const cli_command *c = cli_command_table; c->name; c++) printf("%s ", c->name);
    puts("--help --version'\n        return\n    fi\n    case ${COMP_WORDS[1]} in");
    for (const cli_command *c = cli_command_table; c->name; c++) bash_command(c);
    puts("    esac\n"
         "    if [[ $word == -* ]]; then\n"
         "        _still_words \"$options\"\n"
         "    elif [[ -n $first && $COMP_CWORD == 2 ]]; then\n"
         "        _still_words \"$first\"\n"
         "    elif [[ -n $models ]]; then\n"
         "        _still_models\n"
         "    elif [[ -z $none ]]; then\n"
         "        _still_files\n"
         "    fi\n"
         "}\n"
         "complete -F _still still");
}

/* ---- zsh ----------------------------------------------------------------- */

static void zsh_option(const cli_option *o)
{
    const bool wants = o->kind != CLI_FLAG;
    const char *star = o->kind == CLI_STRINGS ? "*" : "";
    printf("            ");
    if (o->letter)
        printf("'%s'{-%c%s,--%s%s}'[", star, o->letter, wants ? "+" : "", o->name,
               wants ? "=" : "");
    else
        printf("'%s--%s%s[", star, o->name, wants ? "=" : "");
    option_summary(o, "\\");
    printf("]");
    if (wants) {
        printf(":");
        summary(o->arg, "\\");
        switch (value_of(o)) {
        case CHOICE: printf(":(%s)", o->choices); break;
        case PATH: printf(":_files"); break;
        case MODEL: printf(":_still_models"); break;
        case FREE: printf(": "); break;
        }
    }
    puts("' \\");
}

static void zsh_command(const cli_command *c)
{
    char words[512];
    printf("    %s)\n        _arguments -s -S \\\n", c->name);
    for (const cli_option *o = cli_option_table; o->name; o++)
        if (o->commands & c->bit) zsh_option(o);
    if (first_words(c, words, sizeof words))
        printf("            '1:what:(%s)' \\\n", words);
    if (takes_model(c))
        puts("            '*:model or file:_still_models'");
    else if (takes_argument(c))
        puts("            '*:file:_files'");
    else
        puts("            && return 0");
    puts("        ;;");
}

static void zsh_script(void)
{
    puts(
        "#compdef still\n"
        "# zsh completion for still: put it into a folder of $fpath as _still, before\n"
        "# compinit:  still completion zsh > ~/.zfunc/_still\n"
        "\n"
        "_still_models() {\n"
        "    local -a names\n"
        "    names=(${(f)\"$(still list --names 2>/dev/null)\"})\n"
        "    compadd -a names\n"
        "    _files\n"
        "}\n"
        "_still() {\n"
        "    local curcontext=$curcontext command\n"
        "    typeset -A opt_args\n"
        "    if (( CURRENT == 2 )); then\n"
        "        local -a commands\n"
        "        commands=(");
    for (const cli_command *c = cli_command_table; c->name; c++) {
        printf("            '%s:", c->name);
        summary(c->purpose, "\\");
        puts("'");
    }
    puts("        )\n"
         "        _describe -t commands command commands\n"
         "        return\n"
         "    fi\n"
         "    command=$words[2]\n"
         "    shift words\n"
         "    (( CURRENT-- ))\n"
         "    case $command in");
    for (const cli_command *c = cli_command_table; c->name; c++) zsh_command(c);
    puts("    esac\n"
         "}\n"
         "if [[ $funcstack[1] == _still ]]; then _still \"$@\"; else compdef _still "
         "still; "
         "fi");
}

/* ---- fish ---------------------------------------------------------------- */

/* Each with what it means behind a tab. */
static void fish_choices(const cli_option *o)
{
    char word[32];
    printf(" -x -a '");
    for (const char *list = o->choices; cli_next_word(&list, word, sizeof word);) {
        const char *text = choice_text(o, word);
        printf(text ? "%s\\t\"" : "%s ", word);
        if (text) summary(text, "");
        if (text) printf("\" ");
    }
    printf("'");
}

static void fish_option(const cli_command *c, const cli_option *o)
{
    printf("complete -c still -n '__still_is %s' -l %s", c->name, o->name);
    if (o->letter) printf(" -s %c", o->letter);
    if (o->kind != CLI_FLAG) switch (value_of(o)) {
        case CHOICE: fish_choices(o); break;
        case PATH: printf(" -r -F"); break;
        case MODEL: printf(" -r -F -a '(still list --names 2>/dev/null)'"); break;
        case FREE: printf(" -x"); break;
        }
    printf(" -d '");
    option_summary(o, "");
    puts("'");
}

static void fish_script(void)
{
    char words[512];
    puts("# fish completion for still:  still completion fish > "
         "~/.config/fish/completions/still.fish\n"
         "\n"
         "function __still_is\n"
         "    set -l words (commandline -opc)\n"
         "    test (count $words) -gt 1; and test $words[2] = $argv[1]\n"
         "end\n"
         "function __still_no_command\n"
         "    test (count (commandline -opc)) -eq 1\n"
         "end\n"
         "function __still_first\n"
         "    __still_is $argv[1]; and test (count (commandline -opc)) -eq 2\n"
         "end\n"
         "function __still_later\n"
         "    __still_is $argv[1]; and test (count (commandline -opc)) -gt 2\n"
         "end\n"
         "complete -c still -f");
    for (const cli_command *c = cli_command_table; c->name; c++) {
        printf("complete -c still -n __still_no_command -a %s -d '", c->name);
        summary(c->purpose, "");
        puts("'");
    }
    for (const cli_command *c = cli_command_table; c->name; c++) {
        const bool first = first_words(c, words, sizeof words);
        if (first)
            printf("complete -c still -n '__still_first %s' -a '%s'\n", c->name, words);
        if (takes_model(c))
            printf("complete -c still -n '__still_%s %s' -F -a '(still list --names "
                   "2>/dev/null)'\n",
                   first ? "later" : "is", c->name);
        else if (takes_argument(c) && !first)
            printf("complete -c still -n '__still_is %s' -F\n", c->name);
        for (const cli_option *o = cli_option_table; o->name; o++)
            if (o->commands & c->bit) fish_option(c, o);
    }
}

int cli_cmd_completion(const cli_options *o)
{
    static const struct {
        const char *name;
        void (*write)(void);
    } shell[] = {{"bash", bash_script}, {"zsh", zsh_script}, {"fish", fish_script}};
    for (size_t i = 0; i < sizeof shell / sizeof *shell; i++)
        if (!strcmp(o->arg[0], shell[i].name)) {
            shell[i].write();
            return CLI_OK;
        }
    return cli_usage("completion", "no script for '%s': there are bash, zsh and fish",
                     o->arg[0]);
}
