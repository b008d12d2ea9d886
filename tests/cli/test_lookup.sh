#!/bin/bash
# Guesses (--lookup) change no text, on a small random model, which soon repeats itself.
# $2 is tools/make-model.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
export XDG_STATE_HOME=$scratch/state
tiny=$scratch/tiny.gguf
"$2" tiny "$tiny" >/dev/null 2>&1 || { echo "make-model failed" >&2; exit 1; }
prompt='one two three one two three one two three one two'

# same OPTIONS...: the text with guesses, which x then has, is the one without.
same() {
    local run=("$still" generate "$tiny" -p "$prompt" -n 90 --ignore-eos --json "$@")
    expect 0 '' "${run[@]}" --lookup off
    json 'x["guessed_tokens"] == 0 and len(x["tokens"]) == 90'
    cp "$scratch/out" "$scratch/plain"
    expect 0 '' "${run[@]}"
    python3 - "$scratch/plain" "$scratch/out" <<'PYTHON' || fail "guesses change the text: $*"
import json, sys
a, b = (json.load(open(f, encoding="utf-8")) for f in sys.argv[1:])
sys.exit(a["tokens"] != b["tokens"] or a["text"] != b["text"] or a["stop"] != b["stop"])
PYTHON
}
for method in softmax still lolcats swa; do
    for chunk in 7 16; do
        same --method $method --chunk $chunk --no-allocate
        same --method $method --chunk $chunk --no-allocate --temp 0.02 --seed 3 \
            --repeat-penalty 0.4
        json 'x["guessed_tokens"] > 0'
    done
done
same --lookup 4 --repeat-penalty 0.4
json '0 < x["guessed_tokens"] <= 72'
same --lookup 31 --repeat-penalty 0.4
json 'x["guessed_tokens"] > 0'
same --method liger
json 'x["guessed_tokens"] == 0'

# A conversation that goes back and on again.
for lookup in 8 off; do
    printf '%s\n' "$prompt" "$prompt" /regen /undo "$prompt" '/edit two three one' |
        timeout 250 "$still" chat "$tiny" --chat-template chatml --lines --json -n 40 \
            --method still --chunk 8 --no-allocate --temp 0.02 --repeat-penalty 0.4 --seed 5 \
            --ignore-eos --lookup $lookup >"$scratch/out" 2>"$scratch/err" ||
        fail "chat: $(head -c 300 "$scratch/err")"
    python3 - "$scratch/out" >"$scratch/replies.$lookup" <<'PYTHON'
import json, sys
for line in open(sys.argv[1], encoding="utf-8"):
    print(json.loads(line)["reply"])
PYTHON
done
[ -s "$scratch/replies.8" ] || fail "no replies"
cmp -s "$scratch/replies.8" "$scratch/replies.off" || fail "guesses change a conversation"

for bad in 0 32 -1 x 8x ''; do
    expect 2 'lookup: .* is neither a number of tokens from 1 to 31 nor' \
        "$still" generate "$tiny" -p hello --lookup "$bad"
done
finish
