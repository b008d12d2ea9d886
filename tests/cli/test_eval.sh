#!/bin/bash
# still eval and still pull-data, on a small random model. $2 is tools/make-model.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
make_model=$2
tiny=$scratch/tiny.gguf other=$scratch/other.gguf
data=$here/../fixtures/eval/choice
"$make_model" tiny "$tiny" >/dev/null 2>&1 || { echo "make-model failed" >&2; exit 1; }
"$make_model" tiny "$other" --seed 2 >/dev/null 2>&1 || exit 1

# Results: every choice task, standard errors, one object for one model.
expect 0 '' "$still" eval "$tiny" --data "$data" --json \
    --tasks piqa,arc,hellaswag,winogrande,mmlu,lambada
json 'set(x["results"]) == {"piqa","arc_easy","arc_challenge","hellaswag","winogrande","mmlu","lambada"}'
json 'all(0 <= r["acc"] <= 1 and r["stderr"] >= 0 for r in x["results"].values())'
json 'x["results"]["piqa"]["n"] == 4 and x["results"]["mmlu"]["n"] == 3'
json 'all("acc_norm" in r for t, r in x["results"].items() if t != "lambada")'
json 'x["results"]["lambada"]["perplexity"] > 1'
json 'x["results"]["arc_easy"]["tokens"] < x["results"]["arc_easy"]["tokens_alone"]'
cp "$scratch/out" "$scratch/forked"
expect 0 '' "$still" eval "$tiny" --data "$data" --json --no-fork \
    --tasks piqa,arc,hellaswag,winogrande,mmlu,lambada
python3 - "$scratch/forked" "$scratch/out" <<'PYTHON' || fail "--no-fork gives other figures"
import json, sys
a, b = (json.load(open(f))["results"] for f in sys.argv[1:])
sys.exit(any(a[t].get(k) != b[t].get(k) for t in a for k in ("acc", "acc_norm", "perplexity")))
PYTHON

# Several models and methods, side by side.
expect 0 '^| piqa |' "$still" eval "$tiny" "$other" --data "$data" --tasks piqa
expect 0 '^| arc_easy | *| acc | 2 | .* | .* | .* |$' "$still" eval "$tiny" --data "$data" \
    --tasks arc_easy --limit 2 --method still --chunk 16 --no-allocate --against softmax,swa
expect 0 '' "$still" eval "$tiny" "$other" --data "$data" --tasks piqa --json
json 'len(x) == 2 and x[0]["model"] != x[1]["model"] and x[1]["results"]["piqa"]["n"] == 4'

# A log: records, and nothing is computed twice.
log=$scratch/log.jsonl
expect 0 '' "$still" eval "$tiny" --data "$data" --tasks piqa,lambada --limit 2 --log "$log"
[ "$(wc -l <"$log")" = 6 ] || fail "the log has $(wc -l <"$log") lines, not 6"
expect 0 '' "$still" eval "$tiny" --data "$data" --tasks piqa,lambada --log "$log" --json
json 'x["results"]["piqa"]["resumed"] == 2 and x["results"]["piqa"]["n"] == 4'
[ "$(wc -l <"$log")" = 9 ] || fail "the log has $(wc -l <"$log") lines, not 9"
head -c -20 "$log" >"$log.torn"
expect 0 '' "$still" eval "$tiny" --data "$data" --tasks piqa,lambada --log "$log.torn" --json
json 'x["results"]["lambada"]["resumed"] == 2'
cmp -s "$log" "$log.torn" || fail "a torn log does not end up whole"
expect 1 'is not a log' "$still" eval "$tiny" --data "$data" --tasks piqa --log "$tiny"

# Generated sets, frozen: the same questions without their ingredients.
expect 0 'the sets are in' "$still" eval "$tiny" --data "$here/../fixtures/eval/ingredients" \
    --tasks niah_single_1 --lengths 8K --samples 3 --freeze "$scratch/frozen"
[ "$(wc -l <"$scratch/frozen/niah_single_1-8192.jsonl")" = 5 ] || fail "a frozen set of 3 is 5 lines"
sed 's/grass/moss/' "$scratch/frozen/niah_single_1-8192.jsonl" >"$scratch/frozen/niah_single_1-4096.jsonl"
expect 1 'niah_single_1-4096' "$still" eval "$tiny" --data "$scratch/frozen" --tasks niah_single_1 \
    --lengths 4K --samples 3
expect 1 'nothing to freeze' "$still" eval "$tiny" --data "$data" --tasks piqa \
    --freeze "$scratch/frozen"

# Lengths and limits of single tasks, in one process: what they give alone.
expect 0 '' "$still" eval "$tiny" --data "$data" --json --tasks piqa=2,lambada,arc=3 --limit 1
json '{t: r["n"] for t, r in x["results"].items()} == {"piqa": 2, "lambada": 1, "arc_easy": 3, "arc_challenge": 3}'
expect 0 '' "$still" eval "$tiny" --data "$here/../fixtures/eval/ingredients" --json --threads 1 \
    --tasks niah_single_1@4K=2,niah_single_1 --lengths 5K --limit 1
json '{l: r["n"] for l, r in x["results"]["niah_single_1"]["lengths"].items()} == {"4096": 2, "5120": 1}'
for bad in piqa=0 piqa=x piqa= piqa@1K niah_single_1@ape =3; do
    expect 2 '--tasks: \|--lengths: ' "$still" eval "$tiny" --data "$data" --tasks "$bad"
done

# Usage and bad input.
expect 0 '^hellaswag' "$still" eval
expect 2 'no task' "$still" eval "$tiny" --tasks piqua --data "$data"
expect 2 'needs --tasks' "$still" eval "$tiny"
expect 2 'not a method' "$still" eval "$tiny" --tasks piqa --against quadratic
expect 2 'not a list' "$still" eval "$tiny" --tasks piqa --lengths 4X
expect 1 'piqa_valid.jsonl.*docs/evaluation.md' "$still" eval "$tiny" --tasks piqa --data "$scratch"
expect 1 'worked examples' "$still" eval "$tiny" --tasks piqa --shots 3 --data "$data"
expect 0 'longer than the context' "$still" eval "$tiny" --tasks hellaswag --data "$data" --ctx 16
mkdir "$scratch/bad"
echo '{"goal":"g"}' >"$scratch/bad/piqa_valid.jsonl"
expect 1 'piqa_valid.jsonl:1.*sol1' "$still" eval "$tiny" --tasks piqa --data "$scratch/bad"

# pull-data: from a folder and an archive, then without --data.
expect 1 'neither a data set nor a folder' "$still" pull-data "$scratch/nowhere"
expect 1 'none of the files' "$still" pull-data "$here"
expect 1 'not a.* tar archive' "$still" pull-data "$tiny"
expect 0 'niah_single_2 lacks' "$still" pull-data "$data"
expect 0 '^| piqa |' "$still" eval "$tiny" --tasks piqa
tar -czf "$scratch/data.tar.gz" -C "$here/../fixtures/eval" choice
expect 0 '' "$still" pull-data "$scratch/data.tar.gz" --out "$scratch/unpacked" --json
json 'x["files"] == 8 and "piqa" not in x["missing"] and "qa_squad" in x["missing"]'
cmp -s "$data/mmlu_test.jsonl.gz" "$scratch/unpacked/mmlu_test.jsonl.gz" || fail "unpacked differs"
expect 0 '^| mmlu |' "$still" eval "$tiny" --tasks mmlu --data "$scratch/unpacked"
head -c 900 "$scratch/data.tar.gz" >"$scratch/cut.tar.gz"
expect 1 'ends early\|not a whole' "$still" pull-data "$scratch/cut.tar.gz" --out "$scratch/cut"
[ -z "$(ls "$scratch/cut" | grep part)" ] || fail "pieces of a file are left"

# Ranks share the items; figures and log are those of one process.
if ! command -v mpirun >/dev/null; then
    echo "skipped: no mpirun for several ranks"
else
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
        OMPI_MCA_rmaps_base_oversubscribe=1 \
        PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe ASAN_OPTIONS=detect_leaks=0
    rm -f "$log"
    expect 0 '' "$still" eval "$tiny" --data "$data" --tasks piqa,arc --log "$log"
    cp "$scratch/out" "$scratch/alone"
    if timeout 600 mpirun -np 2 "$still" eval "$tiny" --data "$data" --tasks piqa,arc \
        --threads 1 --log "$log.mpi" >"$scratch/out" 2>"$scratch/err"; then
        cmp -s "$scratch/out" "$scratch/alone" || fail "two ranks give another table"
        cmp -s "$log" "$log.mpi" || fail "two ranks write another log"
    elif grep -q 'libstill-mpi.so, is neither' "$scratch/err"; then
        echo "skipped: built without MPI"
    else
        fail "mpirun: $(head -c 300 "$scratch/err")"
    fi
fi
finish
