#!/bin/bash
# recipes/run and recipes/report: what they would run, a small run from training to its
# tables, and tables of the made-up logs in fixtures/recipes. $2 is tools/make-model.
# shellcheck disable=SC2016 # backquotes of Markdown
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
make_model=$2
recipes=$here/../../recipes
fixtures=$here/../fixtures

# run WANTED-STATUS PATTERN ARGUMENTS...
run() {
    local want=$1 pattern=$2 got=0
    shift 2
    timeout 120 "$recipes/run" "$@" >"$scratch/out" 2>"$scratch/err" </dev/null || got=$?
    [ "$got" = "$want" ] || fail "status $got, not $want: run $* ($(tail -n 3 "$scratch/err"))"
    cat "$scratch/out" "$scratch/err" | grep -q -e "$pattern" ||
        fail "no '$pattern' in the output of: run $* ($(tail -n 3 "$scratch/err"))"
}
has() { grep -qxF -e "$1" "$scratch/out" || fail "no line '$1' in the output"; }
lines() { [ "$(wc -l <"$scratch/out")" = "$1" ] || fail "$(wc -l <"$scratch/out") lines, not $1"; }

# The commands, without a model or data.
run 0 '^softmax  *main ' --list
run 0 '' still --dry-run --data nowhere --scale 0.5
has 'still linearize smollm2 --backend cuda --method still --chunk 128 --select 32 --cap 256 --data DATA/gutenberg_books.jsonl.gz --tokens 10000000 --seq 4096 --batch 8 --micro 8 --kd 2 --out runs/still/model'
has 'still perplexity runs/still/model runs/wikitext-23.jsonl --backend cuda --ctx 8192 --json'
has 'still eval runs/still/model --backend cuda --tasks niah_single_1 --lengths 512,1K,2K,4K --limit 100 --data DATA --log runs/still/items.jsonl --json'
run 0 '--tasks niah_single_1 .*--limit 200 ' still --dry-run --data nowhere --scale 0.1 --questions 1
run 0 '' softmax --dry-run --data nowhere --only ppl
lines 4
has 'still perplexity smollm2 --method softmax DATA/wikitext2_raw_test.jsonl --backend cuda --ctx 1024 --json'
run 0 '' lever-curriculum --dry-run --data nowhere --only train
lines 4
grep -q -e '--stage 2 .* --start runs/lever-curriculum/model-3 --out runs/lever-curriculum/model$' \
    "$scratch/out" || fail "the last of four trainings does not start from the third"
run 0 '' saliency --dry-run --data nowhere
lines 1
has 'still saliency smollm2 --method still --chunk 128 --select 32 --cap 256 DATA/wikitext2_raw_test.jsonl --backend cpu --ctx 4096 --json'
run 0 'still-1024' all --dry-run --data nowhere

# What is wrong is said in a line.
run 1 "no recipe 'stil'" stil
run 1 "'nile' is not of" still --only nile
run 1 'not a number' still --scale much
run 1 'not a folder' still --data "$scratch/nowhere" --still "$still"
run 1 'is not there' still --data "$scratch" --still "$scratch/still"
run 2 'recipes/run NAME' --wrong
printf 'like = still\ncolour = red\n' >"$scratch/odd.recipe"
run 1 "'colour' is not a key" "$scratch/odd.recipe" --dry-run

# From training to logs.
"$make_model" tiny "$scratch/tiny.gguf" >/dev/null 2>&1 || { echo "make-model failed" >&2; exit 1; }
data=$scratch/data
cp -r "$fixtures/eval/choice" "$data"
cp "$fixtures/eval/ingredients/gutenberg_books.jsonl" "$data"
for i in 1 2 3; do
    printf '{"text":"%s"}\n' "$(printf "It was the best of times, text $i. %.0s" $(seq 30))"
done >"$data/wikitext2_raw_test.jsonl"
# A text that a recipe names packed may lie there as it is: pull-data does not pack.
run 0 '--data DATA/gutenberg_books.jsonl --tokens' still --dry-run --data "$data"
cat >"$scratch/small.recipe" <<'RECIPE'
like      = still
attention = --method still --chunk 16 --select 4 --cap 32
data      = gutenberg_books.jsonl
tokens    = 128
train     = --stage 1 --seq 64 --batch 1 --held-out 0
train     = --stage 2 --seq 64 --batch 1 --held-out 0
evals     = ppl:64 tasks mmlu saliency:64
RECIPE
small=("$scratch/small.recipe" --backend cpu --data "$data" --out "$scratch/runs"
    --model "$scratch/tiny.gguf" --still "$still")
run 1 'there is no model yet' "${small[@]}" --only ppl
run 0 'small: train$' "${small[@]}" --only train
run 0 'small: tasks mmlu$' "${small[@]}"
run 0 'small: train is complete' "${small[@]}"
run 0 'small: tasks is complete' "${small[@]}"
rm "$scratch/runs/small/tasks.json"
run 0 'small: tasks$' "${small[@]}" --only tasks
run 1 'trained with other settings' "${small[@]}" --scale 2
python3 - "$scratch/runs/small" <<'PYTHON' || fail "the logs of a small run are not as they should be"
import json, sys
log = lambda step: json.load(open(f"{sys.argv[1]}/{step}.json"))
assert log("train-1")["result"][0]["stage"] == 1 and log("train")["result"][0]["stage"] == 2
assert log("train")["result"][0]["tokens"] == 128
assert log("ppl-64")["result"]["perplexity"] > 1
assert log("saliency")["result"]["tokens"] == 64
tasks = log("tasks")
assert tasks["result"]["results"]["piqa"]["resumed"] == 4  # items.jsonl had them
mmlu = log("mmlu")  # of the same process
assert list(mmlu["result"]["results"]) == ["mmlu"] and "--tasks mmlu " in mmlu["command"]
assert len(tasks["result"]["results"]) == 5
assert tasks["run"] == "small" and tasks["scale"] == 1 and tasks["commit"]
assert sys.argv[1] not in json.dumps(tasks), "a folder of this machine"
PYTHON

# Tables: verdicts, counts, missing cells, the paper beside them.
"$recipes/report" "$fixtures/recipes" >"$scratch/out" || fail "report: status $?"
has '| mean of PIQA, ARC-e, ARC-c (n), HellaSwag (n), WinoGrande | >= 0.99 | 1.000 reached | 1.000 `still` |'
has '| WikiText-2 perplexity at 4K | <= 1.06 | 1.100 not reached | 1.050 `lever-kd-0` |'
has '| WikiText-2 perplexity at 8K | <= 1.10 | - | - |' # not the same text
has '| S-NIAH-2 at 2K | >= 0.70 | 0.750 reached, but only 50 questions | 0.750 `still` |'
has '| `still`: STILL, budget 512 | 20M+20M | 61 | 50 | 29 | 40 | 50 | - | 46 |'
has '| `still`: STILL, budget 512 | 20M+20M | 25.2 | - | 22 | 20 (9000) |'
has '- `still` is ahead of `lolcats` in 2 of 3 cells, level in 1 (by more than two standard errors: ahead 2, behind 0); in the paper ahead 9, level 3, behind 0.'
has '- `still` is ahead of `softmax` in 0 of 2 cells, behind in 2 (by more than two standard errors: ahead 0, behind 1).'
has '| STILL 256~512 | 100 | 99.6 | 89 | 86.2 | 100 | 92.6 | 73.8 | 37.4 | 100 | 67.6 | 21.6 | 12.2 |'
has '| `saliency`: teacher, score s3 | - | 70 | 80 | 41.7 | - | 44.2 |' # no correlation
grep -q '`still` is ahead of `lolcats` in 2 of 3 long-context cells .* not reached' "$scratch/out" ||
    fail "no verdict on lolcats"
"$recipes/report" "$scratch/data" >/dev/null 2>"$scratch/err" && fail "a report of no run"
grep -q 'holds no run' "$scratch/err" || fail "report of no run: $(cat "$scratch/err")"
finish
