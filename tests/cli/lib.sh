# shellcheck shell=bash disable=SC2034
# lib.sh - what the shell tests of the command line share. Sourced with the path of the
# still binary as $1; gives a scratch folder, an empty cache and the checks below.
set -u
still=$1
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
export XDG_CACHE_HOME=$scratch/cache XDG_CONFIG_HOME=$scratch/config LC_ALL=C
unset HF_TOKEN HF_ENDPOINT HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_TOKEN_PATH \
    HUGGINGFACE_HUB_CACHE HUGGING_FACE_HUB_TOKEN
trap 'rm -rf "$scratch"' EXIT
failures=0 finished=

# A check that fails behind `finish` ends the test: nothing else would count it.
fail() {
    printf 'FAILED: %s\n' "$*" >&2
    failures=$((failures + 1))
    [ -z "$finished" ] || exit 1
}

# expect STATUS PATTERN COMMAND...: the exit status, and a basic regular expression that
# one line of output (stdout and stderr together) must match; '' for anything.
expect() {
    local want=$1 pattern=$2 got=0
    shift 2
    timeout 600 "$@" >"$scratch/out" 2>"$scratch/err" </dev/null || got=$?
    [ "$got" = "$want" ] || fail "status $got, not $want: $* ($(head -c 300 "$scratch/err"))"
    cat "$scratch/out" "$scratch/err" | grep -q -e "$pattern" ||
        fail "no '$pattern' in the output of: $* ($(head -c 300 "$scratch/err"))"
    # An error is one line on standard error that begins with the program's name.
    if [ "$want" = 1 ] || [ "$want" = 2 ]; then
        grep -v '^still: warning: ' "$scratch/err" >"$scratch/lines"
        if [ "$(wc -l <"$scratch/lines")" != 1 ] || ! grep -q '^still: ' "$scratch/lines"; then
            fail "not one line of error from: $* ($(head -c 300 "$scratch/err"))"
        fi
    fi
}

# json EXPRESSION: a Python expression over the last output, read as JSON into x.
json() {
    python3 - "$scratch/out" "$1" <<'PYTHON' || fail "not so: $1: $(head -c 600 "$scratch/out")"
import json, math, sys
x = json.loads(open(sys.argv[1], encoding="utf-8").read())
sys.exit(0 if eval(sys.argv[2]) else 1)
PYTHON
}

# serve MODE [FOLDER]: a hub on the loopback (hub_server.py) with an empty log; $url is its
# address.
serve() {
    stop_server
    : >"$scratch/log"
    rm -f "$scratch/port" "$scratch/hold"
    mkfifo "$scratch/hold"
    python3 "$here/hub_server.py" "$1" "$scratch/log" ${2:+"$2"} >"$scratch/port" \
        <"$scratch/hold" &
    server=$!
    exec 9>"$scratch/hold" # the server ends when this closes
    for _ in $(seq 600); do [ -s "$scratch/port" ] && break; sleep 0.05; done
    url=http://127.0.0.1:$(cat "$scratch/port")
}
stop_server() {
    [ -n "${server:-}" ] || return 0
    exec 9>&-
    wait "$server" 2>/dev/null
    server=
}
logged() { grep -q -e "$1" "$scratch/log" || fail "the hub saw no '$1'"; }
not_logged() { ! grep -q -e "$1" "$scratch/log" || fail "the hub saw '$1'"; }

finish() {
    [ "$failures" = 0 ] || { echo "$failures checks failed" >&2; exit 1; }
    echo "all checks passed"
    finished=1
}
