#!/usr/bin/env bash
# Runs a test and tells ctest how it ended: 0 passed, 77 skipped, other numbers failed.
#
#   expect.sh NAME [--fails] [--says REGEX] COMMAND [ARGUMENT ...]
#
#   --fails   COMMAND must start and end with a status other than 0
#   --says    a line of its output must match, whatever its status
#
# A test is skipped by skip_because() of tests/skip.h, or by a script that prints
# "skipped: REASON" and exits with 77. cmocka counts a skip as a success, so it is found
# in the output; one that gives no reason is a failure. The reasons go to the file
# $STILL_SKIPS, one "NAME: REASON" each, which scripts/test compares with
# tests/expected-skips.
set -uo pipefail
name=$1 fails=false says=
shift
while [[ ${1:-} == --* ]]; do
    case $1 in
    --fails) fails=true && shift ;;
    --says) says=$2 && shift 2 ;;
    *) echo "expect.sh: what is $1?" >&2 && exit 2 ;;
    esac
done

log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT
"$@" 2>&1 | tee "$log"
status=${PIPESTATUS[0]}

# Distinct tests that cmocka skipped, and the lines that say why.
skipped=$(grep -a '^\[  SKIPPED \] ' "$log" | grep -v 'test(s)' | sort -u | wc -l)
reasons=$(grep -a '^skipped: ..' "$log" | sed 's/^skipped: //')

if [ "$status" -eq 77 ] && [ -z "$reasons" ] ||
    [ "$skipped" -gt "$(grep -c . <<<"$reasons")" ]; then
    echo "expect.sh: $name skips a test and does not say why" >&2
    exit 1
fi
if [ "$status" -eq 126 ] || [ "$status" -eq 127 ]; then
    echo "expect.sh: $1 does not start" >&2
    exit 1
fi
if $fails; then
    if [ "$status" -eq 0 ]; then
        echo "expect.sh: $1 ended with 0, and should have failed" >&2
        exit 1
    fi
elif [ "$status" -ne 0 ] && [ "$status" -ne 77 ]; then
    echo "expect.sh: $1 ended with $status" >&2
    exit "$status"
fi
if [ -n "$reasons" ]; then
    sort -u <<<"$reasons" | sed "s/^/$name: /" >>"${STILL_SKIPS:-/dev/null}"
    exit 77
fi
if [ -n "$says" ] && ! grep -aqE -- "$says" "$log"; then
    echo "expect.sh: no line of the output matches '$says'" >&2
    exit 1
fi
