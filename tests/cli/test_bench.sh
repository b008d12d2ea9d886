#!/bin/bash
# still bench on a small random model, from a file and as a shape. $2 is tools/make-model.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
make_model=$2
tiny=$scratch/tiny.gguf
"$make_model" tiny "$tiny" >/dev/null 2>&1 || { echo "make-model failed" >&2; exit 1; }
bench() { local want=$1 pattern=$2; shift 2; expect "$want" "$pattern" \
    "$still" bench "$@"; }
quick=(--lengths "64,130" --rounds 2 --steps 3 --threads 2 --no-allocate)

# Wrong usage.
while IFS='|' read -r status pattern arguments; do
    [ -n "$status" ] || continue
    eval "set -- $arguments"
    bench "$status" "$pattern" "$@"
done <<CASES
2|needs prefill, decode or train|
2|'frob' is none of: prefill decode train|frob
2|one argument too many|prefill a b
2|MODEL and --shape exclude each other|prefill x --shape tiny
2|'llama9' is none of:.* llama3.1-8b |prefill --shape llama9
2|is not a list such as|prefill --shape tiny --lengths 1x
2|is not a list such as|prefill --shape tiny --lengths 99999999
2|0 is too short|decode --shape tiny --lengths 0
2|the list is empty|decode --shape tiny --lengths ''
2|'mamba' is not a method|decode --shape tiny --against softmax,mamba
2|outside 1..64|decode --shape tiny --rounds 0
2|nothing to time|train --shape tiny --against softmax
2|--micro 4 is more than the batch of 2|train --shape tiny --batch 2 --micro 4
1|no such file or folder|prefill nonsense
1|/no/such/folder/x.csv|decode --shape tiny --lengths 64 --rounds 1 --steps 1 --method softmax --against '' --csv /no/such/folder/x.csv --quiet --json
CASES

# Prefill: three methods side by side, as a table and as JSON.
bench 0 '^| tokens | softmax s | lolcats s | still s | softmax tokens/s |' \
    prefill "$tiny" "${quick[@]}"
[ "$(grep -c '^| \(64\|130\) |' "$scratch/out")" = 2 ] || fail "not two rows"
bench 0 '' prefill --shape tiny "${quick[@]}" --json
json '([(p["length"], p["method"]) for p in x["points"]] ==
       [(n, m) for n in (64, 130) for m in ("softmax", "lolcats", "still")])'
json 'all(p["fits"] and p["seconds"] > 0 and p["peak_bytes"] > 1e6 and
          abs(p["tokens_per_s"] * p["seconds"] / p["length"] - 1) < 1e-6
          for p in x["points"])'
json 'x["what"] == "prefill" and x["model"] == "tiny" and x["batch"] == 1'
bench 0 '^| tokens | swa s | lolcats s | swa tok' \
    prefill "$tiny" "${quick[@]}" --method lolcats --against swa,lolcats --batch-rows 17

# Decode: what does not fit is said, and the rest is measured.
bench 0 '' decode --shape tiny --lengths 64,16000K --rounds 1 --steps 3 --batch 64 \
    --against softmax --method swa --chunk 4 --json --csv "$scratch/d.csv" --svg "$scratch/d.svg"
json '[p["fits"] for p in x["points"]] == [True, True, False, True]'
json 'x["points"][2]["reason"] and "seconds" not in x["points"][2]'
json 'x["points"][0]["state_bytes"] > 0 and x["points"][1]["boundary"] > 0'
[ "$(grep -c ',"does not fit"$' "$scratch/d.csv")" = 1 ] || fail "CSV: $(cat "$scratch/d.csv")"
[ "$(wc -l <"$scratch/d.csv")" = 5 ] || fail "CSV has not five lines"
python3 - "$scratch/d.svg" <<'PYTHON' || fail "the chart is not what it should be"
import sys
import xml.etree.ElementTree as tree
svg = tree.parse(sys.argv[1]).getroot()
text = [t.text for t in svg.iter() if t.tag.endswith("text")]
marks = [m for m in svg.iter() if "mark" in m.get("class", "").split()]
bars = [m for m in svg.iter() if "bar" in m.get("class", "").split()]
# Two in the legend; three points in each of two panels; one round has no spread.
sys.exit(not ("swa" in text and "does not fit" in text and "64" in text and
              len(marks) == 2 + 6 and not bars))
PYTHON
# Several rounds: error bars, of the time alone.
bench 0 '' prefill --shape tiny "${quick[@]}" --json --plot "$scratch/p.svg"
cp "$scratch/out" "$scratch/p.json"
python3 - "$scratch/p.svg" "$scratch/p.json" <<'PYTHON' || fail "error bars: $(cat "$scratch/out")"
import json, sys
import xml.etree.ElementTree as tree
bars = [m for m in tree.parse(sys.argv[1]).getroot().iter() if "bar" in m.get("class", "").split()]
points = json.load(open(sys.argv[2], encoding="utf-8"))["points"]
spread = [p for p in points if p["rounds"][0] < p["rounds"][1]]
sys.exit(not (len(points) == 6 and len(bars) == len(spread) and
              all(p["rounds"][0] <= p["seconds"] <= p["rounds"][1] for p in points)))
PYTHON
bench 0 'does not fit' decode --shape tiny --lengths 16000K --rounds 1 --steps 1 \
    --batch 64 --method softmax --against ''
# Every method has a mark or a colour of its own; a small model's memory is in MiB.
bench 0 '^| 64 |' decode "$tiny" "${quick[@]}" --against softmax,lolcats,hedgehog,t2r,swa,liger,supra \
    --svg "$scratch/m.svg"
python3 - "$scratch/m.svg" <<'PYTHON' || fail "methods look alike in the chart"
import sys
import xml.etree.ElementTree as tree
svg = list(tree.parse(sys.argv[1]).getroot().iter())
marks = [m for m in svg if "mark" in m.get("class", "").split()]
text = [t.text for t in svg if t.tag.endswith("text")]
looks = {(m.get("class"), m.get("d").split("m", 1)[1]) for m in marks}
sys.exit(not (len(looks) == 8 and "most memory the process held, MiB" in text))
PYTHON

# Training: both stages.
bench 0 '' train --shape tiny --lengths 32,64 --rounds 1 --batch 2 --micro 2 --json
json '[(p["length"], p["stage"]) for p in x["points"]] == [(32, 1), (32, 2), (64, 1), (64, 2)]'

# A model that linearize made runs its own method, and no other.
for i in $(seq 40); do echo "{\"text\": \"line $i of some training text\"}"; done >"$scratch/data.jsonl"
expect 0 '' "$still" linearize "$tiny" --data "$scratch/data.jsonl" --out "$scratch/mine" \
    --stage both -n 64 --seq 32 --batch 1 --held-out 0
bench 0 '^| tokens | still s | still tokens/s | still memory |$' prefill "$scratch/mine" "${quick[@]}"
bench 1 'trained for method still, not lolcats' decode "$scratch/mine" "${quick[@]}" --against lolcats --quiet --json

# Ctrl-C: what has been measured is shown, the status says why it is less.
"$still" bench decode --shape tiny --lengths 64,128,256 --rounds 64 --steps 60000 --against '' \
    --method softmax --json >"$scratch/out" 2>"$scratch/err" & job=$!
sleep 1
kill -INT $job; wait $job
[ $? = 130 ] || fail "an interrupted run did not end with 130"
json 'x["interrupted"] is True and x["points"] == []'
finish
