#!/bin/bash
# still export, on a small random model and an adapter trained on a few lines. $2 is
# tools/make-model.
# shellcheck source=lib.sh disable=SC2154
. "$(dirname "$0")/lib.sh"
make_model=$2
mkdir "$scratch/work" && cd "$scratch/work" || exit 1
"$make_model" tiny tiny.gguf >/dev/null 2>&1 || { echo "make-model failed" >&2; exit 1; }
for i in $(seq 60); do
    echo "{\"instruction\": \"count to $i\", \"output\": \"$(seq -s ' ' "$i")\"}"
done >data.jsonl
timeout 120 "$still" linearize tiny.gguf --data data.jsonl --out mine -n 256 --batch 1 \
    --seq 64 --chunk 8 --lora-rank 4 --lr2 0.01 >/dev/null 2>err ||
    { echo "linearize failed: $(cat err)" >&2; exit 1; }
timeout 120 "$still" linearize tiny.gguf --data data.jsonl --out maps -n 64 --batch 1 \
    --seq 64 --chunk 8 --stage 1 >/dev/null 2>&1 || fail "stage 1 alone"
text() { "$still" generate "$1" -p 'one two three four five six' -n 24 --ignore-eos -q 2>&1; }
export_to() { expect 0 "$1" "$still" export mine --to "$2" --out "$3" "${@:4}"; }

# What comes out is a model, and the same one.
want=$(text mine)
[ -n "$want" ] || fail "no text from the adapter"
export_to '^mine.gguf: .* with mine.still.gguf, ' gguf mine.gguf --dtype f32
[ -f mine.still.gguf ] || fail "no mine.still.gguf"
[ "$(text mine.gguf)" = "$want" ] || fail "mine.gguf: '$(text mine.gguf)', not '$want'"
[ "$(text mine.still.gguf)" = "$want" ] || fail "mine.still.gguf gives another text"
export_to '"linearized": *true' safetensors mine-hf --dtype f32 --json
for file in config.json model.safetensors tokenizer.json tokenizer_config.json still.json \
    adapter.safetensors; do
    [ -s "mine-hf/$file" ] || fail "no mine-hf/$file"
done
[ "$(text mine-hf)" = "$want" ] || fail "mine-hf: '$(text mine-hf)', not '$want'"
mkdir elsewhere && cp -r mine-hf elsewhere/copy
[ "$(text elsewhere/copy)" = "$want" ] || fail "a moved export gives another text"
expect 0 'still' "$still" inspect mine-hf
a=$("$still" tokenize tiny.gguf 'The 12 boats, quiet.' --json)
b=$("$still" tokenize mine-hf 'The 12 boats, quiet.' --json)
[ "$a" = "$b" ] || fail "ids differ: $a and $b"
export_to 'low-rank' peft lora --base-name org/name
grep -q '"base_model_name_or_path": "org/name"' lora/adapter_config.json || fail "base name"
[ -s lora/adapter_model.safetensors ] || fail "no lora/adapter_model.safetensors"
grep -q 'not the linearized one' lora/README.md || fail "no word about the gates"

# The adapter alone, smaller.
export_to 'small: .*the adapter alone' adapter small
[ "$(cd small && echo *)" = 'README.md adapter.gguf still.json train.jsonl' ] ||
    fail "small holds $(cd small && echo *)"
cmp -s mine/README.md small/README.md || fail "the card is another one"
cmp -s mine/still.json small/still.json || fail "still.json changed"
(($(stat -c %s small/adapter.gguf) < $(stat -c %s mine/adapter.safetensors) * 2 / 3)) ||
    fail "small is not small"
seq 40 | paste -sd, | sed 's/.*/[&]/' >ids.json
logprobs() { "$still" logprobs "$1" --ids ids.json 2>&1; }
paste <(logprobs mine) <(logprobs small) |
    awk '{ d = $1 - $2; if (d < 0) d = -d; if (d > m) m = d }
        END { exit !(NR == 39 && m > 0 && m < 0.02) }' || fail "small predicts something else"
expect 0 'small-again' "$still" export small --to adapter --out small-again --quiet
cmp -s small/adapter.gguf small-again/adapter.gguf || fail "exported again, it changes"
export_to 'floats' adapter floats --dtype f32 --base-name ./tiny.gguf
grep -q '"name": "./tiny.gguf"' floats/still.json || fail "base name"
[ "$(text floats)" = "$want" ] || fail "floats: '$(text floats)', not '$want'"
expect 0 '' "$still" linearize tiny.gguf --data data.jsonl --out more -n 64 --batch 1 \
    --seq 64 --chunk 8 --lora-rank 4 --stage 2 --start small

# A plain model.
expect 0 'plain.gguf: ' "$still" export tiny.gguf --to gguf --out plain.gguf
[ -e plain.still.gguf ] && fail "a plain model has no twin"
[ "$(text plain.gguf)" = "$(text tiny.gguf)" ] || fail "plain.gguf gives another text"

# Errors: one line, and nothing left behind.
before=$(echo *)
expect 1 'no model' "$still" export missing --to gguf --out x.gguf
expect 1 'exists already' "$still" export mine --to gguf --out mine.gguf
expect 1 'exists already' "$still" export mine --to safetensors --out mine-hf/
expect 1 'must be called NAME.gguf' "$still" export mine --to gguf --out x
expect 1 'no low-rank additions' "$still" export tiny.gguf --to peft --out x
expect 1 'trained by stage 2' "$still" export maps --to peft --out x
expect 1 'not one of f32, f16, bf16' "$still" export mine --to safetensors --out x --dtype q8_0
expect 1 'plain model has no adapter' "$still" export tiny.gguf --to adapter --out x
expect 1 'not one of q8_0, f16, f32' "$still" export mine --to adapter --out x --dtype bf16
expect 2 '' "$still" export mine --to adapter --out x --dtype q4_0
expect 1 'no/such/x: cannot write: .*its folder is not there' "$still" export mine --to safetensors --out no/such/x
expect 2 '' "$still" export mine --to onnx --out x
expect 2 'to gguf' "$still" export mine --out x
expect 2 'out PATH' "$still" export mine --to gguf
# A full disk, as a limit on the size of files.
expect 1 'cannot write' bash -c "ulimit -f 64; exec '$still' export mine --to gguf --out x.gguf --dtype f32"
expect 1 'cannot write' bash -c "ulimit -f 64; exec '$still' export mine --to safetensors --out x --dtype f32"
expect 1 'cannot write' bash -c "ulimit -f 16; exec '$still' export mine --to adapter --out x"
[ "$(echo *)" = "$before" ] || fail "left behind: $(echo *)"
finish
