#!/bin/bash
# still chat without a terminal, on a small random model: messages from arguments, pipes and
# lines, the commands, files, settings, and a long conversation. $2 is tools/make-model.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
export XDG_STATE_HOME=$scratch/state
tiny=$scratch/tiny.gguf
"$2" tiny "$tiny" >/dev/null 2>&1 || { echo "make-model failed" >&2; exit 1; }
saved=$scratch/saved.json

# talk OPTIONS...: a conversation from lines on standard input.
talk() {
    timeout 800 "$still" chat "$tiny" --chat-template chatml --lines --json -n 4 "$@" \
        >"$scratch/out" 2>"$scratch/err" || fail "chat $*: $(head -c 300 "$scratch/err")"
}
# replies EXPRESSION: a Python expression over x, the list of replies.
replies() {
    python3 - "$scratch/out" "$1" <<'PYTHON' || fail "not so: $1: $(head -c 600 "$scratch/out")"
import json, sys
x = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
sys.exit(not eval(sys.argv[2]))
PYTHON
}
# messages EXPRESSION: the same over the saved conversation, a list of (role, content).
messages() {
    python3 - "$saved" "$1" <<'PYTHON' || fail "not so: $1: $(head -c 600 "$saved")"
import json, sys
x = [(m["role"], m["content"]) for m in json.load(open(sys.argv[1], encoding="utf-8"))["messages"]]
sys.exit(not eval(sys.argv[2]))
PYTHON
}
one() { timeout 600 "$still" chat "$tiny" "$@" --chat-template chatml -n 4 --json \
    >"$scratch/out" 2>"$scratch/err"; }

# One message: an argument, all of a pipe, or both; a line of any length.
one 'a question' </dev/null || fail "one question: $(cat "$scratch/err")"
replies 'len(x) == 1'
alone=$("$still" tokenize "$tiny" 'a question' --json | python3 -c 'import json, sys; print(len(json.load(sys.stdin)["ids"]))')
replies "x[0]['prompt_tokens'] > $alone"
printf 'one\ntwo\n/exit\nfour\n' | one || fail "a pipe: $(cat "$scratch/err")"
replies 'len(x) == 1 and x[0]["prompt_tokens"] > 15'
printf 'one\ntwo\n' | one 'and' || fail "both: $(cat "$scratch/err")"
replies 'len(x) == 1'
printf '' | one && fail "nothing was sent"
grep -q "still chat MODEL 'QUESTION'" "$scratch/err" || fail "nothing: $(cat "$scratch/err")"
printf 'a\0b' | one && fail "a byte 0 was taken"
expect 2 "leave out 'hi'" "$still" chat "$tiny" hi --lines
expect 2 'exclude' "$still" chat "$tiny" --system a --system-file b

# Commands. The conversation that is left is the one that was saved.
printf '%s\n' 'one' 'two' '/undo' "/save $saved" '/exit' 'never' | talk --system 'be short'
messages '[r for r, t in x] == ["system", "user", "assistant"] and x[0][1] == "be short" and x[1][1] == "one"'
replies 'len(x) == 2'
printf '%s\n' 'one' '/regen' '/edit  uno' "/save $saved" | talk --temp 1
messages '[r for r, t in x] == ["user", "assistant"] and x[0][1] == "uno"'
replies 'len(x) == 3'
printf '%s\n' "/load $saved" 'more' "/save $saved" | talk
messages 'len(x) == 4 and x[0][1] == "uno" and x[2][1] == "more"'
printf 'text of\na file\n' >"$scratch/note.txt"
printf '%s\n' "/read $scratch/note.txt" 'what of it?' 'and now?' "/save $saved" | talk
messages 'x[0][1] == "text of\na file\n\n\nwhat of it?" and x[2][1] == "and now?"'
printf '%s\n' '"""a' ' b' 'c"""' '"""' 'd' '"""' '"""e"""' ' /usr/bin is a path' "/save $saved" | talk
messages '[t for r, t in x if r == "user"] == ["a\n b\nc", "d", "e", " /usr/bin is a path"]'
printf 'be long\n' >"$scratch/system.txt"
printf '%s\n' hi "/save $saved" | talk --system-file "$scratch/system.txt"
messages 'x[0] == ("system", "be long")'
printf '%s\n' '/system be kind' '/reset' hi "/save $saved" '/system' | talk
messages 'x[0] == ("system", "be kind") and len(x) == 3'

# /undo and /regen leave the session as a conversation that never had the exchange. At
# temperature 0 the same text gives the same reply, whichever method remembers it.
for method in softmax 'still --no-allocate --chunk 8' 'lolcats --chunk 8' liger; do
    # shellcheck disable=SC2086
    printf '%s\n' 'first question' 'to forget' '/undo' 'second question' |
        talk --temp 0 --method $method
    cp "$scratch/out" "$scratch/with"
    # shellcheck disable=SC2086
    printf '%s\n' 'first question' 'second question' '/regen' | talk --temp 0 --method $method
    replies 'x[1]["reply"] == x[2]["reply"]'
    python3 - "$scratch/with" "$scratch/out" <<'PYTHON' || fail "$method: /undo left traces"
import json, sys
a, b = ([json.loads(line) for line in open(p, encoding="utf-8")] for p in sys.argv[1:])
sys.exit(not (a[2]["reply"] == b[1]["reply"] and a[2]["prompt_tokens"] == b[1]["prompt_tokens"]))
PYTHON
done

# What is refused says what to type.
says() { # says PATTERN LINE
    printf '%s\n' "$2" | timeout 600 "$still" chat "$tiny" --chat-template chatml --lines \
        -n 2 --json >"$scratch/out" 2>"$scratch/err"
    grep -q -e "$1" "$scratch/err" || fail "no '$1' after $2: $(cat "$scratch/err")"
}
says '/help lists them; to send it' /frob
says '/read needs a file: /read FILE' /read
says 'takes nothing after it' '/stats please'
says 'nothing to undo' /undo
says 'nothing to answer again' /regen
says 'nothing to edit' /edit
says 'no such file' "/read $scratch/none"
says 'No such file' "/load $scratch/none"
echo '{"a": 1}' >"$scratch/bad.json"
says 'no list of messages' "/load $scratch/bad.json"
says 'save to another name' "/save $scratch/bad.json"
[ "$(cat "$scratch/bad.json")" = '{"a": 1}' ] || fail "/save overwrote a file that is no conversation"
echo '[{"role": "tool", "content": "x"}]' >"$scratch/bad.json"
says "message 0 is neither" "/load $scratch/bad.json"
says '/set alone lists' '/set nothing 1'
says 'needs a value' '/set temp'
says 'is not a number' '/set temp warm'
says 'outside 0..100' '/set temp 1000'
says '/regen .*answer the last question again' /help
says 'has no """ at its end' '"""open'

# Settings: what authors say, what the command line says, and /set.
settings() { printf '/show\n' | talk "$@"; sed -n 's/^  .set \([a-z-]*\) *\(.*\)$/\1 \2/p' "$scratch/err" | tr '\n' ' '; }
[ "$(settings)" = 'n-predict 4 temp 0.4 top-k 0 top-p 0.9 min-p 0 repeat-penalty 1.1 repeat-last 64 seed 0 ' ] ||
    fail "still's own settings: $(settings)"
[ "$(settings --temp 0 --repeat-penalty 1 --top-k 7 -s 5)" = 'n-predict 4 temp 0 top-k 7 top-p 0.9 min-p 0 repeat-penalty 1 repeat-last 64 seed 5 ' ] ||
    fail "settings of the command line: $(settings --temp 0 --repeat-penalty 1 --top-k 7 -s 5)"
printf '%s\n' '/set temp 0.25' '/set repeat-penalty=2' '/set n 3' '/set' hi | talk
grep -q 'temp  *0.25$' "$scratch/err" && grep -q 'repeat-penalty  *2$' "$scratch/err" || fail "/set: $(cat "$scratch/err")"
replies 'x[0]["tokens"] == 3 or x[0]["stop"] == "eos"'
folder=$scratch/folder
"$still" export "$tiny" --to safetensors --out "$folder" >/dev/null 2>&1 || fail "no folder"
tiny_file=$tiny tiny=$folder
echo '{"do_sample": true, "temperature": 0.75, "top_k": 20, "top_p": null, "min_p": 7}' >"$folder/generation_config.json"
[ "$(settings)" = 'n-predict 4 temp 0.75 top-k 20 top-p 1 min-p 0 repeat-penalty 1 repeat-last 64 seed 0 ' ] ||
    fail "settings of generation_config.json: $(settings)"
[ "$(settings --temp 0)" = 'n-predict 4 temp 0 top-k 20 top-p 1 min-p 0 repeat-penalty 1 repeat-last 64 seed 0 ' ] ||
    fail "the command line does not come first: $(settings --temp 0)"
echo '{"do_sample": false, "repetition_penalty": 1.25}' >"$folder/generation_config.json"
[ "$(settings)" = 'n-predict 4 temp 0 top-k 0 top-p 1 min-p 0 repeat-penalty 1.25 repeat-last 64 seed 0 ' ] ||
    fail "settings of a greedy model: $(settings)"
tiny=$tiny_file

# Figures, and what runs. One turn needs no sum.
printf '%s\n' hi /stats | talk
grep -q '^1 turns' "$scratch/err" && fail "a sum of one turn: $(cat "$scratch/err")"
grep -q '^context: [0-9]* tokens of [0-9]' "$scratch/err" || fail "no limit: $(cat "$scratch/err")"
printf '%s\n' hi again /stats /show | talk --method still --no-allocate --chunk 8
grep -q '^last turn: [0-9]* tokens read at' "$scratch/err" || fail "no tokens a second: $(cat "$scratch/err")"
grep -q '^2 turns: [0-9]* tokens read at' "$scratch/err" || fail "no sum: $(cat "$scratch/err")"
grep -q '^context: [0-9]* tokens, without limit' "$scratch/err" || fail "no context: $(cat "$scratch/err")"
grep -q '^memory: .* of the conversation, and as much to go back to; the program took' "$scratch/err" ||
    fail "no memory: $(cat "$scratch/err")"
grep -q '^still, chunk 8, budget 32 exact tokens a head; .* for a conversation of any length' "$scratch/err" ||
    fail "no method: $(cat "$scratch/err")"
printf '%s\n' hi again /stats /show | talk --ctx 500
grep -q '^context: [0-9]* tokens of 500$' "$scratch/err" || fail "no limit: $(cat "$scratch/err")"
grep -q '^softmax; .* of memory for 500 tokens' "$scratch/err" || fail "no softmax: $(cat "$scratch/err")"

# Limits: softmax forgets, and says so; --ctx limits every method; otherwise there is none:
# 100,000 tokens, and the memory of the program is what it was at 20,000 (but for the text).
# Under a sanitizer, which takes ten times as long and keeps what was freed, 24,000 do.
turns=26 least=100000
if grep -qa __asan_init "$still"; then turns=6 least=24000; fi
for i in $(seq 30); do echo "message number $i of thirty"; done >"$scratch/lines"
talk --ctx 400 <"$scratch/lines"
grep -q 'forgot the oldest 1 turn. A larger --ctx holds more; --method still has no limit' "$scratch/err" ||
    fail "softmax: $(cat "$scratch/err")"
talk --ctx 400 --method still --no-allocate --chunk 8 <"$scratch/lines"
grep -q 'Without --ctx there is no limit' "$scratch/err" || fail "--ctx: $(cat "$scratch/err")"
python3 -c '
for i in range('$turns'):
    print("turn", i, *("%d" % (i * 7919 + j * 104729) for j in range(560)))' >"$scratch/lines"
talk --method still --no-allocate --chunk 32 <"$scratch/lines"
grep -q forgot "$scratch/err" && fail "a constant memory forgot turns"
replies "len(x) == $turns and x[-1]['held'] > $least"
if [ "$turns" = 26 ]; then
    replies 'x[-1]["peak_rss"] - next(r for r in x if r["held"] > 20000)["peak_rss"] < 24 << 20'
fi
replies 'all(r["prompt_tokens"] < 2 * x[1]["prompt_tokens"] for r in x)'
finish
