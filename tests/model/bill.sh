#!/usr/bin/env bash
# bill.sh STILL: the memory `still inspect` states for the default model is within 3% of
# the peak resident size of a run, at two contexts and under two methods.
set -euo pipefail
still=$1
for ctx in 512 8192; do
    for method in softmax "still --no-allocate" still; do
        stated=$("$still" inspect smollm2 --ctx $ctx --method $method --json)
        run=$("$still" generate smollm2 -p Hello -n 8 --ctx $ctx --method $method --json)
        python3 - "$stated" "$run" <<'EOP'
import json, sys
bill, run = map(json.loads, sys.argv[1:])
total = bill.get("memory_method", bill["memory"])["total"]
peak = run["peak_rss_bytes"]
print(f"stated {total / 1e6:.1f} MB, peak {peak / 1e6:.1f} MB, {100 * (total / peak - 1):+.1f}%")
sys.exit(abs(total / peak - 1) > 0.03)
EOP
    done
done
