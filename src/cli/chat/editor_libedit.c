/* editor_libedit.c - see editor.h; over libedit.
 *
 * Keys come from terminal.c instead of libedit's own reader, so that Ctrl-C and a new size
 * of the window are keys among others, whichever thread the signal found. Pasted text
 * arrives between two marks and is put into the line at once: newlines in it end nothing.
 * Text is UTF-8 whatever the locale says. */
#include <histedit.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/utf8.h"
#include "cli/chat/editor.h"

enum { HISTORY = 1000, KEY_CANCEL = 3 };
/* Keys that no keyboard has: for the text that a line begins with, and for leaving a line
 * whose end is shown. */
#define KEY_START L"\033[9999~"
#define KEY_DROP L"\033[9998~"
#define PASTE_END L"\033[201~"

struct cli_editor {
    EditLine *el;
    HistoryW *history;
    cli_terminal *terminal;
    wchar_t *prompt, *start;
    size_t longest; /* characters of the longest text in the history */
    cli_input why;  /* how the line ended, if not with a newline */
    bool no_memory;
};

/* ---- UTF-8 and wide characters ------------------------------------------- */

/* free() it; NULL: no memory. What is no UTF-8 becomes U+FFFD. */
static wchar_t *widen(const char *text)
{
    const size_t n = strlen(text);
    wchar_t *out = sti_alloc(n + 1, sizeof *out), *to = out;
    for (size_t i = 0, length, bad; out && i < n; i += length) {
        bool cut;
        length = sti_utf8_char(text + i, n - i, &bad, &cut);
        *to++ = length ? (wchar_t)sti_utf8_decode(text + i, &length) : 0xFFFD;
        if (!length) length = bad;
    }
    return out;
}

/* ---- Keys ---------------------------------------------------------------- */

static cli_editor *editor_of(EditLine *el)
{
    void *e = NULL;
    el_wget(el, EL_CLIENTDATA, &e);
    return e;
}

/* libedit asks for a character: 1, or 0 at the end. */
static int read_key(EditLine *el, wchar_t *out)
{
    cli_editor *e = editor_of(el);
    for (;;) {
        const int32_t c = cli_terminal_key(e->terminal);
        if (c == CLI_KEY_END) {
            e->why = CLI_INPUT_END;
            return 0;
        }
        if (c == CLI_KEY_RESIZED) {
            el_resize(el);
            fputs("\r\033[J", stderr); /* it draws again from here */
            el_wset(el, EL_REFRESH);
            continue;
        }
        *out = c == CLI_KEY_INTERRUPT ? KEY_CANCEL : (wchar_t)c;
        return 1;
    }
}

/* Ctrl-C: shows the end of the line, then drops it. */
static unsigned char cancel(EditLine *el, int key)
{
    (void)key;
    cli_editor *e = editor_of(el);
    const LineInfoW *line = el_wline(el);
    e->why = line->lastchar > line->buffer ? CLI_INPUT_CLEARED : CLI_INPUT_LEAVE;
    el_cursor(el, (int)(line->lastchar - line->cursor));
    el_wpush(el, KEY_DROP);
    return CC_REFRESH;
}

static unsigned char drop(EditLine *el, int key)
{
    (void)el;
    (void)key;
    return CC_EOF;
}

static unsigned char newline(EditLine *el, int key)
{
    (void)key;
    return el_winsertstr(el, L"\n") ? CC_ERROR : CC_REFRESH;
}

static unsigned char insert_start(EditLine *el, int key)
{
    (void)key;
    const cli_editor *e = editor_of(el);
    return e->start && el_winsertstr(el, e->start) ? CC_ERROR : CC_REFRESH;
}

/* Room for one more character and a NUL. */
static bool reserve(wchar_t **text, size_t *room, size_t n)
{
    if (n + 2 <= *room) return true;
    const size_t more = *room ? 2 * *room : 4096;
    wchar_t *grown = sti_grow(*text, more, sizeof **text);
    if (!grown) return false;
    *text = grown;
    *room = more;
    return true;
}

/* After the mark that begins a paste: everything up to the one that ends it. Terminals
 * send carriage returns for line ends. */
static unsigned char paste(EditLine *el, int key)
{
    (void)key;
    cli_editor *e = editor_of(el);
    const size_t mark = wcslen(PASTE_END);
    wchar_t *text = NULL, c;
    size_t n = 0, room = 0;
    unsigned char result = CC_REFRESH;
    bool ended = false;
    while (!ended && read_key(el, &c) == 1) {
        if (c == KEY_CANCEL) {
            free(text);
            return cancel(el, key);
        }
        if (c == L'\n' && n && text[n - 1] == L'\r') n--; /* CR LF is one line end */
        if (!c) continue;
        if (!reserve(&text, &room, n)) {
            e->no_memory = true;
            break;
        }
        text[n++] = c;
        ended = n >= mark && !wmemcmp(text + n - mark, PASTE_END, mark);
    }
    if (ended) n -= mark;
    for (size_t i = 0; i < n; i++)
        if (text[i] == L'\r') text[i] = L'\n';
    if (n) text[n] = 0;
    if (e->no_memory || (n && el_winsertstr(el, text))) {
        e->why = CLI_INPUT_FAILED;
        result = CC_EOF;
    }
    free(text);
    return result;
}

/* ---- Lines --------------------------------------------------------------- */

static wchar_t *prompt_of(EditLine *el)
{
    return editor_of(el)->prompt;
}

static bool bind_keys(EditLine *el)
{
    static const struct {
        const wchar_t *name, *help, *key;
        unsigned char (*run)(EditLine *, int);
    } bound[] = {
        {L"still-cancel", L"drop the line", L"^C", cancel},
        {L"still-drop", L"leave the line", L"\\e[9998~", drop},
        {L"still-newline", L"begin a new line", L"\\e^M", newline},
        {L"still-newline", L"begin a new line", L"\\e^J", newline},
        {L"still-paste", L"take pasted text", L"\\e[200~", paste},
        {L"still-start", L"put in the first text", L"\\e[9999~", insert_start},
    };
    for (size_t i = 0; i < sizeof bound / sizeof *bound; i++)
        if (el_wset(el, EL_ADDFN, bound[i].name, bound[i].help, bound[i].run) ||
            el_wset(el, EL_BIND, bound[i].key, bound[i].name, NULL))
            return false;
    return el_wset(el, EL_BIND, L"^R", L"em-inc-search-prev", NULL) == 0;
}

cli_editor *cli_editor_new(cli_terminal *t)
{
    HistEventW event;
    cli_editor *e = sti_alloc(1, sizeof *e);
    if (!e) return NULL;
    e->terminal = t;
    if (!setlocale(LC_CTYPE, "") || MB_CUR_MAX == 1) setlocale(LC_CTYPE, "C.UTF-8");
    e->el = el_init("still", stdin, stderr, stderr);
    e->history = history_winit();
    if (!e->el || !e->history || history_w(e->history, &event, H_SETSIZE, HISTORY) ||
        el_wset(e->el, EL_CLIENTDATA, e) || el_wset(e->el, EL_PROMPT, prompt_of) ||
        el_wset(e->el, EL_EDITOR, L"emacs") ||
        el_wset(e->el, EL_HIST, history_w, e->history) ||
        el_wset(e->el, EL_GETCFN, read_key)) {
        cli_editor_free(e);
        return NULL;
    }
    el_source(e->el, NULL); /* ~/.editrc, if there is one */
    if (!bind_keys(e->el)) {
        cli_editor_free(e);
        return NULL;
    }
    return e;
}

void cli_editor_free(cli_editor *e)
{
    if (!e) return;
    if (e->el) el_end(e->el);
    if (e->history) history_wend(e->history);
    free(e);
}

/* libedit cuts a text of the history to the room its line has, which only typing makes
 * larger. The line is emptied when reading begins. */
static bool make_room(cli_editor *e)
{
    wchar_t *filler = sti_alloc(e->longest + 1, sizeof *filler);
    if (!filler) return false;
    wmemset(filler, L' ', e->longest);
    const bool done = !e->longest || el_winsertstr(e->el, filler) == 0;
    el_deletestr(e->el, (int)e->longest);
    free(filler);
    return done;
}

static void take_line(const wchar_t *line, int n, sti_buf *out)
{
    if (n > 0 && line[n - 1] == L'\n') n--;
    for (int i = 0; i < n; i++) {
        char c[4];
        sti_buf_put(out, c, sti_utf8_encode((uint32_t)line[i], c));
    }
}

cli_input cli_editor_read(cli_editor *e, const char *prompt, const char *start,
                          sti_buf *out)
{
    int n = 0;
    sti_buf_clear(out);
    sti_buf_put(out, "", 0);
    e->why = CLI_INPUT_END;
    e->no_memory = false;
    e->prompt = widen(prompt);
    e->start = start ? widen(start) : NULL;
    if (!e->prompt || (start && !e->start) || !make_room(e)) {
        e->why = CLI_INPUT_FAILED;
    } else {
        cli_terminal_watch(e->terminal, true);
        el_resize(e->el); /* the window may have changed while a reply was written */
        if (start) el_wpush(e->el, KEY_START);
        const wchar_t *line = el_wgets(e->el, &n);
        cli_terminal_watch(e->terminal, false);
        cli_terminal_quiet(e->terminal);
        if (line && n > 0) {
            take_line(line, n, out);
            e->why = out->failed ? CLI_INPUT_FAILED : CLI_INPUT_TEXT;
        } else {
            fputc('\n', stderr);
        }
    }
    free(e->prompt);
    free(e->start);
    e->prompt = e->start = NULL;
    return e->why;
}

void cli_editor_remember(cli_editor *e, const char *text)
{
    HistEventW event;
    wchar_t *wide = widen(text);
    if (!wide) return; /* less to recall, nothing else */
    const size_t n = wcslen(wide);
    if (history_w(e->history, &event, H_ENTER, wide) != -1 && n > e->longest)
        e->longest = n;
    free(wide);
}
