#!/usr/bin/env bash
# tests/expect.sh itself: what it makes of output and exit status; and tests/skips.sh, what
# it makes of skips.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
expect=$here/expect.sh
log=$(mktemp) list=$(mktemp)
trap 'rm -f "$log" "$list"' EXIT

ends() { # ends STATUS ARGUMENT ...: expect.sh with the arguments ends so
    local want=$1 got=0
    shift
    STILL_SKIPS=$log bash "$expect" t "$@" >/dev/null 2>&1 || got=$?
    [ "$got" -eq "$want" ] || { echo "$*: $got, expected $want" >&2 && exit 1; }
}

ends 0 true
ends 1 false
ends 3 sh -c 'exit 3'
ends 139 sh -c 'kill -SEGV $$'
ends 1 --fails true
ends 0 --fails false
ends 1 --fails ./no-such-program
ends 0 --says 'Par.s' echo Paris
ends 1 --says Paris echo London
ends 1 --says Paris sh -c 'echo Paris; exit 1' # the status counts, too
ends 0 --fails --says Paris sh -c 'echo Paris >&2; exit 1'
ends 1 --fails --says Paris sh -c 'echo London; exit 1'
[ ! -s "$log" ]

# Skips: of a script, of cmocka; one without a reason, one beside a failure.
ends 77 sh -c 'echo "skipped: no moon"; exit 77'
ends 1 sh -c 'exit 77'
cmocka='[  SKIPPED ] test_a
[  SKIPPED ] 1 test(s), listed below:
[  SKIPPED ] test_a'
ends 77 printf 'skipped: no sun\n%s\n' "$cmocka"
ends 1 echo "$cmocka"
ends 1 printf 'skipped: no sun\n[  SKIPPED ] test_b\n%s\n' "$cmocka"
ends 2 sh -c 'echo "skipped: no sun"; echo "[  SKIPPED ] test_a"; exit 2'
[ "$(<"$log")" = "t: no moon
t: no sun" ] || { cat "$log" >&2 && exit 1; }
echo "expect.sh does"

allowed() { # allowed STATUS: what skips.sh makes of the log and the list
    local got=0
    bash "$here/skips.sh" "$log" "$list" >/dev/null 2>&1 || got=$?
    [ "$got" -eq "$1" ] || { echo "skips.sh: $got, expected $1, with $(<"$list")" >&2 && exit 1; }
}
unset OFFLINE
printf '# a list\nany t: no moon\noffline t: no s*\n' >"$list"
allowed 1
OFFLINE=1 allowed 0
printf 'any *: no moon\nany u: no sun\n' >"$list"
allowed 1
printf 'any t: no *\n' >"$list"
allowed 0
: >"$log"
: >"$list"
allowed 0
echo "skips.sh does"
