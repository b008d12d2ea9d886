#!/bin/bash
# Options said once for all: the file, the environment, and that the command line goes before
# both. $2 is tools/make-model.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
make_model=$2
tiny=$scratch/tiny.gguf config=$XDG_CONFIG_HOME/still/config
"$make_model" tiny "$tiny" >/dev/null 2>&1 || { echo "make-model failed" >&2; exit 1; }
mkdir -p "$XDG_CONFIG_HOME/still"
write() { printf '%s\n' "$@" >"$config"; }
tokens() { # N COMMAND...: generates N tokens, as JSON
    local n=$1
    shift
    expect 0 '' "$@"
    json "len(x['tokens']) == $n"
}
go=("$still" generate -p hello --ignore-eos)

# The file, its sections, the environment, the command line; the default model.
write "model = $tiny" 'n-predict = 3' '' '# a comment' 'json = yes'
tokens 3 "${go[@]}"
tokens 3 "$still" generate "$tiny" hello --ignore-eos
write "model=$tiny" 'n-predict = 3' 'json=true' '[chat]' 'n-predict = 7' '[ generate ]' '  max-tokens =  4  '
tokens 4 "${go[@]}"
STILL_N_PREDICT=5 tokens 5 "${go[@]}"
STILL_N_PREDICT=5 tokens 6 "${go[@]}" -n 6
tokens 6 "${go[@]}" --max-tokens 6
STILL_MAX_TOKENS=5 tokens 5 "${go[@]}"
STILL_MAX_TOKENS=9 STILL_N_PREDICT=5 tokens 5 "${go[@]}"
# A flag of the file is taken back.
STILL_JSON=0 expect 0 '' "${go[@]}"
grep -q tokens "$scratch/out" && fail "STILL_JSON=0 does not go before the file"
write 'n-predict = 3' 'tasks = piqa' 'port = 1' 'json = off'
STILL_MODEL=$tiny STILL_JSON=1 tokens 3 "${go[@]}"
STILL_MODEL=/no/such STILL_JSON=1 tokens 3 "${go[@]}" -m "$tiny"
STILL_MODEL=$tiny expect 0 'tiny' "$still" show
STILL_MODEL=$tiny expect 0 '' "$still" perplexity "$here/lib.sh" --ctx 64
STILL_NONSENSE=1 STILL_CTX='' expect 0 '' "$still" inspect "$tiny"

# What is wrong is said with its place, by every command that runs; help still comes.
wrong() { local pattern=$1; shift; write "$@"; expect 2 "$pattern" "$still" inspect "$tiny"; }
wrong 'config:2: no option .tmep., did you mean temp' '' 'tmep = 1'
wrong 'config:1: expected NAME = VALUE' 'temp 1'
wrong 'config:1: no command .chta., did you mean chat' '[chta]'
wrong 'config:2: .inspect. has no option .temp.' '[inspect]' 'temp = 1'
wrong 'config:1: threads: .many. is not a whole number' 'threads = many'
wrong 'config:1: ctx: 0 is outside' 'ctx = 0'
wrong 'config:1: backend: .cpuu. is unknown, did you mean cpu' 'backend = cpuu'
wrong 'config:1: json: .maybe. is neither true nor false' 'json = maybe'
wrong 'for the command line only' 'help = true'
write 'stop = x'
expect 2 'config:1: stop: --stop is for the command line only' "$still" generate "$tiny" hello
expect 0 '' "$still" inspect "$tiny"
STILL_THREADS=many expect 2 'STILL_THREADS: .many. is not a whole number' "$still" inspect "$tiny"
write 'threads = many'
expect 0 '^Usage: still inspect' "$still" inspect --help
expect 0 '^Usage: still inspect' "$still" help inspect
expect 0 '' "$still" version

# Any bytes, a folder, no home: an error of one line, or none.
head -c 3000 "$tiny" >"$config"
expect 2 'config:' "$still" inspect "$tiny"
rm "$config" && mkdir "$config"
expect 1 'config' "$still" inspect "$tiny"
rmdir "$config"
expect 0 '' env -u XDG_CONFIG_HOME HOME=/no/such "$still" inspect "$tiny"
XDG_CONFIG_HOME='' HOME=$scratch/home
mkdir -p "$scratch/home/.config/still" && echo 'threads = many' >"$scratch/home/.config/still/config"
HOME=$scratch/home expect 2 'many' env -u XDG_CONFIG_HOME "$still" inspect "$tiny"
finish
