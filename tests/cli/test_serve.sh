#!/bin/bash
# still serve on a small random model: serve_client.py asks, this starts and ends servers.
# $2 is tools/make-model.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
make_model=$2
tiny=$scratch/tiny.gguf
"$make_model" tiny "$tiny" >/dev/null 2>&1 || { echo "make-model failed" >&2; exit 1; }

# start OPTION...: a server whose process is $server and whose port is $port.
start() {
    : >"$scratch/out"
    "$still" serve "$tiny" --port 0 --json --threads 1 "$@" >"$scratch/out" 2>"$scratch/said" &
    server=$!
    for _ in $(seq 200); do
        [ -s "$scratch/out" ] && break
        kill -0 $server 2>/dev/null || { fail "serve $*: $(cat "$scratch/said")"; return 1; }
        sleep 0.1
    done
    port=$(sed -n 's/.*"port":\([0-9]*\).*/\1/p' "$scratch/out")
    [ -n "$port" ] || fail "no port in: $(cat "$scratch/out")"
}
# stop: Ctrl-C ends it with 130 and no word.
stop() {
    kill -INT $server
    wait $server
    [ $? = 130 ] || fail "the server ended with another status than 130"
    [ ! -s "$scratch/said" ] || fail "the server said: $(cat "$scratch/said")"
}
client() {
    timeout 120 python3 "$here/serve_client.py" "$port" "$@" || fail "client: $*"
}
# `still logprobs` says what the server must say.
ids='[5, 9, 300, 17, 42, 7, 7, 100, 3]'
echo "$ids" >"$scratch/ids.json"
"$still" logprobs "$tiny" --ids "$scratch/ids.json" --json >"$scratch/logprobs.json" ||
    fail "logprobs"

start
client endpoints
client scores "$scratch/ids.json" "$scratch/logprobs.json"
client generate
client shared
client hostile
client together
stop

# Methods that fold the past: sharing beginnings changes nothing either.
for method in "still --chunk 8 --no-allocate" "lolcats --chunk 8" swa liger; do
    # shellcheck disable=SC2086
    start --method $method
    client shared
    stop
done
start --method still --chunk 8 --no-allocate --rollback 0
client shared
stop

# A short context: what does not fit is refused, what is written ends at the limit.
start --ctx 16
client limit
stop

# Keys.
printf 'sesame-1234\n' >"$scratch/key"
start --api-key-file "$scratch/key"
client key sesame-1234
stop
expect 1 'No such file' "$still" serve "$tiny" --port 0 --api-key-file "$scratch/none"
: >"$scratch/empty"
expect 1 'holds no API key' "$still" serve "$tiny" --port 0 --api-key-file "$scratch/empty"
printf 'two words\n' >"$scratch/bad"
expect 1 'without spaces' "$still" serve "$tiny" --port 0 --api-key-file "$scratch/bad"

# Addresses.
start --host 0.0.0.0
client endpoints
kill -INT $server
wait $server
grep -q 'warning: anybody who reaches 0.0.0.0' "$scratch/said" || fail "no warning for 0.0.0.0"
start
expect 1 'Address already in use' "$still" serve "$tiny" --port "$port"
stop
expect 1 'cannot listen on host' "$still" serve "$tiny" --host no.such.host.invalid --port 0
expect 2 '' "$still" serve "$tiny" --port 70000

# Ctrl-C while a request is worked on: it is finished. A client that leaves in the middle
# of a long one frees the model at once.
start
client leave
client finish $server
wait $server
[ $? = 130 ] || fail "Ctrl-C during a request: another status than 130"
finish
