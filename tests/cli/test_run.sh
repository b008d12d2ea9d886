#!/bin/bash
# The commands that run a model, on a small random one. $2 is tools/make-model.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
make_model=$2
tiny=$scratch/tiny.gguf
"$make_model" tiny "$tiny" >/dev/null 2>&1 || { echo "make-model failed" >&2; exit 1; }
generate() { local want=$1 pattern=$2; shift 2; expect "$want" "$pattern" \
    "$still" generate "$tiny" "$@"; }

# generate: figures, repeatability, echo, stop strings, limits.
generate 0 '' -p hello -n 12 --json
json 'x["stop"] in ("length", "eos") and len(x["tokens"]) <= 12'
json 'x["prompt_tokens"] > 0 and x["peak_rss_bytes"] > 1e6 and x["prefill_s"] > 0'
json 'all(k in x for k in ("text", "decode_s", "load_s", "prefill_tokens_per_s", "decode_tokens_per_s"))'
text() { python3 -c 'import json,sys; print(json.load(open(sys.argv[1]))["text"], end="")' "$scratch/out"; }
generate 0 '' -p hello -n 12 --json --ignore-eos
json 'len(x["tokens"]) == 12 and x["stop"] == "length"'
all=$(text)
generate 0 '' -p hello -n 12 --ignore-eos
[ "$(cat "$scratch/out")" = "$all" ] || fail "streamed text differs from --json"
generate 0 '' -p hello -n 12 --ignore-eos --json --batch 1
[ "$(text)" = "$all" ] || fail "--batch 1 gives another text"
generate 0 '^hello' -p hello -n 4 --echo
stop=$(printf %s "$all" | cut -c6-9)
generate 0 '' -p hello -n 12 --ignore-eos --stop "$stop" --json
json 'x["stop"] == "stop"'
[ "$(text)" = "${all%%"$stop"*}" ] || fail "stop string '$stop': '$(text)' of '$all'"
for seed in 1 1 2; do
    generate 0 '' -p hello -n 24 --temp 1.5 --seed $seed --ignore-eos --json
    text >>"$scratch/seeds.$seed"; echo >>"$scratch/seeds.$seed"
done
[ "$(sort -u "$scratch/seeds.1" | wc -l)" -le "$(($(wc -l <"$scratch/seeds.1") / 2))" ] ||
    fail "one seed, two texts"
cmp -s <(head -n "$(wc -l <"$scratch/seeds.2")" "$scratch/seeds.1") "$scratch/seeds.2" &&
    fail "two seeds, one text"
generate 0 '' -p hello -n 0 --json
json 'x["tokens"] == [] and x["text"] == ""'
generate 0 '' -p $'caf\xc3\xa9 \xff\xfe broken' -n 2 --echo --json
printf 'from a file' >"$scratch/prompt"
generate 0 '"prompt_tokens":' --prompt-file "$scratch/prompt" -n 2 --json
: >"$scratch/empty"
generate 1 'the prompt has [0-9]* tokens, the context holds 3' -p "$(seq 100)" --ctx 3
generate 1 'trained on 2048' -p "$(seq 4000)"
generate 0 '"stop":"length"' -p "$(seq 3)" --ctx 10 -n 5000 --ignore-eos --json
# threads beyond the processors are not started
expect 0 "so .* thread" "$still" inspect "$tiny" --threads 1000
expect 0 '' bash -c "echo hi | '$still' generate '$tiny' --prompt-file - -n 2"

# An empty prompt: a start token if the model adds one, else a clear line.
timeout 600 "$still" generate "$tiny" -p '' -n 1 >/dev/null 2>"$scratch/err"
case $? in
0) ;;
1) grep -q 'the prompt is empty' "$scratch/err" || fail "empty prompt: $(cat "$scratch/err")" ;;
*) fail "empty prompt: status $?" ;;
esac

# tokenize there and back, also through a pipe.
expect 0 '' "$still" tokenize "$tiny" 'some text' --json
json 'len(x["ids"]) > 0'
cp "$scratch/out" "$scratch/ids.json"
expect 0 '^some text$' "$still" tokenize "$tiny" --decode --file "$scratch/ids.json"
expect 0 '^some text$' bash -c "printf 'some text' | '$still' tokenize '$tiny' | '$still' tokenize '$tiny' --decode"
expect 1 'id 0 of the list is 99999999' "$still" tokenize "$tiny" --decode 99999999
expect 1 'not a whole number' "$still" tokenize "$tiny" --decode '1 2 x'
expect 0 '{"ids":\[\]}' "$still" tokenize "$tiny" '' --json

# logprobs and perplexity.
expect 0 '' "$still" logprobs "$tiny" --ids "$scratch/ids.json" --json
json 'x["logprobs"] and all(v < 0 for v in x["logprobs"])'
for bad in '[]' '[1]' '[1, "a"]' '[1, 2' '{"a": 1}' '[1, -1]' '[1, 99999999]' '7 8 nine' '[1,2,3,4,5]'; do
    echo "$bad" >"$scratch/bad.json"
    expect 1 '' "$still" logprobs "$tiny" --ids "$scratch/bad.json" --ctx 4
done
seq 300 >"$scratch/text"
expect 0 '^perplexity [0-9.]* +- [0-9.]*' "$still" perplexity "$tiny" "$scratch/text" --ctx 64
expect 0 '' "$still" perplexity "$tiny" "$scratch/text" --ctx 64 --json
json 'x["perplexity"] > 1 and x["windows"] > 1 and x["tokens"] > 300'
expect 0 '' "$still" perplexity "$tiny" "$scratch/text" --ctx 64 --by-position 4 --json
json '[p["to"] for p in x["by_position"]] == [16, 32, 48, 64]'
json 'sum(p["tokens"] for p in x["by_position"]) == x["tokens"]'
expect 0 '' "$still" perplexity "$tiny" "$scratch/text" --ctx 2000 --by-position 4 --json
json 'len(x["by_position"]) == 4 and x["by_position"][3]["to"] == x["tokens"] + 1'
expect 1 'at least 2' "$still" perplexity "$tiny" "$scratch/empty"

# inspect.
expect 0 '^  total' "$still" inspect "$tiny" --ctx 512 --tensors
expect 0 '' "$still" inspect "$tiny" --ctx 512 --json --tensors
json 'x["memory"]["total"] == sum(v for k, v in x["memory"].items() if k not in ("ctx", "total"))'
json 'x["tensors"] == len(x["tensor_list"]) and x["memory"]["ctx"] == 512'

# Broken models: one line, no crash.
for bytes in 0 3 24 100 5000 400000; do
    head -c "$bytes" "$tiny" >"$scratch/cut.gguf"
    expect 1 "$scratch/cut.gguf" "$still" inspect "$scratch/cut.gguf"
    expect 1 '' "$still" generate "$scratch/cut.gguf" -p x
done
mkdir "$scratch/folder"
expect 1 '' "$still" inspect "$scratch/folder"
expect 1 '' "$still" inspect /dev/null

# chat: a line that says what to do without a template; with one, a conversation.
expect 1 'no chat template' "$still" chat "$tiny"
chat=$scratch/chat.gguf
python3 - "$tiny" "$chat" <<'PYTHON'
# The same model with a ChatML template as its first metadata entry. The entry's length
# is a multiple of the alignment, so that tensor data stays aligned.
import struct, sys
data = open(sys.argv[1], "rb").read()
key = b"tokenizer.chat_template"
text = (b"{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
        b"message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        b"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
text += b" " * (-(8 + len(key) + 4 + 8 + len(text)) % 64)
entry = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(text)) + text
count, = struct.unpack_from("<Q", data, 16)
open(sys.argv[2], "wb").write(data[:16] + struct.pack("<Q", count + 1) + entry + data[24:])
PYTHON
converse() { timeout 600 "$still" chat "$chat" --lines "$@" --json >"$scratch/out" 2>"$scratch/err"; }
printf 'hi\n/reset\nagain\n\n/system short\nand again\n/exit\nnever\n' |
    converse -n 4 || fail "chat: $(cat "$scratch/err")"
[ "$(grep -c '^{"reply":' "$scratch/out")" = 3 ] || fail "not three replies"
printf 'a question\nanother question\n' | converse -n 4 --temp 0 || fail "two turns"
python3 - "$scratch/out" <<'PYTHON' || fail "the second turn fed the first again"
import json, sys
first, second = (json.loads(line) for line in open(sys.argv[1]))
sys.exit(not second["prompt_tokens"] < 2 * first["prompt_tokens"])
PYTHON
for i in $(seq 12); do echo "message $i"; done |
    converse -n 8 --ctx 400 || fail "long chat: $(cat "$scratch/err")"
grep -q 'forgot the oldest' "$scratch/err" || fail "the chat forgot nothing"
[ "$(wc -l <"$scratch/out")" = 12 ] || fail "not twelve replies"
seq 500 | tr '\n' ' ' | converse --ctx 64 && fail "too long a message was taken"
grep -q 'shorten it or raise --ctx' "$scratch/err" || fail "too long: $(cat "$scratch/err")"

# Ctrl-C ends a run with 130; a reader that leaves ends it quietly.
"$still" generate "$tiny" -p x -n 1000000 --ctx 2000000 --ignore-eos >"$scratch/out" 2>"$scratch/err" & job=$!
for _ in $(seq 100); do [ -s "$scratch/out" ] && break; sleep 0.1; done
kill -INT $job; wait $job
[ $? = 130 ] || fail "an interrupted run did not end with 130"
[ ! -s "$scratch/err" ] || fail "an interrupted run said: $(cat "$scratch/err")"
timeout 600 "$still" generate "$tiny" -p x -n 100000 --ctx 200000 --ignore-eos 2>"$scratch/err" | head -c 20 >/dev/null
[ "${PIPESTATUS[0]}" = 0 ] || fail "a closed pipe gave status ${PIPESTATUS[0]}"
[ ! -s "$scratch/err" ] || fail "a closed pipe said: $(cat "$scratch/err")"
finish
