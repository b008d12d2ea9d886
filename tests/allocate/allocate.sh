#!/usr/bin/env bash
# The real model: its strongest heads are found, the budget holds, and the caps it prints
# are taken by the other commands.
set -euo pipefail
still=$1
picture=$(mktemp)
cache=$(mktemp -d)
trap 'rm -rf "$picture" "$cache"' EXIT
out=$("$still" allocate smollm2 --probes 2 --budget 18.06MB --json --svg "$picture" 2>/dev/null)
python3 - "$out" "$picture" <<'P'
import json, sys
a = json.loads(sys.argv[1])
assert a["bytes"] <= 18.06e6 and a["bytes"] > 17.5e6, a["bytes"]
few = min(a["caps"])
heads = {(i // a["heads"], i % a["heads"]) for i, c in enumerate(a["caps"]) if c > few}
assert len(heads) == a["chosen"] and sum(c == max(a["caps"]) for c in a["caps"]) >= 1 and {(18, 2), (17, 1), (21, 2)} <= heads, heads
# The picture frames these, with the tokens that each keeps.
drawn = open(sys.argv[2]).read()
assert drawn.count('class="f0 framed"') == a["chosen"], drawn
assert all(f">{c}</text>" in drawn for c in set(a["caps"]) - {few}), drawn
P
cap=$(python3 -c 'import json, sys; print(json.loads(sys.argv[1])["cap"])' "$out")
"$still" inspect smollm2 --method still --select 128 --score distinct --cap "$cap" --ctx 8192 |
    grep -q attention
# Options of the method without --method: of still, which is what is allocated.
said=$("$still" allocate smollm2 --probes 2 --budget 18.06MB --state linear 2>&1)
grep -q -e '--method still .*--cap [0-9]*,' <<<"$said"
! grep -q 'no effect' <<<"$said"
# They change what a model without an adapter gets, and nothing else of it.
usual=$("$still" allocate smollm2 --probes 2 --budget 18.06MB 2>/dev/null)
test "$usual" = "$("$still" allocate smollm2 --probes 2 --budget 18.06MB --method still 2>/dev/null)"
said=$("$still" allocate smollm2 --probes 2 --budget 140MB --layers 10-19 2>/dev/null)
grep -q -e '--score distinct .*--state none .*--layers 10-19 --cache-type-k q8' <<<"$said"
grep -q '^[0-9]* of 30 kv heads' <<<"$said"
! grep -q '^| [02-9] \|^| 2[0-9] ' <<<"$said"
# Methods that keep no tokens by head have no caps.
for other in "--method swa" "--method liger" "--method softmax" "--select 0" "--heads per-head"; do
    # shellcheck disable=SC2086
    ! "$still" allocate smollm2 --probes 2 --budget 18.06MB $other 2>err.txt
    grep -q 'caps are chosen for\|no caps to choose' err.txt
done
! "$still" allocate smollm2 --probes 2 --budget 18.06MB --layers 40-41 2>err.txt
grep -q 'layers 40-41 cannot be converted' err.txt
# An adapter's state is part of it: no session would take caps without one.
! "$still" allocate smollm2-still --probes 2 --state none 2>err.txt
grep -q 'trained with other heads, state' err.txt
! "$still" allocate smollm2 --budget 500KB --probes 1 2>err.txt
grep -q 'too small' err.txt
rm -f err.txt

# What its 24 probes say of smollm2 is in a fixture: the budget of the adapter that ships
# gives that adapter's caps, and so does leaving the budget to the adapter.
here=$(dirname "$0")/..
models=${XDG_CACHE_HOME:-$HOME/.cache}/still/models
mkdir -p "$cache/still/heads"
ln -s "$models" "$cache/still/models"
cp "$here/fixtures/allocate/smollm2-heads.json" "$cache/still/heads/02b5a74088da8986-24-0.json"
shipped=$(python3 -c 'import json, sys; m = json.load(open(sys.argv[1]))["method"]
print("{},{}".format(m["cap"], m["caps"]))' "$here/../models/smollm2-still/still.json")
for budget in "" "--budget 18MB"; do
    # shellcheck disable=SC2086
    said=$(XDG_CACHE_HOME=$cache timeout 60 "$still" allocate smollm2-still $budget 2>/dev/null)
    grep -q -e "--cap $shipped " <<<"$said"
done
