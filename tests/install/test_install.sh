#!/usr/bin/env bash
# What `make install` leaves: every file, and a library that a program of a user finds
# through CMake and pkg-config, compiles with, and runs with, shared and static.
#
#   test_install.sh BUILD_FOLDER SOURCE_FOLDER
set -euo pipefail
build=$1 source=$2
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
cmake --install "$build" --prefix "$root/usr" >"$root/log"

check() { [ -e "$root/usr/$1" ] || { echo "not installed: $1" >&2; exit 1; }; }
check bin/still
check include/still.h
check share/man/man1/still.1
for name in $("$root/usr/bin/still" help | sed -n 's/^  \([a-z-]*\)  .*/\1/p'); do
    check "share/man/man1/still-$name.1"
done
check share/bash-completion/completions/still
check share/zsh/site-functions/_still
check share/fish/vendor_completions.d/still.fish
check share/still/models/smollm2-still/adapter.gguf
check share/doc/still/still.spdx.json
pc=$(find "$root/usr" -name still.pc)
lib=$(dirname "$(dirname "$pc")")
check "${lib#"$root/usr/"}/libstill.so"
check "${lib#"$root/usr/"}/libstill.a"

bash "$source/tests/install/test_elf.sh" "$root/usr/bin" "$lib"
found=$(grep -rlaF -- "$source" "$root/usr") || true
[ -z "$found" ] || { echo "these name the source folder: $found" >&2; exit 1; }
mapfile -t modules < <(find "$lib" -path '*/still/*.so')
python3 "$source/tests/install/sbom.py" "$source" "$root/usr/share/doc/still/still.spdx.json" \
    "$root/usr/bin/still" "$lib/libstill.so" "${modules[@]}"
soname=$(readelf -d "$lib/libstill.so" | sed -n 's/.*SONAME.*\[libstill\.so\.\(.*\)\]/\1/p')
python3 "$source/tests/install/debian.py" "$source" "$root/usr" \
    "$("$root/usr/bin/still" version | cut -d ' ' -f 2)" "$soname"

# make install: root renews the linker's cache, unless the files are for a package.
mkdir "$root/stub"
for tool in cmake ldconfig; do
    printf '#!/bin/sh\necho "%s $*" >>"%s/called"\n' $tool "$root" >"$root/stub/$tool"
done
chmod +x "$root"/stub/*
called() { # the arguments of make install
    : >"$root/called"
    PATH=$root/stub:$PATH make -C "$source" --no-print-directory -o all install "$@"
    cut -d ' ' -f 1 "$root/called" | paste -sd ' '
}
[ "$(called PREFIX=/p DESTDIR=/d)" = cmake ]
[ "$(id -u)" != 0 ] || [ "$(called PREFIX=/p DESTDIR=)" = 'cmake ldconfig' ]

# Moved elsewhere, everything still fits together.
mv "$root/usr" "$root/moved"
lib=$root/moved/${lib#"$root/usr/"}
export PKG_CONFIG_PATH=$lib/pkgconfig
version=$("$root/moved/bin/still" version)
[ "$version" = "still $(pkg-config --modversion still)" ] ||
    { echo "still.pc is of another version than '$version'" >&2; exit 1; }

# The model that was installed with it is found from there; its base is not there.
said=$(XDG_CACHE_HOME=$root "$root/moved/bin/still" inspect smollm2-still 2>&1) || true
[[ $said == *moved/share/still/models/smollm2-still*pull\ smollm2* ]] ||
    { echo "smollm2-still: $said" >&2; exit 1; }

# So is the module for MPI: it sees that no launcher stands behind PMI_SIZE.
ranks() { # ranks PATTERN: what a process that takes itself for one of two says
    local said
    said=$(PMI_SIZE=2 "$root/moved/bin/still" linearize "$root/tiny.gguf" --out "$root/run" \
        --data "$source/README.md" --tokens 64 --seq 16 2>&1) || true
    [[ $said == *$1* ]] || { echo "as one of two ranks: $said" >&2; exit 1; }
}
"$build/tools/make-model" tiny "$root/tiny.gguf" >/dev/null 2>&1
if [ -e "$build/modules/libstill-mpi.so" ]; then
    ranks 'started 2 processes, but MPI sees one'
    rm "$lib/still/libstill-mpi.so"
fi
# Where it is not installed, one that lies in the current directory is not taken.
(cd "$root" && echo >libstill-mpi.so && ranks "libstill-mpi.so, is neither in $root/moved")

run() { # the example must fail for the right reason: there is no such model
    local said
    said=$("$@" "$root/none.gguf" prompt 2>&1) && { echo "opened nothing: $*" >&2; exit 1; }
    [[ $said == *none.gguf* ]] || { echo "$*: $said" >&2; exit 1; }
}
user() { # user VERSION: CMake's find_package of that version, and the program
    cmake -G Ninja -S "$source/tests/install/user" -B "$root/user" -DSTILL_WANTED="$1" \
        -DEXAMPLE="$source/examples/generate.c" -DCMAKE_C_FLAGS='-std=c11 -Wall -Werror' \
        -DCMAKE_PREFIX_PATH="$root/moved" >"$root/log" 2>&1 &&
        cmake --build "$root/user" >>"$root/log" 2>&1
}
user "${version#still }" || { cat "$root/log" >&2; exit 1; }
run "$root/user/user"
if user 99.0; then
    echo "find_package(still 99.0) finds $version" >&2
    exit 1
fi

read -ra flags <<<"$(pkg-config --cflags --libs still)"
cc -std=c11 -Wall -Werror "$source/examples/generate.c" -o "$root/shared" "${flags[@]}"
LD_LIBRARY_PATH=$lib run "$root/shared"
# It asks for each function with the version of the soname, libstill.so.0.1: STILL_0.1.
asked=$(nm -D --undefined-only "$root/shared" | awk '$2 ~ /^still_/ { print $2 }')
if [ -z "$asked" ] || grep -v "@STILL_$soname\$" <<<"$asked"; then
    echo "these are not of version STILL_$soname" >&2
    exit 1
fi

# Every example, on a small model: one that writes, and one that reads a text longer than
# its window, with an adapter that the installed command trained. Each is compiled as its
# comment says.
cp "$source"/examples/*.c "$root"
for example in "$root"/*.c; do
    line=$(sed -n 's/^ \*     cc /cc -std=c11 -Wall -Wextra -Werror /p' "$example")
    [ -n "$line" ] || { echo "$example: says not how to compile it" >&2; exit 1; }
    (cd "$root" && sh -ec "$line")
done
export LD_LIBRARY_PATH=$lib
[ -n "$("$root/generate" "$root/tiny.gguf" 'the sun' 4)" ] ||
    { echo "generate wrote nothing" >&2; exit 1; }
# The same program, compiled against the header of an earlier library, whose params had less
# in them, and of a later one, which have more: all write the same.
declare -A header=([earlier]='/rollback; .* chunk boundaries/d; /double attn_scale;/,/\*\//d
    /const still_logit_bias \*bias;/,/int n_bias;/d'
    [later]='s/^} still_\(session\|model\|sampler\)_params;/    const char *later[3];\n&/')
wanted=$("$root/generate" "$root/tiny.gguf" 'the sun' 4)
sizes=()
for age in earlier later; do
    mkdir "$root/$age"
    sed "${header[$age]}" "$root/moved/include/still.h" >"$root/$age/still.h"
    cc -std=c11 -Wall -Werror -I "$root/$age" "$source/examples/generate.c" \
        -o "$root/$age/generate" "${flags[@]}"
    echo '#include <still.h>
        char of[sizeof(still_session_params) * 1000000 + sizeof(still_model_params) * 1000 +
                sizeof(still_sampler_params)];' >"$root/of.c"
    cc -std=c11 -I "$root/$age" -c "$root/of.c" -o "$root/of.o" "${flags[@]}"
    sizes+=("$(nm -S "$root/of.o" | cut -d ' ' -f 2)")
    [ "$("$root/$age/generate" "$root/tiny.gguf" 'the sun' 4)" = "$wanted" ] ||
        { echo "a program of an $age header: $("$root/$age/generate" \
            "$root/tiny.gguf" 'the sun' 4 2>&1)" >&2; exit 1; }
done
[ "${#sizes[@]}" = 2 ] && [ "${sizes[0]}" != "${sizes[1]}" ] ||
    { echo "the headers have the same structs: ${sizes[*]}" >&2; exit 1; }
for i in {1..40}; do
    echo '{"text": "the sun and the moon and a stone in the river, number '"$i"'"}'
done >"$root/text.jsonl"
"$root/moved/bin/still" linearize "$root/tiny.gguf" --data "$root/text.jsonl" --out "$root/small" \
    --tokens 192 --seq 48 --batch 2 --chunk 8 --lora-rank 2 >"$root/log" 2>&1 ||
    { cat "$root/log" >&2; exit 1; }
past() { "$root/stream" "$root/tiny.gguf" "$root/small" - | tee "$root/said"; }
short=$(head -n 2 "$root/text.jsonl" | past | head -n 1)
long=$(past <"$root/text.jsonl" | head -n 1)
[ "$short" = "$long" ] || { echo "the past grows with the text: $short, $long" >&2; exit 1; }
grep -q ' tokens   perplexity *[0-9]' "$root/said" || { cat "$root/said" >&2; exit 1; }
# One that tries a score: its figure for the method's own is the one of the command.
"$root/score" "$root/tiny.gguf" "$root/text.jsonl" 400 8 >"$root/said"
"$root/moved/bin/still" saliency "$root/tiny.gguf" "$root/text.jsonl" --ctx 400 --chunk 8 \
    --method still --json 2>/dev/null | python3 -c '
import json, re, sys
said = open(sys.argv[1]).read()
found = {name: float(x) for name, x in re.findall(r"^(s3|yours|chance) +([0-9.]+)$", said, re.M)}
wanted = json.load(sys.stdin)
assert abs(found["s3"] - wanted["received"]["captured"]) < 1e-4, (said, wanted["received"])
assert found["chance"] == wanted["chance"] and 0 < found["yours"] < 1, said
' "$root/said"
unset LD_LIBRARY_PATH
rm "$lib"/libstill.so*
read -ra flags <<<"$(pkg-config --cflags --libs --static still)"
cc -std=c11 "$source/examples/generate.c" -o "$root/static" "${flags[@]}"
run "$root/static"
echo "installed, found, compiled and run"
