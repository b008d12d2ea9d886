#!/bin/bash
# What MODEL means: paths first, then the cache, then what came with the program. $2 is
# tools/make-model.
# shellcheck source=lib.sh disable=SC2154
. "$(dirname "$0")/lib.sh"
make_model=$2
shipped=$here/../../models/smollm2-still
mkdir "$scratch/work" && cd "$scratch/work" || exit 1
"$make_model" tiny tiny.gguf >/dev/null 2>&1 || { echo "make-model failed" >&2; exit 1; }
for i in $(seq 20); do echo "{\"text\": \"$(seq -s ' ' "$i" 40)\"}"; done >data.jsonl
timeout 120 "$still" linearize tiny.gguf --data data.jsonl --out mine -n 64 --batch 1 \
    --seq 64 --chunk 8 --stage 1 >/dev/null 2>err ||
    { echo "linearize failed: $(cat err)" >&2; exit 1; }
"$still" export mine --to adapter --out small -q >/dev/null || fail "export"
# Copies of one adapter, each with a copy of the base to know it by.
mark() { # N FOLDER
    cp tiny.gguf "base$1.gguf"
    mkdir -p "$2" && cp small/* "$2" && sed -i "s/tiny.gguf/base$1.gguf/" "$2/still.json"
}
means() { # N PROGRAM NAME
    local said
    said=$("$2" inspect "$3" --json 2>&1)
    [[ $said == *"base$1.gguf"*memory_method* ]] || fail "$2 $3: not $1, but $said"
}

# Installed, in a build folder, and in one below it; from any folder, by a link.
mkdir -p usr/bin tree/build/asan
for folder in usr/bin tree/build tree/build/asan; do cp "$still" "$folder/still"; done
ln -s "$PWD/usr/bin/still" link
mark 1 usr/share/still/models/ours
mark 2 tree/models/ours
means 1 usr/bin/still ours
means 1 ./link ours
means 2 tree/build/still ours
means 2 tree/build/asan/still ours
expect 1 "no model 'theirs'" usr/bin/still inspect theirs
expect 1 "no model 'ours'" "$still" inspect ours
expect 1 '' usr/bin/still inspect ../models/ours

# The list says what an adapter lacks.
expect 0 '^smollm2-still needs smollm2, which is not here: still pull smollm2$' "$still" list
expect 0 '^smollm2-still$' "$still" list --names
[ ! -s "$scratch/err" ] || fail "list --names says more than names"

# The cache goes before it, a path before both.
mark 3 "$XDG_CACHE_HOME/still/models/ours"
means 3 usr/bin/still ours
mark 4 ours
means 4 usr/bin/still ours

# The one that comes with still: small enough, no paths of some machine, and without its
# base model it says what to do.
[ "$(stat -c %s "$shipped/adapter.gguf")" -lt 20000000 ] || fail "the shipped model is large"
grep -q '"name": "smollm2"' "$shipped/still.json" || fail "its base is not smollm2"
grep -qaE '/(home|root|tmp|work)/' "$shipped"/* && fail "a path in the shipped model"
expect 1 'run .still pull smollm2' "$still" inspect smollm2-still
expect 1 'run .still pull smollm2' "$still" chat smollm2-still
finish
