#!/bin/bash
# still chat in a real terminal (tmux), on a small random model: keys, history, paste, blocks,
# Ctrl-C at every moment, a window that changes. $2 is tools/make-model, $3 a library that
# holds the program in the middle of opening its model (none under sanitizers). Nothing here
# depends on time: each step waits for what must come.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
command -v tmux >/dev/null || { echo "skipped: tmux is not installed"; exit 77; }
export XDG_STATE_HOME=$scratch/state TERM=screen-256color LC_ALL=C.UTF-8
tiny=$scratch/tiny.gguf saved=$scratch/saved.json
"$2" tiny "$tiny" >/dev/null 2>&1 || { echo "make-model failed" >&2; exit 1; }
socket=0
tm() { tmux -S "$scratch/tmux$socket" -f /dev/null "$@"; }
trap 'tm kill-server 2>/dev/null; rm -rf "$scratch"' EXIT

screen() { tm capture-pane -p -J -S -3000 -t chat 2>/dev/null; }
# until COMMAND...: waits until it succeeds; a terminal in which nothing happens ends the test.
until_true() {
    local i
    for ((i = 0; i < 1200; i++)); do
        "$@" && return
        sleep 0.1
    done
    fail "not in two minutes: $*: $(screen | grep -v '^ *$' | tail -n 12 | cut -c 1-300)"
    finish
}
# Whether COUNT lines (1) of all that was shown match PATTERN.
shown() { [ "$(screen | grep -c -e "$1")" -ge "${2:-1}" ]; }
until_shown() { until_true shown "$@"; }
# Whether the last line is a prompt at which nothing is typed. Signals do not queue: a second
# Ctrl-C is sent when the first has been answered.
at_prompt() { screen | grep -v '^ *$' | tail -n 1 | grep -q '^> *$'; }
until_ended() { until_true test -s "$scratch/status"; }
# begin COMMAND: runs it in a new terminal; its status will be in the file status.
begin() {
    tm kill-server 2>/dev/null
    socket=$((socket + 1)) # one that ends does not answer for the next
    rm -f "$scratch/status"
    tm new-session -d -s chat -x 80 -y 24 "$1; echo \$? >'$scratch/status'; sleep 600" ||
        { fail "tmux does not start"; finish; }
    tm set-option -g history-limit 100000
}
start() { begin "'$still' chat '$tiny' --chat-template chatml -n 4 $*"; }
keys() { tm send-keys -t chat "$@"; }
text() { tm send-keys -t chat -l -- "$1"; }
line() { text "$1"; keys Enter; }
paste() { tm load-buffer "$1" && tm paste-buffer -p -t chat; }
save() { rm -f "$saved"; line "/save $saved"; until_true test -s "$saved"; }
# questions EXPRESSION: a Python expression over x, what the user said in the conversation.
questions() {
    save
    python3 - "$saved" "$1" "$scratch" <<'PYTHON' || fail "not so: $1: $(head -c 900 "$saved")"
import json, sys
x = [m["content"] for m in json.load(open(sys.argv[1], encoding="utf-8"))["messages"] if m["role"] == "user"]
scratch = sys.argv[3]
sys.exit(not eval(sys.argv[2]))
PYTHON
}
leave() { keys C-d; until_ended; [ "$(cat "$scratch/status")" = "${1:-0}" ] || fail "status $(cat "$scratch/status")"; }

# Keys: in the middle of a line, a line of the history, characters of several bytes; then
# the history of the next conversation.
start
until_shown 'Ctrl-D leaves'
until_shown '^softmax; .* for .* tokens'
text 'helo wörld ✓'
keys Left Left Left Left Left Left Left Left Left
text 'l'
keys Enter
line 'second'
keys Up Up
keys End
text '!'
keys Enter
questions 'x == ["hello wörld ✓", "second", "hello wörld ✓!"]'
line '/undo'
until_shown 'taken back'
line '/edit'
until_shown 'change your question'
text ' thought'
keys Enter
questions 'x == ["hello wörld ✓", "second thought"]'
line '/edit'
until_shown 'change your question' 2
text ' never sent'
keys C-c
questions 'x == ["hello wörld ✓", "second thought"]'
screen | grep -q '\^\[\[\|^> >' && fail "keys are shown as codes, or a prompt twice: $(screen | tail -n 20)"
leave
[ "$(stat -c %a "$XDG_STATE_HOME/still/chat-history")" = 600 ] || fail "others can read the history"
start
until_shown 'Ctrl-D leaves'
keys Up Up Up Up
until_shown '> second thought'
keys Enter
questions 'x == ["second thought"]'

# Several lines: a paste, also of 50 KB, with a line far beyond 4,095 bytes; a block.
printf 'Two roads\n\n  diverged\nin a wood' >"$scratch/poem"
paste "$scratch/poem"
until_shown 'in a wood'
keys Enter
line '"""'
until_shown '^\.\.\.'
line 'in quotes'
line '/not a command"""'
questions 'x[1:] == [open(scratch + "/poem").read(), "in quotes\n/not a command"]'
leave
python3 - >"$scratch/large" <<'PYTHON'
lines = [f"line {i}: " + "abc é " * (i % 30) for i in range(480)]
lines[100] = "".join(f"{i:06d}." for i in range(870))  # 6,090 bytes
print("\n".join(lines) + "\nthe very end", end="")
PYTHON
[ "$(wc -c <"$scratch/large")" -gt 51200 ] || fail "the paste is too small"
start --method swa
until_shown 'for a conversation of any length'
paste "$scratch/large"
until_shown 'the very end'
keys Enter
questions '[t.rstrip() for t in x] == [open(scratch + "/large", encoding="utf-8").read()]'
keys Up Up
until_shown 'the very end' 2
keys Enter
questions 'len(x) == 2 and x[0] == x[1]'
long=$(printf 'x%.0s' $(seq 6000))
line "$long"
questions 'x[2] == "x" * 6000'

# A window that changes, in a half-typed line and while nothing is asked.
text 'a line that is somewhat longer than the window will be in a moment'
tm resize-window -t chat -x 40 -y 12
text ' and goes on'
tm resize-window -t chat -x 100 -y 30
keys Enter
questions 'x[3] == "a line that is somewhat longer than the window will be in a moment and goes on"'

# Ctrl-C: in a line, where nothing is typed, in a block.
text 'half a li'
until_shown 'half a li'
keys C-c
until_true at_prompt
keys C-c
until_shown 'or Ctrl-D leaves'
until_true at_prompt
keys C-c
until_shown 'or Ctrl-D leaves' 2
screen | grep '^> >' && fail "a prompt is shown twice"
line '"""not'
until_shown '^\.\.\.'
keys C-c
questions 'len(x) == 4'
leave

# Ctrl-C while a reply is written: it is kept as far as it went, and so is the conversation.
start --ignore-eos -n 10000000 --method swa
until_shown 'Ctrl-D leaves'
line 'go on for ever'
answers() { [ "$(screen | sed "1,/$1/d" | wc -c)" -gt 400 ]; }
until_true answers 'go on for ever'
keys C-c
until_shown '^\[stopped\]'
line 'and again'
until_true answers 'and again'
keys C-c C-c C-c
until_shown '^\[stopped\]' 2
questions 'x == ["go on for ever", "and again"]'
python3 -c '
import json, sys
m = json.load(open(sys.argv[1], encoding="utf-8"))["messages"]
sys.exit(not all(x["content"] for x in m))' "$saved" || fail "a stopped reply is lost"

# Ctrl-C while a message is read: it is taken back, and the next one is answered.
head -c 4000000 /dev/zero | tr '\0' 'y' | fold -w 70 >"$scratch/huge.txt"
line "/read $scratch/huge.txt"
until_shown 'go before your next message'
line 'what is it?'
until_shown 'reading the prompt'
keys C-c
until_shown 'the message was taken back'
questions 'x == ["go on for ever", "and again"]'
leave

# Ctrl-C while the model is opened ends the program at once.
if [ -n "${3:-}" ]; then
    begin "HOLD_FILE='$tiny' LD_PRELOAD='$3' '$still' chat '$tiny' --chat-template chatml"
    until_shown 'holding'
    keys C-c
    until_ended
    [ "$(cat "$scratch/status")" = 130 ] || fail "status $(cat "$scratch/status") after Ctrl-C while opening"
fi

# SIGTERM leaves the terminal as it was.
start
until_shown 'Ctrl-D leaves'
text 'half a li'
until_shown 'half a li'
pkill -TERM -P "$(tm display-message -p -t chat '#{pane_pid}')" -x still
until_ended
[ "$(cat "$scratch/status")" = 130 ] || fail "status $(cat "$scratch/status") after SIGTERM"
modes=$(stty -a <"$(tm display-message -p -t chat '#{pane_tty}')")
case $modes in *' icanon'*) ;; *) fail "the terminal is not as it was: $modes" ;; esac
case $modes in *' -echo '*) fail "the terminal does not echo: $modes" ;; esac
finish
