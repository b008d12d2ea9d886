#!/bin/bash
# --method still on a model without an adapter: the first use finds the heads that look
# things up and keeps what it found; later uses read it. $2 is tools/make-model.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
make_model=$2
tiny=$scratch/tiny.gguf other=$scratch/other.gguf heads=$XDG_CACHE_HOME/still/heads
"$make_model" tiny "$tiny" >/dev/null 2>&1 || { echo "make-model failed" >&2; exit 1; }
"$make_model" tiny "$other" --seed 2 >/dev/null 2>&1 || exit 1
head -c 3000 "$here/../../README.md" >"$scratch/text"
"$still" tokenize "$tiny" -f "$scratch/text" --json >"$scratch/tokens"
python3 - "$scratch/tokens" >"$scratch/ids" <<'PYTHON'
import json, sys
x = json.load(open(sys.argv[1]))
print(json.dumps((x["ids"] if isinstance(x, dict) else x)[:600]))
PYTHON
method=(--method still --chunk 16 --threads 1 --probes 1)

# logprobs NAME OPTIONS...: what every token is given, in $scratch/NAME.
logprobs() {
    local name=$1
    shift
    expect 0 '' "$still" logprobs "$tiny" --ids "$scratch/ids" --json "$@"
    python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["logprobs"])' \
        "$scratch/out" >"$scratch/$name" || fail "no logprobs: $*"
}
same() {
    cmp -s "$scratch/$1" "$scratch/$2" || fail "$1 and $2 differ: $3"
}
differ() {
    ! cmp -s "$scratch/$1" "$scratch/$2" || fail "$1 and $2 do not differ: $3"
}

# The paper's settings, and caps that are given, are as they were and keep nothing.
logprobs even "${method[@]}" --no-allocate
[ ! -e "$heads" ] || fail "--no-allocate probes"
logprobs given "${method[@]}" --cap 32
[ ! -e "$heads" ] || fail "--cap probes"
same even given "--no-allocate is the preset, cap 2C"

# The first use writes one file, the second reads it: the same numbers.
logprobs first "${method[@]}"
[ "$(ls "$heads" | wc -l)" = 1 ] || fail "not one file: $(ls "$heads")"
kept=$(echo "$heads"/*.json)
cp "$kept" "$scratch/kept"
differ first even "heads have caps of their own"
logprobs second "${method[@]}"
[ ! -s "$scratch/err" ] || fail "the second use says: $(cat "$scratch/err")"
same first second "read from the file"

# It has no linear state unless asked for, and then fewer tokens.
logprobs stateful "${method[@]}" --state linear
differ first stateful "a linear state"
logprobs none "${method[@]}" --state none
same first none "no state is the default"

# What the heads are does not depend on the budget: no probes for another one.
logprobs larger "${method[@]}" --budget 2MB --quiet
[ "$(ls "$heads" | wc -l)" = 1 ] || fail "a budget has a file of its own"
differ first larger "another budget"
expect 1 'a budget of 0.00 MB is too small' "$still" inspect "$tiny" "${method[@]}" --budget 100
# That is said before the minute of probes.
XDG_CACHE_HOME=$scratch/empty expect 1 'a budget of 0.00 MB is too small' \
    "$still" inspect "$tiny" "${method[@]}" --budget 100
! grep -q 'which heads' "$scratch/err" || fail "probes for a budget that is too small"
expect 2 "'much' is not a number of bytes" "$still" inspect "$tiny" "${method[@]}" --budget much

# All commands use the same method, and it takes no more than the even one.
expect 0 '' "$still" inspect "$tiny" "${method[@]}" --no-allocate --json
even=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["memory_method"]["cache"])' <"$scratch/out")
expect 0 '' "$still" inspect "$tiny" "${method[@]}" --json
json "$even * 0.8 < x['memory_method']['cache'] <= $even"
for command in "perplexity $tiny $scratch/text --ctx 512" \
    "generate $tiny -p hello -n 8 --json" \
    "bench decode $tiny --lengths 64 --rounds 1 --steps 1 --batch 1 --against swa --json" \
    "eval $tiny --data $here/../fixtures/eval/choice --tasks arc_easy --limit 2 --json"; do
    # shellcheck disable=SC2086
    expect 0 '' "$still" $command "${method[@]}" --quiet
    cmp -s "$kept" "$scratch/kept" || fail "$command: other heads"
    [ "$(ls "$heads" | wc -l)" = 1 ] || fail "$command: a file of its own"
done

# Another model has other heads; the same probes give the same bytes.
expect 0 '' "$still" generate "$other" -p hello -n 2 "${method[@]}" --quiet
[ "$(ls "$heads" | wc -l)" = 2 ] || fail "models share a file"
for file in "$heads"/*.json; do
    [ "$file" = "$kept" ] || cp "$file" "$scratch/others"
done
rm "$kept"
logprobs again "${method[@]}" --quiet
cmp -s "$kept" "$scratch/kept" || fail "the same probes found other heads"

# A file that is damaged is said to be, ignored and replaced.
damaged() {
    logprobs damaged "${method[@]}"
    grep -q "^still: warning: .*$1" "$scratch/err" || fail "no '$1': $(cat "$scratch/err")"
    same first damaged "$1"
    cmp -s "$kept" "$scratch/kept" || fail "not replaced: $1"
}
head -c 100 "$scratch/kept" >"$kept"
damaged "json"
: >"$kept"
damaged "json"
cp "$scratch/others" "$kept"
damaged "not what probes of this model say"
change() {
    python3 - "$scratch/kept" "$kept" "$1" <<'PYTHON'
import json, sys
x = json.load(open(sys.argv[1]))
exec(sys.argv[3])
json.dump(x, open(sys.argv[2], "w"))
PYTHON
    damaged "not what probes of this model say"
}
change 'x["version"] += 1'
change 'x["gain"].pop()'
change 'x["gain"][0] = "much"'
change 'x["gain"][0] = -0.5'
change 'x["gain"] = [0 for _ in x["gain"]]'
change 'x["probes"] += 1'
change 'del x["seed"]'

# A cache that cannot be written costs time, not the run.
touch "$scratch/file"
XDG_CACHE_HOME=$scratch/file logprobs unwritable "${method[@]}"
grep -q '^still: warning: probes will run again' "$scratch/err" || fail "$(cat "$scratch/err")"
same first unwritable "no cache"

# Nothing to probe with: the even caps.
expect 0 '' "$still" bench prefill --shape tiny --method still --against swa --lengths 64 \
    --rounds 1 --json --quiet

# linearize --budget: heads, bits and the training with little room come by themselves, and
# the adapter keeps within the bytes; a small budget has smaller chunks, then no state.
printf '{"text": "%s"}\n' "$(tr -cd 'a-z \n' <"$scratch/text" | tr '\n' ' ')" >"$scratch/data.jsonl"
train() {
    expect 0 'is a model now' "$still" linearize "$tiny" --data "$scratch/data.jsonl" --held-out 0 \
        --tokens 128 --seq 64 --batch 1 --threads 1 --probes 1 "$@"
}
said() { # said NAME TEXT: the adapter's description has it
    tr -d ' \n' <"$scratch/$1/still.json" | grep -q "$2" || fail "$1: no $2"
}
train --budget 1MB --out "$scratch/large"
train --budget 400KB --out "$scratch/less"
train --budget 150KB --out "$scratch/small"
train --budget 1MB --gate full --score s3 --cache-type-k f16 --out "$scratch/asked"
said large '"chunk":128,.*"key_bits":5,"value_bits":3,.*"score":"distinct".*"state":"linear","gate":false'
said large '"caps":"[0-9]'
said less '"chunk":32,.*"state":"linear"'
said small '"chunk":32,.*"state":"none"'
said asked '"key_bits":0,"value_bits":3,.*"score":"s3".*"gate":true'
within() { # within NAME BYTES: what a session of the trained length keeps
    "$still" inspect "$scratch/$1" --json | python3 -c "
import json, sys
cache = json.load(sys.stdin)['memory_method']['cache']
sys.exit(not $2 * 0.6 < cache <= $2)" || fail "$1: a session does not take about $2 bytes"
}
within large 1000000
within less 400000
within small 150000

finish
