#!/usr/bin/env bash
# Shows the skips of a run of tests, and fails on those that nobody expects.
#
#   skips.sh LOG EXPECTED     lines "NAME: REASON" of expect.sh; tests/expected-skips
#
# With OFFLINE=1 the lines of EXPECTED that say offline count, too.
set -euo pipefail
failed=false
while read -r line; do
    word=unexpected
    while read -r when what; do
        [ "$when" = any ] || [ "$when${OFFLINE:+1}" = offline1 ] || continue
        # shellcheck disable=SC2053 # a pattern
        if [[ $line == $what ]]; then word=expected; fi
    done < <(grep -v '^#' "$2")
    echo "skipped ($word): $line"
    [ $word = expected ] || failed=true
done < <(sort -u "$1")
if $failed; then
    echo "tests were skipped that $2 does not have" >&2
    exit 1
fi
