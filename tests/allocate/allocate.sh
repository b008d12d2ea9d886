#!/usr/bin/env bash
# The real model: its strongest heads are found, the budget holds, and the caps it prints
# are taken by the other commands.
set -euo pipefail
still=$1
picture=$(mktemp)
trap 'rm -f "$picture"' EXIT
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
! "$still" allocate smollm2 --probes 2 --budget 18.06MB --layers 40-41 2>err.txt
grep -q 'layers 40-41 cannot be converted' err.txt
! "$still" allocate smollm2 --budget 500KB --probes 1 2>err.txt
grep -q 'too small' err.txt
rm -f err.txt
