#!/bin/bash
# Wrong usage of every command: the status, one line of error, and what it says. Also
# that help exists for every command and that docs/cli.md is what the program prints.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
docs=$here/../../docs/cli.md

# status | pattern | arguments, one case a line
while IFS='|' read -r status pattern arguments; do
    [ -n "$status" ] || continue
    eval "set -- $arguments"
    expect "$status" "$pattern" "$still" "$@"
done <<'CASES'
2|did you mean generate|genrate
2|unknown command|frobnicate
2|the command comes first|--threads 3
2|did you mean --threads|generate --thread 2
2|did you mean --temp|generate --tmep 1
2|did you mean --temperature|generate --temprature 1
2|did you mean --max-tokens|chat --max-tokns 1
2|did you mean piqa|eval --tasks piqqa --data x
2|did you mean decode|bench decod
2|did you mean models|selftest modells x
2|unknown option '--frobnicate'|chat --frobnicate
2|option --cap is not one of 'allocate'|allocate --cap 96
2|option --prompt is not one of 'chat', but of 'generate'|chat --prompt x
2|unknown command 'ls', did you mean list|ls
2|unknown command 'download', did you mean pull|download x
2|did you mean smollm2|pull smollm
1|did you mean smollm2|generate smolm2 -p x
2|needs the name of a model|rm
2|needs a model|run
1|not in the cache|rm nosuch --yes
2|one argument too many|list x
2|smollm2 nor org/name|pull smollm2:Q8_0
2|unknown option '-Z'|generate -Z
2|one argument too many|generate a b c
2|needs a value: N|generate -p x -n
2|'3x' is not a whole number|generate -p x -n 3x
2|'' is not a whole number|generate -p x -n ''
2|' 3' is not a whole number|generate -p x -n ' 3'
2|'3KB' is not a whole number|generate -p x -n 3KB
2|'K' is not a whole number|generate -p x -n K
2|-1 is outside|generate -p x -n -1
2|17M is outside 1..16777216|generate -p x --ctx 17M
2|'much' is not a number of bytes|generate -p x --backend cuda --gpu-memory much
2|--gpu-memory is for --backend cuda|generate -p x --gpu-memory 4GB
2|9223372036854775807K is outside|generate -p x --ctx 9223372036854775807K
2|outside 1..1024|generate -p x --threads 0
2|outside 1..1024|generate -p x --threads 99999999999999999999
2|outside 1..16777216|generate -p x --ctx 999999999
2|'0' is not a number of questions|eval --tasks piqa=0
2|'x' is not a number of questions|eval --tasks piqa=x
2|'niah_single_1@' names no length|eval --tasks niah_single_1@=5
2|'1K,,2K' is not a list|eval --tasks niah_single_1@1K++2K=2
2|an entry has no name|eval --tasks =5
2|there is no task 'nosuch'|eval --tasks nosuch=3
2|is not a number|generate -p x --temp hot
2|--isa: 'abc' is none of: amx avx512|generate -p x --isa abc
2|--score: '' is none of: s3|generate -p x --score ''
2|--load-state: standard input (-) cannot be mapped|generate -p x --load-state -
2|--data: standard input (-) cannot be read again|linearize --data - --out x
2|is not a number|generate -p x --temp nan
2|is not a number|generate -p x --temp 0x10
2|outside 0..1|generate -p x --top-p 1.5
2|nor -1 for any|generate -p x --seed -2
2|are one model too many|inspect a -m b
2|the prompt is given twice|generate a b -p c
2|the prompt is given twice|generate -m a b -p x
2|is not a whole number|generate -p x --seed 18446744073709551616
2|text is empty|generate -p x --stop ''
2|takes no value|generate -p x --json=yes
2|did you mean cpu|generate -p x --backend cpuu
2|is none of: cpu cuda ref bf16|generate -p x --backend vulkan
2|'mamba'|generate -p x --method mamba
2|--select|generate -p x --select many
2|is none of|generate -p x --method magic
2|needs a prompt|generate
2|exclude each other|generate -p x --prompt-file y
1|run `still pull smollm2`|generate -p x
1|run `still pull org/name`|generate org/name -p x
1|no such file or folder|generate nonsense -p x
1|/no/such/model: No such file|generate /no/such/model -p x
1|is empty|generate '' -p x
1|/no/such/prompt: No such file|generate --prompt-file /no/such/prompt
2|a model to pull|pull
2|hub options do not apply|pull smollm2 --endpoint http://x
2|outside 1..3600|pull org/name --timeout 0
1|run `still pull smollm2`|inspect
2|did you mean --tensors|inspect --tensor
1|run `still pull smollm2`|tokenize smollm2 text
1|/no/such/file|tokenize --tokenizer /no/such/file text
2|exclude each other|tokenize smollm2 text --file x
2|one argument too many|tokenize --tokenizer x a b
1|run `still pull smollm2`|chat
2|needs --ids|logprobs
1|/no/such/ids|logprobs --ids /no/such/ids
2|needs a file|perplexity
1|/no/such/text|perplexity smollm2 /no/such/text
2|needs a suite|selftest models
2|unknown suite 'frob'|selftest frob .
1|/no/such/folder|selftest models /no/such/folder
1|run `still pull smollm2`|selftest end-to-end .
2|no command 'frob'|help frob
2|did you mean chat|help chta
2|one argument too many|version x
CASES

# A name from the command line cannot write to the terminal.
expect 2 'unknown command .a?b' "$still" $'a\x1bb'

# Help: every command has one, in both forms, with usage and examples.
for command in pull run list rm inspect show completion tokenize generate chat logprobs perplexity bench selftest help version; do
    expect 0 "^Usage: still $command" "$still" help "$command"
    cp "$scratch/out" "$scratch/first"
    grep -q '^Examples:' "$scratch/first" || fail "help of $command has no examples"
    awk 'length > 80 { bad = 1 } END { exit bad }' "$scratch/first" ||
        fail "help of $command is wider than 80 columns"
    expect 0 '' "$still" "$command" --help
    cmp -s "$scratch/first" "$scratch/out" || fail "two kinds of help for $command"
    expect 0 "^  $command " "$still" --help
done
expect 0 '^still [0-9]*\.[0-9]*\.[0-9]*$' "$still" --version
expect 0 '^{"version":"' "$still" version --json
expect 0 '^.TH STILL-PULL-DATA 1' "$still" help pull-data --man
expect 2 "no command 'pul', did you mean pull" "$still" help pul --man
expect 0 '^.TH STILL 1' "$still" help --man
grep -q '^.SH "STILL PULL-DATA"$' "$scratch/out" || fail "the manual has no section PULL-DATA"
if LC_ALL=C grep -q '[[:cntrl:]]' "$scratch/out"; then fail "control characters in the manual"; fi
"$still" help --markdown | cmp - "$docs" ||
    fail "docs/cli.md is stale: still help --markdown >docs/cli.md"

# A full disk is an error, a closed pipe is not.
if [ -c /dev/full ]; then
    "$still" help generate >/dev/full 2>"$scratch/err" && fail "a full disk went unseen"
    grep -q 'cannot write to standard output' "$scratch/err" || fail "no line for a full disk"
fi
finish
