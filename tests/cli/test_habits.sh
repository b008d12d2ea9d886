#!/bin/bash
# What people type by habit: names of options from other programs, -m, a prompt without -p,
# - for standard input, any seed. Each gives what the documented form gives. $2 is
# tools/make-model.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
make_model=$2
tiny=$scratch/tiny.gguf
"$make_model" tiny "$tiny" >/dev/null 2>&1 || { echo "make-model failed" >&2; exit 1; }
mkdir -p "$XDG_CACHE_HOME/still/models/smollm2"
ln "$tiny" "$XDG_CACHE_HOME/still/models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# same PATTERN... : the output of a command is that of the one before.
first() { expect 0 '' "$@"; cp "$scratch/out" "$scratch/first"; }
same() {
    expect 0 '' "$@"
    cmp -s "$scratch/out" "$scratch/first" || fail "another output: $*"
}

first "$still" generate "$tiny" -p 'hello there' -n 9 --temp 0.8 --seed 5 --ignore-eos
same "$still" generate "$tiny" 'hello there' --max-tokens 9 --temperature=0.8 --seed 5 --ignore-eos
same "$still" generate -m "$tiny" 'hello there' --predict 9 -t 0.8 -s 5 --ignore-eos
same "$still" generate --model "$tiny" -p 'hello there' --max-new-tokens 9 -t 0.8 -s 5 --ignore-eos
same "$still" generate 'hello there' -n 9 -t 0.8 -s 5 --ignore-eos # the default model
printf 'hello there' >"$scratch/prompt"
same "$still" generate "$tiny" -f "$scratch/prompt" -n 9 -t 0.8 -s 5 --ignore-eos
piped() { "$@" <"$scratch/prompt" >"$scratch/out" 2>"$scratch/err" || fail "$*: $(cat "$scratch/err")"
    cmp -s "$scratch/out" "$scratch/first" || fail "another output: $*"; }
piped "$still" generate "$tiny" - -n 9 -t 0.8 -s 5 --ignore-eos
piped "$still" generate - -n 9 -t 0.8 -s 5 --ignore-eos
piped "$still" generate -m "$tiny" - -n 9 -t 0.8 -s 5 --ignore-eos
piped "$still" generate "$tiny" -p - -n 9 -t 0.8 -s 5 --ignore-eos
expect 2 'needs a prompt' "$still" generate "$tiny"
# A path with a space in it is a path.
ln "$tiny" "$scratch/a model.gguf"
expect 2 'needs a prompt' "$still" generate "$scratch/a model.gguf"
same "$still" generate "$scratch/a model.gguf" 'hello there' -n 9 -t 0.8 -s 5 --ignore-eos

# Any seed, which is said and gives the same again.
expect 0 '^\[seed [0-9]*\]' "$still" generate "$tiny" hello -n 20 -t 1.5 --seed -1 --ignore-eos
cp "$scratch/out" "$scratch/first"
drawn=$(sed -n 's/^\[seed \([0-9]*\)\]$/\1/p' "$scratch/err")
same "$still" generate "$tiny" hello -n 20 -t 1.5 --seed "$drawn" --ignore-eos
expect 0 '' "$still" generate "$tiny" hello -n 20 -t 1.5 --seed -1 --ignore-eos
again=$(sed -n 's/^\[seed \([0-9]*\)\]$/\1/p' "$scratch/err")
[ "$drawn" != "$again" ] || fail "the same seed twice: $drawn"

# chat: a question for the default model, and one from a pipe.
chat=(-n 8 --temp 0 --chat-template chatml)
first "$still" chat "$tiny" 'why is it so' "${chat[@]}"
same "$still" chat 'why is it so' "${chat[@]}"
same "$still" chat -m "$tiny" 'why is it so' "${chat[@]}"
same "$still" run "$tiny" 'why is it so' "${chat[@]}"
printf 'why is it so\n' >"$scratch/prompt"
piped "$still" chat "$tiny" - "${chat[@]}"
piped "$still" chat - "${chat[@]}"

# Files that are standard input; -m where the model is not the first argument.
seq 300 >"$scratch/prompt"
first "$still" perplexity "$tiny" "$scratch/prompt" --ctx 64
piped "$still" perplexity "$tiny" - --ctx 64
same "$still" perplexity -m "$tiny" "$scratch/prompt" --ctx-size 64
same "$still" perplexity "$scratch/prompt" --ctx 64
expect 0 'tiny' "$still" bench decode -m "$tiny" --lengths 8 --steps 1 --rounds 1 --against '' --method softmax --quiet
first "$still" tokenize "$tiny" -f "$scratch/prompt"
piped "$still" tokenize -m "$tiny" -f -
piped "$still" tokenize "$tiny"
expect 2 'one model too many' "$still" inspect "$tiny" -m "$tiny"
expect 0 'Also --temperature' "$still" help generate
finish
