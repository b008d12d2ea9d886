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
    for _ in $(seq 1200); do
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
    timeout 600 python3 "$here/serve_client.py" "$port" "$@" || fail "client: $*"
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
client streams
client sampling
client hostile
client headers
client page
client together
stop

# Conversations: a template that the tokenizer's special tokens are in.
start --chat-template chatml
client chat
client injection
client refusals
client form
client malformed 1000
stop

# What a model kept of a conversation.
start --chat-template chatml --method still --chunk 8 --select 4 --cap 16 --no-allocate
client kept
stop

# What a template is given: this one refuses everything, and says what it saw.
cat >"$scratch/tell.jinja" <<'JINJA'
{{ raise_exception('tools=' ~ (tools | default([]) | length) ~ ' greeting=' ~ greeting ~ ' kw=' ~ (kw | default('none')) ~ (' call=' ~ messages[1].tool_calls[0].function.arguments.a if messages | length > 1 else '')) }}
JINJA
start --chat-template "$scratch/tell.jinja" --template-arg greeting=hi
client template
stop

# Calls that a request demands, in the forms that templates have.
head='{% for m in messages %}{{ "<|im_start|>" ~ m.role ~ "\n" ~ m.content }}'
tail='{{ "<|im_end|>\n" }}{% endfor %}{% if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}'
loop='{% if m.tool_calls %}{% for c in m.tool_calls %}'
call='"name": "{{ c.function.name }}"'
arguments='{{ c.function.arguments | tojson }}'
end='{% endfor %}{% endif %}'
declare -A forms=(
    [hermes]="$loop<tool_call>
{$call, \"arguments\": $arguments}
</tool_call>$end"
    [list]="{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{$call, \"arguments\": $arguments}{% endfor %}]{% endif %}"
    [named]="$loop[TOOL_CALLS]{{ c.function.name }}[ARGS]$arguments$end"
    [bare]="$loop{$call, \"parameters\": $arguments}$end"
    [told]="") # no place for tools: messages tell of them
for form in "${!forms[@]}"; do
    printf '%s' "$head${forms[$form]}$tail" >"$scratch/$form.jinja"
    start --chat-template "$scratch/$form.jinja"
    client demand "$form"
    stop
done
printf '%s' "$head${loop}call {{ c.function.name }}$end$tail" >"$scratch/unread.jinja"
start --chat-template "$scratch/unread.jinja"
client unread
stop

# Who is one too many is told so; who leaves makes room.
start --parallel 1 --queue 1 --ctx 100000
client full
stop
start --parallel 3 --ctx 100000
client slow
stop

# Web pages of other origins; the log has who asked, not what.
start --cors https://a.example --cors http://localhost:3000 --log "$scratch/log" --max-tokens 3
client cors https://a.example
client cors http://localhost:3000
timeout 600 python3 - "$port" <<'PYTHON' || fail "--max-tokens"
import json, sys, urllib.request
r = urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/v1/completions",
                           b'{"prompt": "the secret word", "max_tokens": 50, "ignore_eos": true}')
sys.exit(json.load(r)["usage"]["completion_tokens"] != 3)
PYTHON
stop
grep -q 'secret' "$scratch/log" && fail "the log has a prompt"
python3 - "$scratch/log" <<'PYTHON' || fail "log: $(cat "$scratch/log")"
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
last = lines[-1]
sys.exit(not (last["status"] == 200 and last["path"] == "/v1/completions" and
              last["client"] == "127.0.0.1" and last["completion_tokens"] == 3 and
              last["finish"] == "length" and last["complete"] and
              {l["status"] for l in lines} == {200, 204, 400, 403}))
PYTHON
expect 2 'takes an origin' "$still" serve "$tiny" --port 0 --cors example.org

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
printf '# mine\nsesame-1234\n\nother-5678\n' >"$scratch/key"
start --api-key-file "$scratch/key"
client key sesame-1234 other-5678
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
start --ctx 100000
client drain $server
wait $server
[ $? = 130 ] || fail "SIGTERM during a request: another status than 130"
for signals in 1 2; do
    start --ctx 100000 --parallel 2 --drain $([ $signals = 1 ] && echo 1 || echo 3600)
    client overdue $server $signals
    wait $server
    [ $? = 130 ] || fail "$signals SIGTERM with --drain: another status than 130"
done

# Figures of the folder where pasts are kept.
start --cache-dir "$scratch/pasts"
curl -sS "http://127.0.0.1:$port/metrics" | grep "^still_prefix_disk_entries 0\$" >/dev/null ||
    fail "no figures of --cache-dir"
stop

# The lines of the documentation.
start --chat-template chatml
client docs "$here/../../docs/serve.md"
stop
finish
