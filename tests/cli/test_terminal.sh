#!/bin/bash
# Text from files on its way to a terminal: no escape sequence comes through; and the curves
# that linearize draws there. $2 is tools/make-model.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
make_model=$2
tiny=$scratch/tiny.gguf
"$make_model" tiny "$tiny" >/dev/null 2>&1 || { echo "make-model failed" >&2; exit 1; }
esc=$'\033[31m'

# on_terminal COMMAND...: runs it with its output on a terminal; what came is in out.
on_terminal() {
    timeout 600 python3 - "$@" >"$scratch/out" <<'PYTHON' || fail "status $? on a terminal: $*"
import os, pty, sys
pid, fd = pty.fork()
if pid == 0:
    os.execvp(sys.argv[1], sys.argv[1:])
got = b""
while True:
    try:
        part = os.read(fd, 65536)
    except OSError:
        break
    if not part:
        break
    got += part
sys.stdout.buffer.write(got)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
PYTHON
}
# Bars are drawn with \r\e[K, our own; anything else is not.
harmless() {
    sed 's/\r\x1b\[K//g' "$scratch/out" | grep -q $'\033\\|\007\\|\302\233' &&
        fail "raw control characters from $1: $(cat -v "$scratch/out" | head -c 300)"
    grep -q -e "$2" "$scratch/out" || fail "no '$2' from $1: $(cat -v "$scratch/out" | head -c 300)"
}

# A model whose name is a command for the terminal.
python3 - "$tiny" "$scratch/hostile.gguf" <<'PYTHON' || exit 1
import struct, sys
data = open(sys.argv[1], "rb").read()
key = b"general.name"
at = data.index(key) + len(key) + 4
n = struct.unpack_from("<Q", data, at)[0]
name = b"A\x1b[31m\x07\n\xc2\x9bX"
name += b"X" * (-(len(name) - n) % 32)  # the data stay at a multiple of 32
data = data[:at] + struct.pack("<Q", len(name)) + name + data[at + 8 + n:]
open(sys.argv[2], "wb").write(data)
PYTHON
expect 0 '^A?\[31m????X*$' "$still" inspect "$scratch/hostile.gguf"
cat "$scratch/out" >"$scratch/piped"
grep -q $'\033\\|\007\\|\302\233' "$scratch/piped" && fail "inspect: raw control characters in a pipe"
on_terminal "$still" inspect "$scratch/hostile.gguf" --tensors
harmless inspect 'A?\[31m????X'
on_terminal "$still" inspect "$scratch/hostile.gguf" --json
harmless 'inspect --json' '"name"'
on_terminal bash -c "printf '/help\n' | '$still' chat '$scratch/hostile.gguf' -n 1 2>&1; true"
harmless chat ''

# A file whose name is one.
evil=$scratch/evil${esc}.gguf
cp "$tiny" "$evil"
expect 0 'evil?\[31m.gguf' "$still" inspect "$evil"
grep -q $'\033' "$scratch/out" && fail "inspect: a file's name comes through"

# Text of a model: as it is in a pipe, harmless on a terminal.
ids=$("$still" tokenize "$tiny" "a${esc}b"$'\302\233\tc')
expect 0 '' "$still" tokenize "$tiny" --decode "$ids"
[ "$(cat "$scratch/out")" = "a${esc}b"$'\302\233\tc' ] || fail "a pipe does not get the bytes: $(cat -v "$scratch/out")"
on_terminal "$still" tokenize "$tiny" --decode "$ids"
harmless 'tokenize --decode' 'a?\[31mb??'
expect 0 '' "$still" generate "$tiny" -p "hi${esc}" -n 1 --echo --quiet
grep -q "^hi$(printf '\033')\[31m" "$scratch/out" || fail "a pipe does not get the prompt's bytes"
on_terminal "$still" generate "$tiny" -p "hi${esc}" -n 1 --echo --quiet
harmless generate 'hi?\[31m'

# Curves beneath the bar of linearize, in blocks or characters, gone when it is over.
for i in $(seq 40); do echo "{\"text\": \"line $i of some training text\"}"; done >"$scratch/data.jsonl"
train=("$still" linearize "$tiny" --data "$scratch/data.jsonl" --seq 64 --batch 1 --chunk 8 --lora-rank 2 --stage 1 --tokens 50000)
watch() { # LOCALE PATTERN [options]
    rm -rf "$scratch/run"
    LC_ALL=$1 on_terminal "${train[@]}" --out "$scratch/run" "${@:3}"
    tr '\r' '\n' <"$scratch/out" >"$scratch/screen"
    grep -q -e "$2" "$scratch/screen" || fail "no '$2' on a terminal in $1: $(cat -v "$scratch/screen" | tail -c 600)"
    tail -n 2 "$scratch/screen" | grep -q 'is a model now' || fail "the last line is not the result"
}
watch C.UTF-8 'error  *[0-9.]* [▁▂▃▄▅▆▇█]* [0-9.]*$' --watch
grep -q 'by layer  *\(▁█\|█▁\) at most 0' "$scratch/screen" || fail "--watch shows no layers"
grep -q $'^\033\[J' "$scratch/screen" || fail "the curves stay"
watch C 'error  *[0-9.]* [_.:=+*#-]* [0-9.]*$' --watch
watch C 'stage 1  [0-9]* of'
grep -q 'by layer' "$scratch/screen" && fail "curves without --watch"
rm -rf "$scratch/run"
expect 0 'no effect: --watch; standard error is no terminal' "${train[@]}" --out "$scratch/run" --watch --tokens 64
rm -rf "$scratch/run"
expect 0 'is a model now' "${train[@]}" --out "$scratch/run" --tokens 64 --quiet
[ ! -s "$scratch/err" ] || fail "linearize --quiet says $(cat "$scratch/err")"
finish
